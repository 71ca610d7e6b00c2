//! Dials that `connect()` took for retries. Each is counted once it is known what it is: with its first request, or at
//! its end. So what turns out to be none was never counted, and no counter ever goes down.

use agent_common::{
    NANOS_PER_MS, Stamp, budget,
    retry::{NTH, fresh, operation_number},
    stamp::{STAMP_CORRECTED, STAMP_SPENT, STAMP_TAKEN},
};

use crate::{atomics, budgets::Shared, maps, outcome};

/// A dial's SYN leaves at most so long after its `connect()`, ns, if it is not held.
const AT_ONCE_NS: u64 = 1 << 23;

/// It is a retry, if `connect()` took it for one and it is not counted yet.
///
/// # Safety
/// `stamp` must be map memory.
#[inline(always)]
pub unsafe fn counts(stamp: *mut Stamp) {
    // SAFETY: by contract.
    unsafe {
        if (&raw const (*stamp).flags).read_volatile() & STAMP_TAKEN != 0 {
            count(stamp);
        }
    }
}

#[inline(never)]
unsafe fn count(stamp: *mut Stamp) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let flags = (*stamp).flags;
        (*stamp).flags = flags & !(STAMP_TAKEN | STAMP_SPENT);
        // (Nothing is counted where the row has a new owner.)
        let incarnation = (*stamp).incarnation;
        if let Some(row) = outcome::row_of(stamp)
            && (*row).incarnation == incarnation
            && let Some(retries) = maps::RETRIES.get_ptr_mut((*stamp).row)
        {
            add(
                &raw mut (*retries).nth,
                operation_number((*stamp).operation),
            );
        }
    }
}

/// One retry more, which is this attempt of its operation (from 2).
///
/// # Safety
/// `nth` must be map memory.
#[inline(always)]
pub unsafe fn add(nth: *mut [u32; NTH], attempt: u32) {
    let at = (attempt.wrapping_sub(2) as usize).min(NTH - 1);
    // SAFETY: by contract.
    unsafe { atomics::add32(nth.cast::<u32>().add(at), 1) };
}

/// It is none: its first request repeats nothing that has failed. From here on it is the first attempt of an
/// operation, and as good as if `connect()` had known; what it has cost the budget is given back.
///
/// # Safety
/// As [`counts`]; it must be taken for one.
#[inline(never)]
pub unsafe fn is_none(stamp: *mut Stamp) {
    // SAFETY: by contract, map memory.
    unsafe {
        let flags = (*stamp).flags;
        (*stamp).flags = flags & !(STAMP_TAKEN | STAMP_SPENT) | STAMP_CORRECTED;
        // (Still the time of its SYN: its first exchange has not begun.)
        let begun_ns = (*stamp).begun_ns;
        (*stamp).operation = fresh(begun_ns);
        if flags & STAMP_SPENT == 0 {
            return;
        }
        if let (Some(row), Some(retries)) = (
            outcome::row_of(stamp),
            maps::RETRIES.get_ptr_mut((*stamp).row),
        ) && let Some(policy) = maps::RETRY_POLICIES.get_ptr((*row).settings.policy)
        {
            let mut shared = Shared {
                retries,
                attempts: 0,
            };
            // Not later than its connect().
            let held_ns = 2 * u64::from((*stamp).hold_ms) * NANOS_PER_MS;
            let taken_ns = begun_ns.saturating_sub(AT_ONCE_NS + held_ns);
            budget::give_back(&mut shared, budget::epoch(taken_ns, (*policy).scale));
        }
    }
}
