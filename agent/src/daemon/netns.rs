//! Entering the network namespaces of workloads.
//!
//! No descriptor of a namespace is held beyond the call: an open one keeps the namespace and its
//! devices alive after the workload is gone. A namespace is entered through a live process in it
//! (the one that connected, else any other), or through a name that somebody gave it.

use std::{
    collections::HashMap,
    fs::{self, File},
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Where `ip netns` and most container networks keep namespaces by name.
const NAMED: &str = "/run/netns";
/// A look at every process of the node is not repeated sooner than this.
const SCAN_EVERY: Duration = Duration::from_secs(1);

/// Where a socket is to be made.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Inode of the namespace.
    pub inode: u32,
    /// A process that was in it.
    pub pid: u32,
}

/// Finds ways into namespaces, and remembers which process led where.
#[derive(Default)]
pub struct Namespaces {
    pids: HashMap<u32, u32>,
    scanned: Option<Instant>,
}

impl Namespaces {
    /// Runs `work` with the calling thread inside the namespace, and leaves it again.
    ///
    /// # Errors
    /// When no way into the namespace is found, or entering is not allowed (CAP_SYS_ADMIN).
    pub fn within<T>(&mut self, place: Place, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let own = File::open("/proc/thread-self/ns/net").context("open our network namespace")?;
        let own_inode = own
            .metadata()
            .context("look at our network namespace")?
            .ino();
        if u64::from(place.inode) == own_inode {
            return work();
        }
        let there = self.find(place).with_context(|| {
            format!(
                "find a live process or a name of network namespace {}",
                place.inode
            )
        })?;
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(there.as_fd(), kind)
            .with_context(|| format!("enter network namespace {}", place.inode))?;
        drop(there);
        let result = work();
        // Without a way back the thread would work in a stranger's namespace from here on.
        move_into_link_name_space(own.as_fd(), kind)
            .expect("a thread can return to the network namespace that it came from");
        result
    }

    fn find(&mut self, place: Place) -> Option<File> {
        let inode = place.inode;
        if let Some(file) = of_process(place.pid, inode) {
            return Some(file);
        }
        if let Some(file) = self
            .pids
            .get(&inode)
            .and_then(|pid| of_process(*pid, inode))
        {
            return Some(file);
        }
        if let Some(file) = named(inode) {
            return Some(file);
        }
        if self.scanned.is_some_and(|at| at.elapsed() < SCAN_EVERY) {
            return None;
        }
        self.scan();
        of_process(*self.pids.get(&inode)?, inode)
    }

    /// Looks at every process: one for each namespace is enough.
    fn scan(&mut self) {
        self.pids.clear();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            if let Ok(metadata) = fs::metadata(format!("/proc/{pid}/ns/net")) {
                self.pids.insert(metadata.ino() as u32, pid);
            }
        }
        self.scanned = Some(Instant::now());
    }
}

/// The namespace of a process, if it is the wanted one (the pid may have been used again).
fn of_process(pid: u32, inode: u32) -> Option<File> {
    checked(Path::new(&format!("/proc/{pid}/ns/net")), inode)
}

fn named(inode: u32) -> Option<File> {
    fs::read_dir(NAMED)
        .ok()?
        .flatten()
        .find_map(|entry| checked(&entry.path(), inode))
}

fn checked(path: &Path, inode: u32) -> Option<File> {
    let file = File::open(path).ok()?;
    (file.metadata().ok()?.ino() == u64::from(inode)).then_some(file)
}
