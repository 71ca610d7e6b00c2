//! Retries that are known only by what they ask for: see [`agent_common::tried`].

use agent_common::{
    Stamp,
    method::is_print,
    pace::Pace,
    retry::{NTH, is_retry, operation_time, owner, pack_operation, place, tick},
    tried::{TRIED_SLOTS, Tried, WELL, id},
};

use crate::{atomics, maps, outcome, paces};

/// The window of a row whose policy is not known, ns.
const WINDOW_NS: u64 = 10_000_000_000;

/// The place of this process's request.
#[inline(always)]
unsafe fn place_of(stamp: *mut Stamp, print: u32) -> Option<(u64, *mut Tried)> {
    // SAFETY: by the caller, map memory.
    let id = unsafe { id(owner((*stamp).pid, (*stamp).row), print) };
    Some((id, maps::TRIED.get_ptr_mut(place(id, TRIED_SLOTS))?))
}

#[inline(always)]
unsafe fn window_ns(stamp: *mut Stamp) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        if let Some(row) = outcome::unpinned_row_of(stamp)
            && let Some(policy) = maps::RETRY_POLICIES.get_ptr((*row).settings.policy)
        {
            (*policy).window_ns
        } else {
            WINDOW_NS
        }
    }
}

/// A good request was the same as one before it, or (until it is asked for again) none. What else is known of the
/// habit may be written by another task at the same time.
#[inline(always)]
unsafe fn learns(pace: *mut Pace, is_same: bool) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let habit = (*pace).habit.with_next(is_same);
        (&raw mut (*pace).habit.same).write_volatile(habit.same);
        (&raw mut (*pace).habit.other).write_volatile(habit.other);
    }
}

/// A program closes a connection and so knows how its last request, of this print, has ended: `attempt` of its
/// operation has failed, or it went [`WELL`].
///
/// # Safety
/// `stamp` must be map memory.
#[inline(never)]
pub unsafe fn ended(stamp: *mut Stamp, print: u32, now: u64, attempt: u32) {
    // SAFETY: by contract, map memory.
    unsafe {
        if !is_print(print) || (*stamp).pid == 0 {
            return;
        }
        let Some((id, tried)) = place_of(stamp, print) else {
            return;
        };
        if attempt == WELL {
            // (Whether it is asked for again will show: then it counts against this.)
            if let Some(pace) = paces::pace_of(owner((*stamp).pid, (*stamp).row)) {
                learns(pace, false);
            }
            if (*tried).id != id && (*tried).stays(now, window_ns(stamp)) {
                return;
            }
        }
        // Nobody's while it is written, for whoever reads it on another CPU.
        (&raw mut (*tried).id).write_volatile(0);
        (&raw mut (*tried).at).write_volatile(tick(now));
        (&raw mut (*tried).attempt).write_volatile(attempt);
        (&raw mut (*tried).id).write_volatile(id);
    }
}

/// The first request of a connection has this print. 1 if it is a retry that its connect was not taken for; it
/// is counted then.
///
/// # Safety
/// `stamp` must be map memory.
#[inline(never)]
pub unsafe fn asked(stamp: *mut Stamp, print: u32, now: u64) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        if (*stamp).pid == 0 {
            return 0;
        }
        let (Some((id, tried)), Some(pace), Some(retries)) = (
            place_of(stamp, print),
            paces::pace_of(owner((*stamp).pid, (*stamp).row)),
            maps::RETRIES.get_ptr_mut((*stamp).row),
        ) else {
            return 0;
        };
        if atomics::load(&raw const (*tried).id) != id {
            return 0;
        }
        let known = *tried;
        if known.attempt == WELL {
            learns(pace, true);
            return 0;
        }
        // Each failure is worth one retry.
        if !atomics::replace(&raw mut (*tried).id, id, 0)
            || is_retry((*stamp).operation)
            || !(*pace).habit.seems_to_vary()
            || !known.is_recent(now, window_ns(stamp))
        {
            return 0;
        }
        let nth = (known.attempt.wrapping_sub(1) as usize).min(NTH - 1);
        atomics::add32((&raw mut (*retries).nth).cast::<u32>().add(nth), 1);
        // What limits an operation begins anew with it: it passed as a fresh call.
        (*stamp).operation = pack_operation(operation_time(now), known.attempt + 1, 1);
        1
    }
}
