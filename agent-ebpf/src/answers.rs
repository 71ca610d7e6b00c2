//! DNS answers on their way to programs: copied for the agent, which learns names from them.
//!
//! Only what comes from UDP port 53 gets here, and only what its head says is an answer without error.
//! Everything else about it is the agent's to judge.

use agent_common::{
    HeardAnswer,
    answer::{ANSWER_LEAST, ANSWER_MOST, ANSWERS_A_SECOND},
};
use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_ktime_get_ns, bpf_skb_load_bytes},
};

use crate::{adopt, atomics, kernel, maps, opaque::hidden};

/// Bytes of a UDP header.
const UDP: u32 = 8;
const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// Whether a UDP packet is a DNS answer without error and with records. `udp` is where its header begins,
/// followed by at least 16 bytes.
///
/// # Safety
/// The packet must reach that far.
#[inline(always)]
pub unsafe fn may_be_one(udp: *const u8) -> bool {
    // SAFETY: by contract; bytes, so that nothing has to be aligned.
    unsafe {
        let from_dns = *udp == 0 && *udp.add(1) == 53;
        let (flags, code) = (*udp.add(10), *udp.add(11) & 0x0f);
        let records = *udp.add(14) | *udp.add(15);
        from_dns && flags & 0x80 != 0 && code == 0 && records != 0
    }
}

/// Hands the message up, if there is room. `network` is the length of the network header.
///
/// # Safety
/// `skb` must be the program's context.
#[inline(never)]
pub unsafe fn heard(skb: *mut __sk_buff, network: u32) {
    // SAFETY: by contract.
    unsafe {
        let begin = network + UDP;
        let length = (*skb).len.wrapping_sub(begin);
        if !(ANSWER_LEAST as u32..=ANSWER_MOST as u32).contains(&length) {
            return;
        }
        // The same value, with bounds that every verifier sees.
        let length = (hidden(length - 1) & (ANSWER_MOST as u32 - 1)) + 1;
        let sk = (*skb).__bindgen_anon_2.sk;
        if sk.is_null() || !has_room() {
            return;
        }
        let netns_cookie = kernel::netns_cookie_of_context(sk, adopt::net_cookie_offset());
        if netns_cookie == 0 {
            return;
        }
        let Some(mut entry) = maps::ANSWERS.reserve::<HeardAnswer>(0) else {
            return;
        };
        let answer = entry.as_mut_ptr();
        (*answer).netns_cookie = netns_cookie;
        (*answer).length = length;
        (*answer).reserved = 0;
        let to = (&raw mut (*answer).message).cast();
        if bpf_skb_load_bytes(skb.cast(), begin, to, length) == 0 {
            entry.submit(0);
        } else {
            entry.discard(0);
        }
    }
}

/// Whether this second has room for one more. Two CPUs that begin a second at once may lose a few counts.
#[inline(always)]
unsafe fn has_room() -> bool {
    let Some(word) = maps::ANSWERS_HEARD.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: map memory. The second in the high half, the count in the low.
    unsafe {
        let second = bpf_ktime_get_ns() / NANOS_PER_SECOND;
        let before = atomics::load(word);
        if before >> 32 != second & 0xffff_ffff {
            word.write_volatile(second << 32 | 1);
            return true;
        }
        before & 0xffff_ffff < ANSWERS_A_SECOND && {
            atomics::add(word, 1);
            true
        }
    }
}
