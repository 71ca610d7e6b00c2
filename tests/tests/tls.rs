//! TLS: what is a request, what is an answer, and what is neither. Only record headers are looked at.

use std::{io::Read as _, net::TcpStream, time::Duration};

use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    nginx::Nginx,
    outcome::{expect, judged},
    process::Program,
    server::reset,
    talk::{DESTINATION, PATIENCE, TO, Talk, read_byte, wait_end},
    tls::{Behaviour, CONNECT, CONTEXT, Certificate, TlsServer},
};

const ALL: u32 = 1000;
const DELAY: Duration = Duration::from_millis(120);
/// Time for everything that a server sends by itself to arrive, on a machine that may be busy.
const SETTLE: &str = "time.sleep(0.5)";

struct Scene {
    _net: TestNet,
    _group: TestCgroup,
    _certificate: Certificate,
    _server: TlsServer,
    agent: Agent,
    python: Interpreter,
}

impl Scene {
    fn new(version: &'static str, tickets: u32, answers: u32) -> Self {
        let net = TestNet::new();
        let certificate = Certificate::new();
        let behaviour = Behaviour {
            version,
            tickets,
            answers,
            delay_ms: DELAY.as_millis() as u32,
        };
        let server = TlsServer::start(&net.server, &certificate.both(), behaviour);
        let group = TestCgroup::new("tls");
        // (What is judged is judged for as long as the test takes.)
        let agent = Agent::start_for_loops(&group, "[defaults.breaker]\nwindow_age = \"30m\"\n");
        let mut python = Interpreter::start(&group, &net.client);
        python.value(CONTEXT);
        Self {
            _net: net,
            _group: group,
            _certificate: certificate,
            _server: server,
            agent,
            python,
        }
    }

    #[track_caller]
    fn value(&mut self, expression: &str) {
        self.python.value(expression);
    }

    #[track_caller]
    fn ask(&mut self) {
        self.value("s.sendall(b'request')");
        assert_eq!(self.python.value("len(s.recv(999))"), 300);
    }

    #[track_caller]
    fn expect(&self, wanted: &[(&str, u64)], calls: (u64, u64)) -> serde_json::Value {
        let row = expect(&self.agent, DESTINATION, wanted);
        assert_eq!(judged(&row), calls, "{row:#}");
        row
    }
}

/// Each request counts once, and has the latency of its answer, whatever the server sends by itself.
fn requests_are_counted_and_timed(version: &'static str, tickets: u32) {
    need!("python3", "openssl");
    let mut scene = Scene::new(version, tickets, ALL);
    // The first connection teaches what tickets look like.
    scene.value(CONNECT);
    scene.value(SETTLE);
    scene.ask();
    for _ in 0..5 {
        scene.value(CONNECT);
        // At once: tickets come after it.
        scene.ask();
        scene.ask();
        scene.value("s.close()");
    }
    let row = scene.expect(&[("responses", 11)], (11, 0));
    let latency = &row["response_latency_us"];
    assert_eq!(latency["count"], 11, "{row:#}");
    // Were one of them early, the sum would be less.
    let sum = scene
        .agent
        .metric("backstop_response_duration_seconds_sum", &[])
        .expect("a sum");
    assert!(sum >= 11.0 * DELAY.as_secs_f64(), "{sum} {row:#}");
    assert!(latency["max"].as_u64() < Some(60_000_000), "{row:#}");
    let traits = row["traits"].as_array().expect("a list");
    let has_tickets = traits.iter().any(|learned| learned == "tls13-tickets");
    assert_eq!(has_tickets, tickets > 0 && version == "1.3", "{row:#}");
}

#[test]
fn without_tickets() {
    requests_are_counted_and_timed("1.3", 0);
}

#[test]
fn with_one_ticket() {
    requests_are_counted_and_timed("1.3", 1);
}

#[test]
fn with_two_tickets() {
    requests_are_counted_and_timed("1.3", 2);
}

#[test]
fn with_four_tickets() {
    requests_are_counted_and_timed("1.3", 4);
}

#[test]
fn with_tls_1_2() {
    requests_are_counted_and_timed("1.2", 2);
}

/// A server that hangs once the handshake is done: its tickets are no answer.
fn a_server_hangs_after_the_handshake(version: &'static str, tickets: u32, settle: bool) {
    need!("python3", "openssl");
    let mut scene = Scene::new(version, tickets, 1);
    scene.value(CONNECT);
    if settle {
        scene.value(SETTLE);
    }
    scene.ask();
    scene.value("s.close()");
    scene.expect(&[("responses", 1)], (1, 0));
    for hung in 1..=3 {
        scene.value(CONNECT);
        scene.value("s.sendall(b'request')");
        scene.value(SETTLE);
        let row = scene.agent.row(DESTINATION);
        assert_eq!(row["in_flight"], 1, "{row:#}");
        scene.value(PATIENCE);
        scene.value("s.close()");
        scene.expect(&[("responses", 1), ("gave_up", hung)], (1 + hung, hung));
    }
}

#[test]
fn a_hang_without_tickets_is_seen() {
    a_server_hangs_after_the_handshake("1.3", 0, false);
}

#[test]
fn a_hang_after_one_ticket_is_seen() {
    a_server_hangs_after_the_handshake("1.3", 1, true);
}

/// Here the first connection sees them only after its request: their like length gives them away.
#[test]
fn a_hang_after_two_tickets_is_seen() {
    a_server_hangs_after_the_handshake("1.3", 2, false);
}

#[test]
fn a_hang_after_four_tickets_is_seen() {
    a_server_hangs_after_the_handshake("1.3", 4, true);
}

#[test]
fn a_hang_of_tls_1_2_is_seen() {
    a_server_hangs_after_the_handshake("1.2", 2, false);
}

/// close_notify and the end, where an answer is owed.
fn a_farewell_is_no_answer(version: &'static str) {
    need!("python3", "openssl");
    let mut scene = Scene::new(version, 2, ALL);
    scene.value(CONNECT);
    scene.value(SETTLE);
    scene.ask();
    scene.value("s.sendall(b'bye')");
    assert_eq!(scene.python.value("len(s.recv(9))"), 0);
    scene.value("time.sleep(0.4)");
    scene.value("s.close()");
    scene.expect(&[("responses", 1), ("closed_early", 1)], (2, 1));
}

#[test]
fn a_farewell_of_tls_1_2_is_no_answer() {
    a_farewell_is_no_answer("1.2");
}

#[test]
fn a_farewell_of_tls_1_3_is_no_answer() {
    a_farewell_is_no_answer("1.3");
}

// --- the handshake

/// It is no request and no answer, and a connection that ends after it says nothing.
fn a_handshake_counts_nothing(version: &'static str) {
    need!("python3", "openssl");
    let mut scene = Scene::new(version, 2, ALL);
    for _ in 0..3 {
        scene.value(CONNECT);
        scene.value("s.close()");
    }
    let row = scene.expect(&[], (0, 0));
    assert_eq!(row["established"], 3, "{row:#}");
    assert_eq!(row["response_latency_us"]["count"], 0, "{row:#}");
}

#[test]
fn a_handshake_of_tls_1_2_counts_nothing() {
    a_handshake_counts_nothing("1.2");
}

#[test]
fn a_handshake_of_tls_1_3_counts_nothing() {
    a_handshake_counts_nothing("1.3");
}

/// A client whose handshake fails, after a second at the latest.
fn handshake_fails(handler: fn(TcpStream), wanted: &str) {
    need!("python3");
    let mut talk = Talk::new("handshake", handler);
    talk.value(CONTEXT);
    for count in 1..=5 {
        talk.value("(r := socket.create_connection(('10.77.0.2', 8080), 1)) and 0");
        // (A time-out has no errno.)
        talk.python.errno("c.wrap_socket(r)");
        talk.value("r.close()");
        talk.expect(&[(wanted, count)], (count, count));
    }
    talk.agent.wait_state(DESTINATION, "open");
}

/// Accepts, and no more. Nobody has ever been answered here, and TLS is no one-way protocol.
#[test]
fn a_client_gives_up_on_a_handshake() {
    handshake_fails(wait_end, "gave_up");
}

#[test]
fn closed_instead_of_a_handshake() {
    handshake_fails(
        |mut stream| {
            // The whole record, however many segments it comes in: what is left unread would make a reset of
            // the close.
            let mut head = [0; 5];
            let _ = stream.read_exact(&mut head);
            let length = u16::from_be_bytes([head[3], head[4]]);
            let _ = stream.read_exact(&mut vec![0; length.into()]);
        },
        "closed_early",
    );
}

#[test]
fn reset_instead_of_a_handshake() {
    handshake_fails(
        |mut stream| {
            read_byte(&mut stream);
            reset(stream);
        },
        "reset",
    );
}

// --- real servers

fn nginx_is_counted_exactly(protocol: &str) {
    need!("nginx", "hey", "openssl");
    let net = TestNet::new();
    let certificate = Certificate::new();
    let server = format!(
        "listen 10.77.0.2:8080 ssl backlog=2048;\nssl_certificate {};\nssl_certificate_key {};\n\
         ssl_protocols {protocol};\nlocation / {{ return 200 \"hello\"; }}\n",
        certificate.certificate().display(),
        certificate.key().display()
    );
    let nginx = Nginx::start(&net.server, TO, &server);
    let group = TestCgroup::new("tls-nginx");
    let agent = Agent::start_for_loops(&group, "");
    let url = format!("https://{TO}/");
    for (options, requests) in [("-h2=false", 1600), ("-disable-keepalive", 160)] {
        Program::new("hey")
            .args([options, "-n", &requests.to_string(), "-c", "16", &url])
            .in_cgroup(&group)
            .in_netns(&net.client)
            .within(Duration::from_secs(60))
            .run()
            .good();
    }
    // hey ends handshakes that it does not need any more: these are abandoned.
    let row = agent.wait_row(DESTINATION, "all answers", |row| {
        row["in_flight"] == 0 && row["responses"] == 1760
    });
    assert_eq!(judged(&row).1, 0, "{row:#}");
    nginx.assert_logged(200, 1760);
}

#[test]
fn nginx_with_tls_1_2_is_counted_exactly() {
    nginx_is_counted_exactly("TLSv1.2");
}

#[test]
fn nginx_with_tls_1_3_is_counted_exactly() {
    nginx_is_counted_exactly("TLSv1.3");
}
