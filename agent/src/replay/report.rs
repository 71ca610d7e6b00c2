//! What came of it.

use std::collections::BTreeMap;

use serde::Serialize;

use super::read::RowKey;
use crate::control::api::{Reason, State, Timestamp};

/// A change of state.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Transition {
    /// When.
    pub time: Timestamp,
    /// Of whose breaker.
    pub destination: String,
    /// The callers' control group.
    pub workload: String,
    /// Inode of the network namespace, where it is known.
    pub netns: Option<u64>,
    /// State before.
    pub from: State,
    /// State after.
    pub to: State,
    /// Why.
    pub reason: Reason,
    /// Generation of the verdict, counted from the begin of the recording.
    pub generation: u32,
}

/// What became of a row's calls.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RowReport {
    /// Address and port.
    pub destination: String,
    /// The callers' control group.
    pub workload: String,
    /// Inode of the network namespace, where it is known.
    pub netns: Option<u64>,
    /// The policy that is for it.
    pub policy: String,
    /// State at the end.
    pub state: State,
    /// Changes of state.
    pub transitions: u64,
    /// Connects that were recorded.
    pub connects: u64,
    /// Exchanges that were recorded.
    pub exchanges: u64,
    /// Calls of both that failed, and were not refused here.
    pub failures: u64,
    /// Recorded connects that would have been refused.
    pub refused: u64,
    /// Of those, the ones that had succeeded.
    pub refused_good: u64,
    /// Connects that were refused when this was recorded, and would have been here.
    pub refused_then: u64,
    /// Connects that were refused when this was recorded, and would have been sent: what would have
    /// become of them nobody knows.
    pub unknown: u64,
    /// Calls that ended under another verdict than they began under: they judge nobody.
    pub late: u64,
    /// Good exchanges that may have been slow for the policy: only their longest is known.
    pub may_be_slow: u64,
}

impl RowReport {
    pub(super) fn new(key: &RowKey, policy: &str) -> Self {
        Self {
            destination: key.destination.clone(),
            workload: key.workload.clone(),
            netns: key.netns,
            policy: policy.to_owned(),
            state: State::Closed,
            transitions: 0,
            connects: 0,
            exchanges: 0,
            failures: 0,
            refused: 0,
            refused_good: 0,
            refused_then: 0,
            unknown: 0,
            late: 0,
            may_be_slow: 0,
        }
    }
}

/// A row without a breaker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LeftAlone {
    /// Address and port.
    pub destination: String,
    /// The callers' control group.
    pub workload: String,
    /// In a word or two.
    pub why: String,
}

/// What a configuration would have done.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Replayed {
    /// When the first recorded call ended.
    pub from: Option<Timestamp>,
    /// When the last one did.
    pub to: Option<Timestamp>,
    /// Changes of state, in their order.
    pub transitions: Vec<Transition>,
    /// What became of the calls, by destination.
    pub rows: Vec<RowReport>,
    /// Rows without a breaker.
    pub left_alone: Vec<LeftAlone>,
    /// Lines that were read.
    pub lines: u64,
    /// Lines that say nothing of calls, by kind.
    pub skipped: BTreeMap<String, u64>,
    /// Lines about calls that an earlier line was about.
    pub duplicates: u64,
    /// Calls of which nothing was recorded, though calls before and after them were.
    pub missing: u64,
}
