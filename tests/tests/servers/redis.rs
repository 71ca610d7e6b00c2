//! Redis and redis-cli.

use std::time::Duration;

use rustix::process::Signal;
use tests::{
    interpreter::Interpreter,
    need,
    place::{Place, START, case, check},
    process::{Program, Running},
    talk::PATIENCE,
    wait,
};

const CONNECT: &str = "socket.create_connection(('10.77.0.2', 8080))";
/// On six connections: none, one or seven pings, each answered before the next.
const PING_SOME: &str = r"[(s.sendall(b'*1\r\n$4\r\nPING\r\n'), s.recv(9)) for s, n in zip(w, [0, 0, 1, 1, 7, 7]) for _ in range(n)] and 0";
const BLPOP: &str = r"*3\r\n$5\r\nBLPOP\r\n$7\r\nnothing\r\n$1\r\n0\r\n";

/// A server and the programs that wait for it.
pub struct Redis {
    pub place: Place,
    server: Option<Running>,
    waiting: Vec<Running>,
    /// A client without retries; redis-cli dials again when it was cut off.
    python: Interpreter,
}

impl Redis {
    pub fn start(label: &str, options: &[&str]) -> Self {
        let place = Place::new(label);
        let mut redis = Self {
            python: Interpreter::start(&place.group, &place.net.client),
            place,
            server: None,
            waiting: Vec::new(),
        };
        redis.server = Some(redis.serve(options));
        redis
    }

    fn serve(&self, options: &[&str]) -> Running {
        let server = Program::new("redis-server")
            .args(["--bind", "10.77.0.2", "--port", "8080", "--save", ""])
            .args(["--protected-mode", "no", "--enable-debug-command", "yes"])
            .arg("--dir")
            .arg(self.place.directory.path())
            .args(options);
        self.place.server(server).spawn()
    }

    pub fn cli(&self, command: &[&str]) -> Program {
        let to = ["-h", "10.77.0.2", "-p", "8080"];
        let program = Program::new("redis-cli").args(to).args(command);
        self.place.client(program)
    }

    #[track_caller]
    fn says(&self, command: &[&str], wanted: &str) {
        let finished = self.cli(command).run();
        assert!(finished.stdout.starts_with(wanted), "{finished}");
    }

    /// Workers that wait for something to do, once the server knows all of them.
    fn workers(&mut self, count: usize) {
        let worker = |_| self.cli(&["blpop", "nothing", "0"]).spawn();
        self.waiting = (0..count).map(worker).collect();
        self.blocked(count);
    }

    /// Until the server knows that so many wait. Nobody counts this look from outside the group.
    fn blocked(&self, count: usize) {
        let line = format!("blocked_clients:{count}");
        wait::until("all workers to wait", START, || {
            let info = Program::new("redis-cli")
                .args(["-h", "10.77.0.2", "-p", "8080", "info", "clients"])
                .in_netns(&self.place.net.client)
                .run();
            info.stdout.lines().any(|has| has == line).then_some(())
        });
    }

    /// Three connections wait, the server goes, they see their end.
    fn goes(&mut self, by: Signal) {
        self.python
            .value(&format!("(w := [{CONNECT} for _ in range(3)]) and 0"));
        self.python
            .value("[s.sendall(b'BLPOP nothing 0\\r\\n') for s in w]");
        self.blocked(3);
        self.signal(by);
        self.ended();
        assert_eq!(self.python.value("sum(len(s.recv(9)) for s in w)"), 0);
        self.python.value("[s.close() for s in w] and 0");
    }

    fn workers_end(&mut self) {
        for mut worker in self.waiting.drain(..) {
            worker.extend_deadline(START);
            worker.wait();
        }
    }

    fn signal(&self, signal: Signal) {
        self.server.as_ref().expect("it runs").signal(signal);
    }

    fn ended(&mut self) {
        let mut server = self.server.take().expect("it ran");
        server.extend_deadline(START);
        server.wait();
    }
}

#[test]
fn well_and_not_well() {
    need!("redis-server", "redis-cli", "python3");
    let mut redis = Redis::start("redis", &["--busy-reply-threshold", "50"]);
    let agent = redis.place.agent();
    let cases = [
        case(
            "pings",
            |redis: &mut Redis, _| {
                for _ in 0..10 {
                    redis.says(&["ping"], "PONG");
                }
            },
            10..=10,
            &[],
        ),
        case(
            "errors of the command",
            |redis, _| {
                redis.says(&["nonsense"], "ERR unknown command");
                redis.says(&["set", "busy", "1"], "OK");
                redis.says(&["lpush", "busy", "1"], "WRONGTYPE");
            },
            3..=3,
            &[],
        ),
        case(
            "nothing comes, and the answer says so after a second",
            |redis, _| {
                let waited = redis.cli(&["blpop", "nothing", "1"]).run();
                assert!(waited.elapsed >= Duration::from_secs(1), "{waited}");
            },
            1..=1,
            &[],
        ),
        case(
            "workers that are killed while they wait",
            |redis, _| {
                redis.workers(3);
                redis
                    .waiting
                    .iter()
                    .for_each(|worker| worker.signal(Signal::KILL));
                redis.workers_end();
            },
            0..=0,
            &[("abandoned", 3)],
        ),
        case(
            "workers that are reloaded: they close while they wait, behind none, one or seven answers",
            |redis, _| {
                redis
                    .python
                    .value(&format!("(w := [{CONNECT} for _ in range(6)]) and 0"));
                redis.python.value(PING_SOME);
                redis
                    .python
                    .value(&format!("[s.sendall(b'{BLPOP}') for s in w]"));
                redis.blocked(6);
                redis.python.value(PATIENCE);
                redis.python.value("[s.close() for s in w] and 0");
            },
            16..=16,
            &[("abandoned", 6)],
        ),
        case(
            "workers that get something to do",
            |redis, _| {
                redis.workers(3);
                redis.says(&["rpush", "nothing", "1", "2", "3"], "3");
                redis.workers_end();
            },
            4..=4,
            &[],
        ),
        case(
            "a script that does not end: others are told that it is busy",
            |redis, _| {
                let endless = ["eval", "while true do end", "0"];
                redis.waiting.push(redis.cli(&endless).spawn());
                wait::until("redis to be busy", START, || {
                    let finished = redis.cli(&["get", "x"]).run();
                    finished.stdout.starts_with("BUSY ").then_some(())
                });
                redis.says(&["script", "kill"], "OK");
                redis.workers_end();
            },
            3..=1_000,
            &[("status", 1)],
        ),
        case(
            "it shuts down while three wait",
            |redis, _| redis.goes(Signal::TERM),
            0..=0,
            &[("closed_early", 3)],
        ),
        case(
            "nobody listens",
            |redis, _| {
                assert_eq!(redis.python.errno(CONNECT), libc::ECONNREFUSED);
            },
            0..=0,
            &[("refused", 1)],
        ),
        case(
            "it is killed while three wait",
            |redis, _| {
                redis.server = Some(redis.serve(&[]));
                redis.place.listening();
                redis.goes(Signal::KILL);
            },
            0..=0,
            &[("closed_early", 3)],
        ),
        case(
            "a master that is gone",
            |redis, _| {
                redis.server = Some(redis.serve(&[
                    "--replicaof",
                    "127.0.0.1 1",
                    "--replica-serve-stale-data",
                    "no",
                ]));
                redis.place.listening();
                redis.says(&["get", "x"], "MASTERDOWN");
                redis.signal(Signal::KILL);
                redis.ended();
            },
            1..=1,
            &[("status", 1)],
        ),
        case(
            "a cluster that is down",
            |redis, _| {
                redis.server = Some(redis.serve(&["--cluster-enabled", "yes"]));
                redis.place.listening();
                redis.says(&["get", "x"], "CLUSTERDOWN");
                redis.says(&["ping"], "PONG");
                redis.signal(Signal::KILL);
                redis.ended();
            },
            2..=2,
            &[("status", 1)],
        ),
    ];
    check(&mut redis, &agent, &cases);
}

/// It listens while it still reads its file.
#[test]
fn loading() {
    need!("redis-server", "redis-cli", "python3");
    let mut redis = Redis::start("redis-loading", &[]);
    redis.place.listening();
    // Outside the agent's time: nobody counts these.
    redis.says(&["debug", "populate", "20000", "key", "200"], "OK");
    redis.says(&["save"], "OK");
    redis.signal(Signal::KILL);
    redis.ended();
    // Longer than any test: it is killed while it loads.
    let slow = ["--key-load-delay", "50000"];
    let often = ["--loading-process-events-interval-bytes", "1024"];
    redis.server = Some(redis.serve(&[slow, often].concat()));
    let agent = redis.place.agent();
    let cases = [case(
        "it is loading",
        |redis: &mut Redis, _| {
            let get = redis.cli(&["get", "x"]);
            let finished = get.within(START).run();
            assert!(finished.stdout.starts_with("LOADING"), "{finished}");
        },
        1..=1,
        &[("status", 1)],
    )];
    check(&mut redis, &agent, &cases);
}
