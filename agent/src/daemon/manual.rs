//! `trip`, `hold-closed` and `reset`: orders come in, take effect, and end.

use std::{sync::Arc, time::Duration};

use agent_common::{
    Row as KernelRow, Verdict,
    verdict::{STATE_CLOSED, STATE_FORCED_CLOSED, STATE_FORCED_OPEN, STATE_RAMP},
};

use super::{
    named,
    node::Node,
    orders::{MOST, Standing},
    reactor::{Command, Order},
};
use crate::{
    control::{
        Manual,
        api::{ApiError, Event, ManualResult, ManualState, OrderAction, State, Timestamp},
    },
    core::{Nanos, RowId},
    hosts::table::EVERYWHERE,
    kernel::clock,
    policy::{Destination, DestinationArg},
};

/// Orders that an error names.
const NAMED: usize = 3;

impl Node {
    pub(super) fn manual(
        &mut self,
        destination: &DestinationArg,
        workload: Option<String>,
        action: Manual,
        by: String,
    ) -> Result<ManualResult, ApiError> {
        if self.is_protected(destination) {
            return Err(ApiError::Conflict(format!(
                "{destination} is protected ([protected] in the configuration): it is counted, and \
                 never refused"
            )));
        }
        let by: Arc<str> = by.into();
        match action {
            Manual::Trip(duration) => self.order(destination, workload, true, duration, by),
            Manual::HoldClosed(duration) => self.order(destination, workload, false, duration, by),
            Manual::Reset => self.reset(destination, workload, by),
        }
    }

    /// A new order, which is in force from now on where it covers.
    fn order(
        &mut self,
        destination: &DestinationArg,
        workload: Option<String>,
        trip: bool,
        duration: Duration,
        by: Arc<str>,
    ) -> Result<ManualResult, ApiError> {
        let nanos = Nanos(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX));
        let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let since = Timestamp::now();
        let order = Standing {
            destination: destination.clone(),
            workload: workload.clone(),
            trip,
            until: clock::now() + nanos,
            since,
            ends: Timestamp::from_unix_ms(since.unix_ms().saturating_add(millis)),
            by: Arc::clone(&by),
        };
        if !self.orders.has_room(&order) {
            return Err(ApiError::Conflict(format!(
                "{MOST} manual states are in force already; reset some"
            )));
        }
        let ends = order.ends;
        let before = self.orders.give(order);
        let hosts = &self.naming.hosts;
        if let Err(error) = self.orders.enter(&mut self.kernel, hosts, &self.plan) {
            self.orders.give_back(before);
            self.enter_orders();
            return Err(ApiError::Conflict(format!("{error:#}")));
        }
        self.changed_orders();
        let rows = self.rows_of(destination, workload.as_deref());
        let count = rows.len() as u64;
        let event = Event::Order {
            action: match trip {
                true => OrderAction::Trip,
                false => OrderAction::HoldClosed,
            },
            destination: destination.to_string(),
            workload,
            until: Some(ends),
            rows: count,
            orders: 0,
            by: by.to_string(),
        };
        self.journal.publish(since, event);
        self.tell_rows(rows);
        Ok(ManualResult {
            rows: count,
            taken_back: 0,
            closed_already: 0,
            left: Vec::new(),
        })
    }

    /// Takes orders back and has breakers start anew, but for rows that another order still covers.
    fn reset(
        &mut self,
        destination: &DestinationArg,
        workload: Option<String>,
        by: Arc<str>,
    ) -> Result<ManualResult, ApiError> {
        let workload_meant = workload.as_deref();
        let now = clock::now();
        let rows = self.rows_of(destination, workload_meant);
        let hosts = &self.naming.hosts;
        let gone = self.orders.take_back(destination, workload_meant, hosts);
        let (covered, free): (Vec<_>, Vec<_>) = rows.into_iter().partition(|(_, row)| {
            let names = named::of_row(&self.naming.hosts, row);
            let to = Destination::from_key(&row.key);
            let whose = self.names.name(row.key.cgroup_id, row.last_pid);
            self.orders.in_force(&to, &names, &whose, now).is_some()
        });
        let left = self.manual_states(Some(destination), workload_meant);
        // A name of which nothing is known cannot be told from one that is misspelt.
        if gone.is_empty()
            && free.is_empty()
            && left.is_empty()
            && let DestinationArg::Name { name, port } = destination
            && named::destinations(hosts, name, *port).is_empty()
        {
            return Err(ApiError::NotFound(format!(
                "{destination}: no address is known of that name, and no order is in force for it: nothing \
                 was reset; give the address and port, as `backstop status` shows them"
            )));
        }
        if gone.is_empty() && free.is_empty() && !left.is_empty() {
            return Err(ApiError::Conflict(not_reset(
                destination,
                workload_meant,
                &left,
            )));
        }
        let is_closed = |(id, row): &&(RowId, KernelRow)| {
            let state = Verdict::unpack(row.verdict).state;
            matches!(state, STATE_CLOSED | STATE_RAMP) && !self.orders.is_told(*id)
        };
        let closed_already = free.iter().filter(is_closed).count() as u64;
        self.enter_orders();
        self.changed_orders();
        self.say(Event::Order {
            action: OrderAction::Reset,
            destination: destination.to_string(),
            workload,
            until: None,
            rows: free.len() as u64,
            orders: gone.len() as u64,
            by: by.to_string(),
        });
        let mut resets = Vec::new();
        for (id, _) in &free {
            self.table.forget_traits(*id);
            self.orders.forget(*id);
            resets.push((*id, Order::Reset(Some(Arc::clone(&by)))));
        }
        self.commander.send(Command::Manual(resets));
        self.tell_rows(covered);
        // Of a name's order that is gone other rows are free, too: of addresses that it has no longer.
        self.tell_rows_of(&gone);
        Ok(ManualResult {
            rows: free.len() as u64,
            taken_back: gone.len() as u64,
            closed_already,
            left,
        })
    }

    /// The orders have changed: they are written down, and their names looked up.
    fn changed_orders(&mut self) {
        self.look_up_names();
        self.keeper.changed();
    }

    /// Tells the kernel what rows to come begin with.
    pub(super) fn enter_orders(&mut self) {
        let hosts = &self.naming.hosts;
        if let Err(error) = self.orders.enter(&mut self.kernel, hosts, &self.plan) {
            tracing::error!("orders for rows to come: {error:#}");
        }
    }

    /// Rows that somebody means, protected ones left out.
    fn rows_of(
        &mut self,
        destination: &DestinationArg,
        workload: Option<&str>,
    ) -> Vec<(RowId, KernelRow)> {
        let mut rows = self.meant(destination);
        rows.retain(|(_, row)| {
            !Self::is_guarded(row)
                && workload.is_none_or(|wanted| {
                    self.names.name(row.key.cgroup_id, row.last_pid) == *wanted
                })
        });
        rows
    }

    /// Tells the event thread what is in force for these rows now, where that is news.
    fn tell_rows(&mut self, rows: impl IntoIterator<Item = (RowId, KernelRow)>) {
        let now = clock::now();
        let mut news = Vec::new();
        for (id, row) in rows {
            let names = named::of_row(&self.naming.hosts, &row);
            let to = Destination::from_key(&row.key);
            let workload = self.names.name(row.key.cgroup_id, row.last_pid);
            let state = Verdict::unpack(row.verdict).state;
            let forced = matches!(state, STATE_FORCED_OPEN | STATE_FORCED_CLOSED);
            let order = self.orders.tell(id, &to, &names, &workload, forced, now);
            news.extend(order.map(|order| (id, order)));
        }
        if !news.is_empty() {
            self.commander.send(Command::Manual(news));
        }
    }

    /// These orders are gone: their rows, and what else they stood above, have others or none.
    fn tell_rows_of(&mut self, gone: &[Standing]) {
        let mut wanted: Vec<&DestinationArg> =
            gone.iter().map(|order| &order.destination).collect();
        wanted.dedup();
        let mut rows: Vec<(RowId, KernelRow)> = Vec::new();
        for destination in wanted {
            rows.extend(self.rows_of(destination, None));
        }
        let found: Vec<RowId> = rows.iter().map(|(id, _)| *id).collect();
        for id in self.orders.told_of_gone() {
            if !found.contains(&id) {
                rows.extend(self.table.owned(id).map(|row| (id, row)));
            }
        }
        self.tell_rows(rows);
    }

    /// Tells the event thread of all rows.
    pub(super) fn tell_all_rows(&mut self) {
        if self.orders.is_idle() {
            return;
        }
        let hidden = self.hidden.all();
        let rows = self.table.used().skip(1).filter(|(_, row)| {
            !hidden.contains(&row.key.cgroup_id) && !Self::is_guarded(row) && row.created_ns != 0
        });
        let rows: Vec<_> = rows.collect();
        self.tell_rows(rows);
    }

    /// Ends orders whose time is over.
    pub(super) fn expire_orders(&mut self, now: Nanos) {
        let gone = self.orders.expire(now);
        if gone.is_empty() {
            return;
        }
        // Before names are given up that nobody else has named.
        let counts: Vec<u64> = gone
            .iter()
            .map(|order| self.rows_of(&order.destination, order.workload.as_deref()))
            .map(|rows| rows.len() as u64)
            .collect();
        self.enter_orders();
        self.changed_orders();
        for (order, rows) in gone.iter().zip(counts) {
            self.say(Event::Order {
                action: OrderAction::TimeOver,
                destination: order.destination.to_string(),
                workload: order.workload.clone(),
                until: None,
                rows,
                orders: 0,
                by: order.by.to_string(),
            });
        }
        self.tell_rows_of(&gone);
    }

    /// Says of which orders the time was over while no agent ran.
    pub(super) fn say_what_is_over(&mut self) {
        if !self.over.is_empty() {
            // Not again after the next start.
            self.keeper.changed();
        }
        for order in std::mem::take(&mut self.over) {
            let wanted = order.destination.parse::<DestinationArg>();
            let rows = wanted.map_or(0, |wanted| {
                self.rows_of(&wanted, order.workload.as_deref()).len() as u64
            });
            self.say(Event::Order {
                action: OrderAction::TimeOver,
                destination: order.destination,
                workload: order.workload,
                until: Some(order.until),
                rows,
                orders: 0,
                by: order.by,
            });
        }
    }

    /// Orders for some of what is meant, newest first; `None`: all.
    pub(super) fn manual_states(
        &self,
        wanted: Option<&DestinationArg>,
        workload: Option<&str>,
    ) -> Vec<ManualState> {
        let now = clock::now();
        let orders = self
            .orders
            .concerning(wanted, workload, &self.naming.hosts)
            .filter(|(order, _)| order.until > now);
        orders
            .map(|(order, rows)| ManualState {
                destination: order.destination.to_string(),
                state: match order.trip {
                    true => State::ForcedOpen,
                    false => State::ForcedClosed,
                },
                workload: order.workload.clone(),
                ends_in_ms: (order.until - now).as_millis(),
                since: order.since,
                by: order.by.to_string(),
                rows,
            })
            .collect()
    }

    /// Whether a destination, or every address that is known of it, is protected.
    fn is_protected(&self, destination: &DestinationArg) -> bool {
        let hosts = &self.naming.hosts;
        let guarded = |to: &Destination, netns: u64| {
            let names = hosts.of(netns, &to.addr_bytes());
            self.plan.config.resolve(to, None, &names).protected
        };
        match destination {
            DestinationArg::Address(address) => guarded(address, EVERYWHERE),
            DestinationArg::Name { name, port } => {
                let known = named::destinations(hosts, name, *port);
                !known.is_empty() && known.iter().all(|((netns, _), to)| guarded(to, *netns))
            }
        }
    }
}

/// A reset would change nothing: what is in force, and what takes it back.
fn not_reset(destination: &DestinationArg, workload: Option<&str>, left: &[ManualState]) -> String {
    let mut text = match workload {
        Some(workload) => format!("{destination} is not reset for workload {workload}"),
        None => format!("{destination} is not reset"),
    };
    text.push_str(": no order was given in these words, and another one is in force");
    for order in left.iter().take(NAMED) {
        let (state, whom) = (word(order.state), whom(order.workload.as_deref()));
        text.push_str(&format!(
            "; {} is {state}, {whom}, by {}: `{}` takes that back",
            order.destination,
            order.by,
            taken_back_by(order)
        ));
    }
    if left.len() > NAMED {
        text.push_str(&format!(
            "; and {} more, see `backstop status`",
            left.len() - NAMED
        ));
    }
    let other = match left.first().map(|order| order.state) {
        Some(State::ForcedOpen) => "hold-closed",
        _ => "trip",
    };
    let flag = workload.map_or_else(String::new, |workload| format!(" --workload {workload}"));
    text.push_str(&format!(
        "; `backstop {other} {destination}{flag}` goes before it for a while"
    ));
    text
}

/// What a state is called where it is an order.
fn word(state: State) -> &'static str {
    match state {
        State::ForcedOpen => "refused",
        _ => "held closed",
    }
}

fn whom(workload: Option<&str>) -> String {
    match workload {
        Some(workload) => format!("for workload {workload}"),
        None => "for all workloads".to_owned(),
    }
}

/// The command that takes an order back.
fn taken_back_by(order: &ManualState) -> String {
    let workload = order.workload.as_deref();
    let flag = workload.map_or_else(String::new, |workload| format!(" --workload {workload}"));
    format!("backstop reset {}{flag}", order.destination)
}
