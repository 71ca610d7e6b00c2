//! cgroup/getsockopt and cgroup/setsockopt: a program reads back the timeouts that it has set itself,
//! not ours, and what it sets later is its own.
//!
//! They run at every getsockopt() and setsockopt() of every watched program, so they are attached only
//! while some policy has options set from outside. The kernel has the socket locked
//! (kernel/bpf/cgroup.c, `__cgroup_bpf_run_filter_getsockopt`).

use agent_common::{
    Lent,
    lent::{LentKey, RECEIVE, SEND, Timeval},
    stamp::{PHASE_PENDING, STAMP_TIMEOUT_SET},
};
use aya_ebpf::{
    bindings::bpf_sockopt, helpers::generated::bpf_get_current_pid_tgid, macros::cgroup_sockopt,
    programs::SockoptContext,
};

use crate::{kernel, maps, rows, stamps};

const SOL_SOCKET: i32 = 1;
const IPPROTO_TCP: i32 = 6;
// include/uapi/asm-generic/socket.h; the second of each is for 64-bit times on 32-bit machines, and
// has the layout of the first on others.
const SO_RCVTIMEO: i32 = 20;
const SO_SNDTIMEO: i32 = 21;
const SO_RCVTIMEO_NEW: i32 = 66;
const SO_SNDTIMEO_NEW: i32 = 67;
const TCP_USER_TIMEOUT: i32 = 18;

const MICROS_PER_SECOND: i64 = 1_000_000;

/// Which of our options is asked about.
enum Asked {
    /// One that the agent sets.
    Lent(LentKey),
    /// TCP_USER_TIMEOUT of the socket with this cookie.
    User(u64),
}

/// Tells a program its own value.
#[cgroup_sockopt(getsockopt)]
pub fn reads_back(ctx: SockoptContext) -> i32 {
    // SAFETY: the kernel hands a valid context.
    unsafe {
        let call = ctx.sockopt;
        match asked(call) {
            Some(Asked::Lent(key)) if (*call).retval == 0 => {
                if let Some(lent) = maps::LENT.get_ptr(key) {
                    tell_time(call, lent);
                }
            }
            Some(Asked::User(cookie)) if (*call).retval == 0 => tell_user_timeout(call, cookie),
            _ => {}
        }
        let_pass(call)
    }
}

/// Notes that a program has set the option itself: from now on it is not ours.
#[cgroup_sockopt(setsockopt)]
pub fn chooses(ctx: SockoptContext) -> i32 {
    // SAFETY: the kernel hands a valid context.
    unsafe {
        let call = ctx.sockopt;
        match asked(call) {
            // What the kernel will refuse changes nothing.
            Some(Asked::Lent(key)) if is_time(call) => {
                let _ = maps::LENT.remove(key);
            }
            Some(Asked::User(cookie)) if (*call).optlen >= 4 => {
                if let Some(found) = stamps::find(cookie)
                    && (*found.stamp).phase == PHASE_PENDING
                {
                    (*found.stamp).flags &= !STAMP_TIMEOUT_SET;
                }
            }
            _ => {}
        }
        let_pass(call)
    }
}

/// The option of ours that a call is about, if it is one and somebody else's call.
#[inline(always)]
unsafe fn asked(call: *mut bpf_sockopt) -> Option<Asked> {
    // SAFETY: by the caller.
    unsafe {
        let option = match ((*call).level, (*call).optname) {
            (SOL_SOCKET, SO_RCVTIMEO | SO_RCVTIMEO_NEW) => Some(RECEIVE),
            (SOL_SOCKET, SO_SNDTIMEO | SO_SNDTIMEO_NEW) => Some(SEND),
            (IPPROTO_TCP, TCP_USER_TIMEOUT) => None,
            _ => return None,
        };
        let control = rows::control()?;
        if (bpf_get_current_pid_tgid() >> 32) as u32 == (*control).agent_pid {
            return None;
        }
        let cookie = kernel::cookie_of_context((*call).__bindgen_anon_1.sk);
        if cookie == 0 {
            return None;
        }
        Some(match option {
            Some(option) => Asked::Lent(LentKey { cookie, option }),
            None => Asked::User(cookie),
        })
    }
}

/// Always 1: the call goes on. Where the value is longer than what the kernel shows of it (a page), it
/// is told to take the original, or it would fail the call.
#[inline(always)]
unsafe fn let_pass(call: *mut bpf_sockopt) -> i32 {
    // SAFETY: by the caller; between the two pointers lies what the kernel shows.
    unsafe {
        let (begin, end) = ends(call);
        if i64::from((*call).optlen) > end as i64 - begin as i64 {
            (*call).optlen = 0;
        }
    }
    1
}

#[inline(always)]
unsafe fn ends(call: *mut bpf_sockopt) -> (*mut u8, *mut u8) {
    // SAFETY: by the caller; the unions have one meaning.
    unsafe {
        (
            (*call).__bindgen_anon_2.optval.cast(),
            (*call).__bindgen_anon_3.optval_end.cast(),
        )
    }
}

/// The value, if it has (at least) this type. Packet memory: the verifier wants the bounds compared.
#[inline(always)]
unsafe fn value<T>(call: *mut bpf_sockopt) -> Option<*mut T> {
    // SAFETY: by the caller.
    unsafe {
        let (begin, end) = ends(call);
        (begin.add(size_of::<T>()) <= end).then_some(begin.cast())
    }
}

/// `struct old_timeval32` (include/vdso/time32.h), of 32-bit programs.
#[repr(C)]
struct Timeval32 {
    seconds: i32,
    micros: i32,
}

#[inline(always)]
unsafe fn tell_time(call: *mut bpf_sockopt, lent: *const Lent) {
    // SAFETY: by the caller; bounds are compared.
    unsafe {
        let ours = (*lent).ours;
        if (*call).optlen == size_of::<Timeval>() as i32
            && let Some(time) = value::<Timeval>(call)
        {
            if (*time).seconds == ours.seconds && (*time).micros == ours.micros {
                (*time).seconds = (*lent).before.seconds;
                (*time).micros = (*lent).before.micros;
            }
        } else if (*call).optlen == size_of::<Timeval32>() as i32
            && let Some(time) = value::<Timeval32>(call)
            && i64::from((*time).seconds) == ours.seconds
            && i64::from((*time).micros) == ours.micros
        {
            (*time).seconds = (*lent).before.seconds as i32;
            (*time).micros = (*lent).before.micros as i32;
        }
    }
}

#[inline(always)]
unsafe fn tell_user_timeout(call: *mut bpf_sockopt, cookie: u64) {
    // SAFETY: by the caller; bounds are compared.
    unsafe {
        if let Some(found) = stamps::find(cookie)
            && (*found.stamp).phase == PHASE_PENDING
            && (*found.stamp).flags & STAMP_TIMEOUT_SET != 0
            && (*call).optlen == 4
            && let Some(value) = value::<u32>(call)
            && *value == (*found.stamp).our_timeout_ms
        {
            *value = (*found.stamp).own_timeout_ms;
        }
    }
}

/// Whether the kernel will take it (net/core/sock.c, `sock_set_timeout`).
#[inline(always)]
unsafe fn is_time(call: *mut bpf_sockopt) -> bool {
    // SAFETY: by the caller; bounds are compared.
    unsafe {
        let micros = if (*call).optlen >= size_of::<Timeval>() as i32 {
            value::<Timeval>(call).map(|time| (*time).micros)
        } else if (*call).optlen >= size_of::<Timeval32>() as i32 {
            value::<Timeval32>(call).map(|time| i64::from((*time).micros))
        } else {
            None
        };
        micros.is_some_and(|micros| (0..MICROS_PER_SECOND).contains(&micros))
    }
}
