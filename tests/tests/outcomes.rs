//! Each way in which an exchange can end, with real sockets on both sides.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use tests::{
    need,
    outcome::{expect, judged},
    server::{read_head, reset},
    talk::{CONNECT, DESTINATION, IDLE, PATIENCE, Talk, echo, once, read_byte, wait_end},
};

/// What a write to a connection that its peer has closed ends with.
const REFUSED_WRITE: [i32; 2] = [libc::EPIPE, libc::ECONNRESET];

/// Writes until one is refused: the first ones may be quicker than the reset that they bring about.
const WRITE_AGAIN: &str = "[(time.sleep(0.05), s.sendall(b'x')) for _ in range(1000)]";

/// In so many tries a program is once not held up between an answer and its next request: a connection that
/// lies idle for 500 ms would be stale.
const TRIES: usize = 8;

/// `ask_twice()`: a byte, its answer and another byte; whether that was quick enough.
const ASK_TWICE: &str = "
def ask_twice():
    began = time.monotonic()
    s.sendall(b'x')
    s.recv(9)
    s.sendall(b'x')
    return time.monotonic() - began < 0.4
";

/// Sends a message, and says that this was all.
const TELL_ALL: &str = "s.sendall(b'a message') or s.shutdown(1)";

#[test]
fn answered() {
    need!("python3");
    let mut talk = Talk::new("answered", echo);
    talk.value(CONNECT);
    for _ in 0..3 {
        talk.ask(1);
    }
    let row = talk.expect(&[("responses", 3)], (3, 0));
    assert_eq!(row["established"], 1, "{row:#}");
    talk.value("s.close()");
    talk.expect(&[("responses", 3)], (3, 0));
}

#[test]
fn waiting_is_in_flight() {
    need!("python3");
    let mut talk = Talk::new("waiting", wait_end);
    talk.value(CONNECT);
    assert_eq!(talk.agent.row(DESTINATION)["in_flight"], 0);
    talk.value("s.sendall(b'x')");
    let row = talk.agent.row(DESTINATION);
    assert_eq!(row["in_flight"], 1, "{row:#}");
    assert_eq!(judged(&row), (0, 0), "{row:#}");
}

#[test]
fn reset_in_the_middle_of_a_request() {
    need!("python3");
    let mut talk = Talk::new("reset", |mut stream| {
        read_byte(&mut stream);
        reset(stream);
    });
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    assert_eq!(talk.python.errno("s.recv(9)"), libc::ECONNRESET);
    talk.expect(&[("reset", 1)], (1, 1));
}

#[test]
fn closed_instead_of_an_answer() {
    need!("python3");
    let mut talk = Talk::new("closed", |mut stream| {
        read_byte(&mut stream);
    });
    talk.value(CONNECT);
    talk.ask(0);
    talk.expect(&[("closed_early", 1)], (1, 1));
    talk.value("s.close()");
    talk.expect(&[("closed_early", 1)], (1, 1));
}

/// What a proxy in front of a dead server does.
#[test]
fn closed_before_the_request_was_sent() {
    need!("python3");
    let mut talk = Talk::new("accept-close", drop);
    talk.value(CONNECT);
    assert_eq!(talk.python.value("len(s.recv(9))"), 0);
    talk.value("s.sendall(b'x')");
    let errno = talk.python.errno(WRITE_AGAIN);
    assert!(REFUSED_WRITE.contains(&errno), "errno {errno}");
    talk.expect(&[("closed_early", 1)], (1, 1));
}

/// An answer that came before the reset is an answer.
#[test]
fn reset_after_the_answer() {
    need!("python3");
    for _ in 0..TRIES {
        let mut talk = Talk::new("answer-reset", |mut stream| {
            read_byte(&mut stream);
            let _ = stream.write_all(b"y");
            // The second byte says that the answer has arrived.
            read_byte(&mut stream);
            reset(stream);
        });
        talk.value(CONNECT);
        talk.python.run(ASK_TWICE);
        let is_quick = talk.python.value("ask_twice()") == true;
        assert_eq!(talk.python.errno("s.recv(9)"), libc::ECONNRESET);
        if is_quick {
            // Used before, but not idle: the second one failed.
            talk.expect(&[("responses", 1), ("reset", 1)], (2, 1));
            return;
        }
    }
    panic!("held up {TRIES} times");
}

#[test]
fn the_answer_and_the_end_arrive_together() {
    need!("python3");
    let mut talk = Talk::new("answer-close", |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(b"y");
    });
    for _ in 0..20 {
        talk.value(CONNECT);
        talk.ask(1);
        talk.value("s.close()");
    }
    talk.expect(&[("responses", 20)], (20, 0));
}

#[test]
fn a_killed_client_has_abandoned() {
    need!("python3");
    let mut talk = Talk::new("killed", wait_end);
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    talk.value(PATIENCE);
    let agent = &talk.agent;
    talk.python.kill();
    let row = expect(agent, DESTINATION, &[("abandoned", 1)]);
    assert_eq!(judged(&row), (0, 0), "{row:#}");
}

#[test]
fn a_client_gives_up_after_a_second() {
    need!("python3");
    let mut talk = Talk::new("gave-up", once(wait_end));
    talk.value(CONNECT);
    talk.ask(1);
    talk.value("s.sendall(b'x')");
    talk.value(PATIENCE);
    talk.value("s.close()");
    talk.expect(&[("responses", 1), ("gave_up", 1)], (2, 1));
}

#[test]
fn a_client_that_resets_after_a_second_gave_up() {
    need!("python3");
    let mut talk = Talk::new("gave-up-linger", once(wait_end));
    talk.value(CONNECT);
    talk.ask(1);
    talk.value("s.setsockopt(1, 13, b'\\1\\0\\0\\0\\0\\0\\0\\0')");
    talk.value("s.sendall(b'x')");
    talk.value(PATIENCE);
    talk.value("s.close()");
    talk.expect(&[("responses", 1), ("gave_up", 1)], (2, 1));
}

/// A destination that never answers anybody may be one that never does, as syslog: that is counted,
/// and judges nobody.
#[test]
fn nobody_is_judged_for_a_one_way_protocol() {
    need!("python3");
    let mut talk = Talk::new("one-way", wait_end);
    for _ in 0..6 {
        talk.value(CONNECT);
        talk.value("s.sendall(b'<14>message')");
        talk.value("time.sleep(0.6)");
        talk.value("s.close()");
    }
    let row = talk.expect(&[("gave_up", 6)], (0, 0));
    assert_eq!(row["state"], "closed", "{row:#}");
    assert_eq!(row["traits"], serde_json::json!(["one-way"]), "{row:#}");
}

/// The wait counts from the last byte of the request.
#[test]
fn a_slow_upload_is_not_waiting() {
    need!("python3");
    let mut talk = Talk::with("slow-upload", "gave_up = \"3s\"\n", once(wait_end));
    talk.value(CONNECT);
    talk.ask(1);
    talk.value("s.sendall(b'x')");
    talk.value("time.sleep(4)");
    talk.value("s.sendall(b'x') or s.close()");
    talk.expect(&[("responses", 1), ("abandoned", 1)], (1, 0));
}

/// PostgreSQL's Terminate, after which a client may wait for the end.
#[test]
fn a_farewell_is_owed_no_answer() {
    need!("python3");
    let mut talk = Talk::new("farewell", |mut stream| {
        let mut buffer = [0; 64];
        let _ = stream.read(&mut buffer);
        let _ = stream.write_all(b"y");
        let _ = stream.read(&mut buffer);
    });
    talk.value(CONNECT);
    talk.value(r"s.sendall(b'Q\0\0\0\6x\0')");
    assert_eq!(talk.python.value("len(s.recv(1))"), 1);
    talk.value(r"s.sendall(b'X\0\0\0\4')");
    assert_eq!(talk.python.value("len(s.recv(9))"), 0);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

/// TLS 1.3 encrypts its close_notify as if it were data: 2 bytes, their type and a tag of 16.
#[test]
fn a_tls_farewell_is_owed_no_answer() {
    need!("python3");
    let mut talk = Talk::new("tls-farewell", |mut stream| {
        let mut buffer = [0; 64];
        for answer in [&b"\x16\x03\x03\0\x01y"[..], b"\x17\x03\x03\0\x01y"] {
            let _ = stream.read(&mut buffer);
            let _ = stream.write_all(answer);
        }
        let _ = stream.read(&mut buffer);
    });
    talk.value(CONNECT);
    talk.value(r"s.sendall(b'\x16\x03\x01\0\5hello')");
    assert_eq!(talk.python.value("len(s.recv(99))"), 6);
    talk.value(r"s.sendall(b'\x17\x03\x03\0\x20' + bytes(32))");
    assert_eq!(talk.python.value("len(s.recv(99))"), 6);
    talk.value(r"s.sendall(b'\x17\x03\x03\0\x13' + bytes(19))");
    assert_eq!(talk.python.value("len(s.recv(9))"), 0);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

#[test]
fn a_client_that_closes_at_once_has_abandoned() {
    need!("python3");
    let mut talk = Talk::with("abandoned", "gave_up = \"30s\"\n", wait_end);
    talk.value(CONNECT);
    talk.value("s.sendall(b'x') or s.close()");
    talk.expect(&[("abandoned", 1)], (0, 0));
}

#[test]
fn a_half_closed_client_gets_its_answer() {
    need!("python3");
    let mut talk = Talk::new("half-closed", |mut stream| {
        let mut request = Vec::new();
        let _ = stream.read_to_end(&mut request);
        let _ = stream.write_all(&request);
    });
    talk.value(CONNECT);
    talk.value("s.sendall(b'xyz') or s.shutdown(1)");
    assert_eq!(talk.python.value("len(s.recv(9))"), 3);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

/// "That was all", and the end of the connection says that it has come: so ends what `nc -N` and `socat` send.
#[test]
fn a_message_taken_in_order_is_no_failure() {
    need!("python3");
    // A greeting, or none.
    for (greeting, label) in [("", "taken"), ("hello", "taken-by-a-greeter")] {
        let mut talk = Talk::new(label, move |mut stream| {
            let _ = stream.write_all(greeting.as_bytes());
            let _ = stream.read_to_end(&mut Vec::new());
            // For longer than `gave_up`.
            std::thread::sleep(Duration::from_millis(700));
        });
        for _ in 0..6 {
            talk.value(CONNECT);
            let greeted = talk
                .python
                .value(&format!("len(s.recv({}))", greeting.len()));
            assert_eq!(greeted, greeting.len());
            talk.value(TELL_ALL);
            assert_eq!(talk.python.value("len(s.recv(9))"), 0);
            talk.value("s.close()");
        }
        if greeting.is_empty() {
            talk.expect(&[("abandoned", 6)], (0, 0));
        } else {
            talk.expect(&[("abandoned", 6), ("responses", 6)], (6, 0));
        }
    }
}

/// A server that resets has not read what it was sent, or is no more.
#[test]
fn a_message_that_is_reset_has_failed() {
    need!("python3");
    let mut talk = Talk::new("half-closed-reset", |mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
        reset(stream);
    });
    talk.value(CONNECT);
    talk.value(TELL_ALL);
    assert_eq!(talk.python.errno("s.recv(9)"), libc::ECONNRESET);
    talk.value("s.close()");
    talk.expect(&[("reset", 1)], (1, 1));
}

/// Of a protocol in which everything is answered, nothing is taken without an answer.
#[test]
fn a_half_closed_client_gets_no_answer() {
    need!("python3");
    let mut talk = Talk::new("half-closed-early", wait_end);
    for (number, request) in [(1, r"GET / HTTP/1.0\r\n\r\n"), (2, r"*1\r\n$4\r\nPING\r\n")] {
        talk.value(CONNECT);
        talk.value(&format!("s.sendall(b'{request}') or s.shutdown(1)"));
        assert_eq!(talk.python.value("len(s.recv(9))"), 0);
        talk.value("s.close()");
        talk.expect(&[("closed_early", number)], (number, number));
    }
}

#[test]
fn a_port_check_says_nothing() {
    need!("python3");
    let mut talk = Talk::new("port-check", wait_end);
    for _ in 0..10 {
        talk.value(CONNECT);
        talk.value("s.close()");
    }
    let row = talk.expect(&[], (0, 0));
    assert_eq!(row["established"], 10, "{row:#}");
}

#[test]
fn pipelined_requests_are_one_exchange() {
    need!("python3");
    let mut talk = Talk::new("pipelined", |mut stream| {
        for _ in 0..3 {
            read_byte(&mut stream);
        }
        let _ = stream.write_all(b"abc");
        wait_end(stream);
    });
    talk.value(CONNECT);
    talk.value("s.setsockopt(6, 1, 1)");
    talk.value("[s.sendall(b'x') for _ in range(3)]");
    assert_eq!(talk.python.value("len(s.recv(9))"), 3);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

/// 100 and 103 answer nothing: the latency is that of the final answer.
#[test]
fn interim_answers_are_no_answers() {
    need!("curl");
    let talk = Talk::new("interim", |mut stream| {
        let Some(head) = read_head(&mut stream) else {
            return;
        };
        assert!(head.contains("Expect: 100-continue"), "{head}");
        let _ = stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n");
        let _ = stream.read_exact(&mut [0; 4]);
        let _ = stream.write_all(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n");
        std::thread::sleep(Duration::from_millis(200));
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        wait_end(stream);
    });
    let said = talk.curl(&["-H", "Expect: 100-continue", "--data", "body"]);
    assert_eq!(said, "ok");
    let row = talk.expect(&[("responses", 1)], (1, 0));
    let p50 = row["response_latency_us"]["p50"].as_u64();
    assert!(p50 >= Some(200_000), "{row:#}");
}

/// The final answer counts, and its status, also where it comes in one piece with those before it.
#[test]
fn what_stands_behind_interim_answers_is_an_answer() {
    need!("python3");
    const HINTS: &str = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
    const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    const ILL: &str = "HTTP/1.1 503 Ill\r\nContent-Length: 0\r\n\r\n";
    let mut talk = Talk::new("behind-interim", |mut stream| {
        for answer in [
            format!("{HINTS}{OK}"),
            format!("{HINTS}{HINTS}{OK}"),
            format!("HTTP/1.1 100 Continue\r\n\r\n{HINTS}{ILL}"),
        ] {
            if read_head(&mut stream).is_none() {
                return;
            }
            let _ = stream.write_all(answer.as_bytes());
        }
        wait_end(stream);
    });
    talk.value(CONNECT);
    for (number, end) in ["ok", "ok", "0\\r\\n\\r\\n"].iter().enumerate() {
        talk.value(r"s.sendall(b'GET / HTTP/1.1\r\nHost: a\r\n\r\n')");
        talk.value("(got := b'')");
        let python = format!(
            "[got := got + s.recv(999) for _ in iter(lambda: got.endswith(b'{end}'), True)] and 0"
        );
        talk.value(&python);
        talk.agent.wait_row(DESTINATION, "its answer", |row| {
            row["responses"] == number + 1
        });
    }
    talk.value("s.close()");
    talk.expect(&[("responses", 3), ("status", 1)], (3, 1));
}

/// 413 while the program still uploads: what it sends of it afterwards asks for nothing.
#[test]
fn an_early_answer_ends_the_exchange() {
    need!("python3");
    let (answered, is_answered) = mpsc::channel();
    let mut talk = Talk::new("early", move |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n");
        let _ = answered.send(());
        wait_end(stream);
    });
    talk.value(CONNECT);
    talk.value("s.sendall(b'POST / HTTP/1.1\\r\\nContent-Length: 100000\\r\\n\\r\\n')");
    is_answered.recv().expect("an answer");
    talk.agent
        .wait_row(DESTINATION, "the answer", |row| row["responses"] == 1);
    talk.value("s.sendall(bytes(50000))");
    talk.value(PATIENCE);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

// --- connections of a pool

/// Closes when asked again.
fn end_at_next(mut stream: TcpStream) {
    read_byte(&mut stream);
}

/// The close and the next request cross on the wire: the server has closed when it arrives.
#[test]
fn an_idle_connection_closed_by_its_server_is_stale() {
    need!("python3");
    let mut talk = Talk::new("stale-close", once(drop));
    for _ in 0..10 {
        talk.value(CONNECT);
        talk.ask(1);
        talk.value(IDLE);
        talk.value("s.sendall(b'x')");
        let errno = talk.python.errno(WRITE_AGAIN);
        assert!(REFUSED_WRITE.contains(&errno), "errno {errno}");
    }
    let row = talk.expect(&[("responses", 10), ("stale", 10)], (10, 0));
    assert_eq!(row["state"], "closed", "{row:#}");
}

#[test]
fn an_idle_connection_closed_on_the_next_request_is_stale() {
    need!("python3");
    let mut talk = Talk::new("stale-late", once(end_at_next));
    talk.value(CONNECT);
    talk.ask(1);
    talk.value(IDLE);
    talk.ask(0);
    talk.value("s.close()");
    talk.expect(&[("responses", 1), ("stale", 1)], (1, 0));
}

#[test]
fn an_idle_connection_reset_on_the_next_request_is_stale() {
    need!("python3");
    let end = |mut stream: TcpStream| {
        read_byte(&mut stream);
        reset(stream);
    };
    let mut talk = Talk::new("stale-reset", once(end));
    talk.value(CONNECT);
    talk.ask(1);
    talk.value(IDLE);
    talk.value("s.sendall(b'x')");
    assert_eq!(talk.python.errno("s.recv(9)"), libc::ECONNRESET);
    talk.value("s.close()");
    talk.expect(&[("responses", 1), ("stale", 1)], (1, 0));
}

#[test]
fn an_idle_connection_reset_while_idle_says_nothing() {
    need!("python3");
    let mut talk = Talk::new("idle-reset", once(reset));
    for _ in 0..10 {
        talk.value(CONNECT);
        talk.ask(1);
        assert_eq!(talk.python.errno("s.recv(9)"), libc::ECONNRESET);
        let errno = talk.python.errno("s.sendall(b'x')");
        assert!(REFUSED_WRITE.contains(&errno), "errno {errno}");
        talk.value("s.close()");
    }
    talk.expect(&[("responses", 10)], (10, 0));
}

/// A busy connection is not idle: a server that hangs up on it failed.
#[test]
fn a_busy_connection_closed_is_a_failure() {
    need!("python3");
    for _ in 0..TRIES {
        let mut talk = Talk::new("busy", once(end_at_next));
        talk.value(CONNECT);
        talk.python.run(ASK_TWICE);
        let is_quick = talk.python.value("ask_twice()") == true;
        assert_eq!(talk.python.value("len(s.recv(9))"), 0);
        if is_quick {
            talk.expect(&[("responses", 1), ("closed_early", 1)], (2, 1));
            return;
        }
    }
    panic!("held up {TRIES} times");
}

/// Ten pooled connections, the server restarts: nothing to hold against it.
#[test]
fn a_pool_survives_a_restart_of_its_server() {
    need!("python3");
    let streams = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&streams);
    let mut talk = Talk::new("pool", move |stream| {
        let copy = stream.try_clone().expect("copy a descriptor");
        all.lock().expect("no panic holds it").push(copy);
        echo(stream);
    });
    let connect = "socket.create_connection(('10.77.0.2', 8080))";
    talk.value(&format!("(pool := [{connect} for _ in range(10)]) and 0"));
    let asks = "[len((s.sendall(b'x'), s.recv(9))[1]) for s in pool]";
    assert_eq!(talk.python.value(asks), serde_json::json!(vec![1; 10]));
    for stream in streams.lock().expect("no panic holds it").drain(..) {
        stream.shutdown(Shutdown::Both).expect("shut down");
    }
    talk.value(IDLE);
    assert_eq!(talk.python.value(asks), serde_json::json!(vec![0; 10]));
    talk.value("[s.close() for s in pool] and 0");
    talk.value(CONNECT);
    talk.ask(1);
    let row = talk.expect(&[("responses", 11), ("stale", 10)], (11, 0));
    assert_eq!(row["state"], "closed", "{row:#}");
    assert_eq!(talk.server.accepts(), 11);
}
