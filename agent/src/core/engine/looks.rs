//! What is asked of the engine: nothing here changes it.

use agent_common::CallWindow;

use super::Engine;
use crate::core::{
    BreakerView, DialTarget, Nanos, RowId, Saved, State, WindowKind, WindowStats, Workload,
};

impl Engine {
    /// What of a row's breaker outlives the agent; `None` when it has none in memory: then there is
    /// nothing to be kept.
    pub fn save(&self, row: RowId) -> Option<Saved> {
        Some(self.slot(row)?.breaker.save())
    }

    /// As [`Engine::save`], of all rows, but at most so many: those first that are not closed.
    pub fn save_all(&self, most: usize) -> Vec<(RowId, Saved)> {
        let mut saved = Vec::new();
        for closed in [false, true] {
            let rows = self
                .breakers
                .iter()
                .filter(|(_, slot)| (slot.breaker.state() == State::Closed) == closed);
            let left = most - saved.len();
            saved.extend(rows.take(left).map(|(&index, slot)| {
                let incarnation = slot.incarnation;
                (RowId { index, incarnation }, slot.breaker.save())
            }));
        }
        saved
    }

    /// When [`Event::Deadline`](crate::core::Event::Deadline) is to be handled next; `None`: not before another event. May be
    /// early (then that call does nothing), never late; in the past when one call was not enough.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let timer = self.timers.first().map(|&(at, _)| at);
        let redial = self.redial.next_deadline();
        let calm = self.correlation.deadline();
        let count = (!self.to_be_counted.is_empty()).then_some(self.now);
        [timer, redial, calm, count].into_iter().flatten().min()
    }

    /// While failures are correlated: the workload without which they would not be, the others together
    /// being well. Only its rows are held back then. `None` where others fail, too, and where nobody else
    /// calls anything.
    pub fn correlated_within(&self) -> Option<Workload> {
        self.correlation.within()
    }

    /// Rows that have a breaker in memory, in no particular order.
    pub fn rows(&self) -> impl Iterator<Item = RowId> + '_ {
        self.breakers.iter().map(|(&index, slot)| RowId {
            index,
            incarnation: slot.incarnation,
        })
    }

    /// One of the rows that a dial of this target is for, so that the shell can find out from where
    /// to dial; `None` when no row waits any more.
    pub fn row_waiting_for(&self, target: DialTarget) -> Option<RowId> {
        let index = self.redial.a_row(target)?;
        let slot = self.breakers.get(&index)?;
        Some(RowId {
            index,
            incarnation: slot.incarnation,
        })
    }

    /// Whether the row has a breaker in memory. If not, [`Event::Configure`](crate::core::Event::Configure) has to come first.
    pub fn contains(&self, row: RowId) -> bool {
        self.slot(row).is_some()
    }

    /// A row's state, or `None` when it has no breaker in memory and is therefore closed. One
    /// look-up, cheaper than [`Engine::view`].
    pub fn state(&self, row: RowId) -> Option<State> {
        Some(self.slot(row)?.breaker.state())
    }

    /// A row's breaker, or `None` when it has none in memory and is therefore closed.
    pub fn view(&self, row: RowId, now: Nanos) -> Option<BreakerView> {
        let slot = self.slot(row)?;
        let next_redial_at = (slot.waits)
            .then(|| self.redial.next_dial(slot.breaker.target()))
            .flatten()
            .map(|at| at.max(now));
        Some(slot.breaker.view(next_redial_at, self.leader_of(row)))
    }

    /// One of the row's windows as its breaker would judge it at `now`; `None` when it has none in
    /// memory (then [`evaluate`](crate::core::window::evaluate) with a floor of 0 says the same), and for
    /// [`WindowKind::None`].
    pub fn window_stats(
        &self,
        row: RowId,
        kind: WindowKind,
        window: &CallWindow,
        last_seq: u64,
        now: Nanos,
    ) -> Option<WindowStats> {
        let breaker = &self.slot(row)?.breaker;
        breaker.window_stats(kind, window, last_seq, now)
    }

    /// Whether the row may be evicted. Open and forced ones may not; a half-open one may, since
    /// without calls it stays half-open and would keep its place in the table for ever.
    pub fn evictable(&self, row: RowId) -> bool {
        match self.state(row) {
            None | Some(State::Closed | State::HalfOpen) => true,
            Some(State::Open | State::ForcedOpen | State::ForcedClosed) => false,
        }
    }
}
