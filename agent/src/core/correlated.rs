//! Faults that many destinations share: then the fault is on this side (a route, the network card, a
//! firewall rule), breakers would not help, and opening them only adds to it.
//!
//! Correlated is: at least [`FEWEST`] destinations had traffic in the last minute, and more than
//! [`SHARE_PERCENT`] of them failed on connects within [`WITHIN`], at [`ADDRESSES`] addresses or more.
//! One host that is down takes all its ports with it, and is no such fault; neither is anything on
//! loopback, which no local fault of the network touches. It is over when that has not been so for
//! [`CALM`].
//!
//! How many have traffic only the shell knows: it says so at least every [`COUNT_LASTS`] while connects
//! fail. Without a fresh count nothing is correlated.

use std::collections::{HashMap, HashSet};

use super::{DialTarget, Nanos};

/// Destinations with traffic, at least.
const FEWEST: usize = 5;
/// More than this share of them fail, percent.
const SHARE_PERCENT: usize = 60;
/// Within this time.
const WITHIN: Nanos = Nanos::from_secs(5);
/// Addresses that fail, at least.
const ADDRESSES: usize = 3;
/// Over when it has not been so for this long.
const CALM: Nanos = Nanos::from_secs(10);
/// A count of destinations is believed for this long.
const COUNT_LASTS: Nanos = Nanos::from_secs(5);
/// Failing destinations that are remembered: beyond it the share is so large that more say no more.
const MOST: usize = 65_536;

/// An address and port, of whatever namespace.
type Place = ([u8; 16], u32, u16);

/// A change: correlated failures have begun, or are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Correlated {
    /// Begun, or over.
    pub begins: bool,
    /// Destinations that failed within [`WITHIN`].
    pub failing: usize,
    /// Destinations with traffic.
    pub destinations: usize,
}

/// Who fails, and whether too many do.
#[derive(Default)]
pub(super) struct Correlation {
    /// When a connect failed last.
    failing: HashMap<Place, Nanos>,
    /// Destinations with traffic, and when that was counted.
    traffic: Option<(usize, Nanos)>,
    /// When it was last so; `None`: it is not.
    seen: Option<Nanos>,
    /// When old ones were last thrown out.
    pruned: Nanos,
}

impl Correlation {
    /// Whether nothing more may be opened.
    pub(super) fn holds(&self) -> bool {
        self.seen.is_some()
    }

    /// When [`Correlation::look`] is due at the latest.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.seen.map(|seen| seen + CALM)
    }

    /// A connect to that target failed.
    pub(super) fn failed(
        &mut self,
        target: DialTarget,
        at: Nanos,
        now: Nanos,
    ) -> Option<Correlated> {
        if is_loopback(&target.addr) {
            return None;
        }
        let place = (target.addr, target.ifindex, target.port_be);
        if self.failing.len() < MOST || self.failing.contains_key(&place) {
            let last = self.failing.entry(place).or_insert(at);
            *last = at.max(*last);
        }
        // A look at all of them for each failure would cost too much.
        if self.failing.len() > 2 * FEWEST && now - self.pruned < Nanos::from_millis(100) {
            return None;
        }
        self.look(now)
    }

    /// So many destinations had traffic in the last minute.
    pub(super) fn count(&mut self, destinations: usize, now: Nanos) -> Option<Correlated> {
        self.traffic = Some((destinations, now));
        self.look(now)
    }

    /// Looks anew.
    pub(super) fn look(&mut self, now: Nanos) -> Option<Correlated> {
        self.pruned = now;
        self.failing.retain(|_, at| now - *at <= WITHIN);
        let failing = self.failing.len();
        let counted = self
            .traffic
            .filter(|(_, at)| now - *at <= COUNT_LASTS)
            .map_or(0, |(destinations, _)| destinations.max(failing));
        let is_so = counted >= FEWEST
            && failing * 100 > counted * SHARE_PERCENT
            && self.addresses() >= ADDRESSES;
        let begins = match (is_so, self.seen) {
            (true, before) => {
                self.seen = Some(now);
                if before.is_some() {
                    return None;
                }
                true
            }
            (false, Some(seen)) if now - seen >= CALM => {
                self.seen = None;
                false
            }
            (false, _) => return None,
        };
        Some(Correlated {
            begins,
            failing,
            destinations: counted,
        })
    }

    fn addresses(&self) -> usize {
        let addresses: HashSet<&[u8; 16]> = self.failing.keys().map(|(addr, ..)| addr).collect();
        addresses.len()
    }
}

/// Loopback, of either family.
pub fn is_loopback(addr: &[u8; 16]) -> bool {
    let mut six = [0; 16];
    six[15] = 1;
    *addr == six || (addr[..12] == agent_common::key::IPV4_MAPPED_PREFIX && addr[12] == 127)
}
