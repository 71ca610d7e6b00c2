//! Write and stall timeouts: data that lies still.
//!
//! Whether queued data moves is known only to the kernel's socket, so the agent asks for it: of
//! connections that have sent something since the last look, or had something queued then. Data that
//! a program queues behind a window that is closed already sends nothing; therefore all connections
//! are asked about once in a while.

use std::collections::HashMap;

use agent_common::{
    Row, Stamp,
    stamp::{PROTOCOL_OPAQUE, unpack_request},
};

use super::{
    Rows, Shared,
    abort::{Aborter, Firing, likely, target},
    is_ours, row_of,
};
use crate::{
    core::{
        Nanos, WaitLimits,
        waits::{Due, Limit, Progress},
    },
    sockets::look::Look,
};

/// All connections with a write timeout are asked about this often.
const SWEEP_EVERY: Nanos = Nanos::from_secs(1);

#[derive(Default)]
pub(super) struct StillWatch {
    seen: HashMap<u64, Seen>,
    swept: Nanos,
}

/// What was seen of a connection at the last look.
#[derive(Clone, Copy, Default)]
struct Seen {
    out_end: u32,
    progress: Progress,
    /// Its timeout was only counted: not again, until its data moves.
    counted: bool,
}

/// A connection that is asked about.
struct Candidate {
    cookie: u64,
    stamp: Stamp,
    limits: WaitLimits,
    row: Row,
}

impl StillWatch {
    pub(super) fn look(&mut self, shared: &Shared, aborter: &mut Aborter, now: Nanos, slept: bool) {
        if !shared.plan.waits.iter().any(WaitLimits::watch_connections) {
            self.seen.clear();
            return;
        }
        if slept {
            // What lay still in our sleep may have moved: from here on is looked anew.
            self.seen.clear();
        }
        let sweep = now - self.swept >= SWEEP_EVERY;
        if sweep {
            self.swept = now;
        }
        let mut candidates = self.candidates(shared, now, sweep);
        candidates.sort_by_key(|candidate| candidate.row.netns_inode);
        let mut firings = Vec::new();
        for group in candidates.chunk_by(|a, b| a.row.netns_inode == b.row.netns_inode) {
            self.ask(aborter, group, now, &mut firings);
        }
        if firings.is_empty() {
            return;
        }
        aborter.carry_out(shared, &mut firings, |firing, look| {
            match firing.due.limit {
                Limit::Stall => is_silent(look, firing.due.value),
                _ => look.send_queue > 0,
            }
        });
        for firing in firings.iter().filter(|firing| firing.done) {
            if let Some(seen) = self.seen.get_mut(&firing.cookie) {
                seen.counted = true;
            }
        }
    }

    /// Connections that have to be asked about; forgets those that are gone.
    fn candidates(&mut self, shared: &Shared, now: Nanos, sweep: bool) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let mut rows = Rows::default();
        let mut before = std::mem::take(&mut self.seen);
        shared.connections.each_open(|cookie, stamp| {
            if !is_ours(stamp) {
                return;
            }
            let Some(row) = rows.get(shared, row_of(stamp)) else {
                return;
            };
            let limits = *shared.plan.waits(row.settings.policy);
            if !limits.watch_connections() {
                return;
            }
            let mut seen = before.remove(&cookie).unwrap_or_default();
            let has_sent = seen.out_end != stamp.out_end;
            seen.out_end = stamp.out_end;
            let writes = limits.write.is_some() && (has_sent || sweep || seen.progress.is_queued());
            let stalls = limits
                .stall
                .is_some_and(|stall| may_stall(stamp, now, stall));
            self.seen.insert(cookie, seen);
            if writes || stalls {
                candidates.push(Candidate {
                    cookie,
                    stamp: *stamp,
                    limits,
                    row: *row,
                });
            }
        });
        candidates
    }

    /// Asks about connections of one namespace.
    fn ask(
        &mut self,
        aborter: &mut Aborter,
        group: &[Candidate],
        now: Nanos,
        firings: &mut Vec<Firing>,
    ) {
        let Some(first) = group.first() else { return };
        let inode = first.row.netns_inode;
        let pids = likely(group.iter().map(|c| (c.stamp.pid, c.row.last_pid)));
        let targets: Vec<_> = group.iter().map(|c| target(c.cookie, &c.stamp)).collect();
        let result = aborter.within(inode, &pids, |diag| {
            diag.look_all(&targets, |at, look| {
                if let (Some(candidate), Some(look)) = (group.get(at), look)
                    && let Some(due) = self.judge(candidate, &look, now)
                {
                    firings.push(Firing::new(
                        candidate.cookie,
                        candidate.stamp,
                        None,
                        due,
                        candidate.row,
                    ));
                }
            })
        });
        if let Some(Err(error)) = result {
            aborter.complain(inode, &error);
        }
    }

    /// Whether a timeout has come for a connection.
    fn judge(&mut self, candidate: &Candidate, look: &Look, now: Nanos) -> Option<Due> {
        let seen = self.seen.get_mut(&candidate.cookie)?;
        let acked = look.tcp.map_or(0, |tcp| tcp.bytes_acked);
        let still_since = seen.progress.see(now, acked, u64::from(look.send_queue));
        let write = candidate.limits.write.zip(still_since);
        let stall = candidate
            .limits
            .stall
            .filter(|stall| may_stall(&candidate.stamp, now, *stall) && is_silent(look, *stall));
        let due = |limit, value, since| Due {
            at: now,
            limit,
            value,
            since,
        };
        let found = match (write, stall) {
            (Some((write, since)), _) if now - since >= write => due(Limit::Write, write, since),
            (_, Some(stall)) => due(Limit::Stall, stall, now - silence(look)),
            _ => {
                seen.counted = false;
                return None;
            }
        };
        (!seen.counted).then_some(found)
    }
}

/// Whether silence can be in the middle of an answer: one has begun, and none is owed. What has a
/// protocol that tells where answers end is not guessed at.
fn may_stall(stamp: &Stamp, now: Nanos, stall: Nanos) -> bool {
    let (number, _) = unpack_request(stamp.request);
    number != 0
        && stamp.owed().is_none()
        && stamp.protocol == PROTOCOL_OPAQUE
        && now - Nanos(stamp.answered_ns) >= stall
}

/// For how long nothing has come.
fn silence(look: &Look) -> Nanos {
    Nanos::from_millis(look.tcp.map_or(0, |tcp| u64::from(tcp.last_data_recv_ms)))
}

/// Whether nothing has come for so long, nothing waits to be read, and nothing is being sent.
fn is_silent(look: &Look, stall: Nanos) -> bool {
    !look.has_unread() && look.send_queue == 0 && silence(look) >= stall
}
