//! Requests of HTTP/1 in the clear that are repeated: see [`agent_common::method`].
//!
//! A print of a request is taken only where something can come of it: while something fails, on connections
//! whose connect was looked at as a possible retry, and wherever the policy refuses.
//!
//! A request is refused by dropping its first packet. The program's send has ended well by then, and the
//! kernel would send the packet again and again: so the agent is told, and ends the connection. Where it
//! cannot be told, or does not, the request passes.

use agent_common::{
    Event, EventKind, Mode, OTHER_ROW, Retries, Row, Stamp, Verdict,
    event::{EVENT_QUIET, EVENT_REFUSED, EVENT_WOULD},
    method::{
        self, ASKED_SLOTS, Asked, COVERED, FIRST, HAS_END, PIECES, REFUSED_TICKS, SEARCHED, SOME,
        STEPS, WINDOW,
    },
    pace::{self, Pace},
    retry::{ENDED_UNANSWERED, NTH, TASK_SLOTS, is_retry, is_to_come, owner, place, tick},
    row::{ROW_PROTECTED, ROW_REFUSES, ROW_RETRIES},
    stamp::{PROTOCOL_HTTP1, STAMP_PROBE, STAMP_UNJUDGED, STAMP_WATCHED, unpack_request},
    verdict::STATE_FORCED_CLOSED,
};
use aya_ebpf::{
    bindings::__sk_buff,
    cty::c_void,
    helpers::generated::{bpf_get_socket_cookie, bpf_ktime_get_ns, bpf_loop, bpf_skb_load_bytes},
};

use crate::{
    atomics, events, head, maps,
    opaque::{hidden, hidden64},
    paces, rows,
    segment::{self, Segment},
    taken, tried,
};

const PASS: i32 = 1;
const DROP: i32 = 0;

/// Between two events of a row that tell of requests which passed, in units of [`tick`] (a second).
const TOLD_EVERY: u32 = 954;

/// It is another request than the one that failed, or that is not known.
const OTHER: u32 = 0;
/// It is a retry of a request whose bytes are not known.
const MAY_BE_SAME: u32 = 1;
/// It is a retry of the same request.
const SAME: u32 = 2;

/// The request may pass.
const PASSES: u32 = 0;
/// It would be refused, but for observe mode.
const WOULD: u32 = 1;
/// It is refused.
const REFUSED: u32 = 2;

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
        let (Some(asked), Some(retries)) = (asked_of(cookie), maps::RETRIES.get_ptr_mut(index))
        else {
            return PASS;
        };
        if index == OTHER_ROW {
            return PASS;
        }
        if (*asked).owner != cookie {
            forget(asked, cookie);
        }
        if (*asked).refused != 0 {
            return still_refused(stamp, row, asked);
        }
        let (number, _) = unpack_request(atomics::load(&raw const (*stamp).request));
        let ahead = segment.begin().wrapping_sub((*stamp).request_seq) as i32;
        if number != 0 && ahead <= 0 {
            // It is sent again, with more behind it.
            return PASS;
        }
        let begun = hidden64(begun(skb, segment));
        let method = hidden(begun as u32 & METHOD);
        let print = if begun == 0 {
            0
        } else if method == 0 {
            method::print(begun, method)
        } else {
            method::print(mixed_on(skb, segment, begun), method)
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
            let repeats = hidden(first(stamp, hidden(before.failed), print));
            match hidden(tried::asked(
                stamp,
                print,
                hidden(before.failed),
                bpf_ktime_get_ns(),
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
        if repeats == OTHER || method == 0 || search(skb, segment) != HAS_END {
            return PASS;
        }
        atomics::add32(&raw mut (*retries).non_idempotent, 1);
        let mut fate = PASSES;
        if repeats == SAME && is_whole(skb, segment) {
            fate = may(stamp, row);
        }
        let fate = hidden(fate);
        let is_sent = hidden(tell(stamp, retries, (*asked).owner, hidden(method), fate));
        if fate == WOULD {
            atomics::add32(&raw mut (*retries).would_refuse, 1);
        }
        if fate != REFUSED || is_sent == 0 {
            return PASS;
        }
        atomics::add32(&raw mut (*retries).refused, 1);
        // To the program it has failed once more.
        (*stamp).ended = ENDED_UNANSWERED;
        (*asked).sent = before.sent;
        (*asked).number = before.number;
        (*asked).failed = before.failed;
        (*asked).refused = tick(bpf_ktime_get_ns()) | 1;
        DROP
    }
}

/// A request that was refused is sent again: its connection has not been ended yet.
#[inline(never)]
unsafe fn still_refused(stamp: *mut Stamp, row: *mut Row, asked: *mut Asked) -> i32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let Some(retries) = maps::RETRIES.get_ptr_mut((*stamp).row) else {
            return PASS;
        };
        let ends = (*asked).refused.wrapping_add(REFUSED_TICKS);
        if is_to_come(ends, tick(bpf_ktime_get_ns())) && may(stamp, row) == REFUSED {
            // (The agent may have been unable to look.)
            tell(stamp, retries, (*asked).owner, 0, REFUSED);
            return DROP;
        }
        // Nobody ends it: it passes after all.
        (*asked).refused = 0;
        (*asked).sent = 0;
        (*asked).failed = 0;
        atomics::add32(&raw mut (*retries).refused, u32::MAX);
        PASS
    }
}

/// The first request of a connection, which may repeat what has failed before it was dialled.
#[inline(never)]
unsafe fn first(stamp: *mut Stamp, failed: u32, print: u32) -> u32 {
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
        if let Some(pace) = paces::pace_of(owner((*stamp).pid, (*stamp).row)) {
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

/// What is done to a request that is not idempotent and is repeated.
#[inline(never)]
unsafe fn may(stamp: *mut Stamp, row: *mut Row) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let Some(control) = rows::control() else {
            return PASSES;
        };
        let beat = atomics::load(&raw const (*control).heartbeat_ns);
        let is_awake = bpf_ktime_get_ns().saturating_sub(beat) <= (*control).heartbeat_max_age_ns;
        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        let flags = (*row).settings.flags;
        // A probe is wanted, and an operator's word is the last.
        if !is_awake
            || flags & (ROW_REFUSES | ROW_PROTECTED) != ROW_REFUSES
            || (*stamp).flags & (STAMP_PROBE | STAMP_UNJUDGED) != 0
            || verdict.state == STATE_FORCED_CLOSED
        {
            return PASSES;
        }
        match (&raw const (*control).mode).read_volatile() {
            Mode::ENFORCE => REFUSED,
            Mode::OBSERVE => WOULD,
            _ => PASSES,
        }
    }
}

/// Tells of a request that is repeated; 1 if it was told, else 0. A method of 0: it was told before, and is
/// only still there.
#[inline(never)]
unsafe fn tell(
    stamp: *mut Stamp,
    retries: *mut Retries,
    cookie: u64,
    method: u32,
    fate: u32,
) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let now = bpf_ktime_get_ns();
        let told = (&raw const (*retries).told).read_volatile();
        let is_over = told == 0 || !is_to_come(told.wrapping_add(TOLD_EVERY), tick(now));
        let is_news = method != 0 && is_over;
        let is_news = hidden(u32::from(is_news));
        // (A copy, lest the verifier comes back with each value of it.)
        let flags = hidden(match hidden(fate) {
            REFUSED => EVENT_REFUSED,
            WOULD => EVENT_WOULD,
            _ => 0,
        });
        if is_news == 0 && flags & EVENT_REFUSED == 0 {
            return 0;
        }
        if is_news != 0 {
            (&raw mut (*retries).told).write_volatile(tick(now) | 1);
        }
        let quiet = hidden(if is_news == 0 { EVENT_QUIET } else { 0 });
        u32::from(events::try_send(&Event {
            kind: EventKind::REPEATED,
            seq: cookie,
            timeout_ms: unpack_request(atomics::load(&raw const (*stamp).request)).0,
            outcome: method,
            flags: flags | quiet,
            ..events::about(stamp, now)
        }))
    }
}

/// Bits of an exchange's number.
const EXCHANGE_NUMBERS: u16 = (1 << 14) - 1;

/// Bits of what [`begun`] returns that are the method.
const METHOD: u32 = 3;
/// Set in it.
const BEGUN: u64 = 4;

/// Whether the print has every byte of the request, to the end of its body.
#[inline(never)]
unsafe fn is_whole(skb: *mut __sk_buff, segment: &Segment) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe {
        let payload = hidden(segment.payload);
        if payload > COVERED {
            return false;
        }
        let head = head::of_request(skb, segment);
        if head.is_null() {
            return false;
        }
        let is_whole = method::is_whole(&(*head).search, &(*head).value, payload);
        let is_whole = hidden(u32::from(is_whole));
        head::release(head);
        is_whole != 0
    }
}

/// What a request's print is made of, its first bytes and its method; 0 where it is too short.
#[inline(never)]
unsafe fn begun(skb: *mut __sk_buff, segment: &Segment) -> u64 {
    const HALF: u32 = FIRST as u32 / 2;
    const QUARTER: u32 = FIRST as u32 / 4;
    let (at, payload) = (segment.offset, hidden(segment.payload));
    let mut words = [0_u64; FIRST / 8];
    let to = words.as_mut_ptr().cast::<u8>();
    // SAFETY: by the caller; not more than the buffer holds. Fixed lengths for the verifier of 6.1.
    unsafe {
        let failed = if payload >= FIRST as u32 {
            load(skb, at, to, FIRST as u32)
        } else if payload >= HALF {
            load(skb, at, to, HALF) | load(skb, at + payload - HALF, to.add(HALF as usize), HALF)
        } else if payload >= QUARTER {
            load(skb, at, to, QUARTER)
                | load(
                    skb,
                    at + payload - QUARTER,
                    to.add(QUARTER as usize),
                    QUARTER,
                )
        } else {
            return 0;
        };
        if failed != 0 {
            return 0;
        }
        let method = hidden(method::method(words[0]));
        let mut mix = method::mixed_all(0, &words);
        if method == 0 && payload > FIRST as u32 && method::goes_on(&words) {
            let rest = hidden(payload - FIRST as u32).min(FIRST as u32);
            if load(skb, at + rest, to, FIRST as u32) != 0 {
                return 0;
            }
            mix = method::mixed_all(mix, &words);
        }
        hidden64(mix) & !(BEGUN | u64::from(METHOD)) | BEGUN | u64::from(method)
    }
}

/// What a step of [`mixed_on`] is told, and what it tells.
struct Mixing {
    skb: *mut __sk_buff,
    offset: u32,
    /// Bytes of the request that are printed, at least [`FIRST`] for there to be a step.
    length: u32,
    mix: u64,
}

/// The print of a request that is not idempotent, behind its first bytes: [`COVERED`] of it, and its length.
#[inline(never)]
unsafe fn mixed_on(skb: *mut __sk_buff, segment: &Segment, mix: u64) -> u64 {
    let payload = hidden(segment.payload);
    let mut mixing = Mixing {
        skb,
        offset: segment.offset,
        length: hidden(payload.min(COVERED)),
        mix: method::mixed(mix, u64::from(hidden(payload.min(COVERED + 1)))),
    };
    // SAFETY: by the caller. A loop that the verifier walks through once.
    unsafe {
        let piece = piece as unsafe extern "C" fn(u32, *mut Mixing) -> i64;
        bpf_loop(PIECES, piece as *mut _, (&raw mut mixing).cast(), 0);
        (&raw const mixing.mix).read_volatile()
    }
}

/// A piece more of a request; 1 when there is none.
unsafe extern "C" fn piece(index: u32, mixing: *mut Mixing) -> i64 {
    // SAFETY: what `mixed_on` has given, and nobody else has.
    unsafe {
        let at = method::piece(index, (*mixing).length);
        if at == 0 {
            return 1;
        }
        let mut words = [0_u64; FIRST / 8];
        let to = words.as_mut_ptr().cast();
        // (What cannot be read is nothing that is the same twice.)
        let mut mix = (*mixing).mix;
        if load((*mixing).skb, (*mixing).offset + at, to, FIRST as u32) != 0 {
            mix ^= bpf_ktime_get_ns();
        }
        (*mixing).mix = method::mixed_all(mix, &words);
        0
    }
}

#[inline(always)]
unsafe fn load(skb: *mut __sk_buff, at: u32, to: *mut u8, length: u32) -> i64 {
    // SAFETY: by the caller.
    unsafe { bpf_skb_load_bytes(skb.cast::<c_void>(), at, to.cast(), length) }
}

/// What a step of the search is told, and what it tells.
struct Context {
    skb: *mut __sk_buff,
    /// The request's first byte, from the network header.
    offset: u32,
    at_hand: u32,
    found: u32,
}

/// Searches a request for what [`method::holds`] finds.
#[inline(never)]
unsafe fn search(skb: *mut __sk_buff, segment: &Segment) -> u32 {
    let mut context = Context {
        skb,
        offset: segment.offset,
        at_hand: hidden(hidden(segment.payload).min(SEARCHED)),
        found: 0,
    };
    // SAFETY: by the caller. A loop that the verifier walks through once.
    unsafe {
        let step = step as unsafe extern "C" fn(u32, *mut Context) -> i64;
        bpf_loop(STEPS, step as *mut _, (&raw mut context).cast(), 0);
    }
    hidden(context.found)
}

/// A step of the search; 1 when it is over.
unsafe extern "C" fn step(index: u32, context: *mut Context) -> i64 {
    const MASK: u32 = WINDOW.next_power_of_two() - 1;
    // SAFETY: what `search` has given, and nobody else has.
    unsafe {
        let at = method::window(index);
        let left = (*context).at_hand.wrapping_sub(at);
        if left as i32 <= 0 {
            return 1;
        }
        // For the verifier: at least 1, and no more than there is room for.
        let length = (hidden(left.min(WINDOW) - 1) & MASK) + 1;
        let mut window = [0_u64; MASK as usize / 8 + 1];
        let to = window.as_mut_ptr().cast();
        if load((*context).skb, (*context).offset + at, to, length) != 0 {
            return 1;
        }
        let found = hidden(method::holds([window[0], window[1], window[2]]));
        (*context).found = found;
        i64::from(found != 0)
    }
}
