//! Which policy wins, in the words of `explain`.

use agent_common::key::{CLASS_POLICY, CLASS_PROTECTED, POLICY_KEY_EXACT_BITS};

use super::super::{Config, KnownName, parse_str};
use super::known;

/// A configuration with one policy for each (name, destinations, workloads).
fn config(policies: &[(&str, &[&str], &[&str])], protected: &[&str]) -> Config {
    let mut text = format!("[protected]\ndestinations = {protected:?}\n");
    for (name, destinations, workloads) in policies {
        text += &format!("[[policy]]\nname = {name:?}\n");
        for (key, list) in [("destinations", destinations), ("workloads", workloads)] {
            if !list.is_empty() {
                text += &format!("{key} = {list:?}\n");
            }
        }
    }
    parse_str("f.toml", &text).unwrap_or_else(|error| panic!("{error}"))
}

fn why(config: &Config, to: &str, workload: Option<&str>, name: Option<&str>) -> String {
    let names: Vec<KnownName> = name.map(|name| known(name, true)).into_iter().collect();
    let resolution = config.resolve(&to.parse().expect("a destination"), workload, &names);
    let winner = &config.policy(resolution.policy).expect("a policy").name;
    assert!(
        resolution.why.starts_with(&format!("{winner}: ")),
        "{resolution:?}"
    );
    assert_eq!(
        resolution.protected,
        resolution.why.contains("; protected by "),
        "{resolution:?}"
    );
    resolution.why
}

#[test]
fn the_most_specific_wins() {
    let all = config(
        &[
            ("everything", &["0.0.0.0/0"], &[]),
            ("net", &["10.0.0.0/8"], &[]),
            ("net-port", &["10.0.0.0/8:5432"], &[]),
            ("net-again", &["10.0.0.0/8"], &[]),
            ("billing", &[], &["*/billing-*"]),
            ("both", &["0.0.0.0/0:5432"], &["*/billing-*"]),
            ("host", &["10.0.0.5"], &[]),
            ("below", &["*.internal"], &[]),
            ("name", &["db.internal"], &[]),
        ],
        &[],
    );
    let billing = Some("system.slice/billing-1");
    for (to, workload, name, expected) in [
        (
            "[2001:db8::1]:1",
            None,
            None,
            "default: no policy matches, so the defaults apply",
        ),
        (
            "11.0.0.1:1",
            None,
            None,
            "everything: destination 0.0.0.0/0 matches",
        ),
        (
            "10.0.0.1:1",
            None,
            None,
            "net: destination 10.0.0.0/8 matches; before net-again, which stands later in the \
             file; before everything, whose prefix is shorter",
        ),
        (
            "10.0.0.1:5432",
            Some("system.slice/other"),
            None,
            "net-port: destination 10.0.0.0/8:5432 matches; before net, which does not name the \
             port; before net-again, which does not name the port; before everything, whose \
             prefix is shorter",
        ),
        (
            "11.0.0.1:1",
            billing,
            None,
            "everything: destination 0.0.0.0/0 matches; before billing, as a destination counts \
             more than a workload",
        ),
        (
            "[::1]:1",
            billing,
            None,
            "billing: workload */billing-* matches",
        ),
        (
            "11.0.0.1:5432",
            billing,
            None,
            "both: destination 0.0.0.0/0:5432 and workload */billing-* match; before everything, \
             which does not name the workload; before billing, which does not name the destination",
        ),
        (
            "10.0.0.5:5432",
            None,
            Some("db.internal"),
            "name: destination db.internal matches; before host, which does not name the exact \
             name; before below, which does not name the exact name; before net-port, which does \
             not name the exact name; before 3 more",
        ),
        (
            "10.0.0.5:5432",
            None,
            Some("x.internal"),
            "host: destination 10.0.0.5 matches; before below, which does not name the exact \
             address; before net-port, which does not name the exact address; before net, which \
             does not name the exact address; before 2 more",
        ),
        (
            "11.0.0.5:1",
            None,
            Some("x.internal"),
            "below: destination *.internal matches; before everything, which names a prefix \
             instead of a name",
        ),
    ] {
        assert_eq!(why(&all, to, workload, name), expected);
    }
}

#[test]
fn the_best_pattern_of_a_policy_counts() {
    let all = config(
        &[
            ("a", &["10.0.0.0/8"], &[]),
            ("b", &["0.0.0.0/0", "10.1.0.0/16", "10.0.0.0/8:1"], &[]),
        ],
        &[],
    );
    assert_eq!(
        why(&all, "10.1.0.1:1", None, None),
        "b: destination 10.1.0.0/16 matches; before a, whose prefix is shorter"
    );
}

#[test]
fn protected_is_said_beside_the_policy() {
    let all = config(&[("a", &["10.0.0.0/8"], &[])], &["10.0.0.53:53", "::/0"]);
    assert_eq!(
        why(&all, "10.0.0.53:53", None, None),
        "a: destination 10.0.0.0/8 matches; protected by 10.0.0.53:53: counted, never refused or \
         timed out"
    );
    assert_eq!(
        why(&all, "[::1]:1", None, None),
        "default: no policy matches, so the defaults apply; protected by ::/0: counted, never \
         refused or timed out"
    );
    assert!(!why(&all, "10.0.0.53:54", None, None).contains("protected"));
}

/// (class, port, address, bits of the address, policy), sorted.
fn entries(config: &Config) -> Vec<(u32, u16, String, u32, u32)> {
    let mut all: Vec<_> = config
        .kernel_entries()
        .iter()
        .map(|entry| {
            let addr = std::net::Ipv6Addr::from(entry.key.addr).to_string();
            let bits = entry.prefix_len - POLICY_KEY_EXACT_BITS;
            (
                entry.key.class,
                u16::from_be(entry.key.port_be),
                addr,
                bits,
                entry.policy,
            )
        })
        .collect();
    all.sort();
    all
}

#[test]
fn kernel_entries_of_policies() {
    let all = config(
        &[
            ("workload", &["10.0.0.9"], &["*"]),
            ("net", &["10.0.0.0/8"], &[]),
            ("db", &["10.0.0.0/8:5432", "10.0.0.5", "db.internal"], &[]),
            ("late", &["10.0.0.0/8:5432", "10.0.0.0/8"], &[]),
        ],
        &[],
    );
    let entry =
        |port, addr: &str, bits, policy| (CLASS_POLICY, port, addr.to_owned(), bits, policy);
    assert_eq!(
        entries(&all),
        [
            entry(0, "::ffff:10.0.0.0", 104, 2),
            entry(0, "::ffff:10.0.0.5", 128, 3),
            entry(5432, "::ffff:10.0.0.0", 104, 3),
            entry(5432, "::ffff:10.0.0.5", 128, 3),
        ]
    );
}

/// `::/0` is for IPv6 alone, though IPv4 addresses in their 16-byte form lie in it.
#[test]
fn kernel_entries_keep_the_families_apart() {
    let policy = config(&[("six", &["::/0"], &[])], &[]);
    let entry =
        |class, port, addr: &str, bits, policy| (class, port, addr.to_owned(), bits, policy);
    assert_eq!(
        entries(&policy),
        [
            entry(CLASS_POLICY, 0, "::", 0, 1),
            entry(CLASS_POLICY, 0, "::ffff:0.0.0.0", 96, 0)
        ]
    );

    let both = config(&[], &["::/0", "0.0.0.0/0"]);
    assert_eq!(
        entries(&both),
        [
            entry(CLASS_PROTECTED, 0, "::", 0, 1),
            entry(CLASS_PROTECTED, 0, "::ffff:0.0.0.0", 96, 1)
        ]
    );

    let six = config(&[], &["::/94"]);
    assert_eq!(entries(&six), [entry(CLASS_PROTECTED, 0, "::", 94, 1)]);

    let six = config(&[], &["::fffc:0:0/94"]);
    assert_eq!(
        entries(&six),
        [
            entry(CLASS_PROTECTED, 0, "::fffc:0:0", 95, 1),
            entry(CLASS_PROTECTED, 0, "::fffe:0:0", 96, 1),
        ]
    );
}

#[test]
fn kernel_entries_of_the_defaults() {
    let entry = |port, addr: &str, bits| (CLASS_PROTECTED, port, addr.to_owned(), bits, 1);
    assert_eq!(
        entries(&Config::default_config()),
        [
            entry(0, "::ffff:169.254.0.0", 112),
            entry(53, "::", 0),
            entry(53, "::ffff:0.0.0.0", 96),
            entry(53, "::ffff:169.254.0.0", 112),
        ]
    );
}
