//! What TLS records are taken for, flight by flight.

use agent_common::tls::*;
use proptest::prelude::*;

fn of(kind: u8, length: u32) -> Record {
    Record { kind, length }
}

/// What a client's segments are, each a list of records.
fn client(segments: &[&[(u8, u32)]]) -> (u32, Vec<Sent>) {
    let mut stage = STAGE_HELLO;
    let mut all = Vec::new();
    for segment in segments {
        for (i, &(kind, length)) in segment.iter().enumerate() {
            let (next, what) = sent(stage, of(kind, length), i == 0);
            stage = next;
            all.push(what);
        }
    }
    (stage, all)
}

#[test]
fn clients() {
    use Sent::{Handshake as H, Nothing as N, Request as R};
    type Case<'a> = (&'a str, &'a [&'a [(u8, u32)]], u32, &'a [Sent]);
    let hello = &[(22, 512)][..];
    let cases: &[Case] = &[
        (
            "1.3",
            &[hello, &[(20, 1), (23, 53)], &[(23, 100)], &[(23, 100)]],
            STAGE_SETTLED,
            &[H, N, N, R, R],
        ),
        (
            "1.3, all at once",
            &[hello, &[(20, 1), (23, 69), (23, 100)]],
            STAGE_ASKED,
            &[H, N, N, R],
        ),
        (
            "1.3, each by itself",
            &[hello, &[(20, 1)], &[(23, 53)], &[(23, 100)]],
            STAGE_ASKED,
            &[H, N, N, R],
        ),
        (
            "1.3, asked for another hello",
            &[hello, &[(20, 1), (22, 600)], &[(23, 53)], &[(23, 100)]],
            STAGE_ASKED,
            &[H, N, H, N, R],
        ),
        (
            "1.3, certificate",
            &[
                hello,
                &[(20, 1), (23, 900), (23, 280), (23, 53)],
                &[(23, 90)],
            ],
            STAGE_ASKED,
            &[H, N, N, N, N, R],
        ),
        (
            "1.3, certificate in one record",
            &[hello, &[(20, 1), (23, 1200)], &[(23, 90)]],
            STAGE_ASKED,
            &[H, N, N, R],
        ),
        (
            "1.3, server refused",
            &[hello, &[(20, 1), (23, 19)]],
            STAGE_FLIGHT,
            &[H, N, N],
        ),
        (
            "1.3, farewell without a request",
            &[hello, &[(20, 1), (23, 53)], &[(23, 19)]],
            STAGE_FINISHED,
            &[H, N, N, N],
        ),
        (
            "1.2",
            &[hello, &[(22, 70), (20, 1), (22, 40)], &[(23, 100)]],
            STAGE_SETTLED,
            &[H, H, N, N, R],
        ),
        (
            "1.2, resumed, all at once",
            &[hello, &[(20, 1), (22, 40), (23, 100)]],
            STAGE_SETTLED,
            &[H, N, N, R],
        ),
        (
            "1.2, each by itself",
            &[
                hello,
                &[(22, 70)],
                &[(20, 1)],
                &[(22, 112)],
                &[(23, 100)],
                &[(21, 26)],
            ],
            STAGE_SETTLED,
            &[H, H, N, N, R, N],
        ),
        (
            "1.2, end of the handshake missed",
            &[hello, &[(22, 16000)], &[(23, 100)]],
            STAGE_SETTLED,
            &[H, H, R],
        ),
    ];
    for (name, segments, stage, wanted) in cases {
        let (last, said) = client(segments);
        assert_eq!((said.as_slice(), last), (*wanted, *stage), "{name}");
    }
}

/// A server's records, as they come: `early` before the request has arrived, else after it.
/// Several in one segment are told by `with_next`. Returns which of them answered.
struct Server {
    known: u32,
}

#[derive(Clone, Copy)]
enum Comes {
    /// While nothing is owed.
    Before(u32),
    /// While the request is owed, in a segment of its own.
    Alone(u32),
    /// While the request is owed, with this one behind it in its segment.
    With(u32, u32),
}
use Comes::{Alone, Before, With};

impl Server {
    /// The places of the answers, and the tickets that were seen.
    fn connection(&mut self, records: &[Comes]) -> Option<usize> {
        let mut seen = 0;
        let mut answer = None;
        for (i, comes) in records.iter().enumerate() {
            let (length, next, after_request) = match *comes {
                Before(length) => (length, 0, false),
                Alone(length) => (length, 0, true),
                With(length, next) => (length, next, true),
            };
            let is_owed = after_request && answer.is_none();
            let what = received(seen, self.known, of(23, length), next, is_owed);
            assert!(is_owed || !what.is_answer);
            (seen, self.known) = (what.seen, what.known);
            if what.is_answer {
                answer = Some(i);
            }
        }
        answer
    }
}

const T: u32 = 250;

#[test]
fn no_tickets() {
    let mut server = Server { known: 0 };
    for _ in 0..3 {
        assert_eq!(server.connection(&[Alone(300), Alone(90)]), Some(0));
        assert_eq!(server.connection(&[Alone(20)]), Some(0));
        assert_eq!(server.connection(&[Alone(16000), Alone(16000)]), Some(0));
    }
    assert_eq!(server.known, 0);
}

/// The first connection teaches: its answer is early. The others are right.
#[test]
fn two_tickets_that_come_after_the_request() {
    let mut server = Server { known: 0 };
    let connection = [Alone(T), Alone(T), Alone(400)];
    assert_eq!(server.connection(&connection), Some(0));
    assert_eq!(known_count(server.known), 2);
    for _ in 0..3 {
        assert_eq!(server.connection(&connection), Some(2));
        // The server hangs.
        assert_eq!(server.connection(&[Alone(T), Alone(T)]), None);
        // It resumes: one ticket.
        assert_eq!(server.connection(&[Alone(T), Alone(400)]), Some(1));
        // An answer that looks like a ticket.
        assert_eq!(server.connection(&[Alone(T), Alone(T), Alone(T)]), Some(2));
        assert_eq!(known_count(server.known), 2);
    }
}

#[test]
fn tickets_in_one_segment() {
    for count in 2..=4 {
        let mut server = Server { known: 0 };
        let mut connection: Vec<_> = (1..count).map(|_| With(T, T)).collect();
        connection.extend([With(T, 400), Alone(400)]);
        // Two and four are seen at once, three (which nobody sends) once they were met.
        let first = server.connection(&connection);
        assert_eq!(first, Some(if count == 3 { 2 } else { count }));
        for _ in 0..3 {
            assert_eq!(server.connection(&connection), Some(count), "{count}");
        }
        assert_eq!(known_count(server.known), count as u32);
    }
}

/// One by one, all before the request: learned at once, and known when they come late.
#[test]
fn tickets_before_the_request() {
    for count in 1..=4 {
        let mut server = Server { known: 0 };
        let before: Vec<_> = (0..count).map(|_| Before(T)).collect();
        let with_answer = [&before[..], &[Alone(T)]].concat();
        assert_eq!(server.connection(&with_answer), Some(count));
        let mut late: Vec<_> = (0..count).map(|_| Alone(T)).collect();
        assert_eq!(server.connection(&late), None);
        late.push(Alone(500));
        assert_eq!(server.connection(&late), Some(count));
    }
}

/// One was seen before a request; that there are two is learned when both come late.
#[test]
fn the_second_ticket_is_learned() {
    let mut server = Server { known: 0 };
    assert_eq!(server.connection(&[Before(T), Alone(400)]), Some(1));
    assert_eq!(known_count(server.known), 1);
    let late = [Alone(T), Alone(T), Alone(400)];
    assert_eq!(server.connection(&late), Some(1));
    assert_eq!(server.connection(&late), Some(2));
    assert_eq!(known_count(server.known), 2);
}

/// A ticket alone, always late: nothing tells it from an answer, and nothing is learned.
#[test]
fn a_single_late_ticket_stays_unknown() {
    let mut server = Server { known: 0 };
    for _ in 0..5 {
        assert_eq!(server.connection(&[Alone(T), Alone(400)]), Some(0));
    }
    assert_eq!(server.connection(&[Before(T), Alone(400)]), Some(1));
    assert_eq!(server.connection(&[Alone(T), Alone(400)]), Some(1));
}

#[test]
fn alerts_answer_nothing() {
    let mut server = Server { known: 0 };
    assert_eq!(server.connection(&[Alone(ALERT)]), None);
    assert_eq!(server.known, 0);
}

#[test]
fn a_connection_shows_its_tickets_once() {
    let (mut seen, mut known, mut shown) = (0, 0, 0);
    for is_owed in [true, false, false, false] {
        let what = received(seen, known, of(23, T), 0, is_owed);
        shown += u32::from(shows_tickets(seen, what.seen));
        (seen, known) = (what.seen, what.known);
    }
    assert_eq!((shown, known_count(known)), (1, 4));
}

proptest! {
    #[test]
    fn nothing_panics(seen: u32, known: u32, kind: u8, length in 0u32..65536, next: u32, owed: bool) {
        let what = received(seen, known, of(kind, length), next, owed);
        prop_assert!(owed || !what.is_answer);
        for stage in 0..8 {
            let _ = sent(stage, of(kind, length), owed);
        }
    }
}
