//! Real servers and their own clients: what they say when they are well, and when they are not.

use std::{
    fs::{self, Permissions},
    net::{SocketAddr, TcpStream},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    need,
    net::TestNet,
    outcome::{expect, judged},
    process::{Finished, Program, Running},
    skip, wait,
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
/// For a server to listen, on a busy machine.
const START: Duration = Duration::from_secs(20);
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
        Self {
            net: TestNet::new(),
            group: TestCgroup::new(label),
            directory,
        }
    }

    /// The agent, once the server listens: what that took is nobody's attempt.
    fn agent(&self) -> Agent {
        self.net.server.enter(|| {
            wait::until("the server to listen", START, || {
                TcpStream::connect(TO).ok()
            });
        });
        Agent::start(&self.group, NEVER_OPENS)
    }

    fn client(&self, program: Program) -> Program {
        program.in_cgroup(&self.group).in_netns(&self.net.client)
    }

    fn redis(&self, options: &[&str]) -> Running {
        Program::new("redis-server")
            .args(["--bind", "10.77.0.2", "--port", "8080", "--save", ""])
            .args(["--protected-mode", "no", "--dir"])
            .arg(self.directory.path())
            .args(options)
            .in_netns(&self.net.server)
            .spawn()
    }

    fn redis_cli(&self, command: &[&str]) -> Program {
        let to = ["-h", "10.77.0.2", "-p", "8080"];
        self.client(Program::new("redis-cli").args(to).args(command))
    }
}

/// No failure of any kind.
#[track_caller]
fn assert_healthy(agent: &Agent) -> Value {
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    let failures = row["failures"].as_object().expect("an object");
    assert!(failures.values().all(|count| *count == 0), "{row:#}");
    assert_eq!(judged(&row).1, 0, "{row:#}");
    row
}

// --- Redis

#[test]
fn redis_is_healthy_while_its_clients_wait() {
    need!("redis-server", "redis-cli");
    let place = Place::new("redis");
    let _server = place.redis(&[]);
    let agent = place.agent();
    for _ in 0..10 {
        assert_eq!(place.redis_cli(&["ping"]).run().good(), "PONG\n");
    }
    // Nothing comes: the answer says so after a second.
    let waited = place.redis_cli(&["blpop", "nothing", "1"]).run();
    assert!(waited.elapsed >= Duration::from_secs(1), "{waited}");
    let error = place.redis_cli(&["nonsense"]).run();
    assert!(error.stdout.contains("ERR unknown command"), "{error}");
    // Nothing comes, and the waiting program is killed.
    let mut waiting = place.redis_cli(&["blpop", "nothing", "0"]).spawn();
    agent.wait_row(DESTINATION, "waiting", |row| row["in_flight"] == 1);
    waiting.signal(Signal::KILL);
    waiting.extend_deadline(START);
    waiting.wait();
    let row = assert_healthy(&agent);
    assert_eq!(row["responses"], 12, "{row:#}");
    assert_eq!(row["abandoned"], 1, "{row:#}");
}

#[test]
fn redis_that_is_busy_fails() {
    need!("redis-server", "redis-cli");
    let place = Place::new("redis-busy");
    let _server = place.redis(&["--busy-reply-threshold", "50"]);
    let agent = place.agent();
    let endless = ["eval", "while true do end", "0"];
    let running = place.redis_cli(&endless).spawn();
    let busy = wait::until("redis to be busy", START, || {
        let finished = place.redis_cli(&["get", "x"]).run();
        finished.stdout.starts_with("BUSY ").then_some(finished)
    });
    assert_eq!(
        place.redis_cli(&["script", "kill"]).run().good(),
        "OK\n",
        "{busy}"
    );
    running.wait();
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["failures"]["status"], 1, "{row:#}");
}

#[test]
fn a_redis_replica_without_its_master_fails() {
    need!("redis-server", "redis-cli");
    let place = Place::new("redis-replica");
    let options = [
        "--replicaof",
        "127.0.0.1 1",
        "--replica-serve-stale-data",
        "no",
    ];
    let _server = place.redis(&options);
    let agent = place.agent();
    let finished = place.redis_cli(&["get", "x"]).run();
    assert!(finished.stdout.contains("MASTERDOWN"), "{finished}");
    expect(&agent, DESTINATION, &[("responses", 1), ("status", 1)]);
}

/// The server goes away while programs wait for it.
#[test]
fn redis_that_is_killed_fails_those_who_wait() {
    need!("redis-server", "redis-cli");
    let place = Place::new("redis-killed");
    let server = place.redis(&[]);
    let agent = place.agent();
    let waiting: Vec<_> = (0..3)
        .map(|_| place.redis_cli(&["blpop", "nothing", "0"]).spawn())
        .collect();
    agent.wait_row(DESTINATION, "waiting", |row| row["in_flight"] == 3);
    drop(server);
    let closed = |row: &Value| {
        let failures = &row["failures"];
        failures["closed_early"].as_u64().unwrap_or(0) + failures["reset"].as_u64().unwrap_or(0)
    };
    agent.wait_row(DESTINATION, "three failures", |row| closed(row) == 3);
    drop(waiting);
}

// --- PostgreSQL

/// Where the server's programs are; Debian keeps them out of the path.
fn postgres_programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    versions
        .flatten()
        .map(|version| version.path().join("bin"))
        .find(|programs| programs.join("initdb").is_file())
}

struct Postgres {
    place: Place,
    _server: Running,
}

impl Postgres {
    /// With three connections in all.
    fn start(label: &str, programs: &Path) -> Self {
        let place = Place::new(label);
        let data = place.directory.path().join("data");
        fs::set_permissions(place.directory.path(), Permissions::from_mode(0o777))
            .expect("let the server's user in");
        // The server refuses to run as root.
        let as_postgres = |program: &str| {
            Program::new("setpriv")
                .args(["--reuid=postgres", "--regid=postgres", "--clear-groups"])
                .arg(programs.join(program))
                .arg("-D")
                .arg(&data)
        };
        let initdb = as_postgres("initdb").args(["-A", "trust", "-N", "-U", "tester"]);
        initdb.within(Duration::from_secs(60)).run().good();
        let hba = "host all tester 0.0.0.0/0 trust\nhost all other 0.0.0.0/0 scram-sha-256\n";
        fs::write(data.join("pg_hba.conf"), hba).expect("write pg_hba.conf");
        let server = as_postgres("postgres")
            .args(["-h", "10.77.0.2", "-p", "8080", "-k", "", "-c", "fsync=off"])
            .args([
                "-c",
                "max_connections=3",
                "-c",
                "superuser_reserved_connections=0",
            ])
            .args(["-c", "max_wal_senders=0"])
            .in_netns(&place.net.server)
            .spawn();
        Self {
            place,
            _server: server,
        }
    }

    fn psql(&self, user: &str, database: &str, query: &str) -> Program {
        let to = format!("host=10.77.0.2 port=8080 user={user} dbname={database} password=x");
        let program = Program::new("psql").arg(to).args(["-XAtc", query]);
        self.place.client(program)
    }

    fn ask(&self, query: &str) -> Finished {
        self.psql("tester", "postgres", query).run()
    }
}

#[test]
fn postgres_is_healthy_while_its_clients_err() {
    need!("psql", "setpriv");
    let Some(programs) = postgres_programs() else {
        skip!("PostgreSQL is not installed");
    };
    let postgres = Postgres::start("postgres", &programs);
    let agent = postgres.place.agent();
    for _ in 0..5 {
        assert_eq!(postgres.ask("select 1").good(), "1\n");
    }
    let slow = postgres.ask("select pg_sleep(1)");
    assert!(slow.elapsed >= Duration::from_secs(1), "{slow}");
    let errors = [
        postgres.ask("select nonsense"),
        postgres.psql("tester", "nowhere", "select 1").run(),
        postgres.psql("other", "postgres", "select 1").run(),
    ];
    for error in errors {
        assert_ne!(error.code(), 0, "{error}");
    }
    let row = assert_healthy(&agent);
    assert!(row["responses"].as_u64() >= Some(20), "{row:#}");
}

#[test]
fn postgres_with_too_many_connections_fails() {
    need!("psql", "setpriv");
    let Some(programs) = postgres_programs() else {
        skip!("PostgreSQL is not installed");
    };
    let postgres = Postgres::start("postgres-full", &programs);
    let agent = postgres.place.agent();
    let sleep = || {
        postgres
            .psql("tester", "postgres", "select pg_sleep(60)")
            .spawn()
    };
    let _sleeping: Vec<_> = (0..3).map(|_| sleep()).collect();
    agent.wait_row(DESTINATION, "three queries", |row| {
        row["established"] == 3 && row["in_flight"] == 3 && row["responses"].as_u64() >= Some(6)
    });
    let refused = wait::until("a refusal", START, || {
        let finished = postgres.ask("select 1");
        finished.stderr.contains("too many").then_some(finished)
    });
    assert_ne!(refused.code(), 0, "{refused}");
    let row = agent.wait_row(DESTINATION, "one failure", |row| {
        row["failures"]["status"].as_u64() > Some(0)
    });
    assert_eq!(row["failures"]["status"], 1, "{row:#}");
}
