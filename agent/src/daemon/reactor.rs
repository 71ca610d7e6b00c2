//! The event thread: ring in, core, verdicts out.
//!
//! It does nothing that may wait, and it allocates nothing per event. What takes time (names,
//! logs, files) goes to the select loop as a [`Notice`]; if that is behind, notices are dropped
//! and counted, verdicts are not.

mod actions;
mod commands;
mod rows;

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
    Event as KernelEvent, EventKind,
    event::{
        EVENT_EXCHANGE, EVENT_QUIET, EVENT_REFUSED, EVENT_RETRY_LIMIT, EVENT_UNDER_WAY,
        OUTCOME_ABANDONED, OUTCOME_ESTABLISHED, OUTCOME_LOCAL, OUTCOME_RESPONSE,
    },
    verdict::{STATE_CLOSED, unpack_probe_slots},
};
use anyhow::{Context as _, Result};
use aya::maps::{MapData, RingBuf};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use tokio::sync::mpsc;

use super::{
    canary::Hidden,
    dialer::Dial,
    plan::Plan,
    priority,
    waiting::drain::{Drain, Refused},
};
use crate::{
    control::api::Cause,
    core::{
        Action, Correlated, DialTarget, Engine, Event, Full, Nanos, ProbeOutcome, Reason, RowId,
        State, WindowKind, refusing::Refusing,
    },
    kernel::{Table, clock, events},
    metrics::Reaction,
    policy::OnOpen,
};

pub use commands::{Command, Commander, Ended, Order};

/// Longest sleep: the heartbeat must be much younger than [`HEARTBEAT_MAX_AGE`].
const LONGEST_SLEEP: Duration = Duration::from_millis(500);
/// Age at which the kernel takes the agent for dead and lets everything pass.
pub const HEARTBEAT_MAX_AGE: Nanos = Nanos::from_secs(3);
/// How often lost events are made up for.
const LOSSES_EVERY: Nanos = Nanos::from_millis(250);
/// Events handled before deadlines and commands get their turn.
const BATCH: usize = 256;
/// Notices that may wait for the select loop.
pub const NOTICES: usize = 16_384;

/// What the event thread tells the select loop.
#[derive(Clone)]
pub enum Notice {
    /// Something from the kernel: a new row, a failure, refusals.
    Kernel(KernelEvent),
    /// Whatever the kernel had told by then has been handled, and its notices come before this one.
    CaughtUp(Nanos),
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
            refusing: Refusing::default(),
            acting: None,
            given_way: HashSet::new(),
            catches_up: false,
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
    /// Rows that refuse and may find out by a trial that their server is back.
    refusing: Refusing,
    /// The order that is being carried out.
    acting: Option<(RowId, Order)>,
    /// Rows that were told to be half-open and follow another one's probe since (`scope = "node"`).
    given_way: HashSet<RowId>,
    /// Whether the select loop waits for [`Notice::CaughtUp`].
    catches_up: bool,
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
            if self.catches_up && !more {
                self.catches_up = false;
                // (Where that finds no room, it is asked for again.)
                let _ = self.notices.try_send(Notice::CaughtUp(clock::now()));
            }
            self.losses();
            self.look_at_refusals();
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
        let look = self.refusing.next_look();
        let look = look.map_or(u64::MAX, |look| look.0.saturating_sub(now.0));
        let wait = until.min(look).min(LONGEST_SLEEP.as_nanos() as u64);
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
                        is_under_way: event.flags & EVENT_UNDER_WAY != 0,
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
                if self.known(row) {
                    self.refused(row);
                    if self.engine.state(row) == Some(State::Open) {
                        self.refusing.heard(row, clock::now());
                    }
                }
                self.notify(Notice::Kernel(*event));
            }
            EventKind::HELD => self.notify(Notice::Kernel(*event)),
            _ => {}
        }
    }

    fn refused(&mut self, row: RowId) {
        if let Some(refused) = self.table.refused(row) {
            self.handle(Event::Refused { row, refused });
        }
    }

    /// Between two words of the kernel.
    fn look_at_refusals(&mut self) {
        if self.refusing.next_look().is_none() {
            return;
        }
        let engine = &self.engine;
        let is_open = |row| engine.state(row) == Some(State::Open);
        for row in self.refusing.due(clock::now(), is_open) {
            self.refused(row);
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
