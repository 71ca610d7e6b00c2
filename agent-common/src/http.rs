//! The heads of HTTP/1 answers in the clear: how long an answer is (RFC 9112, section 6.3), and whether it
//! asks to come again later. Runs in the kernel, and is tested natively.
//!
//! An answer that is known to be unfinished may be ended when nothing comes any more. So everything that
//! is in doubt counts as finished: a stall that is missed harms less than a connection that is ended
//! wrongly.

use crate::{
    classify,
    request::{self, ELSEWHERE, HAS_BODY, PIPELINES},
    stamp::{PROTOCOL_HTTP1, Stamp, unpack_request},
};

/// Bytes of a head that are searched at most, which are those of a request; a longer one tells nothing. A
/// power of two.
pub const SEARCHED: u32 = 2048;

/// Bytes of the head of an answer that are searched. (Cookies and tokens make those of requests longer.)
pub const ANSWER_SEARCHED: u32 = 1024;

/// Words of 8 bytes in which they lie, and those behind them that are read along.
pub const WORDS: usize = (SEARCHED / 8) as usize + 3;

/// Steps of a [`Search`] that most heads of [`SEARCHED`] bytes take: one for 8 bytes and one for each line.
/// Where they do not suffice, the head tells nothing.
pub const STEPS: u32 = SEARCHED / 8 + 40;

/// Longest answer that is followed, bytes: sequence numbers tell what is before what only within 2 GiB.
const LONGEST: u64 = (1 << 31) - (1 << 16);

// --- what a request asks for, in the lowest byte of `Stamp::tls_stage` (the rest is told in
// `crate::request`); the egress hook is the writer

/// The bits of those below.
pub const ASKS: u32 = 0xff;
/// An answer that may have a body.
pub const ASKS_BODY: u32 = 0;
/// HEAD: an answer without a body, whatever its head says.
pub const ASKS_HEAD: u32 = 1;
/// CONNECT: what follows is no HTTP.
pub const ASKS_TUNNEL: u32 = 2;
/// The client goes on sending beside the answer: it may be waited for.
pub const ASKS_ON: u32 = 3;

// --- what is known of the answer's end, in `Stamp::tls_seen`; the ingress hook is the writer

/// Nothing, or that it has come.
pub const BODY_NONE: u32 = 0;
/// It ends before the sequence number in `Stamp::tls_next`.
pub const BODY_LENGTH: u32 = 1;
/// It comes in chunks, and the last of them has not come.
pub const BODY_CHUNKED: u32 = 2;
/// It comes in chunks, and what came last may have been the end.
pub const BODY_CHUNKED_PAUSED: u32 = 3;
/// What comes is no HTTP any more, or ends with the connection: for all of its life.
pub const BODY_ENDLESS: u32 = 4;
/// The connection was handed over: neither side speaks HTTP any more, for all of its life ([`hands_over`]).
/// Known by every policy.
pub const BODY_UPGRADED: u32 = 5;

/// Whether an answer with this status line ([`crate::reply::status_line`]) hands the connection over to
/// something that is no HTTP: 101, and a good one to CONNECT (RFC 9110, sections 15.2.2 and 9.3.6). What the
/// client sends from there on begins no request, whatever it looks like.
#[inline(always)]
pub const fn hands_over(line: u64, asks: u32) -> bool {
    const HTTP_101: u64 = u64::from_le_bytes(*b"\x00101HTTP");
    const HTTP_2XX: u64 = u64::from_le_bytes(*b"\x002\0\0HTTP");
    const CLASS: u64 = u64::from_le_bytes([0xff, 0xff, 0, 0, 0xff, 0xff, 0xff, 0xff]);
    line == HTTP_101 || (asks == ASKS_TUNNEL && line & CLASS == HTTP_2XX)
}

/// What a request asks for, whether it may have a body ([`HAS_BODY`]), and whether it is for somebody behind the
/// server ([`ELSEWHERE`]), from its first bytes.
#[inline(always)]
pub fn asks(head: &[u8; classify::HEAD]) -> u32 {
    let asks = match classify::word(head) {
        // (Some send a body with GET: a query, in one go.)
        GET => ASKS_BODY,
        HEAD => ASKS_HEAD,
        CONNECT => return ASKS_TUNNEL | ELSEWHERE,
        _ => ASKS_BODY | HAS_BODY,
    };
    if is_for_proxy(head) {
        asks | ELSEWHERE
    } else {
        asks
    }
}

/// Whether the target of a request has the absolute form (RFC 9112, section 3.2.2), which begins with a scheme,
/// and so with a letter: what a proxy is sent. The other forms begin with `/` or `*`.
#[inline(always)]
fn is_for_proxy(head: &[u8; classify::HEAD]) -> bool {
    // The space behind the method: from GET to PROPPATCH.
    let mut at = 3;
    while at <= 9 {
        if head[at] == b' ' {
            return head[at + 1].is_ascii_alphabetic();
        }
        at += 1;
    }
    false
}

const GET: u32 = u32::from_ne_bytes(*b"GET ");
const HEAD: u32 = u32::from_ne_bytes(*b"HEAD");
const CONNECT: u32 = u32::from_ne_bytes(*b"CONN");

/// What of a head matters, and where it lies: offsets from the head's first byte, 0: not there.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Search {
    /// Bytes that are at hand, at most [`SEARCHED`].
    pub(crate) loaded: u32,
    /// What is to be looked at next.
    at: u32,
    /// The value of Content-Length.
    pub(crate) length_at: u32,
    /// The value of Transfer-Encoding.
    pub(crate) coding_at: u32,
    /// The value of Content-Type.
    type_at: u32,
    /// The value of Retry-After.
    retry_at: u32,
    /// How many of the first two there are.
    pub(crate) framings: u32,
    /// The body.
    pub(crate) body_at: u32,
}

impl Search {
    /// A search that begins at the first of so many bytes, at most [`SEARCHED`].
    #[inline(always)]
    pub const fn new(loaded: u32) -> Self {
        Self {
            loaded,
            at: 0,
            length_at: 0,
            coding_at: 0,
            type_at: 0,
            retry_at: 0,
            framings: 0,
            body_at: 0,
        }
    }

    /// One step; true when the search is over. `word` gives the words of the head, in the order of the
    /// machine (which is little-endian), for indexes below [`WORDS`].
    #[inline(always)]
    pub fn step(&mut self, word: impl Fn(u32) -> u64) -> bool {
        let mut at = self.at;
        if at >= self.loaded {
            return true;
        }
        let ends = line_ends(two(&word, at).0);
        if ends == 0 {
            self.at = at + 8;
            return false;
        }
        at += place(ends) + 1;
        self.at = at;
        let (first, second) = two(&word, at);
        if first as u8 == b'\n' || first as u16 == u16::from_le_bytes(*b"\r\n") {
            self.body_at = at + if first as u8 == b'\n' { 1 } else { 2 };
            return true;
        }
        let (first, second) = (first | SMALL, second | SMALL);
        if first == CONTENT {
            if second & FIRST_7 == LENGTH {
                self.length_at = at + 15;
                self.framings += 1;
            } else if second & FIRST_5 == TYPE {
                self.type_at = at + 13;
            }
        } else if first == TRANSFER && second == ENCODING {
            self.coding_at = at + 18;
            self.framings += 1;
        } else if first == RETRY && second & FIRST_4 == AFTER {
            self.retry_at = at + 12;
        }
        false
    }

    /// Length of the head with the empty line at its end; 0: it is not at hand.
    #[inline(always)]
    pub const fn head(&self) -> u32 {
        self.body_at
    }

    /// Whether the head has Retry-After.
    #[inline(always)]
    pub const fn has_retry_after(&self) -> bool {
        self.retry_at != 0
    }

    /// What the head says of the answer's end: one of the `BODY_` constants, and the length of head and
    /// body together where it says one. With `chunked`, answers in chunks are told from those of which
    /// nothing is known. `word` is that of the steps.
    #[inline(always)]
    pub fn body(&self, word: impl Fn(u32) -> u64, asks: u32, chunked: bool) -> (u32, u32) {
        const NOTHING: (u32, u32) = (BODY_NONE, 0);
        const ENDLESS: (u32, u32) = (BODY_ENDLESS, 0);
        if asks == ASKS_TUNNEL {
            return ENDLESS;
        }
        let (version, status) = two(&word, 0);
        if version & FIRST_7 != HTTP || status as u8 != b' ' {
            return NOTHING;
        }
        match (status >> 8) as u32 & 0x00ff_ffff {
            SWITCHING => return ENDLESS,
            NO_CONTENT | NOT_MODIFIED => return NOTHING,
            // Not the answer yet.
            status if status as u8 == b'1' => return NOTHING,
            _ => {}
        }
        if asks == ASKS_HEAD || self.body_at == 0 || self.body_at > self.loaded || self.framings > 1
        {
            return NOTHING;
        }
        if self.length_at != 0 {
            let length = number(&word, self.length_at);
            return if length < LONGEST {
                (BODY_LENGTH, self.body_at + length as u32)
            } else {
                NOTHING
            };
        }
        if self.coding_at == 0 {
            // It ends with the connection.
            return ENDLESS;
        }
        let is_chunked = is_chunked(&word, self.coding_at);
        let (kind, _) = value(&word, self.type_at);
        let is_event_stream = self.type_at != 0 && kind | SMALL == EVENTS;
        if chunked && is_chunked && !is_event_stream {
            (BODY_CHUNKED, self.body_at)
        } else {
            NOTHING
        }
    }
}

/// Whether a Transfer-Encoding is "chunked", and no more.
#[inline(always)]
fn is_chunked(word: &impl Fn(u32) -> u64, at: u32) -> bool {
    let (coding, _) = value(word, at);
    coding & FIRST_7 | SMALL & FIRST_7 == CHUNKED && is_line_end(coding >> 56)
}

/// What an answer in chunks is after a segment with these last five bytes. The last chunk is an empty
/// one, perhaps with trailers behind it (RFC 9112, section 7.1), so the answer ends with an empty line;
/// not every empty line is its end.
#[inline(always)]
pub fn chunked_after(last: [u8; 5]) -> u32 {
    let [last, line @ ..] = last;
    if u32::from_ne_bytes(line) != u32::from_ne_bytes(*b"\r\n\r\n") {
        BODY_CHUNKED
    } else if last == b'0' {
        BODY_NONE
    } else {
        BODY_CHUNKED_PAUSED
    }
}

/// What is known of an answer that has begun and not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfinished {
    /// Its length, and that not all of it has come.
    Length,
    /// That its last chunk has not come.
    Chunked,
}

/// The answer that comes in on a connection, if it is known to be unfinished. A copy of a stamp that is
/// being written may say so wrongly: who acts on it looks again when nothing has come for a while.
pub fn unfinished(stamp: &Stamp) -> Option<Unfinished> {
    let (number, _) = unpack_request(stamp.request);
    if stamp.protocol != PROTOCOL_HTTP1
        || number == 0
        // Another request was sent: a client that does so takes the answer for finished.
        || stamp.owed().is_some()
        || stamp.tls_stage & ASKS == ASKS_ON
        // It need not be the answer to that request.
        || stamp.tls_stage & PIPELINES != 0
        // The server may wait for the rest of it.
        || request::is_unfinished(stamp)
    {
        return None;
    }
    match stamp.tls_seen {
        BODY_LENGTH if is_before(stamp.in_end, stamp.tls_next) => Some(Unfinished::Length),
        BODY_CHUNKED => Some(Unfinished::Chunked),
        _ => None,
    }
}

/// Whether a sequence number comes before another one.
#[inline(always)]
pub const fn is_before(this: u32, other: u32) -> bool {
    (this.wrapping_sub(other) as i32) < 0
}

/// Makes capitals small, in each byte; `-` and `:` stay what they are.
const SMALL: u64 = 0x2020_2020_2020_2020;
const FIRST_7: u64 = 0x00ff_ffff_ffff_ffff;
const FIRST_5: u64 = 0x00ff_ffff_ffff;
const FIRST_4: u64 = 0xffff_ffff;
const CONTENT: u64 = u64::from_le_bytes(*b"content-");
const LENGTH: u64 = u64::from_le_bytes(*b"length:\0");
const TYPE: u64 = u64::from_le_bytes(*b"type:\0\0\0");
const TRANSFER: u64 = u64::from_le_bytes(*b"transfer");
const ENCODING: u64 = u64::from_le_bytes(*b"-encodin");
const RETRY: u64 = u64::from_le_bytes(*b"retry-af");
const AFTER: u64 = u64::from_le_bytes(*b"ter:\0\0\0\0");
const CHUNKED: u64 = u64::from_le_bytes(*b"chunked\0");
const EVENTS: u64 = u64::from_le_bytes(*b"text/eve");
const HTTP: u64 = u64::from_le_bytes(*b"HTTP/1.\0");
const SWITCHING: u32 = u32::from_le_bytes(*b"101\0");
const NO_CONTENT: u32 = u32::from_le_bytes(*b"204\0");
const NOT_MODIFIED: u32 = u32::from_le_bytes(*b"304\0");

/// The 16 bytes at an offset.
#[inline(always)]
fn two(word: &impl Fn(u32) -> u64, at: u32) -> (u64, u64) {
    let index = (at / 8) & (SEARCHED / 8 - 1);
    let (first, second, third) = (word(index), word(index + 1), word(index + 2));
    let shift = at % 8 * 8;
    // (In two steps: a shift by 64 is none.)
    let join = |low: u64, high: u64| (low >> shift) | (high << 1 << (63 - shift));
    (join(first, second), join(second, third))
}

/// The byte at an offset.
#[inline(always)]
pub(crate) fn byte(word: &impl Fn(u32) -> u64, at: u32) -> u8 {
    (word((at / 8) & (SEARCHED / 8 - 1)) >> (at % 8 * 8)) as u8
}

/// The 16 bytes of a header's value, without a space before them.
#[inline(always)]
fn value(word: &impl Fn(u32) -> u64, at: u32) -> (u64, u64) {
    let (first, second) = two(word, at);
    if matches!(first as u8, b' ' | b'\t') {
        next(first, second)
    } else {
        (first, second)
    }
}

/// The bytes after the first one.
#[inline(always)]
fn next(first: u64, second: u64) -> (u64, u64) {
    ((first >> 8) | (second << 56), second >> 8)
}

/// The number that a header's value is; [`u64::MAX`] for anything else, and for more than ten digits.
#[inline(always)]
fn number(word: &impl Fn(u32) -> u64, at: u32) -> u64 {
    const DIGITS: u32 = 10;
    let (mut first, mut second) = value(word, at);
    let mut number = 0;
    for digits in 0..=DIGITS {
        let digit = (first & 0xff).wrapping_sub(u64::from(b'0'));
        if digit > 9 {
            return if digits > 0 && is_line_end(first & 0xff) {
                number
            } else {
                u64::MAX
            };
        }
        number = number * 10 + digit;
        (first, second) = next(first, second);
    }
    u64::MAX
}

#[inline(always)]
fn is_line_end(byte: u64) -> bool {
    byte == u64::from(b'\r') || byte == u64::from(b'\n')
}

/// The highest bit of bytes that are a line feed. Of those after the first one, some may be wrong.
#[inline(always)]
fn line_ends(word: u64) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    let zero = word ^ (ONES * b'\n' as u64);
    zero.wrapping_sub(ONES) & !zero & (ONES << 7)
}

/// Which byte the lowest bit is in, of a word in which only the highest bits of bytes are set.
#[inline(always)]
fn place(bits: u64) -> u32 {
    let lowest = (bits & bits.wrapping_neg()) >> 7;
    // The kernel's targets have no instruction that counts zeros.
    (lowest.wrapping_mul(0x0001_0203_0405_0607) >> 56) as u32
}
