//! Other agents on the same control groups, or on some above or below.
//!
//! Their self-tests are connects like any other: each makes a row here, of a control group that is gone a
//! moment later, and 2,880 a day would fill the table and the label sets of /metrics. Such a row is judged
//! like any other, so that nobody escapes by a name; it is left out of what is shown for as long as nothing
//! is counted in it but what a self-test does, and given up once its group is gone: no connect can come to
//! it any more.

use std::{collections::HashSet, fs, os::unix::fs::MetadataExt as _, path::Path};

use agent_common::{Row as KernelRow, Verdict, key::mapped, verdict::STATE_CLOSED};

use super::{canary, node::Node};
use crate::{
    core::{Nanos, RowId},
    doctor::hooks,
};

/// How often it is looked whether their groups are gone.
const LOOK_EVERY: Nanos = Nanos::from_secs(1);
/// Connects of a self-test: one, and two more that observe mode or a pause lets pass.
const CONNECTS: u64 = 3;

/// Rows of other agents' self-tests.
#[derive(Default)]
pub struct Neighbours {
    rows: HashSet<RowId>,
    looked_at: Nanos,
}

/// Whether a row is that of another agent's self-test, and of nothing else.
pub fn is_self_test(workload: &str, row: &KernelRow) -> bool {
    canary::is_nest(workload) && is_alike(row)
}

/// Whether nothing is counted but what a self-test does: a few connects to a loopback port on which nobody
/// listens, or that were refused by others; and no breaker is open. (No sums are compared: the kernel may count just
/// then.)
fn is_alike(row: &KernelRow) -> bool {
    let failed_otherwise = row.failed_connect_timeout
        + row.failed_unreachable
        + row.failed_reset
        + row.failed_gave_up
        + row.failed_other;
    row.key.addr == mapped([127, 0, 0, 1])
        && Verdict::unpack(row.verdict).state == STATE_CLOSED
        && row.attempts <= CONNECTS
        && row.local <= CONNECTS
        && row.established + failed_otherwise == 0
        && row.rejected_breaker + row.would_reject_breaker + row.rejected_limit == 0
}

/// Whether the control group of this name and id, one of a self-test, is not there any more. In doubt it is: a
/// name with characters that were replaced leads nowhere.
fn is_gone(mount: &Path, workload: &str, id: u64) -> bool {
    let path = mount.join(workload);
    let has_parent = path.parent().is_some_and(Path::is_dir);
    let is_itself = fs::metadata(&path).is_ok_and(|metadata| metadata.ino() == id);
    canary::is_nest(workload) && has_parent && !workload.contains('?') && !is_itself
}

impl Node {
    /// Notes a new row of another agent's self-test.
    pub(super) fn note_neighbour(&mut self, id: RowId, workload: &str) {
        if canary::is_nest(workload) {
            self.neighbours.rows.insert(id);
        }
    }

    /// Gives up rows of self-tests that are over.
    pub(super) async fn forget_neighbours(&mut self, now: Nanos) -> anyhow::Result<()> {
        if self.neighbours.rows.is_empty() || now - self.neighbours.looked_at < LOOK_EVERY {
            return Ok(());
        }
        self.neighbours.looked_at = now;
        let mut over = Vec::new();
        for id in self.neighbours.rows.clone() {
            let Some(row) = self.table.owned(id).filter(is_alike) else {
                // Given up, or somebody's who only has such a name.
                self.neighbours.rows.remove(&id);
                continue;
            };
            let group = row.key.cgroup_id;
            let workload = self.names.name(group, row.last_pid);
            if row.pending() == 0 && is_gone(self.names.mount(), &workload, group) {
                over.push(id);
            }
        }
        if !over.is_empty() {
            let count = over.len();
            let given_up = self.let_go(over, count).await?;
            // Not for want of room.
            self.evictions.total = self.evictions.total.saturating_sub(given_up as u64);
        }
        Ok(())
    }

    /// Says where other agents are. To be called when the agent before has ended.
    pub fn warn_of_neighbours(&mut self) {
        // So that those who look find this process.
        self.kernel.claim();
        let (paths, own) = (self.attached(), self.kernel.own_programs());
        let mount = self.names.mount().to_owned();
        tokio::task::spawn_blocking(move || {
            for agent in hooks::agents(&paths, &own, &mount) {
                tracing::warn!("{}; {}", agent.said(), hooks::ONE_IS_ENOUGH);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;

    const OPEN: Verdict = Verdict {
        generation: 1,
        errno: 111,
        state: agent_common::verdict::STATE_OPEN,
        flags: 0,
    };

    fn tested() -> KernelRow {
        let mut row = KernelRow::zeroed();
        row.key.addr = mapped([127, 0, 0, 1]);
        (row.attempts, row.failed_refused, row.local) = (1, 1, 2);
        row
    }

    #[test]
    fn a_self_test_and_nothing_else() {
        let nest = "shop/backstop-canary-812";
        assert!(is_self_test(nest, &tested()));
        for other in [
            "shop",
            "shop/backstop-canary-",
            "shop/backstop-canary-1x",
            "shop/backstop-canary--1",
            "backstop-canary-1/shop",
            "shop/my-backstop-canary-1",
        ] {
            assert!(!is_self_test(other, &tested()), "{other}");
        }
        assert!(
            is_self_test("backstop-canary-1", &tested()),
            "below the root"
        );
    }

    /// A name alone hides nobody.
    #[test]
    fn who_does_more_is_shown() {
        type Change = fn(&mut KernelRow);
        let more: [Change; 8] = [
            |row| row.key.addr = mapped([10, 0, 0, 1]),
            |row| (row.attempts, row.failed_refused) = (4, 4),
            |row| row.local = 4,
            |row| row.verdict = OPEN.pack(),
            |row| row.established = 1,
            |row| row.rejected_breaker = 1,
            |row| row.rejected_limit = 1,
            |row| (row.failed_refused, row.failed_connect_timeout) = (0, 1),
        ];
        for (at, change) in more.into_iter().enumerate() {
            let mut row = tested();
            change(&mut row);
            assert!(!is_self_test("backstop-canary-1", &row), "{at}");
        }
        let mut under_way = tested();
        under_way.attempts = 2;
        assert!(is_self_test("backstop-canary-1", &under_way));
        let mut observed = tested();
        (observed.attempts, observed.failed_refused) = (3, 3);
        assert!(is_self_test("backstop-canary-1", &observed));
    }

    #[test]
    fn groups_that_are_gone() {
        let tree = tempfile::tempdir().unwrap();
        let mount = tree.path();
        fs::create_dir_all(mount.join("a/backstop-canary-1")).unwrap();
        let id = fs::metadata(mount.join("a/backstop-canary-1"))
            .unwrap()
            .ino();
        assert!(!is_gone(mount, "a/backstop-canary-1", id));
        assert!(
            is_gone(mount, "a/backstop-canary-1", id + 1),
            "another of that name"
        );
        assert!(is_gone(mount, "a/backstop-canary-2", id));
        assert!(!is_gone(mount, "b/backstop-canary-2", id), "who knows");
        assert!(!is_gone(mount, "a/?/backstop-canary-2", id));
        assert!(!is_gone(mount, "cgroup:12", id), "never named");
    }
}
