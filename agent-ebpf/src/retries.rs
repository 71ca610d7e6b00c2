//! Retries: telling them from fresh calls, and refusing those beyond limit and budget.
//!
//! What a failure means to a program is decided where the program closes the failed socket, because
//! only then does it know; the task that closes it is the one that retries. The rules are in
//! docs/RETRIES.md, what is remembered in [`agent_common::retry`].

use agent_common::{
    Mode, OTHER_ROW, Retries, Row, Stamp, Verdict,
    budget::{self, Cells, Counts},
    retry::{
        ENDED_UNCONNECTED, ENDED_WELL, NO_LIMIT, NTH, PACE_SLOTS, Pace, RUN, TASK_SLOTS, Task,
        UNKNOWN, is_soon, owner, pack_operation, pause, place, too_soon, unpack_operation,
    },
};
use aya_ebpf::helpers::generated::bpf_get_current_pid_tgid;

use crate::{atomics, maps, outcome};

/// In place of an operation: refused, its operation has had its number of retries.
pub const OVER_LIMIT: u64 = 1;
/// In place of an operation: refused, the budget is spent.
pub const OVER_BUDGET: u64 = 2;

/// A row's budget as it lies in the map.
struct Shared {
    retries: *mut Retries,
    attempts: u64,
}

impl Counts for Shared {
    #[inline(always)]
    fn epoch(&self) -> u64 {
        // SAFETY: map memory (as for all functions here).
        unsafe { atomics::load(&raw const (*self.retries).epoch) }
    }

    #[inline(always)]
    fn begin(&self, slot: usize) -> u64 {
        let begins = self.begins();
        // SAFETY: as above; the index is masked again for the verifier.
        unsafe { begins.add(slot & (budget::SLOTS - 1)).read_volatile() }
    }

    #[inline(always)]
    fn attempts(&self) -> u64 {
        self.attempts
    }

    #[inline(always)]
    fn spent(&self) -> u64 {
        // SAFETY: as above.
        unsafe { atomics::load(&raw const (*self.retries).spent) }
    }
}

impl Cells for Shared {
    #[inline(always)]
    fn advance(&mut self, from: u64, to: u64) -> bool {
        // SAFETY: as above.
        unsafe { atomics::replace(&raw mut (*self.retries).epoch, from, to) }
    }

    #[inline(always)]
    fn set_begin(&mut self, slot: usize, counts: u64) {
        let begins = self.begins();
        // SAFETY: as above.
        unsafe {
            begins
                .add(slot & (budget::SLOTS - 1))
                .write_volatile(counts)
        };
    }

    #[inline(always)]
    fn add_spent(&mut self, amount: u64) -> u64 {
        // SAFETY: as above.
        unsafe { atomics::add(&raw mut (*self.retries).spent, amount) }
    }
}

impl Shared {
    #[inline(always)]
    fn begins(&self) -> *mut u64 {
        // SAFETY: as above.
        unsafe { (&raw mut (*self.retries).begins).cast() }
    }
}

/// A row enters an epoch of its budget, if it has not done so yet.
#[inline(never)]
pub fn enter(index: u32, epoch: u64) {
    let (Some(retries), Some(row)) = (maps::RETRIES.get_ptr_mut(index), maps::ROWS.get_ptr(index))
    else {
        return;
    };
    // SAFETY: map memory.
    let attempts = unsafe { atomics::load(&raw const (*row).attempts) };
    budget::enter(&mut Shared { retries, attempts }, epoch);
}

/// A connect, as it is judged.
pub struct Connect {
    /// The row's index.
    pub index: u32,
    /// When the connect before it was, ns.
    pub before_ns: u64,
    /// Now, ns.
    pub now: u64,
    /// The caller, as the kernel packs process and thread.
    pub pid_tgid: u64,
    /// What may be done: one of the [`Mode`] constants.
    pub mode: u32,
}

/// The operation that a connect is an attempt of ([`pack_operation`]), or [`OVER_LIMIT`] or
/// [`OVER_BUDGET`] when it is to be refused.
///
/// # Safety
/// `row` must be the row of that index.
#[inline(always)]
pub unsafe fn judge(row: *mut Row, connect: &Connect) -> u64 {
    let fresh = pack_operation(connect.now / 1000, 1, 1);
    // SAFETY: by contract, map memory.
    unsafe {
        let scale = scale(row);
        if scale == 0 || connect.index == OTHER_ROW {
            return fresh;
        }
        let epoch = budget::epoch(connect.now, scale);
        if epoch != budget::epoch(connect.before_ns, scale) {
            enter(connect.index, epoch);
        }
        let caller = owner(connect.pid_tgid as u32, connect.index);
        let Some(task) = maps::TASKS.get_ptr_mut(place(caller, TASK_SLOTS)) else {
            return fresh;
        };
        if (*task).owner != caller {
            return fresh;
        }
        let operation = again(row, task, connect.now, connect.pid_tgid, connect.mode);
        if operation == 0 { fresh } else { operation }
    }
}

/// A task connects again: the operation that it continues, 0: none, or [`OVER_LIMIT`] or
/// [`OVER_BUDGET`].
#[inline(never)]
unsafe fn again(row: *mut Row, task: *mut Task, now: u64, pid_tgid: u64, mode: u32) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        let index = (*task).owner as u32;
        if (*task).incarnation != (*row).incarnation {
            return 0;
        }
        let pause_ns = now.saturating_sub((*task).last_ns);
        (*task).last_ns = now;
        if (*task).ended == ENDED_WELL {
            paced(task, owner((pid_tgid >> 32) as u32, index), pause(pause_ns));
            return 0;
        }
        let (first_us, number, since) = unpack_operation((*task).operation);
        let policy = maps::RETRY_POLICIES.get_ptr((*row).settings.policy);
        let Some(policy) = policy else { return 0 };
        let age_ns = now.saturating_sub(first_us * 1000);
        let is_over = age_ns > (*policy).window_ns
            || ((*policy).deadline_ns != 0 && age_ns > (*policy).deadline_ns)
            || Verdict::unpack(atomics::load(&raw const (*row).verdict)).generation
                != (*task).generation;
        let too_soon_ns = too_soon_for(owner((pid_tgid >> 32) as u32, index));
        if is_over || !is_soon(pause_ns, too_soon_ns, (*task).retried_ns) {
            (*task).ended = ENDED_WELL;
            (*task).pending = 0;
            (*task).retried_ns = 0;
            return 0;
        }
        // (0 says that there was none.)
        (*task).retried_ns = pause(pause_ns) | 1;
        let Some(retries) = maps::RETRIES.get_ptr_mut(index) else {
            return 0;
        };
        // Several have failed, so it may be any one's; or the destination answers: what limits an
        // operation begins anew.
        let is_anew =
            (*task).pending > 1 || answers(row, retries, (*task).ended) != (*task).answers;
        let since = if is_anew { 0 } else { since };
        if mode != Mode::OFF {
            let limit = (*policy).limit;
            if limit != NO_LIMIT && since > limit {
                if mode == Mode::ENFORCE {
                    atomics::add32(&raw mut (*retries).rejected_limit, 1);
                } else {
                    atomics::add32(&raw mut (*retries).would_limit, 1);
                }
                return OVER_LIMIT;
            }
            let mut shared = Shared {
                retries,
                attempts: atomics::load(&raw const (*row).attempts),
            };
            let epoch = budget::epoch(now, (*policy).scale);
            if !budget::take(&mut shared, epoch, (*policy).budget()) {
                if mode == Mode::ENFORCE {
                    atomics::add32(&raw mut (*retries).rejected_budget, 1);
                } else {
                    atomics::add32(&raw mut (*retries).would_budget, 1);
                }
                return OVER_BUDGET;
            }
        }
        passes(task, retries, first_us, number, since)
    }
}

/// A retry passes.
#[inline(always)]
unsafe fn passes(
    task: *mut Task,
    retries: *mut Retries,
    first_us: u64,
    number: u32,
    since: u32,
) -> u64 {
    // SAFETY: by the caller, map memory.
    unsafe {
        (*task).pending = (*task).pending.saturating_sub(1);
        if (*task).pending == 0 {
            (*task).ended = ENDED_WELL;
        }
        let nth = (number.wrapping_sub(1) as usize).min(NTH - 1);
        atomics::add32((&raw mut (*retries).nth).cast::<u32>().add(nth), 1);
        pack_operation(first_us, number + 1, since + 1)
    }
}

/// Factor of the epochs of a row's budget; 0: retries are not looked for.
///
/// # Safety
/// `row` must be map memory.
#[inline(always)]
pub unsafe fn scale(row: *mut Row) -> u32 {
    // SAFETY: by contract; as the policy's entry.
    unsafe {
        match maps::RETRY_POLICIES.get_ptr((*row).settings.policy) {
            Some(policy) => (*policy).scale,
            None => 0,
        }
    }
}

/// What a refused connect() to this row returns.
#[inline(always)]
pub unsafe fn errno(row: *mut Row) -> u16 {
    // SAFETY: by the caller, map memory.
    unsafe {
        match maps::RETRY_POLICIES.get_ptr((*row).settings.policy) {
            Some(policy) => (*policy).errno as u16,
            None => 111,
        }
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
        let Some(retries) = maps::RETRIES.get_ptr_mut(index) else {
            return 0;
        };
        let (first_us, number, since) = unpack_operation((*task).operation);
        passes(task, retries, first_us, number, since)
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

/// A task has paused so long after a good call.
#[inline(always)]
unsafe fn paced(task: *mut Task, process: u64, pause_ns: u32) {
    // SAFETY: by the caller, map memory.
    unsafe {
        (*task).pauses += 1;
        let is_run = (*task).pauses >= RUN;
        let is_shorter = pause_ns < (*task).shortest_ns;
        if !is_run && !is_shorter {
            return;
        }
        if is_shorter {
            (*task).shortest_ns = pause_ns;
        }
        let Some(pace) = maps::PACES.get_ptr_mut(place(process, PACE_SLOTS)) else {
            return;
        };
        if (*pace).owner != process {
            *pace = Pace {
                owner: process,
                shortest_ns: UNKNOWN,
                before_ns: UNKNOWN,
            };
        }
        if (*task).shortest_ns < (*pace).shortest_ns {
            (*pace).shortest_ns = (*task).shortest_ns;
        }
        if is_run {
            (*task).pauses = 0;
            (*task).shortest_ns = UNKNOWN;
            (*pace).before_ns = (*pace).shortest_ns;
            (*pace).shortest_ns = UNKNOWN;
        }
    }
}

/// What is [`too_soon`] for a process.
#[inline(always)]
unsafe fn too_soon_for(process: u64) -> u32 {
    let Some(pace) = maps::PACES.get_ptr(place(process, PACE_SLOTS)) else {
        return UNKNOWN;
    };
    // SAFETY: map memory.
    unsafe {
        if (*pace).owner == process {
            too_soon((*pace).shortest_ns, (*pace).before_ns)
        } else {
            UNKNOWN
        }
    }
}

/// The current task closes a socket and so knows how its connection ended (`ENDED_`).
///
/// # Safety
/// `stamp` must be the socket's, and the program run for the task that closes it.
#[inline(never)]
pub unsafe fn known(stamp: *mut Stamp, now: u64, ended: u32) {
    // SAFETY: by contract, map memory.
    unsafe {
        let Some(row) = outcome::unpinned_row_of(stamp) else {
            return;
        };
        let index = (*stamp).row;
        if index == OTHER_ROW || scale(row) == 0 {
            return;
        }
        let caller = owner(bpf_get_current_pid_tgid() as u32, index);
        let Some(task) = maps::TASKS.get_ptr_mut(place(caller, TASK_SLOTS)) else {
            return;
        };
        let Some(retries) = maps::RETRIES.get_ptr_mut(index) else {
            return;
        };
        if (*task).owner != caller || (*task).incarnation != (*row).incarnation {
            (*task).owner = 0;
            (*task).incarnation = (*row).incarnation;
            (*task).pending = 0;
            (*task).shortest_ns = UNKNOWN;
            (*task).pauses = 0;
            (*task).retried_ns = 0;
        }
        if ended == ENDED_WELL {
            // A failure that it has not retried yet stays what it may retry next.
            if (*task).pending == 0 {
                (*task).ended = ENDED_WELL;
                (*task).retried_ns = 0;
                (*task).last_ns = now;
            }
        } else {
            (*task).ended = ended;
            (*task).pending += 1;
            (*task).last_ns = now;
            (*task).operation = if (*stamp).operation == 0 {
                // An adopted connection.
                pack_operation(now / 1000, 1, 1)
            } else {
                (*stamp).operation
            };
            (*task).answers = answers(row, retries, ended);
            let verdict = Verdict::unpack(atomics::load(&raw const (*row).verdict));
            (*task).generation = verdict.generation;
        }
        (*task).owner = caller;
    }
}
