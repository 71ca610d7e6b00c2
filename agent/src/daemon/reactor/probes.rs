//! What becomes of exchanges, as the core asks: failed ones, and probes.

use agent_common::{
    Event as KernelEvent,
    event::{
        EVENT_EXCHANGE, OUTCOME_ABANDONED, OUTCOME_CLOSED_EARLY, OUTCOME_ESTABLISHED,
        OUTCOME_GAVE_UP, OUTCOME_LOCAL, OUTCOME_RESET, OUTCOME_RESPONSE, OUTCOME_STATUS,
    },
};

use super::Worker;
use crate::{
    core::{Event, Nanos, ProbeOutcome, RowId, State},
    daemon::waiting::ProbeWaits,
};

impl Worker {
    /// A failure that is in a window, or of a row that is open.
    pub(super) fn exchange_failed(&mut self, row: RowId, event: &KernelEvent) {
        if event.flags & EVENT_EXCHANGE == 0
            || (event.seq == 0 && self.engine.state(row) != Some(State::Open))
        {
            return;
        }
        let is_broken = matches!(
            event.outcome,
            OUTCOME_CLOSED_EARLY | OUTCOME_RESET | OUTCOME_STATUS
        );
        self.handle(Event::ExchangeFailed {
            row,
            at: Nanos(event.at_ns),
            broken_after: is_broken.then(|| Nanos(event.elapsed_us.saturating_mul(1000))),
        });
    }

    /// A probe has ended.
    pub(super) fn probe_ended(&mut self, row: RowId, event: &KernelEvent) {
        let outcome = match event.outcome {
            OUTCOME_ESTABLISHED | OUTCOME_RESPONSE => ProbeOutcome::Success,
            OUTCOME_ABANDONED | OUTCOME_LOCAL => ProbeOutcome::Returned,
            OUTCOME_GAVE_UP if event.flags & EVENT_EXCHANGE != 0 && self.never_answered(row) => {
                ProbeOutcome::Unanswered
            }
            _ => ProbeOutcome::Failure,
        };
        let last_seqs = self.table.last_seqs(row.index);
        let generation = event.generation;
        self.handle(Event::ProbeEnded {
            row,
            generation,
            outcome,
            last_seqs,
        });
    }

    /// A probe waits for its answer.
    pub(super) fn probe_waits(&mut self, probe: &ProbeWaits) {
        let &ProbeWaits {
            row,
            generation,
            waited,
            answers_nobody,
        } = probe;
        if self.engine.contains(row) {
            let last_seqs = self.table.last_seqs(row.index);
            self.handle(Event::ProbeWaits {
                row,
                generation,
                waited,
                answers_nobody,
                last_seqs,
            });
        }
    }

    /// Whether the destination has never answered anybody.
    fn never_answered(&self, id: RowId) -> bool {
        self.table.owned(id).is_some_and(|row| row.responses == 0)
    }
}
