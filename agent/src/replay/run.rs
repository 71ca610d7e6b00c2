//! The virtual clock.

mod agent;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;

use super::read::{RecordedRow, Recording, RowKey, Segment, timestamp};
use super::report::{LeftAlone, Replayed, RowReport, Transition};
use super::shadow::{Shadow, Stamp};
use crate::core::{
    Action, BreakerSettings, DialTarget, Engine, Event, Nanos, ProbeOutcome, RowId, State,
    WindowKind, refusing::Refusing,
};
use crate::daemon::plan::{self, Plan, Ticks};
use crate::daemon::view;
use crate::policy::{Config, Destination};

/// All jitter comes from it.
const SEED: u64 = 1;
/// Lines of refusals that are no farther apart are of one run of refusals: the agent writes one a second.
const SPREAD_OVER: Nanos = Nanos::from_millis(1500);

const KINDS: [WindowKind; 2] = [WindowKind::Connects, WindowKind::Exchanges];

/// What happens, in the order of time; at the same time in the order of rows, windows and calls.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Happening {
    at: Nanos,
    row: usize,
    window: usize,
    seq: u64,
    what: What,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// The n-th call of a segment begins.
    Begins { segment: usize, n: u64 },
    /// It ends; which of those under way.
    Ends { call: u64 },
    /// The recorded agent had refused so many.
    Refused { count: u64 },
    /// The recorded agent had dialled.
    Redialled { answered: bool },
    /// A dial of the replayed agent ends.
    DialEnds { answered: bool },
}

/// A call under way.
struct Call {
    stamp: Stamp,
    failed: bool,
    slow: bool,
}

struct Row<'a> {
    recorded: &'a RecordedRow,
    settings: Arc<BreakerSettings>,
    target: DialTarget,
    shadow: Shadow,
    last_connect: Option<Nanos>,
    /// Probes that have connected and wait for their exchange: the generations.
    probes: VecDeque<u32>,
    refused_told: Option<Nanos>,
    /// Refused by the recorded agent, and by this one.
    refused_total: u64,
    report: RowReport,
}

struct Replay<'a> {
    engine: Engine,
    rows: Vec<Row<'a>>,
    happenings: BinaryHeap<Reverse<Happening>>,
    under_way: HashMap<u64, Call>,
    calls: u64,
    /// What connects and dials have last said of each target.
    reachable: HashMap<DialTarget, bool>,
    /// Dials that were recorded.
    redials: BTreeMap<DialTarget, Vec<(Nanos, bool)>>,
    counted_at: Nanos,
    refusing: Refusing,
    actions: Vec<Action>,
    transitions: Vec<Transition>,
}

/// Feeds a recording through the core.
pub fn replay(recording: &Recording, config: &Config) -> Replayed {
    let plan = Plan::new(
        config.clone(),
        Ticks {
            // Only connect timeouts depend on these two, and none is tried out.
            tick_ns: 4_000_000,
            syn_linear: true,
            window_calls: plan::window_calls(config),
        },
    );
    let mut replay = Replay {
        engine: Engine::new(SEED),
        rows: Vec::new(),
        happenings: BinaryHeap::new(),
        under_way: HashMap::new(),
        calls: 0,
        reachable: HashMap::new(),
        redials: BTreeMap::new(),
        counted_at: Nanos::ZERO,
        refusing: Refusing::default(),
        actions: Vec::new(),
        transitions: Vec::new(),
    };
    let mut left_alone = Vec::new();
    for (key, recorded) in &recording.rows {
        if let Err(why) = replay.row(&plan, key, recorded) {
            left_alone.push((key.clone(), why));
        }
    }
    replay.dials(recording);
    let times = replay.times();
    replay.run();
    let state = |id| replay.engine.state(id).unwrap_or(State::Closed);
    let rows = (0..).zip(replay.rows).map(|(index, row)| RowReport {
        state: view::state(state(id(index))),
        ..row.report
    });
    Replayed {
        transitions: replay.transitions,
        rows: rows.collect(),
        left_alone: left_alone
            .into_iter()
            .map(|(key, why)| LeftAlone {
                destination: key.destination,
                workload: key.workload,
                why: why.to_owned(),
            })
            .collect(),
        from: times.map(|(from, _)| timestamp(from)),
        to: times.map(|(_, to)| timestamp(to)),
        lines: recording.lines,
        skipped: recording.skipped.clone(),
        duplicates: recording.duplicates,
        missing: recording.missing,
    }
}

fn id(index: usize) -> RowId {
    RowId {
        index: index as u32,
        incarnation: 1,
    }
}

impl<'a> Replay<'a> {
    /// Takes a row in; else says why it is left alone.
    fn row(
        &mut self,
        plan: &Plan,
        key: &RowKey,
        recorded: &'a RecordedRow,
    ) -> Result<(), &'static str> {
        let destination: Destination = key
            .destination
            .parse()
            .map_err(|_| "no destination with a breaker")?;
        let resolution = plan.config.resolve(&destination, Some(&key.workload), &[]);
        if resolution.protected {
            return Err("protected");
        }
        let settings = Arc::clone(&plan.breakers[resolution.policy]);
        let slow_call = plan.settings[resolution.policy].slow_call_us;
        let slow_call = (slow_call > 0).then(|| Nanos(u64::from(slow_call) * 1000));
        let target = DialTarget::from(&destination.to_key(0, key.netns.unwrap_or(0)));
        let index = self.rows.len();
        for (window, segments) in recorded.windows.iter().enumerate() {
            for (number, segment) in segments.iter().enumerate() {
                self.begin(index, window, number, segment, 0);
            }
        }
        for (number, (at, count)) in (0..).zip(spread(&recorded.refused)) {
            self.push(at, index, 0, number, What::Refused { count });
        }
        let mut report = RowReport::new(key, plan.name(resolution.policy as u32));
        report.may_be_slow = may_be_slow(&recorded.windows[1], slow_call);
        self.rows.push(Row {
            recorded,
            settings,
            target,
            shadow: Shadow::default(),
            last_connect: None,
            probes: VecDeque::new(),
            refused_told: None,
            refused_total: 0,
            report,
        });
        Ok(())
    }

    /// Takes the recorded dials in.
    fn dials(&mut self, recording: &Recording) {
        for (number, (at, destination, netns, answered)) in (0..).zip(&recording.redials) {
            let Ok(destination) = destination.parse::<Destination>() else {
                continue;
            };
            let target = DialTarget::from(&destination.to_key(0, netns.unwrap_or(0)));
            let row = self.rows.iter().position(|row| row.target == target);
            let Some(row) = row else { continue };
            let answered = *answered;
            self.push(*at, row, 0, number, What::Redialled { answered });
            self.redials
                .entry(target)
                .or_default()
                .push((*at, answered));
        }
    }

    fn push(&mut self, at: Nanos, row: usize, window: usize, seq: u64, what: What) {
        self.happenings.push(Reverse(Happening {
            at,
            row,
            window,
            seq,
            what,
        }));
    }

    /// Schedules the begin of a segment's n-th call.
    fn begin(&mut self, row: usize, window: usize, number: usize, segment: &Segment, n: u64) {
        let at = segment.end(n) - segment.latency;
        let what = What::Begins { segment: number, n };
        self.push(at, row, window, segment.from_seq + n, what);
    }

    /// First and last end of a call.
    fn times(&self) -> Option<(Nanos, Nanos)> {
        let segments = self.rows.iter().flat_map(|row| row.recorded.windows.iter());
        let segments = segments.flatten();
        let first = segments.clone().map(|segment| segment.first).min()?;
        let last = segments.map(|segment| segment.last).max()?;
        Some((first, last))
    }

    fn run(&mut self) {
        while let Some(&Reverse(next)) = self.happenings.peek() {
            let wakes = [self.engine.next_deadline(), self.refusing.next_look()];
            if let Some(now) = wakes.into_iter().flatten().min()
                && now < next.at
            {
                self.wake(now);
                continue;
            }
            self.happenings.pop();
            self.happen(next);
            self.perform(next.at);
        }
    }

    fn happen(&mut self, happening: Happening) {
        let Happening { at, row, .. } = happening;
        match happening.what {
            What::Begins { segment, n } => self.begins(happening, segment, n),
            What::Ends { call } => self.ends(happening, call),
            What::Refused { count } => {
                if self.rows[row].shadow.refuses(at) {
                    self.rows[row].report.refused_then += count;
                    self.refused(row, count, at);
                } else {
                    self.rows[row].report.unknown += count;
                }
            }
            What::Redialled { answered } => {
                let target = self.rows[row].target;
                self.reachable.insert(target, answered);
                self.dial_ended(target, answered, at);
            }
            What::DialEnds { answered } => self.dial_ended(self.rows[row].target, answered, at),
        }
    }

    fn begins(&mut self, happening: Happening, number: usize, n: u64) {
        let Happening {
            at,
            row: index,
            window,
            seq,
            ..
        } = happening;
        let row = &mut self.rows[index];
        let segment = row.recorded.windows[window][number];
        if n == 0 {
            row.shadow
                .enter_unknown(KINDS[window], segment.missing_before);
        }
        let stamp = if KINDS[window] == WindowKind::Connects {
            row.last_connect = Some(at);
            row.report.connects += 1;
            row.shadow
                .admit(at, seq.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32)
        } else {
            row.report.exchanges += 1;
            let generation = row.shadow.generation();
            let probe = row.probes.pop_front() == Some(generation);
            if !probe {
                // Probes of a round before.
                row.probes.retain(|of| *of == generation);
            }
            Some(Stamp {
                generation,
                probe,
                by_exchange: probe,
            })
        };
        let generation = row.shadow.generation();
        match stamp {
            Some(stamp) => {
                let call = self.calls;
                self.calls += 1;
                let (failed, slow) = (segment.failed, segment.slow);
                let under_way = Call {
                    stamp,
                    failed,
                    slow,
                };
                self.under_way.insert(call, under_way);
                let what = What::Ends { call };
                self.push(segment.end(n).max(at), index, window, seq, what);
                if stamp.probe && window == 0 {
                    let row = id(index);
                    let event = Event::ProbeStarted { row, generation };
                    self.handle(index, event, at);
                }
            }
            None => {
                let report = &mut row.report;
                report.refused += 1;
                report.refused_good += u64::from(!segment.failed);
                self.refused(index, 1, at);
            }
        }
        if n + 1 < segment.len() {
            self.begin(index, window, number, &segment, n + 1);
        }
    }

    fn ends(&mut self, happening: Happening, call: u64) {
        let Happening {
            at,
            row: index,
            window,
            ..
        } = happening;
        let Some(call) = self.under_way.remove(&call) else {
            return;
        };
        let (kind, stamp) = (KINDS[window], call.stamp);
        let row = &mut self.rows[index];
        row.report.failures += u64::from(call.failed);
        let seq = row
            .shadow
            .enter(kind, stamp.generation, at, call.failed, call.slow);
        row.report.late += u64::from(seq.is_none());
        let target = row.target;
        if kind == WindowKind::Connects {
            self.reachable.insert(target, !call.failed);
        }
        if seq.is_some() && (call.failed || call.slow) {
            if kind == WindowKind::Connects {
                self.count_traffic(at);
            }
            self.look(index, kind, at);
        }
        if !stamp.probe {
            return;
        }
        if kind == WindowKind::Connects && stamp.by_exchange && !call.failed {
            self.rows[index].probes.push_back(stamp.generation);
            return;
        }
        let outcome = if call.failed || call.slow {
            ProbeOutcome::Failure
        } else {
            ProbeOutcome::Success
        };
        let event = Event::ProbeEnded {
            row: id(index),
            generation: stamp.generation,
            outcome,
            last_seqs: self.rows[index].shadow.last_seqs(),
        };
        self.handle(index, event, at);
    }
}

/// Recorded refusals, spread over the time since those before them: a line a second says how many there
/// were, but the agent looks at their number more often.
fn spread(recorded: &[(Nanos, u64)]) -> Vec<(Nanos, u64)> {
    const PARTS: u64 = 4;
    let mut spread = Vec::with_capacity(recorded.len());
    let mut before = None;
    for &(at, count) in recorded {
        let since = before.map_or(Nanos::ZERO, |before| at - before);
        before = Some(at);
        if since > SPREAD_OVER || count < PARTS {
            spread.push((at, count));
            continue;
        }
        for part in 0..PARTS {
            let until = at - Nanos(since.0 / PARTS).times(PARTS - 1 - part);
            spread.push((until, count / PARTS + u64::from(part < count % PARTS)));
        }
    }
    spread
}

/// Good exchanges that may have been slow for a policy, and of which the recording does not say so.
fn may_be_slow(exchanges: &[Segment], slow_call: Option<Nanos>) -> u64 {
    let Some(slow_call) = slow_call else { return 0 };
    let unsure = exchanges
        .iter()
        .filter(|segment| !segment.failed && !segment.slow && segment.longest > slow_call);
    unsure.map(Segment::len).sum()
}
