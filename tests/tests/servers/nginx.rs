//! nginx and curl.

use std::net::SocketAddr;

use rustix::process::Signal;
use tests::{
    agent::Agent,
    need,
    nginx::Nginx,
    place::{DESTINATION, Place, START, TO, case, check},
    process::{Finished, Program, Running},
    server::Server,
    talk::wait_end,
};

const CONFIG: &str = "listen 10.77.0.2:8080;\n\
     location /200 { return 200 'ok'; }\n\
     location /301 { return 301 /200; }\n\
     location /404 { return 404; }\n\
     location /444 { return 444; }\n\
     location /500 { return 500; }\n\
     location /502 { proxy_pass http://127.0.0.1:1; }\n\
     location /503 { return 503; }\n\
     location /504 { proxy_read_timeout 100ms; proxy_pass http://127.0.0.1:8081; }\n\
     location /never { proxy_pass http://127.0.0.1:8081; }\n";

/// Longer than `gave_up`, also where a busy machine has made answers slow: three times what a destination
/// usually takes is not yet given up.
const PATIENTLY: &[&str] = &["-m", "4"];

/// A server, its upstream, and programs that wait for it.
struct Web {
    place: Place,
    nginx: Option<Nginx>,
    waiting: Vec<Running>,
    upstream: Server,
}

impl Web {
    fn start() -> Self {
        let place = Place::new("nginx");
        let upstream: SocketAddr = "127.0.0.1:8081".parse().expect("an address");
        let upstream = Server::with(&place.net.server, upstream, wait_end);
        let mut web = Self {
            place,
            nginx: None,
            waiting: Vec::new(),
            upstream,
        };
        web.serve();
        web
    }

    fn serve(&mut self) {
        self.nginx = Some(Nginx::start(&self.place.net.server, TO, CONFIG));
    }

    /// Of each path its status, on one connection.
    fn curl(&self, paths: &[&str], options: &[&str]) -> Program {
        let mut curl = Program::new("curl")
            .args(["-q", "-sS", "-w", "%{http_code} "])
            .args(options);
        for path in paths {
            curl = curl.args(["-o", "/dev/null", &format!("http://{TO}{path}")]);
        }
        self.place.client(curl)
    }

    fn asks(&self, paths: &[&str]) -> String {
        self.curl(paths, &[]).run().good()
    }

    /// A program whose request has reached the upstream.
    fn waits(&mut self, agent: &Agent) {
        // Not by what is in flight alone: a server that dies before it has read a request resets.
        let asked = self.upstream.accepts() + 1;
        self.waiting.push(self.curl(&["/never"], &[]).spawn());
        self.upstream.wait_accepts(asked);
        agent.wait_row(DESTINATION, "a request", |row| row["in_flight"] == 1);
    }

    fn waited(&mut self) -> Finished {
        let mut client = self.waiting.pop().expect("one waits");
        client.extend_deadline(START);
        client.wait()
    }

    fn signal(&self, signal: Signal) {
        self.nginx.as_ref().expect("it runs").signal(signal);
    }

    fn ended(&mut self) {
        self.nginx.take().expect("it ran").ended();
    }
}

#[test]
fn well_and_not_well() {
    need!("nginx", "curl");
    let mut web = Web::start();
    let agent = web.place.agent();
    let cases = [
        case(
            "answers",
            |web: &mut Web, _| {
                for path in ["/200", "/301", "/404"] {
                    assert_eq!(web.asks(&[path]), format!("{} ", &path[1..]));
                }
            },
            3..=3,
            &[],
        ),
        case(
            "each way to say that it failed",
            |web, _| {
                for path in ["/500", "/502", "/503", "/504"] {
                    assert_eq!(web.asks(&[path]), format!("{} ", &path[1..]));
                }
            },
            4..=4,
            &[("status", 4)],
        ),
        case(
            "one connection, many answers",
            |web, _| {
                let said = web.asks(&["/404", "/503", "/200", "/503", "/200"]);
                assert_eq!(said, "404 503 200 503 200 ");
            },
            5..=5,
            &[("status", 2)],
        ),
        case(
            "an upload that waits until it is asked for",
            |web, _| {
                let options = ["-H", "Expect: 100-continue", "--data", "body", "-v"];
                let finished = web.curl(&["/200"], &options).run();
                assert!(finished.stderr.contains("100 Continue"), "{finished}");
                assert_eq!(finished.stdout, "200 ", "{finished}");
            },
            1..=1,
            &[],
        ),
        case(
            "it closes instead of an answer",
            |web, _| assert_eq!(web.curl(&["/444"], &[]).run().code(), 52),
            0..=0,
            &[("closed_early", 1)],
        ),
        case(
            "a client that gives up after four seconds",
            |web, _| assert_eq!(web.curl(&["/never"], PATIENTLY).run().code(), 28),
            0..=0,
            &[("gave_up", 1)],
        ),
        case(
            "a client that is killed while it waits",
            |web, agent| {
                web.waits(agent);
                web.waiting[0].signal(Signal::KILL);
                web.waited();
            },
            0..=0,
            &[("abandoned", 1)],
        ),
        case(
            "a server that is stopped: the kernel accepts, nobody answers",
            |web, _| {
                web.signal(Signal::STOP);
                assert_eq!(web.curl(&["/200"], PATIENTLY).run().code(), 28);
                web.signal(Signal::CONT);
            },
            0..=0,
            &[("gave_up", 1)],
        ),
        case(
            "it quits while a client waits, and nobody listens",
            |web, agent| {
                web.waits(agent);
                web.signal(Signal::QUIT);
                web.ended();
                assert_eq!(web.waited().code(), 52);
                assert_eq!(web.curl(&["/200"], &[]).run().code(), 7);
            },
            0..=0,
            &[("closed_early", 1), ("refused", 1)],
        ),
        case(
            "it is killed while a client waits",
            |web, agent| {
                web.serve();
                web.waits(agent);
                web.signal(Signal::KILL);
                assert_eq!(web.waited().code(), 52);
                web.ended();
            },
            0..=0,
            &[("closed_early", 1)],
        ),
    ];
    check(&mut web, &agent, &cases);
}
