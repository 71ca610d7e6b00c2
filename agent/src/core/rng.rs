//! Jitter from a seed.

use super::Nanos;

/// SplitMix64 (Steele, Lea, Flood 2014): one word of state, equidistributed, good enough to keep
/// schedules apart. Never used for anything secret.
pub(super) struct SplitMix64(u64);

impl SplitMix64 {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `base` made shorter or longer by up to `percent` (at most 40) of itself, uniformly.
    pub(super) fn jitter(&mut self, base: Nanos, percent: u64) -> Nanos {
        debug_assert!(percent <= 40, "the span below would overflow");
        let span = base.0 / 100 * percent;
        // The modulo's bias is span / 2^64: nothing for any duration that occurs.
        base - Nanos(span) + Nanos(self.next() % (2 * span + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn jitter_stays_within_its_percentage(seed: u64, base: u64, percent in 0u64..=40) {
            let span = base / 100 * percent;
            let got = SplitMix64::new(seed).jitter(Nanos(base), percent).0;
            prop_assert!(got >= base - span && got <= base.saturating_add(span));
        }
    }

    #[test]
    fn jitter_reaches_both_sides() {
        let mut rng = SplitMix64::new(1);
        let draws: Vec<u64> = (0..1000).map(|_| rng.jitter(Nanos(1000), 20).0).collect();
        assert!(draws.iter().any(|&d| d < 820) && draws.iter().any(|&d| d > 1180));
    }
}
