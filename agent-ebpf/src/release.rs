//! cgroup/sock_release: settles connects that failed inside the call.
//!
//! A connect without a route, without a free port, or refused by a program after ours fires no
//! state change and no error: only the end of the socket shows that nothing came of it.

use agent_common::stamp::{PHASE_IDLE, PHASE_OPEN, PHASE_STAMPED, STAMP_UNWATCHED};
use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns},
    macros::cgroup_sock,
    programs::SockContext,
};

use crate::{
    exchange::{self, Change},
    kernel, limits, outcome, stamps,
};

const TCP_ESTABLISHED: u32 = 1;
const TCP_FIN_WAIT1: u32 = 4;
const TCP_FIN_WAIT2: u32 = 5;
const TCP_CLOSE: u32 = 7;
const RCV_SHUTDOWN: u32 = 1;

/// Always 1.
#[cgroup_sock(sock_release)]
pub fn release(ctx: SockContext) -> i32 {
    // SAFETY: the context is the socket.
    unsafe {
        let cookie = bpf_get_socket_cookie(ctx.as_ptr());
        let Some(found) = stamps::find(cookie) else {
            return 1;
        };
        // Nobody tells of its end: since it was adopted, or since another sock_ops program has taken the
        // flag for it. The latter is looked for only where a place would be lost.
        let is_untold = (*found.stamp).flags & STAMP_UNWATCHED != 0
            || (limits::count(found.stamp) && !kernel::tells_of_context(ctx.sock));
        match (*found.stamp).phase {
            PHASE_IDLE => {}
            // Open: it ends when the kernel closes it, in a moment, if it is not closed already; or
            // here, where nobody will tell.
            PHASE_OPEN => {
                let state = (*ctx.sock).state;
                if state != TCP_CLOSE && !is_untold {
                    return 1;
                }
                // The program closes before the peer has.
                let by_program = matches!(state, TCP_ESTABLISHED | TCP_FIN_WAIT1 | TCP_FIN_WAIT2);
                let error = kernel::error_of_context(ctx.sock);
                let change = Change {
                    state: TCP_CLOSE,
                    error,
                    shut: if by_program { RCV_SHUTDOWN } else { 0 },
                    exiting: error == 0 && by_program && kernel::current_is_exiting(),
                    unread: 0,
                    cookie,
                };
                exchange::closing(found.stamp, bpf_ktime_get_ns(), &change);
                limits::over(found.stamp);
            }
            PHASE_STAMPED => outcome::local(found.stamp, bpf_ktime_get_ns()),
            // Closed without our being told, or about to be.
            _ if (*ctx.sock).state == TCP_CLOSE || is_untold => {
                let error = kernel::error_of_context(ctx.sock);
                let exiting = error == 0 && kernel::current_is_exiting();
                outcome::closed(found.stamp, bpf_ktime_get_ns(), error, exiting);
            }
            // Pending: it ends when the kernel closes it, in a moment.
            _ => return 1,
        }
        found.give_back();
    }
    1
}
