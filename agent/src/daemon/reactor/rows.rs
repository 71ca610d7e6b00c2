//! Which rows have a breaker in the core, and how they come by it.

use std::sync::Arc;

use agent_common::{
    OTHER_ROW, Verdict,
    row::ROW_PROTECTED,
    verdict::{STATE_FORCED_CLOSED, STATE_FORCED_OPEN},
};

use super::Worker;
use crate::{
    core::{DialTarget, Event, Nanos, RowId, Saved, State},
    kernel::clock,
};

impl Worker {
    /// Whether the row's policy has it share a breaker with other workloads.
    pub(super) fn shares(&self, id: RowId) -> bool {
        let row = self.table.owned(id);
        row.is_some_and(|row| self.plan.breaker(row.settings.policy).node_scope)
    }

    /// Rows that share their breakers have them in memory from the start.
    pub(super) fn know_those_that_share(&mut self) {
        if !self.plan.shares_breakers() {
            return;
        }
        for index in 1..self.table.len() {
            let Some(row) = self.table.row(index).filter(|row| row.created_ns != 0) else {
                continue;
            };
            let incarnation = row.incarnation;
            let id = RowId { index, incarnation };
            if self.plan.breaker(row.settings.policy).node_scope {
                self.known(id);
            }
        }
    }

    /// Whether the row has a breaker; brings it into the engine if need be.
    pub(super) fn known(&mut self, row: RowId) -> bool {
        self.engine.contains(row) || self.configure(row)
    }

    fn configure(&mut self, id: RowId) -> bool {
        if id.index == OTHER_ROW {
            return false;
        }
        let Some(row) = self.table.owned(id) else {
            return false;
        };
        if row.created_ns == 0
            || row.settings.flags & ROW_PROTECTED != 0
            || self.hidden.contains(row.key.cgroup_id)
        {
            return false;
        }
        let target = DialTarget::from(&row.key);
        let settings = Arc::clone(self.plan.breaker(row.settings.policy));
        let verdict = Verdict::unpack(row.verdict);
        let generation = verdict.generation;
        let first = !self.engine.contains(id);
        self.handle(Event::Configure {
            row: id,
            target,
            settings,
            generation,
        });
        self.engine.belongs(id, row.key.cgroup_id);
        // The kernel makes rows of a destination with a manual state so from the start.
        let until = Nanos(row.verdict_until_ns);
        if first && until > clock::now() {
            match verdict.state {
                STATE_FORCED_OPEN => self.force(id, true, until),
                STATE_FORCED_CLOSED => self.force(id, false, until),
                _ => {}
            }
        }
        true
    }

    /// Brings a breaker of the agent before into the engine; whether it is not closed.
    pub(super) fn restore(&mut self, id: RowId, saved: &Saved) -> bool {
        let Some(row) = self.table.owned(id) else {
            return false;
        };
        let target = DialTarget::from(&row.key);
        let settings = Arc::clone(self.plan.breaker(row.settings.policy));
        let now = clock::now();
        self.engine
            .restore(id, target, settings, saved, now, &mut self.actions);
        self.engine.belongs(id, row.key.cgroup_id);
        self.perform(None);
        self.engine.state(id) != Some(State::Closed)
    }

    /// A row's policy or its numbers changed. One that is protected now is given up.
    pub(super) fn reconfigure(&mut self, row: RowId) {
        if !self.configure(row) {
            let last_seqs = self.table.last_seqs(row.index);
            self.handle(Event::Reset { row, last_seqs });
            self.handle(Event::Forget { row });
        }
    }
}
