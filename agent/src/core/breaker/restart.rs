//! A breaker over a restart of the agent.

use super::{Breaker, CONFIRMED_WITHIN, Step};
use crate::core::{Reason, Saved, State};

impl Breaker {
    /// What outlives the agent. A manual state is kept by whoever knows who asked for it.
    pub(in crate::core) fn save(&self) -> Saved {
        let own = match self.state {
            // Of those that share a half-open breaker any one may lead again: as one that is open, it would
            // be open for as long as a round of probes may last.
            State::Open if self.shared_probe().is_some() => State::HalfOpen,
            State::Closed | State::Open | State::HalfOpen => self.state,
            State::ForcedOpen | State::ForcedClosed => State::Closed,
        };
        Saved {
            state: own,
            since: self.since,
            reason: if own == State::Closed {
                Reason::NONE
            } else {
                self.reason
            },
            bypassed: self.bypassed,
            generation: self.generation,
            until: self.until,
            cooldown: self.cooldown,
            healthy_since: self.healthy_since,
            misled: u32::from(self.misled),
            distrust_until: self.distrust_until,
            outage_since: self.outage_since,
            floor_seqs: self.floor_seqs,
            floor_at: self.floor_at,
            broken_after: self.broken_after(),
        }
    }

    /// Takes over what an earlier agent has saved; `self` is fresh. An open breaker goes on with its
    /// cooldown, a half-open one with a fresh round: probes under way have ended with that agent.
    /// Nothing is believed that would keep it open for longer than a cooldown.
    pub(in crate::core) fn restore(&mut self, saved: &Saved, step: &mut Step<'_>) {
        let now = step.now;
        let latest = now + self.settings.cooldown_cap();
        self.cooldown = saved
            .cooldown
            .clamp(self.settings.cooldown, self.settings.cooldown_cap());
        self.healthy_since = saved.healthy_since.min(now);
        self.misled = u8::try_from(saved.misled).unwrap_or(u8::MAX);
        self.distrust_until = saved.distrust_until.min(latest);
        self.outage_since = saved.outage_since.min(now);
        self.floor_seqs = saved.floor_seqs;
        self.last_seqs = saved.floor_seqs;
        self.floor_at = saved.floor_at.min(now);
        self.generation = saved.generation;
        self.since = saved.since.min(now);
        if !self.settings.enabled {
            return;
        }
        match saved.state {
            State::Closed | State::ForcedOpen | State::ForcedClosed => {
                self.bypassed = saved.bypassed;
                return;
            }
            State::Open => {
                self.reason = saved.reason;
                self.state = State::Open;
                self.round_since = now;
                self.until = saved.until.min(latest);
                if self.wants_redial() && !self.asks() {
                    self.until = self.until.max(now + CONFIRMED_WITHIN);
                }
            }
            State::HalfOpen => {
                self.reason = saved.reason;
                self.state = State::HalfOpen;
                self.start_round(now);
            }
        }
        self.restore_broken(now, saved.broken_after);
        self.set_verdict(step);
    }
}
