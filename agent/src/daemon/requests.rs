//! What the control server asks of the node: status, pause, reload. Operators' orders are in `manual`.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use agent_common::{Mode, OTHER_ROW, Row as KernelRow, row::ROW_PROTECTED};
use anyhow::{Context as _, Result};
use tokio::sync::oneshot;

use super::{
    backend::{Request, Wanted},
    named::{self, Sizes},
    neighbours::is_self_test,
    node::Node,
    plan::{Plan, window_calls},
    reactor::Command,
    scrape, settle,
    view::{Viewer, Views},
    who,
};
use crate::{
    control::api::{
        ApiError, ConfigAction, ConfigView, Event, PauseResult, Paused, ReloadResult,
        StatusEnvelope, Timestamp,
    },
    core::RowId,
    kernel::clock,
    policy::{self, Destination, DestinationArg},
};

impl Node {
    /// Answers one request.
    pub async fn request(&mut self, request: Request) {
        // Whoever asked may have gone: then nobody is told.
        match request {
            Request::Status(wanted, reply) => {
                let _ = reply.send(self.status(&wanted).await);
            }
            Request::Explain(destination, caller, reply) => {
                let _ = reply.send(self.explain(&destination, &caller).await);
            }
            Request::Manual(destination, workload, action, by, reply) => {
                let may = self.may_change(None);
                let by = who::is(by);
                let done = may.and_then(|()| self.manual(&destination, workload, action, by));
                let _ = reply.send(done);
            }
            Request::Pause(duration, by, reply) => {
                let may = self.may_change(None);
                let _ = reply.send(may.and_then(|()| self.begin_pause(duration, who::is(by))));
            }
            Request::Resume(by, reply) => {
                let may = self.may_change(None);
                let _ = reply.send(may.and_then(|()| self.resume(Some(who::is(by)))));
            }
            Request::Reload(by, reply) => {
                let answer = self.may_change(None).and_then(|()| {
                    self.reload(Some(who::is(by)))
                        .map_err(|e| ApiError::BadRequest(e.to_string()))
                });
                let _ = reply.send(answer);
            }
            Request::HandOver(by, reply) => {
                let _ = reply.send(self.hand_over(by).await);
            }
            Request::EndHandover(by, reply) => {
                let _ = reply.send(self.end_handover(by));
            }
            Request::Doctor(reply) => self.doctor(reply),
            Request::Config(reply) => {
                let _ = reply.send(Ok(self.config()));
            }
            Request::Metrics(reply) => {
                let answer = scrape::text(self).await;
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
            orders: &self.orders,
            hosts: &self.naming.hosts,
            now: clock::now(),
        }
    }

    pub(super) async fn status(&mut self, wanted: &Wanted) -> Result<StatusEnvelope, ApiError> {
        let views = self.views().await?;
        let viewer = Viewer {
            table: &self.table,
            plan: &self.plan,
            views: &views,
            latencies: &self.latencies,
            responses: &self.responses,
            hidden: self.hidden.all(),
            leaving: self.evictions.leaving(),
            orders: &self.orders,
            hosts: &self.naming.hosts,
            now: clock::now(),
        };
        let mut rows: Vec<_> = viewer
            .rows()
            .filter(|(id, row)| match wanted {
                Wanted::All => true,
                Wanted::Other => id.index == OTHER_ROW,
                Wanted::One(wanted) => {
                    id.index != OTHER_ROW && named::is_meant(viewer.hosts, wanted, row)
                }
            })
            .filter_map(|(id, row)| {
                let view = viewer.view(id, &row, &mut self.names);
                (!is_self_test(&view.workload, &row)).then_some(view)
            })
            .collect();
        // Of several names the one that was asked for.
        if let Wanted::One(DestinationArg::Name { name, .. }) = wanted {
            for row in &mut rows {
                row.name = Some(name.to_string());
            }
        }
        let orders = match wanted {
            Wanted::All => self.manual_states(None, None),
            Wanted::Other => Vec::new(),
            Wanted::One(wanted) => self.manual_states(Some(wanted), None),
        };
        let mut envelope = StatusEnvelope {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            mode: self.api_mode(),
            uptime_ms: clock::now().0.saturating_sub(self.ready_at.0) / 1_000_000,
            lost_events: self.table.lost_events() + self.reactor.dropped.load(Ordering::Relaxed),
            paused: self.pause.current().cloned(),
            orders,
            unresolved: self.unresolved(),
            destinations: rows,
        };
        envelope.sort();
        Ok(envelope)
    }

    pub(super) fn begin_pause(
        &mut self,
        duration: Option<Duration>,
        by: String,
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
            by: by.clone(),
        };
        self.pause
            .begin(paused.clone())
            .map_err(|e| ApiError::Internal(format!("{e:#}; nothing is paused")))?;
        self.table.set_mode(Mode::OFF);
        settle::settle(&mut self.kernel);
        self.waiting.give_back();
        self.say(Event::Config {
            action: ConfigAction::Paused,
            message: match until {
                Some(until) => format!("every verdict and timeout is off until {until}"),
                None => "every verdict and timeout is off until resume".to_owned(),
            },
            by: Some(by),
        });
        Ok(PauseResult {
            paused: Some(paused),
            ended: None,
        })
    }

    /// Ends the pause, if there is one; by nobody: its time is over.
    pub(super) fn resume(&mut self, by: Option<String>) -> Result<PauseResult, ApiError> {
        let ended = self
            .pause
            .end()
            .map_err(|e| ApiError::Internal(format!("{e:#}; still paused")))?;
        if ended.is_some() {
            self.table.set_mode(self.kernel_mode());
            self.say(Event::Config {
                action: ConfigAction::Resumed,
                message: match by {
                    Some(_) => "verdicts and timeouts are on again",
                    None => "the pause's time is over: verdicts and timeouts are on again",
                }
                .to_owned(),
                by,
            });
        }
        Ok(PauseResult {
            paused: None,
            ended,
        })
    }

    pub(super) fn config(&self) -> ConfigView {
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
    pub fn reload(&mut self, by: Option<String>) -> Result<ReloadResult> {
        let config = match self.source.read() {
            Ok(config) => config,
            Err(error) => {
                self.tally.reload(false);
                self.checkup.configuration(Some(error.to_string()));
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
        let (wanted, held) = (window_calls(&config), self.ticks.window_calls);
        if wanted > held {
            warnings.push(format!(
                "windows hold {held} calls since the start of the agent: a breaker.window, \
                 min_calls or consecutive_failures of more takes effect with a restart"
            ));
        }
        let changes = policy::diff(&self.plan.config, &config);
        let plan = Arc::new(Plan::new(config, self.ticks));
        if let Err(error) = self.apply(plan) {
            self.tally.reload(false);
            self.checkup.configuration(Some(format!("{error:#}")));
            return Err(error);
        }
        self.tally.reload(true);
        self.checkup.configuration(None);
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
    pub(super) fn apply(&mut self, plan: Arc<Plan>) -> Result<()> {
        let entries = self.entries_of(&plan);
        self.kernel
            .set_policies(&plan.settings, &plan.retries, &plan.statuses, &entries)
            .context("put the policies into the kernel")?;
        self.plan = plan;
        self.look_up_names();
        let hidden = self.hidden.all();
        let rows: Vec<(RowId, KernelRow)> = self.table.used().skip(1).collect();
        let mut endpoints = Vec::new();
        let mut sizes = Sizes::default();
        for (id, row) in rows {
            if hidden.contains(&row.key.cgroup_id) {
                continue;
            }
            let workload = self.names.name(row.key.cgroup_id, row.last_pid);
            let names = named::of_row(&self.naming.hosts, &row);
            let destination = Destination::from_key(&row.key);
            let settings = self.plan.settings_for(&destination, &workload, &names);
            self.table.set_settings(id, settings);
            let guarded = settings.flags & ROW_PROTECTED != 0;
            let names = if guarded { &[][..] } else { &names };
            endpoints.extend(self.naming.endpoint(id, &row.key, names, &mut sizes));
            if guarded {
                self.orders.forget(id);
            }
        }
        self.gave_up_times();
        self.commander.send(Command::Plan(Arc::clone(&self.plan)));
        self.commander.send(Command::Groups(endpoints));
        // Errnos may be others, and who is protected.
        self.enter_orders();
        self.tell_all_rows();
        let sets_options = self.plan.sets_options();
        if sets_options {
            self.kernel.set_options_lent(true);
        }
        self.waiting.plan(Arc::clone(&self.plan));
        let before = self.table.mode();
        self.table.set_mode(self.kernel_mode());
        if before == Mode::ENFORCE && self.kernel_mode() != Mode::ENFORCE {
            settle::settle(&mut self.kernel);
            self.waiting.give_back();
        }
        if !sets_options {
            // Before the hooks go: so long they know what programs set themselves.
            self.waiting.give_back();
            self.kernel.set_options_lent(false);
        }
        Ok(())
    }
}
