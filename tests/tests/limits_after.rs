//! What is lost with an agent or a row, and where no agent runs, as docs/LIMITS.md says it.

use std::net::SocketAddr;

use tests::{
    agent::{Agent, binary},
    attached,
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    need,
    net::{Namespace, TestNet},
    process::Program,
    server::Server,
    wait::{self, LONGEST},
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";

#[test]
fn a_restart_forgets_counters_and_those_that_were_well() {
    let net = TestNet::new();
    let group = TestCgroup::new("restart");
    let agent = Agent::start(&group, "[defaults.breaker]\nredial = false\n");
    let options = agent.options().clone();
    let _server = Server::start(&net.server, TestNet::server4(8081));
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..5 {
        dialer.connect(TO);
        assert_eq!(dialer.connect(TestNet::server4(8081)).errno, 0);
    }
    agent.wait_state(DESTINATION, "open");
    assert_eq!(agent.stop().code(), 0);

    let agent = options.start();
    let rows = agent.status()["destinations"].clone();
    let rows = rows.as_array().expect("a list");
    assert_eq!(rows.len(), 1, "{rows:#?}");
    assert_eq!(rows[0]["destination"], DESTINATION);
    assert_eq!(rows[0]["state"], "open");
    assert_eq!(rows[0]["attempts"], 0);
    assert_eq!(rows[0]["failures"]["refused"], 0);
    assert_eq!(rows[0]["connect_latency_us"]["count"], 0);
}

#[test]
fn connects_between_two_agents_pass_uncounted() {
    let net = TestNet::new();
    let group = TestCgroup::new("gap");
    let agent = Agent::start(&group, "");
    let options = agent.options().clone();
    let server = Server::start(&net.server, TO);
    agent.command(&["trip", DESTINATION]).good();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    assert_eq!(agent.stop().code(), 0);
    assert_eq!(dialer.connect(TO).errno, 0);
    server.wait_accepts(1);
    let agent = options.start();
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["state"], &row["attempts"]),
        (&"forced_open".into(), &0.into()),
        "{row:#}"
    );
}

/// Nobody is left to give the option back, not even when the connection is established.
#[test]
fn a_killed_agent_leaves_its_timeout_on_connects_under_way() {
    need!("nft");
    let net = TestNet::new();
    let group = TestCgroup::new("killed");
    let agent = Agent::start(&group, "[defaults.timeouts]\nconnect = \"60s\"\n");
    let server = Server::start(&net.server, TO);
    let drops = net.server.count_syns(TO.port(), true);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.open(TO, 1, How::default()), [libc::EINPROGRESS]);
    // It is set when the first SYN timer runs out.
    wait::until("the timeout on the socket", LONGEST, || {
        (dialer.user_timeouts() == [60_000]).then_some(())
    });
    agent.kill();
    wait::until("nothing attached", LONGEST, || {
        (attached::programs(&group) == [0; 4]).then_some(())
    });
    drops.stop();
    // (The next SYN may be half a minute away.)
    assert_eq!(dialer.settle(LONGEST), [0]);
    server.wait_accepts(1);
    assert_eq!(dialer.user_timeouts(), [60_000]);
}

#[test]
fn a_destination_that_was_given_up_starts_anew() {
    let namespace = Namespace::new("anew");
    let group = TestCgroup::new("anew");
    let agent = Agent::start(&group, "[agent]\nmax_destinations = 16\n");
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    let first: SocketAddr = "127.0.0.9:80".parse().expect("an address");
    for _ in 0..4 {
        dialer.connect(first);
    }
    assert_eq!(agent.row(&first.to_string())["attempts"], 4);
    dialer.sweep("127.1.0.1".parse().expect("an address"), 80, 30);
    wait::until("the idlest row to go", LONGEST, || {
        agent.row(&first.to_string()).is_null().then_some(())
    });
    let row = wait::until("a row for it", LONGEST, || {
        dialer.connect(first);
        Some(agent.row(&first.to_string())).filter(|row| !row.is_null())
    });
    assert!(row["attempts"].as_u64() < Some(4), "{row:#}");
    assert_eq!(row["state"], "closed", "{row:#}");
}

#[test]
fn a_pid_namespace_of_its_own_is_refused() {
    need!("unshare");
    let group = TestCgroup::new("pid-namespace");
    let finished = Program::new("unshare")
        .args(["--pid", "--fork"])
        .arg(binary())
        .args(["run", "--listen", "none", "--cgroup"])
        .arg(group.path())
        .arg("--socket")
        .arg(group.path().join("none"))
        .run();
    assert_eq!(finished.code(), 4, "{finished}");
    assert!(finished.stderr.contains("pid namespace"), "{finished}");
}
