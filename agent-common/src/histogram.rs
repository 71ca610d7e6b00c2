//! Log-linear latency buckets, counted in the kernel.
//!
//! 16 buckets an octave: a bucket is at most 1/16 (6.25 %) wide, so its middle is within 3.2 % of
//! any value in it. 384 buckets of 32 bits cover 1 us to 2^27 us (134 s); longer goes into the
//! last one. Below 16 us each bucket is 1 us wide.

use bytemuck::{Pod, Zeroable};

use crate::layout;

/// Buckets of a histogram.
pub const BUCKETS: usize = 384;
const SUB_BITS: u32 = 4;
const SUB: u32 = 1 << SUB_BITS;

/// One histogram (1.5 KB). Counts wrap after 2^32 calls in a bucket; the agent keeps sums of
/// differences.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Histogram {
    /// Calls per bucket.
    pub counts: [u32; BUCKETS],
}

layout!(Histogram, size 1536, counts at 0);

/// The bucket of a latency in microseconds.
#[inline(always)]
pub const fn bucket(us: u64) -> usize {
    if us < SUB as u64 {
        return us as usize;
    }
    // Saturate first: the shift below works on 32 bits, which the eBPF target does well.
    let us = if us >= 1 << 27 {
        (1 << 27) - 1
    } else {
        us as u32
    };
    // Position of the highest bit by halving: the eBPF target has no count-leading-zeros.
    let mut high = 0;
    let mut rest = us;
    if rest >= 1 << 16 {
        high += 16;
        rest >>= 16;
    }
    if rest >= 1 << 8 {
        high += 8;
        rest >>= 8;
    }
    if rest >= 1 << 4 {
        high += 4;
        rest >>= 4;
    }
    if rest >= 1 << 2 {
        high += 2;
        rest >>= 2;
    }
    if rest >= 1 << 1 {
        high += 1;
    }
    let octave = high - SUB_BITS;
    (SUB * (octave + 1) + ((us >> octave) & (SUB - 1))) as usize
}

/// Lowest latency (us) of a bucket; the next bucket's is the first that does not belong to it.
pub const fn lower_bound(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    let sub = SUB as u64;
    if bucket < sub {
        return bucket;
    }
    let octave = bucket / sub - 1;
    (sub + bucket % sub) << octave
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ends() {
        assert_eq!(bucket(0), 0);
        assert_eq!(bucket(15), 15);
        assert_eq!(bucket(16), 16);
        assert_eq!(bucket((1 << 27) - 1), BUCKETS - 1);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    proptest! {
        #[test]
        fn a_value_lies_in_its_bucket(us in 0u64..(1 << 27)) {
            let b = bucket(us);
            prop_assert!(b < BUCKETS);
            prop_assert!(lower_bound(b) <= us && us < lower_bound(b + 1));
        }

        #[test]
        fn buckets_are_narrow(b in 16usize..BUCKETS) {
            let (low, high) = (lower_bound(b), lower_bound(b + 1));
            prop_assert!((high - low) * 16 <= low);
        }
    }
}
