//! Giving rows of idle destinations back to the kernel before it runs out of them.
//!
//! A row goes through three steps: no key leads to it any more; no program run can still hold it
//! (a grace period of the kernel's RCU); no socket waits on it. Then it is emptied and free.

use std::collections::HashSet;

use agent_common::OTHER_ROW;
use anyhow::Result;

use crate::{
    core::RowId,
    kernel::{Kernel, Table},
};

/// Share of rows that may be in use before the idlest are given up, per mille.
const FULL_PER_MILLE: u64 = 900;
/// Share of all rows that is given up at a time, per mille.
const STEP_PER_MILLE: u64 = 125;

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

    /// Rows that should be given up now: the idlest first, never one with connects under way.
    /// Empty while there is room.
    pub fn candidates(&self, table: &Table) -> Vec<RowId> {
        let capacity = u64::from(table.len() - 1);
        if self.in_use(table) * 1000 <= capacity * FULL_PER_MILLE {
            return Vec::new();
        }
        let leaving: HashSet<u32> = self.draining.iter().copied().collect();
        let mut idle: Vec<(u64, RowId)> = table
            .used()
            .filter(|(id, row)| {
                id.index != OTHER_ROW && row.in_flight == 0 && !leaving.contains(&id.index)
            })
            .map(|(id, row)| (row.last_connect_ns, id))
            .collect();
        let wanted = (capacity * STEP_PER_MILLE / 1000).max(1) as usize;
        // Twice as many as wanted: some have open breakers, which stay.
        let take = (wanted * 2).min(idle.len());
        if take < idle.len() {
            idle.select_nth_unstable(take);
        }
        idle.truncate(take);
        idle.sort_unstable();
        idle.into_iter().map(|(_, id)| id).collect()
    }

    /// How many of the candidates to give up.
    pub fn step(table: &Table) -> usize {
        (u64::from(table.len() - 1) * STEP_PER_MILLE / 1000).max(1) as usize
    }

    /// Gives rows up that the event thread has let go of.
    ///
    /// # Errors
    /// When a row cannot be returned to the kernel.
    pub fn give_up(&mut self, kernel: &mut Kernel, rows: &[RowId]) -> Result<()> {
        let table = kernel.table();
        for id in rows {
            if let Some(row) = table.owned(*id) {
                kernel.forget_key(&row.key);
                self.draining.push(id.index);
                self.total += 1;
            }
        }
        wait_for_programs();
        self.drain(kernel)
    }

    /// Frees the rows that nothing waits on any more.
    ///
    /// # Errors
    /// As [`Evictions::give_up`].
    pub fn drain(&mut self, kernel: &mut Kernel) -> Result<()> {
        let table = kernel.table();
        let mut waiting = Vec::new();
        for index in std::mem::take(&mut self.draining) {
            let Some(row) = table.row(index) else {
                continue;
            };
            if row.in_flight != 0 {
                waiting.push(index);
                continue;
            }
            kernel.free_row(index)?;
            self.freed += 1;
            if row.histogram != 0 {
                kernel.free_histogram(row.histogram - 1)?;
            }
        }
        self.draining = waiting;
        Ok(())
    }

    /// Indexes of rows on their way out: they belong to nobody any more.
    pub fn leaving(&self) -> &[u32] {
        &self.draining
    }
}

/// Waits until every program run that is under way has ended: MEMBARRIER_CMD_GLOBAL is a
/// `synchronize_rcu()` (kernel/sched/membarrier.c), and programs run inside an RCU read section
/// (include/linux/bpf-cgroup.h, `bpf_prog_run_array_cg`).
fn wait_for_programs() {
    const MEMBARRIER_CMD_GLOBAL: libc::c_int = 1;
    // SAFETY: no memory is passed.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) };
    if result != 0 {
        // Not with nohz_full CPUs: then wait longer than any grace period is in practice.
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
}
