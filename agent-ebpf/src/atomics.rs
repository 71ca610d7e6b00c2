//! Atomics on map memory.
//!
//! `AtomicU64` has no `fetch_add` on this target; the intrinsics compile to BPF_ATOMIC
//! instructions that return the old value (they need `-Ctarget-cpu=v3`).

use core::intrinsics::{AtomicOrdering, atomic_cxchg, atomic_xadd};

/// Adds and returns the value before.
///
/// # Safety
/// `counter` must be valid and aligned (map memory).
#[inline(always)]
pub unsafe fn add(counter: *mut u64, amount: u64) -> u64 {
    // SAFETY: by contract.
    unsafe { atomic_xadd::<u64, u64, { AtomicOrdering::SeqCst }>(counter, amount) }
}

/// Stores `new` if the value is `old`; true when it was.
///
/// # Safety
/// As [`add`].
#[inline(always)]
pub unsafe fn replace(word: *mut u64, old: u64, new: u64) -> bool {
    // SAFETY: by contract.
    unsafe {
        atomic_cxchg::<u64, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(word, old, new)
            .1
    }
}

/// Loads a word that the agent or another CPU may be writing.
///
/// # Safety
/// As [`add`].
#[inline(always)]
pub unsafe fn load(word: *const u64) -> u64 {
    // SAFETY: by contract. An aligned 64-bit load is one instruction, never torn.
    unsafe { word.read_volatile() }
}

/// [`add`] on 32 bits.
///
/// # Safety
/// As [`add`].
#[inline(always)]
pub unsafe fn add32(counter: *mut u32, amount: u32) {
    // SAFETY: by contract.
    unsafe { atomic_xadd::<u32, u32, { AtomicOrdering::SeqCst }>(counter, amount) };
}

/// [`replace`] on 32 bits.
///
/// # Safety
/// As [`add`].
#[inline(always)]
pub unsafe fn replace32(word: *mut u32, old: u32, new: u32) -> bool {
    // SAFETY: by contract.
    unsafe {
        atomic_cxchg::<u32, { AtomicOrdering::SeqCst }, { AtomicOrdering::SeqCst }>(word, old, new)
            .1
    }
}
