//! What happened, kept for `events`, sent to its followers, and logged.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, PoisonError},
};

use tokio::sync::broadcast;

use crate::{
    control::{
        EventFeed,
        api::{ConfigAction, Event, EventRecord, ReasonKind, Timestamp},
    },
    core::Nanos,
};

/// Records that a follower may be behind before it loses its place.
const FOLLOWER_BACKLOG: usize = 4096;
/// Log lines a second about single calls; the rest is counted in one line.
const LOG_LINES_PER_SECOND: u32 = 20;

/// The journal. Shared: written by the select loop, read by the control server.
pub struct Journal {
    inner: Mutex<Inner>,
}

/// A record, and its number among all: in what order those of the same time were published.
type Kept = (u64, Arc<EventRecord>);

struct Inner {
    /// Decisions, and whatever else is rare.
    decisions: VecDeque<Kept>,
    /// Timeouts, refusals, held connects and spent budgets: they may be many, and must push out no
    /// decision.
    firings: VecDeque<Kept>,
    /// Failures and calls, shown only with `all`.
    calls: VecDeque<Kept>,
    published: u64,
    limit: usize,
    log: LogLimit,
    /// `None` once the agent ends.
    followers: Option<broadcast::Sender<Arc<EventRecord>>>,
}

impl Journal {
    /// Keeps so many records of each sort.
    pub fn new(limit: usize) -> Self {
        Self {
            inner: Mutex::new(Inner {
                decisions: VecDeque::new(),
                firings: VecDeque::new(),
                calls: VecDeque::new(),
                published: 0,
                limit,
                log: LogLimit::default(),
                followers: Some(broadcast::channel(FOLLOWER_BACKLOG).0),
            }),
        }
    }

    /// Keeps, sends and logs.
    pub fn publish(&self, time: Timestamp, event: Event) {
        let record = Arc::new(EventRecord { time, event });
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = inner.limit;
        inner.log.line(&record);
        inner.published += 1;
        let number = inner.published;
        let ring = match &record.event {
            Event::Failure { .. } | Event::Calls { .. } | Event::Redial { .. } => &mut inner.calls,
            event if is_firing(event) => &mut inner.firings,
            _ => &mut inner.decisions,
        };
        if limit > 0 {
            if ring.len() >= limit {
                ring.pop_front();
            }
            ring.push_back((number, Arc::clone(&record)));
        }
        // Under the lock, so that a new follower gets neither a gap nor a repetition. Nobody
        // following is no error.
        if let Some(followers) = &inner.followers {
            let _ = followers.send(record);
        }
    }

    /// The agent ends, and nothing more happens: followers read what there is, and then the end. Whether
    /// there are any.
    pub fn end(&self) -> bool {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let followers = inner.followers.take();
        followers.is_some_and(|followers| followers.receiver_count() > 0)
    }

    /// Logs how many lines were left out in the second that is over at `time`, if it is.
    pub fn flush(&self, time: Timestamp) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.log.begin(time);
    }

    /// Kept records, oldest first, and those to come. Of decisions and firings together so many
    /// are shown as are kept, and at least half of that of either, if there are.
    pub fn feed(&self, all: bool) -> EventFeed {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (decisions, firings) = (inner.decisions.len(), inner.firings.len());
        let half = inner.limit / 2;
        let shown = decisions.min(half.max(inner.limit.saturating_sub(firings)));
        let fired = firings.min(inner.limit.saturating_sub(shown));
        let mut kept: Vec<_> = inner
            .decisions
            .iter()
            .skip(decisions - shown)
            .chain(inner.firings.iter().skip(firings - fired))
            .cloned()
            .collect();
        if all {
            kept.extend(inner.calls.iter().cloned());
        }
        kept.sort_by_key(|(number, record)| (record.time, *number));
        EventFeed {
            kept: kept.into_iter().map(|(_, record)| record).collect(),
            coming: match &inner.followers {
                Some(followers) => followers.subscribe(),
                // Of a channel without a sender.
                None => broadcast::channel(1).1,
            },
        }
    }
}

/// Which wall-clock time a kernel time was.
#[derive(Clone, Copy)]
pub struct WallClock {
    offset_ms: i64,
}

impl WallClock {
    /// Compares the two clocks now.
    pub fn read() -> Self {
        let monotonic = crate::kernel::clock::now().as_millis() as i64;
        Self {
            offset_ms: Timestamp::now().unix_ms() as i64 - monotonic,
        }
    }

    /// The wall-clock time.
    pub fn at(self, at: Nanos) -> Timestamp {
        Timestamp::from_unix_ms((at.as_millis() as i64 + self.offset_ms).max(0) as u64)
    }
}

#[derive(Default)]
struct LogLimit {
    second: u64,
    lines: u32,
    left_out: u64,
}

impl LogLimit {
    /// It is that time: what was left out in an earlier second is logged in one line.
    fn begin(&mut self, time: Timestamp) {
        let second = time.unix_ms() / 1000;
        // Events come a moment late; further back goes only a clock that was set.
        if (second..second + 2).contains(&self.second) {
            return;
        }
        if self.left_out > 0 {
            tracing::warn!(
                "{} more timeouts and refusals in that second, not logged one by one",
                self.left_out
            );
        }
        *self = Self {
            second,
            ..Self::default()
        };
    }

    fn line(&mut self, record: &EventRecord) {
        match &record.event {
            event if is_firing(event) => {
                self.begin(record.time);
                if self.lines >= LOG_LINES_PER_SECOND {
                    self.left_out += 1;
                    return;
                }
                self.lines += 1;
            }
            Event::Failure { .. } | Event::Calls { .. } | Event::Redial { .. } => return,
            _ => {}
        }
        log(record);
    }
}

/// Whether an event is one of those that come with calls, and may be many.
fn is_firing(event: &Event) -> bool {
    matches!(
        event,
        Event::Timeout { .. }
            | Event::Rejected { .. }
            | Event::NonIdempotent { .. }
            | Event::Held { .. }
            | Event::RetryBudget { .. }
    )
}

fn log(record: &EventRecord) {
    match &record.event {
        Event::Breaker {
            destination,
            workload,
            from,
            to,
            reason,
            generation,
            cause,
            by,
            ..
        } => {
            let why = match reason.kind {
                ReasonKind::None | ReasonKind::Manual => {
                    let cause = cause.map_or(String::new(), |cause| format!(" ({cause})"));
                    by.as_ref()
                        .map_or(cause.clone(), |by| format!("{cause} by {by}"))
                }
                kind => format!(
                    ": {kind} of {} is {} (threshold {})",
                    reason.window, reason.value, reason.threshold
                ),
            };
            tracing::warn!(%destination, %workload, generation, "breaker {from} -> {to}{why}");
        }
        Event::Order {
            action,
            destination,
            workload,
            until,
            rows,
            orders,
            by,
        } => {
            let until = until.map(|until| until.to_string());
            tracing::info!(
                %destination, workload = workload.as_deref().unwrap_or("all"), %by,
                until, rows, taken_back = orders, "order: {action}"
            );
        }
        Event::Timeout {
            destination,
            workload,
            which,
            value_ms,
            elapsed_ms,
            pid,
            comm,
            mode,
            ..
        } => tracing::warn!(
            %destination, %workload, pid, comm,
            "{which} timeout of {value_ms} ms fired after {elapsed_ms} ms ({mode})"
        ),
        Event::Rejected {
            destination,
            workload,
            reason,
            count,
            pid,
            comm,
            mode,
            ..
        } => {
            tracing::info!(
                %destination, %workload, pid, comm,
                "refused by {reason}, {count} since the last line ({mode})"
            );
        }
        Event::Config {
            action: ConfigAction::Refused,
            message,
            by,
        } => tracing::warn!(by = by.as_deref(), "configuration refused: {message}"),
        Event::Config {
            action: ConfigAction::Missing,
            message,
            ..
        } => tracing::warn!("{message}"),
        Event::Config {
            action,
            message,
            by,
        } => {
            tracing::info!(by = by.as_deref(), "{action}: {message}");
        }
        Event::Safety {
            action, message, ..
        } => tracing::warn!("{action}: {message}"),
        Event::Loss { lost, message } => tracing::warn!(lost, "{message}"),
        Event::Drained {
            destination,
            workload,
            on_open,
            connections,
            ..
        } => tracing::warn!(
            %destination, %workload,
            "the breaker is open: {connections} connections ended (on_open = {on_open})"
        ),
        Event::NonIdempotent {
            destination,
            workload,
            method,
            refused,
            count,
            pid,
            comm,
            mode,
            ..
        } => {
            let fate = if *refused { "refused" } else { "let pass" };
            tracing::warn!(
                %destination, %workload, pid, comm,
                "{method} repeated after a failure and {fate}, {count} such since the last line ({mode})"
            );
        }
        Event::Held {
            destination,
            workload,
            reason,
            count,
            hold_ms,
            pid,
            comm,
            ..
        } => {
            tracing::info!(
                %destination, %workload, pid, comm, hold_ms,
                "held by {reason}, {count} since the last line"
            );
        }
        Event::RetryBudget {
            destination,
            workload,
            exhausted,
            mode,
            ..
        } => {
            let what = match exhausted {
                true => "is spent: retries beyond it are refused",
                false => "has refused nothing for a window",
            };
            tracing::warn!(%destination, %workload, "the retry budget {what} ({mode})");
        }
        Event::Failure { .. } | Event::Calls { .. } | Event::Redial { .. } => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loss(lost: u64) -> Event {
        Event::Loss {
            lost,
            message: String::new(),
        }
    }

    #[test]
    fn the_last_ones_are_kept() {
        let journal = Journal::new(3);
        for lost in 0..5 {
            journal.publish(Timestamp::from_unix_ms(lost), loss(lost));
        }
        let mut feed = journal.feed(false);
        let kept: Vec<_> = feed
            .kept
            .iter()
            .map(|record| record.event.clone())
            .collect();
        assert_eq!(kept, [loss(2), loss(3), loss(4)]);
        assert!(feed.coming.try_recv().is_err());
        journal.publish(Timestamp::from_unix_ms(9), loss(9));
        assert_eq!(feed.coming.try_recv().unwrap().event, loss(9));
    }

    #[test]
    fn timeouts_push_out_no_decision() {
        let timeout = || Event::Rejected {
            destination: "10.0.0.5:5432".to_owned(),
            workload: "/".to_owned(),
            netns: None,
            reason: "breaker".to_owned(),
            count: 1,
            pid: 1,
            comm: "curl".to_owned(),
            mode: crate::control::api::Mode::Enforce,
            generation: 1,
        };
        let journal = Journal::new(4);
        for lost in 0..3 {
            journal.publish(Timestamp::from_unix_ms(lost), loss(lost));
        }
        for i in 0..100 {
            journal.publish(Timestamp::from_unix_ms(10 + i), timeout());
        }
        let kept = journal.feed(false).kept;
        assert_eq!(kept.len(), 4);
        assert_eq!([&kept[0].event, &kept[1].event], [&loss(1), &loss(2)]);
    }

    #[test]
    fn each_second_has_its_own_count() {
        let record = |unix_ms| EventRecord {
            time: Timestamp::from_unix_ms(unix_ms),
            event: Event::Timeout {
                destination: "10.0.0.5:5432".to_owned(),
                workload: "/".to_owned(),
                netns: None,
                which: crate::control::api::TimeoutKind::Read,
                value_ms: 1,
                elapsed_ms: 1,
                pid: 1,
                comm: "curl".to_owned(),
                mode: crate::control::api::Mode::Enforce,
            },
        };
        let mut limit = LogLimit::default();
        for i in 0..50 {
            limit.line(&record(5_000 + i));
        }
        assert_eq!((limit.lines, limit.left_out), (LOG_LINES_PER_SECOND, 30));
        // The second goes on, and one that comes late belongs to it.
        limit.begin(Timestamp::from_unix_ms(5_999));
        limit.line(&record(4_999));
        assert_eq!((limit.lines, limit.left_out), (LOG_LINES_PER_SECOND, 31));
        limit.begin(Timestamp::from_unix_ms(6_000));
        assert_eq!((limit.lines, limit.left_out), (0, 0));
        // The clock is set back.
        limit.line(&record(1_000));
        assert_eq!((limit.second, limit.lines), (1, 1));
    }

    #[test]
    fn none_are_kept_when_none_are_wanted() {
        let journal = Journal::new(0);
        journal.publish(Timestamp::from_unix_ms(1), loss(1));
        assert!(journal.feed(true).kept.is_empty());
    }
}
