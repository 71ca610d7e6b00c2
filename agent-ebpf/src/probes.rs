//! Probe slots of half-open rows: claimed and returned by compare-and-exchange.

use agent_common::{
    Row,
    verdict::{pack_probe_slots, unpack_probe_slots},
};

use crate::atomics;

/// Tries before a claim gives up (and the connect is refused) or a return is left to the lease.
/// Each failed try means that another CPU succeeded.
const TRIES: u32 = 16;

/// Claims one of so many slots of this generation; false when all are taken or the generation has
/// passed.
#[inline(always)]
pub fn claim(row: *mut Row, generation: u32, limit: u32) -> bool {
    // SAFETY: map memory.
    unsafe {
        for _ in 0..TRIES {
            let word = atomics::load(&raw const (*row).probe_slots);
            let (of, taken) = unpack_probe_slots(word);
            if of != generation || taken >= limit {
                return false;
            }
            let claimed = pack_probe_slots(of, taken + 1);
            if atomics::replace(&raw mut (*row).probe_slots, word, claimed) {
                return true;
            }
        }
    }
    false
}

/// Returns a slot that was claimed under this generation.
#[inline(always)]
pub fn give_back(row: *mut Row, generation: u32) {
    // SAFETY: map memory.
    unsafe {
        for _ in 0..TRIES {
            let word = atomics::load(&raw const (*row).probe_slots);
            let (of, taken) = unpack_probe_slots(word);
            if of != generation || taken == 0 {
                return;
            }
            let returned = pack_probe_slots(of, taken - 1);
            if atomics::replace(&raw mut (*row).probe_slots, word, returned) {
                return;
            }
        }
    }
}
