//! The event thread: ring in, core, verdicts out.
//!
//! It does nothing that may wait, and it allocates nothing per event. What takes time (names,
//! logs, files) goes to the select loop as a [`Notice`]; if that is behind, notices are dropped
//! and counted, verdicts are not.

use std::{
    collections::{HashMap, HashSet},
    os::fd::OwnedFd,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc as std_mpsc,
    },
    time::Duration,
};

use agent_common::{
    Event as KernelEvent, EventKind, OTHER_ROW, Verdict,
    event::{
        EVENT_EXCHANGE, EVENT_QUIET, EVENT_REFUSED, EVENT_RETRY_LIMIT, OUTCOME_ABANDONED,
        OUTCOME_ESTABLISHED, OUTCOME_LOCAL, OUTCOME_RESPONSE,
    },
    row::ROW_PROTECTED,
    verdict::{STATE_CLOSED, STATE_FORCED_CLOSED, STATE_FORCED_OPEN, unpack_probe_slots},
};
use anyhow::{Context as _, Result};
use aya::maps::{MapData, RingBuf};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::sync::{mpsc, oneshot};

use super::{
    canary::Hidden,
    dialer::Dial,
    plan::Plan,
    priority,
    view::Views,
    waiting::drain::{Drain, Refused},
};
use crate::{
    control::api::Cause,
    core::{
        Action, Correlated, DialTarget, Endpoint, Engine, Event, Full, Nanos, ProbeOutcome, Reason,
        RowId, Saved, State, WindowKind,
    },
    kernel::{Table, clock, events},
    metrics::Reaction,
    policy::OnOpen,
};

/// Longest sleep: the heartbeat must be much younger than [`HEARTBEAT_MAX_AGE`].
const LONGEST_SLEEP: Duration = Duration::from_millis(500);
/// Age at which the kernel takes the agent for dead and lets everything pass.
pub const HEARTBEAT_MAX_AGE: Nanos = Nanos::from_secs(3);
/// How often lost events are made up for.
const LOSSES_EVERY: Nanos = Nanos::from_millis(250);
/// Events handled before deadlines and commands get their turn.
const BATCH: usize = 256;
/// Dials at a time for rows on which the limit on retries is in force.
const LIMITED_MOST: usize = 200;
/// Notices that may wait for the select loop.
pub const NOTICES: usize = 16_384;

/// What the select loop asks of the event thread.
pub enum Command {
    /// A new configuration; rows have their new settings already.
    Plan(Arc<Plan>),
    /// A row has got other settings.
    Reconfigure(RowId),
    /// Each of these rows is one of the endpoints of these names, and of no others.
    Groups(Vec<Endpoint>),
    /// An operator's order for each of these rows.
    Manual(Vec<(RowId, Order)>),
    /// Every breaker in memory; all others are closed.
    Views(oneshot::Sender<Views>),
    /// What of at most so many breakers outlives the agent.
    Save(usize, oneshot::Sender<Vec<(RowId, Saved)>>),
    /// Rows that have just been made have these breakers; answers with the number of those that are
    /// not closed, once all are in force.
    Restore(Vec<(RowId, Saved)>, oneshot::Sender<usize>),
    /// Give up at most so many of these rows, those that may be; answers with those that were.
    Forget(Vec<RowId>, usize, oneshot::Sender<Vec<RowId>>),
    /// The agent itself has found that a call failed.
    Found(KernelEvent),
    /// Connections of an open breaker were ended.
    Drained {
        /// The row.
        row: RowId,
        /// What its policy says.
        on_open: OnOpen,
        /// How many.
        connections: u64,
    },
    /// A redial ended.
    DialEnded(DialTarget, bool),
    /// Destinations with traffic in the last minute.
    Traffic(usize),
    /// End the thread.
    Stop,
}

/// An operator's order, and who gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Refuse until then.
    Trip(Nanos, Arc<str>),
    /// Let pass until then.
    HoldClosed(Nanos, Arc<str>),
    /// No order is in force any more.
    Lift(Ended),
    /// Start anew; by nobody where the address belongs to another name now.
    Reset(Option<Arc<str>>),
}

/// Why an order is in force no longer, other than that it was taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its time is over.
    TimeOver,
    /// The row's address is not one of its name any more.
    NotCovered,
}

/// What the event thread tells the select loop.
#[derive(Clone)]
pub enum Notice {
    /// Something from the kernel: a new row, a failure, refusals.
    Kernel(KernelEvent),
    /// Failures of many destinations at once have begun, or are over.
    Correlated(Correlated),
    /// Connections of an open breaker were ended: the row, what its policy says, how many.
    Drained(RowId, OnOpen, u64),
    /// A breaker stays closed, or was closed, for the sake of the other endpoints of its name.
    Bypassed(RowId, Reason, Full),
    /// A dial said something.
    Redialled {
        /// A row that it was for.
        row: RowId,
        /// Whether a connection was established.
        answered: bool,
        /// When.
        at: Nanos,
    },
    /// A breaker changed state.
    Transition {
        /// The row.
        row: RowId,
        /// State before.
        from: State,
        /// State now.
        to: State,
        /// Why.
        reason: Reason,
        /// Generation of the verdict.
        generation: u32,
        /// When.
        at: Nanos,
        /// What an operator has to do with it, and which one.
        cause: Option<(Cause, Option<Arc<str>>)>,
    },
}

/// The select loop's end.
pub struct Reactor {
    commands: std_mpsc::Sender<Command>,
    wake: Arc<OwnedFd>,
    /// Reaction times.
    pub reaction: Arc<Reaction>,
    /// Notices dropped because the select loop was behind.
    pub dropped: Arc<AtomicU64>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Sends commands to the event thread.
#[derive(Clone)]
pub struct Commander {
    commands: std_mpsc::Sender<Command>,
    wake: Arc<OwnedFd>,
}

impl Commander {
    /// Sends; nothing happens once the thread has ended.
    pub fn send(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

impl Reactor {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives no thread or descriptor.
    pub fn start(
        ring: RingBuf<MapData>,
        table: Arc<Table>,
        plan: Arc<Plan>,
        dialer: std_mpsc::Sender<Dial>,
        drains: std_mpsc::Sender<Drain>,
        hidden: Hidden,
        seed: u64,
    ) -> Result<(Self, mpsc::Receiver<Notice>)> {
        let (commands, receiver) = std_mpsc::channel();
        let (notices, notices_out) = mpsc::channel(NOTICES);
        let wake = Arc::new(
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .context("make an eventfd for the event thread")?,
        );
        let reaction = Arc::new(Reaction::default());
        let dropped = Arc::new(AtomicU64::new(0));
        let lost = table.lost_events();
        let worker = Worker {
            ring,
            table,
            plan,
            engine: Engine::new(seed),
            commands: receiver,
            wake: Arc::clone(&wake),
            notices,
            dialer,
            drains,
            hidden,
            reaction: Arc::clone(&reaction),
            dropped: Arc::clone(&dropped),
            actions: Vec::with_capacity(64),
            lost,
            losses_at: Nanos(0),
            raised_at: Nanos(0),
            limited: HashMap::new(),
            acting: None,
            given_way: HashSet::new(),
        };
        let thread = std::thread::Builder::new()
            .name("backstop-events".into())
            .spawn(move || worker.run())
            .context("start the event thread")?;
        let reactor = Self {
            commands,
            wake,
            reaction,
            dropped,
            thread: Some(thread),
        };
        Ok((reactor, notices_out))
    }

    /// A sender of commands.
    pub fn commander(&self) -> Commander {
        Commander {
            commands: self.commands.clone(),
            wake: Arc::clone(&self.wake),
        }
    }

    /// Ends the thread and waits for it.
    pub fn stop(&mut self) {
        self.commander().send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }

    /// Whether the thread still runs.
    pub fn is_running(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.stop();
    }
}

struct Worker {
    ring: RingBuf<MapData>,
    table: Arc<Table>,
    plan: Arc<Plan>,
    engine: Engine,
    commands: std_mpsc::Receiver<Command>,
    wake: Arc<OwnedFd>,
    notices: mpsc::Sender<Notice>,
    dialer: std_mpsc::Sender<Dial>,
    drains: std_mpsc::Sender<Drain>,
    /// Canaries are judged by nobody: their rows' verdicts are the proof's own.
    hidden: Hidden,
    reaction: Arc<Reaction>,
    dropped: Arc<AtomicU64>,
    actions: Vec<Action>,
    lost: u64,
    losses_at: Nanos,
    raised_at: Nanos,
    /// Dials under way for rows on which the limit on retries is in force.
    limited: HashMap<DialTarget, RowId>,
    /// The order that is being carried out.
    acting: Option<(RowId, Order)>,
    /// Rows that were told to be half-open and follow another one's probe since (`scope = "node"`).
    given_way: HashSet<RowId>,
}

impl Worker {
    fn run(mut self) {
        if !priority::raise() {
            tracing::info!(
                "the event thread runs at normal priority (no CAP_SYS_NICE): reactions may take \
                 milliseconds on a busy machine"
            );
        }
        loop {
            let now = clock::now();
            self.table.beat(now);
            if self.commands() {
                return;
            }
            let more = self.events();
            self.losses();
            let now = clock::now();
            if self
                .engine
                .next_deadline()
                .is_some_and(|deadline| deadline <= now)
            {
                self.engine.handle(Event::Deadline, now, &mut self.actions);
                self.perform(None);
            }
            if !more {
                self.sleep();
            }
        }
    }

    /// Waits for an event, a command or a deadline.
    fn sleep(&mut self) {
        let now = clock::now();
        if priority::was_dropped() && now.0.saturating_sub(self.raised_at.0) > 1_000_000_000 {
            self.raised_at = now;
            priority::raise();
        }
        let until = self
            .engine
            .next_deadline()
            .map_or(u64::MAX, |d| d.0.saturating_sub(now.0));
        let wait = until.min(LONGEST_SLEEP.as_nanos() as u64);
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: wait as i64,
        };
        let ring = aya_fd(&self.ring);
        let mut fds = [
            PollFd::new(&ring, PollFlags::IN),
            PollFd::new(&self.wake, PollFlags::IN),
        ];
        // Interrupted or failed: the loop looks at everything anyway.
        let _ = poll(&mut fds, Some(&timeout));
        if !fds[1].revents().is_empty() {
            let mut counter = [0_u8; 8];
            let _ = rustix::io::read(&self.wake, &mut counter);
        }
    }

    /// Takes a batch from the ring; true when there may be more.
    fn events(&mut self) -> bool {
        for _ in 0..BATCH {
            let Some(record) = self.ring.next() else {
                return false;
            };
            let event = events::decode(&record);
            drop(record);
            if let Some(event) = event {
                self.event(&event);
            }
        }
        true
    }

    fn event(&mut self, event: &KernelEvent) {
        let row = RowId {
            index: event.row,
            incarnation: event.incarnation,
        };
        match event.kind {
            EventKind::FAILURE => {
                if event.seq != 0 && self.known(row) {
                    self.calls(row, window_of(event));
                    self.perform(Some(event.at_ns));
                }
                self.notify(Notice::Kernel(*event));
            }
            EventKind::PROBE_STARTED if self.known(row) => {
                let generation = event.generation;
                self.handle(Event::ProbeStarted { row, generation });
            }
            EventKind::PROBE_ENDED if self.known(row) => {
                let outcome = match event.outcome {
                    OUTCOME_ESTABLISHED | OUTCOME_RESPONSE => ProbeOutcome::Success,
                    OUTCOME_ABANDONED | OUTCOME_LOCAL => ProbeOutcome::Returned,
                    _ => ProbeOutcome::Failure,
                };
                let last_seqs = self.table.last_seqs(row.index);
                let generation = event.generation;
                self.handle(Event::ProbeEnded {
                    row,
                    generation,
                    outcome,
                    last_seqs,
                });
            }
            EventKind::ROW_CREATED => {
                // One that the kernel has made with a manual state has a breaker from the start, and so
                // has one that follows others.
                if self.table.verdict(row.index).state != STATE_CLOSED || self.shares(row) {
                    self.known(row);
                }
                self.notify(Notice::Kernel(*event));
            }
            EventKind::REPEATED => {
                if event.flags & EVENT_REFUSED != 0 {
                    // A thread that is gone is noticed by whoever runs the loop.
                    let _ = self.drains.send(Drain::Refused(Refused {
                        row,
                        cookie: event.seq,
                        number: event.timeout_ms,
                        at: Nanos(event.at_ns),
                    }));
                }
                if event.flags & EVENT_QUIET == 0 {
                    self.notify(Notice::Kernel(*event));
                }
            }
            EventKind::REJECTED => {
                if event.flags & EVENT_RETRY_LIMIT != 0 {
                    self.ask_for(row);
                }
                if self.known(row)
                    && let Some(refused) = self.table.refused(row)
                {
                    self.handle(Event::Refused { row, refused });
                }
                self.notify(Notice::Kernel(*event));
            }
            EventKind::HELD => self.notify(Notice::Kernel(*event)),
            _ => {}
        }
    }

    fn calls(&mut self, row: RowId, kind: WindowKind) {
        let (last_seq, _) = self.table.calls(row.index, kind);
        let Some(window) = self.table.window(row.index, kind, last_seq) else {
            return;
        };
        self.engine.handle(
            Event::Calls {
                row,
                kind,
                last_seq,
                window: &window,
            },
            clock::now(),
            &mut self.actions,
        );
    }

    fn handle(&mut self, event: Event<'_>) {
        self.engine.handle(event, clock::now(), &mut self.actions);
        self.perform(None);
    }

    /// Whether the row's policy has it share a breaker with other workloads.
    fn shares(&self, id: RowId) -> bool {
        let row = self.table.owned(id);
        row.is_some_and(|row| self.plan.breaker(row.settings.policy).node_scope)
    }

    /// Rows that share their breakers have them in memory from the start.
    fn know_those_that_share(&mut self) {
        if !self.plan.shares_breakers() {
            return;
        }
        for index in 1..self.table.len() {
            let Some(row) = self.table.row(index).filter(|row| row.created_ns != 0) else {
                continue;
            };
            let incarnation = row.incarnation;
            let id = RowId { index, incarnation };
            if self.plan.breaker(row.settings.policy).node_scope {
                self.known(id);
            }
        }
    }

    /// Whether the row has a breaker; brings it into the engine if need be.
    fn known(&mut self, row: RowId) -> bool {
        self.engine.contains(row) || self.configure(row)
    }

    fn configure(&mut self, id: RowId) -> bool {
        if id.index == OTHER_ROW {
            return false;
        }
        let Some(row) = self.table.owned(id) else {
            return false;
        };
        if row.created_ns == 0
            || row.settings.flags & ROW_PROTECTED != 0
            || self.hidden.contains(row.key.cgroup_id)
        {
            return false;
        }
        let target = DialTarget::from(&row.key);
        let settings = Arc::clone(self.plan.breaker(row.settings.policy));
        let verdict = Verdict::unpack(row.verdict);
        let generation = verdict.generation;
        let first = !self.engine.contains(id);
        self.handle(Event::Configure {
            row: id,
            target,
            settings,
            generation,
        });
        // The kernel makes rows of a destination with a manual state so from the start.
        let until = Nanos(row.verdict_until_ns);
        if first && until > clock::now() {
            match verdict.state {
                STATE_FORCED_OPEN => self.force(id, true, until),
                STATE_FORCED_CLOSED => self.force(id, false, until),
                _ => {}
            }
        }
        true
    }

    /// Brings a breaker of the agent before into the engine; whether it is not closed.
    fn restore(&mut self, id: RowId, saved: &Saved) -> bool {
        let Some(row) = self.table.owned(id) else {
            return false;
        };
        let target = DialTarget::from(&row.key);
        let settings = Arc::clone(self.plan.breaker(row.settings.policy));
        let now = clock::now();
        self.engine
            .restore(id, target, settings, saved, now, &mut self.actions);
        self.perform(None);
        self.engine.state(id) != Some(State::Closed)
    }

    /// Carries out what the core decided. `since` is the kernel's time of the event behind it.
    fn perform(&mut self, since: Option<u64>) {
        let mut actions = std::mem::take(&mut self.actions);
        // Before any verdict is in force: nothing comes of one that seems to be from before.
        let at = clock::now();
        for action in actions.drain(..) {
            match action {
                Action::SetVerdict {
                    row,
                    verdict,
                    until,
                    probe_limit,
                } => {
                    self.table.set_verdict(row, verdict, until, probe_limit);
                    if let Some(since) = since {
                        let took = clock::now().0.saturating_sub(since);
                        self.reaction.observe(Duration::from_nanos(took));
                    }
                }
                Action::Transition {
                    row,
                    from,
                    to,
                    reason,
                    generation,
                } => {
                    if to == State::Open {
                        self.opened(row);
                    }
                    let Some(from) = self.told_from(row, from, to) else {
                        continue;
                    };
                    self.notify(Notice::Transition {
                        row,
                        from,
                        to,
                        reason,
                        generation,
                        at,
                        cause: self.cause(row, from, to),
                    });
                }
                Action::Bypassed { row, reason, group } => {
                    self.notify(Notice::Bypassed(row, reason, group));
                }
                Action::Correlated(change) => self.notify(Notice::Correlated(change)),
                Action::Redialled { row, answered } => {
                    self.notify(Notice::Redialled { row, answered, at });
                }
                Action::Dial { target } => self.dial(target),
            }
        }
        self.actions = actions;
    }

    /// What an operator has to do with a change of state. A reset may close others, too, that share the
    /// breaker.
    fn cause(&self, row: RowId, from: State, to: State) -> Option<(Cause, Option<Arc<str>>)> {
        let acting = self.acting.as_ref();
        let order = acting.filter(|(id, order)| *id == row || matches!(order, Order::Reset(_)));
        let was_forced = matches!(from, State::ForcedOpen | State::ForcedClosed);
        match (order.map(|(_, order)| order), to) {
            (Some(Order::Trip(_, by)), State::ForcedOpen) => {
                Some((Cause::Trip, Some(Arc::clone(by))))
            }
            (Some(Order::HoldClosed(_, by)), State::ForcedClosed) => {
                Some((Cause::HoldClosed, Some(Arc::clone(by))))
            }
            (Some(Order::Reset(Some(by))), State::Closed) => {
                Some((Cause::Reset, Some(Arc::clone(by))))
            }
            (Some(Order::Reset(None)), State::Closed) => Some((Cause::NewOwner, None)),
            (Some(Order::Lift(Ended::NotCovered)), State::Closed) => {
                Some((Cause::NotCovered, None))
            }
            (_, State::Closed) if was_forced => Some((Cause::TimeOver, None)),
            _ => None,
        }
    }

    /// From which state a row has come, as far as people were told; `None`: there is nothing to tell. A
    /// half-open row that leaves the probe to another one, with which it shares a breaker, has not failed
    /// and is still half-open.
    fn told_from(&mut self, row: RowId, from: State, to: State) -> Option<State> {
        if (from, to) == (State::HalfOpen, State::Open) {
            let view = self.engine.view(row, clock::now());
            if view.is_some_and(|view| view.shared_probe.is_some()) {
                self.given_way.insert(row);
                return None;
            }
        }
        if self.given_way.remove(&row) && from == State::Open {
            return (to != State::HalfOpen).then_some(State::HalfOpen);
        }
        Some(from)
    }

    /// Has connections ended where the policy says so.
    fn opened(&self, id: RowId) {
        let policy = self.table.owned(id).map(|row| row.settings.policy);
        if policy.is_some_and(|policy| self.plan.on_open(policy) != OnOpen::Keep) {
            // A thread that is gone is noticed by whoever runs the loop.
            let _ = self.drains.send(Drain::Opened(id));
        }
    }

    fn dial(&mut self, target: DialTarget) {
        let row = self
            .engine
            .row_waiting_for(target)
            .and_then(|id| self.table.owned(id));
        let dial = row.map(|row| Dial {
            target,
            netns_inode: row.netns_inode,
            pid: row.last_pid,
            timeout_ms: row.settings.connect_timeout_ms,
        });
        // A dialer that is gone, or a row that is gone: the engine writes the dial off.
        if let Some(dial) = dial {
            let _ = self.dialer.send(dial);
        }
    }

    /// The limit on retries is in force on a row: whether the destination answers again, nobody else
    /// may find out.
    fn ask_for(&mut self, id: RowId) {
        let Some(row) = self.table.owned(id) else {
            return;
        };
        let target = DialTarget::from(&row.key);
        if !self.plan.breaker(row.settings.policy).redial
            || self.limited.len() >= LIMITED_MOST
            || self.limited.contains_key(&target)
        {
            return;
        }
        let dial = Dial {
            target,
            netns_inode: row.netns_inode,
            pid: row.last_pid,
            timeout_ms: row.settings.connect_timeout_ms,
        };
        if self.dialer.send(dial).is_ok() {
            self.limited.insert(target, id);
        }
    }

    /// After lost events: look at every window with failures and at every probe slot, so that
    /// nothing is missed. Not more often than [`LOSSES_EVERY`]: it takes a look at every row.
    fn losses(&mut self) {
        let lost = self.table.lost_events();
        let now = clock::now();
        if lost == self.lost || now.0.saturating_sub(self.losses_at.0) < LOSSES_EVERY.0 {
            return;
        }
        self.lost = lost;
        self.losses_at = now;
        self.know_those_that_share();
        for index in 1..self.table.len() {
            let kinds = [WindowKind::Connects, WindowKind::Exchanges];
            let failed = kinds.map(|kind| self.table.calls(index, kind).1 != 0);
            let slots = self.table.probe_slots(index);
            if failed == [false; 2] && slots == 0 {
                continue;
            }
            let Some(row) = self.table.row(index) else {
                continue;
            };
            let id = RowId {
                index,
                incarnation: row.incarnation,
            };
            if !self.known(id) {
                continue;
            }
            for (kind, _) in kinds.into_iter().zip(failed).filter(|(_, failed)| *failed) {
                self.calls(id, kind);
            }
            let (generation, taken) = unpack_probe_slots(slots);
            if taken > 0 {
                self.handle(Event::ProbeStarted {
                    row: id,
                    generation,
                });
            }
        }
        self.perform(None);
    }

    fn notify(&self, notice: Notice) {
        if self.notices.try_send(notice).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Handles waiting commands; true when the thread is to end.
    fn commands(&mut self) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Plan(plan) => {
                    self.plan = plan;
                    let rows: Vec<RowId> = self.engine.rows().collect();
                    for row in rows {
                        self.reconfigure(row);
                    }
                    self.know_those_that_share();
                }
                Command::Reconfigure(row) => {
                    if self.engine.contains(row) {
                        self.reconfigure(row);
                    } else if self.shares(row) {
                        self.known(row);
                    }
                }
                Command::Groups(endpoints) => {
                    let endpoints = &endpoints;
                    self.handle(Event::Groups { endpoints });
                }
                Command::Manual(orders) => {
                    for (row, order) in orders {
                        self.order(row, order);
                    }
                }
                Command::Views(reply) => {
                    let now = clock::now();
                    let views = self
                        .engine
                        .rows()
                        .filter_map(|row| Some((row, self.engine.view(row, now)?)))
                        .collect();
                    let _ = reply.send(views);
                }
                Command::Save(most, reply) => {
                    let _ = reply.send(self.engine.save_all(most));
                }
                Command::Restore(breakers, reply) => {
                    let restored = breakers
                        .iter()
                        .filter(|(id, saved)| self.restore(*id, saved));
                    let _ = reply.send(restored.count());
                }
                Command::Forget(mut rows, most, reply) => {
                    rows.retain(|row| self.engine.evictable(*row));
                    rows.truncate(most);
                    for row in &rows {
                        self.handle(Event::Forget { row: *row });
                        self.given_way.remove(row);
                    }
                    let _ = reply.send(rows);
                }
                Command::Found(event) => self.event(&event),
                Command::Drained {
                    row,
                    on_open,
                    connections,
                } => self.notify(Notice::Drained(row, on_open, connections)),
                Command::DialEnded(target, success) => {
                    if let Some(row) = self.limited.remove(&target)
                        && success
                    {
                        self.table.count_dialled(row);
                    }
                    self.handle(Event::DialEnded { target, success });
                }
                Command::Traffic(destinations) => {
                    let now = clock::now();
                    self.engine.traffic(destinations, now, &mut self.actions);
                    self.perform(None);
                }
                Command::Stop => return true,
            }
        }
        false
    }

    /// A row's policy or its numbers changed. One that is protected now is given up.
    fn reconfigure(&mut self, row: RowId) {
        if !self.configure(row) {
            let last_seqs = self.table.last_seqs(row.index);
            self.handle(Event::Reset { row, last_seqs });
            self.handle(Event::Forget { row });
        }
    }

    fn order(&mut self, row: RowId, order: Order) {
        if !self.known(row) {
            return;
        }
        self.acting = Some((row, order.clone()));
        let last_seqs = self.table.last_seqs(row.index);
        match order {
            Order::Trip(until, _) => self.force(row, true, until),
            Order::HoldClosed(until, _) => self.force(row, false, until),
            Order::Lift(_) => self.handle(Event::Lift { row, last_seqs }),
            Order::Reset(_) => self.handle(Event::Reset { row, last_seqs }),
        }
        self.acting = None;
    }

    fn force(&mut self, row: RowId, trip: bool, until: Nanos) {
        let last_seqs = self.table.last_seqs(row.index);
        self.handle(if trip {
            Event::Trip {
                row,
                until,
                last_seqs,
            }
        } else {
            Event::HoldClosed {
                row,
                until,
                last_seqs,
            }
        });
    }
}

/// Which window a failure is in.
fn window_of(event: &KernelEvent) -> WindowKind {
    if event.flags & EVENT_EXCHANGE == 0 {
        WindowKind::Connects
    } else {
        WindowKind::Exchanges
    }
}

/// The ring's descriptor in a form that `poll` takes.
fn aya_fd(ring: &RingBuf<MapData>) -> std::os::fd::BorrowedFd<'_> {
    use std::os::fd::{AsRawFd as _, BorrowedFd};
    // SAFETY: the ring keeps its descriptor open as long as it is borrowed.
    unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) }
}
