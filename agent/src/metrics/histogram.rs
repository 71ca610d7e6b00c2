//! From the kernel's 384 log-linear buckets to the few of a Prometheus histogram.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use agent_common::histogram::lower_bound;

/// Upper bounds of `connect_duration_seconds`, microseconds: a connect takes from half a
/// millisecond (one host, one rack) over a SYN that was lost (1 s) and the default timeout (2 s) to
/// 10 s, twice the longest timeout that is sensible.
pub const CONNECT_BOUNDS: [u64; 14] = [
    500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
    2_000_000, 5_000_000, 10_000_000,
];

/// Upper bounds of `response_duration_seconds`, microseconds: from half a millisecond (a cache in the
/// same rack) to a minute, where the read timeouts of most clients end.
pub const RESPONSE_BOUNDS: [u64; 16] = [
    500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
    2_000_000, 5_000_000, 10_000_000, 30_000_000, 60_000_000,
];

/// Upper bounds of `reaction_seconds`, microseconds: 0.1 ms is what the event thread takes when it
/// is woken at once.
pub const REACTION_BOUNDS: [u64; 13] = [
    50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 500_000, 1_000_000,
];

/// A histogram as Prometheus wants it: each bucket counts everything up to its bound.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cumulative {
    /// Upper bound, us, and the values up to it. Bounds and counts rise.
    pub buckets: Vec<(u64, u64)>,
    /// All values.
    pub count: u64,
    /// Their sum, us.
    pub sum_us: u64,
}

impl Cumulative {
    /// Adds another one. Where only one side has buckets they then count less than all.
    pub fn add(&mut self, other: &Self) {
        self.count = self.count.saturating_add(other.count);
        self.sum_us = self.sum_us.saturating_add(other.sum_us);
        if self.buckets.is_empty() {
            self.buckets.clone_from(&other.buckets);
            return;
        }
        for (mine, (_, theirs)) in self.buckets.iter_mut().zip(&other.buckets) {
            mine.1 = mine.1.saturating_add(*theirs);
        }
    }
}

/// Cumulative counts at `bounds` (us, rising) from calls per kernel bucket; without buckets only count
/// and sum. A kernel bucket goes to the first bound that its middle does not exceed, so that a value
/// counts within half a bucket's width (3.2 %) of where it is. `count` is raised to the sum of the
/// buckets if it is less (the two are not read at one instant).
pub fn cumulative<const N: usize>(
    bounds: &[u64; N],
    buckets: &[u64],
    count: u64,
    sum_us: u64,
) -> Cumulative {
    if buckets.is_empty() {
        return Cumulative {
            buckets: Vec::new(),
            count,
            sum_us,
        };
    }
    let mut at = [0u64; N];
    let mut beyond = 0u64;
    for (bucket, calls) in buckets.iter().enumerate().filter(|(_, calls)| **calls > 0) {
        let middle = u64::midpoint(lower_bound(bucket), lower_bound(bucket + 1) - 1);
        let taken_by = bounds.partition_point(|bound| *bound < middle);
        let sum = at.get_mut(taken_by).unwrap_or(&mut beyond);
        *sum = sum.saturating_add(*calls);
    }
    let mut up_to = 0u64;
    let cumulative = bounds.iter().zip(at).map(|(bound, calls)| {
        up_to = up_to.saturating_add(calls);
        (*bound, up_to)
    });
    let buckets = cumulative.collect();
    Cumulative {
        buckets,
        count: count.max(up_to.saturating_add(beyond)),
        sum_us,
    }
}

/// Counts reaction times. The event thread adds, a scrape reads, neither waits.
#[derive(Debug, Default)]
pub struct Reaction {
    /// One more than the bounds: the last takes what is beyond them.
    counts: [AtomicU64; REACTION_BOUNDS.len() + 1],
    sum_us: AtomicU64,
}

impl Reaction {
    /// Adds one.
    pub fn observe(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = REACTION_BOUNDS.partition_point(|bound| *bound < us);
        self.counts[bucket].fetch_add(1, Relaxed);
        self.sum_us.fetch_add(us, Relaxed);
    }

    /// The counts so far. One being added meanwhile may be in the sum only.
    pub fn cumulative(&self) -> Cumulative {
        let mut count = 0;
        let mut buckets = Vec::with_capacity(REACTION_BOUNDS.len());
        for (at, calls) in self.counts.iter().enumerate() {
            count += calls.load(Relaxed);
            if let Some(bound) = REACTION_BOUNDS.get(at) {
                buckets.push((*bound, count));
            }
        }
        Cumulative {
            buckets,
            count,
            sum_us: self.sum_us.load(Relaxed),
        }
    }
}
