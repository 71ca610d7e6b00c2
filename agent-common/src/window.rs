//! The last calls to a destination, kept where they happen.
//!
//! The kernel writes each call (an outcome that counts) into a ring of small entries beside the
//! row; the agent reads it when an event says that something failed. Healthy traffic therefore
//! needs no event at all, and a lost event loses no call: the window is the truth, the event only a
//! hint to look at it.
//!
//! The ring is one, two or four [`Block`]s, the same for every row: as many as the policies' windows
//! need when the agent starts ([`blocks_for`]). Most need one, and windows are the largest part of
//! what a destination costs.
//!
//! An entry is 32 bits: failed (bit 31), slow (30), lap (29..24), time (23..0) in units of
//! 2^22 ns (4.2 ms). The lap is the low 6 bits of sequence / [`BLOCK`]: it tells an entry of this
//! round from one that another CPU has not overwritten yet. The time wraps after 19.5 hours, far
//! beyond any `window_age`.

use bytemuck::{Pod, Zeroable};

use crate::layout;

/// Calls that the largest ring remembers, hence the largest `window` that a policy may ask for.
pub const SLOTS: usize = 128;

/// Calls in a block.
pub const BLOCK: usize = 32;

/// Blocks of the largest ring.
pub const MOST_BLOCKS: u32 = (SLOTS / BLOCK) as u32;

const TIME_SHIFT: u32 = 22;
const TIME_MASK: u32 = (1 << 24) - 1;
const LAP_SHIFT: u32 = 24;
const LAP_MASK: u32 = 0x3f;
const SLOW: u32 = 1 << 30;
const FAILED: u32 = 1 << 31;

/// A block as it lies in kernel memory, at [`block`]; a call lies at [`entry`].
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Block {
    /// Encoded calls, see the module's documentation.
    pub entries: [u32; BLOCK],
}

layout!(Block, size 128, entries at 0);

/// The last calls of a row, read from its blocks to be judged. Index of a call: [`slot`]; what the
/// ring does not hold is 0. Sequence numbers begin with 1 (the first value of the row's call
/// counter).
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct CallWindow {
    /// Encoded calls, see the module's documentation.
    pub entries: [u32; SLOTS],
}

/// Blocks in a ring that is to hold so many calls: 1, 2 or 4.
pub const fn blocks_for(calls: u32) -> u32 {
    let blocks = calls.div_ceil(BLOCK as u32).next_power_of_two();
    if blocks > MOST_BLOCKS {
        MOST_BLOCKS
    } else {
        blocks
    }
}

/// Index of the block that call `seq` of a row lies in; every ring has `blocks` of them, a power of
/// two.
#[inline(always)]
pub const fn block(row: u32, seq: u64, blocks: u32) -> u32 {
    row.wrapping_mul(blocks) + ((seq as u32 / BLOCK as u32) & blocks.wrapping_sub(1))
}

/// Where in its block call `seq` lies.
#[inline(always)]
pub const fn entry(seq: u64) -> usize {
    seq as usize & (BLOCK - 1)
}

/// A call as it is kept in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Its number among the row's calls, from 1.
    pub seq: u64,
    /// When it ended (CLOCK_MONOTONIC, ns), to within 4.2 ms, never later than in truth.
    pub at_ns: u64,
    /// Whether the destination failed it.
    pub failed: bool,
    /// Whether it succeeded but took longer than the policy's `slow_call`.
    pub slow: bool,
}

/// Where call `seq` lies in a [`CallWindow`].
#[inline(always)]
pub const fn slot(seq: u64) -> usize {
    (seq % SLOTS as u64) as usize
}

/// The entry for call `seq`.
#[inline(always)]
pub const fn encode(seq: u64, at_ns: u64, failed: bool, slow: bool) -> u32 {
    let lap = ((seq / BLOCK as u64) as u32) & LAP_MASK;
    let time = ((at_ns >> TIME_SHIFT) as u32) & TIME_MASK;
    let mut entry = (lap << LAP_SHIFT) | time;
    if failed {
        entry |= FAILED;
    }
    if slow {
        entry |= SLOW;
    }
    entry
}

/// The entry of a failed call `seq` that has turned out well; `None` when the entry is another
/// call's by now.
#[inline(always)]
pub const fn repaired(entry: u32, seq: u64, slow: bool) -> Option<u32> {
    let lap = ((seq / BLOCK as u64) as u32) & LAP_MASK;
    if entry & FAILED == 0 || (entry >> LAP_SHIFT) & LAP_MASK != lap {
        return None;
    }
    let entry = entry & !FAILED;
    Some(if slow { entry | SLOW } else { entry })
}

/// The entry of a good call `seq` that has turned out to be a failure; `None` when the entry is another
/// call's, or failed already.
pub const fn spoiled(entry: u32, seq: u64) -> Option<u32> {
    let lap = ((seq / BLOCK as u64) as u32) & LAP_MASK;
    if entry & FAILED != 0 || (entry >> LAP_SHIFT) & LAP_MASK != lap {
        return None;
    }
    Some((entry | FAILED) & !SLOW)
}

/// Whether two times are the same in a window.
pub const fn is_same_time(a_ns: u64, b_ns: u64) -> bool {
    a_ns >> TIME_SHIFT == b_ns >> TIME_SHIFT
}

/// The call `seq` from its entry, or `None` when the entry is of another round or not written yet.
/// `now_ns` resolves the time's wrap: the call is taken to be at most 19.5 hours old.
pub fn decode(entry: u32, seq: u64, now_ns: u64) -> Option<Call> {
    if entry == 0 || (entry >> LAP_SHIFT) & LAP_MASK != ((seq / BLOCK as u64) as u32) & LAP_MASK {
        return None;
    }
    let now_units = now_ns >> TIME_SHIFT;
    let age_units = (now_units as u32).wrapping_sub(entry) & TIME_MASK;
    // A call that another CPU wrote a moment after `now_ns` was read looks 19.5 hours old.
    let age_units = if age_units > TIME_MASK - 1024 {
        0
    } else {
        age_units
    };
    let at_units = now_units.saturating_sub(u64::from(age_units));
    Some(Call {
        seq,
        at_ns: at_units << TIME_SHIFT,
        failed: entry & FAILED != 0,
        slow: entry & SLOW != 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_call_survives_encoding(
            seq in 1u64..u64::MAX,
            at_ns in 0u64..(1 << 60),
            age_ns in 0u64..(19 * 3600 * 1_000_000_000),
            failed: bool,
            slow: bool,
        ) {
            let entry = encode(seq, at_ns, failed, slow);
            prop_assume!(entry != 0);
            let call = decode(entry, seq, at_ns + age_ns).unwrap();
            prop_assert_eq!((call.seq, call.failed, call.slow), (seq, failed, slow));
            prop_assert!(call.at_ns <= at_ns && at_ns - call.at_ns < 1 << TIME_SHIFT);
        }

        #[test]
        fn an_entry_of_the_round_before_is_not_taken(
            seq in 129u64..u64::MAX,
            at_ns in 0u64..(1 << 60),
            blocks in proptest::sample::select(&[1u32, 2, 4][..]),
        ) {
            let old = encode(seq - u64::from(blocks) * BLOCK as u64, at_ns, false, false);
            prop_assert_eq!(decode(old, seq, at_ns), None);
        }

        #[test]
        fn a_repaired_call_has_succeeded(seq in 1u64..u64::MAX, at_ns in 0u64..(1 << 60), slow: bool) {
            let entry = repaired(encode(seq, at_ns, true, false), seq, slow).unwrap();
            prop_assume!(entry != 0);
            let call = decode(entry, seq, at_ns).unwrap();
            prop_assert_eq!((call.failed, call.slow), (false, slow));
            prop_assert_eq!(repaired(encode(seq + BLOCK as u64, at_ns, true, false), seq, slow), None);
            prop_assert_eq!(repaired(encode(seq, at_ns, false, false), seq, slow), None);
        }

        #[test]
        fn a_spoiled_call_has_failed(seq in 1u64..u64::MAX, at_ns in 0u64..(1 << 60), slow: bool) {
            let good = encode(seq, at_ns, false, slow);
            let entry = spoiled(good, seq).unwrap();
            let call = decode(entry, seq, at_ns).unwrap();
            prop_assert_eq!((call.failed, call.slow), (true, false));
            prop_assert!(is_same_time(call.at_ns, at_ns));
            prop_assert_eq!(spoiled(entry, seq), None);
            prop_assert_eq!(spoiled(good, seq + BLOCK as u64), None);
        }

        #[test]
        fn a_ring_holds_its_last_calls(
            row in 0u32..50_000,
            seq in 129u64..u64::MAX,
            calls in 0u32..300,
        ) {
            let blocks = blocks_for(calls);
            let held = u64::from(blocks) * BLOCK as u64;
            prop_assert!(held >= u64::from(calls.min(SLOTS as u32)) && held <= SLOTS as u64);
            let place = |seq| (block(row, seq, blocks), entry(seq));
            let mut taken = [false; SLOTS];
            for seq in seq - held..seq {
                let (block, entry) = place(seq);
                prop_assert!(block / blocks == row && entry < BLOCK);
                let taken = &mut taken[(block % blocks) as usize * BLOCK + entry];
                prop_assert!(!*taken);
                *taken = true;
            }
            prop_assert_eq!(place(seq), place(seq - held));
        }

        #[test]
        fn a_call_written_after_now_was_read_is_new(seq in 1u64..1000, now in (1u64 << 40)..(1 << 60)) {
            let entry = encode(seq, now + 1_000_000_000, true, false);
            let call = decode(entry, seq, now).unwrap();
            prop_assert!(call.at_ns <= now && now - call.at_ns < 1 << TIME_SHIFT);
        }
    }
}
