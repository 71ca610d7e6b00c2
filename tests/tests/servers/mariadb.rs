//! MariaDB and its client: a server that speaks first.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    time::Duration,
};

use rustix::process::Signal;
use tests::{
    agent::Agent,
    need,
    place::{DESTINATION, Place, START, case, check},
    process::{Finished, Program, Running},
    wait,
};

/// A server, and the programs that wait for it.
struct Maria {
    place: Place,
    server: Option<Running>,
    sleeping: Vec<Running>,
}

impl Maria {
    fn start(label: &str) -> Self {
        let place = Place::new(label);
        fs::set_permissions(place.directory.path(), Permissions::from_mode(0o777))
            .expect("let the server's user in");
        let mut maria = Self {
            place,
            server: None,
            sleeping: Vec::new(),
        };
        let install = Program::new("mariadb-install-db")
            .args(["--no-defaults", "--user=mysql", "--skip-test-db"])
            .arg("--auth-root-authentication-method=normal")
            .arg(maria.option("datadir", "data"));
        install.within(START).run().good();
        let users = "create user if not exists tester identified by 'x';\n\
                     grant all on *.* to tester;\n";
        fs::write(maria.path("users.sql"), users).expect("write a file");
        maria.serve();
        maria
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.directory.path().join(name)
    }

    /// `--name=` and the path of a file of the server's.
    fn option(&self, name: &str, file: &str) -> String {
        format!("--{name}={}", self.path(file).display())
    }

    fn serve(&mut self) {
        let server = Program::new(tests::process::find("mariadbd").expect("installed"))
            .args(["--no-defaults", "--user=mysql", "--skip-name-resolve"])
            .args(["--bind-address=10.77.0.2", "--port=8080"])
            .arg("--innodb-flush-log-at-trx-commit=0")
            .args([
                self.option("datadir", "data"),
                self.option("socket", "socket"),
                self.option("pid-file", "pid"),
                self.option("init-file", "users.sql"),
            ]);
        self.server = Some(self.place.server(server).spawn());
    }

    fn client(password: &str, query: &str) -> Program {
        Program::new("mariadb")
            .args([
                "--no-defaults",
                "--skip-ssl",
                "-h",
                "10.77.0.2",
                "-P",
                "8080",
            ])
            .args(["-u", "tester", &format!("-p{password}"), "-BNe", query])
            .within(START)
    }

    fn ask(&self, query: &str) -> Finished {
        self.place.client(Self::client("x", query)).run()
    }

    /// A query that nobody counts.
    fn ask_outside(&self, query: &str) -> Finished {
        let program = Self::client("x", query);
        program.in_netns(&self.place.net.client).run()
    }

    /// Until it takes queries.
    fn serving(&self) {
        wait::until("MariaDB to serve", START, || {
            (self.ask_outside("select 1").stdout == "1\n").then_some(())
        });
    }

    /// A program whose query runs, as the server and the agent see; the server's number of it.
    fn sleep(&mut self, agent: &Agent) -> String {
        let program = self.place.client(Self::client("x", "do sleep(60)"));
        self.sleeping.push(program.spawn());
        agent.wait_row(DESTINATION, "a query that runs", |row| {
            row["in_flight"] == 1
        });
        let running = "select id from information_schema.processlist where info = 'do sleep(60)'";
        wait::until("the query to run", START, || {
            let id = self.ask_outside(running).stdout;
            (!id.is_empty()).then_some(id)
        })
    }

    fn sleepers_end(&mut self) -> Finished {
        let mut client = self.sleeping.pop().expect("one sleeps");
        client.extend_deadline(START);
        client.wait()
    }

    fn stop(&mut self, signal: Signal) {
        let mut server = self.server.take().expect("it runs");
        server.signal(signal);
        server.extend_deadline(START);
        server.wait();
    }
}

/// Two answers a query, and a third where the greeting counts as the answer to the connect.
#[test]
fn well_and_not_well() {
    need!("mariadb", "mariadbd", "mariadb-install-db");
    let mut maria = Maria::start("mariadb");
    maria.serving();
    let agent = maria.place.agent();
    let cases = [
        case(
            "queries",
            |maria: &mut Maria, _| {
                for _ in 0..3 {
                    assert_eq!(maria.ask("select 1").good(), "1\n");
                }
            },
            6..=9,
            &[],
        ),
        case(
            "a query of a second",
            |maria, _| {
                let slow = maria.ask("do sleep(1)");
                assert!(slow.elapsed >= Duration::from_secs(1), "{slow}");
            },
            2..=3,
            &[],
        ),
        case(
            "errors of the client",
            |maria, _| {
                let denied = maria.place.client(Maria::client("wrong", "select 1"));
                let errors = [
                    maria.ask("select nonsense"),
                    maria.ask("use nowhere"),
                    maria.ask("set statement max_statement_time = 0.1 for select sleep(60)"),
                    denied.run(),
                ];
                for error in errors {
                    assert_ne!(error.code(), 0, "{error}");
                }
            },
            4..=16,
            &[],
        ),
        case(
            "a client that is killed while its query runs",
            |maria, agent| {
                let id = maria.sleep(agent);
                maria.sleeping[0].signal(Signal::KILL);
                maria.sleepers_end();
                maria.ask_outside(&format!("kill {id}"));
            },
            1..=2,
            &[("abandoned", 1)],
        ),
        case(
            "an administrator ends the connection",
            |maria, agent| {
                let id = maria.sleep(agent);
                maria.ask_outside(&format!("kill {id}")).good();
                let ended = maria.sleepers_end();
                assert_ne!(ended.code(), 0, "{ended}");
            },
            1..=2,
            &[("closed_early", 1)],
        ),
        case(
            "it shuts down while a query runs",
            |maria, agent| {
                maria.sleep(agent);
                maria.stop(Signal::TERM);
                let ended = maria.sleepers_end();
                assert_ne!(ended.code(), 0, "{ended}");
            },
            1..=2,
            &[("closed_early", 1)],
        ),
        case(
            "nobody listens",
            |maria, _| assert_ne!(maria.ask("select 1").code(), 0),
            0..=0,
            &[("refused", 1)],
        ),
        case(
            "it is killed while a query runs",
            |maria, agent| {
                maria.serve();
                maria.serving();
                maria.sleep(agent);
                maria.stop(Signal::KILL);
                let ended = maria.sleepers_end();
                assert_ne!(ended.code(), 0, "{ended}");
            },
            1..=2,
            &[("closed_early", 1)],
        ),
    ];
    check(&mut maria, &agent, &cases);
}
