//! What is lost with an agent or a row, and where no agent runs, as docs/LIMITS.md says it.

use std::{net::SocketAddr, time::Duration};

use tests::{
    agent::{Agent, binary},
    attached,
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    need,
    net::{Namespace, TestNet},
    process::Program,
    server::Server,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const SOON: Duration = Duration::from_secs(10);

#[test]
fn a_restart_forgets_all_but_a_pause() {
    let net = TestNet::new();
    let group = TestCgroup::new("restart");
    let agent = Agent::start(&group, "[defaults.breaker]\nredial = false\n");
    let options = agent.options().clone();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..5 {
        dialer.connect(TO);
    }
    agent.wait_state(DESTINATION, "open");
    let other = TestNet::server4(8081).to_string();
    agent.command(&["trip", &other]).good();
    agent.command(&["pause"]).good();
    assert_eq!(agent.stop().code(), 0);

    let server = Server::start(&net.server, TO);
    let agent = options.start();
    assert_ne!(agent.status()["paused"], serde_json::Value::Null);
    agent.command(&["resume"]).good();
    assert_eq!(agent.status()["destinations"], serde_json::json!([]));
    assert_eq!(dialer.connect(TO).errno, 0, "the breaker is closed");
    server.wait_accepts(1);
    let _other = Server::start(&net.server, TestNet::server4(8081));
    assert_eq!(
        dialer.connect(TestNet::server4(8081)).errno,
        0,
        "not tripped any more"
    );
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
    assert_eq!(agent.row(DESTINATION), serde_json::Value::Null);
}

/// Nobody is left to give the option back, not even when the connection is established.
#[test]
fn a_killed_agent_leaves_its_timeout_on_connects_under_way() {
    need!("nft");
    let net = TestNet::new();
    let group = TestCgroup::new("killed");
    let agent = Agent::start(&group, "[defaults.timeouts]\nconnect = \"20s\"\n");
    let server = Server::start(&net.server, TO);
    let drops = net.server.count_syns(TO.port(), true);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.open(TO, 1, How::default()), [libc::EINPROGRESS]);
    // It is set when the first SYN timer runs out.
    wait::until("the timeout on the socket", SOON, || {
        (dialer.user_timeouts() == [20_000]).then_some(())
    });
    agent.kill();
    wait::until("nothing attached", SOON, || {
        (attached::programs(&group) == [0; 4]).then_some(())
    });
    drops.stop();
    assert_eq!(dialer.settle(SOON), [0]);
    server.wait_accepts(1);
    assert_eq!(dialer.user_timeouts(), [20_000]);
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
    wait::until("the idlest row to go", SOON, || {
        agent.row(&first.to_string()).is_null().then_some(())
    });
    wait::until("a row for it", SOON, || {
        dialer.connect(first);
        (!agent.row(&first.to_string()).is_null()).then_some(())
    });
    let row = agent.row(&first.to_string());
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
