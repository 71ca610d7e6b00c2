//! What is left of Backstop when its agent dies, hangs or stops: nothing.

use std::{net::SocketAddr, time::Duration};

use rustix::process::Signal;
use tests::{
    agent::{Agent, AgentOptions},
    attached,
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    net::TestNet,
    process::Program,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
/// A dead agent means open traffic: after five seconds, and a busy machine may take some more.
const OPEN_AGAIN: Duration = Duration::from_secs(20);
/// For what an agent does by itself, on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// An agent that refuses a healthy server's connections.
fn refusing(net: &TestNet, group: &TestCgroup) -> (Agent, Server, Dialer) {
    let agent = Agent::start_for_loops(group, "");
    let server = Server::start(&net.server, TO);
    agent.command(&["trip", DESTINATION]).good();
    let mut dialer = Dialer::start(DIAL, group, &net.client);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    (agent, server, dialer)
}

#[test]
fn a_killed_agent_leaves_nothing_attached() {
    let net = TestNet::new();
    let group = TestCgroup::new("killed");
    assert_eq!(attached::programs(&group), [0; 4]);
    let (agent, _server, mut dialer) = refusing(&net, &group);
    assert_eq!(attached::programs(&group), [1; 4]);
    agent.kill();
    let took = dialer.until_established(TO, OPEN_AGAIN);
    assert!(took.is_some(), "still refused after {OPEN_AGAIN:?}");
    let nothing = || (attached::programs(&group) == [0; 4]).then_some(());
    tests::wait::until("nothing attached", SOON, nothing);
    let blackhole = SocketAddr::new(TestNet::blackhole4(0), 80);
    dialer.open(blackhole, 1, How::default());
    dialer.keep_user_timeouts(&[0]);
}

#[test]
fn a_stopped_agent_refuses_nothing_until_it_is_back() {
    let net = TestNet::new();
    let group = TestCgroup::new("hung");
    let (agent, _server, mut dialer) = refusing(&net, &group);
    agent.signal(Signal::STOP);
    let took = dialer.until_established(TO, OPEN_AGAIN);
    assert!(took.is_some(), "still refused after {OPEN_AGAIN:?}");
    // No timeout is put on a connect either.
    let blackhole = SocketAddr::new(TestNet::blackhole4(0), 80);
    dialer.open(blackhole, 1, How::default());
    dialer.keep_user_timeouts(&[0]);
    agent.signal(Signal::CONT);
    tests::wait::until("enforcement to be back", SOON, || {
        (dialer.connect(TO).errno == libc::ECONNREFUSED).then_some(())
    });
    agent.wait_state(DESTINATION, "forced_open");
}

/// A hundred connects under way: half of them with an option of the program's own.
#[test]
fn an_orderly_stop_gives_every_option_back() {
    let net = TestNet::new();
    let group = TestCgroup::new("orderly");
    let agent = Agent::start(&group, "[defaults.timeouts]\nconnect = \"60s\"\n");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let own = How {
        own_timeout: Some(90_000),
        ..How::default()
    };
    let pending = [TestNet::blackhole4(0), TestNet::blackhole6(0)];
    for address in pending {
        let to = SocketAddr::new(address, 80);
        dialer.open(to, 25, How::default());
        dialer.open(to, 25, own);
    }
    dialer.wait_user_timeouts(&[60_000; 100]);
    let finished = agent.stop();
    assert_eq!(finished.code(), 0, "{finished}");
    let expected: Vec<i32> = (0..100)
        .map(|i| if i / 25 % 2 == 0 { 0 } else { 90_000 })
        .collect();
    assert_eq!(dialer.user_timeouts(), expected);
    assert_eq!(attached::programs(&group), [0; 4]);
    assert_eq!(
        dialer.settle(Duration::from_millis(100)),
        [libc::EINPROGRESS; 100]
    );
}

#[test]
fn the_socket_of_a_live_agent_is_respected_that_of_a_dead_one_taken() {
    let group = TestCgroup::new("socket");
    let other = TestCgroup::new("socket-other");
    let first = Agent::start(&group, "");
    let second = AgentOptions::new(&other).home(first.home());
    let refused = second.program().run();
    assert_eq!(refused.code(), 1, "{refused}");
    let socket = first.home().socket();
    assert!(
        refused.stderr.contains(socket.to_str().expect("ASCII")),
        "{refused}"
    );
    assert_eq!(refused.stdout, "", "no ready line");
    assert_eq!(attached::programs(&other), [0; 4]);
    assert_eq!(first.status()["destinations"], serde_json::json!([]));

    first.kill();
    assert!(socket.exists(), "left behind by the killed agent");
    let second = second.start();
    assert_eq!(second.status()["mode"], "enforce");
    assert_eq!(second.stop().code(), 0);
    assert!(!socket.exists());
}

#[test]
fn what_is_in_use_or_not_writable_is_said() {
    let group = TestCgroup::new("in-use");
    let first = Agent::start(&group, "");
    let listen = first
        .ready_line()
        .split("listen=")
        .nth(1)
        .expect("the listener")
        .trim()
        .to_owned();
    let other = TestCgroup::new("in-use-other");
    let refused = AgentOptions::new(&other).listen(&listen).program().run();
    assert_eq!(refused.code(), 1, "{refused}");
    assert!(refused.stderr.contains(&listen), "{refused}");

    // Two would write over each other's state.
    let home = tests::agent::Home::new();
    let state = first.home().path().join("state");
    let refused = Program::new(tests::agent::binary())
        .args(["run", "--listen", "none", "--socket"])
        .arg(home.socket())
        .arg("--state-dir")
        .arg(&state)
        .arg("--cgroup")
        .arg(other.path())
        .run();
    assert_eq!(refused.code(), 1, "{refused}");
    assert!(refused.stderr.contains("another agent"), "{refused}");
    assert!(!home.socket().exists(), "{refused}");

    // A directory cannot be made inside a file, not even by root.
    let options = AgentOptions::new(&other);
    let file = first.home().path().join("file");
    std::fs::write(&file, "").expect("write a file");
    let inside = file.join("state");
    let refused = options
        .args(&["--state-dir", inside.to_str().expect("ASCII")])
        .program()
        .run();
    // Given twice: which of the two counts is clap's business, but it must not start.
    assert_ne!(refused.code(), 0, "{refused}");
    assert_eq!(attached::programs(&other), [0; 4]);
}

#[test]
fn eight_agents_at_once_do_not_touch_one_another() {
    let net = TestNet::new();
    let _server = Server::start(&net.server, TO);
    let groups: Vec<TestCgroup> = (0..8)
        .map(|i| TestCgroup::new(&format!("eight-{i}")))
        .collect();
    let agents: Vec<Agent> = groups.iter().map(|group| Agent::start(group, "")).collect();
    let mut dialers: Vec<Dialer> = groups
        .iter()
        .map(|group| Dialer::start(DIAL, group, &net.client))
        .collect();
    for (i, agent) in agents.iter().enumerate().filter(|(i, _)| i % 2 == 0) {
        agent.command(&["trip", DESTINATION]).good();
        for (j, dialer) in dialers.iter_mut().enumerate() {
            let refused = j <= i && j % 2 == 0;
            let errno = if refused { libc::ECONNREFUSED } else { 0 };
            assert_eq!(dialer.connect(TO).errno, errno, "agent {i}, group {j}");
        }
    }
    for (i, (agent, group)) in agents.iter().zip(&groups).enumerate() {
        let row = agent.row(DESTINATION);
        assert_eq!(row["workload"], group.workload());
        let refused = if i % 2 == 0 { 4 - i / 2 } else { 0 } as u64;
        assert_eq!(row["rejected"]["breaker"], refused, "{row:#}");
        assert_eq!(row["established"], 4 - refused, "{row:#}");
    }
    for agent in agents {
        assert_eq!(agent.stop().code(), 0);
    }
    for group in &groups {
        assert_eq!(attached::programs(group), [0; 4]);
    }
}
