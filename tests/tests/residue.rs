//! Nothing of a workload is kept alive by the agent, and nothing piles up in it.

use std::{
    fs,
    net::SocketAddr,
    process::{Command, Stdio},
};

use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    net::TestNet,
    server::Server,
    wait::{self, LONGEST},
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";

/// A deleted namespace takes its end of the link with it: the other end is the proof.
fn has_link(net: &tests::net::Namespace) -> bool {
    Command::new("ip")
        .args(["-n", net.name(), "link", "show", "s0"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .expect("run ip")
        .success()
}

/// The agent dials inside a namespace, and lets go of it.
#[test]
fn a_namespace_that_is_dialled_from_can_go() {
    let group = TestCgroup::new("namespace");
    let agent = Agent::start(&group, "");
    let net = TestNet::new();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    // Dials to a silent address are pending most of the time.
    for _ in 0..2 {
        let blackhole = SocketAddr::new(TestNet::blackhole4(0), 80);
        dialer.open(
            blackhole,
            5,
            How {
                own_timeout: Some(100),
                ..How::default()
            },
        );
    }
    dialer.settle(LONGEST);
    agent.wait_state("10.77.0.100:80", "open");
    let dialling = |row: &serde_json::Value| row["next_redial_in_ms"].is_u64();
    agent.wait_row(DESTINATION, "a redial", dialling);
    let TestNet { client, server } = net;
    dialer.kill();
    drop(client);
    wait::until("the namespace to go", LONGEST, || {
        (!has_link(&server)).then_some(())
    });
    assert_eq!(agent.get("/readyz").status, 200);
    assert_eq!(agent.stop().code(), 0);
}

/// Descriptors of the agent after many outages in many namespaces are what they were before.
#[test]
fn descriptors_do_not_pile_up() {
    let group = TestCgroup::new("descriptors");
    let agent = Agent::start(&group, "");
    let open = || {
        fs::read_dir(format!("/proc/{}/fd", agent.pid()))
            .expect("its descriptors")
            .count()
    };
    // What is opened once and kept is open from the first outage on.
    let mut before = 0;
    for round in 0..6 {
        if round == 1 {
            before = open();
        }
        let net = TestNet::new();
        let mut dialer = Dialer::start(DIAL, &group, &net.client);
        for _ in 0..5 {
            assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
        }
        let _server = Server::start(&net.server, TO);
        assert!(dialer.until_established(TO, LONGEST).is_some());
        agent.command(&["status"]).good();
    }
    wait::until("as many descriptors as before", LONGEST, || {
        (open() <= before).then_some(())
    });
}

/// Stopped in the middle of traffic: no program notices more than a refusal or a success.
#[test]
fn a_stop_under_load() {
    let (net, group) = (TestNet::new(), TestCgroup::new("load"));
    let agent = Agent::start(&group, "");
    let _server = Server::start(&net.server, TO);
    let mut dialers: Vec<Dialer> = (0..2)
        .map(|_| Dialer::start(DIAL, &group, &net.client))
        .collect();
    agent.command(&["trip", DESTINATION]).good();
    for _ in 0..20 {
        dialers
            .iter_mut()
            .for_each(|dialer| dialer.order(&format!("burst 50 {TO}")));
    }
    let first = dialers[0].answer();
    let refused = |end: &serde_json::Value| end["errno"] == libc::ECONNREFUSED;
    assert!(first.as_array().expect("a list").iter().all(refused));
    let finished = agent.stop();
    assert_eq!(finished.code(), 0, "{finished}");
    for (i, dialer) in dialers.iter_mut().enumerate() {
        for _ in usize::from(i == 0)..20 {
            for end in dialer.answer().as_array().expect("a list") {
                assert!(end["errno"] == 0 || refused(end), "{end}");
                assert_eq!(end["user_timeout"], 0, "{end}");
            }
        }
        assert_eq!(dialer.connect(TO).errno, 0);
    }
}

/// Workloads come and go by the hundred: rows of those that are gone are given back.
#[test]
fn short_lived_workloads_leave_room() {
    let (net, parent) = (TestNet::new(), TestCgroup::new("short"));
    let agent = Agent::start(&parent, "[agent]\nmax_destinations = 64\n");
    for i in 0..100 {
        let group = parent.child(&format!("job-{i}"));
        let mut dialer = Dialer::start(DIAL, &group, &net.client);
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    let used = || {
        agent
            .metric("backstop_destinations", &[])
            .expect("the gauge")
    };
    wait::until("room", LONGEST, || (used() < 64.0).then_some(()));
    let last = parent.child("last");
    let mut dialer = Dialer::start(DIAL, &last, &net.client);
    wait::until("its breaker", LONGEST, || {
        // (A row is free only when it has been cleaned.)
        dialer.connect(TO);
        let rows = agent.rows(DESTINATION);
        rows.iter()
            .any(|row| row["workload"] == last.workload() && row["state"] == "open")
            .then_some(())
    });
}
