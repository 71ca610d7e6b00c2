//! What `doctor` asks of the node: what it knows, gathered at once; the rest is looked into beside the loop.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
};

use agent_common::OTHER_ROW;

use super::{backend::Reply, node::Node, priority, start::HISTOGRAMS};
use crate::{
    control::{
        Backend as _,
        api::{ApiError, DoctorReport, DoctorRows, Timestamp},
    },
    core::{Nanos, WaitLimits},
    doctor::{hooks, node as doctor},
    kernel::clock,
    policy::OnOpen,
};

/// When the self-test last proved a control group.
#[derive(Clone, Copy, Debug, Default)]
pub struct Verified {
    /// connect4 and sock_ops.
    pub at: Nanos,
    /// connect6; `None`: never, for want of IPv6.
    pub at6: Option<Nanos>,
}

/// What is kept for `doctor` alone.
#[derive(Default)]
pub struct Checkup {
    /// By watched control group.
    verified: HashMap<PathBuf, Verified>,
    /// Why the configuration file is not what is in force, and since when.
    config_problem: Option<(Timestamp, String)>,
}

impl Checkup {
    /// A control group was proven just now.
    pub fn proven(&mut self, cgroup: &Path, connect6: bool) {
        let now = clock::now();
        let verified = self.verified.entry(cgroup.to_owned()).or_default();
        verified.at = now;
        if connect6 {
            verified.at6 = Some(now);
        }
    }

    /// A control group's programs are gone.
    pub fn detached(&mut self, cgroup: &Path) {
        self.verified.remove(cgroup);
    }

    /// The file is what is in force (`None`), or why not.
    pub fn configuration(&mut self, problem: Option<String>) {
        self.config_problem = problem.map(|problem| (Timestamp::now(), problem));
    }
}

impl Node {
    /// Answers `doctor`: on a thread of its own, since looking takes time where there are many control groups.
    pub(super) fn doctor(&self, reply: Reply<DoctorReport>) {
        let facts = self.facts();
        tokio::task::spawn_blocking(move || {
            // Whoever asked may have gone.
            let _ = reply.send(Ok::<_, ApiError>(doctor::report(&facts)));
        });
    }

    fn facts(&self) -> doctor::Facts {
        let now = clock::now();
        let ms = |since: Nanos| now.0.saturating_sub(since.0) / agent_common::NANOS_PER_MS;
        let attached = self.attached();
        let watched = self.cgroups.iter().map(|path| {
            let verified = self.checkup.verified.get(path);
            hooks::Watched {
                path: path.clone(),
                is_attached: attached.contains(path),
                verified_ms: verified.map(|verified| ms(verified.at)),
                verified6_ms: verified.and_then(|verified| verified.at6).map(ms),
            }
        });
        let waits = |waits: &WaitLimits| {
            [waits.read, waits.write, waits.deadline, waits.stall]
                .iter()
                .any(Option::is_some)
        };
        let plan = &self.plan;
        doctor::Facts {
            mode: self.api_mode(),
            paused: self.pause.current().cloned(),
            uptime_ms: ms(self.ready_at),
            health: self.handle.health(),
            heartbeat_ms: ms(self.table.heartbeat()),
            is_prompt: priority::is_raised(),
            watched: watched.collect(),
            own: self.kernel.own_programs(),
            mount: self.names.mount().to_owned(),
            config_file: self.source.file.clone(),
            config_problem: self.checkup.config_problem.clone(),
            config_warnings: plan.config.warnings(),
            unresolved: self.unresolved(),
            state_dir: self.pause.directory().to_owned(),
            lost_events: self.table.lost_events() + self.reactor.dropped.load(Ordering::Relaxed),
            rows: self.row_counts(),
            adopted: self.table.counters().adopted,
            can_settle: self.kernel.can_settle(),
            can_adopt: self.kernel.can_adopt(),
            ends_connections: plan.waits.iter().any(waits)
                || plan.on_open.iter().any(|on_open| *on_open != OnOpen::Keep),
            heir: self.heir.as_ref().map(super::takeover::Heir::pid),
        }
    }

    fn row_counts(&self) -> DoctorRows {
        let most = u64::from(self.table.len()) - 1;
        let slots = self
            .table
            .used()
            .flat_map(|(_, row)| [row.histogram, row.response_histogram]);
        DoctorRows {
            in_use: self.evictions.in_use(&self.table),
            most,
            evicted: self.evictions.total,
            other_attempts: self.table.row(OTHER_ROW).map_or(0, |row| row.attempts),
            histograms: slots.filter(|slot| *slot != 0).count() as u64,
            histograms_most: u64::from(HISTOGRAMS).min(2 * most),
        }
    }
}
