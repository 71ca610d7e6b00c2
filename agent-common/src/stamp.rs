//! What the connect hook leaves about a socket for the hooks that follow, and for the agent.

use bytemuck::{Pod, Zeroable};

use crate::{COMM_LEN, layout};

/// The stamp of a socket whose `connect()` passed the hook. Written by the kernel, but for
/// the process of an adopted connection.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Stamp {
    /// The row this connect counts for.
    pub row: u32,
    /// The row's incarnation at the hook; when it differs later, the connect counts as other.
    pub incarnation: u32,
    /// Generation of the verdict under which the connect passed.
    pub generation: u32,
    /// `STAMP_` flags.
    pub flags: u32,
    /// One of the `PHASE_` constants.
    pub phase: u32,
    /// Connect timeout that we apply, ms; 0: none (or the program's own is stricter).
    pub our_timeout_ms: u32,
    /// TCP_USER_TIMEOUT that the program had set, ms; given back at the end of the connect. On an open
    /// connection: how long the connect took, ms.
    pub own_timeout_ms: u32,
    /// Reply to the first SYN timer, ticks; 0: none. On an adopted connection, which will never send
    /// a SYN: `in_end` at its adoption. On an open connection of HTTP/1: where the request under way ends
    /// (`SENDS_` in [`crate::request`]).
    pub syn_timeout_ticks: u32,
    /// Name of the thread that called `connect()`. (The last of what exchanges only read: with the slot's
    /// head before it, it fills a cache line.)
    pub comm: [u8; COMM_LEN],

    // --- the line that exchanges write. Egress and ingress may run on two CPUs: each line that both write
    // --- goes to and fro, which costs more than all the rest
    /// When the SYN left (CLOCK_MONOTONIC, ns); 0 before. On an open connection: when the last byte of
    /// the request under way was sent.
    pub begun_ns: u64,
    /// One of the `ENDED_` constants: what the last answer said, or how it ended.
    pub ended: u32,
    /// 1 once the program has closed the socket: what is left of the connection is the kernel's.
    pub released: u16,
    /// 1 if the last answer was longer than a segment, so that its end is not known. Written by the
    /// ingress hook.
    pub is_long: u16,

    // --- exchanges; the egress hook is the only writer of these
    /// Packed ([`pack_request`]): number of the exchange under way or last ended, its begin, and of
    /// which kind it is (`KIND_`).
    pub request: u64,
    /// Sequence number after the last new payload byte sent.
    pub out_end: u32,
    /// One of the `PROTOCOL_` constants, from the first payload bytes sent.
    pub protocol: u32,

    // --- the ingress hook is the only writer of these
    /// When the last answer began (CLOCK_MONOTONIC, ns); when established, before.
    pub answered_ns: u64,
    /// Sequence number after the last new payload byte received.
    pub in_end: u32,
    /// Number of the exchange that ended last (14 bits, as in `request`). Advanced by
    /// compare-and-exchange, by an answer or by the end of the connection.
    pub answers: u32,

    // --- what protocols take; the egress hook writes the first two, the ingress hook the others
    /// Sequence number of the first byte of the request under way: what the peer sends without
    /// having acknowledged it is no answer.
    pub request_seq: u32,
    /// What a TLS client has sent (`STAGE_` in [`crate::tls`]). With HTTP/1: what the last request asks
    /// for (`ASKS_` in [`crate::http`]), and what is known of its end (`SENDS_` in [`crate::request`]). With
    /// AMQP: [`crate::broker::CONFIRMS`]. With what is only timed: [`crate::classify::ANSWERS_ALL`].
    pub tls_stage: u32,
    /// What a TLS 1.3 server has sent since the handshake ([`crate::tls::received`]). With HTTP/1: what is
    /// known of the end of the last answer, and whether HTTP is spoken at all (`BODY_` in [`crate::http`]).
    pub tls_seen: u32,
    /// Sequence number at which its next record begins; 0: with the next segment. With HTTP/1: the first
    /// one after the last answer, if its length is known.
    pub tls_next: u32,

    // --- written once, when established: how the agent finds the socket from outside
    /// Local address; IPv4 in its mapped form.
    pub local_addr: [u8; 16],
    /// Address of the peer (after anything that rewrites destinations); IPv4 in its mapped form.
    pub peer_addr: [u8; 16],
    /// Local port, network byte order.
    pub local_port_be: u16,
    /// Port of the peer, network byte order.
    pub peer_port_be: u16,
    /// Index of the interface that the socket is bound to; 0: none.
    pub ifindex: u32,

    // --- what a retry of it would need to know ([`crate::retry`])
    /// Packed ([`crate::retry::pack_operation`]): which attempt of which operation it is.
    pub operation: u64,
    /// Process (thread group) that called `connect()`. Of an adopted connection one that has the
    /// socket, written by the agent together with `comm`; 0: not known.
    pub pid: u32,
    /// Thread that called `connect()`.
    pub tid: u32,
    /// Time that its SYN is held, ms; 0: not. The TCP_USER_TIMEOUT on the socket is longer by so much.
    /// Until it is established, `answered_ns` is when its SYN may leave, or when one was last sent.
    pub hold_ms: u32,
    /// TCP_SYNCNT that the socket had before; 0: it is as it was.
    pub syn_count: u32,
}

layout!(
    Stamp, size 176,
    row at 0, phase at 16, comm at 32, begun_ns at 48, ended at 56, request at 64, answered_ns at 80,
    request_seq at 96, local_addr at 112, peer_addr at 128, local_port_be at 144, ifindex at 148,
    operation at 152, pid at 160, hold_ms at 168,
);

impl Stamp {
    /// A stamp of nothing.
    pub const EMPTY: Self = Self {
        row: 0,
        incarnation: 0,
        generation: 0,
        flags: 0,
        phase: PHASE_IDLE,
        our_timeout_ms: 0,
        own_timeout_ms: 0,
        syn_timeout_ticks: 0,
        comm: [0; COMM_LEN],
        begun_ns: 0,
        ended: 0,
        released: 0,
        is_long: 0,
        request: 0,
        out_end: 0,
        protocol: PROTOCOL_UNKNOWN,
        answered_ns: 0,
        in_end: 0,
        answers: 0,
        request_seq: 0,
        tls_stage: 0,
        tls_seen: 0,
        tls_next: 0,
        local_addr: [0; 16],
        peer_addr: [0; 16],
        local_port_be: 0,
        peer_port_be: 0,
        ifindex: 0,
        operation: 0,
        pid: 0,
        tid: 0,
        hold_ms: 0,
        syn_count: 0,
    };

    /// Whether an answer is owed on an open connection: the number of the exchange under way and
    /// its begin, us.
    pub const fn owed(&self) -> Option<(u32, u64)> {
        let (number, begun_us) = unpack_request(self.request);
        if self.phase == PHASE_OPEN && number != self.answers {
            Some((number, begun_us))
        } else {
            None
        }
    }
}

/// Number of an exchange on its connection (14 bits, wrapping) and the time at which it began, us
/// (48 bits: nine years), in one word, so that both hooks see them together. Two bits are left for
/// the kind; 0 is [`KIND_REQUEST`].
#[inline(always)]
pub const fn pack_request(number: u32, begun_us: u64) -> u64 {
    ((number as u64 & REQUEST_NUMBER) << 48) | (begun_us & REQUEST_TIME)
}

/// Number and begin (us) from [`pack_request`].
#[inline(always)]
pub const fn unpack_request(word: u64) -> (u32, u64) {
    (((word >> 48) & REQUEST_NUMBER) as u32, word & REQUEST_TIME)
}

/// An exchange that the agent has counted: its number (14 bits), and that of its call in the window
/// (48 bits) or one of [`SETTLED`] and [`ENDING`].
#[inline(always)]
pub const fn pack_counted(number: u32, seq: u64) -> u64 {
    pack_request(number, seq)
}

/// Number and call from [`pack_counted`].
#[inline(always)]
pub const fn unpack_counted(word: u64) -> (u32, u64) {
    unpack_request(word)
}

/// In place of a call's number: the agent has counted it for good, whatever its end.
pub const SETTLED: u64 = REQUEST_TIME;
/// In place of a call's number: the agent is about to end the connection, and counts it if it does.
pub const ENDING: u64 = REQUEST_TIME - 1;
/// The kind of an exchange, from its packed word.
#[inline(always)]
pub const fn kind_of_request(word: u64) -> u64 {
    word & (3 << 62)
}

/// A request of the program.
pub const KIND_REQUEST: u64 = 0;
/// A part of a handshake: owed like any other exchange, but counted only if it fails.
pub const KIND_HANDSHAKE: u64 = 1 << 62;
/// What a server that speaks first owes from established on.
pub const KIND_GREETING: u64 = 2 << 62;
/// A request that waits by right until there is something to say ([`crate::commands`]): who gives it up says
/// nothing of the destination, and neither does how long it took. (It has the bit of [`KIND_HANDSHAKE`], too.)
pub const KIND_WAIT: u64 = 3 << 62;

const REQUEST_TIME: u64 = (1 << 48) - 1;
const REQUEST_NUMBER: u64 = (1 << 14) - 1;

/// Not known yet: nothing was sent.
pub const PROTOCOL_UNKNOWN: u32 = 0;
/// Anything that is only timed.
pub const PROTOCOL_OPAQUE: u32 = 1;
/// HTTP/1 in the clear.
pub const PROTOCOL_HTTP1: u32 = 2;
/// TLS: record headers are in the clear.
pub const PROTOCOL_TLS: u32 = 3;
/// Many streams on one connection: any payload in answers all that is owed.
pub const PROTOCOL_MULTIPLEXED: u32 = 4;
/// HTTP CONNECT and what goes through it: only timed, for a 5xx to CONNECT speaks of somebody else.
pub const PROTOCOL_TUNNEL: u32 = 5;
/// AMQP 0-9-1 and 1.0: many channels on one connection.
pub const PROTOCOL_AMQP: u32 = 6;
/// SSH: its farewell is encrypted, and a server may answer it by closing.
pub const PROTOCOL_SSH: u32 = 7;

/// MQTT ([`crate::broker`]).
pub const PROTOCOL_MQTT: u32 = 8;
/// NATS.
pub const PROTOCOL_NATS: u32 = 9;
/// STOMP.
pub const PROTOCOL_STOMP: u32 = 10;

/// Adopted in the middle of its life: what the client sends next tells.
pub const PROTOCOL_ADOPTED: u32 = 16;
/// The same, and a request may be under way: only what certainly begins another one, or payload that
/// comes in first, tells.
pub const PROTOCOL_ADOPTED_BUSY: u32 = 17;

/// A place for the stamp of one connection.
///
/// Creating socket storage is by far the dearest step of a connect (two accounted allocations, half
/// a microsecond). So it lies in an array, at the place that the socket's cookie names; only where
/// another socket has that place, it lies in a hash map by cookie. Both can be read by the agent.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Slot {
    /// Cookie of the socket; 0: free. Claimed by compare-and-exchange.
    pub owner: u64,
    /// Not 0 once a socket had to go to the hash map because this place was taken.
    pub spilled: u64,
    /// The stamp.
    pub stamp: Stamp,
}

/// Slots; a power of two.
pub const CONNECTION_SLOTS: u32 = 32_768;

/// Exchanges under way at most that the agent has counted. Beyond it none is counted while it hangs.
pub const COUNTED_MOST: u32 = 16_384;

/// Connections at most whose stamp lies in the hash map. What finds no place passes uncounted.
pub const SPILLED_MOST: u32 = 65_536;

layout!(Slot, size 192, owner at 0, spilled at 8, stamp at 16);

/// Nothing under way: never used, or the last connect ended.
pub const PHASE_IDLE: u32 = 0;
/// Passed the hook, no SYN yet.
pub const PHASE_STAMPED: u32 = 1;
/// SYN sent, no answer yet.
pub const PHASE_PENDING: u32 = 2;

/// Established: exchanges are followed until it closes.
pub const PHASE_OPEN: u32 = 3;

/// Its end is counted; its socket is still open. When the program closes it, it knows.
pub const PHASE_ENDED: u32 = 4;

/// Refused: its SYN never leaves, so that the program is told a little later.
pub const PHASE_HELD: u32 = 5;

/// Holds a probe slot of its generation.
pub const STAMP_PROBE: u32 = 1;
/// Somebody else had asked for state callbacks on this socket: leave the flag on.
pub const STAMP_FOREIGN_STATE_CB: u32 = 1 << 1;
/// `our_timeout_ms` is on the socket as TCP_USER_TIMEOUT: since the first SYN timer ran out, so a
/// connect that succeeds at once is never touched.
pub const STAMP_TIMEOUT_SET: u32 = 1 << 2;
/// Somebody else had asked for retransmission callbacks on this socket: leave the flag on.
pub const STAMP_FOREIGN_RTO_CB: u32 = 1 << 3;
/// Observe mode: the timeout is only watched.
pub const STAMP_OBSERVED: u32 = 1 << 4;
/// A socket of the kernel's own: counted, but no breaker is judged by it.
pub const STAMP_UNJUDGED: u32 = 1 << 5;
/// Has its place among the row's live and pending ones since `connect()`, not only since its SYN.
pub const STAMP_CLAIMED: u32 = 1 << 10;
/// Observe mode: enforce mode would have refused it. What becomes of it is counted once.
pub const STAMP_WOULD: u32 = 1 << 11;
/// The program has said that it sends no more, and still waits for an answer.
pub const STAMP_HALF_CLOSED: u32 = 1 << 7;
/// The connect was looked at as a possible retry, and so is what becomes of it.
pub const STAMP_WATCHED: u32 = 1 << 8;
/// Beside [`STAMP_WATCHED`]: it was looked at for another reason than that the row's connects are, so a pause after
/// it is waited for.
pub const STAMP_RENEWS: u32 = 1 << 13;
/// `connect()` took it for a retry, and it is not counted yet: by its first request, or at its end.
pub const STAMP_TAKEN: u32 = 1 << 14;
/// Beside [`STAMP_TAKEN`]: it has cost the budget a token.
pub const STAMP_SPENT: u32 = 1 << 15;
/// Its first request has shown that it is not what `connect()` took it for, a retry or a fresh call.
pub const STAMP_CORRECTED: u32 = 1 << 17;
/// Its SYN is held now.
pub const STAMP_HELD: u32 = 1 << 12;
/// Keepalive was switched on by us.
pub const STAMP_KEEPALIVE: u32 = 1 << 9;
/// The probe ends with the first exchange, not with the connect.
pub const STAMP_PROBE_BY_EXCHANGE: u32 = 1 << 6;
/// Adopted where the kernel cannot be asked for state callbacks: its end is seen at its release.
pub const STAMP_UNWATCHED: u32 = 1 << 16;
