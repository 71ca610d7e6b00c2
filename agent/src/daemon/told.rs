//! Refusals, held connects and spent budgets as events: what [`super::refusals`] says is to be told.

use agent_common::{
    EventKind, Row as KernelRow,
    event::{
        EVENT_HELD_SPIN, EVENT_LIMIT, EVENT_RETRY_BUDGET, EVENT_RETRY_DEADLINE, EVENT_RETRY_LIMIT,
        EVENT_WOULD,
    },
};

use super::{
    journal::WallClock,
    node::{Node, netns},
    refusals::{self, Counts, Sort, TOLD, Who},
    view,
};
use crate::{
    control::api::{self, Event, Timestamp},
    core::{Nanos, RowId, State},
    kernel::{clock, events::comm},
};

impl Node {
    /// The kernel reports a refusal or a held connect.
    pub(super) fn refused(&mut self, id: RowId, event: &agent_common::Event) {
        let Some(row) = self.shown(id) else { return };
        let retries = self.table.retries(id.index);
        let counts = refusals::counts(&row, &retries);
        let (sort, reason) = what(event);
        let Some(place) = refusals::place(sort, reason) else {
            return;
        };
        let who = Who {
            pid: event.pid,
            comm: event.comm,
            generation: event.generation,
        };
        let at = Nanos(event.at_ns);
        let told = self.refusals.reported(id, &counts, place, at, who);
        let hold_ms = (sort == Sort::Held).then_some(u64::from(event.timeout_ms));
        self.tell(id, &row, &told, WallClock::read().at(at), hold_ms);
    }

    /// Rows whose second is over.
    pub(super) fn tell_refusals(&mut self, now: Nanos) {
        for id in self.refusals.due(now) {
            match self.shown(id) {
                Some(_) => self.tell_rest(id, Timestamp::now()),
                None => self.refusals.forget(id),
            }
            self.refilled(id, now);
        }
    }

    /// What of a row's refusals was not told yet.
    pub(super) fn tell_rest(&mut self, id: RowId, time: Timestamp) {
        let Some(row) = self.shown(id) else { return };
        let counts = refusals::counts(&row, &self.table.retries(id.index));
        let told = self.refusals.rest(id, &counts, clock::now());
        self.tell(id, &row, &told, time, None);
    }

    /// As [`Node::tell_rest`], before the breaker leaves a state. What it refuses once it has opened may be
    /// counted already, and is not of the time before.
    pub(super) fn tell_before(&mut self, id: RowId, from: State, time: Timestamp) {
        let Some(row) = self.shown(id) else { return };
        let mut counts = refusals::counts(&row, &self.table.retries(id.index));
        if !from.refuses() {
            counts = self.refusals.without_breaker(id, counts);
        }
        let told = self.refusals.rest(id, &counts, clock::now());
        self.tell(id, &row, &told, time, None);
    }

    /// As [`Node::tell_rest`], of all rows: reports may have been lost, or the agent ends.
    pub(super) fn tell_all(&mut self) {
        let rows: Vec<RowId> = self.table.used().map(|(id, _)| id).collect();
        for id in rows {
            self.tell_rest(id, Timestamp::now());
            self.tell_repeated_rest(id);
        }
    }

    fn tell(
        &mut self,
        id: RowId,
        row: &KernelRow,
        told: &Counts,
        time: Timestamp,
        hold_ms: Option<u64>,
    ) {
        if told.iter().all(|count| *count == 0) {
            return;
        }
        let destination = view::destination(id, row);
        let workload = view::workload(id, row, &mut self.names);
        let mut by_budget = None;
        for (&(sort, reason), &count) in TOLD.iter().zip(told).filter(|(_, count)| **count > 0) {
            let who = self.refusals.who(id, sort);
            let mode = match sort {
                Sort::WouldReject => api::Mode::Observe,
                Sort::Rejected | Sort::Held => api::Mode::Enforce,
            };
            if reason == "retry_budget" {
                by_budget = Some(mode);
            }
            let (destination, workload) = (destination.clone(), workload.clone());
            let (pid, comm) = (who.pid, comm(&who.comm));
            let event = match sort {
                Sort::Held => Event::Held {
                    destination,
                    workload,
                    netns: netns(row),
                    reason: reason.to_owned(),
                    count,
                    hold_ms,
                    pid,
                    comm,
                },
                Sort::Rejected | Sort::WouldReject => Event::Rejected {
                    destination,
                    workload,
                    netns: netns(row),
                    reason: reason.to_owned(),
                    count,
                    pid,
                    comm,
                    mode,
                    generation: who.generation,
                },
            };
            self.journal.publish(time, event);
        }
        if let Some(mode) = by_budget {
            self.spent(id, row, time, mode);
        }
    }

    /// The budget has refused retries.
    fn spent(&mut self, id: RowId, row: &KernelRow, time: Timestamp, mode: api::Mode) {
        let policy = self.plan.retry(row.settings.policy);
        let now = clock::now();
        let retries = self.table.retries(id.index);
        let left = view::tokens(&self.plan, row, retries, now).unwrap_or(0);
        // With backoff, too many held connects count as a spent budget.
        if policy.backoff_base_ms != 0 && left > 0 {
            return;
        }
        if self.refusals.spent(id, now) {
            let event = self.budget(id, row, true, mode);
            self.journal.publish(time, event);
        }
    }

    /// A budget that was said to be spent has refused nothing for a window.
    fn refilled(&mut self, id: RowId, now: Nanos) {
        let Some(row) = self.shown(id) else { return };
        let window = Nanos(self.plan.retry(row.settings.policy).window_ns);
        if self.refusals.refilled(id, now, window) {
            let mode = self.api_mode();
            let event = self.budget(id, &row, false, mode);
            self.say(event);
        }
    }

    fn budget(&mut self, id: RowId, row: &KernelRow, exhausted: bool, mode: api::Mode) -> Event {
        let retries = self.table.retries(id.index);
        let tokens = view::tokens(&self.plan, row, retries, clock::now()).unwrap_or(0);
        Event::RetryBudget {
            destination: view::destination(id, row),
            workload: view::workload(id, row, &mut self.names),
            netns: netns(row),
            exhausted,
            ratio: view::share(retries.total(), row.attempts).min(1.0),
            #[expect(clippy::cast_precision_loss, reason = "only shown")]
            budget_tokens: tokens as f64,
            mode,
        }
    }
}

/// Which number an event of the kernel speaks of.
fn what(event: &agent_common::Event) -> (Sort, &'static str) {
    if event.kind == EventKind::HELD {
        let spins = event.flags & EVENT_HELD_SPIN != 0;
        return (Sort::Held, if spins { "spin" } else { "backoff" });
    }
    let reasons = [
        (EVENT_RETRY_BUDGET, "retry_budget"),
        (EVENT_RETRY_LIMIT, "retry_limit"),
        (EVENT_RETRY_DEADLINE, "deadline"),
        (EVENT_LIMIT, "limit"),
    ];
    let reason = reasons.iter().find(|(flag, _)| event.flags & flag != 0);
    let sort = match event.flags & EVENT_WOULD {
        0 => Sort::Rejected,
        _ => Sort::WouldReject,
    };
    (sort, reason.map_or("breaker", |(_, reason)| reason))
}
