//! PostgreSQL and psql.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::process::Signal;
use tests::{
    agent::Agent,
    need,
    place::{DESTINATION, Place, START, case, check},
    process::{Finished, Program, Running},
    skip, wait,
};

/// Where the server's programs are; Debian keeps them out of the path.
pub fn programs() -> Option<PathBuf> {
    let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
    versions
        .flatten()
        .map(|version| version.path().join("bin"))
        .find(|programs| programs.join("initdb").is_file())
}

/// A server with three connections in all, and the programs that wait for it.
pub struct Postgres {
    pub place: Place,
    programs: PathBuf,
    pub server: Option<Running>,
    sleeping: Vec<Running>,
}

impl Postgres {
    pub fn start(label: &str, programs: &Path) -> Self {
        let mut postgres = Self::made(label, programs);
        postgres.serve(&[]);
        postgres
    }

    /// Its files are there; it does not run.
    pub fn made(label: &str, programs: &Path) -> Self {
        let place = Place::new(label);
        fs::set_permissions(place.directory.path(), Permissions::from_mode(0o777))
            .expect("let the server's user in");
        let postgres = Self {
            place,
            programs: programs.to_owned(),
            server: None,
            sleeping: Vec::new(),
        };
        let initdb = postgres.as_postgres("initdb");
        let initdb = initdb.args(["-A", "trust", "-N", "-U", "tester"]);
        initdb.within(START).run().good();
        let hba = "host all tester 0.0.0.0/0 trust\nhost all other 0.0.0.0/0 scram-sha-256\n";
        fs::write(postgres.data().join("pg_hba.conf"), hba).expect("write pg_hba.conf");
        postgres
    }

    fn data(&self) -> PathBuf {
        self.place.directory.path().join("data")
    }

    /// The server refuses to run as root.
    fn as_postgres(&self, program: &str) -> Program {
        Program::new("setpriv")
            .args(["--reuid=postgres", "--regid=postgres", "--clear-groups"])
            .arg(self.programs.join(program))
            .arg("-D")
            .arg(self.data())
    }

    /// The server as a program of nobody's namespace.
    pub fn server_program(&self, options: &[&str]) -> Program {
        self.as_postgres("postgres")
            .args(["-h", "10.77.0.2", "-p", "8080", "-k", "", "-c", "fsync=off"])
            .args(["-c", "max_connections=3", "-c", "max_wal_senders=0"])
            .args(["-c", "superuser_reserved_connections=0"])
            .args(options)
    }

    fn serve(&mut self, options: &[&str]) {
        let server = self.server_program(options);
        self.server = Some(self.place.server(server).spawn());
    }

    pub fn psql(&self, user: &str, database: &str, query: &str) -> Program {
        let to = format!("host=10.77.0.2 port=8080 user={user} dbname={database} password=x");
        let psql = Program::new("psql").arg(to).args(["-XAtc", query]);
        psql.within(START)
    }

    /// A query of the clients'.
    pub fn query(&self, query: &str) -> Program {
        self.place.client(self.psql("tester", "postgres", query))
    }

    fn ask(&self, query: &str) -> Finished {
        self.query(query).run()
    }

    /// A query that nobody counts.
    pub fn ask_outside(&self, query: &str) -> Finished {
        let program = self.psql("tester", "postgres", query);
        program.in_netns(&self.place.net.client).run()
    }

    /// Programs whose query runs, as the agent sees.
    fn sleep(&mut self, agent: &Agent, count: usize) {
        let before = agent.row(DESTINATION)["responses"].as_u64().unwrap_or(0);
        // Without rows: their description would come before what goes wrong.
        let text = "do $$ begin perform 'sleeper', pg_sleep(60); end $$";
        let query = || self.query(text).spawn();
        self.sleeping = (0..count).map(|_| query()).collect();
        // Each was told that there is no TLS, and then that it may ask.
        let told = before + 2 * count as u64;
        agent.wait_row(DESTINATION, "queries that run", |row| {
            row["in_flight"] == count && row["responses"] == told
        });
        self.place.read_all();
    }

    fn sleepers_end(&mut self) -> Vec<Finished> {
        let end = |mut client: Running| {
            client.extend_deadline(START);
            client.wait()
        };
        self.sleeping.drain(..).map(end).collect()
    }

    /// The processes of the queries of [`Postgres::sleep`].
    fn backends(&self) -> Vec<i32> {
        let query = "select pid from pg_stat_activity where query like '%sleeper%' \
                     and pid <> pg_backend_pid() and state = 'active'";
        wait::until("a query that runs", START, || {
            let said = self.ask_outside(query).good();
            let pid = |line: &str| line.parse().expect("a pid");
            let pids: Vec<i32> = said.lines().map(pid).collect();
            (!pids.is_empty()).then_some(pids)
        })
    }

    pub fn signal(&self, signal: Signal) {
        self.server.as_ref().expect("it runs").signal(signal);
    }

    pub fn ended(&mut self) {
        let mut server = self.server.take().expect("it ran");
        server.extend_deadline(START);
        server.wait();
    }

    /// Until it takes queries.
    pub fn serving(&self) {
        wait::until("PostgreSQL to serve", START, || {
            (self.ask_outside("select 1").stdout == "1\n").then_some(())
        });
    }
}

#[test]
fn well_and_not_well() {
    need!("psql", "setpriv");
    let Some(programs) = programs() else {
        skip!("PostgreSQL is not installed");
    };
    let mut postgres = Postgres::start("postgres", &programs);
    let agent = postgres.place.agent();
    postgres.serving();
    let cases = [
        case(
            "queries",
            |postgres: &mut Postgres, _| {
                for _ in 0..3 {
                    assert_eq!(postgres.ask("select 1").good(), "1\n");
                }
            },
            9..=9,
            &[],
        ),
        case(
            "a query of a second",
            |postgres, _| {
                let slow = postgres.ask("select pg_sleep(1)");
                assert!(slow.elapsed >= Duration::from_secs(1), "{slow}");
            },
            3..=3,
            &[],
        ),
        case(
            "errors of the client",
            |postgres, _| {
                let errors = [
                    postgres.ask("select nonsense"),
                    postgres
                        .place
                        .client(postgres.psql("tester", "nowhere", ""))
                        .run(),
                    postgres
                        .place
                        .client(postgres.psql("other", "postgres", ""))
                        .run(),
                    postgres.ask("set statement_timeout = 50; select pg_sleep(60)"),
                ];
                for error in errors {
                    assert_ne!(error.code(), 0, "{error}");
                }
            },
            8..=20,
            &[],
        ),
        case(
            "a client that is killed while its query runs",
            |postgres, agent| {
                postgres.sleep(agent, 1);
                postgres.sleeping[0].signal(Signal::KILL);
                postgres.sleepers_end();
                // Its query would run on.
                let query = "select pg_terminate_backend(pid, 60000) from pg_stat_activity \
                             where query like '%sleeper%' and pid <> pg_backend_pid()";
                assert_eq!(postgres.ask_outside(query).good(), "t\n");
            },
            2..=2,
            &[("abandoned", 1)],
        ),
        case(
            "a client that cancels its query, by a connection of its own",
            |postgres, agent| {
                postgres.sleep(agent, 1);
                postgres.sleeping[0].signal(Signal::INT);
                let ended = postgres.sleepers_end().remove(0);
                assert!(ended.stderr.contains("canceling"), "{ended}");
            },
            3..=3,
            &[],
        ),
        case(
            "an administrator ends the connection",
            |postgres, agent| {
                postgres.sleep(agent, 1);
                let backend = postgres.backends()[0];
                let end = format!("select pg_terminate_backend({backend})");
                postgres.ask_outside(&end).good();
                let ended = postgres.sleepers_end().remove(0);
                assert!(ended.stderr.contains("administrator"), "{ended}");
            },
            3..=3,
            &[("status", 1)],
        ),
        case(
            "the process that answers is killed",
            |postgres, agent| {
                postgres.sleep(agent, 1);
                kill(postgres.backends()[0]);
                let ended = postgres.sleepers_end().remove(0);
                assert_ne!(ended.code(), 0, "{ended}");
                postgres.serving();
            },
            2..=2,
            &[("closed_early", 1)],
        ),
        case(
            "too many connections, and then it shuts down at once",
            |postgres, agent| {
                postgres.sleep(agent, 3);
                let refused = postgres.ask("select 1");
                assert!(refused.stderr.contains("too many"), "{refused}");
                postgres.signal(Signal::INT);
                for ended in postgres.sleepers_end() {
                    assert!(ended.stderr.contains("administrator"), "{ended}");
                }
                postgres.ended();
            },
            11..=11,
            &[("status", 4)],
        ),
        case(
            "nobody listens",
            |postgres, _| assert_ne!(postgres.ask("select 1").code(), 0),
            0..=0,
            &[("refused", 1)],
        ),
        case(
            "it shuts down when the last query ends, and takes no other",
            |postgres, agent| {
                postgres.serve(&[]);
                postgres.serving();
                postgres.sleep(agent, 1);
                let backend = postgres.backends()[0];
                postgres.signal(Signal::TERM);
                wait::until("the end of its service", START, || {
                    let refused = postgres.ask_outside("select 1");
                    refused.stderr.contains("shutting down").then_some(())
                });
                let refused = postgres.ask("select 1");
                assert!(refused.stderr.contains("shutting down"), "{refused}");
                // SIGINT cancels a query: an error of the query, and the last one.
                signal(backend, libc::SIGINT);
                let ended = postgres.sleepers_end().remove(0);
                assert!(ended.stderr.contains("canceling"), "{ended}");
                postgres.ended();
            },
            5..=5,
            &[("status", 1)],
        ),
        case(
            "it is starting up, and stays so",
            |postgres, _| {
                fs::write(postgres.data().join("standby.signal"), "").expect("write a file");
                postgres.serve(&["-c", "hot_standby=off"]);
                postgres.place.listening();
                let refused = postgres.ask("select 1");
                let says = ["starting up", "not accepting connections"];
                assert!(
                    says.iter().any(|says| refused.stderr.contains(says)),
                    "{refused}"
                );
                postgres.signal(Signal::INT);
                postgres.ended();
            },
            2..=2,
            &[("status", 1)],
        ),
    ];
    check(&mut postgres, &agent, &cases);
}

fn kill(pid: i32) {
    signal(pid, libc::SIGKILL);
}

/// Only to processes that a test has started.
fn signal(pid: i32, signal: i32) {
    // SAFETY: plain system call.
    let result = unsafe { libc::kill(pid, signal) };
    assert_eq!(
        result,
        0,
        "signal {pid}: {}",
        std::io::Error::last_os_error()
    );
}
