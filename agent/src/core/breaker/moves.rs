//! How a breaker moves: states, rounds, windows, and the verdict that goes with each.

use agent_common::Verdict;
use agent_common::verdict::{STATE_HALF_OPEN, STATE_RAMP, VERDICT_PROBE_BY_EXCHANGE};

use super::{
    Breaker, COOLDOWN_JITTER_PERCENT, IDLE_ROUND, ROUND_LEASES, Server, Step, VERDICT_SLACK,
};
use crate::core::scope::Follows;
use crate::core::{Action, Nanos, Reason, State, WindowKind};

impl Breaker {
    /// Open: whether a trial may pass, or is under way.
    pub(super) fn tries(&self) -> bool {
        self.state == State::Open && self.used > 0
    }

    /// Whether it has just closed and admits a share only.
    pub(in crate::core) fn ramps(&self) -> bool {
        self.state == State::Closed && self.until > Nanos::ZERO
    }

    /// Everything passes. The generation stays: calls under way are judged like those to come.
    pub(super) fn end_ramp(&mut self, step: &mut Step<'_>) {
        self.until = Nanos::ZERO;
        self.write_verdict(step);
    }

    /// Doubles the cooldown; returns it with its jitter.
    pub(super) fn grow(&mut self, step: &mut Step<'_>) -> Nanos {
        let cap = self.settings.cooldown_cap();
        self.cooldown = self.cooldown.times(2).min(cap);
        let cooldown = step.rng.jitter(self.cooldown, COOLDOWN_JITTER_PERCENT);
        cooldown.min(cap)
    }

    pub(super) fn open(&mut self, cooldown: Nanos, reason: Reason, step: &mut Step<'_>) {
        self.until = step.now + cooldown;
        self.successes = 0;
        self.used = 0;
        self.counts_refusals = false;
        self.seldom = 0;
        self.server = Server::Unknown;
        self.round_since = step.now;
        self.enter(State::Open, reason, step);
    }

    pub(super) fn half_open(&mut self, by_redial: bool, step: &mut Step<'_>) {
        self.by_redial = by_redial;
        self.successes = 0;
        self.start_round(step.now);
        self.enter(State::HalfOpen, Reason::NONE, step);
    }

    /// A fresh half-open verdict: all slots are free, late probes of the round before are void.
    pub(super) fn begin_round(&mut self, step: &mut Step<'_>) {
        self.start_round(step.now);
        self.set_verdict(step);
    }

    pub(super) fn start_round(&mut self, now: Nanos) {
        self.used = 0;
        self.round_since = now;
        self.lease_since = Nanos::MAX;
        self.until = self.idle_end() + self.lease().times(ROUND_LEASES);
    }

    pub(super) fn slot_taken(&mut self, now: Nanos) {
        self.lease_since = self.lease_since.min(now);
        self.heard = now;
    }

    /// How long a probe may take: until established, or until its first exchange is over.
    pub(super) fn lease(&self) -> Nanos {
        self.settings.lease(self.reason.window)
    }

    pub(super) fn halve_at(&self) -> Nanos {
        self.healthy_since + self.cooldown
    }

    pub(super) fn idle_end(&self) -> Nanos {
        self.round_since + IDLE_ROUND.max(self.lease())
    }

    /// Never after `until`, even if the lease was changed meanwhile: the verdict would run out.
    pub(super) fn round_end(&self) -> Nanos {
        let lease = self.lease();
        let end = if self.lease_since == Nanos::MAX {
            self.idle_end()
        } else {
            (self.heard + lease).min(self.lease_since + lease.times(ROUND_LEASES))
        };
        end.min(self.until)
    }

    /// With a ramp of that length; zero: none. Nor is there one where the other endpoints of its name
    /// leave no room for it.
    pub(super) fn close(&mut self, last_seqs: Option<[u64; 2]>, ramp: Nanos, step: &mut Step<'_>) {
        self.until = if ramp > Nanos::ZERO && step.full.is_none() {
            step.now + ramp
        } else {
            Nanos::ZERO
        };
        self.follows = Follows::Nobody;
        self.empty_windows(last_seqs, step.now);
        self.successes = 0;
        self.misled = 0;
        self.forget_broken(step.now);
        self.distrust_until = Nanos::ZERO;
        self.healthy_since = step.now;
        self.enter(State::Closed, Reason::NONE, step);
    }

    /// Nothing that happened until now counts any more, in either window. Without sequence numbers,
    /// time decides.
    pub(super) fn empty_windows(&mut self, last_seqs: Option<[u64; 2]>, now: Nanos) {
        self.note_seqs(last_seqs.unwrap_or_default());
        self.floor_at = if last_seqs.is_some() {
            Nanos::ZERO
        } else {
            now
        };
        self.floor_seqs = self.last_seqs;
        self.heard = now;
        self.bypassed = None;
    }

    pub(super) fn enter(&mut self, to: State, reason: Reason, step: &mut Step<'_>) {
        let from = std::mem::replace(&mut self.state, to);
        self.bypassed = None;
        // Half-open still shows why it opened, and is probed accordingly.
        if to != State::HalfOpen {
            self.reason = reason;
        }
        self.set_verdict(step);
        // A manual state that is prolonged is no transition.
        if from != to {
            self.since = step.now;
            step.out.push(Action::Transition {
                row: step.row,
                from,
                to,
                reason,
                generation: self.generation,
            });
        }
    }

    pub(super) fn set_verdict(&mut self, step: &mut Step<'_>) {
        self.generation = self.generation.wrapping_add(1);
        self.write_verdict(step);
    }

    /// The verdict of this generation.
    pub(super) fn write_verdict(&mut self, step: &mut Step<'_>) {
        let (state, until) = if self.ramps() {
            (STATE_RAMP, self.until)
        } else if self.tries() || self.follows == Follows::Offered {
            (STATE_HALF_OPEN, self.until + VERDICT_SLACK)
        } else if self.state.refuses() {
            (self.state.verdict_state(), self.until + VERDICT_SLACK)
        } else {
            (self.state.verdict_state(), Nanos::ZERO)
        };
        let by_exchange = state == STATE_HALF_OPEN && self.reason.window == WindowKind::Exchanges;
        let flags = if by_exchange {
            VERDICT_PROBE_BY_EXCHANGE
        } else {
            0
        };
        step.out.push(Action::SetVerdict {
            row: step.row,
            verdict: Verdict {
                generation: self.generation,
                errno: self.settings.errno,
                state,
                flags,
            },
            until,
            probe_limit: if self.tries() {
                1
            } else {
                self.settings.probe_limit()
            },
        });
    }

    pub(super) fn note_seqs(&mut self, seqs: [u64; 2]) {
        for (known, seq) in self.last_seqs.iter_mut().zip(seqs) {
            *known = seq.max(*known);
        }
    }
}
