//! What happens to a breaker: one method for each event, and each looks at every state.

use std::sync::Arc;

use agent_common::{CallWindow, ramp};

use super::{Breaker, DISTRUST, Server, Step};
use crate::core::groups::Full;
use crate::core::scope::Follows;
use crate::core::{
    Action, BreakerSettings, Bypass, Nanos, ProbeOutcome, Reason, State, WindowKind,
};

impl Breaker {
    /// Changed numbers apply from now on; the state stays, and a cooldown that runs ends as it
    /// would have. Switched off: an open or half-open breaker closes.
    pub(in crate::core) fn configure(
        &mut self,
        settings: Arc<BreakerSettings>,
        step: &mut Step<'_>,
    ) {
        let old = std::mem::replace(&mut self.settings, settings);
        // Growth is kept within the new bounds; without growth the new base applies.
        self.cooldown = if self.cooldown <= old.cooldown {
            self.settings.cooldown
        } else {
            self.cooldown
                .clamp(self.settings.cooldown, self.settings.cooldown_cap())
        };
        match self.state {
            State::Closed => {
                self.heard = step.now;
                if self.ramps() && !self.settings.enabled {
                    self.end_ramp(step);
                } else if self.ramps() && old.errno != self.settings.errno {
                    self.write_verdict(step);
                }
            }
            State::Open | State::HalfOpen if !self.settings.enabled => {
                self.close(None, Nanos::ZERO, step);
            }
            State::HalfOpen if old.errno != self.settings.errno => self.begin_round(step),
            State::Open | State::ForcedOpen if old.errno != self.settings.errno => {
                self.set_verdict(step);
            }
            State::Open | State::HalfOpen | State::ForcedOpen | State::ForcedClosed => {}
        }
    }

    /// Something may have failed or been slow.
    pub(in crate::core) fn calls(
        &mut self,
        kind: WindowKind,
        last_seq: u64,
        window: &CallWindow,
        step: &mut Step<'_>,
    ) {
        let Some(index) = kind.index() else {
            return;
        };
        self.last_seqs[index] = self.last_seqs[index].max(last_seq);
        match self.state {
            State::Closed => {
                let Some(stats) = self.window_stats(kind, window, last_seq, step.now) else {
                    return;
                };
                if stats.failures > 0 || stats.consecutive > 0 || stats.slow_calls > 0 {
                    self.heard = step.now;
                }
                let hint = || {
                    let takes = self.settings.enabled && self.settings.consecutive_failures > 0;
                    let fails = kind == WindowKind::Connects && stats.consecutive > 0;
                    (step.hinted && takes && fails).then_some(Reason::HINTED)
                };
                let trip = stats.trip.or_else(hint);
                // A look at the other window says nothing of this one; the next failure does.
                let held = match (step.holds, step.full) {
                    (true, _) => Some(Bypass::Correlated),
                    (false, Some(_)) => Some(Bypass::MaxOpenShare),
                    (false, None) => None,
                };
                let bypassed = held.filter(|_| trip.is_some());
                let before = std::mem::replace(&mut self.bypassed, bypassed);
                if let (Some(reason), Some(group)) = (trip, step.full)
                    && bypassed == Some(Bypass::MaxOpenShare)
                    && before != bypassed
                {
                    let row = step.row;
                    step.out.push(Action::Bypassed { row, reason, group });
                }
                if let Some(reason) = trip
                    && held.is_none()
                {
                    let cooldown = if self.ramps() {
                        // The outage goes on.
                        self.grow(step)
                    } else {
                        self.outage_since = step.now;
                        self.cooldown
                    };
                    self.open(cooldown, reason, step);
                }
            }
            // The probe's own report decides.
            State::HalfOpen => {}
            State::Open | State::ForcedOpen | State::ForcedClosed => {}
        }
    }

    /// A probe slot was claimed, or found taken.
    pub(in crate::core) fn probe_started(&mut self, generation: u32, step: &mut Step<'_>) {
        match self.state {
            State::HalfOpen if generation == self.generation => self.slot_taken(step.now),
            State::Open if generation == self.generation && self.tries() => self.heard = step.now,
            State::HalfOpen
            | State::Closed
            | State::Open
            | State::ForcedOpen
            | State::ForcedClosed => {}
        }
    }

    /// A probe ended.
    pub(in crate::core) fn probe_ended(
        &mut self,
        generation: u32,
        outcome: ProbeOutcome,
        last_seqs: [u64; 2],
        step: &mut Step<'_>,
    ) {
        self.note_seqs(last_seqs);
        let outcome = match outcome {
            ProbeOutcome::Unanswered if !self.says_nothing() => ProbeOutcome::Failure,
            outcome => outcome,
        };
        match (self.state, outcome) {
            (State::HalfOpen | State::Open, _) if generation != self.generation => {}
            (State::HalfOpen, ProbeOutcome::Success) => {
                self.slot_taken(step.now);
                self.used += 1;
                self.succeeded(last_seqs, step);
            }
            (State::HalfOpen, ProbeOutcome::Failure) => {
                let goes_on = self.is_seldom() && self.is_quick(step.now);
                let cooldown = self.grow(step);
                if self.by_redial {
                    self.misled = self.misled.saturating_add(1);
                }
                if self.misled > 0 {
                    let distrust = DISTRUST.times(1 << self.misled.min(63));
                    self.distrust_until = step.now + distrust;
                }
                let reason = Reason::probe_failed(self.reason.window);
                let (seldom, refusals) = (self.seldom, self.refusals);
                self.open(cooldown, reason, step);
                if goes_on {
                    self.counts_refusals = true;
                    self.seldom = seldom;
                    self.refusals = refusals;
                    self.begin_trial(step);
                }
            }
            // Takes no slot, so it begins no lease.
            (State::HalfOpen, ProbeOutcome::Returned) => self.heard = step.now,
            // It still has its slot.
            (State::HalfOpen, ProbeOutcome::Unanswered) => self.begin_round(step),
            (State::Open, ProbeOutcome::Success) if self.tries() => {
                self.half_open(false, step);
                self.succeeded(last_seqs, step);
            }
            (State::Open, ProbeOutcome::Failure) if self.tries() && self.still_seldom(step.now) => {
                self.begin_trial(step);
            }
            (State::Open, ProbeOutcome::Failure) if self.tries() => {
                self.used = 0;
                self.seldom = 0;
                self.set_verdict(step);
            }
            (State::Open, ProbeOutcome::Unanswered) if self.tries() => {
                self.used = 0;
                self.set_verdict(step);
            }
            // A trial that said nothing: its slot is free for the next one.
            (State::Open, _) => {}
            (State::Closed | State::ForcedOpen | State::ForcedClosed, _) => {}
        }
    }

    /// A probe or trial succeeded.
    pub(super) fn succeeded(&mut self, last_seqs: [u64; 2], step: &mut Step<'_>) {
        self.successes += 1;
        self.misled = 0;
        self.distrust_until = Nanos::ZERO;
        if self.successes >= self.settings.successes_needed() {
            self.close(Some(last_seqs), Nanos(ramp::LENGTH_NS), step);
        } else if self.used >= self.settings.probe_limit() {
            self.begin_round(step);
        }
    }

    /// A dial of the agent was answered, or not. An answer is ignored for a while after misleading ones.
    pub(in crate::core) fn redialled(&mut self, answered: bool, step: &mut Step<'_>) {
        if self.asks() {
            self.server = if answered {
                Server::There
            } else {
                Server::Gone
            };
        } else if answered && self.wants_redial() && step.now >= self.distrust_until {
            self.half_open(true, step);
        }
    }

    /// An operator's word: `to` is one of the forced states.
    pub(in crate::core) fn force(
        &mut self,
        to: State,
        until: Nanos,
        last_seqs: [u64; 2],
        step: &mut Step<'_>,
    ) {
        self.note_seqs(last_seqs);
        self.until = until;
        self.successes = 0;
        self.follows = Follows::Nobody;
        self.enter(to, Reason::MANUAL, step);
    }

    /// Too many endpoints of its name refuse, and this one is to be the one less.
    pub(in crate::core) fn give_way(&mut self, group: Full, step: &mut Step<'_>) {
        if self.ramps() {
            self.end_ramp(step);
            return;
        }
        self.close(None, Nanos::ZERO, step);
        self.bypassed = Some(Bypass::MaxOpenShare);
        step.out.push(Action::Bypassed {
            row: step.row,
            reason: Reason::NONE,
            group,
        });
    }

    /// No operator's word holds any more.
    pub(in crate::core) fn lift(&mut self, last_seqs: [u64; 2], step: &mut Step<'_>) {
        if matches!(self.state, State::ForcedOpen | State::ForcedClosed) {
            self.close(Some(last_seqs), Nanos::ZERO, step);
        }
    }

    /// Starts anew.
    pub(in crate::core) fn reset(&mut self, last_seqs: [u64; 2], step: &mut Step<'_>) {
        self.cooldown = self.settings.cooldown;
        match self.state {
            State::Closed => {
                self.empty_windows(Some(last_seqs), step.now);
                if self.ramps() {
                    self.end_ramp(step);
                }
            }
            State::Open | State::HalfOpen | State::ForcedOpen | State::ForcedClosed => {
                self.close(Some(last_seqs), Nanos::ZERO, step);
            }
        }
    }

    /// What time alone does. Safe to call at any time.
    pub(in crate::core) fn tick(&mut self, step: &mut Step<'_>) {
        match self.state {
            // At most 64 times: halving ends at the base or at nothing.
            State::Closed => {
                if self.ramps() && step.now >= self.until {
                    self.end_ramp(step);
                }
                while self.cooldown > self.settings.cooldown && step.now >= self.halve_at() {
                    self.healthy_since = self.halve_at();
                    self.cooldown = self.cooldown.half().max(self.settings.cooldown);
                }
            }
            State::Open if self.is_follower() => {}
            State::Open if step.now >= self.until => self.half_open(false, step),
            State::HalfOpen if step.now >= self.round_end() => self.begin_round(step),
            State::ForcedOpen | State::ForcedClosed if step.now >= self.until => {
                self.close(None, Nanos::ZERO, step);
            }
            State::Open | State::HalfOpen | State::ForcedOpen | State::ForcedClosed => {}
        }
    }
}
