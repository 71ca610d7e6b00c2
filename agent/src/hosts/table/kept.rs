//! What of the names outlives the agent: those that programs were told. What the agent has resolved itself,
//! it resolves again.

use std::sync::Arc;

use super::{
    Address, EVERYWHERE, Held, HostNames, LONGEST, MOST, MOST_NAMES, MOST_PER_NAMESPACE, is_v6,
};
use crate::core::Nanos;

/// A name of an address, as a program was told. Times are of CLOCK_MONOTONIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// Cookie of the network namespace.
    pub netns: u64,
    /// The address, in 16-byte form.
    pub addr: [u8; 16],
    /// The name.
    pub name: Arc<str>,
    /// Whether somebody has asked for it, not for an alias of it.
    pub asked: bool,
    /// When the address got it.
    pub since: Nanos,
    /// The last answer that had it.
    pub seen: Nanos,
    /// It holds at least until then.
    pub until: Nanos,
    /// The last answer for the name, of the address's family: with it the address or without.
    pub newest: Nanos,
}

impl HostNames {
    /// Every name that programs were told, in no particular order; at most [`MOST`].
    pub fn told(&self) -> Vec<Told> {
        let heard = self.addresses.iter().filter(|(p, _)| p.0 != EVERYWHERE);
        let names = heard.flat_map(|(place, address)| {
            let v6 = is_v6(&place.1);
            address.names.iter().map(move |held| {
                let key = (place.0, Arc::clone(&held.name), v6);
                Told {
                    netns: place.0,
                    addr: place.1,
                    name: Arc::clone(&held.name),
                    asked: held.asked,
                    since: held.since,
                    seen: held.seen,
                    until: held.until,
                    newest: self.answered.get(&key).copied().unwrap_or(held.seen),
                }
            })
        });
        names.collect()
    }

    /// Takes over what an earlier agent was told, for as long as it holds. What this one knows stays, and
    /// the bounds hold, whatever the list says: it may come from a file that anybody has edited.
    pub fn restore(&mut self, told: impl IntoIterator<Item = Told>, now: Nanos) {
        let latest = now + Nanos(LONGEST.as_nanos() as u64);
        for told in told {
            let here = self.counts.get(&told.netns).copied().unwrap_or(0);
            if told.netns == EVERYWHERE || here >= MOST_PER_NAMESPACE || self.count >= MOST {
                continue;
            }
            let place = (told.netns, told.addr);
            let known = self.addresses.get(&place);
            let names = known.map_or(&[][..], |address| &address.names);
            if names.len() >= MOST_NAMES || names.iter().any(|held| held.name == told.name) {
                continue;
            }
            let name = self.interned(told.netns, &told.name);
            let seen = told.seen.min(now);
            let newest = (self.answered)
                .entry((told.netns, Arc::clone(&name), is_v6(&told.addr)))
                .or_default();
            *newest = told.newest.min(now).max(seen).max(*newest);
            let before = self.addresses.get(&place).map_or(0, Address::weight);
            let address = self.addresses.entry(place).or_default();
            address.names.push(Held {
                name,
                asked: told.asked,
                since: told.since.min(seen),
                seen,
                until: told.until.min(latest),
            });
            let more = address.weight() - before;
            *self.counts.entry(told.netns).or_default() += more;
            self.count += more;
        }
    }
}
