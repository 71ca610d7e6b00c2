//! How a connect ended: counters, the window, and an event if it is news.
//!
//! A call is in the window only when the verdict is still the one under which it began.

use agent_common::{
    Event, EventKind, OTHER_ROW, Row, Stamp, Verdict,
    event::{
        EVENT_OUR_TIMEOUT, EVENT_PROBE, EVENT_WOULD, OUTCOME_ABANDONED, OUTCOME_CONNECT_TIMEOUT,
        OUTCOME_ESTABLISHED, OUTCOME_GAVE_UP, OUTCOME_LOCAL, OUTCOME_OTHER, OUTCOME_REFUSED,
        OUTCOME_RESET, OUTCOME_UNREACHABLE,
    },
    histogram,
    retry::ENDED_UNCONNECTED,
    stamp::{
        PHASE_IDLE, PHASE_OPEN, PROTOCOL_UNKNOWN, STAMP_CLAIMED, STAMP_HELD, STAMP_OBSERVED,
        STAMP_PROBE, STAMP_PROBE_BY_EXCHANGE, STAMP_TIMEOUT_SET, STAMP_UNJUDGED, STAMP_WOULD,
    },
    window,
};

use crate::{atomics, begin, events, limits, maps, probes, rows, taken};

const ENETDOWN: u32 = 100;
const ENETUNREACH: u32 = 101;
const ECONNABORTED: u32 = 103;
const ECONNRESET: u32 = 104;
const ETIMEDOUT: u32 = 110;
const ECONNREFUSED: u32 = 111;
const EHOSTDOWN: u32 = 112;
const EHOSTUNREACH: u32 = 113;
/// ICMP "protocol unreachable" and "administratively prohibited" (net/ipv4/icmp.c,
/// `icmp_err_convert`; net/ipv6/icmp.c, `tab_unreach`).
const ENOPROTOOPT: u32 = 92;
const EACCES: u32 = 13;
const EPROTO: u32 = 71;

/// A program that has just established another connection closes the loser of a race, and has not
/// given up (happy eyeballs): within this time, ms.
const RACE_MS: u64 = 50;

/// The row of a connect that has begun. It cannot have a new owner: the agent frees no row with
/// connects in flight.
#[inline(always)]
pub unsafe fn row_of(stamp: *mut Stamp) -> Option<*mut Row> {
    // SAFETY: map memory.
    rows::row(unsafe { (*stamp).row })
}

/// The row of a connect that has not begun, or `other` where the row has a new owner.
#[inline(always)]
pub unsafe fn unpinned_row_of(stamp: *mut Stamp) -> Option<*mut Row> {
    // SAFETY: map memory.
    unsafe {
        let row = rows::row((*stamp).row)?;
        if (*row).incarnation == (*stamp).incarnation {
            return Some(row);
        }
        (*stamp).row = OTHER_ROW;
        (*stamp).incarnation = 0;
        rows::row(OTHER_ROW)
    }
}

/// The SYN leaves: the attempt begins.
///
/// # Safety
/// `stamp` must be map memory (as for all functions here).
#[inline(always)]
pub unsafe fn begun(stamp: *mut Stamp) {
    // SAFETY: by contract, map memory.
    unsafe {
        // A claimed place pins its row.
        if (*stamp).flags & STAMP_CLAIMED != 0 {
            if let Some(row) = row_of(stamp) {
                atomics::add(&raw mut (*row).attempts, 1);
            }
        } else if let Some(row) = unpinned_row_of(stamp) {
            atomics::add(&raw mut (*row).attempts, 1);
            limits::begun(stamp, row);
        }
        (*stamp).request = 0;
        (*stamp).out_end = 0;
        (*stamp).protocol = PROTOCOL_UNKNOWN;
        (*stamp).in_end = 0;
        (*stamp).answers = 0;
        (*stamp).tls_stage = 0;
        (*stamp).tls_seen = 0;
        (*stamp).tls_next = 0;
    }
}

/// Established. `acked` is the first sequence number that the peer has not acknowledged.
///
/// # Safety
/// As [`begun`].
#[inline(always)]
pub unsafe fn established(stamp: *mut Stamp, now: u64, acked: u32) {
    // SAFETY: by contract, map memory.
    unsafe {
        let us = now.saturating_sub((*stamp).begun_ns) / 1000;
        let observed = (*stamp).flags & STAMP_OBSERVED != 0;
        if observed && us > u64::from((*stamp).our_timeout_ms) * 1000 {
            // Observe mode: enforce mode would have ended it.
            return timed_out(stamp, now);
        }
        let Some(row) = row_of(stamp) else { return };
        (*stamp).answered_ns = now;
        begin::established(stamp, row, now, acked);
        (*stamp).flags &= !STAMP_TIMEOUT_SET;
        (*stamp).own_timeout_ms = (us / 1000) as u32;
        (*stamp).phase = PHASE_OPEN;
        atomics::add(&raw mut (*row).established, 1);
        atomics::add(&raw mut (*row).connect_latency_sum_us, us);
        longest(&raw mut (*row).connect_latency_max_us, us);
        bucket((*row).histogram, us);
        remember((*stamp).pid, now);
        call(stamp, row, now, Window::Connects, false, false);
        if (*stamp).flags & (STAMP_PROBE | STAMP_PROBE_BY_EXCHANGE) == STAMP_PROBE {
            probe_ended(stamp, row, now, us, OUTCOME_ESTABLISHED, 0, EVENT_PROBE);
        }
        limits::answered(row);
    }
}

/// Ended without being established; `error` is the socket's (0: the program closed it).
///
/// # Safety
/// As [`begun`].
#[inline(always)]
pub unsafe fn closed(stamp: *mut Stamp, now: u64, error: u32, exiting: bool) {
    // SAFETY: by contract.
    unsafe {
        // ECONNABORTED: an administrator's `ss -K`, which says nothing of the destination.
        if error == 0 || error == ECONNABORTED {
            if error == 0 && !exiting && gave_up(stamp, now) {
                failed(stamp, now, OUTCOME_GAVE_UP, 0, 0);
            } else {
                abandoned(stamp, now);
            }
            return;
        }
        let outcome = match error {
            ECONNREFUSED => OUTCOME_REFUSED,
            ETIMEDOUT => OUTCOME_CONNECT_TIMEOUT,
            EHOSTUNREACH | ENETUNREACH | ENETDOWN | EHOSTDOWN | ENOPROTOOPT | EACCES | EPROTO => {
                OUTCOME_UNREACHABLE
            }
            ECONNRESET => OUTCOME_RESET,
            _ => OUTCOME_OTHER,
        };
        // Ours, if the socket lived as long as our timeout: the kernel's timer is never early.
        let ours = error == ETIMEDOUT
            && (*stamp).flags & STAMP_TIMEOUT_SET != 0
            && now.saturating_sub((*stamp).begun_ns)
                >= u64::from((*stamp).our_timeout_ms) * (agent_common::NANOS_PER_MS * 15 / 16);
        failed(
            stamp,
            now,
            outcome,
            error,
            if ours { EVENT_OUR_TIMEOUT } else { 0 },
        );
    }
}

/// Observe mode: the connect has lived longer than its timeout.
///
/// # Safety
/// As [`begun`].
#[inline(never)]
pub unsafe fn timed_out(stamp: *mut Stamp, now: u64) {
    // SAFETY: by contract.
    unsafe { failed(stamp, now, OUTCOME_CONNECT_TIMEOUT, ETIMEDOUT, EVENT_WOULD) }
}

/// Closed by the program before an answer, or by its end: says nothing of the destination.
///
/// # Safety
/// As [`begun`].
#[inline(never)]
pub unsafe fn abandoned(stamp: *mut Stamp, now: u64) {
    // SAFETY: by contract, map memory.
    unsafe {
        let Some(row) = row_of(stamp) else { return };
        (*stamp).phase = PHASE_IDLE;
        taken::counts(stamp);
        atomics::add(&raw mut (*row).abandoned, 1);
        if (*stamp).flags & STAMP_PROBE != 0 {
            let us = now.saturating_sub((*stamp).begun_ns) / 1000;
            probe_ended(stamp, row, now, us, OUTCOME_ABANDONED, 0, EVENT_PROBE);
        }
        limits::failed(stamp, row);
    }
}

/// Passed the hook and never sent a SYN.
///
/// # Safety
/// As [`begun`].
#[inline(never)]
pub unsafe fn local(stamp: *mut Stamp, now: u64) {
    // SAFETY: by contract, map memory.
    unsafe {
        // First: if the row has been disowned, it may get another owner from here on, and is not ours.
        if (*stamp).flags & STAMP_CLAIMED != 0
            && let Some(row) = row_of(stamp)
        {
            limits::failed(stamp, row);
        }
        let Some(row) = unpinned_row_of(stamp) else {
            return;
        };
        (*stamp).phase = PHASE_IDLE;
        atomics::add(&raw mut (*row).local, 1);
        if (*stamp).flags & STAMP_PROBE != 0 {
            probe_ended(stamp, row, now, 0, OUTCOME_LOCAL, 0, EVENT_PROBE);
        }
    }
}

#[inline(always)]
unsafe fn failed(stamp: *mut Stamp, now: u64, outcome: u32, error: u32, mut flags: u32) {
    // SAFETY: by contract, map memory.
    unsafe {
        let Some(row) = row_of(stamp) else { return };
        (*stamp).phase = PHASE_IDLE;
        (*stamp).ended = ENDED_UNCONNECTED;
        taken::counts(stamp);
        let us = now.saturating_sub((*stamp).begun_ns) / 1000;
        let counter = match outcome {
            OUTCOME_REFUSED => &raw mut (*row).failed_refused,
            OUTCOME_CONNECT_TIMEOUT => &raw mut (*row).failed_connect_timeout,
            OUTCOME_UNREACHABLE => &raw mut (*row).failed_unreachable,
            OUTCOME_RESET => &raw mut (*row).failed_reset,
            OUTCOME_GAVE_UP => &raw mut (*row).failed_gave_up,
            _ => &raw mut (*row).failed_other,
        };
        atomics::add(counter, 1);
        if flags & EVENT_OUR_TIMEOUT != 0 {
            atomics::add(&raw mut (*row).timeouts_connect, 1);
        }
        if flags & EVENT_WOULD != 0 {
            atomics::add(&raw mut (*row).would_timeout, 1);
        }
        let seq = call(stamp, row, now, Window::Connects, true, false);
        if (*stamp).flags & STAMP_PROBE != 0 {
            flags |= EVENT_PROBE;
            probe_ended(stamp, row, now, us, outcome, error, EVENT_PROBE);
        }
        events::send(&Event {
            kind: EventKind::FAILURE,
            seq,
            elapsed_us: us,
            outcome,
            errno: error,
            timeout_ms: (*stamp).our_timeout_ms,
            flags,
            ..events::about(stamp, now)
        });
        if (*stamp).flags & STAMP_WOULD != 0 {
            atomics::add(&raw mut (*row).would_failed, 1);
        }
        limits::failed(stamp, row);
    }
}

/// Which of a row's windows a call is entered into.
#[derive(Clone, Copy, PartialEq)]
pub enum Window {
    /// Outcomes of connects.
    Connects,
    /// Outcomes of exchanges.
    Exchanges,
}

/// Enters a call into a window and returns its number; 0 when it is not judged, or when the verdict
/// has changed since.
///
/// # Safety
/// As [`begun`]; `row` must be the stamp's.
#[inline(always)]
pub unsafe fn call(
    stamp: *mut Stamp,
    row: *mut Row,
    now: u64,
    window: Window,
    is_failure: bool,
    is_slow: bool,
) -> u64 {
    // SAFETY: by contract, map memory.
    unsafe {
        if (*stamp).flags & STAMP_UNJUDGED != 0 {
            return 0;
        }
        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        if verdict.generation != (*stamp).generation {
            atomics::add32(&raw mut (*row).late, 1);
            return 0;
        }
        let (calls, failures, windows) = match window {
            Window::Connects => (
                &raw mut (*row).connect_calls,
                &raw mut (*row).connect_failures,
                &maps::CONNECT_WINDOWS,
            ),
            Window::Exchanges => (
                &raw mut (*row).exchange_calls,
                &raw mut (*row).exchange_failures,
                &maps::EXCHANGE_WINDOWS,
            ),
        };
        let seq = atomics::add(calls, 1) + 1;
        if is_failure {
            atomics::add(failures, 1);
        }
        let block = window::block((*stamp).row, seq, maps::window_blocks());
        if let Some(block) = windows.get_ptr_mut(block) {
            let entries = (&raw mut (*block).entries).cast::<u32>();
            let entry = entries.add(window::entry(seq));
            entry.write_volatile(window::encode(seq, now, is_failure, is_slow));
        }
        seq
    }
}

/// Says how a probe went. Its slot comes back only if the probe said nothing: after a success or a
/// failure the agent decides who may go next, so that never more than the allowed probes leave.
#[inline(always)]
pub unsafe fn probe_ended(
    stamp: *mut Stamp,
    row: *mut Row,
    now: u64,
    us: u64,
    outcome: u32,
    error: u32,
    flags: u32,
) {
    // SAFETY: by contract, map memory.
    unsafe {
        if outcome == OUTCOME_ABANDONED || outcome == OUTCOME_LOCAL {
            probes::give_back(row, (*stamp).generation);
        }
        events::send(&Event {
            kind: EventKind::PROBE_ENDED,
            elapsed_us: us,
            outcome,
            errno: error,
            flags,
            ..events::about(stamp, now)
        });
    }
}

/// Raises a maximum.
///
/// # Safety
/// `max` must be map memory.
#[inline(always)]
pub unsafe fn longest(max: *mut u64, us: u64) {
    // SAFETY: by contract. Two tries: a lost race means that another CPU stored a value of its own,
    // and a maximum that is missed once is met again.
    unsafe {
        for _ in 0..2 {
            let before = atomics::load(max);
            if us <= before || atomics::replace(max, before, us) {
                return;
            }
        }
    }
}

/// Counts a latency in a histogram (slot plus one; 0: none).
#[inline(always)]
pub unsafe fn bucket(slot_plus_one: u32, us: u64) {
    if slot_plus_one != 0
        && let Some(histogram) = maps::HISTOGRAMS.get_ptr_mut(slot_plus_one - 1)
    {
        let bucket = histogram::bucket(us) & 0x1ff;
        if bucket < histogram::BUCKETS {
            // SAFETY: map memory, within the buckets.
            unsafe {
                let count = (&raw mut (*histogram).counts).cast::<u32>().add(bucket);
                atomics::add32(count, 1);
            }
        }
    }
}

#[inline(always)]
unsafe fn remember(pid: u32, now: u64) {
    if let Some(entry) = maps::RECENTLY_ESTABLISHED.get_ptr_mut(pid & (maps::RECENT_SLOTS - 1)) {
        let ms = (now / agent_common::NANOS_PER_MS) as u32;
        // SAFETY: map memory.
        unsafe { entry.write_volatile((u64::from(pid) << 32) | u64::from(ms)) };
    }
}

/// Whether a live program that closes an unanswered connect has given up on the destination.
///
/// # Safety
/// As [`begun`].
#[inline(always)]
pub unsafe fn gave_up(stamp: *mut Stamp, now: u64) -> bool {
    // SAFETY: by contract, map memory.
    unsafe {
        let Some(row) = row_of(stamp) else {
            return false;
        };
        let limit = u64::from((*row).settings.gave_up_ms) * agent_common::NANOS_PER_MS;
        let is_held = (*stamp).flags & STAMP_HELD != 0;
        if limit == 0 || is_held || now.saturating_sub((*stamp).begun_ns) < limit {
            return false;
        }
        let pid = (*stamp).pid;
        let Some(entry) = maps::RECENTLY_ESTABLISHED.get_ptr(pid & (maps::RECENT_SLOTS - 1)) else {
            return true;
        };
        let last = atomics::load(entry);
        let now_ms = (now / agent_common::NANOS_PER_MS) as u32;
        let just_now = u64::from(now_ms.wrapping_sub(last as u32)) <= RACE_MS;
        (last >> 32) as u32 != pid || !just_now
    }
}
