//! Every timeout, in three lengths, for programs of every make that set none, over IPv4, IPv6 and
//! IPv4 through sockets of IPv6: it ends them on time, and by an ordinary error of their own.

#[path = "matrix/cells.rs"]
mod cells;
#[path = "matrix/many.rs"]
mod many;
#[path = "matrix/server.rs"]
mod server;
#[path = "matrix/single.rs"]
mod single;

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;
use tests::{agent::Agent, cgroup::TestCgroup, need, net::TestNet, skip, wait};

use cells::{Cell, Client, Kind};
use server::Silent;
use single::Singles;

/// How a call ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// How long its connection waited, reckoned as its timeout does; more than one where the
    /// program tried again by itself.
    waited: Vec<Duration>,
    /// What the program said.
    said: String,
    /// From the end of the connection to that of the program, as far as it is known.
    lingered: Duration,
}

/// A calm machine stays within 50 ms (and 600 ms for `write`, where data that lies still is found by
/// looking): the tables show it. This one is shared with other tests.
const LATE: Duration = Duration::from_millis(250);
const LATE_WRITE: Duration = Duration::from_millis(850);
/// Where a clock is read, the thread may wait for a processor first: the wait then seems shorter.
const EARLY: Duration = Duration::from_millis(60);
/// From the end of the connection to that of the program.
const LINGER: Duration = Duration::from_secs(1);
/// A call that was too late is made again, so that a moment in which the machine did something else
/// is no failure. What is too late each time is one.
const ROUNDS: usize = 6;
const SOON: Duration = wait::LONGEST;
/// Between the starts of two programs: all at once would measure the starting.
const PACE: Duration = Duration::from_millis(25);

/// Everything that the calls need.
struct Scene<'a> {
    net: &'a TestNet,
    group: &'a TestCgroup,
    agent: &'a Agent,
    server: &'a Silent,
    singles: &'a Singles<'a>,
    c_program: PathBuf,
}

#[test]
fn every_program_ends_on_time() {
    need!(
        "gcc",
        "python3",
        "node",
        "java",
        "javac",
        "curl",
        "hey",
        "nginx",
        "psql",
        "redis-cli"
    );
    if !Path::new("/usr/include/liburing.h").exists() {
        skip!("liburing-dev is not installed");
    }
    let net = TestNet::new();
    net.server.ip(&cells::server_addresses());
    single::small_buffers(&net);
    let mut wanted = Cell::all();
    let mut ports: Vec<u16> = wanted.iter().map(|cell| cell.port()).collect();
    ports.sort_unstable();
    ports.dedup();
    let server = Silent::start(&net.server, ports.into_iter());
    let group = TestCgroup::new("matrix");
    let agent = Agent::start(&group, &cells::policies());
    let singles = Singles::new(&group, &net.client);
    let directory = tempfile::tempdir().expect("a directory");
    let scene = Scene {
        net: &net,
        group: &group,
        agent: &agent,
        server: &server,
        singles: &singles,
        c_program: single::compile(directory.path()),
    };
    for round in 1..=ROUNDS {
        let ends = scene.run(&wanted);
        assert_eq!(ends.len(), wanted.len(), "each call ends");
        table(&ends);
        for (cell, ended) in &ends {
            assert!(is_ordinary(*cell, &ended.said), "{cell}: {ended:?}");
        }
        wanted = ends
            .iter()
            .filter(|(cell, ended)| !is_on_time(*cell, ended))
            .map(|(cell, ended)| {
                eprintln!("round {round}: {cell}: {ended:?}");
                *cell
            })
            .collect();
        if wanted.is_empty() {
            return scene.each_was_counted();
        }
    }
    panic!("never on time: {wanted:?}");
}

impl Scene<'_> {
    /// Makes these calls.
    fn run(&self, cells: &[Cell]) -> Vec<(Cell, Ended)> {
        let (many, single): (Vec<Cell>, Vec<Cell>) = cells
            .iter()
            .partition(|cell| (cell.client as usize) < Client::Curl as usize);
        let mut callers = Vec::new();
        for client in Client::ALL {
            let its = many.iter().filter(|cell| cell.client == client);
            let its: Vec<Cell> = its.copied().collect();
            callers.extend(many::start(
                its,
                &self.c_program,
                self.group,
                &self.net.client,
            ));
        }
        for caller in &mut callers {
            caller.wait_ready();
        }
        for caller in &mut callers {
            caller.go();
        }
        let mut ends: Vec<_> = callers.into_iter().flat_map(many::Caller::ends).collect();
        for (cell, ended) in &mut ends {
            let seen = self.server.take(*cell);
            // A slow program goes on filling its own buffer after the data has stopped to move.
            if cell.kind == Kind::Write {
                ended.waited = seen.iter().map(|seen| seen.waited(cell.kind)).collect();
            }
        }
        ends.extend(self.run_single(&single));
        ends
    }

    fn run_single(&self, cells: &[Cell]) -> Vec<(Cell, Ended)> {
        let before = self.connect_times();
        let mut ends: Vec<(Cell, Ended)> = std::thread::scope(|scope| {
            let calls: Vec<_> = cells
                .iter()
                .map(|cell| {
                    let call = scope.spawn(|| (*cell, self.singles.call(*cell, self.server)));
                    std::thread::sleep(PACE);
                    call
                })
                .collect();
            calls
                .into_iter()
                .map(|call| call.join().expect("no panic"))
                .collect()
        });
        // No server sees a connect that gets no answer: the agent's own event tells the time.
        wait::until("the events of all connects", SOON, || {
            let mut after = self.connect_times();
            let mut connects = ends
                .iter_mut()
                .filter(|(cell, _)| cell.kind == Kind::Connect);
            connects
                .all(|(cell, ended)| {
                    let known = before.get(&cell.destination()).map_or(0, Vec::len);
                    let times = after.remove(&cell.destination()).unwrap_or_default();
                    ended.waited = times.into_iter().skip(known).collect();
                    !ended.waited.is_empty()
                })
                .then_some(())
        });
        ends
    }

    /// How long the connects to each destination took that ran out of time.
    fn connect_times(&self) -> HashMap<String, Vec<Duration>> {
        let mut times = HashMap::<String, Vec<Duration>>::new();
        let events = self.agent.command(&["events", "--json"]).good();
        for line in events.lines() {
            let event: Value = serde_json::from_str(line).expect("JSON");
            if event["kind"] == "timeout" && event["which"] == "connect" {
                let destination = event["destination"].as_str().expect("text").to_owned();
                let elapsed = event["elapsed_ms"].as_u64().expect("a number");
                times
                    .entry(destination)
                    .or_default()
                    .push(Duration::from_millis(elapsed));
            }
        }
        times
    }

    /// Each timeout was counted as what it was, each connection ended by one, none is left.
    fn each_was_counted(&self) {
        let rows = wait::until("everything to be quiet", SOON, || {
            let status = self.agent.status();
            let rows = status["destinations"].as_array().expect("a list").clone();
            (rows.iter())
                .all(|row| row["in_flight"] == 0)
                .then_some(rows)
        });
        for cell in Cell::all() {
            let destination = cell.destination();
            let row = rows.iter().find(|row| row["destination"] == destination);
            let row = row.unwrap_or_else(|| panic!("{cell} has no row"));
            let failures = row["failures"].as_object().expect("an object");
            for (kind, count) in failures {
                let is_its = kind == cell.kind.counter();
                assert_eq!(*count != 0, is_its, "{cell}: {row:#}");
            }
            let ended = &failures[cell.kind.counter()];
            let begun = if cell.kind == Kind::Connect {
                &row["attempts"]
            } else {
                &row["established"]
            };
            assert_eq!(ended, begun, "{cell}: {row:#}");
        }
    }
}

fn lateness(cell: Cell, ended: &Ended) -> Option<f64> {
    let late = |waited: &Duration| waited.as_secs_f64() - cell.value().as_secs_f64();
    ended.waited.iter().map(late).max_by(f64::total_cmp)
}

fn is_on_time(cell: Cell, ended: &Ended) -> bool {
    let late = if cell.kind == Kind::Write {
        LATE_WRITE
    } else {
        LATE
    };
    let value = cell.value();
    !ended.waited.is_empty()
        && ended.lingered <= LINGER
        && (ended.waited.iter()).all(|waited| *waited + EARLY >= value && *waited <= value + late)
}

/// Whether a program ended by an error that it has for a broken connection.
fn is_ordinary(cell: Cell, said: &str) -> bool {
    let (number, text) = if cell.kind == Kind::Connect {
        ("110", "onnection timed out")
    } else {
        ("103", "oftware caused connection abort")
    };
    match cell.client {
        Client::C | Client::Uring | Client::Python | Client::Asyncio | Client::Node => {
            said == number
        }
        Client::Java | Client::Nio => said.replace('_', " ").contains(text),
        Client::Nginx => said.starts_with("HTTP/1.1 502 "),
        Client::Psql => {
            let closed = "server closed the connection unexpectedly";
            said.contains("exit status: 2") && (said.contains(text) || said.contains(closed))
        }
        // It ends well whatever happens, and says in its report what did.
        // Which of its two threads feels the abort, that of reading or of writing, is chance.
        Client::Hey => {
            let pipe = cell.kind == Kind::Write && said.contains("broken pipe");
            said.contains("exit status: 0") && (said.contains(text) || pipe)
        }
        Client::Curl if cell.kind == Kind::Connect => {
            said.contains("exit status: 28") && said.contains("Failed to connect")
        }
        Client::Curl | Client::RedisCli => !said.contains("exit status: 0") && said.contains(text),
    }
}

/// Prints how late they were.
fn table(ends: &[(Cell, Ended)]) {
    let mut columns = BTreeMap::<(usize, bool), Vec<f64>>::new();
    for (cell, ended) in ends {
        let column = (cell.client as usize, cell.kind == Kind::Write);
        let all = columns.entry(column).or_default();
        all.extend(lateness(*cell, ended).map(|late| late * 1000.0));
    }
    eprintln!("late by, ms     cells   p50   max   write: cells   p50   max");
    for client in Client::ALL {
        let mut line = format!("{:14}", format!("{client:?}"));
        for writes in [false, true] {
            let mut all = columns
                .remove(&(client as usize, writes))
                .unwrap_or_default();
            all.sort_by(f64::total_cmp);
            let p50 = all.get(all.len() / 2).copied().unwrap_or(f64::NAN);
            let max = all.last().copied().unwrap_or(f64::NAN);
            let indent = if writes { 9 } else { 0 };
            line += &format!("{:indent$}{:7} {p50:5.0} {max:5.0}", "", all.len());
        }
        eprintln!("{line}");
    }
}
