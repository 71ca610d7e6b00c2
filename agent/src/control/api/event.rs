//! `events --json`: one object a line.

use serde::{Deserialize, Serialize};

use super::{Mode, Reason, State, Timestamp, Window, words};

words! {
    /// Which timeout fired.
    TimeoutKind {
        /// From SYN to established.
        Connect = "connect",
        /// Silence while an answer was owed.
        Read = "read",
        /// Queued data made no progress.
        Write = "write",
        /// The whole operation.
        Deadline = "deadline",
        /// Silence in the middle of an answer.
        Stall = "stall",
        /// No answer to keepalive probes.
        Keepalive = "keepalive",
    }
}

words! {
    /// What happened to the configuration or to the agent as a whole.
    ConfigAction {
        /// The agent began with it.
        Started = "started",
        /// A new one is in force.
        Reloaded = "reloaded",
        /// A new one was wrong; the old one stays in force.
        Refused = "refused",
        /// Something that it names is not there: a name that cannot be looked up, or its own file. What is
        /// in force stays.
        Missing = "missing",
        /// It is there again.
        Found = "found",
        /// Verdicts and timeouts were switched off.
        Paused = "paused",
        /// They were switched on again.
        Resumed = "resumed",
    }
}

words! {
    /// What an operator has to do with a change of a breaker's state.
    Cause {
        /// An order to refuse.
        Trip = "trip",
        /// An order to let pass.
        HoldClosed = "hold_closed",
        /// Reset by hand.
        Reset = "reset",
        /// The order's time is over.
        TimeOver = "time_over",
        /// The order is for a name, and the address is not one of that name any more.
        NotCovered = "not_covered",
        /// The address belongs to another name now: the breaker starts anew.
        NewOwner = "new_owner",
    }
}

words! {
    /// What became of an operator's order.
    OrderAction {
        /// It was given: refuse.
        Trip = "trip",
        /// It was given: let pass.
        HoldClosed = "hold_closed",
        /// A destination was reset, and orders for it taken back.
        Reset = "reset",
        /// Its time is over.
        TimeOver = "time_over",
    }
}

words! {
    /// What the agent did not do so as not to harm.
    SafetyAction {
        /// A breaker stays closed because too many of its kind are open.
        Bypassed = "bypassed",
        /// Most destinations fail at once: the fault is on this side, or where a workload is named, that
        /// one's alone.
        Correlated = "correlated",
        /// Enforcement is not what it should be.
        NotEnforcing = "not_enforcing",
    }
}

/// An event with its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventRecord {
    /// When it happened.
    pub time: Timestamp,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// What happened. The variant is the key `kind`.
///
/// `workload` and `netns` say whose row it is, as in `status`. `pid` and `comm` are the process
/// that called `connect()` and the name of its thread.
#[expect(missing_docs, reason = "fields that repeat their meaning in `status`")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Event {
    /// A breaker changed state.
    Breaker {
        destination: String,
        /// A name of it, if one is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        workload: String,
        netns: Option<u64>,
        from: State,
        to: State,
        reason: Reason,
        generation: u32,
        /// What an operator has to do with it, if one has: an addition, as is the next one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<Cause>,
        /// Who that was.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        by: Option<String>,
    },
    /// An operator has given an order or taken it back, or its time is over; whether there is a row or not.
    /// An addition to the first version of the format.
    Order {
        action: OrderAction,
        /// Address or name and port, as it was written.
        destination: String,
        /// `None`: all workloads.
        workload: Option<String>,
        /// Given: when it ends by itself. Over: when that was, if no agent ran then.
        until: Option<Timestamp>,
        /// Rows that it concerned at that moment.
        rows: u64,
        /// Reset: orders that were taken back.
        orders: u64,
        /// Who gave or took it back; of one whose time is over, who had given it.
        by: String,
    },
    /// A timeout fired, or would have (`mode` is observe).
    Timeout {
        destination: String,
        workload: String,
        netns: Option<u64>,
        which: TimeoutKind,
        /// The timeout's value.
        value_ms: u64,
        /// The time it really took.
        elapsed_ms: u64,
        pid: u32,
        comm: String,
        mode: Mode,
    },
    /// Calls were refused, or would have been (`mode` is observe). At most one a second, row and reason,
    /// but that what is not told yet comes before a change of the breaker.
    Rejected {
        destination: String,
        workload: String,
        netns: Option<u64>,
        /// A word of [`super::Rejections`].
        reason: String,
        /// Calls since the last such event of the row and reason: all such counts of a row add up to its
        /// counter.
        count: u64,
        /// Of one of them; of the one before where the last second's rest is told. 0: not known.
        pid: u32,
        comm: String,
        mode: Mode,
        generation: u32,
    },
    /// Connections that existed when a breaker opened were ended. At most one a second and row; an
    /// addition to the first version of the format.
    Drained {
        destination: String,
        workload: String,
        netns: Option<u64>,
        /// What the policy says: abort or drain-idle.
        on_open: String,
        connections: u64,
    },
    /// Requests that are not idempotent were repeated after a failure. At most one a second and row; an
    /// addition to the first version of the format.
    NonIdempotent {
        destination: String,
        workload: String,
        netns: Option<u64>,
        /// Method of the one that is told of.
        method: String,
        /// It was refused, or would have been (`mode` is observe).
        refused: bool,
        /// Such requests since the last such event of the row, this one included.
        count: u64,
        pid: u32,
        comm: String,
        mode: Mode,
    },
    /// Connects were made to wait. At most one a second, row and reason.
    Held {
        destination: String,
        workload: String,
        netns: Option<u64>,
        /// A word of [`super::Held`].
        reason: String,
        /// As in `rejected`.
        count: u64,
        /// For how long the one whose process is named; `None` where the last second's rest is told.
        hold_ms: Option<u64>,
        pid: u32,
        comm: String,
    },
    /// A retry budget ran out, and refused a retry; or it has refused none for a whole window since.
    RetryBudget {
        destination: String,
        workload: String,
        netns: Option<u64>,
        exhausted: bool,
        ratio: f64,
        budget_tokens: f64,
        mode: Mode,
    },
    /// Configuration, pause and resume.
    Config {
        action: ConfigAction,
        /// One or more sentences for a person.
        message: String,
        /// Who asked for it, if anybody did.
        by: Option<String>,
    },
    /// The agent held back for safety.
    Safety {
        action: SafetyAction,
        destination: Option<String>,
        workload: Option<String>,
        message: String,
    },
    /// Events were lost; counters were not.
    Loss {
        /// How many.
        lost: u64,
        message: String,
    },
    /// A call failed (only with `all`).
    Failure {
        destination: String,
        workload: String,
        netns: Option<u64>,
        window: Window,
        /// A word of [`super::Failures`].
        outcome: String,
        /// The call's number in its window's history.
        seq: u64,
        /// When the call before it ended, to within 4.2 ms, as the window has it by which breakers are
        /// judged; `None`: it is the first, or that is not known.
        previous_call_time: Option<Timestamp>,
        generation: u32,
        latency_us: u64,
    },
    /// A run of calls that did not fail (only with `all`).
    Calls {
        destination: String,
        workload: String,
        netns: Option<u64>,
        window: Window,
        from_seq: u64,
        to_seq: u64,
        first_time: Timestamp,
        last_time: Timestamp,
        latency_us: CallsLatency,
        slow: u64,
    },
    /// A dial of the agent was answered; or was not, where it asked whether the server of a breaker
    /// that opened on exchanges is there at all (only with `all`).
    Redial {
        destination: String,
        netns: Option<u64>,
        answered: bool,
    },
}

impl Event {
    /// Every word of `kind`.
    pub const KINDS: [&str; 14] = [
        "breaker",
        "order",
        "timeout",
        "rejected",
        "drained",
        "non_idempotent",
        "held",
        "retry_budget",
        "config",
        "safety",
        "loss",
        "failure",
        "calls",
        "redial",
    ];

    /// Whether it is shown only when all events are asked for.
    pub const fn only_with_all(&self) -> bool {
        matches!(
            self,
            Self::Failure { .. } | Self::Calls { .. } | Self::Redial { .. }
        )
    }

    /// The word of `kind`.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Breaker { .. } => "breaker",
            Self::Order { .. } => "order",
            Self::Timeout { .. } => "timeout",
            Self::Rejected { .. } => "rejected",
            Self::Drained { .. } => "drained",
            Self::NonIdempotent { .. } => "non_idempotent",
            Self::Held { .. } => "held",
            Self::RetryBudget { .. } => "retry_budget",
            Self::Config { .. } => "config",
            Self::Safety { .. } => "safety",
            Self::Loss { .. } => "loss",
            Self::Failure { .. } => "failure",
            Self::Calls { .. } => "calls",
            Self::Redial { .. } => "redial",
        }
    }
}

/// Latencies counted since the row's last line of this kind, us. A call that ends while a line is
/// written may be in it already and not in its own; `None`: none was counted, or the row has no
/// histogram.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallsLatency {
    /// Median.
    pub p50: Option<u64>,
    /// 99th percentile.
    pub p99: Option<u64>,
    /// Longest.
    pub max: Option<u64>,
}
