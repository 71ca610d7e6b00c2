//! Each way in which an exchange can end, with real sockets on both sides.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    outcome::{expect, judged},
    process::Program,
    server::{Server, read_head, reset},
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
/// A new connection, kept as `s`.
const CONNECT: &str = "(s := socket.create_connection(('10.77.0.2', 8080))) and 0";
/// Longer than the 500 ms after which a used connection counts as idle.
const IDLE: &str = "time.sleep(0.7)";
/// Longer than `gave_up`.
const PATIENCE: &str = "time.sleep(1)";
const REFUSED_WRITE: [i32; 2] = [libc::EPIPE, libc::ECONNRESET];

struct Place {
    server: Server,
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    python: Interpreter,
}

impl Place {
    /// With a server that does this with each connection.
    fn new(label: &str, handler: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        let net = TestNet::new();
        let server = Server::with(&net.server, TO, handler);
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, "");
        let python = Interpreter::start(&group, &net.client);
        Self {
            server,
            net,
            group,
            agent,
            python,
        }
    }

    fn value(&mut self, expression: &str) {
        self.python.value(expression);
    }

    /// Sends a byte and gets `count` back.
    #[track_caller]
    fn ask(&mut self, count: usize) {
        self.value("s.sendall(b'x')");
        assert_eq!(self.python.value("len(s.recv(9))"), count);
    }

    /// These were the outcomes, and so many calls and failures of them are judged.
    #[track_caller]
    fn expect(&self, wanted: &[(&str, u64)], calls: (u64, u64)) -> serde_json::Value {
        let row = expect(&self.agent, DESTINATION, wanted);
        assert_eq!(judged(&row), calls, "{row:#}");
        row
    }

    fn curl(&self, options: &[&str]) -> String {
        let program = Program::new("curl").args(["-q", "-sS"]).args(options);
        let program = program.in_cgroup(&self.group).in_netns(&self.net.client);
        program.arg(format!("http://{TO}/")).run().good()
    }
}

/// Reads one byte; false at the end.
fn read_byte(stream: &mut TcpStream) -> bool {
    stream.read_exact(&mut [0]).is_ok()
}

/// Waits until the peer closes.
fn wait_end(mut stream: TcpStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

fn echo(mut stream: TcpStream) {
    while read_byte(&mut stream) {
        let _ = stream.write_all(b"y");
    }
}

#[test]
fn answered() {
    need!("python3");
    let mut place = Place::new("answered", echo);
    place.value(CONNECT);
    for _ in 0..3 {
        place.ask(1);
    }
    let row = place.expect(&[("responses", 3)], (3, 0));
    assert_eq!(row["established"], 1, "{row:#}");
    place.value("s.close()");
    place.expect(&[("responses", 3)], (3, 0));
}

#[test]
fn waiting_is_in_flight() {
    need!("python3");
    let mut place = Place::new("waiting", wait_end);
    place.value(CONNECT);
    assert_eq!(place.agent.row(DESTINATION)["in_flight"], 0);
    place.value("s.sendall(b'x')");
    let row = place.agent.row(DESTINATION);
    assert_eq!(row["in_flight"], 1, "{row:#}");
    assert_eq!(judged(&row), (0, 0), "{row:#}");
}

#[test]
fn reset_in_the_middle_of_a_request() {
    need!("python3");
    let mut place = Place::new("reset", |mut stream| {
        read_byte(&mut stream);
        reset(stream);
    });
    place.value(CONNECT);
    place.value("s.sendall(b'x')");
    assert_eq!(place.python.errno("s.recv(9)"), libc::ECONNRESET);
    place.expect(&[("reset", 1)], (1, 1));
}

#[test]
fn closed_instead_of_an_answer() {
    need!("python3");
    let mut place = Place::new("closed", |mut stream| {
        read_byte(&mut stream);
    });
    place.value(CONNECT);
    place.ask(0);
    place.expect(&[("closed_early", 1)], (1, 1));
    place.value("s.close()");
    place.expect(&[("closed_early", 1)], (1, 1));
}

/// What a proxy in front of a dead server does.
#[test]
fn closed_before_the_request_was_sent() {
    need!("python3");
    let mut place = Place::new("accept-close", drop);
    place.value(CONNECT);
    assert_eq!(place.python.value("len(s.recv(9))"), 0);
    place.value("s.sendall(b'x')");
    let errno = place.python.errno("(time.sleep(0.1), s.sendall(b'x'))");
    assert!(REFUSED_WRITE.contains(&errno), "errno {errno}");
    place.expect(&[("closed_early", 1)], (1, 1));
}

/// An answer that came before the reset is an answer.
#[test]
fn reset_after_the_answer() {
    need!("python3");
    let mut place = Place::new("answer-reset", |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(b"y");
        // The second byte says that the answer has arrived.
        read_byte(&mut stream);
        reset(stream);
    });
    place.value(CONNECT);
    place.ask(1);
    place.value("s.sendall(b'x')");
    assert_eq!(place.python.errno("s.recv(9)"), libc::ECONNRESET);
    // Used before, but not idle: the second one failed.
    place.expect(&[("responses", 1), ("reset", 1)], (2, 1));
}

#[test]
fn the_answer_and_the_end_arrive_together() {
    need!("python3");
    let mut place = Place::new("answer-close", |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(b"y");
    });
    for _ in 0..20 {
        place.value(CONNECT);
        place.ask(1);
        place.value("s.close()");
    }
    place.expect(&[("responses", 20)], (20, 0));
}

#[test]
fn a_killed_client_has_abandoned() {
    need!("python3");
    let mut place = Place::new("killed", wait_end);
    place.value(CONNECT);
    place.value("s.sendall(b'x')");
    place.value(PATIENCE);
    let agent = &place.agent;
    place.python.kill();
    let row = expect(agent, DESTINATION, &[("abandoned", 1)]);
    assert_eq!(judged(&row), (0, 0), "{row:#}");
}

#[test]
fn a_client_that_ends_without_closing_has_abandoned() {
    need!("python3");
    let mut place = Place::new("ended", wait_end);
    place.value("(os := __import__('os')) and 0");
    place.value(CONNECT);
    place.value("s.sendall(b'x')");
    place.value(PATIENCE);
    let fork = "(child := os.fork()) or (s.close(), os._exit(0))";
    place.value(fork);
    place.value("os.waitpid(child, 0)");
    let row = place.agent.row(DESTINATION);
    assert_eq!(row["in_flight"], 1, "the parent has it: {row:#}");
    let agent = &place.agent;
    place.python.kill();
    expect(agent, DESTINATION, &[("abandoned", 1)]);
}

#[test]
fn a_client_gives_up_after_a_second() {
    need!("python3");
    let mut place = Place::new("gave-up", once(wait_end));
    place.value(CONNECT);
    place.ask(1);
    place.value("s.sendall(b'x')");
    place.value(PATIENCE);
    place.value("s.close()");
    place.expect(&[("responses", 1), ("gave_up", 1)], (2, 1));
}

#[test]
fn a_client_that_resets_after_a_second_gave_up() {
    need!("python3");
    let mut place = Place::new("gave-up-linger", once(wait_end));
    place.value(CONNECT);
    place.ask(1);
    place.value("s.setsockopt(1, 13, b'\\1\\0\\0\\0\\0\\0\\0\\0')");
    place.value("s.sendall(b'x')");
    place.value(PATIENCE);
    place.value("s.close()");
    place.expect(&[("responses", 1), ("gave_up", 1)], (2, 1));
}

/// A destination that never answers anybody may be one that never does, as syslog.
#[test]
fn nobody_gives_up_on_a_one_way_protocol() {
    need!("python3");
    let mut place = Place::new("one-way", wait_end);
    for _ in 0..5 {
        place.value(CONNECT);
        place.value("s.sendall(b'<14>message')");
        place.value("time.sleep(0.6)");
        place.value("s.sendall(b'<14>message')");
        place.value("s.close()");
    }
    place.expect(&[("abandoned", 5)], (0, 0));
}

/// A copy of the socket keeps the exchange alive, wherever it lies.
#[test]
fn a_copy_of_the_socket_gets_the_answer() {
    need!("python3");
    let mut place = Place::new("copy", echo);
    place.value(CONNECT);
    place.value("s.sendall(b'x')");
    place.value("(copy := s.dup()) and s.close()");
    assert_eq!(place.python.value("len(copy.recv(9))"), 1);
    place.value("copy.sendall(b'x')");
    assert_eq!(place.python.value("len(copy.recv(9))"), 1);
    place.value("copy.close()");
    place.expect(&[("responses", 2)], (2, 0));
}

/// Passed to a process outside the control group over a unix socket.
#[test]
fn a_socket_passed_on_is_still_counted() {
    need!("python3");
    let mut place = Place::new("passed", echo);
    let mut other = Interpreter::start_outside(&place.net.client);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let path = path.display();
    let unix = "socket.socket(socket.AF_UNIX)";
    other.value(&format!("(u := {unix}) and u.bind('{path}') or u.listen()"));
    place.value(CONNECT);
    place.value(&format!("(u := {unix}) and u.connect('{path}')"));
    place.value("socket.send_fds(u, [b'x'], [s.fileno()])");
    place.value("s.close()");
    other.value("(s := socket.socket(fileno=socket.recv_fds(u.accept()[0], 9, 1)[1][0])) and 0");
    for _ in 0..3 {
        other.value("s.sendall(b'x')");
        assert_eq!(other.value("len(s.recv(9))"), 1);
    }
    other.value("s.close()");
    place.expect(&[("responses", 3)], (3, 0));
}

/// Requests by sendfile and splice, an answer by splice: no byte passes the program.
#[test]
fn sendfile_and_splice_are_seen() {
    need!("python3");
    let mut place = Place::new("splice", echo);
    place.value("(os := __import__('os')) and 0");
    place.value("(file := os.memfd_create('x')) and os.write(file, b'x' * 1)");
    place.value("(pipe := os.pipe()) and 0");
    place.value(CONNECT);
    place.value("os.sendfile(s.fileno(), file, 0, 1)");
    assert_eq!(place.python.value("len(s.recv(9))"), 1);
    place.value("os.splice(file, pipe[1], 1, offset_src=0)");
    place.value("os.splice(pipe[0], s.fileno(), 1)");
    assert_eq!(place.python.value("os.splice(s.fileno(), pipe[1], 9)"), 1);
    place.value("s.close()");
    place.expect(&[("responses", 2)], (2, 0));
}

/// Nothing was asked by writing nothing.
#[test]
fn an_empty_write_asks_for_nothing() {
    need!("python3");
    let mut place = Place::new("empty", wait_end);
    place.value(CONNECT);
    place.value("s.send(b'')");
    place.value(PATIENCE);
    place.value("s.close()");
    let row = place.expect(&[], (0, 0));
    assert_eq!(row["established"], 1, "{row:#}");
}

/// PostgreSQL's Terminate, after which a client may wait for the end.
#[test]
fn a_farewell_is_owed_no_answer() {
    need!("python3");
    let mut place = Place::new("farewell", |mut stream| {
        let mut buffer = [0; 64];
        let _ = stream.read(&mut buffer);
        let _ = stream.write_all(b"y");
        let _ = stream.read(&mut buffer);
    });
    place.value(CONNECT);
    place.value(r"s.sendall(b'Q\0\0\0\6x\0')");
    assert_eq!(place.python.value("len(s.recv(1))"), 1);
    place.value(r"s.sendall(b'X\0\0\0\4')");
    assert_eq!(place.python.value("len(s.recv(9))"), 0);
    place.value("s.close()");
    let row = place
        .agent
        .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(judged(&row), (1, 0), "{row:#}");
}

#[test]
fn a_client_that_closes_at_once_has_abandoned() {
    need!("python3");
    let mut place = Place::new("abandoned", wait_end);
    place.value(CONNECT);
    place.value("s.sendall(b'x') or s.close()");
    place.expect(&[("abandoned", 1)], (0, 0));
}

#[test]
fn a_half_closed_client_gets_its_answer() {
    need!("python3");
    let mut place = Place::new("half-closed", |mut stream| {
        let mut request = Vec::new();
        let _ = stream.read_to_end(&mut request);
        let _ = stream.write_all(&request);
    });
    place.value(CONNECT);
    place.value("s.sendall(b'xyz') or s.shutdown(1)");
    assert_eq!(place.python.value("len(s.recv(9))"), 3);
    place.value("s.close()");
    place.expect(&[("responses", 1)], (1, 0));
}

#[test]
fn a_half_closed_client_gets_no_answer() {
    need!("python3");
    let mut place = Place::new("half-closed-early", wait_end);
    place.value(CONNECT);
    place.value("s.sendall(b'xyz') or s.shutdown(1)");
    assert_eq!(place.python.value("len(s.recv(9))"), 0);
    place.value("s.close()");
    place.expect(&[("closed_early", 1)], (1, 1));
}

#[test]
fn a_port_check_says_nothing() {
    need!("python3");
    let mut place = Place::new("port-check", wait_end);
    for _ in 0..10 {
        place.value(CONNECT);
        place.value("s.close()");
    }
    let row = place.expect(&[], (0, 0));
    assert_eq!(row["established"], 10, "{row:#}");
}

#[test]
fn pipelined_requests_are_one_exchange() {
    need!("python3");
    let mut place = Place::new("pipelined", |mut stream| {
        for _ in 0..3 {
            read_byte(&mut stream);
        }
        let _ = stream.write_all(b"abc");
        wait_end(stream);
    });
    place.value(CONNECT);
    place.value("s.setsockopt(6, 1, 1)");
    place.value("[s.sendall(b'x') for _ in range(3)]");
    assert_eq!(place.python.value("len(s.recv(9))"), 3);
    place.value("s.close()");
    place.expect(&[("responses", 1)], (1, 0));
}

/// 100 and 103 answer nothing: the latency is that of the final answer.
#[test]
fn interim_answers_are_no_answers() {
    need!("curl");
    let place = Place::new("interim", |mut stream| {
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
    let said = place.curl(&["-H", "Expect: 100-continue", "--data", "body"]);
    assert_eq!(said, "ok");
    let row = place.expect(&[("responses", 1)], (1, 0));
    let p50 = row["response_latency_us"]["p50"].as_u64();
    assert!(p50 >= Some(200_000), "{row:#}");
}

#[test]
fn a_large_upload_is_one_exchange() {
    need!("python3");
    let mut place = Place::new("upload", |mut stream| {
        let mut left = 32 << 20;
        let mut buffer = vec![0; 1 << 16];
        while left > 0 {
            match stream.read(&mut buffer) {
                Ok(count @ 1..) => left -= count,
                _ => return,
            }
        }
        let _ = stream.write_all(b"y");
        wait_end(stream);
    });
    place.value(CONNECT);
    place.value("s.sendall(bytes(32 << 20))");
    assert_eq!(place.python.value("len(s.recv(9))"), 1);
    place.value("s.close()");
    place.expect(&[("responses", 1)], (1, 0));
}

#[test]
fn a_large_download_is_one_exchange() {
    need!("python3");
    let mut place = Place::new("download", |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(&vec![b'y'; 32 << 20]);
    });
    place.value(CONNECT);
    place.value("s.sendall(b'x')");
    let all = "sum(iter(lambda: len(s.recv(1 << 16)), 0))";
    assert_eq!(place.python.value(all), 32 << 20);
    place.value("s.close()");
    place.expect(&[("responses", 1)], (1, 0));
}

/// 413 while the program still uploads: what it sends of it afterwards asks for nothing.
#[test]
fn an_early_answer_ends_the_exchange() {
    need!("python3");
    let (answered, is_answered) = mpsc::channel();
    let mut place = Place::new("early", move |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n");
        let _ = answered.send(());
        wait_end(stream);
    });
    place.value(CONNECT);
    place.value("s.sendall(b'POST / HTTP/1.1\\r\\nContent-Length: 100000\\r\\n\\r\\n')");
    is_answered.recv().expect("an answer");
    place
        .agent
        .wait_row(DESTINATION, "the answer", |row| row["responses"] == 1);
    place.value("s.sendall(bytes(50000))");
    place.value(PATIENCE);
    place.value("s.close()");
    place.expect(&[("responses", 1)], (1, 0));
}

// --- connections of a pool

/// Answers once; then waits for `end` and ends the connection as told.
fn once(end: fn(TcpStream)) -> impl Fn(TcpStream) + Send + Sync + 'static {
    move |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(b"y");
        end(stream);
    }
}

/// Closes when asked again.
fn end_at_next(mut stream: TcpStream) {
    read_byte(&mut stream);
}

/// The close and the next request cross on the wire: the server has closed when it arrives.
#[test]
fn an_idle_connection_closed_by_its_server_is_stale() {
    need!("python3");
    let mut place = Place::new("stale-close", once(drop));
    for _ in 0..10 {
        place.value(CONNECT);
        place.ask(1);
        place.value(IDLE);
        place.value("s.sendall(b'x')");
        let errno = place.python.errno("(time.sleep(0.05), s.sendall(b'x'))");
        assert!(REFUSED_WRITE.contains(&errno), "errno {errno}");
    }
    let row = place.expect(&[("responses", 10), ("stale", 10)], (10, 0));
    assert_eq!(row["state"], "closed", "{row:#}");
}

#[test]
fn an_idle_connection_closed_on_the_next_request_is_stale() {
    need!("python3");
    let mut place = Place::new("stale-late", once(end_at_next));
    place.value(CONNECT);
    place.ask(1);
    place.value(IDLE);
    place.ask(0);
    place.value("s.close()");
    place.expect(&[("responses", 1), ("stale", 1)], (1, 0));
}

#[test]
fn an_idle_connection_reset_on_the_next_request_is_stale() {
    need!("python3");
    let end = |mut stream: TcpStream| {
        read_byte(&mut stream);
        reset(stream);
    };
    let mut place = Place::new("stale-reset", once(end));
    place.value(CONNECT);
    place.ask(1);
    place.value(IDLE);
    place.value("s.sendall(b'x')");
    assert_eq!(place.python.errno("s.recv(9)"), libc::ECONNRESET);
    place.value("s.close()");
    place.expect(&[("responses", 1), ("stale", 1)], (1, 0));
}

#[test]
fn an_idle_connection_reset_while_idle_says_nothing() {
    need!("python3");
    let mut place = Place::new("idle-reset", once(reset));
    for _ in 0..10 {
        place.value(CONNECT);
        place.ask(1);
        assert_eq!(place.python.errno("s.recv(9)"), libc::ECONNRESET);
        let errno = place.python.errno("s.sendall(b'x')");
        assert!(REFUSED_WRITE.contains(&errno), "errno {errno}");
        place.value("s.close()");
    }
    place.expect(&[("responses", 10)], (10, 0));
}

/// A busy connection is not idle: a server that hangs up on it failed.
#[test]
fn a_busy_connection_closed_is_a_failure() {
    need!("python3");
    let mut place = Place::new("busy", once(end_at_next));
    place.value(CONNECT);
    place.ask(1);
    place.ask(0);
    place.expect(&[("responses", 1), ("closed_early", 1)], (2, 1));
}

/// Ten pooled connections, the server restarts: nothing to hold against it.
#[test]
fn a_pool_survives_a_restart_of_its_server() {
    need!("python3");
    let streams = Arc::new(Mutex::new(Vec::new()));
    let all = Arc::clone(&streams);
    let mut place = Place::new("pool", move |stream| {
        let copy = stream.try_clone().expect("copy a descriptor");
        all.lock().expect("no panic holds it").push(copy);
        echo(stream);
    });
    let connect = "socket.create_connection(('10.77.0.2', 8080))";
    place.value(&format!("(pool := [{connect} for _ in range(10)]) and 0"));
    let asks = "[len((s.sendall(b'x'), s.recv(9))[1]) for s in pool]";
    assert_eq!(place.python.value(asks), serde_json::json!(vec![1; 10]));
    for stream in streams.lock().expect("no panic holds it").drain(..) {
        stream.shutdown(Shutdown::Both).expect("shut down");
    }
    place.value(IDLE);
    assert_eq!(place.python.value(asks), serde_json::json!(vec![0; 10]));
    place.value("[s.close() for s in pool] and 0");
    place.value(CONNECT);
    place.ask(1);
    let row = place.expect(&[("responses", 11), ("stale", 10)], (11, 0));
    assert_eq!(row["state"], "closed", "{row:#}");
    assert_eq!(place.server.accepts(), 11);
}
