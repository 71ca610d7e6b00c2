//! Exchanges that wait for an answer: a thread that finds those that hang (`core::hung`), and ends
//! those that a timeout of their policy is for (`core::waits`).
//!
//! An exchange that waits makes no event. The thread looks at every connection on which an answer
//! is owed, which takes about a millisecond: once a second, or twice in the shortest timeout. Between
//! two looks it sleeps until the next timeout of those that it has seen, so that each fires when it
//! should. Where a policy sets a write or stall timeout, it asks the kernel about connections on which
//! data may lie still ([`still`]). Where a policy wants its read timeout to act by options of the
//! socket, another thread sets them ([`option`]), and an exchange that goes on behind them is ended.
//! Where a policy ends connections when its breaker opens, a third one does that ([`drain`]).
//!
//! Probes of half-open breakers that go on waiting are told of ([`probes`]).
//!
//! A program that keeps its socket locked can hold the first one up. Then another one takes its place
//! ([`held`]).

mod abort;
pub mod drain;
mod held;
mod hung;
mod option;
mod probes;
mod still;
mod timeouts;

use std::{
    collections::HashMap,
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use agent_common::{
    Event as KernelEvent, EventKind, OTHER_ROW, Row, Stamp,
    event::EVENT_EXCHANGE,
    request,
    retry::{is_retry, operation_begin_ns},
    row::ROW_PROTECTED,
    stamp::{KIND_REQUEST, KIND_WAIT, STAMP_UNJUDGED, kind_of_request},
    unanswered,
};
use anyhow::{Context as _, Result};

use super::{
    canary::Hidden,
    plan::Plan,
    reactor::{Command, Commander},
};
use crate::{
    core::{Nanos, RowId, hung::Wait},
    kernel::{Connections, LentOptions, Table, clock},
};
use abort::Aborter;
use drain::{Drain, DrainThread};
use held::{Avoided, Beat, Watchdog};
use hung::HungWatch;
use option::{Bounded, OptionThread};
use still::StillWatch;
use timeouts::Timeouts;

pub use probes::ProbeWaits;

/// How often is looked at most: with shorter timeouts, the first look may come too late.
const SHORTEST_LOOK: Nanos = Nanos::from_millis(10);
/// How often is looked at least.
const LONGEST_LOOK: Nanos = Nanos::from_secs(1);
/// When looks are further apart than this beyond their time, the agent itself was stopped: what it
/// sees first may be the end of a silence that it slept through, and it looks again before it acts.
const ASLEEP: Nanos = Nanos::from_secs(2);

/// What the thread is told.
enum Order {
    /// A new configuration.
    Plan(Arc<Plan>),
    /// End.
    Stop,
}

/// Threads at most that hang in programs' locks.
const MOST_HELD: usize = 4;
/// For so long the end of a thread is waited for at a stop: it may hang in a program's lock.
const PATIENCE: Duration = Duration::from_secs(5);

/// The handle of the thread in charge, and of those whose place it has taken.
pub struct Waiting {
    shared: Shared,
    worker: Worker,
    watchdog: Watchdog,
    /// With the sockets that are avoided meanwhile.
    held: Vec<(Worker, Vec<u64>)>,
    /// Said, and not over: even the last thread hangs.
    stands_still: bool,
    options: OptionThread,
    drains: DrainThread,
}

/// What a program's lock does to the timeouts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standstill {
    /// One of these sockets (their cookies) is kept locked: no timeout ends them, the others go on.
    Held(Vec<u64>),
    /// The same, and there is no thread left for the others.
    Whole(Vec<u64>),
    /// That is over, for these.
    Over(Vec<u64>),
}

/// A thread.
struct Worker {
    orders: mpsc::Sender<Order>,
    thread: std::thread::JoinHandle<()>,
    beat: Arc<Beat>,
}

impl Worker {
    fn start(shared: Shared) -> Result<Self> {
        let (orders, receiver) = mpsc::channel();
        let beat = Arc::new(Beat::default());
        let aborter = Aborter::watched(Arc::clone(&beat));
        let thread = std::thread::Builder::new()
            .name("backstop-waits".into())
            .spawn(move || run(shared, aborter, &receiver))
            .context("start the thread that looks at waiting exchanges")?;
        Ok(Self {
            orders,
            thread,
            beat,
        })
    }
}

impl Waiting {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        table: Arc<Table>,
        connections: Arc<Connections>,
        plan: Arc<Plan>,
        hidden: Hidden,
        commander: Commander,
        lent: Arc<LentOptions>,
        drains: (mpsc::Sender<Drain>, mpsc::Receiver<Drain>),
    ) -> Result<Self> {
        let shared = Shared {
            table,
            connections,
            plan,
            hidden,
            commander,
            bounded: Arc::default(),
            avoided: Arc::default(),
        };
        Ok(Self {
            options: OptionThread::start(shared.clone(), lent)?,
            drains: DrainThread::start(shared.clone(), drains.0, drains.1)?,
            worker: Worker::start(shared.clone())?,
            shared,
            watchdog: Watchdog::default(),
            held: Vec::new(),
            stands_still: false,
        })
    }

    /// Takes over a configuration.
    pub fn plan(&mut self, plan: Arc<Plan>) {
        self.shared.plan = Arc::clone(&plan);
        // A thread that is gone is noticed by whoever runs the loop.
        let _ = self.worker.orders.send(Order::Plan(Arc::clone(&plan)));
        self.options.plan(Arc::clone(&plan));
        self.drains.plan(plan);
    }

    /// Sees to it that a thread is at work: to be called several times a second. What has changed is
    /// returned.
    pub fn check(&mut self, now: Nanos) -> Option<Standstill> {
        let is_over = |(worker, _): &(Worker, _)| worker.thread.is_finished();
        if let Some(at) = self.held.iter().position(is_over) {
            let (worker, about) = self.held.swap_remove(at);
            let _ = worker.thread.join();
            self.shared.avoided.remove(&about);
            return Some(Standstill::Over(about));
        }
        if !self.watchdog.hangs(&self.worker.beat, now) {
            let was_whole = std::mem::take(&mut self.stands_still);
            return was_whole.then(|| Standstill::Over(self.worker.beat.about()));
        }
        let about = self.worker.beat.about();
        if self.held.len() < MOST_HELD && !self.stands_still {
            // First, lest the new thread runs into the same.
            self.shared.avoided.add(&about);
            if let Ok(worker) = Worker::start(self.shared.clone()) {
                self.worker.beat.replace();
                let held = std::mem::replace(&mut self.worker, worker);
                self.held.push((held, about.clone()));
                self.watchdog = Watchdog::default();
                return Some(Standstill::Held(about));
            }
            self.shared.avoided.remove(&about);
        }
        let is_news = !std::mem::replace(&mut self.stands_still, true);
        is_news.then_some(Standstill::Whole(about))
    }

    /// Gives every option of a socket back. With the mode or the policies that asked for them changed
    /// before, none is set again.
    pub fn give_back(&self) {
        self.options.give_back();
    }

    /// Whether the thread still runs.
    pub fn is_running(&self) -> bool {
        !self.worker.thread.is_finished() && self.options.is_running() && self.drains.is_running()
    }

    /// Ends the threads. Options of sockets are to be given back before.
    pub fn stop(&mut self) {
        self.options.stop();
        self.drains.stop();
        let _ = self.worker.orders.send(Order::Stop);
        let begin = Instant::now();
        while !self.worker.thread.is_finished() && begin.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run(mut shared: Shared, mut aborter: Aborter, orders: &mpsc::Receiver<Order>) {
    let mut hung = HungWatch::default();
    let mut timeouts = Timeouts::default();
    let mut still = StillWatch::default();
    let mut last = clock::now();
    let mut next = last;
    loop {
        let now = clock::now();
        let wake = timeouts.next().map_or(next, |at| at.min(next));
        match orders.recv_timeout(Duration::from_nanos((wake - now).0)) {
            Ok(Order::Plan(plan)) => {
                shared.plan = plan;
                // What was put off for a second may be due in a moment now.
                next = clock::now();
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Ok(Order::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
        let now = clock::now();
        let slept = now - wake > ASLEEP;
        if now >= next || slept {
            let owed = shared.owed();
            hung.look(&shared, &owed, now, slept);
            timeouts.look(&shared, &owed, now, slept);
            still.look(&shared, &mut aborter, now, slept);
            if !slept {
                probes::look(&shared, &owed, &mut aborter, now);
            }
            last = now;
        }
        if aborter.beat().is_replaced() {
            return;
        }
        if !slept {
            timeouts.fire(&shared, &mut aborter, now);
        }
        next = last + shared.look_every();
    }
}

/// One exchange that waits, and the row that it belongs to.
#[derive(Clone, Copy)]
struct Owed {
    cookie: u64,
    number: u32,
    stamp: Stamp,
    wait: Wait,
}

impl Owed {
    fn of(cookie: u64, stamp: &Stamp) -> Option<Self> {
        let (number, begun_us) = stamp.owed()?;
        if !is_ours(stamp) {
            return None;
        }
        Some(Self {
            cookie,
            number,
            stamp: *stamp,
            wait: Wait {
                begun: Nanos(begun_us * 1000),
                asked: Nanos(stamp.begun_ns),
                sending: request::is_unfinished(stamp),
                operation: operation(stamp, number, Nanos(begun_us * 1000)),
            },
        })
    }

    fn row(&self) -> RowId {
        row_of(&self.stamp)
    }

    /// Whether connections of the row usually end while this exchange is owed an answer: nobody waits for it.
    fn is_usual(&self, row: &Row) -> bool {
        unanswered::may_be(self.stamp.protocol, self.stamp.tls_stage)
            && kind_of_request(self.stamp.request) == KIND_REQUEST
            && unanswered::is_usual(
                row.unanswered,
                self.number,
                row.responses,
                row.exchange_gave_up,
            )
    }

    /// Whether it waits by right for something to come: silence is no sign of anything.
    fn waits(&self) -> bool {
        kind_of_request(self.stamp.request) == KIND_WAIT
    }

    /// Which exchange.
    fn id(&self) -> (u64, u32) {
        (self.cookie, self.number)
    }
}

/// A request that follows its connection's establishment within this time is what the connection was
/// made for; a pool that connects ahead of time waits longer.
const MADE_FOR: Nanos = Nanos::from_secs(1);

/// When the operation began that an exchange belongs to. The first one of a connection usually is what
/// the connection was made for.
fn operation(stamp: &Stamp, number: u32, begun: Nanos) -> Nanos {
    // Before the first answer, this is when the connection was established.
    let established = Nanos(stamp.answered_ns);
    if number == 1 && is_retry(stamp.operation) {
        return Nanos(operation_begin_ns(stamp.operation));
    }
    if number == 1 && begun - established <= MADE_FOR {
        established - Nanos::from_millis(u64::from(stamp.own_timeout_ms))
    } else {
        begun
    }
}

/// Whether a connection is judged and bounded at all, as far as its stamp says.
fn is_ours(stamp: &Stamp) -> bool {
    stamp.row != OTHER_ROW && stamp.flags & STAMP_UNJUDGED == 0
}

fn row_of(stamp: &Stamp) -> RowId {
    RowId {
        index: stamp.row,
        incarnation: stamp.incarnation,
    }
}

/// A failure, as the kernel would tell of it.
fn failure(stamp: &Stamp, outcome: u32, now: Nanos, seq: u64, elapsed: Nanos) -> KernelEvent {
    KernelEvent {
        kind: EventKind::FAILURE,
        row: stamp.row,
        incarnation: stamp.incarnation,
        generation: stamp.generation,
        at_ns: now.0,
        seq,
        elapsed_us: elapsed.0 / 1000,
        outcome,
        errno: 0,
        pid: stamp.pid,
        tid: stamp.tid,
        timeout_ms: 0,
        flags: EVENT_EXCHANGE,
        comm: stamp.comm,
    }
}

/// What all parts work with.
#[derive(Clone)]
struct Shared {
    table: Arc<Table>,
    connections: Arc<Connections>,
    plan: Arc<Plan>,
    hidden: Hidden,
    commander: Commander,
    /// Connections that options bound.
    bounded: Arc<Bounded>,
    /// Connections whose sockets are kept locked.
    avoided: Arc<Avoided>,
}

impl Shared {
    /// Exchanges without an answer, of rows that are judged.
    fn owed(&self) -> Vec<Owed> {
        let mut all = Vec::new();
        self.connections
            .each_owed(|cookie, stamp| all.extend(Owed::of(cookie, stamp)));
        let avoided = self.avoided.all();
        all.retain(|owed| !avoided.contains(&owed.cookie));
        all
    }

    /// The same exchange as it is now, if no answer has come yet.
    fn again(&self, owed: &Owed) -> Option<Owed> {
        let stamp = self.connections.get(owed.cookie)?;
        let again = Owed::of(owed.cookie, &stamp)?;
        (again.number == owed.number && again.row() == owed.row()).then_some(again)
    }

    /// The row, if its exchanges are judged and bounded at all.
    fn row(&self, id: RowId) -> Option<Row> {
        self.table.owned(id).filter(|row| {
            row.settings.flags & ROW_PROTECTED == 0 && !self.hidden.contains(row.key.cgroup_id)
        })
    }

    /// Tells the event thread, which judges the window.
    fn found(&self, event: KernelEvent) {
        self.commander.send(Command::Found(event));
    }

    /// How often to look: as the shortest timeout needs it.
    fn look_every(&self) -> Nanos {
        let limits = self
            .plan
            .waits
            .iter()
            .filter_map(|waits| waits.look_every());
        let hung = self.plan.breakers.iter().filter_map(|b| b.hung.shortest());
        let shortest = limits.chain(hung.map(Nanos::half)).min();
        shortest.map_or(LONGEST_LOOK, |every| {
            every.clamp(SHORTEST_LOOK, LONGEST_LOOK)
        })
    }
}

/// Rows that were looked up, so that ten thousand exchanges of one row take one look.
#[derive(Default)]
struct Rows(HashMap<RowId, Option<Row>>);

impl Rows {
    fn get(&mut self, shared: &Shared, id: RowId) -> Option<&Row> {
        self.0.entry(id).or_insert_with(|| shared.row(id)).as_ref()
    }
}
