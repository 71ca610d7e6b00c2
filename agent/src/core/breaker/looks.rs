//! What a breaker is: nothing here changes it, but for what it is held back by.

use agent_common::CallWindow;

use super::{Breaker, Server};
use crate::core::groups::Refusal;
use crate::core::hints::is_shared;
use crate::core::window::{WindowStats, evaluate_since};
use crate::core::{BreakerView, Bypass, DialTarget, Floor, Nanos, RowId, State, WindowKind};

impl Breaker {
    pub(in crate::core) fn state(&self) -> State {
        self.state
    }

    pub(in crate::core) fn target(&self) -> DialTarget {
        self.target
    }

    /// As its groups count it.
    pub(in crate::core) fn refusal(&self) -> Refusal {
        match self.state {
            State::Open | State::HalfOpen => Refusal::Own,
            State::Closed if self.ramps() => Refusal::Own,
            State::ForcedOpen => Refusal::Ordered,
            State::Closed | State::ForcedClosed => Refusal::None,
        }
    }

    pub(in crate::core) fn since(&self) -> Nanos {
        self.since
    }

    pub(in crate::core) fn max_open_share(&self) -> Option<f64> {
        self.settings.max_open_share
    }

    /// Nothing is held back any more; whether it opens, its next failure says.
    pub(in crate::core) fn released(&mut self) {
        if self.bypassed == Some(Bypass::Correlated) {
            self.bypassed = None;
        }
    }

    pub(in crate::core) fn outage_since(&self) -> Nanos {
        self.outage_since
    }

    /// As `status` shows it. When the agent dials next, the engine knows.
    pub(in crate::core) fn view(
        &self,
        next_redial_at: Option<Nanos>,
        leader: Option<RowId>,
    ) -> BreakerView {
        let ramp_until = self.ramps().then_some(self.until);
        let forced = matches!(self.state, State::ForcedOpen | State::ForcedClosed);
        BreakerView {
            state: self.state,
            since: self.since,
            reason: self.reason,
            next_probe_at: (self.state == State::Open).then_some(self.until),
            generation: self.generation,
            next_redial_at,
            follows: leader.filter(|_| self.is_follower()),
            shared_probe: self.shared_probe(),
            awaits_probe: self.state == State::HalfOpen
                && self.lease_since == Nanos::MAX
                && self.used == 0,
            manual_until: forced.then_some(self.until),
            ramp_until,
            bypassed: self.bypassed,
            cooldown: self.cooldown,
            floors: self.floor_seqs.map(|seq| Floor {
                seq,
                at: self.floor_at,
            }),
        }
    }

    /// Whether the agent should dial: open, the policy says so, and the answer says something.
    pub(in crate::core) fn wants_redial(&self) -> bool {
        let tells = match self.reason.window {
            WindowKind::Connects => true,
            WindowKind::Exchanges => self.server != Server::There,
            WindowKind::None => false,
        };
        self.state == State::Open && !self.is_follower() && tells && self.settings.redial
    }

    /// Whether the first dial is to find out if the server is there at all: it cannot be too early.
    pub(in crate::core) fn asks(&self) -> bool {
        self.wants_redial()
            && self.reason.window == WindowKind::Exchanges
            && self.server == Server::Unknown
    }

    /// Whether others are to take its word: it is open, or not yet closed, for connect failures.
    pub(in crate::core) fn gives_hints(&self) -> bool {
        matches!(self.state, State::Open | State::HalfOpen)
            && !self.is_follower()
            && self.reason.window == WindowKind::Connects
            && is_shared(&self.target.addr)
    }

    /// When time alone changes something.
    pub(in crate::core) fn deadline(&self) -> Nanos {
        match self.state {
            State::Closed if self.ramps() => self.until,
            State::Closed if self.cooldown > self.settings.cooldown => self.halve_at(),
            // Kept in memory, so that it can follow.
            State::Closed if self.shares_scope() => Nanos::MAX,
            // A call exactly `window_age` old still counts.
            State::Closed => self.heard + self.settings.window_age + Nanos(1),
            State::Open if self.is_follower() => Nanos::MAX,
            State::Open | State::ForcedOpen | State::ForcedClosed => self.until,
            State::HalfOpen => self.round_end(),
        }
    }

    /// Whether nothing would be lost by dropping it: closed, cooldown at its base, and whatever it
    /// had heard of (failures, the floor) is too old to count.
    pub(in crate::core) fn is_quiet(&self, now: Nanos) -> bool {
        self.state == State::Closed
            && !self.ramps()
            && !self.shares_scope()
            && self.cooldown <= self.settings.cooldown
            && now - self.heard > self.settings.window_age
    }

    /// A window as this breaker judges it; of none, nothing.
    pub(in crate::core) fn window_stats(
        &self,
        kind: WindowKind,
        window: &CallWindow,
        last_seq: u64,
        now: Nanos,
    ) -> Option<WindowStats> {
        let (seq, at) = (self.floor_seqs[kind.index()?], self.floor_at);
        let s = &self.settings;
        Some(evaluate_since(kind, window, last_seq, seq, at, now, s))
    }
}
