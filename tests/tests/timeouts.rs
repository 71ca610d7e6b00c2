//! Connect timeouts: exact, for every kind of connect, and never in the way of the program's own.

use std::{net::SocketAddr, time::Duration};

use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    dialer::{Dialed, Dialer, How},
    net::TestNet,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");

/// One for each blackhole address of its number.
const TIMEOUTS_MS: [u64; 5] = [100, 300, 1_000, 2_000, 5_000];

/// How late a timeout may be: 20 ms and 1 %.
fn tolerance(timeout: Duration) -> Duration {
    Duration::from_millis(20) + timeout / 100
}

/// Ended by its timeout, at the right time. The kernel reckons in whole milliseconds of its own
/// clock, so that an end may come a part of one early.
#[track_caller]
fn assert_on_time(end: &Dialed, timeout: Duration, what: impl std::fmt::Display) {
    assert_eq!(end.errno, libc::ETIMEDOUT, "{what}: {end:?}");
    assert!(
        end.elapsed + Duration::from_millis(1) > timeout,
        "{what} ends early: {end:?}"
    );
    let late = end.elapsed.saturating_sub(timeout);
    assert!(
        late <= tolerance(timeout),
        "{what} is late by {late:?} of {timeout:?}"
    );
}

/// A policy for each blackhole. The breaker is off: this is about time alone.
fn policies() -> String {
    let mut config = String::from("[defaults]\nbreaker = \"off\"\n");
    for (i, ms) in (0..).zip(TIMEOUTS_MS) {
        let (four, six) = (TestNet::blackhole4(i), TestNet::blackhole6(i));
        config += &format!(
            "[[policy]]\nname = \"after-{ms}\"\ndestinations = [\"{four}\", \"{six}/128\"]\n\
             timeouts = {{ connect = \"{ms}ms\" }}\n"
        );
    }
    config
}

/// Every timeout, IPv4 and IPv6, by one kind of connect, all at the same time.
fn every_timeout_is_exact(how: How) {
    let net = TestNet::new();
    let group = TestCgroup::new("timeouts");
    let agent = Agent::start(&group, &policies());
    let mut running = Vec::new();
    for (i, ms) in (0..).zip(TIMEOUTS_MS) {
        for address in [TestNet::blackhole4(i), TestNet::blackhole6(i)] {
            let to = SocketAddr::new(address, 80);
            let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
            dialer.order_connect(to, how);
            running.push((to, Duration::from_millis(ms), dialer));
        }
    }
    for (to, timeout, dialer) in &mut running {
        let end = dialer.dialed();
        assert_on_time(&end, *timeout, *to);
        assert_eq!(end.user_timeout, 0, "the option is given back: {to}");
        let row = agent.row(&to.to_string());
        assert_eq!(row["failures"]["connect_timeout"], 1, "{row:#}");
        assert_eq!(
            row["timeouts_ms"]["connect"],
            timeout.as_millis() as u64,
            "{row:#}"
        );
        assert_eq!(row["in_flight"], 0, "{row:#}");
        assert_balanced(&row);
    }
}

#[test]
fn blocking_connects_end_on_time() {
    every_timeout_is_exact(How::default());
}

#[test]
fn nonblocking_connects_end_on_time() {
    every_timeout_is_exact(How {
        nonblocking: true,
        ..How::default()
    });
}

#[test]
fn io_uring_connects_end_on_time() {
    every_timeout_is_exact(How {
        uring: true,
        ..How::default()
    });
}

/// Many at once: the timers of one do not disturb those of another.
#[test]
fn a_hundred_connects_end_on_time() {
    let net = TestNet::new();
    let group = TestCgroup::new("hundred");
    let agent = Agent::start(&group, &policies());
    let to = SocketAddr::new(TestNet::blackhole4(1), 80);
    let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
    let timeout = Duration::from_millis(300);
    for end in dialer.burst(to, 100) {
        assert_on_time(&end, timeout, to);
    }
    let row = agent.row(&to.to_string());
    assert_eq!(
        (&row["attempts"], &row["failures"]["connect_timeout"]),
        (&100.into(), &100.into())
    );
    assert_balanced(&row);
}

/// A program's own stricter TCP_USER_TIMEOUT wins, and is what it reads back.
#[test]
fn the_programs_stricter_timeout_wins() {
    let net = TestNet::new();
    let group = TestCgroup::new("stricter");
    let agent = Agent::start(&group, "");
    let own = Duration::from_millis(150);
    for how in [
        How {
            own_timeout: Some(150),
            ..How::default()
        },
        How {
            own_timeout: Some(150),
            nonblocking: true,
            ..How::default()
        },
    ] {
        let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
        let end = dialer.connect_how(SocketAddr::new(TestNet::blackhole4(0), 80), how);
        assert_eq!(
            (end.errno, end.user_timeout),
            (libc::ETIMEDOUT, 150),
            "{end:?}"
        );
        assert_on_time(&end, own, "the own timeout");
    }
    let row = agent.row("10.77.0.100:80");
    assert_eq!(row["failures"]["connect_timeout"], 2, "{row:#}");
}

/// A looser one does not loosen the policy's, and comes back when the connect has ended.
#[test]
fn the_programs_looser_timeout_comes_back() {
    let net = TestNet::new();
    let group = TestCgroup::new("looser");
    let _agent = Agent::start(&group, &policies());
    let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
    let looser = How {
        own_timeout: Some(30_000),
        ..How::default()
    };
    let end = dialer.connect_how(SocketAddr::new(TestNet::blackhole4(1), 80), looser);
    let timeout = Duration::from_millis(300);
    assert_eq!(
        (end.errno, end.user_timeout),
        (libc::ETIMEDOUT, 30_000),
        "{end:?}"
    );
    assert_on_time(&end, timeout, "the policy");
}

/// While connecting the option is ours, afterwards the program reads what it had set.
#[test]
fn an_established_connection_has_the_programs_value() {
    let net = TestNet::new();
    let group = TestCgroup::new("established");
    let agent = Agent::start(&group, "");
    let server = Server::start(&net.server, TestNet::server4(0));
    let server6 = Server::start(&net.server, SocketAddr::new(TestNet::SERVER6, 0));
    let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
    for own in [None, Some(150), Some(1_999), Some(2_001), Some(60_000)] {
        for to in [server.address(), server6.address()] {
            for nonblocking in [false, true] {
                let how = How {
                    own_timeout: own,
                    nonblocking,
                    ..How::default()
                };
                let end = dialer.connect_how(to, how);
                assert_eq!(
                    (end.errno, end.user_timeout),
                    (0, own.unwrap_or(0)),
                    "{to} {end:?}"
                );
            }
        }
    }
    assert_eq!(agent.row(&server.address().to_string())["established"], 10);
}

/// A connect whose first SYN was lost has our timeout until it is established, then the program's.
#[test]
fn a_connection_that_was_slow_to_come_has_the_programs_value() {
    tests::need!("nft");
    let net = TestNet::new();
    let group = TestCgroup::new("slow");
    let _agent = Agent::start(&group, "[defaults.timeouts]\nconnect = \"6s\"\n");
    let server = Server::start(&net.server, TestNet::server4(0));
    let to = server.address();
    let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
    let drops = net.server.count_syns(to.port(), true);
    for own_timeout in [None, Some(60_000), Some(5_000)] {
        dialer.open(
            to,
            1,
            How {
                own_timeout,
                ..How::default()
            },
        );
    }
    dialer.wait_user_timeouts(&[6_000, 6_000, 5_000]);
    drops.stop();
    assert_eq!(dialer.settle(Duration::from_secs(5)), [0; 3]);
    assert_eq!(dialer.user_timeouts(), [0, 60_000, 5_000]);
}

/// One lost SYN costs a repeat, not the connection, even under a short timeout.
#[test]
fn one_lost_syn_is_repeated_in_time() {
    tests::need!("nft");
    let net = TestNet::new();
    let group = TestCgroup::new("lost-syn");
    let port = 8080;
    let to = TestNet::server4(port);
    let config = "[defaults.timeouts]\nconnect = \"300ms\"\n";
    let agent = Agent::start(&group, config);
    let _server = Server::start(&net.server, to);
    // The first SYN of all is dropped, those after it pass.
    net.server.nft(&format!(
        "table inet lossy {{\n\
           chain input {{\n\
             type filter hook input priority 0; policy accept;\n\
             tcp dport {port} tcp flags & (syn | ack) == syn quota until 60 bytes drop\n\
           }}\n\
         }}\n"
    ));
    let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
    let end = dialer.connect(to);
    assert_eq!(end.errno, 0, "{end:?}");
    assert!(
        end.elapsed >= Duration::from_millis(100),
        "the first SYN was not lost: {end:?}"
    );
    assert_eq!(agent.row(&to.to_string())["attempts"], 1);
}
