//! What events say of refusals, held connects and budgets: all of it, and in time.

use std::{cell::Cell, net::SocketAddr, time::Duration};

use rustix::process::Signal;
use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    dialer::Dialer,
    interpreter::Interpreter,
    need,
    net::{Namespace, TestNet},
    server::Server,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const DESTINATION: &str = "10.77.0.2:8080";
const SOON: Duration = wait::LONGEST;
/// Refusals are not slowed down.
const NO_SPIN: &str = "[defaults.retry]\nspin_per_second = \"off\"\n";

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("no number: {value}"))
}

/// Every event that the agent has kept, in the order in which it shows them.
fn events(agent: &Agent) -> Vec<Value> {
    let lines = agent.command(&["events", "--all", "--json"]).good();
    let lines = lines.lines();
    lines
        .map(|line| serde_json::from_str(line).expect("an event"))
        .collect()
}

/// The counts of a kind and reason of a destination, added up.
fn sum(events: &[Value], kind: &str, reason: &str) -> u64 {
    let of = events.iter().filter(|event| {
        event["kind"] == kind && event["destination"] == DESTINATION && event["reason"] == reason
    });
    of.map(|event| number(&event["count"])).sum()
}

/// Waits until all of so many are told; how many events that took.
fn wait_told(agent: &Agent, kind: &str, reason: &str, count: u64) -> Vec<Value> {
    let what = format!("{count} of {kind} {reason}");
    let events = wait::until(&what, SOON, || {
        let events = events(agent);
        let told = sum(&events, kind, reason);
        assert!(told <= count, "{told} instead of {count}: {events:#?}");
        (told == count).then_some(events)
    });
    events
        .into_iter()
        .filter(|event| event["kind"] == kind && event["reason"] == reason)
        .collect()
}

struct Scene {
    agent: Agent,
    python: Interpreter,
    _group: TestCgroup,
    _net: TestNet,
}

impl Scene {
    fn new(config: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new("told");
        let agent = Agent::start(&group, config);
        let mut python = Interpreter::start(&group, &net.client);
        python.run(
            "TO = ('10.77.0.2', 8080)\n\
             def attempt():\n s = socket.socket()\n e = s.connect_ex(TO)\n s.close()\n return e\n\
             def attempts(n):\n return sum(attempt() == 111 for _ in range(n))",
        );
        Self {
            agent,
            python,
            _group: group,
            _net: net,
        }
    }

    /// So many connects, of which so many are refused.
    fn attempts(&mut self, count: u64) -> u64 {
        number(&self.python.value(&format!("attempts({count})")))
    }

    fn trip(&self) {
        self.agent
            .command(&["trip", DESTINATION, "--for", "5m"])
            .good();
    }
}

/// Two thousand in a moment, and nothing after: all of them are told, in few events.
#[test]
fn every_refusal_is_told() {
    need!("python3");
    let mut scene = Scene::new(NO_SPIN);
    scene.attempts(1);
    scene.trip();
    assert_eq!(scene.attempts(2000), 2000);
    let told = wait_told(&scene.agent, "rejected", "breaker", 2000);
    assert_eq!(told[0]["count"], 1, "the first one at once: {told:#?}");
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["rejected"]["breaker"], 2000, "{row:#}");
    // Again, after a while and in another process: none is added to what came before.
    let before = told.len();
    assert_eq!(scene.attempts(500), 500);
    let told = wait_told(&scene.agent, "rejected", "breaker", 2500);
    let later: u64 = told[before..].iter().map(|of| number(&of["count"])).sum();
    assert_eq!(later, 500, "{told:#?}");
}

/// What was refused before the breaker changes is told before it.
#[test]
fn refusals_are_told_before_the_breaker_changes() {
    need!("python3");
    let mut scene = Scene::new(NO_SPIN);
    scene.attempts(1);
    scene.trip();
    assert_eq!(scene.attempts(300), 300);
    scene.agent.command(&["reset", DESTINATION]).good();
    scene.agent.wait_state(DESTINATION, "closed");
    let events = wait::until("the change", SOON, || {
        let events = events(&scene.agent);
        let is_reset = |event: &Value| event["kind"] == "breaker" && event["to"] == "closed";
        let at = events.iter().position(is_reset)?;
        Some(events[..at].to_vec())
    });
    assert_eq!(sum(&events, "rejected", "breaker"), 300, "{events:#?}");
}

/// The first refusal comes after the change that it is due to, however quickly.
#[test]
fn refusals_are_told_after_the_breaker_has_opened() {
    need!("python3");
    let mut scene = Scene::new(&format!("[defaults.breaker]\nredial = false\n{NO_SPIN}"));
    // Of these, the first five are the destination's own.
    assert_eq!(scene.attempts(400), 400);
    let row = scene.agent.wait_state(DESTINATION, "open");
    let refused = number(&row["rejected"]["breaker"]);
    wait_told(&scene.agent, "rejected", "breaker", refused);
    let events = events(&scene.agent);
    let is_refusal = |event: &&Value| event["kind"] == "rejected" && event["reason"] == "breaker";
    let first = events.iter().position(|event| is_refusal(&event));
    let opened = events.iter().position(|event| event["to"] == "open");
    assert!(opened.is_some() && opened < first, "{events:#?}");
    let pid = scene.python.value("os.getpid()");
    for event in events.iter().filter(is_refusal) {
        assert_eq!(event["pid"], pid, "{event:#}");
    }
}

/// The last words of an agent that is told to stop.
#[test]
fn refusals_are_told_before_the_end() {
    need!("python3");
    let mut scene = Scene::new(NO_SPIN);
    let mut follow = scene.agent.follow(&[]);
    scene.attempts(1);
    scene.trip();
    assert_eq!(scene.attempts(700), 700);
    scene.agent.signal(Signal::TERM);
    let told = Cell::new(0);
    follow.wait("the last refusal", |event| {
        if event["kind"] == "rejected" {
            told.set(told.get() + number(&event["count"]));
        }
        told.get() == 700
    });
}

/// A row that is given up within the second of its refusals.
#[test]
fn refusals_are_told_before_a_row_is_given_up() {
    let namespace = Namespace::new("told");
    let group = TestCgroup::new("told");
    let config = "[agent]\nmax_destinations = 100\n[defaults.breaker]\nredial = false\n\
                  [[policy]]\nname = \"one\"\ndestinations = [\"127.0.0.1:8080\"]\n\
                  limits = { connects_per_second = 1 }\n";
    let agent = Agent::start_for_loops(&group, config);
    let to: SocketAddr = "127.0.0.1:8080".parse().expect("an address");
    let _server = Server::start(&namespace, to);
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    let errnos: Vec<i32> = (0..20).map(|_| dialer.connect(to).errno).collect();
    let refused = errnos.iter().filter(|errno| **errno == libc::ECONNREFUSED);
    let refused = refused.count() as u64;
    assert!(refused > 0, "{errnos:?}");
    dialer.sweep("127.1.0.0".parse().expect("an address"), 80, 500);
    wait::until("the row is given up", SOON, || {
        agent.rows("127.0.0.1:8080").is_empty().then_some(())
    });
    let events = events(&agent);
    let of = events
        .iter()
        .filter(|event| event["kind"] == "rejected" && event["destination"] == "127.0.0.1:8080");
    let told: u64 = of.map(|event| number(&event["count"])).sum();
    assert_eq!(told, refused);
}

/// Observe mode: what would have been refused.
#[test]
fn every_refusal_that_would_have_been_is_told() {
    need!("python3");
    let config = "mode = \"observe\"\n[defaults]\nretry = \"off\"\n[defaults.limits]\n\
                  connects_per_second = 1\n";
    let mut scene = Scene::new(config);
    scene.attempts(400);
    let row = wait::until("counted", SOON, || {
        let row = scene.agent.row(DESTINATION);
        (row["attempts"] == 400 && row["in_flight"] == 0).then_some(row)
    });
    let would: Vec<(&str, u64)> = ["breaker", "limit"]
        .map(|reason| (reason, number(&row["would_reject"][reason])))
        .to_vec();
    assert!(would.iter().all(|(_, count)| *count > 0), "{row:#}");
    for (reason, count) in would {
        for event in wait_told(&scene.agent, "rejected", reason, count) {
            assert_eq!(event["mode"], "observe", "{event:#}");
        }
    }
}

/// Refusals of a task that spins, and retries that wait their turn.
#[test]
fn every_held_connect_is_told() {
    need!("python3");
    let config = "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\n\
                  window = \"1h\"\nbackoff = { base = \"20ms\", max = \"40ms\" }\n";
    let mut scene = Scene::new(config);
    scene.attempts(40);
    let held = |scene: &Scene, what: &str| {
        wait::until("quiet", SOON, || {
            let row = scene.agent.row(DESTINATION);
            (row["in_flight"] == 0).then(|| number(&row["held"][what]))
        })
    };
    let waited = held(&scene, "backoff");
    assert!(waited > 1, "{:#}", scene.agent.row(DESTINATION));
    let told = wait_told(&scene.agent, "held", "backoff", waited);
    let first = &told[0];
    assert_eq!(first["pid"], scene.python.value("os.getpid()"), "{first:#}");
    assert!((1..=40).contains(&number(&first["hold_ms"])), "{first:#}");
    let text = scene.agent.command(&["events"]).good();
    assert!(
        text.contains(" held for ") && text.contains(" by backoff, "),
        "{text}"
    );

    scene.trip();
    // More than a hundred in a second, which a busy machine may not grant at once.
    let mut refused = 0;
    let spun = wait::until("a task that spins", SOON, || {
        scene.attempts(106);
        refused += 106;
        Some(held(&scene, "spin")).filter(|spun| *spun > 0)
    });
    wait_told(&scene.agent, "held", "spin", spun);
    wait_told(&scene.agent, "rejected", "breaker", refused);
}

/// Once when it is spent, once when it has refused nothing for its window.
#[test]
fn a_spent_budget_is_told_once() {
    need!("python3");
    let config = "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = \"off\"\nbudget = 0.1\n\
                  min_per_second = 1\nwindow = \"3s\"\nspin_per_second = \"off\"\n";
    let mut scene = Scene::new(config);
    scene.attempts(40);
    let row = scene.agent.row(DESTINATION);
    let refused = number(&row["rejected"]["retry_budget"]);
    assert!(refused > 0, "{row:#}");
    wait_told(&scene.agent, "rejected", "retry_budget", refused);
    let of_budget = |events: &[Value]| -> Vec<Value> {
        let of = events
            .iter()
            .filter(|event| event["kind"] == "retry_budget");
        of.map(|event| event["exhausted"].clone()).collect()
    };
    let told = wait::until("it is spent no more", SOON, || {
        let told = of_budget(&events(&scene.agent));
        (told.len() > 1).then_some(told)
    });
    assert_eq!(told, [true, false]);
    let text = scene.agent.command(&["events"]).good();
    assert!(text.contains("exhausted: retries are"), "{text}");
}

/// Each timeout is an event of its own.
#[test]
fn every_timeout_is_told() {
    need!("python3");
    let config = "[defaults]\nbreaker = \"off\"\nretry = \"off\"\n[defaults.timeouts]\nconnect = \"100ms\"\n";
    let mut scene = Scene::new(config);
    let blackhole = TestNet::blackhole4(0);
    scene.python.run(&format!("BLACKHOLE = '{blackhole}'"));
    scene.python.run(
        "def silent():\n s = socket.socket()\n s.setblocking(False)\n s.connect_ex((BLACKHOLE, 80))\n \
         return s\nkept = [silent() for _ in range(300)]",
    );
    let silent = SocketAddr::new(blackhole, 80);
    let silent = silent.to_string();
    let fired = wait::until("timeouts", SOON, || {
        let row = scene.agent.row(&silent);
        (row["in_flight"] == 0).then(|| number(&row["failures"]["connect_timeout"]))
    });
    let told = wait::until("all of them", SOON, || {
        let events = events(&scene.agent);
        let of = events.iter().filter(|event| event["kind"] == "timeout");
        let told = of.count() as u64;
        (told >= fired).then_some(told)
    });
    let labels = ["kind=\"connect\"".to_owned()];
    let counted = scene.agent.metric("backstop_timeouts_total", &labels);
    assert_eq!((told, counted), (fired, Some(fired as f64)));
    assert_eq!(fired, 300);
}
