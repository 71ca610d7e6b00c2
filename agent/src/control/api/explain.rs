//! `explain --json`: what holds for a destination, and why.

use serde::{Deserialize, Serialize};

use super::{ManualState, Mode, Paused, Row, words};

/// The whole of `explain --json` and of `GET /v1/explain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    /// As it was understood: the canonical form of what was asked for.
    pub destination: String,
    /// Names that the address is known by.
    #[serde(default)]
    pub names: Vec<String>,
    /// Addresses that are known of the name, if a name was asked for. The policy below is that of one of
    /// them; each row says its own.
    #[serde(default)]
    pub addresses: Vec<String>,
    /// Path of the cgroup below the v2 mount; `None`: none was asked for, and policies that name
    /// workloads are left out.
    pub workload: Option<String>,
    /// As configured; a pause does not change it.
    pub mode: Mode,
    /// The pause in force.
    pub paused: Option<Paused>,
    /// The configuration file; `None`: the built-in configuration. Lines below are of it.
    pub file: Option<String>,
    /// The policy that applies.
    pub policy: String,
    /// Why, in one sentence.
    pub why: String,
    /// What protects the destination: it is counted, and never refused or timed out.
    pub protected: Option<Protection>,
    /// Every policy, the one that applies first; the defaults last.
    pub candidates: Vec<Candidate>,
    /// Every setting of the policy that applies, in the order of the built-in configuration.
    pub settings: Vec<Setting>,
    /// Operators' orders for the destination, newest first, however they spell it; also for workloads not
    /// seen yet. For a row the newest that is for its workload is in force.
    pub manual: Vec<ManualState>,
    /// Rows that exist now: of the workload, or of all.
    pub rows: Vec<ExplainedRow>,
}

/// An entry of `[protected]`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Protection {
    /// The entry, such as `0.0.0.0/0:53`.
    pub by: String,
    /// Its line; `None`: it is built in.
    pub line: Option<u64>,
}

words! {
    /// What came of a policy that was asked.
    Fit {
        /// It applies.
        Applies = "applies",
        /// It matches too, but another one goes before it.
        Loses = "loses",
        /// It is not for this destination or workload.
        NoMatch = "no_match",
    }
}

/// A policy that was asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its name; `default` for the defaults.
    pub policy: String,
    /// What came of it.
    pub fit: Fit,
    /// The destination of the policy that matched, if it names any.
    pub destination: Option<String>,
    /// The workload of the policy that matched, if it names any.
    pub workload: Option<String>,
    /// The reason in one sentence.
    pub why: String,
    /// Where it begins in the file.
    pub line: Option<u64>,
}

words! {
    /// Who says what a setting is.
    SettingSource {
        /// The policy that applies.
        Policy = "policy",
        /// `[defaults]` of the file.
        Defaults = "defaults",
        /// Nobody but the agent itself.
        BuiltIn = "built-in",
    }
}

/// A setting in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// Its key in a configuration file, such as `breaker.cooldown`.
    pub key: String,
    /// Its value as text; `breaker` and `retry` themselves are `on` or `off`.
    pub value: String,
    /// Who says so.
    pub source: SettingSource,
    /// The line that says so; `None`: it is built in.
    pub line: Option<u64>,
    /// Why it has no effect here; `None`: it has.
    pub inert: Option<String>,
}

/// A row that exists, and what the agent has learned about it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExplainedRow {
    /// Why the row has its policy: resolved for its own workload.
    pub why: String,
    /// The workload whose breaker is open instead of this one's own (`scope = "node"`).
    #[serde(default)]
    pub opened_by: Option<String>,
    /// How long a live program must have waited for a connect, for giving up to count as a
    /// failure, ms: the policy's `gave_up` adapted to the destination. `None`: never.
    pub gave_up_connect_ms: Option<u64>,
    /// The same for an exchange.
    pub gave_up_exchange_ms: Option<u64>,
    /// As `status --json` shows it.
    pub row: Row,
}
