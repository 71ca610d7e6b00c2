//! A configuration that was checked: every value typed, in range, and with the defaults merged in.
//!
//! `None` always means "off". Durations are whole milliseconds. The ranges are those of
//! `docs/CONFIGURATION.md`; they hold for every value that came out of a file.

use std::time::Duration;

use super::{origins::Origins, pattern::DestinationPattern, workload::WorkloadPattern};

/// A whole configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Where it came from: the name of the file, or `built-in`.
    pub source: String,
    /// Whether refusals and timeouts are carried out or only counted.
    pub mode: Mode,
    /// What applies where no policy matches. Its name is `default`.
    pub defaults: Policy,
    /// The policies in the order of the file, each with the defaults merged in.
    pub policies: Vec<Policy>,
    /// The agent's own sizes and its log.
    pub agent: AgentConfig,
    /// Destinations that are counted and otherwise left alone.
    pub protected: Vec<DestinationPattern>,
    /// Where in the source each setting stands.
    pub origins: Origins,
}

/// Whether decisions are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Refuse and time out.
    Enforce,
    /// Decide and count everything, touch nothing.
    Observe,
}

/// Settings for the destinations and workloads that a policy names.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// Unique in the file; `default` for the defaults.
    pub name: String,
    /// Which destinations; empty: all.
    pub destinations: Vec<DestinationPattern>,
    /// Which workloads; empty: all. Never empty together with `destinations`, except in the
    /// defaults.
    pub workloads: Vec<WorkloadPattern>,
    /// Longest waits.
    pub timeouts: Timeouts,
    /// When a destination counts as sick, and what then.
    pub breaker: BreakerPolicy,
    /// How far programs may retry.
    pub retry: RetryPolicy,
    /// Bulkheads.
    pub limits: Limits,
}

/// Longest waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From SYN to established. Always on.
    pub connect: Duration,
    /// Longest silence while an answer is owed.
    pub read: Option<Duration>,
    /// Longest time in which queued data makes no progress.
    pub write: Option<Duration>,
    /// Longest time of a whole operation, retries included.
    pub deadline: Option<Duration>,
    /// Longest silence in the middle of an answer.
    pub stall: Stall,
    /// Idle time after which the kernel asks whether the peer still lives.
    pub keepalive: Option<Duration>,
    /// What a read timeout does.
    pub read_action: ReadAction,
}

/// When an answer that has stopped in the middle is ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stall {
    /// As after `read`, where the length of the answer is known; with [`ReadAction::Option`] never.
    Auto,
    /// Never.
    Off,
    /// After this long, wherever an answer may be unfinished.
    After(Duration),
}

/// What a read timeout does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadAction {
    /// Abort the socket.
    Abort,
    /// Set `SO_RCVTIMEO`, which ends every blocking receive after that time.
    Option,
}

/// When a destination counts as sick, and what then.
#[derive(Clone, Debug, PartialEq)]
pub struct BreakerPolicy {
    /// False after `breaker = "off"`; the other values are then kept but without effect.
    pub enabled: bool,
    /// Trips when at least this share of the window failed; above 0, at most 1.
    pub failure_rate: Option<f64>,
    /// Calls that are looked at, at most [`agent_common::window::SLOTS`].
    pub window: u32,
    /// Older calls do not count.
    pub window_age: Duration,
    /// Fewer calls than this are never judged by a rate. Between 1 and `window`.
    pub min_calls: u32,
    /// Trips at this many failures in a row; never `Some(0)`.
    pub consecutive_failures: Option<u32>,
    /// A successful call that took longer is slow.
    pub slow_call: Option<Duration>,
    /// Trips when at least this share of the window was slow; above 0, at most 1.
    pub slow_call_rate: Option<f64>,
    /// When an exchange without an answer counts as failed.
    pub hung: Hung,
    /// A connect that a live program gives up after this long without an answer failed.
    pub gave_up: Option<Duration>,
    /// Who shares a breaker.
    pub scope: Scope,
    /// How long it stays open before the first probe.
    pub cooldown: Duration,
    /// Where the doubling of the cooldown ends; never below `cooldown`.
    pub cooldown_max: Duration,
    /// Whether the agent dials an open destination by itself.
    pub redial: bool,
    /// Probes at a time while half-open.
    pub probes: u32,
    /// Successful probes that close it.
    pub successes_to_close: u32,
    /// At most this share of one name's addresses may be open at a time.
    pub max_open_share: Option<f64>,
    /// Statuses that count as failures; empty: none.
    pub failure_status: Vec<StatusPattern>,
    /// What happens to connections that exist when it opens.
    pub on_open: OnOpen,
    /// What a refused program is told.
    pub errno: Errno,
}

/// When an exchange without an answer counts as failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hung {
    /// When the whole destination has fallen silent.
    Auto,
    /// Never.
    Off,
    /// After this long, whatever else the destination does.
    After(Duration),
}

/// Who shares a breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Each workload has its own.
    Workload,
    /// One for all workloads of the node.
    Node,
}

/// A status, or a hundred of them, that counts as a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatusPattern {
    /// `5xx` is `Class(5)`; 4 or 5.
    Class(u8),
    /// One status, 400 to 599.
    Code(u16),
}

/// What happens to existing connections when a breaker opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnOpen {
    /// They live on.
    Keep,
    /// Idle ones are aborted.
    DrainIdle,
    /// All are aborted.
    Abort,
}

/// What a refused `connect()` returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Errno {
    /// Connection refused.
    ConnRefused,
    /// Connection timed out.
    TimedOut,
    /// No route to host.
    HostUnreach,
    /// Network is unreachable.
    NetUnreach,
    /// Connection reset by peer.
    ConnReset,
    /// Operation not permitted.
    Perm,
}

impl Errno {
    /// All of them, in the order of the documentation.
    pub const ALL: [Self; 6] = [
        Self::ConnRefused,
        Self::TimedOut,
        Self::HostUnreach,
        Self::NetUnreach,
        Self::ConnReset,
        Self::Perm,
    ];

    /// The number, positive, as in `errno.h`.
    pub const fn number(self) -> i32 {
        match self {
            Self::ConnRefused => libc::ECONNREFUSED,
            Self::TimedOut => libc::ETIMEDOUT,
            Self::HostUnreach => libc::EHOSTUNREACH,
            Self::NetUnreach => libc::ENETUNREACH,
            Self::ConnReset => libc::ECONNRESET,
            Self::Perm => libc::EPERM,
        }
    }

    /// The name, as it is written in a configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ConnRefused => "ECONNREFUSED",
            Self::TimedOut => "ETIMEDOUT",
            Self::HostUnreach => "EHOSTUNREACH",
            Self::NetUnreach => "ENETUNREACH",
            Self::ConnReset => "ECONNRESET",
            Self::Perm => "EPERM",
        }
    }
}

/// How far programs may retry.
#[derive(Clone, Debug, PartialEq)]
pub struct RetryPolicy {
    /// False after `retry = "off"`; the other values are then kept but without effect.
    pub enabled: bool,
    /// Retries of one operation, the first attempt not counted.
    pub limit: Option<u32>,
    /// Retries as a share of attempts.
    pub budget: Option<f64>,
    /// Time over which the budget is reckoned.
    pub window: Duration,
    /// Retries a second that are always allowed.
    pub min_per_second: u32,
    /// Waits before retries.
    pub backoff: Option<Backoff>,
    /// Connects held back at a time.
    pub max_held: u32,
    /// Refusals a second to one task, beyond which connects are held instead.
    pub spin_per_second: Option<u32>,
    /// Whether retries of non-idempotent requests are refused.
    pub refuse_non_idempotent: bool,
}

/// Waits before retries: uniform between 0 and `min(base * 2^n, max)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backoff {
    /// Bound of the first wait.
    pub base: Duration,
    /// Bound of every wait; never below `base`.
    pub max: Duration,
}

/// Bulkheads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Live connections.
    pub connections: Option<u32>,
    /// SYNs without an answer.
    pub pending: Option<u32>,
    /// Connects a second.
    pub connects_per_second: Option<u32>,
}

impl Limits {
    /// None at all.
    pub const OFF: Self = Self {
        connections: None,
        pending: None,
        connects_per_second: None,
    };
}

/// The agent's own sizes and its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgentConfig {
    /// Rows for (workload, namespace, destination).
    pub max_destinations: u32,
    /// Size of the event ring; a power of two.
    pub ring_bytes: u32,
    /// Events kept for `backstop events`.
    pub events_kept: u32,
    /// Form of the log.
    pub log: LogFormat,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One object a line.
    Json,
}

impl Config {
    /// A policy by the index that [`Config::resolve`] and the kernel entries use: 0 is the
    /// defaults, i + 1 is `policies[i]`. `None` beyond the last one.
    pub fn policy(&self, index: usize) -> Option<&Policy> {
        match index {
            0 => Some(&self.defaults),
            i => self.policies.get(i - 1),
        }
    }
}
