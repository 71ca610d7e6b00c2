//! Requests of HTTP/1 in the clear that are repeated: see [`agent_common::method`].
//!
//! A print of a request is taken only where something can come of it: while something fails, on connections
//! whose connect was looked at as a possible retry, and wherever the policy refuses.
//!
//! Here stands what the first packet of a request says. What becomes of it is in `repeated.rs`; where the policy refuses,
//! all of its bytes are compared in `whole.rs`, over as many packets as they come in.

use agent_common::{
    OTHER_ROW, Row, Stamp,
    method::{self, ASKED_SLOTS, Asked, HAS_END, SOME},
    pace::{self, Pace},
    retry::{ENDED_UNANSWERED, NTH, TASK_SLOTS, is_retry, is_to_come, owner, place, tick},
    row::{ROW_REFUSES, ROW_RETRIES},
    stamp::{PROTOCOL_HTTP1, STAMP_WATCHED, unpack_request},
};
use aya_ebpf::{
    bindings::__sk_buff,
    helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns},
};

use crate::{
    atomics, maps,
    opaque::{hidden, hidden64},
    paces,
    prints::{self, METHOD},
    repeated,
    segment::{self, Segment},
    taken, tried, whole,
};

const PASS: i32 = 1;
const DROP: i32 = 0;

/// It is another request than the one that failed, or that is not known.
pub const OTHER: u32 = 0;
/// It is a retry of a request whose bytes are not known.
pub const MAY_BE_SAME: u32 = 1;
/// It is a retry of the same request.
pub const SAME: u32 = 2;

/// What is remembered of a connection, whoever it is of.
#[inline(always)]
fn asked_of(cookie: u64) -> Option<*mut Asked> {
    maps::ASKED.get_ptr_mut(cookie as u32 & (ASKED_SLOTS - 1))
}

/// A connect passes that was looked at as a possible retry: what has failed before is what it may repeat.
///
/// # Safety
/// To be called for the connect of this task, after its row was found.
#[inline(never)]
pub unsafe fn dials(cookie: u64, index: u32, tid: u32) {
    let caller = owner(tid, index);
    let (Some(task), Some(asked)) = (
        maps::TASKS.get_ptr_mut(place(caller, TASK_SLOTS)),
        asked_of(cookie),
    ) else {
        return;
    };
    // SAFETY: map memory.
    unsafe {
        let mut failed = 0;
        if (*task).owner == caller {
            failed = (*task).failed;
            (*task).failed = 0;
        }
        if failed != 0 || (*asked).owner == cookie {
            forget(asked, cookie);
            (*asked).failed = failed;
        }
    }
}

/// The place is this socket's, of which nothing is known.
#[inline(always)]
unsafe fn forget(asked: *mut Asked, cookie: u64) {
    // SAFETY: by the caller, map memory.
    unsafe {
        (*asked).owner = cookie;
        (*asked).sent = 0;
        (*asked).failed = 0;
        (*asked).repeated = 0;
        (*asked).number = 0;
        (*asked).refused = 0;
    }
}

/// A connection has ended badly (`ended`), and its program knows: print of the request that may be repeated,
/// [`SOME`] or 0.
///
/// # Safety
/// `stamp` must be map memory, and belong to the socket with this cookie.
#[inline(always)]
pub unsafe fn failed(stamp: *mut Stamp, cookie: u64, ended: u32) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        if let Some(asked) = asked_of(cookie)
            && (*asked).owner == cookie
        {
            let (number, _) = unpack_request(atomics::load(&raw const (*stamp).request));
            let (sent, before) = ((*asked).sent, (*asked).failed);
            (*asked).owner = 0;
            let print = if sent == 0 {
                before
            } else if number == u32::from((*asked).number) {
                sent
            } else {
                0
            };
            if print != 0 {
                return hidden(print);
            }
        }
        if ended == ENDED_UNANSWERED && (*stamp).protocol == PROTOCOL_HTTP1 {
            SOME
        } else {
            0
        }
    }
}

/// Print of a connection's last request; 0: it is not known.
///
/// # Safety
/// As [`failed`].
#[inline(always)]
pub unsafe fn last(stamp: *mut Stamp, cookie: u64) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        let (number, _) = unpack_request(atomics::load(&raw const (*stamp).request));
        match asked_of(cookie) {
            Some(asked) if (*asked).owner == cookie && u32::from((*asked).number) == number => {
                (*asked).sent
            }
            _ => 0,
        }
    }
}

/// Whether a request is looked at.
///
/// # Safety
/// `stamp` must be the connection's and `row` its row.
#[inline(always)]
pub unsafe fn matters(stamp: *mut Stamp, row: *mut Row, now: u64) -> bool {
    // SAFETY: by contract, map memory.
    unsafe {
        let flags = (*row).settings.flags;
        (*stamp).protocol == PROTOCOL_HTTP1
            && flags & ROW_RETRIES != 0
            && (flags & ROW_REFUSES != 0
                || ((*stamp).flags & STAMP_WATCHED != 0 && is_first(stamp))
                || is_to_come((&raw const (*row).retry_watch).read_volatile(), tick(now)))
    }
}

/// Whether a connection has had no exchange yet. (Read again: what is compared here, the verifier would
/// know of the number that goes on.)
#[inline(always)]
unsafe fn is_first(stamp: *mut Stamp) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe { unpack_request((&raw const (*stamp).request).read_volatile()).0 == 0 }
}

/// A request begins, and none is under way: whether it may leave, as the hook returns it.
///
/// # Safety
/// As [`matters`]; `skb` must be the context of the egress hook.
#[inline(always)]
pub unsafe fn asks(skb: *mut __sk_buff, stamp: *mut Stamp, row: *mut Row) -> i32 {
    // SAFETY: by contract.
    unsafe {
        let fate = compares(skb, stamp, row);
        taken::counts(stamp);
        fate
    }
}

#[inline(never)]
unsafe fn compares(skb: *mut __sk_buff, stamp: *mut Stamp, row: *mut Row) -> i32 {
    // SAFETY: by contract, map memory.
    unsafe {
        // Once more: what the verifier knew of it by now would make many walks of this.
        let Some(segment) = segment::of(skb) else {
            return PASS;
        };
        let segment = &Segment {
            payload: hidden(segment.payload),
            offset: hidden(segment.offset),
            ..segment
        };
        let cookie = bpf_get_socket_cookie(skb.cast());
        let index = (*stamp).row;
        let Some(asked) = asked_of(cookie) else {
            return PASS;
        };
        if index == OTHER_ROW {
            return PASS;
        }
        if (*asked).owner != cookie {
            forget(asked, cookie);
        }
        if (*asked).refused != 0 {
            return still_refused(skb, stamp, row, segment);
        }
        let (number, _) = unpack_request(atomics::load(&raw const (*stamp).request));
        let ahead = segment.begin().wrapping_sub((*stamp).request_seq) as i32;
        if number != 0 && ahead <= 0 {
            // It is sent again, with more behind it.
            return PASS;
        }
        let begun = hidden64(prints::begun(skb, segment));
        let method = hidden(begun as u32 & METHOD);
        let print = if begun == 0 {
            0
        } else if method == 0 {
            method::print(begun, method)
        } else {
            method::print(prints::mixed_on(skb, segment, begun), method)
        };
        let print = hidden(print);
        let before = *asked;
        (*asked).sent = print;
        (*asked).failed = 0;
        (*asked).number = (number + 1) as u16 & EXCHANGE_NUMBERS;
        if print == 0 {
            return PASS;
        }
        let repeats = if number == 0 {
            let may_differ = u32::from(method != 0);
            let repeats = hidden(first(stamp, hidden(before.failed), print, may_differ));
            match hidden(tried::asked(
                stamp,
                print,
                hidden(before.failed),
                bpf_ktime_get_ns(),
                may_differ,
            )) {
                0 => repeats,
                _ => MAY_BE_SAME,
            }
        } else {
            let is_last = u32::from(before.number) == number;
            next(
                stamp,
                row,
                asked,
                hidden(if is_last { before.sent } else { 0 }),
            )
        };
        let repeats = hidden(repeats);
        if method == 0 || passes(skb, stamp, row, segment, method << 2 | repeats) {
            return PASS;
        }
        // To the program it has failed once more.
        (*stamp).ended = ENDED_UNANSWERED;
        (*asked).sent = before.sent;
        (*asked).number = before.number;
        (*asked).failed = before.failed;
        (*asked).refused = tick(bpf_ktime_get_ns()) | 1;
        DROP
    }
}

/// A request begins that is not idempotent: whether its first packet may leave. `what` is what it says (`OTHER` and the
/// like), and above that its method.
#[inline(always)]
unsafe fn passes(
    skb: *mut __sk_buff,
    stamp: *mut Stamp,
    row: *mut Row,
    segment: &Segment,
    what: u32,
) -> bool {
    // SAFETY: by the caller.
    hidden(unsafe { judged(skb, stamp, row, segment, what) }) == 0
}

/// As [`passes`]: 1 if it may not.
#[inline(never)]
unsafe fn judged(
    skb: *mut __sk_buff,
    stamp: *mut Stamp,
    row: *mut Row,
    segment: &Segment,
    what: u32,
) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let cookie = bpf_get_socket_cookie(skb.cast());
        let (repeats, method) = (hidden(what & 3), hidden(what >> 2));
        let mut state = whole::LOST;
        if (*row).settings.flags & ROW_REFUSES != 0 {
            state = whole::begins(skb, segment, cookie);
        }
        let state = hidden(state);
        let mut sure = 0;
        if state == whole::WHOLE {
            sure = whole::is_sure(stamp, row, cookie, repeats);
        }
        let sure = hidden(sure);
        if state != whole::FOLLOWED && repeats == OTHER && sure == 0 {
            if state == whole::WHOLE {
                whole::sent(stamp, row, cookie);
                whole::follow(stamp, cookie, method, repeats);
            }
            return 0;
        }
        if hidden(prints::search(skb, segment)) != HAS_END {
            return 0;
        }
        if state != whole::FOLLOWED {
            if hidden(repeated::refuses(stamp, row, cookie, method | sure, 0)) != 0 {
                return 1;
            }
            if state == whole::LOST {
                return 0;
            }
            whole::sent(stamp, row, cookie);
        }
        whole::follow(stamp, cookie, method, repeats);
        0
    }
}

/// A request that was refused is sent again: its connection has not been ended yet.
#[inline(never)]
unsafe fn still_refused(
    skb: *mut __sk_buff,
    stamp: *mut Stamp,
    row: *mut Row,
    segment: &Segment,
) -> i32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let cookie = bpf_get_socket_cookie(skb.cast());
        let Some(asked) = asked_of(cookie) else {
            return PASS;
        };
        let method = prints::method_of(skb, segment);
        if repeated::still_refuses(stamp, row, cookie, (*asked).refused, method) != 0 {
            return DROP;
        }
        (*asked).refused = 0;
        (*asked).sent = 0;
        (*asked).failed = 0;
        PASS
    }
}

/// The first request of a connection, which may repeat what has failed before it was dialled. Not 0 in `may_differ`: a
/// print of all its bytes, which tells nothing of who takes up something else. A retry may have an id of its own in its
/// head (`traceparent`, a signature of the moment).
#[inline(never)]
unsafe fn first(stamp: *mut Stamp, failed: u32, print: u32, may_differ: u32) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        if failed == 0 {
            return OTHER;
        }
        if !method::is_print(failed) {
            return if is_retry((*stamp).operation) {
                MAY_BE_SAME
            } else {
                OTHER
            };
        }
        let is_same = failed == print;
        if (is_same || may_differ == 0)
            && let Some(pace) = paces::pace_of(owner((*stamp).pid, (*stamp).row))
        {
            (*pace).habit = (*pace).habit.with_retry(is_same);
        }
        if is_same && is_retry((*stamp).operation) {
            SAME
        } else {
            OTHER
        }
    }
}

/// A later request of a connection, whose print is in `asked` already; `before` was the one before it.
#[inline(never)]
unsafe fn next(stamp: *mut Stamp, row: *mut Row, asked: *mut Asked, before: u32) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let index = (*stamp).row;
        if (*stamp).pid == 0 {
            return OTHER;
        }
        let (Some(pace), Some(policy), Some(retries)) = (
            paces::pace_of(owner((*stamp).pid, index)),
            maps::RETRY_POLICIES.get_ptr((*row).settings.policy),
            maps::RETRIES.get_ptr_mut(index),
        ) else {
            return OTHER;
        };
        let repeated = (*asked).repeated;
        (*asked).repeated = 0;
        if before == 0 {
            return OTHER;
        }
        let is_same = hidden(u32::from(before == (*asked).sent)) != 0;
        if (*stamp).ended != ENDED_UNANSWERED {
            (*pace).habit = (*pace).habit.with_next(is_same);
            return OTHER;
        }
        let pause_ns = bpf_ktime_get_ns().saturating_sub((*stamp).answered_ns);
        if !is_same || pause_ns > (*policy).window_ns || !is_known_to(pace, pause_ns) {
            return OTHER;
        }
        (*asked).repeated = repeated.saturating_add(1);
        let nth = (repeated as usize).min(NTH - 1);
        atomics::add32((&raw mut (*retries).live).cast::<u32>().add(nth), 1);
        SAME
    }
}

/// Whether the same request after such a pause is a retry: a process that asks for the same again and again
/// does so, too, sooner or later.
#[inline(always)]
unsafe fn is_known_to(pace: *mut Pace, pause_ns: u64) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe {
        (*pace).habit.varies()
            || pace::is_soon((*pace).good, (*pace).failed, hidden(pace::bucket(pause_ns)))
    }
}

/// Bits of an exchange's number.
const EXCHANGE_NUMBERS: u16 = (1 << 14) - 1;
