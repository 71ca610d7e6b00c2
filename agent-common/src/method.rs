//! The first bytes of HTTP/1 requests in the clear: whether two requests are the same, whether one may be
//! repeated, and what is learnt of a program from both. Runs in the kernel, and is tested natively.
//!
//! What cannot be told is unknown, and then nothing is concluded: a repetition that is missed harms less
//! than a request that is refused wrongly.

use bytemuck::{Pod, Zeroable};

use crate::layout;

/// What is remembered of the requests of a connection. Approximate on purpose: two connections may share a
/// place, and then the later one has it. Written by the connect hook, then by the egress hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Asked {
    /// Cookie of the socket; 0: nobody.
    pub owner: u64,
    /// Print of its last request ([`print`]); 0: not known.
    pub sent: u32,
    /// Until its first request: print of the one that failed and that it may repeat, or [`SOME`]; 0: there
    /// was none.
    pub failed: u32,
    /// Times that it has repeated its last request.
    pub repeated: u16,
    /// Number of that request's exchange ([`crate::stamp::unpack_request`]): later ones may not have been
    /// looked at.
    pub number: u16,
    /// When its last request was refused, in units of [`crate::retry::tick`], and not 0; 0: it was not.
    pub refused: u32,
}

layout!(Asked, size 24, owner at 0, sent at 8, refused at 20);

/// Places of connections; a power of two.
pub const ASKED_SLOTS: u32 = 16_384;

/// In place of a print: a request of HTTP/1 whose bytes are not known.
pub const SOME: u32 = 2;
/// Set in every print.
const PRINTED: u32 = 1;
/// Set in the print of a request that is not idempotent.
const UNSAFE: u32 = 2;

/// Bytes of a request in its print: with the method, the target and mostly the host.
pub const FIRST: usize = 64;
/// A request that is not idempotent has all of its bytes in its print, up to so many of what came at once,
/// and how many there are.
pub const COVERED: u32 = 1024;
/// Pieces of a print behind the first, of as many bytes.
pub const PIECES: u32 = COVERED / FIRST as u32 - 1;

/// Bytes of a request that are searched for its Idempotency-Key and the end of its head.
pub const SEARCHED: u32 = 4096;
/// Bytes that a step of the search looks at.
pub const WINDOW: u32 = 24;
/// Bytes by which it goes on: two lines of a head cannot end within so many.
const STRIDE: u32 = 4;
/// Steps of a search.
pub const STEPS: u32 = SEARCHED / STRIDE;

/// After a refusal the connection is to be ended at once. Where it is not for so long, in units of
/// [`crate::retry::tick`] (5 s), its request passes.
pub const REFUSED_TICKS: u32 = 4768;

/// Methods that are not idempotent, as events name them: [`method`]. Those that RFC 9110 (section 9.2.2) and
/// the registry of methods at IANA do not call idempotent, but for CONNECT. What is not registered may be
/// anything: not known to be unsafe.
pub const METHODS: [&str; 3] = ["POST", "PATCH", "LOCK"];

/// The number of a method in [`METHODS`], plus one, from a request's first word; 0: it is none of them.
#[inline(always)]
pub const fn method(first: u64) -> u32 {
    const POST: u64 = u64::from_le_bytes(*b"POST \0\0\0");
    const PATCH: u64 = u64::from_le_bytes(*b"PATCH \0\0");
    const LOCK: u64 = u64::from_le_bytes(*b"LOCK \0\0\0");
    const FIVE: u64 = (1 << 40) - 1;
    const SIX: u64 = (1 << 48) - 1;
    if first & FIVE == POST {
        1
    } else if first & SIX == PATCH {
        2
    } else if first & FIVE == LOCK {
        3
    } else {
        0
    }
}

/// One word more of a print.
#[inline(always)]
pub const fn mixed(so_far: u64, word: u64) -> u64 {
    let product = (so_far ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 29)
}

/// The words of some bytes more.
#[inline(always)]
pub fn mixed_all<const N: usize>(so_far: u64, words: &[u64; N]) -> u64 {
    let mut mix = so_far;
    let mut at = 0;
    while at < N {
        mix = mixed(mix, words[at]);
        at += 1;
    }
    mix
}

/// Whether the line goes on after these bytes: none of them is a CR.
#[inline(always)]
pub fn goes_on<const N: usize>(words: &[u64; N]) -> bool {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let mut found = 0;
    let mut at = 0;
    while at < N {
        let of_cr = words[at] ^ (ONES * 0x0d);
        found |= of_cr.wrapping_sub(ONES) & !of_cr & (ONES << 7);
        at += 1;
    }
    found == 0
}

/// The print of a request; `method` as in [`method`].
#[inline(always)]
pub const fn print(mix: u64, method: u32) -> u32 {
    let folded = (mix ^ (mix >> 32)) as u32 & !(PRINTED | UNSAFE);
    folded | PRINTED | if method == 0 { 0 } else { UNSAFE }
}

/// Whether it is a print, of a request that is known.
#[inline(always)]
pub const fn is_print(print: u32) -> bool {
    print & PRINTED != 0
}

/// The first byte of the window that a step looks at; what of it is beyond the request's end is zero.
#[inline(always)]
pub const fn window(step: u32) -> u32 {
    step * STRIDE
}

/// In a window: an Idempotency-Key.
pub const HAS_KEY: u32 = 1;
/// In a window: the head's end.
pub const HAS_END: u32 = 2;

/// What begins with the first bytes of a window ([`STRIDE`]), if a line ends there.
#[inline(always)]
pub const fn holds(window: [u64; 3]) -> u32 {
    const ONES: u32 = 0x0101_0101;
    const LOWER: u64 = 0x2020_2020_2020_2020;
    const NAME: [u64; 2] = [
        u64::from_le_bytes(*b"idempote"),
        u64::from_le_bytes(*b"ncy-key:"),
    ];
    const END: u64 = u64::from_le_bytes(*b"\r\n\0\0\0\0\0\0");
    let of_newline = window[0] as u32 ^ (ONES * b'\n' as u32);
    let newlines = of_newline.wrapping_sub(ONES) & !of_newline & (ONES << 7);
    if newlines == 0 {
        return 0;
    }
    // What follows the first one: all bits below its own, and its own, are so many bytes.
    let upto = newlines ^ newlines.wrapping_sub(1);
    let bytes = ((upto >> 7) & ONES).wrapping_mul(ONES) >> 24;
    let (right, left) = ((8 * bytes) & 63, (64 - 8 * bytes) & 63);
    let one = (window[0] >> right) | (window[1] << left);
    let two = (window[1] >> right) | (window[2] << left);
    if (one | LOWER) ^ NAME[0] | ((two | LOWER) ^ NAME[1]) == 0 {
        HAS_KEY
    } else if one & 0xffff == END {
        HAS_END
    } else {
        0
    }
}

/// Where a piece of a request of this length lies that is printed behind the first: the last one ends with it,
/// and may have bytes of the one before. 0: there is none.
#[inline(always)]
pub const fn piece(index: u32, length: u32) -> u32 {
    const PIECE: u32 = FIRST as u32;
    let at = (index + 1) * PIECE;
    if at >= length {
        0
    } else if length - at < PIECE {
        length - PIECE
    } else {
        at
    }
}

/// What is known of a process: whether it repeats its requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Habit {
    /// After a failure it has taken up something else, more often than it has repeated what failed.
    pub moves_on: u32,
    /// A good answer was followed by the same request: on a connection that is kept by the next one, else
    /// sooner or later.
    pub same: u16,
    /// And by another one, or none yet.
    pub other: u16,
}

layout!(Habit, size 8, moves_on at 0, same at 4, other at 6);

/// From here on a process is known not to repeat what has failed.
const MOVES_ON: u32 = 3;
/// The most that is remembered: so soon it is known otherwise, two for each repetition.
const MOVES_ON_MOST: u32 = 6;

impl Habit {
    /// What looked like a retry has turned out to be one, or another request.
    #[inline(always)]
    pub const fn with_retry(self, is_same: bool) -> Self {
        let moves_on = if is_same {
            self.moves_on.saturating_sub(2)
        } else if self.moves_on < MOVES_ON_MOST {
            self.moves_on + 1
        } else {
            MOVES_ON_MOST
        };
        Self { moves_on, ..self }
    }

    /// Whether the process takes up something else when a call fails: then nothing that it dials is a retry.
    #[inline(always)]
    pub const fn moves_on(self) -> bool {
        self.moves_on >= MOVES_ON
    }

    /// A request has followed a good answer.
    #[inline(always)]
    pub const fn with_next(self, is_same: bool) -> Self {
        const MOST: u16 = 64;
        let mut habit = self;
        if habit.same + habit.other >= MOST {
            habit.same /= 2;
            habit.other /= 2;
        }
        if is_same {
            habit.same += 1;
        } else {
            habit.other += 1;
        }
        habit
    }

    /// Whether its requests hardly ever follow their like: then one that does so after a failure repeats it.
    #[inline(always)]
    pub const fn varies(self) -> bool {
        self.seldom_repeats(8)
    }

    /// Whether none of its first requests was asked for twice, or hardly any later on. (Who asks for the same things
    /// in turn asks for something good again before it comes to what failed, but for the very first.)
    #[inline(always)]
    pub const fn seems_to_vary(self) -> bool {
        self.seldom_repeats(2)
    }

    #[inline(always)]
    const fn seldom_repeats(self, known: u16) -> bool {
        const RARE: u16 = 16;
        self.other >= known && self.same * RARE <= self.other
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::string::String;

    use proptest::prelude::*;

    use super::*;

    /// What the kernel finds in a request.
    fn search(request: &[u8]) -> u32 {
        let at_hand = &request[..request.len().min(SEARCHED as usize)];
        for step in 0..STEPS {
            let Some(rest) = at_hand.get(window(step) as usize..) else {
                break;
            };
            let mut bytes = [0; WINDOW as usize];
            let length = rest.len().min(bytes.len());
            bytes[..length].copy_from_slice(&rest[..length]);
            let word = |i: usize| u64::from_le_bytes(bytes[i * 8..i * 8 + 8].try_into().unwrap());
            let found = holds([word(0), word(1), word(2)]);
            if found != 0 {
                return found;
            }
        }
        0
    }

    fn of(words: &str) -> u64 {
        let mut first = [0; 8];
        let length = words.len().min(8);
        first[..length].copy_from_slice(&words.as_bytes()[..length]);
        u64::from_le_bytes(first)
    }

    #[test]
    fn methods_that_are_not_idempotent() {
        for (request, expected) in [
            ("POST /a HTTP/1.1", 1),
            ("PATCH /a HTTP/1.1", 2),
            ("LOCK /a HTTP/1.1", 3),
            ("GET / HTTP/1.1", 0),
            ("HEAD / HTTP/1.1", 0),
            ("PUT / HTTP/1.1", 0),
            ("DELETE / HTTP/1.1", 0),
            ("OPTIONS * HTTP/1.1", 0),
            ("TRACE / HTTP/1.1", 0),
            ("POSTER / HTTP/1.1", 0),
            ("PATCHES / HTTP/1.1", 0),
            ("POS", 0),
        ] {
            assert_eq!(method(of(request)), expected, "{request}");
        }
        assert_eq!(METHODS.len(), 3);
    }

    #[test]
    fn prints_say_that_they_are() {
        for mix in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            assert!(is_print(print(mix, 0)) && is_print(print(mix, 1)));
            assert_ne!(print(mix, 0), print(mix, 1));
        }
        assert!(!is_print(SOME) && !is_print(0));
    }

    #[test]
    fn a_key_is_found_wherever_it_stands_in_the_head() {
        for before in 0..40 {
            for name in [
                "Idempotency-Key: 7",
                "idempotency-key:8",
                "IDEMPOTENCY-KEY: 9",
            ] {
                let filler: String = core::iter::repeat_n('x', before).collect();
                for rest in ["", "Host: a\r\n"] {
                    let request =
                        std::format!("POST / HTTP/1.1\r\nA: {filler}\r\n{rest}{name}\r\n\r\n{{}}");
                    assert_eq!(search(request.as_bytes()), HAS_KEY, "{request}");
                }
            }
        }
    }

    #[test]
    fn a_head_ends_wherever_it_does() {
        for before in 0..40 {
            for body in [
                "",
                "a",
                "{}",
                "0123456789abcdef",
                "0123456789abcdef01234567",
            ] {
                let filler: String = core::iter::repeat_n('x', before).collect();
                let request = std::format!("POST / HTTP/1.1\r\nA: {filler}\r\n\r\n{body}");
                assert_eq!(search(request.as_bytes()), HAS_END, "{request}");
                let endless = request.replace("\r\n\r\n", "\r\n");
                assert_eq!(search(endless.as_bytes()), 0, "{endless}");
            }
        }
        // What only looks like a key, and one in the body.
        for other in [
            "X-Idempotency-Key: 1",
            "Idempotency-Keys: 1",
            "A: idempotency-key: 1",
        ] {
            let request = std::format!("POST / HTTP/1.1\r\n{other}\r\n\r\n\nidempotency-key: 1");
            assert_eq!(search(request.as_bytes()), HAS_END, "{request}");
        }
    }

    #[test]
    fn pieces_cover_a_request_to_its_last_byte() {
        for length in 0..COVERED + 1 {
            let mut covered = FIRST as u32;
            for at in (0..PIECES).map(|index| piece(index, length)) {
                assert!(at == 0 || (at <= covered && at + FIRST as u32 <= length));
                covered = covered.max(at + FIRST as u32 * u32::from(at != 0));
            }
            assert_eq!(covered, length.max(FIRST as u32));
        }
    }

    #[test]
    fn a_head_that_is_too_long_tells_nothing() {
        let mut request = b"POST / HTTP/1.1\r\nCookie: ".to_vec();
        request.extend(core::iter::repeat_n(b'c', SEARCHED as usize));
        request.extend(b"\r\n\r\n");
        assert_eq!(search(&request), 0);
    }

    #[test]
    fn lines_that_go_on() {
        let words = [u64::from_le_bytes(*b"GET /abc"); 8];
        assert!(goes_on(&words));
        for at in 0..8 {
            let mut ended = words;
            ended[at] = u64::from_le_bytes(*b"TP/1.1\r\n");
            assert!(!goes_on(&ended));
        }
    }

    #[test]
    fn who_moves_on_is_known_after_three_times_and_forgotten_after_two_repetitions() {
        let mut habit = Habit::default();
        for _ in 0..2 {
            habit = habit.with_retry(false);
            assert!(!habit.moves_on());
        }
        for _ in 0..100 {
            habit = habit.with_retry(false);
            assert!(habit.moves_on());
        }
        habit = habit.with_retry(true);
        assert!(habit.moves_on());
        habit = habit.with_retry(true);
        assert!(!habit.moves_on());
    }

    #[test]
    fn a_program_whose_requests_vary() {
        let mut habit = Habit::default();
        for number in 1..8 {
            habit = habit.with_next(false);
            assert!(!habit.varies());
            assert_eq!(habit.seems_to_vary(), number > 1);
        }
        habit = habit.with_next(false);
        assert!(habit.varies());
        habit = habit.with_next(true);
        assert!(!habit.varies() && !habit.seems_to_vary());
        for _ in 0..40 {
            habit = habit.with_next(false);
        }
        assert!(habit.varies());
    }

    proptest! {
        /// Two requests have the same print only if their first bytes are the same.
        #[test]
        fn prints_differ(one: [u64; 8], other: [u64; 8], method in 0_u32..4) {
            let of = |words| print(mixed_all(0, &words), method);
            prop_assert_eq!(of(one), of(one));
            prop_assert_eq!(one == other, of(one) == of(other));
            let mut near = one;
            near[7] ^= 1;
            prop_assert_ne!(of(near), of(one));
        }

        /// A program that repeats at least half of what fails never counts as one that moves on for long,
        /// and one that never does so is known for good.
        #[test]
        fn habits(all in prop::collection::vec(any::<bool>(), 0..400)) {
            let mut habit = Habit::default();
            let mut in_a_row = 0;
            for same in all {
                habit = habit.with_retry(same);
                in_a_row = if same { in_a_row + 1 } else { 0 };
                prop_assert!(habit.moves_on <= MOVES_ON_MOST);
                prop_assert!(in_a_row < 2 || !habit.moves_on());
            }
        }

        /// What comes first tells: a line that begins with a key, or the head's end.
        #[test]
        fn any_head_is_searched(lines in prop::collection::vec(
            prop::sample::select(&["", "Idempotency-Key:", "idempotency-key: x", "key:", "a:", "a: b", "abc: xyz"][..]),
            0..60,
        )) {
            let mut request = String::from("POST / HTTP/1.1\r\n");
            for line in &lines {
                request += line;
                request += "\r\n";
            }
            let tells = |line: &&str| if line.is_empty() {
                Some(HAS_END)
            } else {
                line.to_ascii_lowercase().starts_with("idempotency-key:").then_some(HAS_KEY)
            };
            let expected = lines.iter().find_map(tells).unwrap_or(0);
            prop_assert_eq!(search(request.as_bytes()), expected);
        }

        /// Any bytes may be searched.
        #[test]
        fn any_bytes_are_searched(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            search(&bytes);
        }
    }
}
