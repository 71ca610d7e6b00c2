//! Real servers that speak first, and real servers that ask for fewer calls.

use std::{net::TcpStream, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use rustix::process::Signal;
use tempfile::TempDir;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    nginx::Nginx,
    outcome::{expect, judged},
    process::{Program, Running, find},
    talk::{CONNECT, DESTINATION, PATIENCE, TO},
    wait,
};

/// For a server to listen, on a busy machine.
const START: Duration = Duration::from_secs(60);
/// Counts and judges, never opens.
const NEVER_OPENS: &str = r#"
[defaults.breaker]
failure_rate = "off"
consecutive_failures = 0
"#;

struct Place {
    net: TestNet,
    group: TestCgroup,
    directory: TempDir,
}

impl Place {
    fn new(label: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(directory.path(), open).expect("let the server's user in");
        Self {
            net: TestNet::new(),
            group: TestCgroup::new(label),
            directory,
        }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    fn server(&self, program: Program) -> Running {
        let server = program.in_netns(&self.net.server).within(START).spawn();
        self.net.server.enter(|| {
            wait::until("the server to listen", START, || {
                TcpStream::connect(TO).ok()
            });
        });
        server
    }

    fn agent(&self) -> (Agent, Interpreter) {
        let agent = Agent::start(&self.group, NEVER_OPENS);
        (agent, Interpreter::start(&self.group, &self.net.client))
    }

    fn client(&self, program: Program) -> Program {
        program.in_cgroup(&self.group).in_netns(&self.net.client)
    }
}

/// A server that is stopped hangs: its greeting is owed and does not come.
fn a_stopped_server_is_seen(
    agent: &Agent,
    python: &mut Interpreter,
    server: &Running,
    responses: u64,
) {
    server.signal(Signal::STOP);
    python.value(CONNECT);
    python.value(PATIENCE);
    let row = agent.row(DESTINATION);
    assert_eq!(row["in_flight"], 1, "{row:#}");
    python.value("s.close()");
    let row = agent.wait_row(DESTINATION, "given up", |row| {
        row["failures"]["gave_up"] == 1 && row["in_flight"] == 0
    });
    assert_eq!(row["responses"], responses, "{row:#}");
    server.signal(Signal::CONT);
}

#[test]
fn mariadb() {
    need!("mariadbd", "mariadb-install-db", "mariadb", "python3");
    let place = Place::new("mariadb");
    let data = place.path().join("data");
    Program::new("mariadb-install-db")
        .args(["--no-defaults", "--user=mysql", "--skip-test-db"])
        .arg(format!("--datadir={}", data.display()))
        .within(START)
        .run()
        .good();
    let server = place.server(
        Program::new(find("mariadbd").expect("installed"))
            .args(["--no-defaults", "--user=mysql", "--skip-grant-tables"])
            .args(["--skip-name-resolve", "--max-connections=10", "--port=8080"])
            .arg("--bind-address=10.77.0.2")
            .arg(format!("--datadir={}", data.display()))
            .arg(format!("--socket={}", place.path().join("s").display())),
    );
    let (agent, mut python) = place.agent();
    for _ in 0..4 {
        let query = ["-h", "10.77.0.2", "-P", "8080", "-N", "-e", "select 1"];
        let program = Program::new("mariadb").arg("--no-defaults").args(query);
        assert_eq!(place.client(program).run().good(), "1\n");
    }
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(judged(&row).1, 0, "{row:#}");
    let responses = row["responses"].as_u64().expect("a number");
    // At least the greeting, the login and the query.
    assert!(responses >= 12, "{row:#}");
    // Greeted and gone, as `mariadb-admin ping` without a password is.
    python.value(CONNECT);
    python.value("s.recv(999)");
    python.value("s.close()");
    agent.wait_row(DESTINATION, "a greeting", |row| {
        row["responses"] == responses + 1 && row["in_flight"] == 0
    });
    a_stopped_server_is_seen(&agent, &mut python, &server, responses + 1);
    // As many as there may be (one more is for the administrator), and one that is turned away.
    let connect = "socket.create_connection(('10.77.0.2', 8080))";
    python.value("(all := []) or 0");
    wait::until("a refusal", START, || {
        python.value(&format!("all.append({connect})"));
        let first = python.value("all[-1].recv(999)[4:7].hex()");
        (first == "ff1004").then_some(())
    });
    agent.wait_row(DESTINATION, "too many connections", |row| {
        row["failures"]["status"] == 1
    });
    python.value("[s.close() for s in all] and 0");
    agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
}

#[test]
fn openssh() {
    need!("sshd", "ssh", "ssh-keygen", "python3");
    let place = Place::new("openssh");
    let key = place.path().join("key");
    Program::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(&key)
        .run()
        .good();
    std::fs::create_dir_all("/run/sshd").expect("make the folder that sshd wants");
    let server = place.server(
        Program::new(find("sshd").expect("installed"))
            .args(["-D", "-e", "-f", "/dev/null", "-p", "8080", "-h"])
            .arg(&key)
            .args(["-o", "ListenAddress=10.77.0.2", "-o", "MaxStartups=10"])
            .args(["-o", "UsePAM=no", "-o", "PidFile=none"]),
    );
    let (agent, mut python) = place.agent();
    let ssh = |timeout: &str| {
        let program = Program::new("ssh")
            .args(["-F", "none", "-p", "8080", "-o", "BatchMode=yes"])
            .args(["-o", "StrictHostKeyChecking=no", "-o"])
            .args(["UserKnownHostsFile=/dev/null", "-o", "IdentityFile=none"])
            .args(["-o", &format!("ConnectTimeout={timeout}")])
            .args(["nobody@10.77.0.2", "true"]);
        place.client(program).run()
    };
    for _ in 0..3 {
        let finished = ssh("60");
        assert!(finished.stderr.contains("denied"), "{finished}");
    }
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(judged(&row).1, 0, "{row:#}");
    assert!(row["responses"].as_u64() >= Some(9), "{row:#}");
    // More than it lets begin: each stays without having logged in.
    let connect = "socket.create_connection(('10.77.0.2', 8080))";
    python.value("(all := []) or 0");
    wait::until("a refusal", START, || {
        python.value(&format!("all.append({connect})"));
        let first = python.value("all[-1].recv(999)[:8].decode()");
        (first == "Exceeded").then_some(())
    });
    agent.wait_row(DESTINATION, "too many", |row| {
        row["failures"]["status"] == 1
    });
    python.value("[s.close() for s in all] and 0");
    // Its clients speak first, without waiting for a greeting: that one is owed an answer.
    server.signal(Signal::STOP);
    let (waiting, finished) = std::thread::scope(|scope| {
        let running = scope.spawn(|| ssh("8"));
        let waiting = agent.wait_row(DESTINATION, "waiting", |row| row["in_flight"] == 1);
        (waiting, running.join().expect("ssh"))
    });
    assert!(finished.stderr.contains("timed out"), "{finished}");
    // It exits instead of closing: that is nobody's failure.
    let abandoned = waiting["abandoned"].as_u64().expect("a number") + 1;
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["abandoned"], abandoned, "{row:#}");
    assert_eq!(row["failures"]["status"], 1, "{row:#}");
    server.signal(Signal::CONT);
}

#[test]
fn redis_with_too_many_clients() {
    need!("redis-server", "redis-cli", "python3");
    let place = Place::new("redis-full");
    let _server = place.server(
        Program::new("redis-server")
            .args(["--bind", "10.77.0.2", "--port", "8080", "--save", ""])
            .args(["--protected-mode", "no", "--maxclients", "1", "--dir"])
            .arg(place.path()),
    );
    let (agent, mut python) = place.agent();
    let ping = || {
        let program = Program::new("redis-cli").args(["-h", "10.77.0.2", "-p", "8080", "ping"]);
        place.client(program).run()
    };
    // The test's own look whether it listens may still count as a client.
    wait::until("room for one", START, || {
        (ping().stdout == "PONG\n").then_some(())
    });
    // And so may the client before.
    wait::until("the only place", START, || {
        python.value(CONNECT);
        let said = "s.sendall(b'PING\\r\\n') or s.recv(99).decode() == '+PONG\\r\\n'";
        let answer = python.answer(said);
        (answer["value"] == true).then_some(())
    });
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    let before = row["failures"]["status"].as_u64().expect("a number");
    let finished = ping();
    assert!(!finished.stdout.contains("PONG"), "{finished}");
    // Whether it says so before or after it is asked: it is said, and that is a failure. (redis-cli
    // may ask all the same, which is another, and may try once more.)
    agent.wait_row(DESTINATION, "a failure", |row| {
        row["in_flight"] == 0 && row["failures"]["status"].as_u64() > Some(before)
    });
}

#[test]
fn who_asks_for_fewer_calls_is_seen() {
    need!("nginx", "curl");
    let place = Place::new("throttled");
    let config = "listen 10.77.0.2:8080;\n\
        location /429 { return 429; }\n\
        location /503 { return 503; }\n\
        location /later { add_header Retry-After 3 always; return 503 short; }\n\
        location /long { add_header X-Some-Header \"a rather long value, so that the name stands \
        far behind the begin of the answer, which is read in pieces of 64 bytes\" always;\n\
        add_header Retry-After 3 always; return 503 short; }\n\
        location / { return 200 \"Retry-After: 3\"; }\n";
    let _nginx = Nginx::start(&place.net.server, TO, config);
    let (agent, _python) = place.agent();
    let mut wanted = (0, 0, 0);
    for (path, throttled, failed) in [
        ("/", 0, 0),
        ("/429", 1, 0),
        ("/503", 0, 1),
        ("/later", 1, 1),
        ("/long", 1, 1),
    ] {
        let url = format!("http://{TO}{path}");
        let program = Program::new("curl").args(["-q", "-s", "-o", "/dev/null", &url]);
        place.client(program).run().good();
        wanted = (wanted.0 + 1, wanted.1 + throttled, wanted.2 + failed);
        agent.wait_row(DESTINATION, path, |row| {
            row["responses"] == wanted.0
                && row["throttled"] == wanted.1
                && row["failures"]["status"] == wanted.2
        });
    }
    let row = expect(&agent, DESTINATION, &[("responses", 5), ("status", 3)]);
    assert_eq!(judged(&row), (5, 3), "{row:#}");
    let text = agent.command(&["status", DESTINATION]).good();
    assert!(text.contains("throttled    3"), "{text}");
    assert_eq!(agent.metric("backstop_throttled_total", &[]), Some(3.0));
}
