//! Real servers go away in the ways they really go away: the breaker opens for the right reason, the
//! next call costs the server nothing, and it is in use again soon after it returns.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    follow::Follow,
    need,
    nginx::Nginx,
    place::{DESTINATION, Place, START, TO},
    process::{Finished, Program, Running},
    skip, wait,
};

use crate::postgres::{self, Postgres};

/// Short, so that a call to a dead server does not take the test's time; and longer than an answer takes on a
/// busy machine.
const CONFIG: &str = r#"
[defaults.timeouts]
connect = "1s"
read = "1s"
[defaults.breaker]
cooldown = "1s"
"#;

/// Five failures suffice where each call is one exchange; clients that ask several things in one
/// call need as many calls as half of a window of ten takes.
const CALLS: usize = 12;

/// With redial, or after a cooldown of a second; on a machine that has much else to do. (What fails
/// meanwhile doubles the cooldown.)
const BACK_IN_USE: Duration = Duration::from_secs(120);

/// A server that can go and come.
trait Service {
    fn place(&self) -> &Place;
    /// A client's call, and what it prints when all is well.
    fn call(&self) -> (Program, &'static str);
    fn serve(&mut self);
    fn signal(&mut self, signal: Signal);
    /// Waits for its end.
    fn ended(&mut self);

    /// Until a call from outside the group, which nobody counts, is answered.
    fn serving(&self) {
        wait::until("the server to serve", START, || {
            let (call, good) = self.call();
            let outside = call.in_netns(&self.place().net.client);
            (outside.run().stdout == good).then_some(())
        });
    }
}

/// A way to go, and the way back.
struct Way<S: ?Sized> {
    what: &'static str,
    goes: fn(&mut S),
    returns: fn(&mut S),
    /// The window that opens.
    window: &'static str,
    /// What is counted, one of these at least.
    failures: &'static [&'static str],
}

/// The ways that every server has.
fn ways<S: Service + ?Sized>() -> [Way<S>; 7] {
    [
        Way {
            what: "is stopped",
            goes: |service| {
                // Each of the three ends at once by it when nobody is connected.
                service.signal(Signal::TERM);
                service.ended();
            },
            returns: S::serve,
            window: "connects",
            failures: &["refused"],
        },
        Way {
            what: "is killed",
            goes: |service| {
                service.signal(Signal::KILL);
                service.ended();
            },
            returns: S::serve,
            window: "connects",
            failures: &["refused"],
        },
        Way {
            what: "stands still",
            goes: |service| service.signal(Signal::STOP),
            returns: |service| service.signal(Signal::CONT),
            window: "exchanges",
            failures: &["read_timeout"],
        },
        Way {
            what: "is cut off",
            goes: |service| service.place().net.server.ip("link set s0 down\n"),
            returns: |service| service.place().net.server.ip("link set s0 up\n"),
            window: "connects",
            // The second once the address is not known any more.
            failures: &["connect_timeout", "unreachable"],
        },
        Way {
            what: "is behind a firewall that drops",
            goes: |service| firewall(service.place(), "drop"),
            returns: |service| no_firewall(service.place()),
            window: "connects",
            failures: &["connect_timeout"],
        },
        Way {
            what: "is behind a firewall that resets",
            goes: |service| firewall(service.place(), "reject with tcp reset"),
            returns: |service| no_firewall(service.place()),
            window: "connects",
            failures: &["refused"],
        },
        Way {
            what: "is behind a firewall that says so",
            goes: |service| firewall(service.place(), "reject with icmpx admin-prohibited"),
            returns: |service| no_firewall(service.place()),
            window: "connects",
            failures: &["unreachable"],
        },
    ]
}

fn firewall(place: &Place, verdict: &str) {
    // Else the host says so once a second.
    place.net.server.enter(|| {
        fs::write("/proc/sys/net/ipv4/icmp_ratelimit", "0").expect("sysctl");
    });
    place.net.server.nft(&format!(
        "table inet wall {{\n\
           chain input {{\n\
             type filter hook input priority 0; policy accept;\n\
             tcp dport 8080 {verdict}\n\
           }}\n\
         }}\n"
    ));
}

fn no_firewall(place: &Place) {
    place.net.server.nft("delete table inet wall\n");
}

fn call(service: &(impl Service + ?Sized)) -> (Finished, bool) {
    let (call, good) = service.call();
    let finished = service.place().client(call).within(START).run();
    let is_good = finished.stdout == good && finished.stderr.is_empty();
    (finished, is_good)
}

fn failures(row: &Value, kinds: &[&str]) -> u64 {
    let counts = kinds.iter().map(|kind| row["failures"][kind].as_u64());
    counts.map(Option::unwrap_or_default).sum()
}

/// One after the other; each begins with a server that is well and a breaker that is closed.
fn check<S: Service + ?Sized>(service: &mut S, ways: &[Way<S>]) {
    let agent = Agent::start(&service.place().group, CONFIG);
    // As each pod has one: who redials does so from a live program's namespace.
    let resident = Program::new("sleep").arg("600");
    let _resident = service.place().client(resident).within(10 * START).spawn();
    let mut events = agent.follow(&["--all"]);
    for way in ways {
        eprintln!("{}", one(service, &agent, &mut events, way));
    }
}

fn one<S: Service + ?Sized>(
    service: &mut S,
    agent: &Agent,
    events: &mut Follow,
    way: &Way<S>,
) -> String {
    let what = way.what;
    service.serving();
    // A call may take longer than the timeout, where a machine is very busy.
    wait::until("a good call", START, || {
        let (finished, good) = call(service);
        if !good {
            eprintln!("{what}, before: {finished}");
        }
        (good && agent.row(DESTINATION)["state"] == "closed").then_some(())
    });
    let before = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    (way.goes)(service);
    let calls = (1..=CALLS)
        .find(|number| {
            let (finished, good) = call(service);
            assert!(!good, "{what}, call {number}: {finished}");
            agent.row(DESTINATION)["state"] != "closed"
        })
        .unwrap_or_else(|| panic!("{what}: {:#}", agent.row(DESTINATION)));
    // (Where a machine is very busy, it may have opened before, on calls that took too long.)
    events.wait(&format!("{what}: open on {}", way.window), |event| {
        event["kind"] == "breaker"
            && event["destination"] == DESTINATION
            && event["to"] == "open"
            && event["reason"]["window"] == way.window
    });
    let row = agent.row(DESTINATION);
    let counted = failures(&row, way.failures) - failures(&before, way.failures);
    assert!(counted >= 5, "{what}: {row:#}");

    (way.returns)(service);
    let returned = Instant::now();
    while !call(service).1 {
        let waited = returned.elapsed();
        assert!(waited < BACK_IN_USE, "{what}: {:#}", agent.row(DESTINATION));
    }
    let back = returned.elapsed();
    wait::until("it to be trusted again", START, || {
        let _ = call(service);
        (agent.row(DESTINATION)["state"] == "closed").then_some(())
    });
    // Refused meanwhile: by us, so that no failure of the server's came of it.
    agent.command(&["reset", DESTINATION]).good();
    agent.wait_state(DESTINATION, "closed");
    format!("{what}: open after {calls} calls, in use {back:?} after its return")
}

/// A directory that holds little, in a mount namespace of its own.
struct SmallDisk {
    directory: PathBuf,
    holder: Running,
}

impl SmallDisk {
    /// Of this user's.
    fn new(directory: PathBuf, user: &str) -> Self {
        fs::create_dir_all(&directory).expect("make a directory");
        let mount = r#"mount -t tmpfs -o size=1m none "$1" && chown "$2" "$1" &&
                       echo made && exec sleep 600"#;
        let mut holder = Program::new("unshare")
            .args(["--mount", "sh", "-c", mount, "sh"])
            .arg(&directory)
            .arg(user)
            .within(10 * START)
            .spawn();
        let mut said = String::new();
        BufReader::new(holder.stdout.take().expect("piped"))
            .read_line(&mut said)
            .expect("read");
        assert_eq!(said, "made\n", "{}", holder.stderr_so_far());
        Self { directory, holder }
    }

    fn with(&self, program: Program) -> Program {
        let target = format!("--target={}", self.holder.pid());
        program.run_by("nsenter", &["--mount".to_owned(), target])
    }

    fn grow(&self) {
        let larger = Program::new("mount").args(["-o", "remount,size=64m"]);
        self.with(larger.arg(&self.directory)).run().good();
    }
}

struct Web {
    place: Place,
    nginx: Option<Nginx>,
}

impl Service for Web {
    fn place(&self) -> &Place {
        &self.place
    }

    fn call(&self) -> (Program, &'static str) {
        let curl = Program::new("curl").args(["-q", "-sS", &format!("http://{TO}/")]);
        (curl, "ok")
    }

    fn serve(&mut self) {
        let config = "listen 10.77.0.2:8080; location / { return 200 'ok'; }";
        self.nginx = Some(Nginx::start(&self.place.net.server, TO, config));
    }

    fn signal(&mut self, signal: Signal) {
        self.nginx.as_ref().expect("it runs").signal(signal);
    }

    fn ended(&mut self) {
        self.nginx.take().expect("it ran").ended();
    }
}

#[test]
fn nginx_goes_away() {
    need!("nginx", "curl", "nft");
    let mut web = Web {
        place: Place::new("nginx-goes"),
        nginx: None,
    };
    web.serve();
    check(&mut web, &ways());
}

struct Cache {
    place: Place,
    disk: SmallDisk,
    redis: Option<Running>,
    /// Connections from outside the group, which take all that there are.
    holders: Vec<TcpStream>,
}

impl Service for Cache {
    fn place(&self) -> &Place {
        &self.place
    }

    fn call(&self) -> (Program, &'static str) {
        (redis_cli(&["set", "key", "value"]), "OK\n")
    }

    fn serve(&mut self) {
        let redis = Program::new("redis-server")
            .args(["--bind", "10.77.0.2", "--port", "8080", "--save", ""])
            .args(["--protected-mode", "no", "--maxclients", "10"])
            .args(["--appendonly", "yes", "--dir"])
            .arg(&self.disk.directory);
        self.redis = Some(self.place.server(self.disk.with(redis)).spawn());
    }

    fn signal(&mut self, signal: Signal) {
        self.redis.as_ref().expect("it runs").signal(signal);
    }

    fn ended(&mut self) {
        ended(&mut self.redis);
    }
}

/// A connection that is one of the server's clients.
fn admitted_by_redis() -> Option<TcpStream> {
    let mut stream = TcpStream::connect(TO).expect("a connection");
    let mut answer = [0; 5];
    // One that is refused may be reset, too.
    stream.write_all(b"PING\r\n").ok()?;
    stream.read_exact(&mut answer).ok()?;
    (answer == *b"+PONG").then_some(stream)
}

fn redis_cli(command: &[&str]) -> Program {
    let to = ["-h", "10.77.0.2", "-p", "8080"];
    Program::new("redis-cli").args(to).args(command)
}

fn ended(server: &mut Option<Running>) {
    let mut server = server.take().expect("it ran");
    server.extend_deadline(START);
    server.wait();
}

#[test]
fn redis_goes_away() {
    need!("redis-server", "redis-cli", "nft", "unshare", "nsenter");
    let place = Place::new("redis-goes");
    let mut cache = Cache {
        disk: SmallDisk::new(place.directory.path().join("disk"), "root"),
        place,
        redis: None,
        holders: Vec::new(),
    };
    cache.serve();
    let own = [
        Way {
            what: "has too many clients",
            goes: |cache: &mut Cache| {
                let client = &cache.place.net.client;
                // One more each time: a holder may itself have been refused, while a client before it
                // was not gone yet. Each is told so, or answered.
                wait::until("all to be taken", START, || {
                    cache.holders.extend(client.enter(admitted_by_redis));
                    (cache.holders.len() == 10).then_some(())
                });
            },
            returns: |cache| cache.holders.clear(),
            window: "exchanges",
            // Refused, and the command that it sends nevertheless is reset, or its connection closed.
            failures: &["status", "reset", "closed_early"],
        },
        Way {
            what: "has a full disk",
            goes: |cache| {
                let large = "x".repeat(100_000);
                wait::until("the disk to be full", START, || {
                    let set = redis_cli(&["set", "large", &large]);
                    let said = set.in_netns(&cache.place.net.client).run().stdout;
                    said.starts_with("MISCONF").then_some(())
                });
            },
            returns: |cache| cache.disk.grow(),
            window: "exchanges",
            failures: &["status"],
        },
    ];
    check(&mut cache, &own);
    check(&mut cache, &ways());
}

/// PostgreSQL, with tables on a small disk.
struct Database {
    postgres: Postgres,
    disk: SmallDisk,
    /// The server's processes, of which some outlive the one that is killed.
    group: TestCgroup,
    holders: Vec<TcpStream>,
}

impl Database {
    fn start(postgres: Postgres, disk: SmallDisk) -> Self {
        let mut database = Self {
            postgres,
            disk,
            group: TestCgroup::new("postgres-server"),
            holders: Vec::new(),
        };
        database.serve();
        database.postgres.serving();
        for query in [
            format!(
                "create tablespace small location '{}'",
                database.disk.directory.display()
            ),
            "create table small (x text) tablespace small".to_owned(),
            "create table ballast (x text) tablespace small".to_owned(),
        ] {
            database.postgres.ask_outside(&query).good();
        }
        database
    }
}

/// A connection that the server is ready to take a query from.
fn admitted_by_postgres(startup: &[u8]) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(TO).expect("a connection");
    stream.write_all(startup).ok()?;
    // Messages: a letter, and how long the rest is; `E` refuses, `Z` is ready.
    loop {
        let mut head = [0; 5];
        stream.read_exact(&mut head).ok()?;
        let [letter, length @ ..] = head;
        let rest = u32::from_be_bytes(length) as usize - 4;
        stream.read_exact(&mut vec![0; rest]).ok()?;
        match letter {
            b'E' => return None,
            b'Z' => return Some(stream),
            _ => {}
        }
    }
}

const FILL: &str = "select repeat('x', 1000) from generate_series(1, 100)";

impl Service for Database {
    fn place(&self) -> &Place {
        &self.postgres.place
    }

    /// A program that keeps its connection, so that what fails fails several times in a row.
    fn call(&self) -> (Program, &'static str) {
        let psql = self.postgres.psql("tester", "postgres", "truncate small");
        let insert = format!("insert into small {FILL}");
        let psql = (0..6).fold(psql, |psql, _| psql.args(["-qc", &insert]));
        (psql.args(["-c", "select 'done'"]), "done\n")
    }

    fn serve(&mut self) {
        let server = self.disk.with(self.postgres.server_program(&[]));
        let server = self.postgres.place.server(server).in_cgroup(&self.group);
        self.postgres.server = Some(server.spawn());
    }

    fn signal(&mut self, signal: Signal) {
        self.postgres.signal(signal);
    }

    fn ended(&mut self) {
        self.postgres.ended();
        // What is left of one that was killed keeps the memory that the next one wants.
        wait::until("all of the server to end", START, || {
            self.group.pids().is_empty().then_some(())
        });
    }
}

#[test]
fn postgres_goes_away() {
    need!("psql", "setpriv", "nft", "unshare", "nsenter");
    let Some(programs) = postgres::programs() else {
        skip!("PostgreSQL is not installed");
    };
    let postgres = Postgres::made("postgres-goes", &programs);
    let disk = SmallDisk::new(postgres.place.directory.path().join("disk"), "postgres");
    let mut database = Database::start(postgres, disk);
    let own = [
        Way {
            what: "has too many connections",
            goes: |database: &mut Database| {
                // A startup message: its length, version 3.0, who and where.
                let body = b"\0\x03\0\0user\0tester\0database\0postgres\0\0";
                let message = [&(4 + body.len() as u32).to_be_bytes()[..], body].concat();
                // One more each time: a holder may itself have been refused, while the backend of
                // a query before it was not gone yet.
                let client = &database.postgres.place.net.client;
                wait::until("all to be taken", START, || {
                    let admitted = client.enter(|| admitted_by_postgres(&message));
                    database.holders.extend(admitted);
                    (database.holders.len() == 3).then_some(())
                });
            },
            returns: |database| database.holders.clear(),
            window: "exchanges",
            failures: &["status"],
        },
        Way {
            what: "has a full disk",
            goes: |database| {
                database.postgres.ask_outside("truncate small").good();
                wait::until("the disk to be full", START, || {
                    let fill = format!("insert into ballast {FILL}");
                    let full = database.postgres.ask_outside(&fill);
                    full.stderr.contains("No space").then_some(())
                });
            },
            returns: |database| database.disk.grow(),
            window: "exchanges",
            failures: &["status"],
        },
    ];
    check(&mut database, &own);
    check(&mut database, &ways());
}
