//! A breaker belongs to (workload, network namespace, destination) and to nobody else.

use std::net::SocketAddr;

use tests::{
    agent::{Agent, AgentOptions, assert_balanced},
    cgroup::TestCgroup,
    dialer::Dialer,
    net::{Namespace, TestNet},
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const CONFIG: &str = "[defaults.breaker]\nredial = false\n";

/// The same address in two namespaces: refused in one, served in the other.
#[test]
fn one_address_in_two_namespaces_is_two_destinations() {
    let (sick, healthy) = (TestNet::new(), TestNet::new());
    let (a, b) = (TestCgroup::new("sick"), TestCgroup::new("healthy"));
    let agent = AgentOptions::new(&a).and(&b).config(CONFIG).start();
    let to = TestNet::server4(8080);
    let server = Server::start(&healthy.server, to);
    let mut bad = Dialer::start(DIAL, &a, &sick.client);
    let mut good = Dialer::start(DIAL, &b, &healthy.client);
    for _ in 0..5 {
        assert_eq!(bad.connect(to).errno, libc::ECONNREFUSED);
        assert_eq!(good.connect(to).errno, 0);
    }
    let is_open = |agent: &Agent| {
        agent
            .rows("10.77.0.2:8080")
            .iter()
            .any(|row| row["state"] == "open")
            .then_some(())
    };
    tests::wait::until("the breaker", std::time::Duration::from_secs(60), || {
        is_open(&agent)
    });
    for _ in 0..5 {
        assert_eq!(bad.connect(to).errno, libc::ECONNREFUSED);
        assert_eq!(good.connect(to).errno, 0);
    }
    let rows = agent.rows("10.77.0.2:8080");
    assert_eq!(rows.len(), 2, "{rows:#?}");
    let of = |group: &TestCgroup| {
        rows.iter()
            .find(|row| row["workload"] == group.workload())
            .expect("a row")
    };
    let (bad, good) = (of(&a), of(&b));
    assert_eq!(
        (&bad["state"], &bad["attempts"]),
        (&"open".into(), &5.into()),
        "{bad:#}"
    );
    assert_eq!(bad["rejected"]["breaker"], 5);
    assert_eq!(bad["netns"], sick.client.inode());
    assert_eq!(
        (&good["state"], &good["established"]),
        (&"closed".into(), &10.into()),
        "{good:#}"
    );
    assert_eq!(good["netns"], healthy.client.inode());
    server.wait_accepts(10);
    assert_balanced(bad);
    assert_balanced(good);
}

/// The same in one control group: the namespace alone tells them apart.
#[test]
fn one_workload_in_two_namespaces_has_two_rows() {
    let (first, second) = (Namespace::new("first"), Namespace::new("second"));
    let group = TestCgroup::new("both");
    let agent = Agent::start(&group, CONFIG);
    let to: SocketAddr = "127.0.0.1:8080".parse().unwrap();
    let _server = Server::start(&second, to);
    let mut refused = Dialer::start(DIAL, &group, &first);
    let mut served = Dialer::start(DIAL, &group, &second);
    for _ in 0..8 {
        assert_eq!(refused.connect(to).errno, libc::ECONNREFUSED);
        assert_eq!(served.connect(to).errno, 0);
    }
    let rows = tests::wait::until("the breaker", std::time::Duration::from_secs(60), || {
        let rows = agent.rows("127.0.0.1:8080");
        let is_open = rows.iter().any(|row| row["state"] == "open");
        is_open.then_some(rows)
    });
    let mut seen: Vec<_> = rows
        .iter()
        .map(|row| row["netns"].as_u64().unwrap())
        .collect();
    seen.sort_unstable();
    let mut inodes = [first.inode(), second.inode()];
    inodes.sort_unstable();
    assert_eq!(seen, inodes, "{rows:#?}");
    for row in &rows {
        let state = if row["netns"] == first.inode() {
            "open"
        } else {
            "closed"
        };
        assert_eq!(row["state"], state, "{row:#}");
    }
}

/// Two control groups in one namespace: each has its own breaker (no hint on loopback).
#[test]
fn one_workloads_failures_are_not_anothers() {
    let namespace = Namespace::new("shared");
    let parent = TestCgroup::new("parent");
    let (a, b) = (parent.child("a"), parent.child("b"));
    let agent = Agent::start(&parent, CONFIG);
    let to: SocketAddr = "127.0.0.1:8080".parse().unwrap();
    let mut one = Dialer::start(DIAL, &a, &namespace);
    let mut other = Dialer::start(DIAL, &b, &namespace);
    for _ in 0..5 {
        assert_eq!(one.connect(to).errno, libc::ECONNREFUSED);
    }
    agent.wait_state("127.0.0.1:8080", "open");
    let _server = Server::start(&namespace, to);
    assert_eq!(one.connect(to).errno, libc::ECONNREFUSED, "by Backstop");
    assert_eq!(other.connect(to).errno, 0);
    let rows = agent.rows("127.0.0.1:8080");
    let workloads: Vec<_> = rows
        .iter()
        .map(|row| row["workload"].as_str().unwrap())
        .collect();
    assert_eq!(
        workloads,
        [a.workload(), b.workload()],
        "the open one first"
    );
    // Nested attachments would have run the programs twice.
    assert_eq!(rows[0]["attempts"], 5);
    assert_eq!(rows[1]["attempts"], 1);
}

/// A process outside the watched control groups is none of the agent's business.
#[test]
fn who_is_not_watched_is_not_touched() {
    let net = TestNet::new();
    let group = TestCgroup::new("watched");
    let agent = Agent::start(&group, CONFIG);
    let mut outside = Dialer::start_outside(DIAL, &net.client);
    for _ in 0..8 {
        assert_eq!(
            outside.connect(TestNet::server4(8080)).errno,
            libc::ECONNREFUSED
        );
    }
    outside.open(
        SocketAddr::new(TestNet::blackhole4(0), 80),
        1,
        Default::default(),
    );
    outside.keep_user_timeouts(&[0]);
    assert_eq!(agent.status()["destinations"], serde_json::json!([]));
}
