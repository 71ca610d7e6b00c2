//! What the agent does around its core: it hears of calls and refusals, looks at rows that refuse, dials,
//! counts destinations, and carries out what is decided.

use std::{collections::HashSet, sync::Arc};

use super::{Replay, What, id};
use crate::{
    core::{
        Action, DialTarget, Event, Nanos, State, WindowKind, is_loopback, refusing::TOLD_EVERY,
    },
    daemon::view,
    replay::{read::timestamp, report::Transition},
};

/// A dial ends after this.
const DIAL: Nanos = Nanos::from_millis(1);
/// A dial that the recording says was not answered was made at most this much earlier.
const DIAL_DISORDER: Nanos = Nanos::from_millis(1200);
/// While connects fail, the agent counts the destinations with traffic this often.
const TRAFFIC_EVERY: Nanos = Nanos::from_millis(500);
/// Traffic is a connect within this time.
const TRAFFIC_WITHIN: Nanos = Nanos::from_secs(60);

impl Replay<'_> {
    /// A deadline of the core's, or a look at rows that refuse.
    pub(super) fn wake(&mut self, now: Nanos) {
        if self.engine.next_deadline().is_some_and(|at| at <= now) {
            self.engine.handle(Event::Deadline, now, &mut self.actions);
        }
        let engine = &self.engine;
        let is_open = |row| engine.state(row) == Some(State::Open);
        for row in self.refusing.due(now, is_open) {
            let refused = self.rows[row.index as usize].refused_total;
            let event = Event::Refused { row, refused };
            self.engine.handle(event, now, &mut self.actions);
        }
        self.perform(now);
    }

    pub(super) fn dial_ended(&mut self, target: DialTarget, success: bool, at: Nanos) {
        let event = Event::DialEnded { target, success };
        self.engine.handle(event, at, &mut self.actions);
    }

    /// Hands the core a row's window.
    pub(super) fn look(&mut self, index: usize, kind: WindowKind, at: Nanos) {
        self.known(index, at);
        if let Some(event) = self.rows[index].shadow.calls(id(index), kind) {
            self.engine.handle(event, at, &mut self.actions);
        }
    }

    /// The row has refused so many more, of which the kernel tells now and then.
    pub(super) fn refused(&mut self, index: usize, count: u64, at: Nanos) {
        let row = &mut self.rows[index];
        row.refused_total += count;
        if row.refused_told.is_some_and(|told| at - told < TOLD_EVERY) {
            return;
        }
        row.refused_told = Some(at);
        let refused = row.refused_total;
        let row = id(index);
        self.handle(index, Event::Refused { row, refused }, at);
        if self.engine.state(row) == Some(State::Open) {
            self.refusing.heard(row, at);
        }
    }

    pub(super) fn handle(&mut self, index: usize, event: Event<'static>, at: Nanos) {
        self.known(index, at);
        self.engine.handle(event, at, &mut self.actions);
    }

    /// Brings the row's breaker into memory.
    pub(super) fn known(&mut self, index: usize, at: Nanos) {
        if !self.engine.contains(id(index)) {
            let row = &self.rows[index];
            let event = Event::Configure {
                row: id(index),
                target: row.target,
                settings: Arc::clone(&row.settings),
                generation: row.shadow.generation(),
            };
            self.engine.handle(event, at, &mut self.actions);
        }
    }

    /// Tells the core how many destinations have traffic.
    pub(super) fn count_traffic(&mut self, at: Nanos) {
        if at - self.counted_at < TRAFFIC_EVERY && self.counted_at > Nanos::ZERO {
            return;
        }
        self.counted_at = at;
        let active = self.rows.iter().filter(|row| {
            row.last_connect
                .is_some_and(|last| at - last <= TRAFFIC_WITHIN)
                && !is_loopback(&row.target.addr)
        });
        let places = active.map(|row| (row.target.addr, row.target.ifindex, row.target.port_be));
        let places: HashSet<_> = places.collect();
        self.engine.traffic(places.len(), at, &mut self.actions);
    }

    pub(super) fn perform(&mut self, now: Nanos) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::SetVerdict {
                    row,
                    verdict,
                    until,
                    probe_limit,
                } => {
                    let row = &mut self.rows[row.index as usize];
                    row.shadow.set(verdict, until, probe_limit);
                }
                Action::Transition {
                    row,
                    from,
                    to,
                    reason,
                    generation,
                } => {
                    let report = &mut self.rows[row.index as usize].report;
                    report.transitions += 1;
                    self.transitions.push(Transition {
                        time: timestamp(now),
                        destination: report.destination.clone(),
                        workload: report.workload.clone(),
                        netns: report.netns,
                        from: view::state(from),
                        to: view::state(to),
                        reason: view::reason(reason),
                        generation,
                    });
                }
                Action::Dial { target } => {
                    let answered = self.would_answer(target, now);
                    let row = self.rows.iter().position(|row| row.target == target);
                    if let Some(row) = row {
                        self.push(now + DIAL, row, 0, 0, What::DialEnds { answered });
                    }
                }
                Action::Bypassed { .. } | Action::Correlated(_) | Action::Redialled { .. } => {}
            }
        }
    }

    /// Whether a dial would be answered: as the last connect or recorded dial, unless one was recorded
    /// a moment later that was not.
    pub(super) fn would_answer(&self, target: DialTarget, now: Nanos) -> bool {
        let recorded = self.redials.get(&target).map_or(&[][..], Vec::as_slice);
        let next = recorded.partition_point(|(at, _)| *at < now);
        let soon = recorded
            .get(next)
            .filter(|(at, _)| *at <= now + DIAL_DISORDER);
        if soon.is_some_and(|(_, answered)| !answered) {
            return false;
        }
        self.reachable.get(&target).copied().unwrap_or(false)
    }
}
