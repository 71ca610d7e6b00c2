//! Refusing a connect(), at once or a little later, and telling the agent of it.

use agent_common::{
    COMM_LEN, Event, EventKind, NANOS_PER_MS, Row, Verdict,
    event::{
        EVENT_HELD_SPIN, EVENT_LIMIT, EVENT_RETRY_BUDGET, EVENT_RETRY_DEADLINE, EVENT_RETRY_LIMIT,
        EVENT_WOULD,
    },
    retry::{self, ENDED_WELL},
    spin::{self, SPIN_SLOTS},
    stamp::{PHASE_HELD, STAMP_HELD, STAMP_TIMEOUT_SET},
    syn::first_timeout_ticks,
};
use aya_ebpf::{
    cty::c_void,
    helpers::generated::{bpf_get_current_comm, bpf_get_current_pid_tgid},
};

use crate::{
    atomics, events, held, maps,
    retries::{self, OVER_BUDGET, OVER_DEADLINE, OVER_LIMIT},
    rows, stamps, user_timeout,
};

const ALLOW: i32 = 1;
const REFUSE: i32 = 0;
/// At most one event of a kind per row in this time, in units of [`retry::tick`]: a second.
const EVENT_EVERY: u32 = retry::tick(1_000_000_000) + 1;

/// A refusal's reason: the breaker.
pub const BY_BREAKER: u32 = 1;
/// A limit of connections.
pub const BY_LIMIT: u32 = 2;
/// Retries: this and one of the `OVER_` constants of [`crate::retries`].
pub const BY_RETRY: u32 = 2;
const BY_RETRY_LIMIT: u32 = BY_RETRY + OVER_LIMIT as u32;
const BY_RETRY_BUDGET: u32 = BY_RETRY + OVER_BUDGET as u32;
const BY_RETRY_DEADLINE: u32 = BY_RETRY + OVER_DEADLINE as u32;

/// What connect() returns where the operation's time is used up.
const ETIMEDOUT: u16 = 110;

/// A refusal.
pub struct Refusal {
    /// The row.
    pub row: *mut Row,
    /// Its index.
    pub index: u32,
    /// One of the `BY_` constants.
    pub why: u32,
    /// Now, ns.
    pub now: u64,
    /// The caller, as the kernel packs process and thread.
    pub pid_tgid: u64,
    /// The socket's cookie.
    pub cookie: u64,
    /// 0 where observe mode forgoes it.
    pub enforced: u32,
}

/// Refuses: what the hook is to return.
///
/// # Safety
/// `ctx` must be the program's context, and the refusal of its connect.
#[inline(never)]
pub unsafe fn refuse(ctx: *mut c_void, refusal: &Refusal) -> i32 {
    // SAFETY: by contract.
    unsafe {
        let errno = tell(refusal);
        let hold_ms = too_often(refusal);
        if hold_ms != 0 && hold(ctx, refusal, hold_ms) {
            let told_ns = refusal.now + u64::from(hold_ms) * NANOS_PER_MS;
            retries::told(refusal.index, refusal.pid_tgid as u32, told_ns);
            // (Here and not there for the stack's sake.)
            tell_held(
                refusal.row,
                refusal.index,
                hold_ms,
                EVENT_HELD_SPIN,
                refusal.now,
            );
            return ALLOW;
        }
        set_errno(errno);
        REFUSE
    }
}

/// How long the refusal is to be held, ms, because the task is refused too often.
#[inline(always)]
unsafe fn too_often(refusal: &Refusal) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let Some(policy) = maps::RETRY_POLICIES.get_ptr((*refusal.row).settings.policy) else {
            return 0;
        };
        let per_second = (*policy).spin_per_second;
        if per_second == 0 {
            return 0;
        }
        let task = refusal.pid_tgid as u32;
        let place = retry::place(retry::owner(task, 0), SPIN_SLOTS);
        match maps::SPINS.get_ptr_mut(place) {
            Some(spin) => spin::refused(&mut *spin, task, refusal.now, per_second),
            None => 0,
        }
    }
}

/// Lets the connect begin and never sends its SYN: it ends by TCP_USER_TIMEOUT, with ETIMEDOUT. False where
/// the program has a stricter timeout of its own, or where there is no room for a stamp.
#[inline(never)]
unsafe fn hold(ctx: *mut c_void, refusal: &Refusal, hold_ms: u32) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe {
        let Some(control) = rows::control() else {
            return false;
        };
        let Some(retries) = maps::RETRIES.get_ptr_mut(refusal.index) else {
            return false;
        };
        let own = user_timeout::get(ctx).unwrap_or(1);
        if own != 0 && own <= hold_ms {
            return false;
        }
        let Some(found) = stamps::claim(refusal.cookie) else {
            return false;
        };
        if !user_timeout::set(ctx, hold_ms) {
            found.give_back();
            return false;
        }
        let stamp = found.stamp;
        let linear = (*control).syn_linear != 0;
        (*stamp).row = refusal.index;
        (*stamp).incarnation = (*refusal.row).incarnation;
        (*stamp).our_timeout_ms = 0;
        (*stamp).own_timeout_ms = own;
        (*stamp).hold_ms = hold_ms;
        (*stamp).syn_count = 0;
        (*stamp).syn_timeout_ticks = first_timeout_ticks(hold_ms, (*control).tick_ns, linear);
        (*stamp).begun_ns = 0;
        (*stamp).request = 0;
        (*stamp).answers = 0;
        (*stamp).operation = 0;
        (*stamp).ended = ENDED_WELL;
        (*stamp).released = 0;
        (*stamp).flags = STAMP_TIMEOUT_SET | STAMP_HELD;
        (*stamp).phase = PHASE_HELD;
        atomics::add32(&raw mut (*retries).held_spin, 1);
        rows::count(|c| &raw mut (*c).held);
        held::delays();
        true
    }
}

/// Sets what connect() returns. Newer kernels want the verifier to know that the value is an errno
/// (-4095 to 0), and look at all 64 bits of it; aya's binding passes 32.
#[inline(always)]
unsafe fn set_errno(errno: u16) {
    /// BPF_FUNC_set_retval (include/uapi/linux/bpf.h).
    const SET_RETVAL: usize = 187;
    /// No errno is larger. A mask, because a comparison may be of another register's copy of it.
    const MAX_ERRNO: i64 = 4095;
    let errno = i64::from(errno) & MAX_ERRNO;
    // SAFETY: the number of a helper is its address, and it takes one integer.
    unsafe {
        let set_retval: unsafe extern "C" fn(i64) -> i64 = core::mem::transmute(SET_RETVAL);
        set_retval(-errno);
    }
}

/// What connect() returns, positive.
#[inline(always)]
unsafe fn errno_of(row: *mut Row, why: u32) -> u16 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        match why {
            // (A verdict that has just changed may say none.)
            BY_BREAKER if verdict.errno != 0 => verdict.errno,
            BY_RETRY_DEADLINE => ETIMEDOUT,
            _ => (*row).settings.limit_errno as u16,
        }
    }
}

/// Counts a refusal (or one that observe mode forgoes), reports it now and then, and says what connect() is
/// to return. (Those of retries are counted where they are judged.)
///
/// # Safety
/// The refusal must be of the program's connect.
#[inline(never)]
pub unsafe fn tell(refusal: &Refusal) -> u16 {
    let &Refusal {
        row,
        why,
        now,
        pid_tgid,
        enforced,
        ..
    } = refusal;
    // SAFETY: by contract, map memory.
    unsafe {
        let errno = errno_of(row, why);
        match (why, enforced != 0) {
            (BY_BREAKER, true) => atomics::add(&raw mut (*row).rejected_breaker, 1),
            (BY_BREAKER, false) => atomics::add(&raw mut (*row).would_reject_breaker, 1),
            (BY_LIMIT, true) => atomics::add(&raw mut (*row).rejected_limit, 1),
            (BY_LIMIT, false) => atomics::add(&raw mut (*row).would_reject_limit, 1),
            _ => 0,
        };
        if !is_due(&raw mut (*row).last_rejected_event, now) {
            return errno;
        }
        let would = if enforced != 0 { 0 } else { EVENT_WOULD };
        let reason = match why {
            BY_LIMIT => EVENT_LIMIT,
            BY_RETRY_LIMIT => EVENT_RETRY_LIMIT,
            BY_RETRY_BUDGET => EVENT_RETRY_BUDGET,
            BY_RETRY_DEADLINE => EVENT_RETRY_DEADLINE,
            _ => 0,
        };
        let mut event = Event {
            kind: EventKind::REJECTED,
            row: refusal.index,
            incarnation: (*row).incarnation,
            generation: Verdict::unpack(atomics::load(&raw const (*row).verdict)).generation,
            at_ns: now,
            errno: u32::from(errno),
            pid: (pid_tgid >> 32) as u32,
            tid: pid_tgid as u32,
            flags: reason | would,
            ..events::EMPTY
        };
        bpf_get_current_comm(event.comm.as_mut_ptr().cast(), COMM_LEN as u32);
        events::send(&event);
        errno
    }
}

/// Whether an event is to be sent whose last one was at `last`, and notes that it is.
#[inline(always)]
unsafe fn is_due(last: *mut u32, now: u64) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe {
        // (0 is never.)
        let tick = retry::tick(now) | 1;
        let before = last.read_volatile();
        (before == 0 || tick.wrapping_sub(before) >= EVENT_EVERY)
            && atomics::replace32(last, before, tick)
    }
}

/// Reports a held connect of the current task now and then. (It is counted where it is held.)
///
/// # Safety
/// `row` must be map memory, of that index.
#[inline(never)]
pub unsafe fn tell_held(row: *mut Row, index: u32, hold_ms: u32, flags: u32, now: u64) {
    // SAFETY: by contract.
    unsafe {
        if !is_due(&raw mut (*row).last_held_event, now) {
            return;
        }
        let pid_tgid = bpf_get_current_pid_tgid();
        let mut event = Event {
            kind: EventKind::HELD,
            row: index,
            incarnation: (*row).incarnation,
            generation: Verdict::unpack(atomics::load(&raw const (*row).verdict)).generation,
            at_ns: now,
            pid: (pid_tgid >> 32) as u32,
            tid: pid_tgid as u32,
            timeout_ms: hold_ms,
            flags,
            ..events::EMPTY
        };
        bpf_get_current_comm(event.comm.as_mut_ptr().cast(), COMM_LEN as u32);
        events::send(&event);
    }
}
