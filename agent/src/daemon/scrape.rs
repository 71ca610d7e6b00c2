//! The page that Prometheus reads.

use std::sync::atomic::Ordering;

use anyhow::{Result, anyhow};

use super::{memory, neighbours::is_self_test, node::Node, operations::Operations, view};
use crate::{
    control::api::State,
    kernel::{clock, programs::HOOKS},
    metrics::{self, Latencies, NodeMetrics, RowMetrics, Rows},
};

/// A page above this size, bytes, has left much free memory behind.
const LARGE: usize = 128 * 1024;

/// Puts the page together.
///
/// # Errors
/// When the event thread does not answer, or the page cannot be written.
pub async fn text(node: &mut Node) -> Result<String> {
    let views = node.views().await.map_err(|e| anyhow!("{e}"))?;
    let health = crate::control::Backend::health(&*node.handle);
    // One row after the other: copies of all of them would be the most that the agent ever needs.
    let shown: Vec<_> = node.viewer(&views).rows().map(|(id, _)| id).collect();
    let mut rows = Rows::default();
    for id in shown {
        let Some(row) = node.table.owned(id) else {
            continue;
        };
        let workload = view::workload(id, &row, &mut node.names);
        if is_self_test(&workload, &row) {
            continue;
        }
        let buckets = |slot_plus_one| {
            node.table
                .histogram(slot_plus_one)
                .map(|histogram| histogram.counts.map(u64::from).to_vec())
                .unwrap_or_default()
        };
        let (connects, responses) = (buckets(row.histogram), buckets(row.response_histogram));
        let retries = node.table.retries(id.index);
        let attempts = retries.all_attempts(row.attempts, row.established, row.requests);
        let operations = node.tally.operations.next(
            id,
            Operations {
                by_attempts: retries.operations(attempts),
                attempts,
            },
        );
        rows.add(&RowMetrics {
            destination: view::destination(id, &row),
            workload,
            policy: node.plan.name(row.settings.policy).to_string(),
            state: views.get(&id).map_or(State::Closed, view::shown),
            attempts: row.attempts,
            established: row.established,
            in_flight: u64::from(row.pending()) + row.exchanges_in_flight(),
            abandoned: row.abandoned + row.exchange_abandoned,
            throttled: u64::from(row.throttled),
            possible: view::possible(&node.plan, &row),
            failures: view::failures(&row),
            rejected: view::rejected(&row, &retries),
            would_reject: view::would_reject(&row, &retries),
            would_reject_outcomes: [row.would_succeeded, row.would_failed],
            connections: u64::from(row.live()),
            held: view::held(&retries),
            retries: retries.total(),
            live_retries: retries.live_total(),
            non_idempotent: view::non_idempotent(&retries),
            operation_attempts: operations.attempts,
            budget_tokens: view::tokens(&node.plan, &row, retries, clock::now()),
            operations: operations.by_attempts,
            timeouts: view::firings(&row),
            transitions: node.tally.transitions(id),
            connect: Latencies {
                count: row.established,
                sum_us: row.connect_latency_sum_us,
                buckets: connects,
            },
            response: Latencies {
                // (As many as were measured, where there are buckets: not what waited by right.)
                count: if responses.is_empty() {
                    row.responses
                } else {
                    0
                },
                sum_us: row.response_latency_sum_us,
                buckets: responses,
            },
        });
    }
    let wanted = node.cgroups.len();
    let attached = node.kernel.attachments().len() == wanted && health.ready;
    let page = metrics::render(&NodeMetrics {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        events_lost: node.table.lost_events() + node.reactor.dropped.load(Ordering::Relaxed),
        destinations: node.evictions.in_use(&node.table),
        destinations_evicted: node.evictions.total,
        reaction: node.reactor.reaction.cumulative(),
        reloads_good: node.tally.reloads_good,
        reloads_bad: node.tally.reloads_bad,
        attached: HOOKS
            .iter()
            .map(|hook| ((*hook).to_owned(), attached))
            .collect(),
        paused: node.pause.current().is_some(),
        rows,
    })?;
    // Some 15 KiB a row while it is put together.
    if page.len() > LARGE {
        memory::give_back();
    }
    Ok(page)
}
