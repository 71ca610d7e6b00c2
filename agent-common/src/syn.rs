//! When the first SYN is repeated, so that a connect timeout is exact.
//!
//! TCP_USER_TIMEOUT alone ends a connect only when a SYN timer runs out, and the first runs for
//! one second. The reply to `BPF_SOCK_OPS_TIMEOUT_INIT` sets that first timer, and with it the
//! schedule that follows: one lost SYN is still repeated, and the last leg before the end is
//! shorter than 64 ticks, because timers of 64 ticks and more are rounded up to a granule of
//! 8 (kernel/time/timer.c, `calc_index`).

/// Longest leg, in ticks, that the timer wheel keeps exactly.
const EXACT_TICKS: u64 = 63;
/// Up to this connect timeout the SYN is repeated once, half way, ms.
const HALF_WAY_MS: u64 = 500;
/// From this connect timeout on the kernel's own schedule (1 s) is left alone, ms: it is late by
/// less than one granule of 8 ticks.
const KERNEL_SCHEDULE_MS: u64 = 4_500;
/// Aimed at: the first repeat after about this long, ms, as the kernel does by default.
const USUAL_MS: u64 = 1_000;

/// First SYN timeout in ticks for a connect timeout; 0: leave the kernel's.
///
/// `linear` says whether the first repeats come at equal distances (kernel 6.5 and later,
/// `tcp_syn_linear_timeouts`) or at doubling ones.
#[inline(always)]
pub fn first_timeout_ticks(timeout_ms: u32, tick_ns: u64, linear: bool) -> u32 {
    let timeout_ms = timeout_ms as u64;
    if timeout_ms == 0 || tick_ns == 0 || timeout_ms > KERNEL_SCHEDULE_MS {
        return 0;
    }
    let ticks = timeout_ms * 1_000_000 / tick_ns;
    if ticks < 2 {
        return 1;
    }
    if timeout_ms <= HALF_WAY_MS || ticks <= 2 * EXACT_TICKS {
        return (ticks / 2) as u32;
    }
    let rest = ticks - EXACT_TICKS;
    let usual = USUAL_MS * 1_000_000 / tick_ns;
    // Legs before the last: 1, 2, ... of equal length, or 1 + 2 + 4 ... times the first.
    let mut parts = 1;
    let mut leg = 0;
    while leg < 3 && rest > usual * parts {
        leg += 1;
        parts = if linear { parts + 1 } else { parts * 2 + 1 };
    }
    (rest / parts) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HZ_250: u64 = 4_000_000;

    #[test]
    fn known_values() {
        assert_eq!(first_timeout_ticks(0, HZ_250, true), 0);
        assert_eq!(first_timeout_ticks(100, HZ_250, true), 12);
        assert_eq!(first_timeout_ticks(300, HZ_250, true), 37);
        assert_eq!(first_timeout_ticks(500, HZ_250, true), 62);
        assert_eq!(first_timeout_ticks(1_000, HZ_250, true), 187);
        assert_eq!(first_timeout_ticks(2_000, HZ_250, true), 218);
        assert_eq!(first_timeout_ticks(2_000, HZ_250, false), 145);
        assert_eq!(first_timeout_ticks(5_000, HZ_250, true), 0);
        assert_eq!(first_timeout_ticks(1_000, 0, true), 0);
    }

    proptest! {
        /// The legs of the schedule end at most 63 ticks (plus what division drops) before the
        /// timeout, and at least one repeat happens before it.
        #[test]
        fn the_last_leg_is_exact(
            timeout_ms in 501u32..4_500,
            tick_ns in prop::sample::select(&[1_000_000u64, 3_333_333, 4_000_000, 10_000_000][..]),
            linear: bool,
        ) {
            let ticks = u64::from(timeout_ms) * 1_000_000 / tick_ns;
            let first = u64::from(first_timeout_ticks(timeout_ms, tick_ns, linear));
            prop_assert!(first > 0 && first < ticks);
            let (mut at, mut leg) = (0, first);
            while at + leg <= ticks {
                at += leg;
                if !linear { leg *= 2; }
            }
            // Half-way schedules of slow clocks have a short timeout in ticks anyway.
            prop_assert!(ticks - at <= 63 + 7 || ticks <= 126, "{ticks} {at} {first}");
        }
    }
}
