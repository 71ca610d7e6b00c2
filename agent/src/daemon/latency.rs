//! Latencies of the last five minutes, from the kernel's cumulative histograms.
//!
//! Every half minute the difference to the last look is put aside, as a list of the buckets that
//! changed: a destination with steady latencies costs some hundred bytes a slice.

use std::collections::{HashMap, VecDeque};

use agent_common::histogram::{BUCKETS, Histogram, lower_bound};

use crate::{
    control::api::Latency,
    core::{Nanos, RowId},
};

/// Length of a slice.
pub const SLICE: Nanos = Nanos::from_secs(30);
/// Slices that make five minutes.
const SLICES: usize = 10;

struct Past {
    /// The histogram at the end of the last slice.
    last: Box<[u32; BUCKETS]>,
    /// Buckets and how much they grew, one list a slice, oldest first.
    slices: VecDeque<Vec<(u16, u32)>>,
}

/// The past of each row that has a histogram.
#[derive(Default)]
pub struct Latencies {
    rows: HashMap<RowId, Past>,
    /// Buckets filled by the agent's own self-tests and the like are never asked for.
    since: Option<Nanos>,
}

impl Latencies {
    /// Whether a slice is over.
    pub fn is_due(&self, now: Nanos) -> bool {
        self.since
            .is_none_or(|since| now.0.saturating_sub(since.0) >= SLICE.0)
    }

    /// Ends a slice. `rows` are all rows with a histogram; the past of others is dropped.
    pub fn slice(&mut self, now: Nanos, rows: impl Iterator<Item = (RowId, Histogram)>) {
        self.since = Some(now);
        let mut old = std::mem::take(&mut self.rows);
        for (row, histogram) in rows {
            let mut past = old.remove(&row).unwrap_or_else(|| Past {
                last: Box::new([0; BUCKETS]),
                slices: VecDeque::new(),
            });
            let grown = difference(&past.last, &histogram.counts).collect();
            *past.last = histogram.counts;
            past.slices.push_back(grown);
            if past.slices.len() > SLICES {
                past.slices.pop_front();
            }
            self.rows.insert(row, past);
        }
    }

    /// The last five minutes of a row up to now. `longest` is the longest ever, us.
    pub fn of(&self, row: RowId, histogram: Option<&Histogram>, longest: u64) -> Latency {
        let mut counts = [0_u64; BUCKETS];
        if let Some(past) = self.rows.get(&row) {
            for (bucket, count) in past.slices.iter().flatten() {
                counts[usize::from(*bucket)] += u64::from(*count);
            }
        }
        if let Some(histogram) = histogram {
            let none = [0; BUCKETS];
            let last = self.rows.get(&row).map_or(&none, |past| &past.last);
            for (bucket, count) in difference(last, &histogram.counts) {
                counts[usize::from(bucket)] += u64::from(count);
            }
        }
        summary(&counts, longest)
    }
}

fn difference<'a>(
    before: &'a [u32; BUCKETS],
    now: &'a [u32; BUCKETS],
) -> impl Iterator<Item = (u16, u32)> + 'a {
    (0_u16..)
        .zip(before.iter().zip(now))
        .filter_map(|(bucket, (before, now))| {
            // Counts wrap at 2^32.
            let grown = now.wrapping_sub(*before);
            (grown != 0).then_some((bucket, grown))
        })
}

/// Percentiles from bucket counts: the middle of the bucket, within 3.2 % of the true value.
fn summary(counts: &[u64; BUCKETS], longest: u64) -> Latency {
    let count: u64 = counts.iter().sum();
    if count == 0 {
        return Latency::default();
    }
    let percentile = |share_1000: u64| {
        let wanted = (count * share_1000).div_ceil(1000).max(1);
        let mut seen = 0;
        for (bucket, n) in counts.iter().enumerate() {
            seen += n;
            if seen >= wanted {
                return (lower_bound(bucket) + (lower_bound(bucket + 1) - 1)) / 2;
            }
        }
        longest
    };
    let highest = counts.iter().rposition(|n| *n > 0).unwrap_or(0);
    let max = longest.clamp(lower_bound(highest), lower_bound(highest + 1) - 1);
    Latency {
        count,
        p50: Some(percentile(500).min(max)),
        p90: Some(percentile(900).min(max)),
        p99: Some(percentile(990).min(max)),
        p999: Some(percentile(999).min(max)),
        max,
    }
}

#[cfg(test)]
mod tests {
    use agent_common::histogram::bucket;

    use super::*;

    const ROW: RowId = RowId {
        index: 1,
        incarnation: 0,
    };

    fn histogram(values: &[(u64, u32)]) -> Histogram {
        let mut histogram = Histogram {
            counts: [0; BUCKETS],
        };
        for (us, count) in values {
            histogram.counts[bucket(*us)] += count;
        }
        histogram
    }

    #[test]
    fn percentiles_are_close() {
        let values: Vec<(u64, u32)> = (1..=1000).map(|i| (i * 10, 1)).collect();
        let latency = Latencies::default().of(ROW, Some(&histogram(&values)), 10_000);
        assert_eq!((latency.count, latency.max), (1000, 10_000));
        for (found, wanted) in [
            (latency.p50, 5000.0),
            (latency.p90, 9000.0),
            (latency.p99, 9900.0),
        ] {
            let found = found.unwrap() as f64;
            assert!((found - wanted).abs() <= wanted * 0.033, "{found} {wanted}");
        }
    }

    #[test]
    fn nothing_measured() {
        assert_eq!(Latencies::default().of(ROW, None, 0), Latency::default());
    }

    #[test]
    fn the_past_ends_after_five_minutes() {
        let mut latencies = Latencies::default();
        let old = histogram(&[(100, 7)]);
        let both = histogram(&[(100, 7), (50_000, 3)]);
        latencies.slice(Nanos(0), std::iter::once((ROW, old)));
        assert!(!latencies.is_due(Nanos(1)) && latencies.is_due(SLICE));
        assert_eq!(latencies.of(ROW, Some(&both), 50_000).count, 10);
        for i in 1..=SLICES as u64 {
            latencies.slice(Nanos(i), std::iter::once((ROW, both)));
        }
        let latency = latencies.of(ROW, Some(&both), 50_000);
        assert_eq!((latency.count, latency.max), (3, 50_000));
        latencies.slice(Nanos(99), std::iter::empty());
        assert_eq!(latencies.of(ROW, None, 0).count, 0);
    }
}
