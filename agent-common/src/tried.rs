//! Requests that a process has made of late, and how they ended: a later one that is the same may be a
//! retry which `connect()` could not know, because what is asked for shows only afterwards.
//!
//! For counting only. docs/RETRIES.md says how it decides. Runs in the kernel, and is tested natively.

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
    /// Which one it is ([`id`]); 0: none. Taken by compare-and-exchange.
    pub id: u64,
    /// When its connection was closed ([`tick`]).
    pub at: u32,
    /// Which attempt of its operation has failed, from 1; [`WELL`]: it went well.
    pub attempt: u32,
}

layout!(Tried, size 16, id at 0, at at 8, attempt at 12);

/// Places of requests; a power of two.
pub const TRIED_SLOTS: u32 = 16_384;

/// In place of an attempt that has failed.
pub const WELL: u32 = 0;

/// A request, by process and row ([`crate::retry::owner`]) and its print ([`crate::method::print`]). Not 0.
#[inline(always)]
pub const fn id(process: u64, print: u32) -> u64 {
    mixed(mixed(0, process), print as u64) | 1
}

impl Tried {
    /// Whether another request, one that went well, leaves it its place: it has failed, and `window_ns` has not
    /// passed since.
    #[inline(always)]
    pub const fn stays(self, now_ns: u64, window_ns: u64) -> bool {
        self.id != 0 && self.attempt != WELL && self.is_recent(now_ns, window_ns)
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
            let id = id(owner(pid, row), print);
            prop_assert!(id != 0 && place(id, TRIED_SLOTS) < TRIED_SLOTS);
        }

        /// In the window and not much longer, also where the time wraps. (At its very end the ticks decide.)
        #[test]
        fn recent_is_as_long_as_the_window(begin in 1_u64..1 << 53, window in 1_u64..600, later in 0_u64..1_200) {
            let tried = Tried { id: 1, at: tick(begin), attempt: 1 };
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

    #[test]
    fn only_what_may_be_retried_stays() {
        let failed = Tried {
            id: 1,
            at: tick(SECOND),
            attempt: 2,
        };
        assert!(failed.stays(2 * SECOND, 10 * SECOND));
        assert!(!failed.stays(12 * SECOND, 10 * SECOND));
        let well = Tried {
            attempt: WELL,
            ..failed
        };
        assert!(!well.stays(2 * SECOND, 10 * SECOND));
        assert!(!Tried { id: 0, ..failed }.stays(2 * SECOND, 10 * SECOND));
    }
}
