//! `status --json`: the envelope and its rows.

use serde::{Deserialize, Serialize};

use super::{Timestamp, words};

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
        /// Too many endpoints of its name refuse already.
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

/// One breaker with its counters. Counters are cumulative since the row exists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Address and port.
    pub destination: String,
    /// Path of the cgroup below the v2 mount, or `namespace/pod`.
    pub workload: String,
    /// The name that the address was looked up by, if known: the one that was asked for, else the first.
    pub name: Option<String>,
    /// All its names; an addition to the first version of the format.
    #[serde(default)]
    pub names: Vec<String>,
    /// Inode of the network namespace; `None` only if it could not be read.
    pub netns: Option<u64>,
    /// Name of the policy in force.
    pub policy: String,
    /// State of the breaker.
    pub state: State,
    /// Since the last change of state, ms.
    pub state_age_ms: u64,
    /// Why it is not closed.
    pub reason: Reason,
    /// Until the cooldown ends, ms; `None` unless open.
    pub next_probe_in_ms: Option<u64>,
    /// Number of the verdict in force.
    pub generation: u32,
    /// Until the agent dials by itself, ms; `None` if it does not.
    pub next_redial_in_ms: Option<u64>,
    /// It would be open, but too much else is.
    pub bypassed_for_safety: bool,
    /// Why; `None` unless it is. An addition to the first version of the format.
    #[serde(default)]
    pub bypassed_reason: Option<Bypass>,
    /// What becomes of the next connect; `None` unless half-open. An addition to the first version of the
    /// format, as are the next two.
    #[serde(default)]
    pub probe: Option<Probe>,
    /// Half-open, and for want of a call: nobody has connected for some seconds.
    #[serde(default)]
    pub waits_for_call: bool,
    /// The policy has `breaker = "off"`: it never opens.
    #[serde(default)]
    pub breaker_off: bool,
    /// Closed a moment ago: until all connects pass and not only a share, ms; an addition, as is the
    /// next one.
    #[serde(default)]
    pub ramp_ends_in_ms: Option<u64>,
    /// Who set the manual state that it is in; an addition to the first version of the format.
    #[serde(default)]
    pub manual: Option<ByHand>,
    /// The calls that the breaker judges.
    pub windows: Windows,
    /// SYNs sent.
    pub attempts: u64,
    /// Connects established.
    pub established: u64,
    /// Exchanges answered.
    pub responses: u64,
    /// Connects and exchanges without an answer yet.
    pub in_flight: u64,
    /// Connects and exchanges that the program ended itself before an answer; never a failure.
    pub abandoned: u64,
    /// Resets and closes of reused connections that had been idle; never a failure.
    pub stale: u64,
    /// Answers that asked for fewer calls: HTTP 429, 503 with Retry-After, an account's own limit.
    pub throttled: u64,
    /// What the destination has shown itself to be: one-way, server-first, tls13-tickets, long-waits;
    /// an addition to the first version of the format.
    #[serde(default)]
    pub traits: Vec<String>,
    /// Connects that never sent a SYN.
    pub local: u64,
    /// Failed calls by outcome.
    pub failures: Failures,
    /// Calls refused by Backstop.
    pub rejected: Rejections,
    /// Calls that observe mode let pass and enforce mode would have refused.
    pub would_reject: Rejections,
    /// Of those calls, the ones that went well in truth: established, and the first exchange did not
    /// fail. An addition to the first version of the format, as are the next one and `limits`.
    #[serde(default)]
    pub would_reject_succeeded: u64,
    /// Of those calls, the ones that failed. What the program gave up is in neither.
    #[serde(default)]
    pub would_reject_failed: u64,
    /// The limits in force, and what of them is used.
    #[serde(default)]
    pub limits: Limits,
    /// Connects that were made to wait.
    pub held: Held,
    /// Timeouts that observe mode did not carry out.
    pub would_timeout: u64,
    /// Exchanges first counted as hung that were answered after all.
    pub hung_recovered: u64,
    /// Retries.
    pub retry: Retry,
    /// What the policy says about them; an addition to the first version of the format.
    #[serde(default)]
    pub retry_policy: RetryPolicy,
    /// Latency of connects over the last 5 minutes.
    pub connect_latency_us: Latency,
    /// Latency of answers over the last 5 minutes.
    pub response_latency_us: Latency,
    /// Latency of connects over the last minute.
    #[serde(default)]
    pub connect_latency_1m_us: Latency,
    /// Latency of answers over the last minute.
    #[serde(default)]
    pub response_latency_1m_us: Latency,
    /// The timeouts in force.
    pub timeouts_ms: TimeoutsMs,
}

impl Row {
    /// Where the row belongs in every output: open, half-open, bypassed, the rest.
    fn rank(&self) -> u8 {
        match self.state {
            State::Open | State::ForcedOpen => 0,
            // A server that is well, as far as anybody knows.
            State::HalfOpen if self.waits_for_call => 3,
            State::HalfOpen => 1,
            State::Closed | State::ForcedClosed if self.bypassed_for_safety => 2,
            State::Closed | State::ForcedClosed => 3,
        }
    }

    /// Failures, as far as they are a reason to be looked at first.
    fn failures_shown(&self) -> u64 {
        match self.waits_for_call {
            true => 0,
            false => self.failures.total(),
        }
    }

    fn cmp_shown(&self, other: &Self) -> std::cmp::Ordering {
        self.rank()
            .cmp(&other.rank())
            .then_with(|| other.failures_shown().cmp(&self.failures_shown()))
            .then_with(|| other.waits_for_call.cmp(&self.waits_for_call))
            .then_with(|| self.destination.cmp(&other.destination))
            .then_with(|| self.workload.cmp(&other.workload))
            .then_with(|| self.netns.cmp(&other.netns))
    }
}

/// What made a breaker trip: `value` reached `threshold`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Reason {
    /// The window that was judged.
    pub window: Window,
    /// Which of its thresholds.
    pub kind: ReasonKind,
    /// A ratio from 0 to 1, or a number of failures in a row.
    pub value: f64,
    /// In the same unit.
    pub threshold: f64,
}

impl Reason {
    /// What a closed breaker shows.
    pub const NONE: Self = Self {
        window: Window::None,
        kind: ReasonKind::None,
        value: 0.0,
        threshold: 0.0,
    };
}

/// The two windows of a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Windows {
    /// Outcomes of connects.
    pub connects: Connects,
    /// Outcomes of exchanges.
    pub exchanges: Exchanges,
}

/// The window of connects.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Connects {
    /// Calls in the window.
    pub calls: u64,
    /// Failed calls among them.
    pub failures: u64,
    /// Their share, 0 to 1.
    pub failure_rate: f64,
    /// Failures in a row up to now.
    pub consecutive: u64,
}

/// The window of exchanges.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Exchanges {
    /// Calls in the window.
    pub calls: u64,
    /// Failed calls among them.
    pub failures: u64,
    /// Their share, 0 to 1.
    pub failure_rate: f64,
    /// Failures in a row up to now.
    pub consecutive: u64,
    /// Successful calls that were slow.
    pub slow_calls: u64,
    /// Their share, 0 to 1.
    pub slow_call_rate: f64,
}

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
