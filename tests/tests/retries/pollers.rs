//! Programs that call again and again: by the clock, or until it goes well.

use std::{
    io::Write as _,
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use tests::{
    interpreter::Interpreter,
    server::{Server, read_head},
};

use super::{ECONNREFUSED, NO_BREAKER, Scene, TO, number};

const BAD: &[u8] = b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
const GOOD: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";

/// Status, or errno.
const ASK: &str = r#"
import time
def ask():
    s = socket.socket()
    e = s.connect_ex(('10.77.0.2', 8080))
    if e == 0:
        s.sendall(b'GET /metrics HTTP/1.1\r\nHost: poll.example\r\n\r\n')
        e = int(s.recv(4096)[9:12])
        while s.recv(4096):
            pass
    s.close()
    return e
"#;

fn program(scene: &Scene) -> Interpreter {
    let mut python = Interpreter::start(&scene.group, &scene.net.client);
    python.run(ASK);
    python
}

/// A failing call takes nearly as long as the time between two calls: so the next one follows it more closely than it
/// ever follows a good one. It is none the sooner for that.
#[test]
fn who_calls_by_the_clock_does_not_retry() {
    // On a busy machine a clock is late, now and then: then another program tries.
    let mut seen = Vec::new();
    while seen.last() != Some(&0) {
        assert!(seen.len() < 5, "retries in each try: {seen:?}");
        let scene = Scene::new(NO_BREAKER);
        let served = AtomicU32::new(0);
        let _server = Server::with(&scene.net.server, TO, move |mut stream| {
            if read_head(&mut stream).is_none() {
                return;
            }
            // Twelve good ones, then every other one.
            let number = served.fetch_add(1, Ordering::Relaxed);
            let is_bad = number >= 12 && number.is_multiple_of(2);
            if is_bad {
                thread::sleep(Duration::from_millis(235));
            }
            let _ = stream.write_all(if is_bad { BAD } else { GOOD });
        });
        let mut python = program(&scene);
        python.run(
            "due = time.monotonic()\n\
             told = []\n\
             for _ in range(24):\n \
             time.sleep(max(0, due - time.monotonic()))\n due += 0.25\n told.append(ask())",
        );
        assert_eq!(python.value("told.count(200) + told.count(503)"), 24);
        let row = scene.row();
        assert_eq!(row["rejected"]["retry_budget"], 0, "{row:#}");
        seen.push(number(&row["retry"]["retries"]));
    }
}

/// The limit of the only program that asks does not last for the whole window once the server is well.
#[test]
fn the_limit_finds_out_that_the_server_answers_again() {
    let scene = Scene::new(
        "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = 2\nwindow = \"20s\"\n",
    );
    let served = AtomicU32::new(0);
    let _server = Server::with(&scene.net.server, TO, move |mut stream| {
        if read_head(&mut stream).is_some() {
            let is_bad = served.fetch_add(1, Ordering::Relaxed) < 3;
            let _ = stream.write_all(if is_bad { BAD } else { GOOD });
        }
    });
    let mut python = program(&scene);
    python.run(
        "told = []\n\
         while 200 not in told:\n told.append(ask())\n time.sleep(0.05)",
    );
    assert_eq!(
        python.value("told[:4]"),
        serde_json::json!([503, 503, 503, ECONNREFUSED])
    );
    let row = scene.row();
    // What came when the window was over would be the first attempt of another operation.
    assert_eq!(row["retry"]["retries"], 3, "{row:#}");
    assert_eq!(row["attempts"], 4, "{row:#}");
    assert!(number(&row["rejected"]["retry_limit"]) > 0, "{row:#}");
}
