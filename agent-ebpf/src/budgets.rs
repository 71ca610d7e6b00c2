//! The budget of retries of a row, as it lies in the map: see [`agent_common::budget`].

use agent_common::{
    Retries, Row,
    budget::{self, Cells, Counts},
};

use crate::{atomics, maps, opaque::hidden64};

/// A row's budget as it lies in the map.
pub struct Shared {
    /// The row's counters.
    pub retries: *mut Retries,
    /// [`first_attempts`].
    pub attempts: u64,
}

impl Counts for Shared {
    #[inline(always)]
    fn epoch(&self) -> u64 {
        // SAFETY: map memory (as for all functions here).
        unsafe { atomics::load(&raw const (*self.retries).epoch) }
    }

    #[inline(always)]
    fn begin(&self, slot: usize) -> u64 {
        let begins = self.begins();
        // SAFETY: as above; the index is masked again for the verifier.
        unsafe { begins.add(slot & (budget::SLOTS - 1)).read_volatile() }
    }

    #[inline(always)]
    fn attempts(&self) -> u64 {
        self.attempts
    }

    #[inline(always)]
    fn spent(&self) -> u64 {
        // SAFETY: as above.
        unsafe { atomics::load(&raw const (*self.retries).spent) }
    }

    #[inline(always)]
    fn forgotten(&self, value: u64) -> u64 {
        hidden64(value)
    }
}

impl Cells for Shared {
    #[inline(always)]
    fn advance(&mut self, from: u64, to: u64) -> bool {
        // SAFETY: as above.
        unsafe { atomics::replace(&raw mut (*self.retries).epoch, from, to) }
    }

    #[inline(always)]
    fn set_begin(&mut self, slot: usize, counts: u64) {
        let begins = self.begins();
        // SAFETY: as above.
        unsafe {
            begins
                .add(slot & (budget::SLOTS - 1))
                .write_volatile(counts)
        };
    }

    #[inline(always)]
    fn add_spent(&mut self, amount: u64) -> u64 {
        // SAFETY: as above.
        unsafe { atomics::add(&raw mut (*self.retries).spent, amount) }
    }
}

impl Shared {
    #[inline(always)]
    fn begins(&self) -> *mut u64 {
        // SAFETY: as above.
        unsafe { (&raw mut (*self.retries).begins).cast() }
    }
}

/// What a row's budget is a share of ([`budget::calls`]).
///
/// # Safety
/// `row` and `retries` must be map memory, of one row.
#[inline(always)]
pub unsafe fn first_attempts(row: *const Row, retries: *const Retries) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let attempts = atomics::load(&raw const (*row).attempts);
        let spent = atomics::load(&raw const (*retries).spent);
        budget::calls(attempts, spent, atomics::load(&raw const (*row).responses))
    }
}

/// A row enters an epoch of its budget, if it has not done so yet.
#[inline(never)]
pub fn enter(index: u32, epoch: u64) {
    let (Some(retries), Some(row)) = (maps::RETRIES.get_ptr_mut(index), maps::ROWS.get_ptr(index))
    else {
        return;
    };
    // SAFETY: map memory.
    let attempts = unsafe { first_attempts(row, retries) };
    budget::enter(&mut Shared { retries, attempts }, epoch);
}
