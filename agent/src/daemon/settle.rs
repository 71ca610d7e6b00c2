//! Giving options back on connects that are under way: at a stop, and when a pause begins.

use std::collections::HashMap;

use super::netns::{Namespaces, Place};
use crate::kernel::{Kernel, Table, grace::wait_for_programs};

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
    for (place, in_flight) in places(&table) {
        // A thread of its own: entering a namespace concerns a thread, and this one dies after.
        let result = std::thread::scope(|scope| {
            let (kernel, namespaces) = (&mut *kernel, &mut namespaces);
            scope
                .spawn(move || namespaces.within(place, || kernel.settle_namespace()))
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("the settling thread panicked")))
        });
        match result {
            Ok(()) => {}
            Err(error) if in_flight > 0 => tracing::warn!(
                "{in_flight} connects pending in network namespace {} keep their connect timeout \
                 until they end: {error:#}",
                place.inode
            ),
            // The namespace has gone, most probably.
            Err(error) => tracing::debug!("network namespace {}: {error:#}", place.inode),
        }
    }
}

/// One place per namespace, and its connects in flight. Rows without connects in flight count, too: a Fast Open connect waits
/// with our option until the program writes, and has sent nothing yet.
fn places(table: &Table) -> Vec<(Place, u64)> {
    let mut places: HashMap<u32, (Place, u64)> = HashMap::new();
    for (_, row) in table.used() {
        if row.netns_inode != 0 {
            let place = Place {
                inode: row.netns_inode,
                pid: row.last_pid,
            };
            places.entry(row.netns_inode).or_insert((place, 0)).1 += row.in_flight;
        }
    }
    places.into_values().collect()
}
