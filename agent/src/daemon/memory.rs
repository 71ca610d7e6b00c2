//! Giving memory back that was needed for a moment.

/// Has whatever is large lie in pages of its own, which go back to the system when it is freed. To be called
/// once, before anything large is allocated.
///
/// The allocator does so with 128 KiB and more, but after the first such piece is freed only with larger
/// ones, up to 32 MiB (`M_MMAP_THRESHOLD` in mallopt(3)): the kernel's BTF, read at the start, has that
/// effect. From then on tables that grow leave holes between small pieces: with 50,000 open breakers 31 MiB of
/// heap become 38 to 44.
pub fn keep_large_apart() {
    #[cfg(target_env = "gnu")]
    // SAFETY: sets a number of the allocator's.
    unsafe {
        // The allocator's own first value. A refusal costs only memory.
        libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10);
    }
}

/// Gives free memory back to the system, which the allocator would keep: after something large.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: touches nothing but the allocator's own free lists.
    unsafe {
        libc::malloc_trim(0);
    }
}
