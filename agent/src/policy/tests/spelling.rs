//! How destinations and workloads are written.

use std::net::IpAddr;

use agent_common::{DestinationKey, key::mapped};

use super::super::{Destination, DestinationArg, DestinationPattern, WorkloadPattern};
use super::known;

#[test]
fn patterns_in_their_one_form() {
    for (written, canonical) in [
        ("10.0.0.5:5432", "10.0.0.5:5432"),
        ("10.0.0.5/32", "10.0.0.5"),
        ("10.0.0.0/8", "10.0.0.0/8"),
        ("10.0.0.0/8:5432", "10.0.0.0/8:5432"),
        ("[2001:DB8:0::1]:443", "[2001:db8::1]:443"),
        ("2001:db8::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("[2001:db8::]/32:443", "[2001:db8::]/32:443"),
        ("[2001:db8::]/32", "2001:db8::/32"),
        ("2001:db8::/32", "2001:db8::/32"),
        ("0.0.0.0/0:53", "0.0.0.0/0:53"),
        ("[::]/0:53", "[::]/0:53"),
        ("::ffff:10.0.0.5", "10.0.0.5"),
        ("[::ffff:10.0.0.0]/104:80", "10.0.0.0/8:80"),
        ("::ffff:0:0/96", "0.0.0.0/0"),
        ("db.internal:5432", "db.internal:5432"),
        ("DB.Internal.", "db.internal"),
        ("*.internal", "*.internal"),
        ("*.Internal.:443", "*.internal:443"),
        ("localhost", "localhost"),
        ("_sip.x-1.example", "_sip.x-1.example"),
    ] {
        let pattern: DestinationPattern = written
            .parse()
            .unwrap_or_else(|error| panic!("{written} {error}"));
        assert_eq!(pattern.to_string(), canonical);
    }
}

#[test]
fn what_patterns_match() {
    let to = |text: &str| -> Destination { text.parse().expect("a destination") };
    for (pattern, destination, name, expected) in [
        ("10.0.0.0/8", "10.255.0.1:1", None, true),
        ("10.0.0.0/8:2", "10.255.0.1:1", None, false),
        ("10.0.0.0/8", "11.0.0.1:1", None, false),
        ("10.0.0.0/8", "[::ffff:10.1.2.3]:1", None, true),
        ("127.0.0.1", "0.0.0.0:1", None, true),
        ("::/0", "[2001:db8::1]:1", None, true),
        ("::/0", "10.0.0.1:1", None, false),
        ("0.0.0.0/0", "[2001:db8::1]:1", None, false),
        ("db.internal", "10.0.0.1:1", None, false),
        ("db.internal", "10.0.0.1:1", Some("db.internal"), true),
        ("db.internal:2", "10.0.0.1:1", Some("db.internal"), false),
        ("*.internal", "10.0.0.1:1", Some("db.internal"), true),
        ("*.internal", "10.0.0.1:1", Some("a.db.internal"), true),
        ("*.internal", "10.0.0.1:1", Some("internal"), false),
        ("*.internal", "10.0.0.1:1", Some("notinternal"), false),
        ("internal", "10.0.0.1:1", Some("db.internal"), false),
    ] {
        let parsed: DestinationPattern = pattern.parse().expect("a pattern");
        let names: Vec<_> = name.map(|name| known(name, false)).into_iter().collect();
        assert_eq!(
            parsed.matches(&to(destination), &names),
            expected,
            "{pattern} {destination}"
        );
    }
}

#[test]
fn destinations_in_their_one_form() {
    for (written, canonical) in [
        ("10.0.0.5:5432", "10.0.0.5:5432"),
        ("[2001:DB8::0:1]:443", "[2001:db8::1]:443"),
        ("[::ffff:10.0.0.5]:80", "10.0.0.5:80"),
        ("[fe80::1%3]:443", "[fe80::1%3]:443"),
        ("169.254.1.1%2:80", "169.254.1.1%2:80"),
        ("0.0.0.0:80", "127.0.0.1:80"),
        ("[::]:80", "[::1]:80"),
        ("DB.internal.:5432", "db.internal:5432"),
    ] {
        let arg: DestinationArg = written
            .parse()
            .unwrap_or_else(|error| panic!("{written} {error}"));
        assert_eq!(arg.to_string(), canonical);
    }
}

#[test]
fn destinations_that_are_refused() {
    for (written, said) in [
        ("10.0.0.5", "has no port"),
        ("db.internal", "has no port"),
        ("[::1]", "has no port"),
        (
            "2001:db8::1",
            "is an IPv6 address without a port; write it as \"[2001:db8::1]:PORT\"",
        ),
        (
            "10.0.0.5:0",
            "has the port \"0\", which is no number from 1 to 65535",
        ),
        (
            "[2001:db8::1%3]:443",
            "names an interface, which only a link-local address may",
        ),
        (
            "db%3:443",
            "names an interface, which only a link-local address may",
        ),
        (
            "[fe80::1%eth0]:443",
            "has \"eth0\" where a number of an interface should stand (\"ip link\" shows it)",
        ),
        (
            "*.internal:80",
            "has a \"*\", which stands for no single destination",
        ),
        ("a:b:1", "has \"a:b\" where an IP address should stand"),
        (
            "10.0.0.0/8:80",
            "is a prefix, which stands for no single destination",
        ),
        ("", "has no port"),
    ] {
        let error = written.parse::<DestinationArg>().expect_err(written);
        assert_eq!(error.to_string(), said, "{written}");
    }
    let error = "db.internal:80".parse::<Destination>().expect_err("a name");
    assert_eq!(error.to_string(), "names a host where an address is needed");
}

#[test]
fn keys_of_the_kernel() {
    let v4: Destination = "10.0.0.5:5432".parse().expect("a destination");
    let key = v4.to_key(7, 9);
    assert_eq!((key.cgroup_id, key.netns_cookie, key.ifindex), (7, 9, 0));
    assert_eq!(key.addr, mapped([10, 0, 0, 5]));
    assert_eq!(key.port_be.to_ne_bytes(), [0x15, 0x38]);
    assert_eq!(Destination::from_key(&key), v4);

    let local: Destination = "[fe80::1%3]:443".parse().expect("a destination");
    assert_eq!(local.to_key(0, 0).ifindex, 3);
    assert_eq!(local.to_manual_key().ifindex, 3);
    assert_eq!(Destination::from_key(&local.to_key(0, 0)), local);
    assert_eq!(
        local.addr(),
        "fe80::1".parse::<IpAddr>().expect("an address")
    );

    // An interface says nothing about an address that is the same on all of them.
    let global = DestinationKey { ifindex: 3, ..key };
    assert_eq!(Destination::from_key(&global).to_string(), "10.0.0.5:5432");
}

#[test]
fn workload_globs() {
    for (pattern, workload, expected) in [
        ("*", "/", true),
        ("*", "system.slice/a.service", true),
        ("/", "/", true),
        ("/", "a", false),
        ("system.slice/a.service", "system.slice/a.service", true),
        ("system.slice/a.service", "system.slice/a.service2", false),
        ("system.slice/*", "system.slice/a/b", true),
        ("*/billing-*", "system.slice/billing-1.service", true),
        ("*/billing-*", "billing-1.service", false),
        ("*billing*", "billing", true),
        ("a?c", "abc", true),
        ("a?c", "a/c", true),
        ("a?c", "ac", false),
        ("a*b*c", "a-b-b-c", true),
        ("a*b*c", "a-c-b", false),
        ("a**c", "ac", true),
        ("*é?", "aéb", true),
        ("[ab]", "a", false),
    ] {
        let parsed: WorkloadPattern = pattern.parse().expect("a pattern");
        assert_eq!(parsed.matches(workload), expected, "{pattern} {workload}");
    }
}
