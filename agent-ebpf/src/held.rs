//! Held SYNs: a retry that waits its turn, and a refusal that is told a little later.
//!
//! The first SYN is dropped on its way out; the program sees a connect that takes longer. The kernel
//! sends it again when its first SYN timer runs out, which is therefore set to the hold (`follow`). The
//! reply that sets it is the base of the whole schedule: SYNs may follow one another quickly, so TCP_SYNCNT
//! is raised, TCP_USER_TIMEOUT bounds the whole, and SYNs that come too early are dropped, too. Both
//! options are given back when the connect has ended, however it does.

use agent_common::{
    Mode, NANOS_PER_MS, Stamp,
    retry::{backoff_ms, operation_number},
    stamp::{PHASE_HELD, PHASE_PENDING, STAMP_HELD, STAMP_TIMEOUT_SET},
};
use aya_ebpf::{
    cty::c_void,
    helpers::generated::{bpf_get_prandom_u32, bpf_getsockopt, bpf_ktime_get_ns, bpf_setsockopt},
};

use crate::{atomics, maps, outcome, rows, stamps, user_timeout};

const PASS: i32 = 1;
const DROP: i32 = 0;
const IPPROTO_TCP: i32 = 6;
const TCP_SYNCNT: i32 = 7;
/// SYNs that a held connect may want to send, most of which are dropped: the last one is never the end.
const SYNS: u32 = 64;
/// SYNs of a connect whose hold is over are at least so far apart, ns: as by default in the kernel.
const REPEAT_NS: u64 = 1_000_000_000;

/// Connects whose SYN was held, and that have not ended yet. Not in a map, for it is asked for each SYN; and
/// far from what all programs read, for it may change often.
#[unsafe(no_mangle)]
static mut DELAYED: Delayed = Delayed(0);

#[repr(align(64))]
struct Delayed(u64);

/// One connect more is delayed ([`ended`] says that it is not any more).
#[inline(always)]
pub fn delays() {
    // SAFETY: only ever changed by atomic additions.
    unsafe { atomics::add(&raw mut DELAYED.0, 1) };
}

/// One connect more is held; false when that would be more than `most` at once.
#[inline(always)]
pub fn take(most: u32) -> bool {
    let Some(counters) = maps::COUNTERS.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: map memory.
    unsafe {
        if atomics::add(&raw mut (*counters).held, 1) < u64::from(most) {
            return true;
        }
    }
    forget();
    false
}

/// One connect less is held.
#[inline(always)]
pub fn forget() {
    if let Some(counters) = maps::COUNTERS.get_ptr_mut(0) {
        // SAFETY: map memory.
        unsafe { atomics::add(&raw mut (*counters).held, u64::MAX) };
    }
}

/// Whether any SYN has to be looked at.
#[inline(always)]
pub fn any() -> bool {
    // SAFETY: as above.
    unsafe { atomics::load(&raw const DELAYED.0) != 0 }
}

/// Holds the SYN of a retry that [`take`] has let in. Where the program has a timeout of its own, the wait
/// would be taken from it: then it is not held.
///
/// # Safety
/// `ctx` must be the connect hook's context, `stamp` the socket's, complete but for its phase.
#[inline(never)]
pub unsafe fn hold(ctx: *mut c_void, stamp: *mut Stamp, own: u32, now: u64) {
    // SAFETY: by contract, map memory.
    unsafe {
        if !try_hold(ctx, stamp, own, now) {
            forget();
        }
    }
}

#[inline(always)]
unsafe fn try_hold(ctx: *mut c_void, stamp: *mut Stamp, own: u32, now: u64) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe {
        let (Some(control), Some(row), Some(retries)) = (
            rows::control(),
            outcome::unpinned_row_of(stamp),
            maps::RETRIES.get_ptr_mut((*stamp).row),
        ) else {
            return false;
        };
        let Some(policy) = maps::RETRY_POLICIES.get_ptr((*row).settings.policy) else {
            return false;
        };
        let timeout = (*stamp).our_timeout_ms;
        let tick_ns = (*control).tick_ns;
        if own != 0 || timeout == 0 || tick_ns == 0 {
            return false;
        }
        let retry = operation_number((*stamp).operation).saturating_sub(1);
        let longest_ms = backoff_ms((*policy).backoff_base_ms, (*policy).backoff_max_ms, retry);
        // In whole ticks: each number of them up to the longest is as likely.
        let longest = u64::from(longest_ms) * NANOS_PER_MS / tick_ns;
        let ticks = u64::from(bpf_get_prandom_u32()) * (longest + 1) >> 32;
        if ticks == 0 {
            return false;
        }
        let hold_ms = (ticks * tick_ns / NANOS_PER_MS) as u32;
        let Some(count) = syn_count(ctx) else {
            return false;
        };
        if !user_timeout::set(ctx, timeout + hold_ms) {
            return false;
        }
        if count < SYNS && set_syn_count(ctx, SYNS) {
            (*stamp).syn_count = count;
        }
        (*stamp).own_timeout_ms = own;
        (*stamp).hold_ms = hold_ms;
        (*stamp).syn_timeout_ticks = ticks as u32;
        // The tick under way counts as a whole one, so that the timer runs out up to a tick early.
        (*stamp).answered_ns = (now + (ticks - 1) * tick_ns).saturating_sub(tick_ns / 4);
        // SYNs dropped so far (before it is established).
        (*stamp).request_seq = 0;
        (*stamp).flags |= STAMP_TIMEOUT_SET | STAMP_HELD;
        atomics::add32(&raw mut (*retries).held_backoff, 1);
        delays();
        true
    }
}

#[inline(always)]
unsafe fn syn_count(ctx: *mut c_void) -> Option<u32> {
    let mut value: u32 = 0;
    let to = (&raw mut value).cast();
    // SAFETY: by the caller; the buffer is 4 bytes.
    let result = unsafe { bpf_getsockopt(ctx, IPPROTO_TCP, TCP_SYNCNT, to, 4) };
    (result == 0).then_some(value)
}

#[inline(always)]
unsafe fn set_syn_count(ctx: *mut c_void, mut value: u32) -> bool {
    let from = (&raw mut value).cast();
    // SAFETY: by the caller; the buffer is 4 bytes.
    unsafe { bpf_setsockopt(ctx, IPPROTO_TCP, TCP_SYNCNT, from, 4) == 0 }
}

/// Gives TCP_SYNCNT back, if ours is (still) on the socket.
///
/// # Safety
/// `ctx` must be the program's context, or a socket where the helpers take one; `stamp` the socket's.
#[inline(never)]
pub unsafe fn give_back(ctx: *mut c_void, stamp: *mut Stamp) {
    // SAFETY: by contract.
    unsafe {
        let before = (*stamp).syn_count;
        if before != 0 && syn_count(ctx) == Some(SYNS) {
            set_syn_count(ctx, before);
        }
        (*stamp).syn_count = 0;
    }
}

/// The connect has ended, one way or another. Give TCP_USER_TIMEOUT back first.
///
/// # Safety
/// `stamp` must be map memory.
#[inline(always)]
pub unsafe fn ended(stamp: *mut Stamp) {
    // SAFETY: by contract, map memory.
    unsafe {
        if (*stamp).hold_ms == 0 {
            return;
        }
        left(stamp);
        (*stamp).hold_ms = 0;
        atomics::add(&raw mut DELAYED.0, u64::MAX);
    }
}

/// Its SYN is not held any more.
#[inline(always)]
unsafe fn left(stamp: *mut Stamp) {
    // SAFETY: by the caller, map memory.
    unsafe {
        if (*stamp).flags & STAMP_HELD != 0 {
            (*stamp).flags &= !STAMP_HELD;
            forget();
        }
    }
}

/// A SYN on its way out: whether it may leave, as the hook returns it.
///
/// # Safety
/// Egress only, which has the socket locked.
#[inline(never)]
pub unsafe fn syn(cookie: u64) -> i32 {
    let Some(found) = stamps::find(cookie) else {
        return PASS;
    };
    let stamp = found.stamp;
    // SAFETY: map memory.
    unsafe {
        let phase = (*stamp).phase;
        if phase != PHASE_HELD && (phase != PHASE_PENDING || (*stamp).hold_ms == 0) {
            return PASS;
        }
        let Some(control) = rows::control() else {
            return PASS;
        };
        let now = bpf_ktime_get_ns();
        let beat = atomics::load(&raw const (*control).heartbeat_ns);
        let acts = (&raw const (*control).mode).read_volatile() == Mode::ENFORCE
            && now.saturating_sub(beat) <= (*control).heartbeat_max_age_ns;
        if phase == PHASE_HELD {
            // (Once its TCP_USER_TIMEOUT has been given back, nothing else would end it for long.)
            return if acts { DROP } else { PASS };
        }
        let is_held = (*stamp).flags & STAMP_HELD != 0;
        if acts {
            let half_ns = u64::from((*stamp).our_timeout_ms) * (NANOS_PER_MS / 2);
            // (A little less, for the timers' sake.)
            let apart_ns = if half_ns > REPEAT_NS {
                half_ns
            } else {
                REPEAT_NS
            } * 7
                / 8;
            let may_leave_ns = (*stamp).answered_ns + if is_held { 0 } else { apart_ns };
            let is_first = is_held && (*stamp).request_seq == 0;
            if is_first || now < may_leave_ns {
                (*stamp).request_seq = 1;
                return DROP;
            }
        }
        if is_held {
            left(stamp);
            // From here on the connect counts.
            (*stamp).begun_ns = now;
        }
        (*stamp).answered_ns = now;
        PASS
    }
}
