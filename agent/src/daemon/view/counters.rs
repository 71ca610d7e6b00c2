//! The kernel's counters as `status` and the metrics group them.

use agent_common::{
    Retries, Row as KernelRow, budget,
    retry::{Counted, FATE_PASSED, FATE_REFUSED, FATE_WOULD},
    row::{ROW_LIMITED, ROW_PROTECTED},
    unanswered,
};

use crate::{
    control::api::{Failures, Held, Rejections, TimeoutKind},
    core::{
        HungRule, Nanos,
        traits::{Facts, learned},
    },
    daemon::plan::Plan,
    metrics::{Possible, TIMEOUTS},
};

/// Failures by outcome.
pub fn failures(row: &KernelRow) -> Failures {
    Failures {
        refused: row.failed_refused,
        connect_timeout: row.failed_connect_timeout,
        unreachable: row.failed_unreachable,
        reset: row.failed_reset + row.exchange_reset,
        closed_early: row.exchange_closed_early,
        gave_up: row.failed_gave_up + row.exchange_gave_up,
        hung: row.exchange_hung,
        read_timeout: row.exchange_read_timeout,
        write_timeout: row.exchange_write_timeout,
        deadline: u64::from(row.exchange_deadline),
        status: row.exchange_status,
        other: row.failed_other + row.exchange_other,
    }
}

/// Calls refused, by reason.
pub fn rejected(row: &KernelRow, retries: &Retries) -> Rejections {
    Rejections {
        breaker: row.rejected_breaker,
        retry_budget: u64::from(retries.rejected_budget),
        retry_limit: u64::from(retries.rejected_limit),
        deadline: u64::from(retries.rejected_deadline),
        limit: row.rejected_limit,
    }
}

/// Connects that were made to wait, by reason.
pub fn held(retries: &Retries) -> Held {
    Held {
        backoff: u64::from(retries.held_backoff),
        spin: u64::from(retries.held_spin),
    }
}

/// Calls that observe mode let pass, by reason.
pub fn would_reject(row: &KernelRow, retries: &Retries) -> Rejections {
    Rejections {
        breaker: row.would_reject_breaker,
        retry_budget: u64::from(retries.would_budget),
        retry_limit: u64::from(retries.would_limit),
        deadline: u64::from(retries.would_deadline),
        limit: row.would_reject_limit,
    }
}

/// Retries of requests that are not idempotent: passed, refused, and such as observe mode let pass.
pub fn non_idempotent(retries: &Retries) -> [u64; 3] {
    [FATE_PASSED, FATE_REFUSED, FATE_WOULD].map(|fate| retries.repeated(fate))
}

/// Retries that a row's budget still allows; `None`: it has none.
pub fn tokens(plan: &Plan, row: &KernelRow, retries: Retries, now: Nanos) -> Option<u64> {
    let policy = plan.retry(row.settings.policy);
    if policy.scale == 0 {
        return None;
    }
    let counted = Counted {
        retries,
        attempts: budget::calls(row.attempts, retries.spent, row.responses),
    };
    budget::left(
        &counted,
        budget::epoch(now.0, policy.scale),
        policy.budget(),
    )
}

/// What can happen to the calls of a row only because its policy asks for it.
pub fn possible(plan: &Plan, row: &KernelRow) -> Possible {
    let policy = row.settings.policy;
    if row.settings.flags & ROW_PROTECTED != 0 {
        return Possible::default();
    }
    let waits = plan.waits(policy);
    Possible {
        read: waits.read.is_some(),
        write: waits.write.is_some(),
        stall: waits.stall.is_some(),
        deadline: waits.deadline.is_some(),
        hung: plan.breaker(policy).hung != HungRule::Off,
        limit: row.settings.flags & ROW_LIMITED != 0,
    }
}

/// How often each of our timeouts has ended a connection.
pub fn firings(row: &KernelRow) -> [u64; TIMEOUTS.len()] {
    TIMEOUTS.map(|kind| match kind {
        TimeoutKind::Connect => row.timeouts_connect,
        TimeoutKind::Read => u64::from(row.fired_read),
        TimeoutKind::Write => u64::from(row.fired_write),
        TimeoutKind::Stall => u64::from(row.fired_stall),
        TimeoutKind::Deadline => u64::from(row.fired_deadline),
        // The kernel's own, and not told apart there.
        TimeoutKind::Keepalive => 0,
    })
}

/// What is learned of a row's destination.
pub(super) fn traits(row: &KernelRow) -> Vec<String> {
    let facts = Facts {
        responses: row.responses,
        unanswered: row.exchange_gave_up + row.exchange_abandoned,
        broken: row.exchange_reset + row.exchange_closed_early,
        partly: unanswered::is_learned(row),
        longest: Nanos(row.response_latency_max_us.saturating_mul(1000)),
        greets: KernelRow::greets(row.greeted, row.spoke_first),
        tickets: u64::from(row.ticket_connections),
    };
    learned(&facts)
        .map(|learned| learned.name().to_owned())
        .collect()
}
