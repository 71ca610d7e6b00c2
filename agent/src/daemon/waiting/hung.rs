//! Finds exchanges that hang, and counts them while they do.

use std::collections::{HashMap, HashSet};

use agent_common::{
    Row,
    event::OUTCOME_HUNG,
    histogram::{BUCKETS, bucket},
    stamp::COUNTED_MOST,
};

use super::{Owed, Rows, Shared, failure};
use crate::{
    core::{
        DialTarget, Nanos, RowId, WindowKind,
        hung::{AUTO_USUAL, Arrivals, HungRule, Past, is_hung},
    },
    kernel::clock,
};

/// Exchanges that have waited for less do not make their row worth a look.
const YOUNG: Nanos = Nanos::from_millis(500);

#[derive(Default)]
pub(super) struct HungWatch {
    /// How exchanges keep coming to rows where one waits.
    rows: HashMap<RowId, Arrivals>,
    /// Exchanges that were counted: cookie and number.
    counted: HashSet<(u64, u32)>,
}

impl HungWatch {
    pub(super) fn look(&mut self, shared: &Shared, owed: &[Owed], now: Nanos, slept: bool) {
        if !self.counted.is_empty() {
            let waiting: HashSet<_> = owed.iter().map(Owed::id).collect();
            self.counted.retain(|counted| waiting.contains(counted));
        }
        let mut rows = Rows::default();
        self.arrivals(shared, owed, now, &mut rows);
        if slept {
            return;
        }
        let mut answers = None;
        for owed in owed {
            if self.counted.len() < COUNTED_MOST as usize / 2
                && !self.counted.contains(&owed.id())
                && self.hangs(shared, owed, now, &mut rows, &mut answers)
            {
                self.count(shared, owed);
            }
        }
    }

    /// Notes how exchanges keep coming to the rows of those that wait; forgets all others.
    fn arrivals(&mut self, shared: &Shared, owed: &[Owed], now: Nanos, rows: &mut Rows) {
        let mut before = std::mem::take(&mut self.rows);
        for owed in owed.iter().filter(|owed| now - owed.wait.begun >= YOUNG) {
            let id = owed.row();
            if self.rows.contains_key(&id) {
                continue;
            }
            if let Some(row) = rows.get(shared, id) {
                let mut arrivals = before.remove(&id).unwrap_or_default();
                arrivals.note(now, row.requests);
                self.rows.insert(id, arrivals);
            }
        }
    }

    fn hangs(
        &self,
        shared: &Shared,
        owed: &Owed,
        now: Nanos,
        rows: &mut Rows,
        answers: &mut Option<HashMap<DialTarget, Nanos>>,
    ) -> bool {
        let Some(row) = rows.get(shared, owed.row()) else {
            return false;
        };
        let breaker = shared.plan.breaker(row.settings.policy);
        let waited = now - owed.wait.asked;
        if breaker.hung.shortest().is_none_or(|least| waited < least)
            || owed.is_usual(row)
            || (owed.waits() && breaker.hung == HungRule::Auto)
        {
            return false;
        }
        let none = Arrivals::default();
        let arrivals = self.rows.get(&owed.row()).unwrap_or(&none);
        let mut past = past(shared, row);
        let judge = |past: &Past| {
            is_hung(
                breaker.hung,
                owed.wait,
                now,
                past,
                arrivals,
                breaker.min_calls,
            )
        };
        if !judge(&past) {
            return false;
        }
        // Only now, since it takes a look at every row: was another workload answered?
        let answers = answers.get_or_insert_with(|| last_answers(shared));
        let target = DialTarget::from(&row.key);
        past.last_answer = answers.get(&target).copied().unwrap_or(past.last_answer);
        judge(&past)
    }

    /// Counts an exchange as failed while it hangs.
    fn count(&mut self, shared: &Shared, owed: &Owed) {
        let (table, connections) = (&shared.table, &shared.connections);
        // Once more: the copy may be old by now.
        if shared.again(owed).is_none() {
            return;
        }
        // By a thread whose place this one has taken.
        if connections.is_counted(owed.cookie) {
            self.counted.insert(owed.id());
            return;
        }
        let now = clock::now();
        let id = owed.row();
        let kind = WindowKind::Exchanges;
        let Some(seq) = table.enter_failure(id, kind, owed.stamp.generation, now) else {
            // It began under an older verdict: it is counted when it ends, and judges nobody.
            return;
        };
        table.open_counted(id.index);
        let noted = connections.note_counted(owed.cookie, owed.number, seq);
        let is_over = shared.again(owed).is_none();
        if noted.is_err() || (is_over && connections.take_counted(owed.cookie)) {
            // It has ended in the middle of this, and the kernel has counted the end. (Or the note
            // was refused: then the end will count, not the hanging.)
            table.close_counted(id.index);
            table.repair(id.index, kind, seq);
            return;
        }
        self.counted.insert(owed.id());
        table.count_outcome(id.index, OUTCOME_HUNG);
        let waited = now - owed.wait.begun;
        shared.found(failure(&owed.stamp, OUTCOME_HUNG, now, seq, waited));
    }
}

fn past(shared: &Shared, row: &Row) -> Past {
    let usual_us = AUTO_USUAL.0 / 1000;
    let is_quick = match shared.table.histogram(row.response_histogram) {
        Some(histogram) => {
            let sum = |counts: &[u32]| counts.iter().map(|n| u64::from(*n)).sum::<u64>();
            let slow = sum(&histogram.counts[bucket(usual_us).min(BUCKETS)..]);
            slow * 100 <= sum(&histogram.counts)
        }
        // Without one, only the longest answer is known.
        None => row.response_latency_max_us <= usual_us,
    };
    Past {
        responses: row.responses,
        is_quick,
        longest: Nanos(row.response_latency_max_us.saturating_mul(1000)),
        last_answer: Nanos(row.last_answer_ns),
    }
}

/// When each destination last answered anybody.
fn last_answers(shared: &Shared) -> HashMap<DialTarget, Nanos> {
    let mut answers = HashMap::new();
    for (_, row) in shared.table.used().skip(1) {
        let last = answers
            .entry(DialTarget::from(&row.key))
            .or_insert(Nanos::ZERO);
        *last = Nanos(row.last_answer_ns).max(*last);
    }
    answers
}
