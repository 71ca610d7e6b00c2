//! Which policy is for a connection, and why.
//!
//! The most specific policy wins. In this order:
//! 1. one that names workload and destination, then one that names the destination, then one that
//!    names the workload;
//! 2. among destinations: an exact name, then an exact address, then `*.name` (the longer one
//!    first), then a prefix (the longer one first);
//! 3. a pattern with a port before one without;
//! 4. the policy that stands first in the file.

use std::fmt::Write as _;

use super::{
    DEFAULT_POLICY,
    destination::Destination,
    model::{Config, Policy},
    pattern::{DestinationPattern, KnownName, Target},
    workload::WorkloadPattern,
};

/// At most so many of the policies that lost are named.
const MAX_LOSERS: usize = 3;

/// Which policy is for a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolution {
    /// 0: the defaults; i + 1: `policies[i]`. See [`Config::policy`].
    pub policy: usize,
    /// Counted and otherwise left alone, whatever the policy says.
    pub protected: bool,
    /// The reasons in plain words, one line.
    pub why: String,
}

/// How much a pattern narrows the hosts down; the greatest is the most specific.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Length {
    /// Any host: the policy has no destinations.
    Any,
    /// A prefix of so many bits. Only prefixes of one family ever compete.
    Prefix(u8),
    /// `*.name`, so long.
    Below(usize),
    /// One address.
    Address,
    /// One name.
    Name,
}

/// How specific a match is. The order of the fields is the order of the rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    destination: bool,
    workload: bool,
    length: Length,
    port: bool,
}

/// A policy that is for the connection.
pub(super) struct Match<'c> {
    /// As in [`Resolution::policy`].
    pub index: usize,
    pub policy: &'c Policy,
    rank: Rank,
    /// The pattern that matched; `None`: the policy names none.
    pub destination: Option<&'c DestinationPattern>,
    /// The pattern that matched; `None`: the policy names none.
    pub workload: Option<&'c WorkloadPattern>,
}

impl Match<'_> {
    /// What matched, in plain words.
    pub fn what_matched(&self) -> String {
        match (self.destination, self.workload) {
            (Some(to), Some(from)) => format!("destination {to} and workload {from} match"),
            (Some(to), None) => format!("destination {to} matches"),
            (None, Some(from)) => format!("workload {from} matches"),
            // A policy without both is refused when it is read.
            (None, None) => "matches everything".to_owned(),
        }
    }

    /// Why `loser` stands behind this one. To be read after the loser's name.
    pub fn before(&self, loser: &Self) -> &'static str {
        because(&self.rank, &loser.rank)
    }
}

impl Config {
    /// Finds the policy for a connection to `destination`.
    ///
    /// `workload`: path of the caller's control group; `None` if it is not known, then no policy
    /// with `workloads` is for it. `names`: those that the address is known by.
    pub fn resolve(
        &self,
        destination: &Destination,
        workload: Option<&str>,
        names: &[KnownName],
    ) -> Resolution {
        let matches = self.matches(destination, workload, names);
        let guard = self.guard(destination, names);

        let mut why = match matches.split_first() {
            None => format!("{DEFAULT_POLICY}: no policy matches, so the defaults apply"),
            Some((winner, losers)) => explain(winner, losers),
        };
        if let Some((_, pattern)) = guard {
            let _ = write!(
                why,
                "; protected by {pattern}: counted, never refused or timed out"
            );
        }
        Resolution {
            policy: matches.first().map_or(0, |winner| winner.index),
            protected: guard.is_some(),
            why,
        }
    }

    /// The policies that are for the connection, the one that applies first.
    pub(super) fn matches<'c>(
        &'c self,
        destination: &Destination,
        workload: Option<&str>,
        names: &[KnownName],
    ) -> Vec<Match<'c>> {
        let mut matches: Vec<Match<'_>> = self
            .policies
            .iter()
            .enumerate()
            .filter_map(|(i, policy)| matching(i + 1, policy, destination, workload, names))
            .collect();
        // Stable: among equals the order of the file stays.
        matches.sort_by_key(|found| std::cmp::Reverse(found.rank));
        matches
    }

    /// The first protected destination that covers the connection, with its place in the list. Of names,
    /// only those count that the agent has resolved itself: nobody who answers programs is to decide
    /// what is protected.
    pub(super) fn guard(
        &self,
        destination: &Destination,
        names: &[KnownName],
    ) -> Option<(usize, &DestinationPattern)> {
        let own: Vec<KnownName> = names.iter().filter(|known| known.own).cloned().collect();
        self.protected
            .iter()
            .enumerate()
            .find(|(_, pattern)| pattern.matches(destination, &own))
    }
}

fn matching<'c>(
    index: usize,
    policy: &'c Policy,
    to: &Destination,
    workload: Option<&str>,
    names: &[KnownName],
) -> Option<Match<'c>> {
    let from = match (policy.workloads.as_slice(), workload) {
        ([], _) => None,
        (patterns, workload) => Some(
            patterns
                .iter()
                .find(|pattern| workload.is_some_and(|w| pattern.matches(w)))?,
        ),
    };
    let best = match policy.destinations.as_slice() {
        [] => None,
        patterns => Some(
            patterns
                .iter()
                .filter(|pattern| pattern.matches(to, names))
                .max_by_key(|pattern| (length(pattern), pattern.port.is_some()))?,
        ),
    };
    let rank = Rank {
        destination: best.is_some(),
        workload: from.is_some(),
        length: best.map_or(Length::Any, length),
        port: best.is_some_and(|pattern| pattern.port.is_some()),
    };
    Some(Match {
        index,
        policy,
        rank,
        destination: best,
        workload: from,
    })
}

fn length(pattern: &DestinationPattern) -> Length {
    match &pattern.target {
        Target::Name {
            wildcard: false, ..
        } => Length::Name,
        Target::Name {
            name,
            wildcard: true,
        } => Length::Below(name.len()),
        Target::Address(net) if net.prefix_len() == net.max_prefix_len() => Length::Address,
        Target::Address(net) => Length::Prefix(net.prefix_len()),
    }
}

fn explain(winner: &Match<'_>, losers: &[Match<'_>]) -> String {
    let mut why = format!("{}: {}", winner.policy.name, winner.what_matched());
    for loser in losers.iter().take(MAX_LOSERS) {
        let reason = winner.before(loser);
        let _ = write!(why, "; before {}, {reason}", loser.policy.name);
    }
    if losers.len() > MAX_LOSERS {
        let _ = write!(why, "; before {} more", losers.len() - MAX_LOSERS);
    }
    why
}

/// The first rule by which `winner` beats `loser`.
fn because(winner: &Rank, loser: &Rank) -> &'static str {
    if (winner.destination, winner.workload) != (loser.destination, loser.workload) {
        return match (loser.destination, winner.workload) {
            (true, _) => "which does not name the workload",
            (false, true) => "which does not name the destination",
            (false, false) => "as a destination counts more than a workload",
        };
    }
    if winner.length != loser.length {
        return match (winner.length, loser.length) {
            (Length::Prefix(_), Length::Prefix(_)) => "whose prefix is shorter",
            (Length::Below(_), Length::Below(_)) => "whose name is shorter",
            (Length::Name, _) => "which does not name the exact name",
            (Length::Address, _) => "which does not name the exact address",
            _ => "which names a prefix instead of a name",
        };
    }
    if winner.port != loser.port {
        return "which does not name the port";
    }
    "which stands later in the file"
}
