//! iter/tcp: on an orderly stop or a pause, gives options back: on connects that are under way, and
//! keepalive on connections.
//!
//! Runs once for each TCP socket of the reader's network namespace, with the socket locked
//! (net/ipv4/tcp_ipv4.c, `bpf_iter_tcp_seq_show`).

use agent_common::stamp::{PHASE_IDLE, PHASE_OPEN, STAMP_TIMEOUT_SET};
use aya_ebpf::{
    cty::c_void,
    helpers::generated::{bpf_get_socket_cookie, bpf_skc_to_tcp_sock},
};

use crate::{keepalive, stamps, user_timeout};

/// Context of iter/tcp (net/ipv4/tcp_ipv4.c, `struct bpf_iter__tcp`).
#[repr(C)]
pub struct IterTcp {
    meta: *mut c_void,
    /// Null ends a run.
    pub sk_common: *mut c_void,
    uid: u32,
}

/// Always 0: go on.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/tcp")]
pub fn settle(ctx: *mut IterTcp) -> i32 {
    // SAFETY: the kernel hands a valid context; null ends a run.
    unsafe {
        let common = (*ctx).sk_common;
        if common.is_null() {
            return 0;
        }
        let sk = bpf_skc_to_tcp_sock(common).cast::<c_void>();
        if sk.is_null() {
            return 0;
        }
        let Some(found) = stamps::find(bpf_get_socket_cookie(sk)) else {
            return 0;
        };
        let stamp = found.stamp;
        if (*stamp).phase == PHASE_OPEN {
            keepalive::give_back(sk, stamp);
        }
        if (*stamp).flags & STAMP_TIMEOUT_SET == 0 {
            return 0;
        }
        if (*stamp).phase != PHASE_IDLE {
            user_timeout::give_back(sk, stamp);
        }
        (*stamp).flags &= !STAMP_TIMEOUT_SET;
        (*stamp).our_timeout_ms = 0;
    }
    0
}
