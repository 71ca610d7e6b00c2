//! What was refused and held, told by events: the first call of a row at once, then at most one event a
//! second and reason with the number since, until there is nothing left to tell.
//!
//! The counters are the truth; the kernel reports at most one refusal a second and row, and one held
//! connect. Here stands how much of each counter has been told, so that the counts of all events of a row
//! add up to its counters.

use std::collections::HashMap;

use agent_common::{Retries, Row as KernelRow};

use super::view;
use crate::core::{Nanos, RowId};

/// At most one event in this time for each row and reason.
const EVERY: Nanos = Nanos::from_secs(1);
/// Looks at a row that find nothing until it is left alone. The kernel reports again once a second is
/// over; a program that was slow on its way through the hook may count a moment after that.
const LOOKS: u8 = 2;

/// What an event tells the number of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// Refused.
    Rejected,
    /// Let pass by observe mode.
    WouldReject,
    /// Made to wait.
    Held,
}

/// Every number that is told: its sort, and the word of its reason.
pub const TOLD: [(Sort, &str); 12] = [
    (Sort::Rejected, "breaker"),
    (Sort::Rejected, "retry_budget"),
    (Sort::Rejected, "retry_limit"),
    (Sort::Rejected, "deadline"),
    (Sort::Rejected, "limit"),
    (Sort::WouldReject, "breaker"),
    (Sort::WouldReject, "retry_budget"),
    (Sort::WouldReject, "retry_limit"),
    (Sort::WouldReject, "deadline"),
    (Sort::WouldReject, "limit"),
    (Sort::Held, "backoff"),
    (Sort::Held, "spin"),
];

/// The numbers, in the order of [`TOLD`].
pub type Counts = [u64; TOLD.len()];

/// Counters of a row.
pub fn counts(row: &KernelRow, retries: &Retries) -> Counts {
    let rejected = view::rejected(row, retries).each();
    let would = view::would_reject(row, retries).each();
    let held = view::held(retries);
    let mut counts = [0; TOLD.len()];
    let all = rejected.iter().chain(&would).map(|(_, count)| *count);
    for (count, of) in counts.iter_mut().zip(all.chain([held.backoff, held.spin])) {
        *count = of;
    }
    counts
}

/// Where the number of a sort and reason stands.
pub fn place(sort: Sort, reason: &str) -> Option<usize> {
    TOLD.iter().position(|told| *told == (sort, reason))
}

/// Who was refused, or held, as the kernel last reported it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Who {
    /// The process; 0: not known.
    pub pid: u32,
    /// The name of its thread.
    pub comm: [u8; agent_common::COMM_LEN],
    /// Generation of the verdict.
    pub generation: u32,
}

/// A row of which something was told a moment ago.
struct Active {
    /// When the row is looked at again.
    due: Nanos,
    /// Looks that may still find nothing.
    looks: u8,
    refused: Who,
    held: Who,
    /// When the budget last refused a retry, since it was said to be spent.
    spent: Option<Nanos>,
}

/// See the module.
#[derive(Default)]
pub struct Refusals {
    /// What was told, for as long as the row exists: the low halves of the counters, whose differences are
    /// what matters.
    told: HashMap<RowId, [u32; TOLD.len()]>,
    /// Rows that are looked at until there is nothing left to tell.
    active: HashMap<RowId, Active>,
}

impl Active {
    fn new(due: Nanos) -> Self {
        Self {
            due,
            looks: LOOKS,
            refused: Who::default(),
            held: Who::default(),
            spent: None,
        }
    }
}

impl Refusals {
    /// The kernel reports a call of the kind at [`TOLD`]`[place]`, at `at`: what is to be told now.
    pub fn reported(
        &mut self,
        row: RowId,
        counts: &Counts,
        place: usize,
        at: Nanos,
        who: Who,
    ) -> Counts {
        let is_first = !self.active.contains_key(&row);
        let active = self
            .active
            .entry(row)
            .or_insert_with(|| Active::new(at + EVERY));
        match TOLD[place].0 {
            Sort::Held => active.held = who,
            Sort::Rejected | Sort::WouldReject => active.refused = who,
        }
        active.looks = LOOKS;
        let mut now = [0; TOLD.len()];
        if is_first && self.grown(row, counts)[place] > 0 {
            now[place] = 1;
            let told = self.told.entry(row).or_default();
            told[place] = told[place].wrapping_add(1);
        }
        now
    }

    /// Everything that was not told yet. To be told now.
    pub fn rest(&mut self, row: RowId, counts: &Counts, now: Nanos) -> Counts {
        let grown = self.grown(row, counts);
        let is_news = grown.iter().any(|count| *count > 0);
        if is_news {
            self.told.insert(row, counts.map(|count| count as u32));
            let active = self
                .active
                .entry(row)
                .or_insert_with(|| Active::new(now + EVERY));
            active.looks = LOOKS;
        }
        if let Some(active) = self.active.get_mut(&row) {
            active.due = now + EVERY;
            if !is_news {
                active.looks = active.looks.saturating_sub(1);
            }
            if active.looks == 0 && active.spent.is_none() {
                self.active.remove(&row);
            }
        }
        grown
    }

    /// What was not told yet.
    fn grown(&self, row: RowId, counts: &Counts) -> Counts {
        let told = self.told.get(&row).copied().unwrap_or_default();
        let mut grown = *counts;
        for (grown, told) in grown.iter_mut().zip(told) {
            *grown = u64::from((*grown as u32).wrapping_sub(told));
        }
        grown
    }

    /// These counters, but of calls that the breaker refuses what was told already.
    pub fn without_breaker(&self, row: RowId, mut counts: Counts) -> Counts {
        let grown = self.grown(row, &counts);
        for (place, (_, reason)) in TOLD.iter().enumerate() {
            if *reason == "breaker" {
                counts[place] = counts[place].wrapping_sub(grown[place]);
            }
        }
        counts
    }

    /// Rows whose second is over.
    pub fn due(&mut self, now: Nanos) -> Vec<RowId> {
        if self.active.capacity() > 1024 && self.active.len() * 8 < self.active.capacity() {
            // A storm is over.
            self.active.shrink_to_fit();
        }
        let due = self.active.iter().filter(|(_, active)| active.due <= now);
        due.map(|(row, _)| *row).collect()
    }

    /// Who was last reported.
    pub fn who(&self, row: RowId, sort: Sort) -> Who {
        let active = self.active.get(&row);
        active.map_or(Who::default(), |active| match sort {
            Sort::Held => active.held,
            Sort::Rejected | Sort::WouldReject => active.refused,
        })
    }

    /// The budget has refused a retry: whether that is news.
    pub fn spent(&mut self, row: RowId, now: Nanos) -> bool {
        let active = self.active.get_mut(&row);
        active.is_some_and(|active| active.spent.replace(now).is_none())
    }

    /// Whether the budget, said to be spent, has refused nothing for `window`: to be said once.
    pub fn refilled(&mut self, row: RowId, now: Nanos, window: Nanos) -> bool {
        let active = self.active.get_mut(&row);
        active.is_some_and(|active| {
            let is_over = active.spent.is_some_and(|spent| now - spent >= window);
            if is_over {
                active.spent = None;
            }
            is_over
        })
    }

    /// The row is given up.
    pub fn forget(&mut self, row: RowId) {
        self.told.remove(&row);
        self.active.remove(&row);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ROW: RowId = RowId {
        index: 1,
        incarnation: 0,
    };
    const TICK: Nanos = Nanos::from_millis(100);

    fn total(counts: &Counts) -> u64 {
        counts.iter().sum()
    }

    /// Two thousand in 0.2 s, and nothing after: two events, and not one call missing.
    #[test]
    fn the_tail_is_told_without_another_refusal() {
        let mut refusals = Refusals::default();
        let mut counts = [0; TOLD.len()];
        counts[0] = 13;
        let begin = Nanos::from_secs(100);
        let first = refusals.reported(ROW, &counts, 0, begin, Who::default());
        assert_eq!(total(&first), 1);
        counts[0] = 1995;
        counts[4] = 5;
        assert!(refusals.due(begin + Nanos::from_millis(999)).is_empty());
        let end = begin + EVERY;
        assert_eq!(refusals.due(end), [ROW]);
        let rest = refusals.rest(ROW, &counts, end);
        assert_eq!((rest[0], rest[4], total(&rest)), (1994, 5, 1999));
        // Then it is left alone.
        for second in 1..=2 {
            let later = end + EVERY.times(second);
            assert_eq!(refusals.due(later), [ROW]);
            assert_eq!(total(&refusals.rest(ROW, &counts, later)), 0);
        }
        assert!(refusals.due(Nanos::MAX).is_empty());
        // What comes later is a first one again.
        counts[0] += 1;
        let next = begin + EVERY.times(60);
        assert_eq!(
            total(&refusals.reported(ROW, &counts, 0, next, Who::default())),
            1
        );
    }

    #[test]
    fn a_row_without_refusals_has_no_account() {
        let mut refusals = Refusals::default();
        refusals.rest(ROW, &[0; TOLD.len()], Nanos::from_secs(1));
        assert!(refusals.told.is_empty() && refusals.active.is_empty());
        assert!(refusals.due(Nanos::MAX).is_empty());
    }

    #[test]
    fn a_budget_is_spent_once_until_it_has_refused_nothing_for_a_window() {
        let mut refusals = Refusals::default();
        let mut counts = [0; TOLD.len()];
        // Counters of 64 bits.
        counts[1] = 1 << 40 | 1;
        let at = Nanos::from_secs;
        refusals.rest(ROW, &counts, at(1));
        assert!(refusals.spent(ROW, at(1)));
        assert!(!refusals.spent(ROW, at(5)));
        let window = at(10);
        assert!(!refusals.refilled(ROW, at(14), window));
        // It stays under observation for so long.
        for second in 6..15 {
            refusals.rest(ROW, &counts, at(second));
        }
        assert_eq!(refusals.due(at(15)), [ROW]);
        assert!(refusals.refilled(ROW, at(15), window));
        assert!(!refusals.refilled(ROW, at(16), window));
        assert!(refusals.spent(ROW, at(17)));
    }

    proptest! {
        /// Whatever the kernel reports or loses: the events add up to the counters, and there is at most
        /// one a second and reason but where the breaker changes.
        #[test]
        fn what_is_told_adds_up(
            steps in proptest::collection::vec((0u64..400, 0usize..12, 0u64..50, 0u8..12), 1..200),
        ) {
            let mut refusals = Refusals::default();
            let mut counts = [0; TOLD.len()];
            let mut told = [0; TOLD.len()];
            let mut last = [None; TOLD.len()];
            let mut now = Nanos::from_secs(10);
            // As in the kernel.
            let mut reported = Nanos::ZERO;
            let mut tick = now;
            let mut take = |now: Nanos, counts: Counts, forced: bool| {
                for (place, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
                    told[place] += count;
                    let before: Option<Nanos> = last[place].replace(now);
                    assert!(forced || before.is_none_or(|before| now - before >= EVERY));
                }
                told
            };
            for (wait, place, calls, sort) in steps {
                let until = now + Nanos::from_millis(wait);
                while tick + TICK <= until {
                    tick = tick + TICK;
                    for row in refusals.due(tick) {
                        take(tick, refusals.rest(row, &counts, tick), false);
                    }
                }
                now = until;
                if calls > 0 {
                    counts[place] += calls;
                    if now - reported >= EVERY {
                        reported = now;
                        // One in twelve is lost.
                        if sort != 0 {
                            let first = refusals.reported(ROW, &counts, place, now, Who::default());
                            take(now, first, false);
                        }
                    }
                }
                if sort == 1 {
                    take(now, refusals.rest(ROW, &counts, now), true);
                }
            }
            let end = now + EVERY.times(4);
            let told = take(end, refusals.rest(ROW, &counts, end), true);
            prop_assert_eq!(told, counts);
        }
    }
}
