//! Prints of the first bytes of requests, and what stands in their heads: see [`agent_common::method`].

use agent_common::method::{self, COVERED, FIRST, PIECES, SEARCHED, STEPS, WINDOW};
use aya_ebpf::{
    bindings::__sk_buff,
    cty::c_void,
    helpers::generated::{bpf_ktime_get_ns, bpf_loop, bpf_skb_load_bytes},
};

use crate::{
    opaque::{hidden, hidden64},
    segment::Segment,
};

/// Bits of what [`begun`] returns that are the method.
pub const METHOD: u32 = 3;
/// Set in it.
const BEGUN: u64 = 4;

/// The method of a request that is long enough for a print.
///
/// # Safety
/// As [`begun`].
#[inline(never)]
pub unsafe fn method_of(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    let mut first = 0_u64;
    // SAFETY: by the caller; there is room for it.
    if unsafe { load(skb, segment.offset, (&raw mut first).cast(), 8) } != 0 {
        return 0;
    }
    hidden(method::method(first))
}

/// What a request's print is made of, its first bytes and its method; 0 where it is too short.
///
/// # Safety
/// `skb` must be the context of the egress hook, and `segment` what is in it.
#[inline(never)]
pub unsafe fn begun(skb: *mut __sk_buff, segment: &Segment) -> u64 {
    const HALF: u32 = FIRST as u32 / 2;
    const QUARTER: u32 = FIRST as u32 / 4;
    let (at, payload) = (segment.offset, hidden(segment.payload));
    let mut words = [0_u64; FIRST / 8];
    let to = words.as_mut_ptr().cast::<u8>();
    // SAFETY: by the caller; not more than the buffer holds. Fixed lengths for the verifier of 6.1.
    unsafe {
        let failed = if payload >= FIRST as u32 {
            load(skb, at, to, FIRST as u32)
        } else if payload >= HALF {
            load(skb, at, to, HALF) | load(skb, at + payload - HALF, to.add(HALF as usize), HALF)
        } else if payload >= QUARTER {
            load(skb, at, to, QUARTER)
                | load(
                    skb,
                    at + payload - QUARTER,
                    to.add(QUARTER as usize),
                    QUARTER,
                )
        } else {
            return 0;
        };
        if failed != 0 {
            return 0;
        }
        let method = hidden(method::method(words[0]));
        let mut mix = method::mixed_all(0, &words);
        if method == 0 && payload > FIRST as u32 && method::goes_on(&words) {
            let rest = hidden(payload - FIRST as u32).min(FIRST as u32);
            if load(skb, at + rest, to, FIRST as u32) != 0 {
                return 0;
            }
            mix = method::mixed_all(mix, &words);
        }
        hidden64(mix) & !(BEGUN | u64::from(METHOD)) | BEGUN | u64::from(method)
    }
}

/// What a step of [`mixed_on`] is told, and what it tells.
struct Mixing {
    skb: *mut __sk_buff,
    offset: u32,
    /// Bytes of the request that are printed, at least [`FIRST`] for there to be a step.
    length: u32,
    mix: u64,
}

/// The print of a request that is not idempotent, behind its first bytes: [`COVERED`] of it, and its length.
///
/// # Safety
/// `skb` must be the context of the egress hook, and `segment` what is in it.
#[inline(never)]
pub unsafe fn mixed_on(skb: *mut __sk_buff, segment: &Segment, mix: u64) -> u64 {
    let payload = hidden(segment.payload);
    let mut mixing = Mixing {
        skb,
        offset: segment.offset,
        length: hidden(payload.min(COVERED)),
        mix: method::mixed(mix, u64::from(hidden(payload.min(COVERED + 1)))),
    };
    // SAFETY: by the caller. A loop that the verifier walks through once.
    unsafe {
        let piece = piece as unsafe extern "C" fn(u32, *mut Mixing) -> i64;
        bpf_loop(PIECES, piece as *mut _, (&raw mut mixing).cast(), 0);
        (&raw const mixing.mix).read_volatile()
    }
}

/// A piece more of a request; 1 when there is none.
unsafe extern "C" fn piece(index: u32, mixing: *mut Mixing) -> i64 {
    // SAFETY: what `mixed_on` has given, and nobody else has.
    unsafe {
        let at = method::piece(index, (*mixing).length);
        if at == 0 {
            return 1;
        }
        let mut words = [0_u64; FIRST / 8];
        let to = words.as_mut_ptr().cast();
        // (What cannot be read is nothing that is the same twice.)
        let mut mix = (*mixing).mix;
        if load((*mixing).skb, (*mixing).offset + at, to, FIRST as u32) != 0 {
            mix ^= bpf_ktime_get_ns();
        }
        (*mixing).mix = method::mixed_all(mix, &words);
        0
    }
}

/// Reads bytes of a packet.
///
/// # Safety
/// There must be room for them.
#[inline(always)]
pub unsafe fn load(skb: *mut __sk_buff, at: u32, to: *mut u8, length: u32) -> i64 {
    // SAFETY: by the caller.
    unsafe { bpf_skb_load_bytes(skb.cast::<c_void>(), at, to.cast(), length) }
}

/// What a step of the search is told, and what it tells.
struct Context {
    skb: *mut __sk_buff,
    /// The request's first byte, from the network header.
    offset: u32,
    at_hand: u32,
    found: u32,
}

/// Searches a request for what [`method::holds`] finds.
///
/// # Safety
/// `skb` must be the context of the egress hook, and `segment` what is in it.
#[inline(never)]
pub unsafe fn search(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    let mut context = Context {
        skb,
        offset: segment.offset,
        at_hand: hidden(hidden(segment.payload).min(SEARCHED)),
        found: 0,
    };
    // SAFETY: by the caller. A loop that the verifier walks through once.
    unsafe {
        let step = step as unsafe extern "C" fn(u32, *mut Context) -> i64;
        bpf_loop(STEPS, step as *mut _, (&raw mut context).cast(), 0);
    }
    hidden(context.found)
}

/// A step of the search; 1 when it is over.
unsafe extern "C" fn step(index: u32, context: *mut Context) -> i64 {
    const MASK: u32 = WINDOW.next_power_of_two() - 1;
    // SAFETY: what `search` has given, and nobody else has.
    unsafe {
        let at = method::window(index);
        let left = (*context).at_hand.wrapping_sub(at);
        if left as i32 <= 0 {
            return 1;
        }
        // For the verifier: at least 1, and no more than there is room for.
        let length = (hidden(left.min(WINDOW) - 1) & MASK) + 1;
        let mut window = [0_u64; MASK as usize / 8 + 1];
        let to = window.as_mut_ptr().cast();
        if load((*context).skb, (*context).offset + at, to, length) != 0 {
            return 1;
        }
        let found = hidden(method::holds([window[0], window[1], window[2]]));
        (*context).found = found;
        i64::from(found != 0)
    }
}
