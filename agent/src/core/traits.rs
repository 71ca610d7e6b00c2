//! What a destination has shown itself to be, as far as it changes how its calls are judged.

use super::{Nanos, hung::AUTO_LONGEST};

/// Counts that traits are learned from, of one row, since it exists or was reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Exchanges answered.
    pub responses: u64,
    /// Exchanges that programs ended without an answer.
    pub unanswered: u64,
    /// Exchanges that the destination itself broke off.
    pub broken: u64,
    /// Connections usually end while an answer is owed to one and the same exchange.
    pub partly: bool,
    /// The longest wait for an answer.
    pub longest: Nanos,
    /// Connections on which the destination spoke first, and is known to owe a greeting.
    pub greets: bool,
    /// Connections on which it sent session tickets of TLS 1.3.
    pub tickets: u64,
}

/// Something learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trait {
    /// It never answers (syslog, Graphite): who gives up on it judges nobody.
    OneWay,
    /// It answers some of what it is sent and never the rest (a publisher's messages): who gives up on that judges
    /// nobody.
    PartlyOneWay,
    /// It speaks first: each connection is owed a greeting.
    ServerFirst,
    /// It sends session tickets after the TLS 1.3 handshake, which answer nothing.
    Tls13Tickets,
    /// It has answered after more than [`AUTO_LONGEST`]: silence is not called hung there.
    LongWaits,
}

impl Trait {
    /// Its name, as shown.
    pub fn name(self) -> &'static str {
        match self {
            Self::OneWay => "one-way",
            Self::PartlyOneWay => "partly-one-way",
            Self::ServerFirst => "server-first",
            Self::Tls13Tickets => "tls13-tickets",
            Self::LongWaits => "long-waits",
        }
    }
}

/// As often must exchanges have ended without an answer before a destination is called one-way.
const ONE_WAY_AFTER: u64 = 3;

/// What is learned from these counts.
pub fn learned(facts: &Facts) -> impl Iterator<Item = Trait> {
    let is_one_way = facts.responses == 0 && facts.broken == 0 && facts.unanswered >= ONE_WAY_AFTER;
    [
        is_one_way.then_some(Trait::OneWay),
        (facts.partly && !is_one_way).then_some(Trait::PartlyOneWay),
        facts.greets.then_some(Trait::ServerFirst),
        (facts.tickets > 0).then_some(Trait::Tls13Tickets),
        (facts.longest > AUTO_LONGEST).then_some(Trait::LongWaits),
    ]
    .into_iter()
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(facts: Facts) -> Vec<&'static str> {
        learned(&facts).map(Trait::name).collect()
    }

    #[test]
    fn each_by_its_counts() {
        let nothing = Facts::default();
        assert!(names(nothing).is_empty());
        let sink = Facts {
            unanswered: 3,
            ..nothing
        };
        assert_eq!(names(sink), ["one-way"]);
        for healthy in [
            Facts {
                unanswered: 2,
                ..sink
            },
            Facts {
                responses: 1,
                ..sink
            },
            Facts { broken: 1, ..sink },
        ] {
            assert!(names(healthy).is_empty(), "{healthy:?}");
        }
        let all = Facts {
            responses: 9,
            longest: AUTO_LONGEST + Nanos(1),
            greets: true,
            tickets: 2,
            partly: true,
            ..nothing
        };
        let wanted = [
            "partly-one-way",
            "server-first",
            "tls13-tickets",
            "long-waits",
        ];
        assert_eq!(names(all), wanted);
        assert_eq!(
            names(Facts {
                partly: true,
                ..sink
            }),
            ["one-way"]
        );
        let just = Facts {
            longest: AUTO_LONGEST,
            ..nothing
        };
        assert!(names(just).is_empty());
    }
}
