//! Connections that exist when the agent starts are followed from then on; what they did before is
//! not guessed.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use rustix::process::Signal;
use serde_json::Value;
use tests::{
    agent::{Agent, AgentOptions},
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    nginx::Nginx,
    process::Program,
    server::Server,
    skip,
    talk::{CONNECT, DESTINATION, TO, echo, read_byte, wait_end},
    wait,
};

/// For what comes by itself, on a busy machine.
const SOON: Duration = Duration::from_secs(60);

const SERVER: &str = "listen 10.77.0.2:8080 backlog=2048;\n\
     keepalive_requests 1000000;\n\
     location / { return 200 \"hello\"; }\n\
     location /503 { return 503; }\n";

/// A client and its control group, before any agent.
struct Before {
    net: TestNet,
    group: TestCgroup,
    python: Interpreter,
}

impl Before {
    fn new(label: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new(label);
        let python = Interpreter::start(&group, &net.client);
        Self { net, group, python }
    }
}

#[track_caller]
fn counted(row: &Value, wanted: &[(&str, u64)]) {
    for (key, count) in wanted {
        assert_eq!(row[*key], *count, "{key} in {row:#}");
    }
}

/// Nothing that is counted since the agent's start, but answers.
#[track_caller]
fn answers(agent: &Agent, destination: &str, count: u64) -> Value {
    let row = agent.wait_row(destination, "its answers", |row| {
        row["responses"] == count && row["in_flight"] == 0
    });
    counted(&row, &[("attempts", 0), ("established", 0), ("stale", 0)]);
    counted(&row, &[("abandoned", 0), ("local", 0)]);
    assert_eq!(row["connect_latency_us"]["count"], 0, "{row:#}");
    assert_eq!(row["response_latency_us"]["count"], count, "{row:#}");
    let failures = row["failures"].as_object().expect("an object");
    let status = row["failures"]["status"].as_u64();
    let sum: u64 = failures.values().filter_map(Value::as_u64).sum();
    assert_eq!(Some(sum), status, "{row:#}");
    row
}

#[test]
fn a_keep_alive_client_is_followed_over_starts_kills_and_restarts() {
    need!("nginx");
    let mut before = Before::new("adopt");
    let nginx = Nginx::start(&before.net.server, TO, SERVER);
    before.python.run(
        "import http.client\n\
         c = http.client.HTTPConnection('10.77.0.2', 8080)\n\
         def get(path, count):\n\
         \x20   for _ in range(count):\n\
         \x20       c.request('GET', path)\n\
         \x20       assert c.getresponse().read()\n",
    );
    before.python.value("get('/', 3)");
    let agent = AgentOptions::new(&before.group).start();
    before.python.value("get('/', 100)");
    answers(&agent, DESTINATION, 100);
    before.python.value("get('/503', 2)");
    let row = answers(&agent, DESTINATION, 102);
    assert_eq!(row["failures"]["status"], 2, "{row:#}");
    let home = agent.home().clone();
    agent.kill();
    before.python.value("get('/', 5)");
    let again = AgentOptions::new(&before.group).home(&home).start();
    before.python.value("get('/', 50)");
    answers(&again, DESTINATION, 50);
    again.stop();
    before.python.value("get('/', 5)");
    let again = AgentOptions::new(&before.group).home(&home).start();
    before.python.value("get('/', 7)");
    answers(&again, DESTINATION, 7);
    drop(nginx);
}

#[test]
fn a_redis_client_is_followed() {
    need!("redis-server");
    let mut before = Before::new("adopt");
    let directory = tempfile::tempdir().expect("a directory");
    let server = Program::new("redis-server")
        .args(["--bind", "10.77.0.2", "--port", "8080", "--save", ""])
        .args(["--protected-mode", "no", "--dir"])
        .arg(directory.path())
        .in_netns(&before.net.server)
        .spawn();
    before.net.server.enter(|| {
        wait::until("redis to listen", SOON, || TcpStream::connect(TO).ok());
    });
    before.python.run(
        "def ping(count):\n\
         \x20   for _ in range(count):\n\
         \x20       s.sendall(b'*1\\r\\n$4\\r\\nPING\\r\\n')\n\
         \x20       assert s.recv(99) == b'+PONG\\r\\n'\n",
    );
    before.python.value(CONNECT);
    before.python.value("ping(3)");
    let agent = AgentOptions::new(&before.group).start();
    before.python.value("ping(20)");
    answers(&agent, DESTINATION, 20);
    // It is killed while an answer is owed.
    before
        .python
        .value("s.sendall(b'*3\\r\\n$5\\r\\nBLPOP\\r\\n$1\\r\\nq\\r\\n$1\\r\\n0\\r\\n')");
    agent.wait_row(DESTINATION, "an answer owed", |row| row["in_flight"] == 1);
    server.signal(Signal::KILL);
    let row = agent.wait_row(DESTINATION, "its end", |row| row["in_flight"] == 0);
    let failures = &row["failures"];
    let seen =
        failures["closed_early"].as_u64().unwrap_or(0) + failures["reset"].as_u64().unwrap_or(0);
    assert_eq!(seen, 1, "{row:#}");
    assert_eq!(row["windows"]["exchanges"]["failures"], 1, "{row:#}");
}

/// Another agent's connection, of any protocol, that was idle: known by what the kernel knows.
#[test]
fn an_idle_connection_of_an_unknown_protocol_is_followed_from_its_next_request() {
    let mut before = Before::new("adopt");
    let _server = Server::with(&before.net.server, TO, |mut stream| {
        // The answer comes a while after the request, so that ticks tell them apart.
        while read_byte(&mut stream) {
            std::thread::sleep(Duration::from_millis(30));
            let _ = stream.write_all(b"y");
        }
    });
    let ask = "s.sendall(b'x') or len(s.recv(9))";
    before.python.value(CONNECT);
    assert_eq!(before.python.value(ask), 1);
    let agent = AgentOptions::new(&before.group).start();
    for _ in 0..5 {
        assert_eq!(before.python.value(ask), 1);
    }
    answers(&agent, DESTINATION, 5);
    // Closed by its program: nothing is owed, nothing is counted.
    before.python.value("s.close()");
    answers(&agent, DESTINATION, 5);
}

/// The server holds back its answer until it is told.
#[test]
fn a_request_that_is_under_way_is_not_judged() {
    let mut before = Before::new("adopt");
    let (go, going) = mpsc::channel::<()>();
    let going = Arc::new(Mutex::new(going));
    let _server = Server::with(&before.net.server, TO, move |mut stream| {
        while read_byte(&mut stream) {
            let _ = going.lock().expect("one connection").recv();
            let _ = stream.write_all(b"y");
        }
    });
    before.python.value(CONNECT);
    before.python.value("s.sendall(b'x')");
    let agent = AgentOptions::new(&before.group).start();
    answers(&agent, DESTINATION, 0);
    go.send(()).expect("the server");
    assert_eq!(before.python.value("len(s.recv(9))"), 1);
    answers(&agent, DESTINATION, 0);
    // From here on it is known what is a request.
    go.send(()).expect("the server");
    assert_eq!(before.python.value("s.sendall(b'x') or len(s.recv(9))"), 1);
    answers(&agent, DESTINATION, 1);
    before.python.value("s.sendall(b'x')");
    agent.wait_row(DESTINATION, "an answer owed", |row| row["in_flight"] == 1);
}

#[test]
fn an_upload_that_is_under_way_begins_nothing() {
    let mut before = Before::new("adopt");
    let _server = Server::with(&before.net.server, TO, |mut stream| {
        let mut all = vec![0; 8 << 20];
        let _ = stream.read_exact(&mut all);
        let _ = stream.write_all(b"y");
        echo(stream);
    });
    before.python.value(CONNECT);
    before.python.value("s.sendall(b'u' * (4 << 20))");
    let agent = AgentOptions::new(&before.group).start();
    before.python.value("s.sendall(b'u' * (2 << 20))");
    answers(&agent, DESTINATION, 0);
    before.python.value("s.sendall(b'u' * (2 << 20))");
    assert_eq!(before.python.value("len(s.recv(9))"), 1);
    answers(&agent, DESTINATION, 0);
    assert_eq!(before.python.value("s.sendall(b'x') or len(s.recv(9))"), 1);
    answers(&agent, DESTINATION, 1);
}

/// The server is in the watched group, its client is not.
#[test]
fn accepted_sockets_are_not_adopted() {
    need!("nginx");
    let net = TestNet::new();
    let group = TestCgroup::new("adopt");
    let mut server = Interpreter::start(&group, &net.server);
    // One whose listener lives, one whose listener is closed, one with a backlog of 0.
    server.run(
        "held = []\n\
         def listen(port, backlog):\n\
         \x20   l = socket.socket()\n\
         \x20   l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n\
         \x20   l.bind(('10.77.0.2', port))\n\
         \x20   l.listen(backlog)\n\
         \x20   return l\n\
         ls = [listen(8080, 5), listen(8081, 5), listen(8082, 0)]\n",
    );
    let nginx = Nginx::start_in(&group, &net.server, TestNet::server4(8083), SERVER_8083);
    let mut client = Interpreter::start_outside(&net.client);
    client.run(
        "cs = [socket.create_connection(('10.77.0.2', p)) for p in (8080, 8081, 8082)]\n\
         import http.client\n\
         h = http.client.HTTPConnection('10.77.0.2', 8083)\n\
         def get():\n\
         \x20   h.request('GET', '/')\n\
         \x20   assert h.getresponse().read()\n\
         get()\n",
    );
    server.run("ss = [l.accept()[0] for l in ls]\nls[1].close()\n");
    let agent = AgentOptions::new(&group).start();
    client.run("for c in cs: c.sendall(b'x')\nget()\n");
    server.run("for s in ss: s.recv(9), s.sendall(b'y')\n");
    client.run("for c in cs: assert c.recv(9) == b'y'\nget()\n");
    assert_eq!(agent.status()["destinations"], Value::Array(Vec::new()));
    drop(nginx);
}

/// A listener on the port that a client has, at another address: its bucket is the client's.
#[test]
fn an_accepted_socket_on_a_clients_port_is_not_adopted() {
    let net = TestNet::new();
    let group = TestCgroup::new("adopt");
    let to = SocketAddr::new(IpAddr::from([10, 77, 0, 1]), 9000);
    let _server = Server::with(&net.client, to, echo);
    let mut both = Interpreter::start(&group, &net.server);
    both.run(
        "c = socket.create_connection(('10.77.0.1', 9000))\n\
         port = c.getsockname()[1]\n\
         l = socket.socket()\n\
         l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n\
         l.bind(('127.0.0.1', port))\n\
         l.listen(5)\n",
    );
    let port = both.value("port");
    let mut client = Interpreter::start_outside(&net.server);
    client.run(&format!(
        "s = socket.create_connection(('127.0.0.1', {port}))\n"
    ));
    both.run("a = l.accept()[0]\n");
    let agent = AgentOptions::new(&group).start();
    client.run("s.sendall(b'x')\n");
    both.run("a.recv(9) and a.sendall(b'GET /')\nc.sendall(b'GET /')\nc.recv(9)\n");
    let status = agent.status();
    let rows = status["destinations"].as_array().expect("rows");
    // Of the client it depends on the kernel whether it can still be told.
    let is_clients = |row: &Value| row["destination"] == "10.77.0.1:9000";
    assert!(rows.iter().all(is_clients), "{status:#}");
}

const SERVER_8083: &str = "listen 10.77.0.2:8083 backlog=2048;\n\
     location / { return 200 \"hello\"; }\n";

/// IPv6, and IPv4 in its mapped form; in a namespace of their own, as containers are.
#[test]
fn every_family_and_namespace() {
    let mut before = Before::new("adopt");
    let other = TestNet::new();
    let to6 = SocketAddr::new(TestNet::SERVER6, 8080);
    let _servers = [
        Server::with(&before.net.server, TO, echo),
        Server::with(&before.net.server, to6, echo),
        Server::with(&other.server, TO, echo),
    ];
    let http = "def get(s):\n\
         \x20   s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')\n\
         \x20   got = 0\n\
         \x20   while got < 18: got += len(s.recv(99))\n";
    let mut second = Interpreter::start(&before.group, &other.client);
    second.run(http);
    second.run("s = socket.create_connection(('10.77.0.2', 8080))\n");
    before.python.run(http);
    before.python.run(
        "six = socket.create_connection(('fd77::2', 8080))\n\
         mapped = socket.socket(socket.AF_INET6)\n\
         mapped.connect(('::ffff:10.77.0.2', 8080))\n",
    );
    let agent = AgentOptions::new(&before.group).start();
    before.python.run("get(six)\nget(mapped)\n");
    second.run("get(s)\n");
    let row = agent.wait_row("[fd77::2]:8080", "an answer", |row| row["responses"] == 1);
    assert_eq!(row["netns"], before.net.client.inode(), "{row:#}");
    wait::until("both rows", SOON, || {
        let rows = agent.rows(DESTINATION);
        let answered = rows.iter().filter(|row| row["responses"] == 1);
        (rows.len() == 2 && answered.count() == 2).then_some(())
    });
    let mut inodes: Vec<_> = agent
        .rows(DESTINATION)
        .iter()
        .map(|row| row["netns"].as_u64().expect("an inode"))
        .collect();
    inodes.sort_unstable();
    let mut wanted = [before.net.client.inode(), other.client.inode()];
    wanted.sort_unstable();
    assert_eq!(inodes, wanted);
}

/// A policy that names the workload holds for an adopted connection's row.
#[test]
fn rows_of_adopted_connections_have_their_workloads_policy() {
    let mut before = Before::new("adopt");
    let _server = Server::with(&before.net.server, TO, wait_end);
    before.python.value(CONNECT);
    let config = format!(
        "[[policy]]\nname = \"ours\"\nworkloads = [\"{}\"]\n",
        before.group.workload()
    );
    let agent = AgentOptions::new(&before.group).config(&config).start();
    let row = agent.wait_row(DESTINATION, "its policy", |row| row["policy"] == "ours");
    assert_eq!(row["workload"], before.group.workload(), "{row:#}");
}

#[test]
fn what_is_protected_is_counted() {
    let mut before = Before::new("adopt");
    let _server = Server::with(&before.net.server, TO, echo);
    before.python.value(CONNECT);
    let config = format!("[protected]\ndestinations = [\"{DESTINATION}\"]\n");
    let agent = AgentOptions::new(&before.group).config(&config).start();
    before.python.run("s.sendall(b'GET /')\ns.recv(9)\n");
    let row = answers(&agent, DESTINATION, 1);
    assert_eq!(row["timeouts_ms"]["connect"], Value::Null, "{row:#}");
}

#[test]
fn no_row_is_made_beyond_the_table() {
    let mut before = Before::new("adopt");
    let any = SocketAddr::new(TestNet::SERVER4, 0);
    let servers: Vec<_> = (0..24)
        .map(|_| Server::with(&before.net.server, any, echo))
        .collect();
    let ports: Vec<_> = servers.iter().map(|s| s.address().port()).collect();
    before.python.run(&format!(
        "ss = [socket.create_connection(('10.77.0.2', p)) for p in {ports:?}]\n"
    ));
    let config = "[agent]\nmax_destinations = 16\n";
    let agent = AgentOptions::new(&before.group).config(config).start();
    before.python.run(
        "for s in ss:\n\
         \x20   s.sendall(b'GET /')\n\
         \x20   got = 0\n\
         \x20   while got < 5: got += len(s.recv(9))\n",
    );
    let total = |agent: &Agent| -> u64 {
        let status = agent.status();
        let rows = status["destinations"].as_array().expect("rows");
        assert!(rows.len() <= 17, "{} rows", rows.len());
        rows.iter()
            .filter_map(|row| row["responses"].as_u64())
            .sum()
    };
    wait::until("the rows' answers", SOON, || {
        (total(&agent) > 0).then_some(())
    });
    before.python.run("for s in ss: s.close()\n");
    wait::until("quiet", SOON, || {
        let status = agent.status();
        let rows = status["destinations"].as_array().expect("rows");
        rows.iter().all(|row| row["in_flight"] == 0).then_some(())
    });
}

/// Threads that never stop asking, while agents come and go.
#[test]
fn restarts_under_load_leave_nothing_in_flight_and_count_nothing_twice() {
    need!("nginx");
    let mut before = Before::new("adopt");
    let _nginx = Nginx::start(&before.net.server, TO, SERVER);
    before.python.run(
        "import http.client, threading\n\
         stop, asked = False, [0] * 8\n\
         def work(i):\n\
         \x20   c = http.client.HTTPConnection('10.77.0.2', 8080)\n\
         \x20   while not stop:\n\
         \x20       c.request('GET', '/')\n\
         \x20       assert c.getresponse().read()\n\
         \x20       asked[i] += 1\n\
         \x20   c.close()\n\
         ts = [threading.Thread(target=work, args=(i,)) for i in range(8)]\n\
         [t.start() for t in ts]\n",
    );
    let asked =
        |python: &mut Interpreter| -> u64 { python.value("sum(asked)").as_u64().expect("a count") };
    let options = AgentOptions::new(&before.group);
    for round in 0..5 {
        let at_begin = asked(&mut before.python);
        let agent = options.start();
        let at_ready = asked(&mut before.python);
        agent.wait_row(DESTINATION, "many answers", |row| {
            row["responses"].as_u64().is_some_and(|count| count > 500)
        });
        let low = asked(&mut before.python);
        let row = agent.row(DESTINATION);
        let high = asked(&mut before.python);
        let seen = row["responses"].as_u64().expect("a count");
        // Each thread may be within one exchange at either end.
        assert!(seen + 8 >= low - at_ready, "{seen} of {}", low - at_ready);
        assert!(
            seen <= high - at_begin + 16,
            "{seen} of {}",
            high - at_begin
        );
        counted(&row, &[("attempts", 0), ("stale", 0), ("abandoned", 0)]);
        if round % 2 == 0 {
            agent.kill();
        } else {
            agent.stop();
        }
    }
    let agent = options.start();
    before.python.run("stop = True\n[t.join() for t in ts]\n");
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    let failures = row["failures"].as_object().expect("an object");
    assert!(failures.values().all(|count| *count == 0), "{row:#}");
}

/// Such a client looks like an accepted socket (docs/LIMITS.md).
#[test]
fn a_client_that_has_chosen_its_port_is_left_alone() {
    let mut before = Before::new("adopt");
    let _server = Server::with(&before.net.server, TO, echo);
    before.python.run(
        "s = socket.socket()\n\
         s.bind(('10.77.0.1', 0))\n\
         s.connect(('10.77.0.2', 8080))\n",
    );
    let agent = AgentOptions::new(&before.group).start();
    assert_eq!(before.python.value("s.sendall(b'x') or len(s.recv(9))"), 1);
    assert_eq!(agent.status()["destinations"], Value::Array(Vec::new()));
}

/// The process is found by its descriptors, and timeouts hold for the connection.
#[test]
fn an_adopted_connection_has_a_process_and_timeouts() {
    let mut before = Before::new("adopt");
    let _server = Server::with(&before.net.server, TO, wait_end);
    before.python.value(CONNECT);
    let config = "[defaults.timeouts]\nread = \"300ms\"\n";
    let agent = AgentOptions::new(&before.group).config(config).start();
    let mut events = agent.follow(&[]);
    before.python.value("s.sendall(b'GET /')");
    assert_eq!(before.python.errno("s.recv(9)"), libc::ECONNABORTED);
    let event = events.wait("a timeout", |event| event["kind"] == "timeout");
    assert_eq!(event["which"], "read", "{event:#}");
    assert_eq!(
        event["pid"],
        before.python.value("os.getpid()"),
        "{event:#}"
    );
    let comm = before
        .python
        .value("open('/proc/self/comm').read().strip()");
    assert_eq!(event["comm"], comm, "{event:#}");
    let row = agent.wait_row(DESTINATION, "its end", |row| {
        row["in_flight"] == 0 && row["failures"]["read_timeout"] != 0
    });
    assert_eq!(row["failures"]["read_timeout"], 1, "{row:#}");
}

/// Sends from memory that is not there, until somebody serves the fault (userfaultfd(2)): nobody.
const LOCKED: &str = r#"
import ctypes, fcntl, platform, struct, threading
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 323, "aarch64": 282}[platform.machine()]
uffd = libc.syscall(number, os.O_CLOEXEC)
locked, why = uffd >= 0, os.strerror(ctypes.get_errno())
if locked:
    fcntl.ioctl(uffd, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))  # UFFDIO_API
    libc.mmap.restype = ctypes.c_void_p
    PRIVATE_ANONYMOUS = 0x22
    memory = libc.mmap(None, ctypes.c_size_t(4096), 3, PRIVATE_ANONYMOUS, -1, ctypes.c_long(0))
    fcntl.ioctl(uffd, 0xC020AA00, struct.pack("QQQQ", memory, 4096, 1, 0))  # UFFDIO_REGISTER
    send = lambda: libc.send(s.fileno(), ctypes.c_void_p(memory), ctypes.c_size_t(4096), 0)
    threading.Thread(target=send, daemon=True).start()
    os.read(uffd, 32)  # the fault
"#;

/// A program that has its socket locked does not hold up the start.
#[test]
fn a_locked_socket_does_not_hold_up_the_start() {
    let mut before = Before::new("adopt");
    let _server = Server::with(&before.net.server, TO, wait_end);
    before.python.value(CONNECT);
    // A send from memory that nobody serves (userfaultfd) keeps the socket locked.
    before.python.run(LOCKED);
    if before.python.value("locked") != true {
        skip!(
            "userfaultfd is not to be had: {}",
            before.python.value("why")
        );
    }
    let agent = AgentOptions::new(&before.group).start();
    // What it says is read beside the line that it is ready.
    wait::until("what it says of that", SOON, || {
        let log = agent.log();
        log.contains("keeps one of its sockets locked")
            .then_some(())
    });
    before.python.kill();
}
