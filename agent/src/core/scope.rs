//! Breakers that all workloads of the node share: `scope = "node"` (rule 1).
//!
//! Each row keeps a breaker and windows of its own, and any of them may trip. The one that does *leads*;
//! every other member of its destination *follows*: it refuses as long as the leader is open, though
//! nothing of its own failed, and closes when the leader closes. There is one redial and one cooldown,
//! the leader's, and one probe for all:
//!
//! ```text
//!   leader   Closed ── trips ──► Open ──────► HalfOpen, slot free ── claimed ──► HalfOpen ──► Closed
//!   follower Closed ──────────► Open ──────► offered: its kernel ──────────────► withdrawn ──► Closed
//!                                             verdict has slots, too              (refuses)
//! ```
//!
//! While half-open every member offers a slot, since nobody knows who calls next. With the first claim the
//! others are withdrawn, and the row that claimed leads from there on, whoever it was: its probe decides.
//! Calls that come within the microseconds until the agent has heard of the claim may probe as well; what
//! they find is late, and decides nothing.
//!
//! A leader that goes for another reason than health (given up, an operator's word, its group is full)
//! hands over to a follower. Which rows are members, each row's policy says; loopback, link-local addresses
//! and 10.0.2.0/24 are never shared, as they are another host in each namespace.

use std::collections::{BTreeSet, HashMap};

use super::hints::Place;
use super::{Nanos, Reason};

/// What a follower does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Follows {
    /// It follows nobody.
    Nobody,
    /// The leader is open.
    Open,
    /// The leader is half-open and has a free slot: so has the follower.
    Offered,
    /// The leader is half-open and its slot is taken.
    Withdrawn,
}

/// What followers take from their leader.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lead {
    pub(super) follows: Follows,
    pub(super) reason: Reason,
    pub(super) until: Nanos,
    pub(super) cooldown: Nanos,
    pub(super) misled: u8,
    pub(super) distrust_until: Nanos,
    pub(super) outage_since: Nanos,
}

/// A half-open round, for the follower that takes it over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub(super) since: Nanos,
    pub(super) successes: u32,
    pub(super) by_redial: bool,
}

/// Who shares a breaker with whom.
#[derive(Default)]
pub(super) struct Scopes(HashMap<Place, Scope>);

#[derive(Default)]
struct Scope {
    members: BTreeSet<u32>,
    leader: Option<u32>,
}

impl Scopes {
    /// A row becomes a member.
    pub(super) fn join(&mut self, place: Place, index: u32) {
        self.0.entry(place).or_default().members.insert(index);
    }

    /// A row is no member any more; if it led, nobody does.
    pub(super) fn leave(&mut self, place: Place, index: u32) {
        let Some(scope) = self.0.get_mut(&place) else {
            return;
        };
        scope.members.remove(&index);
        if scope.leader == Some(index) {
            scope.leader = None;
        }
        if scope.members.is_empty() {
            self.0.remove(&place);
        }
    }

    pub(super) fn leader(&self, place: Place) -> Option<u32> {
        self.0.get(&place)?.leader
    }

    pub(super) fn lead(&mut self, place: Place, leader: Option<u32>) {
        if let Some(scope) = self.0.get_mut(&place) {
            scope.leader = leader;
        }
    }

    /// Members, in ascending order.
    pub(super) fn members(&self, place: Place) -> Vec<u32> {
        let scope = self.0.get(&place);
        scope.map_or(Vec::new(), |scope| scope.members.iter().copied().collect())
    }
}
