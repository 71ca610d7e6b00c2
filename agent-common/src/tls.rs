//! What TLS record headers say. They are in the clear; nothing else of TLS is looked at.
//!
//! Runs in the kernel, and is tested and fuzzed natively. Two questions are answered here: which of
//! the records that a client sends is a request ([`sent`]), and which of those that a TLS 1.3 server
//! sends after the handshake are session tickets ([`received`]).
//!
//! **Tickets.** A TLS 1.3 server sends NewSessionTicket messages by itself once it has the client's
//! Finished: OpenSSL two (one when it resumes), each in a segment of its own; rustls two or four;
//! Java, mbedTLS and Schannel one; BoringSSL two, in one segment with the first answer; Go one, which
//! comes with the server's first flight, before any request. They look like any other encrypted
//! record, so only order and length tell:
//!
//! 1. What the server sends while nothing is owed, or before it had the request (its TCP
//!    acknowledges nothing of it), is no answer. From this the row learns the lengths of tickets and
//!    how many there are.
//! 2. Two records of equal length in a row, first of all, are tickets, where no others are known.
//! 3. A record with a known length is a ticket, as long as there were fewer on this connection than
//!    are known.
//! 4. Everything else is an answer.
//!
//! So where a row has not learned yet, a ticket may be taken for the first answer of a connection.
//! That errs on the side of healthy servers: an answer that is taken for a ticket would be a call
//! that hangs.

/// Bytes of a record header.
pub const HEADER: usize = 5;

/// Records looked at in one segment. A client's last flight has at most six (certificate, key
/// exchange, verify, change of cipher, Finished, request), a server rarely sends more than four
/// tickets.
pub const MAX_RECORDS: usize = 6;

/// Record types (RFC 8446, section 5.1).
const CHANGE_CIPHER_SPEC: u8 = 20;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;

/// Tag of the ciphers of TLS 1.3, and the byte with the inner type.
const OVERHEAD: u32 = 16 + 1;
/// An encrypted alert of TLS 1.3: level and description.
pub const ALERT: u32 = 2 + OVERHEAD;
/// An encrypted Finished of TLS 1.3: type, length (3) and a hash of 32 or 48 bytes.
const FINISHED_SHA256: u32 = 4 + 32 + OVERHEAD;
const FINISHED_SHA384: u32 = 4 + 48 + OVERHEAD;
/// Longest encrypted Finished of TLS 1.2 (CBC with SHA-384: 112), with room; a ClientHello, which a
/// HelloRetryRequest asks for once more, is longer.
const LONGEST_FINISHED12: u32 = 128;
/// Lengths that a ticket can have: type, length, lifetime, age, nonce and ticket with their lengths,
/// extensions. Longer ones (a client's whole certificate is in them) are not told.
const SHORTEST_TICKET: u32 = 33;
const LONGEST_TICKET: u32 = 0xfff;
/// More tickets than this no known server sends.
const MOST_TICKETS: u32 = 8;

/// A record's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its type.
    pub kind: u8,
    /// Bytes after the header.
    pub length: u32,
}

/// Reads a header; `None` when it is none.
#[inline(always)]
pub fn record(header: &[u8; HEADER]) -> Option<Record> {
    let is_header = header[0] >= CHANGE_CIPHER_SPEC
        && header[0] <= APPLICATION_DATA
        && header[1] == 3
        && header[2] <= 4;
    is_header.then_some(Record {
        kind: header[0],
        length: (u32::from(header[3]) << 8) | u32::from(header[4]),
    })
}

impl Record {
    /// Whether it ends the connection (close_notify and all other alerts; TLS 1.3 encrypts them, and
    /// only the length tells).
    #[inline(always)]
    pub fn is_alert(self) -> bool {
        self.kind != APPLICATION_DATA || self.length == ALERT
    }

    /// Whether it carries data of the application.
    #[inline(always)]
    pub fn is_data(self) -> bool {
        self.kind == APPLICATION_DATA && self.length != ALERT
    }
}

// --- what the client has sent

/// Hellos, certificates, keys.
pub const STAGE_HELLO: u32 = 0;
/// Its change of cipher: Finished is next.
pub const STAGE_CIPHER: u32 = 1;
/// Something encrypted that may not be all of its last flight (a client's certificate).
pub const STAGE_FLIGHT: u32 = 2;
/// TLS 1.3: its Finished. What the server sends from here on may be tickets.
pub const STAGE_FINISHED: u32 = 3;
/// TLS 1.3: its first request.
pub const STAGE_ASKED: u32 = 4;
/// All that is special is over. TLS 1.2: its Finished. TLS 1.3: its second request.
pub const STAGE_SETTLED: u32 = 5;

/// What a record of a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Sent {
    /// Nothing that is owed an answer.
    Nothing = 0,
    /// A part of the handshake that is owed one: ClientHello, or the keys of TLS 1.2.
    Handshake = 1,
    /// A request.
    Request = 2,
}

/// The next stage, and what the record is. `is_first` says that it begins a segment.
#[inline(always)]
pub fn sent(stage: u32, record: Record, is_first: bool) -> (u32, Sent) {
    let is_finished = record.length == FINISHED_SHA256 || record.length == FINISHED_SHA384;
    match (stage, record.kind) {
        (STAGE_HELLO, HANDSHAKE) => (STAGE_HELLO, Sent::Handshake),
        (STAGE_HELLO, CHANGE_CIPHER_SPEC) => (STAGE_CIPHER, Sent::Nothing),
        // Without a change of cipher: the second flight of TLS 1.3 after a HelloRetryRequest, or a
        // handshake of TLS 1.2 whose end was missed.
        (STAGE_HELLO, APPLICATION_DATA) if is_finished => (STAGE_FINISHED, Sent::Nothing),
        (STAGE_HELLO, APPLICATION_DATA) => (STAGE_SETTLED, Sent::Request),
        // TLS 1.2 encrypts its Finished as a record of the handshake.
        (STAGE_CIPHER, HANDSHAKE) if record.length <= LONGEST_FINISHED12 => {
            (STAGE_SETTLED, Sent::Nothing)
        }
        (STAGE_CIPHER, HANDSHAKE) => (STAGE_HELLO, Sent::Handshake),
        (STAGE_CIPHER | STAGE_FLIGHT, APPLICATION_DATA) if is_finished => {
            (STAGE_FINISHED, Sent::Nothing)
        }
        (STAGE_CIPHER, APPLICATION_DATA) => (STAGE_FLIGHT, Sent::Nothing),
        // The flight was one record, and this is new.
        (STAGE_FLIGHT, APPLICATION_DATA) if is_first && record.is_data() => {
            (STAGE_ASKED, Sent::Request)
        }
        (STAGE_FINISHED, APPLICATION_DATA) if record.is_data() => (STAGE_ASKED, Sent::Request),
        (STAGE_ASKED | STAGE_SETTLED, APPLICATION_DATA) if record.is_data() => {
            (STAGE_SETTLED, Sent::Request)
        }
        _ => (stage, Sent::Nothing),
    }
}

// --- what a TLS 1.3 server sends after the handshake

/// In the word of a connection: tickets so far (bits 0 to 7), then the length of the record that was
/// taken for an answer and may have been the first ticket.
const SEEN_COUNT: u32 = 0xff;
const SEEN_LENGTH_SHIFT: u32 = 8;
/// Nothing that comes can be a ticket any more.
pub const SEEN_SETTLED: u32 = 1 << 31;

/// What a record turned out to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The new word of the connection (0 at first).
    pub seen: u32,
    /// The new word of the row: two lengths of 12 bits, and how many tickets come at most.
    pub known: u32,
    /// Whether it answers what is owed.
    pub is_answer: bool,
}

/// How many tickets a row knows of at most.
#[inline(always)]
pub const fn known_count(known: u32) -> u32 {
    known >> 24
}

#[inline(always)]
const fn knows(known: u32, length: u32) -> bool {
    known_count(known) != 0 && (known & 0xfff == length || (known >> 12) & 0xfff == length)
}

#[inline(always)]
const fn learn(known: u32, length: u32, count: u32) -> u32 {
    let lengths = if knows(known, length) {
        known & 0xff_ffff
    } else {
        ((known & 0xfff) << 12) | length
    };
    let most = if count > MOST_TICKETS {
        MOST_TICKETS
    } else {
        count
    };
    let before = known_count(known);
    (if most > before { most } else { before } << 24) | lengths
}

/// Whether this step (from the word before it to the one after) shows for the first time that the
/// connection has tickets.
#[inline(always)]
pub const fn shows_tickets(before: u32, after: u32) -> bool {
    !is_certain(before) && is_certain(after)
}

#[inline(always)]
const fn is_certain(seen: u32) -> bool {
    let count = seen & SEEN_COUNT;
    let is_unsure = seen >> SEEN_LENGTH_SHIFT != 0;
    seen & SEEN_SETTLED == 0 && (count > 1 || (count == 1 && !is_unsure))
}

/// Judges a record that the server sent between the client's Finished and its second request.
/// `next_length` is that of the record after it in the segment (0: none); `is_owed` says that a
/// request had reached the server and has no answer yet.
#[inline(always)]
pub fn received(
    seen: u32,
    known: u32,
    record: Record,
    next_length: u32,
    is_owed: bool,
) -> Received {
    let tickets = seen & SEEN_COUNT;
    let unsure = (seen >> SEEN_LENGTH_SHIFT) & 0xfff;
    let length = record.length;
    let settled = |is_answer| Received {
        seen: seen | SEEN_SETTLED,
        known,
        is_answer,
    };
    let ticket = |known| Received {
        seen: tickets + 1,
        known,
        is_answer: false,
    };
    if seen & SEEN_SETTLED != 0 {
        return settled(is_owed && record.is_data());
    }
    if !record.is_data() {
        return Received {
            seen,
            known,
            is_answer: false,
        };
    }
    if !(SHORTEST_TICKET..=LONGEST_TICKET).contains(&length) || tickets >= MOST_TICKETS {
        return settled(is_owed);
    }
    if unsure != 0 {
        // After what was taken for an answer. If its like follows, both were tickets; so was one
        // with the length of a ticket that anything follows.
        if !is_owed && length == unsure {
            return Received {
                seen: seen + 1,
                known: learn(known, length, tickets + 1),
                is_answer: false,
            };
        }
        let count = if knows(known, unsure) { tickets } else { 0 };
        let known = if !is_owed && count > known_count(known) {
            learn(known, unsure, count)
        } else {
            known
        };
        return Received {
            known,
            ..settled(is_owed)
        };
    }
    if !is_owed {
        return ticket(learn(known, length, tickets + 1));
    }
    let count = known_count(known);
    let may_be = known == 0 || knows(known, length);
    if may_be && length == next_length && (tickets >= count || count == 1) {
        return ticket(learn(known, length, tickets + 2));
    }
    if knows(known, length) && tickets < count {
        return ticket(known);
    }
    if may_be {
        return Received {
            seen: (tickets + 1) | (length << SEEN_LENGTH_SHIFT),
            known,
            is_answer: true,
        };
    }
    settled(true)
}
