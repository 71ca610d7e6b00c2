//! Connect timeouts: exact, for every kind of connect, and never in the way of the program's own.

use std::{net::SocketAddr, time::Duration};

use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    dialer::{Dialed, Dialer, How},
    net::TestNet,
    server::Server,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");

/// One for each blackhole address of its number.
const TIMEOUTS_MS: [u64; 5] = [100, 300, 1_000, 2_000, 5_000];

/// How late a timeout may be: 20 ms and 1 %.
fn tolerance(timeout: Duration) -> Duration {
    Duration::from_millis(20) + timeout / 100
}

/// The machine is shared with other tests, and its timers are late, too, where it is held up. What is late in
/// one of so many tries was held up; what is late in each of them is a wrong timeout.
const TRIES: u64 = 6;

/// Ended by its timeout, not before it; whether it was on time. The kernel reckons in whole milliseconds of
/// its own clock, so that an end may come a part of one early.
#[track_caller]
fn is_on_time(end: &Dialed, timeout: Duration, what: impl std::fmt::Display) -> bool {
    assert_eq!(end.errno, libc::ETIMEDOUT, "{what}: {end:?}");
    assert!(
        end.elapsed + Duration::from_millis(1) > timeout,
        "{what} ends early: {end:?}"
    );
    let late = end.elapsed.saturating_sub(timeout);
    let is_good = late <= tolerance(timeout);
    if !is_good {
        eprintln!("{what} is late by {late:?} of {timeout:?}");
    }
    is_good
}

/// Tries until everything was on time at once; how many tries that took.
#[track_caller]
fn until_on_time(mut try_it: impl FnMut(u64) -> bool) -> u64 {
    let good = (1..=TRIES).find(|number| try_it(*number));
    good.unwrap_or_else(|| panic!("late {TRIES} times"))
}

/// A policy for each blackhole. Breaker and limits of retries are off: this is about time alone.
fn policies() -> String {
    let mut config = String::from("[defaults]\nbreaker = \"off\"\nretry = \"off\"\n");
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
    until_on_time(|tries| {
        running.retain_mut(|(to, timeout, dialer)| {
            let end = dialer.dialed();
            let is_good = is_on_time(&end, *timeout, *to);
            assert_eq!(end.user_timeout, 0, "the option is given back: {to}");
            let row = agent.row(&to.to_string());
            assert_eq!(row["failures"]["connect_timeout"], tries, "{row:#}");
            assert_eq!(
                row["timeouts_ms"]["connect"],
                timeout.as_millis() as u64,
                "{row:#}"
            );
            assert_eq!(row["in_flight"], 0, "{row:#}");
            assert_balanced(&row);
            !is_good
        });
        // Once more those that were late.
        for (to, _, dialer) in &mut running {
            dialer.order_connect(*to, how);
        }
        running.is_empty()
    });
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
    let tries = until_on_time(|_| {
        let ends = dialer.burst(to, 100);
        let on_time = ends.iter().filter(|end| is_on_time(end, timeout, to));
        on_time.count() == ends.len()
    });
    let row = agent.row(&to.to_string());
    assert_eq!(
        (&row["attempts"], &row["failures"]["connect_timeout"]),
        (&(100 * tries).into(), &(100 * tries).into())
    );
    assert_balanced(&row);
}

/// A program's own stricter TCP_USER_TIMEOUT wins, and is what it reads back.
#[test]
fn the_programs_stricter_timeout_wins() {
    let net = TestNet::new();
    let group = TestCgroup::new("stricter");
    let agent = Agent::start(&group, "[defaults]\nbreaker = \"off\"\nretry = \"off\"\n");
    let own = Duration::from_millis(150);
    let mut tries = 0;
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
        tries += until_on_time(|_| {
            let end = dialer.connect_how(SocketAddr::new(TestNet::blackhole4(0), 80), how);
            assert_eq!(
                (end.errno, end.user_timeout),
                (libc::ETIMEDOUT, 150),
                "{end:?}"
            );
            is_on_time(&end, own, "the own timeout")
        });
    }
    let row = agent.row("10.77.0.100:80");
    assert_eq!(row["failures"]["connect_timeout"], tries, "{row:#}");
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
    let timeout = Duration::from_millis(300);
    until_on_time(|_| {
        let end = dialer.connect_how(SocketAddr::new(TestNet::blackhole4(1), 80), looser);
        assert_eq!(
            (end.errno, end.user_timeout),
            (libc::ETIMEDOUT, 30_000),
            "{end:?}"
        );
        is_on_time(&end, timeout, "the policy")
    });
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
    let _agent = Agent::start(&group, "[defaults.timeouts]\nconnect = \"60s\"\n");
    let server = Server::start(&net.server, TestNet::server4(0));
    let to = server.address();
    let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
    let drops = net.server.count_syns(to.port(), true);
    for own_timeout in [None, Some(90_000), Some(50_000)] {
        dialer.open(
            to,
            1,
            How {
                own_timeout,
                ..How::default()
            },
        );
    }
    dialer.wait_user_timeouts(&[60_000, 60_000, 50_000]);
    drops.stop();
    assert_eq!(dialer.settle(wait::LONGEST), [0; 3]);
    assert_eq!(dialer.user_timeouts(), [0, 90_000, 50_000]);
}

/// One lost SYN costs a repeat, not the connection, even under a short timeout.
#[test]
fn one_lost_syn_is_repeated_in_time() {
    tests::need!("nft");
    let net = TestNet::new();
    let group = TestCgroup::new("lost-syn");
    let port = 8080;
    let to = TestNet::server4(port);
    let config = "[defaults]\nbreaker = \"off\"\nretry = \"off\"\n[defaults.timeouts]\nconnect = \"300ms\"\n";
    let agent = Agent::start(&group, config);
    let _server = Server::start(&net.server, to);
    let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
    // (A machine that is held up may need the rest of the time for the answer to the second one.)
    let tries = until_on_time(|_| {
        net.server.lose_one_syn(port);
        let end = dialer.connect(to);
        assert!(
            end.elapsed >= Duration::from_millis(100),
            "the first SYN was not lost: {end:?}"
        );
        end.errno == 0
    });
    assert_eq!(agent.row(&to.to_string())["attempts"], tries);
}
