//! Whether a request of HTTP/1 has been sent to its end.

use agent_common::{
    Stamp,
    classify::HEAD,
    http::{ASKS, ASKS_BODY, ASKS_ON, SEARCHED, Search, WORDS, asks},
    request::*,
    stamp::{PROTOCOL_HTTP1, PROTOCOL_OPAQUE},
};
use proptest::prelude::*;

/// What a head says of the request's end.
fn said(payload: &[u8], old: u8) -> (u32, u64) {
    let loaded = payload.len().min(SEARCHED as usize);
    let mut bytes = [old; WORDS * 8];
    bytes[..loaded].copy_from_slice(&payload[..loaded]);
    let word = |index: u32| {
        let at = index as usize * 8;
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    };
    let mut search = Search::new(loaded as u32);
    while !search.step(word) {}
    let mut value = Value::of(&search);
    for _ in 0..VALUE {
        if value.step(word) {
            break;
        }
    }
    end(&search, &value)
}

#[track_caller]
fn assert_says(head: &str, wanted: (u32, u64)) {
    for old in [0, b'\n', b'5', 0xff] {
        assert_eq!(said(head.as_bytes(), old), wanted, "{head:?}");
    }
}

#[test]
fn heads() {
    for (head, length) in [
        ("POST /a HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 5),
        ("PUT /a HTTP/1.1\r\nhost: x\r\ncontent-length:0\r\n\r\n", 0),
        (
            "POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9999999999\r\n\r\n",
            9_999_999_999,
        ),
        // Spaces around it, zeros before it, any size of a file.
        ("POST / HTTP/1.1\r\ncontent-length:  7\r\n\r\n", 7),
        ("POST / HTTP/1.1\r\ncontent-length:\t \t70 \t\r\n\r\n", 70),
        ("POST / HTTP/1.1\r\nContent-Length: 00000000100\n\n", 100),
        (
            "POST / HTTP/1.1\r\nContent-Length: 70000000000000\r\n\r\n",
            70_000_000_000_000,
        ),
    ] {
        assert_says(head, (SENDS_LENGTH, head.len() as u64 + length));
        let longer = format!("{head}body");
        assert_says(&longer, (SENDS_LENGTH, head.len() as u64 + length));
    }
    for chunked in [
        "Transfer-Encoding: chunked",
        "transfer-encoding:  Chunked \t",
        "Transfer-Encoding:chunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: gzip ,CHUNKED",
        "Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked",
    ] {
        let head = format!("POST / HTTP/1.1\r\n{chunked}\r\n\r\n");
        assert_says(&head, (SENDS_DATA, head.len() as u64));
    }
    assert_says("DELETE / HTTP/1.1\r\nHost: x\r\n\r\n", (SENDS_WHOLE, 0));
    for lost in [
        "Content-Length: ",
        "Content-Length: 5x",
        "Content-Length: 5 5",
        "Content-Length: -5",
        "Content-Length: 5, 5",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 80000000000000",
        "Content-Length: 99999999999999999999999999",
        "Content-Length: 18446744073709551617",
        "Content-Length:                                5",
        "Transfer-Encoding: gzip",
        "Transfer-Encoding: unchunked",
        "Transfer-Encoding: chunked, gzip",
        "Transfer-Encoding: chunked;q=1",
        "Transfer-Encoding: a-coding-that-is-very-long, chunked",
    ] {
        assert_says(
            &format!("POST / HTTP/1.1\r\n{lost}\r\n\r\n"),
            (SENDS_LOST, 0),
        );
    }
    let long = "x".repeat(SEARCHED as usize);
    for unknown in [
        "",
        "POST / HTTP/1.1\r\nContent-Length: 5\r\n",
        "POST / HTTP/1.1\r\nContent-Length: 5\r\n\r",
        &format!("POST / HTTP/1.1\r\nX: {long}\r\nContent-Length: 5\r\n\r\n"),
    ] {
        assert_says(unknown, (SENDS_UNKNOWN, 0));
    }
}

#[test]
fn methods() {
    for (method, body) in [
        (*b"GET ", false),
        (*b"HEAD", false),
        (*b"CONN", false),
        (*b"POST", true),
        (*b"PATC", true),
        (*b"DELE", true),
    ] {
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&method);
        assert_eq!(asks(&head) & HAS_BODY != 0, body, "{method:?}");
    }
}

#[test]
fn a_connection_that_pipelines_stays_one() {
    let stage = PIPELINES | SENDS_LENGTH | ONE_LAP | ASKS_ON;
    assert_eq!(asked(stage, ASKS_BODY), PIPELINES | ASKS_BODY);
    assert_eq!(asked_on(SENDS_DATA | ASKS_BODY), SENDS_DATA | ASKS_ON);
    assert_eq!(asked_on(stage) & ASKS, ASKS_ON);
}

/// All was sent that was known of, and this is known.
fn sends(mut stamp: Stamp, stage: u32) -> Stamp {
    stamp.tls_stage = stage;
    stamp.out_end = 5;
    stamp
}

#[test]
fn unfinished_requests() {
    let stamp = Stamp {
        protocol: PROTOCOL_HTTP1,
        tls_stage: SENDS_LENGTH,
        syn_timeout_ticks: 5,
        out_end: u32::MAX - 10,
        ..Stamp::EMPTY
    };
    assert!(is_unfinished(&stamp));
    assert!(is_unfinished(&Stamp {
        out_end: 4,
        ..stamp
    }));
    assert!(!is_unfinished(&Stamp {
        out_end: 5,
        ..stamp
    }));
    assert!(!is_unfinished(&Stamp {
        out_end: 9,
        ..stamp
    }));
    let protocol = PROTOCOL_OPAQUE;
    assert!(!is_unfinished(&Stamp { protocol, ..stamp }));
    assert!(is_unfinished(&sends(stamp, SENDS_LENGTH | ONE_LAP)));
    for stage in [SENDS_DATA, SENDS_SIZE, SENDS_LINE, SENDS_LOST] {
        assert!(is_unfinished(&sends(stamp, stage | PIPELINES)));
    }
    for stage in [SENDS_UNKNOWN, SENDS_WHOLE] {
        assert!(!is_unfinished(&sends(stamp, stage | HAS_BODY)));
    }
}

/// What is known after more of a request in chunks, as the hook finds out: `new` is behind the first `old`
/// bytes of the payload of a segment.
fn follow(known: (u32, u32), begin: u32, payload: &[u8], old: usize) -> (u32, u32) {
    let mut chunks = Chunks::before(known.0, known.1, begin, old as u32);
    for _ in 0..STEPS {
        let Some(byte) = payload.get(chunks.at as usize) else {
            break;
        };
        chunks.step(*byte);
        if matches!(chunks.sends, SENDS_WHOLE | SENDS_LOST) {
            break;
        }
    }
    (chunks.sends, chunks.bound(begin))
}

/// The longest that is followed: 64 TiB.
#[test]
fn a_very_long_length() {
    let length = 70_000_000_000_000_u64;
    let (mut bound, laps) = laps(77, length);
    let mut stage = SENDS_LENGTH | laps;
    let mut sent = 0_u64;
    while sent < length {
        let at = 77_u32.wrapping_add(sent as u32);
        assert!(is_unfinished_at(stage, bound, at), "{sent}");
        sent = (sent + LAP / 2).min(length);
        (stage, bound) = after(stage, bound, 77_u32.wrapping_add(sent as u32));
    }
    assert!(!is_unfinished_at(
        stage,
        bound,
        77_u32.wrapping_add(sent as u32)
    ));
    assert_eq!(stage, SENDS_LENGTH);
}

/// Chunks of one byte, in the longest ordinary segment.
#[test]
fn tiny_chunks() {
    let body = "1\r\nx\r\n".repeat(10_900) + "0\r\n\r\n";
    assert!(body.len() > 65_000 && body.len() < 1 << 16);
    assert_eq!(after_all(&body), SENDS_WHOLE);
}

/// Whether a body in chunks has ended, sent in one piece.
fn after_all(body: &str) -> u32 {
    follow((SENDS_DATA, 1000), 1000, body.as_bytes(), 0).0
}

#[test]
fn chunks() {
    for (body, wanted) in [
        ("0\r\n\r\n", SENDS_WHOLE),
        ("5\r\nhello\r\n0\r\n\r\n", SENDS_WHOLE),
        (
            "00005;name=value\r\nhello\r\n000\r\nTrailer: x\r\n\r\n",
            SENDS_WHOLE,
        ),
        ("A\r\n0123456789\r\na \r\n0123456789\r\n", SENDS_DATA),
        // Data that looks like the end.
        ("3\r\n0\r\n\r\n", SENDS_DATA),
        ("5\r\n0\r\n\r\n", SENDS_DATA),
        ("7\r\n\r\n0\r\n\r\n\r\n", SENDS_DATA),
        ("7fffffff\r\n", SENDS_DATA),
        ("5", SENDS_SIZE),
        ("5\r", SENDS_LINE),
        ("5;x=", SENDS_LINE),
        ("hello", SENDS_LOST),
        ("\r\n", SENDS_LOST),
        ("100000000\r\n", SENDS_LOST),
    ] {
        assert_eq!(after_all(body), wanted, "{body:?}");
    }
}

prop_compose! {
    fn chunk()(data in proptest::collection::vec(any::<u8>(), 1..60), pad in 0..3_usize, upper: bool, extended: bool)
        -> Vec<u8>
    {
        let digits = if upper { format!("{:X}", data.len()) } else { format!("{:x}", data.len()) };
        let extension = if extended { ";a=\"b\"" } else { "" };
        let mut chunk = format!("{}{digits}{extension}\r\n", "0".repeat(pad)).into_bytes();
        chunk.extend(data);
        chunk.extend(b"\r\n");
        chunk
    }
}

proptest! {
    /// However a body is cut into segments, with or without repeated bytes before the new ones: it is unfinished
    /// until the line of the last chunk is through, and finished from there on.
    #[test]
    fn the_end_of_chunks_is_found_to_the_byte(
        chunks in proptest::collection::vec(chunk(), 0..12),
        trailer in prop_oneof![Just(""), Just("x: y\r\n")],
        begin: u32,
        cuts in proptest::collection::vec((1..40_usize, 0..20_usize), 1..60),
    ) {
        let mut body: Vec<u8> = chunks.concat();
        let last = body.len() + b"0\r\n".len();
        body.extend(format!("0\r\n{trailer}\r\n").bytes());
        let mut known = (SENDS_DATA, begin);
        let mut sent = 0;
        let mut cuts = cuts.into_iter().cycle();
        while sent < body.len() && known.0 != SENDS_WHOLE {
            let (new, old) = cuts.next().expect("endless");
            let (end, old) = ((sent + new).min(body.len()), old.min(sent));
            let from = sent - old;
            known = follow(known, begin.wrapping_add(from as u32), &body[from..end], old);
            sent = end;
            prop_assert_eq!(known.0 == SENDS_WHOLE, sent >= last, "{} of {:?}", sent, known);
            prop_assert_eq!(is_unfinished_at(known.0, known.1, 0), sent < last);
        }
    }

    /// Garbage makes no step go wrong.
    #[test]
    fn anything_is_followed(payload in proptest::collection::vec(any::<u8>(), 0..200), bound: u32, begin: u32) {
        for sends in [SENDS_DATA, SENDS_SIZE, SENDS_LINE] {
            let (after, _) = follow((sends, bound), begin, &payload, 0);
            prop_assert!(after & !SENDS == 0);
        }
    }

    /// A length of any size, sent in pieces of any size.
    #[test]
    fn the_end_of_a_length_is_found_to_the_byte(
        begin: u32,
        length in prop_oneof![0..10_000_u64, 0..10_000_000_000_u64],
        // Beyond what a segment takes, so that a test is not as long as an upload.
        piece in 1..(LAP - 1),
    ) {
        let (mut bound, laps) = laps(begin, length);
        let mut stage = SENDS_LENGTH | laps;
        let mut sent = 0;
        loop {
            let at = begin.wrapping_add(sent as u32);
            prop_assert_eq!(is_unfinished_at(stage, bound, at), sent < length, "{} of {}", sent, length);
            if sent >= length {
                break;
            }
            sent = (sent + piece).min(length);
            (stage, bound) = after(stage, bound, begin.wrapping_add(sent as u32));
            prop_assert!(stage & PIPELINES == 0);
        }
        let (stage, _) = after(stage, bound, begin.wrapping_add(sent as u32).wrapping_add(1));
        prop_assert!(stage & PIPELINES != 0);
    }
}
