//! Read timeouts and deadlines: they end what waits for too long, on time, and nothing else.

use std::{
    io::Write as _,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::process::Signal;
use serde_json::{Value, json};
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    outcome::{expect, judged},
    server::Server,
    talk::{CONNECT, DESTINATION, TO, read_byte, wait_end},
    wait,
};

struct Scene {
    _server: Server,
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
}

impl Scene {
    fn new(label: &str, config: &str, handler: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let net = TestNet::new();
        let server = Server::with(&net.server, TO, handler);
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, config);
        Self {
            _server: server,
            net,
            group,
            agent,
        }
    }

    fn python(&self) -> Interpreter {
        let mut python = Interpreter::start(&self.group, &self.net.client);
        python.run(TIMED);
        python
    }
}

/// `timed(f)`: what `f` ends with, and after how many milliseconds.
const TIMED: &str = "
def timed(f):
    begin = time.monotonic()
    try:
        result = len(f())
    except OSError as error:
        result = -error.errno
    return [result, round((time.monotonic() - begin) * 1000)]
";

/// After the value, and at most so many ms later: the machine is shared with other tests.
const LATE_MS: i64 = 250;

#[track_caller]
fn assert_aborted(answer: &Value, value_ms: i64) {
    assert_eq!(answer[0], -libc::ECONNABORTED, "{answer}");
    let took = answer[1].as_i64().expect("a number");
    assert!(
        (value_ms..value_ms + LATE_MS).contains(&took),
        "{value_ms} ms took {took} ms"
    );
}

fn config(timeouts: &str) -> String {
    format!("[defaults.timeouts]\n{timeouts}\n")
}

#[test]
fn a_read_ends_on_time() {
    need!("python3");
    for value_ms in [100, 700] {
        let scene = Scene::new(
            "read",
            &config(&format!("read = \"{value_ms}ms\"")),
            wait_end,
        );
        let mut follow = scene.agent.follow(&[]);
        let mut python = scene.python();
        python.value(CONNECT);
        let answer = python.value("timed(lambda: s.sendall(b'x') or s.recv(9))");
        assert_aborted(&answer, value_ms);
        let row = expect(&scene.agent, DESTINATION, &[("read_timeout", 1)]);
        assert_eq!(judged(&row), (1, 1), "{row:#}");
        assert_eq!(row["timeouts_ms"]["read"], value_ms, "{row:#}");
        let event = follow.wait("timeout", |event| event["kind"] == "timeout");
        assert_eq!(event["which"], "read", "{event}");
        assert_eq!(event["value_ms"], value_ms, "{event}");
        assert!(
            event["comm"]
                .as_str()
                .is_some_and(|c| c.starts_with("python")),
            "{event}"
        );
        assert!(event["elapsed_ms"].as_i64() >= Some(value_ms), "{event}");
    }
}

/// The hundredth request of a connection is bounded like the first, and what answers in time is
/// left alone.
#[test]
fn a_request_on_an_old_connection_is_bounded_too() {
    need!("python3");
    let hang = Arc::new(AtomicBool::new(false));
    let hanging = Arc::clone(&hang);
    let scene = Scene::new(
        "read-old",
        &config("read = \"400ms\""),
        move |mut stream| {
            while read_byte(&mut stream) {
                if hanging.load(Ordering::Acquire) {
                    return wait_end(stream);
                }
                std::thread::sleep(Duration::from_millis(20));
                let _ = stream.write_all(b"y");
            }
        },
    );
    let mut python = scene.python();
    python.value(CONNECT);
    for _ in 0..20 {
        python.value("s.sendall(b'x')");
        assert_eq!(python.value("len(s.recv(9))"), 1);
    }
    // Idle for longer than the timeout: nothing is owed.
    python.value("time.sleep(1)");
    python.value("s.sendall(b'x')");
    assert_eq!(python.value("len(s.recv(9))"), 1);
    hang.store(true, Ordering::Release);
    let answer = python.value("timed(lambda: s.sendall(b'x') or s.recv(9))");
    assert_aborted(&answer, 400);
    let row = expect(
        &scene.agent,
        DESTINATION,
        &[("read_timeout", 1), ("responses", 21)],
    );
    assert_eq!(judged(&row), (20, 1), "{row:#}");
}

/// The clock runs from the last byte of the request.
#[test]
fn an_upload_is_not_waiting() {
    need!("python3");
    let scene = Scene::new("read-upload", &config("read = \"300ms\""), |mut stream| {
        for _ in 0..10 {
            read_byte(&mut stream);
        }
        let _ = stream.write_all(b"y");
    });
    let mut python = scene.python();
    python.value(CONNECT);
    // Ten bytes, a second in all.
    python.value("[(s.sendall(b'x'), time.sleep(0.1)) for _ in range(10)] and 0");
    assert_eq!(python.value("len(s.recv(9))"), 1);
    expect(&scene.agent, DESTINATION, &[("responses", 1)]);
}

/// A server that does not read holds up the upload; the answer is not owed before it is through.
#[test]
fn an_upload_that_is_held_up_is_not_waiting() {
    need!("python3");
    let scene = Scene::new("read-held", &config("read = \"300ms\""), |mut stream| {
        std::thread::sleep(Duration::from_millis(1500));
        let mut left = 8 << 20;
        let mut buffer = vec![0; 1 << 16];
        while left > 0 {
            match std::io::Read::read(&mut stream, &mut buffer) {
                Ok(0) | Err(_) => return,
                Ok(n) => left -= n.min(left),
            }
        }
        let _ = stream.write_all(b"y");
    });
    let mut python = scene.python();
    python.value(CONNECT);
    python.value("s.sendall(bytes(8 << 20))");
    assert_eq!(python.value("len(s.recv(9))"), 1);
    expect(&scene.agent, DESTINATION, &[("responses", 1)]);
}

/// A program that is stopped is not waited for by anybody; when it goes on, the timeout holds again.
#[test]
fn a_stopped_program_is_left_alone() {
    need!("python3");
    let scene = Scene::new("read-stopped", &config("read = \"300ms\""), wait_end);
    let mut python = scene.python();
    python.value(CONNECT);
    python.value("s.sendall(b'x')");
    python.signal(Signal::STOP);
    let before = std::time::Instant::now();
    while before.elapsed() < Duration::from_millis(1200) {
        let row = scene.agent.row(DESTINATION);
        assert_eq!(row["failures"]["read_timeout"], 0, "{row:#}");
    }
    python.signal(Signal::CONT);
    assert_eq!(python.errno("s.recv(9)"), libc::ECONNABORTED);
    expect(&scene.agent, DESTINATION, &[("read_timeout", 1)]);
}

#[test]
fn a_deadline_bounds_the_whole_exchange() {
    need!("python3");
    // The program sends a byte now and then: never silent, never done.
    let scene = Scene::new("deadline", &config("deadline = \"600ms\""), wait_end);
    let mut python = scene.python();
    python.value(CONNECT);
    let answer =
        python.value("timed(lambda: [(s.sendall(b'x'), time.sleep(0.05)) for _ in range(40)])");
    assert!(answer[0].as_i64() < Some(0), "{answer}");
    let took = answer[1].as_i64().expect("a number");
    assert!((550..900).contains(&took), "{answer}");
    let row = expect(&scene.agent, DESTINATION, &[("deadline", 1)]);
    // It belongs to no window.
    assert_eq!(judged(&row), (0, 0), "{row:#}");
}

/// It begins with the connect, if that was made for the exchange: here its first SYN is lost.
#[test]
fn a_deadline_holds_from_the_first_syn() {
    need!("python3", "nft");
    let scene = Scene::new("deadline-syn", &config("deadline = \"2s\""), wait_end);
    let mut python = scene.python();
    python.run(
        "
def operation():
    s = socket.create_connection(('10.77.0.2', 8080))
    s.sendall(b'x')
    return s.recv(9)
",
    );
    let lost = scene.net.server.count_syns(8080, true);
    let answer = std::thread::scope(|scope| {
        let answer = scope.spawn(|| python.value("timed(operation)"));
        wait::until("a SYN", Duration::from_secs(5), || {
            (lost.seen() > 0).then_some(())
        });
        lost.stop();
        answer.join().expect("no panic")
    });
    // The second SYN left after almost 0.9 s.
    assert_aborted(&answer, 2000 - 50);
    expect(&scene.agent, DESTINATION, &[("deadline", 1)]);
}

/// Observe mode counts it at its value, once, and touches nothing.
#[test]
fn observe_mode_only_counts() {
    need!("python3");
    let config = format!("mode = \"observe\"\n{}", config("read = \"200ms\""));
    let scene = Scene::new("read-observe", &config, |mut stream| {
        read_byte(&mut stream);
        std::thread::sleep(Duration::from_millis(900));
        let _ = stream.write_all(b"y");
    });
    let mut python = scene.python();
    python.value(CONNECT);
    python.value("s.sendall(b'x')");
    assert_eq!(python.value("len(s.recv(9))"), 1);
    let row = expect(
        &scene.agent,
        DESTINATION,
        &[("read_timeout", 1), ("responses", 1)],
    );
    assert_eq!(judged(&row), (1, 1), "{row:#}");
    assert_eq!(
        (&row["would_timeout"], &row["hung_recovered"]),
        (&json!(1), &json!(0)),
        "{row:#}"
    );
}

/// The policy changes while an exchange waits.
#[test]
fn a_timeout_that_is_switched_on_holds_at_once() {
    need!("python3");
    let scene = Scene::new("read-reload", "", wait_end);
    let mut python = scene.python();
    python.value(CONNECT);
    python.value("s.sendall(b'x')");
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["timeouts_ms"]["read"], Value::Null, "{row:#}");
    scene.agent.home().write_config(&config("read = \"250ms\""));
    scene.agent.request("POST", "/v1/reload");
    assert_eq!(python.errno("s.recv(9)"), libc::ECONNABORTED);
    expect(&scene.agent, DESTINATION, &[("read_timeout", 1)]);
}

/// A thousand at once, in the time of one.
#[test]
fn a_thousand_at_once() {
    need!("python3");
    let scene = Scene::new("read-many", &config("read = \"2s\""), wait_end);
    let mut python = scene.python();
    python.run(
        "
import selectors
all = [socket.create_connection(('10.77.0.2', 8080)) for _ in range(1000)]
def many():
    waiting = selectors.DefaultSelector()
    begin = time.monotonic()
    for c in all:
        c.sendall(b'x')
        waiting.register(c, selectors.EVENT_READ)
    ends = []
    while len(ends) < len(all):
        for key, _ in waiting.select():
            try:
                key.fileobj.recv(9)
            except ConnectionAbortedError:
                ends.append(time.monotonic() - begin)
            waiting.unregister(key.fileobj)
    return [round(min(ends) * 1000), round(max(ends) * 1000)]
",
    );
    let ends = python.value("many()");
    let (first, last) = (ends[0].as_i64().unwrap_or(0), ends[1].as_i64().unwrap_or(0));
    assert!(first >= 2000 && last < 2600, "{ends}");
    wait::until("all counted", Duration::from_secs(10), || {
        let row = scene.agent.row(DESTINATION);
        (row["failures"]["read_timeout"] == 1000 && row["in_flight"] == 0).then_some(())
    });
}
