//! When the file is written, and the thread that waits for the disk.

use std::{
    path::{Path, PathBuf},
    sync::mpsc,
    time::Duration,
};

use agent_common::{Row as KernelRow, window::decode};
use anyhow::{Context as _, Result};
use tokio::sync::oneshot;

use super::file::{self, Calls, Document, Kept, MOST_BREAKERS, Manual, Name, TOO_OLD};
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
/// Names that programs were told, so often where they have heard of any since; sooner only with a change of
/// state, because there can be megabytes of them.
const NAMES_EVERY: Nanos = Nanos::from_secs(60);
/// And so often without: their age says how long no agent has listened (half of [`TOO_OLD`]).
const NAMES_AGAIN: Nanos = Nanos(TOO_OLD.0 / 2);
/// What it took to write so many breakers or names down is given back to the system at once.
const LARGE: usize = 512;
/// A stop waits no longer for the disk.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is written at once, each into a file of its own.
#[derive(Default)]
struct Files {
    state: Option<Document>,
    names: Option<Document>,
}

/// Decides when the files are written, and has them written.
pub struct Keeper {
    files: Option<mpsc::Sender<Files>>,
    ended: mpsc::Receiver<()>,
    last: Nanos,
    /// A breaker or a manual state has changed since.
    changed: bool,
    /// There is, or may be, something that goes into the state's file, or is in it and must come out.
    holds: bool,
    last_names: Nanos,
    /// A program was told a name since then,
    heard: bool,
    /// or ever.
    has_names: bool,
}

impl Keeper {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives none.
    pub fn start(state_dir: PathBuf) -> Result<Self> {
        let (files, orders) = mpsc::channel::<Files>();
        let (end, ended) = mpsc::channel();
        std::thread::Builder::new()
            .name("backstop-state".into())
            .spawn(move || {
                run(&state_dir, &orders);
                // Nobody may be waiting.
                let _ = end.send(());
            })
            .context("start the thread that writes the state down")?;
        Ok(Self {
            files: Some(files),
            ended,
            last: clock::now(),
            changed: false,
            // The files may hold what is over by now.
            holds: true,
            last_names: clock::now(),
            heard: false,
            has_names: true,
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

    fn has_changed(&self, now: Nanos) -> bool {
        self.changed && now - self.last >= SOON
    }

    fn is_state_due(&self, now: Nanos) -> bool {
        self.has_changed(now) || (self.holds && now - self.last >= EVERY)
    }

    fn are_names_due(&self, now: Nanos) -> bool {
        let age = now - self.last_names;
        (self.heard && (self.has_changed(now) || age >= NAMES_EVERY))
            || (self.has_names && age >= NAMES_AGAIN)
    }

    fn write(&mut self, files: Files, now: Nanos) {
        if let Some(state) = &files.state {
            self.last = now;
            self.changed = false;
            self.holds = !state.breakers.is_empty() || !state.manual.is_empty();
        }
        if let Some(names) = &files.names {
            self.last_names = now;
            self.heard = false;
            self.has_names = !names.names.is_empty();
        }
        if let Some(queue) = &self.files {
            // A thread that has ended has said why.
            let _ = queue.send(files);
        }
    }

    /// Waits until everything is on the disk, for a while.
    fn finish(&mut self) {
        self.files = None;
        if self.ended.recv_timeout(PATIENCE).is_err() {
            tracing::warn!("the disk does not answer: the last changes of state may be forgotten");
        }
    }
}

fn run(state_dir: &Path, orders: &mpsc::Receiver<Files>) {
    let mut failing = false;
    while let Ok(mut files) = orders.recv() {
        // Only the latest of each counts.
        while let Ok(later) = orders.try_recv() {
            files.state = later.state.or(files.state);
            files.names = later.names.or(files.names);
        }
        let write = |path, document: &Option<Document>| {
            let document = document.as_ref();
            document.map_or(Ok(()), |document| file::write(path, document))
        };
        let written = write(&file::path(state_dir), &files.state)
            .and(write(&file::names_path(state_dir), &files.names));
        let has_many = |of: &Document| of.breakers.len() > LARGE || of.names.len() > LARGE;
        let is_large = [&files.state, &files.names]
            .into_iter()
            .flatten()
            .any(has_many);
        drop(files);
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
        let mut files = Files::default();
        if self.keeper.is_state_due(now) {
            // Without an event thread the agent ends anyway.
            files.state = self.saved().await.map(|saved| self.document(saved, now));
        }
        if self.keeper.are_names_due(now) {
            files.names = Some(self.told(now));
        }
        if files.state.is_some() || files.names.is_some() {
            self.keeper.write(files, now);
        }
    }

    /// The state as it is now, names and all; `None` when the event thread has ended.
    pub(in crate::daemon) async fn state(&mut self) -> Option<Document> {
        let saved = self.saved().await?;
        let now = clock::now();
        let mut document = self.document(saved, now);
        document.names = self.told(now).names;
        Some(document)
    }

    async fn saved(&self) -> Option<Vec<(RowId, Saved)>> {
        let (reply, answer) = oneshot::channel();
        self.commander.send(Command::Save(MOST_BREAKERS, reply));
        answer.await.ok()
    }

    /// Names that programs were told, and nothing else.
    fn told(&self, now: Nanos) -> Document {
        let mut document = Document::new(now);
        let told = self.naming.hosts.told();
        document.names = told.iter().map(Name::from).collect();
        document
    }

    /// Writes the state down for the last time. The event thread must still run.
    pub(in crate::daemon) fn keep_at_last(&mut self) {
        let (reply, mut answer) = oneshot::channel();
        self.commander.send(Command::Save(MOST_BREAKERS, reply));
        // Commands are handled in order, and the thread is joined before this is called again.
        self.reactor.stop();
        if let Ok(saved) = answer.try_recv() {
            let now = clock::now();
            let files = Files {
                state: Some(self.document(saved, now)),
                names: Some(self.told(now)),
            };
            self.keeper.write(files, now);
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
