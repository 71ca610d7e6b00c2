//! Giving options back on connects that are under way: at a stop, and when a pause begins.

use std::{collections::HashMap, sync::mpsc, thread, time::Duration};

use anyhow::{Context as _, Result};

use crate::{
    kernel::{Kernel, Table, Visit, grace::wait_for_programs},
    sockets::namespace::{Namespaces, Place},
};

/// Longest wait for one namespace: a program may keep its socket locked.
const PATIENCE: Duration = Duration::from_secs(3);

/// Gives TCP_USER_TIMEOUT back on every pending connect, namespace by namespace. The mode must be
/// off already, so that no new one gets it. What cannot be reached is logged.
pub fn settle(kernel: &mut Kernel) {
    if !kernel.can_settle() {
        return;
    }
    // A hook that has read the old mode may still be about to set an option.
    wait_for_programs();
    let table = kernel.table();
    let mut namespaces = Namespaces::default();
    for (inode, (pid, in_flight)) in places(&table) {
        let visit = kernel.settlement();
        let result = visit.and_then(|visit| visit_namespace(visit, &mut namespaces, inode, pid));
        match result {
            Ok(()) => {}
            Err(error) if in_flight > 0 => tracing::warn!(
                "{in_flight} connects pending in network namespace {inode} keep their connect \
                 timeout until they end: {error:#}"
            ),
            // The namespace has gone, most probably.
            Err(error) => tracing::debug!("network namespace {inode}: {error:#}"),
        }
    }
}

/// On a thread of its own: entering a namespace concerns a thread, and this one dies after. It is not waited
/// for when it hangs.
fn visit_namespace(visit: Visit, namespaces: &mut Namespaces, inode: u32, pid: u32) -> Result<()> {
    let (done, result) = mpsc::channel();
    let mut on_the_way = std::mem::take(namespaces);
    thread::Builder::new()
        .name("backstop-settle".into())
        .spawn(move || {
            let pids = [pid];
            let place = Place { inode, pids: &pids };
            let result = on_the_way.within(place, || visit.run());
            let _ = done.send((result, on_the_way));
        })
        .context("start a thread")?;
    let (result, back) = result
        .recv_timeout(PATIENCE)
        .context("some program keeps one of its sockets locked, or there are very many")?;
    *namespaces = back;
    result?
}

/// Of each namespace a process that was in it, and the connects in flight. Rows without connects in
/// flight count, too: a Fast Open connect waits with our option until the program writes, and has
/// sent nothing yet.
fn places(table: &Table) -> HashMap<u32, (u32, u64)> {
    let mut places: HashMap<u32, (u32, u64)> = HashMap::new();
    for (_, row) in table.used() {
        if row.netns_inode != 0 {
            let place = places.entry(row.netns_inode).or_insert((row.last_pid, 0));
            place.1 += u64::from(row.pending());
        }
    }
    places
}
