//! Destinations that answer some messages and never others: a broker behind TLS whose client logs in and
//! publishes, a produce request that wants no acknowledgement, a stream of telemetry. To Backstop each message is
//! a request, and a program that closes such a connection has given one up. So a row learns whether connections
//! usually end like that, and at which of their exchanges. Runs in the kernel, and is tested natively.
//!
//! A server that hangs looks the same as long as nothing else is known of it. So this is learned only where
//! hardly any connection ends well, and always at the same exchange, which a destination that answers its
//! requests contradicts soon: connections end with everything answered, or at another exchange.

use crate::{
    Row,
    stamp::{PROTOCOL_HTTP1, PROTOCOL_OPAQUE},
};

/// Ends without an answer, until they are usual.
const OFTEN: u32 = 3;
/// So many times as often as other ends they must be.
const TIMES: u32 = 4;
/// Ends of either kind that are remembered; from there on half as much.
const MOST: u32 = 32;
/// Answers for each exchange that was given up and each one before it on a connection, at most: where there are
/// more, others are answered.
const ANSWERS: u64 = 2;
/// At a later exchange of a connection this is not learned, on the contrary: it has been answered often enough.
const LATEST: u32 = 8;

/// What a row has seen of the ends of connections: how many were in order, how many came while an answer was
/// owed, and at which exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ends {
    well: u32,
    unanswered: u32,
    at: u32,
}

impl Ends {
    #[inline(always)]
    const fn unpack(word: u32) -> Self {
        Self {
            well: word & 0xff,
            unanswered: word >> 8 & 0xff,
            at: word >> 16 & 0xff,
        }
    }

    #[inline(always)]
    const fn pack(self) -> u32 {
        self.well | self.unanswered << 8 | self.at << 16
    }

    /// Room for one more of each kind.
    #[inline(always)]
    const fn with_room(self) -> Self {
        if self.well < MOST && self.unanswered < MOST {
            return self;
        }
        Self {
            well: self.well / 2,
            unanswered: self.unanswered / 2,
            at: self.at,
        }
    }

    #[inline(always)]
    const fn are_usual(self) -> bool {
        self.unanswered >= OFTEN && self.unanswered > TIMES * self.well
    }
}

/// A connection has ended, and no request of it was given up.
#[inline(always)]
pub const fn well(word: u32) -> u32 {
    let ends = Ends::unpack(word);
    if ends.well >= MOST && ends.unanswered == 0 {
        return word;
    }
    let ends = ends.with_room();
    Ends {
        well: ends.well + 1,
        ..ends
    }
    .pack()
}

/// A program has given up exchange `number` of a connection.
#[inline(always)]
pub const fn given_up(word: u32, number: u32) -> u32 {
    let ends = Ends::unpack(word);
    if number < 2 || (ends.are_usual() && number < ends.at) {
        return word;
    }
    if number > LATEST {
        return well(word);
    }
    let ends = ends.with_room();
    if ends.unanswered == 0 || ends.at == number {
        Ends {
            unanswered: ends.unanswered + 1,
            at: number,
            ..ends
        }
    } else {
        // What is answered on one connection and not on another is owed an answer.
        Ends {
            well: ends.well + 1,
            unanswered: 1,
            at: number,
        }
    }
    .pack()
}

/// Whether an exchange of a connection whose client speaks this protocol, and has this in `Stamp::tls_stage`, may
/// be one that is answered by nobody. HTTP/1 answers everything, and so do some that are known only by their
/// begin.
#[inline(always)]
pub const fn may_be(protocol: u32, stage: u32) -> bool {
    protocol != PROTOCOL_HTTP1 && (protocol != PROTOCOL_OPAQUE || stage == 0)
}

/// Whether connections of a row usually end while this exchange is owed an answer, so that nobody waits for it:
/// the row's word, the answers that it got, the exchanges that were given up.
#[inline(always)]
pub const fn is_usual(word: u32, number: u32, responses: u64, given_up: u64) -> bool {
    let ends = Ends::unpack(word);
    ends.are_usual()
        && number >= ends.at
        && responses <= given_up.wrapping_mul(ANSWERS * ends.at as u64)
}

/// Whether it is learned of a row that some of its exchanges are answered by nobody.
pub const fn is_learned(row: &Row) -> bool {
    is_usual(
        row.unanswered,
        u32::MAX,
        row.responses,
        row.exchange_gave_up,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stamp::{PROTOCOL_MULTIPLEXED, PROTOCOL_TLS};
    use proptest::prelude::*;

    /// A word after these ends: the exchange that was given up, 0 for an end in order.
    fn after(word: u32, ends: &[u32]) -> u32 {
        ends.iter().fold(word, |word, &number| match number {
            0 => well(word),
            number => given_up(word, number),
        })
    }

    fn is(word: u32, number: u32) -> bool {
        is_usual(word, number, 10, 10)
    }

    #[test]
    fn what_always_ends_alike_is_learned() {
        let word = after(0, &[3, 3]);
        assert!(!is(word, 3));
        let word = after(word, &[3]);
        // And what comes before it on a connection is owed an answer as ever.
        assert_eq!(
            [1, 2, 3, 4].map(|n| is(word, n)),
            [false, false, true, true]
        );
        // A login that is not answered teaches nothing else.
        assert_eq!(after(word, &[2, 2, 2, 2]), word);
        // A few others change nothing, many do.
        let word = after(word, &[3, 3, 0]);
        assert!(is(word, 3));
        assert!(!is(after(word, &[0]), 3));
    }

    #[test]
    fn others_are_answered() {
        let word = after(0, &[3, 3, 3]);
        assert!(is_usual(word, 3, 18, 3));
        assert!(!is_usual(word, 3, 19, 3));
    }

    #[test]
    fn a_destination_that_answers_is_not() {
        // Its requests fail now and then, at any place.
        assert!(!is(after(0, &[2, 3, 2, 4, 2, 2, 2]), 4));
        assert!(!is(after(0, &[0, 2, 2, 2, 2]), 2));
        // It has answered for long, and falls silent: for far longer than a breaker takes to open.
        let long = after(0, &[0; 1000]);
        assert_eq!(long, well(long));
        assert!(!is(after(long, &[2; 40]), 2));
        // The first request of a connection.
        assert_eq!(after(0, &[1, 1, 1, 1]), 0);
        // One after many, and then those of fresh connections: five of them suffice to open a breaker.
        assert!(!is(after(0, &[21, 2, 2, 2, 2]), 2));
    }

    #[test]
    fn learned_is_unlearned() {
        let long = after(0, &[2; 1000]);
        assert!(is(long, 2));
        assert!(!is(after(long, &[0; 8]), 2));
        // It shifts where a greeting becomes known, which is an exchange.
        assert!(!is(after(after(0, &[2; 3]), &[3; 4]), 3));
        assert!(is(after(after(0, &[2; 3]), &[3; 5]), 3));
    }

    #[test]
    fn who_may_be() {
        assert!(may_be(PROTOCOL_TLS, 5) && may_be(PROTOCOL_MULTIPLEXED, 0));
        assert!(may_be(PROTOCOL_OPAQUE, 0) && !may_be(PROTOCOL_OPAQUE, 1));
        assert!(!may_be(PROTOCOL_HTTP1, 0));
    }

    proptest! {
        #[test]
        fn counts_stay_in_their_bounds(ends in prop::collection::vec(0..12_u32, 0..300)) {
            let Ends { well, unanswered, at } = Ends::unpack(after(0, &ends));
            prop_assert!(well <= MOST && unanswered <= MOST && at <= LATEST);
        }
    }
}
