//! Clients that look from outside as if something were wrong, and nothing is; and the other way
//! round.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Mutex,
        mpsc::{self, Receiver, Sender},
    },
    time::Duration,
};

use rustix::process::Signal;
use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    clients::{self, source},
    need,
    net::TestNet,
    nginx::Nginx,
    outcome::{expect, judged},
    process::{Program, python},
    server::{Server, read_head, reset},
    skip,
    talk::{CONNECT, DESTINATION, IDLE, PATIENCE, TO, Talk, echo, once, read_byte, wait_end},
    wait,
};

// --- the loser of a race between addresses

/// The first address of the name swallows every packet, the second answers: curl tries the second
/// after 200 ms, Node after 250 ms.
fn the_loser_has_abandoned(command: impl Fn(&str, SocketAddr) -> Program) {
    let net = TestNet::new();
    let group = TestCgroup::new("race");
    let _server = Server::start(&net.server, TO);
    // A busy machine may take its time over those 200 ms.
    let agent = Agent::start(&group, "[defaults.breaker]\ngave_up = \"30s\"\n");
    let hole = SocketAddr::new(TestNet::blackhole6(0), 8080);
    // More than the failures in a row that open.
    for _ in 0..6 {
        let program = command(&hole.ip().to_string(), TO);
        let program = program.in_cgroup(&group).in_netns(&net.client);
        program.run().good();
    }
    let row = expect(&agent, &hole.to_string(), &[("abandoned", 6)]);
    assert_eq!(row["windows"]["connects"]["calls"], 0, "{row:#}");
    assert_eq!(row["state"], "closed", "{row:#}");
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["established"], 6, "{row:#}");
    let failures = row["failures"].as_object().expect("an object");
    assert!(failures.values().all(|count| *count == 0), "{row:#}");
}

#[test]
fn happy_eyeballs_of_curl() {
    need!("curl");
    the_loser_has_abandoned(|hole, to| {
        let name = format!("name.test:{}:[{hole}],{}", to.port(), to.ip());
        let curl = Program::new("curl").args(["-q", "-sS", "--resolve", &name]);
        curl.arg(format!("http://name.test:{}/", to.port()))
    });
}

#[test]
fn happy_eyeballs_of_node() {
    need!("node");
    the_loser_has_abandoned(|hole, to| {
        let port = to.port().to_string();
        let node = Program::new("node").arg(source("race.js"));
        node.args([&port, hole, &to.ip().to_string()])
    });
}

// --- what an answer says, and where

/// A server of one connection at a time whose test says when, and what, it sends.
fn told() -> (Sender<&'static [u8]>, impl Fn(TcpStream) + Send + Sync) {
    let (say, says): (_, Receiver<&'static [u8]>) = mpsc::channel();
    let says = Mutex::new(says);
    let handler = move |mut stream: TcpStream| {
        let says = says.lock().expect("no panic holds it");
        let mut buffer = [0; 4096];
        while matches!(stream.read(&mut buffer), Ok(1..)) {
            // An empty one ends the answer.
            while let Ok(part @ [_, ..]) = says.recv() {
                let _ = stream.write_all(part);
            }
        }
    };
    (say, handler)
}

const GET: &str = r"s.sendall(b'GET / HTTP/1.1\r\nHost: a\r\n\r\n')";

#[test]
fn the_hundredth_answer_on_a_connection_has_a_status_too() {
    need!("python3");
    let mut talk = Talk::new("hundredth", |mut stream| {
        let mut number = 0;
        while read_head(&mut stream).is_some() {
            number += 1;
            let status = if number == 100 { "503 No" } else { "200 OK" };
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    talk.value(CONNECT);
    talk.value(&format!(
        "[len(({GET}, s.recv(99))[1]) for _ in range(99)] and 0"
    ));
    talk.expect(&[("responses", 99)], (20, 0));
    talk.value(GET);
    talk.value("len(s.recv(99))");
    talk.expect(&[("responses", 100), ("status", 1)], (20, 1));
    talk.value("s.close()");
}

/// Only what comes first is the status, however many segments the rest comes in.
#[test]
fn status_lines_inside_a_body_say_nothing() {
    need!("python3");
    let (say, handler) = told();
    let mut talk = Talk::new("bodies", handler);
    talk.value(CONNECT);
    let parts: [&[u8]; 5] = [
        b"HTTP/1.1 200 OK\r\nContent-Length: 75\r\n\r\n",
        b"HTTP/1.1 503 Service Unavailable\r\n\r\n",
        b"-LOADING Redis is loading\r\n",
        b"HTTP/1.1 500\r\n",
        b"",
    ];
    let body: usize = parts[1..].iter().map(|part| part.len()).sum();
    assert_eq!(body, 75 + 2);
    for _ in 0..10 {
        talk.value(GET);
        for part in parts {
            say.send(part).expect("the server takes it");
            if !part.is_empty() {
                // Each in a segment of its own: the last one has been read.
                let count = part.len();
                assert_eq!(talk.python.value("len(s.recv(999))"), count);
            }
        }
    }
    // A request that looks like an answer.
    talk.value(r"s.sendall(b'POST / HTTP/1.1\r\nContent-Length: 14\r\n\r\nHTTP/1.1 500\r\n')");
    say.send(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        .expect("taken");
    talk.value("len(s.recv(999))");
    say.send(b"").expect("the server takes it");
    talk.value("s.close()");
    talk.expect(&[("responses", 11)], (11, 0));
}

/// 101 is the answer; what follows is neither asked nor owed.
#[test]
fn an_upgraded_connection_is_left_alone() {
    need!("python3");
    let mut talk = Talk::new("upgrade", |mut stream| {
        read_head(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n");
        echo(stream);
    });
    talk.value(CONNECT);
    talk.value(r"s.sendall(b'GET / HTTP/1.1\r\nUpgrade: websocket\r\n\r\n')");
    talk.value("len(s.recv(999))");
    talk.value(r"s.sendall(b'\x81\x80\x00\x00\x00\x00')");
    talk.value("len(s.recv(1))");
    talk.value(PATIENCE);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

// --- clients that are not there to take their answer

/// It asks, is kept from running, and the answer comes; much later it reads on.
fn an_answer_that_nobody_takes(label: &str, stop: impl Fn(&Talk), resume: impl Fn(&Talk)) {
    let (say, handler) = told();
    let mut talk = Talk::new(label, handler);
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    stop(&talk);
    say.send(b"y").expect("the server takes it");
    say.send(b"").expect("the server takes it");
    let row = talk.expect(&[("responses", 1)], (1, 0));
    assert_eq!(row["state"], "closed", "{row:#}");
    // It would have waited for long enough to give up, if it were to run.
    std::thread::sleep(Duration::from_millis(600));
    resume(&talk);
    assert_eq!(talk.python.value("len(s.recv(9))"), 1);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

#[test]
fn a_stopped_client_has_its_answer() {
    need!("python3");
    an_answer_that_nobody_takes(
        "stopped",
        |talk| talk.python.signal(Signal::STOP),
        |talk| talk.python.signal(Signal::CONT),
    );
}

#[test]
fn a_frozen_client_has_its_answer() {
    need!("python3");
    let freeze = |talk: &Talk, wanted: &str| {
        let group = talk.group.path();
        fs::write(group.join("cgroup.freeze"), wanted).expect("freeze or thaw the group");
        wait::until(
            "the group to be frozen or thawed",
            Duration::from_secs(60),
            || {
                let events = fs::read_to_string(group.join("cgroup.events")).ok()?;
                let line = format!("frozen {wanted}");
                events.lines().any(|has| has == line).then_some(())
            },
        );
    };
    an_answer_that_nobody_takes("frozen", |talk| freeze(talk, "1"), |talk| freeze(talk, "0"));
}

/// 8 MiB that nobody reads: the server stands still, and the client hangs up after a second.
#[test]
fn a_client_that_stops_reading_has_its_answer() {
    need!("python3");
    let mut talk = Talk::new("unread", |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(&vec![b'y'; 8 << 20]);
    });
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    talk.expect(&[("responses", 1)], (1, 0));
    talk.value(PATIENCE);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

// --- slow, and healthy

/// Two seconds of upload, and then the answer.
#[test]
fn a_slow_upload_is_answered() {
    need!("curl");
    let talk = Talk::new("slow-curl", |mut stream| {
        if read_head(&mut stream).is_some() && stream.read_exact(&mut [0; 200_000]).is_ok() {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
    });
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("file");
    fs::write(&file, vec![b'x'; 200_000]).expect("write a file");
    let file = file.to_str().expect("ASCII");
    let said = talk.curl(&["-H", "Expect:", "--limit-rate", "100K", "-T", file]);
    assert_eq!(said, "ok");
    talk.expect(&[("responses", 1)], (1, 0));
}

/// The server takes what the client sends late: its window is closed for a while, and opens.
#[test]
fn a_server_that_reads_late_answers() {
    need!("python3");
    let mut talk = Talk::new("late-reader", |mut stream| {
        std::thread::sleep(Duration::from_millis(800));
        if stream.read_exact(&mut vec![0; 16 << 20]).is_ok() {
            let _ = stream.write_all(b"y");
            wait_end(stream);
        }
    });
    talk.value(CONNECT);
    talk.value("s.sendall(bytes(16 << 20))");
    assert_eq!(talk.python.value("len(s.recv(9))"), 1);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

/// Probes of an idle connection carry no payload, and ask for nothing.
#[test]
fn keepalive_probes_ask_for_nothing() {
    need!("python3");
    let mut talk = Talk::new("keepalive", echo);
    talk.value(CONNECT);
    talk.ask(1);
    // SO_KEEPALIVE, TCP_KEEPIDLE, TCP_KEEPINTVL.
    talk.value("[s.setsockopt(*o) for o in [(1, 9, 1), (6, 4, 1), (6, 5, 1)]] and 0");
    talk.value("time.sleep(2.2)");
    let row = talk.agent.row(DESTINATION);
    assert_eq!(row["in_flight"], 0, "{row:#}");
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

// --- pools and copies

/// nginx closes what has been idle for three seconds; urllib3 sees that before it asks again.
#[test]
fn a_pool_whose_server_closes_what_is_idle() {
    need!("nginx", "python3");
    if !clients::has_urllib3() {
        skip!("urllib3 is not installed");
    }
    let net = TestNet::new();
    let config = "listen 10.77.0.2:8080;\nkeepalive_timeout 3s;\nlocation / { return 200 'ok'; }\n";
    let _nginx = Nginx::start(&net.server, TO, config);
    let group = TestCgroup::new("urllib3");
    let agent = Agent::start(&group, "");
    let script = format!(
        "import select, urllib3\n\
         pool = urllib3.PoolManager(retries=False)\n\
         def closed():\n\
         \x20   kept = pool.connection_from_url('http://{TO}/').pool.queue\n\
         \x20   idle = [c.sock for c in kept if c is not None]\n\
         \x20   return select.select(idle, [], [], 60)[0] == idle\n\
         for waits in [False, False, True, True, False]:\n\
         \x20   assert not waits or closed()\n\
         \x20   assert pool.request('GET', 'http://{TO}/').data == b'ok'\n"
    );
    let script = Program::new(python()).args(["-c", &script]);
    let script = script.within(Duration::from_secs(180));
    script.in_cgroup(&group).in_netns(&net.client).run().good();
    let row = expect(&agent, DESTINATION, &[("responses", 5)]);
    assert_eq!(row["established"], 3, "{row:#}");
    assert_eq!(judged(&row), (5, 0), "{row:#}");
}

/// Closed by a reset of the program's own, after its answer.
#[test]
fn a_reset_by_the_program_itself_says_nothing() {
    need!("python3");
    let mut talk = Talk::new("linger", echo);
    for _ in 0..10 {
        talk.value(CONNECT);
        talk.value("s.setsockopt(1, 13, b'\\1\\0\\0\\0\\0\\0\\0\\0')");
        talk.ask(1);
        talk.value("s.close()");
    }
    talk.expect(&[("responses", 10)], (10, 0));
}

/// Connected by a process that ends; its child asks, and is answered.
#[test]
fn a_connection_that_a_child_inherits() {
    need!("python3");
    let talk = Talk::new("inherited", echo);
    let script = "import os, socket, sys\n\
         s = socket.create_connection(('10.77.0.2', 8080))\n\
         gone, end = os.pipe()\n\
         if os.fork(): os._exit(0)\n\
         os.close(end)\n\
         os.read(gone, 1)\n\
         for _ in range(3):\n\
         \x20   s.sendall(b'x')\n\
         \x20   assert s.recv(9) == b'y'\n\
         s.close()\n";
    let program = Program::new(python()).args(["-c", script]);
    let program = program.in_cgroup(&talk.group).in_netns(&talk.net.client);
    program.run().good();
    talk.expect(&[("responses", 3)], (3, 0));
}

/// One asks and another takes the answer: the same socket in two processes.
#[test]
fn one_process_asks_and_another_takes_the_answer() {
    need!("python3");
    let (say, handler) = told();
    let mut talk = Talk::new("shared", handler);
    talk.value("(os := __import__('os')) and 0");
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    // The child waits for the answer; the parent closes its copy at once and has not given up.
    talk.value("(child := os.fork()) or os._exit(0 if s.recv(9) == b'y' else 1)");
    talk.value("s.close()");
    let row = talk.agent.row(DESTINATION);
    assert_eq!(row["in_flight"], 1, "{row:#}");
    say.send(b"y").expect("the server takes it");
    say.send(b"").expect("the server takes it");
    assert_eq!(talk.python.value("os.waitpid(child, 0)[1]"), 0);
    talk.expect(&[("responses", 1)], (1, 0));
}

/// The server resets what is idle when it is asked again; the pool asks anew, as pools do, and its
/// breaker stays closed.
#[test]
fn a_pool_that_meets_resets() {
    need!("python3");
    let mut talk = Talk::new(
        "resets",
        once(|mut stream| {
            if read_byte(&mut stream) {
                reset(stream);
            }
        }),
    );
    let connect = "socket.create_connection(('10.77.0.2', 8080))";
    talk.value(&format!("(pool := [{connect} for _ in range(10)]) and 0"));
    let asks = "[len((s.sendall(b'x'), s.recv(9))[1]) for s in pool]";
    assert_eq!(talk.python.value(asks), serde_json::json!(vec![1; 10]));
    talk.value(IDLE);
    talk.value("[s.sendall(b'x') for s in pool] and 0");
    for number in 0..10 {
        let errno = talk.python.errno(&format!("pool[{number}].recv(9)"));
        assert_eq!(errno, libc::ECONNRESET);
    }
    talk.value(CONNECT);
    talk.ask(1);
    let row: Value = talk.expect(&[("responses", 11), ("stale", 10)], (11, 0));
    assert_eq!(row["state"], "closed", "{row:#}");
}

/// It asks again while it does not read: the answer cannot come, and that is not the server's doing.
#[test]
fn a_client_that_asks_and_does_not_read_has_not_waited() {
    need!("python3");
    let mut talk = Talk::new("unread-again", |mut stream| {
        while read_byte(&mut stream) {
            let _ = stream.write_all(&vec![b'y'; 8 << 20]);
        }
    });
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    talk.agent
        .wait_row(DESTINATION, "an answer", |row| row["responses"] == 1);
    talk.value("time.sleep(0.3) or s.sendall(b'x')");
    talk.value(PATIENCE);
    talk.value("s.close()");
    let row = talk
        .agent
        .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(judged(&row).1, 0, "{row:#}");
}
