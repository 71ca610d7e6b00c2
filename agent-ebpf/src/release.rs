//! cgroup/sock_release: settles connects that failed inside the call.
//!
//! A connect without a route, without a free port, or refused by a program after ours fires no
//! state change and no error: only the end of the socket shows that nothing came of it.
//!
//! It is also where a program knows how a connection has ended: what it does next may be a retry.

use agent_common::{
    Stamp,
    event::OUTCOME_GAVE_UP,
    retry::{ENDED_UNANSWERED, ENDED_UNCONNECTED, ENDED_WELL},
    stamp::{
        PHASE_ENDED, PHASE_HELD, PHASE_IDLE, PHASE_OPEN, PHASE_STAMPED, STAMP_UNWATCHED,
        STAMP_WATCHED, unpack_request,
    },
};
use aya_ebpf::{
    EbpfContext as _,
    helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns},
    macros::cgroup_sock,
    programs::SockContext,
};

use crate::{
    ends::{self, Change},
    held, kernel, limits, outcome, retries, stamps,
};

const TCP_ESTABLISHED: u32 = 1;
const TCP_FIN_WAIT1: u32 = 4;
const TCP_FIN_WAIT2: u32 = 5;
const TCP_CLOSE: u32 = 7;
const RCV_SHUTDOWN: u32 = 1;
/// A connection whose last answer is older than this is not closed because of it.
const FRESH_NS: u64 = 1_000_000_000;

/// Always 1.
#[cgroup_sock(sock_release)]
pub fn release(ctx: SockContext) -> i32 {
    // SAFETY: the context is the socket.
    unsafe {
        let cookie = bpf_get_socket_cookie(ctx.as_ptr());
        let Some(found) = stamps::find(cookie) else {
            return 1;
        };
        let stamp = found.stamp;
        // Nobody tells of its end: since it was adopted, or since another sock_ops program has taken the
        // flag for it. The latter is looked for only where a place would be lost.
        let is_untold = (*stamp).flags & STAMP_UNWATCHED != 0
            || (limits::count(stamp) && !kernel::tells_of_context(ctx.sock));
        match (*stamp).phase {
            PHASE_IDLE => {}
            PHASE_ENDED => retries::known(stamp, cookie, bpf_ktime_get_ns(), (*stamp).ended),
            // Open: it ends when the kernel closes it, in a moment, if it is not closed already; or
            // here, where nobody will tell.
            PHASE_OPEN => {
                let state = (*ctx.sock).state;
                if state != TCP_CLOSE && !is_untold {
                    closes_open(stamp, cookie);
                    (*stamp).released = 1;
                    return 1;
                }
                // The program closes before the peer has.
                let by_program = matches!(state, TCP_ESTABLISHED | TCP_FIN_WAIT1 | TCP_FIN_WAIT2);
                let error = kernel::error_of_context(ctx.sock);
                let change = Change {
                    state: TCP_CLOSE,
                    error,
                    shut: if by_program { RCV_SHUTDOWN } else { 0 },
                    unread: 0,
                    cookie,
                };
                ends::closing(stamp, &change);
                limits::over(stamp);
                retries::known(stamp, cookie, bpf_ktime_get_ns(), (*stamp).ended);
            }
            PHASE_STAMPED => {
                held::ended(stamp);
                outcome::local(stamp, bpf_ktime_get_ns());
            }
            // Refused a little later: it ends when the kernel closes it, in a moment.
            PHASE_HELD if (*ctx.sock).state != TCP_CLOSE => {
                (*stamp).released = 1;
                return 1;
            }
            PHASE_HELD => held::ended(stamp),
            // Closed without our being told, or about to be.
            _ if (*ctx.sock).state == TCP_CLOSE || is_untold => {
                let error = kernel::error_of_context(ctx.sock);
                let exiting = error == 0 && kernel::current_is_exiting();
                let now = bpf_ktime_get_ns();
                held::ended(stamp);
                outcome::closed(stamp, now, error, exiting);
                retries::known(stamp, cookie, now, (*stamp).ended);
            }
            // Pending: it ends when the kernel closes it, in a moment.
            _ => {
                let now = bpf_ktime_get_ns();
                if outcome::gave_up(stamp, now) && !kernel::current_is_exiting() {
                    retries::known(stamp, cookie, now, ENDED_UNCONNECTED);
                }
                (*stamp).released = 1;
                return 1;
            }
        }
        found.give_back();
    }
    1
}

/// The program closes an open connection: what it knows by then.
#[inline(always)]
unsafe fn closes_open(stamp: *mut Stamp, cookie: u64) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let word = (&raw const (*stamp).request).read_volatile();
        let (number, _) = unpack_request(word);
        let is_answered = number == (&raw const (*stamp).answers).read_volatile();
        if is_answered && (*stamp).ended == ENDED_WELL && (*stamp).flags & STAMP_WATCHED == 0 {
            return;
        }
        let now = bpf_ktime_get_ns();
        let ended = if is_answered {
            // What the last answer said is old news on a connection that has been idle.
            if now.saturating_sub((*stamp).answered_ns) > FRESH_NS {
                ENDED_WELL
            } else {
                (*stamp).ended
            }
        } else {
            let waited_us = now.saturating_sub((*stamp).begun_ns) / 1000;
            let Some(row) = outcome::row_of(stamp) else {
                return;
            };
            if ends::given_up(stamp, waited_us, false) != OUTCOME_GAVE_UP
                || ends::is_one_way(row, word)
                || ends::is_usual(stamp, row, word)
                || kernel::current_is_exiting()
            {
                return;
            }
            ENDED_UNANSWERED
        };
        retries::known(stamp, cookie, now, ended);
    }
}
