//! What is counted or remembered per row only to be shown: transitions, and the runs of calls
//! between failures (`events --all`).

use std::collections::{BTreeMap, HashMap};

use agent_common::{
    OTHER_ROW, Row as KernelRow,
    event::{
        EVENT_EXCHANGE, OUTCOME_CLOSED_EARLY, OUTCOME_CONNECT_TIMEOUT, OUTCOME_DEADLINE,
        OUTCOME_GAVE_UP, OUTCOME_HUNG, OUTCOME_READ_TIMEOUT, OUTCOME_REFUSED, OUTCOME_RESET,
        OUTCOME_SLOW, OUTCOME_STALL, OUTCOME_STATUS, OUTCOME_UNREACHABLE, OUTCOME_WRITE_TIMEOUT,
    },
    histogram::BUCKETS,
    window::{Call, decode},
};

use super::{
    buckets,
    journal::{Journal, WallClock},
    operations::Told,
    view,
};
use crate::{
    control::api::{CallsLatency, Event, ReasonKind, State, Timestamp},
    core::{Nanos, RowId, WindowKind},
    kernel::Table,
    metrics::Transition,
};

/// How often runs of calls are written down.
const CALLS_EVERY: Nanos = Nanos::from_secs(1);
/// Runs written down at a time; the others go on and are written down later.
const RUNS_AT_A_TIME: usize = 1000;

/// Where the transitions of a row begin.
const FIRST: (State, ReasonKind) = (State::ALL[0], ReasonKind::ALL[0]);

/// Whom an event is about.
pub struct Subject {
    /// Address and port.
    pub destination: String,
    /// The caller's cgroup.
    pub workload: String,
    /// Inode of the network namespace.
    pub netns: Option<u64>,
}

/// See the module.
#[derive(Default)]
pub struct Tally {
    /// How often; a tree, because it keeps a few bytes together for each row.
    transitions: BTreeMap<(RowId, State, State, ReasonKind), u64>,
    /// Numbers of the last calls that were written down (connects, exchanges), by index of the row.
    written: Vec<[u64; 2]>,
    /// Histograms (connects, exchanges) as they were then ([`buckets::write`]), of rows that have
    /// some.
    measured: [HashMap<RowId, Box<[u8]>>; 2],
    /// Operations by their attempts, as they were last told to Prometheus.
    pub operations: Told,
    last: Option<Nanos>,
    /// The look before that.
    looked: Option<Nanos>,
    /// Row at which the next look at all rows begins: where the last one had enough.
    next: u32,
    /// Configurations taken over after the start.
    pub reloads_good: u64,
    /// Configurations refused.
    pub reloads_bad: u64,
}

impl Tally {
    /// Calls that rows begin with have been written down by the agent before.
    pub fn resumed(&mut self, table: &Table) {
        for (id, _) in table.used().skip(1) {
            self.set_written(id.index, table.last_seqs(id.index));
        }
    }

    /// Counts a change of state.
    pub fn transition(&mut self, row: RowId, from: State, to: State, reason: ReasonKind) {
        *self.transitions.entry((row, from, to, reason)).or_default() += 1;
    }

    /// The changes of state of a row.
    pub fn transitions(&self, row: RowId) -> Vec<Transition> {
        let all = self.transitions.range((row, FIRST.0, FIRST.0, FIRST.1)..);
        all.take_while(|((of, ..), _)| *of == row)
            .map(|(&(_, from, to, reason), &count)| Transition {
                from,
                to,
                reason,
                count,
            })
            .collect()
    }

    /// Counts a reload.
    pub fn reload(&mut self, good: bool) {
        if good {
            self.reloads_good += 1;
        } else {
            self.reloads_bad += 1;
        }
    }

    /// Forgets a row.
    pub fn forget(&mut self, row: RowId) {
        for Transition {
            from, to, reason, ..
        } in self.transitions(row)
        {
            self.transitions.remove(&(row, from, to, reason));
        }
        self.set_written(row.index, [0; 2]);
        self.operations.forget(row);
        for measured in &mut self.measured {
            measured.remove(&row);
        }
    }

    /// Writes a failure down, after the good calls before it.
    pub fn failure(
        &mut self,
        journal: &Journal,
        table: &Table,
        row: RowId,
        event: &agent_common::Event,
        subject: Subject,
        time: Timestamp,
    ) {
        // Not in the window: it began under an older verdict.
        if event.seq == 0 {
            return;
        }
        let kind = if event.flags & EVENT_EXCHANGE == 0 {
            WindowKind::Connects
        } else {
            WindowKind::Exchanges
        };
        let clock = WallClock::read();
        let now = Nanos(event.at_ns);
        let previous =
            call(table, row, kind, event.seq - 1, now).map(|call| clock.at(Nanos(call.at_ns)));
        let mut written = self.written(row.index);
        let seen = written[place(kind)];
        if event.seq > seen + 1 {
            let run = (seen + 1, event.seq - 1);
            self.run(journal, table, row, kind, run, now, clock, &subject);
        }
        written[place(kind)] = event.seq.max(seen);
        self.set_written(row.index, written);
        journal.publish(
            time,
            Event::Failure {
                destination: subject.destination,
                workload: subject.workload,
                netns: subject.netns,
                window: view::window_kind(kind),
                outcome: outcome(event.outcome).to_owned(),
                seq: event.seq,
                previous_call_time: previous,
                generation: event.generation,
                latency_us: event.elapsed_us,
            },
        );
    }

    /// Whether runs of good calls are to be written down.
    pub fn is_due(&self, now: Nanos) -> bool {
        self.last
            .is_none_or(|last| now.0.saturating_sub(last.0) >= CALLS_EVERY.0)
    }

    /// Writes down the good calls of rows with traffic.
    pub fn calls(
        &mut self,
        journal: &Journal,
        table: &Table,
        now: Nanos,
        clock: WallClock,
        mut subject: impl FnMut(RowId, &KernelRow) -> Option<Subject>,
    ) {
        self.looked = self.last.replace(now);
        let mut left = RUNS_AT_A_TIME;
        let begin = std::mem::take(&mut self.next).clamp(OTHER_ROW + 1, table.len());
        for index in begin..table.len() {
            // Two words for most rows: those without news.
            let calls = table.last_seqs(index);
            let mut written = self.written(index);
            if calls[0] <= written[0] && calls[1] <= written[1] {
                continue;
            }
            let Some(row) = table.row(index).filter(|row| row.created_ns != 0) else {
                continue;
            };
            let id = RowId {
                index,
                incarnation: row.incarnation,
            };
            let Some(subject) = subject(id, &row) else {
                continue;
            };
            for kind in [WindowKind::Connects, WindowKind::Exchanges] {
                let (calls, seen) = (calls[place(kind)], written[place(kind)]);
                let last = call(table, id, kind, calls, now).map_or(0, |call| call.at_ns);
                // The last call may still be on its way as a failure: it is left for the next time.
                let quiet = now.0.saturating_sub(last) > CALLS_EVERY.0;
                let to = if quiet {
                    calls
                } else {
                    calls.saturating_sub(1)
                };
                if to > seen {
                    self.run(
                        journal,
                        table,
                        id,
                        kind,
                        (seen + 1, to),
                        now,
                        clock,
                        &subject,
                    );
                    written[place(kind)] = to;
                }
            }
            self.set_written(index, written);
            left -= 1;
            if left == 0 {
                self.next = index + 1;
                return;
            }
        }
    }

    fn written(&self, index: u32) -> [u64; 2] {
        self.written.get(index as usize).copied().unwrap_or([0; 2])
    }

    fn set_written(&mut self, index: u32, seqs: [u64; 2]) {
        let index = index as usize;
        if index >= self.written.len() {
            self.written.resize(index + 1, [0; 2]);
        }
        self.written[index] = seqs;
    }

    /// Writes down the good ones among the calls `from` to `to`: failures have lines of their own,
    /// before or after this one. Where failures are among them, every line has the latencies of all.
    #[expect(
        clippy::too_many_arguments,
        reason = "all of them are needed for one line"
    )]
    fn run(
        &mut self,
        journal: &Journal,
        table: &Table,
        row: RowId,
        kind: WindowKind,
        (from, to): (u64, u64),
        now: Nanos,
        clock: WallClock,
        subject: &Subject,
    ) {
        let at = |seq| call(table, row, kind, seq, now).map(|call| Nanos(call.at_ns));
        // Calls that the window does not hold any more came since the last look.
        let since = self.looked.unwrap_or(now);
        let latency = self.latency(table, row, kind);
        let mut begin = from;
        while begin <= to {
            // Older calls than the window holds cannot be told apart any more: one run.
            let is_failed =
                |seq: &u64| call(table, row, kind, *seq, now).is_some_and(|call| call.failed);
            let end = (begin..=to).find(is_failed).map_or(to, |failed| failed - 1);
            if end >= begin {
                let last_time = at(end).unwrap_or(now);
                let first_time = at(begin).unwrap_or(since).min(last_time);
                journal.publish(
                    clock.at(now),
                    Event::Calls {
                        destination: subject.destination.clone(),
                        workload: subject.workload.clone(),
                        netns: subject.netns,
                        window: view::window_kind(kind),
                        from_seq: begin,
                        to_seq: end,
                        first_time: clock.at(first_time),
                        last_time: clock.at(last_time),
                        latency_us: latency.clone(),
                        slow: 0,
                    },
                );
            }
            begin = end + 2;
        }
    }

    /// Latencies of the calls that ended since the last time that some of the row were written down:
    /// null where none was measured.
    fn latency(&mut self, table: &Table, row: RowId, kind: WindowKind) -> CallsLatency {
        let Some(kernel) = table.owned(row) else {
            return CallsLatency::default();
        };
        let (slot, longest) = match kind {
            WindowKind::Exchanges => (kernel.response_histogram, kernel.response_latency_max_us),
            WindowKind::Connects | WindowKind::None => {
                (kernel.histogram, kernel.connect_latency_max_us)
            }
        };
        let Some(histogram) = table.histogram(slot) else {
            return CallsLatency::default();
        };
        let measured = &mut self.measured[place(kind)];
        let mut before = [0; BUCKETS];
        if let Some(bytes) = measured.get(&row) {
            buckets::add(bytes, &mut before);
        }
        let mut bytes = Vec::new();
        buckets::write(&histogram.counts, &mut bytes);
        measured.insert(row, bytes.into_boxed_slice());
        let grown = buckets::grown(&histogram.counts, &before);
        let latency = buckets::summary(&grown, &histogram.counts, longest);
        CallsLatency {
            p50: latency.p50,
            p99: latency.p99,
            max: (latency.count > 0).then_some(latency.max),
        }
    }
}

/// A call in the row's window, if it is still there.
fn call(table: &Table, row: RowId, kind: WindowKind, seq: u64, now: Nanos) -> Option<Call> {
    if seq == 0 {
        return None;
    }
    decode(table.window_entry(row.index, kind, seq)?, seq, now.0)
}

fn outcome(outcome: u32) -> &'static str {
    match outcome {
        OUTCOME_REFUSED => "refused",
        OUTCOME_CONNECT_TIMEOUT => "connect_timeout",
        OUTCOME_UNREACHABLE => "unreachable",
        OUTCOME_RESET => "reset",
        OUTCOME_GAVE_UP => "gave_up",
        OUTCOME_CLOSED_EARLY => "closed_early",
        OUTCOME_STATUS => "status",
        OUTCOME_SLOW => "slow",
        OUTCOME_HUNG => "hung",
        OUTCOME_READ_TIMEOUT | OUTCOME_STALL => "read_timeout",
        OUTCOME_WRITE_TIMEOUT => "write_timeout",
        OUTCOME_DEADLINE => "deadline",
        _ => "other",
    }
}

/// Where a window's number stands in a pair.
fn place(kind: WindowKind) -> usize {
    kind.index().unwrap_or(0)
}
