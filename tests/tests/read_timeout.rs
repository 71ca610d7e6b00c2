//! Read timeouts and deadlines: they end what waits for too long, on time, and nothing else.

use std::{
    io::Write as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::process::Signal;
use serde_json::{Value, json};
use tests::{
    need,
    outcome::{expect, judged},
    talk::{CONNECT, DESTINATION, Scene, read_byte, wait_end},
};

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

/// After the value, and at most so many ms later. The machine is shared with other tests: what is later in
/// one of a few tries was held up, what is later in each of them is late.
const LATE_MS: i64 = 250;
/// Fewer failures in a row than open a breaker.
const TRIES: u64 = 4;

/// The call is ended, not before its value, and once on time. How many tries that took.
#[track_caller]
fn ends_on_time(value_ms: i64, late_ms: i64, mut call: impl FnMut() -> Value) -> u64 {
    let mut took = Vec::new();
    for tries in 1..=TRIES {
        let answer = call();
        assert_eq!(answer[0], -libc::ECONNABORTED, "{answer}");
        let now = answer[1].as_i64().expect("a number");
        assert!(now >= value_ms, "{value_ms} ms took {now} ms");
        if now < value_ms + late_ms {
            return tries;
        }
        took.push(now);
    }
    panic!("{value_ms} ms took {took:?} ms");
}

fn config(timeouts: &str) -> String {
    // (What is tried again is no retry.)
    format!("[defaults]\nretry = \"off\"\n[defaults.timeouts]\n{timeouts}\n")
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
        let mut python = scene.python(TIMED);
        let tries = ends_on_time(value_ms, LATE_MS, || {
            python.value(CONNECT);
            python.value("timed(lambda: s.sendall(b'x') or s.recv(9))")
        });
        let row = expect(&scene.agent, DESTINATION, &[("read_timeout", tries)]);
        assert_eq!(judged(&row), (tries, tries), "{row:#}");
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
        // (No answer takes as long on the busiest machine.)
        &config("read = \"2s\""),
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
    let mut python = scene.python(TIMED);
    python.value(CONNECT);
    for _ in 0..20 {
        python.value("s.sendall(b'x')");
        assert_eq!(python.value("len(s.recv(9))"), 1);
    }
    // Idle for longer than the timeout: nothing is owed.
    python.value("time.sleep(3)");
    python.value("s.sendall(b'x')");
    assert_eq!(python.value("len(s.recv(9))"), 1);
    hang.store(true, Ordering::Release);
    let answer = python.value("timed(lambda: s.sendall(b'x') or s.recv(9))");
    assert_eq!(answer[0], -libc::ECONNABORTED, "{answer}");
    assert!(answer[1].as_i64() >= Some(2000), "{answer}");
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
    // (No program waits as long between two bytes that are to come at once on the busiest machine.)
    let scene = Scene::new("read-upload", &config("read = \"2s\""), |mut stream| {
        for _ in 0..10 {
            read_byte(&mut stream);
        }
        let _ = stream.write_all(b"y");
    });
    let mut python = scene.python(TIMED);
    python.value(CONNECT);
    // Ten bytes, three seconds in all.
    python.value("[(s.sendall(b'x'), time.sleep(0.3)) for _ in range(10)] and 0");
    assert_eq!(python.value("len(s.recv(9))"), 1);
    expect(&scene.agent, DESTINATION, &[("responses", 1)]);
}

/// A server that does not read holds up the upload; the answer is not owed before it is through.
#[test]
fn an_upload_that_is_held_up_is_not_waiting() {
    need!("python3");
    let scene = Scene::new("read-held", &config("read = \"1500ms\""), |mut stream| {
        std::thread::sleep(Duration::from_secs(5));
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
    let mut python = scene.python(TIMED);
    python.value(CONNECT);
    python.value("s.sendall(bytes(8 << 20))");
    assert_eq!(python.value("len(s.recv(9))"), 1);
    expect(&scene.agent, DESTINATION, &[("responses", 1)]);
}

/// A program that is stopped is not waited for by anybody; when it goes on, the timeout holds again.
#[test]
fn a_stopped_program_is_left_alone() {
    need!("python3");
    // (It is stopped before that is over, on the busiest machine.)
    let scene = Scene::new("read-stopped", &config("read = \"2s\""), wait_end);
    let mut python = scene.python(TIMED);
    python.value(CONNECT);
    python.value("s.sendall(b'x')");
    python.signal(Signal::STOP);
    let before = std::time::Instant::now();
    while before.elapsed() < Duration::from_secs(5) {
        let row = scene.agent.row(DESTINATION);
        assert_eq!(row["failures"]["read_timeout"], 0, "{row:#}");
        std::thread::sleep(Duration::from_millis(20));
    }
    python.signal(Signal::CONT);
    assert_eq!(python.errno("s.recv(9)"), libc::ECONNABORTED);
    expect(&scene.agent, DESTINATION, &[("read_timeout", 1)]);
}

#[test]
fn a_deadline_bounds_the_whole_exchange() {
    need!("python3");
    // The program sends a byte now and then: never silent, and not done before the deadline.
    let scene = Scene::new("deadline", &config("deadline = \"600ms\""), wait_end);
    let mut python = scene.python(TIMED);
    python.value(CONNECT);
    let answer =
        python.value("timed(lambda: [(s.sendall(b'x'), time.sleep(0.05)) for _ in range(40)])");
    assert!(answer[0].as_i64() < Some(0), "{answer}");
    let took = answer[1].as_i64().expect("a number");
    assert!(took >= 550, "{answer}");
    let row = expect(&scene.agent, DESTINATION, &[("deadline", 1)]);
    // It belongs to no window.
    assert_eq!(judged(&row), (0, 0), "{row:#}");
}

/// It begins with the connect, if that was made for the exchange: here its first SYN is lost.
#[test]
fn a_deadline_holds_from_the_first_syn() {
    need!("python3", "nft");
    let scene = Scene::new("deadline-syn", &config("deadline = \"2s\""), wait_end);
    let mut python = scene.python(TIMED);
    python.run(
        "
def operation():
    s = socket.create_connection(('10.77.0.2', 8080))
    s.sendall(b'x')
    return s.recv(9)
",
    );
    // The second SYN leaves after almost 0.9 s: later by less than that, it is the deadline of the connect.
    let tries = ends_on_time(2000 - 50, 800, || {
        scene.net.server.lose_one_syn(8080);
        python.value("timed(operation)")
    });
    expect(&scene.agent, DESTINATION, &[("deadline", tries)]);
}

/// Observe mode counts it at its value, once, and touches nothing.
#[test]
fn observe_mode_only_counts() {
    need!("python3");
    let config = format!("mode = \"observe\"\n{}", config("read = \"200ms\""));
    let scene = Scene::new("read-observe", &config, |mut stream| {
        read_byte(&mut stream);
        std::thread::sleep(Duration::from_secs(4));
        let _ = stream.write_all(b"y");
    });
    let mut python = scene.python(TIMED);
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
    let mut python = scene.python(TIMED);
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
    let config = config(
        "read = \"2s\"\n[defaults.breaker]\nconsecutive_failures = \"off\"\nfailure_rate = \"off\"",
    );
    let scene = Scene::new("read-many", &config, wait_end);
    let mut python = scene.python(TIMED);
    python.run(
        "
import selectors
def many():
    all = [socket.create_connection(('10.77.0.2', 8080)) for _ in range(1000)]
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
    let mut seen = Vec::new();
    for tries in 1..=TRIES {
        let ends = python.value("many()");
        let (first, last) = (ends[0].as_i64().unwrap_or(0), ends[1].as_i64().unwrap_or(0));
        assert!(first >= 2000, "{ends}");
        scene.agent.wait_row(DESTINATION, "all counted", |row| {
            row["failures"]["read_timeout"] == 1000 * tries && row["in_flight"] == 0
        });
        if last < 2600 {
            return;
        }
        seen.push(ends);
    }
    panic!("late each time: {seen:?}");
}
