//! A real server and its clients, and a table of what happens between them.

use std::{
    collections::BTreeMap,
    net::{SocketAddr, TcpStream},
    ops::RangeInclusive,
    time::Duration,
};

use serde_json::Value;
use tempfile::TempDir;

use crate::{agent::Agent, cgroup::TestCgroup, net::TestNet, process::Program, wait};

/// Where the server listens.
pub const TO: SocketAddr = TestNet::server4(8080);
/// How the agent calls it.
pub const DESTINATION: &str = "10.77.0.2:8080";
/// For a server to listen, on a busy machine.
pub const START: Duration = Duration::from_secs(60);
/// Counts and judges, and never opens.
const NEVER_OPENS: &str = r#"
[defaults.breaker]
failure_rate = "off"
consecutive_failures = 0
window = 128
window_age = "30m"
"#;

/// Namespaces, the clients' control group, and a directory for the server.
pub struct Place {
    /// The namespaces: client and server.
    pub net: TestNet,
    /// The clients' control group.
    pub group: TestCgroup,
    /// The server's files.
    pub directory: TempDir,
}

impl Place {
    /// An empty one.
    pub fn new(label: &str) -> Self {
        Self {
            net: TestNet::new(),
            group: TestCgroup::new(label),
            directory: tempfile::tempdir().expect("a directory"),
        }
    }

    /// Waits until the server listens.
    pub fn listening(&self) {
        self.net.server.enter(|| {
            wait::until("the server to listen", START, || {
                TcpStream::connect(TO).ok()
            });
        });
    }

    /// The agent, once the server listens: what that took is nobody's attempt.
    pub fn agent(&self) -> Agent {
        self.listening();
        Agent::start(&self.group, NEVER_OPENS)
    }

    /// Waits until the server has read all that it was sent.
    ///
    /// For what must happen after that: a server that ends before it has read resets the
    /// connection (`tcp_close` in net/ipv4/tcp.c), and one that has read closes it.
    pub fn read_all(&self) {
        let [local, queues] = [1, 4];
        let port = format!(":{:04X}", TO.port());
        self.net.server.enter(|| {
            wait::until("the server to have read", START, || {
                let sockets = std::fs::read_to_string("/proc/thread-self/net/tcp");
                let sockets = sockets.expect("read the namespace's sockets");
                let unread = |line: &str| {
                    let fields: Vec<&str> = line.split_ascii_whitespace().collect();
                    fields[local].ends_with(&port) && !fields[queues].ends_with(":00000000")
                };
                (!sockets.lines().skip(1).any(unread)).then_some(())
            });
        });
    }

    /// A program of the clients'.
    pub fn client(&self, program: Program) -> Program {
        program.in_cgroup(&self.group).in_netns(&self.net.client)
    }

    /// A program of the server's.
    pub fn server(&self, program: Program) -> Program {
        program.in_netns(&self.net.server)
    }
}

/// However many: for what depends on the version of a program, and judges nobody.
pub const ANY: u64 = u64::MAX;

/// Something that happens, and what it counts.
pub struct Case<S> {
    what: &'static str,
    act: fn(&mut S, &Agent),
    answers: RangeInclusive<u64>,
    counts: &'static [(&'static str, u64)],
}

/// A line of a table: what happens, how many answers are counted meanwhile, and what else.
///
/// The act ends when all that it began has ended, as far as the client is concerned. Clients of
/// some protocols ask more than what they are told, so the number of answers is a range.
pub const fn case<S>(
    what: &'static str,
    act: fn(&mut S, &Agent),
    answers: RangeInclusive<u64>,
    counts: &'static [(&'static str, u64)],
) -> Case<S> {
    Case {
        what,
        act,
        answers,
        counts,
    }
}

/// Lets one after the other happen. After each, nothing is under way, what was said is counted and
/// nothing else, and the failures are judged as such.
#[track_caller]
pub fn check<S>(scene: &mut S, agent: &Agent, cases: &[Case<S>]) {
    let mut before = Counts::of(&agent.row(DESTINATION));
    for case in cases {
        (case.act)(scene, agent);
        let mut wanted = before.others.clone();
        let is_any = |name: &str| case.counts.contains(&(name, ANY));
        for (name, count) in case.counts.iter().filter(|(name, _)| !is_any(name)) {
            *wanted.entry((*name).to_owned()).or_default() += count;
        }
        wanted.retain(|name, _| !is_any(name));
        let Case { what, answers, .. } = case;
        let what = format!("{what}: {answers:?} answers, {:?}", case.counts);
        let row = agent.wait_row(DESTINATION, &what, |row| {
            let mut now = Counts::of(row);
            now.others.retain(|name, _| !is_any(name));
            let answered = now.answers - before.answers;
            row["in_flight"] == 0
                && answers.contains(&answered)
                && now.others == wanted
                && judged(row) == failed(row)
        });
        before = Counts::of(&row);
    }
}

/// Failures in the windows.
fn judged(row: &Value) -> u64 {
    ["connects", "exchanges"]
        .iter()
        .filter_map(|window| row["windows"][window]["failures"].as_u64())
        .sum()
}

/// Failures that were counted.
fn failed(row: &Value) -> u64 {
    let failures = row["failures"].as_object().into_iter().flatten();
    failures.filter_map(|(_, count)| count.as_u64()).sum()
}

/// What was counted of a row that is perhaps not there yet.
struct Counts {
    answers: u64,
    /// Everything else that an attempt or an exchange may end in; without what is 0.
    others: BTreeMap<String, u64>,
}

impl Counts {
    fn of(row: &Value) -> Self {
        let failures = row["failures"].as_object().into_iter().flatten();
        let beside = ["abandoned", "stale", "local"].map(|name| (name, &row[name]));
        let others = failures
            .map(|(name, count)| (name.as_str(), count))
            .chain(beside)
            .filter_map(|(name, count)| Some((name.to_owned(), count.as_u64()?)))
            .filter(|(_, count)| *count != 0)
            .collect();
        Self {
            answers: row["responses"].as_u64().unwrap_or(0),
            others,
        }
    }
}
