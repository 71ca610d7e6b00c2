//! The kernel's clocks as the programs see them.

use rustix::time::{ClockId, clock_getres, clock_gettime};

use crate::core::Nanos;

/// CLOCK_MONOTONIC, the clock of `bpf_ktime_get_ns` (kernel/bpf/helpers.c).
pub fn now() -> Nanos {
    let t = clock_gettime(ClockId::Monotonic);
    Nanos(t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64)
}

/// Length of a kernel tick in ns: the resolution of a coarse clock is one tick
/// (kernel/time/posix-timers.c, `posix_get_coarse_res`).
pub fn tick_ns() -> u64 {
    let t = clock_getres(ClockId::MonotonicCoarse);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Whether the first SYNs are repeated at equal distances (kernel 6.5 and later:
/// net/ipv4/tcp_timer.c, `tcp_retransmit_timer`; the sysctl exists since then, default 4).
pub fn syn_repeats_are_linear() -> bool {
    std::fs::read_to_string("/proc/sys/net/ipv4/tcp_syn_linear_timeouts")
        .ok()
        .and_then(|text| text.trim().parse::<u32>().ok())
        .is_some_and(|count| count > 0)
}
