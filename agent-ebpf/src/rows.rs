//! Finding and creating rows.

use agent_common::{
    Control, Counters, DestinationKey, Event, EventKind, OTHER_ROW, PolicyKey, Row, Settings,
    key::{CLASS_POLICY, CLASS_PROTECTED, ManualKey, POLICY_KEY_EXACT_BITS},
    row::ROW_PROTECTED,
};
use aya_ebpf::{bindings::BPF_NOEXIST, helpers::generated::bpf_ktime_get_ns, maps::lpm_trie::Key};

use crate::{atomics, events, kernel::TcpSocket, maps};

/// Bits of a full policy key: class, port and a whole address.
const FULL_PREFIX: u32 = POLICY_KEY_EXACT_BITS + 128;

/// The node's control block.
#[inline(always)]
pub fn control() -> Option<*const Control> {
    maps::CONTROL.get_ptr(0)
}

/// Adds one to a counter of the node.
#[inline(always)]
pub fn count(select: impl Fn(*mut Counters) -> *mut u64) {
    if let Some(counters) = maps::COUNTERS.get_ptr_mut(0) {
        // SAFETY: map memory.
        unsafe { atomics::add(select(counters), 1) };
    }
}

/// The row with this index.
#[inline(always)]
pub fn row(index: u32) -> Option<*mut Row> {
    maps::ROWS.get_ptr_mut(index)
}

/// The key's row, which is created if the key is new; row `other` if none is free.
#[inline(always)]
pub fn find_or_create(key: &DestinationKey, socket: TcpSocket) -> Option<(u32, *mut Row)> {
    let index = match maps::KEYS.get_ptr(key) {
        // SAFETY: map memory, valid within this program run (RCU).
        Some(index) => unsafe { *index },
        None => create(key, socket),
    };
    let row = row(index)?;
    // An entry that is being removed may be used again for another key under our eyes
    // (kernel/bpf/hashtab.c, preallocated elements).
    // SAFETY: map memory.
    if index == OTHER_ROW || unsafe { (*row).key == *key } {
        return Some((index, row));
    }
    Some((OTHER_ROW, self::row(OTHER_ROW)?))
}

/// Slow path: the first connect of a (workload, namespace, destination).
#[inline(never)]
fn create(key: &DestinationKey, socket: TcpSocket) -> u32 {
    let index = match maps::FREE_ROWS.pop() {
        Ok(Some(index)) => index,
        _ => {
            count(|c| unsafe { &raw mut (*c).without_row });
            return OTHER_ROW;
        }
    };
    let Some(row) = row(index) else {
        return OTHER_ROW;
    };
    // SAFETY: no time source can fail.
    let now = unsafe { bpf_ktime_get_ns() };
    // SAFETY: the row is ours alone: its index was in the free queue and no key leads to it yet.
    unsafe {
        (*row).key = *key;
        (*row).netns_inode = socket.netns_inode();
        (*row).last_connect_ns = now;
        (*row).settings = settings_for(key);
        (*row).histogram = match maps::FREE_HISTOGRAMS.pop() {
            Ok(Some(slot)) => slot + 1,
            _ => 0,
        };
        if let Some(manual) = manual_for(key)
            && (*row).settings.flags & ROW_PROTECTED == 0
        {
            (*row).verdict_until_ns = (*manual)[1];
            (*row).verdict = (*manual)[0];
        }
        if maps::KEYS
            .insert(key, index, u64::from(BPF_NOEXIST))
            .is_ok()
        {
            // Only now: until then the row is nobody's, also for the agent.
            (&raw mut (*row).created_ns).write_volatile(now);
            count(|c| &raw mut (*c).rows_created);
            events::send(&Event {
                kind: EventKind::ROW_CREATED,
                row: index,
                incarnation: (*row).incarnation,
                at_ns: now,
                ..events::EMPTY
            });
            return index;
        }
        // Another CPU was first, or the map is full: give back what was taken.
        if (*row).histogram != 0 {
            let _ = maps::FREE_HISTOGRAMS.push((*row).histogram - 1, 0);
        }
        (*row).key = bytemuck::Zeroable::zeroed();
        (*row).histogram = 0;
        (*row).verdict = 0;
        (*row).verdict_until_ns = 0;
        let _ = maps::FREE_ROWS.push(index, 0);
    }
    match maps::KEYS.get_ptr(key) {
        // SAFETY: as in `find_or_create`.
        Some(index) => unsafe { *index },
        None => OTHER_ROW,
    }
}

#[inline(always)]
fn manual_for(key: &DestinationKey) -> Option<*const [u64; 2]> {
    maps::MANUAL.get_ptr(ManualKey {
        addr: key.addr,
        ifindex: key.ifindex,
        port_be: key.port_be,
        reserved: 0,
    })
}

/// The settings that hold for a destination: protected, or the most specific policy's.
#[inline(never)]
pub fn settings_for(key: &DestinationKey) -> Settings {
    let mut settings = match maps::POLICIES.get(policy_of(key, CLASS_POLICY).unwrap_or(0)) {
        Some(settings) => *settings,
        None => bytemuck::Zeroable::zeroed(),
    };
    if policy_of(key, CLASS_PROTECTED).is_some() {
        settings.flags |= ROW_PROTECTED;
    }
    settings
}

/// Longest prefix under the destination's own port, else under any port (see `PolicyKey`).
#[inline(always)]
fn policy_of(key: &DestinationKey, class: u32) -> Option<u32> {
    let mut wanted = PolicyKey {
        class,
        port_be: key.port_be,
        reserved: 0,
        addr: key.addr,
    };
    if let Some(policy) = maps::POLICY_TRIE.get(Key::new(FULL_PREFIX, wanted)) {
        return Some(*policy);
    }
    wanted.port_be = 0;
    maps::POLICY_TRIE
        .get(Key::new(FULL_PREFIX, wanted))
        .copied()
}
