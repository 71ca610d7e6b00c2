//! cgroup/connect4 and cgroup/connect6: the verdict, and the stamp for what follows.

use agent_common::{
    COMM_LEN, DestinationKey, Event, EventKind, Mode, Row, Stamp, Verdict,
    key::mapped,
    ramp,
    retry::{self, ENDED_WELL, HELD, is_retry},
    row::{OTHER_ROW, ROW_LIMITED, ROW_PROTECTED, ROW_RETRIES},
    stamp::{
        PHASE_ENDED, PHASE_HELD, PHASE_IDLE, PHASE_OPEN, PHASE_STAMPED, STAMP_CLAIMED,
        STAMP_OBSERVED, STAMP_PROBE, STAMP_PROBE_BY_EXCHANGE, STAMP_TAKEN, STAMP_UNJUDGED,
        STAMP_WATCHED, STAMP_WOULD,
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
    adopt, atomics,
    ends::{self, Change},
    events, held, idempotent,
    kernel::{Task, TcpSocket},
    limits,
    opaque::{hidden, hidden64, is},
    outcome, probes,
    refusal::{self, Refusal},
    retries::{self, OVER_LAST},
    rows,
    stamps::{self, Found},
    user_timeout,
};

const ALLOW: i32 = 1;
const IPPROTO_TCP: u32 = 6;
const AF_INET: u32 = 2;
const TCP_CLOSE: u32 = 7;
const ECONNABORTED: u32 = 103;
const AF_INET6: u32 = 10;

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
    let usable = u32::from_ne_bytes(usable4(addr.to_ne_bytes()));
    judge(&ctx, mapped(hidden(usable).to_ne_bytes()), 0)
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
        let task = Task::current();
        let pid_tgid = task.map_or_else(|| bpf_get_current_pid_tgid(), Task::pid_tgid);
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
            cgroup_id: task.map_or_else(|| bpf_get_current_cgroup_id(), Task::cgroup_id),
            netns_cookie: sk
                .netns_cookie(adopt::net_cookie_offset())
                .unwrap_or_else(|| bpf_get_netns_cookie(ctx.as_ptr())),
            addr,
            ifindex,
            port_be: (*ctx.sock_addr).user_port as u16,
            reserved: 0,
        };
        let Some((index, row)) = rows::find_or_create(&key, sk) else {
            return ALLOW;
        };
        let index = hidden(index);
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
        let acting = hidden(mode) != Mode::OFF
            && awake
            && (*row).settings.flags & ROW_PROTECTED == 0
            && !is_kernels;

        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        let mut flags = if is_kernels { STAMP_UNJUDGED } else { 0 };
        let mut why = 0;
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
                        flags = hidden(flags);
                    }
                    claimed || (ramp && bpf_get_prandom_u32() % 100 < ramp::share(left))
                }
                _ => true,
            };
            if !passes {
                why = refusal::BY_BREAKER;
            }
        }
        // From here on the verifier need not know which way it came.
        let acting = hidden(u32::from(acting));
        let mut flags = hidden(flags);
        let mut why = hidden(why);
        let generation = hidden(verdict.generation);
        let enforced = hidden(u32::from(hidden(mode) == Mode::ENFORCE));
        let is_forced = hidden(u32::from(verdict.state == STATE_FORCED_CLOSED));
        let mut operation = retry::fresh(now);
        if hidden(index) != OTHER_ROW
            && (*row).settings.flags & ROW_RETRIES != 0
            && !(is(enforced) && is(why))
        {
            // A probe is wanted, and an operator's word is the last.
            let may_refuse = is(acting) && !is(why) && !is(flags & STAMP_PROBE) && !is(is_forced);
            let may_do = hidden(if may_refuse { mode } else { Mode::OFF });
            let looks = hidden(retries::looks(row, index, before_ns, now));
            if looks != 0 {
                operation = retries::judge(row, index, now, pid_tgid, may_do);
                flags |= looks | hidden(retries::takes(operation, may_do));
            }
            if operation <= OVER_LAST {
                why = refusal::BY_RETRY + operation as u32;
                if !is(enforced) {
                    operation = hidden64(retries::let_pass(index, pid_tgid as u32));
                    flags |= STAMP_TAKEN;
                }
            }
        }
        flags = hidden(flags);
        why = hidden(why);
        operation = hidden64(operation);
        if is(acting) && !is(why) && (*row).settings.flags & ROW_LIMITED != 0 {
            if hidden(limits::claim(row, now, hidden(enforced))) != limits::PASSES {
                why = refusal::BY_LIMIT;
                if is(flags & STAMP_PROBE) && is(enforced) {
                    probes::give_back(row, generation);
                }
                if operation & HELD != 0 {
                    held::forget();
                }
            } else if is(enforced) {
                flags |= STAMP_CLAIMED;
            }
            flags = hidden(flags);
            why = hidden(why);
        }
        if is(why) {
            let refusal = Refusal {
                row,
                index,
                why,
                now,
                pid_tgid,
                cookie,
                enforced: hidden(enforced),
            };
            if is(enforced) {
                return refusal::refuse(ctx.as_ptr(), &refusal);
            }
            refusal::tell(&refusal);
            flags = hidden(flags | STAMP_WOULD);
        }

        let Some(found) = stamps::claim(cookie) else {
            rows::count(|c| &raw mut (*c).unstamped);
            if is(flags & STAMP_PROBE) {
                probes::give_back(row, generation);
            }
            if operation & HELD != 0 {
                held::forget();
            }
            if is(flags & STAMP_CLAIMED) {
                limits::unstamped(row);
            }
            return ALLOW;
        };
        let stamp = found.stamp;
        (*stamp).row = index;
        (*stamp).incarnation = (*row).incarnation;
        (*stamp).generation = generation;
        (*stamp).our_timeout_ms = 0;
        (*stamp).own_timeout_ms = 0;
        (*stamp).syn_timeout_ticks = 0;
        (*stamp).begun_ns = 0;
        (*stamp).operation = operation & !HELD;
        (*stamp).ended = ENDED_WELL;
        (*stamp).released = 0;
        (*stamp).hold_ms = 0;
        (*stamp).syn_count = 0;
        (*stamp).pid = pid;
        (*stamp).tid = pid_tgid as u32;
        let comm = &raw mut (*stamp).comm;
        if let Some(task) = task {
            comm.cast::<[u64; COMM_LEN / 8]>().write(task.comm());
        } else {
            bpf_get_current_comm(comm.cast(), COMM_LEN as u32);
        }
        if is(acting) && (*row).settings.connect_timeout_ms != 0 {
            if hidden(mode) == Mode::OBSERVE {
                // Only noted: no timer of the program's may change.
                (*stamp).our_timeout_ms = (*row).settings.connect_timeout_ms;
                flags |= STAMP_OBSERVED;
            } else {
                let left = if is_retry(operation) {
                    retries::left_ms(row, operation, now)
                } else {
                    u32::MAX
                };
                bound(stamp, row, sk.user_timeout(), left);
            }
        }
        (*stamp).flags = flags;
        if is(flags & STAMP_WATCHED) {
            idempotent::dials(cookie, index, pid_tgid as u32);
        }
        if operation & HELD != 0 {
            held::hold(ctx.as_ptr(), stamp, sk.user_timeout(), now);
            let hold_ms = hidden((*stamp).hold_ms);
            if hold_ms != 0 {
                refusal::tell_held(row, index, hold_ms, 0, now);
            }
        }
        (*stamp).phase = PHASE_STAMPED;
        if is(flags & STAMP_PROBE) {
            events::send(&Event {
                kind: EventKind::PROBE_STARTED,
                row: index,
                incarnation: (*row).incarnation,
                generation,
                at_ns: now,
                pid,
                tid: pid_tgid as u32,
                ..events::EMPTY
            });
        }
    }
    ALLOW
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
            PHASE_ENDED => {
                let cookie = bpf_get_socket_cookie(ctx.as_ptr());
                retries::known(found.stamp, cookie, now, (*found.stamp).ended);
            }
            // Its end was hidden from us; nothing is owed on a socket that connects anew.
            PHASE_OPEN => {
                let change = Change {
                    state: TCP_CLOSE,
                    error: ECONNABORTED,
                    shut: 0,
                    unread: 0,
                    cookie: bpf_get_socket_cookie(ctx.as_ptr()),
                };
                ends::closing(found.stamp, &change);
                limits::over(found.stamp);
            }
            // It was refused, a little later.
            PHASE_HELD => {
                user_timeout::give_back(ctx.as_ptr(), found.stamp);
                held::ended(found.stamp);
            }
            PHASE_STAMPED => {
                user_timeout::give_back(ctx.as_ptr(), found.stamp);
                held::ended(found.stamp);
                outcome::local(found.stamp, now);
            }
            _ => {
                user_timeout::give_back(ctx.as_ptr(), found.stamp);
                held::ended(found.stamp);
                outcome::abandoned(found.stamp, now);
            }
        }
        found.give_back();
    }
}

/// Notes the connect timeout (at most `left`, ms), or leaves it to the program's own TCP_USER_TIMEOUT (`own`, ms) where
/// that is stricter. Either way the first SYN timer is chosen so that it holds exactly (see
/// `agent_common::syn`). The option itself is set when that timer runs out (`follow`).
#[inline(always)]
unsafe fn bound(stamp: *mut Stamp, row: *mut Row, own: u32, left: u32) {
    // SAFETY: by the caller.
    unsafe {
        let timeout = (*row).settings.connect_timeout_ms;
        let mut odd = own;
        if own == 0 || own > timeout.min(left) {
            (*stamp).our_timeout_ms = timeout.min(left);
            (*stamp).syn_timeout_ticks = (*row).settings.syn_timeout_ticks;
            if timeout <= left {
                return;
            }
            odd = left;
        }
        if let Some(control) = rows::control() {
            let linear = (*control).syn_linear != 0;
            (*stamp).syn_timeout_ticks = first_timeout_ticks(odd, (*control).tick_ns, linear);
        }
    }
}
