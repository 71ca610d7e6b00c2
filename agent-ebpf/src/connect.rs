//! cgroup/connect4 and cgroup/connect6: the verdict, and the stamp for what follows.

use agent_common::{
    COMM_LEN, DestinationKey, Event, EventKind, Mode, Row, Stamp, Verdict,
    event::{EVENT_RETRY_BUDGET, EVENT_RETRY_LIMIT, EVENT_WOULD},
    key::mapped,
    ramp,
    retry::{self, ENDED_WELL},
    row::{OTHER_ROW, ROW_PROTECTED, ROW_RETRIES},
    stamp::{
        PHASE_ENDED, PHASE_IDLE, PHASE_OPEN, PHASE_STAMPED, STAMP_OBSERVED, STAMP_PROBE,
        STAMP_PROBE_BY_EXCHANGE, STAMP_UNJUDGED, STAMP_WATCHED,
    },
    syn::first_timeout_ticks,
    verdict::{
        STATE_CLOSED, STATE_FORCED_CLOSED, STATE_FORCED_OPEN, STATE_HALF_OPEN, STATE_OPEN,
        STATE_RAMP, VERDICT_PROBE_BY_EXCHANGE,
    },
};
use aya_ebpf::{
    EbpfContext as _,
    bindings::bpf_sock,
    helpers::generated::{
        bpf_get_current_cgroup_id, bpf_get_current_comm, bpf_get_current_pid_tgid,
        bpf_get_netns_cookie, bpf_get_prandom_u32, bpf_get_retval, bpf_get_socket_cookie,
        bpf_ktime_get_ns,
    },
    macros::cgroup_sock_addr,
    programs::SockAddrContext,
};

use crate::{
    atomics, events,
    exchange::{self, Change},
    kernel::TcpSocket,
    opaque::{hidden, hidden64},
    outcome, probes,
    retries::{self, OVER_BUDGET, OVER_LIMIT},
    rows,
    stamps::{self, Found},
    user_timeout,
};

const ALLOW: i32 = 1;
const REFUSE: i32 = 0;
const IPPROTO_TCP: u32 = 6;
const AF_INET: u32 = 2;
const TCP_CLOSE: u32 = 7;
const ECONNABORTED: u32 = 103;
const AF_INET6: u32 = 10;
/// At most one `rejected` event per row in this time.
const REJECT_EVENT_EVERY_NS: u64 = 1_000_000_000;

/// IPv4.
#[cgroup_sock_addr(connect4)]
pub fn connect4(ctx: SockAddrContext) -> i32 {
    // SAFETY: the kernel hands a valid context.
    let (protocol, family, addr) = unsafe {
        (
            (*ctx.sock_addr).protocol,
            (*ctx.sock_addr).user_family,
            (*ctx.sock_addr).user_ip4,
        )
    };
    if protocol != IPPROTO_TCP || family != AF_INET {
        return ALLOW;
    }
    judge(&ctx, mapped(usable4(addr.to_ne_bytes())), 0)
}

/// IPv6, and IPv4 in its mapped form (Java's default).
#[cgroup_sock_addr(connect6)]
pub fn connect6(ctx: SockAddrContext) -> i32 {
    // SAFETY: as above.
    let (protocol, family, words) = unsafe {
        (
            (*ctx.sock_addr).protocol,
            (*ctx.sock_addr).user_family,
            (*ctx.sock_addr).user_ip6,
        )
    };
    // The hook comes before the kernel's own check of the family (net/ipv6/tcp_ipv6.c,
    // `tcp_v6_pre_connect`): with another one, the address is what lay behind it in memory.
    if protocol != IPPROTO_TCP || family != AF_INET6 {
        return ALLOW;
    }
    let mut addr = [0u8; 16];
    addr[0..4].copy_from_slice(&words[0].to_ne_bytes());
    addr[4..8].copy_from_slice(&words[1].to_ne_bytes());
    addr[8..12].copy_from_slice(&words[2].to_ne_bytes());
    let mut last = words[3];
    if words[0] | words[1] == 0 {
        if words[2] == 0xffff_u32.to_be() {
            last = u32::from_ne_bytes(usable4(last.to_ne_bytes()));
        } else if words[2] | last == 0 {
            last = 1_u32.to_be();
        }
    }
    addr[12..16].copy_from_slice(&hidden(last).to_ne_bytes());
    // A link-local address means nothing without its interface; where the socket is not bound to
    // one yet, all interfaces share a row (the scope id of the address is not in the context).
    let link_local = addr[0] == 0xfe && addr[1] & 0xc0 == 0x80;
    let ifindex = if link_local {
        // SAFETY: as above; `sk` is never null in this hook.
        unsafe { (*socket(&ctx)).bound_dev_if }
    } else {
        0
    };
    judge(&ctx, addr, hidden(ifindex))
}

/// Connecting to 0.0.0.0 reaches this host (net/ipv4/route.c, `ip_route_output_key_hash_rcu`).
#[inline(always)]
fn usable4(addr: [u8; 4]) -> [u8; 4] {
    if addr == [0; 4] { [127, 0, 0, 1] } else { addr }
}

#[inline(always)]
fn socket(ctx: &SockAddrContext) -> *mut bpf_sock {
    // SAFETY: the union has one meaning.
    unsafe { (*ctx.sock_addr).__bindgen_anon_1.sk }
}

/// Decides about one `connect()` and stamps the socket if it passes.
#[inline(always)]
fn judge(ctx: &SockAddrContext, addr: [u8; 16], ifindex: u32) -> i32 {
    let Some(control) = rows::control() else {
        return ALLOW;
    };
    // SAFETY (here and below): helpers without preconditions, map memory, a valid context.
    unsafe {
        let pid_tgid = bpf_get_current_pid_tgid();
        let pid = (pid_tgid >> 32) as u32;
        if pid == (*control).agent_pid {
            return ALLOW;
        }
        // An MPTCP socket is none, and passes uncounted; its subflows are the kernel's own sockets,
        // which are counted and otherwise left alone.
        let Some(sk) = TcpSocket::of(socket(ctx)) else {
            return ALLOW;
        };
        let now = bpf_ktime_get_ns();
        let cookie = bpf_get_socket_cookie(ctx.as_ptr());
        if let Some(found) = stamps::find(cookie) {
            unfinished(ctx, found, now);
        }
        let key = DestinationKey {
            cgroup_id: bpf_get_current_cgroup_id(),
            netns_cookie: bpf_get_netns_cookie(ctx.as_ptr()),
            addr,
            ifindex,
            port_be: (*ctx.sock_addr).user_port as u16,
            reserved: 0,
        };
        let Some((index, row)) = rows::find_or_create(&key, sk) else {
            return ALLOW;
        };
        let before_ns = (*row).last_connect_ns;
        (*row).last_connect_ns = now;
        (*row).last_pid = pid;
        if bpf_get_retval() != 0 {
            // Another program has refused it already: no slot is taken, no option set.
            atomics::add(&raw mut (*row).local, 1);
            return ALLOW;
        }

        let mode = (&raw const (*control).mode).read_volatile();
        let beat = atomics::load(&raw const (*control).heartbeat_ns);
        let awake = now.saturating_sub(beat) <= (*control).heartbeat_max_age_ns;
        let is_kernels = sk.is_kernels();
        let acting =
            mode != Mode::OFF && awake && (*row).settings.flags & ROW_PROTECTED == 0 && !is_kernels;

        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        let mut flags = if is_kernels { STAMP_UNJUDGED } else { 0 };
        if acting && verdict.state != STATE_CLOSED {
            let left = atomics::load(&raw const (*row).verdict_until_ns).saturating_sub(now);
            let passes = match verdict.state {
                STATE_OPEN | STATE_FORCED_OPEN => left == 0,
                STATE_HALF_OPEN | STATE_RAMP if left != 0 => {
                    let ramp = verdict.state == STATE_RAMP;
                    let limit = if ramp {
                        ramp::floor(left)
                    } else {
                        (&raw const (*row).settings.probe_limit).read_volatile()
                    };
                    let claimed = probes::claim(row, verdict.generation, limit);
                    if claimed && !ramp {
                        flags |= STAMP_PROBE;
                        if verdict.flags & VERDICT_PROBE_BY_EXCHANGE != 0 {
                            flags |= STAMP_PROBE_BY_EXCHANGE;
                        }
                    }
                    claimed || (ramp && bpf_get_prandom_u32() % 100 < ramp::share(left))
                }
                _ => true,
            };
            if !passes {
                let enforced = mode == Mode::ENFORCE;
                let refusal = Refusal {
                    index,
                    generation: verdict.generation,
                    errno: verdict.errno,
                    reason: 0,
                };
                if enforced {
                    atomics::add(&raw mut (*row).rejected_breaker, 1);
                } else {
                    atomics::add(&raw mut (*row).would_reject_breaker, 1);
                }
                refused(row, now, pid_tgid, enforced, &refusal);
                if enforced {
                    refuse_with(verdict.errno);
                    return REFUSE;
                }
            }
        }
        // From here on the verifier need not know which way it came.
        let acting = hidden(u32::from(acting)) != 0;
        let mut flags = hidden(flags);
        // A probe is wanted, and an operator's word is the last.
        let may_refuse = acting && flags & STAMP_PROBE == 0 && verdict.state != STATE_FORCED_CLOSED;
        let may_do = hidden(if may_refuse { mode } else { Mode::OFF });
        let mut operation = retry::fresh(now);
        let mut watched = 0;
        if index == OTHER_ROW || (*row).settings.flags & ROW_RETRIES == 0 {
            // Retries are not looked for.
        } else if retries::is_watched(row, before_ns, now) {
            watched = STAMP_WATCHED;
            operation = retries::judge(row, index, now, pid_tgid, may_do);
        } else if retry::is_sample(now) {
            watched = STAMP_WATCHED;
        }
        flags |= hidden(watched);
        if operation <= OVER_BUDGET {
            let errno = retries::errno(row);
            let refusal = Refusal {
                index,
                generation: verdict.generation,
                errno,
                reason: if operation == OVER_LIMIT {
                    EVENT_RETRY_LIMIT
                } else {
                    EVENT_RETRY_BUDGET
                },
            };
            let enforced = mode == Mode::ENFORCE;
            refused(row, now, pid_tgid, enforced, &refusal);
            if enforced {
                refuse_with(errno);
                return REFUSE;
            }
            operation = hidden64(retries::let_pass(index, pid_tgid as u32));
        }

        let Some(found) = stamps::claim(cookie) else {
            rows::count(|c| &raw mut (*c).unstamped);
            if flags & STAMP_PROBE != 0 {
                probes::give_back(row, verdict.generation);
            }
            return ALLOW;
        };
        let stamp = found.stamp;
        (*stamp).row = index;
        (*stamp).incarnation = (*row).incarnation;
        (*stamp).generation = verdict.generation;
        (*stamp).our_timeout_ms = 0;
        (*stamp).own_timeout_ms = 0;
        (*stamp).syn_timeout_ticks = 0;
        (*stamp).begun_ns = 0;
        (*stamp).operation = operation;
        (*stamp).ended = ENDED_WELL;
        (*stamp).released = 0;
        (*stamp).pid = pid;
        (*stamp).tid = pid_tgid as u32;
        bpf_get_current_comm((&raw mut (*stamp).comm).cast(), COMM_LEN as u32);
        if acting && (*row).settings.connect_timeout_ms != 0 {
            if mode == Mode::OBSERVE {
                // Only noted: no timer of the program's may change.
                (*stamp).our_timeout_ms = (*row).settings.connect_timeout_ms;
                flags |= STAMP_OBSERVED;
            } else {
                bound(stamp, row, sk.user_timeout());
            }
        }
        (*stamp).flags = flags;
        (*stamp).phase = PHASE_STAMPED;
        if flags & STAMP_PROBE != 0 {
            events::send(&Event {
                kind: EventKind::PROBE_STARTED,
                row: index,
                incarnation: (*row).incarnation,
                generation: verdict.generation,
                at_ns: now,
                pid,
                tid: pid_tgid as u32,
                ..events::EMPTY
            });
        }
    }
    ALLOW
}

/// Sets what connect() returns. Newer kernels want the verifier to know that the value is an errno
/// (-4095 to 0), and look at all 64 bits of it; aya's binding passes 32.
#[inline(always)]
unsafe fn refuse_with(errno: u16) {
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

/// Settles what an earlier connect() on this socket has left behind: it failed before a SYN was
/// sent, or its end was hidden from us (another program took the callback flags away).
#[inline(always)]
unsafe fn unfinished(ctx: &SockAddrContext, found: Found, now: u64) {
    // SAFETY: by the caller.
    unsafe {
        match (*found.stamp).phase {
            PHASE_IDLE => {}
            // It failed, and is used again: the program knows.
            PHASE_ENDED => retries::known(found.stamp, now, (*found.stamp).ended),
            // Its end was hidden from us; nothing is owed on a socket that connects anew.
            PHASE_OPEN => {
                let change = Change {
                    state: TCP_CLOSE,
                    error: ECONNABORTED,
                    shut: 0,
                    exiting: false,
                    unread: 0,
                    cookie: bpf_get_socket_cookie(ctx.as_ptr()),
                };
                exchange::closing(found.stamp, now, &change);
            }
            PHASE_STAMPED => {
                user_timeout::give_back(ctx.as_ptr(), found.stamp);
                outcome::local(found.stamp, now);
            }
            _ => {
                user_timeout::give_back(ctx.as_ptr(), found.stamp);
                outcome::abandoned(found.stamp, now);
            }
        }
        found.give_back();
    }
}

/// Notes the connect timeout, or leaves it to the program's own TCP_USER_TIMEOUT (`own`, ms) where
/// that is stricter. Either way the first SYN timer is chosen so that it holds exactly (see
/// `agent_common::syn`). The option itself is set when that timer runs out (`follow`).
#[inline(always)]
unsafe fn bound(stamp: *mut Stamp, row: *mut Row, own: u32) {
    // SAFETY: by the caller.
    unsafe {
        let timeout = (*row).settings.connect_timeout_ms;
        if own == 0 || own > timeout {
            (*stamp).our_timeout_ms = timeout;
            (*stamp).syn_timeout_ticks = (*row).settings.syn_timeout_ticks;
        } else if let Some(control) = rows::control() {
            let linear = (*control).syn_linear != 0;
            (*stamp).syn_timeout_ticks = first_timeout_ticks(own, (*control).tick_ns, linear);
        }
    }
}

/// A refusal.
struct Refusal {
    index: u32,
    generation: u32,
    errno: u16,
    /// The `EVENT_` flag of the reason; 0: the breaker.
    reason: u32,
}

/// Reports a refusal (or one that observe mode forgoes) now and then.
#[inline(never)]
unsafe fn refused(row: *mut Row, now: u64, pid_tgid: u64, enforced: bool, refusal: &Refusal) {
    // SAFETY: by the caller.
    unsafe {
        let last = atomics::load(&raw const (*row).last_reject_event_ns);
        if now.saturating_sub(last) < REJECT_EVENT_EVERY_NS && last != 0 {
            return;
        }
        if !atomics::replace(&raw mut (*row).last_reject_event_ns, last, now) {
            return;
        }
        let mut event = Event {
            kind: EventKind::REJECTED,
            row: refusal.index,
            incarnation: (*row).incarnation,
            generation: refusal.generation,
            at_ns: now,
            errno: u32::from(refusal.errno),
            pid: (pid_tgid >> 32) as u32,
            tid: pid_tgid as u32,
            flags: refusal.reason | if enforced { 0 } else { EVENT_WOULD },
            ..events::EMPTY
        };
        bpf_get_current_comm(event.comm.as_mut_ptr().cast(), COMM_LEN as u32);
        events::send(&event);
    }
}
