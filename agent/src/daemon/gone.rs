//! Names that were heard in network namespaces that are gone: nobody asks for them any more, and a node
//! whose workloads come and go would keep them, in memory and in `names.json`, until others push them out.
//!
//! Once a minute, while names of any namespace are known, a thread looks which namespaces there are: one
//! look at every process, and one short visit to each namespace. It is a thread of its own and ends with
//! the look, as entering a namespace concerns a thread. What two looks in a row have not found is gone: a
//! process that starts another one and ends may slip through one.

use std::{collections::HashSet, thread::JoinHandle};

use super::node::Node;
use crate::{core::Nanos, hosts::table::EVERYWHERE, sockets::namespace::live_cookies};

/// Between two looks. Names in vain cost memory, nothing else.
const LOOK_EVERY: Nanos = Nanos::from_secs(60);

/// Which namespaces of the names are there. See the module.
pub struct Census {
    /// When a look was begun last, or the agent started.
    looked: Nanos,
    /// A look under way: the cookies that it found; `None`: it cannot tell.
    look: Option<JoinHandle<Option<HashSet<u64>>>>,
    /// What the last look has not found.
    missing: HashSet<u64>,
}

impl Census {
    /// The first look is a minute from now.
    pub fn new(now: Nanos) -> Self {
        Self {
            looked: now,
            look: None,
            missing: HashSet::new(),
        }
    }

    /// Of the namespaces that names were heard in, those that are gone now that a look has found `alive`.
    fn gone(&mut self, heard: impl Iterator<Item = u64>, alive: &HashSet<u64>) -> HashSet<u64> {
        let missing: HashSet<u64> = heard
            .filter(|netns| *netns != EVERYWHERE && !alive.contains(netns))
            .collect();
        let gone = missing.intersection(&self.missing).copied().collect();
        self.missing = missing;
        gone
    }

    /// What a look that is over has found.
    fn found(&mut self) -> Option<HashSet<u64>> {
        let look = self.look.take_if(|look| look.is_finished())?;
        look.join().ok()?
    }

    fn is_due(&self, now: Nanos) -> bool {
        self.look.is_none() && now - self.looked >= LOOK_EVERY
    }

    fn begin(&mut self, now: Nanos) {
        self.looked = now;
        let thread = std::thread::Builder::new().name("backstop-gone".into());
        // No thread now: the next minute will do.
        self.look = thread.spawn(live_cookies).ok();
    }
}

impl Node {
    /// Forgets names of namespaces that are gone.
    pub(super) fn forget_gone(&mut self, now: Nanos) {
        if let Some(alive) = self.census.found() {
            let heard = self.naming.hosts.namespaces();
            let gone = self.census.gone(heard, &alive);
            if !gone.is_empty() {
                let changes = self.naming.hosts.forget(&gone);
                tracing::debug!(
                    "{} names of {} network namespaces that are gone are forgotten",
                    changes.len(),
                    gone.len()
                );
                self.renamed(changes);
                self.keeper.heard();
            }
        }
        let has_any = || self.naming.hosts.namespaces().any(|of| of != EVERYWHERE);
        if self.census.is_due(now) && has_any() {
            self.census.begin(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gone_is_what_two_looks_in_a_row_miss() {
        let mut census = Census::new(Nanos::ZERO);
        let heard = [EVERYWHERE, 1, 2, 3];
        let mut look = |alive: &[u64]| {
            let alive = alive.iter().copied().collect();
            let gone = census.gone(heard.into_iter(), &alive);
            let mut gone: Vec<u64> = gone.into_iter().collect();
            gone.sort_unstable();
            gone
        };
        assert_eq!(look(&[1]), [0; 0]);
        assert_eq!(look(&[1, 3]), [2], "3 was only overlooked");
        assert_eq!(look(&[1]), [2]);
        assert_eq!(look(&[]), [2, 3]);
        assert_eq!(look(&[]), [1, 2, 3]);
    }

    #[test]
    fn one_look_at_a_time_and_one_a_minute() {
        let mut census = Census::new(Nanos::ZERO);
        let minute = Nanos::from_secs(60);
        assert!(!census.is_due(minute - Nanos(1)) && census.is_due(minute));
        census.begin(minute);
        assert!(!census.is_due(minute.times(3)), "it has not been heard of");
        census
            .look
            .take()
            .expect("a thread")
            .join()
            .expect("it ends");
        assert!(!census.is_due(minute.times(2) - Nanos(1)));
        assert!(census.is_due(minute.times(2)));
    }
}
