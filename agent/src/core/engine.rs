//! All breakers, their timers and the dial schedules.
//!
//! Cost: an event is a hash look-up, the breaker's step (128 window entries at most), and where its
//! timer moves forward, two operations on an ordered set. A timer that moves back is left where it
//! is and set anew when it fires, so traffic that fails now and then moves nothing. One call handles
//! at most [`MAX_DUE_PER_CALL`] timers; what is left shows in [`Engine::next_deadline`].
//!
//! Order does not depend on hash maps: they are looked up in, never walked.

mod looks;
mod together;

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::Arc,
};

use agent_common::CallWindow;

use super::breaker::{Breaker, Step};
use super::correlated::{Correlated, Correlation, Traffic, Workload};
use super::groups::{Groups, Refusal};
use super::hints::{Hints, Place};
use super::redial::Redial;
use super::rng::SplitMix64;
use super::scope::Scopes;
use super::{
    Action, BreakerSettings, DialTarget, Event, Full, GroupId, Nanos, RowId, Saved, State,
    WindowKind,
};

/// Timers handled by one [`Event::Deadline`], and dials as well.
const MAX_DUE_PER_CALL: usize = 512;

/// The breakers of a node.
pub struct Engine {
    /// By index: an index has one owner at a time. Boxed, because a hash map keeps up to half of its
    /// places empty.
    breakers: HashMap<u32, Box<Slot>>,
    /// One entry per breaker, at its deadline or before.
    timers: BTreeSet<(Nanos, u32)>,
    redial: Redial,
    correlation: Correlation,
    hints: Hints,
    scopes: Scopes,
    groups: Groups,
    /// Groups whose members' shares have changed.
    to_be_counted: BTreeSet<GroupId>,
    rng: SplitMix64,
    /// The scope whose members are being brought in line just now,
    keeping_together: Option<Place>,
    /// and those that have to be, after it.
    to_keep_together: Vec<Place>,
    /// Latest time seen: an earlier one is taken for this.
    now: Nanos,
    /// Row indices of the call under way; kept for its capacity.
    scratch: Vec<u32>,
}

struct Slot {
    incarnation: u32,
    /// Whose row it is.
    workload: Workload,
    /// Whether it waits for its target in `redial`.
    waits: bool,
    /// Whether it is counted in `hints`.
    hints: bool,
    /// What it is counted as in `groups`.
    counted: Refusal,
    /// Whether it is a member in `scopes`.
    shares: bool,
    breaker: Breaker,
    /// Its entry in `timers`; [`NO_TIMER`]: it has none.
    timer: Nanos,
}

/// No deadline is that late.
const NO_TIMER: Nanos = Nanos::MAX;

impl Engine {
    /// An engine without breakers; all jitter comes from the seed.
    pub fn new(seed: u64) -> Self {
        Self {
            breakers: HashMap::new(),
            timers: BTreeSet::new(),
            redial: Redial::default(),
            correlation: Correlation::default(),
            hints: Hints::default(),
            scopes: Scopes::default(),
            groups: Groups::default(),
            to_be_counted: BTreeSet::new(),
            rng: SplitMix64::new(seed),
            keeping_together: None,
            to_keep_together: Vec::new(),
            now: Nanos::ZERO,
            scratch: Vec::new(),
        }
    }

    /// Handles one event and appends what is to be done.
    ///
    /// A row's own timer is looked at before its event, so an event that comes after a deadline
    /// meets the state after it. Time that goes backwards stands still instead.
    pub fn handle(&mut self, event: Event<'_>, now: Nanos, out: &mut Vec<Action>) {
        self.now = self.now.max(now);
        match event {
            Event::Configure {
                row,
                target,
                settings,
                generation,
            } => {
                if !self.make_room(row, out) {
                    return;
                }
                if self.contains(row) {
                    self.step(row, out, |b, step| b.configure(settings, step));
                    // Its share may be less now. Not at once: a reload configures one row after the other,
                    // and which of them gives way is to be decided by all of their new shares.
                    self.to_be_counted.extend(self.groups.of(row.index));
                    return;
                }
                let breaker = Breaker::new(target, settings, generation, self.now);
                self.insert(row, breaker);
                self.share(row.index, out);
            }
            Event::Calls {
                row,
                kind,
                last_seq,
                window,
            } => {
                if kind == WindowKind::Connects {
                    self.note_failure(row, last_seq, window, out);
                }
                self.step(row, out, |b, step| b.calls(kind, last_seq, window, step));
            }
            Event::ProbeStarted { row, generation } => {
                self.claimed(row, generation, out);
                self.step(row, out, |b, step| b.probe_started(generation, step));
            }
            Event::ProbeEnded {
                row,
                generation,
                outcome,
                last_seqs,
            } => {
                self.claimed(row, generation, out);
                self.step(row, out, |b, step| {
                    b.probe_ended(generation, outcome, last_seqs, step);
                });
            }
            Event::ExchangeFailed {
                row,
                at,
                broken_after,
            } => self.step(row, out, |b, _| b.exchange_failed(at, broken_after)),
            Event::ProbeWaits {
                row,
                generation,
                waited,
                answers_nobody,
                last_seqs,
            } => {
                self.claimed(row, generation, out);
                self.step(row, out, |b, step| {
                    b.probe_waits(generation, waited, answers_nobody, last_seqs, step);
                });
            }
            Event::Refused { row, refused } => {
                self.step(row, out, |b, step| b.refused(refused, step));
            }
            Event::DialEnded { target, success } => self.dial_ended(target, success, out),
            Event::Trip {
                row,
                until,
                last_seqs,
            } => self.step(row, out, |b, step| {
                b.force(State::ForcedOpen, until, last_seqs, step);
            }),
            Event::HoldClosed {
                row,
                until,
                last_seqs,
            } => self.step(row, out, |b, step| {
                b.force(State::ForcedClosed, until, last_seqs, step);
            }),
            Event::Reset { row, last_seqs } => {
                // One that follows is open for the leader's sake: what is shared starts anew.
                if let Some(leader) = self.leader_of(row) {
                    self.step(leader, out, |b, step| b.reset_for_all(step));
                }
                self.step(row, out, |b, step| b.reset(last_seqs, step));
            }
            Event::Lift { row, last_seqs } => {
                self.step(row, out, |b, step| b.lift(last_seqs, step));
            }
            Event::Groups { endpoints } => self.regroup(endpoints, out),
            Event::Forget { row } => {
                if self.slot(row).is_some() {
                    self.remove(row.index, out);
                }
                let left = self.groups.forget(row);
                self.keep_shares(&left, out);
            }
            Event::Deadline => self.deadline(out),
        }
    }

    /// Gives a row that has no breaker yet the one that an earlier agent has saved. Where the agent
    /// dials, it does so at once: what was true then may not be true any more. No transition comes of
    /// it. A row that has a breaker keeps it.
    pub fn restore(
        &mut self,
        row: RowId,
        target: DialTarget,
        settings: Arc<BreakerSettings>,
        saved: &Saved,
        now: Nanos,
        out: &mut Vec<Action>,
    ) {
        self.now = self.now.max(now);
        if self.contains(row) || !self.make_room(row, out) {
            return;
        }
        let breaker = Breaker::new(target, settings, saved.generation, self.now);
        self.insert(row, breaker);
        self.step(row, out, |b, step| b.restore(saved, step));
        self.redial.hurry(target, self.now);
    }

    /// Whose row it is: correlated failures are judged by workload, too. To be said whenever the row has
    /// come by a breaker ([`Event::Configure`], [`Engine::restore`]); without it, the row is one of
    /// workload 0.
    pub fn belongs(&mut self, row: RowId, workload: Workload) {
        if let Some(slot) = self.breakers.get_mut(&row.index)
            && slot.incarnation == row.incarnation
        {
            slot.workload = workload;
        }
    }

    /// So many destinations (addresses and ports, loopback apart) had traffic in the last minute. To be
    /// said at least every second while connects fail. A mere number: workloads are not told apart.
    pub fn traffic(&mut self, traffic: impl Into<Traffic>, now: Nanos, out: &mut Vec<Action>) {
        self.now = self.now.max(now);
        let change = self.correlation.count(traffic.into(), self.now);
        self.correlated(change, out);
    }

    fn slot(&self, row: RowId) -> Option<&Slot> {
        self.breakers
            .get(&row.index)
            .map(AsRef::as_ref)
            .filter(|slot| slot.incarnation == row.incarnation)
    }

    fn insert(&mut self, row: RowId, breaker: Breaker) {
        let slot = Slot {
            incarnation: row.incarnation,
            workload: 0,
            waits: false,
            hints: false,
            counted: Refusal::default(),
            shares: false,
            breaker,
            timer: NO_TIMER,
        };
        self.breakers.insert(row.index, Box::new(slot));
        self.settle(row.index);
    }

    /// Gives up a former owner of the row's index. False when the row itself is a former owner.
    fn make_room(&mut self, row: RowId, out: &mut Vec<Action>) -> bool {
        let Some(slot) = self.breakers.get(&row.index) else {
            return true;
        };
        if slot.incarnation == row.incarnation {
            return true;
        }
        // Incarnations wrap: the newer one is less than half the circle ahead.
        let incarnation = slot.incarnation;
        let newer = row.incarnation.wrapping_sub(incarnation) < 1 << 31;
        if newer {
            self.remove(row.index, out);
            let index = row.index;
            self.groups.forget(RowId { index, incarnation });
        }
        newer
    }

    /// Ticks a row's breaker, lets it handle an event and keeps timer and schedule in line.
    fn step(
        &mut self,
        row: RowId,
        out: &mut Vec<Action>,
        event: impl FnOnce(&mut Breaker, &mut Step<'_>),
    ) {
        let Some(slot) = self
            .breakers
            .get_mut(&row.index)
            .filter(|slot| slot.incarnation == row.incarnation)
        else {
            return;
        };
        let hinted = !slot.hints && self.hints.has(slot.breaker.target());
        let full = self.groups.full(row.index, slot.breaker.max_open_share());
        let mut step = Step {
            row,
            now: self.now,
            rng: &mut self.rng,
            holds: self.correlation.holds(slot.workload),
            hinted,
            full,
            out,
        };
        slot.breaker.tick(&mut step);
        event(&mut slot.breaker, &mut step);
        if self.settle(row.index) {
            self.keep_shares_of(row.index, out);
        }
        self.share(row.index, out);
    }

    fn step_index(
        &mut self,
        index: u32,
        out: &mut Vec<Action>,
        event: impl FnOnce(&mut Breaker, &mut Step<'_>),
    ) {
        if let Some(slot) = self.breakers.get(&index) {
            let incarnation = slot.incarnation;
            self.step(RowId { index, incarnation }, out, event);
        }
    }

    /// The last connect of a row failed a moment ago: it may be one of many.
    fn note_failure(
        &mut self,
        row: RowId,
        last_seq: u64,
        window: &CallWindow,
        out: &mut Vec<Action>,
    ) {
        let Some(slot) = self.slot(row) else {
            return;
        };
        let (target, workload) = (slot.breaker.target(), slot.workload);
        let entry = window.entries[agent_common::window::slot(last_seq)];
        let call = agent_common::window::decode(entry, last_seq, self.now.0);
        if let Some(call) = call.filter(|call| call.failed) {
            let at = Nanos(call.at_ns);
            let change = self.correlation.failed(target, workload, at, self.now);
            self.correlated(change, out);
        }
    }

    /// Says so, and lets go of what is held back no more.
    fn correlated(&mut self, change: Option<Correlated>, out: &mut Vec<Action>) {
        out.extend(change.map(Action::Correlated));
        let released = self.correlation.released();
        if released.is_empty() {
            return;
        }
        let released: HashSet<Workload> = released.into_iter().collect();
        for slot in self.breakers.values_mut() {
            if released.contains(&slot.workload) {
                slot.breaker.released();
            }
        }
    }

    fn dial_ended(&mut self, target: DialTarget, success: bool, out: &mut Vec<Action>) {
        self.redial.ended(target);
        let mut rows = std::mem::take(&mut self.scratch);
        rows.clear();
        self.redial.rows(target, &mut rows);
        let asks = |index: &u32| {
            self.breakers
                .get(index)
                .is_some_and(|slot| slot.breaker.asks())
        };
        if let Some(&index) = rows.first()
            && (success || rows.iter().any(asks))
            && let Some(slot) = self.breakers.get(&index)
        {
            let incarnation = slot.incarnation;
            let row = RowId { index, incarnation };
            let answered = success;
            out.push(Action::Redialled { row, answered });
        }
        for &index in &rows {
            self.step_index(index, out, |b, step| b.redialled(success, step));
        }
        self.scratch = rows;
    }

    fn deadline(&mut self, out: &mut Vec<Action>) {
        // All due timers are taken out first, so that one that is due again at once cannot keep
        // others waiting.
        let mut due = std::mem::take(&mut self.scratch);
        due.clear();
        while due.len() < MAX_DUE_PER_CALL
            && let Some(&(at, index)) = self.timers.first()
            && at <= self.now
        {
            self.timers.pop_first();
            if let Some(slot) = self.breakers.get_mut(&index) {
                slot.timer = NO_TIMER;
                due.push(index);
            }
        }
        for &index in &due {
            let now = self.now;
            let mut quiet = false;
            self.step_index(index, out, |b, _| quiet = b.is_quiet(now));
            if quiet {
                self.remove(index, out);
            }
        }
        self.scratch = due;
        if self.correlation.deadline().is_some_and(|at| at <= self.now) {
            let change = self.correlation.look(self.now);
            self.correlated(change, out);
        }
        let groups: Vec<GroupId> = std::mem::take(&mut self.to_be_counted)
            .into_iter()
            .collect();
        self.keep_shares(&groups, out);
        self.redial
            .run(self.now, MAX_DUE_PER_CALL, &mut self.rng, out);
    }

    /// Brings timer and dial schedule in line with a breaker that may have moved; whether it refuses now in
    /// another way than before.
    fn settle(&mut self, index: u32) -> bool {
        let Some(slot) = self.breakers.get_mut(&index) else {
            return false;
        };
        let b = &slot.breaker;
        // Never has no timer.
        let due = b.deadline();
        if due < slot.timer {
            if slot.timer != NO_TIMER {
                self.timers.remove(&(slot.timer, index));
            }
            self.timers.insert((due, index));
            slot.timer = due;
        }
        let wanted = b.wants_redial();
        if wanted && !slot.waits {
            self.redial
                .join(b.target(), index, b.outage_since(), self.now, &mut self.rng);
            if b.asks() {
                self.redial.hurry(b.target(), self.now);
            }
        } else if slot.waits && !wanted {
            self.redial.leave(b.target(), index);
        }
        slot.waits = wanted;
        let hints = slot.breaker.gives_hints();
        if hints != slot.hints {
            slot.hints = hints;
            self.hints.change(slot.breaker.target(), hints);
        }
        let is = slot.breaker.refusal();
        let was = std::mem::replace(&mut slot.counted, is);
        if is != was {
            self.groups.change(index, is);
        }
        is != was && is != Refusal::None
    }

    fn remove(&mut self, index: u32, out: &mut Vec<Action>) {
        let Some(slot) = self.breakers.remove(&index) else {
            return;
        };
        if slot.timer != NO_TIMER {
            self.timers.remove(&(slot.timer, index));
        }
        if slot.waits {
            self.redial.leave(slot.breaker.target(), index);
        }
        if slot.hints {
            self.hints.change(slot.breaker.target(), false);
        }
        self.groups.change(index, Refusal::default());
        if slot.shares {
            let place = slot.breaker.place();
            self.scopes.leave(place, index);
            self.keep_together(place, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What docs/COST.md says of the agent's memory rests on it.
    #[test]
    fn a_breaker_is_small() {
        assert!(size_of::<Slot>() <= 232, "{}", size_of::<Slot>());
    }
}
