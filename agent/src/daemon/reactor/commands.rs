//! What the select loop asks of the event thread, and how it is done.

use std::{
    os::fd::OwnedFd,
    sync::{Arc, mpsc as std_mpsc},
};

use agent_common::Event as KernelEvent;
use tokio::sync::oneshot;

use super::{Notice, Worker};
use crate::{
    core::{DialTarget, Endpoint, Event, Nanos, RowId, Saved},
    daemon::{plan::Plan, view::Views},
    kernel::clock,
    policy::OnOpen,
};

/// What the select loop asks of the event thread.
pub enum Command {
    /// A new configuration; rows have their new settings already.
    Plan(Arc<Plan>),
    /// A row has got other settings.
    Reconfigure(RowId),
    /// Each of these rows is one of the endpoints of these names, and of no others.
    Groups(Vec<Endpoint>),
    /// An operator's order for each of these rows.
    Manual(Vec<(RowId, Order)>),
    /// Every breaker in memory; all others are closed.
    Views(oneshot::Sender<Views>),
    /// What of at most so many breakers outlives the agent.
    Save(usize, oneshot::Sender<Vec<(RowId, Saved)>>),
    /// Rows that have just been made have these breakers; answers with the number of those that are
    /// not closed, once all are in force.
    Restore(Vec<(RowId, Saved)>, oneshot::Sender<usize>),
    /// Give up at most so many of these rows, those that may be; answers with those that were.
    Forget(Vec<RowId>, usize, oneshot::Sender<Vec<RowId>>),
    /// The agent itself has found that a call failed.
    Found(KernelEvent),
    /// Connections of an open breaker were ended.
    Drained {
        /// The row.
        row: RowId,
        /// What its policy says.
        on_open: OnOpen,
        /// How many.
        connections: u64,
    },
    /// A redial ended.
    DialEnded(DialTarget, bool),
    /// Destinations with traffic in the last minute.
    Traffic(usize),
    /// Say so ([`Notice::CaughtUp`]) once everything that the kernel has told so far has been handled.
    CatchUp,
    /// End the thread.
    Stop,
}

/// An operator's order, and who gave it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    /// Refuse until then.
    Trip(Nanos, Arc<str>),
    /// Let pass until then.
    HoldClosed(Nanos, Arc<str>),
    /// No order is in force any more.
    Lift(Ended),
    /// Start anew; by nobody where the address belongs to another name now.
    Reset(Option<Arc<str>>),
}

/// Why an order is in force no longer, other than that it was taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its time is over.
    TimeOver,
    /// The row's address is not one of its name any more.
    NotCovered,
}

/// Sends commands to the event thread.
#[derive(Clone)]
pub struct Commander {
    pub(super) commands: std_mpsc::Sender<Command>,
    pub(super) wake: Arc<OwnedFd>,
}

impl Commander {
    /// Sends; nothing happens once the thread has ended.
    pub fn send(&self, command: Command) {
        if self.commands.send(command).is_ok() {
            let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        }
    }
}

impl Worker {
    /// Handles waiting commands; true when the thread is to end.
    pub(super) fn commands(&mut self) -> bool {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Plan(plan) => {
                    self.plan = plan;
                    let rows: Vec<RowId> = self.engine.rows().collect();
                    for row in rows {
                        self.reconfigure(row);
                    }
                    self.know_those_that_share();
                }
                Command::Reconfigure(row) => {
                    if self.engine.contains(row) {
                        self.reconfigure(row);
                    } else if self.shares(row) {
                        self.known(row);
                    }
                }
                Command::Groups(endpoints) => {
                    let endpoints = &endpoints;
                    self.handle(Event::Groups { endpoints });
                }
                Command::Manual(orders) => {
                    for (row, order) in orders {
                        self.order(row, order);
                    }
                }
                Command::Views(reply) => {
                    let now = clock::now();
                    let views = self
                        .engine
                        .rows()
                        .filter_map(|row| Some((row, self.engine.view(row, now)?)))
                        .collect();
                    let _ = reply.send(views);
                }
                Command::Save(most, reply) => {
                    let _ = reply.send(self.engine.save_all(most));
                }
                Command::Restore(breakers, reply) => {
                    let restored = breakers
                        .iter()
                        .filter(|(id, saved)| self.restore(*id, saved));
                    let _ = reply.send(restored.count());
                }
                Command::Forget(mut rows, most, reply) => {
                    rows.retain(|row| self.engine.evictable(*row));
                    rows.truncate(most);
                    for row in &rows {
                        self.handle(Event::Forget { row: *row });
                        self.given_way.remove(row);
                    }
                    let _ = reply.send(rows);
                }
                Command::Found(event) => self.event(&event),
                Command::Drained {
                    row,
                    on_open,
                    connections,
                } => self.notify(Notice::Drained(row, on_open, connections)),
                Command::DialEnded(target, success) => {
                    if let Some(row) = self.limited.remove(&target)
                        && success
                    {
                        self.table.count_dialled(row);
                    }
                    self.handle(Event::DialEnded { target, success });
                }
                Command::Traffic(destinations) => {
                    let now = clock::now();
                    self.engine.traffic(destinations, now, &mut self.actions);
                    self.perform(None);
                }
                Command::CatchUp => self.catches_up = true,
                Command::Stop => return true,
            }
        }
        false
    }

    fn order(&mut self, row: RowId, order: Order) {
        if !self.known(row) {
            return;
        }
        self.acting = Some((row, order.clone()));
        let last_seqs = self.table.last_seqs(row.index);
        match order {
            Order::Trip(until, _) => self.force(row, true, until),
            Order::HoldClosed(until, _) => self.force(row, false, until),
            Order::Lift(_) => self.handle(Event::Lift { row, last_seqs }),
            Order::Reset(_) => self.handle(Event::Reset { row, last_seqs }),
        }
        self.acting = None;
    }

    pub(super) fn force(&mut self, row: RowId, trip: bool, until: Nanos) {
        let last_seqs = self.table.last_seqs(row.index);
        self.handle(if trip {
            Event::Trip {
                row,
                until,
                last_seqs,
            }
        } else {
            Event::HoldClosed {
                row,
                until,
                last_seqs,
            }
        });
    }
}
