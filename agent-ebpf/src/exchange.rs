//! cgroup_skb: exchanges on established connections.
//!
//! An exchange begins with the first payload byte out while nothing is owed, and is answered by the
//! first payload byte back. Segments that were seen before (retransmissions, duplicates) say
//! nothing. The egress hook runs with the socket locked, the ingress hook before it is, so they may
//! run at once on two CPUs: each field of the stamp has one writer, and an exchange is ended by
//! whoever advances `answers`.
//!
//! Two kinds of exchange are no request of the program: parts of a TLS handshake, which count only if
//! they fail, and the greeting of a server that is known to speak first, owed from established on.

use agent_common::{
    Event, EventKind, Row, Stamp, Verdict,
    classify::{self, Answer, HEAD},
    event::{
        EVENT_EXCHANGE, EVENT_PROBE, OUTCOME_ABANDONED, OUTCOME_CLOSED_EARLY, OUTCOME_GAVE_UP,
        OUTCOME_HUNG, OUTCOME_OTHER, OUTCOME_RESET, OUTCOME_RESPONSE, OUTCOME_SLOW, OUTCOME_STATUS,
    },
    http::{self, ASKS_ON, BODY_NONE},
    retry::{ENDED_UNANSWERED, ENDED_WELL},
    stamp::{
        KIND_GREETING, KIND_HANDSHAKE, KIND_REQUEST, PHASE_OPEN, PHASE_PENDING, PROTOCOL_ADOPTED,
        PROTOCOL_ADOPTED_BUSY, PROTOCOL_AMQP, PROTOCOL_HTTP1, PROTOCOL_MULTIPLEXED,
        PROTOCOL_OPAQUE, PROTOCOL_SSH, PROTOCOL_TLS, PROTOCOL_TUNNEL, PROTOCOL_UNKNOWN,
        STAMP_HALF_CLOSED, STAMP_PROBE, STAMP_PROBE_BY_EXCHANGE, STAMP_WOULD, kind_of_request,
        pack_request, unpack_request,
    },
    tls::{STAGE_ASKED, STAGE_FINISHED, STAGE_SETTLED, Sent},
};
use aya_ebpf::{
    EbpfContext as _,
    bindings::__sk_buff,
    helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns},
    macros::cgroup_skb,
    programs::SkBuffContext,
};

use crate::{
    answers, atomics, begin, body, counted, events, head, held, idempotent,
    opaque::hidden,
    outcome::{self, Window},
    retries,
    segment::{self, Segment},
    stamps, tls,
};

const PASS: i32 = 1;
const DROP: i32 = 0;
const EPIPE: u32 = 32;
const ECONNABORTED: u32 = 103;
const ECONNRESET: u32 = 104;

/// A connection that was used before and then idle for this long, us, may be closed by its server at
/// any moment: that the next request meets the close is a race, not a failure.
const IDLE_US: u64 = 500_000;

/// Among so many first exchanges of an unknown protocol one may be a TLS handshake (STARTTLS,
/// PostgreSQL's SSLRequest).
pub const TLS_BEGINS_WITHIN: u32 = 6;

/// A program that waits for an answer may leave this much unread, bytes: a TLS record, or the session
/// tickets of a TLS 1.3 server.
const READS: u32 = 20_000;

/// The first exchanges of an SSH connection: names and keys, after which nothing can be told.
const SSH_BEGINS_WITHIN: u32 = 3;

/// Payload going out.
#[cgroup_skb(egress)]
pub fn sent(ctx: SkBuffContext) -> i32 {
    // SAFETY: the program's context.
    unsafe {
        let Some(segment) = segment::or_syn(ctx.skb.skb) else {
            return PASS;
        };
        if segment.is_syn && held::any() && held::syn(bpf_get_socket_cookie(ctx.as_ptr())) != PASS {
            return DROP;
        }
        let mut verdict = PASS;
        if segment.payload != 0
            && let Some(stamp) = stamp_of(&ctx)
        {
            match (*stamp).phase {
                PHASE_OPEN if !segment.is_syn => out(&ctx, stamp, segment, &mut verdict),
                PHASE_PENDING if segment.is_syn => begin::sent_with_syn(&ctx, stamp, segment),
                _ => {}
            }
        }
        verdict
    }
}

/// Payload coming in.
#[cgroup_skb(ingress)]
pub fn received(ctx: SkBuffContext) -> i32 {
    // SAFETY: the program's context.
    unsafe {
        let network = segment::of_answer(ctx.skb.skb);
        if network != 0 {
            answers::heard(ctx.skb.skb, network);
        } else if let Some(segment) = segment::of(ctx.skb.skb) {
            if let Some(stamp) = stamp_of(&ctx)
                && (*stamp).phase == PHASE_OPEN
            {
                back(&ctx, stamp, segment);
            }
        }
    }
    PASS
}

/// The stamp of a connection that we follow.
#[inline(always)]
unsafe fn stamp_of(ctx: &SkBuffContext) -> Option<*mut Stamp> {
    // SAFETY: by the caller.
    unsafe {
        let cookie = bpf_get_socket_cookie(ctx.as_ptr());
        Some(stamps::find(cookie)?.stamp)
    }
}

/// Payload on an established connection; `verdict` becomes [`DROP`] where it is not to leave.
#[inline(always)]
unsafe fn out(ctx: &SkBuffContext, stamp: *mut Stamp, segment: Segment, verdict: &mut i32) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let protocol = (*stamp).protocol;
        if protocol != PROTOCOL_UNKNOWN {
            let new = segment.end.wrapping_sub((*stamp).out_end) as i32;
            if new <= 0 {
                return;
            }
        }
        (*stamp).out_end = segment.end;
        let word = atomics::load(&raw const (*stamp).request);
        let (number, _) = unpack_request(word);
        let answers = (&raw const (*stamp).answers).read_volatile();
        let mut turns = false;
        if number != answers {
            // More of a request that is not answered yet; or the client speaks first after all, or
            // begins with TLS (MySQL's SSLRequest is not answered).
            turns = kind_of_request(word) == KIND_GREETING
                || (protocol == PROTOCOL_OPAQUE && number < TLS_BEGINS_WITHIN);
            let in_handshake = protocol == PROTOCOL_TLS && (*stamp).tls_stage < STAGE_FINISHED;
            if !turns {
                if in_handshake || !is_control(ctx, protocol, segment) {
                    (*stamp).begun_ns = bpf_ktime_get_ns();
                }
                if in_handshake {
                    tls::sent(ctx.skb.skb, stamp, &segment);
                }
                return;
            }
        }
        let protocol = if protocol >= PROTOCOL_ADOPTED {
            let head = segment::head(ctx.skb.skb, segment);
            let Some(protocol) = adopted(stamp, &head, segment) else {
                return;
            };
            (*stamp).protocol = protocol;
            (*stamp).tls_stage = STAGE_SETTLED;
            protocol
        } else {
            protocol
        };
        let mut kind = KIND_REQUEST;
        let mut begin_seq = segment.begin();
        match protocol {
            PROTOCOL_TLS if (*stamp).tls_stage <= STAGE_FINISHED => {
                let what = tls::sent(ctx.skb.skb, stamp, &segment);
                match what as u32 {
                    HANDSHAKE => kind = KIND_HANDSHAKE,
                    REQUEST => begin_seq = begin_seq.wrapping_add((what >> 32) as u32),
                    _ => return,
                }
            }
            PROTOCOL_UNKNOWN => {
                let head = segment::head(ctx.skb.skb, segment);
                if is_farewell(&head, segment) {
                    return;
                }
                let protocol = classify::protocol(&head, segment.payload as usize);
                (*stamp).protocol = protocol;
                if protocol == PROTOCOL_TLS {
                    kind = KIND_HANDSHAKE;
                    tls::sent(ctx.skb.skb, stamp, &segment);
                } else if protocol == PROTOCOL_HTTP1 {
                    (*stamp).tls_stage = asks(&head);
                }
                if (*stamp).in_end == 0
                    && let Some(row) = outcome::unpinned_row_of(stamp)
                {
                    atomics::add32(&raw mut (*row).spoke_first, 1);
                }
            }
            PROTOCOL_OPAQUE if number < TLS_BEGINS_WITHIN => {
                let head = segment::head(ctx.skb.skb, segment);
                if classify::begins_tls(&head, segment.payload) {
                    (*stamp).protocol = PROTOCOL_TLS;
                    kind = KIND_HANDSHAKE;
                    tls::sent(ctx.skb.skb, stamp, &segment);
                } else if is_farewell(&head, segment) {
                    return;
                } else if turns {
                    (*stamp).begun_ns = bpf_ktime_get_ns();
                    return;
                }
            }
            PROTOCOL_OPAQUE | PROTOCOL_TUNNEL => {
                if classify::may_be_farewell(segment.payload)
                    && is_farewell(&segment::head(ctx.skb.skb, segment), segment)
                {
                    return;
                }
            }
            _ => {
                let head = segment::head(ctx.skb.skb, segment);
                let begins = match protocol {
                    PROTOCOL_TLS => classify::is_tls_request(&head),
                    PROTOCOL_HTTP1 => classify::begins_http_request(&head),
                    PROTOCOL_AMQP => classify::begins_amqp(&head),
                    PROTOCOL_MULTIPLEXED => classify::begins_stream(&head),
                    _ => true,
                };
                if !begins {
                    if protocol == PROTOCOL_HTTP1 {
                        (*stamp).tls_stage = ASKS_ON;
                    }
                    return;
                }
                match protocol {
                    PROTOCOL_TLS => (*stamp).tls_stage = STAGE_SETTLED,
                    PROTOCOL_HTTP1 => (*stamp).tls_stage = asks(&head),
                    _ => {}
                }
            }
        }
        let now = bpf_ktime_get_ns();
        if turns {
            // Its begin is counted; from here on it is another one.
            (*stamp).request_seq = begin_seq;
            (*stamp).begun_ns = now;
            (&raw mut (*stamp).request).write_volatile(pack_request(number, now / 1000) | kind);
            return;
        }
        let Some(row) = outcome::unpinned_row_of(stamp) else {
            return;
        };
        if number != 0 && retries::is_wanted(stamp, row, number, now) {
            retries::kept(stamp, row, now);
        }
        if idempotent::matters(stamp, row, now) && idempotent::asks(ctx.skb.skb, stamp, row) != PASS
        {
            (*stamp).out_end = begin_seq;
            *verdict = DROP;
            return;
        }
        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        (*stamp).generation = verdict.generation;
        (*stamp).request_seq = begin_seq;
        begin::begin(stamp, row, number + 1, now, kind);
    }
}

/// What a request of HTTP/1 asks for.
#[inline(always)]
fn asks(head: &[u8; HEAD]) -> u32 {
    http::asks([head[0], head[1], head[2], head[3]])
}

const HANDSHAKE: u32 = Sent::Handshake as u32;
const REQUEST: u32 = Sent::Request as u32;

/// Whether a payload on a connection on which an answer is owed is no part of the request: a farewell,
/// or what keeps the connection itself. With a longer one it is not worth a look.
#[inline(always)]
unsafe fn is_control(ctx: &SkBuffContext, protocol: u32, segment: Segment) -> bool {
    /// An alert of TLS 1.2 with the padding of a block cipher has at most 53 bytes.
    const LONGEST: u32 = 64;
    if segment.payload > LONGEST || protocol == PROTOCOL_HTTP1 {
        return false;
    }
    // SAFETY: by the caller.
    let head = unsafe { segment::head(ctx.skb.skb, segment) };
    match protocol {
        PROTOCOL_TLS => !classify::is_tls_request(&head),
        PROTOCOL_AMQP => !classify::begins_amqp(&head),
        PROTOCOL_MULTIPLEXED => !classify::begins_stream(&head),
        _ => is_farewell(&head, segment),
    }
}

/// The protocol of an adopted connection from what its client sends; `None` while that may be the
/// rest of a request that was under way, or says goodbye.
#[inline(always)]
unsafe fn adopted(stamp: *mut Stamp, head: &[u8; HEAD], segment: Segment) -> Option<u32> {
    if is_farewell(head, segment) {
        return None;
    }
    // SAFETY: by the caller, map memory.
    let is_busy = unsafe {
        (*stamp).protocol == PROTOCOL_ADOPTED_BUSY
            && (&raw const (*stamp).in_end).read_volatile() == (*stamp).syn_timeout_ticks
    };
    match classify::mid_stream(head, segment.payload) {
        // Records follow one another in an upload, too.
        PROTOCOL_UNKNOWN | PROTOCOL_TLS if is_busy => None,
        PROTOCOL_UNKNOWN => Some(PROTOCOL_OPAQUE),
        protocol => Some(protocol),
    }
}

#[inline(always)]
fn is_farewell(head: &[u8; HEAD], segment: Segment) -> bool {
    classify::is_farewell(head, segment.payload)
}

#[inline(always)]
unsafe fn back(ctx: &SkBuffContext, stamp: *mut Stamp, segment: Segment) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let before = (*stamp).in_end;
        if before != 0 && segment.end.wrapping_sub(before) as i32 <= 0 {
            return;
        }
        (*stamp).in_end = segment.end;
        let word = atomics::load(&raw const (*stamp).request);
        let (number, begun_us) = unpack_request(word);
        let answers = (&raw const (*stamp).answers).read_volatile();
        let protocol = (*stamp).protocol;
        let kind = kind_of_request(word);
        if number == answers {
            // The middle of an answer, or what nobody asked for: a push, a ticket, a greeting.
            (*stamp).is_long = 1;
            if protocol == PROTOCOL_UNKNOWN && before == 0 {
                greeted(ctx, stamp, &segment);
            } else if protocol == PROTOCOL_HTTP1 {
                if (*stamp).tls_seen != BODY_NONE {
                    body::goes_on(ctx.skb.skb, stamp, &segment);
                }
            } else if may_be_ticket(stamp, protocol) {
                tls::answers(ctx.skb.skb, stamp, &segment, 0);
            }
            return;
        }
        // Sent before the request had arrived?
        let is_early =
            kind == KIND_REQUEST && segment.ack.wrapping_sub((*stamp).request_seq) as i32 <= 0;
        let mut answer = PLAIN;
        if protocol <= classify::LAST_WITH_STATUS {
            answer = hidden(status(ctx.skb.skb, &segment, protocol));
            if answer == Answer::Interim as u32 {
                return;
            }
        } else if protocol == PROTOCOL_TLS && kind == KIND_REQUEST {
            if may_be_ticket(stamp, protocol) {
                if tls::answers(ctx.skb.skb, stamp, &segment, u32::from(!is_early)) == 0 {
                    return;
                }
            } else if classify::is_tls_alert(&segment::head(ctx.skb.skb, segment)) {
                return;
            }
        }
        // (A server that turns everybody away need not have heard the request.)
        if is_early && answer == PLAIN {
            return;
        }
        let now = bpf_ktime_get_ns();
        if !atomics::replace32(&raw mut (*stamp).answers, answers, number) {
            // The connection is being closed on another CPU, which has ended the exchange.
            return;
        }
        (*stamp).answered_ns = now;
        (*stamp).is_long = 0;
        if kind == KIND_HANDSHAKE {
            if let Some(row) = outcome::row_of(stamp) {
                let counted = counted(ctx, stamp, row);
                counted::answered(stamp, row, counted, false, false);
                ended(row);
            }
            return;
        }
        if let Some(row) = outcome::row_of(stamp) {
            if kind == KIND_GREETING {
                atomics::add32(&raw mut (*row).greeted, 1);
            }
            if protocol == PROTOCOL_HTTP1 {
                body::begins(ctx.skb.skb, stamp, &segment, (*row).settings.flags);
            }
            let us = (now / 1000).saturating_sub(begun_us);
            let counted = counted(ctx, stamp, row);
            answered(
                stamp,
                row,
                Answered {
                    now,
                    us,
                    counted,
                    says: hidden(says(answer)),
                },
            );
            ended(row);
        }
    }
}

/// Whether what comes in may be a session ticket of TLS 1.3.
#[inline(always)]
unsafe fn may_be_ticket(stamp: *mut Stamp, protocol: u32) -> bool {
    // SAFETY: by the caller.
    protocol == PROTOCOL_TLS
        && unsafe { matches!((*stamp).tls_stage, STAGE_FINISHED | STAGE_ASKED) }
}

/// The server speaks first, on a destination that is not known for it: an exchange that began at
/// established and is answered now.
#[inline(always)]
unsafe fn greeted(ctx: &SkBuffContext, stamp: *mut Stamp, segment: &Segment) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let Some(row) = outcome::unpinned_row_of(stamp) else {
            return;
        };
        let answer = hidden(status(ctx.skb.skb, segment, PROTOCOL_UNKNOWN));
        let now = bpf_ktime_get_ns();
        let us = now.saturating_sub((*stamp).answered_ns) / 1000;
        (*stamp).answered_ns = now;
        atomics::add32(&raw mut (*row).greeted, 1);
        begin::count_request(row);
        let counted = 0;
        answered(
            stamp,
            row,
            Answered {
                now,
                us,
                counted,
                says: hidden(says(answer)),
            },
        );
    }
}

/// What the first bytes of an answer say: the number of an [`Answer`]. A function of its own, for the
/// stack of the kernel's programs is short.
#[inline(never)]
unsafe fn status(skb: *mut __sk_buff, segment: &Segment, protocol: u32) -> u32 {
    // SAFETY: by the caller.
    unsafe {
        let head = segment::head(skb, *segment);
        let answer = hidden(classify::answer(&head, protocol, segment.payload) as u32);
        if answer == Answer::Unavailable as u32 {
            let head = head::search(skb, segment);
            if !head.is_null() && (*head).search.has_retry_after() {
                return Answer::UnavailableForNow as u32;
            }
        }
        answer
    }
}

/// What the agent has counted the exchange as that has just been answered ([`counted::take`]).
#[inline(always)]
unsafe fn counted(ctx: &SkBuffContext, stamp: *mut Stamp, row: *mut Row) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        if (*row).counted_open == 0 {
            return 0;
        }
        counted::take(bpf_get_socket_cookie(ctx.as_ptr()), stamp, row, 1)
    }
}

/// The answer says that the server failed.
const SAYS_FAILED: u32 = 1;
/// The answer asks for fewer calls.
const SAYS_THROTTLED: u32 = 2;

/// [`Answer`] as a number.
const PLAIN: u32 = Answer::Plain as u32;

#[inline(always)]
fn says(answer: u32) -> u32 {
    let answer = Answer::from_number(answer);
    let failed = if answer.is_failure() { SAYS_FAILED } else { 0 };
    if answer.is_throttled() {
        failed | SAYS_THROTTLED
    } else {
        failed
    }
}

/// An answer.
struct Answered {
    /// When it came, ns.
    now: u64,
    /// After how long, us.
    us: u64,
    /// What the agent has counted the exchange as.
    counted: u64,
    /// What it says: [`SAYS_FAILED`], [`SAYS_THROTTLED`].
    says: u32,
}

#[inline(never)]
unsafe fn answered(stamp: *mut Stamp, row: *mut Row, answered: Answered) {
    let Answered {
        now,
        us,
        counted,
        says,
    } = answered;
    // SAFETY: by the caller, map memory.
    unsafe {
        atomics::add(&raw mut (*row).responses, 1);
        (*row).last_answer_ns = now;
        atomics::add(&raw mut (*row).response_latency_sum_us, us);
        outcome::longest(&raw mut (*row).response_latency_max_us, us);
        outcome::bucket((*row).response_histogram, us);
        let slow_us = u64::from((*row).settings.slow_call_us);
        let is_failed = says & SAYS_FAILED != 0 && (*row).settings.fail_status != 0;
        let is_slow = !is_failed && slow_us != 0 && us > slow_us;
        if says & SAYS_THROTTLED != 0 {
            atomics::add32(&raw mut (*row).throttled, 1);
        }
        if is_failed {
            atomics::add(&raw mut (*row).exchange_status, 1);
            (*stamp).ended = ENDED_UNANSWERED;
            retries::answered_badly(row, now);
        }
        if is_slow {
            atomics::add(&raw mut (*row).slow_calls, 1);
        }
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
        would_ended(stamp, !is_failed);
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
    /// Bytes that lie there and that the program has not read.
    pub unread: u32,
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
        unread,
        cookie,
    } = change;
    const TCP_FIN_WAIT1: u32 = 4;
    const TCP_FIN_WAIT2: u32 = 5;
    const TCP_CLOSE: u32 = 7;
    const TCP_CLOSE_WAIT: u32 = 8;
    const RCV_SHUTDOWN: u32 = 1;
    // SAFETY: by contract.
    unsafe {
        let word = atomics::load(&raw const (*stamp).request);
        let (number, begun_us) = unpack_request(word);
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
            would_ended(stamp, true);
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
            // A program that does not read has not waited: the answer cannot come, or lies there.
            _ if unread > READS => OUTCOME_ABANDONED,
            // The wait counts from the last byte of the request.
            _ => given_up(stamp, now.saturating_sub((*stamp).begun_ns) / 1000, exiting),
        };
        // An encrypted farewell looks like a request, and some servers close first.
        let is_farewell = outcome == OUTCOME_CLOSED_EARLY
            && (*stamp).protocol == PROTOCOL_SSH
            && number > SSH_BEGINS_WITHIN;
        let outcome = if is_farewell {
            OUTCOME_ABANDONED
        } else {
            outcome
        };
        let is_stale = reused
            && idle_us >= IDLE_US
            && (outcome == OUTCOME_CLOSED_EARLY || outcome == OUTCOME_RESET);
        let Some(row) = outcome::row_of(stamp) else {
            return true;
        };
        if (*row).counted_open != 0
            && counted::is_settled(counted::take(cookie, stamp, row, 0), error == ECONNABORTED)
        {
            // The agent has ended it, or counted it while it hung: as a probe it has failed.
            let outcome = if outcome == OUTCOME_ABANDONED {
                OUTCOME_HUNG
            } else {
                outcome
            };
            (*stamp).ended = ENDED_UNANSWERED;
            probe_ended(stamp, now, us, outcome);
            would_ended(stamp, false);
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
        let is_one_way = outcome == OUTCOME_GAVE_UP && is_one_way(row, word);
        (*stamp).ended = if is_stale || outcome == OUTCOME_ABANDONED || is_one_way {
            ENDED_WELL
        } else {
            ENDED_UNANSWERED
        };
        if is_stale || outcome == OUTCOME_ABANDONED {
            probe_ended(stamp, now, us, OUTCOME_ABANDONED);
        } else {
            let seq = if is_one_way {
                0
            } else {
                outcome::call(stamp, row, now, Window::Exchanges, true, false)
            };
            tell(stamp, now, seq, us, outcome, error);
            probe_ended(stamp, now, us, outcome);
            would_ended(stamp, false);
        }
        ended(row);
    }
    true
}

/// A destination that has never answered anybody may be one that never does (syslog): that a program
/// closes without an answer is counted there, and judges nobody. TLS answers a ClientHello always.
///
/// # Safety
/// As [`closing`]; `request` is the exchange's word.
#[inline(always)]
pub unsafe fn is_one_way(row: *mut Row, request: u64) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe { (*row).responses == 0 && kind_of_request(request) != KIND_HANDSHAKE }
}

/// What it means that the program closes before the answer.
///
/// # Safety
/// As [`closing`].
#[inline(always)]
pub unsafe fn given_up(stamp: *mut Stamp, us: u64, exiting: bool) -> u32 {
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

/// Observe mode: what became of a connect that enforce mode would have refused. The first exchange
/// tells, or the end of a connection that owes none; what the program gave up says nothing.
#[inline(always)]
unsafe fn would_ended(stamp: *mut Stamp, went_well: bool) {
    // SAFETY: by the caller, map memory.
    unsafe {
        if (*stamp).flags & STAMP_WOULD == 0 {
            return;
        }
        (*stamp).flags &= !STAMP_WOULD;
        if let Some(row) = outcome::row_of(stamp)
            && (*row).incarnation == (*stamp).incarnation
        {
            let count = if went_well {
                &raw mut (*row).would_succeeded
            } else {
                &raw mut (*row).would_failed
            };
            atomics::add(count, 1);
        }
    }
}

#[inline(always)]
unsafe fn ended(row: *mut Row) {
    // SAFETY: map memory. Last of all: from here on the row may get another owner.
    unsafe { atomics::add(&raw mut (*row).exchanges_in_flight, u64::MAX) };
}

const _: () = assert!(PROTOCOL_OPAQUE < classify::LAST_WITH_STATUS + 1);
