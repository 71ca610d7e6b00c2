//! The agent's own timeouts reach into every network namespace: named or not, of a container or of a
//! user who is not root.

use std::{fs, io::Write as _, net::TcpStream, path::Path, sync::mpsc, time::Duration};

use serde_json::{Value, json};
use tempfile::TempDir;
use tests::{
    agent::{Agent, AgentOptions},
    cgroup::TestCgroup,
    interpreter::{Interpreter, LOOP},
    need,
    net::TestNet,
    outcome::expect,
    process::{Program, find},
    server::Server,
    skip,
    talk::{CONNECT, DESTINATION, TO, read_byte, wait_end},
    unique, wait,
};

/// Debian's own: what a container of bind mounts has.
const PYTHON: &str = "/usr/bin/python3";

/// After the value, and at most so many ms later: the machine is shared with other tests. Without us
/// none of this would ever end.
const LATE_MS: i64 = 20_000;

const TIMED: &str = "
def timed(f):
    begin = time.monotonic()
    try:
        result = f() and 0
    except OSError as error:
        result = error.errno
    return [result, round((time.monotonic() - begin) * 1000)]
def pour():
    while True:
        s.send(bytes(1 << 16))
";

#[track_caller]
fn assert_ended(answer: &Value, errno: i32, value_ms: i64, late_ms: i64) {
    assert_eq!(answer[0], errno, "{answer}");
    let took = answer[1].as_i64().expect("a number");
    let right = value_ms - 1..value_ms + late_ms;
    assert!(right.contains(&took), "{value_ms} ms took {took} ms");
}

/// A container by runc: Debian's root by mounts of this machine's, processes, mounts and host name
/// of its own, and a network namespace that somebody else has made, as it is with Kubernetes.
struct Container {
    bundle: TempDir,
    id: String,
}

impl Container {
    fn new(group: &TestCgroup, net: &TestNet) -> Self {
        let bundle = tempfile::tempdir().expect("a directory");
        let mounts = ["/usr", "/lib", "/lib64", "/bin", "/etc/alternatives"];
        let mut mounts: Vec<Value> = mounts
            .into_iter()
            .filter(|source| Path::new(source).exists())
            .map(|at| json!({"destination": at, "source": at, "type": "bind", "options": ["rbind", "ro"]}))
            .collect();
        mounts.push(json!({"destination": "/proc", "source": "proc", "type": "proc"}));
        let config = json!({
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": 0, "gid": 0},
                "args": [PYTHON, "-c", LOOP],
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
            },
            "root": {"path": "root"},
            "hostname": "inside",
            "mounts": mounts,
            "linux": {
                "cgroupsPath": format!("/{}", group.workload()),
                "namespaces": [
                    {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                    {"type": "network", "path": net.client.path()},
                ],
            },
        });
        fs::create_dir(bundle.path().join("root")).expect("make a directory");
        fs::write(bundle.path().join("config.json"), config.to_string()).expect("write a file");
        Self {
            bundle,
            id: unique("container"),
        }
    }

    fn runc(&self) -> Program {
        Program::new(find("runc").expect("installed"))
            .arg("--root")
            .arg(self.bundle.path().join("state"))
    }

    /// Starts the container's process.
    fn start(&self) -> Interpreter {
        let run = self.runc().args(["run", "--bundle"]);
        Interpreter::start_by(run.arg(self.bundle.path()).arg(&self.id))
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.runc().args(["delete", "--force", &self.id]).run();
    }
}

const FOUR: &str = r#"
[defaults]
breaker = "off"
[defaults.timeouts]
connect = "2s"
[[policy]]
name = "read"
destinations = ["10.77.0.2:8080"]
timeouts = { read = "300ms" }
[[policy]]
name = "write"
destinations = ["10.77.0.2:8081"]
timeouts = { write = "500ms" }
[[policy]]
name = "deadline"
destinations = ["10.77.0.2:8082"]
timeouts = { deadline = "600ms" }
"#;

#[test]
fn every_timeout_inside_a_container() {
    need!("runc");
    if !Path::new(PYTHON).exists() {
        skip!("there is no {PYTHON}");
    }
    let net = TestNet::new();
    let group = TestCgroup::new("container");
    let agent = Agent::start(&group, FOUR);
    let (_end, ended) = mpsc::channel::<()>();
    let ended = std::sync::Mutex::new(ended);
    let _servers = [
        Server::with(&net.server, TO, wait_end),
        Server::with(&net.server, TestNet::server4(8081), move |_unread| {
            let _ = ended.lock().expect("no panic").recv();
        }),
        Server::with(&net.server, TestNet::server4(8082), wait_end),
    ];
    let container = Container::new(&group, &net);
    let mut python = container.start();
    assert_eq!(python.value("socket.gethostname()"), "inside");
    assert_eq!(python.value("os.getpid()"), 1);
    python.run(TIMED);
    let connect =
        |port: u16| format!("(s := socket.create_connection(('10.77.0.2', {port}))) and 0");

    let blackhole = TestNet::blackhole4(0);
    let answer = python.value(&format!(
        "timed(lambda: socket.create_connection(('{blackhole}', 80)))"
    ));
    assert_ended(&answer, libc::ETIMEDOUT, 2_000, LATE_MS);
    expect(
        &agent,
        &format!("{blackhole}:80"),
        &[("connect_timeout", 1)],
    );

    python.value(&connect(8080));
    let answer = python.value("timed(lambda: s.send(b'x') and s.recv(9))");
    assert_ended(&answer, libc::ECONNABORTED, 300, LATE_MS);
    let row = expect(&agent, DESTINATION, &[("read_timeout", 1)]);
    assert_eq!(row["workload"], group.workload(), "{row:#}");
    assert_eq!(row["netns"], net.client.inode(), "{row:#}");

    python.value(&connect(8081));
    // Filling the buffers takes its time, too; a write timeout comes by up to 600 ms late.
    let answer = python.value("timed(pour)");
    assert_ended(&answer, libc::ECONNABORTED, 500, 600 + 2 * LATE_MS);
    expect(&agent, "10.77.0.2:8081", &[("write_timeout", 1)]);

    // The deadline counts from the begin of the connect.
    let connect = connect(8082);
    let answer = python.value(&format!(
        "timed(lambda: {connect} or s.send(b'x') and s.recv(9))"
    ));
    assert_ended(&answer, libc::ECONNABORTED, 600, LATE_MS);
    expect(&agent, "10.77.0.2:8082", &[("deadline", 1)]);
}

/// The same two ends in two namespaces: what hangs in one is ended there, and nowhere else.
#[test]
fn the_same_addresses_in_another_namespace_are_left_alone() {
    need!("python3");
    let (sick, healthy) = (TestNet::new(), TestNet::new());
    let _hangs = Server::with(&sick.server, TO, wait_end);
    let _answers = Server::with(&healthy.server, TO, tests::talk::echo);
    let (a, b) = (TestCgroup::new("sick"), TestCgroup::new("healthy"));
    // Long enough for a healthy server on a busy machine.
    let config = "[defaults.timeouts]\nread = \"3s\"\n";
    let agent = AgentOptions::new(&a).and(&b).config(config).start();
    let mut bad = Interpreter::start(&a, &sick.client);
    let mut good = Interpreter::start(&b, &healthy.client);
    // With one local port, too: only the namespace tells the two connections apart.
    let bound =
        "(s := socket.create_connection(('10.77.0.2', 8080), None, ('10.77.0.1', 7777))) and 0";
    bad.value(bound);
    good.value(bound);
    good.value("s.sendall(b'x') or len(s.recv(9))");
    assert_eq!(
        bad.errno("s.sendall(b'x') or s.recv(9)"),
        libc::ECONNABORTED
    );
    assert_eq!(good.value("s.sendall(b'x') or len(s.recv(9))"), 1);
    // The program is woken before the end of the connection is counted (net/ipv4/tcp.c, `tcp_abort`).
    let rows = wait::until("both counted", Duration::from_secs(60), || {
        let rows = agent.rows(DESTINATION);
        let is_quiet = rows.iter().all(|row| row["in_flight"] == 0);
        (rows.len() == 2 && is_quiet).then_some(rows)
    });
    for row in rows {
        let is_sick = row["netns"] == sick.client.inode();
        assert_eq!(
            row["failures"]["read_timeout"],
            u64::from(is_sick),
            "{row:#}"
        );
        assert_eq!(row["responses"], if is_sick { 0 } else { 2 }, "{row:#}");
    }
}

/// A namespace without a name, which only the program itself leads to; and one of a user namespace,
/// as containers without root have.
#[test]
fn a_namespace_that_has_no_name() {
    need!("python3", "unshare", "ip");
    let python = tests::process::python().display().to_string();
    for options in [
        ["--net", "--fork"].as_slice(),
        ["--net", "--fork", "--user", "--map-root-user"].as_slice(),
    ] {
        let group = TestCgroup::new("unnamed");
        let agent = Agent::start(&group, "[defaults.timeouts]\nread = \"300ms\"\n");
        let inside = "ip link set lo up && exec \"$0\" -c \"$1\"";
        let program = Program::new("unshare")
            .args(options)
            .args(["sh", "-c", inside, &python, LOOP])
            .in_cgroup(&group);
        let mut python = Interpreter::start_by(program);
        python.run(TIMED);
        python.run("listener = socket.create_server(('127.0.0.1', 8080))");
        python.value("(s := socket.create_connection(('127.0.0.1', 8080))) and 0");
        let answer = python.value("timed(lambda: s.send(b'x') and s.recv(9))");
        assert_ended(&answer, libc::ECONNABORTED, 300, LATE_MS);
        let row = expect(&agent, "127.0.0.1:8080", &[("read_timeout", 1)]);
        let inode = python.value("os.stat('/proc/self/ns/net').st_ino");
        assert_eq!(row["netns"], inode, "{row:#}");
    }
}

/// The program's namespace loses its name while it waits (a pod that is being deleted).
#[test]
fn a_namespace_that_loses_its_name() {
    need!("python3");
    let net = TestNet::new();
    let _server = Server::with(&net.server, TO, |mut stream: TcpStream| {
        read_byte(&mut stream);
        let _ = stream.write_all(b"y");
        wait_end(stream);
    });
    let group = TestCgroup::new("lost-name");
    let agent = Agent::start(&group, "[defaults.timeouts]\nread = \"3s\"\n");
    let mut python = Interpreter::start(&group, &net.client);
    python.run(TIMED);
    python.value(CONNECT);
    python.value("s.sendall(b'x') or s.recv(9) and 0");
    let name = net.client.name().to_owned();
    Program::new("ip")
        .args(["netns", "del", &name])
        .run()
        .good();
    let answer = python.value("timed(lambda: s.send(b'x') and s.recv(9))");
    assert_ended(&answer, libc::ECONNABORTED, 3_000, LATE_MS);
    expect(
        &agent,
        DESTINATION,
        &[("read_timeout", 1), ("responses", 1)],
    );
}
