//! The spin guard: an instant refusal must not turn a loop of retries into a hot one.
//!
//! A task that is refused too often in a second has its next refusals held: the connect fails later,
//! after 10 ms at first and twice as long each time, up to 200 ms (Node gives an address 250 ms).
//!
//! A task that calls again before it was told of a refusal that is held does not wait for it: an event loop
//! with calls of many users. To hold more would slow nobody down; it is left alone for a minute.

use bytemuck::{Pod, Zeroable};

use crate::layout;

/// What is remembered of a task that is refused. Approximate on purpose: two tasks may share a place, and
/// then the later one has it. Written by the task itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Spin {
    /// The task (thread); 0: nobody.
    pub owner: u32,
    /// How long its last refusal was held, ms; 0: not at all.
    pub held_ms: u32,
    /// Since when its refusals are counted (CLOCK_MONOTONIC, ns).
    pub since_ns: u64,
    /// When its last refusal ends, ns.
    pub ends_ns: u64,
    /// Refusals since then.
    pub count: u32,
    /// It is left alone until then, seconds (CLOCK_MONOTONIC).
    pub free_until_s: u32,
}

layout!(Spin, size 32, owner at 0, since_ns at 8, count at 24);

/// Places of tasks; a power of two.
pub const SPIN_SLOTS: u32 = 1024;

/// The first hold, ms.
const FIRST_MS: u32 = 10;
/// The longest hold, ms.
const LONGEST_MS: u32 = 200;

const SECOND_NS: u64 = 1_000_000_000;

/// For so long a task is left alone that does not wait for what is held, seconds.
const FREE_S: u32 = 60;

/// A task whose own pauses are so many times as long as the rate asks for does not spin.
const CALM: u64 = 4;

/// Notes a refusal of this task, where more than `per_second` are too many: how long it is to be held, ms;
/// 0: not at all.
#[inline(always)]
pub fn refused(spin: &mut Spin, task: u32, now_ns: u64, per_second: u32) -> u32 {
    if spin.owner != task {
        *spin = Spin {
            owner: task,
            since_ns: now_ns,
            ..Spin::default()
        };
    }
    if now_ns.saturating_sub(spin.since_ns) > SECOND_NS {
        spin.since_ns = now_ns;
        spin.count = 0;
    }
    spin.count += 1;
    let now_s = (now_ns / SECOND_NS) as u32;
    if now_ns < spin.ends_ns {
        spin.free_until_s = now_s + FREE_S;
        spin.held_ms = 0;
        spin.ends_ns = now_ns;
    }
    if now_s < spin.free_until_s {
        spin.ends_ns = now_ns;
        return 0;
    }
    // What it pauses by itself, since it was told of the last refusal.
    let pause_ns = now_ns.saturating_sub(spin.ends_ns);
    let pauses = pause_ns * per_second as u64;
    let hold_ms = if spin.held_ms == 0 {
        if spin.count > per_second { FIRST_MS } else { 0 }
    } else if pauses < SECOND_NS {
        let doubled = spin.held_ms * 2;
        if doubled > LONGEST_MS {
            LONGEST_MS
        } else {
            doubled
        }
    } else if pauses < CALM * SECOND_NS {
        // It may only have waited for a CPU.
        spin.held_ms
    } else if spin.held_ms > FIRST_MS {
        spin.held_ms / 2
    } else {
        spin.count = 0;
        0
    };
    spin.held_ms = hold_ms;
    spin.ends_ns = now_ns + hold_ms as u64 * crate::NANOS_PER_MS;
    hold_ms
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_hot_loop_is_held_longer_and_longer() {
        let mut spin = Spin::default();
        let mut now = SECOND_NS;
        for _ in 0..100 {
            assert_eq!(refused(&mut spin, 7, now, 100), 0);
            now += 10_000;
        }
        for expected in [10, 20, 40, 80, 160, 200, 200] {
            assert_eq!(refused(&mut spin, 7, now, 100), expected);
            now += u64::from(expected) * MS + 10_000;
        }
        now += 20 * MS;
        assert_eq!(refused(&mut spin, 7, now, 100), 200);
        // It pauses by itself: the hold goes as it came.
        for expected in [100, 50, 25, 12, 6, 0, 0] {
            now += u64::from(spin.held_ms) * MS + 40 * MS;
            assert_eq!(refused(&mut spin, 7, now, 100), expected);
        }
        // Another task at the same place begins anew.
        assert_eq!(refused(&mut spin, 8, now, 100), 0);
    }

    #[test]
    fn an_event_loop_is_left_alone() {
        let mut spin = Spin::default();
        let mut held = 0;
        // 400 calls a second for a minute, none of which waits for another.
        for number in 0..24_000_u64 {
            let now = SECOND_NS + number * SECOND_NS / 400;
            held += u32::from(refused(&mut spin, 7, now, 100) != 0);
        }
        assert_eq!(held, 1);
    }

    proptest! {
        /// Whatever its own pauses, a task that is held while it is refused is told no more often than the
        /// rate allows, but for what it may have at once.
        #[test]
        fn no_loop_is_hot(pauses in prop::collection::vec(0_u64..60_000_000, 2_000), rate in 1_u32..500) {
            let mut spin = Spin::default();
            let (begin, mut now) = (SECOND_NS, SECOND_NS);
            let mut at_once = 0_u64;
            for pause in pauses {
                let hold = refused(&mut spin, 7, now, rate);
                prop_assert!(hold <= LONGEST_MS);
                at_once += u64::from(hold == 0);
                now += u64::from(hold) * MS + pause;
            }
            let seconds = (now - begin).div_ceil(SECOND_NS) + 1;
            prop_assert!(at_once <= seconds * u64::from(rate) * 2, "{} in {}", at_once, seconds);
        }

        #[test]
        fn never_in_the_way_of_few(count in 1_u64..2_000, rate in 10_u32..500) {
            let mut spin = Spin::default();
            for number in 0..count {
                let now = SECOND_NS + number * (SECOND_NS / u64::from(rate) + 1);
                prop_assert_eq!(refused(&mut spin, 7, now, rate), 0);
            }
        }
    }
}
