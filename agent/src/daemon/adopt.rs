//! Connections that exist when the agent starts: they are followed from here on, so that a restart
//! does not blind it.
//!
//! Every control group at and below the watched ones is told to the kernel, and `iter/tcp` run in
//! each network namespace that a process in them lives in. Which process has a connection is found
//! afterwards, by the inodes of its descriptors.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    ops::ControlFlow,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use agent_common::{COMM_LEN, stamp::PHASE_OPEN};
use anyhow::{Context as _, Result};

use crate::{
    kernel::{Connections, Kernel, Visit},
    sockets::{
        look::State,
        namespace::{Namespaces, Place},
        process::Process,
    },
};

/// The start waits no longer than this. (100,000 sockets take a fraction of a second.)
const PATIENCE: Duration = Duration::from_secs(10);

/// Control groups, processes and namespaces, as found.
#[derive(Default)]
struct Found {
    /// Id and a process in it; 0: none.
    groups: Vec<(u64, u32)>,
    pids: Vec<u32>,
    /// By inode: a process that lives in it.
    namespaces: BTreeMap<u32, u32>,
}

/// Inode and cookie of each socket, by its inode.
type Inodes = HashMap<u32, (u32, u64)>;

/// Adopts what it can; what it cannot is logged.
pub fn adopt(kernel: &mut Kernel, cgroups: &[PathBuf]) {
    if !kernel.can_adopt() {
        return;
    }
    let found = look(cgroups);
    if let Err(error) = kernel.set_watched(&found.groups) {
        tracing::warn!("{error:#}; connections of the others are not followed until they end");
    }
    let deadline = Instant::now() + PATIENCE;
    let mut inodes = Inodes::new();
    for (&inode, &pid) in &found.namespaces {
        match in_namespace(kernel, inode, pid, deadline) {
            Ok(found) => inodes.extend(found),
            Err(error) => tracing::warn!(
                "connections that exist in network namespace {inode} are not followed, or not \
                 their processes known: {error:#}"
            ),
        }
    }
    // From here on every connection passes the hook.
    if let Err(error) = kernel.set_watched(&[]) {
        tracing::warn!("{error:#}");
    }
    name_processes(&kernel.connections(), &found.pids, inodes);
    let adopted = kernel.table().counters().adopted;
    tracing::info!(
        adopted,
        namespaces = found.namespaces.len(),
        "connections that existed already are followed from here on"
    );
}

/// On a thread of its own, because entering a namespace concerns a thread, and because a program can
/// hold the lock of its socket for as long as it likes: then the start does not wait for it.
fn in_namespace(kernel: &mut Kernel, inode: u32, pid: u32, deadline: Instant) -> Result<Inodes> {
    let visit = kernel.adoption()?;
    let connections = kernel.connections();
    let (done, result) = mpsc::channel();
    thread::Builder::new()
        .name("backstop-adopt".to_owned())
        .spawn(move || {
            // Nobody waits any more when it took too long.
            let _ = done.send(visit_namespace(visit, &connections, inode, pid));
        })
        .context("start a thread")?;
    result
        .recv_timeout(deadline.saturating_duration_since(Instant::now()))
        .context("some program keeps one of its sockets locked, or there are very many")?
}

fn visit_namespace(
    visit: Visit,
    connections: &Connections,
    inode: u32,
    pid: u32,
) -> Result<Inodes> {
    let pids = [pid];
    let place = Place { inode, pids: &pids };
    let mut namespaces = Namespaces::default();
    namespaces.within(place, || visit.run())??;
    let mut inodes = Inodes::new();
    namespaces.diag(place, |diag| {
        diag.dump(&[State::Established], false, |look| {
            let stamp = connections.get(look.cookie);
            if stamp.is_some_and(|stamp| stamp.phase == PHASE_OPEN && stamp.pid == 0) {
                inodes.insert(look.inode, (look.inode, look.cookie));
            }
        })
    })??;
    Ok(inodes)
}

/// Finds a process for each connection. Of several that share one, any.
fn name_processes(connections: &Connections, pids: &[u32], mut inodes: Inodes) {
    for pid in pids {
        if inodes.is_empty() {
            return;
        }
        // Gone, or not to be seen: the connection's process stays unknown.
        let Ok(Some(process)) = Process::open(*pid) else {
            continue;
        };
        let mut found = Vec::new();
        let seen = process.each_socket(|_, inode| {
            found.extend(inodes.get(&inode));
            ControlFlow::Continue(())
        });
        let comm = comm(*pid);
        // Ended meanwhile: what was read may have been of another process with this id.
        if !seen.is_ok_and(|whole| whole) || !process.is_alive() {
            continue;
        }
        for (inode, cookie) in found {
            inodes.remove(&inode);
            connections.set_process(cookie, *pid, comm);
        }
    }
}

fn comm(pid: u32) -> [u8; COMM_LEN] {
    let mut comm = [0; COMM_LEN];
    let text = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = text.strip_suffix(b"\n").unwrap_or(&text);
    let length = name.len().min(COMM_LEN - 1);
    comm[..length].copy_from_slice(&name[..length]);
    comm
}

fn look(cgroups: &[PathBuf]) -> Found {
    let mut found = Found::default();
    let mut stack = cgroups.to_vec();
    while let Some(path) = stack.pop() {
        let Ok(metadata) = fs::metadata(&path) else {
            continue;
        };
        let pids = processes(&path);
        found
            .groups
            .push((metadata.ino(), pids.first().copied().unwrap_or(0)));
        for &pid in &pids {
            if let Ok(namespace) = fs::metadata(format!("/proc/{pid}/ns/net")) {
                // Inodes of namespaces are numbers of 32 bits (`struct ns_common`).
                let inode = namespace.ino() as u32;
                found.namespaces.entry(inode).or_insert(pid);
            }
        }
        found.pids.extend(pids);
        let below = fs::read_dir(&path).into_iter().flatten().flatten();
        stack.extend(
            below
                .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
                .map(|entry| entry.path()),
        );
    }
    found
}

/// The processes of a control group; of a threaded one, its threads.
fn processes(group: &Path) -> Vec<u32> {
    let text = fs::read_to_string(group.join("cgroup.procs"))
        .or_else(|_| fs::read_to_string(group.join("cgroup.threads")))
        .unwrap_or_default();
    // 0: a process that is not visible in our process namespace.
    let pids = text.lines().filter_map(|line| line.parse().ok());
    pids.filter(|pid| *pid != 0).collect()
}
