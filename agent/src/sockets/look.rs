//! A TCP socket as the kernel has it at one moment: what sock_diag tells, decoded.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::netlink::{Attributes, u16_at, u32_at, u64_at};

/// Both ends of a connection, IPv4-mapped addresses as IPv4: a socket of either family is found by
/// its IPv4 addresses (net/ipv4/inet_diag.c, `inet_diag_find_one_icsk`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    local: SocketAddr,
    remote: SocketAddr,
    ifindex: u32,
}

impl Tuple {
    /// `ifindex` is the interface that the socket is bound to, 0 for none. Connecting to a
    /// link-local address binds to its interface; a socket that is bound is not found without.
    pub fn new(local: SocketAddr, remote: SocketAddr, ifindex: u32) -> Self {
        let canonical = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
        Self {
            local: canonical(local),
            remote: canonical(remote),
            ifindex,
        }
    }

    /// The end that is here.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// The other end.
    pub fn remote(&self) -> SocketAddr {
        self.remote
    }

    /// The interface that the socket is bound to, 0: none.
    pub fn ifindex(&self) -> u32 {
        self.ifindex
    }
}

/// State of a TCP socket (include/net/tcp_states.h).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(
    missing_docs,
    reason = "the names are those of RFC 9293 and the kernel"
)]
#[repr(u8)]
pub enum State {
    Established = 1,
    SynSent,
    SynReceived,
    FinWait1,
    FinWait2,
    TimeWait,
    Close,
    CloseWait,
    LastAck,
    Listen,
    Closing,
    /// A connection request that nobody has accepted yet.
    NewSynReceived,
    /// Bound, but neither connected nor listening (shown since 6.8).
    BoundInactive,
}

impl State {
    /// Every one of them.
    pub const ALL: [Self; 13] = [
        Self::Established,
        Self::SynSent,
        Self::SynReceived,
        Self::FinWait1,
        Self::FinWait2,
        Self::TimeWait,
        Self::Close,
        Self::CloseWait,
        Self::LastAck,
        Self::Listen,
        Self::Closing,
        Self::NewSynReceived,
        Self::BoundInactive,
    ];

    fn from_raw(raw: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as u8 == raw)
    }

    /// As a bit of a dump's mask.
    pub(super) fn bit(self) -> u32 {
        1 << self as u8
    }
}

/// Which of its timers runs (`inet_sk_diag_fill` in net/ipv4/inet_diag.c).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// None.
    None,
    /// What was sent is not acknowledged yet; repeated when it runs out.
    Retransmit,
    /// Keepalive: nothing is under way, and SO_KEEPALIVE is on. Also the end of FIN_WAIT2.
    Keepalive,
    /// TIME_WAIT.
    TimeWait,
    /// The peer's window is closed, and is asked after when the timer runs out.
    WindowProbe,
}

/// One look at a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Both ends.
    pub tuple: Tuple,
    /// Whether the socket is of the family AF_INET6; with IPv4 addresses it is a mapped one.
    pub is_inet6: bool,
    /// Unique on this machine until it reboots.
    pub cookie: u64,
    /// State.
    pub state: State,
    /// The timer that runs.
    pub timer: Timer,
    /// How often this timer has run out in a row (at most 255).
    pub timer_runs: u8,
    /// Until it runs out, ms.
    pub timer_left_ms: u32,
    /// The number in `/proc/PID/fd`; 0 once no program has the socket open.
    pub inode: u32,
    /// Whose it is.
    pub uid: u32,
    /// Bytes that have come and that the program has not read. The end of the peer's stream counts as
    /// one until the program has seen it. Of a listener: connections that wait to be accepted.
    pub receive_queue: u32,
    /// Bytes that the program has written and the peer has not acknowledged, sent or not. Of a
    /// listener: most connections that may wait.
    pub send_queue: u32,
    /// Control group (v2) in which the socket was made; 0 where the kernel does not tell.
    pub cgroup_id: u64,
    /// What only a live connection has, if it was asked for.
    pub tcp: Option<Tcp>,
}

/// Details of a live connection (`struct tcp_info` in include/uapi/linux/tcp.h, filled by
/// `tcp_get_info` in net/ipv4/tcp.c). Times are in units of the kernel's tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tcp {
    /// Repeats of the first unacknowledged segment, in a row.
    pub retransmits: u8,
    /// Window or keepalive probes without any answer, in a row. A live peer that reads nothing
    /// answers each.
    pub probes: u8,
    /// How often the timer of repeats or probes was doubled; falls back to 0 when data moves.
    pub backoff: u8,
    /// Timeout of repeats, us.
    pub rto_us: u32,
    /// Segments sent and not acknowledged.
    pub unacked: u32,
    /// Since data was last sent, repeats included, ms. A new socket counts from its making.
    pub last_data_sent_ms: u32,
    /// Since data last came, ms; before the first: since the connection stood.
    pub last_data_recv_ms: u32,
    /// Since the peer last acknowledged anything, a probe or data, ms.
    pub last_ack_recv_ms: u32,
    /// Smoothed round trip, us.
    pub rtt_us: u32,
    /// What the receiver thinks of as one window, bytes. Not what is free: see `receive_window`.
    pub rcv_space: u32,
    /// Window that the peer last offered us, bytes; 0: it does not read.
    pub send_window: u32,
    /// Window that we last offered the peer, bytes; 0: this program does not read. Since 6.2.
    pub receive_window: Option<u32>,
    /// Bytes written and never sent.
    pub notsent_bytes: u32,
    /// Bytes of ours that the peer has acknowledged, since the beginning. A SYN counts as one.
    pub bytes_acked: u64,
    /// Bytes that came in order, since the beginning.
    pub bytes_received: u64,
    /// Bytes sent, repeats included.
    pub bytes_sent: u64,
    /// Time with data to send, us.
    pub busy_us: u64,
    /// Part of it in which the peer's window was in the way, us.
    pub rwnd_limited_us: u64,
    /// Part of it in which our send buffer was in the way, us.
    pub sndbuf_limited_us: u64,
    /// Repeated segments, since the beginning.
    pub total_retrans: u32,
}

impl Look {
    /// Whether a program still has the socket open and the connection is not over: there is
    /// something to end.
    pub fn is_in_use(&self) -> bool {
        use State::{BoundInactive, Close, Listen, NewSynReceived, TimeWait};
        self.inode != 0
            && !matches!(
                self.state,
                TimeWait | Close | Listen | NewSynReceived | BoundInactive
            )
    }

    /// Whether something lies there for the program to read (data, or the end of the stream): then
    /// the silence is the program's own. A program that has closed the peer's window by not reading
    /// always has.
    pub fn has_unread(&self) -> bool {
        self.receive_queue > 0
    }

    /// Whether data waits because the peer's window has no room for it: the peer does not read. Its
    /// kernel is alive as long as [`Tcp::probes`] stays 0.
    pub fn peer_reads_nothing(&self) -> bool {
        self.timer == Timer::WindowProbe
    }

    /// Decodes a `struct inet_diag_msg` and what follows it; `None` when it makes no sense.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let fixed: &[u8; FIXED] = bytes.first_chunk()?;
        let is_inet6 = match i32::from(fixed[0]) {
            libc::AF_INET => false,
            libc::AF_INET6 => true,
            _ => return None,
        };
        let end = |port: usize, address: usize| -> Option<SocketAddr> {
            let port = u16::from_be(u16_at(fixed, port)?);
            let raw: [u8; 16] = *fixed.get(address..)?.first_chunk()?;
            let ip = if is_inet6 {
                IpAddr::from(Ipv6Addr::from(raw))
            } else {
                IpAddr::from(*raw.first_chunk::<4>()?)
            };
            Some(SocketAddr::new(ip, port))
        };
        let cookie = u64::from(u32_at(fixed, 44)?) | u64::from(u32_at(fixed, 48)?) << 32;
        let mut look = Self {
            tuple: Tuple::new(end(4, 8)?, end(6, 24)?, u32_at(fixed, 40)?),
            is_inet6,
            cookie,
            state: State::from_raw(fixed[1])?,
            timer: match fixed[2] {
                0 => Timer::None,
                1 => Timer::Retransmit,
                2 => Timer::Keepalive,
                3 => Timer::TimeWait,
                4 => Timer::WindowProbe,
                _ => return None,
            },
            timer_runs: fixed[3],
            timer_left_ms: u32_at(fixed, 52)?,
            receive_queue: u32_at(fixed, 56)?,
            send_queue: u32_at(fixed, 60)?,
            uid: u32_at(fixed, 64)?,
            inode: u32_at(fixed, 68)?,
            cgroup_id: 0,
            tcp: None,
        };
        for (kind, value) in Attributes::new(&bytes[FIXED..]) {
            match kind {
                INET_DIAG_INFO => look.tcp = Some(Tcp::decode(value)?),
                INET_DIAG_CGROUP_ID => look.cgroup_id = u64_at(value, 0)?,
                _ => {}
            }
        }
        Some(look)
    }
}

/// Length of `struct inet_diag_msg`.
const FIXED: usize = 72;
/// include/uapi/linux/inet_diag.h.
pub const INET_DIAG_INFO: u16 = 2;
const INET_DIAG_CGROUP_ID: u16 = 21;

impl Tcp {
    /// Kernels from 5.4 on have everything but the last field.
    fn decode(info: &[u8]) -> Option<Self> {
        let number = |at| u32_at(info, at);
        let long = |at| u64_at(info, at);
        Some(Self {
            retransmits: *info.get(2)?,
            probes: *info.get(3)?,
            backoff: *info.get(4)?,
            rto_us: number(8)?,
            unacked: number(24)?,
            last_data_sent_ms: number(44)?,
            last_data_recv_ms: number(52)?,
            last_ack_recv_ms: number(56)?,
            rtt_us: number(68)?,
            rcv_space: number(96)?,
            total_retrans: number(100)?,
            bytes_acked: long(120)?,
            bytes_received: long(128)?,
            notsent_bytes: number(144)?,
            busy_us: long(168)?,
            rwnd_limited_us: long(176)?,
            sndbuf_limited_us: long(184)?,
            bytes_sent: long(200)?,
            send_window: number(228)?,
            receive_window: number(232),
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// An answer of the kernel: an established connection with details and a control group.
    fn answer(inet6: bool, info: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0_u8; FIXED];
        bytes[0] = if inet6 { 10 } else { 2 };
        bytes[1] = 1;
        bytes[2] = 4;
        bytes[3] = 6;
        bytes[4..6].copy_from_slice(&40000_u16.to_be_bytes());
        bytes[6..8].copy_from_slice(&443_u16.to_be_bytes());
        if inet6 {
            bytes[8..24].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 0, 1]);
            bytes[24..40].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 10, 0, 0, 2]);
        } else {
            bytes[8..12].copy_from_slice(&[10, 0, 0, 1]);
            bytes[24..28].copy_from_slice(&[10, 0, 0, 2]);
        }
        for (at, value) in [
            (40, 3),
            (44, 0x55),
            (48, 0x66),
            (52, 200),
            (56, 11),
            (60, 12),
        ] {
            bytes[at..at + 4].copy_from_slice(&u32::to_ne_bytes(value));
        }
        bytes[64..68].copy_from_slice(&1000_u32.to_ne_bytes());
        bytes[68..72].copy_from_slice(&4242_u32.to_ne_bytes());
        attribute(&mut bytes, 8, &[0]);
        attribute(&mut bytes, INET_DIAG_INFO, info);
        attribute(&mut bytes, INET_DIAG_CGROUP_ID, &77_u64.to_ne_bytes());
        bytes
    }

    fn attribute(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
        bytes.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }

    /// Each field holds its own offset.
    fn info(length: usize) -> Vec<u8> {
        let mut info: Vec<u8> = (0..length.div_ceil(4) as u32)
            .flat_map(|word| (word * 4).to_ne_bytes())
            .collect();
        info.truncate(length);
        info
    }

    #[test]
    fn an_answer_of_the_kernel() {
        let look = Look::decode(&answer(false, &info(248))).expect("it makes sense");
        let ends = ["10.0.0.1:40000", "10.0.0.2:443"].map(|end| end.parse().expect("address"));
        assert_eq!(look.tuple, Tuple::new(ends[0], ends[1], 3));
        assert_eq!(look.cookie, 0x66_0000_0055);
        assert_eq!(
            (look.state, look.timer),
            (State::Established, Timer::WindowProbe)
        );
        assert_eq!((look.timer_runs, look.timer_left_ms), (6, 200));
        assert_eq!((look.receive_queue, look.send_queue), (11, 12));
        assert_eq!((look.uid, look.inode, look.cgroup_id), (1000, 4242, 77));
        let tcp = look.tcp.expect("details");
        // The offsets, as a C compiler gives them for struct tcp_info of Linux 6.18.
        assert_eq!(
            (tcp.rto_us, tcp.unacked, tcp.last_data_sent_ms),
            (8, 24, 44)
        );
        assert_eq!((tcp.last_data_recv_ms, tcp.last_ack_recv_ms), (52, 56));
        assert_eq!(
            (tcp.rtt_us, tcp.rcv_space, tcp.total_retrans),
            (68, 96, 100)
        );
        assert_eq!((tcp.notsent_bytes, tcp.send_window), (144, 228));
        assert_eq!(tcp.receive_window, Some(232));
        let low = [
            tcp.bytes_acked,
            tcp.bytes_received,
            tcp.busy_us,
            tcp.rwnd_limited_us,
        ];
        assert_eq!(low.map(|long| long as u32), [120, 128, 168, 176]);
    }

    #[test]
    fn a_mapped_socket_has_ipv4_ends() {
        let mapped = Look::decode(&answer(true, &info(248))).expect("it makes sense");
        let plain = Look::decode(&answer(false, &info(248))).expect("it makes sense");
        assert!(mapped.is_inet6 && !plain.is_inet6);
        assert_eq!(mapped.tuple, plain.tuple);
    }

    #[test]
    fn an_older_kernel_tells_less() {
        let tcp = |length| Look::decode(&answer(false, &info(length)))?.tcp;
        assert_eq!(tcp(232).map(|tcp| tcp.receive_window), Some(None), "6.1");
        assert_eq!(tcp(228), None);
    }

    proptest! {
        #[test]
        fn garbage_is_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Look::decode(&bytes);
        }

        #[test]
        fn damage_is_refused_or_read(
            at in 0_usize..400,
            byte in any::<u8>(),
            length in 0_usize..400,
            inet6 in any::<bool>(),
        ) {
            let mut bytes = answer(inet6, &info(248));
            if let Some(hit) = bytes.get_mut(at) {
                *hit = byte;
            }
            bytes.truncate(length);
            let look = Look::decode(&bytes);
            prop_assert!(length >= FIXED || look.is_none());
        }
    }
}
