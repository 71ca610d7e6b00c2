//! cgroup_skb: exchanges on established connections.
//!
//! An exchange begins with the first payload byte out while nothing is owed, and is answered by the
//! first payload byte back. Segments that were seen before (retransmissions, duplicates) say
//! nothing. The egress hook runs with the socket locked, the ingress hook before it is, so they may
//! run at once on two CPUs: each field of the stamp has one writer, and an exchange is ended by
//! whoever advances `answers`.

use agent_common::{
    Event, EventKind, Row, Stamp, Verdict,
    classify::{self, Answer, HEAD},
    event::{
        EVENT_EXCHANGE, EVENT_PROBE, OUTCOME_ABANDONED, OUTCOME_CLOSED_EARLY, OUTCOME_GAVE_UP,
        OUTCOME_HUNG, OUTCOME_OTHER, OUTCOME_RESET, OUTCOME_RESPONSE, OUTCOME_SLOW, OUTCOME_STATUS,
    },
    stamp::{
        PHASE_OPEN, PROTOCOL_AMQP, PROTOCOL_HTTP1, PROTOCOL_MULTIPLEXED, PROTOCOL_OPAQUE,
        PROTOCOL_TLS, PROTOCOL_TUNNEL, PROTOCOL_UNKNOWN, STAMP_HALF_CLOSED, STAMP_PROBE,
        STAMP_PROBE_BY_EXCHANGE, pack_request, unpack_request,
    },
};
use aya_ebpf::{
    EbpfContext as _,
    bindings::__sk_buff,
    helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns, bpf_skb_load_bytes},
    macros::cgroup_skb,
    programs::SkBuffContext,
};

use crate::{
    atomics, counted, events, maps,
    outcome::{self, Window},
    segment::{self, Segment},
    stamps,
};

const PASS: i32 = 1;
const EPIPE: u32 = 32;
const ECONNABORTED: u32 = 103;
const ECONNRESET: u32 = 104;

/// A connection that was used before and then idle for this long, us, may be closed by its server at
/// any moment: that the next request meets the close is a race, not a failure.
const IDLE_US: u64 = 500_000;

/// Payload going out.
#[cgroup_skb(egress)]
pub fn sent(ctx: SkBuffContext) -> i32 {
    // SAFETY: the program's context.
    unsafe {
        if let Some(segment) = segment::of(ctx.skb.skb) {
            out(&ctx, segment);
        }
    }
    PASS
}

/// Payload coming in.
#[cgroup_skb(ingress)]
pub fn received(ctx: SkBuffContext) -> i32 {
    // SAFETY: the program's context.
    unsafe {
        if let Some(segment) = segment::of(ctx.skb.skb) {
            back(&ctx, segment);
        }
    }
    PASS
}

/// The stamp of an open connection that we follow.
#[inline(always)]
unsafe fn followed(ctx: &SkBuffContext) -> Option<*mut Stamp> {
    // SAFETY: by the caller.
    unsafe {
        let cookie = bpf_get_socket_cookie(ctx.as_ptr());
        let stamp = stamps::find(cookie)?.stamp;
        ((*stamp).phase == PHASE_OPEN).then_some(stamp)
    }
}

/// The first bytes of a payload; zero beyond its end.
#[inline(always)]
unsafe fn head(skb: *mut __sk_buff, segment: Segment) -> [u8; HEAD] {
    let mut head = [0_u8; HEAD];
    let to = head.as_mut_ptr().cast();
    // Fixed lengths, the longest that is there: the verifier of 6.1 does not see that a length that
    // was compared with 0 is at least 1. 12 bytes are a status line, 5 a TLS record header.
    // SAFETY: by the caller; not more than the buffer holds.
    unsafe {
        let (skb, at) = (skb.cast(), segment.offset);
        match segment.payload {
            24.. => bpf_skb_load_bytes(skb, at, to, HEAD as u32),
            12.. => bpf_skb_load_bytes(skb, at, to, 12),
            5.. => bpf_skb_load_bytes(skb, at, to, 5),
            _ => bpf_skb_load_bytes(skb, at, to, 1),
        };
    }
    head
}

const _: () = assert!(HEAD == 24);

#[inline(always)]
unsafe fn out(ctx: &SkBuffContext, segment: Segment) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let Some(stamp) = followed(ctx) else { return };
        let protocol = (*stamp).protocol;
        if protocol != PROTOCOL_UNKNOWN {
            let new = segment.end.wrapping_sub((*stamp).out_end) as i32;
            if new <= 0 {
                return;
            }
        }
        (*stamp).out_end = segment.end;
        let (number, _) = unpack_request(atomics::load(&raw const (*stamp).request));
        let answers = (&raw const (*stamp).answers).read_volatile();
        if number != answers {
            // More of a request that is not answered yet.
            (*stamp).begun_ns = bpf_ktime_get_ns();
            return;
        }
        if protocol != PROTOCOL_OPAQUE && protocol != PROTOCOL_TUNNEL {
            let head = head(ctx.skb.skb, segment);
            if protocol == PROTOCOL_UNKNOWN {
                (*stamp).protocol = classify::protocol(&head, segment.payload as usize);
            }
            let begins = match (*stamp).protocol {
                PROTOCOL_TLS => !classify::is_tls_control(&head, segment.payload),
                PROTOCOL_HTTP1 => classify::begins_http_request(&head),
                PROTOCOL_AMQP if protocol != PROTOCOL_UNKNOWN => classify::begins_amqp(&head),
                // The preface itself is followed by the first request or asks for the settings.
                PROTOCOL_MULTIPLEXED if protocol != PROTOCOL_UNKNOWN => {
                    classify::begins_stream(&head)
                }
                _ => true,
            };
            if !begins {
                return;
            }
        } else if segment.payload == classify::FAREWELL as u32
            && classify::is_farewell(&head(ctx.skb.skb, segment))
        {
            return;
        }
        let now = bpf_ktime_get_ns();
        let Some(row) = outcome::unpinned_row_of(stamp) else {
            return;
        };
        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        (*stamp).generation = verdict.generation;
        if atomics::add(&raw mut (*row).requests, 1) == 0
            && let Ok(Some(slot)) = maps::FREE_HISTOGRAMS.pop()
        {
            (*row).response_histogram = slot + 1;
        }
        atomics::add(&raw mut (*row).exchanges_in_flight, 1);
        (*stamp).begun_ns = now;
        (&raw mut (*stamp).request).write_volatile(pack_request(number + 1, now / 1000));
    }
}

#[inline(always)]
unsafe fn back(ctx: &SkBuffContext, segment: Segment) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let Some(stamp) = followed(ctx) else { return };
        let before = (*stamp).in_end;
        if before != 0 && segment.end.wrapping_sub(before) as i32 <= 0 {
            return;
        }
        (*stamp).in_end = segment.end;
        let (number, begun_us) = unpack_request(atomics::load(&raw const (*stamp).request));
        let answers = (&raw const (*stamp).answers).read_volatile();
        if number == answers {
            // The middle of an answer, or what nobody asked for: a greeting, a push, a ticket.
            return;
        }
        let protocol = (*stamp).protocol;
        let mut answer = Answer::Plain;
        if protocol <= classify::LAST_WITH_STATUS {
            let head = head(ctx.skb.skb, segment);
            answer = classify::answer(&head, protocol);
            if answer == Answer::Interim {
                return;
            }
        }
        let now = bpf_ktime_get_ns();
        if !atomics::replace32(&raw mut (*stamp).answers, answers, number) {
            // The connection is being closed on another CPU, which has ended the exchange.
            return;
        }
        (*stamp).answered_ns = now;
        answered(
            ctx,
            stamp,
            now,
            (now / 1000).saturating_sub(begun_us),
            answer,
        );
    }
}

#[inline(always)]
unsafe fn answered(ctx: &SkBuffContext, stamp: *mut Stamp, now: u64, us: u64, answer: Answer) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let Some(row) = outcome::row_of(stamp) else {
            return;
        };
        atomics::add(&raw mut (*row).responses, 1);
        (*row).last_answer_ns = now;
        atomics::add(&raw mut (*row).response_latency_sum_us, us);
        outcome::longest(&raw mut (*row).response_latency_max_us, us);
        outcome::bucket((*row).response_histogram, us);
        let slow_us = u64::from((*row).settings.slow_call_us);
        let is_failed = answer == Answer::Failed && (*row).settings.fail_status != 0;
        let is_slow = !is_failed && slow_us != 0 && us > slow_us;
        if is_failed {
            atomics::add(&raw mut (*row).exchange_status, 1);
        }
        if is_slow {
            atomics::add(&raw mut (*row).slow_calls, 1);
        }
        let counted = if (*row).counted_open == 0 {
            0
        } else {
            counted::take(bpf_get_socket_cookie(ctx.as_ptr()), stamp, row)
        };
        let seq = if counted::answered(stamp, row, counted, is_failed, is_slow) {
            0
        } else {
            outcome::call(stamp, row, now, Window::Exchanges, is_failed, is_slow)
        };
        let outcome = if is_failed {
            OUTCOME_STATUS
        } else if is_slow {
            OUTCOME_SLOW
        } else {
            OUTCOME_RESPONSE
        };
        if outcome != OUTCOME_RESPONSE {
            tell(stamp, now, seq, us, outcome, 0);
        }
        probe_ended(stamp, now, us, outcome);
        ended(row);
    }
}

/// How an established connection changes.
pub struct Change {
    /// The new state.
    pub state: u32,
    /// The socket's error.
    pub error: u32,
    /// Its `sk_shutdown`.
    pub shut: u32,
    /// Whether the current task is on its way out.
    pub exiting: bool,
    /// The socket's cookie.
    pub cookie: u64,
}

/// An established connection changes state. True when it is over as far as we are concerned.
///
/// # Safety
/// `stamp` must be the connection's.
#[inline(never)]
pub unsafe fn closing(stamp: *mut Stamp, now: u64, change: &Change) -> bool {
    let &Change {
        state,
        error,
        shut,
        exiting,
        cookie,
    } = change;
    const TCP_FIN_WAIT1: u32 = 4;
    const TCP_FIN_WAIT2: u32 = 5;
    const TCP_CLOSE: u32 = 7;
    const TCP_CLOSE_WAIT: u32 = 8;
    const RCV_SHUTDOWN: u32 = 1;
    // SAFETY: by contract.
    unsafe {
        let (number, begun_us) = unpack_request(atomics::load(&raw const (*stamp).request));
        let answers = (&raw const (*stamp).answers).read_volatile();
        let owed = number != answers;
        // The program has closed it, and not only said that it will send no more. (At the very end
        // a FIN of the peer's has set the bit, too: then it matters what the program had said.)
        let half_closed = (*stamp).flags & STAMP_HALF_CLOSED != 0;
        let by_program =
            error == 0 && shut & RCV_SHUTDOWN != 0 && !(state == TCP_CLOSE && half_closed);
        match state {
            TCP_FIN_WAIT1 if !by_program => {
                (*stamp).flags |= STAMP_HALF_CLOSED;
                return false;
            }
            // Again the same state: a close after the half of it (net/ipv4/tcp.c, `new_state`).
            TCP_FIN_WAIT2 if !by_program => return false,
            TCP_CLOSE_WAIT if !owed => return false,
            TCP_FIN_WAIT1 | TCP_FIN_WAIT2 | TCP_CLOSE_WAIT | TCP_CLOSE => {}
            _ => return false,
        }
        if !owed {
            // A connection without any exchange (a port check) says nothing, also as a probe.
            probe_ended(stamp, now, 0, OUTCOME_ABANDONED);
            return true;
        }
        if !atomics::replace32(&raw mut (*stamp).answers, answers, number) {
            // An answer has just come in on another CPU: it is one.
            return true;
        }
        let us = (now / 1000).saturating_sub(begun_us);
        let idle_us = begun_us.saturating_sub((*stamp).answered_ns / 1000);
        let reused = number != 1;
        let outcome = match state {
            TCP_CLOSE_WAIT => OUTCOME_CLOSED_EARLY,
            _ if error == ECONNRESET => OUTCOME_RESET,
            // The peer had closed before the request was sent (net/ipv4/tcp_input.c, `tcp_reset`
            // in CLOSE_WAIT).
            _ if error == EPIPE => OUTCOME_CLOSED_EARLY,
            _ if error == ECONNABORTED => OUTCOME_ABANDONED,
            _ if error != 0 => OUTCOME_OTHER,
            _ if !by_program => OUTCOME_CLOSED_EARLY,
            // The wait counts from the last byte of the request.
            _ => given_up(stamp, now.saturating_sub((*stamp).begun_ns) / 1000, exiting),
        };
        let is_stale = reused
            && idle_us >= IDLE_US
            && (outcome == OUTCOME_CLOSED_EARLY || outcome == OUTCOME_RESET);
        let Some(row) = outcome::row_of(stamp) else {
            return true;
        };
        if (*row).counted_open != 0
            && counted::is_settled(counted::take(cookie, stamp, row), error == ECONNABORTED)
        {
            // The agent has ended it, or counted it while it hung: as a probe it has failed.
            let outcome = if outcome == OUTCOME_ABANDONED {
                OUTCOME_HUNG
            } else {
                outcome
            };
            probe_ended(stamp, now, us, outcome);
            ended(row);
            return true;
        }
        let counter = match outcome {
            _ if is_stale => &raw mut (*row).stale,
            OUTCOME_CLOSED_EARLY => &raw mut (*row).exchange_closed_early,
            OUTCOME_RESET => &raw mut (*row).exchange_reset,
            OUTCOME_GAVE_UP => &raw mut (*row).exchange_gave_up,
            OUTCOME_ABANDONED => &raw mut (*row).exchange_abandoned,
            _ => &raw mut (*row).exchange_other,
        };
        atomics::add(counter, 1);
        if is_stale || outcome == OUTCOME_ABANDONED {
            probe_ended(stamp, now, us, OUTCOME_ABANDONED);
        } else {
            // A destination that has never answered anybody may be one that never does (syslog):
            // that a program closes without an answer is counted there, and judges nobody.
            let is_one_way = outcome == OUTCOME_GAVE_UP && (*row).responses == 0;
            let seq = if is_one_way {
                0
            } else {
                outcome::call(stamp, row, now, Window::Exchanges, true, false)
            };
            tell(stamp, now, seq, us, outcome, error);
            probe_ended(stamp, now, us, outcome);
        }
        ended(row);
    }
    true
}

/// What it means that the program closes before the answer.
#[inline(always)]
unsafe fn given_up(stamp: *mut Stamp, us: u64, exiting: bool) -> u32 {
    // SAFETY: by the caller, map memory.
    let limit =
        unsafe { outcome::row_of(stamp).map_or(0, |row| (*row).settings.exchange_gave_up_ms) };
    if !exiting && limit != 0 && us >= u64::from(limit) * 1000 {
        OUTCOME_GAVE_UP
    } else {
        OUTCOME_ABANDONED
    }
}

/// A failed or slow exchange is an event.
#[inline(always)]
unsafe fn tell(stamp: *mut Stamp, now: u64, seq: u64, us: u64, outcome: u32, error: u32) {
    // SAFETY: by the caller.
    unsafe {
        events::send(&Event {
            kind: EventKind::FAILURE,
            row: (*stamp).row,
            incarnation: (*stamp).incarnation,
            generation: (*stamp).generation,
            at_ns: now,
            seq,
            elapsed_us: us,
            outcome,
            errno: error,
            pid: (*stamp).pid,
            tid: (*stamp).tid,
            flags: EVENT_EXCHANGE,
            comm: (*stamp).comm,
            ..events::EMPTY
        });
    }
}

/// A probe that waits for its first exchange ends with it.
#[inline(always)]
unsafe fn probe_ended(stamp: *mut Stamp, now: u64, us: u64, outcome: u32) {
    const BOTH: u32 = STAMP_PROBE | STAMP_PROBE_BY_EXCHANGE;
    // SAFETY: by the caller.
    unsafe {
        if (*stamp).flags & BOTH != BOTH {
            return;
        }
        (*stamp).flags &= !BOTH;
        if let Some(row) = outcome::row_of(stamp) {
            outcome::probe_ended(
                stamp,
                row,
                now,
                us,
                outcome,
                0,
                EVENT_PROBE | EVENT_EXCHANGE,
            );
        }
    }
}

#[inline(always)]
unsafe fn ended(row: *mut Row) {
    // SAFETY: map memory. Last of all: from here on the row may get another owner.
    unsafe { atomics::add(&raw mut (*row).exchanges_in_flight, u64::MAX) };
}

const _: () = assert!(PROTOCOL_OPAQUE < classify::LAST_WITH_STATUS + 1);
