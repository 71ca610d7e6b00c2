//! BPF arrays as memory of the agent.
//!
//! An array with `BPF_F_MMAPABLE` can be mapped (kernel/bpf/arraymap.c, `array_map_mmap`): both
//! sides then see each other's stores without a system call. aya has no such type.

use std::{marker::PhantomData, os::fd::AsFd, ptr::NonNull};

use bytemuck::Pod;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// A mapped array of `T`. Shared with the kernel programs, and between threads of the agent.
///
/// No reference into it is ever made: the kernel writes at any time. Whole elements are copied
/// out; single words go through atomics (see [`crate::kernel::table`]).
pub struct Mapped<T> {
    base: NonNull<T>,
    entries: u32,
    bytes: usize,
    _owns: PhantomData<T>,
}

// SAFETY: the memory is shared by design; it is accessed by volatile copies and atomics only.
unsafe impl<T: Pod> Send for Mapped<T> {}
// SAFETY: as above.
unsafe impl<T: Pod> Sync for Mapped<T> {}

impl<T: Pod> Mapped<T> {
    /// Maps the array behind `fd`, which must have `entries` values of type `T`.
    ///
    /// # Errors
    /// When the kernel refuses, in particular for an array without `BPF_F_MMAPABLE`.
    pub fn new(fd: impl AsFd, entries: u32) -> std::io::Result<Self> {
        // The kernel rounds each value up to 8 bytes; all our types are multiples of 8.
        assert!(
            size_of::<T>().is_multiple_of(8),
            "a mapped type must be a multiple of 8 bytes"
        );
        let bytes = size_of::<T>() * entries as usize;
        // SAFETY: a new shared mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )?
        };
        let base = NonNull::new(base.cast::<T>()).ok_or(std::io::ErrorKind::AddrNotAvailable)?;
        Ok(Self {
            base,
            entries,
            bytes,
            _owns: PhantomData,
        })
    }

    /// Number of elements.
    pub fn len(&self) -> u32 {
        self.entries
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries == 0
    }

    /// Bytes of the mapping, which is memory of the map itself (counted once).
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Address of an element, or `None` beyond the end. Valid as long as `self` is.
    pub fn get(&self, index: u32) -> Option<*mut T> {
        if index >= self.entries {
            return None;
        }
        // SAFETY: within the mapping.
        Some(unsafe { self.base.as_ptr().add(index as usize) })
    }

    /// A copy of an element. Words that change meanwhile may be old or new, never torn.
    pub fn read(&self, index: u32) -> Option<T> {
        // SAFETY: within the mapping, and every bit pattern is a `T`.
        self.get(index)
            .map(|element| unsafe { element.read_volatile() })
    }

    /// Stores an element. Words arrive one by one, in no promised order.
    pub fn write(&self, index: u32, value: T) {
        if let Some(element) = self.get(index) {
            // SAFETY: within the mapping.
            unsafe { element.write_volatile(value) }
        }
    }
}

impl<T> Drop for Mapped<T> {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and nothing outlives `self`.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
