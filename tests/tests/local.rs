//! Connects that fail before a SYN leaves, and addresses that mean something else.

use std::net::SocketAddr;

use serde_json::Value;
use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    net::{Namespace, TestNet},
    server::Server,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// Such a connect is `local`: no attempt, no failure, nothing in flight, the breaker closed.
#[track_caller]
fn assert_local(row: &Value, count: u64) {
    assert_eq!(row["local"], count, "{row:#}");
    assert_eq!(
        (&row["attempts"], &row["in_flight"]),
        (&0.into(), &0.into()),
        "{row:#}"
    );
    assert_eq!(row["windows"]["connects"]["calls"], 0, "{row:#}");
    assert_eq!(row["state"], "closed", "{row:#}");
    assert_balanced(row);
}

#[test]
fn without_a_route() {
    let net = TestNet::new();
    let group = TestCgroup::new("no-route");
    let agent = Agent::start(&group, "");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let all = [
        (SocketAddr::new(TestNet::NO_ROUTE, 80), libc::ENETUNREACH),
        (
            SocketAddr::new(TestNet::UNREACHABLE, 80),
            libc::EHOSTUNREACH,
        ),
        (address("[2001:db8::1]:80"), libc::ENETUNREACH),
    ];
    for (to, errno) in all {
        for _ in 0..3 {
            for how in [
                How::default(),
                How {
                    nonblocking: true,
                    ..How::default()
                },
            ] {
                assert_eq!(dialer.connect_how(to, how).errno, errno, "{to}");
            }
        }
        let all_ended = |row: &Value| row["local"] == 6;
        assert_local(
            &agent.wait_row(&to.to_string(), "six local ends", all_ended),
            6,
        );
    }
}

#[test]
fn without_a_free_port() {
    let net = TestNet::new();
    let group = TestCgroup::new("no-port");
    let agent = Agent::start(&group, "");
    net.client.enter(|| {
        std::fs::write("/proc/sys/net/ipv4/ip_local_port_range", "40000 40003").expect("sysctl");
    });
    let server = Server::start(&net.server, TestNet::server4(0));
    let to = server.address();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    // The sockets are kept: four ports are all there are.
    let errnos = dialer.open(to, 4, How::default());
    assert!(
        errnos
            .iter()
            .all(|errno| [0, libc::EINPROGRESS].contains(errno)),
        "{errnos:?}"
    );
    assert_eq!(dialer.settle(wait::LONGEST), [0; 4]);
    for _ in 0..6 {
        assert_eq!(dialer.connect(to).errno, libc::EADDRNOTAVAIL);
    }
    let row = agent.wait_row(&to.to_string(), "six local ends", |row| row["local"] == 6);
    assert_eq!(
        (&row["attempts"], &row["established"]),
        (&4.into(), &4.into()),
        "{row:#}"
    );
    assert_eq!(
        (&row["in_flight"], &row["state"]),
        (&0.into(), &"closed".into()),
        "{row:#}"
    );
    assert_balanced(&row);
}

/// 0.0.0.0 and [::] are this host, and mapped addresses are IPv4.
#[test]
fn unspecified_and_mapped_addresses_are_what_they_mean() {
    let namespace = Namespace::new("meaning");
    let group = TestCgroup::new("meaning");
    let agent = Agent::start(&group, "[defaults.breaker]\nredial = false\n");
    let four = Server::start(&namespace, address("127.0.0.1:8080"));
    let six = Server::start(&namespace, address("[::1]:8080"));
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    for to in [
        "0.0.0.0:8080",
        "127.0.0.1:8080",
        "[::ffff:127.0.0.1]:8080",
        "[::ffff:0.0.0.0]:8080",
    ] {
        assert_eq!(dialer.connect(address(to)).errno, 0, "{to}");
    }
    for to in ["[::]:8080", "[::1]:8080"] {
        assert_eq!(dialer.connect(address(to)).errno, 0, "{to}");
    }
    four.wait_accepts(4);
    six.wait_accepts(2);
    assert_eq!(agent.row("127.0.0.1:8080")["established"], 4);
    assert_eq!(agent.row("[::1]:8080")["established"], 2);
    assert_eq!(agent.status()["destinations"].as_array().unwrap().len(), 2);

    // One breaker for all the ways to write it; the other family has its own.
    four.stop();
    for _ in 0..5 {
        assert_eq!(
            dialer.connect(address("0.0.0.0:8080")).errno,
            libc::ECONNREFUSED
        );
    }
    agent.wait_state("127.0.0.1:8080", "open");
    let _four = Server::start(&namespace, address("127.0.0.1:8080"));
    let mapped = address("[::ffff:127.0.0.1]:8080");
    assert_eq!(dialer.connect(mapped).errno, libc::ECONNREFUSED);
    assert_eq!(dialer.connect(address("[::1]:8080")).errno, 0);
    assert_eq!(agent.row("127.0.0.1:8080")["rejected"]["breaker"], 1);
}

/// A socket that connects to itself establishes without anybody listening.
#[test]
fn to_oneself() {
    let namespace = Namespace::new("oneself");
    let group = TestCgroup::new("oneself");
    let agent = Agent::start(&group, "");
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    for to in [address("127.0.0.1:45678"), address("[::1]:45678")] {
        let end = dialer.connect_how(
            to,
            How {
                bind: Some(to),
                ..How::default()
            },
        );
        assert_eq!((end.errno, end.user_timeout), (0, 0), "{to}");
        let row = agent.row(&to.to_string());
        assert_eq!(
            (&row["attempts"], &row["established"]),
            (&1.into(), &1.into()),
            "{row:#}"
        );
        assert_eq!(row["in_flight"], 0, "{row:#}");
        assert_balanced(&row);
    }
}

/// A close by a live program after a short wait is `abandoned`, after a long one `gave_up`.
#[test]
fn closing_an_unanswered_connect() {
    let net = TestNet::new();
    let group = TestCgroup::new("closing");
    // A short wait is one of less than 3 s: also where the machine is busy.
    let config = "[defaults.timeouts]\nconnect = \"60s\"\n[defaults.breaker]\ngave_up = \"3s\"\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let to = SocketAddr::new(TestNet::blackhole4(0), 80);
    let destination = to.to_string();
    dialer.open(to, 3, How::default());
    assert_eq!(agent.row(&destination)["in_flight"], 3);
    dialer.close();
    let row = agent.row(&destination);
    assert_eq!(
        (&row["abandoned"], &row["in_flight"]),
        (&3.into(), &0.into()),
        "{row:#}"
    );
    assert_eq!(row["windows"]["connects"]["calls"], 0, "{row:#}");

    dialer.open(to, 2, How::default());
    let pending = dialer.settle(std::time::Duration::from_millis(3_100));
    assert_eq!(pending.last(), Some(&libc::EINPROGRESS));
    dialer.close();
    let row = agent.row(&destination);
    assert_eq!(
        (&row["abandoned"], &row["failures"]["gave_up"]),
        (&3.into(), &2.into()),
        "{row:#}"
    );
    assert_eq!(row["windows"]["connects"]["failures"], 2, "{row:#}");
    assert_balanced(&row);
}

/// A program that is killed has not given up, however long it had waited.
#[test]
fn a_killed_program_has_abandoned() {
    let net = TestNet::new();
    let group = TestCgroup::new("killed");
    // (The timeout is not to come before its end.)
    let config =
        "[defaults.timeouts]\nconnect = \"60s\"\n[defaults.breaker]\ngave_up = \"100ms\"\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let to = SocketAddr::new(TestNet::blackhole4(0), 80);
    dialer.open(to, 7, How::default());
    assert_eq!(
        dialer.settle(std::time::Duration::from_millis(200)),
        [libc::EINPROGRESS; 7]
    );
    dialer.kill();
    let row = agent.wait_row(&to.to_string(), "nothing in flight", |row| {
        row["in_flight"] == 0
    });
    assert_eq!(
        (&row["abandoned"], &row["state"]),
        (&7.into(), &"closed".into()),
        "{row:#}"
    );
    assert_balanced(&row);
}
