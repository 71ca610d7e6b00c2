//! Read timeouts that act by options: SO_RCVTIMEO and SO_SNDTIMEO, set from outside on blocking
//! sockets, and given back.
//!
//! A thread of its own, because it waits for locks of sockets and searches the descriptors of
//! processes. It looks for connections that it has not seen yet, and for those whose policy asks for
//! something else by now. What it holds is given back when the policy no longer asks, at a pause and
//! at a stop; what the program has set meanwhile stays.

use std::{
    collections::HashMap,
    iter,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use agent_common::Mode;
use anyhow::{Context as _, Result};

use super::{
    Rows, Shared,
    abort::{Aborter, likely, target},
    is_ours, row_of,
};
use crate::{
    core::{Nanos, OptionLimits},
    daemon::plan::Plan,
    kernel::{
        LentOptions,
        cgroup::{self, Names},
        clock,
    },
    sockets::{
        diag::Target,
        options::{self, Given, OptionError, Socket, Spot, Tightened, TimeOption, Wanted},
        process,
    },
};

/// How often is looked for new connections, while a policy asks for options.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// Sockets that are reached in one search of a process's descriptors.
const AT_ONCE: usize = 1_000;
/// A search of a process with many descriptors is dear (3 to 4 us each): after it, the thread rests for so
/// many times as long. So searches take at most a twentieth of a processor.
const REST: u64 = 19;
/// How often a socket is searched for that no process was found to have.
const TRIES: u32 = 3;
/// Longest wait until everything is given back: a program may keep its socket locked.
const PATIENCE: Duration = Duration::from_secs(5);

/// Connections of which an option bounds each blocking receive, and since when.
#[derive(Default)]
pub(super) struct Bounded(Mutex<HashMap<u64, Nanos>>);

impl Bounded {
    /// Whether that was so at a time already: a receive that slept before is not affected.
    pub(super) fn before(&self, cookie: u64, time: Nanos) -> bool {
        self.map().get(&cookie).is_some_and(|since| *since <= time)
    }

    fn map(&self) -> MutexGuard<'_, HashMap<u64, Nanos>> {
        // Nothing is half done when a holder panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the thread is told.
enum Order {
    /// A new configuration.
    Plan(Arc<Plan>),
    /// Give everything back, and say when it is done.
    GiveBack(mpsc::Sender<()>),
}

/// The thread's handle. Without it, the thread gives everything back and ends.
pub(super) struct OptionThread {
    orders: Option<mpsc::Sender<Order>>,
    thread: Option<JoinHandle<()>>,
}

impl OptionThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(super) fn start(shared: Shared, lent: Arc<LentOptions>) -> Result<Self> {
        let (orders, receiver) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("backstop-options".into())
            .spawn(move || Holder::new(shared, lent).run(&receiver))
            .context("start the thread that sets options of sockets")?;
        Ok(Self {
            orders: Some(orders),
            thread: Some(thread),
        })
    }

    pub(super) fn plan(&self, plan: Arc<Plan>) {
        self.tell(Order::Plan(plan));
    }

    /// Gives every option back. New ones are set as long as the mode and the policies say so.
    pub(super) fn give_back(&self) {
        let (done, wait) = mpsc::channel();
        self.tell(Order::GiveBack(done));
        if wait.recv_timeout(PATIENCE).is_err() {
            tracing::warn!(
                "some program keeps its socket locked: SO_RCVTIMEO and SO_SNDTIMEO may stay set on \
                 connections that have them from us"
            );
        }
    }

    pub(super) fn is_running(&self) -> bool {
        (self.thread.as_ref()).is_some_and(|thread| !thread.is_finished())
    }

    /// Tells it to end. It is not waited for: it may hang in a program's lock.
    pub(super) fn stop(&mut self) {
        self.orders = None;
    }

    fn tell(&self, order: Order) {
        // A thread that is gone is noticed by whoever runs the loop.
        let _ = self.orders.as_ref().map(|orders| orders.send(order));
    }
}

/// A connection that was seen.
struct Seen {
    limits: OptionLimits,
    state: State,
}

enum State {
    /// Some of its options are ours.
    Held(Held),
    /// Nothing to do: calls on it do not wait, or the program's own values are stricter.
    Left,
    /// No process was found to have it, so often.
    Missed(u32),
}

/// Options that are ours.
struct Held {
    inode: u32,
    spot: Spot,
    owner: Owner,
    given: Vec<Given>,
}

/// Where to search for a socket.
#[derive(Clone, Copy)]
struct Owner {
    /// The process that connected.
    pid: u32,
    cgroup_id: u64,
    /// A process that was in the control group.
    last_pid: u32,
}

/// A connection that is to get options.
struct Candidate {
    cookie: u64,
    target: Target,
    netns_inode: u32,
    owner: Owner,
    limits: OptionLimits,
    tries: u32,
    /// 0: no program has it open.
    inode: u32,
}

/// See the module.
struct Holder {
    shared: Shared,
    lent: Arc<LentOptions>,
    /// Into namespaces.
    visitor: Aborter,
    groups: Groups,
    seen: HashMap<u64, Seen>,
    /// No new search before this.
    rests_until: Nanos,
    /// A problem is told once.
    has_complained: bool,
}

impl Holder {
    fn new(shared: Shared, lent: Arc<LentOptions>) -> Self {
        Self {
            shared,
            lent,
            visitor: Aborter::default(),
            groups: Groups::find(),
            seen: HashMap::new(),
            rests_until: Nanos::ZERO,
            has_complained: false,
        }
    }

    fn run(mut self, orders: &mpsc::Receiver<Order>) {
        loop {
            let is_busy = self.shared.plan.sets_options() || !self.seen.is_empty();
            let order = if is_busy {
                orders.recv_timeout(LOOK_EVERY)
            } else {
                orders
                    .recv()
                    .map_err(|_| mpsc::RecvTimeoutError::Disconnected)
            };
            match order {
                Ok(Order::Plan(plan)) => {
                    self.shared.plan = plan;
                    self.look();
                }
                Ok(Order::GiveBack(done)) => {
                    self.give_all_back();
                    // Nobody waits any more when it took too long.
                    let _ = done.send(());
                }
                Err(mpsc::RecvTimeoutError::Timeout) => self.look(),
                Err(mpsc::RecvTimeoutError::Disconnected) => return self.give_all_back(),
            }
        }
    }

    fn look(&mut self) {
        if self.shared.table.mode() != Mode::ENFORCE || !self.shared.plan.sets_options() {
            return self.give_all_back();
        }
        let mut before = std::mem::take(&mut self.seen);
        let (mut candidates, mut back) = (Vec::new(), Vec::new());
        let mut rows = Rows::default();
        let (shared, seen) = (&self.shared, &mut self.seen);
        shared.connections.each_open(|cookie, stamp| {
            let known = before.remove(&cookie);
            let row = is_ours(stamp).then(|| rows.get(shared, row_of(stamp)));
            let row = row.flatten();
            let limits = row.and_then(|row| shared.plan.waits(row.settings.policy).options());
            let mut tries = 0;
            match known {
                Some(known) if Some(known.limits) == limits => match known.state {
                    State::Missed(before) if before < TRIES => tries = before,
                    state => {
                        let limits = known.limits;
                        seen.insert(cookie, Seen { limits, state });
                        return;
                    }
                },
                Some(known) => back.extend(known.state.held().map(|held| (cookie, held))),
                None => {}
            }
            if let (Some(row), Some(limits)) = (row, limits) {
                candidates.push(Candidate {
                    cookie,
                    target: target(cookie, stamp),
                    netns_inode: row.netns_inode,
                    owner: Owner {
                        pid: stamp.pid,
                        cgroup_id: row.key.cgroup_id,
                        last_pid: row.last_pid,
                    },
                    limits,
                    tries,
                    inode: 0,
                });
            }
        });
        // Gone; but what the kernel moved meanwhile may have escaped the look.
        for (cookie, known) in before {
            if self.shared.connections.get(cookie).is_some() {
                self.seen.insert(cookie, known);
            } else if let Some(held) = known.state.held() {
                self.forget(cookie, &held);
            }
        }
        self.give_back(back);
        self.set(candidates);
    }

    fn set(&mut self, mut candidates: Vec<Candidate>) {
        let begin = clock::now();
        if candidates.is_empty() || begin < self.rests_until {
            return;
        }
        candidates.sort_by_key(|candidate| (candidate.netns_inode, candidate.owner.pid));
        for group in candidates.chunk_by_mut(|a, b| a.netns_inode == b.netns_inode) {
            self.find_inodes(group);
            for group in group.chunk_by(|a, b| a.owner.pid == b.owner.pid) {
                for group in group.chunks(AT_ONCE) {
                    self.set_of_one(group);
                }
            }
        }
        let now = clock::now();
        self.rests_until = now + (now - begin).times(REST);
    }

    fn find_inodes(&mut self, group: &mut [Candidate]) {
        let Some(first) = group.first() else { return };
        let inode = first.netns_inode;
        let pids = likely(group.iter().map(|c| (c.owner.pid, c.owner.last_pid)));
        let targets: Vec<Target> = group.iter().map(|c| c.target).collect();
        let result = self.visitor.within(inode, &pids, |diag| {
            diag.look_all(&targets, |at, look| {
                if let (Some(candidate), Some(look)) = (group.get_mut(at), look) {
                    candidate.inode = look.inode;
                }
            })
        });
        if let Some(Err(error)) = result {
            self.visitor.complain(inode, &error);
        }
    }

    /// Sets the options of connections that one process has made.
    fn set_of_one(&mut self, group: &[Candidate]) {
        let group: Vec<&Candidate> = group.iter().filter(|c| c.inode != 0).collect();
        let Some(owner) = group.first().map(|candidate| candidate.owner) else {
            return;
        };
        let wanted: Vec<Wanted> = group
            .iter()
            .map(|candidate| Wanted {
                inode: candidate.inode,
                cookie: candidate.cookie,
                spot: None,
            })
            .collect();
        let (shared, lent) = (&self.shared, &self.lent);
        let reached = options::reach(&wanted, self.groups.pids(owner), |at, socket| {
            let candidate = group[at];
            set_on(shared, lent, candidate, socket)
        });
        let mut problem = reached.problem;
        for (candidate, result) in group.into_iter().zip(reached.results) {
            let state = match result {
                Some((state, error)) => {
                    problem = problem.or(error);
                    state
                }
                None => State::Missed(candidate.tries + 1),
            };
            let limits = candidate.limits;
            self.seen.insert(candidate.cookie, Seen { limits, state });
        }
        self.complain(problem);
    }

    fn give_all_back(&mut self) {
        let seen = std::mem::take(&mut self.seen);
        let held = seen
            .into_iter()
            .filter_map(|(cookie, seen)| Some((cookie, seen.state.held()?)));
        self.give_back(held.collect());
    }

    fn give_back(&mut self, mut all: Vec<(u64, Held)>) {
        all.sort_by_key(|(_, held)| held.spot.pid);
        for group in all.chunk_by(|(_, a), (_, b)| a.spot.pid == b.spot.pid) {
            let Some(owner) = group.first().map(|(_, held)| held.owner) else {
                continue;
            };
            let wanted: Vec<Wanted> = group
                .iter()
                .map(|(cookie, held)| Wanted {
                    inode: held.inode,
                    cookie: *cookie,
                    spot: Some(held.spot),
                })
                .collect();
            let lent = &self.lent;
            let reached = options::reach(&wanted, self.groups.pids(owner), |at, socket| {
                let (cookie, held) = &group[at];
                let mut problem = None;
                for given in &held.given {
                    if lent.is_ours(*cookie, given.option)
                        && let Err(error) = socket.give_back(given)
                    {
                        problem = Some(error);
                    }
                }
                problem
            });
            for (cookie, held) in group {
                self.forget(*cookie, held);
            }
            let problem = reached.results.into_iter().flatten().flatten().next();
            self.complain(reached.problem.or(problem));
        }
    }

    fn forget(&self, cookie: u64, held: &Held) {
        self.shared.bounded.map().remove(&cookie);
        for given in &held.given {
            self.lent.forget(cookie, given.option);
        }
    }

    fn complain(&mut self, problem: Option<OptionError>) {
        if let Some(problem) = problem
            && !std::mem::replace(&mut self.has_complained, true)
        {
            tracing::warn!(
                "read_action = \"option\": {problem}; there the connection is ended instead"
            );
        }
    }
}

impl State {
    fn held(self) -> Option<Held> {
        match self {
            Self::Held(held) => Some(held),
            Self::Left | Self::Missed(_) => None,
        }
    }
}

/// Sets what is not strict enough on one socket.
fn set_on(
    shared: &Shared,
    lent: &LentOptions,
    candidate: &Candidate,
    socket: &Socket<'_>,
) -> (State, Option<OptionError>) {
    match socket.is_blocking() {
        Ok(true) => {}
        Ok(false) => return (State::Left, None),
        Err(error) => return (State::Left, Some(error)),
    }
    let mut given = Vec::new();
    let mut problem = None;
    let limits = candidate.limits;
    for (option, limit) in [
        (TimeOption::Receive, limits.receive),
        (TimeOption::Send, limits.send),
    ] {
        match socket.tighten(option, Duration::from_nanos(limit.0)) {
            Ok(Tightened::Ours(ours)) => {
                match lent.note(candidate.cookie, &ours) {
                    Ok(()) => given.push(ours),
                    // It would not be known whose it is.
                    Err(_) => problem = socket.give_back(&ours).err().or(problem),
                }
            }
            Ok(Tightened::Theirs(_) | Tightened::KeepaliveOn) => {}
            Err(error) => problem = Some(error),
        }
    }
    // By ours or a stricter one of the program, if nothing went wrong.
    if problem.is_none() {
        let cookie = candidate.cookie;
        shared.bounded.map().insert(cookie, clock::now());
    }
    let held = Held {
        inode: candidate.inode,
        spot: socket.spot(),
        owner: candidate.owner,
        given,
    };
    (State::Held(held), problem)
}

/// Control groups, and the processes in them.
struct Groups(Option<(PathBuf, Names)>);

impl Groups {
    fn find() -> Self {
        let mount = cgroup::mount_point().ok();
        Self(mount.map(|mount| (mount.clone(), Names::new(mount))))
    }

    /// Processes that may have a socket: the one that connected, then those of its group, for which
    /// is looked only when that has it not.
    fn pids(&mut self, owner: Owner) -> impl Iterator<Item = u32> {
        let others = move || match &mut self.0 {
            Some((mount, names)) => {
                let name = names.name(owner.cgroup_id, owner.last_pid);
                let mut pids = process::in_cgroup(&mount.join(name.trim_start_matches('/')));
                pids.retain(|pid| *pid != owner.pid);
                pids
            }
            None => Vec::new(),
        };
        iter::once(owner.pid).chain(iter::once_with(others).flatten())
    }
}
