//! Carries out the agent's own timeouts: a look immediately before the act, the act, the counting.

use std::{
    collections::{HashMap, HashSet},
    net::{Ipv6Addr, SocketAddr},
    sync::Arc,
};

use agent_common::{
    Mode, Row, Stamp,
    event::{
        EVENT_OUR_TIMEOUT, EVENT_WOULD, OUTCOME_DEADLINE, OUTCOME_READ_TIMEOUT, OUTCOME_STALL,
        OUTCOME_WRITE_TIMEOUT,
    },
    stamp::{ENDING, SETTLED},
};

use super::{Shared, failure, held::Beat, row_of};
use crate::{
    core::{
        Nanos, WindowKind,
        waits::{Due, Limit},
    },
    kernel::clock,
    sockets::{
        abort::Fate,
        diag::{Diag, DiagError, Target},
        look::{Look, Tuple},
        namespace::{Namespaces, Place},
        process::{Freezers, Process, RunState},
    },
};

/// Connections that are ended in one visit to a namespace. So long as a batch lasts (some
/// milliseconds), nothing else fires.
const BATCH: usize = 1_000;
/// Processes through which a namespace is looked for, before all processes of the node.
const LIKELY: usize = 16;

/// A connection whose timeout has come.
pub(super) struct Firing {
    pub(super) cookie: u64,
    pub(super) stamp: Stamp,
    /// The exchange that it is about, if the timeout is one of an exchange.
    pub(super) number: Option<u32>,
    pub(super) due: Due,
    pub(super) row: Row,
    /// Whether the connection is over, or the timeout only counted: nothing more is to be done.
    pub(super) done: bool,
    /// Noted in the kernel's map, by us.
    noted: bool,
    /// It was counted before, as hung.
    already: bool,
}

impl Firing {
    pub(super) fn new(cookie: u64, stamp: Stamp, number: Option<u32>, due: Due, row: Row) -> Self {
        Self {
            cookie,
            stamp,
            number,
            due,
            row,
            done: false,
            noted: false,
            already: false,
        }
    }
}

/// See the module.
#[derive(Default)]
pub(super) struct Aborter {
    namespaces: Namespaces,
    freezers: Option<Freezers>,
    /// Namespaces that could not be entered: complained about once.
    complained: HashSet<u32>,
    /// What its thread waits for.
    beat: Arc<Beat>,
}

impl Aborter {
    /// That of a thread whose calls are watched.
    pub(super) fn watched(beat: Arc<Beat>) -> Self {
        Self {
            beat,
            ..Self::default()
        }
    }

    /// What its thread waits for.
    pub(super) fn beat(&self) -> &Arc<Beat> {
        &self.beat
    }

    /// Runs something in the namespace of these connections; complains once for each that cannot be
    /// entered.
    pub(super) fn within<T>(
        &mut self,
        inode: u32,
        pids: &[u32],
        batch: impl FnOnce(&mut Diag) -> T,
    ) -> Option<T> {
        match self.namespaces.diag(Place { inode, pids }, batch) {
            Ok(result) => Some(result),
            Err(error) => {
                self.complain(inode, &error);
                None
            }
        }
    }

    pub(super) fn complain(&mut self, inode: u32, error: &DiagError) {
        if self.complained.insert(inode) {
            tracing::warn!("timeouts cannot look at the connections there: {error}");
        }
    }

    /// Ends those for which `may` still says so when its connection is looked at. In observe mode,
    /// what would have been ended counts as failed at its value, and nothing is touched. What is
    /// left undone has `done` false.
    pub(super) fn carry_out(
        &mut self,
        shared: &Shared,
        firings: &mut [Firing],
        mut may: impl FnMut(&Firing, &Look) -> bool,
    ) {
        match shared.table.mode() {
            Mode::ENFORCE => {}
            Mode::OBSERVE => return only_count(shared, firings),
            // Paused: nothing is ended and nothing would be.
            _ => return,
        }
        firings.sort_by_key(|firing| firing.row.netns_inode);
        for group in firings.chunk_by_mut(|a, b| a.row.netns_inode == b.row.netns_inode) {
            for batch in group.chunks_mut(BATCH) {
                self.abort(shared, batch, &mut may);
            }
        }
    }

    fn abort(
        &mut self,
        shared: &Shared,
        firings: &mut [Firing],
        may: &mut impl FnMut(&Firing, &Look) -> bool,
    ) {
        let Some(first) = firings.first() else { return };
        let inode = first.row.netns_inode;
        let pids = likely(
            firings
                .iter()
                .map(|firing| (firing.stamp.pid, firing.row.last_pid)),
        );
        let freezers = self.freezers.get_or_insert_with(Freezers::find).clone();
        let beat = Arc::clone(&self.beat);
        self.within(inode, &pids, |diag| {
            abort_all(shared, &freezers, &beat, diag, firings, may);
        });
        for firing in firings.iter_mut().filter(|firing| firing.noted) {
            // Not ended by us: its end counts as any other.
            if shared.connections.take_counted(firing.cookie) {
                shared.table.close_counted(firing.stamp.row);
            }
            firing.noted = false;
        }
    }
}

/// The processes that are likeliest to lead into the namespace of these connections.
pub(super) fn likely(pids: impl Iterator<Item = (u32, u32)>) -> Vec<u32> {
    let mut all: Vec<u32> = pids.flat_map(|(a, b)| [a, b]).take(LIKELY).collect();
    all.dedup();
    all
}

fn abort_all(
    shared: &Shared,
    freezers: &Freezers,
    beat: &Beat,
    diag: &mut Diag,
    firings: &mut [Firing],
    may: &mut impl FnMut(&Firing, &Look) -> bool,
) {
    let mut held_up: HashMap<u32, bool> = HashMap::new();
    for firing in firings {
        if beat.is_replaced() {
            return;
        }
        let target = target(firing.cookie, &firing.stamp);
        let fate = beat.during([firing.cookie].into_iter(), || {
            diag.abort_one(&target, |look| {
                let pid = firing.stamp.pid;
                if beat.is_replaced()
                    || !may(firing, look)
                    || *held_up
                        .entry(pid)
                        .or_insert_with(|| is_held_up(pid, freezers))
                {
                    return false;
                }
                let Some(stamp) = shared.connections.get(firing.cookie) else {
                    return false;
                };
                let owed = stamp.owed().map(|(number, _)| number);
                if firing.number.is_some() && owed != firing.number {
                    return false;
                }
                if let Some(number) = owed {
                    note(shared, firing, number, ENDING);
                }
                true
            })
        });
        became(shared, firing, fate);
    }
}

/// What became of a connection that was to be ended.
fn became(shared: &Shared, firing: &mut Firing, fate: Fate) {
    firing.done = !matches!(fate, Fate::Changed | Fate::Unseen(_));
    match fate {
        Fate::Aborted => {
            if firing.noted && shared.connections.take_counted(firing.cookie) {
                // An answer came between the look and the act, and is counted as one.
                shared.table.close_counted(firing.stamp.row);
                firing.already = true;
            }
            firing.noted = false;
            count(shared, firing, 0);
        }
        Fate::Gone | Fate::Changed => {}
        Fate::Refused(errno) => tracing::warn!(
            "a timeout could not end a connection of pid {}: the kernel says {errno}",
            firing.stamp.pid
        ),
        Fate::Unseen(error) => tracing::warn!("a timeout could not look: {error}"),
    }
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

fn only_count(shared: &Shared, firings: &mut [Firing]) {
    for firing in firings {
        firing.done = true;
        if let Some(number) = firing.number {
            note(shared, firing, number, SETTLED);
        }
        count(shared, firing, EVENT_WOULD);
    }
}

/// Notes that the end of an exchange is counted by us, unless it was counted before.
fn note(shared: &Shared, firing: &mut Firing, number: u32, as_what: u64) {
    shared.table.open_counted(firing.stamp.row);
    let noted = shared
        .connections
        .note_counted(firing.cookie, number, as_what);
    firing.noted = noted.is_ok();
    firing.already = noted.is_err();
    if firing.already {
        shared.table.close_counted(firing.stamp.row);
    }
}

/// Counts and tells it.
fn count(shared: &Shared, firing: &Firing, flags: u32) {
    let now = clock::now();
    let id = row_of(&firing.stamp);
    let outcome = match firing.due.limit {
        Limit::Read => OUTCOME_READ_TIMEOUT,
        Limit::Deadline => OUTCOME_DEADLINE,
        Limit::Write => OUTCOME_WRITE_TIMEOUT,
        Limit::Stall => OUTCOME_STALL,
    };
    // A deadline says nothing of the destination, and what was counted as hung counts once.
    let seq = if firing.already || firing.due.limit == Limit::Deadline {
        None
    } else {
        let generation = firing.stamp.generation;
        match firing.due.limit {
            // It was an answer when it began: one call, not two.
            Limit::Stall => {
                let answered = Nanos(firing.stamp.answered_ns);
                shared.table.spoil(id, generation, answered, now)
            }
            _ => (shared.table).enter_failure(id, WindowKind::Exchanges, generation, now),
        }
    };
    if !firing.already {
        shared.table.count_outcome(id.index, outcome);
    }
    let would = flags & EVENT_WOULD != 0;
    shared.table.count_firing(id.index, outcome, would);
    let elapsed = now - firing.due.since;
    let mut event = failure(&firing.stamp, outcome, now, seq.unwrap_or(0), elapsed);
    event.flags |= EVENT_OUR_TIMEOUT | flags;
    event.timeout_ms = u32::try_from(firing.due.value.as_millis()).unwrap_or(u32::MAX);
    shared.found(event);
}

/// The socket of a connection, for the kernel.
pub(super) fn target(cookie: u64, stamp: &Stamp) -> Target {
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
