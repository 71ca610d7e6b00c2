//! Connections that exist when the agent starts: they are followed from here on, so that a restart
//! does not blind it.
//!
//! Every control group at and below the watched ones is told to the kernel, and `iter/tcp` run in
//! each network namespace that a process in them lives in.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use crate::{
    kernel::Kernel,
    sockets::namespace::{Namespaces, Place},
};

/// Control groups and namespaces, as found.
#[derive(Default)]
struct Found {
    /// Id and a process in it; 0: none.
    groups: Vec<(u64, u32)>,
    /// By inode: a process that lives in it.
    namespaces: BTreeMap<u32, u32>,
}

/// Adopts what it can; what it cannot is logged.
pub fn adopt(kernel: &mut Kernel, cgroups: &[PathBuf]) {
    if !kernel.can_adopt() {
        return;
    }
    let found = look(cgroups);
    if let Err(error) = kernel.set_watched(&found.groups) {
        tracing::warn!("{error:#}; connections of the others are not followed until they end");
    }
    let mut namespaces = Namespaces::default();
    for (&inode, &pid) in &found.namespaces {
        let pids = [pid];
        let place = Place { inode, pids: &pids };
        // A thread of its own: entering a namespace concerns a thread, and this one dies after.
        let result = std::thread::scope(|scope| {
            let (kernel, namespaces) = (&mut *kernel, &mut namespaces);
            scope
                .spawn(move || namespaces.within(place, || kernel.adopt_namespace())?)
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("the adopting thread panicked")))
        });
        if let Err(error) = result {
            tracing::warn!(
                "connections that exist in network namespace {inode} are not followed: {error:#}"
            );
        }
    }
    // From here on every connection passes the hook.
    if let Err(error) = kernel.set_watched(&[]) {
        tracing::warn!("{error:#}");
    }
    let adopted = kernel.table().counters().adopted;
    tracing::info!(
        adopted,
        namespaces = found.namespaces.len(),
        "connections that existed already are followed from here on"
    );
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
        for pid in pids {
            let Ok(namespace) = fs::metadata(format!("/proc/{pid}/ns/net")) else {
                continue;
            };
            // Inodes of namespaces are numbers of 32 bits (`struct ns_common`).
            let inode = namespace.ino() as u32;
            found.namespaces.entry(inode).or_insert(pid);
        }
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
