//! A load balancer looks after its servers by checks of its own, which go through the breaker like
//! every other call: it sees a server's return at most one check later than without Backstop.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tempfile::TempDir;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    need,
    net::TestNet,
    place::TO,
    process::{Program, Running},
    server::{Server, read_head},
    wait,
};

const DESTINATION: &str = "10.77.0.2:8080";
/// Between two checks.
const EVERY: Duration = Duration::from_millis(1_000);
const SOON: Duration = Duration::from_secs(60);

/// HAProxy with one server, which it checks.
struct Balancer {
    directory: TempDir,
    _process: Running,
}

impl Balancer {
    fn start(net: &TestNet, group: Option<&TestCgroup>, check: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path().display();
        let every = EVERY.as_millis();
        let config = format!(
            "global\n  stats socket {at}/socket mode 600 level admin\n\
             defaults\n  mode http\n  timeout connect 500ms\n  timeout client 5s\n  timeout server 5s\n\
             backend checked\n  {check}\n  server one {DESTINATION} check inter {every}ms fall 2 rise 2\n"
        );
        let file = directory.path().join("haproxy.cfg");
        fs::write(&file, config).expect("write haproxy.cfg");
        let mut program = Program::new("haproxy")
            .args(["-db", "-f"])
            .arg(&file)
            .in_netns(&net.client)
            .within(10 * SOON);
        if let Some(group) = group {
            program = program.in_cgroup(group);
        }
        Self {
            _process: program.spawn(),
            directory,
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("socket")
    }

    /// What it thinks of its server; `None` while it does not answer.
    fn thinks(&self) -> Option<String> {
        let mut stream = UnixStream::connect(self.socket()).ok()?;
        stream.write_all(b"show stat\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        let mut lines = text.lines().map(|line| line.split(',').collect::<Vec<_>>());
        let column = lines.next()?.iter().position(|name| *name == "status")?;
        let server = lines.find(|fields| fields.get(1) == Some(&"one"))?;
        server.get(column).map(|&status| status.to_owned())
    }

    fn until(&self, wanted: &str) -> Instant {
        wait::until(&format!("it to think {wanted}"), SOON, || {
            self.thinks()
                .is_some_and(|thinks| thinks.starts_with(wanted))
                .then(Instant::now)
        })
    }
}

/// Two that look after the same server, one of them through a breaker. `goes` and `returns` change the
/// server; between them the breaker has opened.
fn sees_it_as_soon_as_others(
    check: &str,
    net: &TestNet,
    goes: impl FnOnce(),
    returns: impl FnOnce(),
) {
    let group = TestCgroup::new("balancer");
    // What comes by the cooldown comes too late.
    let agent = Agent::start(&group, "[defaults.breaker]\ncooldown = \"5m\"\n");
    let protected = Balancer::start(net, Some(&group), check);
    let other = Balancer::start(net, None, check);
    protected.until("UP");
    other.until("UP");
    goes();
    protected.until("DOWN");
    other.until("DOWN");
    agent.wait_row(DESTINATION, "refused checks", |row| {
        row["rejected"]["breaker"].as_u64() >= Some(2)
    });
    returns();
    let returned = Instant::now();
    let (other, protected) = std::thread::scope(|scope| {
        let other = scope.spawn(|| other.until("UP") - returned);
        let protected = protected.until("UP") - returned;
        (other.join().expect("no panic"), protected)
    });
    eprintln!("{check}: up after {protected:?}, the other one after {other:?}");
    // One check later at most. Their checks are not in step: up to one more. And the machine has much
    // else to do; by the cooldown it would be minutes.
    assert!(
        protected <= other + EVERY * 20,
        "{protected:?}, the other one {other:?}: {:#}",
        agent.row(DESTINATION)
    );
}

#[test]
fn of_connects() {
    need!("haproxy");
    let net = TestNet::new();
    let server = std::cell::Cell::new(Some(Server::start(&net.server, TO)));
    sees_it_as_soon_as_others(
        "",
        &net,
        || drop(server.take()),
        || server.set(Some(Server::start(&net.server, TO))),
    );
}

#[test]
fn of_answers() {
    need!("haproxy");
    let net = TestNet::new();
    let sick = Arc::new(AtomicBool::new(false));
    let is_sick = Arc::clone(&sick);
    let _server = Server::with(&net.server, TO, move |mut stream| {
        if read_head(&mut stream).is_some() {
            let status = match is_sick.load(Ordering::SeqCst) {
                true => "503 Service Unavailable",
                false => "200 OK",
            };
            let answer =
                format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    sees_it_as_soon_as_others(
        "option httpchk GET /health",
        &net,
        || sick.store(true, Ordering::SeqCst),
        || sick.store(false, Ordering::SeqCst),
    );
}
