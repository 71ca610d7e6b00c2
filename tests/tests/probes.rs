//! Half-open: as many probes as the policy says, whatever happens at once, and none is lost.

use std::net::SocketAddr;

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
const PORT: u16 = 8080;
const TO: SocketAddr = TestNet::server4(PORT);
const DESTINATION: &str = "10.77.0.2:8080";
/// A probe that hangs does so for longer than all that happens beside it takes, on the busiest machine.
const CONFIG: &str = r#"
[defaults.timeouts]
connect = "6s"
[defaults.breaker]
redial = false
cooldown = "500ms"
"#;

struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
}

impl Scene {
    /// A destination that has failed and is half-open now.
    fn half_open(config: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new("probes");
        let agent = Agent::start(&group, config);
        let scene = Self { net, group, agent };
        let mut dialer = scene.dialer();
        for _ in 0..5 {
            assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
        }
        scene.agent.wait_state(DESTINATION, "half_open");
        scene
    }

    fn dialer(&self) -> Dialer {
        Dialer::start(DIAL, &self.group, &self.net.client)
    }
}

/// The second slot comes with the next verdict.
#[track_caller]
fn second_probe(dialer: &mut Dialer) {
    let took = dialer.until_established(TO, wait::LONGEST);
    assert!(took.is_some(), "no second slot");
}

#[test]
fn of_two_hundred_connects_one_is_the_probe() {
    need!("nft");
    let scene = Scene::half_open(CONFIG);
    let mut events = scene.agent.follow(&[]);
    events.wait_breaker(DESTINATION, "half_open");
    // The probe hangs, so that its slot stays taken while the others come.
    let counter = scene.net.server.count_syns(PORT, true);
    let mut dialer = scene.dialer();
    let ends = dialer.burst(TO, 200);
    let refused = ends
        .iter()
        .filter(|end| end.errno == libc::ECONNREFUSED)
        .count();
    let timed_out = ends
        .iter()
        .filter(|end| end.errno == libc::ETIMEDOUT)
        .count();
    assert_eq!((refused, timed_out), (199, 1));
    // (It is open for no longer than its cooldown.)
    let open = events.wait_breaker(DESTINATION, "open");
    assert_eq!(open["reason"]["kind"], "probe_failed", "{open:#}");
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["attempts"], 6, "{row:#}");
    assert_eq!(row["rejected"]["breaker"], 199, "{row:#}");
    assert_balanced(&row);
    // The SYN of that one attempt, and its repeats, of which some come at equal distances (1 s) first.
    assert!((1..=7).contains(&counter.seen()), "{} SYNs", counter.seen());
}

#[test]
fn as_many_probes_as_the_policy_says() {
    need!("nft");
    let scene = Scene::half_open(&format!("{CONFIG}probes = 3\n"));
    let counter = scene.net.server.count_syns(PORT, true);
    let mut dialer = scene.dialer();
    let ends = dialer.burst(TO, 100);
    let passed = ends
        .iter()
        .filter(|end| end.errno == libc::ETIMEDOUT)
        .count();
    assert_eq!(passed, 3);
    assert!(
        (3..=21).contains(&counter.seen()),
        "{} SYNs",
        counter.seen()
    );
    assert_eq!(scene.agent.row(DESTINATION)["attempts"], 8);
}

#[test]
fn a_killed_probe_returns_its_slot() {
    need!("nft");
    let scene = Scene::half_open(CONFIG);
    let counter = scene.net.server.count_syns(PORT, true);
    // Started before: the probe does not wait for ever.
    let mut other = scene.dialer();
    let mut victim = scene.dialer();
    victim.order_connect(TO, How::default());
    scene
        .agent
        .wait_row(DESTINATION, "a probe under way", |row| {
            row["in_flight"] == 1
        });
    assert_eq!(
        other.connect(TO).errno,
        libc::ECONNREFUSED,
        "the slot is taken"
    );
    victim.kill();
    let row = scene
        .agent
        .wait_row(DESTINATION, "the probe gone", |row| row["in_flight"] == 0);
    assert_eq!(
        (&row["state"], &row["abandoned"]),
        (&"half_open".into(), &1.into()),
        "{row:#}"
    );
    counter.stop();
    let _server = Server::start(&scene.net.server, TO);
    assert_eq!(other.connect(TO).errno, 0, "the slot is free again");
    second_probe(&mut other);
    assert_balanced(&scene.agent.wait_state(DESTINATION, "closed"));
}

#[test]
fn a_probe_that_fails_in_the_call_returns_its_slot() {
    let scene = Scene::half_open(CONFIG);
    let mut dialer = scene.dialer();
    scene.net.client.ip("link set c0 down\n");
    assert_eq!(dialer.connect(TO).errno, libc::ENETUNREACH);
    scene.net.client.ip("link set c0 up\n");
    let row = scene
        .agent
        .wait_row(DESTINATION, "a local end", |row| row["local"] == 1);
    assert_eq!(row["state"], "half_open", "{row:#}");
    let _server = Server::start(&scene.net.server, TO);
    assert_eq!(dialer.connect(TO).errno, 0);
    second_probe(&mut dialer);
    scene.agent.wait_state(DESTINATION, "closed");
}

/// The slot's lease: a probe whose end nobody sees must not block for ever. SIGSTOP keeps the
/// process alive and its connect pending for as long as the connect timeout lets it.
#[test]
fn a_stopped_probe_ends_with_its_timeout() {
    need!("nft");
    let scene = Scene::half_open(CONFIG);
    let counter = scene.net.server.count_syns(PORT, true);
    let mut victim = scene.dialer();
    victim.order_connect(TO, How::default());
    scene
        .agent
        .wait_row(DESTINATION, "a probe under way", |row| {
            row["in_flight"] == 1
        });
    victim.signal(rustix::process::Signal::STOP);
    let mut events = scene.agent.follow(&[]);
    let event = events.wait_breaker(DESTINATION, "open");
    let event = if event["reason"]["kind"] == "probe_failed" {
        event
    } else {
        events.wait_breaker(DESTINATION, "open")
    };
    assert_eq!(event["reason"]["kind"], "probe_failed", "{event:#}");
    counter.stop();
    let _server = Server::start(&scene.net.server, TO);
    scene.agent.wait_state(DESTINATION, "half_open");
    let took = scene.dialer().until_established(TO, wait::LONGEST);
    assert!(took.is_some());
}
