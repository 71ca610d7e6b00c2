//! Giving memory back that was needed for a moment.

/// Gives free memory back to the system, which the allocator would keep: after something large.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: touches nothing but the allocator's own free lists.
    unsafe {
        libc::malloc_trim(0);
    }
}
