//! `status --json`: the envelope, and the words of its rows.

mod counts;
mod row;

use serde::{Deserialize, Serialize};

use super::{Timestamp, words};

pub use counts::{
    Failures, Held, Latency, Limit, Limits, Rejections, Retry, RetryPolicy, TimeoutsMs,
};
pub use row::{Connects, Exchanges, Reason, Row, Windows};

words! {
    /// What the agent does with its verdicts.
    #[derive(clap::ValueEnum)]
    Mode {
        /// Refuse and time out.
        Enforce = "enforce",
        /// Decide and count everything, refuse nothing.
        Observe = "observe",
    }
}

words! {
    /// State of a breaker.
    State {
        /// Connections pass.
        Closed = "closed",
        /// Connections are refused.
        Open = "open",
        /// A few probes pass, the rest is refused.
        HalfOpen = "half_open",
        /// Refused because an operator said so.
        ForcedOpen = "forced_open",
        /// Passing because an operator said so.
        ForcedClosed = "forced_closed",
    }
}

words! {
    /// Which window of calls a reason speaks of.
    Window {
        /// Outcomes of connects.
        Connects = "connects",
        /// Outcomes of exchanges.
        Exchanges = "exchanges",
        /// Neither.
        None = "none",
    }
}

words! {
    /// Why a breaker left the closed state.
    ReasonKind {
        /// Share of failed calls.
        FailureRate = "failure_rate",
        /// Failures in a row.
        ConsecutiveFailures = "consecutive_failures",
        /// Share of slow calls.
        SlowCallRate = "slow_call_rate",
        /// A half-open probe failed.
        ProbeFailed = "probe_failed",
        /// An operator said so.
        Manual = "manual",
        /// It is closed.
        None = "none",
    }
}

words! {
    /// What becomes of the next connect while a breaker is half-open.
    Probe {
        /// It is a probe; where the breaker is shared, unless another workload's is first.
        Free = "free",
        /// As many probes are under way as may be, or nearly: it may be refused.
        Taken = "taken",
        /// It is refused: the probe is that of another workload, with which the breaker is shared.
        TakenElsewhere = "taken_elsewhere",
    }
}

/// The whole of `status --json` and of `GET /v1/destinations`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StatusEnvelope {
    /// Version of the agent.
    pub version: String,
    /// As configured; a pause does not change it.
    pub mode: Mode,
    /// Since the agent is ready, ms.
    pub uptime_ms: u64,
    /// Kernel events that found no room; counters do not depend on them.
    pub lost_events: u64,
    /// The pause in force; an addition to the first version of the format.
    pub paused: Option<Paused>,
    /// Operators' orders, newest first, with or without a row; of one destination, those for it. An addition
    /// to the first version of the format.
    #[serde(default)]
    pub orders: Vec<ManualState>,
    /// Names in the configuration, or in an operator's order, that cannot be looked up; an addition to the
    /// first version of the format.
    #[serde(default)]
    pub unresolved: Vec<Unresolved>,
    /// One row per workload, network namespace and destination, worst first.
    pub destinations: Vec<Row>,
}

impl StatusEnvelope {
    /// Sorts the rows as every output shows them: open, half-open, bypassed, then by failures
    /// (most first; one that is half-open for want of a call counts as without), then by destination,
    /// workload and namespace.
    pub fn sort(&mut self) {
        self.destinations.sort_by(|a, b| a.cmp_shown(b));
    }
}

/// A name that cannot be looked up: what is said of it holds for no address but those that programs are
/// told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unresolved {
    /// The name.
    pub name: String,
    /// Who names it, such as `policy orders-db`.
    pub named_by: String,
    /// What the system's resolver says.
    pub error: String,
}

/// Every verdict and timeout is switched off, counting goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Paused {
    /// When it began.
    pub since: Timestamp,
    /// When it ends by itself; `None`: only by resume.
    pub until: Option<Timestamp>,
    /// Who asked for it.
    pub by: String,
}

words! {
    /// Why a breaker that should be open, or was, is closed.
    Bypass {
        /// Most destinations fail at once.
        Correlated = "correlated",
        /// As many endpoints of its name as may refuse already, or admit a share only (their ramp).
        MaxOpenShare = "max_open_share",
    }
}

/// An operator's order that stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManualState {
    /// Address or name and port, as it was written.
    #[serde(default)]
    pub destination: String,
    /// `forced_open` or `forced_closed`.
    pub state: State,
    /// For whom; `None`: all.
    pub workload: Option<String>,
    /// When it ends by itself, ms.
    pub ends_in_ms: u64,
    /// When it was asked for.
    pub since: Timestamp,
    /// Who asked for it.
    pub by: String,
    /// Rows that it is in force for: not where a newer one is.
    #[serde(default)]
    pub rows: u64,
}

/// A manual state: who asked for it, and when it ends by itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ByHand {
    /// When it was asked for.
    pub since: Timestamp,
    /// When it ends.
    pub until: Timestamp,
    /// Who asked for it, as the kernel vouches for the other end of the socket.
    pub by: String,
    /// The destination of the order, as it was written: an address, or a name; an addition, as is the next
    /// one.
    #[serde(default)]
    pub destination: String,
    /// Its workload; `None`: all.
    #[serde(default)]
    pub workload: Option<String>,
}
