//! Retries: telling them from fresh calls, and refusing those beyond limit and budget.
//!
//! What a failure means to a program is decided where the program closes the failed socket, because
//! only then does it know; the task that closes it is the one that retries. The rules are in
//! docs/RETRIES.md, what is remembered in [`agent_common::retry`].

use agent_common::{
    Mode, NANOS_PER_MS, OTHER_ROW, Retries, RetrySettings, Row, Stamp, Verdict,
    budget::{self, Cells as _},
    pace,
    retry::{
        BUSY, ENDED_UNANSWERED, ENDED_UNCONNECTED, ENDED_WELL, HELD, MOST_REFUSALS, NO_LIMIT,
        Rhythm, SAMPLE_TICKS, SELDOM_NS, TASK_SLOTS, Task, Trial, age_ns, beat, fresh, is_in_time,
        is_new_second, is_retry, is_to_come, operation_begin_ns, operation_number, owner,
        pack_operation, pause, place, tick, trial, unpack_operation,
    },
    row::ROW_RETRIES,
    stamp::{
        PROTOCOL_HTTP1, STAMP_RENEWS, STAMP_SPENT, STAMP_TAKEN, STAMP_WATCHED, unpack_request,
    },
    tried::WELL,
};
use aya_ebpf::helpers::generated::bpf_get_current_pid_tgid;

use crate::{
    atomics,
    budgets::{Shared, enter, first_attempts},
    held, idempotent, maps,
    opaque::{hidden, hidden64},
    outcome,
    paces::pace_of,
    tried,
};

/// In place of an operation: refused, its operation has had its number of retries.
pub const OVER_LIMIT: u64 = 1;
/// In place of an operation: refused, the budget is spent.
pub const OVER_BUDGET: u64 = 2;
/// In place of an operation: refused, its deadline has passed.
pub const OVER_DEADLINE: u64 = 3;
/// The last of them.
pub const OVER_LAST: u64 = OVER_DEADLINE;

/// Exchanges by which a connection may come about and make its first request: a TLS handshake, a login.
/// After more of them, what fails on it is another operation than the one that it was made for.
const MOST_GREETINGS: u32 = 2;

/// Whether a connect is looked at as a possible retry: its flags, 0 if not. Where nothing has failed of late, hardly
/// any is.
///
/// # Safety
/// `row` must be the row of that index; `before_ns` is when the connect before was.
#[inline(always)]
pub unsafe fn looks(row: *mut Row, index: u32, before_ns: u64, now: u64) -> u32 {
    // (The connect that has made the row comes before its begin.)
    let is_seldom = now.wrapping_sub(before_ns).wrapping_sub(1) > SELDOM_NS;
    // SAFETY: by contract, map memory.
    unsafe {
        // (Or a program begins many at once: what the first ones ask for is known when one of them fails.)
        let is_young = (&raw const (*row).attempts).read_volatile() < u64::from(BUSY);
        if (is_seldom || is_young || is_new_second(now, before_ns))
            && hidden(renews(row, index, before_ns, now)) != 0
        {
            return STAMP_WATCHED | STAMP_RENEWS;
        }
        if is_to_come((&raw const (*row).retry_watch).read_volatile(), tick(now)) {
            STAMP_WATCHED
        } else {
            0
        }
    }
}

/// Whether such a connect is looked at whatever the row's others are: 1 or 0.
#[inline(never)]
unsafe fn renews(row: *mut Row, index: u32, before_ns: u64, now: u64) -> u32 {
    let Some(retries) = maps::RETRIES.get_ptr_mut(index) else {
        return 0;
    };
    // SAFETY: by the caller, map memory.
    unsafe {
        let attempts = atomics::load(&raw const (*row).attempts) as u32;
        if is_new_second(now, before_ns) {
            (*retries).second = attempts;
        }
        u32::from(attempts.wrapping_sub((*retries).second) < BUSY)
    }
}

/// What the stamp of a judged connect says of it, given what may be done to it: [`STAMP_TAKEN`] and [`STAMP_SPENT`].
#[inline(never)]
pub fn takes(operation: u64, mode: u32) -> u32 {
    if !is_retry(operation) {
        0
    } else if mode == Mode::OFF {
        STAMP_TAKEN
    } else {
        STAMP_TAKEN | STAMP_SPENT
    }
}

/// Connects of this row are looked at for so long.
#[inline(always)]
unsafe fn watch(row: *mut Row, now: u64, ticks: u32) {
    // SAFETY: by the caller, map memory. (Two at once may leave the shorter time: then the next failure
    // makes it longer.)
    unsafe {
        let until = tick(now).wrapping_add(ticks);
        let place = &raw mut (*row).retry_watch;
        if is_to_come(until, place.read_volatile()) || !is_to_come(place.read_volatile(), tick(now))
        {
            place.write_volatile(until);
        }
    }
}

/// The operation that a connect is an attempt of ([`pack_operation`], and [`HELD`] when its SYN is to be
/// held), or one of the `OVER_` constants when it is to be refused. `mode` is what may be done to it: one
/// of the [`Mode`] constants.
///
/// # Safety
/// `row` must be the row of that index.
#[inline(never)]
pub unsafe fn judge(row: *mut Row, index: u32, now: u64, pid_tgid: u64, mode: u32) -> u64 {
    // SAFETY: by contract, map memory.
    unsafe {
        let Some(policy) = maps::RETRY_POLICIES.get_ptr((*row).settings.policy) else {
            return fresh(now);
        };
        enter(index, budget::epoch(now, (*policy).scale));
        let caller = owner(pid_tgid as u32, index);
        let Some(task) = maps::TASKS.get_ptr_mut(place(caller, TASK_SLOTS)) else {
            return fresh(now);
        };
        claim(task, caller, row);
        let operation = hidden64(again(row, task, now, (pid_tgid >> 32) as u32, policy));
        let operation = if operation == 0 {
            fresh(now)
        } else {
            allowed(task, policy, now, operation, mode)
        };
        let operation = hidden64(operation);
        if operation > OVER_LAST {
            if (*task).open != 0 {
                (*task).in_doubt = 1;
            }
            (*task).open += 1;
        }
        operation
    }
}

/// The place is this task's from here on.
#[inline(never)]
unsafe fn claim(task: *mut Task, caller: u64, row: *mut Row) {
    // SAFETY: by the caller, map memory.
    unsafe {
        if (*task).owner == caller && (*task).incarnation == (*row).incarnation {
            return;
        }
        (*task).owner = caller;
        (*task).incarnation = (*row).incarnation;
        (*task).last_ns = 0;
        (*task).ended = ENDED_WELL;
        (*task).pending = 0;
        (*task).retried_ns = 0;
        (*task).open = 0;
        (*task).in_doubt = 0;
        (*task).refusals = 0;
        (*task).failed = 0;
        (*task).rhythm = Rhythm(0);
    }
}

/// A task connects again: the operation that it continues and has failed, 0: none.
#[inline(never)]
unsafe fn again(
    row: *mut Row,
    task: *mut Task,
    now: u64,
    pid: u32,
    policy: *const RetrySettings,
) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let last_ns = (*task).last_ns;
        (*task).last_ns = now;
        let distance = beat(now).wrapping_sub((*task).dialled);
        (*task).dialled = beat(now);
        if last_ns == 0 {
            return 0;
        }
        let pause_ns = now.saturating_sub(last_ns);
        let Some(pace) = pace_of(owner(pid, (*task).owner as u32)) else {
            return 0;
        };
        let bucket = hidden(pace::bucket(pause_ns));
        if (*task).ended == ENDED_WELL {
            (*pace).good = pace::with((*pace).good, bucket);
            (*task).rhythm = (*task).rhythm.with_next(distance);
            return 0;
        }
        if (*task).rhythm.keeps(distance) {
            // It calls by the clock, and would have called now in any case.
            (*task).ended = ENDED_WELL;
            (*task).pending = 0;
            (*task).retried_ns = 0;
            (*task).refusals = 0;
            (*task).failed = 0;
            return 0;
        }
        let is_soon = if pace::total((*pace).good) == 0 {
            (*task).in_doubt == 0
                && (*task).open == 0
                && (*task).pending <= 1
                && is_in_time(pause_ns, (*task).retried_ns)
        } else {
            pace::is_soon((*pace).good, (*pace).failed, bucket)
        };
        let is_soon = hidden(u32::from(is_soon));
        (*pace).failed = pace::with((*pace).failed, bucket);
        if (*task).refusals >= MOST_REFUSALS {
            (*task).refusals = 0;
            if is_soon != 0 {
                // Such pauses are usual with fresh calls of this program.
                (*pace).good = pace::with((*pace).good, bucket);
                (*pace).failed = [0; 2];
            }
            (*task).ended = ENDED_WELL;
            (*task).pending = 0;
            (*task).retried_ns = 0;
            (*task).failed = 0;
            return 0;
        }
        let (first, _, _) = unpack_operation((*task).operation);
        let age_ns = age_ns(first, now);
        // (Past the deadline it is refused for another window.)
        let over_deadline = (*policy).deadline_ns != 0 && age_ns > (*policy).deadline_ns;
        let mut most_ns = (*policy).window_ns;
        if over_deadline {
            most_ns += (*policy).deadline_ns;
        }
        let is_over = age_ns > most_ns
            || Verdict::unpack(atomics::load(&raw const (*row).verdict)).generation
                != (*task).generation;
        let moves_on = (*pace).habit.moves_on();
        if is_over || is_soon == 0 || moves_on {
            (*task).ended = ENDED_WELL;
            (*task).pending = 0;
            (*task).retried_ns = 0;
            (*task).refusals = 0;
            // Who moves on may have changed its habit: what it asks for is still compared.
            if is_over || is_soon == 0 {
                (*task).failed = 0;
            }
            return 0;
        }
        // (0 says that there was none.)
        (*task).retried_ns = pause(pause_ns) | 1;
        (*task).operation
    }
}

/// A task is told of a refusal only then: its pause counts from there, not from the call. Else a loop that is
/// held for longer than it paused before would seem to have taken up something else.
///
/// # Safety
/// None beyond that of map memory; `task` is a thread.
#[inline(always)]
pub unsafe fn told(index: u32, task: u32, at_ns: u64) {
    let caller = owner(task, index);
    if let Some(task) = maps::TASKS.get_ptr_mut(place(caller, TASK_SLOTS)) {
        // SAFETY: map memory.
        unsafe {
            if (*task).owner == caller {
                (*task).last_ns = at_ns;
            }
        }
    }
}

/// A retry: its operation, or that it is refused.
#[inline(never)]
unsafe fn allowed(
    task: *mut Task,
    policy: *const RetrySettings,
    now: u64,
    operation: u64,
    mode: u32,
) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let index = (*task).owner as u32;
        let (Some(retries), Some(row)) = (
            maps::RETRIES.get_ptr_mut(index),
            maps::ROWS.get_ptr_mut(index),
        ) else {
            return fresh(now);
        };
        let (first, number, since) = unpack_operation(operation);
        // Several have failed, so it may be any one's; or the destination answers: what limits an
        // operation begins anew.
        let is_anew =
            (*task).pending > 1 || answers(row, retries, (*task).ended) != (*task).answers;
        let since = hidden(if is_anew { 0 } else { since });
        let deadline_ns = (*policy).deadline_ns;
        if deadline_ns != 0 && age_ns(first, now) > deadline_ns {
            if is_anew {
                (*task).ended = ENDED_WELL;
                (*task).pending = 0;
                (*task).failed = 0;
                return fresh(now);
            }
            if mode != Mode::OFF {
                if mode == Mode::ENFORCE {
                    atomics::add32(&raw mut (*retries).rejected_deadline, 1);
                } else {
                    atomics::add32(&raw mut (*retries).would_deadline, 1);
                }
                return OVER_DEADLINE;
            }
        }
        let mut held = 0;
        if mode != Mode::OFF {
            let limit = (*policy).limit;
            let is_beyond = limit != NO_LIMIT && since > limit;
            if is_beyond && !tries(task, retries, (*policy).window_ns, now) {
                if mode == Mode::ENFORCE {
                    atomics::add32(&raw mut (*retries).rejected_limit, 1);
                } else {
                    atomics::add32(&raw mut (*retries).would_limit, 1);
                }
                return OVER_LIMIT;
            }
            let mut shared = Shared {
                retries,
                attempts: first_attempts(row, retries),
            };
            let epoch = budget::epoch(now, (*policy).scale);
            if !budget::take(&mut shared, epoch, (*policy).budget()) {
                if mode == Mode::ENFORCE {
                    (*task).refusals += 1;
                    atomics::add32(&raw mut (*retries).rejected_budget, 1);
                } else {
                    atomics::add32(&raw mut (*retries).would_budget, 1);
                }
                return OVER_BUDGET;
            }
            if (*policy).backoff_base_ms != 0 && mode == Mode::ENFORCE {
                if !held::take((*policy).max_held) {
                    // It does not go out.
                    shared.add_spent(u64::MAX);
                    atomics::add32(&raw mut (*retries).rejected_budget, 1);
                    return OVER_BUDGET;
                }
                held = HELD;
            }
        }
        passes(task, first, number, since) | held
    }
}

/// Whether an attempt beyond the limit is let pass all the same, to find out whether the destination answers again.
/// (Where connects failed, the agent finds out by itself.)
#[inline(never)]
unsafe fn tries(task: *mut Task, retries: *mut Retries, window_ns: u64, now: u64) -> bool {
    // SAFETY: by the caller, map memory.
    unsafe {
        if (*task).ended != ENDED_UNANSWERED {
            return false;
        }
        // (0 is never.)
        let now = tick(now) | 1;
        let place = &raw mut (*retries).trial;
        let last = place.read_volatile();
        match trial(last, now, window_ns) {
            Trial::No => false,
            Trial::Begins => {
                atomics::replace32(place, last, now);
                false
            }
            Trial::Passes => atomics::replace32(place, last, now),
        }
    }
}

/// A retry passes.
#[inline(always)]
unsafe fn passes(task: *mut Task, first: u64, number: u32, since: u32) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        (*task).refusals = 0;
        (*task).pending = (*task).pending.saturating_sub(1);
        if (*task).pending == 0 {
            (*task).ended = ENDED_WELL;
            // The pause after this connect says nothing of the pace after a good call.
            (*task).last_ns = 0;
        }
        pack_operation(first, number + 1, since + 1)
    }
}

/// What is left of an operation's deadline, ms, at least 1; `u32::MAX` where it has none.
///
/// # Safety
/// `row` must be map memory.
#[inline(never)]
pub unsafe fn left_ms(row: *mut Row, operation: u64, now: u64) -> u32 {
    // SAFETY: by contract; as the policy's entry.
    unsafe {
        let Some(policy) = maps::RETRY_POLICIES.get_ptr((*row).settings.policy) else {
            return u32::MAX;
        };
        let deadline_ns = (*policy).deadline_ns;
        if deadline_ns == 0 {
            return u32::MAX;
        }
        let ends_ns = operation_begin_ns(operation) + deadline_ns;
        let left_ms = ends_ns.saturating_sub(now) / NANOS_PER_MS;
        if left_ms == 0 { 1 } else { left_ms as u32 }
    }
}

/// Observe mode: one that enforce mode would have refused goes out as a retry all the same.
///
/// # Safety
/// `caller` must be that of [`judge`], `index` its row's.
#[inline(never)]
pub unsafe fn let_pass(index: u32, caller: u32) -> u64 {
    // SAFETY: map memory.
    unsafe {
        let caller = owner(caller, index);
        let Some(task) = maps::TASKS.get_ptr_mut(place(caller, TASK_SLOTS)) else {
            return 0;
        };
        let (first, number, since) = unpack_operation((*task).operation);
        (*task).open += 1;
        passes(task, first, number, since)
    }
}

/// Answers of the destination to anybody, of the kind that was missed; wraps.
#[inline(always)]
unsafe fn answers(row: *mut Row, retries: *mut Retries, ended: u32) -> u32 {
    // SAFETY: by the caller, map memory.
    unsafe {
        if ended == ENDED_UNCONNECTED {
            let established = atomics::load(&raw const (*row).established) as u32;
            return established.wrapping_add((&raw const (*retries).dialled).read_volatile());
        }
        let responses = atomics::load(&raw const (*row).responses);
        let failed = atomics::load(&raw const (*row).exchange_status);
        responses.wrapping_sub(failed) as u32
    }
}

/// The current task closes a socket (with this cookie) and so knows how its connection ended (`ENDED_`).
///
/// # Safety
/// `stamp` must be the socket's, and the program run for the task that closes it.
#[inline(never)]
pub unsafe fn known(stamp: *mut Stamp, cookie: u64, now: u64, ended: u32) {
    // SAFETY: by contract, map memory.
    unsafe {
        let last = hidden64(learns(stamp, cookie, now, ended));
        if last != 0 {
            tried::ended(stamp, last as u32, now, (last >> 32) as u32);
        }
    }
}

/// What [`known`] does for the task; the last request's print, and above it which attempt it was, or [`WELL`]. 0:
/// nothing is known of it.
#[inline(never)]
unsafe fn learns(stamp: *mut Stamp, cookie: u64, now: u64, ended: u32) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let is_watched = (*stamp).flags & STAMP_WATCHED != 0;
        if ended == ENDED_WELL && !is_watched {
            return 0;
        }
        let Some(row) = outcome::unpinned_row_of(stamp) else {
            return 0;
        };
        let index = (*stamp).row;
        if index == OTHER_ROW || (*row).settings.flags & ROW_RETRIES == 0 {
            return 0;
        }
        let current = bpf_get_current_pid_tgid();
        let caller = owner(current as u32, index);
        let (Some(task), Some(retries), Some(policy)) = (
            maps::TASKS.get_ptr_mut(place(caller, TASK_SLOTS)),
            maps::RETRIES.get_ptr_mut(index),
            maps::RETRY_POLICIES.get_ptr((*row).settings.policy),
        ) else {
            return 0;
        };
        claim(task, caller, row);
        if is_watched && (*stamp).tid == current as u32 {
            (*task).open = (*task).open.saturating_sub(1);
        }
        let (number, _) = unpack_request(atomics::load(&raw const (*stamp).request));
        if number > 1 {
            (*task).in_doubt = 1;
        }
        let print = idempotent::failed(stamp, cookie, ended);
        if ended == ENDED_WELL {
            (*task).in_doubt = 1;
            // A failure that it has not retried yet stays what it may retry next.
            if (*task).pending == 0 {
                (*task).ended = ENDED_WELL;
                (*task).retried_ns = 0;
                (*task).last_ns = now;
                (*task).failed = 0;
            }
            // (Else a busy row would be watched for ever.)
            if (*stamp).flags & STAMP_RENEWS != 0 {
                watch(row, now, SAMPLE_TICKS);
            }
            return if number != 0 && (*stamp).protocol == PROTOCOL_HTTP1 {
                u64::from(WELL) << 32 | u64::from(print)
            } else {
                0
            };
        }
        (*task).ended = ended;
        (*task).pending += 1;
        // Of several, it may retry any.
        (*task).failed = if (*task).pending == 1 { print } else { 0 };
        (*task).last_ns = now;
        (*task).operation = if (*stamp).operation == 0 || number > MOST_GREETINGS {
            // An adopted connection; or one that has served others meanwhile, whose operation is over.
            fresh(now)
        } else {
            (*stamp).operation
        };
        (*task).answers = answers(row, retries, ended);
        let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
        (*task).generation = verdict.generation;
        watch(row, now, tick((*policy).window_ns) + 1);
        u64::from(operation_number((*task).operation)) << 32 | u64::from(print)
    }
}

/// An answer says that the server failed: what is asked for next may be the same.
///
/// # Safety
/// `row` must be map memory.
#[inline(never)]
pub unsafe fn answered_badly(row: *mut Row, now: u64) {
    // SAFETY: by contract, map memory.
    unsafe {
        if (*row).settings.flags & ROW_RETRIES != 0
            && let Some(policy) = maps::RETRY_POLICIES.get_ptr((*row).settings.policy)
        {
            watch(row, now, tick((*policy).window_ns) + 1);
        }
    }
}
