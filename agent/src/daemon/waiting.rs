//! Exchanges that wait for an answer: a thread that looks at them once a second and finds those
//! that hang (`core::hung`).
//!
//! An exchange that waits makes no event. The thread looks at every connection on which an answer
//! is owed, which takes about a millisecond, and at nothing else.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, mpsc},
    time::Duration,
};

use agent_common::{
    Event as KernelEvent, EventKind, OTHER_ROW, Row, Stamp,
    event::{EVENT_EXCHANGE, OUTCOME_HUNG},
    histogram::{BUCKETS, bucket},
    row::ROW_PROTECTED,
    stamp::{COUNTED_MOST, STAMP_UNJUDGED},
};
use anyhow::{Context as _, Result};

use super::{
    canary::Hidden,
    plan::Plan,
    reactor::{Command, Commander},
};
use crate::{
    core::{
        DialTarget, Nanos, RowId, WindowKind,
        hung::{AUTO_USUAL, Arrivals, Past, Wait, is_hung},
    },
    kernel::{Connections, Table, clock},
};

/// How often is looked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Exchanges that have waited for less are no news.
const YOUNG: Nanos = Nanos::from_millis(500);
/// When looks are further apart than this, the agent itself was stopped: what it sees first may be
/// the end of a silence that it slept through, and it looks again before it concludes anything.
const ASLEEP: Nanos = Nanos::from_secs(3);

/// What the thread is told.
pub enum Order {
    /// A new configuration.
    Plan(Arc<Plan>),
    /// End.
    Stop,
}

/// The thread's handle.
pub struct Waiting {
    orders: mpsc::Sender<Order>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Waiting {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(
        table: Arc<Table>,
        connections: Arc<Connections>,
        plan: Arc<Plan>,
        hidden: Hidden,
        commander: Commander,
    ) -> Result<Self> {
        let (orders, receiver) = mpsc::channel();
        let watch = Watch {
            table,
            connections,
            plan,
            hidden,
            commander,
            rows: HashMap::new(),
            counted: HashSet::new(),
            last: clock::now(),
        };
        let thread = std::thread::Builder::new()
            .name("backstop-waits".into())
            .spawn(move || run(watch, &receiver))
            .context("start the thread that looks at waiting exchanges")?;
        Ok(Self {
            orders,
            thread: Some(thread),
        })
    }

    /// Takes over a configuration.
    pub fn plan(&self, plan: Arc<Plan>) {
        // A thread that is gone is noticed by whoever runs the loop.
        let _ = self.orders.send(Order::Plan(plan));
    }

    /// Ends the thread and waits for it.
    pub fn stop(&mut self) {
        let _ = self.orders.send(Order::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.stop();
    }
}

fn run(mut watch: Watch, orders: &mpsc::Receiver<Order>) {
    loop {
        match orders.recv_timeout(LOOK_EVERY) {
            Ok(Order::Plan(plan)) => watch.plan = plan,
            Err(mpsc::RecvTimeoutError::Timeout) => watch.look(clock::now()),
            Ok(Order::Stop) | Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// One exchange that waits.
struct Owed {
    cookie: u64,
    number: u32,
    stamp: Stamp,
    wait: Wait,
}

struct Watch {
    table: Arc<Table>,
    connections: Arc<Connections>,
    plan: Arc<Plan>,
    hidden: Hidden,
    commander: Commander,
    /// How exchanges keep coming to rows where one waits.
    rows: HashMap<RowId, Arrivals>,
    /// Exchanges that were counted: cookie and number.
    counted: HashSet<(u64, u32)>,
    last: Nanos,
}

impl Watch {
    fn look(&mut self, now: Nanos) {
        let slept = now - self.last > ASLEEP;
        self.last = now;
        let owed = self.owed(now);
        if !self.counted.is_empty() {
            let waiting: HashSet<_> = owed.iter().map(|o| (o.cookie, o.number)).collect();
            self.counted.retain(|counted| waiting.contains(counted));
        }
        self.arrivals(&owed, now);
        if slept {
            return;
        }
        let mut answers = None;
        for owed in &owed {
            if self.counted.len() < COUNTED_MOST as usize
                && !self.counted.contains(&(owed.cookie, owed.number))
                && self.hangs(owed, now, &mut answers)
            {
                self.count(owed);
            }
        }
    }

    /// Exchanges that have waited for a while, of rows that have a breaker.
    fn owed(&self, now: Nanos) -> Vec<Owed> {
        let mut all = Vec::new();
        self.connections.each_owed(|cookie, stamp| {
            let Some((number, begun_us)) = stamp.owed() else {
                return;
            };
            let wait = Wait {
                begun: Nanos(begun_us * 1000),
                asked: Nanos(stamp.begun_ns),
            };
            if now - wait.begun >= YOUNG
                && stamp.row != OTHER_ROW
                && stamp.flags & STAMP_UNJUDGED == 0
            {
                all.push(Owed {
                    cookie,
                    number,
                    stamp: *stamp,
                    wait,
                });
            }
        });
        all
    }

    /// Notes how exchanges keep coming to the rows of those that wait; forgets all others.
    fn arrivals(&mut self, owed: &[Owed], now: Nanos) {
        let mut before = std::mem::take(&mut self.rows);
        for owed in owed {
            let id = row_of(&owed.stamp);
            if self.rows.contains_key(&id) {
                continue;
            }
            let Some(row) = self.table.owned(id) else {
                continue;
            };
            let mut arrivals = before.remove(&id).unwrap_or_default();
            arrivals.note(now, row.requests);
            self.rows.insert(id, arrivals);
        }
    }

    fn hangs(
        &self,
        owed: &Owed,
        now: Nanos,
        answers: &mut Option<HashMap<DialTarget, Nanos>>,
    ) -> bool {
        let id = row_of(&owed.stamp);
        let (Some(row), Some(arrivals)) = (self.table.owned(id), self.rows.get(&id)) else {
            return false;
        };
        let breaker = self.plan.breaker(row.settings.policy);
        if breaker
            .hung
            .shortest()
            .is_none_or(|least| now - owed.wait.asked < least)
            || row.settings.flags & ROW_PROTECTED != 0
            || self.hidden.contains(row.key.cgroup_id)
        {
            return false;
        }
        let mut past = self.past(&row);
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
        let answers = answers.get_or_insert_with(|| self.last_answers());
        let target = DialTarget::from(&row.key);
        past.last_answer = answers.get(&target).copied().unwrap_or(past.last_answer);
        judge(&past)
    }

    fn past(&self, row: &Row) -> Past {
        let usual_us = AUTO_USUAL.0 / 1000;
        let is_quick = match self.table.histogram(row.response_histogram) {
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
    fn last_answers(&self) -> HashMap<DialTarget, Nanos> {
        let mut answers = HashMap::new();
        for (_, row) in self.table.used().skip(1) {
            let last = answers
                .entry(DialTarget::from(&row.key))
                .or_insert(Nanos::ZERO);
            *last = Nanos(row.last_answer_ns).max(*last);
        }
        answers
    }

    /// Counts an exchange as failed while it hangs.
    fn count(&mut self, owed: &Owed) {
        let id = row_of(&owed.stamp);
        let is_owed = |stamp: &Stamp| {
            row_of(stamp) == id
                && stamp
                    .owed()
                    .is_some_and(|(number, _)| number == owed.number)
        };
        // Once more: the copy may be old by now.
        if !self
            .connections
            .get(owed.cookie)
            .is_some_and(|s| is_owed(&s))
        {
            return;
        }
        let now = clock::now();
        let generation = owed.stamp.generation;
        let kind = WindowKind::Exchanges;
        let Some(seq) = self.table.enter_failure(id, kind, generation, now) else {
            // It began under an older verdict: it is counted when it ends, and judges nobody.
            return;
        };
        self.table.count_hung(id.index);
        self.counted.insert((owed.cookie, owed.number));
        let noted = self.connections.note_counted(owed.cookie, owed.number, seq);
        let still = self
            .connections
            .get(owed.cookie)
            .is_some_and(|s| is_owed(&s));
        if noted.is_err() || (!still && self.connections.take_counted(owed.cookie)) {
            // It ended in the middle of this, and the kernel has counted it as it ended; or the
            // note was refused, and its end will be counted twice rather than not at all.
            self.table.count_hung_end(id.index, !still);
            if !still {
                self.table.repair(id.index, kind, seq);
                return;
            }
        }
        let mut event: KernelEvent = bytemuck::Zeroable::zeroed();
        event.kind = EventKind::FAILURE;
        event.row = id.index;
        event.incarnation = id.incarnation;
        event.generation = generation;
        event.at_ns = now.0;
        event.seq = seq;
        event.elapsed_us = (now - owed.wait.begun).0 / 1000;
        event.outcome = OUTCOME_HUNG;
        event.pid = owed.stamp.pid;
        event.tid = owed.stamp.tid;
        event.flags = EVENT_EXCHANGE;
        event.comm = owed.stamp.comm;
        self.commander.send(Command::Found(event));
    }
}

fn row_of(stamp: &Stamp) -> RowId {
    RowId {
        index: stamp.row,
        incarnation: stamp.incarnation,
    }
}
