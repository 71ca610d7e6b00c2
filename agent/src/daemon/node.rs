//! The select loop's state: everything that may take time.
//!
//! The event thread decides; this side names, tells, reloads, evicts and proves.

use std::{
    collections::{HashMap, HashSet},
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use agent_common::{
    EventKind, Mode, OTHER_ROW, Row as KernelRow, Settings, Verdict,
    event::{EVENT_OUR_TIMEOUT, EVENT_WOULD},
    row::ROW_PROTECTED,
    verdict::{STATE_FORCED_CLOSED, STATE_FORCED_OPEN},
};
use anyhow::{Context as _, Result};
use tokio::sync::oneshot;

use super::{
    backend::{Handle, Request},
    canary::{Finding, Hidden, Proof},
    evict::Evictions,
    journal::{Journal, WallClock},
    latency::Latencies,
    pause::Pause,
    plan::{Plan, Ticks},
    reactor::{Command, Commander, Notice, Order, Reactor},
    settle,
    tally::{Subject, Tally},
    view::{self, Viewer, Views},
};
use crate::{
    control::{
        Manual,
        api::{
            self, ApiError, ConfigAction, ConfigView, Event, ManualResult, PauseResult, Paused,
            Peer, ReloadResult, SafetyAction, StatusEnvelope, TimeoutKind, Timestamp,
        },
    },
    core::{Nanos, RowId},
    kernel::{Kernel, Table, cgroup::Names, clock, events::comm},
    policy::{self, Config, Destination, DestinationArg},
};

/// Manual states at a time, also the size of the kernel's map of them.
const MAX_STANDING: usize = 1024;

/// How often lost events are made up for: that looks at every row.
const LOSSES_EVERY: Nanos = Nanos::from_secs(1);

/// Rounds of eviction in one turn of the loop, when destinations come faster than one can clear.
const EVICTION_ROUNDS: u32 = 4;

/// A manual state that waits for destinations or workloads not seen yet.
struct Standing {
    destination: DestinationArg,
    workload: Option<String>,
    trip: bool,
    until: Nanos,
}

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
    /// Cgroup ids of our own canaries.
    pub hidden: Hidden,
    standing: Vec<Standing>,
    /// Rows whose workload's name was not to be had when they were new.
    unnamed: Vec<RowId>,
    /// When losses were last looked at.
    losses_at: Nanos,
    /// Refusals that the last `rejected` event of a row had counted.
    reported: HashMap<RowId, u64>,
    lost: u64,
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
        journal: Arc<Journal>,
        handle: Arc<Handle>,
        plan: Arc<Plan>,
        source: Source,
        ticks: Ticks,
        names: Names,
        cgroups: Vec<PathBuf>,
        pause: Pause,
        hidden: Hidden,
    ) -> Self {
        Self {
            table: kernel.table(),
            commander: reactor.commander(),
            kernel,
            reactor,
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
            tally: Tally::default(),
            hidden,
            standing: Vec::new(),
            unnamed: Vec::new(),
            losses_at: Nanos(0),
            reported: HashMap::new(),
            lost: 0,
        }
    }

    /// The mode that the kernel is to have.
    pub fn kernel_mode(&self) -> u32 {
        match (self.pause.current(), self.plan.config.mode) {
            (Some(_), _) => Mode::OFF,
            (None, policy::Mode::Enforce) => Mode::ENFORCE,
            (None, policy::Mode::Observe) => Mode::OBSERVE,
        }
    }

    fn api_mode(&self) -> api::Mode {
        match self.plan.config.mode {
            policy::Mode::Enforce => api::Mode::Enforce,
            policy::Mode::Observe => api::Mode::Observe,
        }
    }

    /// Publishes an event of now.
    pub fn say(&self, event: Event) {
        self.journal.publish(Timestamp::now(), event);
    }

    // --- notices of the event thread

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
            } => {
                let Some(row) = self.shown(id) else { return };
                let (from, to) = (view::state(from), view::state(to));
                let reason = view::reason(reason);
                self.tally.transition(id, from, to, reason.kind);
                let event = Event::Breaker {
                    destination: view::destination(id, &row),
                    workload: view::workload(id, &row, &mut self.names),
                    netns: netns(&row),
                    from,
                    to,
                    reason,
                    generation,
                };
                self.journal.publish(WallClock::read().at(at), event);
            }
            Notice::Kernel(event) => {
                let id = RowId {
                    index: event.row,
                    incarnation: event.incarnation,
                };
                match event.kind {
                    EventKind::ROW_CREATED => self.new_row(id),
                    EventKind::FAILURE => self.failure(id, &event),
                    EventKind::REJECTED => self.rejected(id, &event),
                    _ => {}
                }
            }
        }
    }

    fn shown(&self, id: RowId) -> Option<KernelRow> {
        self.table
            .owned(id)
            .filter(|row| !self.hidden.contains(row.key.cgroup_id))
    }

    /// A row's policy may depend on its workload, which only we can name; and a manual state may
    /// be waiting for it.
    fn new_row(&mut self, id: RowId) {
        let Some(row) = self.shown(id) else { return };
        if id.index == OTHER_ROW || row.created_ns == 0 {
            return;
        }
        let destination = Destination::from_key(&row.key);
        let workload = self.names.name(row.key.cgroup_id, row.last_pid);
        if !self.names.knows(row.key.cgroup_id) {
            // Nobody could be asked just now: the policy may depend on the name.
            self.unnamed.push(id);
        }
        let settings = Settings {
            // Adapted to the destination since.
            gave_up_ms: row.settings.gave_up_ms,
            exchange_gave_up_ms: row.settings.exchange_gave_up_ms,
            // The verdict's.
            probe_limit: row.settings.probe_limit,
            ..self.plan.settings_for(&destination, &workload)
        };
        if settings != row.settings {
            self.table
                .set_settings(id, self.plan.settings_for(&destination, &workload));
            self.commander.send(Command::Reconfigure(id));
        }
        if settings.flags & ROW_PROTECTED != 0 {
            return;
        }
        let now = clock::now();
        let standing = self.standing.iter().rev().find(|standing| {
            standing.until > now
                && standing.destination == DestinationArg::Address(destination)
                && standing
                    .workload
                    .as_ref()
                    .is_none_or(|wanted| *wanted == workload)
        });
        let state = Verdict::unpack(row.verdict).state;
        if let Some(standing) = standing
            && state != STATE_FORCED_OPEN
            && state != STATE_FORCED_CLOSED
        {
            let order = order(standing.trip, standing.until);
            self.commander.send(Command::Manual(vec![id], order));
        }
    }

    fn failure(&mut self, id: RowId, event: &agent_common::Event) {
        let Some(row) = self.shown(id) else { return };
        let destination = view::destination(id, &row);
        let workload = view::workload(id, &row, &mut self.names);
        let time = WallClock::read().at(Nanos(event.at_ns));
        if event.flags & (EVENT_OUR_TIMEOUT | EVENT_WOULD) != 0 {
            self.journal.publish(
                time,
                Event::Timeout {
                    destination: destination.clone(),
                    workload: workload.clone(),
                    netns: netns(&row),
                    which: TimeoutKind::Connect,
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

    fn rejected(&mut self, id: RowId, event: &agent_common::Event) {
        let Some(row) = self.shown(id) else { return };
        let total = row.rejected_breaker + row.would_reject_breaker;
        let before = self.reported.insert(id, total).unwrap_or(0);
        let mode = if event.flags & EVENT_WOULD != 0 {
            api::Mode::Observe
        } else {
            api::Mode::Enforce
        };
        self.journal.publish(
            WallClock::read().at(Nanos(event.at_ns)),
            Event::Rejected {
                destination: view::destination(id, &row),
                workload: view::workload(id, &row, &mut self.names),
                netns: netns(&row),
                reason: "breaker".to_owned(),
                count: total.saturating_sub(before).max(1),
                pid: event.pid,
                comm: comm(&event.comm),
                mode,
                generation: event.generation,
            },
        );
    }

    // --- requests

    /// Answers one request.
    pub async fn request(&mut self, request: Request) {
        // Whoever asked may have gone: then nobody is told.
        match request {
            Request::Status(wanted, reply) => {
                let _ = reply.send(self.status(wanted.as_ref()).await);
            }
            Request::Manual(destination, workload, action, by, reply) => {
                let _ = reply.send(self.manual(&destination, workload, action, by));
            }
            Request::Pause(duration, by, reply) => {
                let _ = reply.send(self.begin_pause(duration, by));
            }
            Request::Resume(by, reply) => {
                let _ = reply.send(self.resume(Some(by)));
            }
            Request::Reload(by, reply) => {
                let answer = self
                    .reload(Some(by))
                    .map_err(|e| ApiError::BadRequest(e.to_string()));
                let _ = reply.send(answer);
            }
            Request::Config(reply) => {
                let _ = reply.send(Ok(self.config()));
            }
            Request::Metrics(reply) => {
                let answer = super::scrape::text(self).await;
                let _ = reply.send(answer.map_err(|e| ApiError::Internal(format!("{e:#}"))));
            }
        }
    }

    /// The event thread's breakers.
    pub(super) async fn views(&self) -> Result<Views, ApiError> {
        let (reply, answer) = oneshot::channel();
        self.commander.send(Command::Views(reply));
        answer
            .await
            .map_err(|_| ApiError::Unavailable("the event thread has ended".to_owned()))
    }

    pub(super) fn viewer<'a>(&'a self, views: &'a Views) -> Viewer<'a> {
        Viewer {
            table: &self.table,
            plan: &self.plan,
            views,
            latencies: &self.latencies,
            responses: &self.responses,
            hidden: self.hidden.all(),
            leaving: self.evictions.leaving(),
            now: clock::now(),
        }
    }

    async fn status(
        &mut self,
        wanted: Option<&DestinationArg>,
    ) -> Result<StatusEnvelope, ApiError> {
        let views = self.views().await?;
        let viewer = Viewer {
            table: &self.table,
            plan: &self.plan,
            views: &views,
            latencies: &self.latencies,
            responses: &self.responses,
            hidden: self.hidden.all(),
            leaving: self.evictions.leaving(),
            now: clock::now(),
        };
        let rows = viewer
            .rows()
            .filter(|(id, row)| match wanted {
                None => true,
                Some(DestinationArg::Address(wanted)) => {
                    id.index != OTHER_ROW && Destination::from_key(&row.key) == *wanted
                }
                // Names of addresses are not known in this version.
                Some(DestinationArg::Name { .. }) => false,
            })
            .map(|(id, row)| viewer.view(id, &row, &mut self.names))
            .collect();
        let mut envelope = StatusEnvelope {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            mode: self.api_mode(),
            uptime_ms: clock::now().0.saturating_sub(self.ready_at.0) / 1_000_000,
            lost_events: self.table.lost_events() + self.reactor.dropped.load(Ordering::Relaxed),
            paused: self.pause.current().cloned(),
            destinations: rows,
        };
        envelope.sort();
        Ok(envelope)
    }

    fn manual(
        &mut self,
        destination: &DestinationArg,
        workload: Option<String>,
        action: Manual,
        by: Peer,
    ) -> Result<ManualResult, ApiError> {
        let DestinationArg::Address(address) = destination else {
            return Err(ApiError::BadRequest(format!(
                "{destination}: names are not known to this version; give an address and port, as \
                 `backstop status` shows them"
            )));
        };
        let guarded = self.plan.config.resolve(address, workload.as_deref(), None);
        if guarded.protected {
            return Err(ApiError::Conflict(format!(
                "{address} is protected ([protected] in the configuration): it is counted, and \
                 never refused"
            )));
        }
        let hidden = self.hidden.all();
        let rows: Vec<RowId> = self
            .table
            .used()
            .filter(|(id, row)| {
                id.index != OTHER_ROW
                    && !hidden.contains(&row.key.cgroup_id)
                    && Destination::from_key(&row.key) == *address
                    && workload.as_ref().is_none_or(|wanted| {
                        self.names.name(row.key.cgroup_id, row.last_pid) == *wanted
                    })
            })
            .map(|(id, _)| id)
            .collect();
        self.standing.retain(|standing| {
            standing.destination != *destination
                || (workload.is_some() && standing.workload != workload)
        });
        let now = clock::now();
        let until = |duration: Duration| {
            Nanos(
                now.0
                    .saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)),
            )
        };
        let order = match action {
            Manual::Trip(duration) => Order::Trip(until(duration)),
            Manual::HoldClosed(duration) => Order::HoldClosed(until(duration)),
            Manual::Reset => Order::Reset,
        };
        let forced = match order {
            Order::Trip(until) => Some((true, until)),
            Order::HoldClosed(until) => Some((false, until)),
            Order::Reset => None,
        };
        if forced.is_some() && self.standing.len() >= MAX_STANDING {
            return Err(ApiError::Conflict(format!(
                "{MAX_STANDING} manual states are in force already; reset some"
            )));
        }
        if let Some((trip, until)) = forced {
            self.standing.push(Standing {
                destination: destination.clone(),
                workload: workload.clone(),
                trip,
                until,
            });
        }
        // For rows that do not exist yet, the kernel itself knows what holds for all workloads.
        if workload.is_none() {
            let errno = self.plan.breakers[guarded.policy].errno;
            let state = forced.map(|(trip, until)| {
                let state = if trip {
                    STATE_FORCED_OPEN
                } else {
                    STATE_FORCED_CLOSED
                };
                (
                    Verdict {
                        generation: 1,
                        errno,
                        state,
                        flags: 0,
                    },
                    until,
                )
            });
            self.kernel
                .set_manual(&address.to_manual_key(), state)
                .map_err(|e| ApiError::Internal(format!("{e:#}")))?;
        }
        let count = rows.len() as u64;
        let said = match action {
            Manual::Trip(duration) => format!("trip for {}", humantime::format_duration(duration)),
            Manual::HoldClosed(duration) => {
                format!("hold closed for {}", humantime::format_duration(duration))
            }
            Manual::Reset => "reset".to_owned(),
        };
        tracing::info!(%destination, workload = workload.as_deref(), %by, "{said}");
        self.commander.send(Command::Manual(rows, order));
        Ok(ManualResult { rows: count })
    }

    fn begin_pause(
        &mut self,
        duration: Option<Duration>,
        by: Peer,
    ) -> Result<PauseResult, ApiError> {
        let since = Timestamp::now();
        let until = duration.map(|duration| {
            Timestamp::from_unix_ms(
                since
                    .unix_ms()
                    .saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)),
            )
        });
        let paused = Paused {
            since,
            until,
            by: by.to_string(),
        };
        self.pause
            .begin(paused.clone())
            .map_err(|e| ApiError::Internal(format!("{e:#}; nothing is paused")))?;
        self.table.set_mode(Mode::OFF);
        settle::settle(&mut self.kernel);
        self.say(Event::Config {
            action: ConfigAction::Paused,
            message: match until {
                Some(until) => format!("every verdict and timeout is off until {until}"),
                None => "every verdict and timeout is off until resume".to_owned(),
            },
            by: Some(by.to_string()),
        });
        Ok(PauseResult {
            paused: Some(paused),
        })
    }

    /// Ends the pause, if there is one.
    fn resume(&mut self, by: Option<Peer>) -> Result<PauseResult, ApiError> {
        let ended = self
            .pause
            .end()
            .map_err(|e| ApiError::Internal(format!("{e:#}; still paused")))?;
        if ended.is_some() {
            self.table.set_mode(self.kernel_mode());
            self.say(Event::Config {
                action: ConfigAction::Resumed,
                message: "verdicts and timeouts are on again".to_owned(),
                by: by.map(|by| by.to_string()),
            });
        }
        Ok(PauseResult { paused: None })
    }

    fn config(&self) -> ConfigView {
        ConfigView {
            file: self
                .source
                .file
                .as_ref()
                .map(|file| file.display().to_string()),
            toml: self.plan.config.to_toml(),
            warnings: self.plan.config.warnings(),
        }
    }

    /// Reads the configuration again and puts it in force; on an error nothing changes.
    ///
    /// # Errors
    /// Every problem in the file.
    pub fn reload(&mut self, by: Option<Peer>) -> Result<ReloadResult> {
        let by = by.map(|by| by.to_string());
        let config = match self.source.read() {
            Ok(config) => config,
            Err(error) => {
                self.tally.reload(false);
                self.say(Event::Config {
                    action: ConfigAction::Refused,
                    message: format!("{error}; the old configuration stays in force"),
                    by,
                });
                return Err(error.into());
            }
        };
        let old = self.plan.config.agent;
        let mut warnings = config.warnings();
        if (config.agent.max_destinations, config.agent.ring_bytes)
            != (old.max_destinations, old.ring_bytes)
        {
            warnings.push(
                "agent.max_destinations and agent.ring_bytes change only with a restart".to_owned(),
            );
        }
        let changes = policy::diff(&self.plan.config, &config);
        let plan = Arc::new(Plan::new(config, self.ticks));
        if let Err(error) = self.apply(plan) {
            self.tally.reload(false);
            return Err(error);
        }
        self.tally.reload(true);
        let changed = !changes.is_empty();
        let message = if changed {
            changes
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join("; ")
        } else {
            "read again, nothing differs".to_owned()
        };
        self.say(Event::Config {
            action: ConfigAction::Reloaded,
            message,
            by,
        });
        for warning in &warnings {
            tracing::warn!("{warning}");
        }
        Ok(ReloadResult { changed, warnings })
    }

    /// Puts a plan in force: for rows to come, for rows that exist, and in the event thread.
    ///
    /// # Errors
    /// When the kernel takes no more prefixes.
    fn apply(&mut self, plan: Arc<Plan>) -> Result<()> {
        self.kernel
            .set_policies(&plan.settings, &plan.entries)
            .context("put the policies into the kernel")?;
        self.plan = plan;
        let hidden = self.hidden.all();
        let rows: Vec<(RowId, KernelRow)> = self.table.used().skip(1).collect();
        for (id, row) in rows {
            if hidden.contains(&row.key.cgroup_id) {
                continue;
            }
            let workload = self.names.name(row.key.cgroup_id, row.last_pid);
            let settings = self
                .plan
                .settings_for(&Destination::from_key(&row.key), &workload);
            self.table.set_settings(id, settings);
        }
        self.gave_up_times();
        self.commander.send(Command::Plan(Arc::clone(&self.plan)));
        let before = self.table.mode();
        self.table.set_mode(self.kernel_mode());
        if before == Mode::ENFORCE && self.kernel_mode() != Mode::ENFORCE {
            settle::settle(&mut self.kernel);
        }
        Ok(())
    }

    // --- upkeep

    /// What has to be looked at several times a second.
    pub async fn tick(&mut self) {
        let now = clock::now();
        if self.pause.is_over(Timestamp::now())
            && let Err(error) = self.resume(None)
        {
            tracing::error!("the pause is over but cannot be ended: {error}");
        }
        self.losses(now);
        for id in std::mem::take(&mut self.unnamed) {
            self.new_row(id);
        }
        self.expire_standing(now);
        if let Err(error) = self.evict().await {
            tracing::error!("giving up rows failed: {error:#}");
        }
        if self.latencies.is_due(now) {
            let rows: Vec<_> = self
                .table
                .used()
                .filter_map(|(id, row)| Some((id, self.table.histogram(row.histogram)?)))
                .collect();
            self.latencies.slice(now, rows.into_iter());
            let rows: Vec<_> = self
                .table
                .used()
                .filter_map(|(id, row)| Some((id, self.table.histogram(row.response_histogram)?)))
                .collect();
            self.responses.slice(now, rows.into_iter());
            let used: HashSet<u64> = self
                .table
                .used()
                .map(|(_, row)| row.key.cgroup_id)
                .collect();
            self.names.keep(|id| used.contains(&id));
            self.gave_up_times();
        }
        if self.tally.is_due(now) {
            let clock = WallClock::read();
            let (names, hidden) = (&mut self.names, self.hidden.all());
            self.tally
                .calls(&self.journal, &self.table, now, clock, |id, row| {
                    (!hidden.contains(&row.key.cgroup_id)).then(|| Subject {
                        destination: view::destination(id, row),
                        workload: view::workload(id, row, names),
                        netns: netns(row),
                    })
                });
        }
    }

    /// A program gives up only after three times what the destination usually takes (rule 6).
    fn gave_up_times(&self) {
        for (id, row) in self.table.used().skip(1) {
            let base = self
                .plan
                .settings
                .get(row.settings.policy as usize)
                .map_or(0, |settings| settings.gave_up_ms);
            if base == 0 {
                continue;
            }
            let usual = |latencies: &Latencies, histogram: u32, longest: u64| {
                let histogram = self.table.histogram(histogram);
                let p99 = latencies.of(id, histogram.as_ref(), longest).p99;
                let ms = u32::try_from(p99.unwrap_or(0) * 3 / 1000).unwrap_or(u32::MAX);
                base.max(ms)
            };
            let connect = usual(&self.latencies, row.histogram, row.connect_latency_max_us);
            let exchange = usual(
                &self.responses,
                row.response_histogram,
                row.response_latency_max_us,
            );
            if (connect, exchange) != (row.settings.gave_up_ms, row.settings.exchange_gave_up_ms) {
                self.table.set_gave_up(id, connect, exchange);
            }
        }
    }

    fn losses(&mut self, now: Nanos) {
        if now.0.saturating_sub(self.losses_at.0) < LOSSES_EVERY.0 {
            return;
        }
        self.losses_at = now;
        let lost = self.table.lost_events() + self.reactor.dropped.load(Ordering::Relaxed);
        if lost != self.lost {
            let message = "events found no room and were dropped; counters and breakers do not \
                           depend on them, but lines may be missing here"
                .to_owned();
            self.say(Event::Loss {
                lost: lost - self.lost,
                message,
            });
            self.lost = lost;
            // Among them may have been new rows.
            let rows: Vec<RowId> = self.table.used().skip(1).map(|(id, _)| id).collect();
            for id in rows {
                self.new_row(id);
            }
        }
    }

    fn expire_standing(&mut self, now: Nanos) {
        let kernel = &mut self.kernel;
        self.standing.retain(|standing| {
            if standing.until > now {
                return true;
            }
            if let (DestinationArg::Address(address), None) =
                (standing.destination.clone(), &standing.workload)
                && let Err(error) = kernel.set_manual(&address.to_manual_key(), None)
            {
                tracing::error!("{error:#}");
            }
            false
        });
    }

    async fn evict(&mut self) -> Result<()> {
        self.evictions.drain(&mut self.kernel)?;
        for _ in 0..EVICTION_ROUNDS {
            let candidates = self.evictions.candidates(&self.table);
            if candidates.is_empty() {
                break;
            }
            let (reply, answer) = oneshot::channel();
            let most = Evictions::step(&self.table);
            // The event thread keeps those that are open or forced.
            self.commander
                .send(Command::Forget(candidates, most, reply));
            let rows = answer.await.context("the event thread has ended")?;
            if rows.is_empty() {
                break;
            }
            self.evictions.give_up(&mut self.kernel, &rows)?;
            for row in &rows {
                self.reported.remove(row);
                self.tally.forget(*row);
            }
        }
        Ok(())
    }

    /// Attaches cgroups that have come back, and forgets those that have gone.
    pub fn check_cgroups(&mut self) {
        use std::os::unix::fs::MetadataExt as _;
        for path in self.cgroups.clone() {
            let there = std::fs::metadata(&path).ok().map(|metadata| metadata.ino());
            let attached = self
                .kernel
                .attachments()
                .iter()
                .find(|a| a.path == path)
                .map(|a| a.id);
            if there == attached {
                continue;
            }
            if attached.is_some() {
                self.kernel.detach(&path);
                self.safety(format!(
                    "cgroup {} has vanished; it is attached again when it returns",
                    path.display()
                ));
            }
            if there.is_some() {
                match self.kernel.attach(&path) {
                    Ok(()) => tracing::info!("cgroup {} is attached again", path.display()),
                    Err(error) => self.safety(format!("{error:#}")),
                }
            }
        }
    }

    /// Takes in what the canaries have found, and says whether the agent is ready.
    ///
    /// # Errors
    /// When enforcement failed in every cgroup.
    pub fn proven(&mut self, proofs: Vec<Proof>) -> Result<()> {
        let rows: Vec<RowId> = proofs.iter().filter_map(|proof| proof.row).collect();
        if let Err(error) = self.evictions.give_up(&mut self.kernel, &rows) {
            tracing::error!("{error:#}");
        }
        // Nobody else was given up for them.
        self.evictions.total = self.evictions.total.saturating_sub(rows.len() as u64);
        let count = proofs.len();
        let mut failures = Vec::new();
        let mut is_news = false;
        for proof in proofs {
            if let Some(canary) = proof.canary {
                self.hidden.remove(canary);
            }
            match proof.finding {
                Finding::Proven => is_news = true,
                Finding::Nothing => {}
                Finding::Failed(error) => {
                    is_news = true;
                    self.safety(format!("{error:#}"));
                    failures.push(error);
                }
            }
        }
        if is_news {
            match failures.first() {
                None => {
                    let reason = match self.pause.current() {
                        Some(_) => "paused: the programs are attached and seen to run",
                        None => "enforcement is proven",
                    };
                    self.handle.set_ready(true, reason.to_owned());
                }
                Some(error) => self.handle.set_ready(false, format!("{error:#}")),
            }
        }
        if failures.len() == count
            && let Some(error) = failures.pop()
        {
            return Err(error);
        }
        Ok(())
    }

    /// Paths of the attached cgroups.
    pub fn attached(&self) -> Vec<PathBuf> {
        self.kernel
            .attachments()
            .iter()
            .map(|a| a.path.clone())
            .collect()
    }

    /// Reports that enforcement is not what it should be.
    pub fn safety(&self, message: String) {
        self.say(Event::Safety {
            action: SafetyAction::NotEnforcing,
            destination: None,
            workload: None,
            message,
        });
    }

    /// Ends enforcement in an orderly way: nothing of ours stays on any socket or cgroup.
    pub fn stop(&mut self) {
        self.table.set_mode(Mode::OFF);
        settle::settle(&mut self.kernel);
        for path in self.cgroups.clone() {
            self.kernel.detach(&path);
        }
        self.reactor.stop();
    }
}

fn netns(row: &KernelRow) -> Option<u64> {
    (row.netns_inode != 0).then_some(u64::from(row.netns_inode))
}

fn order(trip: bool, until: Nanos) -> Order {
    if trip {
        Order::Trip(until)
    } else {
        Order::HoldClosed(until)
    }
}
