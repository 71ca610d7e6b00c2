//! cgroup/sock_release: settles connects that failed inside the call.
//!
//! A connect without a route, without a free port, or refused by a program after ours fires no
//! state change and no error: only the end of the socket shows that nothing came of it.

use agent_common::{
    Stamp,
    stamp::{PHASE_PENDING, PHASE_STAMPED},
};
use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::{bpf_ktime_get_ns, bpf_sk_storage_get},
    macros::cgroup_sock,
    programs::SockContext,
};

use crate::{kernel, maps, outcome};

const TCP_CLOSE: u32 = 7;

/// Always 1.
#[cgroup_sock(sock_release)]
pub fn release(ctx: SockContext) -> i32 {
    // SAFETY: the context is the socket; the map is a socket storage map.
    unsafe {
        let stamp = bpf_sk_storage_get(
            (&raw const maps::STAMPS).cast_mut().cast(),
            ctx.as_ptr(),
            core::ptr::null_mut(),
            0,
        )
        .cast::<Stamp>();
        if stamp.is_null() {
            return 1;
        }
        match (*stamp).phase {
            PHASE_STAMPED => outcome::local(stamp, bpf_ktime_get_ns()),
            // Closed without our being told: another sock_ops program has taken the flag for it.
            PHASE_PENDING if (*ctx.sock).state == TCP_CLOSE => {
                let error = kernel::error_of_context(ctx.sock);
                let exiting = error == 0 && kernel::current_is_exiting();
                outcome::closed(stamp, bpf_ktime_get_ns(), error, exiting);
            }
            _ => {}
        }
    }
    1
}
