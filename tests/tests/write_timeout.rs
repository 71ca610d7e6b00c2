//! Write and stall timeouts: data that lies still.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    sync::mpsc,
    time::Duration,
};

use serde_json::Value;
use tests::{
    need,
    outcome::expect,
    talk::{CONNECT, DESTINATION, Talk, echo, read_byte, wait_end},
};

/// After the value, and at most so many ms later: queued data is looked at every 200 ms at the latest, and
/// nothing else ends these connections. (How late it is at most, tests/matrix.rs shows. Here the machine may
/// hold up anybody.)
const LATE_MS: i64 = 20_000;

fn scene(label: &str, timeouts: &str, handler: impl Fn(TcpStream) + Send + Sync + 'static) -> Talk {
    let config = format!("[defaults.timeouts]\n{timeouts}\n");
    Talk::under(label, &config, SEND, handler)
}

/// `send(n)`: what sending n bytes ends with, and after how many milliseconds without progress.
const SEND: &str = "
import select
def send(n):
    moved = time.monotonic()
    try:
        while n > 0:
            select.select([], [s], [])
            n -= s.send(bytes(min(n, 1 << 16)), socket.MSG_DONTWAIT)
            moved = time.monotonic()
        result = 0
    except OSError as error:
        result = error.errno
    return [result, round((time.monotonic() - moved) * 1000)]
";

#[track_caller]
fn assert_ended(answer: &Value, value_ms: i64) {
    assert_eq!(answer[0], libc::ECONNABORTED, "{answer}");
    let took = answer[1].as_i64().expect("a number");
    assert!(
        (value_ms - 50..value_ms + LATE_MS).contains(&took),
        "{value_ms} ms took {took} ms"
    );
}

/// A handler that holds its connection without a read until the test ends.
fn hold() -> (mpsc::Sender<()>, impl Fn(TcpStream) + Send + Sync + 'static) {
    let (end, ended) = mpsc::channel();
    let ended = std::sync::Mutex::new(ended);
    (end, move |_stream| {
        let _ = ended.lock().expect("no panic").recv();
    })
}

#[test]
fn a_peer_that_stops_reading() {
    need!("python3");
    for value_ms in [100, 1000] {
        let (_end, handler) = hold();
        let write = format!("write = \"{value_ms}ms\"");
        let mut scene = scene("write", &write, handler);
        let mut follow = scene.agent.follow(&[]);
        scene.python.value(CONNECT);
        assert_ended(&scene.python.value("send(64 << 20)"), value_ms);
        expect(&scene.agent, DESTINATION, &[("write_timeout", 1)]);
        let event = follow.wait("timeout", |event| event["kind"] == "timeout");
        assert_eq!(
            (&event["which"], &event["value_ms"]),
            (&"write".into(), &value_ms.into())
        );
    }
}

/// Its machine is gone: nothing is acknowledged any more.
#[test]
fn a_peer_that_vanished() {
    need!("python3");
    let mut scene = scene("write-gone", "write = \"600ms\"", wait_end);
    scene.python.value(CONNECT);
    scene.python.value("s.sendall(bytes(1000))");
    scene.net.server.nft(
        "add table inet gone\n\
         add chain inet gone in { type filter hook input priority 0; policy drop; }\n",
    );
    assert_ended(&scene.python.value("send(64 << 20)"), 600);
    expect(&scene.agent, DESTINATION, &[("write_timeout", 1)]);
}

/// Slow, but moving: a peer that reads now and then, each time within the timeout.
#[test]
fn a_slow_reader_is_left_alone() {
    need!("python3");
    // (No thread is held up for so long on the busiest machine.)
    let mut scene = scene("write-slow", "write = \"3s\"", |mut stream| {
        let mut buffer = vec![0; 1 << 20];
        let mut left = 12 << 20;
        while left > 0 {
            std::thread::sleep(Duration::from_millis(500));
            let mut now = 1 << 20;
            while now > 0 && left > 0 {
                match stream.read(&mut buffer[..now]) {
                    Ok(0) | Err(_) => return,
                    Ok(n) => {
                        now -= n;
                        left -= n.min(left);
                    }
                }
            }
        }
        let _ = stream.write_all(b"y");
    });
    scene.python.value(CONNECT);
    assert_eq!(scene.python.value("send(12 << 20)")[0], 0);
    assert_eq!(scene.python.value("len(s.recv(9))"), 1);
    expect(&scene.agent, DESTINATION, &[("responses", 1)]);
}

/// An idle connection has nothing queued, with keepalive or without.
#[test]
fn an_idle_connection_is_left_alone() {
    need!("python3");
    let timeouts = "write = \"2s\"\nread = \"2s\"";
    let mut scene = scene("write-idle", timeouts, echo);
    scene.python.value(CONNECT);
    scene
        .python
        .value("s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)");
    scene.python.value("s.sendall(b'x') or s.recv(9) and 0");
    scene.python.value("time.sleep(5)");
    scene.python.value("s.sendall(b'x') or s.recv(9) and 0");
    expect(&scene.agent, DESTINATION, &[("responses", 2)]);
}

/// An answer of an unknown protocol that stops in the middle, where the policy sets `stall`.
#[test]
fn an_answer_that_stalls() {
    need!("python3");
    let mut scene = scene("stall", "stall = \"2s\"", |mut stream| {
        read_byte(&mut stream);
        for _ in 0..8 {
            // Slow but moving.
            std::thread::sleep(Duration::from_millis(400));
            let _ = stream.write_all(b"y");
        }
        wait_end(stream);
    });
    scene.python.value(CONNECT);
    scene.python.value("s.sendall(b'x')");
    for _ in 0..8 {
        assert_eq!(scene.python.value("len(s.recv(1))"), 1);
    }
    assert_eq!(scene.python.errno("s.recv(1)"), libc::ECONNABORTED);
    expect(
        &scene.agent,
        DESTINATION,
        &[("read_timeout", 1), ("responses", 1)],
    );
}
