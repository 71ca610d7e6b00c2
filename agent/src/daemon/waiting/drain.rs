//! `on_open`: ends the connections that exist when a breaker opens, where its policy says so.
//!
//! A thread of its own, because a look or an abort waits for a socket's lock, which a program can hold.
//! From the opening on it looks at the row's connections once a second, for as long as the breaker is
//! open and any are there: so `drain-idle` finds those whose exchange ends later, and `abort` those
//! whose connect was under way. Once the breaker lets probes pass, nothing more is ended.
//!
//! The same thread ends connections whose request the kernel refuses (`refuse_non_idempotent`), at once: it
//! has dropped a packet of the request, and the program waits for an answer.
//!
//! An operator's `trip` ends nothing: it refuses connects, by hand and for a time. Nothing is ended in
//! observe mode, in a pause, on protected destinations and of sockets of the kernel's own.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use agent_common::{
    Mode, Row, Stamp,
    request::{COMPARED, REFUSED},
    stamp::{PROTOCOL_HTTP1, unpack_request},
    verdict::STATE_OPEN,
};
use anyhow::{Context as _, Result};

use super::{
    Shared,
    abort::{Aborter, likely, target},
    is_ours, row_of,
};
use crate::{
    core::{Nanos, RowId},
    daemon::{plan::Plan, reactor::Command},
    kernel::clock,
    policy::OnOpen,
    sockets::{abort::Fate, look::Look},
};

/// Between two looks while connections are left.
const AGAIN: Duration = Duration::from_secs(1);

/// An exchange is answered with the first byte: the rest of the answer may take its time. Idle is what
/// has been silent in both directions for this long, ms.
const SILENT_MS: u32 = 1_000;

/// How long an order to end a refused request's connection holds: less than the kernel refuses it for, and than
/// it takes the agent for awake.
const VOID: Nanos = Nanos::from_secs(2);

/// What the thread is told.
pub enum Drain {
    /// A breaker has opened whose policy ends connections.
    Opened(RowId),
    /// The kernel has refused a request.
    Refused(Refused),
    /// A new configuration.
    Plan(Arc<Plan>),
}

/// A request that has not left.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// Its connection's row.
    pub row: RowId,
    /// Its socket.
    pub cookie: u64,
    /// Number of the last exchange on its connection ([`unpack_request`]): the one before it, or its own.
    pub number: u32,
    /// Its own: only its end has not left.
    pub is_under_way: bool,
    /// When the kernel has dropped it.
    pub at: Nanos,
}

impl Refused {
    /// Whether it is still so: of a request that leaves after all the kernel counts the exchange, and never
    /// takes that back; of one whose end does it says that nothing is refused any more. An order that has waited, as in an agent that was stopped, is void in any case: while
    /// the request is refused, the kernel orders again with each resend.
    fn is_so(&self, stamp: &Stamp, now: Nanos) -> bool {
        let is_held_back = if self.is_under_way {
            stamp.owed().is_some()
                && stamp.protocol == PROTOCOL_HTTP1
                && stamp.tls_stage & (COMPARED | REFUSED) == COMPARED | REFUSED
        } else {
            stamp.owed().is_none()
        };
        row_of(stamp) == self.row
            && is_held_back
            && unpack_request(stamp.request).0 == self.number
            && now < self.at + VOID
    }
}

/// The thread's handle. It ends when all senders are gone, and is not waited for: it may hang in a
/// program's lock.
pub(super) struct DrainThread {
    orders: Option<mpsc::Sender<Drain>>,
    thread: JoinHandle<()>,
}

impl DrainThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(super) fn start(
        shared: Shared,
        orders: mpsc::Sender<Drain>,
        received: mpsc::Receiver<Drain>,
    ) -> Result<Self> {
        let mut drainer = Drainer {
            shared,
            aborter: Aborter::default(),
            rows: HashSet::new(),
            refused: false,
        };
        let thread = std::thread::Builder::new()
            .name("backstop-drains".into())
            .spawn(move || drainer.run(&received))
            .context("start the thread that ends connections of open breakers")?;
        Ok(Self {
            orders: Some(orders),
            thread,
        })
    }

    pub(super) fn plan(&self, plan: Arc<Plan>) {
        // A thread that is gone is noticed by whoever runs the loop.
        let _ = self.orders.as_ref().map(|to| to.send(Drain::Plan(plan)));
    }

    pub(super) fn is_running(&self) -> bool {
        !self.thread.is_finished()
    }

    pub(super) fn stop(&mut self) {
        self.orders = None;
    }
}

struct Drainer {
    shared: Shared,
    aborter: Aborter,
    /// Rows whose connections are ended.
    rows: HashSet<RowId>,
    /// The kernel does not end connections: said once.
    refused: bool,
}

impl Drainer {
    fn run(&mut self, orders: &mpsc::Receiver<Drain>) {
        loop {
            let order = if self.rows.is_empty() {
                orders.recv().map_err(Into::into)
            } else {
                orders.recv_timeout(AGAIN)
            };
            match order {
                Ok(order) => self.take(order),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
            while let Ok(order) = orders.try_recv() {
                self.take(order);
            }
            self.look();
        }
    }

    fn take(&mut self, order: Drain) {
        match order {
            Drain::Opened(row) => {
                self.rows.insert(row);
            }
            Drain::Refused(refused) => self.refuse(refused),
            Drain::Plan(plan) => self.shared.plan = plan,
        }
    }

    /// Ends a connection whose request has not left. Should that fail, the kernel lets the request pass, or
    /// refuses it again.
    fn refuse(&mut self, refused: Refused) {
        let (shared, cookie) = (&self.shared, refused.cookie);
        let is_wanted = |stamp: &Stamp| {
            refused.is_so(stamp, clock::now()) && shared.table.mode() == Mode::ENFORCE
        };
        let stamp = shared.connections.get(cookie).filter(is_wanted);
        let (Some(stamp), Some(row)) = (stamp, shared.row(refused.row)) else {
            return;
        };
        let pids = likely([(stamp.pid, row.last_pid)].into_iter());
        let target = target(cookie, &stamp);
        let fate = self.aborter.within(row.netns_inode, &pids, |diag| {
            // Just before the act: the same connection, and nothing has left after all.
            diag.abort_one(&target, |_| {
                shared
                    .connections
                    .get(cookie)
                    .is_some_and(|stamp| is_wanted(&stamp))
            })
        });
        match fate {
            Some(Fate::Refused(errno)) => self.complain(errno),
            Some(Fate::Unseen(error)) => {
                tracing::warn!("refuse_non_idempotent could not look: {error}");
            }
            Some(Fate::Aborted | Fate::Gone | Fate::Changed) | None => {}
        }
    }

    /// Says once that the kernel ends no connections.
    fn complain(&mut self, errno: impl std::fmt::Display) {
        if !std::mem::replace(&mut self.refused, true) {
            tracing::warn!(
                "on_open and refuse_non_idempotent cannot end connections: the kernel says {errno} (it \
                 needs CONFIG_INET_DIAG_DESTROY)"
            );
        }
    }

    /// Ends what is to be ended of all rows.
    fn look(&mut self) {
        let shared = &self.shared;
        if shared.table.mode() != Mode::ENFORCE {
            // Observe mode ends nothing, also not later. A pause may be over before the outage is.
            if shared.table.mode() == Mode::OBSERVE {
                self.rows.clear();
            }
            return;
        }
        let mut wanted: HashMap<RowId, (Row, OnOpen)> = HashMap::new();
        self.rows.retain(|&id| {
            let row = shared.row(id).filter(|row| row.live() > 0);
            let on_open = row.map(|row| shared.plan.on_open(row.settings.policy));
            let (Some(row), Some(on_open)) = (row, on_open) else {
                return false;
            };
            let is_open = shared.table.verdict(id.index).state == STATE_OPEN;
            if is_open && on_open != OnOpen::Keep {
                wanted.insert(id, (row, on_open));
            }
            is_open && on_open != OnOpen::Keep
        });
        if wanted.is_empty() {
            return;
        }
        let mut found: HashMap<RowId, Vec<(u64, Stamp)>> = HashMap::new();
        shared.connections.each_open(|cookie, stamp| {
            let id = row_of(stamp);
            if is_ours(stamp) && wanted.contains_key(&id) {
                found.entry(id).or_default().push((cookie, *stamp));
            }
        });
        for (id, connections) in found {
            let Some((row, on_open)) = wanted.get(&id) else {
                continue;
            };
            let ended = self.end(id, row, *on_open, &connections);
            if ended > 0 {
                let (row, on_open) = (id, *on_open);
                self.shared.commander.send(Command::Drained {
                    row,
                    on_open,
                    connections: ended,
                });
            }
        }
    }

    /// Ends connections of one row; how many.
    fn end(&mut self, id: RowId, row: &Row, on_open: OnOpen, connections: &[(u64, Stamp)]) -> u64 {
        let shared = &self.shared;
        let targets: Vec<_> = (connections.iter())
            .map(|(cookie, stamp)| target(*cookie, stamp))
            .collect();
        let pids = likely((connections.iter()).map(|(_, stamp)| (stamp.pid, row.last_pid)));
        let fates = self.aborter.within(row.netns_inode, &pids, |diag| {
            diag.abort(&targets, |look| {
                // Just before the act: the same connection, and the breaker still open.
                let stamp = shared.connections.get(look.cookie);
                let stamp = stamp.filter(|stamp| row_of(stamp) == id);
                stamp.is_some_and(|stamp| {
                    shared.table.mode() == Mode::ENFORCE
                        && shared.table.verdict(id.index).state == STATE_OPEN
                        && (on_open == OnOpen::Abort || is_idle(&stamp, look))
                })
            })
        });
        let mut ended = 0;
        for fate in fates.into_iter().flatten() {
            match fate {
                Fate::Aborted => ended += 1,
                Fate::Gone | Fate::Changed => {}
                Fate::Refused(errno) => self.complain(errno),
                Fate::Unseen(error) => tracing::warn!("on_open could not look: {error}"),
            }
        }
        ended
    }
}

/// Whether nothing is under way: no answer owed, nothing unread, unsent or not acknowledged, and no data
/// for a while.
fn is_idle(stamp: &Stamp, look: &Look) -> bool {
    let silent = look.tcp.is_some_and(|tcp| {
        tcp.last_data_sent_ms >= SILENT_MS && tcp.last_data_recv_ms >= SILENT_MS
    });
    stamp.owed().is_none() && !look.has_unread() && look.send_queue == 0 && silent
}

#[cfg(test)]
mod tests {
    use agent_common::stamp::{PHASE_OPEN, pack_request};
    use bytemuck::Zeroable as _;

    use super::*;

    const ORDER: Refused = Refused {
        row: RowId {
            index: 3,
            incarnation: 1,
        },
        cookie: 7,
        number: 2,
        is_under_way: false,
        at: Nanos::from_secs(100),
    };

    /// What the kernel has when it drops the third request, an answered one behind it.
    fn refused() -> Stamp {
        Stamp {
            row: 3,
            incarnation: 1,
            request: pack_request(2, 1),
            answers: 2,
            ..Stamp::zeroed()
        }
    }

    #[test]
    fn a_request_that_has_left_since_is_not_ended() {
        assert!(ORDER.is_so(&refused(), ORDER.at));
        let mut left = refused();
        left.request = pack_request(3, 1);
        assert!(!ORDER.is_so(&left, ORDER.at));
        // Nor when it was answered.
        left.answers = 3;
        assert!(!ORDER.is_so(&left, ORDER.at));
        let mut other = refused();
        other.incarnation = 2;
        assert!(!ORDER.is_so(&other, ORDER.at));
    }

    #[test]
    fn a_request_whose_end_has_left_since_is_not_ended() {
        let order = Refused {
            number: 3,
            is_under_way: true,
            ..ORDER
        };
        let held_back = Stamp {
            phase: PHASE_OPEN,
            request: pack_request(3, 1),
            protocol: PROTOCOL_HTTP1,
            tls_stage: COMPARED | REFUSED,
            ..refused()
        };
        assert!(order.is_so(&held_back, order.at));
        // It has left; it was answered before; another one is under way.
        let left = Stamp {
            tls_stage: COMPARED,
            ..held_back
        };
        assert!(!order.is_so(&left, order.at));
        let answered = Stamp {
            answers: 3,
            ..held_back
        };
        assert!(!order.is_so(&answered, order.at));
        let next = Stamp {
            request: pack_request(4, 1),
            ..held_back
        };
        assert!(!order.is_so(&next, order.at));
    }

    #[test]
    fn an_order_that_has_waited_is_void() {
        let late = |ms| ORDER.is_so(&refused(), ORDER.at + Nanos::from_millis(ms));
        assert!(late(1_999));
        assert!(!late(2_000));
    }
}
