//! Trials: calls that are let pass while it is open, of what opened on exchanges.

use super::{Breaker, QUICK, REFUSED_PER_TRIAL, SELDOM, SELDOM_GAP, Server, Step};
use crate::core::redial::base_interval;
use crate::core::{Nanos, State, WindowKind};

impl Breaker {
    /// Connects are being refused, so many up to now. Enough of them earn a trial, or few enough.
    pub(in crate::core) fn refused(&mut self, refused: u64, step: &mut Step<'_>) {
        let useful = self.reason.window == WindowKind::Exchanges && self.server != Server::Gone;
        if self.state != State::Open || self.is_follower() || !useful || !self.settings.redial {
            return;
        }
        let refused = refused as u32;
        if !self.counts_refusals {
            self.counts_refusals = true;
            self.successes = refused;
            self.refusals = refused;
            self.heard = step.now;
            self.seldom = u8::from(step.now - self.round_since >= SELDOM_GAP);
            return;
        }
        let more = refused.wrapping_sub(self.refusals);
        if more == 0 {
            return;
        }
        let gap = step.now - self.heard;
        self.seldom = if gap >= SELDOM_GAP.times(u64::from(more)) {
            SELDOM.min(self.seldom.saturating_add(more.min(255) as u8))
        } else {
            0
        };
        self.refusals = refused;
        self.heard = step.now;
        let passed = step.now - self.round_since;
        let wait = if self.tries() {
            // Its end was not heard of.
            self.lease()
        } else if self.is_seldom() {
            SELDOM_GAP
        } else {
            base_interval(step.now - self.outage_since)
        };
        let many = refused.wrapping_sub(self.successes) >= REFUSED_PER_TRIAL;
        if (many || self.is_seldom()) && passed >= wait {
            self.begin_trial(step);
        }
    }

    pub(super) fn is_seldom(&self) -> bool {
        self.seldom >= SELDOM
    }

    pub(super) fn begin_trial(&mut self, step: &mut Step<'_>) {
        self.successes = self.refusals;
        self.round_since = step.now;
        self.used = 1;
        self.set_verdict(step);
    }

    /// Whether a probe or trial that fails now has failed quickly.
    pub(super) fn is_quick(&self, now: Nanos) -> bool {
        now - self.heard <= QUICK
    }

    /// A trial fails now: whether the next call may be one, too.
    pub(super) fn still_seldom(&self, now: Nanos) -> bool {
        self.is_seldom() && self.is_quick(now) && now - self.round_since >= SELDOM_GAP
    }
}
