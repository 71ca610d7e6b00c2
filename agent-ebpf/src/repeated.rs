//! What becomes of a request that is not idempotent and is repeated: counted, told, refused.
//!
//! A request is refused by dropping a packet without which the server has not all of it. The program's send has ended
//! well by then, and the kernel would send the packet again and again: so the agent is told, and ends the
//! connection. Where it cannot be told, or does not, the request passes.

use agent_common::{
    Event, EventKind, Mode, Retries, Row, Stamp, Verdict,
    event::{EVENT_QUIET, EVENT_REFUSED, EVENT_WOULD},
    method::REFUSED_TICKS,
    retry::{FATE_PASSED, FATE_REFUSED, FATE_WOULD, is_to_come, repeated_place, tick, told},
    row::{ROW_PROTECTED, ROW_REFUSES},
    stamp::{STAMP_PROBE, STAMP_UNJUDGED, unpack_request},
    verdict::STATE_FORCED_CLOSED,
};
use aya_ebpf::helpers::generated::bpf_ktime_get_ns;

use crate::{atomics, events, maps, opaque::hidden, rows};

/// Set beside a method: it is certain that the request repeats one that has failed.
pub const SURE: u32 = 1 << 8;

/// A request with a method (and [`SURE`]) is repeated, on the connection with this cookie; `flags` are set in what the
/// agent is told. It is counted and told; 1 if it is refused, else 0.
///
/// # Safety
/// `stamp` must be the connection's and `row` its row.
#[inline(never)]
pub unsafe fn refuses(
    stamp: *mut Stamp,
    row: *mut Row,
    cookie: u64,
    method: u32,
    flags: u32,
) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        let Some(retries) = maps::RETRIES.get_ptr_mut((*stamp).row) else {
            return 0;
        };
        let mut fate = FATE_PASSED;
        if method & SURE != 0 {
            fate = may(stamp, row);
        }
        let fate = hidden(fate);
        let method = hidden(method & (SURE - 1));
        let place = hidden(repeated_place(fate, method) as u32);
        count(retries, place, 1);
        let is_told = hidden(tell(stamp, retries, cookie, method | place << 8, flags));
        if fate != FATE_REFUSED {
            return 0;
        }
        if is_told == 0 {
            count(retries, place, u32::MAX);
            count(
                retries,
                hidden(repeated_place(FATE_PASSED, method) as u32),
                1,
            );
            return 0;
        }
        1
    }
}

/// One more, or ([`u32::MAX`]) one less, of a fate and method.
#[inline(never)]
unsafe fn count(retries: *mut Retries, place: u32, by: u32) {
    const LAST: u32 = repeated_place(FATE_WOULD, u32::MAX) as u32;
    // SAFETY: by the caller, map memory.
    unsafe {
        let all = (&raw mut (*retries).repeated).cast::<u32>();
        atomics::add32(all.add(place.min(LAST) as usize), by);
    }
}

/// A request that was refused at `refused` ([`tick`]) is sent again, for its connection has not been ended yet: 1 if it
/// still is.
///
/// # Safety
/// As [`refuses`].
#[inline(never)]
pub unsafe fn still_refuses(
    stamp: *mut Stamp,
    row: *mut Row,
    cookie: u64,
    refused: u32,
    method_flags: u32,
) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        let Some(retries) = maps::RETRIES.get_ptr_mut((*stamp).row) else {
            return 0;
        };
        let (method, flags) = (method_flags & (SURE - 1), method_flags & !(SURE - 1));
        let ends = refused.wrapping_add(REFUSED_TICKS);
        if is_to_come(ends, tick(bpf_ktime_get_ns())) && may(stamp, row) == FATE_REFUSED {
            // (The agent may have been unable to look.)
            order(stamp, cookie, 0, flags | EVENT_REFUSED | EVENT_QUIET);
            return 1;
        }
        // Nobody ends it: it passes after all.
        count(
            retries,
            hidden(repeated_place(FATE_REFUSED, method) as u32),
            u32::MAX,
        );
        count(
            retries,
            hidden(repeated_place(FATE_PASSED, method) as u32),
            1,
        );
        0
    }
}

/// What is done to a request that is not idempotent and is repeated.
#[inline(never)]
unsafe fn may(stamp: *mut Stamp, row: *mut Row) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let Some(control) = rows::control() else {
            return FATE_PASSED;
        };
        let beat = atomics::load(&raw const (*control).heartbeat_ns);
        let is_awake = bpf_ktime_get_ns().saturating_sub(beat) <= (*control).heartbeat_max_age_ns;
        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        let flags = (*row).settings.flags;
        // A probe is wanted, and an operator's word is the last.
        if !is_awake
            || flags & (ROW_REFUSES | ROW_PROTECTED) != ROW_REFUSES
            || (*stamp).flags & (STAMP_PROBE | STAMP_UNJUDGED) != 0
            || verdict.state == STATE_FORCED_CLOSED
        {
            return FATE_PASSED;
        }
        match (&raw const (*control).mode).read_volatile() {
            Mode::ENFORCE => FATE_REFUSED,
            Mode::OBSERVE => FATE_WOULD,
            _ => FATE_PASSED,
        }
    }
}

/// Tells of a request that is repeated, where that is news or an order; 1 if it was told, else 0. `what` is its method,
/// and above that its [`repeated_place`].
#[inline(never)]
unsafe fn tell(
    stamp: *mut Stamp,
    retries: *mut Retries,
    cookie: u64,
    what: u32,
    flags: u32,
) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let now = bpf_ktime_get_ns();
        let (method, place) = (what & (SURE - 1), what >> 8);
        let before = (&raw const (*retries).told).read_volatile();
        let after = told(before, place, tick(now));
        let is_news = hidden(u32::from(after.is_some()));
        let after = hidden(after.unwrap_or(before));
        // (Copies, lest the verifier comes back with each value of them.)
        let fate = hidden(place / agent_common::method::METHODS.len() as u32);
        let fate = hidden(match fate {
            FATE_REFUSED => EVENT_REFUSED,
            FATE_WOULD => EVENT_WOULD,
            _ => 0,
        });
        if is_news == 0 && fate & EVENT_REFUSED == 0 {
            return 0;
        }
        if is_news != 0 {
            (&raw mut (*retries).told).write_volatile(after);
        }
        let quiet = hidden(if is_news == 0 { EVENT_QUIET } else { 0 });
        order(stamp, cookie, method, flags | fate | quiet)
    }
}

/// Sends the event; 1 if there was room for it, else 0.
#[inline(never)]
unsafe fn order(stamp: *mut Stamp, cookie: u64, method: u32, flags: u32) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        u32::from(events::try_send(&Event {
            kind: EventKind::REPEATED,
            seq: cookie,
            timeout_ms: unpack_request(atomics::load(&raw const (*stamp).request)).0,
            outcome: method,
            flags,
            ..events::about(stamp, bpf_ktime_get_ns())
        }))
    }
}
