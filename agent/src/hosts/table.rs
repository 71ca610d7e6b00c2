//! Which names each address is known by, in each network namespace.
//!
//! Pure: time comes in. What is heard belongs to the namespace in which it was heard; what the agent has
//! resolved itself belongs to all of them ([`EVERYWHERE`]).
//!
//! A name holds for an address until its time to live is over *and* a newer answer for the name (of the
//! same family) leaves the address out. So round robin, which gives some of the addresses at a time, and
//! programs that resolve once and never again, take no name away.
//!
//! *Owners* (rule 19). An address that has lost its last name so and then gets another one has a new owner:
//! what was learned about it is about somebody else. An address that two names share (an ingress) has
//! none when one of them leaves, as long as the other one was there before the first was last heard.
//!
//! *Bounds.* [`MOST_PER_NAMESPACE`] names of addresses in a namespace, [`MOST`] in all, [`MOST_NAMES`] for one
//! address. Beyond that the addresses heard of longest ago are forgotten.

mod kept;

use std::{
    collections::{HashMap, HashSet},
    net::IpAddr,
    sync::Arc,
    time::Duration,
};

use super::Answer;
use crate::{core::Nanos, policy::KnownName};

pub use kept::Told;

/// The namespace of what holds in all of them; no namespace has this cookie.
pub const EVERYWHERE: u64 = 0;

/// Names of addresses (one name of two addresses counts twice) that are remembered for one namespace.
pub const MOST_PER_NAMESPACE: usize = 4096;
/// Names of addresses that are remembered in all.
pub const MOST: usize = 16_384;
/// Names that are remembered for one address.
pub const MOST_NAMES: usize = 8;

/// A name holds for at least so long: short times to live come with round robin.
pub const SHORTEST: Duration = Duration::from_secs(60);
/// A longer time to live counts as this.
pub const LONGEST: Duration = Duration::from_secs(3600);
/// What the agent has resolved itself holds for so long: ten of its rounds.
pub const OWN: Duration = Duration::from_secs(300);

/// An address in a namespace: its cookie, and the 16-byte form.
pub type Place = (u64, [u8; 16]);

/// An address whose names have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// Which one; of namespace [`EVERYWHERE`]: it may have rows in any.
    pub place: Place,
    /// Whether it belongs to somebody else now.
    pub new_owner: bool,
}

/// See the module.
#[derive(Default)]
pub struct HostNames {
    addresses: HashMap<Place, Address>,
    /// By namespace, name and family (whether IPv6): when it was last answered.
    answered: HashMap<(u64, Arc<str>, bool), Nanos>,
    /// Names of addresses in each namespace, and in all.
    counts: HashMap<u64, usize>,
    count: usize,
}

#[derive(Default)]
struct Address {
    names: Vec<Held>,
    /// The last name that it lost, when it has none, and when that was heard.
    last: Option<(Arc<str>, Nanos)>,
}

#[derive(Clone)]
struct Held {
    name: Arc<str>,
    /// Somebody has asked for this name, not for an alias of it.
    asked: bool,
    /// When the address got it.
    since: Nanos,
    /// The last answer that had it.
    seen: Nanos,
    /// It holds at least until then.
    until: Nanos,
}

impl Address {
    /// What it counts for: a name that it has lost is remembered, too.
    fn weight(&self) -> usize {
        self.names.len().max(1)
    }

    fn seen(&self) -> Nanos {
        let held = self.names.iter().map(|held| held.seen);
        let lost = self.last.iter().map(|(_, seen)| *seen);
        held.chain(lost).max().unwrap_or(Nanos::ZERO)
    }
}

impl HostNames {
    /// A program in that namespace was answered.
    pub fn heard(&mut self, netns: u64, answer: &Answer, now: Nanos) -> Vec<Change> {
        if netns == EVERYWHERE {
            return Vec::new();
        }
        let names: Vec<Arc<str>> = answer
            .names
            .iter()
            .map(|name| name.as_str().into())
            .collect();
        let ttl = answer.ttl.clamp(SHORTEST, LONGEST);
        self.learn(netns, &names, &answer.addresses, ttl, now)
    }

    /// The agent has resolved a name. An empty list says nothing.
    pub fn resolved(&mut self, name: &Arc<str>, addresses: &[IpAddr], now: Nanos) -> Vec<Change> {
        let names = [Arc::clone(name)];
        let mut changes = Vec::new();
        // Both families come at once, and count apart.
        for v6 in [false, true] {
            let family: Vec<IpAddr> = addresses
                .iter()
                .copied()
                .filter(|addr| addr.is_ipv6() == v6)
                .collect();
            changes.extend(self.learn(EVERYWHERE, &names, &family, OWN, now));
        }
        changes
    }

    /// The agent no longer resolves any but these names.
    pub fn keep_own(&mut self, names: &[Arc<str>]) -> Vec<Change> {
        let mut changes = Vec::new();
        for (place, address) in &mut self.addresses {
            if place.0 != EVERYWHERE {
                continue;
            }
            let before = address.names.len();
            address.names.retain(|held| names.contains(&held.name));
            if address.names.len() != before {
                let place = *place;
                changes.push(Change {
                    place,
                    new_owner: false,
                });
            }
        }
        self.tidy();
        changes
    }

    fn learn(
        &mut self,
        netns: u64,
        names: &[Arc<str>],
        addresses: &[IpAddr],
        ttl: Duration,
        now: Nanos,
    ) -> Vec<Change> {
        let Some(first) = addresses.first() else {
            return Vec::new();
        };
        let mut changes = Vec::new();
        let until = now + Nanos(u64::try_from(ttl.as_nanos()).unwrap_or(u64::MAX));
        let names: Vec<Arc<str>> = names
            .iter()
            .map(|name| self.interned(netns, name))
            .collect();
        for addr in addresses {
            let place = (netns, bytes(*addr));
            let known = self.addresses.get(&place);
            let is = |held: &Held, name: &Arc<str>| held.name == *name;
            let new = names
                .iter()
                .filter(|name| known.is_none_or(|of| !of.names.iter().any(|held| is(held, name))));
            let new = new.count();
            if new > 0 {
                self.make_room(netns, new, &mut changes);
            }
            let before = self.addresses.get(&place).map_or(0, Address::weight);
            let address = self.addresses.entry(place).or_default();
            let had_none = address.names.is_empty();
            let mut changed = false;
            for (at, name) in names.iter().enumerate() {
                let asked = at == 0;
                if let Some(held) = address.names.iter_mut().find(|held| held.name == *name) {
                    held.seen = now;
                    held.until = held.until.max(until);
                    changed |= asked && !held.asked;
                    held.asked |= asked;
                    continue;
                }
                if address.names.len() == MOST_NAMES {
                    let oldest = address.names.iter().enumerate().min_by_key(|(_, h)| h.seen);
                    let oldest = oldest.map_or(0, |(at, _)| at);
                    address.names.remove(oldest);
                }
                changed = true;
                address.names.push(Held {
                    name: Arc::clone(name),
                    asked,
                    since: now,
                    seen: now,
                    until,
                });
            }
            // Names only come here, or take another one's place.
            let more = address.weight() - before;
            *self.counts.entry(netns).or_default() += more;
            self.count += more;
            let is_another = address
                .last
                .take()
                .is_some_and(|(last, _)| had_none && !names.contains(&last));
            if changed {
                changes.push(Change {
                    place,
                    new_owner: is_another,
                });
            }
        }
        for name in names {
            self.answered.insert((netns, name, first.is_ipv6()), now);
        }
        changes
    }

    /// Takes away what holds no longer. To be called about once a second.
    pub fn expire(&mut self, now: Nanos) -> Vec<Change> {
        let mut changes = Vec::new();
        let answered = &self.answered;
        for (place, address) in &mut self.addresses {
            let v6 = is_v6(&place.1);
            let mut lost: Option<(Arc<str>, Nanos)> = None;
            address.names.retain(|held| {
                let key = (place.0, Arc::clone(&held.name), v6);
                let newest = answered.get(&key).copied().unwrap_or(held.seen);
                let holds = now <= held.until || held.seen >= newest;
                if !holds && lost.as_ref().is_none_or(|(_, seen)| *seen < held.seen) {
                    lost = Some((Arc::clone(&held.name), held.seen));
                }
                holds
            });
            let Some((name, seen)) = lost else {
                continue;
            };
            // Whoever came after the lost one was last heard has taken its place.
            let new_owner =
                !address.names.is_empty() && address.names.iter().all(|held| held.since > seen);
            if address.names.is_empty() {
                address.last = Some((name, seen));
            }
            let place = *place;
            changes.push(Change { place, new_owner });
        }
        if !changes.is_empty() {
            self.tidy();
        }
        changes
    }

    /// Forgets whatever was heard in these namespaces: they are gone.
    pub fn forget(&mut self, gone: &HashSet<u64>) -> Vec<Change> {
        let mut changes = Vec::new();
        self.addresses.retain(|place, _| {
            let stays = !gone.contains(&place.0);
            if !stays {
                let place = *place;
                changes.push(Change {
                    place,
                    new_owner: false,
                });
            }
            stays
        });
        self.tidy();
        changes
    }

    /// Namespaces of which something is remembered, in no particular order, [`EVERYWHERE`] perhaps included.
    pub fn namespaces(&self) -> impl Iterator<Item = u64> + '_ {
        self.counts.keys().copied()
    }

    /// The names of an address in a namespace: those first that the agent has resolved itself, then those
    /// that were asked for, then the oldest.
    pub fn of(&self, netns: u64, addr: &[u8; 16]) -> Vec<KnownName> {
        let mut names: Vec<KnownName> = Vec::new();
        for (place, own) in [(EVERYWHERE, true), (netns, false)] {
            let Some(address) = self.addresses.get(&(place, *addr)) else {
                continue;
            };
            let mut held: Vec<&Held> = address.names.iter().collect();
            held.sort_by_key(|held| (!held.asked, held.since));
            for held in held {
                if !names.iter().any(|known| known.name == held.name) {
                    let name = Arc::clone(&held.name);
                    names.push(KnownName { name, own });
                }
            }
        }
        names
    }

    /// A namespace in which names were heard for an address: the one with the lowest cookie.
    pub fn namespace_of(&self, addr: &[u8; 16]) -> Option<u64> {
        let places = self.addresses.iter().filter(|((netns, of), address)| {
            of == addr && *netns != EVERYWHERE && !address.names.is_empty()
        });
        places.map(|((netns, _), _)| *netns).min()
    }

    /// Where a name is known: addresses and namespaces, in order.
    pub fn places(&self, name: &str) -> Vec<Place> {
        let mut places: Vec<Place> = self
            .addresses
            .iter()
            .filter(|(_, address)| address.names.iter().any(|held| &*held.name == name))
            .map(|(place, _)| *place)
            .collect();
        places.sort_unstable();
        places
    }

    /// Addresses of a family that a name has in a namespace.
    pub fn count(&self, netns: u64, name: &str, v6: bool) -> usize {
        let has = |place: &Place| {
            let address = self.addresses.get(place);
            address.is_some_and(|of| of.names.iter().any(|held| &*held.name == name))
        };
        let places = self.addresses.keys().filter(|(of, addr)| {
            let counts = *of == netns || (*of == EVERYWHERE && !has(&(netns, *addr)));
            counts && is_v6(addr) == v6 && has(&(*of, *addr))
        });
        places.count()
    }

    /// Every address that the agent has resolved a name to, with its own names, in order.
    pub fn own(&self) -> Vec<(IpAddr, Vec<KnownName>)> {
        let mut own: Vec<(IpAddr, Vec<KnownName>)> = self
            .addresses
            .iter()
            .filter(|((netns, _), address)| *netns == EVERYWHERE && !address.names.is_empty())
            .map(|((_, addr), _)| {
                let ip = std::net::Ipv6Addr::from(*addr).to_canonical();
                (ip, self.of(EVERYWHERE, addr))
            })
            .collect();
        own.sort_unstable_by_key(|(addr, _)| *addr);
        own
    }

    /// Names of addresses that are remembered.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether nothing is.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The same text once, whatever the number of addresses.
    fn interned(&self, netns: u64, name: &Arc<str>) -> Arc<str> {
        [false, true]
            .into_iter()
            .find_map(|v6| {
                let key = (netns, Arc::clone(name), v6);
                Some(Arc::clone(&self.answered.get_key_value(&key)?.0.1))
            })
            .unwrap_or_else(|| Arc::clone(name))
    }

    /// Forgets an eighth of the namespace, or of all, where there is no room for so many more.
    fn make_room(&mut self, netns: u64, more: usize, changes: &mut Vec<Change>) {
        let count = self.counts.get(&netns).copied().unwrap_or(0) + more;
        let all = self.count + more > MOST;
        if count <= MOST_PER_NAMESPACE && !all {
            return;
        }
        let mut places: Vec<(Nanos, Place)> = self
            .addresses
            .iter()
            .filter(|(place, _)| {
                // What the agent resolves itself is not pushed out by what programs are told.
                place.0 == netns || (all && count <= MOST_PER_NAMESPACE && place.0 != EVERYWHERE)
            })
            .map(|(place, address)| (address.seen(), *place))
            .collect();
        places.sort_unstable();
        places.truncate((places.len() / 8).max(more));
        for (_, place) in places {
            self.addresses.remove(&place);
            changes.push(Change {
                place,
                new_owner: false,
            });
        }
        self.tidy();
    }

    /// Drops addresses of which nothing is known, and names that no address has.
    fn tidy(&mut self) {
        self.addresses
            .retain(|_, address| !address.names.is_empty() || address.last.is_some());
        let mut used = HashSet::new();
        self.counts.clear();
        self.count = 0;
        for ((netns, addr), address) in &self.addresses {
            *self.counts.entry(*netns).or_default() += address.weight();
            self.count += address.weight();
            for held in &address.names {
                used.insert((*netns, Arc::clone(&held.name), is_v6(addr)));
            }
        }
        self.answered.retain(|key, _| used.contains(key));
    }
}

fn bytes(addr: IpAddr) -> [u8; 16] {
    match addr.to_canonical() {
        IpAddr::V4(addr) => agent_common::key::mapped(addr.octets()),
        IpAddr::V6(addr) => addr.octets(),
    }
}

fn is_v6(addr: &[u8; 16]) -> bool {
    addr[..12] != agent_common::key::IPV4_MAPPED_PREFIX
}

#[cfg(test)]
mod tests;
