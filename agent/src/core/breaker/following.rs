//! A breaker that shares with those of other workloads: what it does as leader, and as follower
//! ([`crate::core::scope`]).

use agent_common::ramp;

use super::{Breaker, Server, Step};
use crate::core::hints::{Place, is_shared, place};
use crate::core::scope::{Follows, Lead, Round};
use crate::core::{Action, Nanos, Reason, SharedProbe, State};

impl Breaker {
    /// Whether it is one of those that share.
    pub(in crate::core) fn shares_scope(&self) -> bool {
        self.settings.node_scope && self.settings.enabled && is_shared(&self.target.addr)
    }

    pub(in crate::core) fn place(&self) -> Place {
        place(self.target)
    }

    /// Whether it is open because another one is.
    pub(in crate::core) fn is_follower(&self) -> bool {
        self.follows != Follows::Nobody
    }

    /// Whether it offers a probe slot for its leader, under this generation.
    pub(in crate::core) fn offers(&self, generation: u32) -> bool {
        self.follows == Follows::Offered && self.generation == generation
    }

    /// What becomes of its connects while the one that it follows is half-open.
    pub(in crate::core) fn shared_probe(&self) -> Option<SharedProbe> {
        match self.follows {
            Follows::Offered => Some(SharedProbe::Free),
            Follows::Withdrawn => Some(SharedProbe::Taken),
            Follows::Nobody | Follows::Open => None,
        }
    }

    /// What others are to do, if it is open by itself.
    pub(in crate::core) fn lead(&self) -> Option<Lead> {
        let follows = match self.state {
            _ if self.is_follower() => return None,
            State::Open => Follows::Open,
            State::HalfOpen if self.lease_since == Nanos::MAX && self.used == 0 => Follows::Offered,
            State::HalfOpen => Follows::Withdrawn,
            State::Closed | State::ForcedOpen | State::ForcedClosed => return None,
        };
        Some(Lead {
            follows,
            reason: self.reason,
            until: self.until,
            cooldown: self.cooldown,
            misled: self.misled,
            distrust_until: self.distrust_until,
            outage_since: self.outage_since,
        })
    }

    /// Whether it has just been found healthy, and has not merely given way.
    pub(in crate::core) fn has_healed(&self) -> bool {
        self.state == State::Closed && self.bypassed.is_none()
    }

    /// The round under way.
    pub(in crate::core) fn round(&self) -> Round {
        Round {
            since: self.round_since,
            successes: self.successes,
            by_redial: self.by_redial,
        }
    }

    /// Does what the leader does, unless an operator has said otherwise.
    pub(in crate::core) fn follow(&mut self, lead: &Lead, step: &mut Step<'_>) {
        if matches!(self.state, State::ForcedOpen | State::ForcedClosed) {
            return;
        }
        let as_before = (self.follows, self.until) == (lead.follows, lead.until);
        self.cooldown = lead
            .cooldown
            .clamp(self.settings.cooldown, self.settings.cooldown_cap());
        self.misled = lead.misled;
        self.distrust_until = lead.distrust_until;
        self.outage_since = lead.outage_since;
        if as_before {
            return;
        }
        let was_half_open = self.state == State::HalfOpen || self.shared_probe().is_some();
        let since = self.since;
        self.follows = lead.follows;
        self.until = lead.until;
        self.successes = 0;
        self.used = 0;
        self.counts_refusals = false;
        self.seldom = 0;
        self.server = Server::Unknown;
        self.round_since = step.now;
        if self.state == State::Open {
            self.reason = lead.reason;
            self.set_verdict(step);
        } else {
            self.enter(State::Open, lead.reason, step);
        }
        // As what it is shown: open, or half-open.
        let is_half_open = self.shared_probe().is_some();
        self.since = match (was_half_open, is_half_open) {
            (true, true) => since,
            (false, false) => self.since,
            _ => step.now,
        };
    }

    /// The leader is well again.
    pub(in crate::core) fn released_by_leader(&mut self, ramps: bool, step: &mut Step<'_>) {
        if self.is_follower() {
            let ramp = if ramps { ramp::LENGTH_NS } else { 0 };
            self.close(None, Nanos(ramp), step);
        }
    }

    /// It leads from now on, as the one that led is no more.
    pub(in crate::core) fn promote(&mut self, step: &mut Step<'_>) {
        match std::mem::replace(&mut self.follows, Follows::Nobody) {
            Follows::Nobody | Follows::Open => {}
            Follows::Offered | Follows::Withdrawn => self.half_open(false, step),
        }
    }

    /// It leads from now on, as its slot was claimed: the verdict under which that happened stays.
    pub(in crate::core) fn take_over(&mut self, round: Round, step: &mut Step<'_>) {
        self.follows = Follows::Nobody;
        self.by_redial = round.by_redial;
        self.successes = round.successes;
        self.used = 0;
        self.round_since = round.since;
        self.lease_since = Nanos::MAX;
        // (Since when it was half-open as a follower.)
        let from = std::mem::replace(&mut self.state, State::HalfOpen);
        step.out.push(Action::Transition {
            row: step.row,
            from,
            to: State::HalfOpen,
            reason: Reason::NONE,
            generation: self.generation,
        });
    }

    /// As [`Breaker::reset`], for the sake of a row that follows this one.
    pub(in crate::core) fn reset_for_all(&mut self, step: &mut Step<'_>) {
        self.cooldown = self.settings.cooldown;
        if matches!(self.state, State::Open | State::HalfOpen) {
            self.close(None, Nanos::ZERO, step);
        }
    }
}
