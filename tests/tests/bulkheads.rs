//! Bulkheads: live connections, pending connects and connects a second, exactly.

use std::{
    net::{SocketAddr, TcpStream},
    time::{Duration, Instant},
};

use serde_json::Value;
use tests::{
    agent::{Agent, AgentOptions, assert_balanced},
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    foreign::{refuse_all, take_callbacks},
    net::TestNet,
    server::Server,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
/// For what comes by itself, on a busy machine.
const SOON: Duration = Duration::from_secs(60);
const BLACKHOLE: SocketAddr = SocketAddr::new(TestNet::blackhole4(0), 80);

/// Nothing else refuses or holds: no breaker, no budget, and an errno that the network does not give.
fn config(limits: &str) -> String {
    format!(
        "[defaults]\nretry = \"off\"\n[defaults.breaker]\nerrno = \"EPERM\"\nfailure_rate = \"off\"\nconsecutive_failures = 0\n\
         [defaults.limits]\n{limits}\n"
    )
}

struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
}

impl Scene {
    fn new(label: &str, limits: &str) -> Self {
        let (net, group) = (TestNet::new(), TestCgroup::new(label));
        let agent = Agent::start(&group, &config(limits));
        Self { net, group, agent }
    }

    fn dialer(&self) -> Dialer {
        Dialer::start(DIAL, &self.group, &self.net.client)
    }

    /// A server that holds each connection until the client closes it.
    fn server(&self) -> Server {
        Server::with(&self.net.server, TO, hold)
    }

    /// Waits until so many connections are counted.
    fn wait_live(&self, destination: &str, count: u64) -> Value {
        let what = format!("{count} live connections");
        self.agent
            .wait_row(destination, &what, |row| live(row) == count)
    }
}

fn hold(mut stream: TcpStream) {
    use std::io::Read as _;
    let mut rest = [0; 64];
    while matches!(stream.read(&mut rest), Ok(1..)) {}
}

fn live(row: &Value) -> u64 {
    row["limits"]["connections"]["used"]
        .as_u64()
        .unwrap_or(u64::MAX)
}

fn refused(row: &Value) -> u64 {
    row["rejected"]["limit"].as_u64().expect("a count")
}

/// How often each errno came, `0` among them.
fn times(crowd: &Value, errno: i32) -> u64 {
    crowd["errnos"][errno.to_string()].as_u64().unwrap_or(0)
}

#[test]
fn connections_are_limited_and_come_back() {
    let scene = Scene::new("bulk", "connections = 3");
    let _server = scene.server();
    let mut dialer = scene.dialer();
    let nonblocking = How {
        nonblocking: true,
        ..How::default()
    };
    dialer.open(TO, 3, nonblocking);
    assert_eq!(dialer.settle(SOON), [0; 3]);
    for how in [
        How::default(),
        nonblocking,
        How {
            uring: true,
            ..How::default()
        },
    ] {
        assert_eq!(dialer.connect_how(TO, how).errno, libc::EPERM);
    }
    let row = scene.agent.row(DESTINATION);
    assert_eq!((live(&row), refused(&row)), (3, 3), "{row:#}");
    assert_eq!(row["limits"]["connections"]["limit"], 3, "{row:#}");
    assert_eq!(row["limits"]["pending"]["limit"], Value::Null, "{row:#}");
    // A refusal is no failure of the destination, and no attempt.
    assert_eq!(
        (&row["attempts"], &row["windows"]["connects"]["failures"]),
        (&3.into(), &0.into()),
        "{row:#}"
    );
    assert_balanced(&row);
    let text = scene.agent.command(&["status", DESTINATION]).good();
    assert!(text.contains("connections 3 of 3"), "{text}");
    let text = scene.agent.command(&["explain", DESTINATION]).good();
    assert!(
        text.contains("refused with EPERM: 3 of 3 connections"),
        "{text}"
    );
    let labels = ["reason=\"limit\"".to_owned()];
    let metric = scene.agent.metric("backstop_rejected_total", &labels);
    assert_eq!(metric, Some(3.0));
    assert_eq!(scene.agent.metric("backstop_connections", &[]), Some(3.0));

    dialer.close();
    assert_eq!(dialer.connect(TO).errno, 0);
    scene.wait_live(DESTINATION, 0);
    assert_balanced(&scene.agent.row(DESTINATION));
}

/// A burst of threads at once: so many as there are places get one, whatever the order.
#[test]
fn never_one_too_many_with_64_threads() {
    let scene = Scene::new("bulk-crowd", "connections = 7");
    let _server = scene.server();
    let mut dialer = scene.dialer();
    dialer.order(&format!("crowd 64 3000 {TO}"));
    let crowd = dialer.answer();
    eprintln!("{crowd}");
    assert_eq!(crowd["most"], 7, "all places were used: {crowd}");
    let row = scene.wait_live(DESTINATION, 0);
    // A thread that is refused more than a hundred times a second is told later.
    let told = times(&crowd, libc::EPERM) + times(&crowd, libc::ETIMEDOUT);
    assert_eq!(told, refused(&row), "{crowd} {row:#}");
    assert_eq!(times(&crowd, 0), row["established"].as_u64().unwrap());
    assert!(refused(&row) > 0);
    assert_balanced(&row);
}

/// Connects from processes that are killed in the middle of them: nothing is leaked. So many, or as
/// many as `BACKSTOP_TEST_CONNECTS` says.
#[test]
fn kills_leak_nothing() {
    const CONNECTS: u64 = 100_000;
    const KILLS: u64 = 20;
    let wanted = std::env::var("BACKSTOP_TEST_CONNECTS").map_or(CONNECTS, |count| {
        count.parse().expect("a number in BACKSTOP_TEST_CONNECTS")
    });
    let scene = Scene::new("bulk-kill", "connections = 24\npending = 20");
    let server = Server::hanging_up(&scene.net.server, TO);
    let began = Instant::now();
    let mut row = Value::Null;
    for round in 1..=KILLS {
        let mut dialer = scene.dialer();
        dialer.order(&format!("crowd 25 600000 {TO}"));
        let most = Duration::from_secs(120 + wanted / KILLS / 200);
        wait::until("more connects", most, || {
            row = scene.agent.row(DESTINATION);
            (row["attempts"].as_u64()? >= wanted * round / KILLS).then_some(())
        });
        dialer.kill();
        row = scene.wait_live(DESTINATION, 0);
        assert_eq!(row["limits"]["pending"]["used"], 0, "{row:#}");
        assert_balanced(&row);
    }
    eprintln!(
        "{} connects begun, {} refused, {KILLS} kills, {:.0} s",
        row["attempts"],
        refused(&row),
        began.elapsed().as_secs_f64()
    );
    drop(server);
    // All places are there.
    let _server = scene.server();
    let mut dialer = scene.dialer();
    for _ in 0..25 {
        dialer.open(TO, 1, How::default());
        dialer.settle(SOON);
    }
    let after = scene.wait_live(DESTINATION, 24);
    assert_eq!(refused(&after), refused(&row) + 1, "{after:#}");
}

#[test]
fn pending_connects_are_limited() {
    let limits = "pending = 2\n[defaults.timeouts]\nconnect = \"8s\"";
    let scene = Scene::new("bulk-pending", limits);
    let destination = BLACKHOLE.to_string();
    let mut dialer = scene.dialer();
    assert_eq!(
        dialer.open(BLACKHOLE, 3, How::default()),
        [libc::EINPROGRESS, libc::EINPROGRESS, libc::EPERM]
    );
    let row = scene.agent.row(&destination);
    assert_eq!(row["limits"]["pending"]["used"], 2, "{row:#}");
    assert_eq!(refused(&row), 1, "{row:#}");
    // Those of another destination are none of its business; an answer frees the place.
    let _server = scene.server();
    for count in 1..=5 {
        dialer.open(TO, 1, How::default());
        scene.agent.wait_row(DESTINATION, "its answer", |row| {
            live(row) == count && row["limits"]["pending"]["used"] == 0
        });
    }
    // The connect timeout gives the places back.
    let row = scene.agent.wait_row(&destination, "timeouts", |row| {
        row["failures"]["connect_timeout"] == 2 && row["in_flight"] == 0
    });
    assert_eq!(live(&row), 0, "{row:#}");
    assert_eq!(
        dialer.open(BLACKHOLE, 1, How::default()),
        [libc::EINPROGRESS]
    );
}

#[test]
fn connects_a_second_are_limited() {
    let scene = Scene::new("bulk-rate", "connects_per_second = 20");
    let _server = scene.server();
    let mut dialer = scene.dialer();
    let began = Instant::now();
    dialer.order(&format!("crowd 8 3000 {TO}"));
    let crowd = dialer.answer();
    let seconds = began.elapsed().as_secs_f64();
    eprintln!("{crowd} in {seconds:.2} s");
    let passed = times(&crowd, 0);
    assert!(passed as f64 <= 20.0 + 20.0 * seconds, "{crowd}");
    // Of 80; a busy machine may keep the crowd from calling at the end of its time.
    assert!(passed >= 60, "the burst and three seconds' worth: {crowd}");
    let row = scene.wait_live(DESTINATION, 0);
    assert_eq!(row["attempts"], passed, "{row:#}");
    let rate = &row["limits"]["connects_per_second"];
    assert_eq!(rate["limit"], 20, "{row:#}");
    assert!(rate["used"].as_u64().is_some_and(|used| used <= 20));
    scene.agent.wait_row(DESTINATION, "a full bucket", |row| {
        row["limits"]["connects_per_second"]["used"] == 0
    });
}

/// What fails inside the call gives its place back at the socket's end, or with its next connect.
#[test]
fn connects_that_fail_in_the_call_keep_no_place() {
    let scene = Scene::new("bulk-local", "connections = 1\npending = 1");
    let to = SocketAddr::new(TestNet::NO_ROUTE, 80);
    let mut dialer = scene.dialer();
    for _ in 0..3 {
        assert_eq!(dialer.connect(to).errno, libc::ENETUNREACH);
    }
    let row = scene
        .agent
        .wait_row(&to.to_string(), "three local ends", |row| {
            row["local"] == 3 && live(row) == 0
        });
    assert_eq!(refused(&row), 0, "{row:#}");
    assert_eq!(row["attempts"], 0, "{row:#}");
    // A socket that is kept keeps it, for it may still be used.
    dialer.open(to, 1, How::default());
    assert_eq!(dialer.connect(to).errno, libc::EPERM);
    assert_eq!(live(&scene.agent.row(&to.to_string())), 1);
    dialer.close();
    scene.wait_live(&to.to_string(), 0);
    // And one to a port where nobody listens.
    for _ in 0..3 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    let row = scene.wait_live(DESTINATION, 0);
    assert_eq!(refused(&row), 0, "{row:#}");
}

/// Another program on the hook, after ours, refuses what we let pass.
#[test]
fn connects_refused_after_us_keep_no_place() {
    let scene = Scene::new("bulk-after", "connections = 1\npending = 1");
    refuse_all(&scene.group, libc::EXFULL);
    let mut dialer = scene.dialer();
    for _ in 0..4 {
        assert_eq!(dialer.connect(TO).errno, libc::EXFULL);
    }
    let row = scene.wait_live(DESTINATION, 0);
    assert_eq!((&row["local"], refused(&row)), (&4.into(), 0), "{row:#}");
    assert_eq!(
        (&row["attempts"], &row["in_flight"]),
        (&0.into(), &0.into())
    );
}

/// Another sock_ops program takes our callbacks away: then nobody is told when a connection ends.
#[test]
fn connections_whose_end_is_hidden_keep_no_place() {
    let scene = Scene::new("bulk-hidden", "connections = 2\npending = 2");
    take_callbacks(&scene.group);
    let _server = scene.server();
    let mut dialer = scene.dialer();
    for _ in 0..8 {
        assert_eq!(dialer.connect(TO).errno, 0);
    }
    dialer.open(TO, 2, How::default());
    scene.wait_live(DESTINATION, 2);
    assert_eq!(dialer.connect(TO).errno, libc::EPERM);
    dialer.kill();
    let row = scene.wait_live(DESTINATION, 0);
    assert_eq!(refused(&row), 1, "{row:#}");
}

#[test]
fn observe_mode_counts_only() {
    let (net, group) = (TestNet::new(), TestCgroup::new("bulk-observe"));
    let options = AgentOptions::new(&group).config(&config("connections = 2"));
    let agent = options.args(&["--mode", "observe"]).start();
    let _server = Server::with(&net.server, TO, hold);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    dialer.open(TO, 5, How::default());
    let row = agent.wait_row(DESTINATION, "five", |row| live(row) == 5);
    assert_eq!(
        (&row["would_reject"]["limit"], refused(&row)),
        (&3.into(), 0),
        "{row:#}"
    );
    wait::until("an event that says so", SOON, || {
        let events = agent.command(&["events", "--json"]).good();
        let says = |what: &str| events.contains(what);
        (says("\"reason\":\"limit\"") && says("\"mode\":\"observe\"")).then_some(())
    });
    // What they came to: each was closed and owed nothing.
    dialer.close();
    let row = agent.wait_row(DESTINATION, "what became of them", |row| {
        row["would_reject_succeeded"] == 3
    });
    assert_eq!(row["would_reject_failed"], 0, "{row:#}");
}

/// A limit that a reload switches on finds the connections that exist; those of before a restart too.
#[test]
fn reload_and_restart_find_the_right_count() {
    let (net, group) = (TestNet::new(), TestCgroup::new("bulk-reload"));
    // So that what waits still waits when the new agent is there.
    let timeouts = "[defaults.timeouts]\nconnect = \"5m\"\n";
    let agent = Agent::start(&group, timeouts);
    let _server = Server::with(&net.server, TO, hold);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    dialer.open(TO, 4, How::default());
    agent.wait_row(DESTINATION, "four", |row| live(row) == 4);
    let limits = "connections = 5\npending = 3";
    agent.home().write_config(&(config(limits) + timeouts));
    agent.wait_row(DESTINATION, "the limit", |row| {
        row["limits"]["connections"]["limit"] == 5
    });
    let mut second = Dialer::start(DIAL, &group, &net.client);
    second.open(TO, 1, How::default());
    agent.wait_row(DESTINATION, "five", |row| live(row) == 5);
    assert_eq!(second.connect(TO).errno, libc::EPERM);
    second.open(BLACKHOLE, 2, How::default());

    // A new agent knows them all, also those without an answer, and whoever of the old one it was
    // that saw them begin.
    let options = agent.options().clone();
    agent.kill();
    let agent = options.start();
    let after_kill = agent.row(DESTINATION);
    agent.stop();
    let agent = options.start();
    for row in [after_kill, agent.row(DESTINATION)] {
        assert_eq!(live(&row), 5, "{row:#}");
    }
    assert_eq!(second.connect(TO).errno, libc::EPERM);
    let row = agent.row(&BLACKHOLE.to_string());
    assert_eq!(row["limits"]["pending"]["used"], 2, "{row:#}");
    let errnos = second.open(BLACKHOLE, 2, How::default());
    assert_eq!(errnos, [libc::EINPROGRESS, libc::EPERM]);
    dialer.close();
    second.close();
    for destination in [DESTINATION.to_owned(), BLACKHOLE.to_string()] {
        let row = agent.wait_row(&destination, "nothing", |row| live(row) == 0);
        assert_eq!(row["limits"]["pending"]["used"], 0, "{row:#}");
    }
}

#[test]
fn a_pause_and_protection_lift_limits() {
    let limits = "connections = 1\n[protected]\ndestinations = [\"10.77.0.2:8081\"]";
    let scene = Scene::new("bulk-pause", limits);
    let _server = scene.server();
    let protected = TestNet::server4(8081);
    let _second = Server::with(&scene.net.server, protected, hold);
    let mut dialer = scene.dialer();
    dialer.open(protected, 3, How::default());
    let row = scene.wait_live(&protected.to_string(), 3);
    assert_eq!(
        row["limits"]["connections"]["limit"],
        Value::Null,
        "{row:#}"
    );
    dialer.open(TO, 1, How::default());
    assert_eq!(dialer.connect(TO).errno, libc::EPERM);
    scene.agent.command(&["pause"]).good();
    dialer.open(TO, 2, How::default());
    scene.wait_live(DESTINATION, 3);
    scene.agent.command(&["resume"]).good();
    // The count went on.
    assert_eq!(dialer.connect(TO).errno, libc::EPERM);
}
