//! Endpoint groups: the destinations that one workload calls by one name and port (rule 16).
//!
//! Programs that know several addresses of a name go to the next one when one refuses. That helps only
//! while there is a next one: if breakers opened for all of them, the last path would be gone, and a
//! fault that the addresses share (an overload, most likely) would become an outage. So of a group of
//! two and more at most a share may be refused at a time, but at least one; whatever else should open
//! is *bypassed for safety*: it stays closed, and says so. When one of those that refuse closes, a
//! bypassed one that still fails may open, with its next failure.
//!
//! Refused counts whatever the reason, an operator's word and a half-open breaker too; but an operator's
//! word itself is never overruled. An address that has several names is in several groups, and opens only
//! where each of them has room. Which rows make a group, the shell says ([`Event::Groups`](super::Event)).

use std::collections::{BTreeSet, HashMap};

use super::RowId;

/// Names a group; made by the shell, of whatever makes a group.
pub type GroupId = u64;

/// A group that has no room for one more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Members that refuse.
    pub open: usize,
    /// All members.
    pub of: usize,
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
    groups: Box<[GroupId]>,
    refuses: bool,
}

#[derive(Default)]
struct Group {
    members: BTreeSet<u32>,
    /// Members that refuse.
    open: usize,
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

impl Groups {
    /// The row is in these groups from now on, and in no others.
    pub(super) fn set(&mut self, row: RowId, groups: &[GroupId], refuses: bool) {
        self.leave(row.index);
        if groups.is_empty() {
            return;
        }
        let mut groups = groups.to_vec();
        groups.sort_unstable();
        groups.dedup();
        for id in &groups {
            let group = self.groups.entry(*id).or_default();
            group.members.insert(row.index);
            group.open += usize::from(refuses);
        }
        let member = Member {
            incarnation: row.incarnation,
            groups: groups.into(),
            refuses,
        };
        self.rows.insert(row.index, member);
    }

    /// The row is in no group any more; returns those that it was in.
    pub(super) fn leave(&mut self, index: u32) -> Box<[GroupId]> {
        let Some(member) = self.rows.remove(&index) else {
            return Box::default();
        };
        for id in &member.groups {
            if let Some(group) = self.groups.get_mut(id) {
                group.members.remove(&index);
                group.open -= usize::from(member.refuses);
                if group.members.is_empty() {
                    self.groups.remove(id);
                }
            }
        }
        member.groups
    }

    /// As [`Groups::leave`], if the index has this owner.
    pub(super) fn forget(&mut self, row: RowId) -> Box<[GroupId]> {
        match self.rows.get(&row.index) {
            Some(member) if member.incarnation == row.incarnation => self.leave(row.index),
            _ => Box::default(),
        }
    }

    /// The row begins or ends to refuse.
    pub(super) fn change(&mut self, index: u32, refuses: bool) {
        let Some(member) = self.rows.get_mut(&index) else {
            return;
        };
        if std::mem::replace(&mut member.refuses, refuses) == refuses {
            return;
        }
        for id in &member.groups {
            if let Some(group) = self.groups.get_mut(id) {
                if refuses {
                    group.open += 1;
                } else {
                    group.open -= 1;
                }
            }
        }
    }

    /// The groups of a row.
    pub(super) fn of(&self, index: u32) -> &[GroupId] {
        self.rows.get(&index).map_or(&[], |member| &member.groups)
    }

    /// Why the row may not refuse beside those others that do; `None`: it may.
    pub(super) fn full(&self, index: u32, share: Option<f64>) -> Option<Full> {
        if self.rows.is_empty() {
            return None;
        }
        let member = self.rows.get(&index)?;
        let groups = member.groups.iter().filter_map(|id| self.groups.get(id));
        groups
            .map(|group| Full {
                open: group.open - usize::from(member.refuses),
                of: group.members.len(),
            })
            .find(|group| group.of >= 2 && group.open >= may_be_open(group.of, share))
    }

    /// The members of a group and how many of them refuse.
    pub(super) fn members(&self, id: GroupId) -> impl Iterator<Item = (u32, Full)> + '_ {
        let group = self.groups.get(&id);
        group.into_iter().flat_map(|group| {
            let count = Full {
                open: group.open,
                of: group.members.len(),
            };
            group.members.iter().map(move |index| (*index, count))
        })
    }
}
