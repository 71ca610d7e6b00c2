//! Names of destinations in the running whole: which rows they choose a policy for, which rows make a
//! group, what an operator means by one.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher as _, RandomState},
    net::Ipv6Addr,
    sync::Arc,
};

use agent_common::{
    OTHER_ROW, PolicyKey, Row as KernelRow, Verdict,
    key::ManualKey,
    row::ROW_PROTECTED,
    verdict::{STATE_FORCED_CLOSED, STATE_FORCED_OPEN},
};

use super::{
    node::{Node, Standing},
    plan::Plan,
    reactor::{Command, Order},
    view,
};
use crate::{
    control::api::{Event, SafetyAction},
    core::{Full, GroupId, Nanos, Reason, ReasonKind, RowId},
    hosts::{
        Change, HostNames, Place,
        listener::Heard,
        resolver::{Found, Resolver},
        table::EVERYWHERE,
    },
    kernel::{Kernel, clock},
    policy::{Destination, DestinationArg, KnownName, MAX_KERNEL_ENTRIES},
};

/// How often names are looked at that may hold no longer.
const EXPIRE_EVERY: Nanos = Nanos::from_secs(1);
/// After rows were looked through for changed names, so many times as long nothing is.
const REST: u64 = 19;
/// A row that is bypassed again within this time is not reported again.
const BYPASS_SAID_FOR: Nanos = Nanos::from_secs(60);

/// What the node knows of names.
pub struct Naming {
    /// All names.
    pub hosts: HostNames,
    resolver: Resolver,
    /// Addresses whose rows are to be looked at, and whether they have a new owner.
    changed: HashMap<Place, bool>,
    /// Not before this.
    next_look: Nanos,
    expired_at: Nanos,
    /// In the kernel's table beside those of the plan.
    entries: Vec<(PolicyKey, u32, u32)>,
    /// Makes ids of groups that nobody can choose.
    ids: RandomState,
    /// Rows that are in a group.
    grouped: HashSet<RowId>,
    /// When a row was last reported as bypassed.
    bypass_said: HashMap<RowId, Nanos>,
}

impl Naming {
    /// With what is known already.
    pub fn new(hosts: HostNames, resolver: Resolver, entries: Vec<(PolicyKey, u32, u32)>) -> Self {
        Self {
            hosts,
            resolver,
            changed: HashMap::new(),
            next_look: Nanos::ZERO,
            expired_at: Nanos::ZERO,
            entries,
            ids: RandomState::new(),
            grouped: HashSet::new(),
            bypass_said: HashMap::new(),
        }
    }

    /// The row is given up.
    pub(super) fn forget(&mut self, id: RowId) {
        self.grouped.remove(&id);
        self.bypass_said.remove(&id);
    }
}

/// The names of a row's address.
pub fn of_row(hosts: &HostNames, row: &KernelRow) -> Vec<KnownName> {
    hosts.of(row.key.netns_cookie, &row.key.addr)
}

/// Whether a row is one of the destinations that somebody means.
pub fn is_meant(hosts: &HostNames, wanted: &DestinationArg, row: &KernelRow) -> bool {
    match wanted {
        DestinationArg::Address(wanted) => Destination::from_key(&row.key) == *wanted,
        DestinationArg::Name { name, port } => {
            row.key.port_be == port.to_be()
                && of_row(hosts, row).iter().any(|known| *known.name == **name)
        }
    }
}

/// Every address, of whatever namespace, that a name and port mean now.
pub fn destinations(hosts: &HostNames, name: &str, port: u16) -> Vec<(Place, Destination)> {
    let places = hosts.places(name).into_iter();
    places
        .map(|place| {
            let addr = Ipv6Addr::from(place.1).to_canonical();
            (place, Destination::new(addr, port, 0))
        })
        .collect()
}

/// The kernel's entries for the names that the agent has resolved, as far as there is room for them.
pub fn entries(plan: &Plan, hosts: &HostNames) -> Vec<(PolicyKey, u32, u32)> {
    let mut entries = plan.config.named_entries(&hosts.own());
    let room = MAX_KERNEL_ENTRIES.saturating_sub(plan.entries.len());
    if entries.len() > room {
        tracing::warn!(
            "the kernel's table has room for {room} of {} addresses of names and ports; connects to the \
             others meet the policy of their address first",
            entries.len()
        );
        entries.truncate(room);
    }
    entries
        .into_iter()
        .map(|entry| (entry.key, entry.prefix_len, entry.policy))
        .collect()
}

/// What the kernel is to do with rows to come of a destination with a manual state: its keys there. A
/// name stands for the addresses that the agent itself has resolved it to, as the kernel's table knows no
/// namespaces.
pub fn manual_keys(hosts: &HostNames, standing: &Standing) -> Vec<(ManualKey, Destination)> {
    if standing.workload.is_some() {
        return Vec::new();
    }
    match &standing.destination {
        DestinationArg::Address(address) => vec![(address.to_manual_key(), *address)],
        DestinationArg::Name { name, port } => destinations(hosts, name, *port)
            .into_iter()
            .filter(|((netns, _), _)| *netns == EVERYWHERE)
            .map(|(_, destination)| (destination.to_manual_key(), destination))
            .collect(),
    }
}

/// Enters a manual state for rows to come, and takes it away where it no longer belongs.
///
/// # Errors
/// When the kernel's map is full.
pub fn put_manual(
    kernel: &mut Kernel,
    hosts: &HostNames,
    plan: &Plan,
    standing: &mut Standing,
) -> anyhow::Result<()> {
    let wanted = manual_keys(hosts, standing);
    for key in std::mem::take(&mut standing.keys) {
        if !wanted.iter().any(|(wanted, _)| *wanted == key) {
            kernel.set_manual(&key, None)?;
        }
    }
    for (key, destination) in wanted {
        let names = hosts.of(EVERYWHERE, &destination.addr_bytes());
        let found = plan.config.resolve(&destination, None, &names);
        if found.protected {
            continue;
        }
        let errno = plan.breakers[found.policy].errno;
        kernel.set_manual(&key, Some((standing.verdict(errno), standing.until)))?;
        standing.keys.push(key);
    }
    Ok(())
}

impl Node {
    /// The agent has looked a name up.
    pub fn found(&mut self, found: Found) {
        if let Found::Addresses(name, addresses) = found
            && self.naming.resolver.names().contains(&name)
        {
            let changes = self.naming.hosts.resolved(&name, &addresses, clock::now());
            self.renamed(changes);
        }
    }

    /// A program was told something about a name.
    pub fn heard(&mut self, heard: &Heard) {
        let hosts = &mut self.naming.hosts;
        let changes = hosts.heard(heard.netns, &heard.answer, clock::now());
        self.renamed(changes);
    }

    fn renamed(&mut self, changes: Vec<Change>) {
        for change in changes {
            *self.naming.changed.entry(change.place).or_default() |= change.new_owner;
        }
    }

    /// Names that have changed take effect, and those whose time is over go.
    pub fn follow_names(&mut self, now: Nanos) {
        if now - self.naming.expired_at >= EXPIRE_EVERY {
            self.naming.expired_at = now;
            let changes = self.naming.hosts.expire(now);
            self.renamed(changes);
        }
        if self.naming.changed.is_empty() || now < self.naming.next_look {
            return;
        }
        let begun = clock::now();
        let changed = std::mem::take(&mut self.naming.changed);
        if changed.keys().any(|(netns, _)| *netns == EVERYWHERE) {
            self.put_names();
        }
        let rows: Vec<(RowId, bool)> = self
            .table
            .used()
            .skip(1)
            .filter_map(|(id, row)| {
                let everywhere = changed.get(&(EVERYWHERE, row.key.addr));
                let here = changed.get(&(row.key.netns_cookie, row.key.addr));
                let found = everywhere.into_iter().chain(here).copied();
                Some((id, found.reduce(|a, b| a | b)?))
            })
            .collect();
        for (id, new_owner) in rows {
            if new_owner {
                self.start_anew(id);
            }
            self.new_row(id);
        }
        let took = clock::now() - begun;
        self.naming.next_look = now + took.times(REST);
    }

    /// What was learned of a row is of somebody else. An operator's word stands.
    fn start_anew(&mut self, id: RowId) {
        let Some(row) = self.table.owned(id) else {
            return;
        };
        let state = Verdict::unpack(row.verdict).state;
        if state == STATE_FORCED_OPEN || state == STATE_FORCED_CLOSED {
            return;
        }
        tracing::info!(
            "{} belongs to another name now; its breaker and what was learned of it start anew",
            Destination::from_key(&row.key)
        );
        self.table.forget_traits(id);
        self.commander.send(Command::Manual(vec![id], Order::Reset));
    }

    /// Tells the kernel what holds for the addresses that the agent has resolved: policies, and manual
    /// states for rows to come.
    fn put_names(&mut self) {
        let entries = entries(&self.plan, &self.naming.hosts);
        if entries != self.naming.entries {
            let all = [self.plan.entries.as_slice(), entries.as_slice()].concat();
            match self.kernel.set_policies(
                &self.plan.settings,
                &self.plan.retries,
                &self.plan.statuses,
                &all,
            ) {
                Ok(()) => self.naming.entries = entries,
                Err(error) => tracing::error!("policies by name: {error:#}"),
            }
        }
        let (kernel, hosts) = (&mut self.kernel, &self.naming.hosts);
        for standing in &mut self.standing {
            if matches!(standing.destination, DestinationArg::Name { .. })
                && let Err(error) = put_manual(kernel, hosts, &self.plan, standing)
            {
                tracing::error!("manual state of {}: {error:#}", standing.destination);
            }
        }
    }

    /// A plan is about to be in force: the kernel's entries for names under it.
    pub(super) fn entries_of(&mut self, plan: &Plan) -> Vec<(PolicyKey, u32, u32)> {
        self.naming.entries = entries(plan, &self.naming.hosts);
        [plan.entries.as_slice(), self.naming.entries.as_slice()].concat()
    }

    /// Looks up what the configuration and the operator name, and nothing else any more.
    pub(super) fn look_up_names(&mut self) {
        let mut names = self.plan.config.exact_names();
        for standing in &self.standing {
            if let DestinationArg::Name { name, .. } = &standing.destination
                && !names.iter().any(|known| **known == **name)
            {
                names.push(name.as_str().into());
            }
        }
        if !names.is_empty() || !self.naming.resolver.names().is_empty() {
            self.naming.resolver.look_up(names);
            let names: Vec<Arc<str>> = self.naming.resolver.names().to_vec();
            let changes = self.naming.hosts.keep_own(&names);
            self.renamed(changes);
        }
    }

    /// Tells the event thread which groups a row is in.
    pub(super) fn group(&mut self, id: RowId, row: &KernelRow, names: &[KnownName], guarded: bool) {
        let key = &row.key;
        let groups: Vec<GroupId> = match guarded {
            true => Vec::new(),
            false => names
                .iter()
                .map(|known| {
                    self.naming.ids.hash_one((
                        key.cgroup_id,
                        key.netns_cookie,
                        &*known.name,
                        key.port_be,
                    ))
                })
                .collect(),
        };
        let was = if groups.is_empty() {
            self.naming.grouped.remove(&id)
        } else {
            self.naming.grouped.insert(id);
            true
        };
        if was {
            self.commander.send(Command::Groups(id, groups));
        }
    }

    /// Says that a breaker stays closed, or was closed, for the sake of the other endpoints.
    pub(super) fn bypassed(&mut self, id: RowId, reason: Reason, group: Full) {
        let Some(row) = self.table.owned(id) else {
            return;
        };
        let now = clock::now();
        let said = self.naming.bypass_said.insert(id, now);
        if said.is_some_and(|said| now - said < BYPASS_SAID_FOR) {
            return;
        }
        let destination = view::destination(id, &row);
        let names = of_row(&self.naming.hosts, &row);
        let name = names.first().map_or("its name", |known| &*known.name);
        let Full { open, of } = group;
        let what = match reason.kind {
            ReasonKind::None => "was open and is closed again",
            _ => "should be open and stays closed",
        };
        let message = format!(
            "{destination} {what}: of {of} endpoints of {name}, {open} refuse already, and breakers never \
             cut off the last path (breaker.max_open_share)"
        );
        let workload = view::workload(id, &row, &mut self.names);
        self.say(Event::Safety {
            action: SafetyAction::Bypassed,
            destination: Some(destination),
            workload: Some(workload),
            message,
        });
    }

    /// Whether a row has the flag of what is protected.
    pub(super) fn is_guarded(row: &KernelRow) -> bool {
        row.settings.flags & ROW_PROTECTED != 0
    }

    /// Rows that somebody means, the `other` row and our own canaries left out.
    pub(super) fn meant(&self, wanted: &DestinationArg) -> Vec<(RowId, KernelRow)> {
        let hidden = self.hidden.all();
        self.table
            .used()
            .filter(|(id, row)| {
                id.index != OTHER_ROW
                    && !hidden.contains(&row.key.cgroup_id)
                    && is_meant(&self.naming.hosts, wanted, row)
            })
            .collect()
    }
}
