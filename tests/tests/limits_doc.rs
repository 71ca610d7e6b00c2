//! What Backstop cannot do, as docs/LIMITS.md says it: each line is still true.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream, UdpSocket},
    os::unix::net::UnixListener,
    path::Path,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use tests::{
    agent::Agent,
    cgroup::{TestCgroup, v2_mount},
    dialer::{Dialer, How},
    foreign,
    interpreter::Interpreter,
    need,
    net::TestNet,
    server::Server,
    skip,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
/// The same for Python.
const ADDRESS: &str = r#"("10.77.0.2", 8080)"#;
const WITHOUT_REDIAL: &str = "[defaults.breaker]\nredial = false\n";
const SOON: Duration = tests::wait::LONGEST;

/// Two namespaces and a watched control group.
struct Place {
    net: TestNet,
    group: TestCgroup,
}

impl Place {
    fn new(label: &str) -> Self {
        Self {
            net: TestNet::new(),
            group: TestCgroup::new(label),
        }
    }

    fn dialer(&self) -> Dialer {
        Dialer::start(DIAL, &self.group, &self.net.client)
    }

    fn interpreter(&self) -> Interpreter {
        Interpreter::start(&self.group, &self.net.client)
    }

    /// Accepts so many connections on [`TO`] and hands each to `answer`.
    fn serve(&self, count: usize, answer: fn(TcpStream)) -> JoinHandle<()> {
        let listener = self
            .net
            .server
            .enter(|| TcpListener::bind(TO).expect("listen"));
        std::thread::spawn(move || {
            for _ in 0..count {
                answer(listener.accept().expect("a connection").0);
            }
        })
    }
}

/// Answers every byte with itself until the end.
fn echo(mut stream: TcpStream) {
    let mut byte = [0];
    while stream.read(&mut byte).is_ok_and(|count| count == 1) {
        if stream.write_all(&byte).is_err() {
            return;
        }
    }
}

fn trip(agent: &Agent) {
    agent.command(&["trip", DESTINATION]).good();
}

/// Expression for a TCP connect of a new socket.
fn connect() -> String {
    format!("socket.socket().connect({ADDRESS})")
}

// --- the page itself

/// Every test that the page names exists, every limit has one or says why not, and every test
/// here is on the page.
#[test]
fn the_page_and_its_tests_agree() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(top.join("../docs/LIMITS.md")).expect("docs/LIMITS.md");
    let named: Vec<(&str, &str)> = page
        .split('`')
        .skip(1)
        .step_by(2)
        .filter_map(|name| name.split_once("::"))
        .collect();
    for (file, test) in &named {
        let source = fs::read_to_string(top.join("tests").join(format!("{file}.rs")))
            .unwrap_or_else(|e| panic!("{file}::{test}: {e}"));
        let wanted = format!("#[test]\nfn {test}()");
        assert!(source.contains(&wanted), "{file}::{test} is no test");
    }
    let limits = page.split("\n- ").skip(1);
    for limit in limits.map(|limit| limit.split("\n\n").next().unwrap_or_default()) {
        let is_shown = limit.contains("::") || limit.contains("Not tested:");
        assert!(is_shown, "no test and no reason: {limit}");
    }
    let here = [
        ("limits_doc", include_str!("limits_doc.rs")),
        ("limits_after", include_str!("limits_after.rs")),
    ];
    for (file, source) in here {
        for test in source.split("#[test]\nfn ").skip(1) {
            let test = test.split('(').next().unwrap_or_default();
            let is_named = named.contains(&(file, test)) || test == "the_page_and_its_tests_agree";
            assert!(is_named, "{file}::{test} is not on the page");
        }
    }
}

// --- what is not seen

#[test]
fn udp_passes_an_open_breaker() {
    need!("python3");
    let place = Place::new("udp");
    let agent = Agent::start(&place.group, "");
    trip(&agent);
    let server = place
        .net
        .server
        .enter(|| UdpSocket::bind(TO).expect("bind"));
    server.set_read_timeout(Some(SOON)).expect("a timeout");
    let mut python = place.interpreter();
    python.value("(u := socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) and 0");
    python.value(&format!("u.connect({ADDRESS})"));
    let unconnected = "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)";
    let mut buffer = [0; 32];
    // One after the other: the order of two on their way is nobody's promise.
    for (send, expected) in [
        (r#"u.send(b"connected")"#.to_owned(), "connected"),
        (
            format!(r#"{unconnected}.sendto(b"sendto", {ADDRESS})"#),
            "sendto",
        ),
    ] {
        python.value(&send);
        let count = server.recv(&mut buffer).expect("a datagram");
        assert_eq!(&buffer[..count], expected.as_bytes());
    }
    assert_eq!(python.errno(&connect()), libc::ECONNREFUSED);
    assert_eq!(agent.row(DESTINATION)["rejected"]["breaker"], 1);
}

#[test]
fn unix_sockets_are_not_seen() {
    need!("python3");
    let place = Place::new("unix");
    let agent = Agent::start(&place.group, "");
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let mut python = place.interpreter();
    let connect = format!(
        "socket.socket(socket.AF_UNIX).connect({:?})",
        path.display().to_string()
    );
    assert_eq!(python.errno(&connect), libc::ENOENT);
    let _listener = UnixListener::bind(&path).expect("bind");
    assert_eq!(python.errno(&connect), 0);
    assert_eq!(agent.status()["destinations"], serde_json::json!([]));
}

#[test]
fn mptcp_passes_an_open_breaker() {
    need!("python3");
    let place = Place::new("mptcp");
    let agent = Agent::start(&place.group, "");
    let server = Server::start(&place.net.server, TO);
    trip(&agent);
    let mut python = place.interpreter();
    let made = python.errno("(m := socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)) and 0");
    if made != 0 {
        skip!("the kernel has no MPTCP (CONFIG_MPTCP; errno {made})");
    }
    assert_eq!(python.errno(&format!("m.connect({ADDRESS})")), 0);
    server.wait_accepts(1);
    assert_eq!(python.errno(&connect()), libc::ECONNREFUSED, "plain TCP");
    assert_eq!(agent.row(DESTINATION)["rejected"]["breaker"], 1);
}

/// Which programs run is settled when a socket is made; whose workload it is, at the connect.
#[test]
fn a_socket_belongs_to_the_group_it_was_made_in() {
    need!("python3");
    let place = Place::new("moved");
    let agent = Agent::start(&place.group, "");
    let mut python = Interpreter::start_outside(&place.net.client);
    python.value("(old := socket.socket()) and 0");
    python.move_to(place.group.path());
    let refused = libc::ECONNREFUSED;
    assert_eq!(python.errno(&format!("old.connect({ADDRESS})")), refused);
    assert_eq!(agent.status()["destinations"], serde_json::json!([]));

    python.value("(new := socket.socket()) and 0");
    python.move_to(v2_mount());
    assert_eq!(python.errno(&format!("new.connect({ADDRESS})")), refused);
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["attempts"], &row["workload"]),
        (&1.into(), &"/".into())
    );
}

#[test]
fn protected_destinations_are_counted_and_never_refused() {
    let place = Place::new("protected");
    let agent = Agent::start(&place.group, "");
    let mut dialer = place.dialer();
    let dns = TestNet::server4(53);
    for _ in 0..20 {
        assert_eq!(dialer.connect(dns).errno, libc::ECONNREFUSED);
    }
    let row = agent.row(&dns.to_string());
    assert_eq!(row["failures"]["refused"], 20, "{row:#}");
    assert_eq!(
        (&row["state"], &row["rejected"]["breaker"]),
        (&"closed".into(), &0.into())
    );
    assert_eq!(row["timeouts_ms"]["connect"], serde_json::Value::Null);
    let refused = agent.command(&["trip", &dns.to_string()]);
    assert_eq!(refused.code(), 1, "{refused}");
}

// --- what is not judged

#[test]
fn a_live_connection_outlives_the_opening() {
    need!("python3");
    let place = Place::new("live");
    let agent = Agent::start(&place.group, "");
    let server = place.serve(1, echo);
    let mut python = place.interpreter();
    python.value(&format!("(s := socket.create_connection({ADDRESS})) and 0"));
    trip(&agent);
    assert_eq!(python.errno(&connect()), libc::ECONNREFUSED);
    // Requests, retries, streams: whatever goes over a connection that lives is not seen.
    for _ in 0..10 {
        assert_eq!(
            python.value(r#"(s.sendall(b"x"), s.recv(1) == b"x")[1]"#),
            true
        );
    }
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["attempts"], &row["established"]),
        (&1.into(), &1.into()),
        "{row:#}"
    );
    assert_eq!(row["rejected"]["breaker"], 1, "{row:#}");
    python.value("s.close()");
    server.join().expect("the server");
}

#[test]
fn a_server_that_accepts_and_then_fails_looks_healthy() {
    need!("python3");
    let place = Place::new("accepts");
    let agent = Agent::start(&place.group, "");
    let server = place.serve(20, drop);
    let mut python = place.interpreter();
    for _ in 0..20 {
        let got = format!("socket.create_connection({ADDRESS}).recv(1) == b''");
        assert_eq!(python.value(&got), true);
    }
    server.join().expect("the server");
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["established"], &row["state"]),
        (&20.into(), &"closed".into())
    );
    assert_eq!(row["windows"]["connects"]["failures"], 0, "{row:#}");
}

/// One of two servers behind an address is dead: the living one is refused with it.
#[test]
fn a_virtual_address_is_one_destination() {
    need!("nft");
    let place = Place::new("virtual");
    let agent = Agent::start(&place.group, WITHOUT_REDIAL);
    place.net.client.nft(
        "table ip virtual {\n\
           chain output {\n\
             type nat hook output priority -100;\n\
             ip daddr 10.77.0.50 tcp dport 80 dnat to 10.77.0.2 : numgen inc mod 2 map { 0 : 8080, 1 : 8081 }\n\
           }\n\
         }\n",
    );
    let server = Server::start(&place.net.server, TO);
    let mut dialer = place.dialer();
    let to: SocketAddr = "10.77.0.50:80".parse().expect("an address");
    let mut refused = 0;
    for _ in 0..10 {
        refused += usize::from(dialer.connect(to).errno == libc::ECONNREFUSED);
    }
    assert_eq!(refused, 5);
    let row = agent.wait_state("10.77.0.50:80", "open");
    assert_eq!(row["reason"]["kind"], "failure_rate", "{row:#}");
    for _ in 0..4 {
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
    server.wait_accepts(5);
    assert_eq!(
        agent.rows(DESTINATION).len(),
        0,
        "what is behind it has no row"
    );
}

#[test]
fn a_link_local_address_has_one_row_for_all_interfaces() {
    need!("python3");
    let place = Place::new("link-local");
    let agent = Agent::start(&place.group, "");
    place
        .net
        .client
        .ip("link add name e0 type veth peer name e1\n\
         link set e0 up\n\
         link set e1 up\n\
         addr add fe80::c0/64 dev c0 nodad\n\
         addr add fe80::e0/64 dev e0 nodad\n");
    let mut python = place.interpreter();
    let mut begin = |interface: &str, bound: bool| {
        python.value("(s := socket.socket(socket.AF_INET6)) and 0");
        python.value("s.setblocking(False)");
        if bound {
            python.value(&format!("s.setsockopt(1, 25, b'{interface}')"));
        }
        let index = python.value(&format!("socket.if_nametoindex('{interface}')"));
        let connect = format!("s.connect(('fe80::99', 80, 0, {index}))");
        assert_eq!(python.errno(&connect), libc::EINPROGRESS);
        index
    };
    begin("c0", false);
    begin("e0", false);
    assert_eq!(agent.row("[fe80::99]:80")["attempts"], 2);
    let index = begin("c0", true);
    assert_eq!(agent.row(&format!("[fe80::99%{index}]:80"))["attempts"], 1);
}

#[test]
fn each_control_group_has_a_window_of_its_own() {
    let place = Place::new("windows");
    let agent = Agent::start(&place.group, WITHOUT_REDIAL);
    let jobs: Vec<TestCgroup> = (0..3)
        .map(|i| place.group.child(&format!("job-{i}")))
        .collect();
    for job in &jobs {
        let mut dialer = Dialer::start(DIAL, job, &place.net.client);
        for _ in 0..4 {
            assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
        }
    }
    let rows = agent.rows(DESTINATION);
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!(
            (&row["attempts"], &row["state"]),
            (&4.into(), &"closed".into())
        );
    }
}

#[test]
fn a_name_that_nobody_was_told_matches_nothing() {
    let place = Place::new("names");
    let config = "[[policy]]\nname = \"db\"\ndestinations = [\"*.internal\"]\n";
    let agent = Agent::start(&place.group, config);
    assert_eq!(place.dialer().connect(TO).errno, libc::ECONNREFUSED);
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["policy"], &row["name"]),
        (&"default".into(), &serde_json::Value::Null)
    );
    for command in ["status", "explain"] {
        let refused = agent.command(&[command, "db.internal:8080"]);
        assert_eq!(refused.code(), 1, "{refused}");
    }
}

// --- what a program can notice

#[test]
fn a_refusal_comes_from_connect_itself() {
    need!("python3");
    let place = Place::new("at-once");
    let agent = Agent::start(&place.group, "");
    let mut python = place.interpreter();
    let mut nonblocking = || {
        python.value("(s := socket.socket()) and 0");
        python.value("s.setblocking(False)");
        python.errno(&format!("s.connect({ADDRESS})"))
    };
    assert_eq!(nonblocking(), libc::EINPROGRESS, "the server's own refusal");
    trip(&agent);
    assert_eq!(nonblocking(), libc::ECONNREFUSED);
}

#[test]
fn a_program_that_runs_later_may_change_the_errno() {
    let place = Place::new("foreign");
    let inner = place.group.child("inner");
    let agent = Agent::start(&inner, "");
    trip(&agent);
    let mut dialer = Dialer::start(DIAL, &inner, &place.net.client);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    foreign::rename_refusals(&place.group, libc::EACCES);
    assert_eq!(dialer.connect(TO).errno, libc::EACCES);
    assert_eq!(agent.row(DESTINATION)["rejected"]["breaker"], 2);
}

#[test]
fn a_redial_is_a_bare_connect_that_nobody_counts() {
    let place = Place::new("redial");
    let agent = Agent::start(&place.group, "");
    // Even inside the watched group the agent's connects are nobody's.
    fs::write(
        place.group.path().join("cgroup.procs"),
        agent.pid().to_string(),
    )
    .expect("move");
    let mut dialer = place.dialer();
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    let server = place.serve(1, |mut stream| {
        let mut rest = Vec::new();
        assert_eq!(stream.read_to_end(&mut rest).expect("an end"), 0);
    });
    let row = agent.wait_state(DESTINATION, "half_open");
    server.join().expect("a connection without a byte");
    assert_eq!(
        (&row["attempts"], &row["established"]),
        (&5.into(), &0.into()),
        "{row:#}"
    );
}

/// It touches no socket, so it learns of a timeout only when the kernel repeats the SYN.
#[test]
fn observe_mode_notices_a_timeout_late() {
    let place = Place::new("observe");
    let config = "mode = \"observe\"\n[defaults.timeouts]\nconnect = \"100ms\"\n";
    let agent = Agent::start(&place.group, config);
    let mut dialer = place.dialer();
    let blackhole = SocketAddr::new(TestNet::blackhole4(0), 80);
    let began = Instant::now();
    dialer.open(blackhole, 1, How::default());
    agent.wait_row(&blackhole.to_string(), "the timeout", |row| {
        row["would_timeout"] == 1
    });
    let took = began.elapsed();
    assert!(
        took >= Duration::from_millis(900),
        "{took:?}: the first repeat is after 1 s"
    );
}
