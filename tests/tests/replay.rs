//! A session with a real server that goes away and comes back, recorded and replayed.

use std::{fs, net::SocketAddr, path::PathBuf};

use serde_json::Value;
use tests::{
    agent::{Agent, binary},
    cgroup::TestCgroup,
    need,
    net::TestNet,
    process::Program,
    server::{Server, read_head},
    wait,
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
/// Connects while the server is well, and those that open the breaker.
const GOOD: u64 = 12;
const FAILURES: u64 = 5;
/// What the events cannot tell: the agent may have been late on a busy machine.
const LATE: i64 = 3_000;

struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
}

impl Scene {
    fn serve(&self) -> Server {
        Server::with(&self.net.server, TO, |mut stream| {
            use std::io::Write as _;
            while read_head(&mut stream).is_some() {
                let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                if stream.write_all(answer).is_err() {
                    return;
                }
            }
        })
    }

    fn curl(&self) -> i32 {
        Program::new("curl")
            .args(["-q", "-sS", "-o", "/dev/null"])
            .arg(format!("http://{TO}/"))
            .in_cgroup(&self.group)
            .in_netns(&self.net.client)
            .run()
            .code()
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.agent.home().path().join(name);
        fs::write(&path, text).expect("write a file of the test");
        path
    }

    fn replay(&self, events: &PathBuf, config: &str) -> Value {
        let config = self.file("tried.toml", config);
        let finished = Program::new(binary())
            .arg("replay")
            .arg(events)
            .arg("--config")
            .arg(config)
            .arg("--json")
            .run();
        assert_eq!(finished.code(), 0, "{finished}");
        serde_json::from_str(&finished.stdout).expect("JSON")
    }
}

/// States that were come into, and when (ms).
fn story<'a>(events: impl IntoIterator<Item = &'a Value>) -> Vec<(String, i64)> {
    events
        .into_iter()
        .filter(|event| event["destination"] == DESTINATION)
        .map(|event| (event["to"].as_str().expect("a state").to_owned(), ms(event)))
        .collect()
}

fn ms(event: &Value) -> i64 {
    let time = event["time"].as_str().expect("a time");
    let finished = Program::new("date")
        .args(["-u", "+%s%3N", "-d", time])
        .run();
    finished.stdout.trim().parse().expect("a number")
}

#[test]
fn a_recorded_outage_happens_again() {
    need!("curl");
    let (net, group) = (TestNet::new(), TestCgroup::new("replay"));
    let agent = Agent::start(&group, "");
    let scene = Scene { net, group, agent };
    let mut events = scene.agent.follow(&["--all"]);
    let server = scene.serve();
    for _ in 0..GOOD {
        assert_eq!(scene.curl(), 0);
    }
    server.stop();
    for _ in 0..FAILURES {
        assert_eq!(scene.curl(), 7);
    }
    events.wait_breaker(DESTINATION, "open");
    // Refused by the breaker: none of these is a call.
    for _ in 0..3 {
        assert_eq!(scene.curl(), 7);
    }
    let _server = scene.serve();
    events.wait_breaker(DESTINATION, "half_open");
    for _ in 0..2 {
        // The second slot comes with the next verdict.
        wait::until("a probe", wait::LONGEST, || {
            (scene.curl() == 0).then_some(())
        });
    }
    events.wait_breaker(DESTINATION, "closed");
    // (It may have been told before.)
    events.find("the last call", |event| {
        event["kind"] == "calls"
            && event["window"] == "connects"
            && event["to_seq"].as_u64() >= Some(GOOD + FAILURES + 2)
    });

    let recorded = scene.agent.command(&["events", "--all", "--json"]).stdout;
    let file = scene.file("recorded.jsonl", &recorded);
    let lines: Vec<Value> = recorded
        .lines()
        .map(|line| serde_json::from_str(line).expect("an event"))
        .collect();
    let was = story(lines.iter().filter(|line| line["kind"] == "breaker"));
    let states =
        |story: &[(String, i64)]| story.iter().map(|(to, _)| to.clone()).collect::<Vec<_>>();
    assert_eq!(states(&was), ["open", "half_open", "closed"], "{recorded}");

    let same = scene.replay(&file, "");
    let transitions = same["transitions"].as_array().expect("an array");
    let again = story(transitions);
    assert_eq!(states(&again), states(&was), "{same:#}");
    for ((to, then), (_, now)) in was.iter().zip(&again) {
        assert!(
            (then - now).abs() <= LATE,
            "{to} at {then} and {now}: {same:#}"
        );
    }
    let row = &same["rows"][0];
    assert_eq!(row["connects"], GOOD + FAILURES + 2, "{same:#}");
    assert_eq!(row["failures"], FAILURES, "{same:#}");
    assert_eq!(row["refused"], 0, "{same:#}");
    assert_eq!(same["missing"], 0, "{same:#}");
    assert_eq!(same, scene.replay(&file, ""), "always the same");

    let strict = scene.replay(&file, "[defaults.breaker]\nconsecutive_failures = 3\n");
    let earlier = story(strict["transitions"].as_array().expect("an array"));
    assert_eq!(earlier[0].0, "open");
    assert!(earlier[0].1 < again[0].1, "{strict:#}");
    assert_eq!(strict["rows"][0]["refused"], FAILURES - 3, "{strict:#}");
    assert_eq!(strict["rows"][0]["refused_good"], 0, "{strict:#}");

    let never = scene.replay(&file, "[defaults]\nbreaker = \"off\"\n");
    assert_eq!(never["transitions"], Value::Array(Vec::new()));

    // For a person, and what is wrong with a file.
    let text = |events: &PathBuf| {
        Program::new(binary())
            .arg("replay")
            .arg(events)
            .arg("--config")
            .arg(scene.file("default.toml", ""))
            .run()
    };
    let finished = text(&file);
    assert_eq!(finished.code(), 0, "{finished}");
    assert!(finished.stdout.contains("closed -> open"), "{finished}");
    let finished = text(&scene.file("bad.jsonl", &format!("{recorded}no event\n")));
    assert_eq!(finished.code(), 1, "{finished}");
    let number = recorded.lines().count() + 1;
    let told = format!("bad.jsonl: line {number}: not an event");
    assert!(finished.stderr.contains(&told), "{finished}");
}
