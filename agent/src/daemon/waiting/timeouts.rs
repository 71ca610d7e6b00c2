//! Read timeouts and deadlines: fires each when it is due, and not when the wait is the program's own.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::{Ipv6Addr, SocketAddr},
};

use agent_common::{
    Mode, Row, Stamp,
    event::{EVENT_OUR_TIMEOUT, EVENT_WOULD, OUTCOME_DEADLINE, OUTCOME_READ_TIMEOUT},
    stamp::{ENDING, SETTLED},
};

use super::{Owed, Rows, Shared};
use crate::{
    core::{
        Nanos, WindowKind,
        waits::{Due, Limit},
    },
    kernel::clock,
    sockets::{
        abort::Fate,
        diag::{Diag, Target},
        look::{Look, Tuple},
        namespace::{Namespaces, Place},
        process::{Freezers, Process, RunState},
    },
};

/// What is due within this time is done in one go: less than a timer is late by anyway.
const SLACK: Nanos = Nanos::from_millis(1);
/// When a wait was found to be the program's own (it is stopped, or still sends), it is looked at
/// again after this long.
const AGAIN: Nanos = Nanos::from_millis(50);
/// Connections that are ended in one visit to a namespace. So long as a batch lasts (some
/// milliseconds), nothing else fires.
const BATCH: usize = 1_000;

#[derive(Default)]
pub(super) struct Timeouts {
    /// Exchanges with a timeout, by when it fires.
    due: BTreeMap<(Nanos, u64, u32), Owed>,
    /// Exchanges that were put off, and those whose timeout was only counted (never again).
    put_off: HashMap<(u64, u32), Nanos>,
    namespaces: Namespaces,
    freezers: Option<Freezers>,
    /// Kernels that cannot abort are complained about once, and namespaces that cannot be entered.
    complained: HashSet<u32>,
}

/// An exchange whose timeout has come.
struct Firing {
    owed: Owed,
    due: Due,
    row: Row,
    /// Noted in the kernel's map by us.
    noted: bool,
    /// It was counted before, as hung.
    already: bool,
}

impl Timeouts {
    /// When the next one fires, of those that were seen.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.due.first_key_value().map(|((at, ..), _)| *at)
    }

    /// Takes in all exchanges that wait. After a sleep of the agent everything is put off a little,
    /// so that what happened meanwhile is seen first.
    pub(super) fn look(&mut self, shared: &Shared, owed: &[Owed], now: Nanos, slept: bool) {
        self.due.clear();
        if shared
            .plan
            .waits
            .iter()
            .all(|waits| waits.shortest().is_none())
        {
            self.put_off.clear();
            return;
        }
        if !self.put_off.is_empty() {
            let waiting: HashSet<_> = owed.iter().map(Owed::id).collect();
            self.put_off.retain(|id, _| waiting.contains(id));
        }
        let mut rows = Rows::default();
        for owed in owed {
            if let Some(row) = rows.get(shared, owed.row())
                && let Some(due) = shared.plan.waits(row.settings.policy).due(owed.wait)
            {
                let not_before = self.put_off.get(&owed.id()).copied();
                let at = due.at.max(not_before.unwrap_or(Nanos::ZERO));
                let at = if slept { at.max(now + AGAIN) } else { at };
                if at < Nanos::MAX {
                    self.due.insert((at, owed.cookie, owed.number), *owed);
                }
            }
        }
    }

    /// Fires all that are due.
    pub(super) fn fire(&mut self, shared: &Shared, now: Nanos) {
        let mut by_namespace: HashMap<u32, Vec<Firing>> = HashMap::new();
        let mut rows = Rows::default();
        while let Some(entry) = self.due.first_entry()
            && entry.key().0 <= now + SLACK
        {
            let Some(owed) = shared.again(&entry.remove()) else {
                continue;
            };
            let Some(row) = rows.get(shared, owed.row()) else {
                continue;
            };
            let Some(due) = shared.plan.waits(row.settings.policy).due(owed.wait) else {
                continue;
            };
            if due.at > now + SLACK {
                // The program has sent more of its request since.
                self.due.insert((due.at, owed.cookie, owed.number), owed);
                continue;
            }
            let firing = Firing {
                owed,
                due,
                row: *row,
                noted: false,
                already: false,
            };
            match shared.table.mode() {
                Mode::ENFORCE => {
                    let inode = row.netns_inode;
                    by_namespace.entry(inode).or_default().push(firing);
                }
                Mode::OBSERVE => self.only_count(shared, firing),
                // Paused: it is looked at again with the next look.
                _ => {}
            }
        }
        for (inode, mut firings) in by_namespace {
            for batch in firings.chunks_mut(BATCH) {
                self.abort(shared, inode, batch);
            }
        }
    }

    /// Observe mode touches nothing: what would have been ended counts as failed at its value.
    fn only_count(&mut self, shared: &Shared, mut firing: Firing) {
        let owed = &firing.owed;
        self.put_off.insert(owed.id(), Nanos::MAX);
        note(shared, &mut firing, SETTLED);
        count(shared, &firing, EVENT_WOULD);
    }

    fn abort(&mut self, shared: &Shared, inode: u32, firings: &mut [Firing]) {
        let pids: Vec<u32> = firings
            .iter()
            .flat_map(|firing| [firing.owed.stamp.pid, firing.row.last_pid])
            .take(2 * BATCH.min(8))
            .collect();
        let place = Place { inode, pids: &pids };
        let freezers = self.freezers.get_or_insert_with(Freezers::find).clone();
        let result = self
            .namespaces
            .diag(place, |diag| abort_all(shared, &freezers, diag, firings));
        let mut complaint = result.err().map(|error| error.to_string());
        for firing in firings.iter_mut().filter(|firing| firing.noted) {
            // Not ended by us: its end counts as any other.
            if shared.connections.take_counted(firing.owed.cookie) {
                shared.table.close_counted(firing.owed.stamp.row);
            }
            firing.noted = false;
        }
        let again = clock::now() + AGAIN;
        for firing in firings.iter().filter(|firing| firing.due.at < Nanos::MAX) {
            self.put_off.insert(firing.owed.id(), again);
            let owed = firing.owed;
            self.due.insert((again, owed.cookie, owed.number), owed);
        }
        complaint = complaint.filter(|_| self.complained.insert(inode));
        if let Some(complaint) = complaint {
            tracing::warn!("timeouts cannot end connections there: {complaint}");
        }
    }
}

/// Ends those that are still to be ended. What has been ended is marked by a time that never comes.
fn abort_all(shared: &Shared, freezers: &Freezers, diag: &mut Diag, firings: &mut [Firing]) {
    let targets: Vec<Target> = firings
        .iter()
        .map(|f| target(f.owed.cookie, &f.owed.stamp))
        .collect();
    let places: HashMap<u64, usize> = (targets.iter().map(|t| t.cookie)).zip(0..).collect();
    let mut held_up: HashMap<u32, bool> = HashMap::new();
    let fates = diag.abort(&targets, |look| {
        let Some(firing) = places.get(&look.cookie).and_then(|at| firings.get_mut(*at)) else {
            return false;
        };
        let pid = firing.owed.stamp.pid;
        let may = !is_the_programs_own(look, firing.due.limit)
            && !*held_up
                .entry(pid)
                .or_insert_with(|| is_held_up(pid, freezers))
            && shared.again(&firing.owed).is_some();
        if may {
            note(shared, firing, ENDING);
        }
        may
    });
    for (firing, fate) in firings.iter_mut().zip(fates) {
        match fate {
            Fate::Aborted => {
                count(shared, firing, 0);
                firing.noted = false;
                firing.due.at = Nanos::MAX;
            }
            Fate::Gone => firing.due.at = Nanos::MAX,
            Fate::Changed => {}
            Fate::Refused(errno) => {
                tracing::warn!(
                    "a timeout could not end a connection of pid {}: the kernel says {errno}",
                    firing.owed.stamp.pid
                );
                firing.due.at = Nanos::MAX;
            }
            Fate::Unseen(error) => tracing::warn!("a timeout could not look: {error}"),
        }
    }
}

/// Whether not the destination is waited for: the answer lies there unread, or the program has not
/// sent all of its request.
fn is_the_programs_own(look: &Look, limit: Limit) -> bool {
    let unsent = look.tcp.is_some_and(|tcp| tcp.notsent_bytes > 0);
    look.has_unread() || (limit == Limit::Read && unsent)
}

fn is_held_up(pid: u32, freezers: &Freezers) -> bool {
    match Process::open(pid) {
        Ok(Some(process)) => matches!(
            process.run_state(freezers),
            RunState::Stopped | RunState::Frozen
        ),
        // Gone (a child has the socket by now), or not to be seen: nothing holds it up.
        Ok(None) | Err(_) => false,
    }
}

/// Notes that its end is counted by us, unless it was counted before.
fn note(shared: &Shared, firing: &mut Firing, as_what: u64) {
    let owed = &firing.owed;
    shared.table.open_counted(owed.stamp.row);
    let noted = shared
        .connections
        .note_counted(owed.cookie, owed.number, as_what);
    firing.noted = noted.is_ok();
    firing.already = noted.is_err();
    if firing.already {
        shared.table.close_counted(owed.stamp.row);
    }
}

/// Counts and tells it.
fn count(shared: &Shared, firing: &Firing, flags: u32) {
    let now = clock::now();
    let id = firing.owed.row();
    let outcome = match firing.due.limit {
        Limit::Read => OUTCOME_READ_TIMEOUT,
        Limit::Deadline => OUTCOME_DEADLINE,
    };
    // A deadline says nothing of the destination, and what was counted as hung counts once.
    let seq = if firing.already || firing.due.limit == Limit::Deadline {
        None
    } else {
        let generation = firing.owed.stamp.generation;
        (shared.table).enter_failure(id, WindowKind::Exchanges, generation, now)
    };
    if !firing.already {
        shared.table.count_outcome(id.index, outcome);
    }
    shared
        .table
        .count_firing(id.index, outcome, flags & EVENT_WOULD != 0);
    let elapsed = now - firing.due.since;
    let mut event = firing.owed.failure(outcome, now, seq.unwrap_or(0), elapsed);
    event.flags |= EVENT_OUR_TIMEOUT | flags;
    event.timeout_ms = u32::try_from(firing.due.value.as_millis()).unwrap_or(u32::MAX);
    shared.found(event);
}

/// The socket of a connection, for the kernel.
fn target(cookie: u64, stamp: &Stamp) -> Target {
    let end = |addr: [u8; 16], port_be: u16| {
        SocketAddr::from((Ipv6Addr::from(addr), u16::from_be(port_be)))
    };
    let tuple = Tuple::new(
        end(stamp.local_addr, stamp.local_port_be),
        end(stamp.peer_addr, stamp.peer_port_be),
        stamp.ifindex,
    );
    Target { tuple, cookie }
}
