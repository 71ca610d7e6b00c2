//! TCP_USER_TIMEOUT of a socket, from inside a program.

use agent_common::{Stamp, stamp::STAMP_TIMEOUT_SET};
use aya_ebpf::{
    cty::c_void,
    helpers::generated::{bpf_getsockopt, bpf_setsockopt},
};

use crate::held;

const IPPROTO_TCP: i32 = 6;
const TCP_USER_TIMEOUT: i32 = 18;

/// The value in ms (0: none), or `None` when the kernel does not tell.
///
/// # Safety
/// `ctx` must be the program's context, or a socket where the helper takes one.
#[inline(always)]
pub unsafe fn get(ctx: *mut c_void) -> Option<u32> {
    let mut value: u32 = 0;
    // SAFETY: by contract; the buffer is 4 bytes.
    let result = unsafe {
        bpf_getsockopt(
            ctx,
            IPPROTO_TCP,
            TCP_USER_TIMEOUT,
            (&raw mut value).cast(),
            4,
        )
    };
    (result == 0).then_some(value)
}

/// Sets the value in ms; false when the kernel refuses.
///
/// # Safety
/// As [`get`].
#[inline(always)]
pub unsafe fn set(ctx: *mut c_void, mut value: u32) -> bool {
    // SAFETY: by contract; the buffer is 4 bytes.
    unsafe {
        bpf_setsockopt(
            ctx,
            IPPROTO_TCP,
            TCP_USER_TIMEOUT,
            (&raw mut value).cast(),
            4,
        ) == 0
    }
}

/// Gives the program's value back, if ours is (still) on the socket; and TCP_SYNCNT, where the SYN was held.
///
/// # Safety
/// As [`get`]; `stamp` must be the socket's.
#[inline(always)]
pub unsafe fn give_back(ctx: *mut c_void, stamp: *mut Stamp) {
    // SAFETY: by contract.
    unsafe {
        if (*stamp).flags & STAMP_TIMEOUT_SET != 0
            && get(ctx) == Some((*stamp).our_timeout_ms + (*stamp).hold_ms)
        {
            set(ctx, (*stamp).own_timeout_ms);
        }
        if (*stamp).syn_count != 0 {
            held::give_back(ctx, stamp);
        }
    }
}
