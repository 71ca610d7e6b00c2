//! `doctor --json`: whether a node is really protected.

use serde::{Deserialize, Serialize};

use super::{Mode, Paused, words};

words! {
    /// How a check ended.
    CheckStatus {
        /// As it should be.
        Ok = "ok",
        /// Protected, and something to know.
        Warn = "warn",
        /// Not protected, or not as it was asked for.
        Fail = "fail",
        /// Could not be looked at, or need not.
        Skip = "skip",
    }
}

words! {
    /// Where a program runs, seen from ours.
    Position {
        /// Before ours.
        Before = "before",
        /// After ours.
        After = "after",
    }
}

/// The whole of `doctor --json` and of `GET /v1/doctor`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DoctorReport {
    /// Version of whoever has looked: the agent, or without one the command.
    pub version: String,
    /// No check has failed.
    pub ok: bool,
    /// The agent; `None`: none answers.
    pub agent: Option<DoctorAgent>,
    /// What was looked at, the worst first.
    pub checks: Vec<Check>,
    /// Every hook of every watched control group; none without an agent.
    pub hooks: Vec<HookReport>,
}

/// The agent that has answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DoctorAgent {
    /// Its process.
    pub pid: u32,
    /// As configured; a pause does not change it.
    pub mode: Mode,
    /// The pause in force.
    pub paused: Option<Paused>,
    /// Since it was ready, ms.
    pub uptime_ms: u64,
    /// Enforcement is proven.
    pub ready: bool,
    /// Since the event thread's last heartbeat, ms; beyond 3,000 the kernel refuses nothing.
    pub heartbeat_ms_ago: u64,
    /// The watched control groups, whether they are there or not.
    pub cgroups: Vec<String>,
    /// The configuration file; `None`: the built-in one.
    pub config_file: Option<String>,
    /// Where its state is kept.
    pub state_dir: String,
    /// Events that found no room since the start.
    pub lost_events: u64,
    /// Rows of destinations.
    pub rows: DoctorRows,
    /// Memory.
    pub memory: DoctorMemory,
    /// Connections that existed at the start and are followed since.
    pub adopted: u64,
}

/// The table of destinations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorRows {
    /// Rows in use.
    pub in_use: u64,
    /// Of so many (`max_destinations`).
    pub most: u64,
    /// Rows given up to make room.
    pub evicted: u64,
    /// Connects counted in the row of all those without one of their own.
    pub other_attempts: u64,
    /// Latency histograms that are lent.
    pub histograms: u64,
    /// Of so many.
    pub histograms_most: u64,
}

/// Memory, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorMemory {
    /// Of the process, resident, its mapped arrays included; `None`: unknown.
    pub resident: Option<u64>,
    /// Of the kernel's maps and programs that belong to it.
    pub kernel: Option<u64>,
    /// The limit of the agent's own control group, or the nearest one above.
    pub limit: Option<u64>,
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// A word.
    pub name: String,
    /// How it ended.
    pub status: CheckStatus,
    /// What was found, in plain sentences.
    pub what: String,
    /// What to do about it.
    #[serde(rename = "do")]
    pub remedy: Option<String>,
}

/// One hook of one watched control group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HookReport {
    /// The directory.
    pub cgroup: String,
    /// The hook, as in the metric `backstop_attached`.
    pub hook: String,
    /// Our program runs there, as the kernel says.
    pub attached: bool,
    /// Since a connect of the self-test last proved it, ms; `None`: never, or the self-test does not reach
    /// this hook.
    pub verified_ms_ago: Option<u64>,
    /// Other programs on it, in the order in which they run; those of groups below first.
    pub others: Vec<OtherProgram>,
}

/// Somebody else's program on one of our hooks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherProgram {
    /// Its id, as `bpftool prog show id` takes it.
    pub id: u32,
    /// Its name; empty: it has none.
    pub name: String,
    /// When it runs.
    pub position: Position,
    /// The group that it is attached to: the watched one, one above, or one below.
    pub cgroup: String,
    /// How programs are attached there: `multi`, `override`.
    pub attach_flags: Vec<String>,
    /// Whether it is able to change what ours decides.
    pub can_change_verdict: bool,
}
