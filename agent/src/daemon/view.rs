//! Rows as `status` shows them.

use std::collections::{HashMap, HashSet};

use agent_common::{OTHER_ROW, Row as KernelRow};

use super::{latency::Latencies, plan::Plan};
use crate::{
    control::api::{self, Failures, Held, Latency, Rejections, Retry, TimeoutsMs, Windows},
    core::{BreakerView, Nanos, Reason, ReasonKind, RowId, State, WindowKind, WindowStats, window},
    kernel::{Table, cgroup::Names},
    policy::Destination,
};

/// What a row of all those without one of their own is called.
pub const OTHER: &str = "other";

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
    /// The last five minutes.
    pub latencies: &'a Latencies,
    /// Rows that nobody is to see.
    pub hidden: HashSet<u64>,
    /// Rows on their way out.
    pub leaving: &'a [u32],
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
        let stats = self.stats(id, row, view);
        let until = |at: Nanos| at.0.saturating_sub(self.now.0) / agent_common::NANOS_PER_MS;
        let since = view.map_or(row.created_ns, |view| view.since.0);
        let policy = row.settings.policy;
        api::Row {
            destination: destination(id, row),
            workload: workload(id, row, names),
            name: None,
            netns: (row.netns_inode != 0).then_some(u64::from(row.netns_inode)),
            policy: self.plan.name(policy).to_string(),
            state: view.map_or(api::State::Closed, |view| state(view.state)),
            state_age_ms: if id.index == OTHER_ROW {
                0
            } else {
                self.now.0.saturating_sub(since) / agent_common::NANOS_PER_MS
            },
            reason: view.map_or(api::Reason::NONE, |view| reason(view.reason)),
            next_probe_in_ms: view.and_then(|view| view.next_probe_at).map(until),
            generation: self.table.verdict(id.index).generation,
            next_redial_in_ms: view.and_then(|view| view.next_redial_at).map(until),
            bypassed_for_safety: false,
            windows: Windows {
                connects: api::Connects {
                    calls: u64::from(stats.calls),
                    failures: u64::from(stats.failures),
                    failure_rate: stats.failure_rate,
                    consecutive: u64::from(stats.consecutive),
                },
                ..Windows::default()
            },
            attempts: row.attempts,
            established: row.established,
            responses: 0,
            in_flight: row.in_flight,
            abandoned: row.abandoned,
            stale: 0,
            local: row.local,
            failures: failures(row),
            rejected: Rejections {
                breaker: row.rejected_breaker,
                ..Rejections::default()
            },
            would_reject: Rejections {
                breaker: row.would_reject_breaker,
                ..Rejections::default()
            },
            held: Held::default(),
            would_timeout: row.would_timeout,
            hung_recovered: 0,
            retry: Retry::default(),
            connect_latency_us: self.latency(id, row),
            response_latency_us: Latency::default(),
            timeouts_ms: TimeoutsMs {
                connect: (row.settings.connect_timeout_ms != 0
                    && row.settings.flags & agent_common::row::ROW_PROTECTED == 0)
                    .then_some(u64::from(row.settings.connect_timeout_ms)),
                ..TimeoutsMs::default()
            },
        }
    }

    /// Latencies of connects over the last five minutes.
    pub fn latency(&self, id: RowId, row: &KernelRow) -> Latency {
        let histogram = self.table.histogram(row.histogram);
        self.latencies
            .of(id, histogram.as_ref(), row.connect_latency_max_us)
    }

    /// The window as the row's breaker judges it.
    fn stats(&self, id: RowId, row: &KernelRow, view: Option<&BreakerView>) -> WindowStats {
        let settings = self.plan.breaker(row.settings.policy);
        let (floor_seq, floor_at) =
            view.map_or((0, Nanos::ZERO), |view| (view.floor_seq, view.floor_at));
        match self.table.window(id.index) {
            Some(window) if id.index != OTHER_ROW => window::evaluate_since(
                &window,
                row.connect_calls,
                floor_seq,
                floor_at,
                self.now,
                settings,
            ),
            _ => WindowStats {
                calls: 0,
                failures: 0,
                failure_rate: 0.0,
                consecutive: 0,
                trip: None,
            },
        }
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

/// Failures by outcome.
pub fn failures(row: &KernelRow) -> Failures {
    Failures {
        refused: row.failed_refused,
        connect_timeout: row.failed_connect_timeout,
        unreachable: row.failed_unreachable,
        reset: row.failed_reset,
        gave_up: row.failed_gave_up,
        other: row.failed_other,
        ..Failures::default()
    }
}

/// A core state in the words of the interface.
pub fn state(state: State) -> api::State {
    match state {
        State::Closed => api::State::Closed,
        State::Open => api::State::Open,
        State::HalfOpen => api::State::HalfOpen,
        State::ForcedOpen => api::State::ForcedOpen,
        State::ForcedClosed => api::State::ForcedClosed,
    }
}

/// A core reason in the words of the interface.
pub fn reason(reason: Reason) -> api::Reason {
    api::Reason {
        window: match reason.window {
            WindowKind::Connects => api::Window::Connects,
            WindowKind::Exchanges => api::Window::Exchanges,
            WindowKind::None => api::Window::None,
        },
        kind: match reason.kind {
            ReasonKind::FailureRate => api::ReasonKind::FailureRate,
            ReasonKind::ConsecutiveFailures => api::ReasonKind::ConsecutiveFailures,
            ReasonKind::SlowCallRate => api::ReasonKind::SlowCallRate,
            ReasonKind::ProbeFailed => api::ReasonKind::ProbeFailed,
            ReasonKind::Manual => api::ReasonKind::Manual,
            ReasonKind::None => api::ReasonKind::None,
        },
        value: reason.value,
        threshold: reason.threshold,
    }
}
