//! Latencies are those that the client sees.

use std::{io::Write as _, net::SocketAddr, time::Duration};

use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    net::TestNet,
    process::find,
    say_skipped,
    server::{Server, read_head},
    timed::{TIMED, TimedClient},
};

/// A busy machine may put milliseconds between the arrival of an answer and its reader, in one
/// measurement; not in each of them.
const TRIES: u16 = 5;

/// A client that asks a server which waits, and an agent between them.
struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    wait: Duration,
    count: usize,
}

impl Scene {
    fn new(wait: Duration, count: usize) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new("latency");
        let agent = Agent::start(&group, "");
        Self {
            net,
            group,
            agent,
            wait,
            count,
        }
    }

    /// The medians that the client and the agent saw, with a server of their own.
    fn medians(&self, client: &TimedClient, port: u16) -> [Duration; 2] {
        let to: SocketAddr = TestNet::server4(port);
        let wait = self.wait;
        let _server = Server::with(&self.net.server, to, move |mut stream| {
            while read_head(&mut stream).is_some() {
                std::thread::sleep(wait);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
        });
        let program = client.command(to, self.count).in_cgroup(&self.group);
        let finished = program.in_netns(&self.net.client).promptly().run();
        assert!(finished.status.success(), "{finished}");
        let mut waits = client.waits(&finished);
        assert_eq!(waits.len(), self.count, "{finished}");
        waits.sort();
        let row = self.agent.wait_row(&to.to_string(), "all answers", |row| {
            row["responses"] == self.count && row["in_flight"] == 0
        });
        let latency = &row["response_latency_us"];
        let number = |name: &str| latency[name].as_u64().expect("a time");
        assert!(number("max") >= number("p50"), "{row:#}");
        assert_eq!(number("count"), self.count as u64, "{row:#}");
        [waits[waits.len() / 2], Duration::from_micros(number("p50"))]
    }

    /// The agent's median is the client's, within 5 % and `slack`.
    fn check(&self, client: &TimedClient, port: u16, slack: Duration) {
        let mut seen = Vec::new();
        for port in port..port + TRIES {
            let [by_client, by_agent] = self.medians(client, port);
            // A percentile is the middle of its bucket, which may lie a little below.
            let at_least = self.wait - self.wait / 20;
            assert!(by_agent >= at_least, "{}: {by_agent:?}", client.name);
            seen.push((by_client, by_agent));
            if by_client.abs_diff(by_agent) <= by_client / 20 + slack {
                return;
            }
        }
        panic!("{}: (client, agent) saw {seen:?}", client.name);
    }
}

/// Clients that are installed, each with ports of its own.
fn clients() -> Vec<(TimedClient, u16)> {
    let mut ports = (8000..).step_by(TRIES.into());
    let mut clients = Vec::new();
    for client in TIMED {
        match client.needs.iter().find(|name| find(name).is_none()) {
            None => clients.push((client, ports.next().expect("a port"))),
            Some(name) => say_skipped(format_args!("the program {name} is not installed")),
        }
    }
    clients
}

/// One client after the other: they would disturb each other.
fn one_by_one(wait: Duration, count: usize, slack: Duration) {
    let scene = Scene::new(wait, count);
    for (client, port) in clients() {
        scene.check(&client, port, slack);
    }
}

/// All clients at once: they do little but wait.
fn together(wait: Duration, count: usize) {
    let scene = Scene::new(wait, count);
    std::thread::scope(|scope| {
        for (client, port) in clients() {
            let scene = &scene;
            scope.spawn(move || scene.check(&client, port, Duration::from_micros(100)));
        }
    });
}

#[test]
fn a_wait_of_200_us() {
    one_by_one(Duration::from_micros(200), 201, Duration::from_micros(200));
}

#[test]
fn a_wait_of_5_ms() {
    one_by_one(Duration::from_millis(5), 101, Duration::from_micros(100));
}

#[test]
fn a_wait_of_50_ms() {
    together(Duration::from_millis(50), 21);
}

#[test]
fn a_wait_of_500_ms() {
    together(Duration::from_millis(500), 7);
}
