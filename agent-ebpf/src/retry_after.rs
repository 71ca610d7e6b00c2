//! Retry-After in the head of an HTTP response.

use core::mem::MaybeUninit;

use agent_common::classify::RetryAfter;
use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes};

use crate::segment::Segment;

/// Whether the head of an HTTP response has it: 1 or 0. Dear beside the rest: only for a 503.
///
/// # Safety
/// `skb` must be the program's context.
#[inline(never)]
pub unsafe fn is_there(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    const CHUNK: u32 = 64;
    const CHUNKS: u32 = 8;
    let mut search = RetryAfter::default();
    let mut at = 0;
    for _ in 0..CHUNKS {
        if at >= segment.payload {
            break;
        }
        // The last chunk ends where the payload ends, and begins anew.
        if at + CHUNK > segment.payload {
            if segment.payload < CHUNK {
                break;
            }
            at = segment.payload - CHUNK;
            search = RetryAfter::default();
        }
        let mut chunk = MaybeUninit::<[u8; CHUNK as usize]>::uninit();
        // SAFETY: by the caller; the helper checks the offset.
        let failed = unsafe {
            bpf_skb_load_bytes(
                skb.cast(),
                segment.offset + at,
                chunk.as_mut_ptr().cast(),
                CHUNK,
            )
        };
        if failed != 0 {
            break;
        }
        // (By reference: a copy would take as much of the short stack again.)
        // SAFETY: the helper has filled all of it.
        for &byte in unsafe { chunk.assume_init_ref() } {
            if let Some(is_there) = search.step(byte) {
                return u32::from(is_there);
            }
        }
        at += CHUNK;
    }
    0
}
