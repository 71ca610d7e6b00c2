//! What the node looks after by itself: losses, evictions, cgroups, proofs, the stop.

use std::{collections::HashSet, path::PathBuf, sync::atomic::Ordering};

use agent_common::Mode;
use anyhow::{Context as _, Result};
use tokio::sync::oneshot;

use super::{
    canary::{Finding, Proof},
    evict::Evictions,
    journal::WallClock,
    latency::Latencies,
    node::{Node, netns},
    reactor::Command,
    settle,
    tally::Subject,
    view,
    waiting::Standstill,
};
use crate::{
    control::api::{ConfigAction, Event, SafetyAction, Timestamp},
    core::{Correlated, Nanos, RowId, is_loopback},
    kernel::clock,
};

/// How often lost events are made up for: that looks at every row.
const LOSSES_EVERY: Nanos = Nanos::from_secs(1);

/// While calls fail, destinations with traffic are counted so often.
const TRAFFIC_EVERY: Nanos = Nanos::from_millis(500);
/// Until so long after the last failure.
const TRAFFIC_AFTER: Nanos = Nanos::from_secs(10);
/// A destination that was called within this time has traffic.
const TRAFFIC_WITHIN: Nanos = Nanos::from_secs(60);

/// For so long nothing much can have happened since the event thread had caught up.
const CAUGHT_UP_FOR: Nanos = Nanos::from_millis(100);

/// Rounds of eviction in one turn of the loop, when destinations come faster than one can clear.
const EVICTION_ROUNDS: u32 = 4;

impl Node {
    /// What has to be looked at several times a second.
    pub async fn tick(&mut self) {
        let now = clock::now();
        if self.pause.is_over(Timestamp::now())
            && let Err(error) = self.resume(None)
        {
            tracing::error!("the pause is over but cannot be ended: {error}");
        }
        self.forget_gone(now);
        self.follow_names(now);
        self.tell_refusals(now);
        self.tell_repeated_due(now);
        self.journal.flush(Timestamp::now());
        if let Some(change) = self.waiting.check(now) {
            self.standstill(change);
        }
        self.count_traffic(now);
        self.losses(now);
        let unnamed = std::mem::take(&mut self.unnamed);
        self.look_at_rows(unnamed, false);
        self.expire_orders(now);
        self.keep().await;
        if let Err(error) = self.evict().await {
            tracing::error!("giving up rows failed: {error:#}");
        }
        if let Err(error) = self.forget_neighbours(now).await {
            tracing::error!("giving up rows of other agents' self-tests failed: {error:#}");
        }
        if self.latencies.is_due(now) {
            let table = &self.table;
            let connects = table
                .used()
                .filter_map(|(id, row)| Some((id, table.histogram(row.histogram)?)));
            self.latencies.slice(now, connects);
            let responses = table
                .used()
                .filter_map(|(id, row)| Some((id, table.histogram(row.response_histogram)?)));
            self.responses.slice(now, responses);
            let used: HashSet<u64> = self
                .table
                .used()
                .map(|(_, row)| row.key.cgroup_id)
                .collect();
            self.names.keep(|id| used.contains(&id));
            self.gave_up_times();
        }
        if self.tally.is_due(now) {
            self.commander.send(Command::CatchUp);
        }
    }

    /// Writes the good calls down; the failures of all until `at` are known.
    pub(super) fn tell_calls(&mut self, at: Nanos) {
        let now = clock::now();
        // What has failed since, while this process stood still, would be taken for good.
        let is_late = now.0.saturating_sub(at.0) > CAUGHT_UP_FOR.0;
        if is_late || !self.tally.is_due(now) {
            return;
        }
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

    /// A program gives up only after three times what the destination usually takes (rule 6).
    pub(super) fn gave_up_times(&self) {
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
                let p99 = latencies.five_minutes(id, histogram.as_ref(), longest).p99;
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

    /// Tells the event thread how many destinations have traffic, while calls fail.
    fn count_traffic(&mut self, now: Nanos) {
        let is_due = now - self.counted_at >= TRAFFIC_EVERY;
        if !is_due || now - self.failed_at > TRAFFIC_AFTER {
            return;
        }
        self.counted_at = now;
        let hidden = self.hidden.all();
        let active = self.table.used().skip(1).filter(|(_, row)| {
            now - Nanos(row.last_connect_ns) <= TRAFFIC_WITHIN
                && !is_loopback(&row.key.addr)
                && !hidden.contains(&row.key.cgroup_id)
        });
        let places: HashSet<_> = active
            .map(|(_, row)| (row.key.addr, row.key.ifindex, row.key.port_be))
            .collect();
        self.commander.send(Command::Traffic(places.len()));
    }

    /// Says that a program's lock holds timeouts up, or no longer does.
    fn standstill(&self, change: Standstill) {
        let about = match &change {
            Standstill::Held(about) | Standstill::Whole(about) | Standstill::Over(about) => about,
        };
        let connections = about
            .iter()
            .find_map(|cookie| self.kernel.connections().get(*cookie))
            .and_then(|stamp| Some((stamp, self.table.row(stamp.row)?)));
        let which = match (connections, about.len()) {
            (Some((stamp, row)), count) => {
                let id = RowId {
                    index: stamp.row,
                    incarnation: row.incarnation,
                };
                let destination = view::destination(id, &row);
                match count {
                    1 => format!("the connection of pid {} to {destination}", stamp.pid),
                    _ => format!(
                        "one of {count} connections (pid {} to {destination} and others)",
                        stamp.pid
                    ),
                }
            }
            (None, _) => "a connection that has ended".to_owned(),
        };
        self.safety(match change {
            Standstill::Held(_) => format!(
                "a program keeps the socket of {which} locked: read, write, stall timeouts and \
                 deadlines do not end it until the program lets go; those of others go on"
            ),
            Standstill::Whole(_) => format!(
                "programs keep sockets locked, now that of {which}: no read, write or stall timeout and \
                 no deadline fires until one of them lets go"
            ),
            Standstill::Over(_) => format!(
                "the socket of {which} is not locked any more: its timeouts are watched again"
            ),
        });
    }

    /// Says that many destinations fail at once, or that this is over.
    pub(super) fn correlated(&self, change: Correlated) {
        let Correlated {
            begins,
            failing,
            destinations,
        } = change;
        let message = if begins {
            format!(
                "connects to {failing} of {destinations} destinations with traffic fail at once: the \
                 fault is most likely on this side (a route, an interface, a firewall, a proxy); no \
                 breaker is opened until that is over"
            )
        } else {
            "connects do not fail everywhere any more; breakers open again where they should"
                .to_owned()
        };
        self.say(Event::Safety {
            action: SafetyAction::Correlated,
            destination: None,
            workload: None,
            message,
        });
    }

    pub(super) fn losses(&mut self, now: Nanos) {
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
            self.look_at_rows(rows, false);
            // And refusals that nobody has heard of.
            self.tell_all();
        }
    }

    pub(super) async fn evict(&mut self) -> Result<()> {
        self.evictions.drain(&mut self.kernel)?;
        for _ in 0..EVICTION_ROUNDS {
            let candidates = self.evictions.candidates(&self.table);
            if candidates.is_empty() {
                break;
            }
            let most = Evictions::step(&self.table);
            if self.let_go(candidates, most).await? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Gives up so many of these rows at most, as far as they are not open or forced; returns how many it were.
    ///
    /// # Errors
    /// When the event thread has ended, or a row cannot be returned to the kernel.
    pub(super) async fn let_go(&mut self, candidates: Vec<RowId>, most: usize) -> Result<usize> {
        let (reply, answer) = oneshot::channel();
        // The event thread keeps those that are open or forced.
        self.commander
            .send(Command::Forget(candidates, most, reply));
        let rows = answer.await.context("the event thread has ended")?;
        if rows.is_empty() {
            return Ok(0);
        }
        let leaving = self.evictions.close(&mut self.kernel, &rows);
        // Nothing is refused on them any more.
        for row in &leaving {
            self.tell_rest(*row, Timestamp::now());
            self.refusals.forget(*row);
        }
        self.evictions.give_up(&mut self.kernel, &leaving)?;
        for row in &rows {
            self.repeated.forget(*row);
            self.tally.forget(*row);
            self.naming.forget(*row);
            self.orders.forget(*row);
        }
        Ok(leaving.len())
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
                self.checkup.detached(&path);
                self.safety(format!(
                    "cgroup {} has vanished; it is attached again when it returns",
                    path.display()
                ));
            }
            if there.is_some() {
                match self.kernel.attach(&path) {
                    Ok(()) => {
                        tracing::info!("cgroup {} is attached again", path.display());
                        self.warn_of_neighbours();
                    }
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
        let leaving = self.evictions.close(&mut self.kernel, &rows);
        if let Err(error) = self.evictions.give_up(&mut self.kernel, &leaving) {
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
                Finding::Proven => {
                    is_news = true;
                    self.checkup.proven(&proof.cgroup, proof.connect6);
                }
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

    /// The configuration file is not there any more.
    pub fn file_is_gone(&mut self, error: &str) {
        self.checkup
            .configuration(Some(format!("the file is gone: {error}.")));
        self.say(Event::Config {
            action: ConfigAction::Missing,
            message: format!(
                "the configuration file is gone: {error}; what was read from it stays in force, and a start \
                 of the agent would fail"
            ),
            by: None,
        });
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
        self.waiting.give_back();
        for path in self.cgroups.clone() {
            self.kernel.detach(&path);
        }
        self.waiting.stop();
        self.tell_all();
        self.keep_at_last();
    }
}
