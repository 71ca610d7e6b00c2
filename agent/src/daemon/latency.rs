//! Latencies of the last minute and the last five, from the kernel's cumulative histograms.
//!
//! Every ten seconds what has grown since the last look is put aside as a slice, and six slices
//! become one of a minute. So "the last minute" is 60 to 70 seconds and "the last five minutes" 300
//! to 360. A destination without traffic has no place in a slice.
//!
//! Memory is bounded by [`MOST_BYTES`]: where the slices of all rows take more, the oldest go first,
//! and the five minutes of that time are shorter.

use std::collections::VecDeque;

use agent_common::histogram::{BUCKETS, Histogram};

use super::buckets::{self, Counts};
use crate::{
    control::api::Latency,
    core::{Nanos, RowId},
};

/// Length of a slice.
pub const SLICE: Nanos = Nanos::from_secs(10);
/// Slices that make a minute.
const MINUTE: usize = 6;
/// Minutes kept.
const MINUTES: usize = 5;
/// Most memory of the slices, without the look that the next one is compared with.
const MOST_BYTES: usize = 3 << 20;

/// The past of each row that has a histogram of one kind.
#[derive(Default)]
pub struct Latencies {
    /// All histograms at the last look.
    last: Pieces,
    /// What had grown at each look, oldest first.
    slices: VecDeque<Pieces>,
    /// Slices that are in no minute yet.
    fresh: usize,
    /// Whole minutes, oldest first.
    minutes: VecDeque<Pieces>,
    since: Option<Nanos>,
}

impl Latencies {
    /// Whether a slice is over.
    pub fn is_due(&self, now: Nanos) -> bool {
        self.since
            .is_none_or(|since| now.0.saturating_sub(since.0) >= SLICE.0)
    }

    /// Ends a slice. `rows` are all rows with a histogram, in the order of their indexes.
    pub fn slice(&mut self, now: Nanos, rows: impl Iterator<Item = (RowId, Histogram)>) {
        self.since = Some(now);
        let (mut last, mut slice) = (Pieces::default(), Pieces::default());
        for (row, histogram) in rows {
            let mut before = [0; BUCKETS];
            self.last.add(row, &mut before);
            last.push(row, &histogram.counts);
            slice.push(row, &buckets::grown(&histogram.counts, &before));
        }
        last.fit();
        slice.fit();
        self.last = last;
        self.slices.push_back(slice);
        self.fresh += 1;
        if self.fresh == MINUTE {
            self.fresh = 0;
            let whole = self.slices.iter().rev().take(MINUTE).collect::<Vec<_>>();
            self.minutes.push_back(Pieces::merged(&whole));
        }
        while self.slices.len() > MINUTE {
            self.slices.pop_front();
        }
        while self.minutes.len() > MINUTES {
            self.minutes.pop_front();
        }
        while self.bytes() > MOST_BYTES {
            if self.minutes.pop_front().is_none() && self.slices.pop_front().is_none() {
                break;
            }
            self.fresh = self.fresh.min(self.slices.len());
        }
    }

    /// The last minute of a row, up to now. `longest` is the longest ever, us.
    pub fn last_minute(&self, row: RowId, histogram: Option<&Histogram>, longest: u64) -> Latency {
        self.since(row, histogram, longest, self.slices.iter())
    }

    /// The last five minutes of a row, up to now. `longest` is the longest ever, us.
    pub fn five_minutes(&self, row: RowId, histogram: Option<&Histogram>, longest: u64) -> Latency {
        let fresh = self.slices.iter().rev().take(self.fresh);
        self.since(row, histogram, longest, self.minutes.iter().chain(fresh))
    }

    fn since<'a>(
        &'a self,
        row: RowId,
        histogram: Option<&Histogram>,
        longest: u64,
        slices: impl Iterator<Item = &'a Pieces>,
    ) -> Latency {
        let Some(Histogram { counts: all }) = histogram else {
            return Latency::default();
        };
        let mut before = [0; BUCKETS];
        self.last.add(row, &mut before);
        let mut counts = buckets::grown(all, &before);
        for slice in slices {
            slice.add(row, &mut counts);
        }
        buckets::summary(&counts, all, longest)
    }

    /// Memory of the slices.
    fn bytes(&self) -> usize {
        let all = self.slices.iter().chain(&self.minutes);
        all.map(Pieces::bytes).sum()
    }
}

/// Bucket counts of many rows in two pieces of memory.
#[derive(Default)]
struct Pieces {
    /// Rows in ascending order, and where their bytes end.
    rows: Vec<(RowId, u32)>,
    /// See [`buckets::write`].
    bytes: Vec<u8>,
}

impl Pieces {
    /// Appends a row, which must come after those that are there; one without counts is left out.
    fn push(&mut self, row: RowId, counts: &Counts) {
        let before = self.bytes.len();
        buckets::write(counts, &mut self.bytes);
        if self.bytes.len() > before {
            self.rows.push((row, self.bytes.len() as u32));
        }
    }

    /// Adds a row's counts.
    fn add(&self, row: RowId, to: &mut Counts) {
        if let Ok(at) = self.rows.binary_search_by_key(&row, |(row, _)| *row) {
            let begin = at.checked_sub(1).map_or(0, |before| self.rows[before].1);
            buckets::add(&self.bytes[begin as usize..self.rows[at].1 as usize], to);
        }
    }

    fn merged(all: &[&Self]) -> Self {
        let rows = all.iter().flat_map(|pieces| &pieces.rows);
        let mut rows: Vec<RowId> = rows.map(|(row, _)| *row).collect();
        rows.sort_unstable();
        rows.dedup();
        let mut merged = Self::default();
        for row in rows {
            let mut counts = [0; BUCKETS];
            for pieces in all {
                pieces.add(row, &mut counts);
            }
            merged.push(row, &counts);
        }
        merged.fit();
        merged
    }

    fn fit(&mut self) {
        self.rows.shrink_to_fit();
        self.bytes.shrink_to_fit();
    }

    fn bytes(&self) -> usize {
        self.rows.len() * size_of::<(RowId, u32)>() + self.bytes.len()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::buckets::tests::histogram, *};

    const ROW: RowId = row(1);

    const fn row(index: u32) -> RowId {
        RowId {
            index,
            incarnation: 0,
        }
    }

    /// Latencies, the values counted so far, and the time in slices.
    #[derive(Default)]
    struct Scene {
        latencies: Latencies,
        values: Vec<u64>,
        slices: u64,
    }

    impl Scene {
        fn pass(&mut self, slices: u64) {
            for _ in 0..slices {
                let now = Nanos(self.slices * SLICE.0);
                assert!(self.latencies.is_due(now));
                let rows = std::iter::once((ROW, histogram(&self.values)));
                self.latencies.slice(now, rows);
                assert!(!self.latencies.is_due(now + Nanos(1)));
                self.slices += 1;
            }
        }

        fn counts(&self) -> (u64, u64) {
            let histogram = histogram(&self.values);
            let of = (ROW, Some(&histogram), 50_000);
            let minute = self.latencies.last_minute(of.0, of.1, of.2);
            let five = self.latencies.five_minutes(of.0, of.1, of.2);
            (minute.count, five.count)
        }
    }

    #[test]
    fn calls_of_now_count_in_both() {
        let mut scene = Scene {
            values: vec![100; 7],
            ..Scene::default()
        };
        assert_eq!(scene.counts(), (7, 7));
        scene.pass(1);
        assert_eq!(scene.counts(), (7, 7));
        scene.values.push(3);
        assert_eq!(scene.counts(), (8, 8));
    }

    /// Whatever the second in which they began, the minute is 60 to 70 s, the five 300 to 360 s.
    #[test]
    fn the_past_ends() {
        for begin in 0..12 {
            let mut scene = Scene::default();
            scene.pass(begin);
            scene.values = vec![100; 7];
            scene.pass(6);
            assert_eq!(scene.counts(), (7, 7), "{begin}");
            scene.pass(1);
            assert_eq!(scene.counts(), (0, 7), "{begin}");
            scene.pass(30 - 7);
            assert_eq!(scene.counts(), (0, 7), "{begin}");
            scene.pass(7);
            assert_eq!(scene.counts(), (0, 0), "{begin}");
            scene.values.push(5);
            assert_eq!(scene.counts(), (1, 1), "{begin}");
        }
    }

    #[test]
    fn a_row_of_another_owner_has_no_past() {
        let mut scene = Scene {
            values: vec![100; 7],
            ..Scene::default()
        };
        scene.pass(2);
        let other = RowId {
            incarnation: 1,
            ..ROW
        };
        let fresh = histogram(&[1, 2]);
        let five = scene.latencies.five_minutes(other, Some(&fresh), 2);
        assert_eq!((five.count, five.max), (2, 2));
        let none = scene.latencies.five_minutes(ROW, None, 0);
        assert_eq!(none, Latency::default());
    }

    /// A thousand rows with a call in each bucket in every slice: worse than 4,096 real ones.
    #[test]
    fn memory_is_bounded() {
        let mut latencies = Latencies::default();
        let most = latencies.bytes();
        assert_eq!(most, 0);
        for slice in 1..=10_u32 {
            let rows = (1..=1024).map(|index| {
                let counts = [slice; BUCKETS];
                (row(index), Histogram { counts })
            });
            latencies.slice(Nanos(u64::from(slice) * SLICE.0), rows);
            assert!(latencies.bytes() <= MOST_BYTES);
        }
        // What remains is right: a minute that is shorter.
        let all = Histogram {
            counts: [10; BUCKETS],
        };
        let minute = latencies.last_minute(ROW, Some(&all), 1 << 26);
        assert_eq!(minute.count % BUCKETS as u64, 0);
    }
}
