//! Requests that are not idempotent and were repeated, told by events: by method and fate, each at most once a second
//! and row. What the kernel counts meanwhile is told when the second is over, so that the events' counts add up to
//! the counters.

use std::collections::HashMap;

use agent_common::{
    COMM_LEN, Event as KernelEvent,
    event::{EVENT_REFUSED, EVENT_WOULD},
    method::METHODS,
    retry::{FATE_PASSED, FATE_REFUSED, FATE_WOULD, FATES, repeated_place},
};

use super::{
    journal::WallClock,
    node::{Node, netns},
    view,
};
use crate::{
    control::api::{self, Event, Timestamp},
    core::{Nanos, RowId},
    kernel::{clock, events::comm},
};

/// At most one event in this time for each row, method and fate.
const EVERY: Nanos = Nanos::from_secs(1);
/// Looks that find nothing until a row is left alone: who counts is slower than who looks now and then.
const LOOKS: u8 = 2;

/// Methods and fates ([`repeated_place`]).
const PLACES: usize = FATES * METHODS.len();

/// The kernel's counters of a row. They wrap.
type Counts = [u32; PLACES];

/// A process and the name of its thread, as the kernel last reported it.
type Who = (u32, [u8; COMM_LEN]);

/// Requests of one method and fate that are to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct News {
    place: usize,
    count: u32,
    who: Who,
}

/// What was told of a row.
#[derive(Default)]
struct Told {
    counts: Counts,
    /// When an event last told of each.
    at: [Option<Nanos>; PLACES],
    /// Of whom the last report was, of each and of any.
    who: [Option<Who>; PLACES],
    last: Who,
    /// When the row is looked at again, and how often that may still find nothing; 0: it is not.
    due: Nanos,
    looks: u8,
}

/// See the module.
#[derive(Default)]
pub struct Repeated(HashMap<RowId, Told>);

impl Repeated {
    /// The kernel reports one, at `now`: what is to be told of its like.
    fn reported(
        &mut self,
        row: RowId,
        counts: &Counts,
        place: usize,
        who: Who,
        now: Nanos,
    ) -> Option<News> {
        let told = self.0.entry(row).or_default();
        if told.looks == 0 {
            told.due = now + EVERY;
        }
        told.looks = LOOKS;
        told.who[place] = Some(who);
        told.last = who;
        told.news(place, counts, now, false)
    }

    /// What of a row was not told yet. With `all` also what was told of less than a second ago.
    fn rest(&mut self, row: RowId, counts: &Counts, now: Nanos, all: bool) -> Vec<News> {
        if *counts == Counts::default() && !self.0.contains_key(&row) {
            return Vec::new();
        }
        let told = self.0.entry(row).or_default();
        let news: Vec<News> = (0..PLACES)
            .filter_map(|place| told.news(place, counts, now, all))
            .collect();
        told.due = now + EVERY;
        told.looks = if news.is_empty() && told.counts == *counts {
            told.looks.saturating_sub(1)
        } else {
            LOOKS
        };
        news
    }

    /// Rows whose second is over.
    fn due(&self, now: Nanos) -> Vec<RowId> {
        let due = (self.0.iter()).filter(|(_, told)| told.looks != 0 && told.due <= now);
        due.map(|(row, _)| *row).collect()
    }

    /// The row is given up.
    pub fn forget(&mut self, row: RowId) {
        self.0.remove(&row);
    }
}

impl Told {
    /// What there is of one method and fate that was not told, and may be by now: now it is.
    fn news(&mut self, place: usize, counts: &Counts, now: Nanos, all: bool) -> Option<News> {
        let grown = counts[place].wrapping_sub(self.counts[place]).cast_signed();
        if grown < 0 {
            // One that was refused has passed after all: it is told once more.
            self.counts[place] = counts[place];
        }
        let is_soon = self.at[place].is_some_and(|at| now < at + EVERY);
        if grown <= 0 || (is_soon && !all) {
            return None;
        }
        self.counts[place] = counts[place];
        self.at[place] = Some(now);
        Some(News {
            place,
            count: grown.cast_unsigned(),
            who: self.who[place].unwrap_or(self.last),
        })
    }
}

/// Which method and fate a report is of.
fn place(event: &KernelEvent) -> usize {
    let fate = if event.flags & EVENT_REFUSED != 0 {
        FATE_REFUSED
    } else if event.flags & EVENT_WOULD != 0 {
        FATE_WOULD
    } else {
        FATE_PASSED
    };
    repeated_place(fate, event.outcome)
}

impl Node {
    /// The kernel reports a repeated request.
    pub(super) fn repeated(&mut self, id: RowId, event: &KernelEvent) {
        if self.shown(id).is_none() {
            return;
        }
        let counts = self.table.retries(id.index).repeated;
        let (at, who) = (Nanos(event.at_ns), (event.pid, event.comm));
        let news = self.repeated.reported(id, &counts, place(event), who, at);
        if let Some(news) = news {
            self.tell_repeated(id, news, WallClock::read().at(at));
        }
    }

    /// Rows whose second is over.
    pub(super) fn tell_repeated_due(&mut self, now: Nanos) {
        for id in self.repeated.due(now) {
            match self.shown(id) {
                Some(_) => self.tell_repeated_of(id, false),
                None => self.repeated.forget(id),
            }
        }
    }

    /// All that of a row was not told yet.
    pub(super) fn tell_repeated_rest(&mut self, id: RowId) {
        self.tell_repeated_of(id, true);
    }

    fn tell_repeated_of(&mut self, id: RowId, all: bool) {
        let counts = self.table.retries(id.index).repeated;
        for news in self.repeated.rest(id, &counts, clock::now(), all) {
            self.tell_repeated(id, news, Timestamp::now());
        }
    }

    fn tell_repeated(&mut self, id: RowId, news: News, time: Timestamp) {
        let Some(row) = self.shown(id) else { return };
        let is_of = |fate| news.place / METHODS.len() == repeated_place(fate, 1) / METHODS.len();
        let (pid, name) = news.who;
        let event = Event::NonIdempotent {
            destination: view::destination(id, &row),
            workload: view::workload(id, &row, &mut self.names),
            netns: netns(&row),
            method: METHODS[news.place % METHODS.len()].to_owned(),
            refused: !is_of(FATE_PASSED),
            count: u64::from(news.count),
            pid,
            comm: comm(&name),
            mode: if is_of(FATE_WOULD) {
                api::Mode::Observe
            } else {
                api::Mode::Enforce
            },
        };
        self.journal.publish(time, event);
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
    const NOBODY: Who = (0, [0; COMM_LEN]);

    fn counts(all: &[(usize, u32)]) -> Counts {
        let mut counts = Counts::default();
        for (place, count) in all {
            counts[*place] = *count;
        }
        counts
    }

    #[test]
    fn the_tail_is_told_when_the_second_is_over() {
        let mut repeated = Repeated::default();
        let at = Nanos::from_secs;
        let who = (7, *b"python\0\0\0\0\0\0\0\0\0\0");
        let first = repeated.reported(ROW, &counts(&[(0, 1)]), 0, who, at(10));
        assert_eq!(first.map(|news| news.count), Some(1));
        assert!(repeated.due(at(10)).is_empty());
        assert_eq!(repeated.due(at(11)), [ROW]);
        let rest = repeated.rest(ROW, &counts(&[(0, 4)]), at(11), false);
        assert_eq!((rest[0].count, rest[0].who, rest.len()), (3, who, 1));
        // What is counted late is told, too. Then the row is left alone.
        assert!(
            repeated
                .rest(ROW, &counts(&[(0, 4)]), at(12), false)
                .is_empty()
        );
        let late = repeated.rest(ROW, &counts(&[(0, 5)]), at(13), false);
        assert_eq!(late[0].count, 1);
        for second in 14..16 {
            assert_eq!(repeated.due(at(second)), [ROW]);
            assert!(
                repeated
                    .rest(ROW, &counts(&[(0, 5)]), at(second), false)
                    .is_empty()
            );
        }
        assert!(repeated.due(at(99)).is_empty());
        // A report that was overtaken by a look tells nothing twice.
        let of = |repeated: &mut Repeated, count, second| {
            repeated.reported(ROW, &counts(&[(0, count)]), 0, who, at(second))
        };
        assert!(of(&mut repeated, 5, 100).is_none());
        assert_eq!(of(&mut repeated, 6, 101).map(|news| news.count), Some(1));
    }

    #[test]
    fn two_methods_within_a_second_are_two_events() {
        let mut repeated = Repeated::default();
        let (post, patch) = ((1, [b'a'; COMM_LEN]), (2, [b'b'; COMM_LEN]));
        let now = Nanos::from_secs(10);
        let one = repeated
            .reported(ROW, &counts(&[(0, 1)]), 0, post, now)
            .expect("news");
        assert_eq!((one.place, one.count, one.who), (0, 1, post));
        let both = counts(&[(0, 1), (1, 1)]);
        let one = repeated.reported(ROW, &both, 1, patch, now).expect("news");
        assert_eq!((one.place, one.count, one.who), (1, 1, patch));
        let rest = repeated.rest(ROW, &counts(&[(0, 3), (1, 2)]), now + EVERY, false);
        let told: Vec<_> = rest
            .iter()
            .map(|news| (news.place, news.count, news.who))
            .collect();
        assert_eq!(told, [(0, 2, post), (1, 1, patch)]);
    }

    #[test]
    fn what_was_refused_and_passes_after_all_is_told_as_both() {
        let mut repeated = Repeated::default();
        let refused = repeated_place(FATE_REFUSED, 1);
        let now = Nanos::from_secs(10);
        assert!(
            repeated
                .reported(ROW, &counts(&[(refused, 1)]), refused, NOBODY, now)
                .is_some()
        );
        let rest = repeated.rest(ROW, &counts(&[(0, 1)]), now + EVERY, false);
        assert_eq!(
            rest.iter()
                .map(|news| (news.place, news.count))
                .collect::<Vec<_>>(),
            [(0, 1)]
        );
        let rest = repeated.rest(
            ROW,
            &counts(&[(0, 1), (refused, 1)]),
            now + EVERY.times(2),
            false,
        );
        assert_eq!(
            rest.iter()
                .map(|news| (news.place, news.count))
                .collect::<Vec<_>>(),
            [(refused, 1)]
        );
    }

    #[test]
    fn a_row_without_any_has_no_account() {
        let mut repeated = Repeated::default();
        assert!(
            repeated
                .rest(ROW, &Counts::default(), Nanos::from_secs(1), true)
                .is_empty()
        );
        assert!(repeated.0.is_empty());
    }

    proptest! {
        /// Whatever the kernel reports or loses: the events add up to the counters, with at most one a second of
        /// each method and fate.
        #[test]
        fn what_is_told_adds_up(
            steps in prop::collection::vec((0_u64..900, 0..PLACES, 0_u32..9, any::<bool>()), 1..120),
        ) {
            let mut repeated = Repeated::default();
            let mut counts = Counts::default();
            let mut told = Counts::default();
            let mut last = [None; PLACES];
            let mut now = Nanos::from_secs(10);
            let mut take = |news: &[News], now: Nanos, all: bool| {
                for news in news {
                    told[news.place] += news.count;
                    let before: Option<Nanos> = last[news.place].replace(now);
                    assert!(all || before.is_none_or(|before| now >= before + EVERY));
                }
            };
            for (ms, place, count, is_heard) in steps {
                now = now + Nanos::from_millis(ms);
                for row in repeated.due(now) {
                    take(&repeated.rest(row, &counts, now, false), now, false);
                }
                counts[place] += count;
                if is_heard {
                    let news = repeated.reported(ROW, &counts, place, NOBODY, now);
                    take(news.as_slice(), now, false);
                }
            }
            take(&repeated.rest(ROW, &counts, now, true), now, true);
            prop_assert_eq!(told, counts);
        }
    }
}
