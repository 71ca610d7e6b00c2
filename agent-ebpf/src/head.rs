//! Searches the head of an HTTP answer or request: see [`agent_common::http`]. Dear beside the rest: only where
//! something depends on it.

use agent_common::{
    http::{ANSWER_SEARCHED, SEARCHED, STEPS, Search, WORDS},
    request::{VALUE, Value},
};
use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_loop, bpf_skb_load_bytes},
};

use crate::{maps, segment::Segment};

/// What is searched, and what was found. In a map: too much for the stack.
#[repr(C)]
pub struct Head {
    /// The first bytes of the payload, and something old behind them.
    pub words: [u64; WORDS],
    /// What was found.
    pub search: Search,
    /// What it says of a request's end.
    pub value: Value,
    /// Not 0 while it is in use ([`of_request`]).
    pub busy: u32,
    /// Bytes that are loaded.
    pub loads: u32,
}

/// The entries of the map.
const ANSWER: u32 = 0;
const REQUEST: u32 = 1;

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

/// Searches the head with which an answer begins; null when there is nothing to read.
///
/// # Safety
/// `skb` must be the context of the ingress hook, which does not interrupt itself on a processor.
#[inline(never)]
pub unsafe fn search(skb: *mut __sk_buff, segment: &Segment) -> *mut Head {
    match maps::HEAD.get_ptr_mut(ANSWER) {
        // SAFETY: by contract.
        Some(head) if unsafe { load_and_search(head, skb, segment, ANSWER_SEARCHED) } => head,
        _ => core::ptr::null_mut(),
    }
}

/// Searches the head with which a request begins; null when there is nothing to read, or when this hook was
/// interrupted by itself (a program sends, and so does the kernel in a soft interrupt meanwhile). What is
/// returned is to be given back to [`release`].
///
/// # Safety
/// `skb` must be the context of the egress hook.
#[inline(always)]
pub unsafe fn of_request(skb: *mut __sk_buff, segment: &Segment) -> *mut Head {
    let Some(head) = maps::HEAD.get_ptr_mut(REQUEST) else {
        return core::ptr::null_mut();
    };
    // SAFETY: map memory. Programs stay on their processor.
    unsafe {
        if (&raw const (*head).busy).read_volatile() != 0 {
            return core::ptr::null_mut();
        }
        (&raw mut (*head).busy).write_volatile(1);
        if load_and_search(head, skb, segment, SEARCHED) {
            (*head).value = Value::of(&(*head).search);
            let mut context = Context { head };
            let read = read as unsafe extern "C" fn(u32, *mut Context) -> i64;
            bpf_loop(VALUE, read as *mut _, (&raw mut context).cast(), 0);
            return head;
        }
        release(head);
    }
    core::ptr::null_mut()
}

/// The end of the use of a request's head.
///
/// # Safety
/// `head` must be from [`of_request`].
#[inline(always)]
pub unsafe fn release(head: *mut Head) {
    // SAFETY: by contract, map memory.
    unsafe { (&raw mut (*head).busy).write_volatile(0) };
}

#[inline(always)]
unsafe fn load_and_search(
    head: *mut Head,
    skb: *mut __sk_buff,
    segment: &Segment,
    most: u32,
) -> bool {
    // For the verifier: at least 1, and no more than there is room for. By way of memory, or it would tell
    // apart all that it knows of the payload's length from here back to the packet's begin.
    // SAFETY: map memory.
    let longest = unsafe {
        (&raw mut (*head).loads).write_volatile(segment.payload.min(most));
        (&raw const (*head).loads).read_volatile()
    };
    let loaded = (longest.wrapping_sub(1) & (SEARCHED - 1)) + 1;
    // SAFETY: by contract, map memory.
    unsafe {
        let to = (&raw mut (*head).words).cast();
        if bpf_skb_load_bytes(skb.cast(), segment.offset, to, loaded) != 0 {
            return false;
        }
        (*head).search = Search::new(loaded);
        let mut context = Context { head };
        // A loop that the verifier walks through once.
        let step = step as unsafe extern "C" fn(u32, *mut Context) -> i64;
        bpf_loop(STEPS, step as *mut _, (&raw mut context).cast(), 0);
    }
    true
}

/// A step of the search; 1 when it is over.
unsafe extern "C" fn step(_: u32, context: *mut Context) -> i64 {
    // SAFETY: what `search` has given, and nobody else has.
    unsafe {
        let head = (*context).head;
        i64::from((*head).search.step(|index| word(head, index)))
    }
}

/// A byte of a value; 1 when there is no more.
unsafe extern "C" fn read(_: u32, context: *mut Context) -> i64 {
    // SAFETY: what `of_request` has given, and nobody else has.
    unsafe {
        let head = (*context).head;
        i64::from((*head).value.step(|index| word(head, index)))
    }
}
