//! Bulkheads: places among a row's live connections and unanswered connects, and tokens of its rate.
//!
//! Every connection is counted, with or without a limit, in one word of its row
//! ([`agent_common::limits`]): so a limit that is switched on finds the right count, and operators see
//! what there is before they set one. Without a limit a connect is counted from its SYN on; with one,
//! `connect()` itself claims the place, and whatever ends the stamp returns it.

use agent_common::{
    OTHER_ROW, Row, Stamp,
    limits::{ONE_BEGUN, ONE_LIVE, ONE_PENDING, earned_in, has_room, has_token},
    row::ROW_LIMITED,
};

use crate::{atomics, rows, taken};

/// There is room; in enforce mode a place is claimed.
pub const PASSES: u32 = 0;
/// There is none.
const FULL: u32 = 1;

/// Claims a place and a token for a connect in enforce mode (`claims` is not 0); in observe mode only
/// looks whether there is a place. A refused connect takes nothing.
///
/// Without loops, for the verifier's sake: look, add, and go back if somebody else was first. So never
/// one too many passes. Who goes back has been refused rightly, and is in the way of others for as long
/// as that takes: some nanoseconds, and only while the last place is being taken.
///
/// # Safety
/// `row` must be map memory.
#[inline(never)]
pub unsafe fn claim(row: *mut Row, now: u64, claims: u32) -> u32 {
    // SAFETY: by contract.
    unsafe {
        let places = &raw mut (*row).places;
        let connections = (&raw const (*row).settings.connections_most).read_volatile();
        let pending = (&raw const (*row).settings.pending_most).read_volatile();
        if !has_room(atomics::load(places), connections, pending) {
            return FULL;
        }
        if claims != 0 {
            let before = atomics::add(places, ONE_BEGUN);
            if !has_room(before, connections, pending) {
                atomics::add(places, 0_u64.wrapping_sub(ONE_BEGUN));
                return FULL;
            }
        }
        let per_second = (&raw const (*row).settings.connects_per_second).read_volatile();
        if per_second != 0 && take(&raw mut (*row).bucket, now, per_second) == FULL {
            if claims != 0 {
                atomics::add(places, 0_u64.wrapping_sub(ONE_BEGUN));
            }
            return FULL;
        }
    }
    PASSES
}

/// Takes a token of the row's rate, also in observe mode. As above.
#[inline(always)]
unsafe fn take(bucket: *mut u64, now: u64, per_second: u32) -> u32 {
    // SAFETY: by the caller.
    unsafe {
        let word = atomics::load(bucket);
        if !has_token(word, now, per_second) {
            return FULL;
        }
        if word < now {
            // Or somebody else does.
            atomics::replace(bucket, word, now);
        }
        let earned_in = earned_in(per_second);
        if has_token(atomics::add(bucket, earned_in), now, per_second) {
            return PASSES;
        }
        atomics::add(bucket, 0_u64.wrapping_sub(earned_in));
        FULL
    }
}

/// A connection of this row begins; row `other` counts no live ones, for its stamps come and go.
#[inline(always)]
fn begun_in(row: u32) -> u64 {
    if row == OTHER_ROW {
        ONE_PENDING
    } else {
        ONE_BEGUN
    }
}

/// The SYN leaves, and `connect()` has claimed no place.
///
/// # Safety
/// `stamp` and `row` must be map memory and belong together (as for all functions here).
#[inline(always)]
pub unsafe fn begun(stamp: *mut Stamp, row: *mut Row) {
    // SAFETY: by contract.
    unsafe { atomics::add(&raw mut (*row).places, begun_in((*stamp).row)) };
}

/// The connect is answered: its connection lives on.
///
/// # Safety
/// As [`begun`]. Last of all: from here on the row may get another owner.
#[inline(always)]
pub unsafe fn answered(row: *mut Row) {
    // SAFETY: by contract.
    unsafe { atomics::add(&raw mut (*row).places, 0_u64.wrapping_sub(ONE_PENDING)) };
}

/// The connect has begun, or claimed its place, and comes to nothing.
///
/// # Safety
/// As [`answered`].
#[inline(always)]
pub unsafe fn failed(stamp: *mut Stamp, row: *mut Row) {
    // SAFETY: by contract.
    unsafe {
        let amount = 0_u64.wrapping_sub(begun_in((*stamp).row));
        atomics::add(&raw mut (*row).places, amount);
    }
}

/// The connect has claimed a place, and passes without a stamp.
///
/// # Safety
/// As [`begun`].
#[inline(always)]
pub unsafe fn unstamped(row: *mut Row) {
    // SAFETY: by contract.
    unsafe { atomics::add(&raw mut (*row).places, 0_u64.wrapping_sub(ONE_BEGUN)) };
}

/// Whether a limit counts this connection: then its end must not be missed.
///
/// # Safety
/// As [`begun`].
#[inline(always)]
pub unsafe fn count(stamp: *mut Stamp) -> bool {
    // SAFETY: by contract, map memory.
    unsafe { rows::row((*stamp).row).is_some_and(|row| (*row).settings.flags & ROW_LIMITED != 0) }
}

/// An established connection is over; if it has asked for nothing, it is known only now for what its connect was
/// taken. Nothing is returned where the row has another owner meanwhile:
/// the former one's count was thrown away with it. (It cannot get one in between: rows are emptied
/// only after a grace period.)
///
/// # Safety
/// As [`begun`].
#[inline(always)]
pub unsafe fn over(stamp: *mut Stamp) {
    // SAFETY: by contract, map memory.
    unsafe {
        let index = (*stamp).row;
        if index == OTHER_ROW {
            return;
        }
        if let Some(row) = rows::row(index)
            && (*row).incarnation == (*stamp).incarnation
        {
            taken::counts(stamp);
            atomics::add(&raw mut (*row).places, 0_u64.wrapping_sub(ONE_LIVE));
        }
    }
}

/// A connection that existed already is followed from now on.
///
/// # Safety
/// As [`begun`].
#[inline(always)]
pub unsafe fn adopted(index: u32, row: *mut Row) {
    if index != OTHER_ROW {
        // SAFETY: by contract.
        unsafe { atomics::add(&raw mut (*row).places, ONE_LIVE) };
    }
}
