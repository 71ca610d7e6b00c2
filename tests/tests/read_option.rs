//! Read timeouts by options (`read_action = "option"`): the program sees EAGAIN on time, the socket
//! lives, what the program has set is its own, and everything is given back.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::TcpStream,
    time::Duration,
};

use serde_json::{Value, json};
use tests::{
    agent::Agent,
    attached,
    cgroup::TestCgroup,
    interpreter::{Interpreter, LOOP},
    need,
    net::TestNet,
    process::{Program, python},
    server::Server,
    talk::{CONNECT, DESTINATION, TO},
};

const VALUE_MS: i64 = 300;
/// After the value, and at most so many ms later. (Only the option ends a receive with EAGAIN, and only the agent
/// a connection; how late that is at most, tests/matrix.rs shows. Here the machine may hold up anybody.)
const LATE_MS: i64 = 10_000;
/// What comes behind an option of 2 s comes later than this.
const BEHIND_MS: i64 = 200;
/// A machine that is busy at the moment may wake anybody too late.
const TRIES: usize = 6;

const CONFIG: &str = "[defaults.timeouts]\nread = \"300ms\"\nread_action = \"option\"\n";
/// With a time behind the option that is longer than what timers are late by.
const SLOW_MS: i64 = 2000;
const SLOW: &str = "[defaults]\nbreaker = \"off\"\nretry = \"off\"\n\
                    [defaults.timeouts]\nread = \"2s\"\nread_action = \"option\"\n";

/// Sends a byte now and then by itself, does not answer `h`, answers anything else with a byte.
fn pushing(mut stream: TcpStream, every: Duration) {
    stream.set_read_timeout(Some(every)).expect("a timeout");
    let mut is_asked = false;
    loop {
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(1..) => {
                is_asked = true;
                if byte != *b"h" && stream.write_all(b"y").is_err() {
                    return;
                }
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !is_asked && stream.write_all(b"y").is_err() {
                    return;
                }
            }
            Ok(0) | Err(_) => return,
        }
    }
}

/// `timed(f)`: what `f` ends with, and after how many ms. `bounded(s)`: the same of the first
/// receive that an option of the agent's bounds. `told(s, name)`: what the program is told of an option, ms.
const HELPERS: &str = "
import struct
def timed(f):
    begin = time.monotonic()
    try:
        result = len(f())
    except OSError as error:
        result = -error.errno
    return [result, round((time.monotonic() - begin) * 1000)]
def bounded(s):
    while True:
        answer = timed(lambda: s.recv(1))
        if answer[0] != 1:
            return answer
def told(s, name):
    value = s.getsockopt(socket.SOL_SOCKET, getattr(socket, name), 16)
    seconds, micros = struct.unpack('ll', value)
    return seconds * 1000 + micros // 1000
def sets(s, name, ms):
    value = struct.pack('ll', ms // 1000, ms % 1000 * 1000)
    s.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
";

struct Scene {
    _server: Server,
    net: TestNet,
    group: TestCgroup,
    agent: Agent,
    python: Interpreter,
}

impl Scene {
    fn new(label: &str, config: &str) -> Self {
        // Longer than the timeout: a receive that nothing bounds lasts until then.
        let push = Duration::from_millis(if config == SLOW { 3000 } else { 700 });
        let net = TestNet::new();
        let server = Server::with(&net.server, TO, move |stream| pushing(stream, push));
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, config);
        // Before all ordinary programs: what it is told it acts upon at once.
        let program = Program::new(python()).args(["-c", LOOP]).promptly();
        let program = program.in_cgroup(&group).in_netns(&net.client);
        let mut python = Interpreter::start_by(program);
        python.run(HELPERS);
        Self {
            _server: server,
            net,
            group,
            agent,
            python,
        }
    }

    /// A connection `s`, once its receives are bounded.
    #[track_caller]
    fn connect(&mut self) {
        self.python.value(CONNECT);
        let answer = self.python.value("bounded(s)");
        assert_ends(&answer, libc::EAGAIN, VALUE_MS, LATE_MS);
    }

    /// Receives of a connection are not bounded (any more): they last until the server sends
    /// something. The second and third begin when it has just done so.
    #[track_caller]
    fn assert_unbounded(&mut self, name: &str) {
        let answers = self
            .python
            .value(&format!("[len({name}.recv(1)) for _ in range(3)]"));
        assert_eq!(answers, json!([1, 1, 1]));
    }

    #[track_caller]
    fn told(&mut self, name: &str, option: &str) -> Value {
        self.python.value(&format!("told({name}, '{option}')"))
    }
}

#[track_caller]
fn assert_ends(answer: &Value, errno: i32, value_ms: i64, late_ms: i64) {
    assert_eq!(answer[0], -errno, "{answer}");
    let took = answer[1].as_i64().expect("a number");
    // What the kernel rounds to ticks may show as one ms less.
    assert!(
        (value_ms - 1..value_ms + late_ms).contains(&took),
        "{value_ms} ms took {took} ms"
    );
}

/// A receive ends with EAGAIN though nothing is owed; one that is owed an answer does, too, and the
/// next exchanges on the same connection work.
#[test]
fn a_receive_ends_and_the_socket_lives() {
    need!("python3");
    let mut late = Vec::new();
    for _ in 0..TRIES {
        let mut scene = Scene::new("option", CONFIG);
        scene.connect();
        // The program tries again: the answer is owed anew, and comes. So do those after it.
        let answers = scene.python.value(
            "[timed(lambda: s.sendall(byte) or s.recv(1)) for byte in (b'h', b'x', b'x', b'x', b'x')]",
        );
        assert_ends(&answers[0], libc::EAGAIN, VALUE_MS, LATE_MS);
        if (1..5).any(|at| answers[at][0] != 1) {
            // The program or its server was held up for longer than the timeout.
            late.push(answers);
            continue;
        }
        let row = scene.agent.row(DESTINATION);
        assert!(row["responses"].as_u64() >= Some(4), "{row:#}");
        assert_eq!(
            (&row["failures"]["read_timeout"], &row["in_flight"]),
            (&json!(0), &json!(0)),
            "{row:#}"
        );
        return;
    }
    panic!("not one of {TRIES} times: {late:?}");
}

/// A program that does not act upon EAGAIN is ended a moment later.
#[test]
fn behind_the_option_comes_the_abort() {
    need!("python3");
    let mut scene = Scene::new("option-abort", CONFIG);
    let mut follow = scene.agent.follow(&[]);
    scene.connect();
    scene.python.run(
        "
def stubborn():
    s.sendall(b'h')
    while True:
        try:
            if not s.recv(9):
                return b''
        except BlockingIOError:
            pass
",
    );
    let answer = scene.python.value("timed(stubborn)");
    assert_ends(&answer, libc::ECONNABORTED, VALUE_MS + 100, LATE_MS);
    let event = follow.wait("timeout", |event| event["kind"] == "timeout");
    assert_eq!(event["which"], "read", "{event}");
    assert_eq!(event["value_ms"], VALUE_MS, "{event}");
    assert!(
        event["elapsed_ms"].as_i64() >= Some(VALUE_MS + 100),
        "{event}"
    );
    let row = scene.agent.wait_row(DESTINATION, "counted", |row| {
        row["failures"]["read_timeout"] == 1
    });
    assert_eq!(row["in_flight"], 0, "{row:#}");
}

/// Ended at the value, and at least once before what comes behind an option would have been due.
#[track_caller]
fn assert_ends_at_the_value(mut run: impl FnMut() -> Value) {
    for _ in 0..TRIES {
        let answer = run();
        // The agent was quicker than the program: this says nothing.
        if answer[0] == -libc::EAGAIN {
            continue;
        }
        assert_ends(&answer, libc::ECONNABORTED, SLOW_MS, 2 * LATE_MS);
        if answer[1].as_i64() < Some(SLOW_MS + BEHIND_MS) {
            return;
        }
    }
    panic!("never on time");
}

/// A receive on a new connection sleeps before the agent has seen it: no option wakes it, and it is
/// ended at the value, not later.
#[test]
fn a_receive_that_sleeps_already_is_ended() {
    need!("python3");
    let mut scene = Scene::new("option-asleep", SLOW);
    scene.python.run(
        "
def at_once():
    s = socket.create_connection(('10.77.0.2', 8080))
    s.sendall(b'h')
    return s.recv(1)
",
    );
    assert_ends_at_the_value(|| scene.python.value("timed(at_once)"));
}

/// Calls that do not wait feel no option: their exchange is ended at the value, not later.
#[test]
fn a_socket_that_does_not_block_is_ended() {
    need!("python3");
    let mut scene = Scene::new("option-nonblock", SLOW);
    scene.python.run(
        "
import select
def connect():
    global n
    n = socket.socket()
    n.setblocking(False)
    n.connect_ex(('10.77.0.2', 8080))
    select.select([], [n], [])
def polled():
    n.send(b'h')
    while True:
        select.select([n], [], [])
        # What was pushed before is read over.
        if not n.recv(9):
            return b''
",
    );
    assert_ends_at_the_value(|| {
        scene.python.value("connect()");
        // This one was seen after the other, or with it.
        scene.python.value(CONNECT);
        let answer = scene.python.value("bounded(s)");
        assert_ends(&answer, libc::EAGAIN, SLOW_MS, LATE_MS);
        scene.python.value("timed(polled)")
    });
    // A blocking one is given the time.
    scene.python.run(
        "
def stubborn():
    s.sendall(b'h')
    while True:
        try:
            if not s.recv(9):
                return b''
        except BlockingIOError:
            pass
",
    );
    let answer = scene.python.value("timed(stubborn)");
    assert_ends(&answer, libc::ECONNABORTED, SLOW_MS + BEHIND_MS, LATE_MS);
}

/// A stricter value of the program stays, set before ours, and a longer one is what it reads back.
#[test]
fn the_programs_own_value_before() {
    need!("python3");
    let mut scene = Scene::new("option-before", CONFIG);
    scene.python.run(
        "
def own(ms):
    s = socket.socket()
    sets(s, 'SO_RCVTIMEO', ms)
    s.connect(('10.77.0.2', 8080))
    return s
",
    );
    scene
        .python
        .value("[strict := own(100), long := own(7000)] and 0");
    // Those were seen before this one, or with it.
    scene.connect();
    let answer = scene.python.value("bounded(strict)");
    assert_ends(&answer, libc::EAGAIN, 100, LATE_MS);
    let answer = scene.python.value("bounded(long)");
    assert_ends(&answer, libc::EAGAIN, VALUE_MS, LATE_MS);
    for (name, option, ms) in [
        ("strict", "SO_RCVTIMEO", 100),
        ("long", "SO_RCVTIMEO", 7000),
        ("long", "SO_SNDTIMEO", 0),
        ("s", "SO_RCVTIMEO", 0),
        ("s", "SO_SNDTIMEO", 0),
    ] {
        assert_eq!(scene.told(name, option), ms, "{name} {option}");
    }
    let Scene {
        agent, mut python, ..
    } = scene;
    agent.stop();
    // Nobody is between the program and the kernel any more.
    for (name, ms) in [("strict", 100), ("long", 7000), ("s", 0)] {
        for (option, ms) in [("SO_RCVTIMEO", ms), ("SO_SNDTIMEO", 0)] {
            assert_eq!(python.value(&format!("told({name}, '{option}')")), ms);
        }
    }
}

/// What the program sets later is its own: stricter, longer, or the same as ours.
#[test]
fn the_programs_own_value_after() {
    need!("python3");
    for own in [100, VALUE_MS, 20_000] {
        let mut scene = Scene::new("option-after", CONFIG);
        scene.connect();
        scene
            .python
            .value(&format!("sets(s, 'SO_RCVTIMEO', {own})"));
        assert_eq!(scene.told("s", "SO_RCVTIMEO"), own);
        // With more, the server sends something first.
        if own <= VALUE_MS {
            let answer = scene.python.value("bounded(s)");
            assert_ends(&answer, libc::EAGAIN, own, LATE_MS);
        } else {
            scene.assert_unbounded("s");
        }
        // Connections are looked at again for this one: it stays.
        scene
            .python
            .value("(t := socket.create_connection(('10.77.0.2', 8080))) and 0");
        let other = scene.python.value("bounded(t)");
        assert_ends(&other, libc::EAGAIN, VALUE_MS, LATE_MS);
        assert_eq!(scene.told("s", "SO_RCVTIMEO"), own);
        let Scene {
            agent, mut python, ..
        } = scene;
        agent.stop();
        assert_eq!(python.value("told(s, 'SO_RCVTIMEO')"), own);
        assert_eq!(python.value("told(s, 'SO_SNDTIMEO')"), 0);
    }
}

#[test]
fn a_stop_gives_it_back() {
    need!("python3");
    let mut scene = Scene::new("option-stop", CONFIG);
    scene.connect();
    assert_eq!(attached::sockopt_programs(&scene.group), [1; 2]);
    let Scene {
        agent,
        mut python,
        group,
        ..
    } = scene;
    let finished = agent.stop();
    assert_eq!(finished.code(), 0, "{}", finished.stderr);
    assert_eq!(python.value("told(s, 'SO_RCVTIMEO')"), 0);
    assert_eq!(python.value("told(s, 'SO_SNDTIMEO')"), 0);
    assert_eq!(attached::sockopt_programs(&group), [0; 2]);
}

/// Nobody is left to give it back.
#[test]
fn a_killed_agent_leaves_the_option() {
    need!("python3");
    let mut scene = Scene::new("option-kill", CONFIG);
    scene.connect();
    let Scene {
        agent, mut python, ..
    } = scene;
    agent.kill();
    assert_eq!(python.value("told(s, 'SO_RCVTIMEO')"), VALUE_MS);
    assert_eq!(python.value("told(s, 'SO_SNDTIMEO')"), VALUE_MS);
}

#[test]
fn a_pause_gives_it_back_and_a_resume_sets_it_again() {
    need!("python3");
    let mut scene = Scene::new("option-pause", CONFIG);
    scene.connect();
    let paused = scene.agent.command(&["pause"]);
    assert_eq!(paused.code(), 0, "{}", paused.stderr);
    scene.assert_unbounded("s");
    let resumed = scene.agent.command(&["resume"]);
    assert_eq!(resumed.code(), 0, "{}", resumed.stderr);
    let answer = scene.python.value("bounded(s)");
    assert_ends(&answer, libc::EAGAIN, VALUE_MS, LATE_MS);
}

/// Another value, another action, and back.
#[test]
fn a_policy_that_changes() {
    need!("python3");
    let mut scene = Scene::new("option-reload", CONFIG);
    scene.connect();
    let reload = |scene: &Scene, config: &str| {
        scene.agent.home().write_config(config);
        let response = scene.agent.request("POST", "/v1/reload");
        assert_eq!(response.status, 200, "{}", response.body);
    };
    reload(&scene, "[defaults.timeouts]\nread = \"300ms\"\n");
    scene.assert_unbounded("s");
    assert_eq!(scene.told("s", "SO_RCVTIMEO"), 0);
    // The hooks cost something: they are not there when nobody needs them.
    assert_eq!(attached::sockopt_programs(&scene.group), [0; 2]);
    reload(&scene, CONFIG);
    let answer = scene.python.value("bounded(s)");
    assert_ends(&answer, libc::EAGAIN, VALUE_MS, LATE_MS);
    // A policy for nobody here leaves the destination without one.
    let other = "[[policy]]\nname = \"other\"\ndestinations = [\"192.0.2.1\"]\n\
                 timeouts = { read = \"300ms\", read_action = \"option\" }\n";
    reload(&scene, other);
    // Given back at the next look, which the hooks outlive.
    scene.python.run(
        "
def freed(s):
    while timed(lambda: s.recv(1))[0] != 1 or timed(lambda: s.recv(1))[0] != 1:
        pass
",
    );
    scene.python.value("freed(s)");
    scene.assert_unbounded("s");
}

/// The process that connected is gone, and a child has the socket.
#[test]
fn a_child_that_has_the_socket() {
    need!("python3");
    let mut scene = Scene::new("option-child", CONFIG);
    // From here on the child answers.
    scene.python.run(
        "
s = socket.create_connection(('10.77.0.2', 8080))
if os.fork():
    os._exit(0)
",
    );
    let answer = scene.python.value("bounded(s)");
    assert_ends(&answer, libc::EAGAIN, VALUE_MS, LATE_MS);
    let Scene {
        agent, mut python, ..
    } = scene;
    agent.stop();
    assert_eq!(python.value("told(s, 'SO_RCVTIMEO')"), 0);
}

/// A thousand connections of one process, all of them bounded, and given back.
#[test]
fn a_thousand_connections_of_one_process() {
    need!("python3");
    let mut scene = Scene::new("option-many", CONFIG);
    scene.python.run(
        "
from concurrent.futures import ThreadPoolExecutor
all = [socket.create_connection(('10.77.0.2', 8080)) for _ in range(1000)]
def many():
    with ThreadPoolExecutor(200) as pool:
        return sorted(set(answer[0] for answer in pool.map(bounded, all)))
",
    );
    assert_eq!(scene.python.value("many()"), json!([-libc::EAGAIN]));
    let Scene {
        agent, mut python, ..
    } = scene;
    let finished = agent.stop();
    assert_eq!(finished.code(), 0, "{}", finished.stderr);
    let left = "[told(s, 'SO_RCVTIMEO') + told(s, 'SO_SNDTIMEO') for s in all]";
    assert_eq!(python.value(&format!("sum({left})")), 0);
}

/// While a connect is pending, TCP_USER_TIMEOUT is ours in the kernel, and the program's own where
/// the program looks.
#[test]
fn a_pending_connect_shows_the_programs_own_timeout() {
    need!("python3");
    let mut scene = Scene::new("option-pending", CONFIG);
    scene.net.server.nft(
        "add table inet gone\n\
         add chain inet gone in { type filter hook input priority 0; policy drop; }\n",
    );
    scene.python.run(
        "
import errno, select
def pending():
    s = socket.socket()
    s.setblocking(False)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 9000)
    begin = time.monotonic()
    assert s.connect_ex(('10.77.0.2', 8080)) == errno.EINPROGRESS
    told = set()
    while not select.select([], [s], [], 0.01)[1]:
        told.add(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
    error = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    return [sorted(told), error, 1.9 < time.monotonic() - begin < 8.9]
",
    );
    // Ours had ended it: so it was on the socket all the second half of the time.
    assert_eq!(
        scene.python.value("pending()"),
        json!([[9000], libc::ETIMEDOUT, true])
    );
}
