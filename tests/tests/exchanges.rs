//! What is counted is what happened: the answers that load generators count, to the last one.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use rustix::process::Signal;
use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    clients, need,
    net::TestNet,
    nginx::Nginx,
    process::{Finished, Program, python},
    server::Server,
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const SERVER: &str = "listen 10.77.0.2:8080 backlog=2048;\n\
     location / { return 200 \"hello\"; }\n\
     location /503 { return 503; }\n";
/// For a load generator, beside other tests.
const LONG: Duration = Duration::from_secs(300);
/// Counts and judges, never opens.
const NEVER_OPENS: &str = r#"
[defaults.breaker]
failure_rate = "off"
consecutive_failures = 0
"#;

struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    nginx: Nginx,
}

impl Scene {
    fn new(config: &str) -> Self {
        let net = TestNet::new();
        let nginx = Nginx::start(&net.server, TO, SERVER);
        let group = TestCgroup::new("exchanges");
        let agent = Agent::start(&group, config);
        Self {
            net,
            group,
            agent,
            nginx,
        }
    }

    fn run(&self, program: Program) -> Finished {
        program
            .in_cgroup(&self.group)
            .in_netns(&self.net.client)
            .within(LONG)
            .run()
    }

    /// The row once nothing is under way.
    fn quiet(&self) -> Value {
        self.agent
            .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0)
    }

    /// All answers, and nothing else, were counted; no connection failed.
    #[track_caller]
    fn assert_exact(&self, answers: u64, status: u64) -> Value {
        let row = self.quiet();
        assert_eq!(row["responses"], answers, "{row:#}");
        assert_eq!(row["failures"]["status"], status, "{row:#}");
        let failures = row["failures"].as_object().expect("an object");
        let sum: u64 = failures.values().filter_map(Value::as_u64).sum();
        assert_eq!(sum, status, "{row:#}");
        // What is left over when a program ends may be a connect, but no exchange.
        let number = |key: &str| row[key].as_u64().expect("a count");
        let connects = number("attempts") - number("established");
        assert_eq!(number("abandoned"), connects, "{row:#}");
        row
    }
}

fn url(path: &str) -> String {
    format!("http://{TO}{path}")
}

fn hey(count: usize, connections: usize, path: &str) -> Program {
    let (count, connections) = (count.to_string(), connections.to_string());
    Program::new("hey").args(["-n", &count, "-c", &connections, &url(path)])
}

/// The number that hey gives for a status. The marks of its histogram, above, look the same.
fn hey_count(finished: &Finished, status: u16) -> u64 {
    let mark = format!("[{status}]");
    let table = finished.stdout.split("Status code distribution:").nth(1);
    let mut lines = table.unwrap_or_default().lines();
    let line = lines.find(|line| line.contains(&mark));
    let count = line.and_then(|line| line.split_whitespace().nth(1));
    count
        .and_then(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("no {mark} in {finished}"))
}

/// The first number after a mark.
fn number_after(finished: &Finished, mark: &str) -> u64 {
    let rest = finished.stdout.split(mark).nth(1);
    let word = rest.and_then(|rest| rest.split_whitespace().next());
    word.and_then(|word| word.parse().ok())
        .unwrap_or_else(|| panic!("no {mark:?} in {finished}"))
}

fn hey_is_counted_exactly(count: usize, connections: usize) {
    need!("nginx", "hey");
    let scene = Scene::new("");
    let finished = scene.run(hey(count, connections, "/"));
    let answers = hey_count(&finished, 200);
    assert_eq!(answers, count as u64, "{finished}");
    let row = scene.assert_exact(answers, 0);
    assert_eq!(row["response_latency_us"]["count"], answers, "{row:#}");
    scene.nginx.assert_logged(200, answers);
}

#[test]
fn hey_on_one_connection() {
    hey_is_counted_exactly(2_000, 1);
}

#[test]
fn hey_on_64_connections() {
    hey_is_counted_exactly(6_400, 64);
}

#[test]
fn hey_on_1000_connections() {
    hey_is_counted_exactly(10_000, 1_000);
}

#[test]
fn hey_without_keep_alive() {
    need!("nginx", "hey");
    let scene = Scene::new("");
    let program = Program::new("hey").args(["-disable-keepalive", "-n", "640", "-c", "64"]);
    let finished = scene.run(program.arg(url("/")));
    let answers = hey_count(&finished, 200);
    assert_eq!(answers, 640, "{finished}");
    scene.assert_exact(answers, 0);
}

#[test]
fn ab_with_and_without_keep_alive() {
    need!("nginx", "ab");
    let scene = Scene::new("");
    let mut sum = 0;
    for (options, connections) in [("-k", "1"), ("-k", "64"), ("-k", "1000"), ("-d", "64")] {
        let program = Program::new("ab").args(["-q", options, "-n", "4000", "-c", connections]);
        let finished = scene.run(program.arg(url("/")));
        sum += number_after(&finished, "Complete requests:");
        scene.assert_exact(sum, 0);
    }
    assert_eq!(sum, 16_000);
}

#[test]
fn h2load_with_http1() {
    need!("nginx", "h2load");
    let scene = Scene::new("");
    let mut sum = 0;
    for connections in ["1", "64", "1000"] {
        let program = Program::new("h2load").args(["--h1", "-n", "5000", "-c", connections]);
        let finished = scene.run(program.arg(url("/")));
        assert!(
            finished.stdout.contains("5000 done, 5000 succeeded"),
            "{finished}"
        );
        sum += 5_000;
        scene.assert_exact(sum, 0);
    }
    scene.nginx.assert_logged(200, sum);
}

/// wrk does not count the answers that are under way at its end: one a connection at most.
#[test]
fn wrk_within_its_connections() {
    need!("nginx", "wrk");
    let scene = Scene::new("");
    for connections in [1, 64, 1_000] {
        let before = scene.agent.row(DESTINATION)["responses"]
            .as_u64()
            .unwrap_or(0);
        let count = connections.to_string();
        let program = Program::new("wrk").args(["-t", "1", "-d", "1", "--timeout", "30"]);
        let finished = scene.run(program.args(["-c", &count, &url("/")]));
        // "  81234 requests in 1.00s, 13.17MB read"
        let line = finished
            .stdout
            .lines()
            .find(|line| line.contains(" requests in "));
        let number = line.and_then(|line| line.split_whitespace().next());
        let counted: u64 = number
            .and_then(|number| number.parse().ok())
            .unwrap_or_else(|| panic!("{finished}"));
        assert!(!finished.stdout.contains("Socket errors"), "{finished}");
        let row = scene.quiet();
        let seen = row["responses"].as_u64().expect("a count") - before;
        assert!(
            (counted..=counted + connections).contains(&seen),
            "{seen} seen: {finished}"
        );
        let failures = row["failures"].as_object().expect("an object");
        assert!(failures.values().all(|count| *count == 0), "{row:#}");
    }
}

/// More exchanges on one connection than 16 bits can number.
#[test]
fn seventy_thousand_on_one_connection() {
    hey_is_counted_exactly(70_000, 1);
}

/// One packet in fifty is lost on its way, in either direction: repeats are not counted twice.
#[test]
fn lost_packets_are_counted_once() {
    need!("nginx", "hey", "nft");
    let scene = Scene::new("");
    let lose = "numgen random mod 50 0 counter drop";
    scene.net.server.nft(&format!(
        "table inet lossy {{\n\
           chain input {{ type filter hook input priority 0; tcp dport 8080 tcp flags & syn == 0 {lose}; }}\n\
           chain output {{ type filter hook output priority 0; tcp sport 8080 tcp flags & syn == 0 {lose}; }}\n\
         }}\n"
    ));
    let answers = hey_count(&scene.run(hey(2_000, 50, "/503")), 503);
    let row = scene
        .agent
        .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["responses"], answers, "{row:#}");
    assert_eq!(row["failures"]["status"], answers, "{row:#}");
}

/// Client and server in one control group, over loopback and IPv6: only the client's side counts.
#[test]
fn client_and_server_in_one_group() {
    need!("nginx", "hey");
    let net = TestNet::new();
    let group = TestCgroup::new("both");
    let agent = Agent::start(&group, "");
    let to: SocketAddr = "[::1]:8080".parse().expect("an address");
    let config = "listen [::1]:8080 backlog=1024;\nlocation / { return 200 \"hello\"; }\n";
    let _nginx = Nginx::start_in(&group, &net.client, to, config);
    let finished = Program::new("hey")
        .args(["-n", "3200", "-c", "32", "http://[::1]:8080/"])
        .in_cgroup(&group)
        .in_netns(&net.client)
        .within(LONG)
        .run();
    let answers = hey_count(&finished, 200);
    assert_eq!(answers, 3_200, "{finished}");
    let row = agent.wait_row("[::1]:8080", "quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["responses"], answers, "{row:#}");
    assert_eq!(
        agent.status()["destinations"].as_array().map(Vec::len),
        Some(1)
    );
}

/// Clients and servers that do everything there is to a connection, all at once: nothing is left
/// under way.
#[test]
fn nothing_is_in_flight_after_chaos() {
    need!("python3");
    let net = TestNet::new();
    let group = TestCgroup::new("chaos");
    let agent = Agent::start(&group, NEVER_OPENS);
    let number = AtomicU64::new(0);
    let _server = Server::with(&net.server, TO, move |mut stream| {
        let number = number.fetch_add(1, Ordering::Relaxed);
        let mut buffer = [0; 512];
        for i in number.. {
            match i * 7 % 10 {
                0 => return tests::server::reset(stream),
                1 => return,
                2 => drop(stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")),
                3 => drop(stream.write_all(b"HTTP/1.1 503 No\r\n\r\n")),
                4 => drop(stream.write_all(&[b'x'; 100_000])),
                5 => drop(stream.shutdown(Shutdown::Write)),
                6 => std::thread::sleep(Duration::from_millis(20)),
                _ => drop(stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n")),
            }
            if !matches!(stream.read(&mut buffer), Ok(1..)) {
                return;
            }
        }
    });
    for seed in ["a", "b"] {
        Program::new(python())
            .arg(clients::source("chaos.py"))
            .args(["10.77.0.2", "8080", "4000", seed])
            .in_cgroup(&group)
            .in_netns(&net.client)
            .within(LONG)
            .run()
            .good();
    }
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert!(row["responses"].as_u64() > Some(1_000), "{row:#}");
    assert!(row["failures"]["reset"].as_u64() > Some(0), "{row:#}");
    assert!(
        row["failures"]["closed_early"].as_u64() > Some(0),
        "{row:#}"
    );
    assert_eq!(row["failures"]["other"], 0, "{row:#}");
}

/// As many failures as the server's log has, and as the client saw.
#[test]
fn every_5xx_is_a_failure() {
    need!("nginx", "hey");
    let scene = Scene::new(NEVER_OPENS);
    let good = hey_count(&scene.run(hey(1_000, 50, "/")), 200);
    let bad = hey_count(&scene.run(hey(1_500, 50, "/503")), 503);
    let row = scene.assert_exact(good + bad, bad);
    assert_eq!(row["state"], "closed", "{row:#}");
    scene.nginx.assert_logged(503, bad);
}

/// Events are lost, counts are not: every answer is an event here, the ring is small, and nobody
/// reads it.
#[test]
fn totals_are_exact_when_events_are_lost() {
    need!("nginx", "hey");
    let scene = Scene::new(&format!("{NEVER_OPENS}[agent]\nring_bytes = 65536\n"));
    scene.agent.signal(Signal::STOP);
    let finished = scene.run(hey(6_400, 64, "/503"));
    scene.agent.signal(Signal::CONT);
    let bad = hey_count(&finished, 503);
    assert_eq!(bad, 6_400, "{finished}");
    scene.assert_exact(bad, bad);
    tests::wait::until("what it says of the loss", LONG, || {
        (scene.agent.status()["lost_events"].as_u64() > Some(0)).then_some(())
    });
}

/// Load generators that are killed in the middle leave nothing under way behind.
#[test]
fn nothing_is_in_flight_after_a_kill() {
    need!("nginx", "hey");
    let scene = Scene::new(NEVER_OPENS);
    // More than it can do before it is killed.
    let running = hey(100_000_000, 64, "/")
        .in_cgroup(&scene.group)
        .in_netns(&scene.net.client)
        .spawn();
    scene.agent.wait_row(DESTINATION, "traffic", |row| {
        row["responses"].as_u64() > Some(1_000)
    });
    drop(running);
    let row = scene.quiet();
    assert_eq!(row["failures"]["gave_up"], 0, "{row:#}");
    assert_eq!(row["failures"]["reset"], 0, "{row:#}");
    assert_eq!(row["failures"]["closed_early"], 0, "{row:#}");
}
