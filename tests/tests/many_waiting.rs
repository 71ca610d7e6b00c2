//! Ten thousand connections that wait at once: all end in the time of one, at little cost.

use std::{
    fs,
    net::TcpStream,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    server::Server,
    skip,
    talk::{DESTINATION, TO},
    wait,
};

const COUNT: u64 = 10_000;
/// Room for both ends' other descriptors.
const DESCRIPTORS: u64 = COUNT + 500;
const VALUE_MS: u64 = 6_000;
/// How long the agent's processor time is measured, while nothing ends.
const QUIET: Duration = Duration::from_secs(3);
/// On a calm machine 90 of 100 end within 150 ms and all within 250 ms, and the agent takes under 2 %
/// of a core while they wait: it is printed. Ending them takes some 10 us of a core for each, which a
/// machine with other work on it (and a debug build) may not give at once.
const LATE_P90_MS: f64 = 1_500.0;
const LATE_MAX_MS: f64 = 3_000.0;
const AGENT_PERCENT: f64 = 15.0;
/// A busy moment of the machine is no failure; to be late each time is.
const ROUNDS: usize = 5;

/// `ask()` sends a request on each; `ends()` is how late each ended, in ms.
const CLIENT: &str = "
import resource, select
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
poll = select.epoll()
def dial(count):
    global many, sent
    many = {}
    for _ in range(count):
        s = socket.create_connection(('10.77.0.2', 8080))
        many[s.fileno()] = s
    sent = {}
    return len(many)
def ask():
    for fd, s in many.items():
        sent[fd] = time.monotonic()
        s.send(b'x')
    for fd in many:
        poll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
    return time.monotonic() - min(sent.values())
def ends(value):
    late = []
    while len(late) < len(many):
        ready = poll.poll(maxevents=len(many))
        now = time.monotonic()
        late += [(now - sent[fd] - value) * 1000 for fd, _ in ready]
    for fd, s in many.items():
        try:
            raise AssertionError(f'an answer: {s.recv(9)}')
        except ConnectionAbortedError:
            s.close()
    late.sort()
    return [late[0], late[len(late) // 2], late[len(late) * 9 // 10], late[-1]]
";

/// Lets this process have so many descriptors; false where it may not.
fn raise_limit() -> bool {
    let limit = getrlimit(Resource::Nofile);
    let enough = limit.maximum.is_none_or(|most| most >= DESCRIPTORS);
    enough
        && setrlimit(
            Resource::Nofile,
            Rlimit {
                current: limit.maximum,
                maximum: limit.maximum,
            },
        )
        .is_ok()
}

/// Processor time of a process so far.
fn processor_time(pid: i32) -> Duration {
    let path = format!("/proc/{pid}/stat");
    let stat = fs::read_to_string(path).expect("the agent runs");
    let (_, fields) = stat.rsplit_once(") ").expect("a name in brackets");
    let ticks: u64 = fields
        .split(' ')
        .skip(11)
        .take(2)
        .map(|field| field.parse::<u64>().expect("a number"))
        .sum();
    // USER_HZ, which is 100 on all architectures that Backstop runs on.
    Duration::from_millis(ticks * 10)
}

#[test]
fn ten_thousand_end_in_the_time_of_one() {
    need!("python3");
    if !raise_limit() {
        skip!("this process may have less than {DESCRIPTORS} descriptors (ulimit -Hn)");
    }
    let net = TestNet::new();
    let held = Arc::new(Mutex::new(Vec::<TcpStream>::new()));
    let holder = Arc::clone(&held);
    let server = Server::with(&net.server, TO, move |stream| {
        holder.lock().expect("no panic holds it").push(stream);
    });
    let group = TestCgroup::new("many");
    let config = format!(
        "[defaults.timeouts]\nread = \"{VALUE_MS}ms\"\n[defaults]\nbreaker = \"off\"\nretry = \"off\"\n"
    );
    let agent = Agent::start(&group, &config);
    let mut python = Interpreter::start(&group, &net.client);
    python.run(CLIENT);
    for round in 1..=ROUNDS as u64 {
        assert_eq!(python.value(&format!("dial({COUNT})")), COUNT);
        server.wait_accepts(round * COUNT);
        python.value("ask()");
        let (begin, before) = (Instant::now(), processor_time(agent.pid()));
        std::thread::sleep(QUIET);
        let used = processor_time(agent.pid()) - before;
        let percent = used.as_secs_f64() / begin.elapsed().as_secs_f64() * 100.0;
        let late = python.value(&format!("ends({VALUE_MS} / 1000)"));
        let late: Vec<f64> = (late.as_array().expect("a list").iter())
            .map(|ms| ms.as_f64().expect("a number"))
            .collect();
        let [first, p50, p90, last] = late[..] else {
            panic!("{late:?}");
        };
        eprintln!(
            "{COUNT} read timeouts of {VALUE_MS} ms are late by {first:.1} (first), {p50:.1} (p50), \
             {p90:.1} (p90), {last:.1} ms (last); while they wait the agent takes {percent:.1} % of a core"
        );
        assert!(first > -1.0, "one ended early");
        held.lock().expect("no panic holds it").clear();
        let ended = round * COUNT;
        agent.wait_row(DESTINATION, "all are counted", |row| {
            row["failures"]["read_timeout"] == ended && row["in_flight"] == 0
        });
        if p90 < LATE_P90_MS && last < LATE_MAX_MS && percent < AGENT_PERCENT {
            return assert_logged(&agent, ended);
        }
    }
    panic!("too late, or too dear, each time");
}

/// Each has a line in the log, or is in the count of those that have none.
fn assert_logged(agent: &Agent, ended: u64) {
    wait::until("every timeout in the log", wait::LONGEST, || {
        let log = agent.log();
        let lines = log
            .lines()
            .filter(|line| line.contains("timeout of"))
            .count() as u64;
        let left_out: u64 = log
            .lines()
            .filter_map(|line| {
                let (before, _) = line.split_once(" more timeouts and refusals")?;
                before.rsplit(' ').next()?.parse::<u64>().ok()
            })
            .sum();
        assert!(lines < ended / 10, "{lines} lines");
        (lines + left_out == ended).then_some(())
    });
}
