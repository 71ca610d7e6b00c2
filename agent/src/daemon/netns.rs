//! Entering the network namespaces of workloads.
//!
//! No descriptor of a namespace is held beyond the call: an open one keeps the namespace and its
//! devices alive after the workload is gone. A namespace is entered through a live process that
//! has connected from it.

use std::{
    fs::File,
    os::unix::fs::MetadataExt as _,
};

use anyhow::{Context as _, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::kernel::Table;

/// Processes of one namespace that are tried before it counts as gone.
const CANDIDATES: usize = 16;

/// Where a socket is to be made.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Cookie of the namespace, to find other processes in it.
    pub cookie: u64,
    /// Inode of the namespace.
    pub inode: u32,
    /// A process that was in it.
    pub pid: u32,
}

/// Runs `work` with the calling thread inside the namespace, and leaves it again.
///
/// # Errors
/// When no live process of the namespace is found, or entering is not allowed (CAP_SYS_ADMIN).
pub fn within<T>(table: &Table, place: Place, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let own = File::open("/proc/thread-self/ns/net").context("open our own network namespace")?;
    let own_inode = own.metadata().context("look at our own network namespace")?.ino();
    if u64::from(place.inode) == own_inode {
        return work();
    }
    let there = find(table, place).with_context(|| {
        format!("find a live process in network namespace {}", place.inode)
    })?;
    let kind = Some(LinkNameSpaceType::Network);
    move_into_link_name_space(std::os::fd::AsFd::as_fd(&there), kind)
        .with_context(|| format!("enter network namespace {}", place.inode))?;
    drop(there);
    let result = work();
    // Without a way back the thread would work in a stranger's namespace from here on.
    move_into_link_name_space(std::os::fd::AsFd::as_fd(&own), kind)
        .expect("a thread can return to the network namespace that it came from");
    result
}

fn find(table: &Table, place: Place) -> Option<File> {
    open(place.pid, place.inode).or_else(|| {
        table
            .used()
            .filter(|(_, row)| row.key.netns_cookie == place.cookie && row.last_pid != place.pid)
            .map(|(_, row)| row.last_pid)
            .take(CANDIDATES)
            .find_map(|pid| open(pid, place.inode))
    })
}

/// The namespace of a process, if it is the wanted one (the pid may have been used again).
fn open(pid: u32, inode: u32) -> Option<File> {
    let file = File::open(format!("/proc/{pid}/ns/net")).ok()?;
    (file.metadata().ok()?.ino() == u64::from(inode)).then_some(file)
}
