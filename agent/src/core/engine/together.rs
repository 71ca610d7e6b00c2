//! Breakers that concern one another: endpoints of one name, and rows that share one breaker.

use std::collections::BTreeSet;

use super::{Action, Breaker, Engine, Full, GroupId, Place, RowId, State};
use crate::core::groups::{Endpoint, Refusal, may_be_open};

impl Engine {
    /// These rows are endpoints of other names than before, or of names with more or fewer addresses.
    pub(super) fn regroup(&mut self, endpoints: &[Endpoint], out: &mut Vec<Action>) {
        let mut touched = BTreeSet::new();
        for endpoint in endpoints {
            let slot = self.slot(endpoint.row);
            let refusal = slot.map(|slot| slot.breaker.refusal());
            touched.extend(self.groups.leave(endpoint.row.index));
            self.groups.set(endpoint, refusal.unwrap_or_default());
            touched.extend(self.groups.of(endpoint.row.index));
        }
        let touched: Vec<GroupId> = touched.into_iter().collect();
        self.keep_shares(&touched, out);
    }

    /// See [`Engine::keep_shares`]; of the groups of a row.
    pub(super) fn keep_shares_of(&mut self, index: u32, out: &mut Vec<Action>) {
        let groups = self.groups.of(index);
        if !groups.is_empty() {
            self.keep_shares(&groups, out);
        }
    }

    /// Lets pass what refuses beyond the share of its group: first what ramps, then what opened last.
    pub(super) fn keep_shares(&mut self, groups: &[GroupId], out: &mut Vec<Action>) {
        for &id in groups {
            while let Some((index, group)) = self.beyond_share(id) {
                self.step_index(index, out, |b, step| b.give_way(group, step));
            }
        }
    }

    fn beyond_share(&self, id: GroupId) -> Option<(u32, Full)> {
        let open = self.groups.members(id).filter_map(|(index, group)| {
            let breaker = &self.breakers.get(&index)?.breaker;
            let most = may_be_open(group.of, breaker.max_open_share());
            let (ramps, of) = (breaker.ramps(), group.of);
            let open = if ramps { group.any } else { group.own };
            let gives_way = breaker.refusal() == Refusal::Own && open > most;
            gives_way.then_some((ramps, breaker.since(), index, Full { open, of }))
        });
        let last = open.max_by_key(|(ramps, since, index, _)| (*ramps, *since, *index))?;
        Some((last.2, last.3))
    }

    /// The row that another one follows.
    pub(super) fn leader_of(&self, row: RowId) -> Option<RowId> {
        let slot = self.slot(row).filter(|slot| slot.breaker.is_follower())?;
        let index = self.scopes.leader(slot.breaker.place())?;
        let incarnation = self.breakers.get(&index)?.incarnation;
        Some(RowId { index, incarnation })
    }

    /// A probe slot of a row was claimed: if it was offered for its leader, the row leads now.
    pub(super) fn claimed(&mut self, row: RowId, generation: u32, out: &mut Vec<Action>) {
        let offers = self
            .slot(row)
            .is_some_and(|slot| slot.breaker.offers(generation));
        let leader = self.leader_of(row).filter(|_| offers);
        let Some(leader) = leader.and_then(|leader| self.breakers.get(&leader.index)) else {
            return;
        };
        let (place, round) = (leader.breaker.place(), leader.breaker.round());
        self.scopes.lead(place, Some(row.index));
        self.step(row, out, |b, step| b.take_over(round, step));
    }

    /// Brings a row's membership in line with its policy, and then all members with their leader.
    pub(super) fn share(&mut self, index: u32, out: &mut Vec<Action>) {
        let Some(slot) = self.breakers.get_mut(&index) else {
            return;
        };
        let shares = slot.breaker.shares_scope();
        if !shares && !slot.shares {
            return;
        }
        let place = slot.breaker.place();
        if shares != slot.shares {
            slot.shares = shares;
            if shares {
                self.scopes.join(place, index);
            } else {
                self.scopes.leave(place, index);
                self.step_index(index, out, |b, step| b.released_by_leader(false, step));
            }
        }
        self.keep_together(place, out);
    }

    /// Members of a scope do what their leader does.
    pub(super) fn keep_together(&mut self, place: Place, out: &mut Vec<Action>) {
        if let Some(under_way) = self.keeping_together {
            // A step below has come here again: of this scope the loop there sees what it did.
            if under_way != place {
                self.to_keep_together.push(place);
            }
            return;
        }
        self.to_keep_together.push(place);
        while let Some(place) = self.to_keep_together.pop() {
            self.keeping_together = Some(place);
            self.keep_members_together(place, out);
            self.keeping_together = None;
        }
    }

    fn keep_members_together(&mut self, place: Place, out: &mut Vec<Action>) {
        let members = self.scopes.members(place);
        // Each turn ends with one leader less, or with all that follow following.
        for _ in 0..=members.len() {
            let Some(leader) = self.chosen_leader(place, &members, out) else {
                break;
            };
            let lead = self
                .breakers
                .get(&leader)
                .and_then(|slot| slot.breaker.lead());
            let Some(lead) = lead else { continue };
            for &index in members.iter().filter(|index| **index != leader) {
                if self.may_follow(index) {
                    self.step_index(index, out, |b, step| b.follow(&lead, step));
                }
            }
            let goes_on = self.breakers.get(&leader);
            if goes_on.is_some_and(|slot| slot.breaker.lead().is_some()) {
                break;
            }
        }
    }

    /// Who leads: whoever did, while it is open; else a follower, unless the leader has healed; else one that
    /// has opened by itself.
    fn chosen_leader(
        &mut self,
        place: Place,
        members: &[u32],
        out: &mut Vec<Action>,
    ) -> Option<u32> {
        let of = |engine: &Self, index: u32, is: fn(&Breaker) -> bool| {
            engine
                .breakers
                .get(&index)
                .is_some_and(|slot| is(&slot.breaker))
        };
        let before = self.scopes.leader(place);
        if let Some(leader) = before {
            if of(self, leader, |b| b.lead().is_some()) {
                return Some(leader);
            }
            self.scopes.lead(place, None);
            if of(self, leader, Breaker::has_healed) {
                let ramps = of(self, leader, Breaker::ramps);
                for &index in members {
                    self.step_index(index, out, |b, step| b.released_by_leader(ramps, step));
                }
            }
        }
        let followers: Vec<u32> = members
            .iter()
            .copied()
            .filter(|index| of(self, *index, Breaker::is_follower))
            .collect();
        let own = members
            .iter()
            .copied()
            .find(|index| of(self, *index, |b| b.lead().is_some()));
        let leader = own.or(followers.first().copied())?;
        self.scopes.lead(place, Some(leader));
        if own.is_none() {
            self.step_index(leader, out, Breaker::promote);
        }
        Some(leader)
    }

    /// Whether a member may be open for another one's sake: one that is already may, and one that is closed
    /// unless something holds it back.
    fn may_follow(&self, index: u32) -> bool {
        let Some(slot) = self.breakers.get(&index) else {
            return false;
        };
        let breaker = &slot.breaker;
        breaker.state() != State::Closed
            || (!self.correlation.holds(slot.workload)
                && self.groups.full(index, breaker.max_open_share()).is_none())
    }
}
