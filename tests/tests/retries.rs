//! Programs whose retries are known, and programs that never retry: what is taken for a retry, what is
//! refused, and when that ends.

#![expect(
    clippy::print_stdout,
    reason = "figures for docs/RETRIES.md, shown by --nocapture"
)]

#[path = "retries/asked.rs"]
mod asked;
#[path = "retries/pollers.rs"]
mod pollers;
#[path = "retries/programs.rs"]
mod programs;

use std::{
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    clients,
    interpreter::Interpreter,
    need,
    net::TestNet,
    process::{Program, python},
    server::{Server, read_head, reset},
    wait,
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const LONG: Duration = Duration::from_secs(90);
const SOON: Duration = wait::LONGEST;
const ECONNREFUSED: i64 = 111;
/// Tells retries, refuses nothing.
const ONLY_COUNTS: &str = "[defaults]\nbreaker = \"off\"\n\
     [defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\n";
/// The built-in limit and budget, without a breaker that would be quicker.
const NO_BREAKER: &str = "[defaults]\nbreaker = \"off\"\n# retry: built in\n";

struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
}

impl Scene {
    fn new(config: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new("retries");
        let agent = Agent::start(&group, config);
        Self { net, group, agent }
    }

    /// A server that fails so many of a hundred requests: by a 503, or (every other one) by a reset.
    fn server(&self, percent: u64) -> Server {
        let served = AtomicU64::new(0);
        Server::with(&self.net.server, TO, move |mut stream| {
            use std::io::Write as _;
            let number = loop {
                let Some(head) = read_head(&mut stream) else {
                    return;
                };
                let number = served.fetch_add(1, Ordering::Relaxed);
                // Scattered, and the same in each run.
                let fails = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
                if fails % 100 < percent {
                    break fails;
                }
                let is_kept = head.contains("keep-alive");
                let answer: &[u8] = if is_kept {
                    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
                } else {
                    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
                };
                if stream.write_all(answer).is_err() || !is_kept {
                    return;
                }
            };
            if number.is_multiple_of(2) {
                let _ = stream.write_all(
                    b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
                );
            } else {
                reset(stream);
            }
        })
    }

    fn start(&self, how: &str) -> Program {
        let words = how.split(' ').map(str::to_owned);
        Program::new(python())
            .arg(clients::source("retrying.py"))
            .arg(format!("http://{TO}/"))
            .args(words)
            .in_cgroup(&self.group)
            .in_netns(&self.net.client)
            .within(LONG)
    }

    fn run(&self, how: &str) -> Value {
        serde_json::from_str(&self.start(how).run().good()).expect("counts")
    }

    fn row(&self) -> Value {
        self.agent
            .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0)
    }
}

/// A program that connects six times to what refuses it. What comes after more than 16 times the pause before is
/// no retry: no machine is so busy.
const REFUSED: &str = "refused 6 0.1";

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("a number: {value}"))
}

/// Share of fresh calls that were taken for retries, by a program that never retries. None is refused by
/// the built-in limit and budget.
#[track_caller]
fn never_retries(how: &str, percent: u64) {
    let scene = Scene::new(NO_BREAKER);
    let _server = scene.server(percent);
    let told = scene.run(how);
    assert_eq!(told["retries"], 0);
    let row = scene.row();
    assert_eq!(row["attempts"], told["made"], "{row:#}");
    let retries = number(&row["retry"]["retries"]) + number(&row["retry"]["live"]);
    let calls = number(&told["calls"]);
    println!("{how}, {percent} % fail: {retries} of {calls} taken for retries");
    assert!(retries * 100 <= calls, "{retries} of {calls}");
    assert_eq!(row["rejected"]["retry_limit"], 0, "{row:#}");
    assert_eq!(row["rejected"]["retry_budget"], 0, "{row:#}");
}

/// Share of the retries that were seen, by a program that counts its own.
#[track_caller]
fn is_seen_to_retry(how: &str, percent: u64) {
    let scene = Scene::new(ONLY_COUNTS);
    let _server = scene.server(percent);
    let told = scene.run(how);
    let row = scene.row();
    assert_eq!(row["attempts"], told["made"], "{row:#}");
    let (seen, truth) = (number(&row["retry"]["retries"]), number(&told["retries"]));
    let fresh = number(&told["made"]) - truth;
    println!("{how}, {percent} % fail: {seen} of {truth} retries seen");
    assert!(truth >= 20, "{told}");
    assert!(seen * 10 >= truth * 9, "{seen} of {truth}: {row:#}");
    assert!(seen <= truth + fresh / 100, "{seen} of {truth}: {row:#}");
}

macro_rules! cases {
    ($check:ident: $($name:ident = $how:literal at $percent:literal;)*) => {
        $(#[test]
        fn $name() {
            $check($how, $percent);
        })*
    };
}

cases! { never_retries:
    a_steady_sequence_at_1_percent = "sequence 600 0.005 0 0 0" at 1;
    a_steady_sequence_at_20_percent = "sequence 600 0.005 0 0 0" at 20;
    a_steady_sequence_at_40_percent = "sequence 600 0.005 0 0 0" at 40;
    a_random_sequence_at_10_percent = "sequence 800 0.005 1 0 0" at 10;
    a_random_sequence_at_40_percent = "sequence 800 0.005 1 0 0" at 40;
    a_poll_of_ten_things_at_40_percent = "named 500 10 0.005 0 0" at 40;
    a_tight_loop_at_40_percent = "sequence 1500 0 0 0 0" at 40;
    workers_at_20_percent = "threads 20 60 0.05 0 0" at 20;
    workers_at_40_percent = "threads 20 60 0.05 0 0" at 40;
    a_thread_for_each_at_40_percent = "thread_each 500 0.005 0 0" at 40;
    an_event_loop_at_20_percent = "event_loop 800 0.005 0 0" at 20;
    an_event_loop_at_40_percent = "event_loop 800 0.005 0 0" at 40;
    a_quick_event_loop_at_40_percent = "event_loop 4000 0.0005 0 0" at 40;
    many_workers_at_40_percent = "threads 60 60 0.1 0 0" at 40;
    kept_connections_at_1_percent = "kept 1 800 0.005" at 1;
    kept_connections_at_40_percent = "kept 1 800 0.005" at 40;
    pooled_connections_at_20_percent = "kept 20 60 0.05" at 20;
    work_that_piles_up_at_40_percent = "queue 8 100 0.05 800" at 40;
}

cases! { is_seen_to_retry:
    a_sequence_that_retries_at_once = "sequence 120 0.1 0 2 0" at 30;
    a_sequence_that_waits_before_it_retries = "sequence 240 0.05 0 2 0.002" at 30;
    a_sequence_that_waits_longer_than_it_pauses = "named 200 1000 0.005 2 0.05" at 30;
    a_thread_for_each_that_retries = "thread_each 300 0.005 2 0" at 30;
    a_thread_for_each_that_waits = "thread_each 300 0.005 2 0.05" at 30;
}

/// Its next call after a failure comes as soon as a retry would; but it asks for something else.
#[test]
fn a_program_that_takes_up_other_work_at_once_loses_few_calls() {
    let scene = Scene::new(NO_BREAKER);
    let _server = scene.server(10);
    let told = scene.run("crawl 16 6 0.02");
    let row = scene.row();
    let refused = number(&row["rejected"]["retry_budget"]);
    println!(
        "{refused} of {} calls refused, {} taken for retries",
        told["calls"], row["retry"]["retries"]
    );
    assert!(number(&told["calls"]) > 500, "{told}");
    assert!(refused * 100 <= number(&told["calls"]), "{told}: {row:#}");
    assert_eq!(row["rejected"]["retry_limit"], 0, "{row:#}");
}

#[test]
fn urllib3_is_seen_to_retry() {
    if !clients::has_urllib3() {
        tests::say_skipped(format_args!("this Python has no urllib3"));
        return;
    }
    is_seen_to_retry("urllib3 100 0.1 3 0", 30);
}

#[test]
fn retries_of_a_tight_loop_are_missed() {
    let scene = Scene::new(ONLY_COUNTS);
    let _server = scene.server(30);
    let told = scene.run("sequence 400 0 0 2 0");
    let (seen, truth) = (
        number(&scene.row()["retry"]["retries"]),
        number(&told["retries"]),
    );
    assert!(truth > 100 && seen * 2 < truth, "{seen} of {truth}");
}

#[test]
fn first_attempts_at_once_are_no_retries() {
    let scene = Scene::new(NO_BREAKER);
    scene.run("parallel 40");
    let row = scene.row();
    assert_eq!(row["attempts"], 40, "{row:#}");
    assert_eq!(row["retry"]["retries"], 0, "{row:#}");
    assert_eq!(row["rejected"]["retry_limit"], 0, "{row:#}");
}

#[test]
fn curl_and_wget_retry_within_the_limit() {
    need!("curl", "wget");
    let scene = Scene::new(NO_BREAKER);
    let _server = scene.server(100);
    let url = format!("http://{TO}/");
    // Waits of a second between, and no connection is kept after a 503.
    let curl = [
        "-q",
        "-sS",
        "--retry",
        "3",
        "--retry-delay",
        "1",
        "--retry-all-errors",
        &url,
    ];
    let wget = [
        "--no-config",
        "--tries=4",
        "--waitretry=1",
        "--retry-on-http-error=503",
        "--output-document=-",
        &url,
    ];
    for program in [
        Program::new("curl").args(curl),
        Program::new("wget").args(wget),
    ] {
        let finished = program
            .in_cgroup(&scene.group)
            .in_netns(&scene.net.client)
            .within(LONG)
            .run();
        assert_ne!(finished.code(), 0, "{finished}");
    }
    // Of each, four attempts: the last one is beyond the limit.
    let row = scene.row();
    assert_eq!(row["attempts"], 6, "{row:#}");
    assert_eq!(row["retry"]["retries"], 4, "{row:#}");
    assert_eq!(row["rejected"]["retry_limit"], 2, "{row:#}");
    assert_eq!(
        row["retry"]["operations"],
        serde_json::json!([0, 0, 2, 0, 0])
    );
    assert_eq!(row["retry"]["amplification"], 3.0);
    assert_eq!(row["failures"]["refused"], 0, "{row:#}");
}

#[test]
fn a_limit_is_of_one_operation() {
    let scene = Scene::new(NO_BREAKER);
    for _ in 0..2 {
        let told = scene.run(REFUSED);
        assert_eq!(told["errnos"], Value::from(vec![ECONNREFUSED; 6]));
    }
    let row = scene.row();
    assert_eq!(row["attempts"], 6, "{row:#}");
    assert_eq!(row["failures"]["refused"], 6, "{row:#}");
    assert_eq!(row["rejected"]["retry_limit"], 6, "{row:#}");
    let events = scene.agent.command(&["events", "--json"]).good();
    let rejected = events
        .lines()
        .find(|line| line.contains("\"retry_limit\""))
        .expect("an event");
    assert!(rejected.contains("\"kind\":\"rejected\""), "{rejected}");
}

#[test]
fn observe_mode_only_counts() {
    let scene = Scene::new(&format!("mode = \"observe\"\n{NO_BREAKER}"));
    scene.run(REFUSED);
    let row = scene.row();
    assert_eq!(row["attempts"], 6, "{row:#}");
    assert_eq!(row["rejected"]["retry_limit"], 0, "{row:#}");
    assert_eq!(row["would_reject"]["retry_limit"], 3, "{row:#}");
    assert_eq!(row["retry"]["retries"], 5, "{row:#}");
}

#[test]
fn what_is_protected_held_closed_or_paused_is_never_refused() {
    let protected = format!("{NO_BREAKER}[protected]\ndestinations = [\"10.77.0.2:8080\"]\n");
    let scene = Scene::new(&protected);
    scene.run(REFUSED);
    let scenes = [scene, Scene::new(NO_BREAKER), Scene::new(NO_BREAKER)];
    scenes[1]
        .agent
        .command(&["hold-closed", DESTINATION])
        .good();
    scenes[2].agent.command(&["pause"]).good();
    for scene in &scenes {
        let before = scene.agent.rows(DESTINATION);
        let before = before.first().map_or(0, |row| number(&row["attempts"]));
        scene.run(REFUSED);
        let row = scene.row();
        assert_eq!(number(&row["attempts"]) - before, 6, "{row:#}");
        assert_eq!(row["rejected"]["retry_limit"], 0, "{row:#}");
        assert_eq!(row["rejected"]["retry_budget"], 0, "{row:#}");
    }
}

/// One task that connects, and is told what connect() said.
struct Caller(Interpreter);

impl Caller {
    fn new(scene: &Scene) -> Self {
        let mut python = Interpreter::start(&scene.group, &scene.net.client);
        python.run(
            // The pauses of a busy machine are to be short beside those of the program.
            "def attempt():\n time.sleep(0.1)\n s = socket.socket()\n \
             e = s.connect_ex(('10.77.0.2', 8080))\n s.close()\n return e",
        );
        Self(python)
    }

    fn attempt(&mut self) -> i64 {
        self.0.value("attempt()").as_i64().expect("an errno")
    }
}

#[test]
fn a_limit_ends_when_the_destination_answers_anybody() {
    let scene = Scene::new(NO_BREAKER);
    let (mut limited, mut other) = (Caller::new(&scene), Caller::new(&scene));
    for _ in 0..5 {
        assert_eq!(limited.attempt(), ECONNREFUSED);
    }
    assert_eq!(scene.row()["attempts"], 3);
    let _server = scene.server(0);
    assert_eq!(limited.attempt(), ECONNREFUSED);
    assert_eq!(other.attempt(), 0);
    assert_eq!(limited.attempt(), 0);
    let row = scene.row();
    assert_eq!(row["rejected"]["retry_limit"], 3, "{row:#}");
}

#[test]
fn a_limit_ends_when_the_destination_answers_the_agent() {
    let scene = Scene::new("[defaults]\nbreaker = \"off\"\n[defaults.retry]\nwindow = \"1m\"\n");
    let mut limited = Caller::new(&scene);
    for _ in 0..5 {
        assert_eq!(limited.attempt(), ECONNREFUSED);
    }
    let _server = scene.server(0);
    // Its own attempts are refused; they only remind the agent, once a second.
    wait::until("an end of the limit", SOON, || {
        (limited.attempt() == 0).then_some(())
    });
    let row = scene.row();
    assert_eq!(row["attempts"], 4, "{row:#}");
}

#[test]
fn a_limit_ends_with_the_window() {
    let scene = Scene::new("[defaults]\nbreaker = \"off\"\n[defaults.retry]\nwindow = \"5s\"\n");
    let mut limited = Caller::new(&scene);
    for _ in 0..5 {
        assert_eq!(limited.attempt(), ECONNREFUSED);
    }
    assert_eq!(scene.row()["attempts"], 3);
    std::thread::sleep(Duration::from_millis(5_050));
    assert_eq!(limited.attempt(), ECONNREFUSED);
    let row = scene.row();
    assert_eq!(row["attempts"], 4, "{row:#}");
    assert_eq!(row["retry"]["retries"], 2, "{row:#}");
}

#[test]
fn a_budget_is_shared_and_has_a_floor() {
    let scene = Scene::new(
        "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = \"off\"\nbudget = 0.1\n\
         window = \"20s\"\nmin_per_second = 1\n",
    );
    let before = scene.run("refused 1 0");
    assert_eq!(before["errnos"], Value::from(vec![ECONNREFUSED]));
    for _ in 0..4 {
        scene.run("refused 11 0.1");
    }
    let row = scene.row();
    // Twenty of the 40; the first of each program is none.
    assert_eq!(row["retry"]["retries"], 20, "{row:#}");
    assert_eq!(row["rejected"]["retry_budget"], 20, "{row:#}");
    assert_eq!(row["attempts"], 25, "{row:#}");
    assert_eq!(row["retry"]["budget_tokens"], 0.0, "{row:#}");
    let labels = ["reason=\"retry_budget\"".to_owned()];
    let rejected = scene.agent.metric("backstop_rejected_total", &labels);
    assert_eq!(rejected, Some(20.0));
    assert_eq!(
        scene.agent.metric("backstop_retries_total", &[]),
        Some(20.0)
    );
}

/// Fifty programs with five immediate retries each, 60 % of all requests failing: the retries that pass
/// are within the budget, whether the programs call steadily or at random times.
#[track_caller]
fn storm(how: &str) {
    let config =
        "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = \"off\"\nmin_per_second = 1\n";
    let scene = Scene::new(config);
    let _server = scene.server(60);
    let storm: Vec<_> = (0..50).map(|_| scene.start(how).spawn()).collect();
    let mut fresh = 0;
    for client in storm {
        let told: Value = serde_json::from_str(&client.wait().good()).expect("counts");
        fresh += number(&told["made"]) - number(&told["retries"]);
    }
    let row = scene.row();
    let attempts = number(&row["attempts"]);
    println!(
        "storm, {how}: {attempts} attempts of {fresh} operations: {:#}",
        row["retry"]
    );
    // The floor is one in a second, and ten in each of two windows. (`cargo xtask retries storm` measures for
    // longer, and holds it to 1.12: in a few seconds on a busy machine more retries come too late to be known.)
    let most = fresh as f64 * 1.2 + 20.0;
    assert!((attempts as f64) < most, "{attempts}: {row:#}");
    assert!(number(&row["rejected"]["retry_budget"]) > 500, "{row:#}");
}

#[test]
fn a_steady_storm_is_held_to_the_budget() {
    storm("sequence 25 0.4 0 5 0");
}

#[test]
fn a_random_storm_is_held_to_the_budget() {
    storm("sequence 25 0.4 1 5 0");
}
