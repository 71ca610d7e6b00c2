//! Two agents on one socket's path: the programs of the inner control group run first, then those
//! of the outer one, as with any other program on the hook.

use std::net::SocketAddr;

use serde_json::Value;
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

struct Scene {
    net: TestNet,
    _server: Server,
    _outer_group: TestCgroup,
    outer: Agent,
    inner: Agent,
    dialer: Dialer,
}

impl Scene {
    fn new(config: &str) -> Self {
        let net = TestNet::new();
        let _server = Server::start(&net.server, TO);
        let outer_group = TestCgroup::new("outer");
        let group = outer_group.child("inner");
        let outer = Agent::start_for_loops(&outer_group, config);
        let inner = Agent::start_for_loops(&group, config);
        let dialer = Dialer::start(DIAL, &group, &net.client);
        // Its parent removes it.
        std::mem::forget(group);
        Self {
            net,
            _server,
            _outer_group: outer_group,
            outer,
            inner,
            dialer,
        }
    }
}

fn is_local(row: &Value) -> bool {
    row["local"] == 3
}

/// A refusal by a program after ours is no failure of the destination.
#[test]
fn the_outer_one_refuses() {
    let mut scene = Scene::new("");
    scene.outer.command(&["trip", DESTINATION]).good();
    for how in [
        How::default(),
        How {
            nonblocking: true,
            ..How::default()
        },
        How {
            uring: true,
            ..How::default()
        },
    ] {
        assert_eq!(scene.dialer.connect_how(TO, how).errno, libc::ECONNREFUSED);
    }
    let row = scene
        .inner
        .wait_row(DESTINATION, "three local ends", is_local);
    assert_eq!(
        (&row["attempts"], &row["in_flight"]),
        (&0.into(), &0.into()),
        "{row:#}"
    );
    assert_eq!(
        (&row["state"], &row["windows"]["connects"]["calls"]),
        (&"closed".into(), &0.into())
    );
    assert_eq!(scene.outer.row(DESTINATION)["rejected"]["breaker"], 3);
}

/// One before ours has refused already: we neither count a refusal of our own nor change its errno.
#[test]
fn the_inner_one_refuses() {
    let config = "[defaults.breaker]\nerrno = \"EHOSTUNREACH\"\n";
    let mut scene = Scene::new(config);
    scene.inner.command(&["trip", DESTINATION]).good();
    for _ in 0..3 {
        assert_eq!(scene.dialer.connect(TO).errno, libc::EHOSTUNREACH);
    }
    let row = scene
        .outer
        .wait_row(DESTINATION, "three local ends", is_local);
    assert_eq!(
        (&row["attempts"], &row["in_flight"]),
        (&0.into(), &0.into()),
        "{row:#}"
    );
    assert_eq!(
        (&row["state"], &row["rejected"]["breaker"]),
        (&"closed".into(), &0.into()),
        "{row:#}"
    );
    assert_eq!(scene.inner.row(DESTINATION)["rejected"]["breaker"], 3);
}

/// Both count what passes, both see it end, and the stricter timeout is the one that holds.
#[test]
fn both_pass() {
    let mut scene = Scene::new("[defaults.timeouts]\nconnect = \"60s\"\n");
    scene
        .inner
        .home()
        .write_config("[defaults]\nretry = \"off\"\n[defaults.timeouts]\nconnect = \"90s\"\n");
    assert_eq!(scene.inner.request("POST", "/v1/reload").status, 200);
    assert_eq!(scene.dialer.connect(TO).errno, 0);
    for _ in 0..5 {
        let closed = TestNet::server4(8081);
        assert_eq!(scene.dialer.connect(closed).errno, libc::ECONNREFUSED);
    }
    for agent in [&scene.outer, &scene.inner] {
        let row = agent.row(DESTINATION);
        assert_eq!(
            (&row["attempts"], &row["established"]),
            (&1.into(), &1.into()),
            "{row:#}"
        );
        let row = agent.wait_state("10.77.0.2:8081", "open");
        assert_eq!(
            (&row["attempts"], &row["failures"]["refused"]),
            (&5.into(), &5.into())
        );
        assert_balanced(&row);
    }
    let blackhole = SocketAddr::new(TestNet::blackhole4(0), 80);
    scene.dialer.open(blackhole, 1, How::default());
    scene.dialer.wait_user_timeouts(&[60_000]);
    // The first to stop must not take away what the other has set.
    let Scene {
        outer,
        inner,
        mut dialer,
        net,
        ..
    } = scene;
    assert_eq!(inner.stop().code(), 0);
    assert_eq!(dialer.user_timeouts(), [60_000]);
    assert_eq!(outer.stop().code(), 0);
    drop(net);
}
