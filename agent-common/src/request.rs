//! Requests of HTTP/1 in the clear: whether one that was begun has been sent to its end (RFC 9112, section
//! 6). Runs in the kernel, and is tested natively.
//!
//! No answer is owed to a request that is not finished: who waits for its rest is the server. So no wait
//! counts against the destination meanwhile. Of a request of which nothing is known, each byte may be the
//! last one.

use crate::{
    http::{self, ASKS, SEARCHED, Search, is_before},
    stamp::{PROTOCOL_HTTP1, Stamp},
};

// --- what is known of the end of the last request, in `Stamp::tls_stage` beside what it asks for; the
// egress hook is the writer

/// The bits of those below.
pub const SENDS: u32 = 7 << 8;
/// Nothing: its head was not searched, or does not say.
pub const SENDS_UNKNOWN: u32 = 0;
/// It ends before the sequence number in `Stamp::syn_timeout_ticks`, after so many laps ([`LAP`]).
pub const SENDS_LENGTH: u32 = 1 << 8;
/// It comes in chunks: the head of the next one begins at the sequence number in `Stamp::syn_timeout_ticks`.
pub const SENDS_DATA: u32 = 2 << 8;
/// In the size of a chunk, of which `Stamp::syn_timeout_ticks` is what was read so far.
pub const SENDS_SIZE: u32 = 3 << 8;
/// Behind the size of a chunk, in `Stamp::syn_timeout_ticks`, before the end of its line.
pub const SENDS_LINE: u32 = 4 << 8;
/// It has a body, and where that ends cannot be told.
pub const SENDS_LOST: u32 = 5 << 8;
/// All of it was sent.
pub const SENDS_WHOLE: u32 = 6 << 8;

/// The client has sent another request before the answer: of its answers nothing is known any more. For all
/// of the connection's life.
pub const PIPELINES: u32 = 1 << 11;
/// A request with this method may have a body.
pub const HAS_BODY: u32 = 1 << 12;
/// The request is for somebody behind a proxy: a status in the answer need not speak of the proxy.
pub const ELSEWHERE: u32 = 1 << 15;

/// The request under way, or last answered, is compared byte for byte ([`crate::whole`]).
pub const COMPARED: u32 = 1 << 13;
/// Beside [`COMPARED`]: its last packet was dropped, and has not left.
pub const REFUSED: u32 = 1 << 14;

/// Sequence numbers tell what is before what only within 2 GiB, so a longer request is followed in laps of
/// so many bytes. Their number lies in `Stamp::tls_stage`.
pub const LAP: u64 = 1 << 30;
/// A lap in `Stamp::tls_stage`.
pub const ONE_LAP: u32 = 1 << 16;

/// Longest chunk that is followed, bytes.
const LONGEST_CHUNK: u32 = 1 << 31;

/// Bytes of heads of chunks that are looked at in one segment: as many as an ordinary one has at all. Where they
/// do not suffice, the end cannot be told.
pub const STEPS: u32 = 1 << 16;

/// What stays of a connection's word when another request begins.
#[inline(always)]
pub const fn asked(stage: u32, asks: u32) -> u32 {
    stage & PIPELINES | asks
}

/// The client goes on sending beside the answer.
#[inline(always)]
pub const fn asked_on(stage: u32) -> u32 {
    stage & !ASKS | http::ASKS_ON
}

/// What the head of a request says of its end: one of the `SENDS_` constants, and of which length it is up
/// to its end ([`SENDS_LENGTH`]) or up to the first chunk ([`SENDS_DATA`]), head included.
///
/// A body that is announced in a way that cannot be read has no end that can be told ([`SENDS_LOST`]): a wait
/// that is missed harms less than an upload that is ended.
#[inline(always)]
pub fn end(search: &Search, value: &Value) -> (u32, u64) {
    if search.body_at == 0 || search.body_at > search.loaded {
        return (SENDS_UNKNOWN, 0);
    }
    let body_at = u64::from(search.body_at);
    if search.coding_at != 0 {
        // Whatever length is said as well (RFC 9112, section 6.3).
        if value.is_chunked() {
            return (SENDS_DATA, body_at);
        }
    } else if search.length_at == 0 {
        return (SENDS_WHOLE, 0);
    } else if search.framings == 1 && value.is_number() {
        return (SENDS_LENGTH, body_at + value.number);
    }
    (SENDS_LOST, 0)
}

/// Longest body that is followed, bytes: as many laps as fit into `Stamp::tls_stage`, less a head.
const LONGEST: u64 = (LAP << 16) - 2 * SEARCHED as u64;

/// Bytes of the value of a header that are looked at, each in a [`Value::step`]: the digits of any length there
/// is, and spaces; some codings.
pub const VALUE: u32 = 32;

/// The value of the header that says where a request ends, as far as it was read.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Value {
    /// What it is as a number.
    number: u64,
    /// Its last eight bytes that are no spaces, in small letters.
    last: u64,
    /// Where the next byte lies.
    at: u32,
    /// One of those below.
    is: u32,
    /// 1 behind its last byte.
    ended: u32,
}

/// Nothing but spaces so far.
const IS_EMPTY: u32 = 0;
/// A number.
const IS_NUMBER: u32 = 1;
/// A number, and spaces behind it.
const IS_OVER: u32 = 2;
/// No number, or one that is too long.
const IS_TEXT: u32 = 3;

impl Value {
    /// Begins to read what matters in a head: Transfer-Encoding, else Content-Length. Where there is
    /// neither, no step is needed.
    #[inline(always)]
    pub const fn of(search: &Search) -> Self {
        let at = if search.coding_at != 0 {
            search.coding_at
        } else {
            search.length_at
        };
        Self {
            number: 0,
            last: 0,
            at,
            is: IS_EMPTY,
            ended: (at == 0) as u32,
        }
    }

    /// One byte; true when there is no more. `word` gives the words of the head.
    #[inline(always)]
    pub fn step(&mut self, word: impl Fn(u32) -> u64) -> bool {
        if self.ended != 0 {
            return true;
        }
        let byte = http::byte(&word, self.at);
        self.at += 1;
        if byte == b'\r' || byte == b'\n' {
            self.ended = 1;
            return true;
        }
        if byte == b' ' || byte == b'\t' {
            if self.is == IS_NUMBER {
                self.is = IS_OVER;
            }
            return false;
        }
        let digit = byte.wrapping_sub(b'0');
        if digit < 10 && self.is <= IS_NUMBER && self.number <= LONGEST {
            self.number = self.number * 10 + u64::from(digit);
            self.is = IS_NUMBER;
        } else {
            self.is = IS_TEXT;
        }
        // (Letters become small, and nothing else a letter.)
        self.last = self.last >> 8 | u64::from(byte | 0x20) << 56;
        false
    }

    /// Whether it is a number, with any spaces around it, that is not too long.
    #[inline(always)]
    const fn is_number(&self) -> bool {
        let is_number = self.is == IS_NUMBER || self.is == IS_OVER;
        is_number && self.ended != 0 && self.number <= LONGEST
    }

    /// Whether its last element is "chunked".
    #[inline(always)]
    const fn is_chunked(&self) -> bool {
        const CHUNKED: u64 = u64::from_le_bytes(*b"\0chunked");
        let before = self.last as u8;
        self.ended != 0 && self.last & !0xff == CHUNKED && (before == 0 || before == b',')
    }
}

/// The sequence number at which a request of this length ends for the first lap, and how many follow, as
/// they lie in `Stamp::tls_stage`.
#[inline(always)]
pub const fn laps(begin: u32, length: u64) -> (u32, u32) {
    (
        begin.wrapping_add((length & (LAP - 1)) as u32),
        (length / LAP) as u32 * ONE_LAP,
    )
}

/// What is known after a segment that ends at a sequence number, of a request whose length is known
/// ([`SENDS_LENGTH`]), and where it ends.
#[inline(always)]
pub const fn after(stage: u32, bound: u32, end: u32) -> (u32, u32) {
    if is_before(end, bound) {
        (stage, bound)
    } else if stage >= ONE_LAP {
        (stage - ONE_LAP, bound.wrapping_add(LAP as u32))
    } else if end == bound {
        (stage, bound)
    } else {
        (stage | PIPELINES, bound)
    }
}

/// Whether a request is known to be unfinished when all up to the sequence number `sent` was.
#[inline(always)]
pub const fn is_unfinished_at(stage: u32, bound: u32, sent: u32) -> bool {
    match stage & SENDS {
        SENDS_LENGTH => stage >= ONE_LAP || is_before(sent, bound),
        SENDS_DATA | SENDS_SIZE | SENDS_LINE | SENDS_LOST => true,
        _ => false,
    }
}

/// Whether the request under way, or last answered, on a connection is known to be unfinished.
pub fn is_unfinished(stamp: &Stamp) -> bool {
    stamp.protocol == PROTOCOL_HTTP1
        && is_unfinished_at(stamp.tls_stage, stamp.syn_timeout_ticks, stamp.out_end)
}

/// Where in its chunks a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Chunks {
    /// One of the `SENDS_` constants.
    pub sends: u32,
    /// The size of a chunk, as far as it was read.
    pub size: u32,
    /// Offset in the payload of what comes next.
    pub at: u32,
}

impl Chunks {
    /// Takes up what was known before a segment that begins at a sequence number, of whose payload the first
    /// `old` bytes were seen before.
    #[inline(always)]
    pub const fn before(sends: u32, bound: u32, begin: u32, old: u32) -> Self {
        let (size, at) = if sends == SENDS_DATA {
            (0, bound.wrapping_sub(begin))
        } else {
            (bound, old)
        };
        Self { sends, size, at }
    }

    /// What is known after that segment: what lies in `Stamp::syn_timeout_ticks`.
    #[inline(always)]
    pub const fn bound(&self, begin: u32) -> u32 {
        if self.sends == SENDS_DATA {
            begin.wrapping_add(self.at)
        } else {
            self.size
        }
    }

    /// One byte, which is that at `at`. (RFC 9112, section 7.1: size in hexadecimal digits, perhaps an
    /// extension, CRLF, data, CRLF. After the empty one perhaps trailers, which are not waited for.)
    #[inline(always)]
    pub fn step(&mut self, byte: u8) {
        self.at += 1;
        if self.sends == SENDS_LINE {
            if byte == b'\n' {
                self.line_ends();
            }
            return;
        }
        let digit = digit(byte);
        if digit < 16 {
            // (The first digit of a size begins it anew.)
            if self.sends == SENDS_DATA {
                self.sends = SENDS_SIZE;
                self.size = 0;
            }
            if self.size >= LONGEST_CHUNK >> 4 {
                self.sends = SENDS_LOST;
            }
            self.size = self.size << 4 | digit;
        } else if self.sends == SENDS_DATA {
            self.sends = SENDS_LOST;
        } else if byte == b'\n' {
            self.line_ends();
        } else {
            self.sends = SENDS_LINE;
        }
    }

    #[inline(always)]
    fn line_ends(&mut self) {
        if self.size == 0 {
            self.sends = SENDS_WHOLE;
        } else {
            self.sends = SENDS_DATA;
            self.at = self.at.wrapping_add(self.size + 2);
        }
    }
}

/// The value of a hexadecimal digit; 16 and more for anything else.
#[inline(always)]
const fn digit(byte: u8) -> u32 {
    let decimal = byte.wrapping_sub(b'0');
    if decimal < 10 {
        return decimal as u32;
    }
    let letter = (byte | 0x20).wrapping_sub(b'a');
    if letter < 6 { letter as u32 + 10 } else { 16 }
}
