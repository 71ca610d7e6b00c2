//! Rows as `status` shows them.

mod counters;
mod words;

use std::collections::{HashMap, HashSet};

use agent_common::{
    OTHER_ROW, Retries, Row as KernelRow, budget, limits,
    retry::NO_LIMIT,
    row::{ROW_LIMITED, ROW_PROTECTED},
};

use super::{latency::Latencies, named, orders::Orders, plan::Plan};
use crate::{
    control::api::{self, Latency, Retry, RetryPolicy, TimeoutsMs, Windows},
    core::{BreakerView, Floor, Nanos, RowId, WindowKind, WindowStats, window},
    hosts::HostNames,
    kernel::{Table, cgroup::Names},
    policy::{Destination, KnownName},
};
use counters::traits;
use words::probe;

pub use counters::{
    failures, firings, held, non_idempotent, possible, rejected, tokens, would_reject,
};
pub use words::{bypass, reason, shown, state, timeout_kind, window_kind};

/// What a row of all those without one of their own is called.
pub const OTHER: &str = "other";

/// A half-open row that nobody has called within this time waits for a call.
const CALLED_WITHIN: Nanos = Nanos::from_secs(5);

/// Breakers, from the event thread.
pub type Views = HashMap<RowId, BreakerView>;

/// Everything that a row's view is put together from.
pub struct Viewer<'a> {
    /// The mapped arrays.
    pub table: &'a Table,
    /// The configuration in force.
    pub plan: &'a Plan,
    /// Breakers that are in memory.
    pub views: &'a Views,
    /// The past of connects' latencies.
    pub latencies: &'a Latencies,
    /// The past of responses' latencies.
    pub responses: &'a Latencies,
    /// Rows that nobody is to see.
    pub hidden: HashSet<u64>,
    /// Rows on their way out.
    pub leaving: &'a [u32],
    /// What operators have ordered.
    pub orders: &'a Orders,
    /// Names of destinations.
    pub hosts: &'a HostNames,
    /// CLOCK_MONOTONIC.
    pub now: Nanos,
}

impl Viewer<'_> {
    /// Rows that are shown: the `other` row only once something counted there.
    pub fn rows(&self) -> impl Iterator<Item = (RowId, KernelRow)> + '_ {
        self.table.used().filter(|(id, row)| {
            if id.index == OTHER_ROW {
                return row.attempts != 0 || row.local != 0;
            }
            !self.hidden.contains(&row.key.cgroup_id) && !self.leaving.contains(&id.index)
        })
    }

    /// One row as `status --json` shows it.
    pub fn view(&self, id: RowId, row: &KernelRow, names: &mut Names) -> api::Row {
        let view = self.views.get(&id);
        let connects = self.stats(id, row, view, WindowKind::Connects);
        let exchanges = self.stats(id, row, view, WindowKind::Exchanges);
        let until = |at: Nanos| at.0.saturating_sub(self.now.0) / agent_common::NANOS_PER_MS;
        let since = view.map_or(row.created_ns, |view| view.since.0);
        let policy = row.settings.policy;
        let retries = self.table.retries(id.index);
        let (minute, five_minutes) = self.latency(id, row);
        let workload = workload(id, row, names);
        let known = named::of_row(self.hosts, row);
        let fails = connects.consecutive > 0
            || exchanges.consecutive > 0
            || connects.trip.is_some()
            || exchanges.trip.is_some();
        // A row that has recovered since makes no event that the breaker would hear of.
        let bypassed = view.and_then(|view| view.bypassed).filter(|_| fails);
        let bypassed = bypassed.map(bypass);
        api::Row {
            manual: view.and_then(|view| self.by_hand(view, row, &known, &workload)),
            destination: destination(id, row),
            workload,
            name: known.first().map(|known| known.name.to_string()),
            names: known.iter().map(|known| known.name.to_string()).collect(),
            netns: (row.netns_inode != 0).then_some(u64::from(row.netns_inode)),
            policy: self.plan.name(policy).to_string(),
            state: view.map_or(api::State::Closed, shown),
            state_age_ms: if id.index == OTHER_ROW {
                0
            } else {
                self.now.0.saturating_sub(since) / agent_common::NANOS_PER_MS
            },
            reason: view.map_or(api::Reason::NONE, |view| reason(view.reason)),
            next_probe_in_ms: view
                .filter(|view| view.shared_probe.is_none())
                .and_then(|view| view.next_probe_at)
                .map(until),
            probe: view.and_then(probe),
            waits_for_call: view.and_then(probe) == Some(api::Probe::Free)
                && self.now - Nanos(row.last_connect_ns) > CALLED_WITHIN,
            breaker_off: !self.plan.breaker(policy).enabled,
            generation: self.table.verdict(id.index).generation,
            next_redial_in_ms: view.and_then(|view| view.next_redial_at).map(until),
            bypassed_for_safety: bypassed.is_some(),
            bypassed_reason: bypassed,
            ramp_ends_in_ms: view.and_then(|view| view.ramp_until).map(until),
            windows: Windows {
                connects: api::Connects {
                    calls: u64::from(connects.calls),
                    failures: u64::from(connects.failures),
                    failure_rate: connects.failure_rate,
                    consecutive: u64::from(connects.consecutive),
                },
                exchanges: api::Exchanges {
                    calls: u64::from(exchanges.calls),
                    failures: u64::from(exchanges.failures),
                    failure_rate: exchanges.failure_rate,
                    consecutive: u64::from(exchanges.consecutive),
                    slow_calls: u64::from(exchanges.slow_calls),
                    slow_call_rate: exchanges.slow_call_rate,
                },
            },
            attempts: row.attempts,
            established: row.established,
            responses: row.responses,
            in_flight: u64::from(row.pending()) + row.exchanges_in_flight(),
            abandoned: row.abandoned + row.exchange_abandoned,
            stale: row.stale,
            throttled: u64::from(row.throttled),
            traits: traits(row),
            local: row.local,
            failures: failures(row),
            rejected: rejected(row, &retries),
            would_reject: would_reject(row, &retries),
            would_reject_succeeded: row.would_succeeded,
            would_reject_failed: row.would_failed,
            limits: self.limits(row),
            held: held(&retries),
            would_timeout: row.would_timeout,
            hung_recovered: u64::from(row.hung_recovered),
            retry: self.retry(row, retries),
            retry_policy: self.retry_policy(policy),
            connect_latency_us: five_minutes.0,
            response_latency_us: five_minutes.1,
            connect_latency_1m_us: minute.0,
            response_latency_1m_us: minute.1,
            timeouts_ms: self.timeouts(row),
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "only shown")]
    fn retry(&self, row: &KernelRow, retries: Retries) -> Retry {
        let (retried, attempts) = (retries.total(), row.attempts);
        let live = retries.live_total();
        let all = retries.all_attempts(attempts, row.established, row.requests);
        let repeated = non_idempotent(&retries);
        Retry {
            retries: retried,
            ratio: share(retried, attempts).min(1.0),
            budget_tokens: tokens(self.plan, row, retries, self.now).unwrap_or(0) as f64,
            non_idempotent: repeated.iter().sum(),
            amplification: share(all, all.saturating_sub(retried + live)),
            operations: retries.operations(all),
            live,
            non_idempotent_refused: repeated[1],
            non_idempotent_would_refuse: repeated[2],
        }
    }

    /// What a policy says about retries.
    fn retry_policy(&self, policy: u32) -> RetryPolicy {
        let retry = self.plan.retry(policy);
        if retry.scale == 0 {
            return RetryPolicy::default();
        }
        let on = |value: u32, is_on: bool| is_on.then_some(u64::from(value));
        let backs_off = retry.backoff_base_ms != 0;
        let budget = f64::from(retry.budget_ppm) / f64::from(budget::WHOLE_PPM);
        RetryPolicy {
            limit: on(retry.limit, retry.limit != NO_LIMIT),
            budget: (retry.budget_ppm != budget::NO_BUDGET).then_some(budget),
            backoff_base_ms: on(retry.backoff_base_ms, backs_off),
            backoff_max_ms: on(retry.backoff_max_ms, backs_off),
            spin_per_second: on(retry.spin_per_second, retry.spin_per_second != 0),
        }
    }

    /// Who set the manual state of a breaker.
    fn by_hand(
        &self,
        view: &BreakerView,
        row: &KernelRow,
        names: &[KnownName],
        workload: &str,
    ) -> Option<api::ByHand> {
        view.manual_until?;
        let destination = Destination::from_key(&row.key);
        let order = self
            .orders
            .in_force(&destination, names, workload, self.now)?;
        Some(api::ByHand {
            since: order.since,
            until: order.ends,
            by: order.by.to_string(),
            destination: order.destination.to_string(),
            workload: order.workload.clone(),
        })
    }

    /// The limits in force and what of them is used; none where the destination is protected.
    fn limits(&self, row: &KernelRow) -> api::Limits {
        let settings = &row.settings;
        let is_limited = settings.flags & (ROW_LIMITED | ROW_PROTECTED) == ROW_LIMITED;
        let limit = |most: u32, used: u32| api::Limit {
            limit: (is_limited && most != 0).then_some(u64::from(most)),
            used: u64::from(used),
        };
        let per_second = settings.connects_per_second;
        let taken = limits::taken(row.bucket, self.now.0, per_second);
        api::Limits {
            connections: limit(settings.connections_most, row.live()),
            pending: limit(settings.pending_most, row.pending()),
            connects_per_second: limit(per_second, taken),
        }
    }

    /// The timeouts in force; none where the destination is protected.
    fn timeouts(&self, row: &KernelRow) -> TimeoutsMs {
        let connect = u64::from(row.settings.connect_timeout_ms);
        if connect == 0 || row.settings.flags & ROW_PROTECTED != 0 {
            return TimeoutsMs::default();
        }
        let waits = self.plan.waits(row.settings.policy);
        TimeoutsMs {
            connect: Some(connect),
            read: waits.read.map(Nanos::as_millis),
            write: waits.write.map(Nanos::as_millis),
            deadline: waits.deadline.map(Nanos::as_millis),
            stall: waits.stall.map(Nanos::as_millis),
            keepalive: (row.settings.keepalive_s != 0)
                .then_some(u64::from(row.settings.keepalive_s) * 1000),
        }
    }

    /// Latencies of connects and responses over the last minute, and over the last five.
    fn latency(&self, id: RowId, row: &KernelRow) -> ((Latency, Latency), (Latency, Latency)) {
        let connects = self.table.histogram(row.histogram);
        let responses = self.table.histogram(row.response_histogram);
        let connects = (id, connects.as_ref(), row.connect_latency_max_us);
        let responses = (id, responses.as_ref(), row.response_latency_max_us);
        let minute =
            |of: &Latencies, (id, histogram, longest)| of.last_minute(id, histogram, longest);
        let five =
            |of: &Latencies, (id, histogram, longest)| of.five_minutes(id, histogram, longest);
        (
            (
                minute(self.latencies, connects),
                minute(self.responses, responses),
            ),
            (
                five(self.latencies, connects),
                five(self.responses, responses),
            ),
        )
    }

    /// A window as the row's breaker judges it.
    fn stats(
        &self,
        id: RowId,
        row: &KernelRow,
        view: Option<&BreakerView>,
        kind: WindowKind,
    ) -> WindowStats {
        let settings = self.plan.breaker(row.settings.policy);
        let floor = view
            .zip(kind.index())
            .map_or(Floor::default(), |(view, place)| view.floors[place]);
        let last_seq = match kind {
            WindowKind::Exchanges => row.exchange_calls,
            WindowKind::Connects | WindowKind::None => row.connect_calls,
        };
        let window = if id.index == OTHER_ROW {
            bytemuck::Zeroable::zeroed()
        } else {
            self.table
                .window(id.index, kind, last_seq)
                .unwrap_or(bytemuck::Zeroable::zeroed())
        };
        let last_seq = if id.index == OTHER_ROW { 0 } else { last_seq };
        window::evaluate_since(
            kind, &window, last_seq, floor.seq, floor.at, self.now, settings,
        )
    }
}

/// A part of a whole, 0 to 1; 0 where there is nothing.
#[expect(clippy::cast_precision_loss, reason = "only shown")]
pub fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// The destination as text.
pub fn destination(id: RowId, row: &KernelRow) -> String {
    if id.index == OTHER_ROW {
        OTHER.to_owned()
    } else {
        Destination::from_key(&row.key).to_string()
    }
}

/// The workload as text.
pub fn workload(id: RowId, row: &KernelRow, names: &mut Names) -> String {
    if id.index == OTHER_ROW {
        OTHER.to_owned()
    } else {
        names.name(row.key.cgroup_id, row.last_pid)
    }
}
