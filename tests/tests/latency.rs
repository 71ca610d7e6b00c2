//! Latencies are those that the client sees.

use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    net::TestNet,
    process::{Program, find},
    server::{Server, read_head},
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const REQUESTS: usize = 11;

/// A server that waits before each answer, and writes down how long it really did.
struct Waits {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    waited: Arc<Mutex<Vec<Duration>>>,
    _server: Server,
}

impl Waits {
    fn new(wait: Duration) -> Self {
        let net = TestNet::new();
        let waited = Arc::new(Mutex::new(Vec::new()));
        let list = Arc::clone(&waited);
        let _server = Server::with(&net.server, TO, move |mut stream| {
            while read_head(&mut stream).is_some() {
                let began = Instant::now();
                std::thread::sleep(wait);
                list.lock()
                    .expect("no panic holds it")
                    .push(began.elapsed());
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
            }
            let _ = stream.read(&mut [0]);
        });
        let group = TestCgroup::new("latency");
        let agent = Agent::start(&group, "");
        Self {
            net,
            group,
            agent,
            waited,
            _server,
        }
    }

    fn run(&self, program: Program) {
        let program = program.in_cgroup(&self.group).in_netns(&self.net.client);
        program.run().good();
    }

    /// The median is that of the server's waits, within 5 % and 1 ms.
    fn assert_p50(&self, who: &str) {
        let row = self.agent.wait_row(DESTINATION, "all answers", |row| {
            row["responses"].as_u64() >= Some(REQUESTS as u64) && row["in_flight"] == 0
        });
        let mut waited = self.waited.lock().expect("no panic holds it").clone();
        waited.sort();
        let median = waited[waited.len() / 2];
        let p50 = row["response_latency_us"]["p50"].as_u64().expect("a time");
        let p50 = Duration::from_micros(p50);
        let slack = median / 20 + Duration::from_millis(1);
        let range = median.saturating_sub(slack)..=median + slack;
        assert!(range.contains(&p50), "{who}: {p50:?} instead of {median:?}");
        let max = row["response_latency_us"]["max"].as_u64().expect("a time");
        assert!(max >= p50.as_micros() as u64, "{row:#}");
    }
}

fn each_client(wait: Duration) {
    let url = format!("http://{TO}/");
    if find("python3").is_some() {
        let scene = Waits::new(wait);
        let mut python = Interpreter::start(&scene.group, &scene.net.client);
        python.value("(s := socket.create_connection(('10.77.0.2', 8080))) and 0");
        let ask = "(s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n'), s.recv(999))";
        python.value(&format!("[{ask} for _ in range({REQUESTS})] and 0"));
        scene.assert_p50("Python");
    }
    if find("curl").is_some() {
        let scene = Waits::new(wait);
        for _ in 0..REQUESTS {
            scene.run(Program::new("curl").args(["-q", "-sS", &url]));
        }
        scene.assert_p50("curl");
    }
    if find("hey").is_some() {
        let scene = Waits::new(wait);
        let count = REQUESTS.to_string();
        scene.run(Program::new("hey").args(["-n", &count, "-c", "1", &url]));
        scene.assert_p50("hey");
    }
}

#[test]
fn a_wait_of_5_ms() {
    each_client(Duration::from_millis(5));
}

#[test]
fn a_wait_of_50_ms() {
    each_client(Duration::from_millis(50));
}

#[test]
fn a_wait_of_200_ms() {
    each_client(Duration::from_millis(200));
}
