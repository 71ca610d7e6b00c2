//! Requests of HTTP/1 in the clear that are not idempotent, byte for byte: whether a process sends the same
//! one again that has failed before. Runs in the kernel, and is tested natively.
//!
//! Only for policies that refuse such a request. A body may come in packets of its own, cut in any way; so the
//! print of a request goes on with each of them, and depends on its bytes alone.

use bytemuck::{Pod, Zeroable};

use crate::{
    layout,
    method::mixed,
    request::{SENDS_DATA, SENDS_LENGTH, SENDS_WHOLE},
    retry::{is_to_come, tick},
};

/// Bytes of a request, head and body, that are compared. A longer one is never taken for another one's repetition.
/// So many cost the hook a thousand reads of 64 bytes.
pub const MOST: u32 = 1 << 16;

/// A print that goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Running {
    /// Of all whole words so far.
    pub mix: u64,
    /// The bytes behind them.
    pub carry: u64,
    /// All bytes so far.
    pub length: u32,
    /// Zero.
    pub reserved: u32,
}

layout!(Running, size 24, mix at 0, length at 16);

impl Running {
    /// Eight bytes more.
    #[inline(always)]
    pub const fn eight(&mut self, word: u64) {
        self.some(word, 8);
    }

    /// Some bytes more, one to eight; what of the word is behind them is zero.
    #[inline(always)]
    pub const fn some(&mut self, word: u64, bytes: u32) {
        let before = self.length & 7;
        let joined = self.carry | word << (8 * before);
        if before + bytes >= 8 {
            self.mix = mixed(self.mix, joined);
            // (In two steps: a shift by 64 is none.)
            self.carry = word >> 1 >> (63 - 8 * before);
        } else {
            self.carry = joined;
        }
        self.length += bytes;
    }

    /// The print of all bytes.
    #[inline(always)]
    pub const fn print(&self) -> u64 {
        mixed(mixed(self.mix, self.carry), self.length as u64)
    }
}

/// The request of a connection. Approximate on purpose: two connections may share a place, and then the later one
/// has it. Written by the egress hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Whole {
    /// Cookie of the socket; 0: nobody.
    pub owner: u64,
    /// What was sent so far. Of a request that is whole `mix` is its print.
    pub running: Running,
    /// All bytes of the request, from its head; [`CHUNKED`]: its last chunk says.
    pub total: u32,
    /// One of the constants below.
    pub state: u16,
    /// Number of its method ([`crate::method::method`]).
    pub method: u8,
    /// What its first packet says of it: a number of the egress hook's own.
    pub repeats: u8,
}

layout!(Whole, size 40, owner at 0, running at 8, total at 32, state at 36);

/// Places of connections; a power of two. Only requests that are under way matter.
pub const WHOLE_SLOTS: u32 = 4096;

/// In [`Whole::total`].
pub const CHUNKED: u32 = u32::MAX;

/// How many bytes a request has, or that it comes in chunks ([`CHUNKED`]), from what its head says of its end
/// ([`crate::request::end`]) and the length of that head. 0: that cannot be told, or it has more than [`MOST`].
#[inline(always)]
pub const fn total(what: u32, length: u64, head: u32) -> u32 {
    match what {
        SENDS_LENGTH if length <= MOST as u64 => length as u32,
        SENDS_WHOLE => head,
        SENDS_DATA => CHUNKED,
        _ => 0,
    }
}

/// Nothing is known of it.
pub const STATE_LOST: u16 = 0;
/// Not all of it was sent.
pub const STATE_FOLLOWED: u16 = 1;
/// All of it was sent.
pub const STATE_WHOLE: u16 = 2;
/// Its last packet was dropped.
pub const STATE_REFUSED: u16 = 3;

/// Whether the last bytes of a request that comes in chunks (the first of them in the lowest byte) are its end:
/// a line end, and an empty chunk without trailers (RFC 9112, section 7.1). Data may look so, too; but then the
/// request that has failed was cut off just there.
#[inline(always)]
pub const fn ends_chunks(last: u64) -> bool {
    const SEVEN: u64 = u64::from_le_bytes(*b"\r\n0\r\n\r\n\0");
    last == SEVEN
}

/// A request that a process has made: whether it has failed, and how often it has gone well. Approximate on purpose:
/// two of them may share a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Made {
    /// Which one it is ([`id`]); 0: none.
    pub id: u64,
    /// When it has failed first ([`tick`], and not 0), of failures that are less than the window apart from that;
    /// 0: it has not.
    pub failed: u32,
    /// Times that it was sent and has not failed: it went well, or is under way.
    pub well: u32,
}

layout!(Made, size 16, id at 0, failed at 8, well at 12);

/// Places of requests; a power of two.
pub const MADE_SLOTS: u32 = 16_384;

/// So often is remembered.
const WELL_MOST: u32 = 64;

/// It has not failed within the window.
pub const KNOWS_NONE: u32 = 0;
/// It has, but has gone well as well, or is under way: it may be something that is asked for again and again.
pub const KNOWS_FAILED: u32 = 1;
/// It has, and has never gone well.
pub const KNOWS_ONLY_FAILED: u32 = 2;

/// A request, by process and row ([`crate::retry::owner`]) and its print. Not 0.
#[inline(always)]
pub const fn id(process: u64, print: u64) -> u64 {
    mixed(mixed(0, process), print) | 1
}

impl Made {
    #[inline(always)]
    const fn is_recent(self, now_ns: u64, window_ns: u64) -> bool {
        self.failed != 0 && is_to_come(self.failed.wrapping_add(tick(window_ns) + 1), tick(now_ns))
    }

    /// What is known of the request `id`.
    #[inline(always)]
    pub const fn knows(self, id: u64, now_ns: u64, window_ns: u64) -> u32 {
        if self.id != id || !self.is_recent(now_ns, window_ns) {
            KNOWS_NONE
        } else if self.well != 0 {
            KNOWS_FAILED
        } else {
            KNOWS_ONLY_FAILED
        }
    }

    /// The request `id` is sent, all of it. What is here of another one stays where it may be repeated, or was made
    /// more than once; but less of it, lest it stays for ever.
    #[inline(always)]
    pub const fn sent(self, id: u64, now_ns: u64, window_ns: u64) -> Self {
        if self.id != id {
            if self.is_recent(now_ns, window_ns) {
                return self;
            }
            if self.well > 1 {
                return Self {
                    well: self.well - 1,
                    ..self
                };
            }
            return Self {
                id,
                failed: 0,
                well: 1,
            };
        }
        Self {
            well: if self.well < WELL_MOST {
                self.well + 1
            } else {
                WELL_MOST
            },
            ..self
        }
    }

    /// The request `id` has failed, all of which was sent.
    #[inline(always)]
    pub const fn failed(self, id: u64, now_ns: u64, window_ns: u64) -> Self {
        let is_recent = self.is_recent(now_ns, window_ns);
        if self.id != id {
            return if is_recent || self.well > 1 {
                self
            } else {
                Self {
                    id,
                    failed: tick(now_ns) | 1,
                    well: 0,
                }
            };
        }
        Self {
            id,
            failed: if is_recent {
                self.failed
            } else {
                tick(now_ns) | 1
            },
            well: self.well.saturating_sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::{string::String, vec::Vec};

    use proptest::prelude::*;

    use super::*;
    use crate::{
        http::Search,
        request::{self, Value},
        retry::{owner, place},
    };

    const SECOND: u64 = 1_000_000_000;
    const WINDOW: u64 = 10 * SECOND;

    /// As the hook does it: by eight, and what is left.
    fn add(running: &mut Running, bytes: &[u8]) {
        for piece in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            let word = u64::from_le_bytes(word);
            if piece.len() == 8 {
                running.eight(word);
            } else {
                running.some(word, piece.len() as u32);
            }
        }
    }

    fn print(bytes: &[u8]) -> u64 {
        let mut running = Running::default();
        add(&mut running, bytes);
        running.print()
    }

    proptest! {
        /// However a request is cut into packets, its print is the same.
        #[test]
        fn a_print_depends_on_bytes_alone(
            bytes in prop::collection::vec(any::<u8>(), 0..600),
            cuts in prop::collection::vec(0_usize..600, 0..12),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.push(bytes.len());
            cuts.sort_unstable();
            let mut running = Running::default();
            let mut at = 0;
            for cut in cuts {
                add(&mut running, &bytes[at..cut]);
                at = cut;
            }
            prop_assert_eq!(running.length as usize, bytes.len());
            prop_assert_eq!(running.print(), print(&bytes));
        }

        /// Another byte anywhere, a byte more or less: another print.
        #[test]
        fn prints_differ(bytes in prop::collection::vec(any::<u8>(), 1..600), at: prop::sample::Index, by in 1_u8..) {
            let mut other = bytes.clone();
            other[at.index(bytes.len())] ^= by;
            prop_assert_ne!(print(&bytes), print(&other));
            other.clone_from(&bytes);
            other.push(0);
            prop_assert_ne!(print(&bytes), print(&other));
            other.truncate(bytes.len() - 1);
            prop_assert_ne!(print(&bytes), print(&other));
        }

        #[test]
        fn a_request_has_a_place(pid: u32, row: u32, print: u64) {
            let id = id(owner(pid, row), print);
            prop_assert!(id != 0 && place(id, MADE_SLOTS) < MADE_SLOTS);
        }

        /// Whatever happens in one place: only what has failed within the window is known to have, and what is
        /// known to have only failed was never sent oftener than it has failed.
        #[test]
        fn what_is_known(steps in prop::collection::vec((1_u64..4, any::<bool>(), 0_u64..8), 1..200)) {
            let mut made = Made::default();
            let mut now = SECOND;
            let mut first_failed = [None; 4];
            let mut balance = [0_i64; 4];
            for (which, fails, seconds) in steps {
                now += seconds * SECOND;
                let at = which as usize;
                made = made.sent(which << 1 | 1, now, WINDOW);
                balance[at] += 1;
                if fails {
                    made = made.failed(which << 1 | 1, now, WINDOW);
                    balance[at] -= 1;
                    first_failed[at] = Some(now);
                }
                for which in 1..4_u64 {
                    let known = made.knows(which << 1 | 1, now, WINDOW);
                    let at = which as usize;
                    if known != KNOWS_NONE {
                        prop_assert!(first_failed[at].is_some());
                    }
                    prop_assert!(made.id == which << 1 | 1 || known == KNOWS_NONE);
                    prop_assert!(made.well <= WELL_MOST);
                    if known == KNOWS_FAILED {
                        prop_assert!(balance[at] > 0);
                    }
                }
            }
        }
    }

    #[test]
    fn what_has_only_failed_is_known_for_a_window() {
        let made = Made::default().sent(3, SECOND, WINDOW);
        assert_eq!(made.knows(3, SECOND, WINDOW), KNOWS_NONE);
        let made = made.failed(3, SECOND, WINDOW);
        assert_eq!(made.knows(3, 9 * SECOND, WINDOW), KNOWS_ONLY_FAILED);
        assert_eq!(made.knows(5, 9 * SECOND, WINDOW), KNOWS_NONE);
        // Failures within the window leave its begin where it was.
        let again = made.sent(3, 9 * SECOND, WINDOW);
        assert_eq!(again.knows(3, 9 * SECOND, WINDOW), KNOWS_FAILED);
        let again = again.failed(3, 9 * SECOND, WINDOW);
        assert_eq!(again.failed, made.failed);
        assert_eq!(again.knows(3, 12 * SECOND, WINDOW), KNOWS_NONE);
        // And later ones begin another.
        let later = again
            .sent(3, 12 * SECOND, WINDOW)
            .failed(3, 12 * SECOND, WINDOW);
        assert_eq!(later.knows(3, 20 * SECOND, WINDOW), KNOWS_ONLY_FAILED);
    }

    #[test]
    fn what_goes_well_again_and_again_is_in_doubt() {
        let mut made = Made::default();
        for second in 1..20 {
            made = made.sent(3, second * SECOND, WINDOW);
        }
        for second in 20..40 {
            made = made
                .sent(3, second * SECOND, WINDOW)
                .failed(3, second * SECOND, WINDOW);
            assert_eq!(made.knows(3, second * SECOND, WINDOW), KNOWS_FAILED);
        }
        // A few others in the same place do not push it out, many do.
        made.failed = 0;
        for _ in 0..10 {
            made = made.sent(5, 60 * SECOND, WINDOW);
        }
        assert_eq!(made.id, 3);
        for _ in 0..10 {
            made = made.sent(5, 60 * SECOND, WINDOW);
        }
        assert_eq!(made.id, 5);
    }

    #[test]
    fn a_head_says_how_long_its_request_is() {
        let of = |request: &str| {
            let bytes = request.as_bytes();
            let word = |index: u32| {
                let at = index as usize * 8;
                let mut word = [0; 8];
                for (to, from) in word.iter_mut().zip(bytes.iter().skip(at)) {
                    *to = *from;
                }
                u64::from_le_bytes(word)
            };
            let mut search = Search::new(bytes.len() as u32);
            while !search.step(word) {}
            let mut value = Value::of(&search);
            while !value.step(word) {}
            let (what, length) = request::end(&search, &value);
            total(what, length, search.head())
        };
        let begin = "POST /a HTTP/1.1\r\nHost: b\r\n";
        let head = begin.len() as u32;
        for (rest, expected) in [
            ("Content-Length: 2\r\n\r\n{}", head + 23),
            ("Content-Length: 2\r\n\r\n", head + 23),
            ("Content-Length: 2\r\n\r\n{}POST", head + 23),
            ("Content-Length: 0\r\n\r\n", head + 21),
            ("Content-Length: 65000\r\n\r\n", head + 25 + 65_000),
            ("Content-Length: 65536\r\n\r\n", 0),
            // No body (RFC 9112, section 6.3).
            ("\r\n", head + 2),
            ("\r\nPOST /b HTTP/1.1\r\n\r\n", head + 2),
            // No end of the head.
            ("A: b\r\n", 0),
            ("Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 0),
            ("Transfer-Encoding: gzip\r\n\r\n", 0),
            ("Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", CHUNKED),
        ] {
            assert_eq!(of(&(String::from(begin) + rest)), expected, "{rest}");
        }
    }

    #[test]
    fn the_end_of_chunks() {
        let last = |bytes: &[u8; 7]| {
            let mut word = [0; 8];
            word[..7].copy_from_slice(bytes);
            ends_chunks(u64::from_le_bytes(word))
        };
        assert!(last(b"\r\n0\r\n\r\n"));
        assert!(!last(b"aa0\r\n\r\n"));
        assert!(!last(b"\r\n10\r\n\r"));
        assert!(!last(b"0\r\nA: b"));
    }
}
