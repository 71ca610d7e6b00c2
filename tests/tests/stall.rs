//! Answers of HTTP/1 that stop in the middle, and silences that are none of that.

#[path = "stall/cases.rs"]
mod cases;

use std::{
    fs,
    io::{Read as _, Write as _},
    net::TcpStream,
    os::unix::fs::PermissionsExt as _,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    nginx::Nginx,
    outcome::{expect, judged},
    process::Program,
    server::{Server, read_head},
    talk::{DESTINATION, TO, wait_end},
};

use cases::{Case, HEALTHY, PAUSES, PONG};

/// No thread of a server is held up for so long on the busiest machine: what it sends at once comes in time.
const VALUE_MS: u64 = 2_000;
/// Late by two looks at most, which are a quarter of the value apart, and by what a busy machine takes. (Nothing
/// but the agent ends these connections.)
const LATE_MS: u64 = VALUE_MS / 2 + 20_000;
/// For so long silences are left alone: longer than the value and all looks.
const LONG: Duration = Duration::from_millis(VALUE_MS * 5 / 2);

/// Lets all that wait for it go on.
#[derive(Clone, Default)]
struct Cue(Arc<(Mutex<bool>, Condvar)>);

impl Cue {
    fn give(&self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }

    fn wait(&self) {
        let mut given = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !*given {
            given = self.0.1.wait(given).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Sends parts of an answer, each as a segment of its own (the socket does not gather them).
fn send(stream: &mut TcpStream, parts: &[impl AsRef<str>]) {
    for (i, part) in parts.iter().enumerate() {
        if i > 0 {
            std::thread::sleep(Duration::from_millis(30));
        }
        let _ = stream.write_all(part.as_ref().as_bytes());
    }
}

/// Does what the case of each request's path says.
fn serve(cue: &Cue, mut stream: TcpStream) {
    while let Some(head) = read_head(&mut stream) {
        let path = head.split(' ').nth(1).unwrap_or_default();
        let Some(case) = HEALTHY.iter().chain(PAUSES).find(|case| case.path == path) else {
            send(&mut stream, &[PONG]);
            continue;
        };
        if case.request.starts_with("POST") {
            let _ = stream.read_exact(&mut [0; 3]);
        }
        send(&mut stream, &case.first());
        cue.wait();
        send(&mut stream, &[case.last]);
        if !case.beside.is_empty() {
            let _ = stream.read_exact(&mut vec![0; case.beside.len() + 2]);
        }
        if case.is_over {
            return;
        }
    }
}

/// `ask(text)`: a connection's number; `take(i, n)`: the number of bytes that it got, once they are `n`; `head(i, n)`:
/// the same of the first `n`, whatever comes behind them.
const CLIENT: &str = "
socks, seen = [], []
def ask(text):
    s = socket.create_connection(('10.77.0.2', 8080))
    s.settimeout(60)
    s.sendall(text.encode())
    socks.append(s)
    seen.append(0)
    return len(socks) - 1
def say(i, text):
    socks[i].sendall(text.encode())
    return 0
def take(i, n):
    while seen[i] < n:
        got = socks[i].recv(1 << 16)
        if not got:
            break
        seen[i] += len(got)
    return seen[i]
def head(i, n):
    seen[i] += len(socks[i].recv(n, socket.MSG_WAITALL))
    return seen[i]
def ends(i):
    begin = time.monotonic()
    try:
        while socks[i].recv(1 << 16):
            begin = time.monotonic()
        return [0, 0]
    except OSError as error:
        return [error.errno, round((time.monotonic() - begin) * 1000)]
";

struct Scene {
    _server: Server,
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    python: Interpreter,
}

impl Scene {
    fn new(
        label: &str,
        timeouts: &str,
        handler: impl Fn(TcpStream) + Send + Sync + 'static,
    ) -> Self {
        let net = TestNet::new();
        let server = Server::with(&net.server, TO, handler);
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, &format!("[defaults.timeouts]\n{timeouts}\n"));
        let mut python = Interpreter::start(&group, &net.client);
        python.run(CLIENT);
        Self {
            _server: server,
            net,
            group,
            agent,
            python,
        }
    }

    fn call(&mut self, function: &str, i: u64, argument: impl Into<Value>) -> Value {
        let argument: Value = argument.into();
        self.python.value(&format!("{function}({i}, {argument})"))
    }

    fn ask(&mut self, request: &str) -> u64 {
        let quoted = serde_json::to_string(request).expect("text");
        let number = self.python.value(&format!("ask({quoted})"));
        number.as_u64().expect("a number")
    }

    /// Takes so much of what comes; more or less fails the test.
    #[track_caller]
    fn take(&mut self, i: u64, length: usize, what: &str) {
        let taken = self.call("take", i, length);
        assert_eq!(taken, length, "{what}: {}", self.agent.log());
    }

    /// The connection ends by our doing, on time.
    #[track_caller]
    fn ends(&mut self, i: u64) {
        let answer = self.python.value(&format!("ends({i})"));
        assert_eq!(answer[0], libc::ECONNABORTED, "{answer}");
        let took = answer[1].as_u64().expect("a number");
        assert!(
            (VALUE_MS - 50..VALUE_MS + LATE_MS).contains(&took),
            "{took} ms"
        );
    }
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")
}

/// For longer than twice the value nothing is ended.
#[track_caller]
fn assert_left_alone(agent: &Agent, time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        let row = agent.row(DESTINATION);
        assert_eq!(
            row["failures"]["read_timeout"],
            0,
            "{row:#} {}",
            agent.log()
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[track_caller]
fn all_healthy(label: &str, timeouts: &str, cases: &[Case]) {
    let cue = Cue::default();
    let given = cue.clone();
    let mut scene = Scene::new(label, timeouts, move |stream| serve(&given, stream));
    let mut asked = Vec::new();
    for case in cases {
        let request = match case.request {
            "" => get(case.path),
            request => request.to_owned(),
        };
        let number = scene.ask(&request);
        let length: usize = case.first().iter().map(String::len).sum();
        scene.take(number, length, case.path);
        if !case.beside.is_empty() {
            scene.call("say", number, case.beside);
        }
        asked.push((case, number, length));
    }
    assert_left_alone(&scene.agent, LONG);
    cue.give();
    for (case, number, length) in asked {
        scene.take(number, length + case.last.len(), case.path);
        if !case.beside.is_empty() {
            scene.call("say", number, "wo");
        }
        if !case.is_over {
            scene.call("say", number, get("/ping"));
            let length = length + case.last.len() + PONG.len();
            scene.take(number, length, case.path);
        }
    }
    let row = scene.agent.row(DESTINATION);
    let failures = row["failures"].as_object().expect("an object");
    assert!(failures.values().all(|count| count == 0), "{row:#}");
}

#[test]
fn silences_that_are_healthy_by_default() {
    need!("python3");
    let cases: Vec<Case> = HEALTHY.iter().chain(PAUSES).copied().collect();
    all_healthy("calm", &format!("read = \"{VALUE_MS}ms\""), &cases);
}

#[test]
fn silences_that_are_healthy_whatever_is_set() {
    need!("python3");
    all_healthy("calmer", &format!("stall = \"{VALUE_MS}ms\""), HEALTHY);
}

/// `read` alone: curl has asked, and the body stops before its end.
#[test]
fn a_body_that_stops_before_its_end() {
    need!("curl");
    let timeouts = format!("read = \"{VALUE_MS}ms\"");
    let scene = Scene::new("stop", &timeouts, |mut stream| {
        read_head(&mut stream);
        let head =
            "HTTP/1.1 200 OK\r\nServer: x\r\nContent-Type: text/plain\r\nContent-Length: 6\r\n\r\n";
        send(&mut stream, &[head, "one"]);
        wait_end(stream);
    });
    let mut follow = scene.agent.follow(&[]);
    let begin = Instant::now();
    let curl = Program::new("curl")
        .args(["-q", "-sS"])
        .arg(format!("http://{TO}/"));
    let ended = curl
        .in_cgroup(&scene.group)
        .in_netns(&scene.net.client)
        .run();
    let took = begin.elapsed().as_millis() as u64;
    // CURLE_RECV_ERROR: Software caused connection abort.
    assert_eq!(ended.code(), 56, "{}", ended.stderr);
    assert_eq!(ended.stdout, "one");
    assert!((VALUE_MS..VALUE_MS + LATE_MS).contains(&took), "{took} ms");
    let event = follow.wait("timeout", |event| event["kind"] == "timeout");
    assert_eq!(
        (&event["which"], &event["value_ms"], &event["comm"]),
        (&"stall".into(), &VALUE_MS.into(), &"curl".into())
    );
    let row = expect(
        &scene.agent,
        DESTINATION,
        &[("responses", 1), ("read_timeout", 1)],
    );
    assert_eq!(row["timeouts_ms"]["stall"], VALUE_MS, "{row:#}");
    // An answer, and a failure; to the breaker one call, which failed.
    assert_eq!(judged(&row), (1, 1), "{row:#}");
}

/// Each answer of a connection has an end of its own: the first two come whole, the third stops. With
/// nothing of its body, or with some.
#[test]
fn the_third_answer_of_a_connection_stops() {
    need!("python3");
    for body in ["", "one"] {
        let timeouts = format!("read = \"{VALUE_MS}ms\"");
        let mut scene = Scene::new("third", &timeouts, move |mut stream| {
            for _ in 0..2 {
                read_head(&mut stream);
                send(&mut stream, &[PONG]);
            }
            read_head(&mut stream);
            send(
                &mut stream,
                &["HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n", body],
            );
            wait_end(stream);
        });
        let number = scene.ask(&get("/"));
        scene.take(number, PONG.len(), "the first");
        // As idle as it likes.
        assert_left_alone(&scene.agent, LONG);
        scene.call("say", number, get("/"));
        scene.take(number, 2 * PONG.len(), "the second");
        scene.call("say", number, get("/"));
        scene.ends(number);
        let row = expect(
            &scene.agent,
            DESTINATION,
            &[("responses", 3), ("read_timeout", 1)],
        );
        assert_eq!(judged(&row), (3, 1), "{row:#}");
        let run = &row["windows"]["exchanges"]["consecutive"];
        assert_eq!(run, 1, "{row:#}");
    }
}

/// A policy that sets `stall` means chunks, too.
#[test]
fn chunks_that_stop() {
    need!("python3");
    let cue = Cue::default();
    let given = cue.clone();
    let timeouts = format!("stall = \"{VALUE_MS}ms\"");
    let mut scene = Scene::new("chunks", &timeouts, move |stream| serve(&given, stream));
    let number = scene.ask(&get(PAUSES[0].path));
    scene.ends(number);
    cue.give();
    expect(
        &scene.agent,
        DESTINATION,
        &[("responses", 1), ("read_timeout", 1)],
    );
}

/// Observe mode counts it once, and touches nothing.
#[test]
fn observe_mode_counts_a_stall() {
    need!("python3");
    let timeouts = format!("read = \"{VALUE_MS}ms\"");
    let cue = Cue::default();
    let given = cue.clone();
    let net = TestNet::new();
    let _server = Server::with(&net.server, TO, move |mut stream| {
        read_head(&mut stream);
        send(
            &mut stream,
            &["HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\none"],
        );
        given.wait();
        send(&mut stream, &["two"]);
        wait_end(stream);
    });
    let group = TestCgroup::new("watched");
    let config = format!("mode = \"observe\"\n[defaults.timeouts]\n{timeouts}\n");
    let agent = Agent::start(&group, &config);
    let mut python = Interpreter::start(&group, &net.client);
    python.run(CLIENT);
    let first = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\none".len();
    python.value(&format!("ask({:?})", get("/")));
    assert_eq!(python.value(&format!("take(0, {first})")), first);
    agent.wait_row(DESTINATION, "is counted", |row| {
        row["failures"]["read_timeout"] == 1
    });
    std::thread::sleep(LONG);
    cue.give();
    let length = first + "two".len();
    assert_eq!(python.value(&format!("take(0, {length})")), length);
    let row = agent.row(DESTINATION);
    assert_eq!(row["failures"]["read_timeout"], 1, "{row:#}");
    assert_eq!(row["would_timeout"], 1, "{row:#}");
}

/// The program does not read for many times the value (its window is closed), and then does: what comes
/// late is its own doing. The same when it is stopped, and when it is frozen.
#[test]
fn a_program_that_does_not_read() {
    need!("python3");
    const LENGTH: usize = 12 << 20;
    let timeouts = format!("read = \"{VALUE_MS}ms\"\nstall = \"{VALUE_MS}ms\"");
    let mut scene = Scene::new("unread", &timeouts, |mut stream| {
        read_head(&mut stream);
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LENGTH}\r\n\r\n");
        send(&mut stream, &[head]);
        let _ = stream.write_all(&vec![b'y'; LENGTH]);
        wait_end(stream);
    });
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {LENGTH}\r\n\r\n").len();
    let freeze = scene.group.path().join("cgroup.freeze");
    for how in ["sleeps", "is stopped", "is frozen"] {
        let number = scene.ask(&get("/"));
        // (The begin of the body may have come with it.)
        assert_eq!(scene.call("head", number, head), head, "{how}");
        match how {
            "is stopped" => scene.python.signal(Signal::STOP),
            "is frozen" => fs::write(&freeze, "1").expect("freeze the group"),
            _ => {}
        }
        assert_left_alone(&scene.agent, LONG);
        match how {
            "is stopped" => scene.python.signal(Signal::CONT),
            "is frozen" => fs::write(&freeze, "0").expect("thaw the group"),
            _ => {}
        }
        scene.take(number, head + LENGTH, how);
    }
    expect(&scene.agent, DESTINATION, &[("responses", 3)]);
}

/// The server ends the connection before the end of the body: the program has seen that, and keeps its
/// socket. And one that sends its next request before: it takes the answer for finished.
#[test]
fn what_is_not_the_servers_silence() {
    need!("python3");
    let timeouts = format!("stall = \"{VALUE_MS}ms\"");
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\none";
    let mut scene = Scene::new("ended", &timeouts, move |mut stream| {
        let asked = read_head(&mut stream).unwrap_or_default();
        send(&mut stream, &[head]);
        if asked.contains("/more") {
            wait_end(stream);
        }
    });
    let ended = scene.ask(&get("/"));
    scene.take(ended, head.len(), "the end");
    assert_eq!(scene.call("take", ended, 1000), head.len());
    let more = scene.ask(&get("/more"));
    scene.take(more, head.len(), "more");
    scene.call("say", more, get("/more"));
    assert_left_alone(&scene.agent, LONG);
    let row = scene.agent.row(DESTINATION);
    let failures = row["failures"].as_object().expect("an object");
    assert!(failures.values().all(|count| count == 0), "{row:#}");
}

/// A real server that hangs in the middle of a file, and a real program.
#[test]
fn nginx_hangs_in_the_middle_of_a_file() {
    need!("nginx", "curl");
    let net = TestNet::new();
    let files = tempfile::tempdir().expect("a directory");
    fs::write(files.path().join("large"), vec![b'y'; 8 << 20]).expect("write a file");
    let at = files.path().display();
    // nginx changes its user when it can.
    let everybody = fs::Permissions::from_mode(0o755);
    fs::set_permissions(files.path(), everybody).expect("let everybody read");
    let server = format!("listen {TO}; root {at}; limit_rate 1m;");
    let nginx = Nginx::start(&net.server, TO, &server);
    let group = TestCgroup::new("hangs");
    let agent = Agent::start(&group, "[defaults.timeouts]\nread = \"3s\"\n");
    let curl = Program::new("curl").args(["-q", "-sS", "-o", "/dev/null"]);
    let url = format!("http://{TO}/large");
    // Slowly, for seconds: longer than the value, and never silent for so long.
    let mut first = curl
        .arg(&url)
        .in_cgroup(&group)
        .in_netns(&net.client)
        .spawn();
    first.extend_deadline(Duration::from_secs(90));
    first.wait().good();
    let row = expect(&agent, DESTINATION, &[("responses", 1)]);
    assert_eq!(row["attempts"], 1, "{row:#}");
    let curl = Program::new("curl").args(["-q", "-sS", "-o", "/dev/null"]);
    let mut second = curl
        .arg(&url)
        .in_cgroup(&group)
        .in_netns(&net.client)
        .spawn();
    second.extend_deadline(Duration::from_secs(90));
    agent.wait_row(DESTINATION, "begins", |row| row["responses"] == 2);
    nginx.signal(Signal::STOP);
    assert_eq!(second.wait().code(), 56);
    expect(
        &agent,
        DESTINATION,
        &[("responses", 2), ("read_timeout", 1)],
    );
    nginx.signal(Signal::CONT);
}
