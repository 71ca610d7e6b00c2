//! How soon a process calls again: after a call that went well, and after one that failed.
//!
//! A retry is told from a fresh call by comparing the two. A program that never retries pauses after a
//! failure as it does after a good call; so a pause that is hardly ever as short after a good call is a
//! retry's. docs/RETRIES.md has the reasons.

use bytemuck::{Pod, Zeroable};

use crate::{layout, method::Habit};

/// What is known of a process and a row. Approximate on purpose: two of them may share a place, and then
/// the later one has it. Written by the process's own tasks.
///
/// Pauses are counted by length, a byte for each octave ([`bucket`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Pace {
    /// Packed process and row ([`crate::retry::owner`]); 0: nobody.
    pub owner: u64,
    /// Pauses after a call that went well.
    pub good: Pauses,
    /// Pauses after a call that failed.
    pub failed: Pauses,
    /// What it asks for then.
    pub habit: Habit,
}

layout!(Pace, size 48, owner at 0, good at 8, failed at 24, habit at 40);

/// Pauses by length.
pub type Pauses = [u64; 2];

/// Places of paces; a power of two.
pub const PACE_SLOTS: u32 = 4096;

/// Buckets of pauses: the first holds those up to 2^17 ns (131 us), the last those from 2^31 ns (2.1 s).
pub const BUCKETS: u32 = 16;

/// So many pauses are remembered; then each counts half, so that what a program did long ago is forgotten.
const MOST: u32 = 63;

/// Of the fresh calls that follow a failure, one in so many may be as short as what is taken for a retry.
/// Less than half of all fresh calls follow a failure, so that fewer than one in 200 is misjudged.
const RARE: u32 = 128;

/// Of a program that is seen to retry, one in so many of what is taken for a retry may be a fresh call.
const SURE: u32 = 16;

/// Pauses after failures that must be known before a program can be seen to retry.
const KNOWN: u32 = 4;

/// The bucket of a pause.
#[inline(always)]
pub const fn bucket(pause_ns: u64) -> u32 {
    const FIRST: u32 = 17;
    const LONGEST: u64 = (1 << (BUCKETS - 1)) - 1;
    let octaves = pause_ns >> FIRST;
    let octaves = if octaves > LONGEST { LONGEST } else { octaves };
    // Number of significant bits, by halving: the target has no instruction for it.
    let mut rest = octaves as u32;
    let mut bits = 0;
    if rest >= 1 << 8 {
        bits += 8;
        rest >>= 8;
    }
    if rest >= 1 << 4 {
        bits += 4;
        rest >>= 4;
    }
    if rest >= 1 << 2 {
        bits += 2;
        rest >>= 2;
    }
    if rest >= 1 << 1 {
        bits += 1;
        rest >>= 1;
    }
    bits + rest
}

/// Sum of the bytes of a word, below 256.
#[inline(always)]
const fn sum(word: u64) -> u32 {
    (word.wrapping_mul(0x0101_0101_0101_0101) >> 56) as u32
}

/// All pauses.
#[inline(always)]
pub const fn total(pauses: Pauses) -> u32 {
    sum(pauses[0]) + sum(pauses[1])
}

/// Pauses of this bucket and of shorter ones.
#[inline(always)]
const fn at_most(pauses: Pauses, bucket: u32) -> u32 {
    if bucket >= BUCKETS - 1 {
        return total(pauses);
    }
    let mask = u64::MAX >> (56 - 8 * (bucket & 7));
    if bucket < 8 {
        sum(pauses[0] & mask)
    } else {
        sum(pauses[0]) + sum(pauses[1] & mask)
    }
}

/// The shortest bucket that holds a pause.
#[inline(always)]
const fn shortest(pauses: Pauses) -> u32 {
    if pauses[0] != 0 {
        lowest_byte(pauses[0])
    } else {
        8 + lowest_byte(pauses[1])
    }
}

/// Index of the lowest byte that is not 0.
#[inline(always)]
const fn lowest_byte(word: u64) -> u32 {
    // All bits below the lowest one that is set: of each byte of them one is counted.
    let below = word.wrapping_sub(1) & !word;
    sum((below >> 7) & 0x0101_0101_0101_0101)
}

/// One pause more.
#[inline(always)]
pub const fn with(pauses: Pauses, bucket: u32) -> Pauses {
    const HALVES: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    let [mut first, mut second] = pauses;
    if total(pauses) >= MOST {
        first = (first >> 1) & HALVES;
        second = (second >> 1) & HALVES;
    }
    let one = 1_u64 << (8 * (bucket & 7));
    if bucket < 8 {
        [first + one, second]
    } else {
        [first, second + one]
    }
}

/// Whether a pause after a failure is too short for a fresh call. Never when no pause after a good call is
/// known.
#[inline(always)]
pub const fn is_soon(good: Pauses, failed: Pauses, bucket: u32) -> bool {
    // (One more of each than is known, for little may be known.)
    let known = total(good) + 1;
    // Twice as long is still too short: what a program does after a failure may take it a little less
    // time than what it does after a good call.
    let as_short = at_most(good, bucket + 1) + 1;
    if known == 1 {
        return false;
    }
    // Most pauses after failures are as short, and few after good calls: F and G of them. If R of what
    // follows failures are retries, then F = R + (1 - R) G, and of what is as short and follows a failure
    // (1 - R) G / F are fresh calls, where 1 - R = (1 - F) / (1 - G).
    let failures = total(failed);
    let short_failures = at_most(failed, bucket);
    if failures >= KNOWN
        && 2 * short_failures >= failures
        && SURE * (failures - short_failures + 1) * as_short <= short_failures * (known - as_short)
    {
        return true;
    }
    if as_short != 1 {
        return false;
    }
    // Few pauses are known. Each octave that the shortest is away from this one makes half as likely that
    // they are fewer by chance.
    let away = shortest(good).saturating_sub(bucket + 1);
    (known << (if away > 7 { 7 } else { away })) >= RARE
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::vec::Vec;

    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;

    fn pauses(all: &[u64]) -> Pauses {
        all.iter()
            .fold([0; 2], |known, &ns| with(known, bucket(ns)))
    }

    /// Pauses of a program that connects at random times.
    fn random(seed: &[u32], mean_ns: u64) -> Vec<u64> {
        let pause = |&at: &u32| {
            let share = (f64::from(at) + 1.0) / (f64::from(u32::MAX) + 2.0);
            (-share.ln() * mean_ns as f64) as u64
        };
        seed.iter().map(pause).collect()
    }

    #[test]
    fn buckets_are_octaves() {
        for (ns, expected) in [
            (0, 0),
            (131_071, 0),
            (131_072, 1),
            (262_144, 2),
            (5 * MS, 6),
            (100 * MS, 10),
            (2_147 * MS, 14),
            (2_148 * MS, 15),
            (u64::MAX, 15),
        ] {
            assert_eq!(bucket(ns), expected, "{ns}");
        }
    }

    #[test]
    fn nothing_known_is_never_soon() {
        for bucket in 0..BUCKETS {
            assert!(!is_soon([0; 2], [0; 2], bucket));
            assert!(!is_soon([0; 2], [60, 0], bucket));
        }
    }

    #[test]
    fn a_steady_pace() {
        let good = pauses(&[5 * MS; 40]);
        assert!(is_soon(good, [0; 2], bucket(MS / 10)));
        assert!(is_soon(good, [0; 2], bucket(MS)));
        // Less than the half, but in the bucket next to it; and what differs little.
        assert!(!is_soon(good, [0; 2], bucket(4 * MS)));
        assert!(!is_soon(good, [0; 2], bucket(3 * MS)));
        // A second is far from 50 us also where only two are known.
        assert!(is_soon(pauses(&[1000 * MS; 2]), [0; 2], 0));
        assert!(!is_soon(pauses(&[MS; 2]), [0; 2], 0));
    }

    #[test]
    fn a_program_that_is_seen_to_retry() {
        // Random pauses of which some are short by chance.
        let mut good = [400 * MS; 38].to_vec();
        good.extend([2 * MS; 3]);
        let good = pauses(&good);
        assert!(!is_soon(good, [0; 2], bucket(MS)));
        assert!(is_soon(good, pauses(&[MS; 20]), bucket(MS)));
        assert!(!is_soon(good, pauses(&[MS; 3]), bucket(MS)));
        assert!(!is_soon(good, pauses(&[300 * MS; 20]), bucket(300 * MS)));
    }

    proptest! {
        #[test]
        fn bytes_are_counted(all in prop::collection::vec(any::<u64>(), 0..200), upto in 0..BUCKETS) {
            let known = pauses(&all);
            let bytes: Vec<u32> = known.iter().flat_map(|w| w.to_le_bytes()).map(u32::from).collect();
            prop_assert_eq!(total(known), bytes.iter().sum::<u32>());
            prop_assert_eq!(at_most(known, upto), bytes[..=upto as usize].iter().sum::<u32>());
            prop_assert!(total(known) <= MOST);
            if all.len() <= MOST as usize {
                prop_assert_eq!(total(known) as usize, all.len());
            }
            if let Some(first) = bytes.iter().position(|&n| n != 0) {
                prop_assert_eq!(shortest(known) as usize, first);
            }
        }

        /// Of the calls of a program that never retries and pauses at random, hardly one that follows a
        /// failure is taken for a retry, however few pauses are known.
        #[test]
        fn random_pauses_are_hardly_soon(
            seed in prop::collection::vec(any::<u32>(), 40_000),
            mean_us in prop::sample::select(&[300_u64, 5_000, 50_000, 1_000_000][..]),
            failing in prop::sample::select(&[1_u32, 10, 20, 40][..]),
            calls in prop::sample::select(&[30_usize, 400, 20_000][..]),
        ) {
            let all = random(&seed, mean_us * 1000);
            let (mut taken, mut fresh) = (0, 0);
            for run in all[..20_000].chunks(calls).zip(seed[20_000..].chunks(calls)) {
                let (mut good, mut failed) = ([0; 2], [0; 2]);
                for (&pause, &dice) in run.0.iter().zip(run.1) {
                    let bucket = bucket(pause);
                    fresh += 1;
                    if dice % 100 < failing {
                        taken += u32::from(is_soon(good, failed, bucket));
                        failed = with(failed, bucket);
                    } else {
                        good = with(good, bucket);
                    }
                }
            }
            // (Some 20 more by chance.)
            prop_assert!(taken * 100 <= fresh + 2_000, "{} of {}", taken, fresh);
        }

        /// At its own pace it is never taken for one that retries.
        #[test]
        fn never_soon_at_its_own_pace(ns: u64, known in 1_usize..100, failures in 0_usize..100) {
            let good = pauses(&std::vec![ns; known]);
            let failed = pauses(&std::vec![ns; failures]);
            prop_assert!(!is_soon(good, failed, bucket(ns)));
            prop_assert!(!is_soon(good, failed, bucket(ns / 2)));
        }
    }
}
