//! Commands of databases in the clear (Redis, PostgreSQL, MySQL): a few are owed no answer, and a few wait for
//! something by right. Runs in the kernel, and is tested natively.
//!
//! Only a message at the begin of a payload is seen, and its first bytes decide. Where it is not certain, an answer
//! is owed as to any other command.

use crate::classify::{HEAD, is_redis_array, word};

/// What a command is owed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// An answer.
    Asks,
    /// Nothing.
    Tells,
    /// An answer, when there is something to say: until then, silence is healthy.
    Waits,
}

/// What a payload of so many bytes is owed, on a connection on which nothing is owed, and on which each request is
/// answered ([`crate::classify::answers_all`]) or which was adopted.
#[inline(always)]
pub fn command(head: &[u8; HEAD], length: u32) -> Command {
    if is_redis_array(head, length) {
        return redis(head);
    }
    if mysql_tells(head, length) || postgres_tells(head, length) {
        Command::Tells
    } else {
        Command::Asks
    }
}

/// The bit that makes a letter small, of eight letters.
const SMALL: u64 = 0x2020_2020_2020_2020;

/// Redis: `*3\r\n$5\r\nBLPOP\r\n`, the numbers of one or two digits. (A client that waits sends 24 bytes at least.)
#[inline(always)]
fn redis(head: &[u8; HEAD]) -> Command {
    let from = u64::from_le_bytes([
        head[8], head[9], head[10], head[11], head[12], head[13], head[14], head[15],
    ]);
    let (next, last) = (u64::from(head[16]), u64::from(head[17]));
    // (Not by an index, of which it would have to be known that it lies within.)
    let name = SMALL
        | match (head[2] == b'\r', head[6], head[7]) {
            (true, b'\r', _) => from,
            (true, ..) | (false, _, b'\r') => from >> 8 | next << 56,
            _ => from >> 16 | next << 48 | last << 56,
        };
    // What a replica says once a second of how far it has got: REPLCONF ACK.
    let is_ack = head[18] == b'$' && head[19] == b'3' && head[20] == b'\r';
    if name == u64::from_le_bytes(*b"replconf") && is_ack {
        Command::Tells
    } else if redis_waits(name) {
        Command::Waits
    } else {
        Command::Asks
    }
}

/// Whether a command with a name that begins like this waits, or may: BLPOP, BLMOVE, BLMPOP, BRPOP, BRPOPLPUSH,
/// BZPOPMIN, BZPOPMAX, BZMPOP; XREAD, XREADGROUP; WAIT, WAITAOF.
#[inline(always)]
const fn redis_waits(name: u64) -> bool {
    const BL: u64 = u16::from_le_bytes(*b"bl") as u64;
    const BR: u64 = u16::from_le_bytes(*b"br") as u64;
    const BZ: u64 = u16::from_le_bytes(*b"bz") as u64;
    matches!(name & 0xffff, BL | BR | BZ)
        || name & 0xff_ffff_ffff == u64::from_le_bytes(*b"xread\0\0\0")
        || name & 0xffff_ffff == u64::from_le_bytes(*b"wait\0\0\0\0")
}

/// MySQL: a packet is its length, a number, which is 0 at the begin of a command, and the command. COM_STMT_CLOSE,
/// of which several may come together, and COM_STMT_SEND_LONG_DATA are not answered.
#[inline(always)]
fn mysql_tells(head: &[u8; HEAD], length: u32) -> bool {
    const SEND_LONG_DATA: u8 = 0x18;
    const STMT_CLOSE: u8 = 0x19;
    /// Bytes of a COM_STMT_CLOSE.
    const CLOSE: u32 = 9;
    match head[4] {
        STMT_CLOSE if word(head) == u32::from_ne_bytes([5, 0, 0, 0]) => {
            // (Of 18 bytes 12 are at hand.)
            let another = head[9] == 5 && head[10] | head[11] == 0;
            length == CLOSE || (length.is_multiple_of(CLOSE) && another)
        }
        SEND_LONG_DATA => {
            length > 10 && u32::from_le_bytes([head[0], head[1], head[2], head[3]]) == length - 4
        }
        _ => false,
    }
}

/// PostgreSQL: what the receiver of a replication says of how far it has got (a CopyData with a standby status
/// update, or with feedback of a hot standby).
#[inline(always)]
fn postgres_tells(head: &[u8; HEAD], length: u32) -> bool {
    const STATUS: u32 = 39;
    const FEEDBACK: u32 = 30;
    head[0] == b'd'
        && u32::from_be_bytes([head[1], head[2], head[3], head[4]]).wrapping_add(1) == length
        && ((head[5] == b'r' && length == STATUS) || (head[5] == b'h' && length == FEEDBACK))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    extern crate std;
    use std::{string::String, vec::Vec};

    /// As much as the hook loads.
    fn head(text: &[u8]) -> [u8; HEAD] {
        let mut head = [0; HEAD];
        let loaded = match text.len() {
            24.. => 24,
            12.. => 12,
            5.. => 5,
            _ => 1,
        };
        head[..loaded].copy_from_slice(&text[..loaded]);
        head
    }

    /// A command of Redis.
    fn array(words: &[&str]) -> Vec<u8> {
        let mut bytes = std::format!("*{}\r\n", words.len());
        for word in words {
            bytes += &std::format!("${}\r\n{word}\r\n", word.len());
        }
        bytes.into_bytes()
    }

    fn said(bytes: &[u8]) -> Command {
        command(&head(bytes), bytes.len() as u32)
    }

    #[test]
    fn redis_commands() {
        for (words, wanted) in [
            (&["BLPOP", "q", "0"][..], Command::Waits),
            (
                &["blpop", "a", "b", "c", "d", "e", "f", "g", "h", "5"],
                Command::Waits,
            ),
            (&["BRPOP", "q", "0"], Command::Waits),
            (&["BRPOPLPUSH", "a", "b", "0"], Command::Waits),
            (&["BLMOVE", "a", "b", "LEFT", "LEFT", "0"], Command::Waits),
            (&["BLMPOP", "0", "1", "a", "LEFT"], Command::Waits),
            (&["bzpopmin", "a", "0"], Command::Waits),
            (&["BZPOPMAX", "a", "0"], Command::Waits),
            (&["BZMPOP", "0", "1", "a", "MIN"], Command::Waits),
            (
                &["XREAD", "BLOCK", "0", "STREAMS", "s", "$"],
                Command::Waits,
            ),
            (
                &[
                    "XREADGROUP",
                    "GROUP",
                    "g",
                    "c",
                    "BLOCK",
                    "0",
                    "COUNT",
                    "1",
                    "STREAMS",
                    "s",
                    ">",
                ],
                Command::Waits,
            ),
            (&["WAIT", "1", "0"], Command::Waits),
            (&["WAITAOF", "1", "1", "0"], Command::Waits),
            (&["REPLCONF", "ACK", "1234"], Command::Tells),
            (&["REPLCONF", "ACK", "1234", "FACK", "1234"], Command::Tells),
            (
                &["REPLCONF", "capa", "eof", "capa", "psync2"],
                Command::Asks,
            ),
            (&["REPLCONF", "listening-port", "6379"], Command::Asks),
            (&["PING"], Command::Asks),
            (&["LPOP", "bl"], Command::Asks),
            (&["GET", "BLPOP"], Command::Asks),
            (&["BITCOUNT", "a"], Command::Asks),
            (&["BGSAVE"], Command::Asks),
            (&["XADD", "s", "*", "a", "b"], Command::Asks),
            (&["XRANGE", "s", "-", "+"], Command::Asks),
            (&["WATCH", "a", "b", "c"], Command::Asks),
            // Answered at once; what follows is pushed, and owed to nobody.
            (&["SUBSCRIBE", "a"], Command::Asks),
            (&["MONITOR"], Command::Asks),
        ] {
            let bytes = array(words);
            let text = String::from_utf8_lossy(&bytes).into_owned();
            assert_eq!(said(&bytes), wanted, "{text:?}");
        }
        assert_eq!(said(b"*100\r\n$5\r\nBLPOP\r\n$1\r\na\r\n"), Command::Asks);
    }

    #[test]
    fn mysql_commands() {
        const CLOSE: &[u8] = b"\x05\0\0\0\x19\x01\0\0\0";
        for (bytes, wanted) in [
            (CLOSE.to_vec(), Command::Tells),
            ([CLOSE, CLOSE].concat(), Command::Tells),
            ([CLOSE, CLOSE, CLOSE].concat(), Command::Tells),
            // Something follows that is answered: a ping, a query, a reset of the statement.
            ([CLOSE, b"\x01\0\0\0\x0e"].concat(), Command::Asks),
            ([CLOSE, b"\x09\0\0\0\x03SELECT 1"].concat(), Command::Asks),
            (
                [CLOSE, b"\x0e\0\0\0\x03SELECT 1 + 123"].concat(),
                Command::Asks,
            ),
            (b"\x0b\0\0\0\x18\x01\0\0\0\0\0data".to_vec(), Command::Tells),
            // Not all of it, or more than that.
            (b"\x0c\0\0\0\x18\x01\0\0\0\0\0data".to_vec(), Command::Asks),
            (
                b"\x0b\0\0\0\x18\x01\0\0\0\0\0data\x01\0\0\0\x0e".to_vec(),
                Command::Asks,
            ),
            (b"\x05\0\0\0\x1a\x01\0\0\0".to_vec(), Command::Asks),
            (b"\x05\0\0\0\x03quit".to_vec(), Command::Asks),
            (b"\x05\0\0\x01\x19\x01\0\0\0".to_vec(), Command::Asks),
            (b"\x01\0\0\0\x0e".to_vec(), Command::Asks),
        ] {
            assert_eq!(said(&bytes), wanted, "{bytes:?}");
        }
    }

    #[test]
    fn postgres_messages() {
        let message = |kind: &[u8], length: usize| {
            let mut bytes = b"d\0\0\0".to_vec();
            bytes.push(length as u8 - 1);
            bytes.extend(kind);
            bytes.resize(length, 0);
            bytes
        };
        assert_eq!(said(&message(b"r", 39)), Command::Tells);
        assert_eq!(said(&message(b"h", 30)), Command::Tells);
        assert_eq!(said(&message(b"r", 40)), Command::Asks);
        assert_eq!(said(&message(b"x", 39)), Command::Asks);
        assert_eq!(said(b"Q\0\0\0\x0dSELECT 1\0"), Command::Asks);
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes: [u8; HEAD], length: u32) {
            let _ = command(&bytes, length);
        }
    }
}
