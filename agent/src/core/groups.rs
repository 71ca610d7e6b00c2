//! Endpoint groups: the destinations that one workload calls by one name and port (rule 16).
//!
//! Programs that know several addresses of a name go to the next one when one refuses. That helps only
//! while there is a next one: if breakers opened for all of them, the last path would be gone, and a
//! fault that the addresses share (an overload, most likely) would become an outage. So of a group of
//! two and more at most a share may be refused at a time, but at least one; whatever else should open
//! is *bypassed for safety*: it stays closed, and says so. When one of those that refuse closes, a
//! bypassed one that still fails may open, with its next failure. One that has just closed refuses a
//! share for a while (its *ramp*) and keeps its place until that is over: else both of two would refuse.
//!
//! Two counts. *Whether one more may open*: there counts whatever refuses, an operator's word, a
//! half-open breaker and a ramp too. *Whether one that is open has to give way*: there count only breakers that
//! have opened by themselves, and ramps. So an operator's word is never overruled, and never sends traffic to
//! what somebody else's breaker keeps it from; but it takes the places of those that come after it. A ramp
//! gives way before anything else, and to an operator's word as well: that costs nobody a path.
//!
//! Members are the addresses of the name. One that no program has called yet has no row and refuses
//! nothing: it counts as one that is well. So the shell says how many addresses a name has, with the rows of
//! a group, and all that it knows at once ([`Event::Groups`](super::Event)): what is judged in the middle of
//! it would be judged by half a group. An address that has several names is in several groups, and opens
//! only where each of them has room.

use std::collections::{BTreeSet, HashMap};

use super::RowId;

/// Names a group; made by the shell, of whatever makes a group.
pub type GroupId = u64;

/// A row and the names that it is an endpoint of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The row.
    pub row: RowId,
    /// One for each name, and no others.
    pub groups: Box<[Membership]>,
}

/// One of the groups of an [`Endpoint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Membership {
    /// Which one.
    pub group: GroupId,
    /// Addresses of the name that are known, with or without a row, of the row's family: programs that
    /// cannot use the other one have no path there. Of the rows of a group and family, what was said last
    /// holds.
    pub addresses: u32,
    /// Whether that is IPv6.
    pub v6: bool,
}

/// A group that has no room for one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Members that refuse.
    pub open: usize,
    /// All members.
    pub of: usize,
}

/// What a row does to those that call it, as far as its groups are concerned. (One byte: there are many
/// breakers.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Everything passes.
    #[default]
    None,
    /// It refuses because an operator said so.
    Ordered,
    /// It refuses by itself, everything or a share.
    Own,
}

impl Refusal {
    fn any(self) -> bool {
        self != Self::None
    }

    fn own(self) -> bool {
        self == Self::Own
    }
}

/// How many members of a group refuse.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusing {
    pub(super) any: usize,
    pub(super) own: usize,
    /// All members.
    pub(super) of: usize,
}

/// All groups.
#[derive(Default)]
pub(super) struct Groups {
    /// By index: each row that is in a group.
    rows: HashMap<u32, Member>,
    groups: HashMap<GroupId, Group>,
}

struct Member {
    incarnation: u32,
    groups: Box<[Membership]>,
    refusal: Refusal,
}

#[derive(Default)]
struct Group {
    members: BTreeSet<u32>,
    /// By family (IPv4, IPv6): members,
    rows: [u32; 2],
    /// and addresses that the shell knows of.
    addresses: [u32; 2],
    /// Members that refuse,
    any: usize,
    /// and those of them that do so by themselves.
    own: usize,
}

impl Group {
    /// All members, those without a row too, of families that have one with a row.
    fn size(&self) -> usize {
        let families = self.rows.iter().zip(self.addresses);
        let used = families.filter(|(rows, _)| **rows > 0);
        used.map(|(rows, addresses)| addresses.max(*rows) as usize)
            .sum()
    }

    fn enter(&mut self, refusal: Refusal) {
        self.any += usize::from(refusal.any());
        self.own += usize::from(refusal.own());
    }

    fn leave(&mut self, refusal: Refusal) {
        self.any -= usize::from(refusal.any());
        self.own -= usize::from(refusal.own());
    }
}

/// Members of a group of `of` that may refuse at a time: the share, rounded down, but at least one.
/// All of them where there is but one, or no share.
pub fn may_be_open(of: usize, share: Option<f64>) -> usize {
    match share {
        Some(share) if of >= 2 => {
            // A product that should be whole may fall short of it by rounding.
            let most = (of as f64 * share + 1e-9).floor();
            (most as usize).clamp(1, of)
        }
        _ => of,
    }
}

fn ids(memberships: &[Membership]) -> impl Iterator<Item = GroupId> + '_ {
    memberships.iter().map(|membership| membership.group)
}

impl Groups {
    /// The row is in these groups from now on, and in no others.
    pub(super) fn set(&mut self, endpoint: &Endpoint, refusal: Refusal) {
        let row = endpoint.row;
        self.leave(row.index);
        if endpoint.groups.is_empty() {
            return;
        }
        let mut entered = Vec::with_capacity(endpoint.groups.len());
        for membership in &endpoint.groups {
            let group = self.groups.entry(membership.group).or_default();
            if group.members.insert(row.index) {
                let family = usize::from(membership.v6);
                group.addresses[family] = membership.addresses;
                group.rows[family] += 1;
                group.enter(refusal);
                entered.push(*membership);
            }
        }
        let member = Member {
            incarnation: row.incarnation,
            groups: entered.into(),
            refusal,
        };
        self.rows.insert(row.index, member);
    }

    /// The row is in no group any more; returns those that it was in.
    pub(super) fn leave(&mut self, index: u32) -> Vec<GroupId> {
        let Some(member) = self.rows.remove(&index) else {
            return Vec::new();
        };
        for membership in &member.groups {
            if let Some(group) = self.groups.get_mut(&membership.group) {
                group.members.remove(&index);
                group.rows[usize::from(membership.v6)] -= 1;
                group.leave(member.refusal);
                if group.members.is_empty() {
                    self.groups.remove(&membership.group);
                }
            }
        }
        ids(&member.groups).collect()
    }

    /// As [`Groups::leave`], if the index has this owner.
    pub(super) fn forget(&mut self, row: RowId) -> Vec<GroupId> {
        match self.rows.get(&row.index) {
            Some(member) if member.incarnation == row.incarnation => self.leave(row.index),
            _ => Vec::new(),
        }
    }

    /// The row begins or ends to refuse.
    pub(super) fn change(&mut self, index: u32, refusal: Refusal) {
        let Some(member) = self.rows.get_mut(&index) else {
            return;
        };
        let before = std::mem::replace(&mut member.refusal, refusal);
        for id in ids(&member.groups) {
            if let Some(group) = self.groups.get_mut(&id) {
                group.leave(before);
                group.enter(refusal);
            }
        }
    }

    /// The groups of a row.
    pub(super) fn of(&self, index: u32) -> Vec<GroupId> {
        let member = self.rows.get(&index);
        member.map_or(Vec::new(), |member| ids(&member.groups).collect())
    }

    /// Why the row may not refuse beside those others that do; `None`: it may.
    pub(super) fn full(&self, index: u32, share: Option<f64>) -> Option<Full> {
        if self.rows.is_empty() {
            return None;
        }
        let member = self.rows.get(&index)?;
        let groups = ids(&member.groups).filter_map(|id| self.groups.get(&id));
        groups
            .map(|group| Full {
                open: group.any - usize::from(member.refusal.any()),
                of: group.size(),
            })
            .find(|group| group.of >= 2 && group.open >= may_be_open(group.of, share))
    }

    /// The members of a group that have a row, and how many of all refuse.
    pub(super) fn members(&self, id: GroupId) -> impl Iterator<Item = (u32, Refusing)> + '_ {
        let group = self.groups.get(&id);
        group.into_iter().flat_map(|group| {
            let count = Refusing {
                any: group.any,
                own: group.own,
                of: group.size(),
            };
            group.members.iter().map(move |index| (*index, count))
        })
    }
}
