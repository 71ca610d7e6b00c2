//! When the file is written, and the thread that waits for the disk.

use std::{path::PathBuf, sync::mpsc, time::Duration};

use agent_common::{Row as KernelRow, window::decode};
use anyhow::{Context as _, Result};
use tokio::sync::oneshot;

use super::file::{self, Calls, Document, Kept, MOST_BREAKERS, Manual, Name};
use crate::{
    core::{Nanos, RowId, Saved, WindowKind},
    daemon::{memory, node::Node, reactor::Command},
    kernel::{Table, clock},
    policy::Destination,
};

/// After a change of state, or a manual one, so soon; what changes meanwhile is written with it.
const SOON: Nanos = Nanos::from_secs(1);
/// While there is something to be kept, so often.
const EVERY: Nanos = Nanos::from_secs(5);
/// While there are but names that programs were told, so often, if they have heard of any since.
const NAMES_EVERY: Nanos = Nanos::from_secs(60);
/// What it took to write so many breakers down is given back to the system at once.
const LARGE: usize = 512;
/// A stop waits no longer for the disk.
const PATIENCE: Duration = Duration::from_secs(5);

/// Decides when the file is written, and has it written.
pub struct Keeper {
    documents: Option<mpsc::Sender<Document>>,
    ended: mpsc::Receiver<()>,
    last: Nanos,
    /// A breaker or a manual state has changed since.
    changed: bool,
    /// There is, or may be, something that goes into the file, or is in it and must come out. Names that
    /// programs were told apart,
    holds: bool,
    /// of which something was heard since.
    heard: bool,
}

impl Keeper {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives none.
    pub fn start(path: PathBuf) -> Result<Self> {
        let (documents, orders) = mpsc::channel::<Document>();
        let (end, ended) = mpsc::channel();
        std::thread::Builder::new()
            .name("backstop-state".into())
            .spawn(move || {
                run(&path, &orders);
                // Nobody may be waiting.
                let _ = end.send(());
            })
            .context("start the thread that writes the state down")?;
        Ok(Self {
            documents: Some(documents),
            ended,
            last: clock::now(),
            changed: false,
            // The file may hold what is over by now.
            holds: true,
            heard: false,
        })
    }

    /// A state changed.
    pub fn changed(&mut self) {
        self.changed = true;
    }

    /// A call failed: there is a window to be kept.
    pub fn failed(&mut self) {
        self.holds = true;
    }

    /// A program was told something about a name.
    pub fn heard(&mut self) {
        self.heard = true;
    }

    fn is_due(&self, now: Nanos) -> bool {
        let age = now - self.last;
        (self.changed && age >= SOON)
            || (self.holds && age >= EVERY)
            || (self.heard && age >= NAMES_EVERY)
    }

    fn write(&mut self, document: Document, now: Nanos) {
        self.last = now;
        self.changed = false;
        self.heard = false;
        self.holds = !document.breakers.is_empty() || !document.manual.is_empty();
        if let Some(documents) = &self.documents {
            // A thread that has ended has said why.
            let _ = documents.send(document);
        }
    }

    /// Waits until everything is on the disk, for a while.
    fn finish(&mut self) {
        self.documents = None;
        if self.ended.recv_timeout(PATIENCE).is_err() {
            tracing::warn!("the disk does not answer: the last changes of state may be forgotten");
        }
    }
}

fn run(path: &std::path::Path, orders: &mpsc::Receiver<Document>) {
    let mut failing = false;
    while let Ok(mut document) = orders.recv() {
        // Only the latest counts.
        while let Ok(later) = orders.try_recv() {
            document = later;
        }
        let written = file::write(path, &document);
        let is_large = document.breakers.len() > LARGE;
        drop(document);
        if is_large {
            memory::give_back();
        }
        match written {
            Ok(()) => failing = false,
            Err(error) if !failing => {
                failing = true;
                tracing::warn!("{error:#}; a restart would forget what changes from here on");
            }
            Err(_) => {}
        }
    }
}

impl Node {
    /// Has the state written down when it is time.
    pub(in crate::daemon) async fn keep(&mut self) {
        let now = clock::now();
        if !self.keeper.is_due(now) {
            return;
        }
        // Without an event thread the agent ends anyway.
        if let Some(document) = self.state().await {
            self.keeper.write(document, now);
        }
    }

    /// The state as it is now; `None` when the event thread has ended.
    pub(in crate::daemon) async fn state(&mut self) -> Option<Document> {
        let (reply, answer) = oneshot::channel();
        self.commander.send(Command::Save(MOST_BREAKERS, reply));
        let saved = answer.await.ok()?;
        Some(self.document(saved, clock::now()))
    }

    /// Writes the state down for the last time. The event thread must still run.
    pub(in crate::daemon) fn keep_at_last(&mut self) {
        let (reply, mut answer) = oneshot::channel();
        self.commander.send(Command::Save(MOST_BREAKERS, reply));
        // Commands are handled in order, and the thread is joined before this is called again.
        self.reactor.stop();
        if let Ok(saved) = answer.try_recv() {
            let now = clock::now();
            let document = self.document(saved, now);
            self.keeper.write(document, now);
        }
        self.keeper.finish();
    }

    fn document(&mut self, saved: Vec<(RowId, Saved)>, now: Nanos) -> Document {
        let mut document = Document::new(now);
        for (id, saved) in saved {
            let Some(row) = self.table.owned(id).filter(|row| row.created_ns != 0) else {
                continue;
            };
            let age = self.plan.breaker(row.settings.policy).window_age;
            document.breakers.push(Kept {
                destination: Destination::from_key(&row.key).to_string(),
                workload: self.names.name(row.key.cgroup_id, row.last_pid),
                netns: row.netns_inode,
                netns_cookie: row.key.netns_cookie,
                pid: row.last_pid,
                calls: [WindowKind::Connects, WindowKind::Exchanges]
                    .map(|kind| calls(&self.table, id, &row, kind, now - age, now)),
                breaker: (&saved).into(),
            });
        }
        let orders = self.orders.all().filter(|order| order.until > now);
        document.manual = orders
            .map(|order| Manual {
                destination: order.destination.to_string(),
                workload: order.workload.clone(),
                trip: order.trip,
                since: order.since,
                until: order.ends,
                by: order.by.to_string(),
            })
            .collect();
        let told = self.naming.hosts.told();
        document.names = told.iter().map(Name::from).collect();
        document
    }
}

/// The last calls of a window that are not older than `oldest`.
fn calls(
    table: &Table,
    id: RowId,
    row: &KernelRow,
    kind: WindowKind,
    oldest: Nanos,
    now: Nanos,
) -> Calls {
    let last = match kind {
        WindowKind::Exchanges => row.exchange_calls,
        WindowKind::Connects | WindowKind::None => row.connect_calls,
    };
    let held = u64::from(table.window_calls());
    let first = last.saturating_sub(held - 1).max(1);
    let entry = |seq| table.window_entry(id.index, kind, seq).unwrap_or(0);
    let is_young =
        |seq: &u64| decode(entry(*seq), *seq, now.0).is_some_and(|call| call.at_ns >= oldest.0);
    let entries = match (first..=last).find(is_young) {
        Some(first) => (first..=last).map(entry).collect(),
        None => Vec::new(),
    };
    Calls { last, entries }
}
