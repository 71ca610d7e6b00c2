//! What it costs to look at 10,000 sockets, to end them, and to find their descriptors:
//! `cargo run --release -p agent --example sockets_cost`, as root. Works in a network namespace of
//! its own.
#![expect(clippy::print_stdout, reason = "its output is its result")]

use std::{
    hint::black_box,
    net::{TcpListener, TcpStream},
    os::unix::fs::MetadataExt as _,
    process::Command,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use backstop::sockets::{
    abort::Fate,
    diag::{Diag, Target},
    look::{Look, State},
    namespace::{Namespaces, Place},
    options::{TimeOption, Wanted, reach},
};
use rustix::time::{ClockId, clock_gettime};

const SOCKETS: usize = 10_000;
/// Each figure is the best and the median of so many runs, in processor time.
const RUNS: usize = 9;

fn main() -> Result<()> {
    // SAFETY: plain system calls on a structure that lives; nothing of this process depends on its
    // namespace yet.
    let ready = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit);
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
        libc::unshare(libc::CLONE_NEWNET) == 0
    };
    ensure!(ready, "make a network namespace: needs root");
    let up = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status();
    ensure!(up.context("run ip")?.success(), "no loopback");

    // Nobody accepts, so that the servers' ends need no descriptors; a backlog holds 4,096.
    let mut listeners = Vec::new();
    let mut clients = Vec::new();
    while clients.len() < SOCKETS {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        rustix::net::listen(&listener, 4_096)?;
        for _ in 0..2_500 {
            clients.push(TcpStream::connect(listener.local_addr()?)?);
        }
        listeners.push(listener);
    }
    let pid = std::process::id();
    let inode = std::fs::metadata("/proc/self/ns/net")?.ino() as u32;

    // From a namespace that is not ours, as the agent does.
    let mut namespaces = std::thread::spawn(move || {
        // SAFETY: a plain system call that concerns this thread.
        unsafe { libc::unshare(libc::CLONE_NEWNET) };
        Bench {
            namespaces: Namespaces::default(),
            inode,
            pid,
        }
        .run()
    })
    .join()
    .expect("no panic")?;
    report(
        "find one socket among 10,000 descriptors",
        1,
        &mut namespaces,
    );
    drop((clients, listeners));
    Ok(())
}

struct Bench {
    namespaces: Namespaces,
    inode: u32,
    pid: u32,
}

impl Bench {
    fn diag<T>(&mut self, batch: impl FnOnce(&mut Diag) -> T) -> Result<T> {
        let pids = [self.pid];
        let place = Place {
            inode: self.inode,
            pids: &pids,
        };
        Ok(self.namespaces.diag(place, batch)?)
    }

    fn run(mut self) -> Result<Vec<Duration>> {
        let mut looks: Vec<Look> = Vec::new();
        self.diag(|diag| {
            diag.dump(&[State::Established], false, |look| {
                if look.is_in_use() {
                    looks.push(look);
                }
            })
        })??;
        let targets: Vec<Target> = looks
            .iter()
            .map(|look| Target {
                tuple: look.tuple,
                cookie: look.cookie,
            })
            .collect();
        ensure!(targets.len() == SOCKETS, "{} sockets", targets.len());

        let mut enter = times(|| self.diag(|_| ()))?;
        report("enter, open, leave, close", 1, &mut enter);
        let mut one = times(|| self.diag(|diag| diag.look(&targets[0]).map(black_box)))?;
        report("the same with one look", 1, &mut one);
        let mut single =
            times(|| self.diag(|diag| targets.iter().try_for_each(|t| diag.look(t).map(ignore))))?;
        report("look, one by one", SOCKETS, &mut single);
        let mut all = times(|| self.diag(|diag| diag.look_all(&targets, |_, l| ignore(l))))?;
        report("look_all", SOCKETS, &mut all);
        for (what, details) in [("dump", false), ("dump with details", true)] {
            let mut dump =
                times(|| self.diag(|diag| diag.dump(&[State::Established], details, ignore)))?;
            report(what, 2 * SOCKETS, &mut dump);
        }

        let mut wanted: Vec<Wanted> = looks
            .iter()
            .map(|look| Wanted {
                inode: look.inode,
                cookie: look.cookie,
                spot: None,
            })
            .collect();
        let limit = Duration::from_secs(9);
        let mut spots = Vec::new();
        let mut set = times(|| {
            let set = reach(&wanted, [self.pid], |_, socket| {
                let tightened = socket.tighten(TimeOption::Receive, limit);
                (socket.spot(), tightened)
            });
            spots = set.results.into_iter().flatten().collect();
            Ok(())
        })?;
        ensure!(spots.len() == SOCKETS, "{} reached", spots.len());
        report("set SO_RCVTIMEO on all, one process", SOCKETS, &mut set);
        for (wanted, (spot, _)) in wanted.iter_mut().zip(&spots) {
            wanted.spot = Some(*spot);
        }
        let mut again = times(|| {
            let read = reach(&wanted, [], |_, socket| socket.time(TimeOption::Receive));
            ensure!(read.results.iter().all(Option::is_some));
            Ok(())
        })?;
        report("read it again where they were", SOCKETS, &mut again);
        wanted[SOCKETS / 2].spot = None;
        let find = times(|| {
            let found = reach(&wanted[SOCKETS / 2..][..1], [self.pid], |_, _| ());
            ensure!(found.results[0].is_some());
            Ok(())
        })?;

        let begin = cpu();
        let mut slowest = Duration::ZERO;
        let mut last = begin;
        let fates = self.diag(|diag| {
            diag.abort(&targets, |look| {
                slowest = slowest.max(cpu() - last);
                last = cpu();
                !look.has_unread()
            })
        })?;
        let mut took = [cpu() - begin];
        ensure!(
            fates.iter().all(|fate| matches!(fate, Fate::Aborted)),
            "not all aborted"
        );
        report("abort, each with a look", SOCKETS, &mut took);
        println!("  from one look to the next at most {slowest:?}");
        Ok(find)
    }
}

/// Processor time of this thread: all of the work is done on it, the kernel's too, and other work of
/// the machine does not count.
fn cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn times<T>(mut work: impl FnMut() -> Result<T>) -> Result<Vec<Duration>> {
    (0..RUNS)
        .map(|_| {
            let begin = cpu();
            black_box(work()?);
            Ok(cpu() - begin)
        })
        .collect()
}

fn report(what: &str, count: usize, times: &mut [Duration]) {
    times.sort_unstable();
    let median = times[times.len() / 2];
    println!(
        "{what:<42} best {:>10.1?}  median {median:>10.1?}  {:>8.2} us each",
        times[0],
        median.as_secs_f64() * 1e6 / count as f64
    );
}

fn ignore<T>(value: T) {
    black_box(value);
}
