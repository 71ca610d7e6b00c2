//! Retries: what the kernel remembers to tell one from a fresh call, and what it counts.
//!
//! docs/RETRIES.md says how it decides, and why so. In short: a program that closes a connection which
//! has failed knows of the failure. If the same task then connects to the same destination sooner than
//! its process ever does after a good call, it retries.

use bytemuck::{Pod, Zeroable};

use crate::{
    budget::{Budget, Counts, SLOTS},
    layout,
    method::METHODS,
};

/// What a policy says about retries. Written by the agent, by index of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct RetrySettings {
    /// An operation ends this long after its first attempt, ns.
    pub window_ns: u64,
    /// Or after this long, ns; 0: none.
    pub deadline_ns: u64,
    /// [`Budget::share_ppm`].
    pub budget_ppm: u32,
    /// [`Budget::floor`].
    pub budget_floor: u32,
    /// Retries of an operation; [`NO_LIMIT`]: any number.
    pub limit: u32,
    /// Factor of the epochs of the budget ([`crate::budget::epoch_scale`]); 0: retries are not looked
    /// for.
    pub scale: u32,
    /// Refusals of one task in a second beyond which they are held; 0: never.
    pub spin_per_second: u32,
    /// The SYN of retry n is held for a random time up to this times 2^n, ms; 0: not held.
    pub backoff_base_ms: u32,
    /// Or up to this, ms.
    pub backoff_max_ms: u32,
    /// SYNs held at once, of the whole node; retries beyond are refused.
    pub max_held: u32,
}

layout!(RetrySettings, size 48, window_ns at 0, budget_ppm at 16, scale at 28, max_held at 44);

/// In [`RetrySettings::limit`].
pub const NO_LIMIT: u32 = u32::MAX;

impl RetrySettings {
    /// The budget.
    #[inline(always)]
    pub const fn budget(&self) -> Budget {
        Budget {
            share_ppm: self.budget_ppm,
            floor: self.budget_floor,
        }
    }
}

/// What is counted of a row's retries. One entry for each row, of the same index. Written by the
/// kernel but where said; zero in a free row.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Retries {
    /// Attempts and tokens spent at the begin of the last epochs ([`crate::budget`]).
    pub begins: [u64; SLOTS],
    /// The epoch under way.
    pub epoch: u64,
    /// Tokens of the budget spent so far.
    pub spent: u64,
    /// Retries refused because the budget was spent.
    pub rejected_budget: u32,
    /// Retries refused because the operation had had its number of them.
    pub rejected_limit: u32,
    /// As `rejected_budget`, where observe mode let them pass.
    pub would_budget: u32,
    /// As `rejected_limit`, likewise.
    pub would_limit: u32,
    /// Times that the destination answered a dial of the agent's own while a limit was in force.
    /// Written by the agent.
    pub dialled: u32,
    /// Retries whose SYN was held.
    pub held_backoff: u32,
    /// Refusals of any kind that were held.
    pub held_spin: u32,
    /// Retries refused because the deadline of their operation had passed.
    pub rejected_deadline: u32,
    /// Retries that dialled, by what they were of their operation: its second attempt, its third, its
    /// fourth, a later one. Each is counted once it is known to be one: with its first request, or at its end.
    pub nth: [u32; NTH],
    /// As `rejected_deadline`, where observe mode let them pass.
    pub would_deadline: u32,
    /// Requests repeated that are not idempotent, by fate and method ([`repeated_place`]).
    pub repeated: [u32; FATES * METHODS.len()],
    /// Requests repeated on the connection on which they had failed, as `nth`.
    pub live: [u32; NTH],
    /// In which second events have told of such requests, and of which of them ([`told`]); 0: none did.
    pub told: u32,
    /// Attempts of the row when the second began ([`is_new_second`]); wraps.
    pub second: u32,
    /// When one was last let pass beyond its limit, or the first was refused ([`tick`]); 0: never
    /// ([`trial`]).
    pub trial: u32,
    _pad: u32,
}

/// Entries of [`Retries::nth`].
pub const NTH: usize = 4;

layout!(
    Retries, size 200,
    begins at 0, epoch at 64, rejected_budget at 80, nth at 112, repeated at 132, live at 168, trial at 192,
);

/// What becomes of an attempt beyond the limit, of an operation whose exchange has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trial {
    /// It is refused.
    No,
    /// It is refused, and the time until the first trial begins.
    Begins,
    /// It is let pass, to find out whether the destination answers again.
    Passes,
}

/// Of those that the limit refuses one passes each quarter of the window: the agent's own dials do not tell whether
/// the destination answers, and there may be nobody else who asks. `last` is [`Retries::trial`].
#[inline(always)]
pub const fn trial(last: u32, now: u32, window_ns: u64) -> Trial {
    let window = tick(window_ns);
    let age = now.wrapping_sub(last);
    if last == 0 || age > window {
        Trial::Begins
    } else if age >= window / 4 {
        Trial::Passes
    } else {
        Trial::No
    }
}

/// Fates of a request that is not idempotent and is repeated.
pub const FATES: usize = 3;
/// It passed.
pub const FATE_PASSED: u32 = 0;
/// It was refused.
pub const FATE_REFUSED: u32 = 1;
/// It would have been refused, but for observe mode.
pub const FATE_WOULD: u32 = 2;

/// What [`Retries::told`] becomes when an event tells of one of these ([`repeated_place`]) in the second (of 1.07 s)
/// that has this [`tick`]; `None` if one has told of its like in it.
#[inline(always)]
pub const fn told(before: u32, place: u32, tick: u32) -> Option<u32> {
    const PLACES: u32 = (FATES * METHODS.len()) as u32;
    let second = tick >> 10 << PLACES;
    let bit = 1 << (place & 15);
    if before >> PLACES << PLACES != second {
        Some(second | bit)
    } else if before & bit == 0 {
        Some(before | bit)
    } else {
        None
    }
}

/// The entry of [`Retries::repeated`] of a fate and a method ([`crate::method::method`], not 0).
#[inline(always)]
pub const fn repeated_place(fate: u32, method: u32) -> usize {
    let fate = if fate > FATE_WOULD { FATE_WOULD } else { fate } as usize;
    let method = method.saturating_sub(1) as usize;
    let most = METHODS.len() - 1;
    fate * METHODS.len() + if method > most { most } else { method }
}

impl Retries {
    /// Retries that dialled.
    pub fn total(&self) -> u64 {
        self.nth.iter().map(|&n| u64::from(n)).sum()
    }

    /// Requests repeated that are not idempotent, of one fate.
    pub fn repeated(&self, fate: u32) -> u64 {
        let begin = repeated_place(fate, 1);
        let all = &self.repeated[begin..begin + METHODS.len()];
        all.iter().map(|&n| u64::from(n)).sum()
    }

    /// Retries on connections that existed.
    pub fn live_total(&self) -> u64 {
        self.live.iter().map(|&n| u64::from(n)).sum()
    }

    /// All attempts of a row, given those that dialled, the connects that were established and the requests.
    /// Where requests are retried on connections that exist, each request is an attempt, and so is a connect
    /// that came to nothing.
    pub fn all_attempts(&self, dialled: u64, established: u64, requests: u64) -> u64 {
        if self.live_total() == 0 {
            return dialled;
        }
        (dialled.saturating_sub(established) + requests).max(dialled + self.live_total())
    }

    /// Operations by the number of attempts that they took, [`NTH`] + 1 and more together, given all
    /// attempts of the row ([`Retries::all_attempts`]). Those under way count with the attempts that they have
    /// had.
    pub fn operations(&self, attempts: u64) -> [u64; NTH + 1] {
        let first = attempts.saturating_sub(self.total() + self.live_total());
        let mut at_least = [first; NTH + 1];
        let nth = self.nth.iter().zip(&self.live);
        for (to, (&dialled, &live)) in at_least[1..].iter_mut().zip(nth) {
            *to = u64::from(dialled) + u64::from(live);
        }
        // What the last entry holds may be several attempts of one operation.
        at_least[NTH] = at_least[NTH].min(at_least[NTH - 1]);
        let mut operations = at_least;
        for number in 0..NTH {
            operations[number] = at_least[number].saturating_sub(at_least[number + 1]);
        }
        operations
    }
}

/// A copy of a row's counters, to be read.
#[derive(Clone, Copy, Debug)]
pub struct Counted {
    /// The counters.
    pub retries: Retries,
    /// The row's attempts that were no retries.
    pub attempts: u64,
}

impl Counts for Counted {
    fn epoch(&self) -> u64 {
        self.retries.epoch
    }

    fn begin(&self, slot: usize) -> u64 {
        self.retries.begins[slot]
    }

    fn attempts(&self) -> u64 {
        self.attempts
    }

    fn spent(&self) -> u64 {
        self.retries.spent
    }
}

/// What is known of a task (a thread) and a row. Approximate on purpose: two of them may share a place,
/// and then the later one has it. Written by the task itself, at a connect and at the close of a socket.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Task {
    /// Packed task and row ([`owner`]); 0: nobody.
    pub owner: u64,
    /// When it last closed a connection to the destination, or connected (CLOCK_MONOTONIC, ns); 0: not
    /// known.
    pub last_ns: u64,
    /// Of the connection that failed: its operation ([`pack_operation`]).
    pub operation: u64,
    /// The row's incarnation.
    pub incarnation: u32,
    /// One of the `ENDED_` constants: what it knows of its last connection.
    pub ended: u32,
    /// Failed connections that it has closed, and has not retried yet.
    pub pending: u32,
    /// Generation of the row's verdict when the connection failed.
    pub generation: u32,
    /// Answers of the destination to anybody until then.
    pub answers: u32,
    /// Pause before the last retry of the operation, ns, also of a refused one; 0: there was none.
    pub retried_ns: u32,
    /// Connections that it has opened while it was watched, and has not closed.
    pub open: u32,
    /// Not 0 once it was seen to have had a good call, or several calls at once: without a pace to compare
    /// with, nothing that it does is taken for a retry.
    pub in_doubt: u32,
    /// Calls refused by the budget since one passed.
    pub refusals: u32,
    /// Print of the request that has failed and that it may repeat, or [`crate::method::SOME`]; 0: none was
    /// sent, or it is not known.
    pub failed: u32,
    /// When it last connected ([`beat`]).
    pub dialled: u32,
    /// How far apart its connects are.
    pub rhythm: Rhythm,
}

layout!(Task, size 72, owner at 0, operation at 16, ended at 28, open at 48, rhythm at 68);

/// A time as a rhythm knows it: units of 2^16 ns (66 us). Wraps after 281 s.
#[inline(always)]
pub const fn beat(now_ns: u64) -> u32 {
    (now_ns >> 16) as u32
}

/// Whether a task calls by the clock: a scrape each 15 s, a poll each 100 ms. Such a one does not call again sooner
/// because a call has failed; but where failing takes its time, the pause after it is shorter than after good calls.
///
/// The usual distance between two connects of which the first went well, in [`beat`]s, without its lowest bit: that
/// says whether the last one was as long. 0: not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct Rhythm(pub u32);

impl Rhythm {
    /// The next connect comes so long after one that went well.
    #[inline(always)]
    #[must_use]
    pub const fn with_next(self, distance: u32) -> Self {
        if self.is_near(distance) {
            Self(distance | 1)
        } else if self.0 & 1 != 0 {
            // (One that comes late on a busy machine is no other rhythm yet.)
            Self(self.0 & !1)
        } else {
            Self(distance & !1)
        }
    }

    /// Whether a connect that comes so long after one that failed comes when it would have come in any case.
    #[inline(always)]
    pub const fn keeps(self, distance: u32) -> bool {
        self.0 & 1 != 0 && self.is_near(distance)
    }

    /// Within an eighth.
    #[inline(always)]
    const fn is_near(self, distance: u32) -> bool {
        let usual = self.0 & !1;
        usual != 0 && distance.abs_diff(usual) <= usual >> 3
    }
}

/// So many calls are refused by the budget for one failure. Who goes on is no program that retries a few
/// times: it takes up other work at once when some fails, and would lose all of it.
pub const MOST_REFUSALS: u32 = 12;

/// Places of tasks; a power of two.
pub const TASK_SLOTS: u32 = 8192;

/// Longest pause that is remembered (4.3 s); longer ones count as this.
const LONGEST: u32 = u32::MAX;

/// The connection ended well, or nothing is known of it that a retry could be for.
pub const ENDED_WELL: u32 = 0;
/// The connect failed.
pub const ENDED_UNCONNECTED: u32 = 1;
/// The last exchange failed.
pub const ENDED_UNANSWERED: u32 = 2;

/// A task or process, and a row, in one word. Not 0.
#[inline(always)]
pub const fn owner(id: u32, row: u32) -> u64 {
    ((id as u64) << 32) | row as u64
}

/// The place that an owner has among `slots` (a power of two).
#[inline(always)]
pub const fn place(owner: u64, slots: u32) -> u32 {
    // Fibonacci hashing: the high bits of the product are the mixed ones.
    let mixed = owner.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 48) as u32 & (slots - 1)
}

/// An operation as an attempt carries it: when its first attempt began ([`operation_time`], 47 bits: 4 years), its
/// number in the chain, and its number since the destination was last seen to answer (each from 1, and
/// at most 255).
#[inline(always)]
pub const fn pack_operation(first: u64, number: u32, since: u32) -> u64 {
    const MOST: u32 = 255;
    let number = if number > MOST { MOST } else { number };
    let since = if since > MOST { MOST } else { since };
    (first << 16) | ((number as u64) << 8) | since as u64
}

/// First attempt, number and number since an answer, from [`pack_operation`].
#[inline(always)]
pub const fn unpack_operation(word: u64) -> (u64, u32, u32) {
    let first = (word & !HELD) >> 16;
    (first, (word >> 8) as u32 & 0xff, word as u32 & 0xff)
}

/// In an operation that the connect hook has judged: its SYN is to be held.
pub const HELD: u64 = 1 << 63;

/// Whether it is a later attempt than the first.
#[inline(always)]
pub const fn is_retry(operation: u64) -> bool {
    operation_number(operation) > 1
}

/// Which attempt it is, from 1.
#[inline(always)]
pub const fn operation_number(operation: u64) -> u32 {
    (operation >> 8) as u32 & 0xff
}

/// When the first attempt of an operation began (CLOCK_MONOTONIC, ns).
#[inline(always)]
pub const fn operation_begin_ns(operation: u64) -> u64 {
    ((operation & !HELD) >> 16) << 10
}

/// Longest hold of retry n (0: the first): `base` x 2^n, at most `max`, ms.
#[inline(always)]
pub const fn backoff_ms(base_ms: u32, max_ms: u32, retry: u32) -> u32 {
    let doubled = (base_ms as u64) << (if retry > 16 { 16 } else { retry });
    if doubled > max_ms as u64 {
        max_ms
    } else {
        doubled as u32
    }
}

/// A time as an operation carries it: units of 1,024 ns.
#[inline(always)]
pub const fn operation_time(now_ns: u64) -> u64 {
    now_ns >> 10
}

/// The first attempt of an operation.
#[inline(always)]
pub const fn fresh(now_ns: u64) -> u64 {
    pack_operation(operation_time(now_ns), 1, 1)
}

/// Time since an operation's first attempt, ns.
#[inline(always)]
pub const fn age_ns(first: u64, now_ns: u64) -> u64 {
    now_ns.saturating_sub(first << 10)
}

/// A time as rows remember it: units of 2^20 ns (1.05 ms). Wraps after 52 days.
#[inline(always)]
pub const fn tick(now_ns: u64) -> u32 {
    (now_ns >> 20) as u32
}

/// Whether a time of [`tick`] is yet to come. (One that is older than 26 days seems to be, and then a few
/// connects are looked at for nothing.)
#[inline(always)]
pub const fn is_to_come(tick: u32, now: u32) -> bool {
    tick.wrapping_sub(now) as i32 > 0
}

/// Connects that come further apart are all looked at, ns: what it costs does not matter then.
pub const SELDOM_NS: u64 = 1 << 22;

/// But not on a row that has had so many since the second began: what is busy pauses, too, when the machine has other
/// things to do.
pub const BUSY: u32 = 256;

/// A pause after a good call is looked for this long, in units of [`tick`] (134 ms): of a program that never pauses
/// once a second ([`is_new_second`]), so one eighth of the time.
pub const SAMPLE_TICKS: u32 = 128;

/// Connects that come in different parts of time (of 1.07 s) than the one before are looked at, so that
/// the budget knows the attempts of its window.
#[inline(always)]
pub const fn is_new_second(now_ns: u64, before_ns: u64) -> bool {
    now_ns >> 30 != before_ns >> 30
}

/// A pause as it is remembered.
#[inline(always)]
pub const fn pause(ns: u64) -> u32 {
    if ns >= LONGEST as u64 {
        LONGEST
    } else {
        ns as u32
    }
}

/// Whether a program whose pace is not known does what a retry would, given the pause before the retry
/// before this one (0: there was none). Where the pause is far longer, it has done something else
/// meanwhile.
#[inline(always)]
pub const fn is_in_time(pause_ns: u64, retried_ns: u32) -> bool {
    const LONG_NS: u64 = 100_000_000;
    const FAR_LONGER: u64 = 16;
    retried_ns == 0 || pause_ns < LONG_NS || pause_ns < retried_ns as u64 * FAR_LONGER
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pace::PACE_SLOTS;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_operation_survives_packing(first in 0_u64..1 << 47, number in 1_u32..400, since in 1_u32..400) {
            let word = pack_operation(first, number, since);
            prop_assert_eq!(unpack_operation(word), (first, number.min(255), since.min(255)));
        }

        #[test]
        fn places_are_places(id: u32, row: u32) {
            prop_assert!(place(owner(id, row), TASK_SLOTS) < TASK_SLOTS);
            prop_assert!(place(owner(id, row), PACE_SLOTS) < PACE_SLOTS);
        }

        #[test]
        fn times_to_come(now: u32, ahead in 1_u32..1 << 30) {
            prop_assert!(is_to_come(now.wrapping_add(ahead), now));
            prop_assert!(!is_to_come(now.wrapping_sub(ahead), now));
            prop_assert!(!is_to_come(now, now));
        }

        /// A clock that is a few percent off is one; what comes much sooner is not.
        #[test]
        fn a_clock_is_known(period_ms in 5_u64..100_000, off in -100_i64..100, sooner in 1_u64..80) {
            let beats = |thousandths: u64| beat(period_ms * 1_000 * thousandths);
            let rhythm = Rhythm::default().with_next(beats(1_000)).with_next(beats(1_000));
            prop_assert!(rhythm.keeps(beats((1_000 + off).unsigned_abs())), "{:?}", rhythm);
            let sooner = beats(10 * sooner);
            prop_assert!(!rhythm.keeps(sooner));
            prop_assert!(!Rhythm::default().with_next(beats(1_000)).keeps(beats(1_000)), "seen once");
            let uneven = rhythm.with_next(sooner);
            prop_assert!(!uneven.keeps(sooner) && !uneven.keeps(beats(1_000)));
            prop_assert!(uneven.with_next(beats(1_000)).keeps(beats(1_000)), "one that was late");
        }

        /// However often it is asked: at most four pass in a window, and none comes later than a quarter and the
        /// time between two calls.
        #[test]
        fn trials_are_rare_and_come(begin in 1_u64..1 << 40, window_s in 1_u64..600, step_ms in 1_u64..2_000) {
            let window_ns = window_s * 1_000_000_000;
            let step_ns = (step_ms * 1_000_000).min(window_ns / 4);
            let (mut last, mut passed, mut now, mut passed_at) = (0, 0, begin, begin);
            while now < begin + window_ns {
                match trial(last, tick(now) | 1, window_ns) {
                    Trial::No => {}
                    Trial::Begins => {
                        prop_assert_eq!(now, begin);
                        last = tick(now) | 1;
                    }
                    Trial::Passes => {
                        passed += 1;
                        passed_at = now;
                        last = tick(now) | 1;
                    }
                }
                prop_assert!(now - passed_at <= window_ns / 4 + step_ns + 4_000_000);
                now += step_ns;
            }
            prop_assert!(passed <= 4, "{}", passed);
        }

        /// Waits that grow as those of most programs do are one operation's.
        #[test]
        fn growing_waits_are_soon(wait_ms in 1_u64..1_000, factor in 1_u64..10, n in 1_u32..5) {
            let wait = |n| wait_ms * factor.pow(n) * 1_000_000;
            prop_assert!(is_in_time(wait(n), pause(wait(n - 1))) || wait(n - 1) >= 1 << 32);
        }
    }

    #[test]
    fn each_like_is_told_once_a_second() {
        let now = tick(77_000_000_000);
        let first = told(0, 0, now).expect("none was told");
        assert_eq!(told(first, 0, now), None);
        let second = told(first, 8, now + 1).expect("another");
        assert_eq!(told(second, 8, now + 1), None);
        assert_eq!(told(second, 0, now + 1), None);
        let next = told(second, 0, now + 1024).expect("a second later");
        assert!(told(next, 8, now + 1024).is_some());
    }

    #[test]
    fn operations_by_attempts() {
        let mut retries: Retries = Zeroable::zeroed();
        assert_eq!(retries.operations(7), [7, 0, 0, 0, 0]);
        // Three of one attempt, one each of two and of four.
        retries.nth = [2, 1, 1, 0];
        assert_eq!(retries.operations(9), [3, 1, 0, 1, 0]);
        assert_eq!(retries.all_attempts(9, 8, 500), 9);
        // Two more of two attempts, on connections that had had 500 requests.
        retries.live = [2, 0, 0, 0];
        assert_eq!(retries.all_attempts(9, 8, 500), 501);
        assert_eq!(retries.operations(501), [491, 3, 0, 1, 0]);
        // Requests that nobody has seen.
        assert_eq!(retries.all_attempts(9, 9, 0), 11);
    }

    /// Tasks of one process, and tasks of many rows, hardly ever share a place.
    #[test]
    fn neighbours_are_apart() {
        let mut taken = [false; TASK_SLOTS as usize];
        let mut shared = 0;
        for tid in 4_000..4_500 {
            for row in [7, 8] {
                let place = place(owner(tid, row), TASK_SLOTS) as usize;
                shared += u32::from(core::mem::replace(&mut taken[place], true));
            }
        }
        assert!(shared < 150, "{shared}");
    }
}
