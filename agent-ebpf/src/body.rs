//! Where an answer of HTTP/1 in the clear ends: see [`agent_common::http`]. Only for policies that end
//! answers which stop in the middle.

use agent_common::{
    Stamp,
    http::{
        self, ASKS, BODY_CHUNKED, BODY_CHUNKED_PAUSED, BODY_ENDLESS, BODY_LENGTH, BODY_NONE,
        BODY_UPGRADED,
    },
    row::{ROW_CHUNKS, ROW_LENGTHS},
};
use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes};

use crate::{head, opaque::hidden, segment::Segment};

/// An answer with this status line begins, on a row with these flags.
///
/// # Safety
/// `skb` must be the context of the ingress hook, `stamp` its connection's.
#[inline(always)]
pub unsafe fn begins(
    skb: *mut __sk_buff,
    stamp: *mut Stamp,
    segment: &Segment,
    flags: u32,
    line: u64,
) {
    // SAFETY: by contract.
    unsafe {
        if http::hands_over(line, (*stamp).tls_stage & ASKS) {
            (*stamp).tls_seen = BODY_UPGRADED;
            return;
        }
        if (*stamp).tls_seen >= BODY_ENDLESS {
            return;
        }
        if flags & ROW_LENGTHS == 0 {
            (*stamp).tls_seen = BODY_NONE;
            return;
        }
        search(skb, stamp, segment, flags & ROW_CHUNKS);
    }
}

/// # Safety
/// As [`begins`].
#[inline(never)]
unsafe fn search(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment, chunked: u32) {
    // SAFETY: by contract, map memory.
    unsafe {
        (*stamp).tls_seen = BODY_NONE;
        let head = head::search(skb, segment);
        if head.is_null() {
            return;
        }
        let word = |index| head::word(head, index);
        let asks = hidden((*stamp).tls_stage & ASKS);
        let (what, whole) = (*head).search.body(word, asks, chunked != 0);
        let (what, whole) = (hidden(what), hidden(whole));
        (*stamp).tls_next = segment.begin().wrapping_add(whole);
        (*stamp).tls_seen = what;
        // The empty line at its end is the head's.
        let is_head_alone = what == BODY_CHUNKED && whole == segment.payload;
        if !is_head_alone {
            goes_on(skb, stamp, segment);
        }
    }
}

/// More of an answer has come.
///
/// # Safety
/// As [`begins`].
#[inline(never)]
pub unsafe fn goes_on(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment) {
    // SAFETY: by contract.
    unsafe {
        match (*stamp).tls_seen {
            BODY_LENGTH if !http::is_before(segment.end, (*stamp).tls_next) => {
                (*stamp).tls_seen = BODY_NONE;
            }
            BODY_CHUNKED | BODY_CHUNKED_PAUSED => {
                let mut last = [0_u8; 5];
                let is_short = segment.payload < 5;
                // A short one may be the end of the end.
                (*stamp).tls_seen = if is_short
                    || bpf_skb_load_bytes(
                        skb.cast(),
                        segment.offset + segment.payload - 5,
                        last.as_mut_ptr().cast(),
                        5,
                    ) != 0
                {
                    BODY_CHUNKED_PAUSED
                } else {
                    http::chunked_after(last)
                };
            }
            _ => {}
        }
    }
}
