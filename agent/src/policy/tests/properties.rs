//! What holds for every text, every pattern and every configuration.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use agent_common::key::{CLASS_POLICY, CLASS_PROTECTED, POLICY_KEY_EXACT_BITS};
use ipnet::IpNet;
use proptest::{collection::vec, option, prelude::*, sample::select};

use super::super::{
    Config, DEFAULT_CONFIG, Destination, DestinationArg, DestinationPattern, KernelEntry,
    KnownName, Target, WorkloadPattern, diff, duration::parse_duration, format_duration, parse_str,
};

use super::known;

/// Addresses in which short prefixes, mapped ones and neighbours meet often.
fn address() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        (select(vec![0u8, 10, 11, 169]), 0..4u8, 0..4u8)
            .prop_map(|(a, b, d)| Ipv4Addr::new(a, b, 0, d).into()),
        (
            select(vec![0u16, 0x2001, 0xfe80]),
            select(vec![0u16, 0xfffc, 0xffff]),
            0..4u16
        )
            .prop_map(|(a, f, h)| Ipv6Addr::new(a, 0, 0, 0, 0, f, 0, h).into()),
        any::<[u8; 4]>().prop_map(IpAddr::from),
        any::<[u8; 16]>().prop_map(IpAddr::from),
    ]
}

/// A prefix that a pattern can have; half of them from a handful, so that equal ones meet.
fn net() -> impl Strategy<Value = IpNet> {
    let few = [
        "0.0.0.0/0",
        "10.0.0.0/8",
        "10.0.0.0/16",
        "::/0",
        "2001:db8::/32",
    ];
    let few = few.map(|net| net.parse::<IpNet>().expect("a prefix"));
    prop_oneof![select(few.to_vec()), any_net()]
}

fn any_net() -> impl Strategy<Value = IpNet> {
    (address(), 0..=128u8)
        .prop_map(|(addr, length)| {
            let addr = addr.to_canonical();
            let max = if addr.is_ipv4() { 32 } else { 128 };
            IpNet::new(addr, length.min(max)).expect("in range").trunc()
        })
        .prop_filter(
            "what the parser refuses or turns into another family",
            |net| {
                let whole = net.prefix_len() == net.max_prefix_len();
                !(whole && net.addr().is_unspecified()) && net.addr().to_canonical() == net.addr()
            },
        )
}

fn port() -> impl Strategy<Value = Option<u16>> {
    option::of(prop_oneof![select(vec![53u16, 80, 443]), 1..=u16::MAX])
}

pub(super) fn pattern() -> impl Strategy<Value = DestinationPattern> {
    let name = (
        "[a-z][a-z0-9_]{0,8}(\\.[a-z][a-z0-9]{0,5}){0,3}",
        any::<bool>(),
    )
        .prop_map(|(name, wildcard)| Target::Name { name, wildcard });
    let target = prop_oneof![3 => net().prop_map(Target::Address), 1 => name];
    (target, port()).prop_map(|(target, port)| DestinationPattern { target, port })
}

fn destination() -> impl Strategy<Value = Destination> {
    (
        address(),
        prop_oneof![select(vec![53u16, 80, 443]), 1..=u16::MAX],
        0..3u32,
    )
        .prop_map(|(addr, port, ifindex)| Destination::new(addr, port, ifindex))
}

/// A configuration with address patterns only, some policies with workloads.
fn config() -> impl Strategy<Value = Config> {
    let policy = (vec(pattern(), 0..4), any::<bool>());
    (vec(policy, 0..8), vec(pattern(), 0..4)).prop_map(|(policies, protected)| {
        let mut config = Config::default_config();
        for (i, (destinations, workload)) in policies.into_iter().enumerate() {
            let mut policy = config.defaults.clone();
            policy.name = format!("p{i}");
            if workload || destinations.is_empty() {
                policy.workloads = vec!["*/billing".parse().expect("a pattern")];
            }
            policy.destinations = destinations;
            config.policies.push(policy);
        }
        config.protected = protected;
        config
    })
}

/// What the kernel does: the longest prefix under the port, else under port 0.
fn look_up(entries: &[KernelEntry], class: u32, to: &Destination) -> Option<u32> {
    let addr = u128::from_be_bytes(to.addr_bytes());
    [to.port(), 0].into_iter().find_map(|port| {
        entries
            .iter()
            .filter(|entry| entry.key.class == class && entry.key.port_be == port.to_be())
            .filter(|entry| {
                let host_bits = 128 - (entry.prefix_len - POLICY_KEY_EXACT_BITS);
                let differ = addr ^ u128::from_be_bytes(entry.key.addr);
                differ.checked_shr(host_bits).unwrap_or(0) == 0
            })
            .max_by_key(|entry| entry.prefix_len)
            .map(|entry| entry.policy)
    })
}

proptest! {
    #[test]
    fn kernel_and_agent_choose_alike(config in config(), to in vec(destination(), 1..20)) {
        let entries = config.kernel_entries();
        // A destination inside each prefix: random ones rarely hit a long one.
        let inside = config.policies.iter().flat_map(|policy| &policy.destinations)
            .chain(&config.protected)
            .filter_map(|pattern| match &pattern.target {
                Target::Address(net) => {
                    Some(Destination::new(net.addr(), pattern.port.unwrap_or(80), 0))
                }
                Target::Name { .. } => None,
            });
        for to in to.into_iter().chain(inside) {
            let agent = config.resolve(&to, None, &[]);
            let kernel = look_up(&entries, CLASS_POLICY, &to).unwrap_or(0);
            prop_assert_eq!(agent.policy as u32, kernel, "{} {}", to, agent.why);
            let protected = look_up(&entries, CLASS_PROTECTED, &to).is_some();
            prop_assert_eq!(agent.protected, protected, "{} {}", to, agent.why);
        }
    }

    #[test]
    fn kernel_and_agent_choose_alike_by_name(
        config in config(),
        to in vec(destination(), 1..10),
        own in any::<bool>(),
    ) {
        // Each destination has one of the names in the configuration, if there is one.
        let patterns = config.policies.iter().flat_map(|policy| &policy.destinations);
        let names: Vec<_> = patterns.chain(&config.protected).filter_map(|pattern| {
            match &pattern.target {
                Target::Name { name, wildcard: true } => Some(format!("a.{name}")),
                Target::Name { name, wildcard: false } => Some(name.clone()),
                Target::Address(_) => None,
            }
        }).collect();
        let named: Vec<_> = to.iter().zip(names.iter().cycle()).map(|(to, name)| {
            (to.addr(), vec![known(name, own)])
        }).collect();
        let mut entries = config.named_entries(&named);
        let own_keys: Vec<_> = entries.iter().map(|entry| (entry.key, entry.prefix_len)).collect();
        entries.extend(config.kernel_entries().into_iter().filter(|entry| {
            !own_keys.contains(&(entry.key, entry.prefix_len))
        }));
        // An address that appears twice has the names of both.
        let names_of = |to: &Destination| -> Vec<KnownName> {
            let same = named.iter().filter(|(addr, _)| *addr == to.addr());
            same.flat_map(|(_, names)| names.clone()).collect()
        };
        for to in &to {
            if named.iter().filter(|(addr, _)| *addr == to.addr()).count() > 1 {
                continue;
            }
            for port in [to.port(), 53, 80, 443, 9999] {
                let to = Destination::new(to.addr(), port, to.ifindex());
                let agent = config.resolve(&to, None, &names_of(&to));
                let kernel = look_up(&entries, CLASS_POLICY, &to).unwrap_or(0);
                prop_assert_eq!(agent.policy as u32, kernel, "{} {}", to, agent.why);
                let protected = look_up(&entries, CLASS_PROTECTED, &to).is_some();
                prop_assert_eq!(agent.protected, protected, "{} {}", to, agent.why);
            }
        }
    }

    #[test]
    fn what_programs_are_told_protects_nothing(config in config(), to in destination(), name in "[a-z]{1,5}(\\.[a-z]{1,5}){0,2}") {
        let without = config.resolve(&to, None, &[]).protected;
        let with = config.resolve(&to, None, &[known(&name, false)]).protected;
        prop_assert_eq!(without, with);
        // A name that the agent trusts protects more, never less.
        let own = config.resolve(&to, None, &[known(&name, true)]).protected;
        prop_assert!(own || !without);
    }

    #[test]
    fn kernel_entries_are_well_formed(config in config()) {
        let entries = config.kernel_entries();
        let mut keys = std::collections::HashSet::new();
        for entry in entries {
            let bits = entry.prefix_len - POLICY_KEY_EXACT_BITS;
            prop_assert!(bits <= 128);
            let host = u128::MAX.checked_shr(bits).unwrap_or(0);
            prop_assert_eq!(u128::from_be_bytes(entry.key.addr) & host, 0);
            let most = if entry.key.class == CLASS_POLICY { config.policies.len() } else { 1 };
            prop_assert!(entry.policy as usize <= most, "{:?}", entry);
            prop_assert!(keys.insert((entry.key, entry.prefix_len)), "twice: {:?}", entry);
        }
    }

    #[test]
    fn patterns_survive_their_own_spelling(pattern in pattern()) {
        let text = pattern.to_string();
        prop_assert_eq!(text.parse::<DestinationPattern>(), Ok(pattern), "{}", text);
    }

    #[test]
    fn destinations_survive_their_own_spelling(to in destination()) {
        let text = to.to_string();
        prop_assert_eq!(text.parse::<Destination>(), Ok(to), "{}", text);
        prop_assert_eq!(Destination::from_key(&to.to_key(1, 2)), to);
    }

    #[test]
    fn durations_survive_their_own_spelling(ms in 0..u64::from(u32::MAX)) {
        let duration = Duration::from_millis(ms);
        prop_assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
    }

    #[test]
    fn any_text_is_a_pattern_or_an_error(text in "\\PC{0,40}|[0-9a-f:.*/%\\[\\]]{0,30}") {
        if let Ok(pattern) = text.parse::<DestinationPattern>() {
            let canonical = pattern.to_string();
            prop_assert_eq!(canonical.parse::<DestinationPattern>(), Ok(pattern));
        }
        if let Ok(arg) = text.parse::<DestinationArg>() {
            let canonical = arg.to_string();
            prop_assert_eq!(canonical.parse::<DestinationArg>(), Ok(arg));
        }
        if let Ok(pattern) = text.parse::<WorkloadPattern>() {
            prop_assert_eq!(pattern.as_str(), text);
        }
    }

    #[test]
    fn globs_match_like_their_definition(pattern in "[ab?*]{1,8}", text in "[ab]{0,10}") {
        let parsed: WorkloadPattern = pattern.parse().expect("a pattern");
        prop_assert_eq!(parsed.matches(&text), by_definition(pattern.as_bytes(), text.as_bytes()));
    }

    #[test]
    fn any_bytes_are_a_configuration_or_an_error(bytes in vec(any::<u8>(), 0..300)) {
        survives(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn mutated_files_are_a_configuration_or_an_error(
        start in select(vec![DEFAULT_CONFIG, ORDERS, SERVICES]),
        cuts in vec((any::<prop::sample::Index>(), 0..20usize, select(PIECES)), 1..6),
    ) {
        let mut text: Vec<char> = start.chars().collect();
        for (at, length, piece) in cuts {
            let at = at.index(text.len() + 1);
            let end = (at + length).min(text.len());
            text.splice(at..end, piece.chars());
        }
        survives(&text.into_iter().collect::<String>());
    }
}

const ORDERS: &str = include_str!("../../../../config/examples/orders-db.toml");
const SERVICES: &str = include_str!("../../../../config/examples/many-services.toml");
const PIECES: &[&str] = &[
    "",
    "\n",
    "\"",
    "[",
    "]",
    "{",
    "}",
    "=",
    "#",
    ".",
    "é",
    "\u{0}",
    "\r\n",
    "'''",
    "0",
    "-1",
    "1e999",
    "nan",
    "\"off\"",
    "\"99999999999999h\"",
    "99999999999999999999",
    "[[policy]]",
    "[defaults]\n",
    "x = 1\n",
    "1979-05-27",
    "\"*\"",
    "true",
    "'\u{7f}'",
    "name",
];

/// Whatever the text is, it is read and can be written down again, or it is refused with usable
/// problems; and nothing panics.
fn survives(text: &str) {
    match parse_str("f.toml", text) {
        Ok(config) => {
            assert_eq!(diff(&config, &config), []);
            config.warnings();
            config.kernel_entries();
            let written = config.to_toml();
            assert_eq!(parse_str("f.toml", &written), Ok(config), "{written}");
        }
        Err(error) => {
            assert!(!error.problems.is_empty());
            let lines = text.matches('\n').count() + 1;
            for problem in &error.problems {
                assert!(
                    (1..=lines).contains(&problem.line) && problem.column > 0,
                    "{problem:?}"
                );
                assert!(!problem.what.is_empty(), "{problem:?}");
            }
            let shown = error.to_string();
            assert_eq!(shown.lines().count(), error.problems.len(), "{shown}");
        }
    }
}

fn by_definition(pattern: &[u8], text: &[u8]) -> bool {
    match (pattern, text) {
        ([], []) => true,
        ([b'*', rest @ ..], _) => (0..=text.len()).any(|n| by_definition(rest, &text[n..])),
        ([b'?', rest @ ..], [_, tail @ ..]) => by_definition(rest, tail),
        ([want, rest @ ..], [have, tail @ ..]) => want == have && by_definition(rest, tail),
        _ => false,
    }
}
