//! Exchanges that the agent has counted as failed while they hang: what becomes of them.
//!
//! The agent enters such a call into the window as any other, and notes it in [`maps::HUNG`].
//! Whoever removes that entry, the hook that sees the end or the agent itself (when the answer came
//! in the middle of its work), settles the rest: so it is done once.

use agent_common::{
    Row, Stamp,
    stamp::{unpack_hung, unpack_request},
    window,
};

use crate::{atomics, maps};

/// The call number under which the exchange that has just ended was counted as failed; 0: it was
/// not, or the agent is settling it itself.
///
/// # Safety
/// `stamp` and `row` must be map memory, and belong to the socket with this cookie.
#[inline(never)]
pub unsafe fn take(cookie: u64, stamp: *mut Stamp, row: *mut Row) -> u64 {
    let Some(noted) = maps::HUNG.get_ptr(cookie) else {
        return 0;
    };
    // SAFETY: by contract; the entry is map memory.
    unsafe {
        let (number, seq) = unpack_hung(noted.read_volatile());
        let (ended, _) = unpack_request(atomics::load(&raw const (*stamp).request));
        if number != ended || maps::HUNG.remove(cookie).is_err() {
            return 0;
        }
        atomics::add32(&raw mut (*row).hung_open, u32::MAX);
        seq
    }
}

/// The answer came after all: the window is repaired, unless it says that the server failed. The
/// call has no further number: always 0.
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
) -> u64 {
    // SAFETY: by contract.
    unsafe {
        atomics::add(&raw mut (*row).hung_recovered, 1);
        if failed {
            return 0;
        }
        let Some(calls) = maps::EXCHANGE_WINDOWS.get_ptr_mut((*stamp).row) else {
            return 0;
        };
        let slot = window::slot(seq) & (window::SLOTS - 1);
        let entry = (&raw mut (*calls).entries).cast::<u32>().add(slot);
        let before = entry.read_volatile();
        if let Some(after) = window::repaired(before, seq, slow) {
            atomics::replace32(entry, before, after);
        }
    }
    0
}
