//! What a packet of a TCP connection carries, from its headers.

use agent_common::classify::HEAD;
use aya_ebpf::{bindings::__sk_buff, helpers::generated::bpf_skb_load_bytes};

use crate::{answers, opaque::hidden};

const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;
const TCP_SYN: u8 = 0x02;

/// A TCP segment (before segmentation by the device, or after merging: many packets' worth).
#[derive(Clone, Copy)]
pub struct Segment {
    /// Sequence number after its last payload byte.
    pub end: u32,
    /// Payload bytes, more than 0 but in a SYN.
    pub payload: u32,
    /// Where the payload begins, from the network header.
    pub offset: u32,
    /// What it acknowledges: the sequence number that its sender expects next.
    pub ack: u32,
    /// Whether it opens a connection: TCP Fast Open sends data with the SYN.
    pub is_syn: bool,
}

impl Segment {
    /// Sequence number of its first payload byte.
    #[inline(always)]
    pub fn begin(&self) -> u32 {
        self.end.wrapping_sub(self.payload)
    }
}

/// The segment, or `None` for anything without a payload (but a SYN) or with headers that are not worth it
/// (IPv4 options, IPv6 extension headers).
///
/// # Safety
/// `skb` must be the program's context.
#[inline(always)]
pub unsafe fn or_syn(skb: *mut __sk_buff) -> Option<Segment> {
    // SAFETY: by contract.
    unsafe { parse::<true>(skb) }
}

/// As [`or_syn`], without SYNs that carry nothing.
///
/// # Safety
/// As [`or_syn`].
#[inline(always)]
pub unsafe fn of(skb: *mut __sk_buff) -> Option<Segment> {
    // SAFETY: by contract.
    unsafe { parse::<false>(skb) }
}

#[inline(always)]
unsafe fn parse<const SYNS: bool>(skb: *mut __sk_buff) -> Option<Segment> {
    // SAFETY: by contract; every access is within what was compared with the end.
    unsafe {
        let (data, end) = ((*skb).data as usize, (*skb).data_end as usize);
        if data + 40 > end {
            return None;
        }
        let ip = data as *const u8;
        let version = *ip;
        let network = if version == 0x45 {
            if *ip.add(9) != IPPROTO_TCP {
                return None;
            }
            20
        } else if version >> 4 == 6 {
            if *ip.add(6) != IPPROTO_TCP || data + 60 > end {
                return None;
            }
            40
        } else {
            return None;
        };
        let tcp = if network == 20 {
            ip.add(20)
        } else {
            ip.add(40)
        };
        let header = u32::from(*tcp.add(12) >> 4) * 4;
        let offset = network + header;
        let length = (*skb).len;
        let is_syn = *tcp.add(13) & TCP_SYN != 0;
        if length <= offset && !(SYNS && is_syn && length == offset) {
            return None;
        }
        let payload = length - offset;
        // The header may lie at any address.
        let seq = u32::from_be(tcp.add(4).cast::<u32>().read_unaligned());
        let ack = u32::from_be(tcp.add(8).cast::<u32>().read_unaligned());
        Some(Segment {
            // A SYN has a number of its own, before the data.
            end: seq.wrapping_add(payload).wrapping_add(u32::from(is_syn)),
            // (Lest the verifier walks on twice, for IPv4 and for IPv6.)
            payload: hidden(payload),
            offset: hidden(offset),
            ack,
            is_syn,
        })
    }
}

/// Length of the network header of a packet that may be a DNS answer; 0: it is none. For a TCP packet
/// that is one comparison, of a byte that [`of`] needs as well.
///
/// # Safety
/// As [`of`].
#[inline(always)]
pub unsafe fn of_answer(skb: *mut __sk_buff) -> u32 {
    // SAFETY: as in `of`.
    unsafe {
        let (data, end) = ((*skb).data as usize, (*skb).data_end as usize);
        if data + 40 > end {
            return 0;
        }
        let ip = data as *const u8;
        let version = *ip;
        if version == 0x45 {
            if *ip.add(9) == IPPROTO_UDP && answers::may_be_one(ip.add(20)) {
                return 20;
            }
        } else if version >> 4 == 6
            && *ip.add(6) == IPPROTO_UDP
            && data + 60 <= end
            && answers::may_be_one(ip.add(40))
        {
            return 40;
        }
        0
    }
}

/// The first bytes of a payload; zero beyond its end.
///
/// # Safety
/// `skb` must be the program's context, and `segment` what is in it.
#[inline(always)]
pub unsafe fn head(skb: *mut __sk_buff, segment: Segment) -> [u8; HEAD] {
    const ROOM: usize = HEAD.next_power_of_two();
    // 12 bytes are a status line, 5 a TLS record header.
    let longest = match hidden(segment.payload) {
        24.. => 24,
        12.. => 12,
        5.. => 5,
        _ => 1,
    };
    // For the verifier: at least 1, and no more than there is room for. (And hidden, so that it walks on once.)
    let length = ((hidden(longest) - 1) & (ROOM as u32 - 1)) + 1;
    let mut words = [0_u64; ROOM / 8];
    // SAFETY: by the caller; the buffer has room for it.
    unsafe {
        let to = words.as_mut_ptr().cast();
        bpf_skb_load_bytes(skb.cast(), segment.offset, to, length);
        words.as_ptr().cast::<[u8; HEAD]>().read()
    }
}

const _: () = assert!(HEAD == 24);
