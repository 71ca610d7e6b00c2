//! Exchanges that the agent has counted itself, while they were under way: what becomes of them.
//!
//! The agent enters such a call into the window as any other, and notes it in [`maps::COUNTED`].
//! Whoever removes that entry, the hook that sees the end or the agent itself (when the end came in
//! the middle of its work), settles the rest: so it is done once.

use agent_common::{
    Row, Stamp,
    stamp::{ENDING, SETTLED, unpack_counted, unpack_request},
    window,
};

use crate::{atomics, maps};

/// The call number under which the exchange that has just ended was counted, or [`ENDING`] or
/// [`SETTLED`]; 0: it was not. For an answer (`is_answer` not 0), an [`ENDING`] stays where it is, and
/// counts as not: so the agent, which ends the connection a moment later, sees that it came first.
///
/// # Safety
/// `stamp` and `row` must be map memory, and belong to the socket with this cookie.
#[inline(never)]
pub unsafe fn take(cookie: u64, stamp: *mut Stamp, row: *mut Row, is_answer: u32) -> u64 {
    let Some(noted) = maps::COUNTED.get_ptr(cookie) else {
        return 0;
    };
    // SAFETY: by contract; the entry is map memory.
    unsafe {
        let (number, seq) = unpack_counted(noted.read_volatile());
        let (ended, _) = unpack_request(atomics::load(&raw const (*stamp).request));
        if number != ended
            || (is_answer != 0 && seq == ENDING)
            || maps::COUNTED.remove(cookie).is_err()
        {
            return 0;
        }
        atomics::add32(&raw mut (*row).counted_open, u32::MAX);
        seq
    }
}

/// Whether an exchange that was taken with this number and that a closed connection has ended is
/// counted already. One that the agent was about to end, and that somebody else has ended first, is
/// not.
#[inline(always)]
pub fn is_settled(seq: u64, by_agent: bool) -> bool {
    seq != 0 && (seq != ENDING || by_agent)
}

/// An exchange that was taken with this number is answered after all. True when it is counted
/// already; the window is repaired then, unless the answer says that the server failed.
///
/// # Safety
/// As [`take`].
#[inline(always)]
pub unsafe fn answered(
    stamp: *mut Stamp,
    row: *mut Row,
    seq: u64,
    failed: bool,
    slow: bool,
) -> bool {
    if seq == 0 {
        return false;
    }
    if seq == SETTLED {
        return true;
    }
    // SAFETY: by contract.
    unsafe {
        atomics::add32(&raw mut (*row).hung_recovered, 1);
        if failed {
            return true;
        }
        let block = window::block((*stamp).row, seq, maps::window_blocks());
        let Some(block) = maps::EXCHANGE_WINDOWS.get_ptr_mut(block) else {
            return true;
        };
        let entries = (&raw mut (*block).entries).cast::<u32>();
        let entry = entries.add(window::entry(seq));
        let before = entry.read_volatile();
        if let Some(after) = window::repaired(before, seq, slow) {
            atomics::replace32(entry, before, after);
        }
    }
    true
}
