//! The loaded programs: where they are attached, and the maps that need system calls.

mod attach;
mod load;

use std::{
    fs::File,
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use agent_common::{
    DestinationKey, PolicyKey, RetrySettings, Row, Settings, Statuses, Verdict, key::ManualKey,
};
use anyhow::{Context as _, Result};
use aya::{
    Ebpf,
    maps::{HashMap, LpmTrie, MapData, Queue, RingBuf, lpm_trie::Key},
    programs::{Iter, Program, iter::IterLink},
};

use rustix::fs::{FlockOperation, flock};

use super::{connections::Connections, lent::LentOptions, sockopt::SockoptHooks, table::Table};
use crate::core::{Nanos, RowId};
use attach::{Links, attach_all, detach_all, own_programs};

pub use attach::{HOOKS, OwnProgram};
pub use load::LoadOptions;

/// An insertion: only if it is not there (include/uapi/linux/bpf.h).
const BPF_NOEXIST: u64 = 1;

/// One attached cgroup.
pub struct Attachment {
    /// Canonical path.
    pub path: PathBuf,
    /// Cgroup id (inode) at the time of attaching: another one at this path later means that the
    /// cgroup was recreated and has lost its programs.
    pub id: u64,
    links: Links,
    /// The directory.
    dir: File,
    /// By this agent.
    is_locked: bool,
}

/// The loaded programs and their maps. Dropping it detaches everything.
pub struct Kernel {
    ebpf: Ebpf,
    table: Arc<Table>,
    connections: Arc<Connections>,
    keys: HashMap<MapData, [u8; 40], u32>,
    free_rows: Queue<MapData, u32>,
    free_histograms: Queue<MapData, u32>,
    answers: Option<RingBuf<MapData>>,
    policy_trie: LpmTrie<MapData, [u8; 24], u32>,
    manual: HashMap<MapData, [u8; 24], [u64; 2]>,
    attachments: Vec<Attachment>,
    watched: HashMap<MapData, u64, u32>,
    lent: Arc<LentOptions>,
    sockopt: SockoptHooks,
    can_settle: bool,
    can_adopt: bool,
}

/// A program that is about to visit every TCP socket of a network namespace.
pub struct Visit(IterLink);

impl Visit {
    /// Visits those of the calling thread's namespace. Waits for the lock of each.
    ///
    /// # Errors
    /// When the kernel refuses the iterator.
    pub fn run(self) -> Result<()> {
        let mut file = self.0.into_file().context("open iter/tcp")?;
        std::io::copy(&mut file.by_ref(), &mut std::io::sink()).context("run iter/tcp")?;
        Ok(())
    }
}

impl Kernel {
    /// The mapped arrays.
    pub fn table(&self) -> Arc<Table> {
        Arc::clone(&self.table)
    }

    /// The ring of DNS answers ([`agent_common::HeardAnswer`]), for the thread that reads it; `None` when it
    /// was taken before.
    pub fn take_answers(&mut self) -> Option<RingBuf<MapData>> {
        self.answers.take()
    }

    /// The connections that are followed.
    pub fn connections(&self) -> Arc<Connections> {
        Arc::clone(&self.connections)
    }

    /// The options that we have set on programs' sockets.
    pub fn lent(&self) -> Arc<LentOptions> {
        Arc::clone(&self.lent)
    }

    /// Says whether options of programs' sockets are (about to be) ours: only then the hooks are
    /// attached by which programs are told their own values. They are an extra: where the kernel has
    /// them not, programs read ours.
    pub fn set_options_lent(&mut self, is_so: bool) {
        let paths = self.attachments.iter().map(|a| a.path.as_path());
        if let Err(error) = self.sockopt.want(&mut self.ebpf, is_so, paths) {
            tracing::warn!("{error:#}; programs that ask for SO_RCVTIMEO are told our value");
        }
    }

    /// Attaches all hooks to a cgroup; on failure nothing stays attached there.
    ///
    /// # Errors
    /// When the directory cannot be opened or the kernel refuses.
    pub fn attach(&mut self, path: &Path) -> Result<()> {
        let dir = File::open(path).with_context(|| format!("open cgroup {}", path.display()))?;
        let id = dir
            .metadata()
            .with_context(|| format!("stat cgroup {}", path.display()))?
            .ino();
        let links = attach_all(&mut self.ebpf, &dir)
            .with_context(|| format!("attach to cgroup {}", path.display()))?;
        self.attachments.push(Attachment {
            path: path.to_owned(),
            id,
            links,
            dir,
            is_locked: false,
        });
        if self.sockopt.is_wanted()
            && let Err(error) = self.sockopt.attach(&mut self.ebpf, path)
        {
            tracing::warn!("{error:#}; programs that ask for SO_RCVTIMEO are told our value");
        }
        Ok(())
    }

    /// Locks the directories of attached control groups: whoever looks who is attached there finds this
    /// process by the lock. It ends with the attachment.
    pub fn claim(&mut self) {
        for attachment in self.attachments.iter_mut().filter(|of| !of.is_locked) {
            // Another agent's already, or not to be had: then nobody can tell.
            let locked = flock(&attachment.dir, FlockOperation::NonBlockingLockExclusive);
            attachment.is_locked = locked.is_ok();
        }
    }

    /// What is attached.
    pub fn attachments(&self) -> &[Attachment] {
        &self.attachments
    }

    /// What hangs on each of them, by hook.
    pub fn own_programs(&self) -> Vec<OwnProgram> {
        own_programs(&self.ebpf)
    }

    /// Detaches one cgroup (for one that has vanished, the kernel has done so already).
    pub fn detach(&mut self, path: &Path) {
        self.sockopt.detach(&mut self.ebpf, path);
        while let Some(at) = self.attachments.iter().position(|a| a.path == path) {
            let Attachment { links, .. } = self.attachments.swap_remove(at);
            detach_all(&mut self.ebpf, links);
        }
    }

    /// Whether [`Kernel::settlement`] can work here.
    pub fn can_settle(&self) -> bool {
        self.can_settle
    }

    /// Prepares a visit that gives TCP_USER_TIMEOUT back on every pending connect of one network
    /// namespace.
    ///
    /// # Errors
    /// When the kernel refuses the iterator.
    pub fn settlement(&mut self) -> Result<Visit> {
        self.visit("settle")
    }

    /// Whether [`Kernel::adoption`] can work here.
    pub fn can_adopt(&self) -> bool {
        self.can_adopt
    }

    /// Says which control groups' connections are adopted (id, and a process in it); none: no more.
    ///
    /// # Errors
    /// When there are more than the map holds (65,536).
    pub fn set_watched(&mut self, groups: &[(u64, u32)]) -> Result<()> {
        let before: Vec<u64> = self.watched.keys().filter_map(Result::ok).collect();
        for id in before {
            // Not there: as wanted.
            let _ = self.watched.remove(&id);
        }
        for (id, pid) in groups {
            self.watched
                .insert(id, pid, 0)
                .context("note a control group whose connections are adopted")?;
        }
        Ok(())
    }

    /// Prepares a visit that follows the connections that exist in one network namespace and belong
    /// to watched control groups.
    ///
    /// # Errors
    /// When the kernel refuses the iterator.
    pub fn adoption(&mut self) -> Result<Visit> {
        self.visit("adopt")
    }

    fn visit(&mut self, name: &str) -> Result<Visit> {
        let visitor = program::<Iter>(&mut self.ebpf, name)?;
        let link = visitor.attach().context("attach iter/tcp")?;
        Ok(Visit(visitor.take_link(link)?))
    }

    /// The index of the row that a key leads to.
    pub fn row_of(&self, key: &DestinationKey) -> Option<u32> {
        self.keys.get(bytemuck::cast_ref(key), 0).ok()
    }

    /// Makes a row, as the connect hook does for a new key; `None` where no row is free or the key has
    /// one. Histogram and incarnation are given here.
    pub fn make_row(&mut self, row: Row) -> Option<RowId> {
        let index = self.free_rows.pop(0).ok()?;
        let slot = self.free_histograms.pop(0).ok();
        let incarnation = self.table.row(index).map_or(0, |row| row.incarnation);
        let made = Row {
            histogram: slot.map_or(0, |slot| slot + 1),
            incarnation,
            ..row
        };
        self.table.make(index, made);
        if self
            .keys
            .insert(
                bytemuck::cast_ref::<_, [u8; 40]>(&row.key),
                index,
                BPF_NOEXIST,
            )
            .is_ok()
        {
            self.table.count_created();
            return Some(RowId { index, incarnation });
        }
        // Neither list can be full: both have just given one.
        if let Some(slot) = slot {
            let _ = self.free_histogram(slot);
        }
        let _ = self.free_row(index);
        None
    }

    /// Makes a key lead nowhere; its row lives on for those who have found it already.
    pub fn forget_key(&mut self, key: &DestinationKey) {
        // Not there: as wanted.
        let _ = self.keys.remove(bytemuck::cast_ref(key));
    }

    /// Makes a key lead to its row again; false: it has got another one meanwhile.
    pub fn remember_key(&mut self, key: &DestinationKey, index: u32) -> bool {
        let key: &[u8; 40] = bytemuck::cast_ref(key);
        self.keys.insert(key, index, BPF_NOEXIST).is_ok()
    }

    /// Returns a row to the kernel's list of free ones, emptied.
    ///
    /// # Errors
    /// When the list is full, which cannot be unless a row is returned twice.
    pub fn free_row(&mut self, index: u32) -> Result<()> {
        self.table.clear(index);
        self.free_rows
            .push(index, 0)
            .with_context(|| format!("return row {index}"))
    }

    /// Returns a histogram to the kernel's list of free ones, emptied.
    ///
    /// # Errors
    /// As [`Kernel::free_row`].
    pub fn free_histogram(&mut self, slot: u32) -> Result<()> {
        self.table.clear_histogram(slot);
        self.free_histograms
            .push(slot, 0)
            .with_context(|| format!("return histogram {slot}"))
    }

    /// Replaces the policies that the kernel applies to rows it creates. Rows created meanwhile
    /// may get the old ones: the agent resolves every new row again.
    ///
    /// # Errors
    /// When there are more entries than the maps hold.
    pub fn set_policies(
        &mut self,
        settings: &[Settings],
        retries: &[RetrySettings],
        statuses: &[Statuses],
        entries: &[(PolicyKey, u32, u32)],
    ) -> Result<()> {
        // Before the settings that send the kernel there.
        for (index, statuses) in (0..).zip(statuses) {
            self.table.set_statuses(index, *statuses);
        }
        for (index, settings) in (0..).zip(settings) {
            self.table.set_policy(index, *settings);
        }
        for (index, settings) in (0..).zip(retries) {
            self.table.set_retry_policy(index, *settings);
        }
        let wanted: std::collections::HashMap<(u32, [u8; 24]), u32> = entries
            .iter()
            .map(|(key, prefix, policy)| ((*prefix, bytemuck::cast(*key)), *policy))
            .collect();
        let present: Vec<Key<[u8; 24]>> = self
            .policy_trie
            .keys()
            .collect::<Result<_, _>>()
            .context("list the policy trie")?;
        for ((prefix, data), policy) in &wanted {
            self.policy_trie
                .insert(&Key::new(*prefix, *data), policy, 0)
                .context("enter a prefix into the policy trie")?;
        }
        for key in present {
            if !wanted.contains_key(&(key.prefix_len(), key.data())) {
                self.policy_trie
                    .remove(&key)
                    .context("remove a prefix from the policy trie")?;
            }
        }
        Ok(())
    }

    /// The state that rows of a destination get when they are created; `None` takes it away.
    ///
    /// # Errors
    /// When the map is full (1,024 manual states).
    pub fn set_manual(&mut self, key: &ManualKey, state: Option<(Verdict, Nanos)>) -> Result<()> {
        let key: &[u8; 24] = bytemuck::cast_ref(key);
        match state {
            Some((verdict, until)) => self
                .manual
                .insert(key, [verdict.pack(), until.0], 0)
                .context("remember a manual state"),
            None => {
                // Not there: as wanted.
                let _ = self.manual.remove(key);
                Ok(())
            }
        }
    }
}

pub(super) fn program<'a, P>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut P>
where
    &'a mut P: TryFrom<&'a mut Program, Error = aya::programs::ProgramError>,
{
    let program = ebpf
        .program_mut(name)
        .with_context(|| format!("find program {name}"))?;
    program
        .try_into()
        .with_context(|| format!("program {name} has another type"))
}
