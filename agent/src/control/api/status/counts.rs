//! What is counted of a row, what is measured, and the limits in force.

use serde::{Deserialize, Serialize};

/// Failed calls by outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failures {
    /// RST to the SYN.
    pub refused: u64,
    /// No answer to the SYN in time.
    pub connect_timeout: u64,
    /// No way to the host or network.
    pub unreachable: u64,
    /// Reset.
    pub reset: u64,
    /// Closed before the answer.
    pub closed_early: u64,
    /// No answer for long, while nothing else was answered either.
    pub hung: u64,
    /// The program stopped waiting after a long time without an answer.
    pub gave_up: u64,
    /// Silence while an answer was owed.
    pub read_timeout: u64,
    /// Queued data made no progress.
    pub write_timeout: u64,
    /// The whole operation took too long.
    pub deadline: u64,
    /// An answer whose status counts as failure.
    pub status: u64,
    /// Anything else.
    pub other: u64,
}

impl Failures {
    /// Every outcome with its word, in the order of the contract.
    pub fn each(&self) -> [(&'static str, u64); 12] {
        [
            ("refused", self.refused),
            ("connect_timeout", self.connect_timeout),
            ("unreachable", self.unreachable),
            ("reset", self.reset),
            ("closed_early", self.closed_early),
            ("hung", self.hung),
            ("gave_up", self.gave_up),
            ("read_timeout", self.read_timeout),
            ("write_timeout", self.write_timeout),
            ("deadline", self.deadline),
            ("status", self.status),
            ("other", self.other),
        ]
    }

    /// All of them together.
    pub fn total(&self) -> u64 {
        total(&self.each())
    }
}

/// Calls refused, or that would have been, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rejections {
    /// The breaker is open or half-open.
    pub breaker: u64,
    /// Too many retries over all.
    pub retry_budget: u64,
    /// Too many retries of one operation.
    pub retry_limit: u64,
    /// The operation's time is used up.
    pub deadline: u64,
    /// A bulkhead is full.
    pub limit: u64,
}

impl Rejections {
    /// Every reason with its word, in the order of the contract.
    pub fn each(&self) -> [(&'static str, u64); 5] {
        [
            ("breaker", self.breaker),
            ("retry_budget", self.retry_budget),
            ("retry_limit", self.retry_limit),
            ("deadline", self.deadline),
            ("limit", self.limit),
        ]
    }

    /// All of them together.
    pub fn total(&self) -> u64 {
        total(&self.each())
    }
}

fn total(counts: &[(&str, u64)]) -> u64 {
    counts
        .iter()
        .fold(0, |sum, (_, count)| sum.saturating_add(*count))
}

/// Connects that were made to wait, by reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    /// Backoff before a retry.
    pub backoff: u64,
    /// A program that retried in a tight loop.
    pub spin: u64,
}

/// Retries of a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Retry {
    /// Attempts that were retries.
    pub retries: u64,
    /// Their share of all attempts, 0 to 1.
    pub ratio: f64,
    /// Retries that the budget still allows.
    pub budget_tokens: f64,
    /// Retries of requests that are not safe to repeat, let pass or refused.
    pub non_idempotent: u64,
    /// Attempts for each operation, 1 without retries; 0 without attempts. This and those below are
    /// additions to the first version of the format.
    #[serde(default)]
    pub amplification: f64,
    /// Operations that took one attempt, two, three, four, and more.
    #[serde(default)]
    pub operations: [u64; 5],
    /// Retries on the connection on which the attempt before had failed. They are not in `retries`, for
    /// nothing was dialled.
    #[serde(default)]
    pub live: u64,
    /// Of `non_idempotent`, those that were refused.
    #[serde(default)]
    pub non_idempotent_refused: u64,
    /// Of `non_idempotent`, those that observe mode let pass.
    #[serde(default)]
    pub non_idempotent_would_refuse: u64,
}

/// What a row's policy says about retries; `None`: off, or no limit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RetryPolicy {
    /// Retries of one operation, as in force: a limit below what opens the breaker is raised to that.
    pub limit: Option<u64>,
    /// Share of the attempts that may be retries, 0 to 1.
    pub budget: Option<f64>,
    /// The wait before a retry is drawn from 0 to this, doubled with each one; ms.
    pub backoff_base_ms: Option<u64>,
    /// Or to this, ms.
    pub backoff_max_ms: Option<u64>,
    /// Refusals a second to one task beyond which they are held.
    pub spin_per_second: Option<u64>,
}

/// Latencies in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// Calls measured.
    pub count: u64,
    /// Median; this and the next three are `None` when count is 0.
    pub p50: Option<u64>,
    /// 90th percentile.
    pub p90: Option<u64>,
    /// 99th percentile.
    pub p99: Option<u64>,
    /// 99.9th percentile.
    pub p999: Option<u64>,
    /// Longest; 0 when count is 0.
    pub max: u64,
}

/// Bulkheads of a row.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Live connections.
    pub connections: Limit,
    /// Connects without an answer.
    pub pending: Limit,
    /// Connects that the last second's worth has not earned back yet.
    pub connects_per_second: Limit,
}

impl Limits {
    /// Every limit with its word, in the order of the configuration.
    pub fn each(&self) -> [(&'static str, &Limit); 3] {
        [
            ("connections", &self.connections),
            ("pending", &self.pending),
            ("connects a second", &self.connects_per_second),
        ]
    }
}

/// One of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limit {
    /// The most that may be used; `None`: no limit.
    pub limit: Option<u64>,
    /// What is used now, also without a limit; of a rate only with one.
    pub used: u64,
}

/// Timeouts in force, ms; `None`: off.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TimeoutsMs {
    /// From SYN to established.
    pub connect: Option<u64>,
    /// Longest silence while an answer is owed.
    pub read: Option<u64>,
    /// Longest time queued data makes no progress.
    pub write: Option<u64>,
    /// Whole operation, retries included.
    pub deadline: Option<u64>,
    /// Longest silence in the middle of an answer.
    pub stall: Option<u64>,
    /// Idle time before the first keepalive probe.
    pub keepalive: Option<u64>,
}
