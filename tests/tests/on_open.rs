//! `on_open`: what becomes of the connections that exist when a breaker opens.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use serde_json::Value;
use tests::{
    agent::{Agent, AgentOptions},
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    server::Server,
    talk::{DESTINATION, TO},
    wait,
};

const OTHER: SocketAddr = TestNet::server4(8081);
const SOON: Duration = wait::LONGEST;

/// Lets answers go that the server holds back.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn open(&self) {
        *self.0.0.lock().expect("no thread panics") = true;
        self.0.1.notify_all();
    }

    fn is_open(&self) -> bool {
        *self.0.0.lock().expect("no thread panics")
    }

    fn wait(&self) {
        let held = self.0.0.lock().expect("no thread panics");
        drop(
            self.0
                .1
                .wait_while(held, |open| !*open)
                .expect("no thread panics"),
        );
    }
}

/// Answers `x` at once, `w` when the gate opens, and `s` with one byte after the other until the second gate
/// opens, of which the last one is a `z`.
fn serve(mut stream: TcpStream, gate: &Gate, enough: &Gate) {
    let mut byte = [0];
    while stream.read_exact(&mut byte).is_ok() {
        if byte == *b"w" {
            gate.wait();
        }
        while byte == *b"s" && !enough.is_open() {
            if stream.write_all(b"y").is_err() {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        let last = if byte == *b"s" { b"z" } else { b"y" };
        if stream.write_all(last).is_err() {
            return;
        }
    }
}

struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    gate: Gate,
    enough: Gate,
    server: Option<Server>,
    _other: Server,
    python: Interpreter,
}

impl Scene {
    /// Connections `idle`, `busy` (an answer is owed), `stream` (an answer is coming) to one server, and
    /// one to another.
    fn new(label: &str, on_open: &str, mode: &str) -> Self {
        let (net, group) = (TestNet::new(), TestCgroup::new(label));
        let config = format!(
            "mode = \"{mode}\"\n[defaults.breaker]\nredial = false\ngave_up = \"off\"\n\
             on_open = \"{on_open}\"\n"
        );
        let agent = AgentOptions::new(&group).config(&config).start();
        let (gate, enough) = (Gate::default(), Gate::default());
        let serve_at = |to| {
            let (gate, enough) = (gate.clone(), enough.clone());
            Server::with(&net.server, to, move |stream| serve(stream, &gate, &enough))
        };
        let (server, other) = (Some(serve_at(TO)), serve_at(OTHER));
        let mut python = Interpreter::start(&group, &net.client);
        for (name, port) in [
            ("idle", 8080),
            ("busy", 8080),
            ("stream", 8080),
            ("other", 8081),
        ] {
            let connect = format!("socket.create_connection(('10.77.0.2', {port}))");
            python.value(&format!("({name} := {connect}) and 0"));
            python.value(&format!("{name}.sendall(b'x')"));
            assert_eq!(python.value(&format!("len({name}.recv(1))")), 1);
        }
        python.value("busy.sendall(b'w')");
        Self {
            net,
            group,
            agent,
            gate,
            enough,
            server,
            _other: other,
            python,
        }
    }

    /// The server listens no more: five connects are refused. The connections live on.
    fn open(&mut self) {
        drop(self.server.take());
        self.python.value("stream.sendall(b's')");
        assert_eq!(self.python.value("len(stream.recv(1))"), 1);
        for _ in 0..5 {
            let connect = "socket.create_connection(('10.77.0.2', 8080))";
            assert_eq!(self.python.errno(connect), libc::ECONNREFUSED);
        }
        self.agent.wait_state(DESTINATION, "open");
    }

    /// The errno that the program meets on a connection without data; `None`: it lives.
    #[track_caller]
    fn errno(&mut self, name: &str) -> Option<i32> {
        let look = format!("{name}.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)");
        let errno = self.python.value(&look).as_i64().expect("an errno");
        (errno != 0).then_some(errno as i32)
    }

    #[track_caller]
    fn wait_ended(&mut self, name: &str) {
        let errno = wait::until(&format!("the end of {name}"), SOON, || self.errno(name));
        assert_eq!(errno, libc::ECONNABORTED);
    }

    /// It answers as before.
    #[track_caller]
    fn lives(&mut self, name: &str) {
        self.python.value(&format!("{name}.sendall(b'x')"));
        assert_eq!(self.python.value(&format!("len({name}.recv(1))")), 1);
    }

    fn drained(&self) -> Vec<Value> {
        let events = self.agent.command(&["events", "--json"]).good();
        let events = events
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        events
            .filter(|event: &Value| event["kind"] == "drained")
            .collect()
    }
}

#[test]
fn abort_ends_every_connection_of_the_row_and_no_other() {
    need!("python3");
    let mut scene = Scene::new("on-open-abort", "abort", "enforce");
    // The same destination, called by another workload that is well, is another row.
    let sibling = TestCgroup::new("on-open-sibling");
    let second = AgentOptions::new(&sibling).start();
    let mut python = Interpreter::start(&sibling, &scene.net.client);
    python.value("(s := socket.create_connection(('10.77.0.2', 8080))) and 0");
    // (So that it is accepted before the server stops.)
    python.value("s.sendall(b'x')");
    assert_eq!(python.value("len(s.recv(1))"), 1);
    scene.open();
    for name in ["idle", "busy", "stream"] {
        scene.wait_ended(name);
    }
    scene.lives("other");
    python.value("s.sendall(b'x')");
    assert_eq!(python.value("len(s.recv(1))"), 1);
    let row = scene.agent.wait_row(DESTINATION, "none left", |row| {
        row["limits"]["connections"]["used"] == 0
    });
    // What we end is no failure of anybody.
    assert_eq!(
        (
            &row["windows"]["exchanges"]["failures"],
            &row["abandoned"],
            &row["failures"]["refused"]
        ),
        (&0.into(), &1.into(), &5.into()),
        "{row:#}"
    );
    // (In one look, or one that was under way and the next.)
    let events = wait::until("what was ended is told", SOON, || {
        let events = scene.drained();
        let ended = events.iter().filter_map(|e| e["connections"].as_u64());
        (ended.sum::<u64>() >= 3).then_some(events)
    });
    let ended = events.iter().filter_map(|e| e["connections"].as_u64());
    assert_eq!(ended.sum::<u64>(), 3, "{events:?}");
    assert_eq!(events[0]["on_open"], "abort");
    let first = &events[0]["connections"];
    scene.agent.wait_log(&format!("{first} connections ended"));
    drop(second);
}

#[test]
fn drain_idle_waits_for_what_is_under_way() {
    need!("python3");
    let mut scene = Scene::new("on-open-drain", "drain-idle", "enforce");
    scene.open();
    scene.wait_ended("idle");
    assert_eq!((scene.errno("busy"), scene.errno("stream")), (None, None));
    // The whole of the answer comes, though its exchange was answered with the first byte.
    scene.enough.open();
    scene.python.run(
        "
def rest():
    while (byte := stream.recv(1)) == b'y':
        pass
    return byte.decode()
",
    );
    assert_eq!(scene.python.value("rest()"), "z");
    scene.wait_ended("stream");
    assert_eq!(scene.errno("busy"), None);
    scene.gate.open();
    assert_eq!(scene.python.value("len(busy.recv(1))"), 1);
    scene.wait_ended("busy");
    scene.lives("other");
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["abandoned"], 0, "{row:#}");
}

#[test]
fn nothing_is_ended_by_keep_by_hand_or_in_observe_mode() {
    need!("python3");
    let mut keep = Scene::new("on-open-keep", "keep", "enforce");
    keep.open();
    let mut observed = Scene::new("on-open-observe", "abort", "observe");
    observed.open();
    let mut tripped = Scene::new("on-open-trip", "abort", "enforce");
    tripped.agent.command(&["trip", DESTINATION]).good();
    tripped.agent.wait_state(DESTINATION, "forced_open");
    // One that opens later and ends its connections shows that there was time enough.
    let mut last = Scene::new("on-open-last", "abort", "enforce");
    last.open();
    last.wait_ended("idle");
    std::thread::sleep(Duration::from_millis(1_500));
    for scene in [&mut keep, &mut observed, &mut tripped] {
        scene.lives("idle");
        assert_eq!(scene.errno("busy"), None);
        assert_eq!(scene.drained(), Vec::<Value>::new());
        assert!(!scene.group.pids().is_empty());
    }
}
