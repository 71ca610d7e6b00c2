//! What was refused and held, told by events: the first call of a row at once, then at most one event a
//! second and reason with the number since, until there is nothing left to tell.
//!
//! The counters are the truth; the kernel reports at most one refusal a second and row, and one held
//! connect. Here stands how much of each counter has been told, so that the counts of all events of a row
//! add up to its counters.

use std::collections::{HashMap, HashSet};

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

#[derive(Default)]
struct Account {
    told: Counts,
    /// When something was last told.
    last: Option<Nanos>,
    /// When the row is looked at again; `None`: when the kernel reports.
    due: Option<Nanos>,
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
    rows: HashMap<RowId, Account>,
    /// Those of them that have a `due`.
    active: HashSet<RowId>,
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
        let account = self.rows.entry(row).or_default();
        match TOLD[place].0 {
            Sort::Held => account.held = who,
            Sort::Rejected | Sort::WouldReject => account.refused = who,
        }
        account.looks = LOOKS;
        self.active.insert(row);
        let mut now = [0; TOLD.len()];
        if account.due.is_some() {
            return now;
        }
        if let Some(last) = account.last.filter(|last| at - *last < EVERY) {
            account.due = Some(last + EVERY);
            return now;
        }
        account.due = Some(at + EVERY);
        if counts[place] > account.told[place] {
            now[place] = 1;
            account.told[place] += 1;
            account.last = Some(at);
        }
        now
    }

    /// What has been told.
    pub fn told(&self, row: RowId) -> Counts {
        self.rows.get(&row).map_or([0; TOLD.len()], |of| of.told)
    }

    /// Everything that was not told yet. To be told now.
    pub fn rest(&mut self, row: RowId, counts: &Counts, now: Nanos) -> Counts {
        let told = self.told(row);
        let mut grown = *counts;
        for (grown, told) in grown.iter_mut().zip(told) {
            *grown = grown.saturating_sub(told);
        }
        let is_news = grown.iter().any(|count| *count > 0);
        if !is_news && !self.rows.contains_key(&row) {
            return grown;
        }
        let account = self.rows.entry(row).or_default();
        account.told = *counts;
        if is_news {
            account.last = Some(now);
            account.looks = LOOKS;
        } else {
            account.looks = account.looks.saturating_sub(1);
        }
        if account.looks == 0 && account.spent.is_none() {
            account.due = None;
            self.active.remove(&row);
        } else {
            account.due = Some(now + EVERY);
            self.active.insert(row);
        }
        grown
    }

    /// Rows whose second is over.
    pub fn due(&self, now: Nanos) -> Vec<RowId> {
        let is_due = |row: &&RowId| {
            let account = self.rows.get(row);
            account.is_some_and(|account| account.due.is_some_and(|due| due <= now))
        };
        self.active.iter().filter(is_due).copied().collect()
    }

    /// Who was last reported.
    pub fn who(&self, row: RowId, sort: Sort) -> Who {
        let account = self.rows.get(&row);
        account.map_or(Who::default(), |account| match sort {
            Sort::Held => account.held,
            Sort::Rejected | Sort::WouldReject => account.refused,
        })
    }

    /// The budget has refused a retry: whether that is news.
    pub fn spent(&mut self, row: RowId, now: Nanos) -> bool {
        let account = self.rows.get_mut(&row);
        account.is_some_and(|account| account.spent.replace(now).is_none())
    }

    /// Whether the budget, said to be spent, has refused nothing for `window`: to be said once.
    pub fn refilled(&mut self, row: RowId, now: Nanos, window: Nanos) -> bool {
        let account = self.rows.get_mut(&row);
        account.is_some_and(|account| {
            let is_over = account.spent.is_some_and(|spent| now - spent >= window);
            if is_over {
                account.spent = None;
            }
            is_over
        })
    }

    /// The row is given up.
    pub fn forget(&mut self, row: RowId) {
        self.rows.remove(&row);
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
        assert!(refusals.rows.is_empty());
        assert!(refusals.due(Nanos::MAX).is_empty());
    }

    #[test]
    fn a_budget_is_spent_once_until_it_has_refused_nothing_for_a_window() {
        let mut refusals = Refusals::default();
        let mut counts = [0; TOLD.len()];
        counts[1] = 1;
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
