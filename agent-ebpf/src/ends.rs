//! How exchanges end: with an answer, or with the connection.

use agent_common::{
    Event, EventKind, Row, Stamp, Statuses, Verdict,
    event::{
        EVENT_EXCHANGE, EVENT_PROBE, OUTCOME_ABANDONED, OUTCOME_CLOSED_EARLY, OUTCOME_GAVE_UP,
        OUTCOME_HUNG, OUTCOME_OTHER, OUTCOME_RESET, OUTCOME_RESPONSE, OUTCOME_SLOW, OUTCOME_STATUS,
    },
    reply::{self, Answer},
    request::COMPARED,
    retry::{ENDED_UNANSWERED, ENDED_WELL},
    row::FAIL_LISTED,
    stamp::{
        KIND_HANDSHAKE, KIND_REQUEST, KIND_WAIT, PROTOCOL_HTTP1, PROTOCOL_SSH, STAMP_HALF_CLOSED,
        STAMP_PROBE, STAMP_PROBE_BY_EXCHANGE, STAMP_WOULD, kind_of_request, unpack_request,
    },
    unanswered,
    verdict::STATE_CLOSED,
};

use aya_ebpf::helpers::generated::bpf_ktime_get_ns;

use crate::{
    atomics, counted, events,
    kernel::current_is_exiting,
    maps,
    opaque::{hidden, hidden64, is},
    outcome::{self, Window},
    request, retries, tried, whole,
};

const EPIPE: u32 = 32;
const ECONNABORTED: u32 = 103;
const ECONNRESET: u32 = 104;

/// A connection that was used before and then idle for this long, us, may be closed by its server at
/// any moment: that the next request meets the close is a race, not a failure.
const IDLE_US: u64 = 500_000;

/// A program that waits for an answer may leave this much unread, bytes: a TLS record, or the session
/// tickets of a TLS 1.3 server.
const READS: u32 = 20_000;

/// The first exchanges of an SSH connection: names and keys, after which nothing can be told.
const SSH_BEGINS_WITHIN: u32 = 3;

/// The answer says that the server failed.
const SAYS_FAILED: u64 = 1;
/// The answer asks for fewer calls.
const SAYS_THROTTLED: u64 = 2;
/// The request was one that waits by right: when its answer came says nothing.
const SAYS_WAITED: u64 = 4;

/// What an answer says, by its number and its status line: [`Answered::says`].
#[inline(always)]
pub fn says(answer: u32, line: u64) -> u64 {
    let answer = Answer::from_number(answer);
    let failed = if answer.is_failure() { SAYS_FAILED } else { 0 };
    let throttled = if answer.is_throttled() {
        SAYS_THROTTLED
    } else {
        0
    };
    line | hidden64(failed | throttled)
}

/// What the kind of the exchange adds to what its answer says.
#[inline(always)]
pub fn waited(kind: u64) -> u64 {
    hidden64(if kind == KIND_WAIT { SAYS_WAITED } else { 0 })
}

/// Whether an answer that says this is a failure for the policy of a row.
#[inline(always)]
unsafe fn fails(row: *mut Row, says: u64) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe {
        // (Asked in any other way, this costs the verifier twice as much.)
        let how = (*row).settings.fail_status;
        let says = if how == FAIL_LISTED {
            is_listed(row, says)
        } else {
            says as u32
        };
        how != 0 && says & SAYS_FAILED as u32 != 0
    }
}

/// Whether the policy of a row lists the status of an answer that says this: 1 ([`SAYS_FAILED`]) or 0.
///
/// # Safety
/// `row` must be map memory.
#[inline(never)]
unsafe fn is_listed(row: *mut Row, says: u64) -> u32 {
    // SAFETY: by contract.
    let policy = unsafe { (*row).settings.policy };
    let (failed, throttled) = (says & SAYS_FAILED != 0, says & SAYS_THROTTLED != 0);
    let status = reply::status(says, failed, throttled);
    let Some(listed) = maps::STATUSES.get_ptr(policy) else {
        return 0;
    };
    // Not by an index, of which the verifier would want to know where it comes from.
    // SAFETY: map memory.
    let bits =
        [0, 1, 2, 3].map(|word| unsafe { (&raw const (*listed).bits[word]).read_volatile() });
    u32::from((Statuses { bits }).contains(status))
}

/// An answer.
pub struct Answered {
    /// When it came, ns.
    pub now: u64,
    /// After how long, us.
    pub us: u64,
    /// What the agent has counted the exchange as.
    pub counted: u64,
    /// What it says ([`says`]): its status line, [`SAYS_FAILED`], [`SAYS_THROTTLED`]; and [`waited`].
    pub says: u64,
}

/// An exchange is answered. 1 if the answer says that it has failed, else 0.
///
/// # Safety
/// `stamp` must be the connection's and `row` its row.
#[inline(never)]
pub unsafe fn answered(stamp: *mut Stamp, row: *mut Row, answered: Answered) -> u32 {
    let Answered {
        now,
        us,
        counted,
        says,
    } = answered;
    // SAFETY: by the caller, map memory.
    unsafe {
        (*row).last_answer_ns = now;
        measure(row, us, says);
        let slow_us = u64::from((*row).settings.slow_call_us);
        let is_failed = fails(row, says);
        // (Not by a question, for which the verifier would walk on twice.)
        let judged_us = us & hidden64(((says / SAYS_WAITED) & 1).wrapping_sub(1));
        let is_slow = !is_failed && slow_us != 0 && judged_us > slow_us;
        if says & SAYS_THROTTLED != 0 {
            atomics::add32(&raw mut (*row).throttled, 1);
        }
        if is_failed {
            atomics::add(&raw mut (*row).exchange_status, 1);
            (*stamp).ended = ENDED_UNANSWERED;
            retries::answered_badly(row, now);
        }
        if is_slow {
            atomics::add(&raw mut (*row).slow_calls, 1);
        }
        let seq = if counted::answered(stamp, row, counted, is_failed, is_slow) {
            0
        } else {
            outcome::call(stamp, row, now, Window::Exchanges, is_failed, is_slow)
        };
        let outcome = if is_failed {
            OUTCOME_STATUS
        } else if is_slow {
            OUTCOME_SLOW
        } else {
            OUTCOME_RESPONSE
        };
        if outcome != OUTCOME_RESPONSE {
            tell(stamp, now, seq, us, outcome, 0);
        }
        probe_ended(stamp, now, us, outcome);
        would_ended(stamp, !is_failed);
        // Last of all, as in `ended`.
        atomics::add(&raw mut (*row).responses, 1);
        hidden(u32::from(is_failed))
    }
}

/// Enters the latency of an answer that says this.
///
/// # Safety
/// `row` must be map memory.
#[inline(never)]
unsafe fn measure(row: *mut Row, us: u64, says: u64) -> u32 {
    // SAFETY: by contract.
    unsafe {
        if says & SAYS_WAITED == 0 {
            atomics::add(&raw mut (*row).response_latency_sum_us, us);
            outcome::longest(&raw mut (*row).response_latency_max_us, us);
            outcome::bucket((*row).response_histogram, us);
        }
    }
    hidden(0)
}

/// How an established connection changes.
pub struct Change {
    /// The new state.
    pub state: u32,
    /// The socket's error.
    pub error: u32,
    /// Its `sk_shutdown`.
    pub shut: u32,
    /// Bytes that lie there and that the program has not read.
    pub unread: u32,
    /// The socket's cookie.
    pub cookie: u64,
}

/// An established connection changes state. True when it is over as far as we are concerned.
///
/// # Safety
/// `stamp` must be the connection's.
#[inline(never)]
pub unsafe fn closing(stamp: *mut Stamp, change: &Change) -> bool {
    let &Change {
        state,
        error,
        shut,
        unread,
        cookie,
    } = change;
    const TCP_FIN_WAIT1: u32 = 4;
    const TCP_FIN_WAIT2: u32 = 5;
    const TCP_CLOSE: u32 = 7;
    const TCP_CLOSE_WAIT: u32 = 8;
    const RCV_SHUTDOWN: u32 = 1;
    // SAFETY: by contract.
    unsafe {
        let word = atomics::load(&raw const (*stamp).request);
        let (number, begun_us) = unpack_request(word);
        let answers = (&raw const (*stamp).answers).read_volatile();
        let owed = number != answers;
        // The program has closed it, and not only said that it will send no more. (At the very end
        // a FIN of the peer's has set the bit, too: then it matters what the program had said.)
        let half_closed = (*stamp).flags & STAMP_HALF_CLOSED != 0;
        let by_program =
            error == 0 && shut & RCV_SHUTDOWN != 0 && !(state == TCP_CLOSE && half_closed);
        match state {
            TCP_FIN_WAIT1 if !by_program => {
                (*stamp).flags |= STAMP_HALF_CLOSED;
                return false;
            }
            // Again the same state: a close after the half of it (net/ipv4/tcp.c, `new_state`).
            TCP_FIN_WAIT2 if !by_program => return false,
            TCP_CLOSE_WAIT if !owed => return false,
            TCP_FIN_WAIT1 | TCP_FIN_WAIT2 | TCP_CLOSE_WAIT | TCP_CLOSE => {}
            _ => return false,
        }
        if !owed {
            // A connection without any exchange (a port check) says nothing, also as a probe.
            if (*stamp).flags & STAMP_PROBE != 0 {
                probe_ended(stamp, bpf_ktime_get_ns(), 0, OUTCOME_ABANDONED);
            }
            would_ended(stamp, true);
            if number != 0 && kind_of_request(word) == KIND_REQUEST {
                ended_well(stamp);
            }
            return true;
        }
        let now = bpf_ktime_get_ns();
        if !atomics::replace32(&raw mut (*stamp).answers, answers, number) {
            // An answer has just come in on another CPU: it is one.
            return true;
        }
        let us = (now / 1000).saturating_sub(begun_us);
        let idle_us = begun_us.saturating_sub((*stamp).answered_ns / 1000);
        let reused = number != 1;
        let outcome = match state {
            TCP_CLOSE_WAIT => OUTCOME_CLOSED_EARLY,
            _ if error == ECONNRESET => OUTCOME_RESET,
            // The peer had closed before the request was sent (net/ipv4/tcp_input.c, `tcp_reset`
            // in CLOSE_WAIT).
            _ if error == EPIPE => OUTCOME_CLOSED_EARLY,
            _ if error == ECONNABORTED => OUTCOME_ABANDONED,
            _ if error != 0 => OUTCOME_OTHER,
            _ if !by_program => OUTCOME_CLOSED_EARLY,
            // A program that does not read has not waited: the answer cannot come, or lies there.
            _ if unread > READS => OUTCOME_ABANDONED,
            // The wait counts from the last byte of the request.
            _ => {
                let waited_us = now.saturating_sub((*stamp).begun_ns) / 1000;
                given_up(stamp, waited_us, current_is_exiting())
            }
        };
        // An encrypted farewell looks like a request, and some servers close first.
        let is_farewell = outcome == OUTCOME_CLOSED_EARLY
            && (*stamp).protocol == PROTOCOL_SSH
            && number > SSH_BEGINS_WITHIN;
        let is_taken = half_closed && outcome == OUTCOME_CLOSED_EARLY && is_message(stamp, word);
        let outcome = if is_farewell || is_taken {
            OUTCOME_ABANDONED
        } else {
            outcome
        };
        let is_stale = reused
            && idle_us >= IDLE_US
            && (outcome == OUTCOME_CLOSED_EARLY || outcome == OUTCOME_RESET);
        let Some(row) = outcome::row_of(stamp) else {
            return true;
        };
        if (*row).counted_open != 0
            && counted::is_settled(counted::take(cookie, stamp, row, 0), error == ECONNABORTED)
        {
            // The agent has ended it, or counted it while it hung: as a probe it has failed.
            let outcome = if outcome == OUTCOME_ABANDONED {
                OUTCOME_HUNG
            } else {
                outcome
            };
            (*stamp).ended = what_is_known(stamp, cookie, ENDED_UNANSWERED);
            probe_ended(stamp, now, us, outcome);
            would_ended(stamp, false);
            ended(row);
            return true;
        }
        let counter = match outcome {
            _ if is_stale => &raw mut (*row).stale,
            OUTCOME_CLOSED_EARLY => &raw mut (*row).exchange_closed_early,
            OUTCOME_RESET => &raw mut (*row).exchange_reset,
            OUTCOME_GAVE_UP => &raw mut (*row).exchange_gave_up,
            OUTCOME_ABANDONED => &raw mut (*row).exchange_abandoned,
            _ => &raw mut (*row).exchange_other,
        };
        atomics::add(counter, 1);
        let is_unasked = error == 0 && !is_stale && is(unasked(stamp, row, word, outcome, us));
        let how = if is_stale || outcome == OUTCOME_ABANDONED || is_unasked {
            ENDED_WELL
        } else {
            ENDED_UNANSWERED
        };
        (*stamp).ended = what_is_known(stamp, cookie, hidden(how));
        if is_stale || outcome == OUTCOME_ABANDONED {
            probe_ended(stamp, now, us, OUTCOME_ABANDONED);
        } else {
            let seq = if is_unasked {
                0
            } else {
                outcome::call(stamp, row, now, Window::Exchanges, true, false)
            };
            tell(stamp, now, seq, us, outcome, error);
            probe_ended(stamp, now, us, outcome);
            would_ended(stamp, false);
            if (*stamp).protocol == PROTOCOL_HTTP1 {
                tried::fails(stamp, cookie, now);
            }
        }
        ended(row);
    }
    true
}

/// How an exchange ended, for whoever compares requests.
#[inline(always)]
unsafe fn what_is_known(stamp: *mut Stamp, cookie: u64, ended: u32) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        if (*stamp).protocol == PROTOCOL_HTTP1 && (*stamp).tls_stage & COMPARED != 0 {
            whole::ended(stamp, cookie, ended)
        } else {
            ended
        }
    }
}

/// A destination that has never answered anybody may be one that never does (syslog): that a program
/// closes without an answer is counted there, and judges nobody. TLS answers a ClientHello always.
///
/// # Safety
/// As [`closing`]; `request` is the exchange's word.
#[inline(always)]
pub unsafe fn is_one_way(row: *mut Row, request: u64) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe { (*row).responses == 0 && kind_of_request(request) != KIND_HANDSHAKE }
}

/// Whether an exchange may be a message for which the end of the connection is all the answer there is. A server
/// that closes in order behind the end of what it was sent has read all of that: the kernel resets otherwise
/// (net/ipv4/tcp.c, `__tcp_close`).
///
/// # Safety
/// As [`closing`]; `request` is the exchange's word.
#[inline(always)]
unsafe fn is_message(stamp: *mut Stamp, request: u64) -> bool {
    // SAFETY: by the caller, map memory.
    kind_of_request(request) == KIND_REQUEST
        && unsafe { unanswered::may_be((*stamp).protocol, (*stamp).tls_stage) }
}

/// Whether nobody waits for the answer to this exchange, for connections of the row usually end like this
/// ([`unanswered`]).
///
/// # Safety
/// As [`closing`]; `request` is the exchange's word.
#[inline(always)]
pub unsafe fn is_usual(stamp: *mut Stamp, row: *mut Row, request: u64) -> bool {
    let (number, _) = unpack_request(request);
    // SAFETY: by the caller, map memory.
    unsafe {
        is_message(stamp, request)
            && unanswered::is_usual(
                (&raw const (*row).unanswered).read_volatile(),
                number,
                (*row).responses,
                (*row).exchange_gave_up,
            )
    }
}

/// 1 if an exchange that has ended like this was owed no answer by all that is known of the destination, else 0; and
/// what is learned by it.
///
/// # Safety
/// As [`is_usual`].
#[inline(never)]
unsafe fn unasked(stamp: *mut Stamp, row: *mut Row, request: u64, outcome: u32, us: u64) -> u32 {
    // SAFETY: by contract, map memory.
    unsafe {
        hidden(u32::from(match outcome {
            OUTCOME_GAVE_UP => {
                let is_unasked = is_one_way(row, request) || is_usual(stamp, row, request);
                learn(stamp, row, request);
                is_unasked
            }
            // The peer is quicker than the program to close what nothing is owed on.
            OUTCOME_CLOSED_EARLY => {
                us >= u64::from((*row).settings.exchange_gave_up_ms) * 1000
                    && is_usual(stamp, row, request)
            }
            OUTCOME_ABANDONED if unpack_request(request).0 != 1 => {
                ended_well(stamp);
                false
            }
            _ => false,
        }))
    }
}

/// A program has given up an exchange: noted where the breaker is closed. What two processors note at once may be
/// noted once.
#[inline(always)]
unsafe fn learn(stamp: *mut Stamp, row: *mut Row, request: u64) {
    // SAFETY: by the caller, map memory.
    unsafe {
        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        if verdict.state == STATE_CLOSED && is_message(stamp, request) {
            let (number, _) = unpack_request(request);
            let word = &raw mut (*row).unanswered;
            word.write_volatile(unanswered::given_up(word.read_volatile(), number));
        }
    }
}

/// A connection ends, and no request of it was given up. Written only where it is news.
#[inline(always)]
unsafe fn ended_well(stamp: *mut Stamp) {
    // SAFETY: by the caller, map memory.
    unsafe {
        if let Some(row) = outcome::unpinned_row_of(stamp) {
            let word = &raw mut (*row).unanswered;
            let before = word.read_volatile();
            let after = unanswered::well(before);
            if after != before {
                word.write_volatile(after);
            }
        }
    }
}

/// What it means that the program closes before the answer. (Nobody has waited for the answer to a request
/// that is not finished, and what waits by right is not late.)
///
/// # Safety
/// As [`closing`].
#[inline(always)]
pub unsafe fn given_up(stamp: *mut Stamp, us: u64, exiting: bool) -> u32 {
    // SAFETY: by the caller, map memory.
    let limit =
        unsafe { outcome::row_of(stamp).map_or(0, |row| (*row).settings.exchange_gave_up_ms) };
    // SAFETY: by the caller.
    let is_owed = || unsafe {
        kind_of_request((&raw const (*stamp).request).read_volatile()) != KIND_WAIT
            && !request::is_unfinished(stamp)
    };
    if !exiting && limit != 0 && us >= u64::from(limit) * 1000 && is_owed() {
        OUTCOME_GAVE_UP
    } else {
        OUTCOME_ABANDONED
    }
}

/// A failed or slow exchange is an event.
#[inline(always)]
unsafe fn tell(stamp: *mut Stamp, now: u64, seq: u64, us: u64, outcome: u32, error: u32) {
    // SAFETY: by the caller.
    unsafe {
        events::send(&Event {
            kind: EventKind::FAILURE,
            seq,
            elapsed_us: us,
            outcome,
            errno: error,
            flags: EVENT_EXCHANGE,
            ..events::about(stamp, now)
        });
    }
}

/// A probe that waits for its first exchange ends with it.
#[inline(always)]
unsafe fn probe_ended(stamp: *mut Stamp, now: u64, us: u64, outcome: u32) {
    const BOTH: u32 = STAMP_PROBE | STAMP_PROBE_BY_EXCHANGE;
    // SAFETY: by the caller.
    unsafe {
        if (*stamp).flags & BOTH != BOTH {
            return;
        }
        (*stamp).flags &= !BOTH;
        if let Some(row) = outcome::row_of(stamp) {
            outcome::probe_ended(
                stamp,
                row,
                now,
                us,
                outcome,
                0,
                EVENT_PROBE | EVENT_EXCHANGE,
            );
        }
    }
}

/// Observe mode: what became of a connect that enforce mode would have refused. The first exchange
/// tells, or the end of a connection that owes none; what the program gave up says nothing.
#[inline(always)]
unsafe fn would_ended(stamp: *mut Stamp, went_well: bool) {
    // SAFETY: by the caller, map memory.
    unsafe {
        if (*stamp).flags & STAMP_WOULD == 0 {
            return;
        }
        (*stamp).flags &= !STAMP_WOULD;
        if let Some(row) = outcome::row_of(stamp)
            && (*row).incarnation == (*stamp).incarnation
        {
            let count = if went_well {
                &raw mut (*row).would_succeeded
            } else {
                &raw mut (*row).would_failed
            };
            atomics::add(count, 1);
        }
    }
}

/// An exchange that was under way has ended, and not with an answer that counts ([`answered`]).
///
/// # Safety
/// `row` must be that of its begin.
#[inline(always)]
pub unsafe fn ended(row: *mut Row) {
    // SAFETY: map memory. Last of all: from here on the row may get another owner.
    unsafe { atomics::add(&raw mut (*row).ended_otherwise, 1) };
}
