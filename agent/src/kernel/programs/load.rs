//! Loading the embedded object: sizes of its maps, what it is told of this kernel, its programs.

use std::sync::Arc;

use agent_common::{ABI_VERSION, AdoptOffsets, stamp::CONNECTION_SLOTS};
use anyhow::{Context as _, Result};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, MapData, Queue, RingBuf},
    programs::{CgroupSkb, CgroupSock, CgroupSockAddr, Iter, SockOps},
};
use bytemuck::Pod;

use super::{Kernel, program};
use crate::kernel::{
    btf, connections::Connections, lent::LentOptions, mapped::Mapped, sockopt::SockoptHooks,
    support::Unsupported, table::Table,
};

/// The kernel object, built from `agent-ebpf` by `cargo xtask ebpf`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../agent-ebpf/object/backstop-ebpf.o"
));

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
