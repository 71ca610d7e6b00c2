//! Long waits that are nobody's fault: no timeout ends them.

use std::{
    fs,
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    time::{Duration, Instant},
};

use rustix::process::Signal;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    clients::source,
    interpreter::Interpreter,
    need,
    net::TestNet,
    outcome::expect,
    server::{Server, read_head},
    talk::{CONNECT, DESTINATION, TO, read_byte, wait_end},
    wait,
};

/// The ports of the cases, as in patient.py.
const SLOW: u16 = 8100;
const HTTP: u16 = 8101;
const PUSH: u16 = 8102;
const WEBSOCKET: u16 = 8103;
const QUERY: u16 = 8104;
const POOL: u16 = 8105;
const UPLOAD: u16 = 8106;
const PRESSURE: u16 = 8107;

/// Never answers.
const SILENT: SocketAddr = TestNet::server4(8081);

/// Between two bytes of a slow download: 0.9 of its `stall`.
const GAP: Duration = Duration::from_millis(1_800);
/// The server itself may wait for a processor between two bytes; a run in which it did so for longer
/// than this shows nothing, and is repeated.
const LONGEST_GAP: Duration = Duration::from_millis(1_950);
const RUNS: usize = 4;

/// Every policy has timeouts that its case outlasts, beside those that bound it.
const POLICIES: &str = r#"
[[policy]]
name = "moving"
destinations = ["10.77.0.2:8100", "10.77.0.2:8101"]
timeouts = { read = "1990ms", write = "1s", stall = "2s" }
[[policy]]
name = "query"
destinations = ["10.77.0.2:8104"]
timeouts = { write = "1s" }
[[policy]]
name = "waiting"
destinations = ["10.77.0.2:8102", "10.77.0.2:8103", "10.77.0.2:8105"]
timeouts = { read = "2s", write = "1s", deadline = "2500ms" }
[[policy]]
name = "uploading"
destinations = ["10.77.0.2:8106"]
timeouts = { read = "4s", write = "1s" }
[[policy]]
name = "pressed"
destinations = ["10.77.0.2:8107"]
timeouts = { read = "3s" }
"#;

/// The longest pause that a server itself made, ns.
#[derive(Clone, Default)]
struct Gaps(Arc<AtomicU64>);

impl Gaps {
    /// Sends a byte each [`GAP`].
    fn trickle(&self, stream: &mut TcpStream) {
        let mut before = Instant::now();
        for _ in 0..4 {
            std::thread::sleep(GAP.saturating_sub(before.elapsed()));
            let _ = stream.write_all(b"y");
            let gap = before.elapsed().as_nanos() as u64;
            self.0.fetch_max(gap, Ordering::SeqCst);
            before = Instant::now();
        }
    }

    fn take(&self) -> Duration {
        Duration::from_nanos(self.0.swap(0, Ordering::SeqCst))
    }
}

fn seconds(count: u64) {
    std::thread::sleep(Duration::from_secs(count));
}

fn push(mut stream: TcpStream) {
    for _ in 0..3 {
        let _ = stream.write_all(b"y");
        seconds(3);
    }
}

fn websocket(mut stream: TcpStream) {
    if read_head(&mut stream).is_none() {
        return;
    }
    let _ = stream.write_all(b"HTTP/1.1 101 Switching Protocols\r\n\r\n");
    let _ = stream.read_exact(&mut [0; 7]);
    seconds(3);
    let _ = stream.write_all(b"\x82\x01y");
}

fn query(mut stream: TcpStream) {
    read_byte(&mut stream);
    seconds(5);
    let _ = stream.write_all(b"y");
}

fn upload(mut stream: TcpStream) {
    for _ in 0..8 {
        read_byte(&mut stream);
    }
    let _ = stream.write_all(b"y");
}

/// Reads nothing for a while.
fn press(mut stream: TcpStream) {
    seconds(5);
    let mut left = 12 << 20;
    let mut buffer = vec![0; 1 << 16];
    while left > 0 {
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(count) => left -= count.min(left),
        }
    }
    let _ = stream.write_all(b"y");
}

#[test]
fn slow_but_moving() {
    need!("python3");
    let net = TestNet::new();
    let gaps = Gaps::default();
    let (slow, http) = (gaps.clone(), gaps.clone());
    let serve = |port, handler: Box<dyn Fn(TcpStream) + Send + Sync>| {
        Server::with(&net.server, TestNet::server4(port), handler)
    };
    let _servers = [
        serve(
            SLOW,
            Box::new(move |mut stream| {
                read_byte(&mut stream);
                slow.trickle(&mut stream);
            }),
        ),
        serve(
            HTTP,
            Box::new(move |mut stream| {
                read_head(&mut stream);
                let head = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\n";
                let _ = stream.write_all(head);
                http.trickle(&mut stream);
            }),
        ),
        serve(PUSH, Box::new(push)),
        serve(WEBSOCKET, Box::new(websocket)),
        serve(QUERY, Box::new(query)),
        serve(POOL, Box::new(tests::talk::echo)),
        serve(UPLOAD, Box::new(upload)),
        serve(PRESSURE, Box::new(press)),
    ];
    let group = TestCgroup::new("patient");
    let script = fs::read_to_string(source("patient.py")).expect("patient.py");
    for run in 1..=RUNS {
        let agent = Agent::start(&group, POLICIES);
        let mut python = Interpreter::start(&group, &net.client);
        python.run(&script);
        let said = python.value("run()");
        let longest = gaps.take();
        let said = said.as_object().expect("an object");
        assert_eq!(said.len(), 8);
        if longest > LONGEST_GAP {
            eprintln!("run {run} had a gap of {longest:?}");
            continue;
        }
        for (case, said) in said {
            assert_eq!(said, "ok", "{case}; {}", agent.log());
        }
        let status = agent.status();
        for row in status["destinations"].as_array().expect("a list") {
            let failures = row["failures"].as_object().expect("an object");
            assert!(failures.values().all(|count| count == 0), "{row:#}");
        }
        return;
    }
    panic!("the machine was too busy {RUNS} times");
}

/// A server that answers each byte when the test lets it.
struct OnCue {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    python: Interpreter,
    server: Server,
    cue: mpsc::Sender<()>,
    asked: Arc<AtomicU64>,
}

impl OnCue {
    fn new(label: &str, config: &str) -> Self {
        let net = TestNet::new();
        let (cue, cues) = mpsc::channel();
        let cues = Arc::new(Mutex::new(cues));
        let asked = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&asked);
        let server = Server::with(&net.server, TO, move |mut stream| {
            while read_byte(&mut stream) {
                counter.fetch_add(1, Ordering::SeqCst);
                let cues: MutexGuard<'_, mpsc::Receiver<()>> = cues.lock().expect("no panic");
                if cues.recv().is_err() {
                    return;
                }
                drop(cues);
                let _ = stream.write_all(b"y");
            }
        });
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, config);
        let python = Interpreter::start(&group, &net.client);
        Self {
            net,
            group,
            agent,
            python,
            server,
            cue,
            asked,
        }
    }

    fn wait_asked(&self, count: u64) {
        wait::until("the requests", wait::LONGEST, || {
            (self.asked.load(Ordering::SeqCst) == count).then_some(())
        });
    }
}

/// For so long nothing is ended, and the row is asked for it all the time.
#[track_caller]
fn assert_left_alone(agent: &Agent, time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time {
        let row = agent.row(DESTINATION);
        assert_eq!(row["failures"]["read_timeout"], 0, "{row:#}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The program is stopped or frozen when the answer comes, for longer than twice its timeout.
#[test]
fn the_answer_waits_for_a_stopped_program() {
    need!("python3");
    // The answer comes in time, also on the busiest machine.
    let mut scene = OnCue::new("stopped", "[defaults.timeouts]\nread = \"3s\"\n");
    let freeze = scene.group.path().join("cgroup.freeze");
    let mut asked = 0;
    for frozen in [false, true] {
        scene.python.value(CONNECT);
        scene.python.value("s.sendall(b'x')");
        asked += 1;
        scene.wait_asked(asked);
        if frozen {
            fs::write(&freeze, "1").expect("freeze the group");
        } else {
            scene.python.signal(Signal::STOP);
        }
        scene.cue.send(()).expect("the server waits");
        assert_left_alone(&scene.agent, Duration::from_secs(7));
        if frozen {
            fs::write(&freeze, "0").expect("thaw the group");
        } else {
            scene.python.signal(Signal::CONT);
        }
        assert_eq!(scene.python.value("len(s.recv(9))"), 1);
    }
    expect(&scene.agent, DESTINATION, &[("responses", 2)]);
    assert_eq!(scene.server.accepts(), 2);
    assert_ne!(scene.net.client.inode(), 0);
}

/// An agent that was stopped itself finds, when it wakes, exchanges whose time is over and that have
/// been answered meanwhile: none of them is ended. What still waits is.
#[test]
fn an_agent_that_wakes_ends_nothing_that_was_answered() {
    need!("python3");
    const COUNT: u64 = 200;
    let mut scene = OnCue::new("asleep", "[defaults.timeouts]\nread = \"3s\"\n");
    let _silent = Server::with(&scene.net.server, SILENT, wait_end);
    scene.python.run(
        "
late = socket.create_connection(('10.77.0.2', 8081))
many = [socket.create_connection(('10.77.0.2', 8080)) for _ in range(200)]
def ask():
    for s in many + [late]:
        s.sendall(b'x')
",
    );
    scene.python.value("ask()");
    scene.agent.signal(Signal::STOP);
    scene.wait_asked(COUNT);
    // The time of all of them runs out in the agent's sleep; then they are answered.
    std::thread::sleep(Duration::from_secs(5));
    for _ in 0..COUNT {
        scene.cue.send(()).expect("the server waits");
    }
    scene
        .python
        .value("[s.recv(1, socket.MSG_PEEK) for s in many] and 0");
    scene.agent.signal(Signal::CONT);
    assert_eq!(scene.python.errno("late.recv(1)"), libc::ECONNABORTED);
    assert_eq!(
        scene.python.value("sum(len(s.recv(9)) for s in many)"),
        COUNT
    );
    expect(&scene.agent, DESTINATION, &[("responses", COUNT)]);
    expect(&scene.agent, &SILENT.to_string(), &[("read_timeout", 1)]);
}
