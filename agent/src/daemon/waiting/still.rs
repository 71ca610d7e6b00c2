//! Write and stall timeouts: data that lies still.
//!
//! Whether queued data moves is known only to the kernel's socket, so the agent asks for it: of
//! connections that have sent something since the last look, or had something queued then. Data that
//! a program queues behind a window that is closed already sends nothing; therefore all connections
//! are asked about once in a while.
//!
//! An answer that has stopped is asked about at each look, for what the program has not read counts
//! against nobody: the peer may have to wait until it does. So the silence counts from the last look that
//! showed anything but silence, be it data, be it something unread.

use std::{collections::HashMap, sync::Arc};

use agent_common::{
    Row, Stamp,
    http::{self, Unfinished},
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
    sockets::look::{Look, State},
};

/// All connections with a write timeout are asked about this often.
const SWEEP_EVERY: Nanos = Nanos::from_secs(1);

#[derive(Default)]
pub(super) struct StillWatch {
    seen: HashMap<u64, Seen>,
    swept: Nanos,
}

/// Connections that are asked about in one call.
const AT_ONCE: usize = 128;

/// What was seen of a connection at the last look.
#[derive(Clone, Copy, Default)]
struct Seen {
    out_end: u32,
    in_end: u32,
    /// The last look that showed anything but silence.
    heard: Nanos,
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
                Limit::Stall => is_silent(look, firing.due.value) && has_stopped(shared, firing),
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
        let avoided = shared.avoided.all();
        let found = |cookie: u64, stamp: &Stamp| {
            if !is_ours(stamp) || avoided.contains(&cookie) {
                return;
            }
            let Some(row) = rows.get(shared, row_of(stamp)) else {
                return;
            };
            let limits = *shared.plan.waits(row.settings.policy);
            if !limits.watch_connections() {
                return;
            }
            let known = before.remove(&cookie);
            let mut seen = known.unwrap_or_default();
            let has_sent = seen.out_end != stamp.out_end;
            if known.is_none() || has_sent || seen.in_end != stamp.in_end {
                seen.heard = now;
            }
            (seen.out_end, seen.in_end) = (stamp.out_end, stamp.in_end);
            let writes = limits.write.is_some() && (has_sent || sweep || seen.progress.is_queued());
            let stalls = seen.heard < now && may_stall(stamp, &limits);
            self.seen.insert(cookie, seen);
            if writes || stalls {
                candidates.push(Candidate {
                    cookie,
                    stamp: *stamp,
                    limits,
                    row: *row,
                });
            }
        };
        if shared.plan.waits.iter().any(WaitLimits::watch_all) {
            shared.connections.each_open(found);
        } else {
            shared.connections.each_unfinished(found);
        }
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
        let beat = Arc::clone(aborter.beat());
        let result = aborter.within(inode, &pids, |diag| {
            for part in group.chunks(AT_ONCE) {
                if beat.is_replaced() {
                    break;
                }
                let targets: Vec<_> = part.iter().map(|c| target(c.cookie, &c.stamp)).collect();
                let found = |at: usize, look| {
                    if let (Some(candidate), Some(look)) = (part.get(at), look)
                        && let Some(due) = self.judge(candidate, &look, now)
                    {
                        let &Candidate {
                            cookie, stamp, row, ..
                        } = candidate;
                        firings.push(Firing::new(cookie, stamp, None, due, row));
                    }
                };
                let cookies = part.iter().map(|candidate| candidate.cookie);
                beat.during(cookies, || diag.look_all(&targets, found))?;
            }
            Ok(())
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
        if !is_waiting(look) {
            seen.heard = now;
        }
        let heard = seen.heard;
        let stall = candidate.limits.stall.filter(|stall| {
            now - heard >= *stall
                && is_silent(look, *stall)
                && may_stall(&candidate.stamp, &candidate.limits)
        });
        let due = |limit, value, since| Due {
            at: now,
            limit,
            value,
            since,
        };
        let found = match (write, stall) {
            (Some((write, since)), _) if now - since >= write => due(Limit::Write, write, since),
            (_, Some(stall)) => due(Limit::Stall, stall, heard),
            _ => {
                seen.counted = false;
                return None;
            }
        };
        (!seen.counted).then_some(found)
    }
}

/// Whether silence can be in the middle of an answer. HTTP/1 says where one ends; of a protocol that is not
/// known, any silence after one has begun may be. What other protocols say is not guessed at.
fn may_stall(stamp: &Stamp, limits: &WaitLimits) -> bool {
    if limits.stall.is_none() {
        return false;
    }
    match http::unfinished(stamp) {
        Some(Unfinished::Length) => true,
        Some(Unfinished::Chunked) => limits.stall_widely,
        None => {
            let (number, _) = unpack_request(stamp.request);
            limits.stall_widely
                && stamp.protocol == PROTOCOL_OPAQUE
                && number != 0
                && stamp.owed().is_none()
        }
    }
}

/// Whether nothing has moved since the connection was asked about, as far as the kernel's programs saw.
fn has_stopped(shared: &Shared, firing: &Firing) -> bool {
    let limits = shared.plan.waits(firing.row.settings.policy);
    let now = shared.connections.get(firing.cookie);
    now.is_some_and(|stamp| {
        row_of(&stamp) == row_of(&firing.stamp)
            && (stamp.in_end, stamp.out_end) == (firing.stamp.in_end, firing.stamp.out_end)
            && may_stall(&stamp, limits)
    })
}

/// Whether the program waits for what the peer sends: it has read all that came, and sends nothing, and the
/// peer has not ended the connection.
fn is_waiting(look: &Look) -> bool {
    use State::{Established, FinWait1, FinWait2};
    !look.has_unread()
        && look.send_queue == 0
        && matches!(look.state, Established | FinWait1 | FinWait2)
}

/// Whether it has waited for so long.
fn is_silent(look: &Look, stall: Nanos) -> bool {
    let silence = look.tcp.map_or(0, |tcp| u64::from(tcp.last_data_recv_ms));
    is_waiting(look) && Nanos::from_millis(silence) >= stall
}
