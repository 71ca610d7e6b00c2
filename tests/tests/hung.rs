//! Exchanges that hang: counted while they do, once, and repaired when the answer comes after all.

use std::{
    io::Write as _,
    net::TcpStream,
    sync::{
        Arc, Condvar, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    outcome::judged,
    server::Server,
    talk::{CONNECT, DESTINATION, TO, read_byte},
    wait,
};

/// A server that answers each byte while it is allowed to, and holds its answers back while not.
#[derive(Clone, Default)]
struct Gate {
    shut: Arc<(Mutex<bool>, Condvar)>,
}

impl Gate {
    fn set(&self, shut: bool) {
        *self.shut.0.lock().expect("no panic") = shut;
        self.shut.1.notify_all();
    }

    fn serve(&self, net: &TestNet) -> Server {
        let shut = Arc::clone(&self.shut);
        Server::with(&net.server, TO, move |mut stream: TcpStream| {
            while read_byte(&mut stream) {
                let held = shut.0.lock().expect("no panic");
                // A test that has failed opens nothing any more.
                let (held, _) = shut
                    .1
                    .wait_timeout_while(held, Duration::from_secs(300), |shut| *shut)
                    .expect("no panic");
                drop(held);
                if stream.write_all(b"y").is_err() {
                    return;
                }
            }
        })
    }
}

struct Scene {
    gate: Gate,
    _server: Server,
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
}

impl Scene {
    fn new(label: &str, config: &str) -> Self {
        let net = TestNet::new();
        let gate = Gate::default();
        let server = gate.serve(&net);
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, config);
        Self {
            gate,
            _server: server,
            net,
            group,
            agent,
        }
    }

    fn python(&self) -> Interpreter {
        Interpreter::start(&self.group, &self.net.client)
    }

    /// Waits for longer than most tests do.
    fn wait(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        wait::until(what, Duration::from_secs(120), || {
            let row = self.agent.row(DESTINATION);
            is_so(&row).then_some(row)
        })
    }
}

fn ask(python: &mut Interpreter) {
    python.value("s.sendall(b'x')");
    assert_eq!(python.value("len(s.recv(9))"), 1);
}

fn hung(row: &Value) -> u64 {
    row["failures"]["hung"].as_u64().expect("a count")
}

/// Longer than an answer takes on a busy machine.
const AFTER_A_WHILE: &str = "[defaults.breaker]\nhung = \"2s\"\n";

#[test]
fn it_counts_while_it_hangs_and_the_answer_repairs_it() {
    need!("python3");
    let scene = Scene::new("hung", AFTER_A_WHILE);
    let mut python = scene.python();
    python.value(CONNECT);
    ask(&mut python);
    scene.gate.set(true);
    python.value("s.sendall(b'x')");
    let row = scene.wait("hung", |row| hung(row) == 1 && judged(row) == (2, 1));
    assert_eq!(row["in_flight"], 1, "{row:#}");
    assert_eq!(row["hung_recovered"], 0, "{row:#}");

    scene.gate.set(false);
    assert_eq!(python.value("len(s.recv(9))"), 1);
    let row = scene.wait("recovered", |row| {
        row["hung_recovered"] == 1 && row["in_flight"] == 0 && judged(row) == (2, 0)
    });
    assert_eq!(row["responses"], 2, "{row:#}");
    assert_eq!(hung(&row), 1, "{row:#}");

    // The next exchange of the same connection is one of its own.
    ask(&mut python);
    let row = scene.wait("answered", |row| row["responses"] == 3);
    assert_eq!(judged(&row), (3, 0), "{row:#}");
}

#[test]
fn it_counts_once_whatever_its_end() {
    need!("python3");
    let scene = Scene::new("hung-once", AFTER_A_WHILE);
    scene.gate.set(true);
    let mut python = scene.python();
    python.value(CONNECT);
    python.value("s.sendall(b'x')");
    scene.wait("hung", |row| hung(row) == 1);
    python.value("s.close()");
    let row = scene.wait("ended", |row| {
        row["in_flight"] == 0 && judged(row) == (1, 1)
    });
    let failures: u64 = row["failures"]
        .as_object()
        .expect("an object")
        .values()
        .filter_map(Value::as_u64)
        .sum();
    assert_eq!((failures, hung(&row)), (1, 1), "{row:#}");
    assert_eq!(row["abandoned"], 0, "{row:#}");
}

/// Hung work trips before any program gives up.
#[test]
fn five_that_hang_open_the_breaker() {
    need!("python3");
    let scene = Scene::new("hung-trip", AFTER_A_WHILE);
    scene.gate.set(true);
    let mut python = scene.python();
    python
        .value("(all := [socket.create_connection(('10.77.0.2', 8080)) for _ in range(5)]) and 0");
    python.value("[c.sendall(b'x') for c in all]");
    let row = scene.wait("open", |row| row["state"] == "open");
    assert_eq!(row["reason"]["window"], "exchanges", "{row:#}");
    assert_eq!(row["reason"]["kind"], "consecutive_failures", "{row:#}");
    assert_eq!(
        (hung(&row), &row["in_flight"]),
        (5, &Value::from(5)),
        "{row:#}"
    );
    assert_eq!(python.errno(CONNECT), libc::ECONNREFUSED);
    // They recover, and with them the windows; what the breaker makes of it are its probes.
    scene.gate.set(false);
    python.value("[c.recv(9) for c in all] and 0");
    scene.wait("recovered", |row| {
        row["in_flight"] == 0 && row["hung_recovered"] == 5
    });
}

#[test]
fn off_is_off() {
    need!("python3");
    let scene = Scene::new("hung-off", "[defaults.breaker]\nhung = \"off\"\n");
    let short = Scene::new("hung-short", AFTER_A_WHILE);
    for scene in [&scene, &short] {
        scene.gate.set(true);
    }
    let mut pythons = [scene.python(), short.python()];
    for python in &mut pythons {
        python.value(CONNECT);
        python.value("s.sendall(b'x')");
    }
    // As long as the other one takes.
    short.wait("hung", |row| hung(row) == 1);
    assert_eq!(hung(&scene.agent.row(DESTINATION)), 0);
}

/// Asks again and again with connections of its own; a list of those that were not answered.
const ASKING: &str = "
import threading
unanswered, stop = [], threading.Event()
def asking():
    while not stop.wait(0.25):
        c = socket.create_connection(('10.77.0.2', 8080))
        c.settimeout(0.2)
        c.sendall(b'x')
        try:
            c.recv(9)
            c.close()
        except TimeoutError:
            unanswered.append(c)
threading.Thread(target=asking, daemon=True).start()
";

/// The default: a quick destination that falls silent although it is asked again and again.
#[test]
fn a_destination_that_falls_silent_is_found_by_itself() {
    need!("python3");
    // What programs give up is not what opens it here.
    let scene = Scene::new(
        "hung-auto",
        "[defaults.breaker]\nconsecutive_failures = 3\n",
    );
    let mut python = scene.python();
    python.value(CONNECT);
    for _ in 0..20 {
        ask(&mut python);
    }
    python.run(ASKING);
    scene.wait("traffic", |row| row["responses"].as_u64() > Some(25));
    scene.gate.set(true);
    let row = scene.wait("open", |row| row["state"] == "open");
    assert!(hung(&row) >= 3, "{row:#}");
    assert_eq!(row["reason"]["window"], "exchanges", "{row:#}");
    python.value("stop.set()");
    scene.gate.set(false);
    python.value("[c.settimeout(120) or c.recv(9) for c in unanswered] and 0");
    let row = scene.wait("recovered", |row| {
        row["in_flight"] == 0 && row["hung_recovered"] == row["failures"]["hung"]
    });
    assert_eq!(row["failures"]["gave_up"], 0, "{row:#}");
}

/// A worker on an empty queue waits for long, and others are answered meanwhile: it does not hang.
#[test]
fn a_long_wait_beside_others_that_are_answered_is_healthy() {
    need!("python3");
    let net = TestNet::new();
    let patient = Arc::new(AtomicBool::new(true));
    let wait = Arc::clone(&patient);
    // 'w' waits, anything else is answered at once.
    let _server = Server::with(&net.server, TO, move |mut stream| {
        let mut byte = [0];
        while std::io::Read::read_exact(&mut stream, &mut byte).is_ok() {
            while byte == *b"w" && wait.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(20));
            }
            if stream.write_all(b"y").is_err() {
                return;
            }
        }
    });
    let group = TestCgroup::new("hung-queue");
    let agent = Agent::start(&group, "");
    let mut python = Interpreter::start(&group, &net.client);
    python.value(CONNECT);
    python.value("s.sendall(b'w')");
    let mut other = Interpreter::start(&group, &net.client);
    other.value(CONNECT);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(13) {
        ask(&mut other);
        other.value("time.sleep(0.25)");
    }
    let row = agent.row(DESTINATION);
    assert_eq!(
        (hung(&row), &row["in_flight"]),
        (0, &Value::from(1)),
        "{row:#}"
    );
    patient.store(false, Ordering::Release);
    assert_eq!(python.value("len(s.recv(9))"), 1);
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["hung_recovered"], 0, "{row:#}");
}

/// Makes sockets until one has the place of `s` in the kernel's table, which has 32,768, and connects
/// it as `t`.
const SAME_PLACE: &str = "
cookie = lambda c: int.from_bytes(c.getsockopt(socket.SOL_SOCKET, 57, 8), sys.byteorder)
wanted = cookie(s) % 32768
while True:
    t = socket.socket()
    if cookie(t) % 32768 == wanted:
        break
    t.close()
t.connect(('10.77.0.2', 8080))
";

/// Two connections with one place: the second one is followed all the same, hanging and answered.
#[test]
fn a_connection_whose_place_is_taken_is_followed_too() {
    need!("python3");
    let scene = Scene::new("hung-place", AFTER_A_WHILE);
    let mut python = scene.python();
    python.value(CONNECT);
    python.run(SAME_PLACE);
    assert_eq!(
        python.value("s is not t and cookie(s) % 32768 == cookie(t) % 32768"),
        true
    );
    for _ in 0..10 {
        python.value("[c.sendall(b'x') for c in (s, t)]");
        python.value("[c.recv(9) for c in (s, t)] and 0");
    }
    scene.wait("answered", |row| {
        row["responses"] == 20 && judged(row) == (20, 0)
    });
    scene.gate.set(true);
    python.value("[c.sendall(b'x') for c in (s, t)]");
    scene.wait("hung", |row| hung(row) == 2 && judged(row) == (20, 2));
    scene.gate.set(false);
    python.value("[c.recv(9) for c in (s, t)] and 0");
    scene.wait("recovered", |row| {
        row["in_flight"] == 0 && row["hung_recovered"] == 2 && judged(row) == (20, 0)
    });
    // The place of the first is free again, and the second one is still found.
    python.value("s.close()");
    python.value("t.sendall(b'x')");
    python.value("t.recv(9) and t.close()");
    scene.wait("answered", |row| {
        row["responses"] == 23 && row["in_flight"] == 0
    });
}
