//! Names of destinations in the running whole: which rows they choose a policy for, which rows make a
//! group, what an operator means by one.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasher as _, RandomState},
    net::Ipv6Addr,
    sync::Arc,
};

use agent_common::{
    DestinationKey, OTHER_ROW, PolicyKey, Row as KernelRow, Verdict,
    key::IPV4_MAPPED_PREFIX,
    row::ROW_PROTECTED,
    verdict::{STATE_FORCED_CLOSED, STATE_FORCED_OPEN},
};

use super::{
    node::Node,
    plan::Plan,
    reactor::{Command, Order},
    view,
};
use crate::{
    control::api::{ConfigAction, Event, SafetyAction, Unresolved},
    core::{Endpoint, Full, Membership, Nanos, Reason, ReasonKind, RowId},
    hosts::{
        Change, HostNames, Place,
        listener::Heard,
        resolver::{Found, Resolver},
        table::EVERYWHERE,
    },
    kernel::{Table, clock},
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
    /// Names that cannot be looked up, and why.
    unresolved: BTreeMap<Arc<str>, String>,
    /// Addresses whose rows are to be looked at, and whether they have a new owner.
    changed: HashMap<Place, bool>,
    /// Not before this.
    next_look: Nanos,
    expired_at: Nanos,
    /// In the kernel's table beside those of the plan.
    entries: Vec<(PolicyKey, u32, u32)>,
    /// Makes ids of groups that nobody can choose.
    ids: RandomState,
    /// Rows that are in a group, and a hash of what was told of each.
    grouped: HashMap<RowId, u64>,
    /// When a row was last reported as bypassed.
    bypass_said: HashMap<RowId, Nanos>,
}

impl Naming {
    /// With what is known already.
    pub fn new(hosts: HostNames, resolver: Resolver, entries: Vec<(PolicyKey, u32, u32)>) -> Self {
        Self {
            hosts,
            resolver,
            unresolved: BTreeMap::new(),
            changed: HashMap::new(),
            next_look: Nanos::ZERO,
            expired_at: Nanos::ZERO,
            entries,
            ids: RandomState::new(),
            grouped: HashMap::new(),
            bypass_said: HashMap::new(),
        }
    }

    /// The groups of a row with these names, if they are others than it was in.
    pub(super) fn endpoint(
        &mut self,
        row: RowId,
        key: &DestinationKey,
        names: &[KnownName],
        sizes: &mut Sizes,
    ) -> Option<Endpoint> {
        let v6 = key.addr[..12] != IPV4_MAPPED_PREFIX;
        let mut membership = |known: &KnownName| Membership {
            group: self
                .ids
                .hash_one((key.cgroup_id, key.netns_cookie, &*known.name, key.port_be)),
            addresses: sizes.of(&self.hosts, key.netns_cookie, &known.name, v6),
            v6,
        };
        let groups: Box<[Membership]> = names.iter().map(&mut membership).collect();
        let told = (!groups.is_empty()).then(|| self.ids.hash_one(&groups));
        let before = match told {
            Some(told) => self.grouped.insert(row, told),
            None => self.grouped.remove(&row),
        };
        (before != told).then_some(Endpoint { row, groups })
    }

    /// Groups of rows that have got another address beside them, or lost one.
    pub(super) fn grown(&mut self, table: &Table, sizes: &mut Sizes) -> Vec<Endpoint> {
        let rows: Vec<RowId> = self.grouped.keys().copied().collect();
        let of = |id: RowId| {
            let row = table.owned(id)?;
            let names = of_row(&self.hosts, &row);
            self.endpoint(id, &row.key, &names, sizes)
        };
        rows.into_iter().filter_map(of).collect()
    }

    /// The row is given up.
    pub(super) fn forget(&mut self, id: RowId) {
        self.grouped.remove(&id);
        self.bypass_said.remove(&id);
    }
}

/// How many addresses names have, each counted once.
#[derive(Default)]
pub struct Sizes(HashMap<(u64, bool), HashMap<Arc<str>, u32>>);

impl Sizes {
    fn of(&mut self, hosts: &HostNames, netns: u64, name: &Arc<str>, v6: bool) -> u32 {
        let sizes = self.0.entry((netns, v6)).or_default();
        *sizes
            .entry(Arc::clone(name))
            .or_insert_with(|| u32::try_from(hosts.count(netns, name, v6)).unwrap_or(u32::MAX))
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

impl Node {
    /// The agent has looked a name up.
    pub fn found(&mut self, found: Found) {
        match found {
            Found::Addresses(name, addresses) if self.is_looked_up(&name) => {
                if self.naming.unresolved.remove(&name).is_some() {
                    self.say(Event::Config {
                        action: ConfigAction::Found,
                        message: format!("{name} can be looked up again"),
                        by: None,
                    });
                }
                let changes = self.naming.hosts.resolved(&name, &addresses, clock::now());
                self.renamed(changes);
            }
            Found::Failed(name, error) if self.is_looked_up(&name) => {
                let message = format!(
                    "{} names {name}, which cannot be looked up: {error}; it holds for no address of that \
                     name but those that programs are told",
                    self.named_by(&name)
                );
                self.naming.unresolved.insert(name, error);
                self.say(Event::Config {
                    action: ConfigAction::Missing,
                    message,
                    by: None,
                });
            }
            Found::Addresses(..) | Found::Failed(..) | Found::RoundEnded => {}
        }
    }

    fn is_looked_up(&self, name: &Arc<str>) -> bool {
        self.naming.resolver.names().contains(name)
    }

    /// Who names a destination by this name.
    fn named_by(&self, name: &str) -> String {
        match self.plan.config.naming(name) {
            none if none.is_empty() => "an operator's order".to_owned(),
            some => some.join(", "),
        }
    }

    /// The names that cannot be looked up.
    pub(super) fn unresolved(&self) -> Vec<Unresolved> {
        let names = self.naming.unresolved.iter();
        names
            .map(|(name, error)| Unresolved {
                name: name.to_string(),
                named_by: self.named_by(name),
                error: error.clone(),
            })
            .collect()
    }

    /// A program was told something about a name.
    pub fn heard(&mut self, heard: &Heard) {
        let hosts = &mut self.naming.hosts;
        let changes = hosts.heard(heard.netns, &heard.answer, clock::now());
        self.renamed(changes);
        self.keeper.heard();
    }

    pub(super) fn renamed(&mut self, changes: Vec<Change>) {
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
        for (id, new_owner) in &rows {
            if *new_owner {
                self.start_anew(*id);
            }
        }
        self.look_at_rows(rows.into_iter().map(|(id, _)| id), true);
        let took = clock::now() - begun;
        self.naming.next_look = now + took.times(REST);
    }

    /// What was learned of a row is of somebody else. An operator's word stands.
    fn start_anew(&mut self, id: RowId) {
        let Some(row) = self.table.owned(id) else {
            return;
        };
        let state = Verdict::unpack(row.verdict).state;
        let forced = matches!(state, STATE_FORCED_OPEN | STATE_FORCED_CLOSED);
        if forced || self.orders.is_told(id) {
            return;
        }
        tracing::info!(
            "{} belongs to another name now; its breaker and what was learned of it start anew",
            Destination::from_key(&row.key)
        );
        self.table.forget_traits(id);
        let order = (id, Order::Reset(None));
        self.commander.send(Command::Manual(vec![order]));
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
        self.enter_orders();
    }

    /// A plan is about to be in force: the kernel's entries for names under it.
    pub(super) fn entries_of(&mut self, plan: &Plan) -> Vec<(PolicyKey, u32, u32)> {
        self.naming.entries = entries(plan, &self.naming.hosts);
        [plan.entries.as_slice(), self.naming.entries.as_slice()].concat()
    }

    /// Looks up what the configuration and the operator name, and nothing else any more.
    pub(super) fn look_up_names(&mut self) {
        let mut names = self.plan.config.exact_names();
        for order in self.orders.all() {
            if let DestinationArg::Name { name, .. } = &order.destination
                && !names.iter().any(|known| **known == **name)
            {
                names.push(name.as_str().into());
            }
        }
        if !names.is_empty() || !self.naming.resolver.names().is_empty() {
            self.naming.resolver.look_up(names);
            let names: Vec<Arc<str>> = self.naming.resolver.names().to_vec();
            self.naming
                .unresolved
                .retain(|name, _| names.contains(name));
            let changes = self.naming.hosts.keep_own(&names);
            self.renamed(changes);
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
        // One whose admission ramps up refuses a share, and counts.
        let others = match open {
            1 => "1 refuses already or lets only a share pass".to_owned(),
            _ => format!("{open} refuse already or let only a share pass"),
        };
        let message = format!(
            "{destination} {what}: of {of} endpoints of {name}, {others}, and breakers never \
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
