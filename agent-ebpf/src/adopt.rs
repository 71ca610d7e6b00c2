//! iter/tcp: when the agent starts, connections of watched control groups that exist already.
//!
//! Runs once for each TCP socket of the reader's network namespace, with the socket locked. A client
//! is told from an accepted socket by two marks that an accepted one has from its listener: the
//! backlog (net/core/sock.c, `sk_clone`, copies it) and the bucket of its port, which says whether
//! connect() chose the port by itself (`fastreuse` below 0: net/ipv4/inet_hashtables.c,
//! `__inet_hash_connect`). A client that chose its port itself is left alone: it cannot be told.
//!
//! Nothing is counted here, but for the attempt where the SYN is not answered yet. What the connection was doing is known as far as the kernel knows it:
//! after data has come in last, with nothing left to send, no request is under way.

use agent_common::{
    AdoptOffsets, COMM_LEN, DestinationKey, Stamp,
    retry::ENDED_WELL,
    stamp::{
        PHASE_OPEN, PHASE_PENDING, PROTOCOL_ADOPTED, PROTOCOL_ADOPTED_BUSY, STAMP_FOREIGN_STATE_CB,
        STAMP_UNWATCHED, pack_request,
    },
    tls::STAGE_SETTLED,
};
use aya_ebpf::{
    bindings::BPF_SOCK_OPS_STATE_CB_FLAG,
    helpers::generated::{
        bpf_get_socket_cookie, bpf_getsockopt, bpf_jiffies64, bpf_ktime_get_ns, bpf_setsockopt,
    },
};

use crate::{
    kernel::{TcpSocket, load},
    limits, maps, outcome, rows,
    settle::IterTcp,
    stamps,
};

/// Set by the agent before loading, as the other offsets. It loads this program only when it has
/// found every one.
#[unsafe(no_mangle)]
static ADOPT_OFFSETS: AdoptOffsets = AdoptOffsets::UNKNOWN;

/// Exchanges that an adopted connection counts as having had: beyond those among which a handshake
/// may begin ([`crate::exchange::TLS_BEGINS_WITHIN`]).
const USED: u32 = 8;
const _: () = assert!(USED >= crate::exchange::TLS_BEGINS_WITHIN);

const TCP_ESTABLISHED: u8 = 1;
const TCP_SYN_SENT: u8 = 2;
/// A generation that no verdict has: rows begin at 0 and count up.
const NOT_JUDGED: u32 = u32::MAX;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;
const IPPROTO_TCP: i32 = 6;
/// include/uapi/linux/bpf.h; since Linux 6.12.
const TCP_BPF_SOCK_OPS_CB_FLAGS: i32 = 1008;

/// One of the offsets; for unsafe blocks. Read singly: a copy of the whole struct would hide the
/// constants. Volatile because the agent replaces its bytes.
macro_rules! offset {
    ($field:ident) => {
        core::ptr::read_volatile(&raw const ADOPT_OFFSETS.$field)
    };
}

/// A member of the socket.
macro_rules! member {
    ($socket:expr, $field:ident as $type:ty) => {
        $socket.member::<$type>(offset!($field))
    };
}

/// Where `struct net` has its cookie; [`NO_OFFSET`] where that is not known.
#[inline(always)]
pub fn net_cookie_offset() -> u32 {
    // SAFETY: as everywhere in this file.
    unsafe { offset!(net_cookie) }
}

/// Always 0: go on.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/tcp")]
pub fn adopt(ctx: *mut IterTcp) -> i32 {
    // SAFETY: the kernel hands a valid context; the verifier has checked the offsets.
    unsafe {
        let common = (*ctx).sk_common;
        if common.is_null() {
            return 0;
        }
        let Some(socket) = TcpSocket::visited(common) else {
            return 0;
        };
        let state = member!(socket, state as u8);
        if (state != TCP_ESTABLISHED && state != TCP_SYN_SENT)
            || member!(socket, backlog as u32) != 0
            || socket.is_kernels()
        {
            return 0;
        }
        let bucket = member!(socket, bucket as *const u8);
        if bucket.is_null() || load::<i8>(bucket, offset!(fast_reuse)) >= 0 {
            return 0;
        }
        let Some(cgroup_id) = cgroup_of(socket) else {
            return 0;
        };
        let Some(pid) = maps::WATCHED.get_ptr(cgroup_id) else {
            return 0;
        };
        let cookie = bpf_get_socket_cookie(socket.pointer());
        if stamps::find(cookie).is_some() {
            return 0;
        }
        take(socket, cgroup_id, cookie, *pid, state == TCP_SYN_SENT);
    }
    0
}

/// Id of the control group in which the socket was made.
#[inline(always)]
unsafe fn cgroup_of(socket: TcpSocket) -> Option<u64> {
    // SAFETY: by the caller.
    unsafe {
        let group = member!(socket, cgroup as *const u8);
        if group.is_null() {
            return None;
        }
        let node = load::<*const u8>(group, offset!(cgroup_node));
        if node.is_null() {
            return None;
        }
        Some(load::<u64>(node, offset!(node_id)))
    }
}

/// The four words of an address in its 16-byte form, at a member's offset.
macro_rules! address {
    ($socket:expr, $family:expr, $four:ident, $six:ident) => {{
        let mut words = [0_u32, 0, 0xffff_u32.to_be(), 0];
        if $family == AF_INET {
            words[3] = member!($socket, $four as u32);
        } else {
            words[0] = $socket.member::<u32>(offset!($six));
            words[1] = $socket.member::<u32>(offset!($six) + 4);
            words[2] = $socket.member::<u32>(offset!($six) + 8);
            words[3] = $socket.member::<u32>(offset!($six) + 12);
        }
        words
    }};
}

/// Follows the connection from here on.
#[inline(always)]
unsafe fn take(socket: TcpSocket, cgroup_id: u64, cookie: u64, pid: u32, is_pending: bool) {
    // SAFETY: by the caller; map memory.
    unsafe {
        let family = member!(socket, family as u16);
        if family != AF_INET && family != AF_INET6 {
            return;
        }
        let net = socket.net();
        if net.is_null() {
            return;
        }
        let peer = address!(socket, family, peer4, peer6);
        let peer: [u8; 16] = core::mem::transmute(peer);
        let bound = member!(socket, ifindex as u32);
        let link_local = peer[0] == 0xfe && peer[1] & 0xc0 == 0x80;
        let key = DestinationKey {
            cgroup_id,
            netns_cookie: load::<u64>(net, offset!(net_cookie)),
            addr: peer,
            ifindex: if link_local { bound } else { 0 },
            port_be: member!(socket, peer_port as u16),
            reserved: 0,
        };
        let Some((index, row)) = rows::find_or_create(&key, socket) else {
            return;
        };
        if (*row).last_pid == 0 {
            // A way to the row's namespace and name.
            (*row).last_pid = pid;
        }
        let Some(found) = stamps::claim(cookie) else {
            rows::count(|c| &raw mut (*c).unstamped);
            return;
        };
        let stamp = found.stamp;
        (*stamp).row = index;
        (*stamp).incarnation = (*row).incarnation;
        (*stamp).generation = 0;
        (*stamp).our_timeout_ms = 0;
        (*stamp).own_timeout_ms = 0;
        (*stamp).begun_ns = 0;
        // Who connected is not known.
        (*stamp).pid = 0;
        (*stamp).tid = 0;
        (*stamp).comm = [0; COMM_LEN];
        // Not one of its first exchanges, wherever it was before: no handshake is looked for.
        (*stamp).request = pack_request(USED, 0);
        (*stamp).answers = USED;
        (*stamp).request_seq = 0;
        (*stamp).tls_stage = STAGE_SETTLED;
        (*stamp).tls_seen = 0;
        (*stamp).tls_next = 0;
        (*stamp).operation = 0;
        (*stamp).ended = ENDED_WELL;
        (*stamp).released = 0;
        (*stamp).peer_addr = peer;
        let local = address!(socket, family, local4, local6);
        (*stamp).local_addr = core::mem::transmute::<[u32; 4], [u8; 16]>(local);
        (*stamp).local_port_be = member!(socket, local_port as u16).to_be();
        (*stamp).peer_port_be = key.port_be;
        (*stamp).ifindex = bound;
        (*stamp).flags = watch(socket);
        if is_pending {
            // Its place is taken from now on; how long it waits already is not known, so it is counted
            // and not judged.
            (*stamp).generation = NOT_JUDGED;
            (*stamp).begun_ns = bpf_ktime_get_ns();
            (*stamp).syn_timeout_ticks = 0;
            outcome::begun(stamp);
            (&raw mut (*stamp).phase).write_volatile(PHASE_PENDING);
            rows::count(|c| &raw mut (*c).adopted);
            return;
        }
        history(socket, stamp);
        limits::adopted(index, row);
        // Last: from here on its packets count.
        (&raw mut (*stamp).phase).write_volatile(PHASE_OPEN);
        rows::count(|c| &raw mut (*c).adopted);
    }
}

/// What the connection has done so far.
#[inline(always)]
unsafe fn history(socket: TcpSocket, stamp: *mut Stamp) {
    // SAFETY: by the caller.
    unsafe {
        let (sent_at, received_at) = (
            member!(socket, sent_at as u32),
            member!(socket, received_at as u32),
        );
        let sent = member!(socket, sent as u32);
        let in_end = member!(socket, received as u32);
        (*stamp).out_end = sent;
        (*stamp).in_end = in_end;
        (*stamp).syn_timeout_ticks = in_end;
        let all_out =
            member!(socket, written as u32) == sent && member!(socket, acknowledged as u32) == sent;
        // Within one tick it cannot be told which came first.
        let received_last = received_at.wrapping_sub(sent_at) as i32 > 0;
        (*stamp).protocol = if all_out && received_last {
            PROTOCOL_ADOPTED
        } else {
            PROTOCOL_ADOPTED_BUSY
        };
        let now = bpf_ktime_get_ns();
        let ticks = u64::from((bpf_jiffies64() as u32).wrapping_sub(received_at));
        let tick = rows::control().map_or(0, |control| (*control).tick_ns);
        (*stamp).answered_ns = now.saturating_sub(ticks * tick);
    }
}

/// Asks for the callbacks that tell how it ends; the stamp's flags.
#[inline(always)]
unsafe fn watch(socket: TcpSocket) -> u32 {
    let sk = socket.pointer();
    let option = TCP_BPF_SOCK_OPS_CB_FLAGS;
    let mut before: u32 = 0;
    // SAFETY: by the caller; the buffers are 4 bytes.
    unsafe {
        if bpf_getsockopt(sk, IPPROTO_TCP, option, (&raw mut before).cast(), 4) != 0 {
            return STAMP_UNWATCHED;
        }
        if before & BPF_SOCK_OPS_STATE_CB_FLAG != 0 {
            // Another program's, or of an agent before this one.
            return STAMP_FOREIGN_STATE_CB;
        }
        let mut wanted = before | BPF_SOCK_OPS_STATE_CB_FLAG;
        if bpf_setsockopt(sk, IPPROTO_TCP, option, (&raw mut wanted).cast(), 4) != 0 {
            return STAMP_UNWATCHED;
        }
    }
    0
}
