//! The whole path with programs that know nothing of Backstop: real refusals, a refusal in the
//! kernel that looks the same, and the way back.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use serde_json::Value;
use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    clients::{self, Client},
    dialer::{Dialer, How},
    net::TestNet,
    process::{Finished, Program, Running, find},
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const PORT: u16 = 8080;
const TO: SocketAddr = TestNet::server4(PORT);
const DESTINATION: &str = "10.77.0.2:8080";
/// `consecutive_failures` of the built-in configuration.
const FAILURES: u64 = 5;

/// With redial the breaker is half-open this soon after the server is back: within a second, on a
/// machine that has nothing else to do. The cooldown would be five minutes.
const BACK_IN_USE: Duration = Duration::from_secs(30);

const WITH_REDIAL: &str = r#"
[defaults.breaker]
cooldown = "5m"
"#;

const WITHOUT_REDIAL: &str = r#"
[defaults.breaker]
redial = false
cooldown = "8s"
"#;

/// `dial` as a client of its own: the io_uring connect.
const URING: Client = Client {
    name: "io_uring",
    needs: &[],
    command: |to| Program::new(DIAL).args(["connect", &to.to_string(), "uring"]),
    message: |finished| errno(finished).to_string(),
    succeeded: |finished| errno(finished) == 0,
};

fn errno(finished: &Finished) -> i64 {
    let answer: Value = serde_json::from_str(&finished.stdout).expect("dial's answer");
    answer["errno"].as_i64().expect("an errno")
}

struct Scene {
    client: Client,
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    /// A process that stays in the workload and never connects, as each pod has one: the programs
    /// that do are gone by the time of a redial.
    _resident: Running,
}

impl Scene {
    /// `None`, and said, when the client is not installed.
    fn new(client: Client, config: &str) -> Option<Self> {
        let missing = client.needs.iter().find(|program| find(program).is_none());
        if let Some(program) = missing {
            tests::say_skipped(format_args!("the program {program} is not installed"));
            return None;
        }
        if client.name == clients::PYTHON_URLLIB3.name && !clients::has_urllib3() {
            tests::say_skipped(format_args!("this Python has no urllib3"));
            return None;
        }
        let net = TestNet::new();
        let group = TestCgroup::new("breaker");
        let agent = Agent::start(&group, config);
        let sleep = Program::new("sleep").arg("600");
        let _resident = sleep.in_cgroup(&group).in_netns(&net.client).spawn();
        Some(Self {
            client,
            net,
            group,
            agent,
            _resident,
        })
    }

    fn ask(&self) -> Finished {
        self.client
            .command(TO)
            .in_cgroup(&self.group)
            .in_netns(&self.net.client)
            .run()
    }

    /// Five real refusals open the breaker; the next refusal is Backstop's and looks the same.
    /// Returns how many there were, which the caller adds to.
    fn open(&self) -> u64 {
        let natural = self.client.command(TO).in_netns(&self.net.client).run();
        let natural = self.client.outcome(&natural);
        for _ in 0..FAILURES {
            let finished = self.ask();
            assert_eq!(self.client.outcome(&finished), natural, "{finished}");
            // Java tries twice: its sixth attempt may be there before the breaker has opened.
            if self.agent.row(DESTINATION)["attempts"].as_u64() >= Some(FAILURES) {
                break;
            }
        }
        let row = self.agent.wait_state(DESTINATION, "open");
        let attempts = row["attempts"].as_u64().expect("a count");
        let most = FAILURES + u64::from(self.client.name == clients::JAVA.name);
        assert!((FAILURES..=most).contains(&attempts), "{row:#}");
        assert_eq!(row["failures"]["refused"], attempts, "{row:#}");
        assert_eq!(row["workload"], self.group.workload());
        assert_eq!(row["netns"], self.net.client.inode());
        let reason = &row["reason"];
        assert_eq!(reason["kind"], "consecutive_failures");
        assert_eq!(reason["window"], "connects");
        let value = reason["value"].as_f64().expect("a number");
        assert!((5.0..=most as f64).contains(&value), "{row:#}");
        assert_eq!(reason["threshold"], 5.0);

        let before = row["rejected"]["breaker"].as_u64().expect("a count");
        let finished = self.ask();
        assert_eq!(self.client.outcome(&finished), natural, "{finished}");
        let row = self.agent.row(DESTINATION);
        assert!(
            row["rejected"]["breaker"].as_u64() > Some(before),
            "{row:#}"
        );
        assert_eq!(row["attempts"], attempts, "no SYN left: {row:#}");
        assert_balanced(&row);
        attempts
    }

    fn succeeds(&self) {
        let finished = self.ask();
        assert!(
            self.client.succeeded(&finished),
            "{}: {finished}",
            self.client.name
        );
    }
}

/// The server comes back; redial notices.
fn with_redial(client: Client) {
    let Some(scene) = Scene::new(client, WITH_REDIAL) else {
        return;
    };
    let failed = scene.open();
    let mut events = scene.agent.follow(&[]);
    let back = Instant::now();
    let server = Server::start(&scene.net.server, TO);
    events.wait_breaker(DESTINATION, "half_open");
    let noticed = back.elapsed();
    assert!(noticed < BACK_IN_USE, "noticed after {noticed:?}");
    // Two probes by the program itself, then everything.
    scene.succeeds();
    let row = scene
        .agent
        .wait_row(DESTINATION, "one probe", |row| row["established"] == 1);
    assert_eq!(row["state"], "half_open", "{row:#}");
    scene.succeeds();
    events.wait_breaker(DESTINATION, "closed");
    scene.succeeds();
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["established"], 3, "{row:#}");
    assert_eq!(row["reason"]["kind"], "none");
    assert_balanced(&row);
    // The agent's own dials are not the program's attempts.
    assert_eq!(row["attempts"], failed + 3);
    assert!(server.accepts() >= 4);
}

/// The server comes back; only the cooldown lets probes through.
fn without_redial(client: Client) {
    // A client must have started and ended before the cooldown is over.
    let slow = WITHOUT_REDIAL.replace("8s", "20s");
    let is_slow = client.name == clients::JAVA.name;
    let config = if is_slow { &slow } else { WITHOUT_REDIAL };
    let Some(scene) = Scene::new(client, config) else {
        return;
    };
    scene.open();
    let opened = scene.agent.row(DESTINATION);
    assert_eq!(opened["next_redial_in_ms"], Value::Null);
    let mut events = scene.agent.follow(&[]);
    let server = Server::start(&scene.net.server, TO);
    let half_open = events.wait_breaker(DESTINATION, "half_open");
    assert_eq!(server.accepts(), 0, "nobody dialled: {half_open}");
    scene.succeeds();
    let row = scene
        .agent
        .wait_row(DESTINATION, "one probe", |row| row["established"] == 1);
    assert_eq!(row["state"], "half_open", "{row:#}");
    scene.succeeds();
    events.wait_breaker(DESTINATION, "closed");
    let mut dialer = Dialer::start(DIAL, &scene.group, &scene.net.client);
    let ends = dialer.burst(TO, 20);
    assert!(ends.iter().all(|end| end.errno == 0), "{ends:?}");
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["established"], 22, "{row:#}");
    assert_balanced(&row);
}

macro_rules! each_client {
    ($($name:ident: $client:expr),+ $(,)?) => {
        mod redial {
            $(#[test] fn $name() { super::with_redial($client); })+
        }
        mod cooldown {
            $(#[test] fn $name() { super::without_redial($client); })+
        }
    };
}

each_client! {
    curl: tests::clients::CURL,
    wget: tests::clients::WGET,
    python_blocking: tests::clients::PYTHON_BLOCKING,
    python_asyncio: tests::clients::PYTHON_ASYNCIO,
    python_urllib3: tests::clients::PYTHON_URLLIB3,
    java: tests::clients::JAVA,
    node: tests::clients::NODE,
    hey: tests::clients::HEY,
    io_uring: super::URING,
}

/// Rates: failures that are not in a row open the breaker, too, once there are enough calls.
#[test]
fn half_of_the_window_failing_opens() {
    let net = TestNet::new();
    let group = TestCgroup::new("rate");
    let config = "[defaults.breaker]\nwindow = 10\nmin_calls = 10\nredial = false\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for call in 0..9 {
        let server = (call % 2 == 0).then(|| Server::start(&net.server, TO));
        assert_eq!(dialer.connect(TO).errno == 0, server.is_some());
    }
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["state"], &row["windows"]["connects"]["calls"]),
        (&"closed".into(), &9.into())
    );
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let row = agent.wait_state(DESTINATION, "open");
    assert_eq!(row["reason"]["kind"], "failure_rate");
    assert_eq!(row["reason"]["value"], 0.5);
    assert_eq!(row["failures"]["refused"], 5);
}

/// A failed probe opens again, for longer.
#[test]
fn a_failed_probe_opens_again_for_longer() {
    let net = TestNet::new();
    let group = TestCgroup::new("failed-probe");
    let agent = Agent::start(&group, WITHOUT_REDIAL);
    let mut events = agent.follow(&[]);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..FAILURES {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    events.wait_breaker(DESTINATION, "open");
    events.wait_breaker(DESTINATION, "half_open");
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let again = events.wait_breaker(DESTINATION, "open");
    assert_eq!(again["reason"]["kind"], "probe_failed", "{again:#}");
    let row = agent.wait_state(DESTINATION, "open");
    // The first cooldown was 8 s; the doubled one has jitter.
    let number = |key: &str| row[key].as_u64().expect("a time");
    let cooldown = number("next_probe_in_ms") + number("state_age_ms");
    assert!(cooldown > 12_000, "{row:#}");
}

/// Each errno that a policy may ask for is what the program sees.
#[test]
fn the_policy_chooses_the_errno() {
    let net = TestNet::new();
    let group = TestCgroup::new("errno");
    let all = [
        ("ECONNREFUSED", libc::ECONNREFUSED),
        ("ETIMEDOUT", libc::ETIMEDOUT),
        ("EHOSTUNREACH", libc::EHOSTUNREACH),
        ("ENETUNREACH", libc::ENETUNREACH),
        ("ECONNRESET", libc::ECONNRESET),
        ("EPERM", libc::EPERM),
    ];
    let mut config = String::new();
    for (i, (name, _)) in all.iter().enumerate() {
        config += &format!(
            "[[policy]]\nname = \"{name}\"\ndestinations = [\"10.77.0.2:{}\"]\n\
             breaker = {{ errno = \"{name}\" }}\n",
            9000 + i
        );
    }
    let agent = Agent::start(&group, &config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for (i, (name, number)) in (0..).zip(all) {
        let to = TestNet::server4(9000 + i);
        agent.command(&["trip", &to.to_string()]).good();
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
            assert_eq!(dialer.connect_how(to, how).errno, number, "{name}");
        }
        let row = agent.wait_state(&to.to_string(), "forced_open");
        assert_eq!(
            (&row["policy"], &row["rejected"]["breaker"]),
            (&name.into(), &3.into())
        );
        assert_eq!(
            (&row["state"], &row["attempts"]),
            (&"forced_open".into(), &0.into())
        );
    }
}
