//! Walks the TLS records of a segment, as far as they matter: the handshake, the first request and
//! what a TLS 1.3 server sends around it. See [`agent_common::tls`].

use agent_common::{
    OTHER_ROW, Stamp,
    tls::{self, HEADER, MAX_RECORDS, Sent},
};
use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes};

use crate::{
    atomics,
    opaque::{hidden, hidden64, is},
    outcome,
    segment::Segment,
};

/// The record whose header is at `at` in the payload, as one word for [`unpacked`]; 0 when there is no whole
/// header. (A word and a function: a record of which the verifier knew anything would make many walks of what
/// follows it.)
#[inline(never)]
unsafe fn record(skb: *mut __sk_buff, segment: &Segment, at: u32) -> u32 {
    if hidden(at) + HEADER as u32 > hidden(segment.payload) {
        return 0;
    }
    let mut header = [0_u8; HEADER];
    // SAFETY: by the caller; the helper checks the offset.
    let failed = unsafe {
        bpf_skb_load_bytes(
            skb.cast(),
            segment.offset + at,
            header.as_mut_ptr().cast(),
            HEADER as u32,
        )
    };
    if failed != 0 {
        return 0;
    }
    hidden(tls::record(&header).map_or(0, |record| u32::from(record.kind) << 16 | record.length))
}

/// A record from [`record`]; `None` when there is none. No type of a record is 0.
#[inline(always)]
fn unpacked(word: u32) -> Option<tls::Record> {
    (word != 0).then_some(tls::Record {
        kind: (word >> 16) as u8,
        length: word & 0xffff,
    })
}

/// What a client sends up to its first request. Returns what it is, and where in the payload it
/// begins, as one word (low half: [`Sent`]).
///
/// # Safety
/// `skb` must be the context of the egress hook, `stamp` its connection's.
#[inline(never)]
pub unsafe fn sent(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment) -> u64 {
    // SAFETY: by contract.
    unsafe {
        let mut at = 0;
        let mut result = Sent::Nothing as u64;
        for _ in 0..MAX_RECORDS {
            let Some(record) = unpacked(record(skb, segment, at)) else {
                break;
            };
            let (stage, what) = tls::sent((*stamp).tls_stage, record, at == 0);
            let what = hidden(what as u32);
            (*stamp).tls_stage = stage;
            if what != Sent::Nothing as u32 {
                result = (u64::from(at) << 32) | u64::from(what);
            }
            if what == Sent::Request as u32 {
                break;
            }
            at = hidden(at + HEADER as u32 + record.length);
            result = hidden64(result);
        }
        result
    }
}

/// Whether an answer is in what a TLS 1.3 server sends around the first request: 1 or 0.
///
/// # Safety
/// `skb` must be the context of the ingress hook, `stamp` its connection's.
#[inline(never)]
pub unsafe fn answers(
    skb: *mut __sk_buff,
    stamp: *mut Stamp,
    segment: &Segment,
    is_owed: u32,
) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        let mut answer = hidden(0);
        let mut is_owed = hidden(is_owed);
        let begin = segment.end.wrapping_sub(segment.payload);
        let mut at = match (*stamp).tls_next {
            0 => 0,
            next => next.wrapping_sub(begin),
        };
        if hidden(at) as i32 >= hidden(segment.payload) as i32 {
            // The middle of a ticket.
            return 0;
        }
        let Some(row) = outcome::row_of(stamp) else {
            return is_owed;
        };
        // What row `other` has learned would be of many destinations. (A mask, and values that are
        // hidden: what is a branch here is walked by the verifier once for each record.)
        let mask = hidden(if (*stamp).row == OTHER_ROW {
            0
        } else {
            u32::MAX
        });
        let known = &raw mut (*row).ticket_lengths;
        let mut found = record(skb, segment, at);
        for _ in 0..MAX_RECORDS {
            let Some(this) = unpacked(hidden(found)) else {
                break;
            };
            at = hidden(at + HEADER as u32 + this.length);
            found = record(skb, segment, at);
            let next_length = hidden(found & 0xffff);
            let before = known.read_volatile();
            let seen = (*stamp).tls_seen;
            let what = tls::received(seen, before & mask, this, next_length, is(is_owed));
            let is_answer = hidden(u32::from(what.is_answer));
            let now_seen = hidden(what.seen);
            known.write_volatile((hidden(what.known) & mask) | (before & !mask));
            if tls::shows_tickets(seen, now_seen) {
                atomics::add32(&raw mut (*row).ticket_connections, mask & 1);
            }
            (*stamp).tls_seen = now_seen;
            // What follows an answer in the segment may tell that it was none.
            answer = hidden(answer | is_answer);
            is_owed = hidden(is_owed & !is_answer);
            if is(now_seen & tls::SEEN_SETTLED) {
                return answer;
            }
            if at >= hidden(segment.payload) {
                // Never 0, which means "with the next segment": one in four billion is not worth it.
                (*stamp).tls_next = begin.wrapping_add(at);
                return answer;
            }
        }
        // Not to be followed any further: all that comes is an answer.
        (*stamp).tls_seen |= tls::SEEN_SETTLED;
        answer | is_owed
    }
}
