//! The select loop's state: everything that may take time.
//!
//! The event thread decides; this side names, tells, reloads, evicts and proves. Here: the state
//! itself and the notices of the event thread. Orders are in `requests`, what comes round by itself
//! in `upkeep`.

use std::{path::PathBuf, sync::Arc};

use agent_common::{
    EventKind, Mode, OTHER_ROW, Row as KernelRow, Settings, Verdict,
    event::{EVENT_OUR_TIMEOUT, EVENT_WOULD},
    row::ROW_PROTECTED,
    verdict::{STATE_FORCED_CLOSED, STATE_FORCED_OPEN},
};

use super::{
    backend::Handle,
    canary::Hidden,
    checkup::Checkup,
    evict::Evictions,
    gone::Census,
    journal::{Journal, WallClock},
    latency::Latencies,
    memo::{keeper::Keeper, restore::Restored},
    named::{self, Naming, Sizes},
    neighbours::{Neighbours, is_self_test},
    orders::Orders,
    pause::Pause,
    plan::{Plan, Ticks},
    reactor::{Command, Commander, Notice, Reactor},
    refusals::Refusals,
    repeated::Repeated,
    takeover::Heir,
    tally::{Subject, Tally},
    view,
    waiting::Waiting,
};
use crate::{
    control::api::{self, Cause, Event, Timestamp},
    core::{Endpoint, Nanos, RowId},
    kernel::{Kernel, Table, cgroup::Names, clock, events::comm},
    policy::{self, Config, Destination},
};

/// Where the configuration comes from.
pub struct Source {
    /// The file; `None`: the built-in one.
    pub file: Option<PathBuf>,
    /// The flag `--mode`, which wins over the file.
    pub mode: Option<policy::Mode>,
}

impl Source {
    /// Reads it.
    ///
    /// # Errors
    /// Every problem in the file.
    pub fn read(&self) -> Result<Config, policy::ConfigError> {
        let mut config = match &self.file {
            Some(file) => policy::load(file)?,
            None => Config::default_config(),
        };
        if let Some(mode) = self.mode {
            config.mode = mode;
        }
        Ok(config)
    }
}

/// See the module.
pub struct Node {
    /// Programs and maps.
    pub kernel: Kernel,
    /// The mapped arrays.
    pub table: Arc<Table>,
    /// The event thread.
    pub reactor: Reactor,
    /// Orders to it.
    pub commander: Commander,
    /// The thread that looks at waiting exchanges.
    pub waiting: Waiting,
    /// What happened.
    pub journal: Arc<Journal>,
    /// The servers' end.
    pub handle: Arc<Handle>,
    /// The configuration in force.
    pub plan: Arc<Plan>,
    /// Where it comes from.
    pub source: Source,
    /// The machine's clocks.
    pub ticks: Ticks,
    /// Names of workloads.
    pub names: Names,
    /// Paths to be attached.
    pub cgroups: Vec<PathBuf>,
    /// The pause.
    pub pause: Pause,
    /// When the agent became ready.
    pub ready_at: Nanos,
    pub(super) evictions: Evictions,
    pub(super) latencies: Latencies,
    pub(super) responses: Latencies,
    pub(super) tally: Tally,
    /// Self-tests of other agents.
    pub(super) neighbours: Neighbours,
    /// What `doctor` is told besides.
    pub(super) checkup: Checkup,
    /// Cgroup ids of our own canaries.
    pub hidden: Hidden,
    /// What operators have ordered.
    pub(super) orders: Orders,
    /// Names of destinations.
    pub(super) naming: Naming,
    /// Which of the namespaces that names were heard in are there.
    pub(super) census: Census,
    /// What came back from the agent before, in a few words.
    pub(super) restored: Option<String>,
    /// Orders whose time was over while no agent ran: to be said at the start.
    pub(super) over: Vec<super::memo::file::Manual>,
    /// Writes the state down.
    pub(super) keeper: Keeper,
    /// When a call failed last.
    pub(super) failed_at: Nanos,
    /// When destinations with traffic were last counted.
    pub(super) counted_at: Nanos,
    /// Rows whose workload's name was not to be had when they were new.
    pub(super) unnamed: Vec<RowId>,
    /// When losses were last looked at.
    pub(super) losses_at: Nanos,
    /// Refusals and held connects, and what of them was told.
    pub(super) refusals: Refusals,
    pub(super) repeated: Repeated,
    pub(super) lost: u64,
    /// An agent that is taking over.
    pub(super) heir: Option<Heir>,
    /// It has: this one is to end.
    pub handed_over: bool,
}

impl Node {
    /// Puts the parts together.
    #[expect(
        clippy::too_many_arguments,
        reason = "each part is made by its own step of the start"
    )]
    pub fn new(
        kernel: Kernel,
        reactor: Reactor,
        waiting: Waiting,
        journal: Arc<Journal>,
        handle: Arc<Handle>,
        plan: Arc<Plan>,
        source: Source,
        ticks: Ticks,
        names: Names,
        cgroups: Vec<PathBuf>,
        pause: Pause,
        hidden: Hidden,
        keeper: Keeper,
        restored: Restored,
        naming: Naming,
    ) -> Self {
        let mut tally = Tally::default();
        tally.resumed(&kernel.table());
        Self {
            table: kernel.table(),
            commander: reactor.commander(),
            kernel,
            reactor,
            waiting,
            journal,
            handle,
            plan,
            source,
            ticks,
            names,
            cgroups,
            pause,
            ready_at: clock::now(),
            evictions: Evictions::default(),
            latencies: Latencies::default(),
            responses: Latencies::default(),
            tally,
            neighbours: Neighbours::default(),
            checkup: Checkup::default(),
            hidden,
            restored: restored.said(),
            over: restored.over,
            orders: restored.orders,
            keeper,
            naming,
            census: Census::new(clock::now()),
            failed_at: Nanos(0),
            counted_at: Nanos(0),
            unnamed: Vec::new(),
            losses_at: Nanos(0),
            refusals: Refusals::default(),
            repeated: Repeated::default(),
            lost: 0,
            heir: None,
            handed_over: false,
        }
    }

    /// The mode that the kernel is to have.
    pub fn kernel_mode(&self) -> u32 {
        kernel_mode(&self.pause, self.plan.config.mode)
    }

    pub(super) fn api_mode(&self) -> api::Mode {
        match self.plan.config.mode {
            policy::Mode::Enforce => api::Mode::Enforce,
            policy::Mode::Observe => api::Mode::Observe,
        }
    }

    /// Publishes an event of now.
    pub fn say(&self, event: Event) {
        self.journal.publish(Timestamp::now(), event);
    }

    /// Handles one notice.
    pub fn notice(&mut self, notice: Notice) {
        match notice {
            Notice::Transition {
                row: id,
                from,
                to,
                reason,
                generation,
                at,
                cause,
            } => {
                let Some(row) = self.shown(id) else { return };
                let time = WallClock::read().at(at);
                // Before the change, as they were of the state before.
                self.tell_before(id, from, time);
                self.keeper.changed();
                let (from, to) = (view::state(from), view::state(to));
                let reason = view::reason(reason);
                self.tally.transition(id, from, to, reason.kind);
                let names = named::of_row(&self.naming.hosts, &row);
                let workload = view::workload(id, &row, &mut self.names);
                let (cause, by) = match cause {
                    Some((cause, by)) => (Some(cause), by),
                    // The kernel has made the row so.
                    None if matches!(to, api::State::ForcedOpen | api::State::ForcedClosed) => {
                        let is = Destination::from_key(&row.key);
                        let trip = to == api::State::ForcedOpen;
                        let mut orders = self.orders.all().rev();
                        let order = orders.find(|order| {
                            order.trip == trip && order.covers(&is, &names, &workload)
                        });
                        let cause = order.map(|_| match trip {
                            true => Cause::Trip,
                            false => Cause::HoldClosed,
                        });
                        (cause, order.map(|order| Arc::clone(&order.by)))
                    }
                    None => (None, None),
                };
                let event = Event::Breaker {
                    destination: view::destination(id, &row),
                    name: names.first().map(|known| known.name.to_string()),
                    workload,
                    netns: netns(&row),
                    from,
                    to,
                    reason,
                    generation,
                    cause,
                    by: by.map(|by| by.to_string()),
                };
                self.journal.publish(time, event);
            }
            Notice::Bypassed(row, reason, group) => self.bypassed(row, reason, group),
            Notice::Redialled { row, answered, at } => {
                let Some(known) = self.shown(row) else { return };
                let event = Event::Redial {
                    destination: view::destination(row, &known),
                    netns: netns(&known),
                    answered,
                };
                self.journal.publish(WallClock::read().at(at), event);
            }
            Notice::Correlated(change) => self.correlated(change),
            Notice::CaughtUp(at) => self.tell_calls(at),
            Notice::Drained(id, on_open, connections) => {
                let Some(row) = self.shown(id) else { return };
                let event = Event::Drained {
                    destination: view::destination(id, &row),
                    workload: view::workload(id, &row, &mut self.names),
                    netns: netns(&row),
                    on_open: on_open.to_string(),
                    connections,
                };
                self.say(event);
            }
            Notice::Kernel(event) => {
                let id = RowId {
                    index: event.row,
                    incarnation: event.incarnation,
                };
                match event.kind {
                    EventKind::ROW_CREATED => self.new_row(id),
                    EventKind::FAILURE => {
                        self.keeper.failed();
                        self.failed_at = clock::now();
                        self.failure(id, &event);
                    }
                    EventKind::REJECTED | EventKind::HELD => self.refused(id, &event),
                    EventKind::REPEATED => self.repeated(id, &event),
                    _ => {}
                }
            }
        }
    }

    pub(super) fn shown(&self, id: RowId) -> Option<KernelRow> {
        self.table
            .owned(id)
            .filter(|row| !self.hidden.contains(row.key.cgroup_id))
    }

    /// A row's policy may depend on its workload and on names, which only we know; and an order may be
    /// waiting for it.
    pub(super) fn new_row(&mut self, id: RowId) {
        self.look_at_rows([id], false);
    }

    /// As [`Node::new_row`]; also for rows that exist, when names have changed (`renamed`). The groups of
    /// all of them are told at once, as they are judged by one another.
    pub(super) fn look_at_rows(&mut self, ids: impl IntoIterator<Item = RowId>, renamed: bool) {
        let mut endpoints = Vec::new();
        let mut sizes = Sizes::default();
        for id in ids {
            endpoints.extend(self.look_at_row(id, &mut sizes));
        }
        if renamed {
            endpoints.extend(self.naming.grown(&self.table, &mut sizes));
        }
        if !endpoints.is_empty() {
            self.commander.send(Command::Groups(endpoints));
        }
    }

    fn look_at_row(&mut self, id: RowId, sizes: &mut Sizes) -> Option<Endpoint> {
        let row = self.shown(id)?;
        if id.index == OTHER_ROW || row.created_ns == 0 {
            return None;
        }
        let destination = Destination::from_key(&row.key);
        let workload = self.names.name(row.key.cgroup_id, row.last_pid);
        if !self.names.knows(row.key.cgroup_id) {
            // Nobody could be asked just now: the policy may depend on the name.
            self.unnamed.push(id);
        }
        self.note_neighbour(id, &workload);
        let names = named::of_row(&self.naming.hosts, &row);
        let wanted = self.plan.settings_for(&destination, &workload, &names);
        let settings = Settings {
            // Adapted to the destination since.
            gave_up_ms: row.settings.gave_up_ms,
            exchange_gave_up_ms: row.settings.exchange_gave_up_ms,
            // The verdict's.
            probe_limit: row.settings.probe_limit,
            ..wanted
        };
        if settings != row.settings {
            self.table.set_settings(id, wanted);
            self.commander.send(Command::Reconfigure(id));
        }
        let guarded = settings.flags & ROW_PROTECTED != 0;
        if guarded {
            self.orders.forget(id);
        } else {
            let state = Verdict::unpack(row.verdict).state;
            let forced = matches!(state, STATE_FORCED_OPEN | STATE_FORCED_CLOSED);
            let now = clock::now();
            let orders = &mut self.orders;
            if let Some(order) = orders.tell(id, &destination, &names, &workload, forced, now) {
                self.commander.send(Command::Manual(vec![(id, order)]));
            }
        }
        let names = if guarded { &[][..] } else { &names };
        self.naming.endpoint(id, &row.key, names, sizes)
    }

    /// Gives the rows of adopted connections what depends on their workload. There may be more of
    /// them than notices have room.
    pub(super) fn adopted(&mut self) {
        let rows: Vec<RowId> = self.table.used().map(|(id, _)| id).collect();
        self.look_at_rows(rows, false);
    }

    fn failure(&mut self, id: RowId, event: &agent_common::Event) {
        let Some(row) = self.shown(id) else { return };
        let destination = view::destination(id, &row);
        let workload = view::workload(id, &row, &mut self.names);
        if is_self_test(&workload, &row) {
            return;
        }
        let time = WallClock::read().at(Nanos(event.at_ns));
        if event.flags & (EVENT_OUR_TIMEOUT | EVENT_WOULD) != 0 {
            self.journal.publish(
                time,
                Event::Timeout {
                    destination: destination.clone(),
                    workload: workload.clone(),
                    netns: netns(&row),
                    which: view::timeout_kind(event.outcome),
                    value_ms: u64::from(event.timeout_ms),
                    elapsed_ms: event.elapsed_us / 1000,
                    pid: event.pid,
                    comm: comm(&event.comm),
                    mode: self.api_mode(),
                },
            );
        }
        let subject = Subject {
            destination,
            workload,
            netns: netns(&row),
        };
        self.tally
            .failure(&self.journal, &self.table, id, event, subject, time);
    }
}

/// The mode that the kernel is to have.
pub(super) fn kernel_mode(pause: &Pause, mode: policy::Mode) -> u32 {
    match (pause.current(), mode) {
        (Some(_), _) => Mode::OFF,
        (None, policy::Mode::Enforce) => Mode::ENFORCE,
        (None, policy::Mode::Observe) => Mode::OBSERVE,
    }
}

/// Inode of a row's network namespace, if it is known.
pub(super) fn netns(row: &KernelRow) -> Option<u64> {
    (row.netns_inode != 0).then_some(u64::from(row.netns_inode))
}
