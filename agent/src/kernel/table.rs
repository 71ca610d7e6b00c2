//! Rows, windows and the node's blocks, as shared between the kernel, the event thread and the
//! select loop.

mod life;
mod settings;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use agent_common::{
    CallWindow, Control, Counters, Retries, RetrySettings, Row, Settings, Statuses, Verdict,
    event::{OUTCOME_DEADLINE, OUTCOME_HUNG, OUTCOME_STALL, OUTCOME_WRITE_TIMEOUT},
    histogram::Histogram,
    verdict::{STATE_HALF_OPEN, STATE_RAMP, pack_probe_slots},
    window::{self, Block, encode, repaired},
};

use super::mapped::Mapped;
use crate::core::{Nanos, RowId, WindowKind};

/// All mapped arrays. Words are written by one side each, as the ABI says at each field.
pub struct Table {
    pub(super) control: Mapped<Control>,
    pub(super) counters: Mapped<Counters>,
    pub(super) rows: Mapped<Row>,
    pub(super) windows: Mapped<Block>,
    pub(super) exchange_windows: Mapped<Block>,
    /// Blocks in each window.
    pub(super) window_blocks: u32,
    pub(super) histograms: Mapped<Histogram>,
    pub(super) policies: Mapped<Settings>,
    pub(super) retries: Mapped<Retries>,
    pub(super) retry_policies: Mapped<RetrySettings>,
    pub(super) statuses: Mapped<Statuses>,
}

/// An aligned word in mapped memory.
///
/// # Safety
/// `word` must point into a mapping that outlives the use.
unsafe fn word<'a>(word: *mut u64) -> &'a AtomicU64 {
    // SAFETY: by contract; the kernel side uses atomic instructions too.
    unsafe { AtomicU64::from_ptr(word) }
}

/// As [`word`], 32 bits.
///
/// # Safety
/// As [`word`].
unsafe fn half<'a>(half: *mut u32) -> &'a AtomicU32 {
    // SAFETY: by contract.
    unsafe { AtomicU32::from_ptr(half) }
}

/// A row's counters of calls and of failed ones, in one of its windows.
///
/// # Safety
/// `row` must point into the mapping.
unsafe fn calls_of(row: *mut Row, kind: WindowKind) -> (*mut u64, *mut u64) {
    // SAFETY: by contract.
    unsafe {
        match kind {
            WindowKind::Exchanges => (
                &raw mut (*row).exchange_calls,
                &raw mut (*row).exchange_failures,
            ),
            WindowKind::Connects | WindowKind::None => (
                &raw mut (*row).connect_calls,
                &raw mut (*row).connect_failures,
            ),
        }
    }
}

impl Table {
    /// Number of rows, the `other` row (0) included.
    pub fn len(&self) -> u32 {
        self.rows.len()
    }

    /// Whether there are no rows; never true.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Memory of the mapped arrays, bytes.
    pub fn bytes(&self) -> usize {
        self.control.bytes()
            + self.counters.bytes()
            + self.rows.bytes()
            + self.windows.bytes()
            + self.exchange_windows.bytes()
            + self.histograms.bytes()
            + self.policies.bytes()
            + self.retries.bytes()
            + self.retry_policies.bytes()
            + self.statuses.bytes()
    }

    /// Writes the node's control block. Mode last, so that nothing acts on half of it.
    pub fn write_control(&self, control: Control) {
        let mode = control.mode;
        if let Some(block) = self.control.get(0) {
            // SAFETY: within the mapping.
            unsafe {
                half(&raw mut (*block).mode).store(agent_common::Mode::OFF, Ordering::Release);
            }
        }
        self.control.write(
            0,
            Control {
                mode: agent_common::Mode::OFF,
                ..control
            },
        );
        self.set_mode(mode);
    }

    /// Switches the mode (`agent_common::Mode`).
    pub fn set_mode(&self, mode: u32) {
        if let Some(block) = self.control.get(0) {
            // SAFETY: within the mapping.
            unsafe { half(&raw mut (*block).mode).store(mode, Ordering::Release) };
        }
    }

    /// The mode in force.
    pub fn mode(&self) -> u32 {
        self.control
            .read(0)
            .map_or(agent_common::Mode::OFF, |control| control.mode)
    }

    /// Says that the agent is at work.
    pub fn beat(&self, now: Nanos) {
        if let Some(block) = self.control.get(0) {
            // SAFETY: within the mapping.
            unsafe { word(&raw mut (*block).heartbeat_ns).store(now.0, Ordering::Release) };
        }
    }

    /// When the agent was last seen at work.
    pub fn heartbeat(&self) -> Nanos {
        Nanos(
            self.control
                .read(0)
                .map_or(0, |control| control.heartbeat_ns),
        )
    }

    /// The node's counters.
    pub fn counters(&self) -> Counters {
        self.counters
            .read(0)
            .unwrap_or(bytemuck::Zeroable::zeroed())
    }

    /// Events that the ring had no room for, so far.
    pub fn lost_events(&self) -> u64 {
        self.counters().lost_events
    }

    /// A copy of a row, whoever owns it.
    pub fn row(&self, index: u32) -> Option<Row> {
        self.rows.read(index)
    }

    /// A copy of a row if it still has this owner.
    pub fn owned(&self, id: RowId) -> Option<Row> {
        self.rows
            .read(id.index)
            .filter(|row| row.incarnation == id.incarnation)
    }

    /// Connects of a row that a breaker has refused, or would have.
    pub fn refused(&self, id: RowId) -> Option<u64> {
        let row = self.owned(id)?;
        Some(row.rejected_breaker + row.would_reject_breaker)
    }

    /// Rows in use: id and copy. The `other` row comes first.
    pub fn used(&self) -> impl Iterator<Item = (RowId, Row)> + '_ {
        (0..self.len()).filter_map(|index| {
            let row = self.rows.get(index)?;
            // SAFETY: within the mapping. Read one word before the whole row: most are free.
            let created = unsafe { word(&raw mut (*row).created_ns).load(Ordering::Acquire) };
            if index != 0 && created == 0 {
                return None;
            }
            let row = self.rows.read(index)?;
            Some((
                RowId {
                    index,
                    incarnation: row.incarnation,
                },
                row,
            ))
        })
    }

    /// Number of the last call in each of the row's windows (connects, exchanges).
    pub fn last_seqs(&self, index: u32) -> [u64; 2] {
        [WindowKind::Connects, WindowKind::Exchanges].map(|kind| self.calls(index, kind).0)
    }

    /// Number of the last call in one of the row's windows, and the number of failures.
    pub fn calls(&self, index: u32, kind: WindowKind) -> (u64, u64) {
        let Some(row) = self.rows.get(index) else {
            return (0, 0);
        };
        // SAFETY: within the mapping.
        unsafe {
            let (calls, failures) = calls_of(row, kind);
            (
                word(calls).load(Ordering::Acquire),
                word(failures).load(Ordering::Acquire),
            )
        }
    }

    /// The row's packed probe slots.
    pub fn probe_slots(&self, index: u32) -> u64 {
        let Some(row) = self.rows.get(index) else {
            return 0;
        };
        // SAFETY: within the mapping.
        unsafe { word(&raw mut (*row).probe_slots).load(Ordering::Acquire) }
    }

    /// Calls that each window holds.
    pub fn window_calls(&self) -> u32 {
        self.window_blocks * window::BLOCK as u32
    }

    /// A copy of one of the row's windows: the calls up to `last_seq`.
    pub fn window(&self, index: u32, kind: WindowKind, last_seq: u64) -> Option<CallWindow> {
        let mut calls: CallWindow = bytemuck::Zeroable::zeroed();
        let held = u64::from(self.window_calls());
        for seq in last_seq.saturating_sub(held - 1).max(1)..=last_seq {
            calls.entries[window::slot(seq)] = self.window_entry(index, kind, seq)?;
        }
        Some(calls)
    }

    /// What lies where call `seq` lies in one of the row's windows.
    pub fn window_entry(&self, index: u32, kind: WindowKind, seq: u64) -> Option<u32> {
        // SAFETY: within the mapping.
        Some(unsafe { self.entry(index, kind, seq)?.read_volatile() })
    }

    /// Where call `seq` lies in one of the row's windows.
    fn entry(&self, index: u32, kind: WindowKind, seq: u64) -> Option<*mut u32> {
        let block = window::block(index, seq, self.window_blocks);
        let block = self.windows_of(kind).get(block)?;
        // SAFETY: within the mapping, and within the entries.
        Some(unsafe {
            (&raw mut (*block).entries)
                .cast::<u32>()
                .add(window::entry(seq))
        })
    }

    fn windows_of(&self, kind: WindowKind) -> &Mapped<Block> {
        match kind {
            WindowKind::Exchanges => &self.exchange_windows,
            WindowKind::Connects | WindowKind::None => &self.windows,
        }
    }

    /// Enters a failed call that the agent has found itself, if the row has this owner and its
    /// verdict this generation. Returns the call's number.
    pub fn enter_failure(
        &self,
        id: RowId,
        kind: WindowKind,
        generation: u32,
        now: Nanos,
    ) -> Option<u64> {
        let row = self.rows.get(id.index)?;
        self.owned(id)?;
        if self.verdict(id.index).generation != generation {
            return None;
        }
        // SAFETY: within the mappings. As `call` in the kernel programs does it.
        unsafe {
            let (calls, failures) = calls_of(row, kind);
            let seq = word(calls).fetch_add(1, Ordering::AcqRel) + 1;
            word(failures).fetch_add(1, Ordering::AcqRel);
            let entry = self.entry(id.index, kind, seq)?;
            half(entry).store(encode(seq, now.0, true, false), Ordering::Release);
            Some(seq)
        }
    }

    /// Makes a failure of an exchange whose answer began at `answered` and was counted as good then, if the
    /// row has this owner and its verdict this generation. Returns the call's number; where the window does
    /// not hold it any more, that of a failed call entered now.
    pub fn spoil(&self, id: RowId, generation: u32, answered: Nanos, now: Nanos) -> Option<u64> {
        let kind = WindowKind::Exchanges;
        let row = self.rows.get(id.index)?;
        self.owned(id)?;
        if self.verdict(id.index).generation != generation {
            return None;
        }
        let (last, _) = self.calls(id.index, kind);
        let held = u64::from(self.window_calls());
        for seq in (last.saturating_sub(held - 1).max(1)..=last).rev() {
            let entry = self.entry(id.index, kind, seq)?;
            // SAFETY: within the mapping.
            let entry = unsafe { half(entry) };
            let before = entry.load(Ordering::Acquire);
            let is_it = window::decode(before, seq, now.0)
                .is_some_and(|call| window::is_same_time(call.at_ns, answered.0));
            // Of several at that time any good one will do: what is judged is their number and order.
            if is_it
                && let Some(after) = window::spoiled(before, seq)
                && entry
                    .compare_exchange(before, after, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
            {
                // SAFETY: within the mapping.
                unsafe {
                    let (_, failures) = calls_of(row, kind);
                    word(failures).fetch_add(1, Ordering::AcqRel);
                }
                return Some(seq);
            }
        }
        self.enter_failure(id, kind, generation, now)
    }

    /// Makes a success of a failed call, if it is still in the window.
    pub fn repair(&self, index: u32, kind: WindowKind, seq: u64) {
        let Some(entry) = self.entry(index, kind, seq) else {
            return;
        };
        // SAFETY: within the mapping.
        let entry = unsafe { half(entry) };
        let before = entry.load(Ordering::Acquire);
        if let Some(after) = repaired(before, seq, false) {
            // Another call has taken the place: nothing to repair.
            let _ = entry.compare_exchange(before, after, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// An exchange is about to be noted in `COUNTED`: from now on ends are looked up there.
    pub fn open_counted(&self, index: u32) {
        if let Some(row) = self.rows.get(index) {
            // SAFETY: within the mapping.
            unsafe { half(&raw mut (*row).counted_open).fetch_add(1, Ordering::AcqRel) };
        }
    }

    /// It is not noted there any more, where the kernel has not taken it out.
    pub fn close_counted(&self, index: u32) {
        if let Some(row) = self.rows.get(index) {
            // SAFETY: within the mapping.
            unsafe { half(&raw mut (*row).counted_open).fetch_sub(1, Ordering::AcqRel) };
        }
    }

    /// Counts an outcome that the agent has found itself (`OUTCOME_`).
    pub fn count_outcome(&self, index: u32, outcome: u32) {
        let Some(row) = self.rows.get(index) else {
            return;
        };
        // SAFETY: within the mapping.
        unsafe {
            if outcome == OUTCOME_DEADLINE {
                half(&raw mut (*row).exchange_deadline).fetch_add(1, Ordering::AcqRel);
                return;
            }
            let counter = match outcome {
                OUTCOME_HUNG => &raw mut (*row).exchange_hung,
                OUTCOME_WRITE_TIMEOUT => &raw mut (*row).exchange_write_timeout,
                _ => &raw mut (*row).exchange_read_timeout,
            };
            word(counter).fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Counts a timeout that has fired, or in observe mode would have.
    pub fn count_firing(&self, index: u32, outcome: u32, would: bool) {
        let Some(row) = self.rows.get(index) else {
            return;
        };
        // SAFETY: within the mapping.
        unsafe {
            if would {
                word(&raw mut (*row).would_timeout).fetch_add(1, Ordering::AcqRel);
                return;
            }
            let counter = match outcome {
                OUTCOME_WRITE_TIMEOUT => &raw mut (*row).fired_write,
                OUTCOME_STALL => &raw mut (*row).fired_stall,
                OUTCOME_DEADLINE => &raw mut (*row).fired_deadline,
                _ => &raw mut (*row).fired_read,
            };
            half(counter).fetch_add(1, Ordering::AcqRel);
        }
    }

    /// A copy of a histogram by the row's `histogram` field (slot plus one).
    pub fn histogram(&self, slot_plus_one: u32) -> Option<Histogram> {
        self.histograms.read(slot_plus_one.checked_sub(1)?)
    }

    /// Empties a histogram before it is lent again.
    pub fn clear_histogram(&self, slot: u32) {
        self.histograms.write(slot, bytemuck::Zeroable::zeroed());
    }

    /// Puts a verdict in force. What belongs to it is stored first, the verdict itself last.
    pub fn set_verdict(&self, id: RowId, verdict: Verdict, until: Nanos, probe_limit: u32) {
        let Some(row) = self.rows.get(id.index) else {
            return;
        };
        // SAFETY: within the mapping.
        unsafe {
            if half(&raw mut (*row).incarnation).load(Ordering::Acquire) != id.incarnation {
                return;
            }
            word(&raw mut (*row).verdict_until_ns).store(until.0, Ordering::Release);
            if verdict.state == STATE_HALF_OPEN {
                half(&raw mut (*row).settings.probe_limit).store(probe_limit, Ordering::Release);
            }
            if matches!(verdict.state, STATE_HALF_OPEN | STATE_RAMP) {
                let slots = pack_probe_slots(verdict.generation, 0);
                word(&raw mut (*row).probe_slots).store(slots, Ordering::Release);
            }
            word(&raw mut (*row).verdict).store(verdict.pack(), Ordering::Release);
        }
    }

    /// The verdict in force.
    pub fn verdict(&self, index: u32) -> Verdict {
        let Some(row) = self.rows.get(index) else {
            return Verdict::default();
        };
        // SAFETY: within the mapping.
        Verdict::unpack(unsafe { word(&raw mut (*row).verdict).load(Ordering::Acquire) })
    }

    /// A copy of what is counted of a row's retries.
    pub fn retries(&self, index: u32) -> Retries {
        let zeroed = bytemuck::Zeroable::zeroed();
        self.retries.read(index).unwrap_or(zeroed)
    }

    /// The destination has answered a dial of the agent's own while the limit on retries was in force.
    pub fn count_dialled(&self, id: RowId) {
        if self.owned(id).is_none() {
            return;
        }
        if let Some(retries) = self.retries.get(id.index) {
            // SAFETY: within the mapping.
            unsafe { half(&raw mut (*retries).dialled).fetch_add(1, Ordering::AcqRel) };
        }
    }
}
