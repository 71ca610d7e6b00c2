//! Exchanges that waited in health and were broken off: what a probe has to do that waits like them.
//!
//! A probe of a breaker that opened on exchanges is a whole exchange. Where exchanges rightly wait for long (long
//! polls, queues) or are never answered at all (syslog, Graphite), such a probe does not end, though the
//! destination has been well again for long. There a probe that outlives the failure which it is to disprove has
//! disproved it.
//!
//! - What was broken off must have waited: for [`LEAST`] or longer, unless the destination answers nobody. Who is
//!   answered at once is owed an answer, and a server that is back and hangs gives none.
//! - Failures by silence within the last `window_age` are no such failures: there a probe must be answered.
//! - A breaker that was closed by waiting and opens again within [`LATELY`] has to be answered, unless the destination
//!   answers nobody: a server that hangs and is killed again and again would be let flood each time.
//! - How long is long enough: [`LEAST`] where an event broke them off and not a limit on their time. That is so
//!   where the server was gone afterwards, or where [`TOGETHER`] ended three or more whose lives differ
//!   ([`ALIKE`]). Else a quarter more than they had lived; where nobody is ever answered, [`MOST`] at most,
//!   because there no answer can speak for the destination instead.

use super::{Breaker, PROBE_WAITS, Server, Step};
use crate::core::{Nanos, State, WindowKind};

/// A wait of this length is no wait for a server that is about to answer; and a server that accepts and breaks
/// off does it sooner, if nothing else is known.
const LEAST: Nanos = PROBE_WAITS;
/// Less than the lease of an exchange by default, which begins a second or two before.
const MOST: Nanos = Nanos::from_secs(20);
/// What one event breaks off ends within this.
const TOGETHER: Nanos = Nanos::from_millis(250);
/// What closed by waiting so long ago was right to.
const LATELY: Nanos = Nanos::from_secs(300);
/// Lives that differ by less may have had the same limit.
const ALIKE: Nanos = Nanos::from_secs(1);

/// What was broken off last, since the breaker was closed last. Boxed, since few breakers have it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Broken {
    /// When the first of those ended that ended together; `None`: there were none yet.
    first: Option<Nanos>,
    /// How many, and how long they had lived.
    count: u32,
    shortest: Nanos,
    longest: Nanos,
    /// Some had waited for [`LEAST`], then or before.
    waited: bool,
    /// When one failed by silence last.
    silent: Option<Nanos>,
    /// When the breaker was last closed because probes waited, though the destination answers.
    outlived: Option<Nanos>,
}

impl Broken {
    const NONE: Self = Self {
        first: None,
        count: 0,
        shortest: Nanos::MAX,
        longest: Nanos::ZERO,
        waited: false,
        silent: None,
        outlived: None,
    };

    /// Nothing but that waiting has closed it.
    fn outlived(at: Nanos) -> Box<Self> {
        Box::new(Self {
            outlived: Some(at),
            ..Self::NONE
        })
    }

    fn note(&mut self, at: Nanos, lived: Nanos) {
        // (Events of several processors may come in another order.)
        let joins = |first: Nanos| (at - first).max(first - at) <= TOGETHER;
        if self.first.is_none_or(|first| !joins(first)) {
            *self = Self {
                first: Some(at),
                waited: self.waited,
                silent: self.silent,
                outlived: self.outlived,
                ..Self::NONE
            };
        }
        self.count += 1;
        self.shortest = self.shortest.min(lived);
        self.longest = self.longest.max(lived);
        self.waited |= lived >= LEAST;
    }

    /// Whether one event has broken them off.
    fn was_one_event(&self) -> bool {
        self.count >= 3 && self.longest - self.shortest >= ALIKE
    }
}

impl Breaker {
    /// An exchange failed at `at`: it was broken off after it had lived for so long, or it failed by silence.
    pub(in crate::core) fn exchange_failed(&mut self, at: Nanos, broken_after: Option<Nanos>) {
        let broken = || Box::new(Broken::NONE);
        // One that follows has not opened by itself, and may lead yet.
        let is_closed = self.state == State::Closed || self.is_follower();
        match (self.state, broken_after) {
            _ if is_closed && broken_after.is_none() => {
                self.broken.get_or_insert_with(broken).silent = Some(at);
            }
            // What opened by silence has to be answered, however its probes fail.
            (State::Closed | State::Open | State::HalfOpen, Some(lived))
                if is_closed || self.was_broken().is_some() =>
            {
                self.broken.get_or_insert_with(broken).note(at, lived);
            }
            // And a probe says by itself how it went.
            (State::Closed | State::Open | State::HalfOpen, _) => {}
            (State::ForcedOpen | State::ForcedClosed, _) => {}
        }
    }

    /// It closes: what was broken off is of the past, but not that it was closed by waiting lately.
    pub(super) fn forget_broken(&mut self, now: Nanos) {
        let outlived = self.broken.take().and_then(|broken| broken.outlived);
        let lately = outlived.filter(|at| now - *at <= LATELY);
        self.broken = lately.map(Broken::outlived);
    }

    /// Whether it opened because exchanges were broken off, and none failed by silence.
    fn was_broken(&self) -> Option<&Broken> {
        let broken = self.broken.as_deref()?;
        let first = broken.first?;
        let silent = |at: Nanos| first - at <= self.settings.window_age;
        (self.reason.window == WindowKind::Exchanges && !broken.silent.is_some_and(silent))
            .then_some(broken)
    }

    /// What of it outlives the agent: how long they had lived, where that was a wait.
    pub(super) fn broken_after(&self) -> Option<Nanos> {
        let broken = self.was_broken().filter(|broken| broken.waited)?;
        Some(broken.longest.max(LEAST))
    }

    /// Takes over what an earlier agent has saved of it.
    pub(super) fn restore_broken(&mut self, now: Nanos, after: Option<Nanos>) {
        self.broken = after.map(|lived| {
            let mut broken = Box::new(Broken::NONE);
            broken.note(now, lived);
            broken
        });
    }

    /// For how long a probe has to wait in health to be a good one; `None`: it has to be answered.
    fn outlives(&self, answers_nobody: bool) -> Option<Nanos> {
        let broken = self.was_broken()?;
        let lately = |at: Nanos| broken.first.is_some_and(|first| first - at <= LATELY);
        if !answers_nobody && (!broken.waited || broken.outlived.is_some_and(lately)) {
            return None;
        }
        if self.server == Server::Gone || broken.was_one_event() {
            return Some(LEAST);
        }
        let longer = Nanos(broken.longest.0.saturating_add(broken.longest.0 / 4));
        let most = if answers_nobody { MOST } else { Nanos::MAX };
        Some(longer.min(most).max(LEAST))
    }

    /// A probe waits for an answer, on a connection that is well. If that is enough, it is a good one, and the
    /// next may go; how it ends is not asked any more.
    pub(in crate::core) fn probe_waits(
        &mut self,
        generation: u32,
        waited: Nanos,
        answers_nobody: bool,
        last_seqs: [u64; 2],
        step: &mut Step<'_>,
    ) {
        let is_enough = self
            .outlives(answers_nobody)
            .is_some_and(|least| waited >= least);
        if generation != self.generation || !is_enough {
            return;
        }
        self.note_seqs(last_seqs);
        match self.state {
            State::HalfOpen => {
                self.slot_taken(step.now);
                // A fresh round, whatever else is under way: its end must not be heard a second time.
                self.used = self.settings.probe_limit();
                self.succeeded(last_seqs, step);
            }
            State::Open if self.tries() => {
                self.half_open(false, step);
                self.succeeded(last_seqs, step);
            }
            State::Open | State::Closed | State::ForcedOpen | State::ForcedClosed => {}
        }
        if self.state == State::Closed && !answers_nobody {
            self.broken = Some(Broken::outlived(step.now));
        }
    }

    /// A probe was given up by its program, on a destination that has never answered anybody: whether that says
    /// nothing.
    pub(super) fn says_nothing(&self) -> bool {
        self.was_broken().is_some()
    }
}
