//! Keepalive for connections whose program has not asked for it (SO_KEEPALIVE and its times).

use agent_common::{Mode, Stamp, stamp::STAMP_KEEPALIVE};
use aya_ebpf::{
    cty::c_void,
    helpers::generated::{bpf_getsockopt, bpf_ktime_get_ns, bpf_setsockopt},
};

use crate::{atomics, outcome, rows};

const SOL_SOCKET: i32 = 1;
const SO_KEEPALIVE: i32 = 9;
const IPPROTO_TCP: i32 = 6;
const TCP_KEEPIDLE: i32 = 4;
const TCP_KEEPINTVL: i32 = 5;
const TCP_KEEPCNT: i32 = 6;

/// Probes without an answer that end the connection.
const PROBES: u32 = 4;
/// Longest time between two of them, s: the kernel's own (net.ipv4.tcp_keepalive_intvl).
const LONGEST_INTERVAL: u32 = 75;

#[inline(always)]
unsafe fn get(ctx: *mut c_void, level: i32, name: i32) -> Option<u32> {
    let mut value: u32 = 0;
    // SAFETY: by the caller; the buffer is 4 bytes.
    let result = unsafe { bpf_getsockopt(ctx, level, name, (&raw mut value).cast(), 4) };
    (result == 0).then_some(value)
}

#[inline(always)]
unsafe fn set(ctx: *mut c_void, level: i32, name: i32, mut value: u32) -> bool {
    // SAFETY: by the caller; the buffer is 4 bytes.
    unsafe { bpf_setsockopt(ctx, level, name, (&raw mut value).cast(), 4) == 0 }
}

/// Switches it on for a connection that has just been established, if the policy says so and the
/// program has not.
///
/// # Safety
/// `ctx` must be the program's context, `stamp` the connection's.
#[inline(always)]
pub unsafe fn switch_on(ctx: *mut c_void, stamp: *mut Stamp) {
    // SAFETY: by contract, map memory.
    unsafe {
        let Some(row) = outcome::row_of(stamp) else {
            return;
        };
        let idle = (*row).settings.keepalive_s;
        if idle == 0 {
            return;
        }
        let Some(control) = rows::control() else {
            return;
        };
        let beat = atomics::load(&raw const (*control).heartbeat_ns);
        let is_awake = bpf_ktime_get_ns().saturating_sub(beat) <= (*control).heartbeat_max_age_ns;
        if (&raw const (*control).mode).read_volatile() != Mode::ENFORCE
            || !is_awake
            || get(ctx, SOL_SOCKET, SO_KEEPALIVE) != Some(0)
        {
            return;
        }
        let interval = match idle / PROBES {
            0 => 1,
            LONGEST_INTERVAL.. => LONGEST_INTERVAL,
            interval => interval,
        };
        if set(ctx, IPPROTO_TCP, TCP_KEEPIDLE, idle)
            && set(ctx, IPPROTO_TCP, TCP_KEEPINTVL, interval)
            && set(ctx, IPPROTO_TCP, TCP_KEEPCNT, PROBES)
            && set(ctx, SOL_SOCKET, SO_KEEPALIVE, 1)
        {
            (*stamp).flags |= STAMP_KEEPALIVE;
        }
    }
}

/// Switches it off again where it is still ours. The times stay, without effect.
///
/// # Safety
/// As [`switch_on`]; `ctx` may be a socket where the helpers take one.
#[inline(always)]
pub unsafe fn give_back(ctx: *mut c_void, stamp: *mut Stamp) {
    // SAFETY: by contract, map memory.
    unsafe {
        if (*stamp).flags & STAMP_KEEPALIVE == 0 {
            return;
        }
        (*stamp).flags &= !STAMP_KEEPALIVE;
        // The program may have taken it over, with a time of its own.
        let ours = outcome::row_of(stamp).map_or(0, |row| (*row).settings.keepalive_s);
        if get(ctx, IPPROTO_TCP, TCP_KEEPIDLE) == Some(ours) {
            set(ctx, SOL_SOCKET, SO_KEEPALIVE, 0);
        }
    }
}
