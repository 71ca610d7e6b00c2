//! cgroup_skb: exchanges on established connections.
//!
//! An exchange begins with the first payload byte out while nothing is owed, and is answered by the
//! first payload byte back. Segments that were seen before (retransmissions, duplicates) say
//! nothing. The egress hook runs with the socket locked, the ingress hook before it is, so they may
//! run at once on two CPUs: each field of the stamp has one writer, and an exchange is ended by
//! whoever advances `answers`.
//!
//! Two kinds of exchange are no request of the program: parts of a TLS handshake, which count only if
//! they fail, and the greeting of a server that is known to speak first, owed from established on. A third is one
//! that may take any time: a command that waits by right.

use agent_common::{
    Row, Stamp, Verdict, classify,
    http::{self, BODY_NONE},
    reply::{self, Answer},
    request::{COMPARED, ELSEWHERE, SENDS, asked, asked_on},
    retry::ENDED_WELL,
    stamp::{
        KIND_GREETING, KIND_HANDSHAKE, KIND_REQUEST, KIND_WAIT, PHASE_OPEN, PHASE_PENDING,
        PROTOCOL_ADOPTED, PROTOCOL_AMQP, PROTOCOL_HTTP1, PROTOCOL_MQTT, PROTOCOL_MULTIPLEXED,
        PROTOCOL_NATS, PROTOCOL_OPAQUE, PROTOCOL_STOMP, PROTOCOL_TLS, PROTOCOL_TUNNEL,
        PROTOCOL_UNKNOWN, kind_of_request, pack_request, unpack_request,
    },
    tls::{STAGE_ASKED, STAGE_FINISHED, STAGE_HELLO, STAGE_SETTLED, Sent},
};
use aya_ebpf::{
    EbpfContext as _,
    bindings::__sk_buff,
    helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns},
    macros::cgroup_skb,
    programs::SkBuffContext,
};

use crate::{
    answers, atomics, begin, body, counted,
    ends::{self, Answered, answered, ended},
    head, held, idempotent,
    opaque::{hidden, hidden64, is},
    outcome, paces, request,
    segment::{self, Segment},
    speaks::{self, FAREWELL, WAIT},
    stamps, taken, tls, tried, whole,
};

const PASS: i32 = 1;
const DROP: i32 = 0;
/// [`Answer`] as a number.
const PLAIN: u32 = Answer::Plain as u32;

/// Among so many first exchanges of an unknown protocol one may be a TLS handshake (STARTTLS,
/// PostgreSQL's SSLRequest).
pub const TLS_BEGINS_WITHIN: u32 = 6;

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
                PHASE_OPEN if !segment.is_syn => {
                    let flags = out(&ctx, stamp, segment, &mut verdict);
                    // Here, where the verifier knows least, for it costs it much.
                    request::begins(ctx.skb.skb, stamp, &segment, flags);
                }
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

/// Payload beyond what was sent before? Returns the flags of the row if an exchange begins with it, else 0;
/// `verdict` becomes [`DROP`] where it is not to leave.
#[inline(always)]
unsafe fn out(ctx: &SkBuffContext, stamp: *mut Stamp, segment: Segment, verdict: &mut i32) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let protocol = (*stamp).protocol;
        let mut new = 0;
        if protocol != PROTOCOL_UNKNOWN {
            new = segment.end.wrapping_sub((*stamp).out_end) as i32;
            if new <= 0 {
                return 0;
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
            turns = kind_of_request(hidden64(word)) == KIND_GREETING
                || (protocol == PROTOCOL_OPAQUE && number < TLS_BEGINS_WITHIN);
            let in_handshake = protocol == PROTOCOL_TLS && (*stamp).tls_stage < STAGE_FINISHED;
            if !turns {
                if in_handshake || !is_control(ctx, protocol, segment) {
                    (*stamp).begun_ns = bpf_ktime_get_ns();
                }
                if in_handshake {
                    tls::sent(ctx.skb.skb, stamp, &segment);
                } else if protocol == PROTOCOL_HTTP1 && (*stamp).tls_stage & (SENDS | COMPARED) != 0
                {
                    let old = segment.payload.wrapping_sub(new as u32);
                    if hidden(more(ctx.skb.skb, stamp, &segment, old) as u32) == DROP as u32 {
                        *verdict = DROP;
                    }
                }
                return 0;
            }
        }
        let protocol = if protocol >= PROTOCOL_ADOPTED {
            let protocol = speaks::adopted(ctx.skb.skb, stamp, &segment);
            if protocol == PROTOCOL_UNKNOWN {
                return 0;
            }
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
                    _ => return 0,
                }
            }
            PROTOCOL_UNKNOWN => {
                let protocol = speaks::first(ctx.skb.skb, &segment);
                if protocol == FAREWELL {
                    return 0;
                }
                (*stamp).protocol = protocol;
                if protocol == PROTOCOL_TLS {
                    kind = KIND_HANDSHAKE;
                    tls::sent(ctx.skb.skb, stamp, &segment);
                } else {
                    let stage = speaks::asks(ctx.skb.skb, &segment, protocol);
                    (*stamp).tls_stage = stage;
                    if protocol == PROTOCOL_OPAQUE && stage & classify::WAITS_FIRST != 0 {
                        kind = KIND_WAIT;
                    }
                }
                if protocol != PROTOCOL_HTTP1 {
                    // What it asks for cannot be compared.
                    taken::counts(stamp);
                }
                if (*stamp).in_end == 0
                    && let Some(row) = outcome::unpinned_row_of(stamp)
                {
                    atomics::add32(&raw mut (*row).spoke_first, 1);
                }
                // (It is answered, if at all, by +OK where the client wants that.)
                if protocol == PROTOCOL_NATS {
                    return 0;
                }
            }
            PROTOCOL_OPAQUE if number < TLS_BEGINS_WITHIN => {
                let what = speaks::early(ctx.skb.skb, &segment, (*stamp).tls_stage);
                if what == PROTOCOL_TLS {
                    (*stamp).protocol = PROTOCOL_TLS;
                    (*stamp).tls_stage = STAGE_HELLO;
                    kind = KIND_HANDSHAKE;
                    tls::sent(ctx.skb.skb, stamp, &segment);
                } else if what == FAREWELL {
                    return 0;
                } else if turns {
                    (*stamp).begun_ns = bpf_ktime_get_ns();
                    return 0;
                } else if what == WAIT {
                    kind = KIND_WAIT;
                }
            }
            PROTOCOL_OPAQUE if (*stamp).tls_stage != 0 => {
                match speaks::later(ctx.skb.skb, &segment) {
                    FAREWELL => return 0,
                    WAIT => kind = KIND_WAIT,
                    _ => {}
                }
            }
            PROTOCOL_AMQP | PROTOCOL_MQTT | PROTOCOL_NATS | PROTOCOL_STOMP => {
                if !speaks::asks_broker(ctx.skb.skb, stamp, &segment) {
                    return 0;
                }
            }
            PROTOCOL_OPAQUE | PROTOCOL_TUNNEL => {
                if speaks::is_farewell(ctx.skb.skb, &segment) {
                    return 0;
                }
            }
            _ => {
                let head = segment::head(ctx.skb.skb, segment);
                let begins = match protocol {
                    PROTOCOL_TLS => classify::is_tls_request(&head),
                    PROTOCOL_HTTP1 => request::may_begin(ctx.skb.skb, stamp, &head, &segment),
                    PROTOCOL_MULTIPLEXED => classify::begins_stream(&head),
                    _ => true,
                };
                if !begins {
                    if protocol == PROTOCOL_HTTP1 {
                        (*stamp).tls_stage = asked_on((*stamp).tls_stage);
                    }
                    return 0;
                }
                match protocol {
                    PROTOCOL_TLS => (*stamp).tls_stage = STAGE_SETTLED,
                    PROTOCOL_HTTP1 => {
                        (*stamp).tls_stage = asked((*stamp).tls_stage, hidden(http::asks(&head)));
                    }
                    _ => {}
                }
            }
        }
        let kind = hidden64(kind);
        let now = bpf_ktime_get_ns();
        if turns {
            // Its begin is counted; from here on it is another one.
            (*stamp).request_seq = begin_seq;
            (*stamp).begun_ns = now;
            (&raw mut (*stamp).request).write_volatile(pack_request(number, now / 1000) | kind);
            return 0;
        }
        let Some(row) = outcome::unpinned_row_of(stamp) else {
            return 0;
        };
        if number != 0 && paces::is_wanted(stamp, row, number, word | kind, now) {
            paces::kept(stamp, row, now);
        }
        if idempotent::matters(stamp, row, now) && idempotent::asks(ctx.skb.skb, stamp, row) != PASS
        {
            (*stamp).out_end = begin_seq;
            *verdict = DROP;
            return 0;
        }
        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        // (Not a store if need not be: ingress reads that line on other CPUs.)
        if (*stamp).generation != verdict.generation {
            (*stamp).generation = verdict.generation;
        }
        (*stamp).request_seq = begin_seq;
        let flags = hidden((*row).settings.flags);
        begin::begin(stamp, row, number + 1, now, kind);
        flags
    }
}

/// More of a request of HTTP/1 is sent: all of the payload but the first `old` bytes. Whether it may leave, as the hook
/// returns it.
#[inline(never)]
unsafe fn more(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment, old: u32) -> i32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        // (All that the verifier knows of it by now would make many walks of this.)
        let segment = &Segment {
            end: hidden(segment.end),
            payload: hidden(segment.payload),
            offset: hidden(segment.offset),
            ack: 0,
            is_syn: false,
        };
        let old = hidden(old);
        if (*stamp).tls_stage & COMPARED != 0 && whole::goes_on(skb, stamp, segment, old) != PASS {
            (*stamp).out_end = segment.begin().wrapping_add(old);
            return DROP;
        }
        if (*stamp).tls_stage & SENDS != 0 {
            request::goes_on(skb, stamp, segment, old);
        }
        PASS
    }
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
    unsafe { speaks::is_control(ctx.skb.skb, &segment, protocol) != 0 }
}

#[inline(always)]
unsafe fn back(ctx: &SkBuffContext, stamp: *mut Stamp, mut segment: Segment) {
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
            if (*stamp).is_long == 0 {
                (*stamp).is_long = 1;
            }
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
        let is_early = hidden(u32::from(
            (kind == KIND_REQUEST || kind == KIND_WAIT)
                && segment.ack.wrapping_sub((*stamp).request_seq) as i32 <= 0,
        ));
        let (mut answer, mut line) = (PLAIN, 0);
        if protocol <= reply::LAST_WITH_STATUS {
            (answer, line) = said(status(ctx.skb.skb, &segment, protocol));
            if answer == Answer::Interim as u32 {
                let heads = interim(ctx.skb.skb, &segment);
                segment.offset = hidden(segment.offset.wrapping_add(heads));
                segment.payload = hidden(segment.payload.wrapping_sub(heads));
                (answer, line) = said(status(ctx.skb.skb, &segment, protocol));
                if answer == Answer::Interim as u32 {
                    return;
                }
            }
        } else if protocol == PROTOCOL_TLS && kind == KIND_REQUEST {
            if may_be_ticket(stamp, protocol) {
                if tls::answers(ctx.skb.skb, stamp, &segment, hidden(is_early ^ 1)) == 0 {
                    return;
                }
            } else if classify::is_tls_alert(&segment::head(ctx.skb.skb, segment)) {
                return;
            }
        }
        // (A server that turns everybody away need not have heard the request.)
        if is(is_early) && answer == PLAIN {
            return;
        }
        let now = bpf_ktime_get_ns();
        if !atomics::replace32(&raw mut (*stamp).answers, answers, number) {
            // The connection is being closed on another CPU, which has ended the exchange.
            return;
        }
        (*stamp).answered_ns = now;
        if (*stamp).is_long != 0 {
            (*stamp).is_long = 0;
        }
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
                body::begins(ctx.skb.skb, stamp, &segment, (*row).settings.flags, line);
            }
            let us = (now / 1000).saturating_sub(begun_us);
            let counted = counted(ctx, stamp, row);
            // Of whom it speaks, if the request was not for this server, nobody knows.
            let is_elsewhere = protocol == PROTOCOL_HTTP1 && (*stamp).tls_stage & ELSEWHERE != 0;
            let says = if is_elsewhere {
                0
            } else {
                ends::says(answer, line) | ends::waited(kind)
            };
            let failed = answered(
                stamp,
                row,
                Answered {
                    now,
                    us,
                    counted,
                    says,
                },
            );
            if is(failed) {
                whole::answered_badly(stamp, bpf_get_socket_cookie(ctx.as_ptr()));
            }
            if (*stamp).ended != ENDED_WELL && protocol == PROTOCOL_HTTP1 {
                tried::fails(stamp, bpf_get_socket_cookie(ctx.as_ptr()), now);
            }
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
        let (answer, line) = said(status(ctx.skb.skb, segment, PROTOCOL_UNKNOWN));
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
                says: ends::says(answer, line),
            },
        );
    }
}

/// The number of an [`Answer`], and its status line, of what [`status`] returns.
#[inline(always)]
fn said(word: u64) -> (u32, u64) {
    (hidden((word & 0xff) as u32), hidden64(word & !0xff))
}

/// What the first bytes of an answer say: the number of an [`Answer`], and above it the status line. A function of its own, for the
/// stack of the kernel's programs is short.
#[inline(never)]
unsafe fn status(skb: *mut __sk_buff, segment: &Segment, protocol: u32) -> u64 {
    // SAFETY: by the caller.
    unsafe {
        let head = segment::head(skb, *segment);
        let answer = hidden(reply::answer(&head, protocol, segment.payload) as u32);
        let line = reply::status_line(&head);
        if answer == Answer::Unavailable as u32 {
            let head = head::search(skb, segment);
            if !head.is_null() && (*head).search.has_retry_after() {
                return line | Answer::UnavailableForNow as u64;
            }
        }
        line | u64::from(answer)
    }
}

/// Length of the interim answers with which a segment begins and behind which it goes on, hidden; of at most
/// two, and 0 where nothing is behind them.
///
/// # Safety
/// `skb` must be the context of the ingress hook, and `segment` what is in it.
#[inline(never)]
unsafe fn interim(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    let mut rest = *segment;
    // SAFETY: by contract.
    unsafe {
        for _ in 0..2 {
            let head = head::search(skb, &rest);
            if head.is_null() {
                break;
            }
            let length = hidden((*head).search.head());
            if length == 0 || length >= rest.payload {
                break;
            }
            rest.offset = hidden(rest.offset + length);
            rest.payload = hidden(rest.payload - length);
            let answer = reply::answer(&segment::head(skb, rest), PROTOCOL_HTTP1, rest.payload);
            if !is(hidden(u32::from(answer as u32 == Answer::Interim as u32))) {
                break;
            }
        }
    }
    hidden(rest.offset.wrapping_sub(segment.offset))
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

const _: () = assert!(PROTOCOL_OPAQUE < reply::LAST_WITH_STATUS + 1);
