//! Admission after a breaker has closed: a destination that is just back gets its crowd in steps.
//!
//! For [`LENGTH_NS`] a share of the connects passes: 10 %, then 25 %, then 50 %. Beside the share a
//! floor passes in any case, so that who calls seldom never notices: the ramp is against crowds. The
//! kernel reckons both from the time that is left, so a ramp needs no agent to go on or to end.

/// Length of the ramp, ns.
pub const LENGTH_NS: u64 = 2_000_000_000;

/// Shares of the steps, percent; each step takes as long as the others.
pub const SHARES: [u32; 3] = [10, 25, 50];

/// Connects that pass at once, whatever the share says,
pub const FLOOR: u32 = 30;

/// and one more each so many ns: 20 a second.
pub const FLOOR_EVERY_NS: u64 = 50_000_000;

/// Share of the connects that pass when so much of the ramp is left, percent. 100 at its end; with more
/// left than a ramp is long, that of the first step.
#[inline(always)]
pub const fn share(left_ns: u64) -> u32 {
    const STEP: u64 = LENGTH_NS / SHARES.len() as u64;
    if left_ns == 0 {
        100
    } else if left_ns <= STEP {
        SHARES[2]
    } else if left_ns <= 2 * STEP {
        SHARES[1]
    } else {
        SHARES[0]
    }
}

/// Connects that pass beside the share from the ramp's begin until so much of it is left.
#[inline(always)]
pub const fn floor(left_ns: u64) -> u32 {
    let elapsed = LENGTH_NS.saturating_sub(left_ns);
    // At most 40 more: it fits.
    FLOOR + (elapsed / FLOOR_EVERY_NS) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_steps() {
        const MS: u64 = 1_000_000;
        assert_eq!([2000, 1400].map(|ms| share(ms * MS)), [10, 10]);
        assert_eq!([1300, 700].map(|ms| share(ms * MS)), [25, 25]);
        assert_eq!([600, 1].map(|ms| share(ms * MS)), [50, 50]);
        assert_eq!(share(0), 100);
        assert_eq!(
            [2000, 1951, 1950, 0].map(|ms| floor(ms * MS)),
            [30, 30, 31, 70]
        );
    }

    proptest! {
        #[test]
        fn more_passes_as_time_goes_by(a: u64, b: u64) {
            let (more, less) = (a.max(b), a.min(b));
            prop_assert!(share(more) <= share(less) && floor(more) <= floor(less));
            prop_assert!((10..=100).contains(&share(a)) && (30..=70).contains(&floor(a)));
        }
    }
}
