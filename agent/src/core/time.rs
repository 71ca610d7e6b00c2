//! Time as a number.

use std::ops::{Add, Sub};

/// A moment (CLOCK_MONOTONIC, as `bpf_ktime_get_ns`) or a duration, in nanoseconds.
///
/// All arithmetic saturates: no time, however odd, may bring the agent down. The end of the range
/// (584 years) stands for "never".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The beginning of time, or no time at all.
    pub const ZERO: Self = Self(0);
    /// Never.
    pub const MAX: Self = Self(u64::MAX);

    /// A duration in seconds.
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000_000))
    }

    /// A duration in milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Whole milliseconds, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// `factor` times as long.
    pub const fn times(self, factor: u64) -> Self {
        Self(self.0.saturating_mul(factor))
    }

    /// Half as long, rounded down.
    pub const fn half(self) -> Self {
        Self(self.0 / 2)
    }
}

impl Add for Nanos {
    type Output = Self;

    /// Saturates at [`Nanos::MAX`].
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Sub for Nanos {
    type Output = Self;

    /// Saturates at [`Nanos::ZERO`]: the time since a moment in the future is none.
    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

#[cfg(test)]
mod tests {
    use super::Nanos;

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        assert_eq!(Nanos::MAX + Nanos(1), Nanos::MAX);
        assert_eq!(Nanos(1) - Nanos(2), Nanos::ZERO);
        assert_eq!(Nanos::MAX.times(2), Nanos::MAX);
        assert_eq!(Nanos::from_secs(u64::MAX), Nanos::MAX);
        assert_eq!(Nanos::from_millis(1_500).as_millis(), 1_500);
        assert_eq!(Nanos(3).half(), Nanos(1));
    }
}
