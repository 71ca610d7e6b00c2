//! Names of states and reasons, spelled as they appear in `status --json`, events and metrics.

use agent_common::verdict;

/// State of a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// Passing, and judging what passes.
    Closed,
    /// Refusing until the cooldown ends or a redial is answered.
    Open,
    /// Admitting a few probes, refusing the rest.
    HalfOpen,
    /// Refusing because an operator said so.
    ForcedOpen,
    /// Passing whatever happens because an operator said so.
    ForcedClosed,
}

impl State {
    /// Every state, in the order of declaration.
    pub const ALL: [Self; 5] = [
        Self::Closed,
        Self::Open,
        Self::HalfOpen,
        Self::ForcedOpen,
        Self::ForcedClosed,
    ];

    /// The public spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
            Self::ForcedOpen => "forced_open",
            Self::ForcedClosed => "forced_closed",
        }
    }

    /// The kernel's number for it (`STATE_` constants of [`agent_common::verdict`]).
    pub const fn verdict_state(self) -> u8 {
        match self {
            Self::Closed => verdict::STATE_CLOSED,
            Self::Open => verdict::STATE_OPEN,
            Self::HalfOpen => verdict::STATE_HALF_OPEN,
            Self::ForcedOpen => verdict::STATE_FORCED_OPEN,
            Self::ForcedClosed => verdict::STATE_FORCED_CLOSED,
        }
    }

    /// Whether the kernel refuses connects (some of them, while half-open).
    pub const fn refuses(self) -> bool {
        match self {
            Self::Open | Self::HalfOpen | Self::ForcedOpen => true,
            Self::Closed | Self::ForcedClosed => false,
        }
    }
}

/// Why a breaker that should be open, or was, is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Bypass {
    /// Most destinations fail at once ([`Correlated`](super::Correlated)).
    Correlated,
    /// As many endpoints of its name as may refuse already, or ramp up.
    MaxOpenShare,
}

/// Which of a row's two windows something is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WindowKind {
    /// SYN to established.
    Connects,
    /// Request to answer.
    Exchanges,
    /// Neither: closed, or an operator's word.
    None,
}

impl WindowKind {
    /// The public spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Connects => "connects",
            Self::Exchanges => "exchanges",
            Self::None => "none",
        }
    }

    /// Its place where there is one of something for each window (floors, sequence numbers):
    /// connects 0, exchanges 1, neither none.
    pub const fn index(self) -> Option<usize> {
        match self {
            Self::Connects => Some(0),
            Self::Exchanges => Some(1),
            Self::None => None,
        }
    }
}

/// Kind of a [`Reason`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReasonKind {
    /// Too large a share of the last calls failed.
    FailureRate,
    /// Too many failures in a row.
    ConsecutiveFailures,
    /// Too large a share of the last calls was slow.
    SlowCallRate,
    /// A half-open probe failed.
    ProbeFailed,
    /// An operator's word.
    Manual,
    /// No trip: closed, or on the way there.
    None,
}

impl ReasonKind {
    /// The public spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::FailureRate => "failure_rate",
            Self::ConsecutiveFailures => "consecutive_failures",
            Self::SlowCallRate => "slow_call_rate",
            Self::ProbeFailed => "probe_failed",
            Self::Manual => "manual",
            Self::None => "none",
        }
    }
}

/// Why a breaker is where it is, with the value that was compared and what it was compared with.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reason {
    /// The window it is about.
    pub window: WindowKind,
    /// What tripped.
    pub kind: ReasonKind,
    /// The value seen: a rate (0 to 1) or a count.
    pub value: f64,
    /// The threshold it reached, in the same unit.
    pub threshold: f64,
}

impl Reason {
    /// No reason: closed, or a transition that is no trip.
    pub const NONE: Self = Self {
        window: WindowKind::None,
        kind: ReasonKind::None,
        value: 0.0,
        threshold: 0.0,
    };

    /// An operator's word.
    pub const MANUAL: Self = Self {
        kind: ReasonKind::Manual,
        ..Self::NONE
    };

    /// One failed connect, which suffices while another workload's breaker is open for the same
    /// destination.
    pub const HINTED: Self = Self {
        window: WindowKind::Connects,
        kind: ReasonKind::ConsecutiveFailures,
        value: 1.0,
        threshold: 1.0,
    };

    /// One failed probe, of one that suffices.
    pub const fn probe_failed(window: WindowKind) -> Self {
        Self {
            window,
            kind: ReasonKind::ProbeFailed,
            value: 1.0,
            threshold: 1.0,
        }
    }
}
