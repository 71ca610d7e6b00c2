//! Giving options back on connects that are under way: at a stop, and when a pause begins.

use std::collections::HashMap;

use crate::{
    kernel::{Kernel, Table, grace::wait_for_programs},
    sockets::namespace::{Namespaces, Place},
};

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
        let pids = [pid];
        let place = Place { inode, pids: &pids };
        // A thread of its own: entering a namespace concerns a thread, and this one dies after.
        let result = std::thread::scope(|scope| {
            let (kernel, namespaces) = (&mut *kernel, &mut namespaces);
            scope
                .spawn(move || namespaces.within(place, || kernel.settle_namespace())?)
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("the settling thread panicked")))
        });
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
