//! Every metric: name, kind, help, labels.

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only ever grows, from 0 at the row's or the agent's start.
    Counter,
    /// A current value.
    Gauge,
    /// Cumulative buckets, a sum and a count.
    Histogram,
}

/// A metric's declaration.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Full name.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// One sentence for a person.
    pub help: &'static str,
    /// Labels besides those of the row.
    pub labels: &'static [&'static str],
    /// Whether it has the labels [`ROW_LABELS`].
    pub per_row: bool,
}

/// Labels of every metric that belongs to a row.
pub const ROW_LABELS: [&str; 3] = ["destination", "workload", "policy"];

macro_rules! metrics {
    ($($kind:ident $scope:ident $id:ident = $name:literal [$($label:literal),*]: $help:literal;)*) => {
        $(
            #[doc = $help]
            pub const $id: Metric = Metric {
                name: concat!("backstop_", $name),
                kind: Kind::$kind,
                help: $help,
                labels: &[$($label),*],
                per_row: metrics!(@$scope),
            };
        )*

        /// All of them, in the order of the page.
        pub const ALL: &[Metric] = &[$($id),*];
    };
    (@row) => { true };
    (@node) => { false };
}

metrics! {
    Counter row ATTEMPTS = "attempts_total" []:
        "Connects begun (SYNs sent).";
    Counter row ESTABLISHED = "established_total" []:
        "Connects established.";
    Counter row FAILURES = "failures_total" ["kind"]:
        "Connects and exchanges that the destination failed, by outcome.";
    Counter row ABANDONED = "abandoned_total" []:
        "Connects and exchanges that the program itself ended before an answer; never a failure.";
    Counter row THROTTLED = "throttled_total" []:
        "Answers that asked for fewer calls: HTTP 429, 503 with Retry-After, an account's own limit.";
    Counter row REJECTED = "rejected_total" ["reason"]:
        "Connects refused by Backstop, by reason; they never reached the destination.";
    Counter row WOULD_REJECT = "would_reject_total" ["reason"]:
        "Connects that observe mode let pass and enforce mode would have refused, by reason.";
    Counter row WOULD_REJECT_OUTCOMES = "would_reject_outcomes_total" ["outcome"]:
        "What became of the connects that observe mode let pass: succeeded or failed.";
    Counter row HELD = "held_total" ["reason"]:
        "Connects that were made to wait, by reason: backoff before a retry, or a task that spins.";
    Counter row RETRIES = "retries_total" []:
        "Connects that were retries of one that had failed.";
    Counter row LIVE_RETRIES = "live_retries_total" []:
        "Requests of HTTP/1 in the clear that were repeated on the connection on which they had failed.";
    Counter row NON_IDEMPOTENT = "non_idempotent_total" ["result"]:
        "Retries of requests that are not idempotent, by result: passed, refused, or would_refuse in observe mode.";
    Gauge row RETRY_BUDGET = "retry_budget_tokens" []:
        "Retries that the budget still allows; absent without a budget.";
    Histogram row OPERATION_ATTEMPTS = "operation_attempts" []:
        "Attempts for each operation: 1 where nothing was retried.";
    Counter row TIMEOUTS = "timeouts_total" ["kind"]:
        "Calls ended by a timeout of Backstop, by timeout.";
    Gauge row BREAKER_STATE = "breaker_state" ["state"]:
        "1 for the state that the breaker is in, 0 for the others.";
    Counter row TRANSITIONS = "breaker_transitions_total" ["from", "to", "reason"]:
        "Changes of the breaker's state.";
    Histogram row CONNECT_DURATION = "connect_duration_seconds" []:
        "Time from SYN to established, of established connects.";
    Histogram row RESPONSE_DURATION = "response_duration_seconds" []:
        "Time from the first byte of a request to the first byte of its answer.";
    Gauge row IN_FLIGHT = "in_flight" []:
        "Connects and exchanges begun that have no outcome yet.";
    Gauge row CONNECTIONS = "connections" []:
        "Live connections, from the SYN until the program closes them or they break.";
    Counter node EVENTS_LOST = "events_lost_total" []:
        "Kernel events that found no room in the ring buffer; counters do not depend on them.";
    Gauge node DESTINATIONS = "destinations" []:
        "Rows in use: one per workload, network namespace and destination.";
    Counter node DESTINATIONS_EVICTED = "destinations_evicted_total" []:
        "Rows given up to make room for others.";
    Histogram node REACTION = "reaction_seconds" []:
        "Time from a failure in the kernel to the verdict that it led to.";
    Counter node CONFIG_RELOADS = "config_reloads_total" ["result"]:
        "Configurations read after the start, by result: ok, or error and the old one stays.";
    Gauge node ATTACHED = "attached" ["hook"]:
        "1 for a kernel hook that is attached and seen to work, else 0.";
    Gauge node PAUSED = "paused" []:
        "1 while an operator has switched every verdict and timeout off, else 0.";
    Gauge node BUILD_INFO = "build_info" ["version"]:
        "Always 1; the labels say what runs.";
}
