//! What a policy says about a breaker.

use super::{HungRule, Nanos, WindowKind};

/// The numbers of one breaker, the same for both of its windows. Shared between all rows of a
/// policy.
///
/// Values that make no sense are not refused here (the policy does that, with file and line); they
/// are read in the nearest harmless way, said at each field, and never make the core panic.
#[derive(Clone, Debug, PartialEq)]
pub struct BreakerSettings {
    /// False for `breaker = "off"`: never trips by itself. An operator can still trip it.
    pub enabled: bool,
    /// Share of failed calls (0 to 1) at which the breaker trips; `None`: off.
    pub failure_rate: Option<f64>,
    /// Share of slow exchanges (0 to 1) at which the breaker trips; `None`: off. What is slow, the
    /// kernel decides ([`agent_common::Settings::slow_call_us`]).
    pub slow_call_rate: Option<f64>,
    /// Calls that are judged together, 1 to [`agent_common::window::SLOTS`]; clamped to that.
    pub window: u32,
    /// Older calls do not count.
    pub window_age: Nanos,
    /// Fewer calls than this never trip by rate.
    pub min_calls: u32,
    /// Failures in a row at which the breaker trips; 0: off.
    pub consecutive_failures: u32,
    /// How long an open breaker refuses before it admits a probe.
    pub cooldown: Nanos,
    /// Longest cooldown after probes failed; less than `cooldown` counts as `cooldown`.
    pub cooldown_max: Nanos,
    /// Whether the agent dials by itself while the breaker is open for connect failures.
    pub redial: bool,
    /// Probes admitted at a time while half-open; 0 counts as 1.
    pub probes: u32,
    /// Successful probes in a row that close the breaker; 0 counts as 1.
    pub successes_to_close: u32,
    /// Share of one name's endpoints (0 to 1) that may be open at a time; `None`: all of them.
    pub max_open_share: Option<f64>,
    /// Whether all workloads of the node share one breaker for each destination.
    pub node_scope: bool,
    /// How long a probe may take before its slot is taken back: connect timeout + 1 s. Less than
    /// 1 ms counts as 1 ms.
    pub probe_lease: Nanos,
    /// The same for a probe that ends with its first exchange: the lease of a connect and the time
    /// that an exchange may take. Less than 1 ms counts as 1 ms.
    pub exchange_lease: Nanos,
    /// When an exchange without an answer counts as failed.
    pub hung: HungRule,
    /// The errno of a refused connect (Linux number, positive).
    pub errno: u16,
}

impl Default for BreakerSettings {
    /// The documented defaults, with the lease of the default connect timeout of 2 s and 30 s more
    /// for an exchange.
    fn default() -> Self {
        Self {
            enabled: true,
            failure_rate: Some(0.5),
            slow_call_rate: None,
            window: 20,
            window_age: Nanos::from_secs(60),
            min_calls: 10,
            consecutive_failures: 5,
            cooldown: Nanos::from_secs(30),
            cooldown_max: Nanos::from_secs(300),
            redial: true,
            probes: 1,
            successes_to_close: 2,
            max_open_share: Some(0.5),
            node_scope: false,
            probe_lease: Nanos::from_secs(3),
            exchange_lease: Nanos::from_secs(33),
            hung: HungRule::Auto,
            errno: 111, // ECONNREFUSED
        }
    }
}

impl BreakerSettings {
    /// Longest cooldown, never below the shortest.
    pub(super) fn cooldown_cap(&self) -> Nanos {
        self.cooldown_max.max(self.cooldown)
    }

    /// Probe slots of a half-open round, at least one: with none, half-open had no exit.
    pub(super) fn probe_limit(&self) -> u32 {
        self.probes.max(1)
    }

    /// Successes that close, at least one.
    pub(super) fn successes_needed(&self) -> u32 {
        self.successes_to_close.max(1)
    }

    /// The lease of a breaker that opened on this window, long enough that renewing it cannot
    /// become a busy loop.
    pub(super) fn lease(&self, opened_on: WindowKind) -> Nanos {
        let lease = match opened_on {
            WindowKind::Exchanges => self.exchange_lease,
            WindowKind::Connects | WindowKind::None => self.probe_lease,
        };
        lease.max(Nanos::from_millis(1))
    }
}
