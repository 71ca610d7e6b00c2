//! When the agent dials by itself: one schedule per address and namespace.
//!
//! While rows of a target wait for it (see `Breaker::wants_redial`), the target is dialled every 500 ms in the
//! first minute since the outage began, every 2 s until ten minutes, then every 4 s, each wait
//! jittered by 20 %. One dial per target is in flight at a time; the node as a whole dials at most
//! [`MAX_DIALS_PER_SECOND`]. What is due beyond that waits in the order in which it became due.
//! Whether a row acts on an answer is its breaker's affair: the schedule is the same for all.

use std::collections::{BTreeSet, HashMap};

use super::rng::SplitMix64;
use super::{Action, DialTarget, Nanos};

/// No second of the node's time holds more dials than this.
pub const MAX_DIALS_PER_SECOND: u64 = 200;

/// A dial that has not been answered for this long never will be; the next one may go out.
pub const DIAL_WRITE_OFF: Nanos = Nanos::from_secs(10);

/// Until this long after the outage began: every 500 ms.
const FIRST_PHASE: Nanos = Nanos::from_secs(60);
/// Until this long after the outage began: every 2 s; after it, every 4 s.
const SECOND_PHASE: Nanos = Nanos::from_secs(600);
/// Each wait is up to this much shorter or longer, so that targets that failed together are not
/// dialled together for ever.
const JITTER_PERCENT: u64 = 20;

/// Dials that may go out at once.
const BURST: u64 = 10;
/// Time that one dial costs. Refill is slower than the limit by the burst, so that a full burst
/// and a second of refill together stay within the limit.
const DIAL_COST: Nanos = Nanos(1_000_000_000_u64.div_ceil(MAX_DIALS_PER_SECOND - BURST));

/// The dial schedules of all targets.
#[derive(Default)]
pub(super) struct Redial {
    schedules: HashMap<DialTarget, Schedule>,
    /// Targets with rows and without a dial in flight, by the time of their next dial.
    due: BTreeSet<(Nanos, DialTarget)>,
    /// Targets with a dial in flight, by the time at which it is written off.
    in_flight: BTreeSet<(Nanos, DialTarget)>,
    /// The token bucket, kept as the time at which it is full again (GCRA).
    full_at: Nanos,
}

/// A target that rows wait for, or that has a dial in flight. Small: there may be one for each row.
struct Schedule {
    /// Indices of the rows that wait.
    rows: Rows,
    /// When the outage began.
    since: Nanos,
    /// Next dial, at the earliest.
    next: Nanos,
    /// When the dial in flight is written off; [`Nanos::MAX`]: there is none.
    write_off: Nanos,
}

/// A set of rows, nearly always one.
enum Rows {
    One(u32),
    /// None, or several.
    #[expect(clippy::box_collection, reason = "three words less for all the others")]
    Other(Box<BTreeSet<u32>>),
}

impl Rows {
    fn insert(&mut self, row: u32) {
        match self {
            Self::Other(rows) if rows.is_empty() => *self = Self::One(row),
            Self::Other(rows) => {
                rows.insert(row);
            }
            Self::One(one) if *one == row => {}
            Self::One(one) => *self = Self::Other(Box::new(BTreeSet::from([*one, row]))),
        }
    }

    fn remove(&mut self, row: u32) {
        match self {
            Self::One(one) if *one == row => *self = Self::Other(Box::default()),
            Self::One(_) => {}
            Self::Other(rows) => {
                rows.remove(&row);
            }
        }
    }

    fn first(&self) -> Option<u32> {
        match self {
            Self::One(one) => Some(*one),
            Self::Other(rows) => rows.first().copied(),
        }
    }

    fn is_empty(&self) -> bool {
        self.first().is_none()
    }
}

impl Redial {
    /// A row begins to wait for a target. `since`: when its outage began; the first row's counts.
    pub(super) fn join(
        &mut self,
        target: DialTarget,
        row: u32,
        since: Nanos,
        now: Nanos,
        rng: &mut SplitMix64,
    ) {
        let schedule = self.schedules.entry(target).or_insert_with(|| Schedule {
            rows: Rows::Other(Box::default()),
            since,
            next: Nanos::MAX,
            write_off: Nanos::MAX,
        });
        let first = schedule.rows.is_empty();
        schedule.rows.insert(row);
        if !first {
            return;
        }
        schedule.since = since;
        schedule.next = now + interval(now - since, rng);
        if schedule.write_off == Nanos::MAX {
            self.due.insert((schedule.next, target));
        }
    }

    /// The target is dialled as soon as the limit allows.
    pub(super) fn hurry(&mut self, target: DialTarget, now: Nanos) {
        let Some(schedule) = self.schedules.get_mut(&target) else {
            return;
        };
        if schedule.write_off == Nanos::MAX && now < schedule.next {
            self.due.remove(&(schedule.next, target));
            schedule.next = now;
            self.due.insert((now, target));
        }
    }

    /// A row no longer waits.
    pub(super) fn leave(&mut self, target: DialTarget, row: u32) {
        let Some(schedule) = self.schedules.get_mut(&target) else {
            return;
        };
        schedule.rows.remove(row);
        // With a dial in flight the schedule stays until its end, so that rows that come back
        // meanwhile do not start a second one.
        if schedule.rows.is_empty() && schedule.write_off == Nanos::MAX {
            self.due.remove(&(schedule.next, target));
            self.schedules.remove(&target);
        }
    }

    /// The dial of a target ended, or is written off.
    pub(super) fn ended(&mut self, target: DialTarget) {
        let Some(schedule) = self.schedules.get_mut(&target) else {
            return;
        };
        let write_off = std::mem::replace(&mut schedule.write_off, Nanos::MAX);
        if write_off == Nanos::MAX {
            return;
        }
        self.in_flight.remove(&(write_off, target));
        if schedule.rows.is_empty() {
            self.schedules.remove(&target);
        } else {
            self.due.insert((schedule.next, target));
        }
    }

    /// Appends the rows that wait for a target, in ascending order.
    pub(super) fn rows(&self, target: DialTarget, out: &mut Vec<u32>) {
        match self.schedules.get(&target).map(|schedule| &schedule.rows) {
            Some(Rows::One(one)) => out.push(*one),
            Some(Rows::Other(rows)) => out.extend(rows.iter()),
            None => {}
        }
    }

    /// One of the rows that wait for a target.
    pub(super) fn a_row(&self, target: DialTarget) -> Option<u32> {
        self.schedules.get(&target)?.rows.first()
    }

    /// Writes off what never reported and dials what is due, as far as the limit allows; at most
    /// `budget` of both.
    pub(super) fn run(
        &mut self,
        now: Nanos,
        budget: usize,
        rng: &mut SplitMix64,
        out: &mut Vec<Action>,
    ) {
        for _ in 0..budget {
            if let Some(&(at, target)) = self.in_flight.first()
                && at <= now
            {
                self.ended(target);
                continue;
            }
            let Some(&(at, target)) = self.due.first() else {
                return;
            };
            if at > now || self.earliest_token() > now {
                return;
            }
            self.due.pop_first();
            let Some(schedule) = self.schedules.get_mut(&target) else {
                continue;
            };
            let write_off = (now + DIAL_WRITE_OFF).min(Nanos(u64::MAX - 1));
            schedule.next = now + interval(now - schedule.since, rng);
            schedule.write_off = write_off;
            self.in_flight.insert((write_off, target));
            self.full_at = self.full_at.max(now) + DIAL_COST;
            out.push(Action::Dial { target });
        }
    }

    /// When [`Redial::run`] has something to do.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        let write_off = self.in_flight.first().map(|&(at, _)| at);
        let dial = self
            .due
            .first()
            .map(|&(at, _)| at.max(self.earliest_token()));
        [write_off, dial].into_iter().flatten().min()
    }

    /// When the target is dialled next, at the earliest; `None` when nothing waits for it.
    pub(super) fn next_dial(&self, target: DialTarget) -> Option<Nanos> {
        let schedule = self.schedules.get(&target)?;
        (!schedule.rows.is_empty()).then_some(schedule.next)
    }

    fn earliest_token(&self) -> Nanos {
        self.full_at - DIAL_COST.times(BURST - 1)
    }
}

/// Wait between two dials that long after the outage began.
fn interval(elapsed: Nanos, rng: &mut SplitMix64) -> Nanos {
    rng.jitter(base_interval(elapsed), JITTER_PERCENT)
}

/// The same without its jitter.
pub(super) fn base_interval(elapsed: Nanos) -> Nanos {
    if elapsed < FIRST_PHASE {
        Nanos::from_millis(500)
    } else if elapsed < SECOND_PHASE {
        Nanos::from_secs(2)
    } else {
        Nanos::from_secs(4)
    }
}
