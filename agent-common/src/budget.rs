//! The retry budget: retries in a rolling window are at most a share of the other attempts in it, or a fixed
//! number where that is more.
//!
//! The decision is made inside connect(), so it must be a few instructions, and integers only. The
//! window is cut into [`SLOTS`] - 1 epochs. Attempts and tokens spent are counted since for ever; at
//! the begin of each epoch both are noted, so that what the window holds is two subtractions. An epoch
//! that lies partly outside the window counts with its tokens and without its attempts: the budget is
//! never exceeded in any window, and up to a seventh of it may stay unused.
//!
//! One word changes hands when several CPUs decide at once: the number of tokens spent, by an addition
//! that is taken back when it was too much. A CPU that is interrupted between reading the clock and
//! adding may decide by the epoch before; each CPU can do that once, hence "never over by more than
//! one token per CPU". What turns out to be no retry gives its token back ([`give_back`]).

/// Epochs whose begin is remembered: those of the window and the one under way.
pub const SLOTS: usize = 8;

/// Epochs in a window.
const PARTS: u64 = SLOTS as u64 - 1;

/// A share of everything, in parts per million.
pub const WHOLE_PPM: u32 = 1_000_000;

/// In place of a share: no budget.
pub const NO_BUDGET: u32 = u32::MAX;

/// Another CPU may be so many epochs ahead; further is another scale of epochs, after a reload.
const AHEAD_MOST: u64 = 2;

/// Time is taken in units of 2^20 ns, about a millisecond.
const TIME_SHIFT: u32 = 20;

/// The counters, wherever they lie.
pub trait Counts {
    /// The epoch under way.
    fn epoch(&self) -> u64;
    /// What was noted at the begin of an epoch; `slot` is below [`SLOTS`].
    fn begin(&self, slot: usize) -> u64;
    /// Attempts so far that were no retries.
    fn attempts(&self) -> u64;
    /// Tokens spent so far.
    fn spent(&self) -> u64;
    /// The same value. The kernel's verifier is to forget how it came about, or it would follow each way.
    #[inline(always)]
    fn forgotten(&self, value: u64) -> u64 {
        value
    }
}

/// Counters that can be changed by several CPUs at once.
pub trait Cells: Counts {
    /// Advances the epoch if it is still `from`; true if so.
    fn advance(&mut self, from: u64, to: u64) -> bool;
    /// Notes what an epoch began with.
    fn set_begin(&mut self, slot: usize, counts: u64);
    /// Adds to them (wrapping) and returns the number before.
    fn add_spent(&mut self, amount: u64) -> u64;
}

/// A policy's budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Retries as a share of the other attempts, parts per million; [`NO_BUDGET`]: any number.
    pub share_ppm: u32,
    /// Retries in a window that are allowed whatever the share says.
    pub floor: u32,
}

/// The factor that makes epochs of times ([`epoch`]), for a window of at least a millisecond.
pub const fn epoch_scale(window_ns: u64) -> u32 {
    let length = window_ns.div_ceil(PARTS);
    if length == 0 {
        return 0;
    }
    let scale = (1_u64 << (32 + TIME_SHIFT)) / length;
    if scale > u32::MAX as u64 {
        u32::MAX
    } else if scale == 0 {
        1
    } else {
        scale as u32
    }
}

/// The epoch of a time, ns.
#[inline(always)]
pub const fn epoch(now_ns: u64, scale: u32) -> u64 {
    (now_ns >> TIME_SHIFT).wrapping_mul(scale as u64) >> 32
}

#[inline(always)]
const fn slot(epoch: u64) -> usize {
    epoch as usize & (SLOTS - 1)
}

/// Attempts (low half) and tokens spent, in one word.
#[inline(always)]
const fn pack(attempts: u64, spent: u64) -> u64 {
    (attempts & 0xffff_ffff) | (spent << 32)
}

/// Enters an epoch: to be called with each attempt, so that what an epoch began with is known. Cheap
/// when it is the epoch under way.
#[inline(always)]
pub fn enter(cells: &mut impl Cells, epoch: u64) {
    let before = cells.epoch();
    if before.wrapping_sub(epoch) <= AHEAD_MOST {
        return;
    }
    if !cells.advance(before, epoch) {
        return;
    }
    // Nothing was attempted in the epochs between.
    let passed = epoch.wrapping_sub(before);
    let counts = pack(cells.attempts(), cells.spent());
    for back in 0..SLOTS as u64 {
        if back < passed {
            cells.set_begin(slot(epoch.wrapping_sub(back)), counts);
        }
    }
}

/// What was noted at the begin of an epoch, or the counters themselves if it has not been entered yet.
#[inline(always)]
fn noted(cells: &impl Counts, epoch: u64) -> u64 {
    let ahead = epoch.wrapping_sub(cells.epoch());
    let counts = if ahead != 0 && ahead < u64::MAX / 2 {
        pack(cells.attempts(), cells.spent())
    } else {
        cells.begin(slot(epoch))
    };
    cells.forgotten(counts)
}

/// What a budget is a share of, without the retries: attempts, or, where connections are kept and most calls
/// make no attempt, calls that were answered. (A retry that was refused afterwards for another reason is
/// no attempt, so `spent` may be ahead of them.)
#[inline(always)]
pub const fn calls(attempts: u64, spent: u64, responses: u64) -> u64 {
    let all = if responses > attempts {
        responses
    } else {
        attempts
    };
    all.saturating_sub(spent)
}

/// Tokens that the window allows in all, and the number spent at its begin.
#[inline(always)]
fn window(cells: &impl Counts, epoch: u64, budget: Budget) -> (u64, u32) {
    // What the epoch of a CPU that is behind began with may have been overwritten.
    let ahead = cells.epoch();
    let epoch = cells.forgotten(if ahead.wrapping_sub(epoch) <= AHEAD_MOST {
        ahead
    } else {
        epoch
    });
    let attempts_before = noted(cells, epoch.wrapping_sub(PARTS - 1)) as u32;
    let spent_before = (noted(cells, epoch.wrapping_sub(PARTS)) >> 32) as u32;
    // Below 0 where tokens were spent on what then was no attempt.
    let attempts = (cells.attempts() as u32).wrapping_sub(attempts_before) as i32;
    let attempts = if attempts < 0 { 0 } else { attempts };
    let share = attempts as u64 * budget.share_ppm as u64 / WHOLE_PPM as u64;
    let floor = budget.floor as u64;
    let allowed = if share > floor { share } else { floor };
    (cells.forgotten(allowed), spent_before)
}

/// Tokens spent since the window's begin. Below 0 only for a moment, while another CPU takes its own
/// back.
#[inline(always)]
const fn spent_in_window(spent: u64, before: u32) -> u64 {
    let spent = (spent as u32).wrapping_sub(before) as i32;
    if spent < 0 { 0 } else { spent as u64 }
}

/// Takes a token for a retry; false when there is none. Enter the epoch first.
#[inline(always)]
pub fn take(cells: &mut impl Cells, epoch: u64, budget: Budget) -> bool {
    if budget.share_ppm == NO_BUDGET {
        cells.add_spent(1);
        return true;
    }
    let (allowed, before) = window(cells, epoch, budget);
    let spent = cells.add_spent(1);
    if cells.forgotten(spent_in_window(spent, before)) < allowed {
        return true;
    }
    cells.add_spent(u64::MAX);
    false
}

/// Gives a token back that was taken in this epoch, for what has turned out to be no retry. True if it was: then
/// all is as if it had never been taken, and what it was taken for had been another attempt from the start.
///
/// Only while the epoch is under way, for what later ones began with would have to be changed as well; else the
/// token stays spent. (A CPU that is interrupted between looking and giving back may leave one token too many to
/// the window that begins with the next epoch: as above.)
#[inline(always)]
pub fn give_back(cells: &mut impl Cells, epoch: u64) -> bool {
    if cells.epoch() != epoch {
        return false;
    }
    cells.add_spent(u64::MAX);
    true
}

/// Tokens that are left; `None`: there is no budget.
pub fn left(cells: &impl Counts, epoch: u64, budget: Budget) -> Option<u64> {
    if budget.share_ppm == NO_BUDGET {
        return None;
    }
    let (allowed, before) = window(cells, epoch, budget);
    Some(allowed.saturating_sub(spent_in_window(cells.spent(), before)))
}

#[cfg(test)]
mod tests {
    extern crate std;

    use core::sync::atomic::{AtomicU64, Ordering};
    use std::{sync::Arc, thread, vec::Vec};

    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    #[derive(Default)]
    struct Words {
        epoch: AtomicU64,
        begins: [AtomicU64; SLOTS],
        attempts: AtomicU64,
        spent: AtomicU64,
    }

    impl Counts for &Words {
        fn epoch(&self) -> u64 {
            self.epoch.load(Ordering::SeqCst)
        }
        fn begin(&self, slot: usize) -> u64 {
            self.begins[slot].load(Ordering::SeqCst)
        }
        fn attempts(&self) -> u64 {
            self.attempts.load(Ordering::SeqCst)
        }
        fn spent(&self) -> u64 {
            self.spent.load(Ordering::SeqCst)
        }
    }

    impl Cells for &Words {
        fn advance(&mut self, from: u64, to: u64) -> bool {
            let order = Ordering::SeqCst;
            self.epoch.compare_exchange(from, to, order, order).is_ok()
        }
        fn set_begin(&mut self, slot: usize, counts: u64) {
            self.begins[slot].store(counts, Ordering::SeqCst);
        }
        fn add_spent(&mut self, amount: u64) -> u64 {
            self.spent.fetch_add(amount, Ordering::SeqCst)
        }
    }

    /// All attempts are counted, and those that have cost a token are no first ones, as in a row.
    struct Calls<'a>(&'a Words);

    impl Counts for Calls<'_> {
        fn epoch(&self) -> u64 {
            self.0.epoch()
        }
        fn begin(&self, slot: usize) -> u64 {
            self.0.begin(slot)
        }
        fn attempts(&self) -> u64 {
            calls(self.0.attempts(), self.0.spent(), 0)
        }
        fn spent(&self) -> u64 {
            self.0.spent()
        }
    }

    impl Cells for Calls<'_> {
        fn advance(&mut self, from: u64, to: u64) -> bool {
            self.0.advance(from, to)
        }
        fn set_begin(&mut self, slot: usize, counts: u64) {
            self.0.set_begin(slot, counts);
        }
        fn add_spent(&mut self, amount: u64) -> u64 {
            self.0.add_spent(amount)
        }
    }

    impl Words {
        fn all(&self) -> (u64, Vec<u64>, u64, u64) {
            let load = |word: &AtomicU64| word.load(Ordering::SeqCst);
            let begins = self.begins.iter().map(load).collect();
            (
                load(&self.epoch),
                begins,
                load(&self.attempts),
                load(&self.spent),
            )
        }
    }

    /// What happened when, ms, and how often.
    type Log = Vec<(f64, u64)>;

    fn within(log: &Log, now: f64, length: f64) -> f64 {
        log.iter()
            .filter(|(at, _)| *at > now - length)
            .map(|(_, n)| *n as f64)
            .sum()
    }

    /// Length of an epoch, ms.
    fn length(scale: u32) -> f64 {
        (1_u64 << 52) as f64 / f64::from(scale) / MS as f64
    }

    #[test]
    fn an_epoch_is_a_seventh_of_the_window() {
        for window_ms in [1_000_u64, 10_000, 61_000, 3_600_000] {
            let scale = epoch_scale(window_ms * MS);
            let seven = length(scale) * 7.0 / window_ms as f64;
            assert!((1.0..1.001).contains(&seven), "{window_ms} {seven}");
            let from = 12_345 * window_ms * MS;
            let passed = epoch(from + 7 * window_ms * MS, scale) - epoch(from, scale);
            assert!((48..=50).contains(&passed), "{window_ms} {passed}");
        }
    }

    #[test]
    fn a_quiet_row_has_its_floor() {
        let words = Words::default();
        let scale = epoch_scale(10_000 * MS);
        let budget = Budget {
            share_ppm: 100_000,
            floor: 3,
        };
        let now = epoch(1_000_000 * MS, scale);
        assert_eq!(left(&&words, now, budget), Some(3));
        enter(&mut &words, now);
        let taken = (0..10).filter(|_| take(&mut &words, now, budget)).count();
        assert_eq!((taken, left(&&words, now, budget)), (3, Some(0)));
        // A window later, without a call between.
        let now = epoch(1_012_000 * MS, scale);
        assert_eq!(left(&&words, now, budget), Some(3));
        assert_eq!(
            left(
                &&words,
                now,
                Budget {
                    share_ppm: NO_BUDGET,
                    floor: 0
                }
            ),
            None
        );
    }

    proptest! {
        /// Against a model that remembers every call, in any window.
        #[test]
        fn never_over_and_hardly_under(
            window_ms in 1_000_u64..120_000,
            share_ppm in 0_u32..=WHOLE_PPM,
            floor in 0_u32..20,
            start_ms in 0_u64..100_000_000,
            steps in prop::collection::vec((0_u64..3_000, 0_u64..60, 0_u32..30), 1..120),
        ) {
            let scale = epoch_scale(window_ms * MS);
            let budget = Budget { share_ppm, floor };
            let share = f64::from(share_ppm) / f64::from(WHOLE_PPM);
            let (words, mut now) = (Words::default(), start_ms);
            words.epoch.store(epoch(now * MS, scale), Ordering::SeqCst);
            let (mut attempts, mut retries) = (Log::new(), Log::new());
            for (pause_ms, calls, wanted) in steps {
                now += pause_ms;
                let at = now as f64;
                let entered = epoch(now * MS, scale);
                enter(&mut &words, entered);
                words.attempts.fetch_add(calls, Ordering::SeqCst);
                attempts.push((at, calls));
                for _ in 0..wanted {
                    // Epochs begin to within a unit of time.
                    let (seven, unit) = (7.0 * length(scale), 2.0);
                    let allowed = |length: f64| {
                        (share * within(&attempts, at, length)).floor().max(f64::from(floor))
                    };
                    if take(&mut &words, entered, budget) {
                        retries.push((at, 1));
                        let made = within(&retries, at, seven - unit);
                        prop_assert!(made <= allowed(seven + unit), "{made}");
                    } else {
                        let made = within(&retries, at, seven / 7.0 * 8.0 + unit);
                        prop_assert!(made + 1.0 > allowed(seven / 7.0 * 6.0 - unit), "{made}");
                    }
                }
            }
        }

        /// Beside a row that knows from the start which dials are no retries: one that takes them for some, and gives
        /// their tokens back later, never allows more, and allows the same once all were given back in time.
        #[test]
        fn what_is_given_back_was_never_taken(
            window_ms in 1_000_u64..60_000,
            share_ppm in 0_u32..=WHOLE_PPM,
            floor in 0_u32..20,
            // Of each step: a pause, fresh calls, dials that seem to be retries and whether they are, tokens to give
            // back then.
            steps in prop::collection::vec(
                (0_u64..2_000, 0_u64..20, prop::collection::vec(any::<bool>(), 0..6), 0_usize..8),
                1..150,
            ),
        ) {
            let scale = epoch_scale(window_ms * MS);
            let budget = Budget { share_ppm, floor };
            let (ours, knowing) = (Words::default(), Words::default());
            let mut now = 1_000_000;
            let mut owed = Vec::new();
            let mut lost = false;
            for (pause_ms, fresh, dials, backs) in steps {
                now += pause_ms;
                let entered = epoch(now * MS, scale);
                for words in [&ours, &knowing] {
                    enter(&mut Calls(words), entered);
                    words.attempts.fetch_add(fresh, Ordering::SeqCst);
                }
                for is_retry in dials {
                    if !take(&mut Calls(&ours), entered, budget) {
                        continue;
                    }
                    if is_retry {
                        prop_assert!(take(&mut Calls(&knowing), entered, budget));
                    } else {
                        owed.push(entered);
                    }
                    for words in [&ours, &knowing] {
                        words.attempts.fetch_add(1, Ordering::SeqCst);
                    }
                }
                for _ in 0..backs {
                    let Some(of) = owed.pop() else { break };
                    lost |= !give_back(&mut Calls(&ours), of);
                }
                let left = |words| left(&Calls(words), entered, budget);
                prop_assert!(left(&ours) <= left(&knowing));
                if owed.is_empty() && !lost {
                    prop_assert_eq!(ours.all(), knowing.all());
                }
            }
        }

        /// Whatever the words hold, nothing panics, and no token comes from nowhere.
        #[test]
        fn any_words_are_bearable(
            begins: [u64; SLOTS], at: u64, attempts: u64, spent: u64, now: u64, scale: u32,
        ) {
            let words = Words {
                epoch: at.into(),
                begins: begins.map(Into::into),
                attempts: attempts.into(),
                spent: spent.into(),
            };
            let now = epoch(now, scale);
            let budget = Budget { share_ppm: 0, floor: 0 };
            enter(&mut &words, now);
            prop_assert!(!take(&mut &words, now, budget));
            prop_assert_eq!(left(&&words, now, budget), Some(0));
        }
    }

    /// Interrupted between looking and giving back, while another CPU enters the next epoch.
    #[test]
    fn a_token_given_back_too_late_is_one_too_many_at_most() {
        let scale = epoch_scale(1_000 * MS);
        let budget = Budget {
            share_ppm: WHOLE_PPM,
            floor: 5,
        };
        let first = epoch(5_000 * MS, scale);
        let (raced, knowing) = (Words::default(), Words::default());
        for words in [&raced, &knowing] {
            enter(&mut Calls(words), first);
            words.attempts.store(20, Ordering::SeqCst);
        }
        assert!(take(&mut Calls(&raced), first, budget));
        enter(&mut Calls(&raced), first + 1);
        enter(&mut Calls(&knowing), first + 1);
        Calls(&raced).add_spent(u64::MAX);
        for later in 1..20 {
            for words in [&raced, &knowing] {
                enter(&mut Calls(words), first + later);
            }
            let left = |words| left(&Calls(words), first + later, budget).expect("a budget");
            assert!(left(&raced) <= left(&knowing) + 1, "{later}");
        }
    }

    #[test]
    fn cpus_at_once_that_give_back_take_no_more_than_one_each_too_many() {
        const THREADS: u64 = 8;
        let scale = epoch_scale(1_000 * MS);
        let budget = Budget {
            share_ppm: 100_000,
            floor: 5,
        };
        for round in 0..50_u64 {
            let words = Words::default();
            let first = epoch((5_000 + round) * MS, scale);
            words.epoch.store(first, Ordering::SeqCst);
            words.attempts.store(1_000, Ordering::SeqCst);
            let work = || {
                let mut kept = 0_u64;
                for step in 0..400 {
                    let now = first + u64::from(step >= 200);
                    enter(&mut &words, now);
                    if take(&mut &words, now, budget) {
                        let is_none = step % 3 == 0;
                        kept += u64::from(!is_none || !give_back(&mut &words, now));
                    }
                }
                kept
            };
            let kept: u64 = thread::scope(|scope| {
                let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
                threads.into_iter().map(|t| t.join().expect("counts")).sum()
            });
            assert_eq!(words.spent.load(Ordering::SeqCst), kept);
            assert!(kept <= 100 + THREADS, "{kept}");
            // What was given back is there.
            let rest = (0..200).filter(|_| take(&mut &words, first + 1, budget));
            let all = kept + rest.count() as u64;
            assert!((100..=100 + THREADS).contains(&all), "{all}");
        }
    }

    #[test]
    fn cpus_at_once_take_no_more_than_one_each_too_many() {
        const THREADS: u64 = 8;
        let scale = epoch_scale(1_000 * MS);
        let budget = Budget {
            share_ppm: 100_000,
            floor: 5,
        };
        for round in 0..50_u64 {
            let words = Arc::new(Words::default());
            let first = epoch((5_000 + round) * MS, scale);
            words.epoch.store(first, Ordering::SeqCst);
            words.attempts.store(1_000, Ordering::SeqCst);
            let threads: Vec<_> = (0..THREADS)
                .map(|_| {
                    let words = Arc::clone(&words);
                    thread::spawn(move || {
                        let mut taken = 0;
                        // Over the begin of an epoch in the middle.
                        for step in 0..400 {
                            let now = first + u64::from(step >= 200);
                            enter(&mut &*words, now);
                            taken += u64::from(take(&mut &*words, now, budget));
                        }
                        taken
                    })
                })
                .collect();
            let taken: u64 = threads.into_iter().map(|t| t.join().expect("counts")).sum();
            assert!((100..=100 + THREADS).contains(&taken), "{taken}");
        }
    }
}
