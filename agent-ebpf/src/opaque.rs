//! Values that the verifier is not to know.
//!
//! It follows every value that a program can have known by itself (kernel/bpf/verifier.c,
//! `states_equal`): an enum of five variants makes five walks through all that comes after it. What is
//! read from memory can be anything, and is walked once.

/// Always 0. In writable data, so that nothing but a load tells.
#[unsafe(no_mangle)]
static mut NOTHING: u32 = 0;

/// The same value.
#[inline(always)]
pub fn hidden64(value: u64) -> u64 {
    value.wrapping_add(u64::from(hidden(0)))
}

/// The same value.
#[inline(always)]
pub fn hidden(value: u32) -> u32 {
    // SAFETY: nobody ever writes it.
    value.wrapping_add(unsafe { (&raw const NOTHING).read_volatile() })
}

/// Whether a word is not 0. Of the word itself the verifier learns nothing by this: asked again, it walks both
/// ways again, but does not walk all that lies between once for each.
#[inline(always)]
pub fn is(word: u32) -> bool {
    hidden(word) != 0
}
