//! `explain`: what holds for a destination, and why.

use agent_common::{NANOS_PER_MS, OTHER_ROW};

use super::{node::Node, view};
use crate::{
    control::{
        Caller,
        api::{
            ApiError, Candidate, ExplainedRow, Explanation, Fit, ManualState, Protection, Setting,
            SettingSource, State,
        },
    },
    kernel::clock,
    policy::{self, Destination, DestinationArg},
};

impl Node {
    pub(super) async fn explain(
        &mut self,
        wanted: &DestinationArg,
        caller: &Caller,
    ) -> Result<Explanation, ApiError> {
        let DestinationArg::Address(destination) = wanted else {
            return Err(ApiError::BadRequest(format!(
                "{wanted}: names are not known to this version; give an address and port, as \
                 `backstop status` shows them"
            )));
        };
        let workload = match caller {
            Caller::Any => None,
            Caller::Workload(workload) => Some(workload.clone()),
            Caller::Process(pid) => Some(
                self.names
                    .of_pid(*pid)
                    .map_err(|e| ApiError::NotFound(e.to_string()))?,
            ),
        };
        let rows = self
            .explained_rows(destination, workload.as_deref())
            .await?;
        if let Some(workload) = &workload
            && rows.is_empty()
            && !self.names.exists(workload)
        {
            return Err(ApiError::NotFound(format!(
                "there is no control group {workload:?}, and none was seen; `backstop status` \
                 shows workloads as they are written"
            )));
        }
        let config = &self.plan.config;
        let resolution = config.resolve(destination, workload.as_deref(), None);
        let explained = config.explain(destination, workload.as_deref(), None);
        Ok(Explanation {
            destination: destination.to_string(),
            mode: self.api_mode(),
            paused: self.pause.current().cloned(),
            file: self
                .source
                .file
                .as_ref()
                .map(|file| file.display().to_string()),
            policy: self.plan.names[resolution.policy].to_string(),
            why: resolution.why,
            protected: explained.guard.map(|guard| Protection {
                by: guard.by,
                line: line(guard.line),
            }),
            candidates: explained.candidates.into_iter().map(candidate).collect(),
            settings: explained.settings.into_iter().map(setting).collect(),
            manual: self.manual_states(wanted, workload.as_deref()),
            rows,
            workload,
        })
    }

    /// The rows that exist: of one workload, or of all.
    async fn explained_rows(
        &mut self,
        destination: &Destination,
        workload: Option<&str>,
    ) -> Result<Vec<ExplainedRow>, ApiError> {
        let views = self.views().await?;
        let found: Vec<_> = self
            .viewer(&views)
            .rows()
            .filter(|(id, row)| {
                id.index != OTHER_ROW && Destination::from_key(&row.key) == *destination
            })
            .collect();
        let mut rows = Vec::new();
        for (id, row) in found {
            let viewer = view::Viewer {
                table: &self.table,
                plan: &self.plan,
                views: &views,
                latencies: &self.latencies,
                responses: &self.responses,
                hidden: self.hidden.all(),
                leaving: self.evictions.leaving(),
                standing: &self.standing,
                now: clock::now(),
            };
            let shown = viewer.view(id, &row, &mut self.names);
            if workload.is_some_and(|wanted| wanted != shown.workload) {
                continue;
            }
            let config = &self.plan.config;
            rows.push(ExplainedRow {
                why: config.resolve(destination, Some(&shown.workload), None).why,
                gave_up_connect_ms: waited(row.settings.gave_up_ms),
                gave_up_exchange_ms: waited(row.settings.exchange_gave_up_ms),
                row: shown,
            });
        }
        rows.sort_by(|a, b| (&a.row.workload, a.row.netns).cmp(&(&b.row.workload, b.row.netns)));
        Ok(rows)
    }

    fn manual_states(&self, wanted: &DestinationArg, workload: Option<&str>) -> Vec<ManualState> {
        let now = clock::now();
        let standing = self.standing.iter().filter(|standing| {
            standing.until > now
                && standing.destination == *wanted
                && match (&standing.workload, workload) {
                    (Some(theirs), Some(ours)) => theirs == ours,
                    _ => true,
                }
        });
        standing
            .map(|standing| ManualState {
                state: match standing.trip {
                    true => State::ForcedOpen,
                    false => State::ForcedClosed,
                },
                workload: standing.workload.clone(),
                ends_in_ms: standing.until.0.saturating_sub(now.0) / NANOS_PER_MS,
                since: standing.since,
                by: standing.by.clone(),
            })
            .collect()
    }
}

/// 0 is never.
fn waited(ms: u32) -> Option<u64> {
    (ms != 0).then_some(u64::from(ms))
}

fn line(line: Option<usize>) -> Option<u64> {
    line.map(|line| line as u64)
}

fn candidate(candidate: policy::Candidate) -> Candidate {
    Candidate {
        policy: candidate.name,
        fit: match candidate.fit {
            policy::Fit::Applies => Fit::Applies,
            policy::Fit::Loses => Fit::Loses,
            policy::Fit::NoMatch => Fit::NoMatch,
        },
        destination: candidate.destination,
        workload: candidate.workload,
        why: candidate.why,
        line: line(candidate.line),
    }
}

fn setting(setting: policy::SourcedSetting) -> Setting {
    Setting {
        key: setting.key.to_owned(),
        value: setting.value,
        source: match setting.source {
            policy::SettingSource::Policy => SettingSource::Policy,
            policy::SettingSource::Defaults => SettingSource::Defaults,
            policy::SettingSource::BuiltIn => SettingSource::BuiltIn,
        },
        line: line(setting.line),
        inert: setting.inert.map(str::to_owned),
    }
}
