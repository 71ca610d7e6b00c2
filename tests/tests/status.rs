//! Answers in the clear that say that the server failed, and those that only look so.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    nginx::Nginx,
    outcome::{expect, judged},
    process::Program,
    server::{Server, read_head},
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
/// A new connection, kept as `s`.
const CONNECT: &str = "(s := socket.create_connection(('10.77.0.2', 8080))) and 0";
/// Counts and judges, never opens.
const NEVER_OPENS: &str = r#"
[defaults.breaker]
failure_rate = "off"
consecutive_failures = 0
window_age = "30m"
"#;

struct Place {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
}

impl Place {
    fn new(label: &str, config: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, config);
        Self { net, group, agent }
    }

    fn python(&self) -> Interpreter {
        Interpreter::start(&self.group, &self.net.client)
    }

    fn curl(&self, options: &[&str], url: &str) -> String {
        let program = Program::new("curl").args(["-q", "-sS"]).args(options);
        let program = program.in_cgroup(&self.group).in_netns(&self.net.client);
        program.arg(url).run().good()
    }
}

/// As Python writes bytes.
fn literal(bytes: &[u8]) -> String {
    format!("bytes({bytes:?})")
}

/// What is asked, what is answered, whether that is a failure.
const TABLE: &[(&[u8], &[u8], bool)] = &[
    (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", false),
    (
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 301 Moved\r\n\r\n",
        false,
    ),
    (
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        false,
    ),
    (
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 429 Too Many\r\n\r\n",
        false,
    ),
    (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 500 Oh\r\n\r\n", true),
    (
        b"POST / HTTP/1.0\r\n\r\n",
        b"HTTP/1.0 502 Bad\r\n\r\n",
        true,
    ),
    (b"HEAD / HTTP/1.1\r\n\r\n", b"HTTP/1.1 503 No\r\n\r\n", true),
    (b"DELETE / HTTP/1.1\r\n\r\n", b"HTTP/1.1 599 \r\n\r\n", true),
    // A status line in a segment of its own.
    (b"GET / HTTP/1.1\r\n\r\n", b"HTTP/1.1 503\r\n", true),
    (
        b"GET / HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        false,
    ),
    // It speaks of somebody else.
    (
        b"CONNECT a:443 HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 503 No\r\n\r\n",
        false,
    ),
    // Redis
    (b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n", false),
    (
        b"*1\r\n$4\r\nPING\r\n",
        b"-LOADING Redis is loading the dataset in memory\r\n",
        true,
    ),
    (
        b"*1\r\n$4\r\nPING\r\n",
        b"-BUSY Redis is busy running a script.\r\n",
        true,
    ),
    (
        b"*1\r\n$4\r\nPING\r\n",
        b"-MASTERDOWN Link with MASTER is down\r\n",
        true,
    ),
    (
        b"*1\r\n$4\r\nPING\r\n",
        b"-CLUSTERDOWN The cluster is down\r\n",
        true,
    ),
    (
        b"*1\r\n$4\r\nNONE\r\n",
        b"-ERR unknown command 'NONE'\r\n",
        false,
    ),
    (
        b"*1\r\n$4\r\nPING\r\n",
        b"-NOAUTH Authentication required.\r\n",
        false,
    ),
    (
        b"*1\r\n$6\r\nXGROUP\r\n",
        b"-BUSYGROUP Consumer Group name already exists\r\n",
        false,
    ),
    (
        b"*1\r\n$7\r\nRESTORE\r\n",
        b"-BUSYKEY Target key name already exists.\r\n",
        false,
    ),
    // PostgreSQL: a start-up packet; starting up, too many connections, wrong password, no such
    // database.
    (
        b"\0\0\0\x0c\0\x03\0\0x\0\0\0",
        b"E\0\0\0\x40SFATAL\0VFATAL\0C57P03\0M",
        true,
    ),
    (
        b"\0\0\0\x0c\0\x03\0\0x\0\0\0",
        b"E\0\0\0\x40SFATAL\0VFATAL\0C53300\0M",
        true,
    ),
    (
        b"\0\0\0\x0c\0\x03\0\0x\0\0\0",
        b"E\0\0\0\x40SFATAL\0VFATAL\0C28P01\0M",
        false,
    ),
    (
        b"\0\0\0\x0c\0\x03\0\0x\0\0\0",
        b"E\0\0\0\x40SFATAL\0VFATAL\0C3D000\0M",
        false,
    ),
    (
        b"Q\0\0\0\x0dselect x\0",
        b"E\0\0\0\x40SERROR\0VERROR\0C42703\0M",
        false,
    ),
    // Unknown: only timed.
    (b"hello there, server", b"HTTP/1.1 503 No\r\n\r\n", false),
];

#[test]
fn first_bytes_tell_the_status() {
    need!("python3");
    let place = Place::new("status", NEVER_OPENS);
    let mut python = place.python();
    let mut wrong = Vec::new();
    for (i, (request, answer, is_failure)) in (0..).zip(TABLE) {
        let to = TestNet::server4(9000 + i);
        let _server = Server::with(&place.net.server, to, |mut stream| {
            let mut buffer = [0; 128];
            let _ = stream.read(&mut buffer);
            let _ = stream.write_all(TABLE[usize::from(stream_port(&stream)) - 9000].1);
            let _ = stream.read(&mut buffer);
        });
        python.value(&format!(
            "(s := socket.create_connection(('10.77.0.2', {}))) and 0",
            to.port()
        ));
        python.value(&format!("s.sendall({})", literal(request)));
        assert_eq!(python.value("len(s.recv(99))"), answer.len());
        python.value("s.close()");
        let row = place
            .agent
            .wait_row(&to.to_string(), "quiet", |row| row["in_flight"] == 0);
        assert_eq!(row["responses"], 1, "{row:#}");
        if row["failures"]["status"] != u64::from(*is_failure) {
            let answer = String::from_utf8_lossy(answer).into_owned();
            wrong.push((String::from_utf8_lossy(request), answer, *is_failure));
        }
        if *is_failure == (row["failures"]["status"] == 1) {
            assert_eq!(judged(&row), (1, u64::from(*is_failure)), "{row:#}");
        }
    }
    assert!(wrong.is_empty(), "judged the wrong way: {wrong:#?}");
}

fn stream_port(stream: &TcpStream) -> u16 {
    stream.local_addr().expect("an address").port()
}

/// A policy that takes no status for a failure.
#[test]
fn the_policy_says_which_statuses_count() {
    need!("curl");
    let config = "[defaults.breaker]\nfailure_status = []\n";
    let place = Place::new("no-status", config);
    let _server = Server::with(&place.net.server, TO, |mut stream| {
        read_head(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n");
    });
    for _ in 0..10 {
        place.curl(&[], &format!("http://{TO}/"));
    }
    let row = place.agent.wait_row(DESTINATION, "quiet", |row| {
        row["in_flight"] == 0 && row["responses"] == 10
    });
    assert_eq!(judged(&row), (10, 0), "{row:#}");
    assert_eq!(row["state"], "closed", "{row:#}");
}

#[test]
fn the_hundredth_answer_of_a_connection_counts() {
    need!("python3");
    let place = Place::new("hundredth", NEVER_OPENS);
    let _server = Server::with(&place.net.server, TO, |mut stream| {
        for i in 1..=100 {
            if read_head(&mut stream).is_none() {
                return;
            }
            let status = if i == 100 { "503 No" } else { "200 OK" };
            // One write, one segment.
            let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes());
        }
        let _ = stream.read(&mut [0]);
    });
    let mut python = place.python();
    python.value(CONNECT);
    python.value(
        "[(s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n'), s.recv(99)) for _ in range(100)] and 0",
    );
    python.value("s.close()");
    let row = expect(
        &place.agent,
        DESTINATION,
        &[("responses", 100), ("status", 1)],
    );
    // The window has the last 20.
    assert_eq!(judged(&row), (20, 1), "{row:#}");
    assert_eq!(row["established"], 1, "{row:#}");
}

/// A status line in a body, at the beginning of a segment.
#[test]
fn a_body_is_not_a_status() {
    need!("curl");
    let place = Place::new("body", NEVER_OPENS);
    let body = "HTTP/1.1 503 Service Unavailable\r\n\r\n";
    let _server = Server::with(&place.net.server, TO, move |mut stream| {
        read_head(&mut stream);
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", body.len());
        let _ = stream.write_all(head.as_bytes());
        // For a segment of its own.
        std::thread::sleep(Duration::from_millis(50));
        let _ = stream.write_all(body.as_bytes());
        let _ = stream.read(&mut [0]);
    });
    assert_eq!(place.curl(&[], &format!("http://{TO}/")), body);
    let row = expect(&place.agent, DESTINATION, &[("responses", 1)]);
    assert_eq!(judged(&row), (1, 0), "{row:#}");
}

// --- HTTP/2

const H2: &str = "listen 10.77.0.2:8080 http2;\nlocation / { return 503; }\n";

/// Many streams on one connection: only timed.
#[test]
fn http2_is_not_judged_by_status() {
    need!("nginx", "curl");
    let place = Place::new("http2", "");
    let _nginx = Nginx::start(&place.net.server, TO, H2);
    for _ in 0..10 {
        let options = [
            "--http2-prior-knowledge",
            "-w",
            "%{http_version} %{http_code}",
            "-o",
            "/dev/null",
        ];
        let said = place.curl(&options, &format!("http://{TO}/"));
        assert_eq!(said, "2 503");
    }
    let row = place
        .agent
        .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert!(row["responses"].as_u64() >= Some(10), "{row:#}");
    assert_eq!(judged(&row).1, 0, "{row:#}");
    assert_eq!(row["state"], "closed", "{row:#}");
}

#[test]
fn h2load_leaves_nothing_in_flight() {
    need!("nginx", "h2load");
    let place = Place::new("h2load", "");
    let _nginx = Nginx::start(&place.net.server, TO, H2);
    let args = ["-n", "5000", "-c", "20", "-m", "10"];
    let program = Program::new("h2load")
        .args(args)
        .arg(format!("http://{TO}/"));
    let program = program.in_cgroup(&place.group).in_netns(&place.net.client);
    program.run().good();
    let row = place
        .agent
        .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert!(row["responses"].as_u64() >= Some(20), "{row:#}");
    assert_eq!(judged(&row).1, 0, "{row:#}");
}

/// A settings acknowledgement or a window update asks for nothing: an idle connection that the
/// program closes later was not given up.
#[test]
fn an_idle_http2_connection_owes_nothing() {
    need!("nginx", "python3");
    let place = Place::new("http2-idle", "");
    let _nginx = Nginx::start(&place.net.server, TO, H2);
    let mut python = place.python();
    python.value(CONNECT);
    // Preface, empty SETTINGS, HEADERS (GET / http, host by the static table) on stream 1.
    let headers = r"b'\0\0\6\1\5\0\0\0\1\x82\x86\x84\x41\1a'";
    python.value(&format!(
        r"s.sendall(b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n' + bytes([0,0,0,4,0,0,0,0,0]) + {headers})"
    ));
    python.value("time.sleep(0.2)");
    assert!(python.value("len(s.recv(9999))").as_u64() > Some(9));
    // SETTINGS ACK and WINDOW_UPDATE of the connection.
    python.value("s.sendall(bytes([0,0,0,4,1,0,0,0,0, 0,0,4,8,0,0,0,0,0,0,0,1,0]))");
    python.value("time.sleep(1)");
    python.value("s.close()");
    let row = place
        .agent
        .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["failures"]["gave_up"], 0, "{row:#}");
    assert_eq!(judged(&row).1, 0, "{row:#}");
}

// --- TLS

fn tls(version: &str) {
    need!("nginx", "openssl", "curl");
    let place = Place::new("tls", "");
    let directory = tempfile::tempdir().expect("a directory");
    let (key, certificate) = (directory.path().join("key"), directory.path().join("cert"));
    Program::new("openssl")
        .args([
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
        ])
        .args(["-nodes", "-subj", "/CN=test", "-days", "1", "-keyout"])
        .arg(&key)
        .arg("-out")
        .arg(&certificate)
        .run()
        .good();
    let server = format!(
        "listen 10.77.0.2:8080 ssl;\nssl_certificate {};\nssl_certificate_key {};\n\
         keepalive_timeout 1s;\n\
         location / {{ return 503; }}\n",
        certificate.display(),
        key.display()
    );
    let _nginx = Nginx::start(&place.net.server, TO, &server);
    let url = format!("https://{TO}/");
    for _ in 0..10 {
        let options = [
            "-k",
            "--http1.1",
            "--tls-max",
            version,
            "-w",
            "%{http_code}",
            "-o",
            "/dev/null",
        ];
        assert_eq!(place.curl(&options, &url), "503");
    }
    // A client that says farewell and waits for the server's.
    let mut python = place.python();
    python.value("(ssl := __import__('ssl')) and 0");
    python.value("(c := ssl._create_unverified_context()) and 0");
    for _ in 0..50 {
        python.value(CONNECT);
        python.value("(t := c.wrap_socket(s)) and 0");
        python.value(r"t.sendall(b'GET / HTTP/1.1\r\nHost: a\r\n\r\n')");
        assert!(python.value("len(t.recv(9999))").as_u64() > Some(0));
        python.errno("t.unwrap().close()");
        python.value("t.close()");
    }
    // Ten requests on each of ten connections.
    let program = Program::new("hey").args(["-n", "100", "-c", "10", &url]);
    let finished = program
        .in_cgroup(&place.group)
        .in_netns(&place.net.client)
        .run();
    assert!(
        finished.stdout.contains("[503]\t100 responses"),
        "{finished}"
    );
    let row = place
        .agent
        .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert!(row["responses"].as_u64() >= Some(110), "{row:#}");
    assert_eq!(judged(&row).1, 0, "{row:#}");
    let failures = row["failures"].as_object().expect("an object");
    assert!(failures.values().all(|count| *count == 0), "{row:#}");
}

#[test]
fn tls_1_2_is_only_timed() {
    tls("1.2");
}

#[test]
fn tls_1_3_is_only_timed() {
    tls("1.3");
}
