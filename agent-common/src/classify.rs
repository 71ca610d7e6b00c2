//! What the first bytes of a payload say: which protocol it is, and what a client asks for ([`crate::reply`]: what
//! a server answers). Runs in the kernel, and is tested and fuzzed natively.
//!
//! Nothing here needs more than [`HEAD`] bytes, and nothing looks inside encrypted data.

use crate::{
    broker,
    stamp::{
        PROTOCOL_AMQP, PROTOCOL_HTTP1, PROTOCOL_MQTT, PROTOCOL_MULTIPLEXED, PROTOCOL_NATS,
        PROTOCOL_OPAQUE, PROTOCOL_SSH, PROTOCOL_TLS, PROTOCOL_TUNNEL, PROTOCOL_UNKNOWN,
    },
    tls,
};

/// Bytes of a payload that are looked at.
pub const HEAD: usize = 24;

/// The protocol from the first payload bytes that a client sends (`length` of them are real, the
/// rest is zero).
#[inline(always)]
pub fn protocol(head: &[u8; HEAD], length: usize) -> u32 {
    if length >= tls::HEADER && is_tls_handshake(head) {
        return PROTOCOL_TLS;
    }
    // HTTP/2 (RFC 9113, section 3.4) and AMQP begin with a preface.
    if starts(head, b"PRI * HT") {
        return PROTOCOL_MULTIPLEXED;
    }
    if word(head) == u32::from_ne_bytes(*b"AMQP") {
        return PROTOCOL_AMQP;
    }
    if let Some(protocol) = broker::protocol(head) {
        return protocol;
    }
    if word(head) == u32::from_ne_bytes(*b"CONN") {
        return PROTOCOL_TUNNEL;
    }
    if is_http_method(head) {
        return PROTOCOL_HTTP1;
    }
    if word(head) == u32::from_ne_bytes(*b"SSH-") {
        return PROTOCOL_SSH;
    }
    PROTOCOL_OPAQUE
}

/// Longest TLS record (RFC 8446, section 5.2; 2,048 of overhead in TLS 1.2).
const TLS_RECORD_MOST: u32 = (1 << 14) + 2048;

/// The protocol from a payload that a client sends in the middle of a connection's life;
/// [`PROTOCOL_UNKNOWN`] when the bytes do not certainly begin a message. `look` gives the first bytes, and the
/// length of all; each question looks anew, for the verifier would take what it learns of them into all that
/// follow.
///
/// As far as can be told: a segment in the middle of an upload looks like this only by chance.
#[inline(always)]
pub fn mid_stream(look: impl Fn() -> ([u8; HEAD], u32)) -> u32 {
    if ask(&look, broker::is_mqtt_packet) {
        PROTOCOL_MQTT
    } else if look().1 < 5 {
        PROTOCOL_UNKNOWN
    } else if ask(&look, broker::is_nats_message) {
        PROTOCOL_NATS
    } else if ask(&look, is_tls_record) {
        PROTOCOL_TLS
    } else if ask(&look, |head, _| word(head) == u32::from_ne_bytes(*b"CONN")) {
        PROTOCOL_TUNNEL
    } else if ask(&look, |head, _| is_http_method(head)) {
        PROTOCOL_HTTP1
    } else if ask(&look, is_redis_array) || ask(&look, is_mysql_command) {
        PROTOCOL_OPAQUE
    } else if ask(&look, is_amqp_frame) {
        PROTOCOL_AMQP
    } else if ask(&look, is_http2_frame) {
        PROTOCOL_MULTIPLEXED
    } else if ask(&look, is_postgres_message) {
        PROTOCOL_OPAQUE
    } else {
        PROTOCOL_UNKNOWN
    }
}

/// Puts one question.
#[inline(always)]
fn ask(look: &impl Fn() -> ([u8; HEAD], u32), question: impl Fn(&[u8; HEAD], u32) -> bool) -> bool {
    let (head, length) = look();
    question(&head, length)
}

/// A TLS record that is not too long.
#[inline(always)]
fn is_tls_record(head: &[u8; HEAD], _: u32) -> bool {
    tls_record(head).is_some_and(|record| (1..=TLS_RECORD_MOST).contains(&record.length))
}

/// Redis: an array of some elements.
#[inline(always)]
pub(crate) fn is_redis_array(head: &[u8; HEAD], _: u32) -> bool {
    head[0] == b'*' && head[1].is_ascii_digit() && (head[2] == b'\r' || head[3] == b'\r')
}

/// MySQL: a command is the first packet of its exchange, and nearly always alone.
#[inline(always)]
fn is_mysql_command(head: &[u8; HEAD], length: u32) -> bool {
    u32::from_le_bytes([head[0], head[1], head[2], head[3]]) == length - 4
}

/// PostgreSQL: Query, Parse, Bind, Execute, Describe, Close, Function call.
#[inline(always)]
fn is_postgres_message(head: &[u8; HEAD], length: u32) -> bool {
    let message = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    matches!(head[0], b'Q' | b'P' | b'B' | b'E' | b'D' | b'C' | b'F')
        && message >= 4
        && message < length
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
pub(crate) fn word(head: &[u8; HEAD]) -> u32 {
    u32::from_ne_bytes([head[0], head[1], head[2], head[3]])
}

/// Whether a payload begins with one of the usual methods of HTTP/1, WebDAV's with a body among them
/// (PROPFIND, PROPPATCH, REPORT).
#[inline(always)]
pub fn is_http_method(head: &[u8; HEAD]) -> bool {
    let first = word(head);
    first == u32::from_ne_bytes(*b"GET ")
        || first == u32::from_ne_bytes(*b"POST")
        || first == u32::from_ne_bytes(*b"PUT ")
        || first == u32::from_ne_bytes(*b"HEAD")
        || first == u32::from_ne_bytes(*b"DELE")
        || first == u32::from_ne_bytes(*b"PATC")
        || first == u32::from_ne_bytes(*b"OPTI")
        || first == u32::from_ne_bytes(*b"TRAC")
        || is_webdav_method(head)
}

/// Whether a payload begins with a method of WebDAV (RFC 4918, 3253 and 5323). They are rarer, so that more of
/// them must fit.
#[inline(always)]
fn is_webdav_method(head: &[u8; HEAD]) -> bool {
    let rest = u32::from_ne_bytes([head[4], head[5], head[6], head[7]]);
    let begins = |four: &[u8; 4], then: &[u8; 4], mask: u32| {
        word(head) == u32::from_ne_bytes(*four) && rest & mask == u32::from_ne_bytes(*then) & mask
    };
    const ONE: u32 = 0xff;
    const THREE: u32 = 0xff_ffff;
    begins(b"LOCK", b"    ", ONE)
        || begins(b"UNLO", b"CK  ", THREE)
        || begins(b"PROP", b"FIND", u32::MAX)
        || begins(b"PROP", b"PATC", u32::MAX)
        || begins(b"MKCO", b"L   ", ONE | 0xff00)
        || begins(b"COPY", b"    ", ONE)
        || begins(b"MOVE", b"    ", ONE)
        || begins(b"REPO", b"RT  ", THREE)
        || begins(b"SEAR", b"CH  ", THREE)
}

/// Whether a payload on an HTTP/1 connection can begin a request: any method is in capitals. The
/// rest of an upload that was answered already, or a frame of an upgraded connection, is not.
#[inline(always)]
pub fn begins_http_request(head: &[u8; HEAD]) -> bool {
    head[0].is_ascii_uppercase() && head[1].is_ascii_uppercase() && head[2].is_ascii_uppercase()
}

/// A client of a protocol that answers each request: in `Stamp::tls_stage`, of what is no HTTP/1 and no TLS. The
/// egress hook is the writer.
pub const ANSWERS_ALL: u32 = 1 << 15;
/// Beside [`ANSWERS_ALL`]: the first request of the connection is one that waits ([`crate::commands`]).
pub const WAITS_FIRST: u32 = 1 << 14;

/// Whether the first payload that a client sends is one of a protocol that answers each request, though it is
/// only timed: Redis, PostgreSQL's startup (version 3; SSLRequest and GSSENCRequest, of which five bytes are at
/// hand), MySQL's answer to a greeting.
#[inline(always)]
pub fn answers_all(head: &[u8; HEAD], length: u32) -> bool {
    let is_startup = head[4] == 0 && head[5] == 3;
    let said = u32::from_le_bytes([head[0], head[1], head[2], 0]);
    is_redis_array(head, length)
        || (word(head) == u32::from_ne_bytes([0, 0, 0, 8]) && length == 8 && head[4] == 4)
        || (head[0] == 0 && is_startup)
        || (head[3] == 1 && said == length.wrapping_sub(4))
}

/// Whether a payload of this length can be a farewell at all.
#[inline(always)]
pub fn may_be_farewell(length: u32) -> bool {
    matches!(length, 2 | 5 | 6 | 7 | 16)
}

/// Whether a payload says goodbye, which is owed no answer but the end: PostgreSQL's Terminate and
/// CancelRequest (a connection of its own), MySQL's COM_QUIT, memcached's quit, MQTT's DISCONNECT
/// (OASIS, section 3.14), LDAP's unbind (RFC 4511, section 4.3).
#[inline(always)]
pub fn is_farewell(head: &[u8; HEAD], length: u32) -> bool {
    let first = word(head);
    match length {
        2 => head[0] == 0xe0,
        5 => {
            (first == u32::from_ne_bytes(*b"X\0\0\0") && head[4] == 4)
                || (first == u32::from_ne_bytes([1, 0, 0, 0]) && head[4] == 1)
        }
        6 => first == u32::from_ne_bytes(*b"quit") && head[4] == b'\r',
        7 => first == u32::from_ne_bytes([0x30, 5, 2, 1]),
        16 => starts(head, &[0, 0, 0, 16, 0x04, 0xd2, 0x16, 0x2e]),
        _ => false,
    }
}

/// Whether a payload on a multiplexed connection can ask for something. HTTP/2 frames that keep
/// the connection itself (RFC 9113, section 6: type 3 RST_STREAM, 4 SETTINGS, 6 PING, 7 GOAWAY,
/// 8 WINDOW_UPDATE) ask for nothing that is owed.
#[inline(always)]
pub fn begins_stream(head: &[u8; HEAD]) -> bool {
    !matches!(head[3], 3 | 4 | 6 | 7 | 8)
}

#[inline(always)]
fn tls_record(head: &[u8; HEAD]) -> Option<tls::Record> {
    tls::record(&[head[0], head[1], head[2], head[3], head[4]])
}

#[inline(always)]
fn is_tls_handshake(head: &[u8; HEAD]) -> bool {
    const HANDSHAKE: u8 = 22;
    head[0] == HANDSHAKE && tls_record(head).is_some()
}

/// Whether a payload of `length` bytes, on a connection that began with something else, begins TLS:
/// a record of the handshake with a ClientHello in it.
#[inline(always)]
pub fn begins_tls(head: &[u8; HEAD], length: u32) -> bool {
    length >= 24 && is_tls_handshake(head) && head[5] == 1
}

/// Whether a TLS payload that a client sends after the handshake asks for something: data of the
/// application, and no alert.
#[inline(always)]
pub fn is_tls_request(head: &[u8; HEAD]) -> bool {
    tls_record(head).is_some_and(tls::Record::is_data)
}

/// Whether a TLS payload that a server sends is an alert, or anything else that answers no request
/// of the application.
#[inline(always)]
pub fn is_tls_alert(head: &[u8; HEAD]) -> bool {
    tls_record(head).is_some_and(tls::Record::is_alert)
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
            (b"LOCK /x HTTP/1.1", PROTOCOL_HTTP1),
            (b"UNLOCK /x HTTP/1", PROTOCOL_HTTP1),
            (b"PROPFIND /x HTTP", PROTOCOL_HTTP1),
            (b"PROPPATCH /x HTT", PROTOCOL_HTTP1),
            (b"MKCOL /x HTTP/1.", PROTOCOL_HTTP1),
            (b"COPY /x HTTP/1.1", PROTOCOL_HTTP1),
            (b"MOVE /x HTTP/1.1", PROTOCOL_HTTP1),
            (b"REPORT /x HTTP/1", PROTOCOL_HTTP1),
            (b"SEARCH /x HTTP/1", PROTOCOL_HTTP1),
            (b"LOCKS A 1 2 3 4 ", PROTOCOL_OPAQUE),
            (b"PROPOSE a value ", PROTOCOL_OPAQUE),
            (b"CONNECT a:443 HT", PROTOCOL_TUNNEL),
            (b"PRI * HTTP/2.0\r\n", PROTOCOL_MULTIPLEXED),
            (b"AMQP\0\0\x09\x01", PROTOCOL_AMQP),
            (b"SSH-2.0-OpenSSH_9\r\n", PROTOCOL_SSH),
            (b"\x16\x03\x01\x02\x00\x01", PROTOCOL_TLS),
            (b"*1\r\n$4\r\nPING\r\n", PROTOCOL_OPAQUE),
            (b"\x16", PROTOCOL_OPAQUE),
            (b"", PROTOCOL_OPAQUE),
        ] {
            assert_eq!(protocol(&head(bytes), bytes.len()), wanted, "{bytes:?}");
        }
    }

    #[test]
    fn what_answers_each_request() {
        for (bytes, wanted) in [
            (&b"*1\r\n$4\r\nPING\r\n"[..], true),
            (b"\0\0\0\x29\0\x03\0\0user\0me\0", true),
            (b"\0\0\0\x29\0\x03\0\x02user\0me\0", true),
            (b"\0\0\0\x08\x04\xd2\x16\x2f", true),
            (b"\0\0\0\x09\x04\xd2\x16\x2f", false),
            (b"\x0c\0\0\x01\x8d\xa6\xff\x09\0\0\0\x01....", true),
            (b"a message", false),
            (b"x", false),
        ] {
            let said = answers_all(&head(bytes), bytes.len() as u32);
            assert_eq!(said, wanted, "{bytes:?}");
        }
    }

    #[test]
    fn heartbeats() {
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
            (b"\x30\x07\0\x01t21.5", PROTOCOL_MQTT),
            (b"\x32\x09\0\x01t\0\x0121.5", PROTOCOL_MQTT),
            (b"\xc0\0", PROTOCOL_MQTT),
            // LDAP's search.
            (
                b"\x30\x0c\x02\x01\x02\x63\x07\x04\0\x0a\x01\x02\x0a\x01",
                PROTOCOL_UNKNOWN,
            ),
            (
                b"0123456789 and so on, of a length that fits not",
                PROTOCOL_UNKNOWN,
            ),
            (b"PUB foo 5\r\nhello\r\n", PROTOCOL_NATS),
            (b"HPUB foo 12 17\r\n", PROTOCOL_NATS),
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
            let look = || (head, bytes.len() as u32);
            assert_eq!(mid_stream(look), wanted, "{bytes:?}");
        }
    }

    #[test]
    fn farewells() {
        for (text, is_one) in [
            (&b"X\0\0\0\x04"[..], true),
            (b"\x01\0\0\0\x01", true),
            (b"quit\r\n", true),
            (b"\xe0\0", true),
            (b"\x30\x05\x02\x01\x07\x42\0", true),
            (b"\0\0\0\x10\x04\xd2\x16\x2e\0\0\0\x01\0\0\0\x02", true),
            (b"Q\0\0\0\x04", false),
            (b"PING\r", false),
            (b"QUIT\r\n", false),
            (b"\xc0\0", false),
            (b"", false),
        ] {
            let length = text.len() as u32;
            assert_eq!(is_farewell(&head(text), length), is_one, "{text:?}");
            assert!(!is_one || may_be_farewell(length), "{text:?}");
        }
    }

    #[test]
    fn records() {
        assert!(!is_tls_request(&head(b"\x14\x03\x03\x00\x01\x01\x17")));
        assert!(!is_tls_request(&head(b"\x15\x03\x03\x00\x02")));
        assert!(is_tls_request(&head(b"\x17\x03\x03\x00\x50")));
        assert!(!is_tls_request(&head(b"\x17\x03\x03\x00\x13")));
        // The middle of a record.
        assert!(!is_tls_request(&head(b"\x17\x99\x03\x00\x50")));
        assert!(is_tls_alert(&head(b"\x15\x03\x03\x00\x02")));
        assert!(is_tls_alert(&head(b"\x17\x03\x03\x00\x13")));
        assert!(!is_tls_alert(&head(b"\x17\x03\x03\x00\x50")));
        let hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
        assert!(begins_tls(&head(hello), 517));
        assert!(!begins_tls(&head(b"\x16\x03\x01\x02\x00\x02"), 517));
        assert!(!begins_tls(&head(hello), 11));
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes: [u8; HEAD], length: u32) {
            let _ = protocol(&bytes, length as usize);
            let _ = (is_tls_request(&bytes), is_tls_alert(&bytes), begins_tls(&bytes, length));
            let _ = mid_stream(|| (bytes, length));
        }
    }
}
