//! A row: one breaker with its counters.

use serde::{Deserialize, Serialize};

use super::{
    ByHand, Bypass, Failures, Held, Latency, Limits, Probe, ReasonKind, Rejections, Retry,
    RetryPolicy, State, TimeoutsMs, Window,
};

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
    /// What the destination has shown itself to be: one-way, partly-one-way, server-first,
    /// tls13-tickets, long-waits; an addition to the first version of the format.
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

    pub(super) fn cmp_shown(&self, other: &Self) -> std::cmp::Ordering {
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
