//! Manual states: trip, hold-closed, reset; and what they are not for.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    net::TestNet,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const NO_REDIAL: &str = "[defaults.breaker]\nredial = false\n";

#[test]
fn a_trip_holds_for_its_time_also_for_the_unseen() {
    let (net, group) = (TestNet::new(), TestCgroup::new("trip"));
    let agent = Agent::start(&group, "");
    let server = Server::start(&net.server, TO);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let mut events = agent.follow(&[]);
    let began = Instant::now();
    agent.command(&["trip", DESTINATION, "--for", "3s"]).good();
    assert_eq!(
        dialer.connect(TO).errno,
        libc::ECONNREFUSED,
        "the very first connect"
    );
    events.wait_breaker(DESTINATION, "forced_open");
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["state"], &row["attempts"]),
        (&"forced_open".into(), &0.into()),
        "{row:#}"
    );
    let took = dialer
        .until_established(TO, Duration::from_secs(10))
        .expect("it ends by itself");
    assert!(began.elapsed() >= Duration::from_secs(3), "only {took:?}");
    events.wait_breaker(DESTINATION, "closed");
    server.stop();
    // A trip of a destination that is known by now.
    agent.command(&["trip", DESTINATION]).good();
    agent.wait_state(DESTINATION, "forced_open");
    agent.command(&["reset", DESTINATION]).good();
    let row = agent.wait_state(DESTINATION, "closed");
    assert_eq!(row["windows"]["connects"]["calls"], 0, "{row:#}");
}

#[test]
fn a_trip_is_for_one_workload_if_so_said() {
    let (net, parent) = (TestNet::new(), TestCgroup::new("whom"));
    let (a, b) = (parent.child("a"), parent.child("b"));
    let agent = Agent::start(&parent, "");
    let _server = Server::start(&net.server, TO);
    let mut one = Dialer::start(DIAL, &a, &net.client);
    let mut other = Dialer::start(DIAL, &b, &net.client);
    assert_eq!(one.connect(TO).errno, 0);
    let state_of = |group: &TestCgroup| {
        let rows = agent.rows(DESTINATION);
        let row = rows.iter().find(|row| row["workload"] == group.workload());
        row.map_or(Value::Null, |row| row["state"].clone())
    };
    agent
        .command(&["trip", DESTINATION, "--workload", &a.workload()])
        .good();
    tests::wait::until("the trip", Duration::from_secs(5), || {
        (state_of(&a) == "forced_open").then_some(())
    });
    assert_eq!(one.connect(TO).errno, libc::ECONNREFUSED);
    assert_eq!(other.connect(TO).errno, 0);
    assert_eq!(state_of(&b), "closed");
    agent
        .command(&["reset", DESTINATION, "--workload", &a.workload()])
        .good();
    tests::wait::until("the reset", Duration::from_secs(5), || {
        (state_of(&a) == "closed").then_some(())
    });
    assert_eq!(one.connect(TO).errno, 0);
}

#[test]
fn held_closed_passes_whatever_fails() {
    let (net, group) = (TestNet::new(), TestCgroup::new("hold"));
    let agent = Agent::start(&group, NO_REDIAL);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    // Several, none of them seen before: from the very first connect on.
    for port in 8080..8090 {
        let to = TestNet::server4(port);
        let destination = to.to_string();
        agent.command(&["hold-closed", &destination]).good();
        for end in dialer.burst(to, 20) {
            assert_eq!(end.errno, libc::ECONNREFUSED);
        }
        let row = agent.wait_state(&destination, "forced_closed");
        assert_eq!(row["failures"]["refused"], 20, "{row:#}");
        assert_eq!(row["rejected"]["breaker"], 0, "{row:#}");
    }
    agent.command(&["reset", DESTINATION]).good();
    agent.wait_state(DESTINATION, "closed");
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(DESTINATION, "open");
}

#[test]
fn a_reset_closes_an_open_breaker() {
    let (net, group) = (TestNet::new(), TestCgroup::new("reset"));
    let agent = Agent::start(&group, NO_REDIAL);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(DESTINATION, "open");
    let _server = Server::start(&net.server, TO);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    agent.command(&["reset", DESTINATION]).good();
    agent.wait_state(DESTINATION, "closed");
    assert_eq!(dialer.connect(TO).errno, 0);
}

#[test]
fn what_is_protected_is_left_alone() {
    let (net, group) = (TestNet::new(), TestCgroup::new("protected"));
    let config = format!("{NO_REDIAL}[protected]\ndestinations = [\"10.77.0.0/24\"]\n");
    let agent = Agent::start(&group, &config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..20 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["state"], &row["failures"]["refused"]),
        (&"closed".into(), &20.into())
    );
    dialer.open(
        SocketAddr::new(TestNet::blackhole4(0), 80),
        1,
        How::default(),
    );
    dialer.keep_user_timeouts(&[0]);
    let trip = agent.command(&["trip", DESTINATION]);
    assert_eq!(trip.code(), 1, "{trip}");
    assert!(trip.stderr.contains("protected"), "{trip}");
}
