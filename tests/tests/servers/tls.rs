//! TLS 1.2 and 1.3, by nginx and by openssl: timed, and not read.

use std::{ops::RangeInclusive, path::PathBuf};

use rustix::process::Signal;
use tests::{
    interpreter::Interpreter,
    need,
    nginx::Nginx,
    place::{ANY, Place, START, TO, case, check},
    process::{Program, Running},
    server::Server,
    talk::{PATIENCE, wait_end},
};

const REQUESTS: u64 = 640;
const CONNECTIONS: u64 = 16;

const CONNECT: &str = "socket.create_connection(('10.77.0.2', 8080))";

/// A server with a certificate of its own making.
struct Tls {
    place: Place,
    nginx: Option<Nginx>,
    openssl: Option<Running>,
    upstream: Option<Server>,
}

impl Tls {
    fn new(label: &str) -> Self {
        let tls = Self {
            place: Place::new(label),
            nginx: None,
            openssl: None,
            upstream: None,
        };
        Program::new("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt"])
            .args([
                "ec_paramgen_curve:prime256v1",
                "-nodes",
                "-subj",
                "/CN=test",
            ])
            .arg("-keyout")
            .arg(tls.path("key"))
            .arg("-out")
            .arg(tls.path("certificate"))
            .run()
            .good();
        tls
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.directory.path().join(name)
    }

    /// nginx with one version of TLS.
    fn nginx(&mut self, version: &str) {
        let config = format!(
            "listen 10.77.0.2:8080 ssl;\nssl_protocols {version};\nssl_certificate {};\n\
             ssl_certificate_key {};\nlocation / {{ return 200 'ok'; }}\n\
             location /503 {{ return 503; }}\n\
             location /never {{ proxy_pass http://127.0.0.1:8081; }}\n",
            self.path("certificate").display(),
            self.path("key").display(),
        );
        self.nginx = Some(Nginx::start(&self.place.net.server, TO, &config));
    }

    /// openssl, which answers each connection once.
    fn s_server(&mut self, version: &str) {
        let server = Program::new("openssl")
            .args(["s_server", "-accept", "10.77.0.2:8080", "-www", version])
            .arg("-cert")
            .arg(self.path("certificate"))
            .arg("-key")
            .arg(self.path("key"));
        self.openssl = Some(self.place.server(server).spawn());
    }

    fn curl(&self, path: &str, options: &[&str]) -> Program {
        let curl = Program::new("curl")
            .args(["-q", "-sS", "-w", "%{http_code}", "-o", "/dev/null"])
            .args(options)
            .arg(format!("https://{TO}{path}"));
        self.place.client(curl)
    }

    fn hey(&self) {
        let count = REQUESTS.to_string();
        let hey = Program::new("hey").args(["-n", &count, "-c", &CONNECTIONS.to_string()]);
        let hey = self.place.client(hey.arg(format!("https://{TO}/")));
        let finished = hey.within(START).run();
        let all = format!("[200]\t{count} responses");
        assert!(finished.stdout.contains(&all), "{finished}");
    }
}

/// What both versions have in common; `requests` is how many answers hey's are.
fn well_and_not_well(version: &str, other: &'static [&'static str], requests: RangeInclusive<u64>) {
    need!("nginx", "openssl", "curl", "hey");
    let mut tls = Tls::new("tls");
    let upstream = "127.0.0.1:8081".parse().expect("an address");
    let _upstream = Server::with(&tls.place.net.server, upstream, wait_end);
    tls.nginx(version);
    let agent = tls.place.agent();
    let mut cases = vec![
        case(
            "answers",
            |tls: &mut Tls, _| {
                for _ in 0..3 {
                    assert_eq!(tls.curl("/", &["-k"]).run().good(), "200");
                }
            },
            3..=6,
            &[],
        ),
        // hey may leave connections in the middle of their handshake when all is done.
        case(
            "answers on connections that live",
            |tls, _| tls.hey(),
            requests,
            &[("abandoned", ANY)],
        ),
        case(
            "a status that nobody sees",
            |tls, _| assert_eq!(tls.curl("/503", &["-k"]).run().good(), "503"),
            1..=2,
            &[],
        ),
        case(
            "a certificate that the client does not trust",
            |tls, _| assert_eq!(tls.curl("/", &[]).run().code(), 60),
            0..=0,
            &[],
        ),
    ];
    // No closure: it says which version the server does not speak.
    for option in other {
        let act: fn(&mut Tls, &_) = match *option {
            "1.3" => |tls, _| assert_eq!(tls.curl("/", &["-k", "--tlsv1.3"]).run().code(), 35),
            _ => |tls, _| assert_eq!(tls.curl("/", &["-k", "--tls-max", "1.2"]).run().code(), 35),
        };
        cases.push(case(
            "a version that only one of them speaks",
            act,
            0..=0,
            &[],
        ));
    }
    check(&mut tls, &agent, &cases);
}

#[test]
fn nginx_with_tls_1_2() {
    well_and_not_well("TLSv1.2", &["1.3"], REQUESTS..=REQUESTS);
}

/// The tickets that come after the handshake may be answers of their own, one a connection.
#[test]
fn nginx_with_tls_1_3() {
    well_and_not_well("TLSv1.3", &["1.2"], REQUESTS..=REQUESTS + CONNECTIONS);
}

/// It shakes hands and then hangs, is stopped, is killed.
#[test]
fn a_server_that_fails_after_the_handshake() {
    need!("nginx", "openssl", "curl", "python3");
    let mut tls = Tls::new("tls-hangs");
    let upstream = "127.0.0.1:8081".parse().expect("an address");
    tls.upstream = Some(Server::with(&tls.place.net.server, upstream, wait_end));
    tls.nginx("TLSv1.2");
    let agent = tls.place.agent();
    let cases = [
        case(
            "an answer",
            |tls: &mut Tls, _| assert_eq!(tls.curl("/", &["-k"]).run().good(), "200"),
            1..=1,
            &[],
        ),
        case(
            "it hangs, and the client gives up after a while",
            |tls, _| {
                let mut python = Interpreter::start(&tls.place.group, &tls.place.net.client);
                python.value("(ssl := __import__('ssl')) and 0");
                python.value("(c := ssl._create_unverified_context()) and 0");
                python.value(&format!("(s := c.wrap_socket({CONNECT})) and 0"));
                python.value(r"s.sendall(b'GET /never HTTP/1.1\r\nHost: a\r\n\r\n')");
                python.value(PATIENCE);
                python.value("s.close()");
            },
            0..=0,
            &[("gave_up", 1)],
        ),
        case(
            "it hangs, and the client says goodbye after a while",
            |tls, _| assert_eq!(tls.curl("/never", &["-k", "-m", "4"]).run().code(), 28),
            0..=0,
            &[("gave_up", 1)],
        ),
        case(
            "it is killed while the client waits",
            |tls, agent| {
                let upstream = tls.upstream.as_ref().expect("it listens");
                // A server that dies before it has read a request resets.
                let asked = upstream.accepts() + 1;
                let mut client = tls.curl("/never", &["-k"]).spawn();
                upstream.wait_accepts(asked);
                agent.wait_row(tests::place::DESTINATION, "a request", |row| {
                    row["in_flight"] == 1
                });
                let nginx = tls.nginx.take().expect("it runs");
                nginx.signal(Signal::KILL);
                nginx.ended();
                client.extend_deadline(START);
                assert_ne!(client.wait().code(), 0);
            },
            0..=0,
            &[("closed_early", 1)],
        ),
    ];
    check(&mut tls, &agent, &cases);
}

/// Each answers, says goodbye and closes.
#[test]
fn openssl_with_both_versions() {
    need!("openssl", "curl");
    for version in ["-tls1_2", "-tls1_3"] {
        let mut tls = Tls::new("s_server");
        tls.s_server(version);
        let agent = tls.place.agent();
        let cases = [case(
            "answers",
            |tls: &mut Tls, _| {
                for _ in 0..5 {
                    assert_eq!(tls.curl("/", &["-k"]).run().good(), "200");
                }
            },
            5..=10,
            &[],
        )];
        check(&mut tls, &agent, &cases);
    }
}
