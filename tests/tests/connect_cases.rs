//! Connect timeouts where packets are lost or say no, where the program has options of its own, and
//! however it waits.

use std::{fs, io::Write as _, net::SocketAddr, path::Path, time::Duration};

use serde_json::Value;
use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    clients::source,
    interpreter::Interpreter,
    need,
    net::TestNet,
    process::Program,
    server::Server,
    skip, wait,
};

const VALUE_MS: u64 = 900;
/// As much later as a busy machine may make it; how exact it is, timeouts.rs shows. Without us it takes
/// the kernel two minutes.
const LATE_MS: u64 = 20_000;
/// Busy or not, one of so many is on time.
const TRIES: u32 = 8;
/// Swallows everything.
const NOWHERE: (&str, u16) = ("10.77.0.100", 80);

/// `wait_*`: how a program waits for a connect that does not block. `dial(to, wait, prepare)`: what
/// it ends with, and after how many milliseconds.
const DIAL: &str = "
import select
TCP_USER_TIMEOUT, TCP_SYNCNT = socket.TCP_USER_TIMEOUT, socket.TCP_SYNCNT
def wait_select(s):
    select.select([], [s], [])
def wait_poll(s):
    p = select.poll()
    p.register(s, select.POLLOUT)
    p.poll()
def wait_epoll(s):
    with select.epoll() as p:
        p.register(s, select.EPOLLOUT)
        p.poll()
def option(name, value):
    return lambda s: s.setsockopt(socket.IPPROTO_TCP, name, value)
def dial(to, wait=None, before=None, after=None):
    global s
    s = socket.socket()
    if before:
        before(s)
    begin = time.monotonic()
    if wait:
        s.setblocking(False)
        error = s.connect_ex(to)
        if after:
            after(s)
        if error == 115:
            wait(s)
            error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    else:
        try:
            s.connect(to)
            error = 0
        except OSError as failure:
            error = failure.errno
    return [error, round((time.monotonic() - begin) * 1000)]
";

struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    python: Interpreter,
}

impl Scene {
    fn new(label: &str) -> Self {
        Self::with(label, VALUE_MS)
    }

    /// With another connect timeout.
    fn with(label: &str, value_ms: u64) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new(label);
        let config = format!(
            "[defaults]\nbreaker = \"off\"\n[defaults.timeouts]\nconnect = \"{value_ms}ms\"\n"
        );
        let agent = Agent::start_for_loops(&group, &config);
        let mut python = Interpreter::start(&group, &net.client);
        python.run(DIAL);
        Self {
            net,
            group,
            agent,
            python,
        }
    }

    /// Dials an address that swallows everything; it ends as the policy says.
    #[track_caller]
    fn ends_on_time(&mut self, how: &str) {
        let answer = self.python.value(&format!("dial({NOWHERE:?}{how})"));
        assert_on_time(&answer, VALUE_MS, how);
    }

    /// The row once nothing is under way.
    fn row(&self, to: impl ToString) -> Value {
        let quiet = |row: &Value| row["in_flight"] == 0;
        self.agent.wait_row(&to.to_string(), "quiet", quiet)
    }
}

#[track_caller]
fn assert_on_time(answer: &Value, value_ms: u64, what: &str) {
    assert_eq!(answer[0], libc::ETIMEDOUT, "{what}: {answer}");
    let took = answer[1].as_u64().expect("a number");
    let right = value_ms - 2..value_ms + LATE_MS;
    assert!(
        right.contains(&took),
        "{what}: {value_ms} ms took {took} ms"
    );
}

#[test]
fn however_a_program_waits() {
    need!("python3");
    let mut scene = Scene::new("waits");
    for how in ["", ", wait_select", ", wait_poll", ", wait_epoll"] {
        scene.ends_on_time(how);
    }
    let row = scene.row("10.77.0.100:80");
    assert_eq!(row["failures"]["connect_timeout"], 4, "{row:#}");
    assert_balanced(&row);
}

#[test]
fn a_program_that_waits_by_io_uring() {
    need!("gcc");
    if !Path::new("/usr/include/liburing.h").exists() {
        skip!("liburing-dev is not installed");
    }
    let scene = Scene::new("uring-poll");
    let directory = tempfile::tempdir().expect("a directory");
    let program = directory.path().join("cells");
    Program::new("gcc")
        .args(["-O1", "-o"])
        .arg(&program)
        .arg(source("cells.c"))
        .args(["-luring", "-lpthread"])
        .run()
        .good();
    let (host, port) = NOWHERE;
    for how in ["poll", "uring"] {
        let program = Program::new(&program).arg(how).fed();
        let mut running = program
            .in_cgroup(&scene.group)
            .in_netns(&scene.net.client)
            .spawn();
        let mut input = running.stdin.take().expect("piped");
        writeln!(input, "connect {VALUE_MS} {host} {port}").expect("write to it");
        drop(input);
        let said = running.wait().good();
        let words: Vec<&str> = said.split_whitespace().collect();
        let ["ready", "0", errno, elapsed_us] = words[..] else {
            panic!("{how}: {said}");
        };
        let number = |word: &str| word.parse::<u64>().expect("a number");
        let answer = serde_json::json!([number(errno), number(elapsed_us) / 1000]);
        assert_on_time(&answer, VALUE_MS, how);
    }
}

/// The answer to the first SYN is lost; it comes again with that to the second, in time.
#[test]
fn a_lost_answer_comes_again() {
    need!("python3", "nft");
    let mut scene = Scene::with("lost-answer", 4_000);
    let to = TestNet::server4(8080);
    let _server = Server::start(&scene.net.server, to);
    // The first SYN-ACK is dropped (60 bytes), those after it pass. (Kernels before 6.11 take a quota that is
    // just used up for exceeded.)
    scene.net.client.nft(
        "table inet lossy {\n\
           chain input {\n\
             type filter hook input priority 0; policy accept;\n\
             tcp sport 8080 tcp flags & (syn | ack) == (syn | ack) quota until 61 bytes drop\n\
           }\n\
         }\n",
    );
    let answer = scene.python.value("dial(('10.77.0.2', 8080))");
    assert_eq!(answer[0], 0, "{answer}");
    let took = answer[1].as_u64().expect("a number");
    assert!(took > 100, "the first answer was not lost: {answer}");
    let row = scene.agent.row(&to.to_string());
    assert_eq!(
        (&row["attempts"], &row["established"]),
        (&1.into(), &1.into()),
        "{row:#}"
    );
    assert_eq!(
        scene
            .python
            .value("s.getsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT)"),
        0,
        "the option is given back"
    );
}

/// All answers are lost: the connect ends on time, though the server believes it has a connection.
#[test]
fn every_answer_is_lost() {
    need!("python3", "nft");
    let mut scene = Scene::new("lost-answers");
    let to = TestNet::server4(8080);
    let _server = Server::start(&scene.net.server, to);
    scene.net.client.nft(
        "table inet lossy {\n\
           chain input {\n\
             type filter hook input priority 0; policy accept;\n\
             tcp sport 8080 tcp flags & (syn | ack) == (syn | ack) drop\n\
           }\n\
         }\n",
    );
    let answer = scene.python.value("dial(('10.77.0.2', 8080))");
    assert_on_time(&answer, VALUE_MS, "every answer is lost");
    let row = scene.row(to);
    assert_eq!(row["failures"]["connect_timeout"], 1, "{row:#}");
    assert_balanced(&row);
}

/// A router says no while the connect waits, to a repeated SYN: that ends it, and is no timeout.
#[test]
fn unreachable_while_it_waits() {
    need!("python3", "nft");
    for (icmp, address) in [
        ("icmp type host-unreachable", TestNet::SERVER4),
        ("icmpv6 type no-route", TestNet::SERVER6),
    ] {
        // Long: nothing is to end before the router has been told to say no.
        let value_ms = 20_000;
        let mut scene = Scene::with("icmp", value_ms);
        let to = SocketAddr::new(address, 8080);
        let mut other = Interpreter::start(&scene.group, &scene.net.client);
        other.run(DIAL);
        let drops = scene.net.server.count_syns(8080, true);
        let answer = std::thread::scope(|scope| {
            let dialed = scope.spawn(|| {
                let (host, port) = (to.ip(), to.port());
                let connect = format!("dial_any(('{host}', {port}))");
                scene.python.run(
                    "
def dial_any(to):
    begin = time.monotonic()
    try:
        socket.create_connection(to)
    except OSError as failure:
        return [failure.errno, round((time.monotonic() - begin) * 1000)]
",
                );
                scene.python.value(&connect)
            });
            wait::until("the first SYN", Duration::from_secs(60), || {
                (drops.seen() > 0).then_some(())
            });
            // From now on, instead of dropping.
            scene.net.server.nft(&format!(
                "delete table inet syns8080\n\
                 table inet no {{\n\
                   chain input {{\n\
                     type filter hook input priority 0; policy accept;\n\
                     tcp dport 8080 reject with {icmp}\n\
                   }}\n\
                 }}\n"
            ));
            dialed.join().expect("no panic")
        });
        // What that says of IPv6 is ENETUNREACH.
        let errno = answer[0].as_i64().expect("a number") as i32;
        assert!(
            [libc::EHOSTUNREACH, libc::ENETUNREACH].contains(&errno),
            "{answer}"
        );
        assert!(answer[1].as_u64() < Some(value_ms), "{answer}");
        let row = scene.row(to);
        assert_eq!(row["failures"]["unreachable"], 1, "{row:#}");
        assert_eq!(row["failures"]["connect_timeout"], 0, "{row:#}");
        assert_balanced(&row);
    }
}

/// A stricter option of the program's own wins, set before the connect or while it waits; a looser
/// one does not loosen the policy. It reads back what it has set.
#[test]
fn options_of_its_own() {
    need!("python3");
    let mut scene = Scene::new("own");
    for (name, value, when) in [
        ("TCP_USER_TIMEOUT", 60_000, "before"),
        ("TCP_USER_TIMEOUT", 60_000, "after"),
        ("TCP_SYNCNT", 10, "before"),
        ("TCP_SYNCNT", 10, "after"),
    ] {
        scene.ends_on_time(&format!(", wait_poll, {when}=option({name}, {value})"));
        let read = format!("s.getsockopt(socket.IPPROTO_TCP, {name})");
        assert_eq!(scene.python.value(&read), value, "{name} {when}");
    }
    for (name, value, when) in [
        ("TCP_USER_TIMEOUT", 300_u64, "before"),
        ("TCP_USER_TIMEOUT", 300, "after"),
        ("TCP_SYNCNT", 1, "before"),
        ("TCP_SYNCNT", 1, "after"),
    ] {
        let what = format!(", wait_poll, {when}=option({name}, {value})");
        // The kernel looks at what is set later when it repeats the SYN, and at TCP_SYNCNT as well.
        let stricter = (name, when) == ("TCP_USER_TIMEOUT", "before");
        let longest = if stricter { value } else { VALUE_MS } + 300;
        let is_on_time = (0..TRIES).any(|_| {
            let answer = scene.python.value(&format!("dial({NOWHERE:?}{what})"));
            assert_eq!(answer[0], libc::ETIMEDOUT, "{what}: {answer}");
            eprintln!("{what}: {answer}");
            answer[1].as_u64().expect("a number") < longest
        });
        assert!(is_on_time, "{what}: never within {longest} ms");
        let read = format!("s.getsockopt(socket.IPPROTO_TCP, {name})");
        assert_eq!(scene.python.value(&read), value, "{what}");
    }
    assert_balanced(&scene.row("10.77.0.100:80"));
}

/// TCP Fast Open: the connect is part of the first send, with its data in the SYN or not.
#[test]
fn fast_open() {
    need!("python3");
    let mut scene = Scene::new("fast-open");
    scene.net.client.enter(|| {
        // Client, and without a cookie.
        fs::write("/proc/sys/net/ipv4/tcp_fastopen", "5").expect("write tcp_fastopen");
    });
    scene.python.run(
        "
def fast(deferred):
    s = socket.socket()
    begin = time.monotonic()
    try:
        if deferred:
            s.setsockopt(socket.IPPROTO_TCP, 30, 1)  # TCP_FASTOPEN_CONNECT
            s.connect(('10.77.0.100', 80))
            s.send(b'x')
        else:
            s.sendto(b'x', socket.MSG_FASTOPEN, ('10.77.0.100', 80))
        # With its data in the SYN, the send does not wait.
        s.recv(1)
        error = 0
    except OSError as failure:
        error = failure.errno
    return [error, round((time.monotonic() - begin) * 1000)]
",
    );
    for deferred in ["False", "True"] {
        let answer = scene.python.value(&format!("fast({deferred})"));
        assert_on_time(&answer, VALUE_MS, deferred);
    }
    let row = scene.row("10.77.0.100:80");
    assert_eq!(row["failures"]["connect_timeout"], 2, "{row:#}");
    assert_balanced(&row);
}

/// MPTCP is left alone: no timeout of ours.
#[test]
fn mptcp_is_left_alone() {
    need!("python3");
    let mut scene = Scene::new("mptcp");
    scene
        .python
        .run("IPPROTO_MPTCP = getattr(socket, 'IPPROTO_MPTCP', 262)");
    let made = scene
        .python
        .errno("(s := socket.socket(socket.AF_INET, socket.SOCK_STREAM, IPPROTO_MPTCP)) and 0");
    if made != 0 {
        skip!("the kernel has no MPTCP (CONFIG_MPTCP; errno {made})");
    }
    let limit = VALUE_MS as f64 * 2.0 / 1000.0;
    scene.python.value(&format!("s.settimeout({limit})"));
    scene.python.run(
        "
def ends():
    try:
        s.connect(('10.77.0.100', 80))
    except TimeoutError as error:
        return repr(error)
",
    );
    // Python's own, without an errno.
    assert_eq!(scene.python.value("ends()"), "TimeoutError('timed out')");
    scene.python.value("s.close()");
    let row = scene
        .agent
        .wait_row("10.77.0.100:80", "is quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["failures"]["connect_timeout"], 0, "{row:#}");
}
