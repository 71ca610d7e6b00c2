//! How long the agent takes from a failure in the kernel to the verdict in the kernel.

use std::sync::atomic::{AtomicU64, Ordering};

use agent_common::histogram::{BUCKETS, bucket};

/// Counts per bucket of [`agent_common::histogram`], filled by the event thread, read by anybody.
pub struct Reaction {
    counts: Box<[AtomicU64]>,
    sum_ns: AtomicU64,
}

impl Default for Reaction {
    fn default() -> Self {
        Self {
            counts: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect(),
            sum_ns: AtomicU64::new(0),
        }
    }
}

impl Reaction {
    /// One reaction, ns.
    pub fn record(&self, ns: u64) {
        self.counts[bucket(ns / 1000)].fetch_add(1, Ordering::Relaxed);
        self.sum_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Counts per bucket (us), and the sum in ns.
    pub fn read(&self) -> (Vec<u64>, u64) {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        (counts, self.sum_ns.load(Ordering::Relaxed))
    }
}
