//! What a DNS answer says about names and addresses (RFC 1035).
//!
//! The bytes are whatever came from port 53: nothing in them is believed but their form. Names that are no
//! host names (other characters, too long) are passed over, so that nothing of them has to be cleaned when
//! it is shown.

use std::{net::IpAddr, time::Duration};

use simple_dns::{CLASS, Name, Packet, PacketFlag, QCLASS, QTYPE, RCODE, TYPE, rdata::RData};

use crate::policy::host_name;

/// Addresses of one answer that are taken in.
pub const MOST_ADDRESSES: usize = 64;
/// Names on the way from the question to the addresses (CNAME) that are taken in, the question included.
pub const MOST_NAMES: usize = 8;
/// Records of each kind in a message that is looked at: an answer of 1,232 bytes holds some hundred.
const MOST_RECORDS: u16 = 256;
/// Bytes of a message's head.
const HEAD: usize = 12;

/// An answer to the question for a name's addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The name that was asked for, then those that it is an alias of. Lower case, no trailing dot.
    pub names: Vec<String>,
    /// Addresses of one family, not mapped, neither unspecified nor multicast. Never empty.
    pub addresses: Vec<IpAddr>,
    /// How long it may be kept, by its shortest record.
    pub ttl: Duration,
}

/// Reads a message; `None` for everything that is not an answer with addresses.
pub fn decode(message: &[u8]) -> Option<Answer> {
    // The parser makes room for as many records as the head claims.
    let counts = message.get(4..HEAD)?;
    let is_sane = counts
        .chunks_exact(2)
        .all(|count| u16::from_be_bytes([count[0], count[1]]) <= MOST_RECORDS);
    if !is_sane {
        return None;
    }
    let packet = Packet::parse(message).ok()?;
    if !packet.has_flags(PacketFlag::RESPONSE) || packet.rcode() != RCODE::NoError {
        return None;
    }
    let [question] = packet.questions.as_slice() else {
        return None;
    };
    let wants_addresses = matches!(
        question.qtype,
        QTYPE::TYPE(TYPE::A | TYPE::AAAA) | QTYPE::ANY
    );
    if !wants_addresses || question.qclass != QCLASS::CLASS(CLASS::IN) {
        return None;
    }
    let mut names = vec![text(&question.qname)?];
    let mut last = &question.qname;
    let mut ttl = u32::MAX;
    while names.len() < MOST_NAMES {
        let alias = packet
            .answers
            .iter()
            .find_map(|record| match &record.rdata {
                RData::CNAME(target) if is_same(&record.name, last) => Some((record, &target.0)),
                _ => None,
            });
        let Some((record, target)) = alias else {
            break;
        };
        ttl = ttl.min(record.ttl);
        last = target;
        let name = text(target)?;
        if names.contains(&name) {
            return None;
        }
        names.push(name);
    }
    let mut addresses = Vec::new();
    for record in &packet.answers {
        let addr: IpAddr = match &record.rdata {
            RData::A(a) => std::net::Ipv4Addr::from(a.address).into(),
            RData::AAAA(aaaa) => std::net::Ipv6Addr::from(aaaa.address).into(),
            _ => continue,
        };
        let addr = addr.to_canonical();
        let useless = addr.is_unspecified() || addr.is_multicast() || addresses.contains(&addr);
        let family = addresses.first().map(IpAddr::is_ipv4);
        if !is_same(&record.name, last) || useless || family.is_some_and(|v4| v4 != addr.is_ipv4())
        {
            continue;
        }
        ttl = ttl.min(record.ttl);
        addresses.push(addr);
        if addresses.len() == MOST_ADDRESSES {
            break;
        }
    }
    if addresses.is_empty() {
        return None;
    }
    Some(Answer {
        names,
        addresses,
        ttl: Duration::from_secs(u64::from(ttl)),
    })
}

/// Whether two names are the same: case does not matter.
fn is_same(one: &Name<'_>, other: &Name<'_>) -> bool {
    let (one, other) = (one.get_labels(), other.get_labels());
    one.len() == other.len()
        && one
            .iter()
            .zip(other)
            .all(|(a, b)| a.as_ref().eq_ignore_ascii_case(b.as_ref()))
}

/// The name as text, if it is a host name.
fn text(name: &Name<'_>) -> Option<String> {
    let mut text = String::new();
    for label in name.get_labels() {
        // A dot inside a label would make two of it.
        let label = std::str::from_utf8(label.as_ref()).ok()?;
        if label.contains('.') {
            return None;
        }
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(label);
    }
    host_name(&text)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use simple_dns::{Question, ResourceRecord, rdata};

    use super::*;

    fn name(text: &str) -> Name<'_> {
        Name::new(text).expect("a name")
    }

    fn message(asked: &str, qtype: TYPE, records: Vec<ResourceRecord<'_>>) -> Vec<u8> {
        let mut packet = Packet::new_reply(7);
        packet.questions.push(Question::new(
            name(asked).into_owned(),
            QTYPE::TYPE(qtype),
            QCLASS::CLASS(CLASS::IN),
            false,
        ));
        packet.answers = records;
        packet.build_bytes_vec_compressed().expect("a message")
    }

    fn record<'a>(owner: &'a str, ttl: u32, rdata: RData<'a>) -> ResourceRecord<'a> {
        ResourceRecord::new(name(owner), CLASS::IN, ttl, rdata)
    }

    fn a(addr: [u8; 4]) -> RData<'static> {
        RData::A(rdata::A {
            address: u32::from_be_bytes(addr),
        })
    }

    #[test]
    fn addresses_and_aliases() {
        let records = vec![
            record(
                "DB.Internal",
                300,
                RData::CNAME(name("db-1.internal").into()),
            ),
            record("db-1.internal", 60, a([10, 0, 0, 5])),
            record("db-1.internal", 90, a([10, 0, 0, 6])),
            record("db-1.internal", 90, a([10, 0, 0, 5])),
            record("other.internal", 1, a([10, 0, 0, 7])),
            record("db-1.internal", 90, a([0, 0, 0, 0])),
        ];
        let answer = decode(&message("db.internal", TYPE::A, records)).expect("an answer");
        assert_eq!(answer.names, ["db.internal", "db-1.internal"]);
        let expected: Vec<IpAddr> = vec![[10, 0, 0, 5].into(), [10, 0, 0, 6].into()];
        assert_eq!(answer.addresses, expected);
        assert_eq!(answer.ttl, Duration::from_secs(60));
    }

    #[test]
    fn mapped_addresses_are_what_they_map() {
        let address = u128::from_be_bytes([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 5]);
        let records = vec![record("a.b", 5, RData::AAAA(rdata::AAAA { address }))];
        let answer = decode(&message("a.b", TYPE::AAAA, records)).expect("an answer");
        assert_eq!(answer.addresses, [IpAddr::from([10, 0, 0, 5])]);
    }

    #[test]
    fn what_says_nothing() {
        let good = || vec![record("a.b", 5, a([10, 0, 0, 5]))];
        assert!(decode(&message("a.b", TYPE::A, good())).is_some());
        // Another question, no address, a loop.
        assert_eq!(decode(&message("a.b", TYPE::TXT, good())), None);
        assert_eq!(decode(&message("c.d", TYPE::A, good())), None);
        assert_eq!(decode(&message("a.b", TYPE::A, Vec::new())), None);
        let looped = vec![
            record("a.b", 5, RData::CNAME(name("c.d").into())),
            record("c.d", 5, RData::CNAME(name("a.b").into())),
        ];
        assert_eq!(decode(&message("a.b", TYPE::A, looped)), None);
        // A question, and an error.
        let mut asks = message("a.b", TYPE::A, good());
        asks[2] &= 0x7f;
        assert_eq!(decode(&asks), None);
        let mut fails = message("a.b", TYPE::A, good());
        fails[3] |= 3;
        assert_eq!(decode(&fails), None);
        // A head that claims more than there is room for.
        let mut claims = message("a.b", TYPE::A, good());
        claims[6] = 0xff;
        assert_eq!(decode(&claims), None);
    }

    #[test]
    fn names_that_no_host_has() {
        // "_" is one that hosts have in practice.
        for (asked, taken) in [
            ("a_b.internal", true),
            (r"a\027[31m.internal", false),
            (r"a\.b.internal", false),
            (r"\195\164.internal", false),
            ("10.0.0.1", false),
            ("-a.internal", false),
        ] {
            let records = vec![record(asked, 5, a([10, 0, 0, 5]))];
            let answer = decode(&message(asked, TYPE::A, records));
            assert_eq!(answer.is_some(), taken, "{asked}");
        }
    }

    fn is_clean(answer: &Answer) -> bool {
        !answer.addresses.is_empty()
            && answer.addresses.len() <= MOST_ADDRESSES
            && (1..=MOST_NAMES).contains(&answer.names.len())
            && answer
                .names
                .iter()
                .all(|name| name.len() <= 253 && !name.chars().any(char::is_control))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            if let Some(answer) = decode(&bytes) {
                prop_assert!(is_clean(&answer));
            }
        }

        /// Damaged answers get further than noise.
        #[test]
        fn damaged_answers(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
            cut in any::<prop::sample::Index>(),
            cuts in any::<bool>(),
        ) {
            let records = vec![
                record("db.internal", 300, RData::CNAME(name("db-1.internal").into())),
                record("db-1.internal", 60, a([10, 0, 0, 5])),
                record("db-1.internal", 90, a([10, 0, 0, 6])),
            ];
            let mut bytes = message("db.internal", TYPE::A, records);
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            if cuts {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Some(answer) = decode(&bytes) {
                prop_assert!(is_clean(&answer));
            }
        }
    }
}
