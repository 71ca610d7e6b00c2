//! Counts of latency buckets: kept small, and summed up.
//!
//! A row's latencies lie in few of the 384 buckets, so what is kept of a histogram is a list of the
//! buckets that are not empty: how far it is from the one before, and its count, each in as few
//! bytes as it needs (LEB128). A steady destination takes some 60 to 200 bytes.

use agent_common::histogram::{BUCKETS, lower_bound};

use crate::control::api::Latency;

/// Counts of all buckets.
pub type Counts = [u32; BUCKETS];

/// Appends the counts that are not 0.
pub fn write(counts: &Counts, to: &mut Vec<u8>) {
    let mut next = 0;
    for (bucket, &count) in counts.iter().enumerate().filter(|(_, count)| **count != 0) {
        number((bucket - next) as u32, to);
        number(count, to);
        next = bucket + 1;
    }
}

/// Adds what [`write`] wrote. Counts wrap, as those of the kernel do.
pub fn add(mut from: &[u8], to: &mut Counts) {
    let mut bucket = 0;
    while let (Some(gap), Some(count)) = (take(&mut from), take(&mut from)) {
        bucket += gap as usize;
        let Some(sum) = to.get_mut(bucket) else {
            return;
        };
        *sum = sum.wrapping_add(count);
        bucket += 1;
    }
}

/// What was counted between two looks at one histogram, whose counts wrap.
pub fn grown(now: &Counts, before: &Counts) -> Counts {
    let mut grown = *now;
    for (grown, before) in grown.iter_mut().zip(before) {
        *grown = grown.wrapping_sub(*before);
    }
    grown
}

fn number(mut number: u32, to: &mut Vec<u8>) {
    while number >= 0x80 {
        to.push(number as u8 | 0x80);
        number >>= 7;
    }
    to.push(number as u8);
}

fn take(from: &mut &[u8]) -> Option<u32> {
    let mut number = 0;
    for shift in (0..35).step_by(7) {
        let (byte, rest) = from.split_first()?;
        *from = rest;
        number |= u32::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// Count, percentiles (by nearest rank) and maximum of `counts`, which were counted in the histogram
/// that is now `all`. `longest` is the longest latency ever counted in it, us.
///
/// A percentile is the middle of its bucket, hence within 3.2 % of the true value, or exact below
/// 16 us. So is the maximum, but exact where the longest latency ever is surely among `counts`.
/// Longer than 134 s is not told apart.
pub fn summary(counts: &Counts, all: &Counts, longest: u64) -> Latency {
    let count: u64 = counts.iter().copied().map(u64::from).sum();
    let Some(highest) = counts.iter().rposition(|count| *count > 0) else {
        return Latency::default();
    };
    // (Less where it was forgotten, as a destination is that has a new owner.)
    let is_longest = longest >= lower_bound(highest)
        && all[highest] == counts[highest]
        && all[highest + 1..].iter().all(|count| *count == 0);
    let max = if is_longest {
        let most = if highest == BUCKETS - 1 {
            u64::MAX
        } else {
            lower_bound(highest + 1) - 1
        };
        longest.clamp(lower_bound(highest), most)
    } else {
        middle(highest)
    };
    let percentile = |per_mille: u64| {
        let wanted = (count * per_mille).div_ceil(1000);
        let mut seen = 0;
        let bucket = counts.iter().position(|count| {
            seen += u64::from(*count);
            seen >= wanted
        });
        Some(bucket.map_or(max, middle).min(max))
    };
    Latency {
        count,
        p50: percentile(500),
        p90: percentile(900),
        p99: percentile(990),
        p999: percentile(999),
        max,
    }
}

fn middle(bucket: usize) -> u64 {
    u64::midpoint(lower_bound(bucket), lower_bound(bucket + 1) - 1)
}

#[cfg(test)]
pub(super) mod tests {
    use agent_common::histogram::{Histogram, bucket};
    use proptest::prelude::*;

    use super::*;

    pub(in super::super) fn histogram(values: &[u64]) -> Histogram {
        let mut counts = [0; BUCKETS];
        for us in values {
            counts[bucket(*us)] += 1;
        }
        Histogram { counts }
    }

    #[test]
    fn nothing_measured() {
        let none = [0; BUCKETS];
        assert_eq!(summary(&none, &none, 7), Latency::default());
    }

    /// Latencies as they come: from microseconds to two minutes, some far from the rest.
    fn latencies() -> impl Strategy<Value = Vec<u64>> {
        let wide = prop_oneof![0u64..100, 100u64..50_000, 0u64..(1 << 27)];
        prop_oneof![
            proptest::collection::vec(wide, 1..2000),
            proptest::collection::vec(900u64..1100, 1..2000),
        ]
    }

    proptest! {
        #[test]
        fn percentiles_are_within_five_per_cent(old in latencies(), new in latencies()) {
            let before = histogram(&old).counts;
            let mut all = before;
            for (all, new) in all.iter_mut().zip(histogram(&new).counts) {
                *all += new;
            }
            let longest = *old.iter().chain(&new).max().unwrap();
            let shown = summary(&grown(&all, &before), &all, longest);

            let mut sorted = new.clone();
            sorted.sort_unstable();
            let exact = |per_mille: usize| sorted[(sorted.len() * per_mille).div_ceil(1000) - 1];
            prop_assert_eq!(shown.count, sorted.len() as u64);
            let found = [shown.p50, shown.p90, shown.p99, shown.p999];
            for (found, per_mille) in found.into_iter().zip([500, 900, 990, 999]) {
                let (found, exact) = (found.unwrap(), exact(per_mille));
                prop_assert!(found.abs_diff(exact) * 20 <= exact, "{} {}", found, exact);
                prop_assert!(found <= shown.max);
            }
            let max = exact(1000);
            prop_assert!(shown.max.abs_diff(max) * 20 <= max, "max {} {}", shown.max, max);
        }

        #[test]
        fn a_maximum_without_a_past_is_exact(values in latencies()) {
            let all = histogram(&values).counts;
            let longest = *values.iter().max().unwrap();
            prop_assert_eq!(summary(&all, &all, longest).max, longest);
        }

        #[test]
        fn counts_survive_writing(
            buckets in proptest::collection::btree_map(0..BUCKETS, any::<u32>(), 0..BUCKETS),
        ) {
            let mut counts = [0; BUCKETS];
            for (bucket, count) in buckets {
                counts[bucket] = count;
            }
            let mut bytes = Vec::new();
            write(&counts, &mut bytes);
            let mut back = [0; BUCKETS];
            add(&bytes, &mut back);
            prop_assert_eq!(back, counts);
        }

        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            add(&bytes, &mut [0; BUCKETS]);
        }
    }

    #[test]
    fn what_is_longer_than_the_last_bucket_is_kept_as_maximum() {
        let values = [1_000, 200_000_000, 300_000_000];
        let all = histogram(&values).counts;
        let shown = summary(&all, &all, 300_000_000);
        assert_eq!(shown.max, 300_000_000);
        assert!(shown.p999 >= Some(130_000_000) && shown.p999 <= Some(shown.max));
    }
}
