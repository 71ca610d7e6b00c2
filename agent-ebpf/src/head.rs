//! Searches the head of an HTTP answer: see [`agent_common::http`]. Dear beside the rest: only where
//! something depends on it.

use agent_common::http::{SEARCHED, STEPS, Search, WORDS};
use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_loop, bpf_skb_load_bytes},
};

use crate::{maps, opaque::hidden, segment::Segment};

/// What is searched, and what was found. In a map: too much for the stack.
#[repr(C)]
pub struct Head {
    /// The first bytes of the payload, and something old behind them.
    pub words: [u64; WORDS],
    /// What was found.
    pub search: Search,
}

/// Word `index` of a head.
///
/// # Safety
/// `head` must be an entry of the map.
#[inline(always)]
pub unsafe fn word(head: *const Head, index: u32) -> u64 {
    // SAFETY: by contract; the index is below [`WORDS`].
    unsafe {
        (&raw const (*head).words)
            .cast::<u64>()
            .add(index as usize)
            .read()
    }
}

/// What a step is told.
struct Context {
    head: *mut Head,
}

/// Searches the head with which a payload begins; null when there is nothing to read.
///
/// # Safety
/// `skb` must be the context of the ingress hook, which does not interrupt itself on a processor.
#[inline(never)]
pub unsafe fn search(skb: *mut __sk_buff, segment: &Segment) -> *mut Head {
    let Some(head) = maps::HEAD.get_ptr_mut(0) else {
        return core::ptr::null_mut();
    };
    // For the verifier: at least 1, and no more than there is room for.
    let longest = segment.payload.min(SEARCHED);
    let loaded = (hidden(longest - 1) & (SEARCHED - 1)) + 1;
    // SAFETY: by contract, map memory.
    unsafe {
        let to = (&raw mut (*head).words).cast();
        if bpf_skb_load_bytes(skb.cast(), segment.offset, to, loaded) != 0 {
            return core::ptr::null_mut();
        }
        (*head).search = Search::new(loaded);
        let mut context = Context { head };
        // A loop that the verifier walks through once.
        let step = step as unsafe extern "C" fn(u32, *mut Context) -> i64;
        bpf_loop(STEPS, step as *mut _, (&raw mut context).cast(), 0);
    }
    head
}

/// A step of the search; 1 when it is over.
unsafe extern "C" fn step(_: u32, context: *mut Context) -> i64 {
    // SAFETY: what `search` has given, and nobody else has.
    unsafe {
        let head = (*context).head;
        i64::from((*head).search.step(|index| word(head, index)))
    }
}
