//! Whether an exchange without an answer hangs, or merely takes its time.
//!
//! Silence is healthy by default: a queue that is empty, a long poll, a long query. An exchange is
//! called hung only when everything else speaks for it: the whole destination has fallen silent,
//! although it is asked again and again, and although it has always answered quickly.

use std::collections::VecDeque;

use super::Nanos;

/// When an exchange without an answer counts as failed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HungRule {
    /// Never.
    Off,
    /// After this long, whatever else the destination does.
    After(Nanos),
    /// When the whole destination has fallen silent.
    #[default]
    Auto,
}

impl HungRule {
    /// The shortest wait that can be hung; `None`: none is.
    pub fn shortest(self) -> Option<Nanos> {
        match self {
            Self::Off => None,
            Self::After(limit) => Some(limit),
            Self::Auto => Some(AUTO_WAIT),
        }
    }
}

/// [`HungRule::Auto`]: shorter waits are never hung (design rule 7).
pub const AUTO_WAIT: Nanos = Nanos::from_secs(10);
/// [`HungRule::Auto`]: a destination that ever answered after more than this may do so again
/// (design rule 7).
pub const AUTO_LONGEST: Nanos = Nanos::from_secs(5);
/// [`HungRule::Auto`]: 99 of 100 answers came within this (design rule 7).
pub const AUTO_USUAL: Nanos = Nanos::from_secs(1);

/// An exchange that waits.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// When its first byte was sent.
    pub begun: Nanos,
    /// When its last byte so far was sent: the wait counts from here.
    pub asked: Nanos,
    /// More of the request is still to be sent: nothing is owed yet.
    pub sending: bool,
    /// When the operation began that it belongs to: with the connect, if that was made for it.
    pub operation: Nanos,
}

/// What is known of a destination.
#[derive(Clone, Copy, Debug)]
pub struct Past {
    /// Answers so far.
    pub responses: u64,
    /// Whether at least 99 of 100 of them came within [`AUTO_USUAL`]; false when it is not known.
    pub is_quick: bool,
    /// The longest of them took this long.
    pub longest: Nanos,
    /// When the last answer of the destination to anybody began; zero: never.
    pub last_answer: Nanos,
}

/// How exchanges kept coming: when the count of those begun was seen to have grown, the last 64
/// times.
#[derive(Clone, Debug, Default)]
pub struct Arrivals {
    seen: VecDeque<(Nanos, u64)>,
}

/// Looks that are remembered: with one a second, six times [`AUTO_WAIT`].
const LOOKS: usize = 64;

impl Arrivals {
    /// Notes how many exchanges have begun so far.
    pub fn note(&mut self, now: Nanos, begun: u64) {
        if self.seen.back().is_some_and(|&(_, last)| last == begun) {
            return;
        }
        if self.seen.len() == LOOKS {
            self.seen.pop_front();
        }
        self.seen.push_back((now, begun));
    }

    /// Exchanges that began after the first look past `begun` (at least so many: the rest of that
    /// look may be older), and the time over which they were spread.
    pub fn since(&self, begun: Nanos) -> (u64, Nanos) {
        let mut later = self.seen.iter().skip_while(|&&(at, _)| at < begun);
        let (Some(base), Some(first), Some(last)) = (later.next(), later.next(), self.seen.back())
        else {
            return (0, Nanos::ZERO);
        };
        (last.1.saturating_sub(base.1), last.0 - first.0)
    }
}

/// Whether the exchange hangs. `min_calls` is the policy's: with less history, or fewer further
/// exchanges, nothing is concluded.
pub fn is_hung(
    rule: HungRule,
    wait: Wait,
    now: Nanos,
    past: &Past,
    arrivals: &Arrivals,
    min_calls: u32,
) -> bool {
    if wait.sending {
        return false;
    }
    let waited = now - wait.asked;
    match rule {
        HungRule::Off => false,
        HungRule::After(limit) => waited >= limit,
        HungRule::Auto => {
            let min_calls = u64::from(min_calls.max(1));
            let (further, spread) = arrivals.since(wait.begun);
            waited >= AUTO_WAIT
                && past.last_answer < wait.begun
                && past.responses >= min_calls
                && past.is_quick
                && past.longest <= AUTO_LONGEST
                && further >= min_calls
                && spread >= (now - wait.begun).half()
        }
    }
}
