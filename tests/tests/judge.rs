//! What counts as a failure, for how long, and against whom.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    need,
    net::TestNet,
    server::Server,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const BLACKHOLE: SocketAddr = SocketAddr::new(TestNet::blackhole4(0), 80);

/// Silence opens the breaker, too; the cooldown's end lets a probe through although the agent's
/// own dials go on failing, and refusals are instant meanwhile.
#[test]
fn timeouts_open_and_the_cooldown_runs_regardless_of_redial() {
    let (net, group) = (TestNet::new(), TestCgroup::new("silence"));
    let config =
        "[defaults.timeouts]\nconnect = \"100ms\"\n[defaults.breaker]\ncooldown = \"5s\"\n";
    let agent = Agent::start(&group, config);
    let mut events = agent.follow(&[]);
    let destination = BLACKHOLE.to_string();
    let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
    for _ in 0..5 {
        assert_eq!(dialer.connect(BLACKHOLE).errno, libc::ETIMEDOUT);
    }
    events.wait_breaker(&destination, "open");
    // (One of them at least meets no other program on its processor.)
    let refused = (0..5).map(|_| {
        let end = dialer.connect(BLACKHOLE);
        assert_eq!(end.errno, libc::ECONNREFUSED);
        end.elapsed
    });
    let quickest = refused.min().expect("five");
    assert!(quickest < Duration::from_millis(50), "{quickest:?}");
    agent.wait_row(&destination, "a redial", |row| {
        row["next_redial_in_ms"].is_u64()
    });
    events.wait_breaker(&destination, "half_open");
    assert_eq!(
        dialer.connect(BLACKHOLE).errno,
        libc::ETIMEDOUT,
        "the probe"
    );
    let again = events.wait_breaker(&destination, "open");
    assert_eq!(again["reason"]["kind"], "probe_failed");
    let row = agent.row(&destination);
    assert_eq!(
        (&row["attempts"], &row["failures"]["connect_timeout"]),
        (&6.into(), &6.into())
    );
    assert_balanced(&row);
}

/// An answer of the network that the host cannot be reached.
#[test]
fn unreachable_opens() {
    need!("nft");
    let (net, group) = (TestNet::new(), TestCgroup::new("unreachable"));
    net.server.nft(
        "table inet unreach {\n\
           chain input {\n\
             type filter hook input priority 0; policy accept;\n\
             tcp dport 8080 reject with icmpx type host-unreachable\n\
           }\n\
         }\n",
    );
    // Else the host sends one such answer a second.
    net.server.enter(|| {
        for file in ["ipv4/icmp_ratelimit", "ipv6/icmp/ratelimit"] {
            std::fs::write(format!("/proc/sys/net/{file}"), "0").expect("sysctl");
        }
    });
    let agent = Agent::start(&group, "[defaults.breaker]\nredial = false\n");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for to in [TO, SocketAddr::new(TestNet::SERVER6, 8080)] {
        for _ in 0..5 {
            assert_eq!(dialer.connect(to).errno, libc::EHOSTUNREACH, "{to}");
        }
        let row = agent.wait_state(&to.to_string(), "open");
        assert_eq!(row["failures"]["unreachable"], 5, "{row:#}");
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
        assert_balanced(&row);
    }
}

/// A run of failures that is older than `window_age` is over.
#[test]
fn old_failures_do_not_count() {
    let (net, group) = (TestNet::new(), TestCgroup::new("age"));
    // Longer than five connects take on the busiest machine.
    let config = "[defaults.breaker]\nwindow_age = \"5s\"\nredial = false\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for round in 1..=2_u64 {
        for _ in 0..4 {
            assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
        }
        let row = agent.row(DESTINATION);
        assert_eq!(row["windows"]["connects"]["consecutive"], 4, "{row:#}");
        let aged = |row: &Value| row["windows"]["connects"]["calls"] == 0;
        let row = agent.wait_row(DESTINATION, "aged calls", aged);
        assert_eq!(
            row["failures"]["refused"],
            round * 4,
            "counters never go back: {row:#}"
        );
    }
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    let row = agent.wait_state(DESTINATION, "open");
    assert_eq!(row["attempts"], 13, "{row:#}");
}

/// Connects that began before a reset end after it: they are counted, but judge nobody.
#[test]
fn late_outcomes_are_dropped() {
    let (net, group) = (TestNet::new(), TestCgroup::new("late"));
    // Longer than both commands take on the busiest machine.
    let config = "[defaults.timeouts]\nconnect = \"6s\"\n";
    let agent = Agent::start(&group, config);
    let destination = BLACKHOLE.to_string();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    dialer.open(BLACKHOLE, 20, How::default());
    agent.command(&["trip", &destination]).good();
    agent.wait_state(&destination, "forced_open");
    agent.command(&["reset", &destination]).good();
    agent.wait_state(&destination, "closed");
    assert_eq!(dialer.settle(wait::LONGEST), [libc::ETIMEDOUT; 20]);
    let row = agent.row(&destination);
    assert_eq!(
        (&row["state"], &row["failures"]["connect_timeout"]),
        (&"closed".into(), &20.into())
    );
    assert_eq!(row["windows"]["connects"]["calls"], 0, "{row:#}");
    assert_balanced(&row);
    // Those that begin now count.
    dialer.close();
    dialer.open(BLACKHOLE, 5, How::default());
    agent.wait_state(&destination, "open");
}

#[test]
fn a_breaker_that_is_off_only_counts() {
    let (net, group) = (TestNet::new(), TestCgroup::new("off"));
    let config = "[defaults.breaker]\nconsecutive_failures = \"off\"\nfailure_rate = \"off\"\n\
        [[policy]]\nname = \"none\"\ndestinations = [\"10.77.0.2:8081\"]\nbreaker = \"off\"\n";
    let agent = Agent::start_for_loops(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for to in [TO, TestNet::server4(8081)] {
        for _ in 0..40 {
            assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
        }
        let row = agent.row(&to.to_string());
        assert_eq!(
            (&row["state"], &row["failures"]["refused"]),
            (&"closed".into(), &40.into())
        );
        assert_eq!(row["rejected"]["breaker"], 0, "{row:#}");
    }
}

/// One success is enough where the policy says so.
#[test]
fn one_success_closes_if_so_said() {
    let (net, group) = (TestNet::new(), TestCgroup::new("one"));
    let agent = Agent::start(&group, "[defaults.breaker]\nsuccesses_to_close = 1\n");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(DESTINATION, "open");
    let _server = Server::start(&net.server, TO);
    agent.wait_state(DESTINATION, "half_open");
    assert_eq!(dialer.connect(TO).errno, 0);
    agent.wait_state(DESTINATION, "closed");
}

/// ::1 refused, then 127.0.0.1 reached: as programs do that try both addresses of localhost.
#[test]
fn another_address_is_another_destination() {
    let (net, group) = (TestNet::new(), TestCgroup::new("localhost"));
    let agent = Agent::start(&group, "");
    let four: SocketAddr = "127.0.0.1:8080".parse().expect("an address");
    let six: SocketAddr = "[::1]:8080".parse().expect("an address");
    let _server = Server::start(&net.client, four);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..10 {
        assert_eq!(dialer.connect(six).errno, libc::ECONNREFUSED);
        assert_eq!(dialer.connect(four).errno, 0);
    }
    let row = agent.row("127.0.0.1:8080");
    assert_eq!(
        (&row["state"], &row["established"]),
        (&"closed".into(), &10.into()),
        "{row:#}"
    );
    agent.wait_state("[::1]:8080", "open");
}

/// A program whose own timeout is short gives up again and again: that opens the breaker.
#[test]
fn giving_up_opens() {
    let (net, group) = (TestNet::new(), TestCgroup::new("gave-up"));
    let config = "[defaults.breaker]\ngave_up = \"50ms\"\nredial = false\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..5 {
        dialer.open(BLACKHOLE, 1, How::default());
        assert_eq!(
            dialer.settle(Duration::from_millis(100)),
            [libc::EINPROGRESS]
        );
        dialer.close();
    }
    let row = agent.wait_state(&BLACKHOLE.to_string(), "open");
    assert_eq!(
        (&row["failures"]["gave_up"], &row["abandoned"]),
        (&5.into(), &0.into()),
        "{row:#}"
    );
    assert_eq!(dialer.connect(BLACKHOLE).errno, libc::ECONNREFUSED);
}
