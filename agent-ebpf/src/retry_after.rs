//! Retry-After in the head of an HTTP response.

use core::mem::MaybeUninit;

use agent_common::classify::RetryAfter;
use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes};

use crate::segment::Segment;

/// Bytes of a response's head that are searched at a time.
const CHUNK: u32 = 64;

/// Whether the head of an HTTP response has it: 1 or 0. Dear beside the rest: only for a 503.
///
/// # Safety
/// `skb` must be the program's context.
#[inline(never)]
pub unsafe fn is_there(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    const CHUNKS: u32 = 8;
    let mut search = RetryAfter::default();
    let mut at = 0;
    // SAFETY: by the caller.
    unsafe {
        for _ in 0..CHUNKS {
            if at + CHUNK > segment.payload {
                break;
            }
            if let Some(is_there) = search_chunk(skb, segment.offset + at, &mut search) {
                return is_there;
            }
            at += CHUNK;
        }
        // The rest, with what lies before it: chunks have one length.
        if segment.payload < CHUNK {
            return 0;
        }
        let last = segment.offset + segment.payload - CHUNK;
        search_chunk(skb, last, &mut RetryAfter::default()).unwrap_or(0)
    }
}

/// 1: found; 0: the head has ended; `None`: neither.
#[inline(always)]
unsafe fn search_chunk(skb: *mut __sk_buff, at: u32, search: &mut RetryAfter) -> Option<u32> {
    let mut chunk = MaybeUninit::<[u8; CHUNK as usize]>::uninit();
    // SAFETY: by the caller; the helper checks the offset.
    let failed = unsafe { bpf_skb_load_bytes(skb.cast(), at, chunk.as_mut_ptr().cast(), CHUNK) };
    if failed != 0 {
        return Some(0);
    }
    // (By reference: a copy would take as much of the short stack again.)
    // SAFETY: the helper has filled all of it.
    for &byte in unsafe { chunk.assume_init_ref() } {
        if let Some(is_there) = search.step(byte) {
            return Some(u32::from(is_there));
        }
    }
    None
}
