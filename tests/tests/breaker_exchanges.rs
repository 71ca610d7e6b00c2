//! The breaker opens on what established connections bring, and is probed by whole exchanges.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
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
    process::{Finished, Program},
    server::{Server, read_head},
    wait::until,
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
/// For what comes by itself, on a busy machine.
const SOON: Duration = Duration::from_secs(60);
/// A new connection, kept as `s`.
const CONNECT: &str = "(s := socket.create_connection(('10.77.0.2', 8080))) and 0";
const ASK: &str = r"s.sendall(b'GET / HTTP/1.1\r\nHost: a\r\n\r\n')";
/// Time enough between two probes to see that they are two.
const CONFIG: &str = r#"
[defaults.breaker]
cooldown = "500ms"
"#;

struct Scene {
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
}

impl Scene {
    fn new(label: &str, config: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, config);
        Self { net, group, agent }
    }

    fn serve(&self, handler: impl Fn(TcpStream) + Send + Sync + 'static) -> Server {
        Server::with(&self.net.server, TO, handler)
    }

    fn curl(&self) -> Finished {
        Program::new("curl")
            .args(["-q", "-sS", "-w", "%{http_code}", "-o", "/dev/null"])
            .arg(format!("http://{TO}/"))
            .in_cgroup(&self.group)
            .in_netns(&self.net.client)
            .run()
    }

    fn python(&self) -> Interpreter {
        Interpreter::start(&self.group, &self.net.client)
    }

    /// Five answers of 503 open it.
    fn open(&self) -> Value {
        for _ in 0..5 {
            let finished = self.curl();
            assert_eq!(finished.stdout, "503", "{finished}");
        }
        self.agent
            .wait_row(DESTINATION, "opened", |row| row["state"] != "closed")
    }
}

fn answer(stream: &mut TcpStream, status: &str) -> bool {
    if read_head(stream).is_none() {
        return false;
    }
    let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
    stream.write_all(answer.as_bytes()).is_ok()
}

/// Answers 503 until it is healed.
fn sick(healed: &Arc<AtomicBool>) -> impl Fn(TcpStream) + Send + Sync + 'static {
    let healed = Arc::clone(healed);
    move |mut stream| {
        let status = || {
            if healed.load(Ordering::SeqCst) {
                "200 OK"
            } else {
                "503 No"
            }
        };
        while answer(&mut stream, status()) {}
    }
}

/// It accepts, so it looks healthy to connects; its answers say that it is not.
#[test]
fn a_server_that_answers_503_opens_and_heals() {
    need!("curl");
    let scene = Scene::new("503", "[defaults.breaker]\ncooldown = \"8s\"\n");
    let healed = Arc::new(AtomicBool::new(false));
    let server = scene.serve(sick(&healed));
    let mut events = scene.agent.follow(&[]);
    let row = scene.open();
    assert_eq!(row["state"], "open", "{row:#}");
    let reason = &row["reason"];
    assert_eq!(reason["window"], "exchanges", "{row:#}");
    assert_eq!(reason["kind"], "consecutive_failures", "{row:#}");
    assert_eq!(
        (&reason["value"], &reason["threshold"]),
        (&5.0.into(), &5.0.into())
    );
    assert_eq!(row["windows"]["connects"]["failures"], 0, "{row:#}");
    let open = events.wait_breaker(DESTINATION, "open");
    assert_eq!(open["reason"]["window"], "exchanges", "{open:#}");

    let finished = scene.curl();
    assert_eq!(finished.code(), 7, "refused: {finished}");
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["rejected"]["breaker"], 1, "{row:#}");
    // The agent has asked once whether the server is there at all. It is, so dials say no more.
    server.wait_accepts(6);
    until("the answer to the dial", SOON, || {
        let row = scene.agent.row(DESTINATION);
        row["next_redial_in_ms"].is_null().then_some(())
    });

    healed.store(true, Ordering::SeqCst);
    events.wait_breaker(DESTINATION, "half_open");
    for _ in 0..2 {
        let row = scene.agent.row(DESTINATION);
        assert_eq!(row["state"], "half_open", "{row:#}");
        assert_eq!(scene.curl().stdout, "200");
    }
    events.wait_breaker(DESTINATION, "closed");
    assert_eq!(scene.curl().stdout, "200");
    let row = scene.agent.wait_state(DESTINATION, "closed");
    assert_eq!(row["failures"]["status"], 5, "{row:#}");
    assert_eq!(row["responses"], 8, "{row:#}");
    assert_eq!(row["reason"]["kind"], "none", "{row:#}");
}

/// A crowd finds out long before the cooldown ends that a server is well again.
#[test]
fn one_call_in_fifty_tries_a_server_that_answered_503() {
    need!("curl");
    let scene = Scene::new("trials", "[defaults.breaker]\ncooldown = \"5m\"\n");
    let healed = Arc::new(AtomicBool::new(false));
    let _server = scene.serve(sick(&healed));
    let mut events = scene.agent.follow(&[]);
    scene.open();
    events.wait_breaker(DESTINATION, "open");
    let failed = |row: &Value| row["failures"]["status"].as_u64().unwrap();
    let before = failed(&scene.agent.row(DESTINATION));
    // A trial comes to nothing, and is no change of state.
    let (mut last, mut longest) = (Instant::now(), Duration::ZERO);
    let row = until("a trial", SOON, || {
        scene.curl();
        longest = longest.max(last.elapsed());
        last = Instant::now();
        let row = scene.agent.row(DESTINATION);
        (failed(&row) > before).then_some(row)
    });
    assert_eq!(row["state"], "open", "{row:#}");
    // Who calls seldom is let pass sooner: on a machine so busy that a call took nearly a second.
    let is_crowd = longest < Duration::from_millis(800);
    let refused = row["rejected"]["breaker"].as_u64();
    assert!(refused >= Some(50) || !is_crowd, "{row:#}");
    healed.store(true, Ordering::SeqCst);
    until("closed", SOON, || {
        scene.curl();
        let row = scene.agent.row(DESTINATION);
        (row["state"] == "closed").then_some(())
    });
    let half_open = events.wait_breaker(DESTINATION, "half_open");
    assert_eq!(half_open["from"], "open", "{half_open:#}");
    let closed = events.wait_breaker(DESTINATION, "closed");
    assert_eq!(closed["from"], "half_open", "{closed:#}");
}

/// A server that is killed resets what is under way: that it is gone, the agent finds out.
#[test]
fn a_killed_server_is_dialled_although_exchanges_opened_it() {
    need!("python3");
    let scene = Scene::new("killed", "[defaults.breaker]\ncooldown = \"5m\"\n");
    let listen = "l = socket.create_server(('10.77.0.2', 8080))";
    let mut server = Interpreter::start_outside(&scene.net.server);
    server.run(listen);
    let mut events = scene.agent.follow(&[]);
    let mut python = scene.python();
    python.run("six = [socket.create_connection(('10.77.0.2', 8080)) for _ in range(6)]");
    python.run(r"for s in six: s.sendall(b'GET / HTTP/1.1\r\nHost: a\r\n\r\n')");
    server.kill();
    let open = events.wait_breaker(DESTINATION, "open");
    assert_eq!(open["reason"]["window"], "exchanges", "{open:#}");
    let row = scene.agent.wait_row(DESTINATION, "dialled", |row| {
        row["next_redial_in_ms"].is_u64()
    });
    assert!(row["next_probe_in_ms"].as_u64() >= Some(120_000), "{row:#}");
    // Back in less than the cooldown, and no call has paid for finding it out.
    let mut server = Interpreter::start_outside(&scene.net.server);
    server.run(listen);
    events.wait_breaker(DESTINATION, "half_open");
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["attempts"], 6, "{row:#}");
}

/// A probe is the whole exchange: an accept alone heals nothing.
#[test]
fn a_probe_that_is_answered_503_opens_again() {
    need!("curl");
    let scene = Scene::new("probe-503", CONFIG);
    let _server = scene.serve(sick(&Arc::default()));
    let mut events = scene.agent.follow(&[]);
    scene.open();
    events.wait_breaker(DESTINATION, "half_open");
    assert_eq!(scene.curl().stdout, "503");
    let again = events.wait_breaker(DESTINATION, "open");
    assert_eq!(again["reason"]["kind"], "probe_failed", "{again:#}");
    assert_eq!(again["reason"]["window"], "exchanges", "{again:#}");
}

#[test]
fn a_probe_that_is_reset_opens_again() {
    need!("curl");
    let scene = Scene::new("probe-reset", CONFIG);
    let server = scene.serve(sick(&Arc::default()));
    let mut events = scene.agent.follow(&[]);
    scene.open();
    server.stop();
    let _server = scene.serve(|mut stream| {
        read_head(&mut stream);
        tests::server::reset(stream);
    });
    events.wait_breaker(DESTINATION, "half_open");
    assert_ne!(scene.curl().code(), 0);
    let again = events.wait_breaker(DESTINATION, "open");
    assert_eq!(again["reason"]["kind"], "probe_failed", "{again:#}");
}

/// Half-open because of exchanges, and the server refuses connects by now.
#[test]
fn a_probe_that_is_refused_opens_again() {
    need!("curl");
    let scene = Scene::new("probe-refused", CONFIG);
    let server = scene.serve(sick(&Arc::default()));
    let mut events = scene.agent.follow(&[]);
    scene.open();
    server.stop();
    events.wait_breaker(DESTINATION, "half_open");
    assert_eq!(scene.curl().code(), 7);
    let again = events.wait_breaker(DESTINATION, "open");
    assert_eq!(again["reason"]["kind"], "probe_failed", "{again:#}");
}

/// The slot of a probe stays taken until its exchange has ended, however long the connection has
/// been established.
#[test]
fn one_probe_exchange_at_a_time() {
    need!("curl", "python3");
    let scene = Scene::new("one-probe", CONFIG);
    let healed = Arc::new(AtomicBool::new(false));
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let (is_healed, is_open) = (Arc::clone(&healed), Arc::clone(&gate));
    let _server = scene.serve(move |mut stream| {
        let sick = !is_healed.load(Ordering::SeqCst);
        if read_head(&mut stream).is_none() {
            return;
        }
        let status = if sick { "503 No" } else { "200 OK" };
        if !sick {
            let open = is_open.0.lock().expect("no panic holds it");
            drop(is_open.1.wait_while(open, |open| !*open));
        }
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        let _ = stream.write_all(answer.as_bytes());
        let _ = stream.read(&mut [0]);
    });
    scene.open();
    scene.agent.wait_state(DESTINATION, "half_open");
    healed.store(true, Ordering::SeqCst);
    let mut probe = scene.python();
    probe.value(CONNECT);
    let mut other = scene.python();
    let refused = libc::ECONNREFUSED;
    assert_eq!(other.errno(CONNECT), refused, "established, not yet asked");
    probe.value(ASK);
    assert_eq!(other.errno(CONNECT), refused, "asked, not yet answered");
    *gate.0.lock().expect("no panic holds it") = true;
    gate.1.notify_all();
    assert!(probe.value("len(s.recv(99))").as_u64() > Some(0));
    // The answer has ended it, though the connection lives.
    let connected = || (other.errno(CONNECT) == 0).then_some(());
    until("the next probe", SOON, connected);
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["state"], "half_open", "{row:#}");
    other.value(ASK);
    assert!(other.value("len(s.recv(99))").as_u64() > Some(0));
    scene.agent.wait_state(DESTINATION, "closed");
}

/// A probe that connects and hangs up says nothing, and gives its slot back.
#[test]
fn a_probe_without_an_exchange_returns_its_slot() {
    need!("curl", "python3");
    let scene = Scene::new("no-exchange", CONFIG);
    let healed = Arc::new(AtomicBool::new(false));
    let _server = scene.serve(sick(&healed));
    scene.open();
    let row = scene.agent.wait_state(DESTINATION, "half_open");
    let generation = row["generation"].clone();
    healed.store(true, Ordering::SeqCst);
    let mut python = scene.python();
    for _ in 0..5 {
        python.value(CONNECT);
        assert_eq!(scene.curl().code(), 7, "the slot is taken");
        python.value("s.close()");
    }
    let row = scene.agent.row(DESTINATION);
    assert_eq!(
        (&row["state"], &row["generation"]),
        (&"half_open".into(), &generation),
        "{row:#}"
    );
    for _ in 0..2 {
        assert_eq!(scene.curl().stdout, "200");
    }
    scene.agent.wait_state(DESTINATION, "closed");
}

/// Killed in the middle of its exchange.
#[test]
fn a_killed_probe_returns_its_slot() {
    need!("curl", "python3");
    let scene = Scene::new("killed-probe", CONFIG);
    let healed = Arc::new(AtomicBool::new(false));
    let is_healed = Arc::clone(&healed);
    let server = scene.serve(sick(&healed));
    scene.open();
    scene.agent.wait_state(DESTINATION, "half_open");
    server.stop();
    let server = scene.serve(|mut stream| {
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let mut victim = scene.python();
    victim.value(CONNECT);
    victim.value(ASK);
    victim.kill();
    scene
        .agent
        .wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    server.stop();
    is_healed.store(true, Ordering::SeqCst);
    let _server = scene.serve(sick(&healed));
    for _ in 0..2 {
        assert_eq!(scene.curl().stdout, "200");
    }
    scene.agent.wait_state(DESTINATION, "closed");
}

/// Answers on connections that began before it opened say nothing about its probes.
#[test]
fn connections_from_before_do_not_close_it() {
    need!("curl", "python3");
    let scene = Scene::new("before", CONFIG);
    let healed = Arc::new(AtomicBool::new(false));
    let _server = scene.serve(sick(&healed));
    let mut python = scene.python();
    python.value(CONNECT);
    scene.open();
    scene.agent.wait_state(DESTINATION, "half_open");
    healed.store(true, Ordering::SeqCst);
    for _ in 0..5 {
        python.value(ASK);
        assert!(python.value("len(s.recv(99))").as_u64() > Some(0));
    }
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["state"], "half_open", "{row:#}");
    assert_eq!(row["responses"], 10, "{row:#}");
}

/// As many 503 as good answers, never five in a row.
#[test]
fn half_of_the_answers_failing_opens() {
    need!("python3");
    let config = "[defaults.breaker]\nwindow = 10\nmin_calls = 10\n";
    let scene = Scene::new("rate", config);
    let _server = scene.serve(|mut stream| {
        let mut statuses = ["200 OK", "503 No"].iter().cycle();
        while answer(&mut stream, statuses.next().expect("a cycle")) {}
    });
    let mut python = scene.python();
    python.value(CONNECT);
    let ask = |python: &mut Interpreter| {
        python.value(ASK);
        assert!(python.value("len(s.recv(99))").as_u64() > Some(0));
    };
    for _ in 0..9 {
        ask(&mut python);
    }
    let row = scene.agent.row(DESTINATION);
    assert_eq!((judged(&row), &row["state"]), ((9, 4), &"closed".into()));
    ask(&mut python);
    let row = scene.agent.wait_state(DESTINATION, "open");
    assert_eq!(row["reason"]["window"], "exchanges", "{row:#}");
    assert_eq!(row["reason"]["kind"], "failure_rate", "{row:#}");
    assert_eq!(row["reason"]["value"], 0.5, "{row:#}");
}

/// A server that accepts and hangs up is not saved by its accepts.
#[test]
fn closing_early_opens() {
    need!("curl");
    let scene = Scene::new("early", "");
    let _server = scene.serve(|mut stream| drop(read_head(&mut stream)));
    for _ in 0..5 {
        assert_ne!(scene.curl().code(), 0);
    }
    let row = scene.agent.wait_state(DESTINATION, "open");
    assert_eq!(row["reason"]["window"], "exchanges", "{row:#}");
    assert_eq!(row["failures"]["closed_early"], 5, "{row:#}");
}

/// Good exchanges do not save a server whose connects fail.
#[test]
fn connects_still_open_by_themselves() {
    need!("curl");
    let scene = Scene::new("connects", "");
    let server = scene.serve(|mut stream| while answer(&mut stream, "200 OK") {});
    for _ in 0..3 {
        assert_eq!(scene.curl().stdout, "200");
    }
    server.stop();
    for _ in 0..5 {
        assert_eq!(scene.curl().code(), 7);
    }
    let row = scene
        .agent
        .wait_row(DESTINATION, "open, and dialled", |row| {
            row["state"] == "open" && row["next_redial_in_ms"].is_u64()
        });
    assert_eq!(row["reason"]["window"], "connects", "{row:#}");
    assert_eq!(row["reason"]["kind"], "consecutive_failures", "{row:#}");
    assert_eq!(judged(&row), (3, 0), "{row:#}");
}

#[test]
fn slow_answers_open() {
    need!("python3");
    let config = "[[policy]]\nname = \"slow\"\ndestinations = [\"10.77.0.2\"]\n\
         breaker = { slow_call = \"1s\", min_calls = 10, window = 10 }\n";
    let scene = Scene::new("slow", config);
    let _server = scene.serve(|mut stream| {
        for i in 0.. {
            if i >= 5 {
                std::thread::sleep(Duration::from_millis(1_100));
            }
            if !answer(&mut stream, "200 OK") {
                return;
            }
        }
    });
    let mut python = scene.python();
    python.value(CONNECT);
    for _ in 0..10 {
        python.value(ASK);
        assert!(python.value("len(s.recv(99))").as_u64() > Some(0));
    }
    let row = scene.agent.wait_state(DESTINATION, "open");
    assert_eq!(row["reason"]["window"], "exchanges", "{row:#}");
    assert_eq!(row["reason"]["kind"], "slow_call_rate", "{row:#}");
    assert_eq!(
        (&row["reason"]["value"], &row["reason"]["threshold"]),
        (&0.5.into(), &0.5.into()),
        "{row:#}"
    );
    let failures = row["failures"].as_object().expect("an object");
    assert!(failures.values().all(|count| *count == 0), "{row:#}");
}

/// Observe mode decides and refuses nothing.
#[test]
fn observe_mode_only_says_so() {
    need!("curl");
    // Without trials, which let somebody pass who calls seldom: a test on a busy machine, say.
    let scene = Scene::new(
        "observe",
        "mode = \"observe\"\n[defaults.breaker]\nredial = false\ncooldown = \"5m\"\n",
    );
    let _server = scene.serve(sick(&Arc::default()));
    scene.open();
    for _ in 0..3 {
        assert_eq!(scene.curl().stdout, "503");
    }
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["state"], "open", "{row:#}");
    assert_eq!(row["would_reject"]["breaker"], 3, "{row:#}");
    assert_eq!(row["rejected"]["breaker"], 0, "{row:#}");
    assert_eq!(row["failures"]["status"], 8, "{row:#}");
}
