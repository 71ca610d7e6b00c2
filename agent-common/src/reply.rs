//! What the first bytes of an answer say of the server. Runs in the kernel, and is tested and fuzzed natively.

use crate::{
    classify::{HEAD, word},
    stamp::{PROTOCOL_HTTP1, PROTOCOL_OPAQUE, PROTOCOL_UNKNOWN},
    status::{TOO_MANY, UNAVAILABLE},
};

/// Of the protocols up to this number an answer's first bytes may tell its status.
pub const LAST_WITH_STATUS: u32 = PROTOCOL_HTTP1;

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
    /// An answer that asks for fewer calls, and no failure: HTTP 429, an account's own limit.
    Throttled = 3,
    /// HTTP 503, which may have Retry-After.
    Unavailable = 4,
    /// HTTP 503 with Retry-After.
    UnavailableForNow = 5,
}

impl Answer {
    /// Whether it says that the server failed.
    #[inline(always)]
    pub fn is_failure(self) -> bool {
        matches!(
            self,
            Self::Failed | Self::Unavailable | Self::UnavailableForNow
        )
    }

    /// The answer with this number; [`Answer::Plain`] when there is none.
    #[inline(always)]
    pub fn from_number(number: u32) -> Self {
        [
            Self::Interim,
            Self::Failed,
            Self::Throttled,
            Self::Unavailable,
            Self::UnavailableForNow,
        ]
        .into_iter()
        .find(|answer| *answer as u32 == number)
        .unwrap_or(Self::Plain)
    }

    /// Whether it asks for fewer calls.
    #[inline(always)]
    pub fn is_throttled(self) -> bool {
        matches!(self, Self::Throttled | Self::UnavailableForNow)
    }
}

/// What the first bytes of an answer of `length` bytes say (zero beyond its end). A protocol that is
/// not known yet means that the server speaks first.
#[inline(always)]
pub fn answer(head: &[u8; HEAD], protocol: u32, length: u32) -> Answer {
    if protocol == PROTOCOL_HTTP1 {
        return http(head);
    }
    if protocol == PROTOCOL_OPAQUE || protocol == PROTOCOL_UNKNOWN {
        let failed = if protocol == PROTOCOL_UNKNOWN {
            any_begins(head, &GREETINGS)
        } else {
            any_begins(head, &ANSWERS)
        };
        if failed || postgres_failed(head) {
            return Answer::Failed;
        }
        if protocol == PROTOCOL_UNKNOWN && http(head).is_failure() {
            return Answer::Failed;
        }
        return mysql(head, length);
    }
    Answer::Plain
}

// --- the tables: to add a status, add its first bytes

/// The first bytes of a payload, as words and what of them counts.
#[derive(Clone, Copy)]
struct Begin([(u64, u64); HEAD / 8]);

const fn begin(text: &str) -> Begin {
    let text = text.as_bytes();
    assert!(text.len() <= HEAD);
    let mut words = [(0, 0); HEAD / 8];
    let mut i = 0;
    while i < text.len() {
        // The first byte is the lowest: both the kernel's targets and all hosts are little-endian.
        words[i / 8].0 |= (text[i] as u64) << (i % 8 * 8);
        words[i / 8].1 |= 0xff << (i % 8 * 8);
        i += 1;
    }
    Begin(words)
}

/// Answers in protocols that we do not know, by which a server says that it cannot serve.
const ANSWERS: [Begin; 7] = [
    // Redis: not `-BUSYKEY`, `-BUSYGROUP`, which speak of the command.
    begin("-LOADING"),
    begin("-BUSY "),
    begin("-MASTERDOWN"),
    begin("-CLUSTERDOWN"),
    // The disk is full or fails, so that nothing can be saved; the memory that it may use is full.
    begin("-MISCONF"),
    begin("-OOM "),
    begin("-ERR max number of clien"),
];

/// Greetings by which a server says that it cannot serve.
const GREETINGS: [Begin; 6] = [
    // SMTP (RFC 5321, section 4.2.3) and FTP (RFC 959): not available, closing.
    begin("421 "),
    begin("421-"),
    // NNTP (RFC 3977, section 5.1): temporarily unavailable.
    begin("400 "),
    // POP3 (RFC 1939), and Redis with too many clients.
    begin("-ERR"),
    // IMAP (RFC 9051, section 7.1.5).
    begin("* BYE"),
    // OpenSSH, MaxStartups.
    begin("Exceeded"),
];

#[inline(always)]
fn any_begins<const N: usize>(head: &[u8; HEAD], with: &[Begin; N]) -> bool {
    let mut words = [0; HEAD / 8];
    for (i, word) in words.iter_mut().enumerate() {
        let at = i * 8;
        *word = u64::from_le_bytes([
            head[at],
            head[at + 1],
            head[at + 2],
            head[at + 3],
            head[at + 4],
            head[at + 5],
            head[at + 6],
            head[at + 7],
        ]);
    }
    let mut i = 0;
    while i < N {
        let Begin([first, second, third]) = with[i];
        if words[0] & first.1 == first.0
            && words[1] & second.1 == second.0
            && words[2] & third.1 == third.0
        {
            return true;
        }
        i += 1;
    }
    false
}

/// MySQL and MariaDB: an error packet (length, number, 0xff, code), as a greeting (number 0) or as an
/// answer, where `#` and an SQLSTATE follow. Codes that speak of the server, from the manuals' lists
/// of server errors; those that speak of the account's own limits ask for fewer calls.
#[inline(always)]
fn mysql(head: &[u8; HEAD], length: u32) -> Answer {
    let said = u32::from_le_bytes([head[0], head[1], head[2], 0]);
    if head[4] != 0xff || length < 9 || said != length.wrapping_sub(4) {
        return Answer::Plain;
    }
    if head[3] != 0 && head[7] != b'#' {
        return Answer::Plain;
    }
    match u16::from_le_bytes([head[5], head[6]]) {
        // Disk full; the storage engine fails; out of memory, three ways; too many connections; shutting down, three ways; this host is
        // blocked; no more threads; offline mode.
        1021 | 1030 | 1037 | 1038 | 1041 | 1040 | 1053 | 1079 | 1080 | 1129 | 1135 | 3032 => {
            Answer::Failed
        }
        // The account has too many connections, or has used up what it may in an hour.
        1203 | 1226 => Answer::Throttled,
        _ => Answer::Plain,
    }
}

/// PostgreSQL: an ErrorResponse whose SQLSTATE (its manual, appendix A) speaks of the server. Of any
/// severity: class 53 (insufficient resources: too many connections, the disk is full, no memory) and
/// 580 (the system failed it: I/O), but not 58P (a file that the query names). With severity FATAL or
/// PANIC also class 57 (an operator intervenes: starting up, shutting down); as an ERROR that is a
/// query that was cancelled. Fields: S, V (since protocol 3 of 9.6), C.
#[inline(always)]
fn postgres_failed(head: &[u8; HEAD]) -> bool {
    const ERROR: u32 = u32::from_ne_bytes(*b"ERRO");
    const FATAL: u32 = u32::from_ne_bytes(*b"FATA");
    const PANIC: u32 = u32::from_ne_bytes(*b"PANI");
    let severity = u32::from_ne_bytes([head[6], head[7], head[8], head[9]]);
    let ends_session = severity == FATAL || severity == PANIC;
    if head[0] != b'E' || head[5] != b'S' || !(ends_session || severity == ERROR) {
        return false;
    }
    let state = if head[12] == b'C' {
        [head[13], head[14], head[15]]
    } else if head[19] == b'C' {
        [head[20], head[21], head[22]]
    } else {
        return false;
    };
    match state {
        [b'5', b'3', _] | [b'5', b'8', b'0'] => true,
        [b'5', b'7', _] => ends_session,
        _ => false,
    }
}

/// What of an answer's first bytes tells its status, if it is one of HTTP: for [`status`]. The lowest byte is
/// 0. (No more than that, for the verifier walks through each question that is asked here many times.)
#[inline(always)]
pub fn status_line(head: &[u8; HEAD]) -> u64 {
    let [h, t, u, p, ..] = *head;
    u64::from_le_bytes([0, head[9], head[10], head[11], h, t, u, p])
}

/// The status of an answer: that of HTTP, or what an answer of another protocol corresponds to; 0: none.
#[inline(always)]
pub fn status(line: u64, failed: bool, throttled: bool) -> u32 {
    let [_, a, b, c, begin @ ..] = line.to_le_bytes();
    if u32::from_ne_bytes(begin) == u32::from_ne_bytes(*b"HTTP") {
        let digit = |byte: u8| u32::from(byte.wrapping_sub(b'0'));
        digit(a) * 100 + digit(b) * 10 + digit(c)
    } else if failed {
        UNAVAILABLE
    } else if throttled {
        TOO_MANY
    } else {
        0
    }
}

/// `HTTP/1.x NNN`.
#[inline(always)]
fn http(head: &[u8; HEAD]) -> Answer {
    if word(head) != u32::from_ne_bytes(*b"HTTP") || head[4] != b'/' || head[8] != b' ' {
        return Answer::Plain;
    }
    match [head[9], head[10], head[11]] {
        // 101 hands the connection over: that is the answer.
        [b'1', b'0', b'1'] => Answer::Plain,
        [b'1', ..] => Answer::Interim,
        [b'4', b'2', b'9'] => Answer::Throttled,
        [b'5', b'0', b'3'] => Answer::Unavailable,
        [b'5', ..] => Answer::Failed,
        _ => Answer::Plain,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stamp::{PROTOCOL_TLS, PROTOCOL_TUNNEL};
    use proptest::prelude::*;

    fn head(text: &[u8]) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        let length = text.len().min(HEAD);
        head[..length].copy_from_slice(&text[..length]);
        head
    }

    #[test]
    fn statuses() {
        for (bytes, said) in [
            (&b"HTTP/1.1 404 Not Found"[..], 404),
            (b"HTTP/1.0 599", 599),
            (b"HTTP/1.1 503 No", 503),
            (b"HTTP/1.1 200 OK", 200),
            (b"-LOADING", 503),
            (b"+OK\r\n", 0),
            (b"", 0),
        ] {
            let head = head(bytes);
            let protocol = if bytes.starts_with(b"H") {
                PROTOCOL_HTTP1
            } else {
                PROTOCOL_OPAQUE
            };
            let answer = answer(&head, protocol, bytes.len() as u32);
            let line = status_line(&head);
            assert_eq!(line & 0xff, 0);
            let found = status(line, answer.is_failure(), answer.is_throttled());
            assert_eq!(found, said, "{bytes:?}");
        }
        assert_eq!(status(0, false, true), 429);
        assert_eq!(
            status(status_line(&head(b"HTTP/1.1 429")), false, true),
            429
        );
    }

    #[test]
    fn answers() {
        for (bytes, of, wanted) in [
            (&b"HTTP/1.1 200 OK\r\n"[..], PROTOCOL_HTTP1, Answer::Plain),
            (b"HTTP/1.1 404 No", PROTOCOL_HTTP1, Answer::Plain),
            (b"HTTP/1.0 503 Se", PROTOCOL_HTTP1, Answer::Unavailable),
            (b"HTTP/1.1 500 In", PROTOCOL_HTTP1, Answer::Failed),
            (b"HTTP/1.1 429 To", PROTOCOL_HTTP1, Answer::Throttled),
            (b"HTTP/1.1 100 Co", PROTOCOL_HTTP1, Answer::Interim),
            (b"HTTP/1.1 103 Ea", PROTOCOL_HTTP1, Answer::Interim),
            (b"HTTP/1.1 101 Sw", PROTOCOL_HTTP1, Answer::Plain),
            (b"HTTP/1.1 503 Se", PROTOCOL_TLS, Answer::Plain),
            (b"-LOADING Redis ", PROTOCOL_OPAQUE, Answer::Failed),
            (b"-ERR unknown co", PROTOCOL_OPAQUE, Answer::Plain),
            (b"-BUSY Redis is busy", PROTOCOL_OPAQUE, Answer::Failed),
            (b"-BUSYGROUP Consumer", PROTOCOL_OPAQUE, Answer::Plain),
            (b"HTTP/1.1 503\r\n", PROTOCOL_HTTP1, Answer::Unavailable),
            (b"-CLUSTERDOWN The", PROTOCOL_OPAQUE, Answer::Failed),
            (
                b"-ERR max number of clients reached\r\n",
                PROTOCOL_OPAQUE,
                Answer::Failed,
            ),
            (b"421 no article\r\n", PROTOCOL_OPAQUE, Answer::Plain),
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
            (
                b"E\0\0\0\x60SERROR\0VERROR\0C53100\0",
                PROTOCOL_OPAQUE,
                Answer::Failed,
            ),
            (
                b"E\0\0\0\x60SERROR\0VERROR\0C58030\0",
                PROTOCOL_OPAQUE,
                Answer::Failed,
            ),
            (
                b"E\0\0\0\x60SERROR\0VERROR\0C58P01\0",
                PROTOCOL_OPAQUE,
                Answer::Plain,
            ),
            (
                b"E\0\0\0\x60SPANIC\0VPANIC\0C53100\0",
                PROTOCOL_OPAQUE,
                Answer::Failed,
            ),
            (
                b"-MISCONF Redis is configured to save",
                PROTOCOL_OPAQUE,
                Answer::Failed,
            ),
            (b"-OOM command not allowed", PROTOCOL_OPAQUE, Answer::Failed),
        ] {
            let said = answer(&head(bytes), of, bytes.len() as u32);
            assert_eq!(said, wanted, "{bytes:?}");
        }
    }

    /// What an error packet of MySQL's says, with so many bytes behind it.
    fn error(number: u8, code: u16, text: &str, more: u32, of: u32) -> Answer {
        let [low, high] = code.to_le_bytes();
        let length = text.len() as u8 + 3;
        let mut packet = head(&[length, 0, 0, number, 0xff, low, high]);
        packet[7..7 + text.len()].copy_from_slice(text.as_bytes());
        answer(&packet, of, u32::from(length) + 4 + more)
    }

    #[test]
    fn errors_of_mysql() {
        for (code, wanted) in [
            (1040, Answer::Failed),
            (1053, Answer::Failed),
            (1129, Answer::Failed),
            (3032, Answer::Failed),
            (1203, Answer::Throttled),
            (1226, Answer::Throttled),
            // Not this host; access denied; syntax.
            (1130, Answer::Plain),
            (1045, Answer::Plain),
            (1064, Answer::Plain),
        ] {
            assert_eq!(error(0, code, "text", 0, PROTOCOL_UNKNOWN), wanted);
            let later = |of| error(2, code, "#08004text", 0, of);
            assert_eq!(later(PROTOCOL_OPAQUE), wanted, "{code}");
            assert_eq!(later(PROTOCOL_TLS), Answer::Plain);
        }
        // Not alone in its segment, and without an SQLSTATE.
        let more = error(1, 1040, "#08004text", 1, PROTOCOL_OPAQUE);
        assert_eq!(more, Answer::Plain);
        let without = error(1, 1040, "text", 0, PROTOCOL_OPAQUE);
        assert_eq!(without, Answer::Plain);
    }

    #[test]
    fn greetings() {
        for (bytes, wanted) in [
            (&b"220 mail ESMTP\r\n"[..], Answer::Plain),
            (b"421 4.3.2 closing\r\n", Answer::Failed),
            (b"421-too many\r\n", Answer::Failed),
            (b"554 5.7.1 go away\r\n", Answer::Plain),
            (b"SSH-2.0-OpenSSH_9.2p1\r\n", Answer::Plain),
            (b"Exceeded MaxStartups\r\n", Answer::Failed),
            (b"+OK POP3\r\n", Answer::Plain),
            (b"-ERR [SYS/TEMP] too many\r\n", Answer::Failed),
            (b"* OK IMAP4rev1\r\n", Answer::Plain),
            (b"* BYE too many\r\n", Answer::Failed),
            (b"HTTP/1.1 503 Service Un", Answer::Failed),
            (b"HTTP/1.1 408 Request Ti", Answer::Plain),
            (b"\x4a\0\0\0\x0a5.5.5-10.11.19-Mar", Answer::Plain),
            (b"4", Answer::Plain),
        ] {
            let said = answer(&head(bytes), PROTOCOL_UNKNOWN, bytes.len() as u32);
            assert_eq!(said, wanted, "{bytes:?}");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes: [u8; HEAD], length: u32, of in 0u32..8) {
            let _ = answer(&bytes, of, length);
        }
    }
}
