//! Rows that the agent makes, gives up, and empties for the next owner.

use std::sync::atomic::Ordering;

use agent_common::Row;

use super::{Table, calls_of, half, word};
use crate::core::{RowId, WindowKind};

impl Table {
    /// Writes a row that no key leads to yet.
    pub(in crate::kernel) fn make(&self, index: u32, row: Row) {
        self.rows.write(index, row);
    }

    /// One more row was made.
    pub(in crate::kernel) fn count_created(&self) {
        if let Some(counters) = self.counters.get(0) {
            // SAFETY: within the mapping.
            unsafe { word(&raw mut (*counters).rows_created).fetch_add(1, Ordering::AcqRel) };
        }
    }

    /// Puts calls into one of the windows of a row that has none yet: the last of them has number
    /// `last`, and so many failed.
    pub fn put_calls(&self, index: u32, kind: WindowKind, last: u64, calls: &[u32], failed: u64) {
        let Some(row) = self.rows.get(index) else {
            return;
        };
        for (seq, entry) in (1..=last).rev().zip(calls.iter().rev()) {
            if let Some(place) = self.entry(index, kind, seq) {
                // SAFETY: within the mapping.
                unsafe { half(place).store(*entry, Ordering::Release) };
            }
        }
        // SAFETY: within the mapping.
        unsafe {
            let (count, failures) = calls_of(row, kind);
            word(failures).store(failed, Ordering::Release);
            word(count).store(last, Ordering::Release);
        }
    }

    /// Forgets what was learned of a destination, as if it had a new owner.
    pub fn forget_traits(&self, id: RowId) {
        let Some(row) = self.rows.get(id.index) else {
            return;
        };
        // SAFETY: within the mapping.
        unsafe {
            if half(&raw mut (*row).incarnation).load(Ordering::Acquire) != id.incarnation {
                return;
            }
            half(&raw mut (*row).greeted).store(0, Ordering::Release);
            half(&raw mut (*row).spoke_first).store(0, Ordering::Release);
            half(&raw mut (*row).ticket_lengths).store(0, Ordering::Release);
            half(&raw mut (*row).ticket_connections).store(0, Ordering::Release);
            half(&raw mut (*row).unanswered).store(0, Ordering::Release);
            word(&raw mut (*row).response_latency_max_us).store(0, Ordering::Release);
        }
    }

    /// Ends the ownership of a row: connects that pass the hook already and begin after this count
    /// as other. Those that have begun stay with the row until they end.
    pub fn disown(&self, index: u32) {
        let Some(row) = self.rows.get(index) else {
            return;
        };
        // SAFETY: within the mapping.
        unsafe { half(&raw mut (*row).incarnation).fetch_add(1, Ordering::AcqRel) };
    }

    /// Empties a row that is disowned and that nothing waits on any more.
    pub fn clear(&self, index: u32) {
        let Some(row) = self.rows.read(index) else {
            return;
        };
        let mut empty: Row = bytemuck::Zeroable::zeroed();
        empty.incarnation = row.incarnation;
        self.rows.write(index, empty);
        self.retries.write(index, bytemuck::Zeroable::zeroed());
        for block in 0..self.window_blocks {
            let block = index * self.window_blocks + block;
            self.windows.write(block, bytemuck::Zeroable::zeroed());
            self.exchange_windows
                .write(block, bytemuck::Zeroable::zeroed());
        }
    }
}
