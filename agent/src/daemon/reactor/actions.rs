//! Carrying out what the core decides: verdicts, notices and why, dials.

use std::{sync::Arc, time::Duration};

use super::{
    Notice, Worker,
    commands::{Ended, Order},
};
use crate::{
    control::api::Cause,
    core::{Action, DialTarget, RowId, State},
    daemon::{dialer::Dial, waiting::drain::Drain},
    kernel::clock,
    policy::OnOpen,
};

/// Dials at a time for rows on which the limit on retries is in force.
const LIMITED_MOST: usize = 200;

impl Worker {
    /// Carries out what the core decided. `since` is the kernel's time of the event behind it.
    pub(super) fn perform(&mut self, since: Option<u64>) {
        let mut actions = std::mem::take(&mut self.actions);
        // Before any verdict is in force: nothing comes of one that seems to be from before.
        let at = clock::now();
        for action in actions.drain(..) {
            match action {
                Action::SetVerdict {
                    row,
                    verdict,
                    until,
                    probe_limit,
                } => {
                    self.table.set_verdict(row, verdict, until, probe_limit);
                    if let Some(since) = since {
                        let took = clock::now().0.saturating_sub(since);
                        self.reaction.observe(Duration::from_nanos(took));
                    }
                }
                Action::Transition {
                    row,
                    from,
                    to,
                    reason,
                    generation,
                } => {
                    if to == State::Open {
                        self.opened(row);
                    }
                    let Some(from) = self.told_from(row, from, to) else {
                        continue;
                    };
                    self.notify(Notice::Transition {
                        row,
                        from,
                        to,
                        reason,
                        generation,
                        at,
                        cause: self.cause(row, from, to),
                    });
                }
                Action::Bypassed { row, reason, group } => {
                    self.notify(Notice::Bypassed(row, reason, group));
                }
                Action::Correlated(change) => {
                    let within = self.engine.correlated_within();
                    self.notify(Notice::Correlated(change, within));
                }
                Action::Redialled { row, answered } => {
                    self.notify(Notice::Redialled { row, answered, at });
                }
                Action::Dial { target } => self.dial(target),
            }
        }
        self.actions = actions;
    }

    /// What an operator has to do with a change of state. A reset may close others, too, that share the
    /// breaker.
    fn cause(&self, row: RowId, from: State, to: State) -> Option<(Cause, Option<Arc<str>>)> {
        let acting = self.acting.as_ref();
        let order = acting.filter(|(id, order)| *id == row || matches!(order, Order::Reset(_)));
        let was_forced = matches!(from, State::ForcedOpen | State::ForcedClosed);
        match (order.map(|(_, order)| order), to) {
            (Some(Order::Trip(_, by)), State::ForcedOpen) => {
                Some((Cause::Trip, Some(Arc::clone(by))))
            }
            (Some(Order::HoldClosed(_, by)), State::ForcedClosed) => {
                Some((Cause::HoldClosed, Some(Arc::clone(by))))
            }
            (Some(Order::Reset(Some(by))), State::Closed) => {
                Some((Cause::Reset, Some(Arc::clone(by))))
            }
            (Some(Order::Reset(None)), State::Closed) => Some((Cause::NewOwner, None)),
            (Some(Order::Lift(Ended::NotCovered)), State::Closed) => {
                Some((Cause::NotCovered, None))
            }
            (_, State::Closed) if was_forced => Some((Cause::TimeOver, None)),
            _ => None,
        }
    }

    /// From which state a row has come, as far as people were told; `None`: there is nothing to tell. A
    /// half-open row that leaves the probe to another one, with which it shares a breaker, has not failed
    /// and is still half-open.
    fn told_from(&mut self, row: RowId, from: State, to: State) -> Option<State> {
        if (from, to) == (State::HalfOpen, State::Open) {
            let view = self.engine.view(row, clock::now());
            if view.is_some_and(|view| view.shared_probe.is_some()) {
                self.given_way.insert(row);
                return None;
            }
        }
        if self.given_way.remove(&row) && from == State::Open {
            return (to != State::HalfOpen).then_some(State::HalfOpen);
        }
        Some(from)
    }

    /// Has connections ended where the policy says so.
    fn opened(&self, id: RowId) {
        let policy = self.table.owned(id).map(|row| row.settings.policy);
        if policy.is_some_and(|policy| self.plan.on_open(policy) != OnOpen::Keep) {
            // A thread that is gone is noticed by whoever runs the loop.
            let _ = self.drains.send(Drain::Opened(id));
        }
    }

    fn dial(&mut self, target: DialTarget) {
        let row = self
            .engine
            .row_waiting_for(target)
            .and_then(|id| self.table.owned(id));
        let dial = row.map(|row| Dial {
            target,
            netns_inode: row.netns_inode,
            pid: row.last_pid,
            timeout_ms: row.settings.connect_timeout_ms,
        });
        // A dialer that is gone, or a row that is gone: the engine writes the dial off.
        if let Some(dial) = dial {
            let _ = self.dialer.send(dial);
        }
    }

    /// The limit on retries is in force on a row: whether the destination answers again, nobody else
    /// may find out.
    pub(super) fn ask_for(&mut self, id: RowId) {
        let Some(row) = self.table.owned(id) else {
            return;
        };
        let target = DialTarget::from(&row.key);
        if !self.plan.breaker(row.settings.policy).redial
            || self.limited.len() >= LIMITED_MOST
            || self.limited.contains_key(&target)
        {
            return;
        }
        let dial = Dial {
            target,
            netns_inode: row.netns_inode,
            pid: row.last_pid,
            timeout_ms: row.settings.connect_timeout_ms,
        };
        if self.dialer.send(dial).is_ok() {
            self.limited.insert(target, id);
        }
    }
}
