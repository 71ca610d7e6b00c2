//! What the first bytes of a payload say. Runs in the kernel, and is tested and fuzzed natively.
//!
//! Nothing here needs more than [`HEAD`] bytes, and nothing looks inside encrypted data.

use crate::stamp::{
    PROTOCOL_AMQP, PROTOCOL_HTTP1, PROTOCOL_MULTIPLEXED, PROTOCOL_OPAQUE, PROTOCOL_TLS,
    PROTOCOL_TUNNEL, PROTOCOL_UNKNOWN,
};

/// Bytes of a payload that are looked at.
pub const HEAD: usize = 24;

/// Of the protocols up to this number an answer's first bytes may tell its status.
pub const LAST_WITH_STATUS: u32 = PROTOCOL_HTTP1;

/// TLS record types (RFC 8446, section 5.1).
const TLS_CHANGE_CIPHER_SPEC: u8 = 20;
const TLS_HANDSHAKE: u8 = 22;
const TLS_APPLICATION_DATA: u8 = 23;

/// What an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Answer {
    /// An answer.
    Plain = 0,
    /// Not the answer yet: HTTP 100, 103 and kin.
    Interim = 1,
    /// An answer that says that the server failed.
    Failed = 2,
}

/// Whether the bytes are a TLS record header of this major version.
#[inline(always)]
fn is_tls_record(head: &[u8; HEAD]) -> bool {
    (head[0] >= TLS_CHANGE_CIPHER_SPEC && head[0] <= TLS_APPLICATION_DATA)
        && head[1] == 3
        && head[2] <= 4
}

/// The protocol from the first payload bytes that a client sends (`length` of them are real, the
/// rest is zero).
#[inline(always)]
pub fn protocol(head: &[u8; HEAD], length: usize) -> u32 {
    if length >= 5 && head[0] == TLS_HANDSHAKE && is_tls_record(head) {
        return PROTOCOL_TLS;
    }
    // HTTP/2 (RFC 9113, section 3.4) and AMQP begin with a preface.
    if starts(head, b"PRI * HT") {
        return PROTOCOL_MULTIPLEXED;
    }
    if word(head) == u32::from_ne_bytes(*b"AMQP") {
        return PROTOCOL_AMQP;
    }
    if word(head) == u32::from_ne_bytes(*b"CONN") {
        return PROTOCOL_TUNNEL;
    }
    if is_http_method(head) {
        return PROTOCOL_HTTP1;
    }
    PROTOCOL_OPAQUE
}

/// Longest TLS record (RFC 8446, section 5.2; 2,048 of overhead in TLS 1.2).
const TLS_RECORD_MOST: u32 = (1 << 14) + 2048;

/// The protocol from a payload of `length` bytes that a client sends in the middle of a connection's
/// life; [`PROTOCOL_UNKNOWN`] when the bytes do not certainly begin a message.
///
/// As far as can be told: a segment in the middle of an upload looks like this only by chance.
#[inline(always)]
pub fn mid_stream(head: &[u8; HEAD], length: u32) -> u32 {
    let long = |a: u8, b: u8, c: u8, d: u8| u32::from_be_bytes([a, b, c, d]);
    if length < 5 {
        return PROTOCOL_UNKNOWN;
    }
    let record = long(0, 0, head[3], head[4]);
    if is_tls_record(head) && record != 0 && record <= TLS_RECORD_MOST {
        return PROTOCOL_TLS;
    }
    if word(head) == u32::from_ne_bytes(*b"CONN") {
        return PROTOCOL_TUNNEL;
    }
    if is_http_method(head) {
        return PROTOCOL_HTTP1;
    }
    // Redis: an array of some elements.
    if head[0] == b'*' && head[1].is_ascii_digit() && (head[2] == b'\r' || head[3] == b'\r') {
        return PROTOCOL_OPAQUE;
    }
    // MySQL: a command is the first packet of its exchange, and nearly always alone.
    if head[3] == 0 && long(0, head[2], head[1], head[0]) == length - 4 {
        return PROTOCOL_OPAQUE;
    }
    if is_amqp_frame(head, length) {
        return PROTOCOL_AMQP;
    }
    if is_http2_frame(head, length) {
        return PROTOCOL_MULTIPLEXED;
    }
    // PostgreSQL: Query, Parse, Bind, Execute, Describe, Close, Function call.
    let message = long(head[1], head[2], head[3], head[4]);
    if matches!(head[0], b'Q' | b'P' | b'B' | b'E' | b'D' | b'C' | b'F')
        && message >= 4
        && message < length
    {
        return PROTOCOL_OPAQUE;
    }
    PROTOCOL_UNKNOWN
}

/// A whole AMQP frame: 0-9-1 (type, channel, size), or 1.0 (size, offset of the data, type).
#[inline(always)]
fn is_amqp_frame(head: &[u8; HEAD], length: u32) -> bool {
    // Of a payload of less than 12 bytes five are at hand: a heartbeat.
    if length == 8 {
        return (head[0] == 8 && head[1] | head[2] | head[3] | head[4] == 0)
            || (word(head) == u32::from_ne_bytes([0, 0, 0, 8]) && head[4] == 2);
    }
    let size = u32::from_be_bytes([head[3], head[4], head[5], head[6]]);
    if length >= 12 && matches!(head[0], 1..=3) && size != 0 && size <= length - 8 {
        return true;
    }
    let size = u32::from_be_bytes([head[0], head[1], head[2], head[3]]);
    length >= 12 && size >= 12 && size <= length && head[4] == 2 && head[5] <= 1
}

/// A whole HTTP/2 frame (RFC 9113, section 4.1) such as a client sends.
#[inline(always)]
fn is_http2_frame(head: &[u8; HEAD], length: u32) -> bool {
    let size = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    if length < 9 || size > length - 9 {
        return false;
    }
    // Of nine bytes five are at hand: that is the answer to SETTINGS.
    let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
    match head[3] {
        0 | 1 => size != 0 && stream % 2 == 1 && stream >> 31 == 0,
        3 | 8 => size == 4,
        4 => size.is_multiple_of(6) && stream == 0,
        6 => size == 8 && stream == 0,
        7 => size >= 8 && stream == 0,
        _ => false,
    }
}

#[inline(always)]
fn starts(head: &[u8; HEAD], with: &[u8; 8]) -> bool {
    u64::from_ne_bytes([
        head[0], head[1], head[2], head[3], head[4], head[5], head[6], head[7],
    ]) == u64::from_ne_bytes(*with)
}

#[inline(always)]
fn word(head: &[u8; HEAD]) -> u32 {
    u32::from_ne_bytes([head[0], head[1], head[2], head[3]])
}

#[inline(always)]
fn is_http_method(head: &[u8; HEAD]) -> bool {
    let first = word(head);
    first == u32::from_ne_bytes(*b"GET ")
        || first == u32::from_ne_bytes(*b"POST")
        || first == u32::from_ne_bytes(*b"PUT ")
        || first == u32::from_ne_bytes(*b"HEAD")
        || first == u32::from_ne_bytes(*b"DELE")
        || first == u32::from_ne_bytes(*b"PATC")
        || first == u32::from_ne_bytes(*b"OPTI")
        || first == u32::from_ne_bytes(*b"TRAC")
}

/// Whether a payload on an HTTP/1 connection can begin a request: any method is in capitals. The
/// rest of an upload that was answered already, or a frame of an upgraded connection, is not.
#[inline(always)]
pub fn begins_http_request(head: &[u8; HEAD]) -> bool {
    head[0].is_ascii_uppercase() && head[1].is_ascii_uppercase() && head[2].is_ascii_uppercase()
}

/// Bytes of a farewell.
pub const FAREWELL: usize = 5;

/// Whether a payload of [`FAREWELL`] bytes says goodbye, which is owed no answer but the end:
/// PostgreSQL's Terminate, MySQL's COM_QUIT.
#[inline(always)]
pub fn is_farewell(head: &[u8; HEAD]) -> bool {
    (head[0] == b'X' && word(head) == u32::from_ne_bytes(*b"X\0\0\0") && head[4] == 4)
        || (word(head) == u32::from_ne_bytes([1, 0, 0, 0]) && head[4] == 1)
}

/// Whether a payload on a multiplexed connection can ask for something. HTTP/2 frames that keep
/// the connection itself (RFC 9113, section 6: type 3 RST_STREAM, 4 SETTINGS, 6 PING, 7 GOAWAY,
/// 8 WINDOW_UPDATE) ask for nothing that is owed.
#[inline(always)]
pub fn begins_stream(head: &[u8; HEAD]) -> bool {
    !matches!(head[3], 3 | 4 | 6 | 7 | 8)
}

/// Bytes of a TLS 1.3 record with an alert in it: header, level and description, inner type, tag.
const TLS13_ALERT: u32 = 5 + 2 + 1 + 16;

/// Whether a payload on an AMQP connection can ask for something: a heartbeat (frame type 8; an
/// empty frame in AMQP 1.0, whose size is 8) does not.
#[inline(always)]
pub fn begins_amqp(head: &[u8; HEAD]) -> bool {
    let empty = word(head) == u32::from_ne_bytes([0, 0, 0, 8]);
    head[0] != 8 && !empty
}

/// Whether a TLS payload of `length` bytes that a client sends asks for no answer of the
/// application: it belongs to the handshake, or is an alert that ends the connection (close_notify;
/// TLS 1.3 encrypts it, and only its length tells).
#[inline(always)]
pub fn is_tls_control(head: &[u8; HEAD], length: u32) -> bool {
    is_tls_record(head)
        && (head[0] != TLS_APPLICATION_DATA
            || (length == TLS13_ALERT && head[3] == 0 && head[4] == (TLS13_ALERT - 5) as u8))
}

/// What the first bytes of an answer say (zero beyond its end).
#[inline(always)]
pub fn answer(head: &[u8; HEAD], protocol: u32) -> Answer {
    if protocol == PROTOCOL_HTTP1 {
        return http(head);
    }
    if protocol == PROTOCOL_OPAQUE && (redis_failed(head) || postgres_failed(head)) {
        return Answer::Failed;
    }
    Answer::Plain
}

/// Redis: errors that speak of the server, not of the command (`-BUSYKEY`, `-BUSYGROUP`).
#[inline(always)]
fn redis_failed(head: &[u8; HEAD]) -> bool {
    let first = word(head);
    first == u32::from_ne_bytes(*b"-LOA")
        || (first == u32::from_ne_bytes(*b"-BUS") && head[4] == b'Y' && head[5] == b' ')
        || first == u32::from_ne_bytes(*b"-MAS")
        || first == u32::from_ne_bytes(*b"-CLU")
}

/// PostgreSQL: an ErrorResponse of severity FATAL whose SQLSTATE is of class 57 (operator
/// intervention: starting up, shutting down) or 53 (insufficient resources: too many connections).
/// Fields: S, V (since protocol 3 of 9.6), C.
#[inline(always)]
fn postgres_failed(head: &[u8; HEAD]) -> bool {
    if head[0] != b'E' || head[5] != b'S' || head[6] != b'F' || head[7] != b'A' || head[8] != b'T' {
        return false;
    }
    let (first, second) = if head[12] == b'C' {
        (head[13], head[14])
    } else if head[19] == b'C' {
        (head[20], head[21])
    } else {
        return false;
    };
    first == b'5' && (second == b'7' || second == b'3')
}

/// `HTTP/1.x NNN`.
#[inline(always)]
fn http(head: &[u8; HEAD]) -> Answer {
    if word(head) != u32::from_ne_bytes(*b"HTTP") || head[4] != b'/' || head[8] != b' ' {
        return Answer::Plain;
    }
    match head[9] {
        // 101 hands the connection over: that is the answer.
        b'1' if !(head[10] == b'0' && head[11] == b'1') => Answer::Interim,
        b'5' => Answer::Failed,
        _ => Answer::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn head(text: &[u8]) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        let length = text.len().min(HEAD);
        head[..length].copy_from_slice(&text[..length]);
        head
    }

    #[test]
    fn protocols() {
        for (bytes, wanted) in [
            (&b"GET / HTTP/1.1\r\n"[..], PROTOCOL_HTTP1),
            (b"POST /x HTTP/1.1", PROTOCOL_HTTP1),
            (b"CONNECT a:443 HT", PROTOCOL_TUNNEL),
            (b"PRI * HTTP/2.0\r\n", PROTOCOL_MULTIPLEXED),
            (b"AMQP\0\0\x09\x01", PROTOCOL_AMQP),
            (b"\x16\x03\x01\x02\x00\x01", PROTOCOL_TLS),
            (b"*1\r\n$4\r\nPING\r\n", PROTOCOL_OPAQUE),
            (b"\x16", PROTOCOL_OPAQUE),
            (b"", PROTOCOL_OPAQUE),
        ] {
            assert_eq!(protocol(&head(bytes), bytes.len()), wanted, "{bytes:?}");
        }
    }

    #[test]
    fn answers() {
        for (bytes, of, wanted) in [
            (&b"HTTP/1.1 200 OK\r\n"[..], PROTOCOL_HTTP1, Answer::Plain),
            (b"HTTP/1.1 404 No", PROTOCOL_HTTP1, Answer::Plain),
            (b"HTTP/1.0 503 Se", PROTOCOL_HTTP1, Answer::Failed),
            (b"HTTP/1.1 100 Co", PROTOCOL_HTTP1, Answer::Interim),
            (b"HTTP/1.1 103 Ea", PROTOCOL_HTTP1, Answer::Interim),
            (b"HTTP/1.1 101 Sw", PROTOCOL_HTTP1, Answer::Plain),
            (b"HTTP/1.1 503 Se", PROTOCOL_TLS, Answer::Plain),
            (b"-LOADING Redis ", PROTOCOL_OPAQUE, Answer::Failed),
            (b"-ERR unknown co", PROTOCOL_OPAQUE, Answer::Plain),
            (b"-BUSY Redis is busy", PROTOCOL_OPAQUE, Answer::Failed),
            (b"-BUSYGROUP Consumer", PROTOCOL_OPAQUE, Answer::Plain),
            (b"HTTP/1.1 503\r\n", PROTOCOL_HTTP1, Answer::Failed),
            (b"HTTP/1.1 503 Se", PROTOCOL_TUNNEL, Answer::Plain),
            (
                b"E\0\0\0\x60SFATAL\0VFATAL\0C57P03\0",
                PROTOCOL_OPAQUE,
                Answer::Failed,
            ),
            (
                b"E\0\0\0\x60SFATAL\0C53300\0M",
                PROTOCOL_OPAQUE,
                Answer::Failed,
            ),
            (
                b"E\0\0\0\x60SFATAL\0VFATAL\0C28P01\0",
                PROTOCOL_OPAQUE,
                Answer::Plain,
            ),
            (
                b"E\0\0\0\x60SERROR\0VERROR\0C57014\0",
                PROTOCOL_OPAQUE,
                Answer::Plain,
            ),
        ] {
            assert_eq!(answer(&head(bytes), of), wanted, "{bytes:?}");
        }
    }

    #[test]
    fn heartbeats() {
        assert!(!begins_amqp(&head(b"\x08\0\0\0\0\0\0\xce")));
        assert!(!begins_amqp(&head(b"\0\0\0\x08\x02\0\0\0")));
        assert!(begins_amqp(&head(b"\x01\0\x01\0\0\0\x0d")));
        assert!(!begins_stream(&head(b"\0\0\x08\x06\x01\0\0\0\0")));
        assert!(begins_stream(&head(b"\0\0\x20\x01\x05\0\0\0\x01")));
    }

    #[test]
    fn in_the_middle_of_a_stream() {
        for (bytes, wanted) in [
            (&b"GET / HTTP/1.1\r\n"[..], PROTOCOL_HTTP1),
            (b"CONNECT a:443 HTTP/1.1\r\n", PROTOCOL_TUNNEL),
            (b"\x17\x03\x03\x00\x13...................", PROTOCOL_TLS),
            (b"\x15\x03\x03\x00\x02..", PROTOCOL_TLS),
            (b"\x17\x03\x03\xff\x13..", PROTOCOL_UNKNOWN),
            (b"*1\r\n$4\r\nPING\r\n", PROTOCOL_OPAQUE),
            (b"*12\r\n$4\r\nMSET\r\n", PROTOCOL_OPAQUE),
            (b"\x09\0\0\0\x03SELECT 1", PROTOCOL_OPAQUE),
            (b"Q\0\0\0\x0dSELECT 1\0", PROTOCOL_OPAQUE),
            (b"Q\0\0\xff\x0dSELECT 1\0", PROTOCOL_UNKNOWN),
            (b"\x08\0\0\0\0\0\0\xce", PROTOCOL_AMQP),
            (b"\0\0\0\x08\x02\0\0\0", PROTOCOL_AMQP),
            (b"\x01\0\x01\0\0\0\x05\0\x14\0\x0a\0\xce", PROTOCOL_AMQP),
            (b"\0\0\0\x04\x01\0\0\0\0", PROTOCOL_MULTIPLEXED),
            (b"\0\0\x04\x08\0\0\0\0\0\0\0\x01\0", PROTOCOL_MULTIPLEXED),
            (b"\0\0\x08\x06\x01\0\0\0\0........", PROTOCOL_MULTIPLEXED),
            (b"\0\0\x03\x01\x05\0\0\0\x07...", PROTOCOL_MULTIPLEXED),
            (b"\0\0\xff\x01\x05\0\0\0\x07...", PROTOCOL_UNKNOWN),
            (b"the middle of an upload", PROTOCOL_UNKNOWN),
            (b"0123456789abcdef", PROTOCOL_UNKNOWN),
            (b"x", PROTOCOL_UNKNOWN),
            (b"", PROTOCOL_UNKNOWN),
        ] {
            // As much as the hook loads.
            let loaded = match bytes.len() {
                24.. => 24,
                12.. => 12,
                5.. => 5,
                length => length,
            };
            let head = head(&bytes[..loaded]);
            assert_eq!(mid_stream(&head, bytes.len() as u32), wanted, "{bytes:?}");
        }
    }

    #[test]
    fn farewells() {
        assert!(is_farewell(&head(b"X\0\0\0\x04")));
        assert!(is_farewell(&head(b"\x01\0\0\0\x01")));
        assert!(!is_farewell(&head(b"Q\0\0\0\x04")));
        assert!(!is_farewell(&head(b"PING\r")));
    }

    #[test]
    fn handshakes() {
        assert!(is_tls_control(&head(b"\x14\x03\x03\x00\x01\x01\x17"), 80));
        assert!(is_tls_control(&head(b"\x15\x03\x03\x00\x02"), 7));
        assert!(!is_tls_control(&head(b"\x17\x03\x03\x00\x50"), 85));
        assert!(is_tls_control(&head(b"\x17\x03\x03\x00\x13"), 24));
        assert!(!is_tls_control(&head(b"\x17\x03\x03\x00\x13"), 1000));
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes: [u8; HEAD], length in 0usize..HEAD, of in 0u32..6) {
            let _ = (protocol(&bytes, length), answer(&bytes, of), is_tls_control(&bytes, length as u32), mid_stream(&bytes, length as u32));
        }
    }
}
