//! Manual states: trip, hold-closed, reset; and what they are not for.

use std::{
    net::{Ipv4Addr, SocketAddr},
    time::{Duration, Instant},
};

use serde_json::Value;
use tests::{
    agent::{Agent, AgentOptions},
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    names::EtcFiles,
    net::TestNet,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const NO_REDIAL: &str = "[defaults.breaker]\nredial = false\n";
const SOON: Duration = tests::wait::LONGEST;

#[test]
fn a_trip_holds_for_its_time_also_for_the_unseen() {
    let (net, group) = (TestNet::new(), TestCgroup::new("trip"));
    let agent = Agent::start(&group, "");
    let server = Server::start(&net.server, TO);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let mut events = agent.follow(&[]);
    let began = Instant::now();
    // (Longer than it takes to look at it on the busiest machine.)
    agent.command(&["trip", DESTINATION, "--for", "8s"]).good();
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
        .until_established(TO, SOON)
        .expect("it ends by itself");
    assert!(began.elapsed() >= Duration::from_secs(8), "only {took:?}");
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
    tests::wait::until("the trip", SOON, || {
        (state_of(&a) == "forced_open").then_some(())
    });
    assert_eq!(one.connect(TO).errno, libc::ECONNREFUSED);
    assert_eq!(other.connect(TO).errno, 0);
    assert_eq!(state_of(&b), "closed");
    agent
        .command(&["reset", DESTINATION, "--workload", &a.workload()])
        .good();
    tests::wait::until("the reset", SOON, || {
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

/// What `web.internal` stands for.
const NAMED: &str = "10.77.0.2 web.internal\n10.77.0.3 web.internal\n";
const WEB: &str = "web.internal:8080";
const OTHER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(10, 77, 0, 3)), 8080);

/// Of one destination, by workload.
fn state_of(agent: &Agent, destination: &str, group: &TestCgroup) -> Value {
    let rows = agent.rows(destination);
    let row = rows.iter().find(|row| row["workload"] == group.workload());
    row.map_or(Value::Null, |row| row["state"].clone())
}

fn orders(agent: &Agent) -> Vec<Value> {
    let status = agent.status();
    status["orders"].as_array().expect("a list").clone()
}

#[test]
fn the_newest_order_that_covers_a_row_is_in_force_also_for_rows_to_come() {
    let (net, parent) = (TestNet::new(), TestCgroup::new("newest"));
    let (a, b) = (parent.child("a"), parent.child("b"));
    let agent = Agent::start_for_loops(&parent, "");
    let _server = Server::start(&net.server, TO);
    agent.command(&["trip", DESTINATION, "--for", "1h"]).good();
    let workload = b.workload();
    let began = Instant::now();
    let hold = [
        "hold-closed",
        DESTINATION,
        "--workload",
        &workload,
        "--for",
        "15s",
    ];
    agent.command(&hold).good();
    let mut one = Dialer::start(DIAL, &a, &net.client);
    let mut other = Dialer::start(DIAL, &b, &net.client);
    assert_eq!(one.connect(TO).errno, libc::ECONNREFUSED);
    // The very first connect of the other workload still meets what holds for all.
    other.connect(TO);
    tests::wait::until("the order for the workload", SOON, || {
        (state_of(&agent, DESTINATION, &b) == "forced_closed").then_some(())
    });
    if began.elapsed() < Duration::from_secs(10) {
        assert_eq!(other.connect(TO).errno, 0);
        assert_eq!(one.connect(TO).errno, libc::ECONNREFUSED);
        let rows = agent.rows(DESTINATION);
        let row = rows.iter().find(|row| row["workload"] == workload);
        assert_eq!(row.expect("its row")["manual"]["workload"], workload);
    }
    // It ends, and the older one is in force again, without a moment between.
    tests::wait::until("the older order", SOON, || {
        (state_of(&agent, DESTINATION, &b) == "forced_open").then_some(())
    });
    let mut events = agent.follow(&[]);
    let change = events.wait("the end of the newer order", |event| {
        event["kind"] == "breaker"
            && event["workload"] == workload.as_str()
            && event["from"] == "forced_closed"
    });
    assert!(began.elapsed() >= Duration::from_secs(15));
    assert_eq!(change["to"], "forced_open", "{change:#}");
    assert_eq!(other.connect(TO).errno, libc::ECONNREFUSED);
    let left = orders(&agent);
    assert_eq!(left.len(), 1, "{left:#?}");
    assert_eq!(
        (&left[0]["rows"], &left[0]["workload"]),
        (&2.into(), &Value::Null)
    );
    let said = agent.command(&["reset", DESTINATION]).good();
    assert!(said.contains("1 order taken back, 2 rows closed"), "{said}");
    for group in [&a, &b] {
        tests::wait::until("the reset", SOON, || {
            (state_of(&agent, DESTINATION, group) == "closed").then_some(())
        });
    }
    assert_eq!(other.connect(TO).errno, 0);
}

/// Somebody has refused an address, somebody else a name of it, and somebody wants both back.
#[test]
fn a_reset_in_other_words_takes_back_what_it_can_or_says_what_is_left() {
    let (net, group) = (TestNet::new(), TestCgroup::new("words"));
    net.server.ip("addr add 10.77.0.3/24 dev s0\n");
    let etc = EtcFiles::new(NAMED, None);
    let options = AgentOptions::new(&group).config_for_loops("");
    let start = || options.start_as(etc.program(options.program()));
    let agent = start();
    let _servers = [TO, OTHER].map(|to| Server::start(&net.server, to));
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, 0);

    // Of what nobody knows nothing can be taken back.
    let unknown = agent.command(&["reset", "wbe.internal:8080"]);
    assert_eq!(unknown.code(), 1, "{unknown}");
    assert!(
        unknown
            .stderr
            .contains("wbe.internal:8080: no address is known of that name"),
        "{unknown}"
    );

    // The name has its addresses from the order on it: none before.
    agent.command(&["trip", DESTINATION]).good();
    agent
        .command(&["hold-closed", WEB, "--workload", "nobody"])
        .good();
    agent.wait_row(DESTINATION, "its name", |row| row["name"] == "web.internal");
    let said = agent.command(&["reset", WEB]).good();
    assert!(said.contains("2 orders taken back, 1 row closed"), "{said}");
    agent.wait_state(DESTINATION, "closed");
    assert_eq!(orders(&agent), [Value::Null; 0]);
    assert_eq!(dialer.connect(TO).errno, 0);

    // The other way round: the address alone is not what was ordered.
    agent.command(&["trip", WEB, "--for", "1h"]).good();
    agent.wait_state(DESTINATION, "forced_open");
    let refused = agent.command(&["reset", DESTINATION]);
    assert_eq!(refused.code(), 1, "{refused}");
    for part in [
        "10.77.0.2:8080 is not reset",
        "web.internal:8080 is refused, for all workloads, by uid ",
        "`backstop reset web.internal:8080` takes that back",
        "`backstop hold-closed 10.77.0.2:8080` goes before it",
    ] {
        assert!(refused.stderr.contains(part), "{refused}");
    }
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    for args in [["status", DESTINATION], ["explain", DESTINATION]] {
        let text = agent.command(&args).good();
        assert!(
            text.contains("web.internal:8080 refused for another"),
            "{text}"
        );
    }
    // As it says: an order for the address goes before it, and taken back it gives way again.
    agent.command(&["hold-closed", DESTINATION]).good();
    agent.wait_state(DESTINATION, "forced_closed");
    assert_eq!(dialer.connect(TO).errno, 0);
    let said = agent.command(&["reset", DESTINATION]).good();
    assert!(
        said.contains("1 order taken back, 0 rows closed") && said.contains("in force still"),
        "{said}"
    );
    agent.wait_state(DESTINATION, "forced_open");

    // A restart knows the same, from the first connect on, also to an address that has no row yet.
    assert_eq!(agent.stop().code(), 0);
    let agent = start();
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    assert_eq!(dialer.connect(OTHER).errno, libc::ECONNREFUSED);
    // (A row that the kernel has just made is known to the agent a moment later.)
    for to in [TO, OTHER] {
        agent.wait_state(&to.to_string(), "forced_open");
    }
    assert_eq!(orders(&agent)[0]["destination"], WEB);
    let said = agent.command(&["reset", WEB]).good();
    assert!(said.contains("1 order taken back, 2 rows closed"), "{said}");
    agent.wait_state(DESTINATION, "closed");
    agent.wait_state(&OTHER.to_string(), "closed");
    assert_eq!(agent.stop().code(), 0);
    let _agent = start();
    assert_eq!(dialer.connect(TO).errno, 0);
    assert_eq!(dialer.connect(OTHER).errno, 0);
}

/// A typing error, or a destination that nobody has called yet.
#[test]
fn an_order_without_a_row_is_seen() {
    let group = TestCgroup::new("typo");
    let agent = Agent::start(&group, "");
    agent
        .command(&["trip", "10.9.9.9:1", "--workload", "typo/x"])
        .good();
    for args in [
        &["status"][..],
        &["status", "10.9.9.9:1"],
        &["explain", "10.9.9.9:1"],
    ] {
        let text = agent.command(args).good();
        assert!(
            text.contains("10.9.9.9:1 refused for another 9m")
                && text.contains("workload typo/x: no")
                && text.contains("by uid "),
            "{args:?} {text}"
        );
    }
    let order = &orders(&agent)[0];
    assert_eq!(
        (&order["destination"], &order["workload"], &order["rows"]),
        (&"10.9.9.9:1".into(), &"typo/x".into(), &0.into())
    );
    let events = agent.command(&["events"]).good();
    let line = events.lines().find(|line| line.contains("10.9.9.9:1"));
    let line = line.expect("a line");
    assert!(line.contains("to be refused for 10m by uid "), "{line}");
    assert!(line.contains("(backstop"), "{line}");
    assert!(line.ends_with("0 rows  (typo/x)"), "{line}");
    let reset = ["reset", "10.9.9.9:1"];
    let said = agent.command(&reset).good();
    assert!(said.contains("1 order taken back, 0 rows closed"), "{said}");
    let said = agent.command(&reset).good();
    assert!(
        said.contains("no order was in force, 0 rows closed"),
        "{said}"
    );
    assert_eq!(orders(&agent), [Value::Null; 0]);
    assert_eq!(agent.command(&["status", "10.9.9.9:1"]).code(), 1);
}

/// The name is known for the order's sake alone: at its end the rows are counted before it is forgotten.
#[test]
fn the_end_of_an_order_by_name_counts_its_rows() {
    let (net, group) = (TestNet::new(), TestCgroup::new("name-over"));
    let etc = EtcFiles::new(NAMED, None);
    let options = AgentOptions::new(&group);
    let agent = options.start_as(etc.program(options.program()));
    let _server = Server::start(&net.server, TO);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, 0);
    let mut events = agent.follow(&[]);
    agent.command(&["hold-closed", WEB]).good();
    agent.wait_row(DESTINATION, "its name", |row| row["name"] == "web.internal");
    agent.wait_state(DESTINATION, "forced_closed");
    // In the place of the one before.
    agent.command(&["hold-closed", WEB, "--for", "1s"]).good();
    let over = events.wait("its end", |event| event["action"] == "time_over");
    assert_eq!(
        (&over["destination"], &over["rows"]),
        (&WEB.into(), &1.into()),
        "{over:#}"
    );
    agent.wait_state(DESTINATION, "closed");
    let said = agent.command(&["reset", DESTINATION]).good();
    assert!(
        said.contains("no order was in force, 1 row was closed already"),
        "{said}"
    );
}

#[test]
fn events_say_who_and_how_it_ended() {
    let (net, group) = (TestNet::new(), TestCgroup::new("who"));
    let agent = Agent::start(&group, "");
    let _server = Server::start(&net.server, TO);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, 0);
    let mut events = agent.follow(&[]);
    let is_somebody = |event: &Value| {
        let by = event["by"].as_str().unwrap_or_default();
        by.starts_with("uid ") && by.contains(", pid ") && by.contains("(backstop")
    };
    agent.command(&["trip", DESTINATION, "--for", "1s"]).good();
    let tripped = events.wait_breaker(DESTINATION, "forced_open");
    assert!(
        tripped["cause"] == "trip" && is_somebody(&tripped),
        "{tripped:#}"
    );
    let ended = events.wait_breaker(DESTINATION, "closed");
    assert_eq!(
        (&ended["cause"], &ended["by"]),
        (&"time_over".into(), &Value::Null)
    );
    // (One thread tells of the breaker, another one of orders.)
    let over = events.find("the end of the order", |event| {
        event["action"] == "time_over"
    });
    assert!(over["kind"] == "order" && is_somebody(&over), "{over:#}");
    agent.command(&["hold-closed", DESTINATION]).good();
    let held = events.wait_breaker(DESTINATION, "forced_closed");
    assert!(
        held["cause"] == "hold_closed" && is_somebody(&held),
        "{held:#}"
    );
    agent.command(&["reset", DESTINATION]).good();
    let reset = events.wait_breaker(DESTINATION, "closed");
    assert!(
        reset["cause"] == "reset" && is_somebody(&reset),
        "{reset:#}"
    );

    agent.command(&["pause", "--for", "1s"]).good();
    let paused = events.wait("the pause", |event| event["action"] == "paused");
    assert!(is_somebody(&paused), "{paused:#}");
    let resumed = events.wait("its end", |event| event["action"] == "resumed");
    assert!(
        resumed["by"].is_null()
            && resumed["message"]
                .as_str()
                .unwrap()
                .contains("time is over"),
        "{resumed:#}"
    );
    let said = agent.command(&["resume"]).good();
    assert!(said.contains("nothing was paused"), "{said}");
}
