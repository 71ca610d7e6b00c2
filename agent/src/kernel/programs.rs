//! Loading the embedded object, attaching it to cgroups, and the maps that need system calls.

use std::{
    fs::File,
    io::Read as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use agent_common::{
    ABI_VERSION, AdoptOffsets, DestinationKey, PolicyKey, RetrySettings, Row, Settings, Statuses,
    Verdict, key::ManualKey, stamp::CONNECTION_SLOTS,
};
use anyhow::{Context as _, Result};
use aya::{
    Ebpf, EbpfLoader,
    maps::{HashMap, LpmTrie, Map, MapData, Queue, RingBuf, lpm_trie::Key},
    programs::{
        CgroupAttachMode, CgroupSkb, CgroupSkbAttachType, CgroupSock, CgroupSockAddr, Iter,
        Program, SockOps, cgroup_skb::CgroupSkbLinkId, cgroup_sock::CgroupSockLinkId,
        cgroup_sock_addr::CgroupSockAddrLinkId, iter::IterLink, sock_ops::SockOpsLinkId,
    },
};
use bytemuck::Pod;

use super::{
    btf, connections::Connections, lent::LentOptions, mapped::Mapped, sockopt::SockoptHooks,
    support::Unsupported, table::Table,
};
use crate::core::{Nanos, RowId};

/// The kernel object, built from `agent-ebpf` by `cargo xtask ebpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../agent-ebpf/object/backstop-ebpf.o"
));

/// Hooks that a cgroup gets, as shown in `attached{hook}`.
pub const HOOKS: [&str; 6] = [
    "connect4",
    "connect6",
    "sock_ops",
    "sock_release",
    "egress",
    "ingress",
];

/// An insertion: only if it is not there (include/uapi/linux/bpf.h).
const BPF_NOEXIST: u64 = 1;

/// Sizes of the maps.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Rows, without the `other` row.
    pub max_destinations: u32,
    /// Ring buffer, bytes; a power of two and a multiple of the page size.
    pub ring_bytes: u32,
    /// Calls that each row's windows must hold, at most [`agent_common::window::SLOTS`].
    pub window_calls: u32,
    /// Latency histograms to lend.
    pub histograms: u32,
    /// Policies, the defaults included.
    pub policies: u32,
}

/// Links of one cgroup, in the order of attaching; none for a hook that is not attached (yet).
#[derive(Default)]
struct Links {
    follow: Option<SockOpsLinkId>,
    release: Option<CgroupSockLinkId>,
    connect4: Option<CgroupSockAddrLinkId>,
    connect6: Option<CgroupSockAddrLinkId>,
    egress: Option<CgroupSkbLinkId>,
    ingress: Option<CgroupSkbLinkId>,
}

/// One attached cgroup.
pub struct Attachment {
    /// Canonical path.
    pub path: PathBuf,
    /// Cgroup id (inode) at the time of attaching: another one at this path later means that the
    /// cgroup was recreated and has lost its programs.
    pub id: u64,
    links: Links,
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
    /// Loads the programs; nothing is attached yet. The ring is returned apart, for the thread
    /// that reads it.
    ///
    /// # Errors
    /// [`Unsupported`] (as the error's root) where the kernel lacks something.
    pub fn load(options: LoadOptions) -> Result<(Self, RingBuf<MapData>)> {
        let abi = abi_of(OBJECT).context("read the embedded kernel object")?;
        anyhow::ensure!(
            abi == ABI_VERSION,
            "the embedded kernel object has ABI {abi}, this agent {ABI_VERSION}: rebuild the \
             object with `cargo xtask ebpf`"
        );
        let types = std::fs::read(btf::VMLINUX).map_err(|e| Unsupported::Btf {
            path: btf::VMLINUX,
            cause: e.to_string(),
        })?;
        let types = btf::Btf::parse(&types).map_err(|e| Unsupported::Btf {
            path: btf::VMLINUX,
            cause: e.to_string(),
        })?;
        let (offsets, adopt_offsets) = (types.offsets(), types.adopt_offsets());
        let adopt_known = adopt_offsets.unwrap_or(AdoptOffsets::UNKNOWN);
        let rows = options.max_destinations + 1;
        let window_blocks = agent_common::window::blocks_for(options.window_calls);
        let blocks = rows * window_blocks;
        let mut ebpf = EbpfLoader::new()
            .override_global("OFFSETS", bytemuck::bytes_of(&offsets), true)
            .override_global("ADOPT_OFFSETS", bytemuck::bytes_of(&adopt_known), true)
            .override_global("WINDOW_BLOCKS", bytemuck::bytes_of(&window_blocks), true)
            .map_max_entries("KEYS", options.max_destinations)
            .map_max_entries("ROWS", rows)
            .map_max_entries("CONNECT_WINDOWS", blocks)
            .map_max_entries("EXCHANGE_WINDOWS", blocks)
            .map_max_entries("FREE_ROWS", options.max_destinations)
            .map_max_entries("HISTOGRAMS", options.histograms)
            .map_max_entries("FREE_HISTOGRAMS", options.histograms)
            .map_max_entries("POLICIES", options.policies)
            .map_max_entries("RETRIES", rows)
            .map_max_entries("RETRY_POLICIES", options.policies)
            .map_max_entries("STATUSES", options.policies)
            .map_max_entries("EVENTS", options.ring_bytes)
            .load(OBJECT)
            .map_err(|e| refused("object", &e))?;

        let table = Table {
            control: mapped(&mut ebpf, "CONTROL", 1)?,
            counters: mapped(&mut ebpf, "COUNTERS", 1)?,
            rows: mapped(&mut ebpf, "ROWS", rows)?,
            windows: mapped(&mut ebpf, "CONNECT_WINDOWS", blocks)?,
            exchange_windows: mapped(&mut ebpf, "EXCHANGE_WINDOWS", blocks)?,
            window_blocks,
            histograms: mapped(&mut ebpf, "HISTOGRAMS", options.histograms)?,
            policies: mapped(&mut ebpf, "POLICIES", options.policies)?,
            retries: mapped(&mut ebpf, "RETRIES", rows)?,
            retry_policies: mapped(&mut ebpf, "RETRY_POLICIES", options.policies)?,
            statuses: mapped(&mut ebpf, "STATUSES", options.policies)?,
        };
        let slots = mapped(&mut ebpf, "CONNECTIONS", CONNECTION_SLOTS)?;
        let Map::HashMap(spilled) = take(&mut ebpf, "SPILLED")? else {
            anyhow::bail!("map SPILLED is no hash map")
        };
        let hung = take(&mut ebpf, "COUNTED")?.try_into()?;
        let connections = Connections::new(slots, spilled, hung);
        let types = aya::Btf::from_sys_fs().context("read the kernel's type information")?;
        let can_settle = load_programs(&mut ebpf, &types)?;
        let can_adopt = load_adopt(&mut ebpf, &types, adopt_offsets.is_some())?;

        let mut free_rows: Queue<_, u32> = take(&mut ebpf, "FREE_ROWS")?.try_into()?;
        for index in 1..rows {
            free_rows
                .push(index, 0)
                .context("fill the list of free rows")?;
        }
        let mut free_histograms: Queue<_, u32> = take(&mut ebpf, "FREE_HISTOGRAMS")?.try_into()?;
        for slot in 0..options.histograms {
            free_histograms
                .push(slot, 0)
                .context("fill the list of free histograms")?;
        }
        let ring = RingBuf::try_from(take(&mut ebpf, "EVENTS")?).context("open the ring buffer")?;
        let answers = RingBuf::try_from(take(&mut ebpf, "ANSWERS")?)
            .context("open the ring buffer of DNS answers")?;
        let kernel = Self {
            keys: take(&mut ebpf, "KEYS")?.try_into()?,
            policy_trie: take(&mut ebpf, "POLICY_TRIE")?.try_into()?,
            manual: take(&mut ebpf, "MANUAL")?.try_into()?,
            table: Arc::new(table),
            connections: Arc::new(connections),
            free_rows,
            free_histograms,
            answers: Some(answers),
            attachments: Vec::new(),
            watched: take(&mut ebpf, "WATCHED")?.try_into()?,
            lent: Arc::new(LentOptions::new(take(&mut ebpf, "LENT")?.try_into()?)),
            sockopt: SockoptHooks::default(),
            can_settle,
            can_adopt,
            ebpf,
        };
        Ok((kernel, ring))
    }

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
        });
        if self.sockopt.is_wanted()
            && let Err(error) = self.sockopt.attach(&mut self.ebpf, path)
        {
            tracing::warn!("{error:#}; programs that ask for SO_RCVTIMEO are told our value");
        }
        Ok(())
    }

    /// What is attached.
    pub fn attachments(&self) -> &[Attachment] {
        &self.attachments
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
        let _ = self.free_row(index);
        if let Some(slot) = slot {
            let _ = self.free_histogram(slot);
        }
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

/// The ABI version that an object was built with: its symbol `ABI_VERSION`.
fn abi_of(object: &[u8]) -> Result<u32> {
    use object::{Object as _, ObjectSection as _, ObjectSymbol as _};
    let file = object::File::parse(object)?;
    let symbol = file
        .symbols()
        .find(|symbol| symbol.name() == Ok("ABI_VERSION"))
        .context("find the symbol ABI_VERSION")?;
    let section = symbol.section_index().context("find its section")?;
    let data = file
        .section_by_index(section)?
        .data_range(symbol.address(), 4)?
        .context("read its value")?;
    Ok(u32::from_le_bytes(data.try_into()?))
}

fn refused(program: &str, error: &dyn std::error::Error) -> Unsupported {
    let mut cause = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        cause = format!("{cause}: {inner}");
        source = inner.source();
    }
    Unsupported::Program {
        program: program.to_owned(),
        cause,
    }
}

fn load_programs(ebpf: &mut Ebpf, types: &aya::Btf) -> Result<bool> {
    for name in ["connect4", "connect6"] {
        program::<CgroupSockAddr>(ebpf, name)?
            .load()
            .map_err(|e| refused(name, &e))?;
    }
    program::<SockOps>(ebpf, "follow")?
        .load()
        .map_err(|e| refused("follow", &e))?;
    program::<CgroupSock>(ebpf, "release")?
        .load()
        .map_err(|e| refused("release", &e))?;
    for name in ["sent", "received"] {
        program::<CgroupSkb>(ebpf, name)?
            .load()
            .map_err(|e| refused(name, &e))?;
    }
    // An extra: without it, a pending connect keeps our timeout over a stop.
    match program::<Iter>(ebpf, "settle")?.load("tcp", types) {
        Ok(()) => Ok(true),
        Err(e) => {
            let cause = refused("settle", &e);
            tracing::warn!("{cause}; connects pending at a stop will keep their connect timeout");
            Ok(false)
        }
    }
}

/// An extra: without it, connections that exist at the start are not followed.
fn load_adopt(ebpf: &mut Ebpf, types: &aya::Btf, known: bool) -> Result<bool> {
    const WITHOUT: &str = "connections that exist already are not followed";
    if !known {
        tracing::warn!("the kernel's type information lacks what adoption needs; {WITHOUT}");
        return Ok(false);
    }
    match program::<Iter>(ebpf, "adopt")?.load("tcp", types) {
        Ok(()) => Ok(true),
        Err(e) => {
            tracing::warn!("{}; {WITHOUT}", refused("adopt", &e));
            Ok(false)
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

/// Attaches every hook, or none.
fn attach_all(ebpf: &mut Ebpf, cgroup: &File) -> Result<Links> {
    let mut links = Links::default();
    match attach_each(ebpf, cgroup, &mut links) {
        Ok(()) => Ok(links),
        Err(error) => {
            // aya keeps links of its own accord: what is not detached stays.
            detach_all(ebpf, links);
            Err(error)
        }
    }
}

/// The followers first: a connect that passes the hook must not go unfollowed.
fn attach_each(ebpf: &mut Ebpf, cgroup: &File, links: &mut Links) -> Result<()> {
    let mode = CgroupAttachMode::Single;
    let follow = program::<SockOps>(ebpf, "follow")?.attach(cgroup, mode);
    links.follow = Some(follow.context("attach sock_ops")?);
    let release = program::<CgroupSock>(ebpf, "release")?.attach(cgroup, mode);
    links.release = Some(release.context("attach sock_release")?);
    let (out, back) = (CgroupSkbAttachType::Egress, CgroupSkbAttachType::Ingress);
    let egress = program::<CgroupSkb>(ebpf, "sent")?.attach(cgroup, out, mode);
    links.egress = Some(egress.context("attach egress")?);
    let ingress = program::<CgroupSkb>(ebpf, "received")?.attach(cgroup, back, mode);
    links.ingress = Some(ingress.context("attach ingress")?);
    let connect4 = program::<CgroupSockAddr>(ebpf, "connect4")?.attach(cgroup, mode);
    links.connect4 = Some(connect4.context("attach connect4")?);
    let connect6 = program::<CgroupSockAddr>(ebpf, "connect6")?.attach(cgroup, mode);
    links.connect6 = Some(connect6.context("attach connect6")?);
    Ok(())
}

/// Enforcement goes first, then what follows connects. A link that the kernel has already
/// dissolved, with its cgroup, is as good as detached.
fn detach_all(ebpf: &mut Ebpf, links: Links) {
    for (name, link) in [("connect4", links.connect4), ("connect6", links.connect6)] {
        if let (Some(link), Ok(p)) = (link, program::<CgroupSockAddr>(ebpf, name)) {
            let _ = p.detach(link);
        }
    }
    for (name, link) in [("sent", links.egress), ("received", links.ingress)] {
        if let (Some(link), Ok(p)) = (link, program::<CgroupSkb>(ebpf, name)) {
            let _ = p.detach(link);
        }
    }
    if let (Some(link), Ok(p)) = (links.follow, program::<SockOps>(ebpf, "follow")) {
        let _ = p.detach(link);
    }
    if let (Some(link), Ok(p)) = (links.release, program::<CgroupSock>(ebpf, "release")) {
        let _ = p.detach(link);
    }
}

fn take(ebpf: &mut Ebpf, name: &str) -> Result<Map> {
    ebpf.take_map(name)
        .with_context(|| format!("find map {name} in the kernel object"))
}

fn mapped<T: Pod>(ebpf: &mut Ebpf, name: &str, entries: u32) -> Result<Mapped<T>> {
    let map = ebpf
        .map(name)
        .with_context(|| format!("find map {name} in the kernel object"))?;
    let Map::Array(data) = map else {
        anyhow::bail!("map {name} is no array")
    };
    let info = data
        .info()
        .with_context(|| format!("ask about map {name}"))?;
    anyhow::ensure!(
        info.value_size() as usize == size_of::<T>() && info.max_entries() == entries,
        "map {name} has another layout than this agent (ABI {ABI_VERSION}): rebuild the kernel \
         object with `cargo xtask ebpf`"
    );
    Mapped::new(data.fd(), entries).with_context(|| format!("map {name} into memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_object_has_this_abi() {
        assert_eq!(abi_of(OBJECT).unwrap(), ABI_VERSION);
        assert!(abi_of(b"no object").is_err());
        let object = aya_obj::Object::parse(OBJECT).unwrap();
        for name in ["ROWS", "CONTROL", "COUNTERS", "KEYS", "POLICIES"] {
            assert!(object.maps.contains_key(name), "{name}");
        }
        assert_eq!(
            object.maps["ROWS"].value_size() as usize,
            size_of::<agent_common::Row>()
        );
        for name in [
            "connect4",
            "connect6",
            "follow",
            "release",
            "sent",
            "received",
            "settle",
            "adopt",
            "chooses",
            "reads_back",
        ] {
            assert!(object.programs.contains_key(name), "{name}");
        }
    }
}
