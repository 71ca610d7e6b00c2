//! Giving options back on connects that are under way: at a stop, and when a pause begins.

use std::collections::HashMap;

use super::netns::{Namespaces, Place};
use crate::kernel::{Kernel, Table};

/// Gives TCP_USER_TIMEOUT back on every pending connect, namespace by namespace. The mode must be
/// off already, so that no new one gets it. What cannot be reached is logged.
pub fn settle(kernel: &mut Kernel) {
    if !kernel.can_settle() {
        return;
    }
    let table = kernel.table();
    for place in places(&table) {
        // A thread of its own: entering a namespace concerns a thread, and this one dies after.
        let result = std::thread::scope(|scope| {
            let kernel = &mut *kernel;
            scope
                .spawn(move || Namespaces::default().within(place, || kernel.settle_namespace()))
                .join()
                .unwrap_or_else(|_| Err(anyhow::anyhow!("the settling thread panicked")))
        });
        if let Err(error) = result {
            tracing::warn!(
                "connects pending in network namespace {} keep their connect timeout until they \
                 end: {error:#}",
                place.inode
            );
        }
    }
}

/// One place per namespace with connects under way.
fn places(table: &Table) -> Vec<Place> {
    let mut places = HashMap::new();
    for (_, row) in table.used() {
        if row.in_flight != 0 && row.netns_inode != 0 {
            places.entry(row.netns_inode).or_insert(Place {
                inode: row.netns_inode,
                pid: row.last_pid,
            });
        }
    }
    places.into_values().collect()
}
