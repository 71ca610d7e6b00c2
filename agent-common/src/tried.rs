//! Requests that a process has made of late, and how they ended. What is asked for shows only after
//! `connect()`: a later request that is the same may be a retry which `connect()` took for a fresh call, and one
//! that repeats nothing which has failed is a fresh call, whatever `connect()` took it for.
//!
//! docs/RETRIES.md says how it decides. Runs in the kernel, and is tested natively.

use bytemuck::{Pod, Zeroable};

use crate::{
    layout,
    method::mixed,
    retry::{is_to_come, tick},
};

/// A request of HTTP/1 in the clear that a process has made of a row, and knows the end of. Approximate on
/// purpose: two of them may share a place, and then the later one has it, but a good one none whose retry may
/// still come. Written by whoever closes the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Tried {
    /// Which one it is ([`id`]); 0: none. Taken by compare-and-exchange, with its last failure.
    pub id: u64,
    /// When its connection was closed ([`tick`]).
    pub at: u32,
    /// Its failures ([`failed`]); [`WELL`]: it went well. Changed by compare-and-exchange.
    pub failures: u32,
}

layout!(Tried, size 16, id at 0, at at 8, failures at 12);

/// Places of requests; a power of two.
pub const TRIED_SLOTS: u32 = 16_384;

/// In place of failures.
pub const WELL: u32 = 0;

/// The attempts that are told apart.
const ATTEMPTS: u32 = 255;
/// A failure more that nothing has repeated yet.
const ONE_MORE: u32 = ATTEMPTS + 1;
/// The most of those that are remembered.
const MOST_MORE: u32 = 255 * ONE_MORE;

/// A failure: of which attempt of its operation, from 1.
#[inline(always)]
pub const fn failed(attempt: u32) -> u32 {
    if attempt == 0 {
        1
    } else if attempt > ATTEMPTS {
        ATTEMPTS
    } else {
        attempt
    }
}

/// The same request has failed once more (`is_another`), or the last failure was of another attempt than was
/// thought.
#[inline(always)]
pub const fn failed_again(failures: u32, attempt: u32, is_another: bool) -> u32 {
    let mut more = failures & !ATTEMPTS;
    if is_another && more < MOST_MORE {
        more += ONE_MORE;
    }
    more | failed(attempt)
}

/// What is left when one failure has been repeated: each is worth one retry. [`WELL`]: none is.
#[inline(always)]
pub const fn repeated(failures: u32) -> u32 {
    if failures < ONE_MORE {
        WELL
    } else {
        failures - ONE_MORE
    }
}

/// A request, by process and row ([`crate::retry::owner`]) and its print ([`crate::method::print`]). Not 0.
#[inline(always)]
pub const fn id(process: u64, print: u32) -> u64 {
    mixed(mixed(0, process), print as u64) | 1
}

/// A request that has failed, while its program has not closed its connection yet ([`id`]). Its entry, without
/// failures, pushes none out.
#[inline(always)]
pub const fn id_open(process: u64, print: u32) -> u64 {
    !id(process, print) | 1
}

impl Tried {
    /// Which attempt of its operation has failed last, from 1.
    #[inline(always)]
    pub const fn attempt(self) -> u32 {
        self.failures & ATTEMPTS
    }

    /// Whether another request, one that went well, leaves it its place: it has failed, and `window_ns` has not
    /// passed since.
    #[inline(always)]
    pub const fn stays(self, now_ns: u64, window_ns: u64) -> bool {
        self.id != 0 && self.failures != WELL && self.is_recent(now_ns, window_ns)
    }

    /// Whether `window_ns` has not passed since its end.
    #[inline(always)]
    pub const fn is_recent(self, now_ns: u64, window_ns: u64) -> bool {
        is_to_come(self.at.wrapping_add(tick(window_ns) + 1), tick(now_ns))
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use proptest::prelude::*;

    use super::*;
    use crate::retry::{owner, place};

    const SECOND: u64 = 1_000_000_000;

    proptest! {
        #[test]
        fn a_request_has_a_place(pid: u32, row: u32, print: u32) {
            let ids = [id(owner(pid, row), print), id_open(owner(pid, row), print)];
            prop_assert!(ids[0] != ids[1]);
            for id in ids {
                prop_assert!(id != 0 && place(id, TRIED_SLOTS) < TRIED_SLOTS);
            }
        }

        /// In the window and not much longer, also where the time wraps. (At its very end the ticks decide.)
        #[test]
        fn recent_is_as_long_as_the_window(begin in 1_u64..1 << 53, window in 1_u64..600, later in 0_u64..1_200) {
            let tried = Tried { id: 1, at: tick(begin), failures: 1 };
            let is_recent = tried.is_recent(begin + later * SECOND, window * SECOND);
            prop_assert!(is_recent == (later < window) || later == window);
        }
    }

    #[test]
    fn requests_differ_by_process_row_and_print() {
        let ids = [
            id(owner(7, 1), 5),
            id(owner(8, 1), 5),
            id(owner(7, 2), 5),
            id(owner(7, 1), 7),
        ];
        let differ: std::collections::HashSet<_> = ids.into_iter().collect();
        assert_eq!(differ.len(), ids.len());
    }

    proptest! {
        /// Each failure is worth one retry, whatever attempts they were.
        #[test]
        fn as_many_are_repeated_as_have_failed(attempts in prop::collection::vec(1_u32..400, 1..300)) {
            let mut failures = failed(attempts[0]);
            for &attempt in &attempts[1..] {
                failures = failed_again(failures, attempt, true);
                // Another number for the same one.
                failures = failed_again(failures, attempt, false);
            }
            let last = attempts[attempts.len() - 1].min(ATTEMPTS);
            let mut repetitions = 0;
            while failures != WELL {
                let tried = Tried { id: 1, at: 0, failures };
                prop_assert_eq!(tried.attempt(), last);
                failures = repeated(failures);
                repetitions += 1;
            }
            prop_assert_eq!(repetitions, attempts.len().min(256));
        }
    }

    #[test]
    fn only_what_may_be_retried_stays() {
        let failed = Tried {
            id: 1,
            at: tick(SECOND),
            failures: 2,
        };
        assert!(failed.stays(2 * SECOND, 10 * SECOND));
        assert!(!failed.stays(12 * SECOND, 10 * SECOND));
        let well = Tried {
            failures: WELL,
            ..failed
        };
        assert!(!well.stays(2 * SECOND, 10 * SECOND));
        assert!(!Tried { id: 0, ..failed }.stays(2 * SECOND, 10 * SECOND));
    }
}
