//! What is known only by what is asked for, of retries and of fresh calls: see [`agent_common::tried`].

use agent_common::{
    Stamp,
    method::{SOME, is_print},
    pace::Pace,
    retry::{is_retry, operation_time, owner, pack_operation, place, tick},
    stamp::{STAMP_CORRECTED, STAMP_TAKEN, unpack_request},
    tried::{TRIED_SLOTS, Tried, WELL, failed, failed_again, id, id_open, repeated},
};

use crate::{atomics, idempotent, maps, opaque::hidden, outcome, paces, taken};

/// The window of a row whose policy is not known, ns.
const WINDOW_NS: u64 = 10_000_000_000;

/// The place of this process's request; with [`SOME`] that of its failures whose request is not known.
#[inline(always)]
unsafe fn place_of(stamp: *mut Stamp, print: u32) -> Option<(u64, *mut Tried)> {
    // SAFETY: by the caller, map memory.
    let id = unsafe { id(owner((*stamp).pid, (*stamp).row), print) };
    Some((id, maps::TRIED.get_ptr_mut(place(id, TRIED_SLOTS))?))
}

/// The place of this process's request while its connection is open.
#[inline(always)]
unsafe fn open_place_of(stamp: *mut Stamp, print: u32) -> Option<(u64, *mut Tried)> {
    // SAFETY: as above.
    let id = unsafe { id_open(owner((*stamp).pid, (*stamp).row), print) };
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

/// The last request of a connection has failed. Its program need not have closed it before it asks again, on another
/// thread or in its own time.
///
/// # Safety
/// `stamp` must be map memory, and belong to the socket with this cookie.
#[inline(never)]
pub unsafe fn fails(stamp: *mut Stamp, cookie: u64, now: u64) {
    // SAFETY: by contract, map memory.
    unsafe {
        let print = hidden(idempotent::last(stamp, cookie));
        if print == 0 || (*stamp).pid == 0 {
            return;
        }
        let Some((id, tried)) = open_place_of(stamp, print) else {
            return;
        };
        if (*tried).stays(now, window_ns(stamp)) {
            return;
        }
        (&raw mut (*tried).id).write_volatile(0);
        (&raw mut (*tried).at).write_volatile(tick(now));
        (&raw mut (*tried).failures).write_volatile(WELL);
        (&raw mut (*tried).id).write_volatile(id);
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
        if (*stamp).pid == 0 {
            return;
        }
        let (number, _) = unpack_request(atomics::load(&raw const (*stamp).request));
        let mut print = print;
        if !is_print(print) {
            // A request that was not looked at has failed; or a connect, for a request that is not known. (What
            // repeats such a one has failed in its place.)
            let is_unknown = if number == 0 {
                !is_retry((*stamp).operation)
            } else {
                print == SOME
            };
            if attempt == WELL || !is_unknown {
                return;
            }
            print = SOME;
        }
        let print = hidden(print);
        let (Some((id, tried)), Some((id_open, open))) =
            (place_of(stamp, print), open_place_of(stamp, print))
        else {
            return;
        };
        if attempt != WELL {
            atomics::replace(&raw mut (*open).id, id_open, 0);
        }
        let is_known = (*tried).id == id;
        if attempt == WELL {
            // (Whether it is asked for again will show: then it counts against this.)
            if let Some(pace) = paces::pace_of(owner((*stamp).pid, (*stamp).row)) {
                learns(pace, false);
            }
            if !is_known && (*tried).stays(now, window_ns(stamp)) {
                return;
            }
        } else if is_known && (*tried).stays(now, window_ns(stamp)) {
            // (A dial that came to nothing has sent nothing: it has failed as often as before.)
            let is_another = number != 0 || print == SOME;
            let failures = (*tried).failures;
            let more = failed_again(failures, attempt, is_another);
            atomics::replace32(&raw mut (*tried).failures, failures, more);
            (&raw mut (*tried).at).write_volatile(tick(now));
            return;
        }
        // Nobody's while it is written, for whoever reads it on another CPU.
        (&raw mut (*tried).id).write_volatile(0);
        (&raw mut (*tried).at).write_volatile(tick(now));
        (&raw mut (*tried).failures).write_volatile(if attempt == WELL {
            WELL
        } else {
            failed(attempt)
        });
        (&raw mut (*tried).id).write_volatile(id);
    }
}

/// A failure is repeated; false where somebody else was first.
#[inline(always)]
unsafe fn repeats(tried: *mut Tried, id: u64, failures: u32) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe {
        match repeated(failures) {
            WELL => atomics::replace(&raw mut (*tried).id, id, 0),
            rest => atomics::replace32(&raw mut (*tried).failures, failures, rest),
        }
    }
}

/// The first request of a connection has this print; `before` is that of the request that has failed and that its
/// task may repeat, [`SOME`], or 0. 1 if it is a retry that its connect was not taken for; it is counted then. If its
/// connect was taken for one, and it repeats nothing that has failed, it is none. (Not where `may_differ` is not 0: then
/// it is another print of a request that may be the same but for an id in its head.)
///
/// # Safety
/// `stamp` must be map memory.
#[inline(never)]
pub unsafe fn asked(stamp: *mut Stamp, print: u32, before: u32, now: u64, may_differ: u32) -> u32 {
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
        let known = *tried;
        let is_known = known.id == id;
        let is_taken = (*stamp).flags & STAMP_TAKEN != 0;
        if is_known && known.failures == WELL {
            learns(pace, true);
        }
        if is_known && known.failures != WELL {
            // Each failure is worth one retry.
            if !repeats(tried, id, known.failures)
                || is_retry((*stamp).operation)
                || !(*pace).habit.seems_to_vary()
                || !known.is_recent(now, window_ns(stamp))
            {
                return 0;
            }
            let attempt = known.attempt() + 1;
            taken::add(&raw mut (*retries).nth, attempt);
            // What limits an operation begins anew with it: it passed as a fresh call.
            (*stamp).operation = pack_operation(operation_time(now), attempt, 1);
            (*stamp).flags |= STAMP_CORRECTED;
            return 1;
        }
        if is_taken
            && may_differ == 0
            && hidden(u32::from(is_another(stamp, tried, print, before, now))) != 0
        {
            taken::is_none(stamp);
        }
        0
    }
}

/// Whether a first request, of which no failure is known, certainly repeats none.
#[inline(never)]
unsafe fn is_another(
    stamp: *mut Stamp,
    tried: *mut Tried,
    print: u32,
    before: u32,
    now: u64,
) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe {
        if before == print {
            return false;
        }
        let id = id(owner((*stamp).pid, (*stamp).row), print);
        let window_ns = window_ns(stamp);
        if (*tried).id != id && (*tried).stays(now, window_ns) {
            // That one may have pushed it out.
            return false;
        }
        let Some((id_open, open)) = open_place_of(stamp, print) else {
            return false;
        };
        if (*open).id == id_open && (*open).is_recent(now, window_ns) {
            return false;
        }
        if is_print(before) {
            return true;
        }
        if (*tried).id == id {
            // It went well since, but may have failed as well.
            return false;
        }
        // The failure of a request that is not known is worth one retry, too; but not to who has been seen to take up
        // something else.
        let (Some((id, unknown)), Some(pace)) = (
            place_of(stamp, SOME),
            paces::pace_of(owner((*stamp).pid, (*stamp).row)),
        ) else {
            return false;
        };
        let known = *unknown;
        let is_unknown = known.id == id && known.stays(now, window_ns);
        if is_unknown {
            repeats(unknown, id, known.failures);
        }
        let may_be_that = is_unknown || before == SOME;
        !may_be_that || (*pace).habit.moves_on != 0
    }
}
