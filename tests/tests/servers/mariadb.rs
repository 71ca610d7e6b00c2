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
    interpreter::Interpreter,
    need,
    place::{DESTINATION, Place, START, case, check},
    process::{Finished, Program, Running},
    talk::PATIENCE,
    wait,
};

/// What a driver with prepared statements says: `login()`, and `prepared(more)`, which prepares a statement, executes
/// and closes it, which is not answered, and sends more with that.
const PREPARED: &str = r"
def packet(number, body):
    return len(body).to_bytes(3, 'little') + bytes([number]) + body

def exactly(count):
    data = b''
    while len(data) < count:
        more = s.recv(count - len(data))
        assert more, 'closed'
        data += more
    return data

def answered():
    body = exactly(int.from_bytes(exactly(4)[:3], 'little'))
    assert body[0] in (0, 10), body
    return body

def login():
    global s
    s = socket.create_connection(('10.77.0.2', 8080))
    answered()
    # Protocol 4.1, and a password of a secure kind, which is empty.
    s.sendall(packet(1, b'\x01\x82\0\0' + b'\0\0\0\1' + b'\x21' + bytes(23) + b'guest\0' + b'\0'))
    answered()

def prepared(more):
    s.sendall(packet(0, b'\x16do 1'))
    number = answered()[1:5]
    s.sendall(packet(0, b'\x17' + number + b'\0' + b'\1\0\0\0'))
    answered()
    s.sendall(packet(0, b'\x19' + number) + more)
";

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
                     grant all on *.* to tester;\n\
                     create user if not exists guest;\n";
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
    need!("mariadb", "mariadbd", "mariadb-install-db", "python3");
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
            "a prepared statement, closed long before its connection is",
            |maria, agent| {
                let python = &mut Interpreter::start(&maria.place.group, &maria.place.net.client);
                python.run(PREPARED);
                python.value("login()");
                // With a ping behind it that is answered, and without.
                python.value("prepared(packet(0, b'\\x0e')) or answered() and 0");
                python.value("prepared(b'')");
                let row = agent.row(DESTINATION);
                assert_eq!(row["in_flight"], 0, "{row:#}");
                python.value(PATIENCE);
                python.value("s.sendall(packet(0, b'\\1')) or s.close()");
            },
            6..=7,
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
