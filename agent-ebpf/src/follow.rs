//! sock_ops: follows a stamped connect from SYN to outcome.
//!
//! Callback flags are shared by all sock_ops programs of a socket: ours are added and taken away
//! again, those of others left as they are.

use agent_common::{
    Mode, Stamp,
    stamp::{
        PHASE_HELD, PHASE_OPEN, PHASE_PENDING, PHASE_STAMPED, STAMP_FOREIGN_RTO_CB,
        STAMP_FOREIGN_STATE_CB, STAMP_OBSERVED, STAMP_TIMEOUT_SET,
    },
};
use aya_ebpf::{
    EbpfContext as _,
    bindings::{BPF_SOCK_OPS_RTO_CB_FLAG, BPF_SOCK_OPS_STATE_CB_FLAG, bpf_sock},
    helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns},
    macros::sock_ops,
    programs::SockOpsContext,
};

use crate::{
    atomics,
    ends::{self, Change},
    held, keepalive,
    kernel::{TcpSocket, current_is_exiting},
    limits, outcome, rows,
    stamps::{self, Found},
    user_timeout,
};

// include/uapi/linux/bpf.h, enum at BPF_SOCK_OPS_VOID.
const TIMEOUT_INIT: u32 = 1;
const TCP_CONNECT_CB: u32 = 3;
const ACTIVE_ESTABLISHED_CB: u32 = 4;
/// A socket that connects to itself establishes through the passive callback.
const PASSIVE_ESTABLISHED_CB: u32 = 5;
const RTO_CB: u32 = 8;
const STATE_CB: u32 = 10;

const TCP_FIN_WAIT1: u32 = 4;
const TCP_FIN_WAIT2: u32 = 5;
const TCP_CLOSE: u32 = 7;
const TCP_CLOSE_WAIT: u32 = 8;

/// Always 1: the reply, where there is one, goes by the context.
#[sock_ops]
pub fn follow(ctx: SockOpsContext) -> u32 {
    let op = ctx.op();
    match op {
        TIMEOUT_INIT
        | TCP_CONNECT_CB
        | ACTIVE_ESTABLISHED_CB
        | PASSIVE_ESTABLISHED_CB
        | RTO_CB
        | STATE_CB => {}
        _ => return 1,
    }
    let state = ctx.arg(1);
    if op == STATE_CB
        && !matches!(
            state,
            TCP_CLOSE | TCP_FIN_WAIT1 | TCP_FIN_WAIT2 | TCP_CLOSE_WAIT
        )
    {
        return 1;
    }
    let sk = socket(&ctx);
    if sk.is_null() {
        return 1;
    }
    // Request sockets of a server arrive here too and never have a stamp.
    // SAFETY: a helper without preconditions.
    let cookie = unsafe { bpf_get_socket_cookie(ctx.as_ptr()) };
    let Some(found) = stamps::find(cookie) else {
        return 1;
    };
    let stamp = found.stamp;
    // SAFETY (to the end): map memory, a valid context.
    unsafe {
        let phase = (*stamp).phase;
        if op == TCP_CONNECT_CB {
            if phase == PHASE_STAMPED {
                begin(&ctx, stamp);
            } else if phase == PHASE_HELD {
                listen(&ctx, stamp);
            }
            return 1;
        }
        if phase == PHASE_OPEN && op == STATE_CB {
            let sk = TcpSocket::of(sk);
            let error = if state == TCP_CLOSE {
                sk.map_or(0, TcpSocket::error)
            } else {
                0
            };
            let change = Change {
                state,
                error,
                shut: sk.map_or(0, TcpSocket::shutdown),
                unread: sk.map_or(0, TcpSocket::unread),
                cookie,
            };
            if ends::closing(stamp, &change) {
                limits::over(stamp);
                drop_callbacks(&ctx, stamp);
                found.ended();
            }
            return 1;
        }
        if phase == PHASE_HELD {
            refused_later(&ctx, found, op, state);
            return 1;
        }
        if phase != PHASE_PENDING {
            return 1;
        }
        match op {
            TIMEOUT_INIT => {
                if (*stamp).syn_timeout_ticks != 0 {
                    ctx.set_reply((*stamp).syn_timeout_ticks);
                }
            }
            RTO_CB => {
                if timer_ran_out(&ctx, stamp, sk) {
                    found.ended();
                }
            }
            STATE_CB if state != TCP_CLOSE => {}
            STATE_CB => {
                let error = TcpSocket::of(sk).map_or(0, |socket| match socket.error() {
                    0 => socket.error_told(),
                    error => error,
                });
                let exiting = error == 0 && current_is_exiting();
                user_timeout::give_back(ctx.as_ptr(), stamp);
                drop_callbacks(&ctx, stamp);
                held::ended(stamp);
                outcome::closed(stamp, bpf_ktime_get_ns(), error, exiting);
                found.ended();
            }
            _ => {
                user_timeout::give_back(ctx.as_ptr(), stamp);
                held::ended(stamp);
                note_addresses(&ctx, stamp, sk);
                outcome::established(stamp, bpf_ktime_get_ns(), (*ctx.ops).snd_una);
                if (*stamp).phase == PHASE_OPEN {
                    keepalive::switch_on(ctx.as_ptr(), stamp);
                } else {
                    // Observe mode has counted it as timed out.
                    drop_callbacks(&ctx, stamp);
                    found.ended();
                }
            }
        }
    }
    1
}

#[inline(always)]
fn socket(ctx: &SockOpsContext) -> *mut bpf_sock {
    // SAFETY: the union has one meaning.
    unsafe { (*ctx.ops).__bindgen_anon_2.sk }
}

/// Notes what the agent needs to find the socket from outside.
#[inline(always)]
unsafe fn note_addresses(ctx: &SockOpsContext, stamp: *mut Stamp, sk: *mut bpf_sock) {
    const AF_INET: u32 = 2;
    const MAPPED: u32 = 0xffff_u32.to_be();
    // SAFETY: by the caller; the context is only read in words of four bytes.
    unsafe {
        let ops = ctx.ops;
        let local = (&raw mut (*stamp).local_addr).cast::<u32>();
        let peer = (&raw mut (*stamp).peer_addr).cast::<u32>();
        if ctx.family() == AF_INET {
            for (to, ip4) in [(local, ctx.local_ip4()), (peer, ctx.remote_ip4())] {
                to.cast::<u64>().write(0);
                to.add(2).write(MAPPED);
                to.add(3).write(ip4);
            }
        } else {
            let from_local = (&raw const (*ops).local_ip6).cast::<u32>();
            let from_peer = (&raw const (*ops).remote_ip6).cast::<u32>();
            local.write_volatile(from_local.read_volatile());
            local
                .add(1)
                .write_volatile(from_local.add(1).read_volatile());
            local
                .add(2)
                .write_volatile(from_local.add(2).read_volatile());
            local
                .add(3)
                .write_volatile(from_local.add(3).read_volatile());
            peer.write_volatile(from_peer.read_volatile());
            peer.add(1).write_volatile(from_peer.add(1).read_volatile());
            peer.add(2).write_volatile(from_peer.add(2).read_volatile());
            peer.add(3).write_volatile(from_peer.add(3).read_volatile());
        }
        // The context has the local port in host order, the peer's in the high half
        // (net/core/filter.c, `sock_ops_convert_ctx_access`).
        (*stamp).local_port_be = (ctx.local_port() as u16).to_be();
        (*stamp).peer_port_be = (ctx.remote_port() >> 16) as u16;
        (*stamp).ifindex = (*sk).bound_dev_if;
    }
}

/// The SYN is about to leave (net/ipv4/tcp_output.c, `tcp_connect`, before `tcp_connect_init`).
#[inline(always)]
unsafe fn begin(ctx: &SockOpsContext, stamp: *mut Stamp) {
    // SAFETY: by the caller.
    unsafe {
        (*stamp).begun_ns = bpf_ktime_get_ns();
        (*stamp).phase = PHASE_PENDING;
        listen(ctx, stamp);
        outcome::begun(stamp);
    }
}

/// Asks for the callbacks that are needed.
#[inline(always)]
unsafe fn listen(ctx: &SockOpsContext, stamp: *mut Stamp) {
    // SAFETY: by the caller.
    unsafe {
        let before = ctx.cb_flags();
        let mut wanted = before | BPF_SOCK_OPS_STATE_CB_FLAG;
        let mut flags = (*stamp).flags;
        if before & BPF_SOCK_OPS_STATE_CB_FLAG != 0 {
            flags |= STAMP_FOREIGN_STATE_CB;
        }
        if (*stamp).our_timeout_ms != 0 {
            if before & BPF_SOCK_OPS_RTO_CB_FLAG != 0 {
                flags |= STAMP_FOREIGN_RTO_CB;
            }
            wanted |= BPF_SOCK_OPS_RTO_CB_FLAG;
        }
        (*stamp).flags = flags;
        let _ = ctx.set_cb_flags(wanted as i32);
    }
}

/// A connect that is refused a little later: its only SYN timer, and its end.
#[inline(never)]
unsafe fn refused_later(ctx: &SockOpsContext, found: Found, op: u32, state: u32) {
    // SAFETY: by the caller.
    unsafe {
        let stamp = found.stamp;
        match op {
            TIMEOUT_INIT => {
                ctx.set_reply((*stamp).syn_timeout_ticks);
                return;
            }
            STATE_CB if state != TCP_CLOSE => return,
            RTO_CB => return,
            // (Established: what held its SYN had gone, or is paused.)
            _ => {}
        }
        user_timeout::give_back(ctx.as_ptr(), stamp);
        drop_callbacks(ctx, stamp);
        held::ended(stamp);
        found.ended();
    }
}

/// The connection is over. (One that is open keeps all of them: a timer that runs out then costs a look.)
#[inline(always)]
unsafe fn drop_callbacks(ctx: &SockOpsContext, stamp: *mut Stamp) {
    // SAFETY: by the caller.
    unsafe {
        let mut keep = ctx.cb_flags();
        if (*stamp).flags & STAMP_FOREIGN_STATE_CB == 0 {
            keep &= !BPF_SOCK_OPS_STATE_CB_FLAG;
        }
        if (*stamp).our_timeout_ms != 0 && (*stamp).flags & STAMP_FOREIGN_RTO_CB == 0 {
            keep &= !BPF_SOCK_OPS_RTO_CB_FLAG;
        }
        let _ = ctx.set_cb_flags(keep as i32);
    }
}

/// A SYN timer has run out, and the next one is about to be set (net/ipv4/tcp_timer.c,
/// `tcp_write_timeout`, then `tcp_clamp_rto_to_user_timeout`): TCP_USER_TIMEOUT set here ends the
/// connect in time, and a connect that needed no second SYN has never been touched. Observe mode
/// only counts, as soon as a timer runs out past the timeout; true when that has ended the connect
/// as far as we are concerned.
#[inline(always)]
unsafe fn timer_ran_out(ctx: &SockOpsContext, stamp: *mut Stamp, sk: *mut bpf_sock) -> bool {
    // SAFETY: by the caller.
    unsafe {
        let timeout = (*stamp).our_timeout_ms;
        if timeout == 0 || (*stamp).flags & STAMP_TIMEOUT_SET != 0 {
            return false;
        }
        let Some(control) = rows::control() else {
            return false;
        };
        let now = bpf_ktime_get_ns();
        let beat = atomics::load(&raw const (*control).heartbeat_ns);
        let mode = (&raw const (*control).mode).read_volatile();
        if mode == Mode::OFF || now.saturating_sub(beat) > (*control).heartbeat_max_age_ns {
            return false;
        }
        if (*stamp).flags & STAMP_OBSERVED != 0 {
            let limit = u64::from(timeout) * agent_common::NANOS_PER_MS;
            if now.saturating_sub((*stamp).begun_ns) >= limit {
                // Before the outcome: what is to be dropped is in the stamp.
                drop_callbacks(ctx, stamp);
                outcome::timed_out(stamp, now);
                return true;
            }
            return false;
        }
        // The program may have set its own since connect().
        let own = TcpSocket::of(sk).map_or(0, TcpSocket::user_timeout);
        if (own == 0 || own > timeout) && user_timeout::set(ctx.as_ptr(), timeout) {
            (*stamp).own_timeout_ms = own;
            (*stamp).flags |= STAMP_TIMEOUT_SET;
        }
        false
    }
}
