//! Timeouts that come at the moment when their connection ends by itself, or another takes its place.

use std::{
    fs,
    hash::{BuildHasher as _, RandomState},
    io::Write as _,
    net::TcpStream,
    time::Duration,
};

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    clients::source,
    interpreter::Interpreter,
    maps, need,
    net::TestNet,
    server::Server,
    talk::{CONNECT, DESTINATION, TO, echo, read_byte, wait_end},
    wait,
};

const TRIES: u64 = 10_000;
const VALUE_MS: u64 = 60;

/// Answers at a random moment around the end of the client's time.
fn answer_about_then(mut stream: TcpStream) {
    if !read_byte(&mut stream) {
        return;
    }
    // A third of the value to both sides.
    let random = RandomState::new().hash_one(0) % (VALUE_MS * 667);
    std::thread::sleep(Duration::from_micros(VALUE_MS * 667 + random));
    let _ = stream.write_all(b"y");
    wait_end(stream);
}

/// Waits until so much is noted: counters, notes and gauges of one exchange are not written in one moment.
#[track_caller]
fn wait_noted(agent: &Agent, count: usize) {
    let wanted = maps::Noted {
        notes: count,
        open: count as u64,
    };
    wait::until(&format!("{wanted:?}"), wait::LONGEST, || {
        (maps::noted(agent) == wanted).then_some(())
    });
}

#[test]
fn ten_thousand_ends_at_the_moment_of_the_timeout() {
    need!("python3");
    let net = TestNet::new();
    let _server = Server::with(&net.server, TO, answer_about_then);
    let _bystanders = Server::with(&net.server, TestNet::server4(8081), echo);
    let group = TestCgroup::new("churn");
    let agent = Agent::start(
        &group,
        &format!(
            "[defaults]\nbreaker = \"off\"\n\
             [[policy]]\nname = \"churn\"\ndestinations = [\"{DESTINATION}\"]\n\
             timeouts = {{ read = \"{VALUE_MS}ms\" }}\n"
        ),
    );
    let mut python = Interpreter::start(&group, &net.client);
    python.run(&fs::read_to_string(source("churn.py")).expect("churn.py"));
    let said = python.value(&format!("churn({TRIES}, {VALUE_MS} / 1000)"));
    eprintln!("{said}");
    assert_eq!(said["wrong"].as_array().map(Vec::len), Some(0), "{said}");
    let seen = |name: &str| said[name].as_u64().unwrap_or(0);
    assert_eq!(
        seen("answered") + seen("aborted") + seen("left"),
        TRIES,
        "{said}"
    );
    // Both happened, so that there was something to race for.
    assert!(
        seen("answered") > TRIES / 20 && seen("aborted") > TRIES / 20,
        "{said}"
    );

    let row = agent.wait_row(DESTINATION, "is quiet", |row| row["in_flight"] == 0);
    let count = |value: &Value| value.as_u64().expect("a count");
    let failures: u64 = row["failures"]
        .as_object()
        .expect("an object")
        .values()
        .map(count)
        .sum();
    let ended =
        count(&row["responses"]) + failures + count(&row["abandoned"]) + count(&row["stale"]);
    // Each is counted once. An answer that comes between the look and the act counts as an answer,
    // though the program sees the abort.
    assert_eq!(ended, TRIES, "{said} {row:#}");
    let timeouts = count(&row["failures"]["read_timeout"]);
    eprintln!("{timeouts} read timeouts, {} responses", row["responses"]);
    assert!(timeouts <= seen("aborted") + seen("left"), "{said} {row:#}");
    assert_eq!(failures, timeouts, "{row:#}");
    wait_noted(&agent, 0);
    let bystanders = agent.row("10.77.0.2:8081");
    assert_eq!(bystanders["responses"], TRIES, "{bystanders:#}");
}

/// The notes that the test above looks for are there while an exchange that was counted still hangs.
#[test]
fn notes_of_what_the_agent_counts_are_taken_back() {
    need!("python3");
    let net = TestNet::new();
    let _server = Server::with(&net.server, TO, wait_end);
    let group = TestCgroup::new("notes");
    let agent = Agent::start(&group, "[defaults.breaker]\nhung = \"200ms\"\n");
    let mut python = Interpreter::start(&group, &net.client);
    python.value(CONNECT);
    python.value("s.sendall(b'x')");
    agent.wait_row(DESTINATION, "hangs", |row| row["failures"]["hung"] == 1);
    wait_noted(&agent, 1);
    python.value("s.close()");
    agent.wait_row(DESTINATION, "is quiet", |row| row["in_flight"] == 0);
    wait_noted(&agent, 0);
}
