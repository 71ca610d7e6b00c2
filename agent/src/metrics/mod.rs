//! What Prometheus scrapes. Every metric is declared once, in [`declared`].
//!
//! The daemon hands over plain numbers ([`NodeMetrics`]), [`render`] turns them into text. Counters
//! come from the kernel's own, which never lose an event.

pub mod declared;
mod histogram;
mod render;
#[cfg(test)]
mod tests;

pub use histogram::{
    CONNECT_BOUNDS, Cumulative, REACTION_BOUNDS, RESPONSE_BOUNDS, Reaction, cumulative,
};
pub use render::{RenderError, Rows, SERIES_ROWS, render};

use crate::control::api::{Failures, Held, ReasonKind, Rejections, State, TimeoutKind};

/// The numbers of the node.
#[derive(Default)]
pub struct NodeMetrics {
    /// Version of the agent.
    pub version: String,
    /// Kernel events that found no room in the ring buffer.
    pub events_lost: u64,
    /// Rows in use.
    pub destinations: u64,
    /// Rows given up for others.
    pub destinations_evicted: u64,
    /// From a kernel event to the verdict it led to.
    pub reaction: Cumulative,
    /// Configurations taken over after the start.
    pub reloads_good: u64,
    /// Configurations refused.
    pub reloads_bad: u64,
    /// Every hook by name, and whether the program is attached and was seen to work.
    pub attached: Vec<(String, bool)>,
    /// Whether an operator has switched enforcement off for now.
    pub paused: bool,
    /// Rows, in an order that stays: those beyond [`SERIES_ROWS`] share one series `other`.
    pub rows: Rows,
}

/// The timeouts that end connections, in the order of [`RowMetrics::timeouts`].
pub const TIMEOUTS: [TimeoutKind; 5] = [
    TimeoutKind::Connect,
    TimeoutKind::Read,
    TimeoutKind::Write,
    TimeoutKind::Stall,
    TimeoutKind::Deadline,
];

/// What can happen to the calls of a row only under policies that ask for it: its kinds are on the page
/// from the start of such rows, at 0, so that a rate is there from the first one on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Possible {
    /// A read timeout.
    pub read: bool,
    /// A write timeout.
    pub write: bool,
    /// A stall timeout.
    pub stall: bool,
    /// A deadline.
    pub deadline: bool,
    /// An exchange that counts as hung.
    pub hung: bool,
    /// A limit of connections.
    pub limit: bool,
}

/// The numbers of one row. Rows with the same three labels (in two network namespaces, say) are
/// added up.
#[derive(Clone, Debug)]
pub struct RowMetrics {
    /// Address and port.
    pub destination: String,
    /// As in `status`.
    pub workload: String,
    /// Name of the policy in force.
    pub policy: String,
    /// State of the breaker.
    pub state: State,
    /// SYNs sent.
    pub attempts: u64,
    /// Connects established.
    pub established: u64,
    /// Connects and exchanges without an answer yet.
    pub in_flight: u64,
    /// Connects and exchanges that the program ended itself before an answer.
    pub abandoned: u64,
    /// Answers that asked for fewer calls.
    pub throttled: u64,
    /// What its policy asks for.
    pub possible: Possible,
    /// Failed calls by outcome.
    pub failures: Failures,
    /// Calls refused.
    pub rejected: Rejections,
    /// Calls that observe mode let pass.
    pub would_reject: Rejections,
    /// What became of them: succeeded, failed.
    pub would_reject_outcomes: [u64; 2],
    /// Live connections.
    pub connections: u64,
    /// Connects that were made to wait.
    pub held: Held,
    /// Attempts that were retries.
    pub retries: u64,
    /// Retries on connections that existed.
    pub live_retries: u64,
    /// Retries of requests that are not idempotent: passed, refused, and such as observe mode let pass.
    pub non_idempotent: [u64; 3],
    /// Attempts of all operations: connects, or requests where those are retried on connections that exist.
    pub operation_attempts: u64,
    /// Retries that the budget still allows; `None`: there is no budget.
    pub budget_tokens: Option<u64>,
    /// Operations that took one attempt, two, three, four, and more.
    pub operations: [u64; 5],
    /// Connections ended by each of our timeouts.
    pub timeouts: [u64; TIMEOUTS.len()],
    /// Changes of state so far.
    pub transitions: Vec<Transition>,
    /// Latencies of established connects.
    pub connect: Latencies,
    /// Latencies of answered exchanges.
    pub response: Latencies,
}

/// How often a breaker went from one state to another for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transition {
    /// The state before.
    pub from: State,
    /// The state after.
    pub to: State,
    /// Why.
    pub reason: ReasonKind,
    /// How often so far.
    pub count: u64,
}

/// Latencies of one kind of call since the row exists.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    /// All of them.
    pub count: u64,
    /// Their sum, us.
    pub sum_us: u64,
    /// Calls per kernel bucket, see [`agent_common::histogram`]; empty for a row without a
    /// histogram of its own, which then has only count and sum.
    pub buckets: Vec<u64>,
}
