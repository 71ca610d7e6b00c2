//! Pause and resume: every verdict and timeout off, counting on.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    net::TestNet,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const BLACKHOLE: SocketAddr = SocketAddr::new(TestNet::blackhole4(0), 80);

#[test]
fn under_load() {
    let (net, group) = (TestNet::new(), TestCgroup::new("load"));
    let agent = Agent::start(&group, "[defaults.timeouts]\nconnect = \"60s\"\n");
    let _server = Server::start(&net.server, TO);
    agent.command(&["trip", DESTINATION]).good();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    dialer.open(BLACKHOLE, 20, How::default());
    dialer.wait_user_timeouts(&[60_000; 20]);

    // Bursts go on in another process through all of it.
    let mut load = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..30 {
        load.order(&format!("burst 50 {TO}"));
    }
    let first = load.answer();
    let errnos = |burst: &serde_json::Value| -> Vec<i64> {
        let ends = burst.as_array().expect("a list").iter();
        ends.map(|end| end["errno"].as_i64().expect("an errno"))
            .collect()
    };
    assert_eq!(errnos(&first), [i64::from(libc::ECONNREFUSED); 50]);
    agent.command(&["pause"]).good();
    assert_eq!(
        dialer.connect(TO).errno,
        0,
        "from the moment that pause returns"
    );
    // What is under way has its own option again, what begins never gets ours.
    dialer.open(BLACKHOLE, 1, How::default());
    dialer.keep_user_timeouts(&[0; 21]);
    let paused = agent.status();
    assert!(paused["paused"]["by"].is_string(), "{paused:#}");
    assert_eq!(agent.metric("backstop_paused", &[]), Some(1.0));
    let loud = agent.command(&["status"]).good();
    assert!(loud.contains("PAUSED"), "{loud}");
    let before = agent.row(DESTINATION)["established"].as_u64();
    assert_eq!(dialer.connect(TO).errno, 0);
    assert!(
        agent.row(DESTINATION)["established"].as_u64() > before,
        "counting goes on"
    );

    agent.command(&["resume"]).good();
    assert_eq!(
        dialer.connect(TO).errno,
        libc::ECONNREFUSED,
        "from the moment that resume returns"
    );
    let mut seen = std::collections::BTreeSet::new();
    for _ in 1..30 {
        seen.extend(errnos(&load.answer()));
    }
    let allowed = [0, i64::from(libc::ECONNREFUSED)];
    assert!(seen.iter().all(|errno| allowed.contains(errno)), "{seen:?}");
    let row = agent.wait_row(DESTINATION, "nothing in flight", |row| {
        row["in_flight"] == 0
    });
    assert_balanced(&row);
    assert_eq!(agent.metric("backstop_paused", &[]), Some(0.0));
}

#[test]
fn across_a_restart() {
    let (net, group) = (TestNet::new(), TestCgroup::new("restart"));
    let agent = Agent::start(&group, "[defaults.timeouts]\nconnect = \"60s\"\n");
    agent.command(&["pause"]).good();
    let options = agent.options().clone();
    assert_eq!(agent.stop().code(), 0);
    let agent = options.start();
    assert!(agent.status()["paused"].is_object());
    let _server = Server::start(&net.server, TO);
    agent.command(&["trip", DESTINATION]).good();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, 0);
    dialer.open(BLACKHOLE, 1, How::default());
    dialer.keep_user_timeouts(&[0]);
    // Also when the agent is killed.
    agent.kill();
    let agent = options.start();
    assert!(agent.status()["paused"].is_object());
    agent.command(&["resume"]).good();
    assert_eq!(agent.stop().code(), 0);
    let agent = options.start();
    assert!(agent.status()["paused"].is_null());
    dialer.open(BLACKHOLE, 1, How::default());
    dialer.wait_user_timeouts(&[0, 60_000]);
}

#[test]
fn for_a_time() {
    let (net, group) = (TestNet::new(), TestCgroup::new("for"));
    let agent = Agent::start(&group, "");
    let _server = Server::start(&net.server, TO);
    let mut events = agent.follow(&[]);
    agent.command(&["trip", DESTINATION]).good();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let began = Instant::now();
    // (Longer than a connect takes on the busiest machine.)
    agent.command(&["pause", "--for", "5s"]).good();
    assert_eq!(dialer.connect(TO).errno, 0);
    events.wait("resumed", |event| event["action"] == "resumed");
    assert!(began.elapsed() >= Duration::from_secs(5));
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    assert!(agent.status()["paused"].is_null());
}
