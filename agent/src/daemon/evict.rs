//! Giving rows of idle destinations back to the kernel before it runs out of them.
//!
//! A row goes through four steps: no key leads to it any more; no program run still holds it (a
//! grace period); it is disowned, so that no connect begins on it any more (another grace period);
//! and when the connects that have begun are over, it is emptied and free.

use std::collections::{HashMap, HashSet};

use agent_common::{OTHER_ROW, Row, row::ROW_LIMITED};
use anyhow::Result;

use crate::{
    core::RowId,
    kernel::{Kernel, Table, grace::wait_for_programs},
};

/// Share of rows that may be in use before the idlest are given up, per mille.
const FULL_PER_MILLE: u64 = 900;
/// Share of all rows that is given up at a time, per mille.
const STEP_PER_MILLE: u64 = 125;

/// Whether connections live that a limit must know of: with the row, their number would be lost.
fn is_counted(row: &Row) -> bool {
    row.settings.flags & ROW_LIMITED != 0 && row.live() != 0
}

/// Rows on their way out.
#[derive(Default)]
pub struct Evictions {
    /// Unreachable by key, but sockets still wait on them.
    draining: Vec<u32>,
    /// Rows given up so far.
    pub total: u64,
    /// Rows returned to the kernel so far.
    freed: u64,
}

impl Evictions {
    /// Rows in use, those on their way out included.
    pub fn in_use(&self, table: &Table) -> u64 {
        table.counters().rows_created.saturating_sub(self.freed)
    }

    /// Rows that should be given up now: the idlest first, never one with connects under way, nor
    /// one with live connections that a limit counts.
    /// Empty while there is room.
    pub fn candidates(&self, table: &Table) -> Vec<RowId> {
        let capacity = u64::from(table.len() - 1);
        if self.in_use(table) * 1000 <= capacity * FULL_PER_MILLE {
            return Vec::new();
        }
        let leaving: HashSet<u32> = self.draining.iter().copied().collect();
        let mut owners: HashMap<u64, usize> = HashMap::new();
        let mut idle: Vec<(bool, u64, RowId, u64)> = Vec::new();
        for (id, row) in table.used() {
            if id.index == OTHER_ROW {
                continue;
            }
            *owners.entry(row.key.cgroup_id).or_default() += 1;
            let is_idle = row.pending() == 0 && row.exchanges_in_flight() == 0 && !is_counted(&row);
            if is_idle && !leaving.contains(&id.index) {
                idle.push((true, row.last_connect_ns, id, row.key.cgroup_id));
            }
        }
        // A workload that takes most of the table (a scanner, a crawler) pays first.
        let greedy = owners.iter().max_by_key(|(_, rows)| **rows);
        if let Some((greedy, rows)) = greedy
            && rows * 2 > idle.len()
        {
            for row in &mut idle {
                row.0 = row.3 != *greedy;
            }
        }
        // More than wanted: some have open breakers, which stay.
        let take = (Self::step(table) * 4).min(idle.len());
        if take < idle.len() {
            idle.select_nth_unstable(take);
        }
        idle.truncate(take);
        idle.sort_unstable();
        idle.into_iter().map(|(_, _, id, _)| id).collect()
    }

    /// How many of the candidates to give up.
    pub fn step(table: &Table) -> usize {
        (u64::from(table.len() - 1) * STEP_PER_MILLE / 1000).max(1) as usize
    }

    /// Makes rows unreachable that the event thread has let go of; answers with those that are to be
    /// given up, which no program holds any more.
    pub fn close(&mut self, kernel: &mut Kernel, rows: &[RowId]) -> Vec<RowId> {
        let table = kernel.table();
        let mut leaving = Vec::with_capacity(rows.len());
        for id in rows {
            let Some(row) = table.owned(*id).filter(|row| row.created_ns != 0) else {
                continue;
            };
            if kernel.row_of(&row.key) == Some(id.index) {
                kernel.forget_key(&row.key);
                leaving.push(*id);
            }
        }
        if leaving.is_empty() {
            return leaving;
        }
        wait_for_programs();
        // A connection that has come meanwhile is counted in the row: it stays.
        leaving.retain(|id| {
            let came = table.row(id.index).filter(is_counted);
            !came.is_some_and(|row| kernel.remember_key(&row.key, id.index))
        });
        leaving
    }

    /// Gives rows up that [`Evictions::close`] has answered with.
    ///
    /// # Errors
    /// When a row cannot be returned to the kernel.
    pub fn give_up(&mut self, kernel: &mut Kernel, leaving: &[RowId]) -> Result<()> {
        if leaving.is_empty() {
            return Ok(());
        }
        let table = kernel.table();
        for id in leaving {
            table.disown(id.index);
        }
        wait_for_programs();
        self.total += leaving.len() as u64;
        self.draining.extend(leaving.iter().map(|id| id.index));
        self.drain(kernel)
    }

    /// Frees the rows that nothing waits on any more.
    ///
    /// # Errors
    /// As [`Evictions::give_up`].
    pub fn drain(&mut self, kernel: &mut Kernel) -> Result<()> {
        let table = kernel.table();
        let mut result = Ok(());
        self.draining.retain(|&index| {
            let Some(row) = table.row(index) else {
                return false;
            };
            if row.pending() != 0 || row.exchanges_in_flight() != 0 {
                return true;
            }
            // Histograms first: whoever takes the row finds one for it then.
            let freed = [row.histogram, row.response_histogram]
                .into_iter()
                .filter(|slot| *slot != 0)
                .try_for_each(|slot| kernel.free_histogram(slot - 1))
                .and_then(|()| kernel.free_row(index));
            match freed {
                Ok(()) => self.freed += 1,
                Err(error) => result = Err(error),
            }
            false
        });
        result
    }

    /// Indexes of rows on their way out: they belong to nobody any more.
    pub fn leaving(&self) -> &[u32] {
        &self.draining
    }
}
