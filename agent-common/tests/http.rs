//! What the heads of HTTP/1 answers say of their end.

use agent_common::{
    Stamp, classify,
    http::*,
    reply,
    request::{ELSEWHERE, HAS_BODY, PIPELINES, SENDS_SIZE},
    stamp::{PHASE_OPEN, PROTOCOL_HTTP1, PROTOCOL_OPAQUE, pack_request},
};
use proptest::prelude::*;

/// What a segment with this payload says of the answer's end, and whether it has Retry-After, as the hook
/// asks: a buffer with something old behind what was loaded, and so many steps at most.
fn searched(payload: &[u8], asks: u32, old: u8) -> ((u32, u32), bool) {
    let loaded = payload.len().min(SEARCHED as usize);
    let mut bytes = [old; WORDS * 8];
    bytes[..loaded].copy_from_slice(&payload[..loaded]);
    let word = |index: u32| {
        let at = index as usize * 8;
        u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    };
    let mut search = Search::new(loaded as u32);
    for _ in 0..STEPS {
        if search.step(word) {
            break;
        }
    }
    (search.body(word, asks, true), search.has_retry_after())
}

fn said(payload: &[u8], asks: u32, old: u8) -> (u32, u32) {
    searched(payload, asks, old).0
}

#[track_caller]
fn assert_says(head: &str, wanted: (u32, u32)) {
    for old in [0, b'\n', b'\r', 0xff] {
        assert_eq!(said(head.as_bytes(), ASKS_BODY, old), wanted, "{head:?}");
    }
}

#[test]
fn some_answers_hand_the_connection_over() {
    let line = |answer: &[u8; classify::HEAD]| reply::status_line(answer);
    let switching = line(b"HTTP/1.1 101 Switching P");
    let good = line(b"HTTP/1.1 200 Connection ");
    let also_good = line(b"HTTP/1.0 299 Fine.......");
    for asks in [ASKS_BODY, ASKS_HEAD, ASKS_ON, ASKS_TUNNEL] {
        assert!(hands_over(switching, asks));
        assert_eq!(hands_over(good, asks), asks == ASKS_TUNNEL);
        assert_eq!(hands_over(also_good, asks), asks == ASKS_TUNNEL);
        for other in [
            b"HTTP/1.1 100 Continue...",
            b"HTTP/1.1 407 Proxy Authe",
            b"HTTP/1.1 502 Bad Gateway",
            b"TEXT/1.1 101 no answer..",
            b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        ] {
            assert!(!hands_over(line(other), asks), "{other:?}");
        }
    }
}

const NOTHING: (u32, u32) = (BODY_NONE, 0);
const ENDLESS: (u32, u32) = (BODY_ENDLESS, 0);

#[test]
fn lengths() {
    for (head, length) in [
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", 5),
        ("HTTP/1.0 200 OK\r\ncontent-length:17\r\n\r\nhello", 17),
        ("HTTP/1.1 200\r\nServer: x\r\nCONTENT-LENGTH:\t0\r\n\r\n", 0),
        (
            "HTTP/1.1 404 No\r\nContent-Length: 2000000000\r\nA: b\r\n\r\n",
            2_000_000_000,
        ),
        ("HTTP/1.1 200 OK\nContent-Length: 5\n\n", 5),
        (
            "HTTP/1.1 206 P\r\nContent-Type: text/event-stream\r\nContent-Length: 5\r\n\r\n",
            5,
        ),
        (
            "HTTP/1.1 200 OK\r\na:b\r\nc:\r\nContent-Length: 5\r\n\r\nHTTP",
            5,
        ),
    ] {
        let end = head.find("\r\n\r\n").map(|at| at + 4);
        let body = end.or(head.find("\n\n").map(|at| at + 2)).expect("an end");
        assert_says(head, (BODY_LENGTH, body as u32 + length));
    }
}

#[test]
fn what_is_in_doubt_is_finished() {
    let long = "x".repeat(SEARCHED as usize);
    let many = "a:b\r\n".repeat(390);
    for head in [
        "",
        "HTTP/1.1 200 OK",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r",
        "HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 304 Not\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 100 Continue\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5, 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length:\r\n 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length:   5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 0x5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 12345678901\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2147483647\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunkedx\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        "ICY 200 OK\r\nContent-Length: 5\r\n\r\n",
        "of a body\r\nContent-Length: 5\r\n\r\n",
        &format!("HTTP/1.1 200 OK\r\nX: {long}\r\nContent-Length: 5\r\n\r\n"),
        &format!("HTTP/1.1 200 OK\r\n{many}Content-Length: 5\r\n\r\n"),
    ] {
        assert_says(head, NOTHING);
    }
}

#[test]
fn what_ends_with_the_connection() {
    for head in [
        "HTTP/1.1 101 Switching\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.0 200 OK\r\n\r\nbody",
        "HTTP/1.1 200 OK\r\nX-Content-Length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: y\r\n Content-Length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length : 5\r\n\r\n",
    ] {
        assert_says(head, ENDLESS);
    }
}

#[test]
fn chunks() {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-encoding: Chunked\r\n\r\n";
    assert_says(head, (BODY_CHUNKED, head.len() as u32));
    let body = format!("{head}5\r\nhello\r\n");
    assert_says(&body, (BODY_CHUNKED, head.len() as u32));
    for (last, wanted) in [
        (b"hello", BODY_CHUNKED),
        (b"\n0\r\n\r", BODY_CHUNKED),
        (b"0\r\n\r\n", BODY_NONE),
        (b"a\r\n\r\n", BODY_CHUNKED_PAUSED),
    ] {
        assert_eq!(chunked_after(*last), wanted, "{last:?}");
    }
}

#[test]
fn retry_after() {
    for (head, wanted) in [
        ("HTTP/1.1 503 No\r\nRetry-After: 3\r\n\r\n", true),
        (
            "HTTP/1.1 503 No\r\nServer: x\r\nretry-after:3\r\n\r\n",
            true,
        ),
        ("HTTP/1.1 503 No\r\nRetry-After: 3", true),
        ("HTTP/1.1 503 No\r\n\r\nRetry-After: 3\r\n", false),
        ("HTTP/1.1 503 No\r\nRetry: 3\r\n\r\n", false),
        ("HTTP/1.1 503 No\r\nX-Retry-After: 3\r\n\r\n", false),
    ] {
        assert_eq!(
            searched(head.as_bytes(), ASKS_BODY, 0).1,
            wanted,
            "{head:?}"
        );
    }
}

#[test]
fn requests() {
    let head = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n";
    for (method, what, wanted) in [
        ("GET ", ASKS_BODY, BODY_LENGTH),
        ("POST", ASKS_BODY | HAS_BODY, BODY_LENGTH),
        ("HEAD", ASKS_HEAD, BODY_NONE),
        ("CONN", ASKS_TUNNEL | ELSEWHERE, BODY_ENDLESS),
    ] {
        assert_eq!(asks(&begin(method)), what);
        assert_eq!(said(head, what & ASKS, 0).0, wanted, "{method:?}");
    }
}

/// What a proxy is sent speaks of somebody else, and nothing else does.
#[test]
fn the_absolute_form() {
    for (line, wanted) in [
        ("GET http://dead.example/ HTTP/1.1", true),
        ("GET HTTP://DEAD.example/ HTTP/1.1", true),
        ("POST https://dead.example/x HTTP/1.1", true),
        ("HEAD http://dead.example/ HTTP/1.1", true),
        ("PATCH http://dead.example/ HTTP/1.1", true),
        ("DELETE http://dead.example/ HTTP/1.1", true),
        ("OPTIONS http://dead.example HTTP/1.1", true),
        ("PROPFIND http://dead.example/ HTTP/1.1", true),
        ("PROPPATCH http://dead.example/ HTTP/1.1", true),
        ("GET ftp://dead.example/ HTTP/1.1", true),
        ("CONNECT dead.example:443 HTTP/1.1", true),
        ("GET / HTTP/1.1", false),
        ("GET /http://dead.example/ HTTP/1.1", false),
        ("POST /?to=http://dead.example/ HTTP/1.1", false),
        ("PROPPATCH /http HTTP/1.1", false),
        ("OPTIONS * HTTP/1.1", false),
        ("GET  http://dead.example/ HTTP/1.1", false),
        ("GET", false),
    ] {
        assert_eq!(asks(&begin(line)) & ELSEWHERE != 0, wanted, "{line}");
    }
}

/// As many bytes of a payload as the hook looks at.
fn begin(text: &str) -> [u8; classify::HEAD] {
    let mut head = [0; classify::HEAD];
    let length = text.len().min(head.len());
    head[..length].copy_from_slice(&text.as_bytes()[..length]);
    head
}

#[test]
fn unfinished_answers() {
    let stamp = Stamp {
        phase: PHASE_OPEN,
        protocol: PROTOCOL_HTTP1,
        request: pack_request(3, 1),
        answers: 3,
        in_end: u32::MAX - 10,
        tls_seen: BODY_LENGTH,
        tls_next: 5,
        ..Stamp::EMPTY
    };
    assert_eq!(unfinished(&stamp), Some(Unfinished::Length));
    assert_eq!(
        unfinished(&Stamp { in_end: 4, ..stamp }),
        Some(Unfinished::Length)
    );
    for finished in [
        Stamp { in_end: 5, ..stamp },
        Stamp {
            in_end: 100,
            ..stamp
        },
        Stamp {
            tls_seen: BODY_NONE,
            ..stamp
        },
        Stamp {
            tls_seen: BODY_ENDLESS,
            ..stamp
        },
        Stamp {
            tls_seen: BODY_CHUNKED_PAUSED,
            ..stamp
        },
        Stamp {
            tls_stage: ASKS_ON,
            ..stamp
        },
        Stamp {
            tls_stage: PIPELINES,
            ..stamp
        },
        // The rest of the request is waited for.
        Stamp {
            tls_stage: SENDS_SIZE,
            ..stamp
        },
        Stamp {
            protocol: PROTOCOL_OPAQUE,
            ..stamp
        },
        // Another request is under way.
        Stamp {
            request: pack_request(4, 2),
            ..stamp
        },
        // Nothing was asked for yet.
        Stamp {
            request: 0,
            answers: 0,
            ..stamp
        },
    ] {
        assert_eq!(unfinished(&finished), None);
    }
    let chunked = Stamp {
        tls_seen: BODY_CHUNKED,
        in_end: 100,
        ..stamp
    };
    assert_eq!(unfinished(&chunked), Some(Unfinished::Chunked));
}

/// A header that says nothing of a length.
fn other() -> impl Strategy<Value = String> {
    "[A-BD-SU-Za-bd-su-z][A-Za-z-]{0,20}: ?[ -~]{0,40}"
}

/// A name in whatever letters.
fn cased(name: &'static str) -> impl Strategy<Value = String> {
    proptest::collection::vec(any::<bool>(), name.len()).prop_map(move |upper| {
        let letters = name.chars().zip(upper);
        letters
            .map(|(letter, upper)| {
                if upper {
                    letter.to_ascii_uppercase()
                } else {
                    letter
                }
            })
            .collect()
    })
}

proptest! {
    /// A head with its length at any place, and any bytes behind it: the length is found, or the head is
    /// too long to be searched.
    #[test]
    fn a_length_is_found_wherever_it_is(
        before in proptest::collection::vec(other(), 0..12),
        after in proptest::collection::vec(other(), 0..12),
        name in cased("content-length:"),
        length in 0_u32..2_000_000_000,
        body in proptest::collection::vec(any::<u8>(), 0..2000),
        old: u8,
    ) {
        let mut lines = vec!["HTTP/1.1 200 OK".to_owned()];
        lines.extend(before);
        lines.push(format!("{name} {length}"));
        lines.extend(after);
        let head = lines.join("\r\n") + "\r\n\r\n";
        let mut payload = head.clone().into_bytes();
        payload.extend(body);
        let wanted = if head.len() <= SEARCHED as usize {
            (BODY_LENGTH, head.len() as u32 + length)
        } else {
            NOTHING
        };
        prop_assert_eq!(said(&payload, ASKS_BODY, old), wanted);
    }

    /// However a head is cut, its first part says nothing.
    #[test]
    fn a_part_of_a_head_says_nothing(lines in proptest::collection::vec(other(), 0..8), cut: u16, old: u8) {
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n{}\r\n\r\n", lines.join("\r\n"));
        // (An empty list makes an empty line earlier.)
        let end = head.find("\r\n\r\n").expect("an end") + 4;
        let part = &head[..usize::from(cut) % end];
        prop_assert_eq!(said(part.as_bytes(), ASKS_BODY, old), NOTHING);
    }

    #[test]
    fn nothing_panics(payload in proptest::collection::vec(any::<u8>(), 0..1200), asks in 0_u32..4, old: u8) {
        let (what, _) = said(&payload, asks, old);
        prop_assert!(what <= BODY_ENDLESS);
    }

    /// Garbage behind a good status line.
    #[test]
    fn what_is_said_lies_within(
        rest in proptest::collection::vec(prop_oneof![Just(b'\r'), Just(b'\n'), any::<u8>()], 0..1200),
        old: u8,
    ) {
        let mut payload = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n".to_vec();
        payload.extend(rest);
        let (what, whole) = said(&payload, ASKS_BODY, old);
        prop_assert!(what != BODY_LENGTH || whole as usize <= payload.len());
    }
}
