//! Entering the network namespaces of workloads.
//!
//! No descriptor of a namespace is held beyond the call: an open one keeps the namespace and its
//! devices alive after the workload is gone. A namespace is entered through a live process in it
//! (the one that connected, else any other), or through a name that somebody gave it.
//!
//! Entering concerns the calling thread alone, and it is back before the call returns. A socket made
//! inside stays in that namespace; so a batch of questions is asked from outside, through a netlink
//! socket that lives no longer than the batch ([`Namespaces::diag`]): an open one, too, keeps the
//! namespace's devices.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socket_with},
    thread::{LinkNameSpaceType, move_into_link_name_space},
};
use thiserror::Error;

use super::diag::{Diag, DiagError};

/// Where `ip netns` and most container networks keep namespaces by name.
const NAMED: &str = "/run/netns";
/// A look at every process of the node is not repeated sooner than this.
const SCAN_EVERY: Duration = Duration::from_secs(1);

/// Where a socket is to be made.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Inode of the namespace.
    pub inode: u32,
    /// Processes that were in it, the likeliest first. One that has ended, or whose id somebody else
    /// has by now, does no harm.
    pub pids: &'a [u32],
}

/// Why a namespace was not entered.
#[derive(Debug, Error)]
pub enum EnterError {
    /// Most probably it has gone, and its sockets with it.
    #[error(
        "no live process and no name in {NAMED} leads into network namespace {inode}; it has gone, \
         or the agent does not see its processes (it must run in the host's pid namespace)"
    )]
    NotFound {
        /// Of the namespace.
        inode: u32,
    },
    /// The kernel says no.
    #[error("enter network namespace {inode} (needs CAP_SYS_ADMIN): {cause}")]
    Refused {
        /// Of the namespace.
        inode: u32,
        /// Its words.
        cause: io::Error,
    },
    /// Our own namespace cannot be told.
    #[error("look at our own network namespace in /proc/thread-self/ns/net: {cause}")]
    Own {
        /// What went wrong.
        cause: io::Error,
    },
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
    /// When no way into the namespace is found, or entering is not allowed.
    pub fn within<T>(
        &mut self,
        place: Place<'_>,
        work: impl FnOnce() -> T,
    ) -> Result<T, EnterError> {
        let own = File::open("/proc/thread-self/ns/net")
            .and_then(|file| Ok((file.metadata()?.ino(), file)));
        let (own_inode, own) = own.map_err(|cause| EnterError::Own { cause })?;
        let inode = place.inode;
        if u64::from(inode) == own_inode {
            return Ok(work());
        }
        let there = self.find(place).ok_or(EnterError::NotFound { inode })?;
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(there.as_fd(), kind).map_err(|errno| EnterError::Refused {
            inode,
            cause: errno.into(),
        })?;
        drop(there);
        let _back = Back { own };
        Ok(work())
    }

    /// Runs a batch of questions about the sockets of a namespace, and acts on them. The calling
    /// thread is inside only while the netlink socket is made.
    ///
    /// # Errors
    /// When the namespace is not entered, or the kernel gives no netlink socket; the batch has not
    /// run then.
    pub fn diag<T>(
        &mut self,
        place: Place<'_>,
        batch: impl FnOnce(&mut Diag) -> T,
    ) -> Result<T, DiagError> {
        let mut diag = self.within(place, Diag::open)??;
        Ok(batch(&mut diag))
    }

    fn find(&mut self, place: Place<'_>) -> Option<File> {
        let inode = place.inode;
        let known = self.pids.get(&inode);
        let found = (place.pids.iter().chain(known)).find_map(|pid| of_process(*pid, inode));
        if let Some(file) = found.or_else(|| named(inode)) {
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

/// Cookie of the network namespace that a socket was made in; `None` on kernels that do not tell.
pub fn netns_cookie(socket: &OwnedFd) -> Option<u64> {
    /// include/uapi/asm-generic/socket.h, since 5.14; not in the libc crate.
    const SO_NETNS_COOKIE: libc::c_int = 71;
    let mut cookie = 0_u64;
    let mut length = size_of::<u64>() as libc::socklen_t;
    // SAFETY: an open descriptor, and a buffer of the length given.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &raw mut length,
        )
    };
    (result == 0).then_some(cookie)
}

/// Cookie of the calling thread's network namespace; `None` where it cannot be told.
pub fn netns_cookie_here() -> Option<u64> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).ok()?;
    netns_cookie(&socket)
}

/// Cookies of the network namespaces in which a process lives, or that somebody has given a name. It looks
/// at every process, and enters each namespace once; a namespace that only an open descriptor keeps is not
/// found. `None` where that cannot be told: no process is seen, the kernel tells no cookies (before 5.14),
/// or a namespace is there and may not be entered.
pub fn live_cookies() -> Option<HashSet<u64>> {
    let mut namespaces = Namespaces::default();
    namespaces.scan();
    if namespaces.pids.is_empty() {
        return None;
    }
    let mut inodes: HashSet<u32> = namespaces.pids.keys().copied().collect();
    let names = fs::read_dir(NAMED).into_iter().flatten().flatten();
    inodes.extend(names.filter_map(|entry| Some(fs::metadata(entry.path()).ok()?.ino() as u32)));
    let mut cookies = HashSet::new();
    for inode in inodes {
        match namespaces.within(Place { inode, pids: &[] }, netns_cookie_here) {
            Ok(cookie) => cookies.insert(cookie?),
            // It has gone meanwhile, or is a name to which no namespace is bound (yet).
            Err(EnterError::NotFound { .. }) => continue,
            Err(EnterError::Refused { cause, .. })
                if cause.raw_os_error() == Some(libc::EINVAL) =>
            {
                continue;
            }
            Err(EnterError::Refused { .. } | EnterError::Own { .. }) => return None,
        };
    }
    Some(cookies)
}

/// Takes the thread home when dropped, also when the work panics.
struct Back {
    own: File,
}

impl Drop for Back {
    fn drop(&mut self) {
        // Without a way back the thread would work in a stranger's namespace from here on.
        move_into_link_name_space(self.own.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("a thread can return to the network namespace that it came from");
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
