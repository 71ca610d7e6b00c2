//! Requests that are compared byte for byte, over all packets in which they come: see [`agent_common::whole`]. Only for
//! policies that refuse what is not idempotent and is repeated.

use agent_common::{
    Row, Stamp,
    event::EVENT_UNDER_WAY,
    request::{self, COMPARED, REFUSED},
    retry::{ENDED_UNANSWERED, owner, place, tick},
    stamp::PROTOCOL_HTTP1,
    whole::{
        CHUNKED, KNOWS_FAILED, KNOWS_ONLY_FAILED, MADE_SLOTS, MOST, Made, Running, STATE_FOLLOWED,
        STATE_LOST, STATE_REFUSED, STATE_WHOLE, WHOLE_SLOTS, Whole, ends_chunks, id, total,
    },
};
use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns, bpf_loop},
};

use crate::{
    head,
    idempotent::{MAY_BE_SAME, SAME},
    maps,
    opaque::{hidden, hidden64},
    outcome,
    prints::load,
    repeated::{self, SURE},
    segment::Segment,
};

/// Nothing is compared from here on.
pub const LOST: u32 = STATE_LOST as u32;
/// More of it is to come.
pub const FOLLOWED: u32 = STATE_FOLLOWED as u32;
/// All of it is there.
pub const WHOLE: u32 = STATE_WHOLE as u32;

/// Bytes that a step takes, but at the end of a packet.
const PIECE: u32 = 64;
/// Steps of a packet.
const STEPS: u32 = MOST / PIECE + PIECE / 8 + 1;

const PASS: i32 = 1;
const DROP: i32 = 0;

/// The request of a connection, whoever it is of.
#[inline(always)]
fn of(cookie: u64) -> Option<*mut Whole> {
    maps::WHOLES.get_ptr_mut(cookie as u32 & (WHOLE_SLOTS - 1))
}

/// A request begins that is not idempotent: [`LOST`], [`FOLLOWED`] or [`WHOLE`].
///
/// # Safety
/// `skb` must be the context of the egress hook, `segment` what is in it, and the cookie its socket's.
#[inline(never)]
pub unsafe fn begins(skb: *mut __sk_buff, segment: &Segment, cookie: u64) -> u32 {
    let Some(whole) = of(cookie) else {
        return hidden(LOST);
    };
    // SAFETY: map memory.
    unsafe {
        (*whole).owner = cookie;
        (*whole).state = STATE_LOST;
        (*whole).running.mix = 0;
        (*whole).running.carry = 0;
        (*whole).running.length = 0;
        let total = hidden(length(skb, segment));
        if total == 0 {
            return hidden(LOST);
        }
        (*whole).total = total;
        let state = hidden(add(skb, segment, 0, whole));
        (*whole).state = state as u16;
        hidden(state)
    }
}

/// The request of this connection is compared from here on, packet by packet. `method` is its method, and `repeats`
/// what its first packet says.
///
/// # Safety
/// To be called after [`begins`].
#[inline(always)]
pub unsafe fn follow(stamp: *mut Stamp, cookie: u64, method: u32, repeats: u32) {
    let Some(whole) = of(cookie) else { return };
    // SAFETY: map memory.
    unsafe {
        (*whole).method = method as u8;
        (*whole).repeats = repeats as u8;
        (*stamp).tls_stage |= COMPARED;
    }
}

/// How long a request is, from its head ([`total`]).
#[inline(never)]
unsafe fn length(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let head = head::of_request(skb, segment);
        if head.is_null() {
            return 0;
        }
        let (what, length) = request::end(&(*head).search, &(*head).value);
        let total = total(hidden(what), hidden64(length), (*head).search.head());
        head::release(head);
        hidden(total)
    }
}

/// What a step is told.
struct Adding {
    skb: *mut __sk_buff,
    running: *mut Running,
    /// Where the next byte lies.
    at: u32,
    /// Bytes that are left.
    left: u32,
}

/// More of a request: all of the payload but the first `old` bytes. What is known of the request then.
#[inline(never)]
unsafe fn add(skb: *mut __sk_buff, segment: &Segment, old: u32, whole: *mut Whole) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let total = (*whole).total;
        let payload = hidden(segment.payload);
        let more = payload.wrapping_sub(old);
        let length = (*whole).running.length.wrapping_add(more);
        if old > payload || length > total.min(MOST) {
            return LOST;
        }
        let mut adding = Adding {
            skb,
            running: &raw mut (*whole).running,
            at: segment.offset.wrapping_add(old),
            left: more,
        };
        // A loop that the verifier walks through once.
        let piece = piece as unsafe extern "C" fn(u32, *mut Adding) -> i64;
        bpf_loop(STEPS, piece as *mut _, (&raw mut adding).cast(), 0);
        if (&raw const adding.left).read_volatile() != 0 {
            return LOST;
        }
        let is_whole = if total == CHUNKED {
            ends(skb, segment)
        } else {
            u32::from(length == total)
        };
        if hidden(is_whole) == 0 {
            return FOLLOWED;
        }
        (*whole).running.mix = (*whole).running.print();
        WHOLE
    }
}

/// A piece more of a request; 1 when there is none.
unsafe extern "C" fn piece(_: u32, adding: *mut Adding) -> i64 {
    // SAFETY: what `add` has given, and nobody else has.
    unsafe {
        let left = (*adding).left;
        if left == 0 {
            return 1;
        }
        let mut words = [0_u64; PIECE as usize / 8];
        let to = words.as_mut_ptr().cast();
        let mut running = *(*adding).running;
        let taken = if left >= PIECE {
            if load((*adding).skb, (*adding).at, to, PIECE) != 0 {
                return 1;
            }
            for word in words {
                running.eight(word);
            }
            PIECE
        } else {
            // For the verifier: at least 1, and no more than there is room for.
            let taken = (hidden(left.min(8) - 1) & 7) + 1;
            if load((*adding).skb, (*adding).at, to, taken) != 0 {
                return 1;
            }
            running.some(words[0], taken);
            taken
        };
        *(*adding).running = running;
        (*adding).at = (*adding).at.wrapping_add(taken);
        (*adding).left = left.wrapping_sub(taken);
        0
    }
}

/// Whether a packet ends with the end of a request that comes in chunks ([`ends_chunks`]): 1 or 0. (A shorter one may be
/// nothing but that.)
#[inline(never)]
unsafe fn ends(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    const LINE: [u8; 2] = *b"\r\n";
    let payload = hidden(segment.payload);
    let mut last = [0_u8; 8];
    // SAFETY: by the caller; there is room for it.
    let failed = unsafe {
        if payload >= 7 {
            load(skb, segment.offset + payload - 7, last.as_mut_ptr(), 7)
        } else if payload == 5 {
            [last[0], last[1]] = LINE;
            load(skb, segment.offset, last.as_mut_ptr().add(2), 5)
        } else {
            return 0;
        }
    };
    u32::from(failed == 0 && ends_chunks(u64::from_le_bytes(last)))
}

/// More of a request that is compared is sent: all of the payload but the first `old` bytes. Whether it may leave,
/// as the hook returns it.
///
/// # Safety
/// `skb` must be the context of the egress hook, `segment` what is in it, and `stamp` its connection's.
#[inline(never)]
pub unsafe fn goes_on(skb: *mut __sk_buff, stamp: *mut Stamp, segment: &Segment, old: u32) -> i32 {
    // SAFETY: by contract, map memory.
    unsafe {
        let cookie = bpf_get_socket_cookie(skb.cast());
        let (Some(whole), Some(row)) = (of(cookie), outcome::row_of(stamp)) else {
            return PASS;
        };
        if (*whole).owner != cookie {
            return PASS;
        }
        let method = u32::from((*whole).method);
        match (*whole).state {
            STATE_REFUSED => {
                let what = method | EVENT_UNDER_WAY;
                if repeated::still_refuses(stamp, row, cookie, (*whole).total, what) != 0 {
                    return DROP;
                }
                (*stamp).tls_stage &= !REFUSED;
                (*whole).state = STATE_LOST;
                return PASS;
            }
            STATE_FOLLOWED => {}
            _ => {
                // Another request behind it: whose failure shows is not certain.
                (*whole).state = STATE_LOST;
                return PASS;
            }
        }
        let state = hidden(add(skb, segment, hidden(old), whole));
        (*whole).state = state as u16;
        if state != WHOLE {
            return PASS;
        }
        let repeats = u32::from((*whole).repeats);
        let sure = hidden(is_sure(stamp, row, cookie, repeats));
        if sure != 0 || repeats == MAY_BE_SAME {
            // Before the agent is told.
            (*stamp).tls_stage |= REFUSED;
            if repeated::refuses(stamp, row, cookie, method | sure, EVENT_UNDER_WAY) != 0 {
                (*whole).state = STATE_REFUSED;
                (*whole).total = tick(bpf_ktime_get_ns()) | 1;
                return DROP;
            }
            (*stamp).tls_stage &= !REFUSED;
        }
        sent(stamp, row, cookie);
        PASS
    }
}

/// The place of the request of a connection, all of which is there, among those that its process has made.
#[inline(always)]
unsafe fn made(stamp: *mut Stamp, cookie: u64) -> Option<(u64, *mut Made)> {
    let whole = of(cookie)?;
    // SAFETY: by the caller, map memory.
    unsafe {
        if (*stamp).pid == 0 || (*whole).owner != cookie || (*whole).state != STATE_WHOLE {
            return None;
        }
        let id = id(owner((*stamp).pid, (*stamp).row), (*whole).running.mix);
        Some((id, maps::MADE.get_ptr_mut(place(id, MADE_SLOTS))?))
    }
}

/// The window of a row, ns.
#[inline(always)]
unsafe fn window_ns(row: *mut Row) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        maps::RETRY_POLICIES
            .get_ptr((*row).settings.policy)
            .map_or(0, |policy| (*policy).window_ns)
    }
}

/// Writes an entry: nobody's meanwhile, for whoever reads it on another CPU.
#[inline(always)]
unsafe fn write(to: *mut Made, made: Made) {
    // SAFETY: by the caller, map memory.
    unsafe {
        (&raw mut (*to).id).write_volatile(0);
        (&raw mut (*to).failed).write_volatile(made.failed);
        (&raw mut (*to).well).write_volatile(made.well);
        (&raw mut (*to).id).write_volatile(made.id);
    }
}

/// Whether it is certain that a request, all of which is there, repeats one that has failed: [`SURE`] or 0. `repeats` is
/// what its first packet says.
///
/// # Safety
/// `stamp` must be the connection's, `row` its row and the cookie its socket's, as for all below.
#[inline(never)]
pub unsafe fn is_sure(stamp: *mut Stamp, row: *mut Row, cookie: u64, repeats: u32) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        let Some((id, made)) = made(stamp, cookie) else {
            return 0;
        };
        let known = *made;
        let knows = hidden(known.knows(id, bpf_ktime_get_ns(), window_ns(row)));
        hidden(match knows {
            KNOWS_ONLY_FAILED => SURE,
            KNOWS_FAILED if repeats == SAME => SURE,
            _ => 0,
        })
    }
}

/// The request of a connection has been sent, all of it.
///
/// # Safety
/// As [`is_sure`].
#[inline(never)]
pub unsafe fn sent(stamp: *mut Stamp, row: *mut Row, cookie: u64) {
    // SAFETY: by contract, map memory.
    unsafe {
        if let Some((id, made)) = made(stamp, cookie) {
            write(made, (*made).sent(id, bpf_ktime_get_ns(), window_ns(row)));
        }
    }
}

/// An answer says that the server failed.
///
/// # Safety
/// As [`is_sure`].
#[inline(never)]
pub unsafe fn answered_badly(stamp: *mut Stamp, cookie: u64) {
    // SAFETY: by contract, map memory.
    unsafe {
        if (*stamp).protocol == PROTOCOL_HTTP1 && (*stamp).tls_stage & COMPARED != 0 {
            ended(stamp, cookie, ENDED_UNANSWERED);
        }
    }
}

/// The exchange of a request that was compared has failed, or its connection was ended with it: what it is to be taken
/// for, `ended` if it is nothing special.
///
/// # Safety
/// As [`is_sure`].
#[inline(never)]
pub unsafe fn ended(stamp: *mut Stamp, cookie: u64, ended: u32) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        if (*stamp).tls_stage & REFUSED != 0 {
            // To the program it has failed once more.
            return hidden(ENDED_UNANSWERED);
        }
        if ended == ENDED_UNANSWERED
            && let Some((id, made)) = made(stamp, cookie)
            && let Some(row) = outcome::row_of(stamp)
        {
            write(made, (*made).failed(id, bpf_ktime_get_ns(), window_ns(row)));
        }
        hidden(ended)
    }
}
