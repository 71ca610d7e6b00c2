//! The types of the control interface, as they travel in JSON.
//!
//! Names, order and spelling of the keys are a fixed interface: scripts rely on them, and a test
//! compares them with the contract. Every key is always there; what is unknown is `null`.

mod doctor;
mod event;
mod explain;
mod status;
#[cfg(test)]
pub(crate) mod tests;
mod timestamp;

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

pub use doctor::{
    Check, CheckStatus, DoctorAgent, DoctorMemory, DoctorReport, DoctorRows, HookReport,
    OtherProgram, Position,
};
pub use event::{
    CallsLatency, Cause, ConfigAction, Event, EventRecord, OrderAction, SafetyAction, TimeoutKind,
};
pub use explain::{Candidate, ExplainedRow, Explanation, Fit, Protection, Setting, SettingSource};
pub use status::{
    ByHand, Bypass, Connects, Exchanges, Failures, Held, Latency, Limit, Limits, ManualState, Mode,
    Paused, Probe, Reason, ReasonKind, Rejections, Retry, RetryPolicy, Row, State, StatusEnvelope,
    TimeoutsMs, Unresolved, Window, Windows,
};
pub use timestamp::Timestamp;

use crate::policy::{DestinationArg, read_duration};

/// Declares an enum whose variants are fixed words in JSON, on the command line and in metrics.
macro_rules! words {
    ($(#[$meta:meta])* $name:ident { $($(#[$variant_meta:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord,
            serde::Serialize, serde::Deserialize,
        )]
        pub enum $name {
            $($(#[$variant_meta])* #[serde(rename = $word)] $variant,)*
        }

        impl $name {
            /// Every value, in the order of the contract.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The word in JSON and in metric labels.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}
pub(crate) use words;

/// The process at the other end of the unix socket, as the kernel vouches for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peer {
    /// User id it connected with.
    pub uid: u32,
    /// Process id, in the agent's process namespace; `None` if it lives in one not visible there.
    pub pid: Option<i32>,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.pid {
            Some(pid) => write!(f, "uid {}, pid {pid}", self.uid),
            None => write!(f, "uid {}", self.uid),
        }
    }
}

/// Answer to trip, hold-closed and reset.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManualResult {
    /// Rows that changed at once, or start anew. 0 is no error: a manual state also waits for a
    /// destination or workload that was not seen yet.
    pub rows: u64,
    /// Reset: orders that were taken back; an addition to the first version of the format, as are the next
    /// two.
    #[serde(default)]
    pub taken_back: u64,
    /// Reset: of the rows, those that were closed already.
    #[serde(default)]
    pub closed_already: u64,
    /// Reset: orders for the same destination in other words that are in force still, newest first.
    #[serde(default)]
    pub left: Vec<ManualState>,
}

/// Answer to pause and resume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PauseResult {
    /// The pause now in force, if any.
    pub paused: Option<Paused>,
    /// The pause that was ended, if there was one; an addition to the first version of the format.
    #[serde(default)]
    pub ended: Option<Paused>,
}

/// Answer to `POST /v1/handover`: the state of the agent that another one takes over from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Handover {
    /// Version of the agent.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// Breakers, windows and manual states, in the form of `state.json`.
    pub state: serde_json::Value,
    /// The pause in force.
    pub paused: Option<Paused>,
}

/// Answer to reload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadResult {
    /// Whether anything differs from before.
    pub changed: bool,
    /// What is allowed but probably not meant, one sentence each.
    pub warnings: Vec<String>,
}

/// The configuration in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigView {
    /// The file it was read from; `None`: the built-in one.
    pub file: Option<String>,
    /// The whole configuration as TOML, flags of the command line applied.
    pub toml: String,
    /// What is allowed but probably not meant, one sentence each.
    pub warnings: Vec<String>,
}

/// What `/healthz` and `/readyz` answer with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Health {
    /// The event thread runs and writes its heartbeat.
    pub alive: bool,
    /// Enforcement is proven (or observe mode attached) and nothing has undone it since.
    pub ready: bool,
    /// One sentence for a person, above all when one of the two is false.
    pub reason: String,
}

/// Why a request was not done. On the wire: an HTTP status and `{"error":"…"}`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// 400: the request cannot be understood, or the configuration file is wrong.
    #[error("{0}")]
    BadRequest(String),
    /// 404: there is no such thing.
    #[error("{0}")]
    NotFound(String),
    /// 409: understood, but not possible now (a protected destination, for example).
    #[error("{0}")]
    Conflict(String),
    /// 500: the agent failed at it.
    #[error("{0}")]
    Internal(String),
    /// 503: the agent is too busy, or its loop does not answer.
    #[error("{0}")]
    Unavailable(String),
}

/// Body of every answer that is not a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// What was tried, on what, and what to do next.
    pub error: String,
}

/// How long a manual state holds when nobody says otherwise.
pub const MANUAL_DEFAULT: Duration = Duration::from_secs(600);

/// Longest time that `for` accepts: beyond a year somebody mistyped.
pub const FOR_MAX: Duration = Duration::from_secs(366 * 24 * 3600);

/// Parses the `for` of a pause or a manual state: a duration such as `90s`, `15m` or `1h30m`,
/// from one millisecond to [`FOR_MAX`].
///
/// # Errors
/// A sentence naming the text and what is allowed.
pub fn parse_for(text: &str) -> Result<Duration, String> {
    let allowed = "want a duration from 1ms to 366days, such as \"90s\", \"15m\" or \"2h\"";
    let shown = || text.chars().take(100).collect::<String>();
    let duration = read_duration(text).map_err(|e| format!("{:?} {e}; {allowed}", shown()))?;
    if duration < Duration::from_millis(1) || duration > FOR_MAX {
        return Err(format!("{text:?} is out of range; {allowed}"));
    }
    Ok(duration)
}

/// Longest workload that is looked at, bytes: a path below the cgroup mount may have 4,095.
const WORKLOAD_BYTES: usize = 4096;

/// Whether `text` can be a workload at all, seen or not.
///
/// # Errors
/// A sentence naming the text and what is allowed.
pub fn check_workload(text: &str) -> Result<(), String> {
    let slash = text != "/" && (text.starts_with('/') || text.ends_with('/'));
    if text.is_empty()
        || text.len() > WORKLOAD_BYTES
        || slash
        || text.split('/').any(|part| part == "..")
        || text.contains(|c: char| c.is_control())
    {
        let shown: String = text.chars().take(100).collect();
        return Err(format!(
            "{shown:?} is no workload; want a cgroup path below the v2 mount without leading \
             slash, such as \"system.slice/billing.service\", or \"/\" for its root"
        ));
    }
    Ok(())
}

/// Whether `text` can be the workload of an order: one, and no pattern.
///
/// # Errors
/// As [`check_workload`].
pub fn check_order_workload(text: &str) -> Result<(), String> {
    check_workload(text)?;
    if text.contains(['*', '?']) {
        let shown: String = text.chars().take(100).collect();
        return Err(format!(
            "{shown:?} is a pattern, and an order is for one workload or for all: give one as `backstop \
             status` shows it, or none for all"
        ));
    }
    Ok(())
}

/// Parses a destination that a person has written.
///
/// # Errors
/// A sentence naming the text and what is allowed.
pub fn parse_destination(text: &str) -> Result<DestinationArg, String> {
    text.parse().map_err(|error| {
        format!(
            "destination {text:?} {error}; write it like 10.0.0.5:5432, [2001:db8::1]:443 or \
             db.internal:5432"
        )
    })
}
