//! Walks the TLS records of a segment, as far as they matter: the handshake, the first request and
//! what a TLS 1.3 server sends around it. See [`agent_common::tls`].

use agent_common::{
    OTHER_ROW, Stamp,
    tls::{self, HEADER, MAX_RECORDS, Sent},
};
use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes};

use crate::{atomics, outcome, segment::Segment};

/// The record whose header is at `at` in the payload; `None` when there is no whole header.
#[inline(always)]
unsafe fn record(skb: *mut __sk_buff, segment: Segment, at: u32) -> Option<tls::Record> {
    if at + HEADER as u32 > segment.payload {
        return None;
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
        return None;
    }
    tls::record(&header)
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
            let Some(record) = record(skb, *segment, at) else {
                break;
            };
            let (stage, what) = tls::sent((*stamp).tls_stage, record, at == 0);
            (*stamp).tls_stage = stage;
            if what as u32 != Sent::Nothing as u32 {
                result = (u64::from(at) << 32) | what as u64;
            }
            if what as u32 == Sent::Request as u32 {
                break;
            }
            at += HEADER as u32 + record.length;
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
    mut is_owed: u32,
) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        let mut answer = 0;
        let begin = segment.end.wrapping_sub(segment.payload);
        let mut at = match (*stamp).tls_next {
            0 => 0,
            next => next.wrapping_sub(begin),
        };
        if at as i32 >= segment.payload as i32 {
            // The middle of a ticket.
            return 0;
        }
        // What row `other` learned would be of many destinations.
        let row = match outcome::row_of(stamp) {
            Some(row) if (*stamp).row != OTHER_ROW => row,
            _ => return is_owed,
        };
        for _ in 0..MAX_RECORDS {
            let Some(found) = record(skb, *segment, at) else {
                break;
            };
            let next = at + HEADER as u32 + found.length;
            let next_length = match record(skb, *segment, next) {
                Some(next) => next.length,
                None => 0,
            };
            let before = (&raw const (*row).ticket_lengths).read_volatile();
            let seen = (*stamp).tls_seen;
            let what = tls::received(seen, before, found, next_length, is_owed != 0);
            if what.known != before {
                (*row).ticket_lengths = what.known;
            }
            if tls::shows_tickets(seen, what.seen) {
                atomics::add32(&raw mut (*row).ticket_connections, 1);
            }
            (*stamp).tls_seen = what.seen;
            if what.is_answer {
                // What follows it in the segment may tell that it was none.
                answer = 1;
                is_owed = 0;
            }
            if what.seen & tls::SEEN_SETTLED != 0 {
                return answer;
            }
            at = next;
            if at >= segment.payload {
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
