//! Where a request of HTTP/1 in the clear ends: see [`agent_common::request`]. Only for policies by which a
//! wait counts.

use agent_common::{
    Stamp,
    classify::{self, HEAD},
    http::BODY_UPGRADED,
    request::{
        self, Chunks, HAS_BODY, PIPELINES, SENDS, SENDS_DATA, SENDS_LENGTH, SENDS_LINE, SENDS_LOST,
        SENDS_SIZE, SENDS_WHOLE, STEPS,
    },
    row::ROW_REQUESTS,
    stamp::PROTOCOL_HTTP1,
};
use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_loop, bpf_skb_load_bytes},
};

use crate::{
    head,
    opaque::{hidden, hidden64},
    segment::Segment,
    speaks,
};

/// A request begins, on a row with these flags (0: none begins). What it asks for is known.
///
/// # Safety
/// `skb` must be the context of the egress hook, `stamp` its connection's.
#[inline(always)]
pub unsafe fn begins(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment, flags: u32) {
    // SAFETY: by contract.
    unsafe {
        if flags & ROW_REQUESTS == 0 || (*stamp).protocol != PROTOCOL_HTTP1 {
            return;
        }
        if (*stamp).tls_stage & HAS_BODY == 0 {
            (*stamp).tls_stage |= SENDS_WHOLE;
        } else {
            // The verifier walks through a loop once for each thing that it knows of those who call it.
            let segment = Segment {
                end: hidden(segment.end),
                payload: hidden(segment.payload),
                offset: hidden(segment.offset),
                ack: 0,
                is_syn: false,
            };
            search(skb, stamp, &segment);
        }
    }
}

/// # Safety
/// As [`begins`].
#[inline(never)]
unsafe fn search(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment) {
    // SAFETY: by contract, map memory.
    unsafe {
        let head = head::of_request(skb, segment);
        if head.is_null() {
            return;
        }
        let (what, length) = request::end(&(*head).search, &(*head).value);
        let (what, length) = (hidden(what), hidden64(length));
        head::release(head);
        let (bound, laps) = request::laps(segment.begin(), length);
        let mut known = ((*stamp).tls_stage | what | laps, bound);
        if what == SENDS_LENGTH {
            known = request::after(known.0, known.1, segment.end);
        }
        ((*stamp).tls_stage, (*stamp).syn_timeout_ticks) = known;
        if what == SENDS_DATA {
            follow(skb, stamp, segment, 0);
        }
    }
}

/// More of a request is sent: all of the payload but the first `old` bytes. (More than it has: something
/// was missed.)
///
/// # Safety
/// As [`begins`].
#[inline(never)]
pub unsafe fn goes_on(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment, old: u32) {
    // SAFETY: by contract.
    unsafe {
        let stage = (*stamp).tls_stage;
        let bound = (*stamp).syn_timeout_ticks;
        match stage & SENDS {
            SENDS_LENGTH => {
                let (stage, bound) = request::after(stage, bound, segment.end);
                (*stamp).tls_stage = stage;
                (*stamp).syn_timeout_ticks = bound;
            }
            SENDS_WHOLE if speaks::is_http_method(skb, segment) => {
                (*stamp).tls_stage = stage | PIPELINES;
            }
            SENDS_DATA | SENDS_SIZE | SENDS_LINE => follow(skb, stamp, segment, old),
            _ => {}
        }
    }
}

/// What a step is told.
struct Context {
    skb: *mut __sk_buff,
    offset: u32,
    payload: u32,
    chunks: Chunks,
}

/// Follows a request that comes in chunks.
///
/// # Safety
/// As [`begins`].
#[inline(never)]
unsafe fn follow(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment, old: u32) {
    // SAFETY: by contract.
    unsafe {
        let stage = (*stamp).tls_stage;
        let sends = hidden(stage & SENDS);
        let bound = hidden((*stamp).syn_timeout_ticks);
        let mut context = Context {
            skb,
            offset: segment.offset,
            payload: segment.payload,
            chunks: Chunks::before(sends, bound, segment.begin(), hidden(old)),
        };
        if old > segment.payload {
            (*stamp).tls_stage = stage & !SENDS | SENDS_LOST;
            return;
        }
        // A loop that the verifier walks through once.
        let step = step as unsafe extern "C" fn(u32, *mut Context) -> i64;
        bpf_loop(STEPS, step as *mut _, (&raw mut context).cast(), 0);
        let chunks = (&raw const context.chunks).read_volatile();
        let ended = chunks.sends == SENDS_WHOLE || chunks.sends == SENDS_LOST;
        let sends = if !ended && chunks.at < segment.payload {
            // The steps did not suffice.
            SENDS_LOST
        } else {
            chunks.sends
        };
        (*stamp).syn_timeout_ticks = chunks.bound(segment.begin());
        (*stamp).tls_stage = stage & !SENDS | sends;
    }
}

/// A byte of the head of a chunk; 1 when there is none.
unsafe extern "C" fn step(_: u32, context: *mut Context) -> i64 {
    // SAFETY: what `follow` has given, and nobody else has.
    unsafe {
        let at = (*context).chunks.at;
        if at >= (*context).payload {
            return 1;
        }
        let mut byte = 0_u8;
        let from = (*context).offset.wrapping_add(at);
        if bpf_skb_load_bytes((*context).skb.cast(), from, (&raw mut byte).cast(), 1) != 0 {
            (*context).chunks.sends = SENDS_LOST;
            return 1;
        }
        (*context).chunks.step(byte);
        let sends = (*context).chunks.sends;
        i64::from(sends == SENDS_WHOLE || sends == SENDS_LOST)
    }
}

/// Whether a payload, sent while nothing is owed, begins a request. The rest of an upload that was answered
/// early does so only if it looks much like one, and nothing does on a connection that was handed over.
///
/// # Safety
/// As [`begins`].
#[inline(always)]
pub unsafe fn may_begin(
    skb: *mut __sk_buff,
    stamp: *mut Stamp,
    head: &[u8; HEAD],
    segment: &Segment,
) -> bool {
    // SAFETY: by contract, map memory.
    let (stage, bound, seen) = unsafe {
        let seen = (&raw const (*stamp).tls_seen).read_volatile();
        ((*stamp).tls_stage, (*stamp).syn_timeout_ticks, seen)
    };
    if seen == BODY_UPGRADED {
        return false;
    }
    if request::is_unfinished_at(stage, bound, segment.begin()) {
        // SAFETY: by contract.
        unsafe { speaks::is_http_method(skb, segment) }
    } else {
        classify::begins_http_request(head)
    }
}

/// Whether the request under way is known to be unfinished.
///
/// # Safety
/// `stamp` must be a connection's.
#[inline(always)]
pub unsafe fn is_unfinished(stamp: *mut Stamp) -> bool {
    // SAFETY: by contract, map memory.
    unsafe {
        (*stamp).protocol == PROTOCOL_HTTP1
            && request::is_unfinished_at(
                (*stamp).tls_stage,
                (*stamp).syn_timeout_ticks,
                (*stamp).out_end,
            )
    }
}
