//! A configuration in the form that the kernel and the core take.

use std::sync::Arc;

use agent_common::{
    PolicyKey, RetrySettings, Settings, Statuses,
    budget::{NO_BUDGET, WHOLE_PPM, epoch_scale},
    retry::NO_LIMIT,
    row::{
        FAIL_5XX, FAIL_LISTED, ROW_CHUNKS, ROW_LENGTHS, ROW_LIMITED, ROW_PROTECTED, ROW_REFUSES,
        ROW_REQUESTS, ROW_RETRIES,
    },
    syn::first_timeout_ticks,
};

use crate::{
    core::{BreakerSettings, HungRule, Nanos, WaitLimits},
    policy::{
        Config, Destination, Hung, KnownName, Limits, OnOpen, Policy, ReadAction, Scope, Stall,
        StatusPattern,
    },
};

/// How long a probe may take beyond the connect timeout before its slot is taken back.
const LEASE_SLACK: Nanos = Nanos::from_secs(1);

/// How long a probe that is a whole exchange may take beyond the connect timeout.
const EXCHANGE_LEASE: Nanos = Nanos::from_secs(30);

/// What the machine adds to a policy's numbers.
#[derive(Clone, Copy, Debug)]
pub struct Ticks {
    /// Length of a kernel tick, ns.
    pub tick_ns: u64,
    /// See [`crate::kernel::clock::syn_repeats_are_linear`].
    pub syn_linear: bool,
    /// Calls that the windows hold, since the start.
    pub window_calls: u32,
}

/// A configuration and everything derived from it. Policies have the index that
/// [`Config::resolve`] gives: 0 is the defaults.
#[derive(Clone)]
pub struct Plan {
    /// The configuration itself.
    pub config: Config,
    /// By policy: for the kernel.
    pub settings: Vec<Settings>,
    /// By policy: for the core.
    pub breakers: Vec<Arc<BreakerSettings>>,
    /// By policy: what the kernel is told about retries.
    pub retries: Vec<RetrySettings>,
    /// By policy: the statuses that are failures.
    pub statuses: Vec<Statuses>,
    /// By policy: the timeouts that the agent watches.
    pub waits: Vec<WaitLimits>,
    /// By policy: what becomes of connections when its breaker opens.
    pub on_open: Vec<OnOpen>,
    /// By policy: the name.
    pub names: Vec<Arc<str>>,
    /// For the kernel's policy trie: key, prefix length, policy.
    pub entries: Vec<(PolicyKey, u32, u32)>,
}

impl Plan {
    /// Derives everything.
    pub fn new(config: Config, ticks: Ticks) -> Self {
        let policies: Vec<&Policy> = std::iter::once(&config.defaults)
            .chain(&config.policies)
            .collect();
        let settings = (0..)
            .zip(&policies)
            .map(|(i, policy)| kernel_settings(policy, i, ticks))
            .collect();
        let breakers = policies
            .iter()
            .map(|policy| Arc::new(breaker_settings(policy, ticks)))
            .collect();
        let retries = policies
            .iter()
            .map(|policy| retry_settings(policy))
            .collect();
        let statuses = policies.iter().map(|policy| statuses(policy)).collect();
        let waits = policies.iter().map(|policy| wait_limits(policy)).collect();
        let on_open = policies.iter().map(|p| p.breaker.on_open).collect();
        let names = policies
            .iter()
            .map(|policy| Arc::from(policy.name.as_str()))
            .collect();
        let entries = config
            .kernel_entries()
            .into_iter()
            .map(|entry| (entry.key, entry.prefix_len, entry.policy))
            .collect();
        Self {
            settings,
            breakers,
            retries,
            statuses,
            waits,
            on_open,
            names,
            entries,
            config,
        }
    }

    /// What holds for a destination that is known by these names when this workload calls it.
    pub fn settings_for(
        &self,
        destination: &Destination,
        workload: &str,
        names: &[KnownName],
    ) -> Settings {
        let resolution = self.config.resolve(destination, Some(workload), names);
        let mut settings = self.settings[resolution.policy];
        if resolution.protected {
            settings.flags |= ROW_PROTECTED;
        }
        settings
    }

    /// The breaker of a row with these settings. Out of range (a row of an older plan): defaults.
    pub fn breaker(&self, policy: u32) -> &Arc<BreakerSettings> {
        self.breakers
            .get(policy as usize)
            .unwrap_or(&self.breakers[0])
    }

    /// Whether rows of some policy share their breaker with those of other workloads.
    pub fn shares_breakers(&self) -> bool {
        self.breakers.iter().any(|breaker| breaker.node_scope)
    }

    /// The timeouts of a row with these settings that the agent watches. Out of range: defaults.
    pub fn waits(&self, policy: u32) -> &WaitLimits {
        self.waits.get(policy as usize).unwrap_or(&self.waits[0])
    }

    /// What a row with these settings has been told about retries. Out of range: defaults.
    pub fn retry(&self, policy: u32) -> &RetrySettings {
        self.retries
            .get(policy as usize)
            .unwrap_or(&self.retries[0])
    }

    /// What becomes of the connections of a row with these settings when its breaker opens. Out of
    /// range: defaults.
    pub fn on_open(&self, policy: u32) -> OnOpen {
        let of = self.on_open.get(policy as usize);
        *of.unwrap_or(&self.on_open[0])
    }

    /// The same without the timeouts that the agent watches itself.
    pub fn without_waits(&self) -> Self {
        let none = WaitLimits {
            read: None,
            deadline: None,
            write: None,
            stall: None,
            stall_widely: false,
            by_option: false,
        };
        Self {
            waits: vec![none; self.waits.len()],
            ..self.clone()
        }
    }

    /// Whether some policy has options set from outside.
    pub fn sets_options(&self) -> bool {
        self.waits.iter().any(|waits| waits.options().is_some())
    }

    /// The name of a policy.
    pub fn name(&self, policy: u32) -> &Arc<str> {
        self.names.get(policy as usize).unwrap_or(&self.names[0])
    }
}

fn millis(duration: std::time::Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}

fn nanos(duration: std::time::Duration) -> Nanos {
    Nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
}

fn kernel_settings(policy: &Policy, index: u32, ticks: Ticks) -> Settings {
    // A deadline bounds the attempt as well.
    let connect = policy.timeouts.connect;
    let connect_timeout_ms = millis(policy.timeouts.deadline.map_or(connect, |d| d.min(connect)));
    let limited = if policy.limits == Limits::OFF {
        0
    } else {
        ROW_LIMITED
    };
    Settings {
        connect_timeout_ms,
        syn_timeout_ticks: first_timeout_ticks(connect_timeout_ms, ticks.tick_ns, ticks.syn_linear),
        gave_up_ms: policy.breaker.gave_up.map_or(0, millis),
        probe_limit: policy.breaker.probes,
        policy: index,
        flags: limited
            | match (policy.retry.enabled, policy.retry.refuse_non_idempotent) {
                (false, _) => 0,
                (true, false) => ROW_RETRIES,
                (true, true) => ROW_RETRIES | ROW_REFUSES,
            }
            | match wait_limits(policy) {
                WaitLimits { stall: None, .. } => 0,
                WaitLimits {
                    stall_widely: false,
                    ..
                } => ROW_LENGTHS,
                _ => ROW_LENGTHS | ROW_CHUNKS,
            }
            | if judges_waits(policy) {
                ROW_REQUESTS
            } else {
                0
            },
        slow_call_us: policy.breaker.slow_call.map_or(0, |slow| {
            u32::try_from(slow.as_micros()).unwrap_or(u32::MAX)
        }),
        fail_status: match statuses(policy) {
            none if none == Statuses::default() => 0,
            all if all == set_of([StatusPattern::Class(5)]) => FAIL_5XX,
            _ => FAIL_LISTED,
        },
        exchange_gave_up_ms: policy.breaker.gave_up.map_or(0, millis),
        keepalive_s: policy
            .timeouts
            .keepalive
            .map_or(0, |idle| millis(idle).div_ceil(1000)),
        connections_most: policy.limits.connections.unwrap_or(0),
        pending_most: policy.limits.pending.unwrap_or(0),
        connects_per_second: policy.limits.connects_per_second.unwrap_or(0),
        limit_errno: policy.breaker.errno.number().unsigned_abs(),
    }
}

/// The statuses that a policy takes for failures.
fn statuses(policy: &Policy) -> Statuses {
    set_of(policy.breaker.failure_status.iter().copied())
}

fn set_of(patterns: impl IntoIterator<Item = StatusPattern>) -> Statuses {
    let mut statuses = Statuses::default();
    for pattern in patterns {
        match pattern {
            StatusPattern::Class(class) => {
                let first = u32::from(class) * 100;
                (first..first + 100).for_each(|status| statuses.insert(status));
            }
            StatusPattern::Code(status) => statuses.insert(u32::from(status)),
        }
    }
    statuses
}

/// Whether the policy says how long an answer may be waited for, so that it matters when a request ends.
/// (Where `hung` is "auto", others have to be silent, too.)
fn judges_waits(policy: &Policy) -> bool {
    let limits = wait_limits(policy);
    let hung = policy.breaker.enabled && matches!(policy.breaker.hung, Hung::After(_));
    limits.read.is_some() || limits.stall.is_some() || hung
}

/// A policy whose breaker wants more failures than this is not waited for by the limit of retries.
const MOST_TO_OPEN: u32 = 10;

/// Retries of a single operation by which the breaker opens while nothing else happens; 0 where it never
/// does. A limit below that would keep the breaker of a destination that is down closed for as long as
/// only one program calls it; then nobody would look out for its return.
fn retries_to_open(policy: &Policy) -> u32 {
    let breaker = &policy.breaker;
    if !breaker.enabled {
        return 0;
    }
    let by_rate = breaker.failure_rate.map(|_| breaker.min_calls);
    let calls = [breaker.consecutive_failures, by_rate]
        .into_iter()
        .flatten()
        .min();
    calls
        .filter(|calls| *calls <= MOST_TO_OPEN)
        .map_or(0, |calls| calls.saturating_sub(1))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share is from 0 to 1"
)]
fn retry_settings(policy: &Policy) -> RetrySettings {
    let retry = &policy.retry;
    let window_ms = u64::from(millis(retry.window));
    let floor = u64::from(retry.min_per_second) * window_ms / 1000;
    RetrySettings {
        window_ns: nanos(retry.window).0,
        deadline_ns: policy.timeouts.deadline.map_or(0, |d| nanos(d).0),
        budget_ppm: retry.budget.map_or(NO_BUDGET, |share| {
            (share * f64::from(WHOLE_PPM)).round() as u32
        }),
        budget_floor: u32::try_from(floor).unwrap_or(u32::MAX),
        limit: retry
            .limit
            .map_or(NO_LIMIT, |limit| limit.max(retries_to_open(policy))),
        scale: if retry.enabled {
            epoch_scale(nanos(retry.window).0)
        } else {
            0
        },
        spin_per_second: retry.spin_per_second.filter(|_| retry.enabled).unwrap_or(0),
        backoff_base_ms: retry.backoff.as_ref().map_or(0, |b| millis(b.base)),
        backoff_max_ms: retry.backoff.as_ref().map_or(0, |b| millis(b.max)),
        max_held: retry.max_held,
    }
}

fn wait_limits(policy: &Policy) -> WaitLimits {
    let timeouts = &policy.timeouts;
    let by_option = timeouts.read_action == ReadAction::Option;
    let stall = match timeouts.stall {
        // The option bounds each receive in the middle of an answer as well, and the socket lives.
        Stall::Auto => timeouts.read.filter(|_| !by_option),
        Stall::Off => None,
        Stall::After(limit) => Some(limit),
    };
    WaitLimits {
        read: timeouts.read.map(nanos),
        deadline: timeouts.deadline.map(nanos),
        write: timeouts.write.map(nanos),
        stall: stall.map(nanos),
        stall_widely: matches!(timeouts.stall, Stall::After(_)),
        by_option,
    }
}

/// Calls that windows must hold so that every policy can be judged.
pub fn window_calls(config: &Config) -> u32 {
    let policies = std::iter::once(&config.defaults).chain(&config.policies);
    let wanted = policies.map(|policy| {
        let breaker = &policy.breaker;
        let run = breaker.consecutive_failures.unwrap_or(0);
        breaker.window.max(breaker.min_calls).max(run)
    });
    let wanted = wanted.max().unwrap_or(0);
    agent_common::window::blocks_for(wanted) * agent_common::window::BLOCK as u32
}

fn breaker_settings(policy: &Policy, ticks: Ticks) -> BreakerSettings {
    let breaker = &policy.breaker;
    BreakerSettings {
        enabled: breaker.enabled,
        failure_rate: breaker.failure_rate,
        // Shorter only where a reload asked for more than was set up at the start.
        window: breaker.window.min(ticks.window_calls),
        window_age: nanos(breaker.window_age),
        min_calls: breaker.min_calls,
        consecutive_failures: breaker.consecutive_failures.unwrap_or(0),
        cooldown: nanos(breaker.cooldown),
        cooldown_max: nanos(breaker.cooldown_max),
        redial: breaker.redial,
        probes: breaker.probes,
        successes_to_close: breaker.successes_to_close,
        max_open_share: breaker.max_open_share,
        node_scope: breaker.scope == Scope::Node,
        probe_lease: Nanos(
            nanos(policy.timeouts.connect)
                .0
                .saturating_add(LEASE_SLACK.0),
        ),
        slow_call_rate: breaker.slow_call.and(breaker.slow_call_rate),
        exchange_lease: Nanos(
            nanos(policy.timeouts.connect)
                .0
                .saturating_add(EXCHANGE_LEASE.0),
        ),
        hung: match breaker.hung {
            Hung::Auto => HungRule::Auto,
            Hung::Off => HungRule::Off,
            Hung::After(limit) => HungRule::After(nanos(limit)),
        },
        errno: u16::try_from(breaker.errno.number()).unwrap_or(libc::ECONNREFUSED as u16),
    }
}
