//! `explain`: what holds for a destination, and why.

use agent_common::OTHER_ROW;

use super::{named, node::Node, view};
use crate::{
    control::{
        Caller,
        api::{
            ApiError, Candidate, ExplainedRow, Explanation, Fit, Protection, Setting, SettingSource,
        },
    },
    hosts::table::EVERYWHERE,
    kernel::clock,
    policy::{self, Destination, DestinationArg, KnownName},
};

impl Node {
    pub(super) async fn explain(
        &mut self,
        wanted: &DestinationArg,
        caller: &Caller,
    ) -> Result<Explanation, ApiError> {
        let workload = match caller {
            Caller::Any => None,
            Caller::Workload(workload) => Some(workload.clone()),
            Caller::Process(pid) => Some(
                self.names
                    .of_pid(*pid)
                    .map_err(|e| ApiError::NotFound(e.to_string()))?,
            ),
        };
        let rows = self.explained_rows(wanted, workload.as_deref()).await?;
        if let Some(workload) = &workload
            && rows.is_empty()
            && !self.names.exists(workload)
        {
            return Err(ApiError::NotFound(format!(
                "there is no control group {workload:?}, and none was seen; `backstop status` \
                 shows workloads as they are written"
            )));
        }
        let (destination, names) = self.explained(wanted, &rows)?;
        let config = &self.plan.config;
        let resolution = config.resolve(&destination, workload.as_deref(), &names);
        let explained = config.explain(&destination, workload.as_deref(), &names);
        Ok(Explanation {
            destination: wanted.to_string(),
            names: names.iter().map(|known| known.name.to_string()).collect(),
            addresses: match wanted {
                DestinationArg::Address(_) => Vec::new(),
                DestinationArg::Name { name, port } => {
                    let known = named::destinations(&self.naming.hosts, name, *port);
                    let known = known.into_iter().map(|(_, to)| to);
                    let known: std::collections::BTreeSet<_> = known.collect();
                    known.iter().map(ToString::to_string).collect()
                }
            },
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
            manual: self.manual_states(Some(wanted), workload.as_deref()),
            rows,
            workload,
        })
    }

    /// The address that stands for a destination, with its names: of a name the one that a row of it
    /// has, else the first that is known.
    fn explained(
        &self,
        wanted: &DestinationArg,
        rows: &[ExplainedRow],
    ) -> Result<(Destination, Vec<KnownName>), ApiError> {
        let hosts = &self.naming.hosts;
        let (name, port) = match wanted {
            DestinationArg::Address(address) => {
                // The names that a row's namespace knows; without a row, some namespace that has heard any.
                let addr = address.addr_bytes();
                let row = self.meant(wanted).into_iter().next();
                let netns = row
                    .map(|(_, row)| row.key.netns_cookie)
                    .or_else(|| hosts.namespace_of(&addr))
                    .unwrap_or(EVERYWHERE);
                return Ok((*address, hosts.of(netns, &addr)));
            }
            DestinationArg::Name { name, port } => (name, *port),
        };
        let known = named::destinations(hosts, name, port);
        let of_row = known.iter().find(|(_, to)| {
            let to = to.to_string();
            rows.iter().any(|row| row.row.destination == to)
        });
        let Some(((netns, addr), destination)) = of_row.or(known.first()) else {
            if let Some(unresolved) = self.unresolved().iter().find(|of| of.name == *name) {
                return Err(ApiError::NotFound(format!(
                    "{wanted}: {} names it, but it cannot be looked up: {}; so that holds for no address of \
                     it, and no program was heard to be told one",
                    unresolved.named_by, unresolved.error
                )));
            }
            return Err(ApiError::NotFound(format!(
                "{wanted}: no address is known of that name: the agent has not looked it up (it does so for \
                 names that stand in full in its configuration) or could not, and no program was heard to \
                 be told of it; give an address and port, as `backstop status` shows them"
            )));
        };
        Ok((*destination, hosts.of(*netns, addr)))
    }

    /// The rows that exist: of one workload, or of all.
    async fn explained_rows(
        &mut self,
        wanted: &DestinationArg,
        workload: Option<&str>,
    ) -> Result<Vec<ExplainedRow>, ApiError> {
        let views = self.views().await?;
        let found: Vec<_> = self
            .viewer(&views)
            .rows()
            .filter(|(id, row)| {
                id.index != OTHER_ROW && named::is_meant(&self.naming.hosts, wanted, row)
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
                orders: &self.orders,
                hosts: &self.naming.hosts,
                now: clock::now(),
            };
            let shown = viewer.view(id, &row, &mut self.names);
            if workload.is_some_and(|wanted| wanted != shown.workload) {
                continue;
            }
            let config = &self.plan.config;
            let names = named::of_row(&self.naming.hosts, &row);
            let destination = Destination::from_key(&row.key);
            let leader = views.get(&id).and_then(|view| view.follows);
            let leader = leader.and_then(|id| Some((id, self.table.owned(id)?)));
            let opened_by = leader.map(|(id, row)| view::workload(id, &row, &mut self.names));
            rows.push(ExplainedRow {
                opened_by,
                why: config
                    .resolve(&destination, Some(&shown.workload), &names)
                    .why,
                gave_up_connect_ms: waited(row.settings.gave_up_ms),
                gave_up_exchange_ms: waited(row.settings.exchange_gave_up_ms),
                row: shown,
            });
        }
        rows.sort_by(|a, b| {
            let key = |row: &ExplainedRow| {
                let row = &row.row;
                (row.workload.clone(), row.netns, row.destination.clone())
            };
            key(a).cmp(&key(b))
        });
        Ok(rows)
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
