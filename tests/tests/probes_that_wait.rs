//! Exchanges that rightly wait, or are never answered, are broken off by a restart of their server: the breaker that
//! opens for it closes again, though no probe is ever answered.

use std::{
    io::Write as _,
    net::{Shutdown, TcpStream},
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::{Value, json};
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    follow::Follow,
    interpreter::Interpreter,
    need,
    net::TestNet,
    server::{Server, read_head},
    talk::{DESTINATION, TO, wait_end},
    wait::until,
};

/// For what comes by itself, on a busy machine.
const SOON: Duration = Duration::from_secs(120);
/// Nothing of what is tested waits for a cooldown, and no call is too old to be counted.
const CONFIG: &str = "[defaults.breaker]\ncooldown = \"5m\"\nwindow_age = \"30m\"\n";
const CALLERS: usize = 6;

/// A server that can be restarted, its callers, and the agent between them.
struct Scene {
    net: TestNet,
    agent: Agent,
    python: Interpreter,
    events: Follow,
    connections: Arc<Mutex<Vec<TcpStream>>>,
    _group: TestCgroup,
}

impl Scene {
    /// The callers' part: `call()` makes a connection, keeps it, and sends what is not answered.
    fn new(label: &str, call: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, CONFIG);
        let mut python = Interpreter::start(&group, &net.client);
        python.run(&format!(
            "kept = []\ndef call():\n    s = socket.create_connection(('10.77.0.2', 8080))\n{call}    kept.append(s)\n"
        ));
        let events = agent.follow(&["--all"]);
        Self {
            net,
            agent,
            python,
            events,
            connections: Arc::default(),
            _group: group,
        }
    }

    /// A server that does `answer` first, and then waits for the end of each connection.
    fn serve(&self, answer: fn(&mut TcpStream)) -> Server {
        let connections = Arc::clone(&self.connections);
        Server::with(&self.net.server, TO, move |mut stream| {
            let copy = stream.try_clone().expect("another handle");
            connections.lock().expect("no panic holds it").push(copy);
            answer(&mut stream);
            wait_end(stream);
        })
    }

    /// Everybody calls.
    fn calls(&mut self) {
        self.python
            .run(&format!("for _ in range({CALLERS}): call()"));
        let all = format!("{CALLERS} that wait");
        let wait = |row: &Value| row["in_flight"] == CALLERS;
        self.agent.wait_row(DESTINATION, &all, wait);
    }

    /// The server ends: nobody listens, and then every connection is closed.
    fn stop(&mut self, server: Server) {
        server.stop();
        let connections = std::mem::take(&mut *self.connections.lock().expect("no panic holds it"));
        for connection in connections {
            let _ = connection.shutdown(Shutdown::Both);
        }
        let open = self.events.wait_breaker(DESTINATION, "open");
        assert_eq!(open["reason"]["window"], "exchanges", "{open:#}");
        self.agent.wait_row(DESTINATION, "all broken off", |row| {
            row["failures"]["closed_early"] == CALLERS
        });
        // The agent has asked if the server is there: it is not, and is dialled from now on.
        self.events.wait("a dial that is not answered", |event| {
            event["kind"] == "redial" && event["answered"] == false
        });
        self.python.run("for s in kept: s.close()\nkept.clear()");
    }

    /// Callers call as soon as they may, and wait, until the breaker is closed.
    fn closes(&mut self) {
        until("closed", SOON, || {
            let errno = self.python.errno("call()");
            // (Who is refused too often is told a little later.)
            let refused = [0, libc::ECONNREFUSED, libc::ETIMEDOUT];
            assert!(refused.contains(&errno), "{errno}");
            let row = self.agent.row(DESTINATION);
            (row["state"] == "closed").then_some(())
        });
        let closed = self.events.wait_breaker(DESTINATION, "closed");
        assert_eq!(closed["from"], "half_open", "{closed:#}");
    }
}

#[test]
fn one_way_senders_come_back_after_a_restart_of_their_receiver() {
    need!("python3");
    let mut scene = Scene::new("one-way", "    s.sendall(b'<13>hello\\n')\n");
    let server = scene.serve(|_| {});
    scene.calls();
    scene.stop(server);
    let _server = scene.serve(|_| {});
    scene.events.wait_breaker(DESTINATION, "half_open");
    // Somebody who says a line and leaves: it says nothing, and costs no cooldown.
    scene
        .python
        .run("call()\ntime.sleep(0.7)\nkept.pop().close()");
    scene.agent.wait_row(DESTINATION, "given up", |row| {
        row["failures"]["gave_up"] == 1 && row["in_flight"] == 0
    });
    scene.closes();
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["responses"], 0, "{row:#}");
    assert_eq!(row["failures"]["closed_early"], CALLERS, "{row:#}");
}

#[test]
fn long_polls_come_back_after_a_restart_of_their_server() {
    need!("python3");
    let poll = r"    s.sendall(b'GET /watch HTTP/1.1\r\nHost: a\r\n\r\n')
";
    let mut scene = Scene::new("long-polls", poll);
    // The first is answered at once, by which the destination is none that never answers.
    scene.python.run(
        r"
def ask():
    s = socket.create_connection(('10.77.0.2', 8080))
    s.sendall(b'GET /now HTTP/1.1\r\nHost: a\r\n\r\n')
    got = s.recv(99)
    s.close()
    return len(got)
",
    );
    let answer = |stream: &mut TcpStream| {
        if read_head(stream).is_some_and(|head| head.starts_with("GET /now")) {
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        }
    };
    let server = scene.serve(answer);
    assert_ne!(scene.python.value("ask()"), json!(0));
    scene.calls();
    // What waits in health has waited for longer than an answer may take that comes at once.
    scene.python.value("time.sleep(2)");
    scene.stop(server);
    let _server = scene.serve(answer);
    scene.events.wait_breaker(DESTINATION, "half_open");
    scene.closes();
    let row = scene.agent.row(DESTINATION);
    assert_eq!(row["responses"], 1, "{row:#}");
    assert_eq!(row["failures"]["gave_up"], 0, "{row:#}");
}
