//! Faults that many destinations share: then the fault is on this side (a route, the network card, a
//! firewall rule), breakers would not help, and opening them only adds to it.
//!
//! Correlated is: at least [`FEWEST`] destinations had traffic in the last minute, and more than
//! [`SHARE_PERCENT`] of them failed on connects within [`WITHIN`], at [`ADDRESSES`] addresses or more.
//! One host that is down takes all its ports with it, and is no such fault; neither is anything on
//! loopback, which no local fault of the network touches. It is over when that has not been so for
//! [`CALM`].
//!
//! One workload alone may fail at everything that it calls: it scans a network, its own policy forbids
//! all, its list of targets is old. That must not keep the breakers of others closed. So while the node's
//! destinations fail, a row is held back only if its own workload shows the fault: more than
//! [`SHARE_PERCENT`] of the destinations with traffic of that workload fail. And where the fault would not
//! be there without the workload that fails most, only the rows of that one are held back. It would not,
//! unless of the destinations of all others together more than [`SHARE_PERCENT`] fail, too, at
//! [`ADDRESSES`] addresses or more. [`FEWEST`] is not asked of the others, nor of one workload: two
//! programs with three upstreams each that all fail are one fault of the node, and neither is to be taken
//! for the one to blame. Fewer than three addresses of others, however, prove nothing: those may just be
//! down, and a breaker that opens there does no more than on a node with few destinations.
//!
//! How many have traffic only the shell knows: it says so at least every [`COUNT_LASTS`] while connects
//! fail. Without a fresh count nothing is correlated.
//!
//! Cost: a failure is two look-ups; a look walks all that fail, ten times a second at most when they are
//! more than ten, and twice when they are thousands. Of workloads it asks only while the node's
//! destinations fail.

use std::cmp::Reverse;
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
/// Failing destinations that are remembered, and pairs of a workload and a destination: beyond it the
/// share is so large that more say no more.
const MOST: usize = 65_536;

/// So many that fail are all looked at with each failure,
const SOME: usize = 2 * FEWEST;
/// so many ten times a second, and more twice a second.
const MANY: usize = 4096;

/// An address and port, of whatever namespace.
type Place = ([u8; 16], u32, u16);

/// Whose destinations: an opaque number of the shell's. Rows of which it has not said are of number 0.
pub type Workload = u64;

/// Destinations with traffic in the last minute, loopback apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Addresses and ports, of all workloads.
    pub destinations: usize,
    /// Of each workload. Of one that is missing here, what fails is taken for all that it calls.
    pub workloads: HashMap<Workload, Share>,
}

/// What one workload calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// Its destinations.
    pub destinations: usize,
    /// Those among them that no other workload calls.
    pub exclusive: usize,
}

impl From<usize> for Traffic {
    /// Workloads are not told apart.
    fn from(destinations: usize) -> Self {
        Self {
            destinations,
            workloads: HashMap::new(),
        }
    }
}

impl Traffic {
    /// Counts: each item is one row with traffic.
    pub fn of<P: Ord>(rows: impl IntoIterator<Item = (P, Workload)>) -> Self {
        let mut rows: Vec<(P, Workload)> = rows.into_iter().collect();
        rows.sort_unstable();
        // A workload may call a place from several namespaces: that is one destination.
        rows.dedup();
        let mut traffic = Self::default();
        for whose in rows.chunk_by(|a, b| a.0 == b.0) {
            traffic.destinations += 1;
            for (_, workload) in whose {
                let share = traffic.workloads.entry(*workload).or_default();
                share.destinations += 1;
                share.exclusive += usize::from(whose.len() == 1);
            }
        }
        traffic
    }
}

/// A change: correlated failures have begun, or are over. Said to begin again, twice at most, when it is
/// known better whose fault it is ([`Engine::correlated_within`](super::Engine::correlated_within)): that
/// of one workload beside which others are well, or that of more than this one.
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
    /// The same for each workload.
    whose: HashMap<(Workload, Place), Nanos>,
    /// What has traffic, and when that was counted.
    traffic: Option<(Traffic, Nanos)>,
    /// When it was last so; `None`: it is not.
    seen: Option<Nanos>,
    /// Workloads that are held back, and when each showed the fault last. Empty unless `seen`.
    held: HashMap<Workload, Nanos>,
    /// The workload without which there would be no fault.
    only: Option<Workload>,
    /// Somebody else calls anything at all: only then does `only` say anything.
    has_others: bool,
    /// What has been said of whose fault it is.
    told: Blame,
    /// Workloads that were held back and no longer are.
    released: Vec<Workload>,
    /// When the next look is due.
    due: Option<Nanos>,
    /// When old ones were last thrown out.
    pruned: Nanos,
}

impl Correlation {
    /// Whether nothing more may be opened of that workload.
    pub(super) fn holds(&self, workload: Workload) -> bool {
        self.held.contains_key(&workload)
    }

    /// The workload without which the others together would be well; `None` while that is not so, and
    /// where there are no others.
    pub(super) fn within(&self) -> Option<Workload> {
        self.only.filter(|_| self.has_others)
    }

    /// Workloads that are held back no more, since this was last asked.
    pub(super) fn released(&mut self) -> Vec<Workload> {
        std::mem::take(&mut self.released)
    }

    /// When [`Correlation::look`] is due at the latest.
    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.due
    }

    /// A connect of that workload to that target failed.
    pub(super) fn failed(
        &mut self,
        target: DialTarget,
        workload: Workload,
        at: Nanos,
        now: Nanos,
    ) -> Option<Correlated> {
        if is_loopback(&target.addr) {
            return None;
        }
        let place = (target.addr, target.ifindex, target.port_be);
        note(&mut self.failing, place, at);
        note(&mut self.whose, (workload, place), at);
        // A look at all of them for each failure would cost too much.
        let many = self.whose.len();
        let pause = Nanos::from_millis(if many > MANY { 500 } else { 100 });
        if many > SOME && now - self.pruned < pause {
            return None;
        }
        self.look(now)
    }

    /// So much had traffic in the last minute.
    pub(super) fn count(&mut self, traffic: Traffic, now: Nanos) -> Option<Correlated> {
        self.traffic = Some((traffic, now));
        self.look(now)
    }

    /// Looks anew.
    pub(super) fn look(&mut self, now: Nanos) -> Option<Correlated> {
        self.pruned = now;
        self.failing.retain(|_, at| now - *at <= WITHIN);
        self.whose.retain(|_, at| now - *at <= WITHIN);
        let failing = self.failing.len();
        let counted = self
            .traffic
            .as_ref()
            .filter(|(_, at)| now - *at <= COUNT_LASTS)
            .map_or(0, |(traffic, _)| traffic.destinations.max(failing));
        let addresses = addresses(self.failing.keys());
        let is_so = counted >= FEWEST && is_most(failing, counted) && addresses >= ADDRESSES;
        let (mut begins, mut ends, mut is_news) = (false, false, false);
        if is_so {
            begins = self.seen.replace(now).is_none();
            self.blame(counted, now);
            let blame = match (self.only, self.has_others) {
                (Some(_), false) => Blame::Alone,
                (Some(_), true) => Blame::One,
                (None, _) => Blame::Many,
            };
            let before = self.told;
            self.told = before.max(blame);
            // Alone and many are the same words: the fault is on this side.
            is_news = self.told > before && (before, blame) != (Blame::Alone, Blame::Many);
        } else if self.seen.is_some_and(|seen| now - seen >= CALM) {
            ends = true;
            self.seen = None;
            self.only = None;
            self.told = Blame::default();
        }
        let released = &mut self.released;
        self.held.retain(|workload, seen| {
            let stays = now - *seen < CALM;
            if !stays {
                released.push(*workload);
            }
            stays
        });
        let ages = self.held.values().chain(&self.seen);
        self.due = ages.min().map(|oldest| *oldest + CALM);
        (begins || ends || is_news).then_some(Correlated {
            begins: !ends,
            failing,
            destinations: counted,
        })
    }

    /// The node's destinations fail: which workloads show it.
    fn blame(&mut self, counted: usize, now: Nanos) {
        let mut failing: HashMap<Workload, usize> = HashMap::new();
        for (workload, _) in self.whose.keys() {
            *failing.entry(*workload).or_default() += 1;
        }
        let shares = self.traffic.as_ref().map(|(traffic, _)| &traffic.workloads);
        let share = |workload: &Workload| {
            let known = shares.and_then(|shares| shares.get(workload));
            known.copied().unwrap_or_default()
        };
        // Of equals the one of the lower number: the order is not to depend on the map's.
        let most = failing
            .iter()
            .max_by_key(|(workload, count)| (**count, Reverse(**workload)))
            .map(|(workload, _)| *workload);
        let of_others: HashSet<&Place> = self
            .whose
            .keys()
            .filter(|(workload, _)| Some(*workload) != most)
            .map(|(_, place)| place)
            .collect();
        let exclusive = most.map_or(0, |most| share(&most).exclusive);
        let others = counted.saturating_sub(exclusive).max(of_others.len());
        let too =
            is_most(of_others.len(), others) && addresses(of_others.iter().copied()) >= ADDRESSES;
        self.only = most.filter(|_| !too);
        let calls = |workload: &Workload| Some(*workload) != most;
        self.has_others =
            !of_others.is_empty() || shares.is_some_and(|shares| shares.keys().any(calls));
        for (workload, failing) in &failing {
            let all = share(workload).destinations.max(*failing);
            if is_most(*failing, all) && self.only.is_none_or(|only| only == *workload) {
                self.held.insert(*workload, now);
            }
        }
    }
}

/// Whose fault it is taken for. In the course of one fault only what comes later here is news.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Blame {
    /// One workload fails, and no other calls anything (or has not been counted yet).
    #[default]
    Alone,
    /// One fails, and the others are well.
    One,
    /// Others fail, too.
    Many,
}

/// More than [`SHARE_PERCENT`] of them.
fn is_most(failing: usize, of: usize) -> bool {
    failing * 100 > of * SHARE_PERCENT
}

fn addresses<'a>(places: impl Iterator<Item = &'a Place>) -> usize {
    let addresses: HashSet<&[u8; 16]> = places.map(|(addr, ..)| addr).collect();
    addresses.len()
}

/// Remembers the failure, where there is room.
fn note<K: Eq + std::hash::Hash>(failing: &mut HashMap<K, Nanos>, of: K, at: Nanos) {
    if failing.len() < MOST || failing.contains_key(&of) {
        let last = failing.entry(of).or_insert(at);
        *last = at.max(*last);
    }
}

/// Loopback, of either family.
pub fn is_loopback(addr: &[u8; 16]) -> bool {
    let mut six = [0; 16];
    six[15] = 1;
    *addr == six || (addr[..12] == agent_common::key::IPV4_MAPPED_PREFIX && addr[12] == 127)
}
