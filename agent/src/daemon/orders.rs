//! Operators' orders: `trip` and `hold-closed`, for destinations and workloads seen or not.
//!
//! *One rule.* Of the orders that cover a row the newest is in force. When it ends, by time or because it
//! is taken back, the next older one that still covers the row is in force again, with its own who and
//! when; without one the row's breaker starts anew. It does not matter how an order is spelled (by
//! address or by name, for one workload or for all), nor whether the row was there before it. An order
//! takes the place of an older one of the same spelling and workload.
//!
//! Two others have to know: the event thread, for rows that exist ([`Orders::tell`] says what is news to
//! it), and the kernel, for rows to come ([`Orders::enter`]). The kernel knows no workloads: a row to come
//! begins with what holds for all, and has its own workload's order a moment after its first connect.
//!
//! *No gap between two orders.* Both are told a little more than an order's time ([`RELAY`]) where an older
//! one is in force after it: they would let everything pass until this side has looked at the clock.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use agent_common::{
    Verdict,
    key::ManualKey,
    verdict::{STATE_FORCED_CLOSED, STATE_FORCED_OPEN},
};
use anyhow::Result;

use super::{
    named,
    plan::Plan,
    reactor::{Ended, Order},
};
use crate::{
    control::api::Timestamp,
    core::{Nanos, RowId},
    hosts::{HostNames, table::EVERYWHERE},
    kernel::Kernel,
    policy::{Destination, DestinationArg, KnownName},
};

/// Orders at a time.
pub const MOST: usize = 1024;
/// Addresses at a time with an order for rows to come: the size of the kernel's map of them.
const MOST_ENTERED: usize = 1024;
/// So much longer than its time an order lasts where an older one follows. The orders are looked at
/// every 100 ms.
pub const RELAY: Nanos = Nanos::from_secs(1);

/// An order in force, also for destinations or workloads not seen yet.
#[derive(Clone, Debug)]
pub struct Standing {
    /// Of what.
    pub destination: DestinationArg,
    /// For whom; `None`: all.
    pub workload: Option<String>,
    /// Refused, or held closed.
    pub trip: bool,
    /// When it ends.
    pub until: Nanos,
    /// When it was asked for.
    pub since: Timestamp,
    /// As `until`, for people and for the next agent.
    pub ends: Timestamp,
    /// Who asked for it.
    pub by: Arc<str>,
}

impl Standing {
    /// Whether it is for this destination, which is known by these names, when this workload calls it.
    pub fn covers(&self, destination: &Destination, names: &[KnownName], workload: &str) -> bool {
        let is_it = match &self.destination {
            DestinationArg::Address(address) => address == destination,
            DestinationArg::Name { name, port } => {
                *port == destination.port() && names.iter().any(|known| *known.name == **name)
            }
        };
        is_it && self.concerns_workload(Some(workload))
    }

    /// Whether it is for some of the workloads that are meant; `None`: all are.
    fn concerns_workload(&self, wanted: Option<&str>) -> bool {
        match (self.workload.as_deref(), wanted) {
            (Some(theirs), Some(ours)) => theirs == ours,
            _ => true,
        }
    }

    /// Whether it is for what is meant, or for some of its addresses.
    fn concerns(
        &self,
        wanted: &DestinationArg,
        meant: &HashSet<Destination>,
        hosts: &HostNames,
    ) -> bool {
        self.destination == *wanted || !addresses(hosts, &self.destination).is_disjoint(meant)
    }

    fn order(&self, until: Nanos) -> Order {
        let by = Arc::clone(&self.by);
        if self.trip {
            Order::Trip(until, by)
        } else {
            Order::HoldClosed(until, by)
        }
    }

    /// What rows to come begin with.
    fn verdict(&self, errno: u16) -> Verdict {
        Verdict {
            generation: 1,
            errno,
            state: if self.trip {
                STATE_FORCED_OPEN
            } else {
                STATE_FORCED_CLOSED
            },
            flags: 0,
        }
    }
}

/// Every address that is meant, of whatever namespace.
fn addresses(hosts: &HostNames, wanted: &DestinationArg) -> HashSet<Destination> {
    match wanted {
        DestinationArg::Address(address) => HashSet::from([*address]),
        DestinationArg::Name { name, port } => {
            let known = named::destinations(hosts, name, *port).into_iter();
            known.map(|(_, address)| address).collect()
        }
    }
}

/// An order with its number: a higher one is newer.
#[derive(Clone, Debug)]
pub struct Numbered {
    number: u64,
    order: Standing,
}

/// What the event thread was told last of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Told {
    number: u64,
    until: Nanos,
}

/// See the module.
#[derive(Default)]
pub struct Orders {
    /// Oldest first.
    standing: Vec<Numbered>,
    next: u64,
    told: HashMap<RowId, Told>,
    /// What the kernel has for rows to come.
    entered: HashMap<ManualKey, (u64, Nanos)>,
}

impl Orders {
    /// One more, the newest. Returns what was in force before, for [`Orders::give_back`].
    pub fn give(&mut self, order: Standing) -> Vec<Numbered> {
        let before = self.standing.clone();
        if let Some(place) = self.place(&order) {
            self.standing.remove(place);
        }
        let number = self.next;
        self.next += 1;
        self.standing.push(Numbered { number, order });
        before
    }

    /// Undoes [`Orders::give`].
    pub fn give_back(&mut self, before: Vec<Numbered>) {
        self.standing = before;
    }

    /// Whether there is room for it.
    pub fn has_room(&self, order: &Standing) -> bool {
        self.standing.len() < MOST || self.place(order).is_some()
    }

    fn place(&self, order: &Standing) -> Option<usize> {
        self.standing.iter().position(|Numbered { order: of, .. }| {
            of.destination == order.destination && of.workload == order.workload
        })
    }

    /// Takes back what was ordered for a destination: with the same words, and where they are a name, for
    /// the addresses of that name, too. Of one workload only what was ordered for that one.
    pub fn take_back(
        &mut self,
        wanted: &DestinationArg,
        workload: Option<&str>,
        hosts: &HostNames,
    ) -> Vec<Standing> {
        let ours = addresses(hosts, wanted);
        self.remove(|order| {
            let is_it = match &order.destination {
                DestinationArg::Address(address) => ours.contains(address),
                DestinationArg::Name { .. } => order.destination == *wanted,
            };
            is_it && (workload.is_none() || order.workload.as_deref() == workload)
        })
    }

    /// Takes away those whose time is over.
    pub fn expire(&mut self, now: Nanos) -> Vec<Standing> {
        if self.all().all(|order| order.until > now) {
            return Vec::new();
        }
        self.remove(|order| order.until <= now)
    }

    fn remove(&mut self, is_it: impl Fn(&Standing) -> bool) -> Vec<Standing> {
        let mut gone = Vec::new();
        self.standing.retain(|Numbered { order, .. }| {
            let goes = is_it(order);
            if goes {
                gone.push(order.clone());
            }
            !goes
        });
        gone
    }

    /// All of them, oldest first.
    pub fn all(&self) -> impl DoubleEndedIterator<Item = &Standing> + '_ {
        self.standing.iter().map(|Numbered { order, .. }| order)
    }

    /// Whether there is none, and no row that was told of one.
    pub fn is_idle(&self) -> bool {
        self.standing.is_empty() && self.told.is_empty()
    }

    /// Rows that were told of an order that does not stand any more.
    pub fn told_of_gone(&self) -> Vec<RowId> {
        let stands = |number| self.standing.iter().any(|order| order.number == number);
        let gone = self.told.iter().filter(|(_, told)| !stands(told.number));
        gone.map(|(row, _)| *row).collect()
    }

    /// Those that are for some of what is meant, newest first, each with the number of rows that it is in
    /// force for.
    pub fn concerning<'a>(
        &'a self,
        wanted: Option<&'a DestinationArg>,
        workload: Option<&'a str>,
        hosts: &'a HostNames,
    ) -> impl Iterator<Item = (&'a Standing, u64)> + 'a {
        let mut rows: HashMap<u64, u64> = HashMap::new();
        for told in self.told.values() {
            *rows.entry(told.number).or_default() += 1;
        }
        let meant = wanted.map_or_else(HashSet::new, |wanted| addresses(hosts, wanted));
        let all = self.standing.iter().rev();
        all.filter(move |Numbered { order, .. }| {
            order.concerns_workload(workload)
                && wanted.is_none_or(|wanted| order.concerns(wanted, &meant, hosts))
        })
        .map(move |Numbered { number, order }| (order, rows.get(number).copied().unwrap_or(0)))
    }

    /// The one that is in force when this workload calls an address with these names.
    pub fn in_force(
        &self,
        destination: &Destination,
        names: &[KnownName],
        workload: &str,
        now: Nanos,
    ) -> Option<&Standing> {
        let mut newest = self.all().rev();
        newest.find(|order| order.until > now && order.covers(destination, names, workload))
    }

    /// What is to be told to the event thread of a row that exists; `None`: it knows. To be asked when the
    /// row is new, and when its names or the orders have changed. `forced`: the kernel has made the row in
    /// a manual state, or it is in one for another reason.
    pub fn tell(
        &mut self,
        row: RowId,
        destination: &Destination,
        names: &[KnownName],
        workload: &str,
        forced: bool,
        now: Nanos,
    ) -> Option<Order> {
        let mut covering = self.standing.iter().rev().filter(|Numbered { order, .. }| {
            order.until > now && order.covers(destination, names, workload)
        });
        let Some(newest) = covering.next() else {
            let ended = match self.told.remove(&row) {
                Some(told) if told.until <= now => Ended::TimeOver,
                Some(_) => Ended::NotCovered,
                None if forced => Ended::NotCovered,
                None => return None,
            };
            return Some(Order::Lift(ended));
        };
        let until = told_until(&newest.order, covering.map(|older| &older.order));
        let number = newest.number;
        let told = Told { number, until };
        if self.told.insert(row, told) == Some(told) {
            return None;
        }
        Some(newest.order.order(until))
    }

    /// Whether the event thread was told of an order for the row.
    pub fn is_told(&self, row: RowId) -> bool {
        self.told.contains_key(&row)
    }

    /// The row is given up, or is protected by now.
    pub fn forget(&mut self, row: RowId) {
        self.told.remove(&row);
    }

    /// What the kernel is to have for rows to come: for each address what holds for all workloads. A name
    /// stands for the addresses that the agent itself has resolved it to, as the kernel's table knows no
    /// namespaces.
    fn entries(&self, hosts: &HostNames, plan: &Plan) -> HashMap<ManualKey, (Verdict, Nanos)> {
        let mut covering: HashMap<Destination, Vec<&Standing>> = HashMap::new();
        for order in self.all().rev().filter(|order| order.workload.is_none()) {
            let addresses = match &order.destination {
                DestinationArg::Address(address) => vec![*address],
                DestinationArg::Name { name, port } => named::destinations(hosts, name, *port)
                    .into_iter()
                    .filter(|((netns, _), _)| *netns == EVERYWHERE)
                    .map(|(_, address)| address)
                    .collect(),
            };
            for address in addresses {
                covering.entry(address).or_default().push(order);
            }
        }
        let entry = |(address, orders): (Destination, Vec<&Standing>)| {
            let names = hosts.of(EVERYWHERE, &address.addr_bytes());
            let found = plan.config.resolve(&address, None, &names);
            if found.protected {
                return None;
            }
            let errno = plan.breakers[found.policy].errno;
            let (newest, older) = orders.split_first()?;
            let until = told_until(newest, older.iter().copied());
            Some((address.to_manual_key(), (newest.verdict(errno), until)))
        };
        covering.into_iter().filter_map(entry).collect()
    }

    /// Tells the kernel what rows to come begin with. To be called when the orders, names or policies have
    /// changed.
    ///
    /// # Errors
    /// When there are more addresses than the kernel has room for, or it takes them not.
    pub fn enter(&mut self, kernel: &mut Kernel, hosts: &HostNames, plan: &Plan) -> Result<()> {
        let entries = self.entries(hosts, plan);
        anyhow::ensure!(
            entries.len() <= MOST_ENTERED,
            "orders for {} addresses, and there is room for {MOST_ENTERED}; reset some",
            entries.len()
        );
        let gone: Vec<ManualKey> = self
            .entered
            .keys()
            .filter(|key| !entries.contains_key(*key))
            .copied()
            .collect();
        for key in gone {
            kernel.set_manual(&key, None)?;
            self.entered.remove(&key);
        }
        for (key, (verdict, until)) in entries {
            let entry = (verdict.pack(), until);
            if self.entered.get(&key) != Some(&entry) {
                kernel.set_manual(&key, Some((verdict, until)))?;
                self.entered.insert(key, entry);
            }
        }
        Ok(())
    }
}

/// Until when an order is told to hold: until its end; a little longer where older ones that go on then
/// have to follow without a gap, but never longer than the last of them.
fn told_until<'a>(newest: &Standing, older: impl Iterator<Item = &'a Standing>) -> Nanos {
    let last = older.map(|order| order.until).max();
    let last = last.unwrap_or_default().max(newest.until);
    last.min(newest.until + RELAY)
}

#[cfg(test)]
mod tests;
