//! Any events in any order, against the reference model.

use std::collections::{BTreeMap, BTreeSet};

use agent_common::Verdict;
use agent_common::verdict::STATE_RAMP;
use proptest::prelude::*;

use super::evaluate::Truth;
use super::model::{Model, ModelRow};
use super::ops::{Op, POLICIES, ROWS, any_op, event_of, settings, target_of};
use super::*;

/// What the shell and the kernel know, built from actions alone.
#[derive(Default)]
struct Seen {
    verdicts: BTreeMap<u32, (Verdict, Nanos)>,
    states: BTreeMap<u32, State>,
    /// When a dial went out that has not been answered.
    in_flight: BTreeMap<DialTarget, Nanos>,
    last_dial: BTreeMap<DialTarget, Nanos>,
    /// Targets of which it was to be asked at once if they are there, since the last dial.
    asked: BTreeSet<DialTarget>,
    waiting_since: BTreeMap<DialTarget, Nanos>,
}

struct Driver {
    engine: Engine,
    model: Model,
    seen: Seen,
    now: Nanos,
    incarnations: [u32; ROWS as usize],
    /// Connects and exchanges of each row.
    rings: Vec<[Ring; 2]>,
    truth: Vec<[Vec<Truth>; 2]>,
    refused: [u64; ROWS as usize],
    policies: Vec<Arc<BreakerSettings>>,
    out: Vec<Action>,
}

impl Driver {
    fn new(seed: u64, policies: Vec<BreakerSettings>) -> Self {
        Self {
            engine: Engine::new(seed),
            model: Model::default(),
            seen: Seen::default(),
            now: secs(10_000),
            incarnations: [1; ROWS as usize],
            rings: (0..ROWS).map(|_| [Ring::new(), Ring::new()]).collect(),
            truth: vec![Default::default(); ROWS as usize],
            // The low half of the count, which alone is remembered, wraps on the way.
            refused: [u64::from(u32::MAX) - 100; ROWS as usize],
            policies: policies.into_iter().map(Arc::new).collect(),
            out: Vec::new(),
        }
    }

    fn id(&self, index: u32) -> RowId {
        RowId {
            index,
            incarnation: self.incarnations[index as usize],
        }
    }

    fn run(&mut self, op: &Op) {
        match *op {
            Op::Call { row, window, how } => {
                let ring = &mut self.rings[row as usize][window];
                match how {
                    Some(how) => ring.push_how(self.now, how),
                    None => ring.push_unwritten(),
                }
                self.truth[row as usize][window].push(how.map(|how| (self.now, how)));
                return;
            }
            Op::Wait(time) => {
                self.now = self.now + time;
                return;
            }
            Op::WaitForDeadline => {
                if let Some(at) = self.engine.next_deadline() {
                    self.now = self.now.max(at);
                }
                return self.run(&Op::Deadline);
            }
            Op::ClockGoesBack(time) => {
                // The engine has seen the present; what comes from the past happens now as well.
                self.run(&Op::Deadline);
                self.engine
                    .handle(Event::Deadline, self.now - time, &mut self.out);
                return self.run(&Op::Deadline);
            }
            Op::NewOwner { row } => {
                self.incarnations[row as usize] += 1;
                self.rings[row as usize] = [Ring::new(), Ring::new()];
                self.truth[row as usize] = Default::default();
                self.seen.verdicts.remove(&row);
                self.seen.states.remove(&row);
                self.model.rows.remove(&row);
            }
            Op::Refused { row, more } => self.refused[row as usize] += more,
            _ => {}
        }
        let generation = op.row().map_or(0, |row| {
            self.seen
                .verdicts
                .get(&row)
                .map_or(0, |(verdict, _)| verdict.generation)
        });
        let until = match *op {
            Op::Trip { time, .. } | Op::HoldClosed { time, .. } => self.now + time,
            _ => Nanos::ZERO,
        };
        let [connects, exchanges] = &self.rings[op.row().unwrap_or(0) as usize];
        let incarnations = self.incarnations;
        let id = |index: u32| RowId {
            index,
            incarnation: incarnations[index as usize],
        };
        let event = event_of(
            op,
            id,
            generation,
            until,
            self.refused[op.row().unwrap_or(0) as usize],
            [connects.last_seq, exchanges.last_seq],
            [&connects.window, &exchanges.window],
            &self.policies,
        )
        .expect("operations that are no events are handled above");
        self.engine.handle(event, self.now, &mut self.out);
        self.apply_to_model(op, generation, until);
        let in_flight = &self.seen.in_flight;
        let asks = |known: &&ModelRow| known.asks() && !in_flight.contains_key(&known.target);
        let asks = self.model.rows.values().filter(asks);
        self.seen.asked.extend(asks.map(|known| known.target));
        self.check_actions();
        self.check_rows();
        self.check_dials(matches!(op, Op::Deadline));
    }

    fn apply_to_model(&mut self, op: &Op, generation: u32, until: Nanos) {
        let now = self.now;
        let index = op.row().unwrap_or(0);
        let row = self.id(index);
        let truth = &self.truth[index as usize];
        let last_seqs = [truth[0].len() as u64, truth[1].len() as u64];
        match *op {
            Op::Configure { policy, .. } => {
                let settings = &self.policies[policy];
                let to = target_of(index);
                self.model.configure(row, to, settings, generation, now);
            }
            Op::NewOwner { .. } => {
                let to = target_of(index);
                self.model
                    .configure(row, to, &self.policies[0], generation, now);
            }
            Op::DialEnded {
                target: number,
                success,
            } => {
                self.seen.in_flight.remove(&target(number));
                self.model.redialled(target(number), success, now);
            }
            Op::Forget { .. } => {
                self.model.rows.remove(&index);
                self.seen.states.remove(&index);
                // The row is freed and, in this test, taken into use again by the same owner: a
                // fresh row passes everything.
                if let Some((verdict, until)) = self.seen.verdicts.get_mut(&index) {
                    verdict.state = State::Closed.verdict_state();
                    verdict.flags = 0;
                    *until = Nanos::ZERO;
                }
            }
            Op::Deadline => self.model.deadline(now),
            _ => {
                let hinted = self.model.rows.iter().any(|(other, known)| {
                    *other != index && known.target == target_of(index) && known.is_a_hint()
                });
                let Some(known) = self.model.at(row, now) else {
                    return;
                };
                match *op {
                    Op::Look { kind, .. } => {
                        let window = usize::from(kind == WindowKind::Exchanges);
                        known.calls(kind, &truth[window], hinted, now);
                    }
                    Op::ProbeStarted { late, .. } => {
                        known.probe_started(generation.wrapping_sub(late), now);
                    }
                    Op::ProbeEnded { late, outcome, .. } => {
                        let generation = generation.wrapping_sub(late);
                        known.probe_ended(generation, outcome, last_seqs, now);
                    }
                    Op::Refused { .. } => known.refused(self.refused[index as usize], now),
                    Op::Trip { .. } => known.force(State::ForcedOpen, until, last_seqs),
                    Op::HoldClosed { .. } => known.force(State::ForcedClosed, until, last_seqs),
                    Op::Reset { .. } => known.reset(last_seqs, now),
                    _ => unreachable!("not about a known row"),
                }
            }
        }
    }

    fn check_actions(&mut self) {
        for action in std::mem::take(&mut self.out) {
            match action {
                Action::SetVerdict {
                    row,
                    verdict,
                    until,
                    probe_limit,
                } => {
                    assert_eq!(row, self.id(row.index), "a verdict for a former owner");
                    let last = self
                        .seen
                        .verdicts
                        .insert(row.index, (verdict, until))
                        .map_or(Verdict::default(), |(verdict, _)| verdict);
                    // A ramp ends, or is told another errno, under its own generation.
                    if verdict.generation != last.generation {
                        let next = last.generation + 1;
                        assert_eq!(verdict.generation, next, "generations go up by one");
                    } else {
                        assert_eq!(last.state, STATE_RAMP);
                        let goes_on = [STATE_RAMP, State::Closed.verdict_state()];
                        assert!(goes_on.contains(&verdict.state));
                    }
                    assert!(probe_limit > 0);
                }
                Action::Transition {
                    row,
                    from,
                    to,
                    generation,
                    ..
                } => {
                    assert_eq!(row, self.id(row.index), "a transition of a former owner");
                    let last = self.seen.states.insert(row.index, to);
                    assert_eq!(last.unwrap_or(State::Closed), from);
                    assert_ne!(from, to);
                    assert_eq!(self.seen.verdicts[&row.index].0.generation, generation);
                }
                Action::Bypassed { .. } => panic!("no row has a name"),
                Action::Redialled { row, .. } => assert_eq!(row, self.id(row.index)),
                Action::Correlated(_) => panic!("two addresses are not many"),
                Action::Dial { target } => {
                    let waiting =
                        |known: &ModelRow| known.target == target && known.waits_for_redial();
                    assert!(self.model.rows.values().any(waiting), "nobody waits for it");
                    let last = self.seen.last_dial.insert(target, self.now);
                    // Whether a server is there at all is asked at once.
                    let hurries = self.seen.asked.remove(&target);
                    assert!(hurries || last.is_none_or(|at| self.now - at >= millis(400)));
                    let flying = self.seen.in_flight.insert(target, self.now);
                    assert!(flying.is_none_or(|at| self.now - at >= DIAL_WRITE_OFF));
                }
            }
        }
    }

    fn check_rows(&mut self) {
        for index in 0..ROWS {
            let row = self.id(index);
            let view = self.engine.view(row, self.now);
            let Some(known) = self.model.get(row) else {
                assert_eq!(view, None, "row {index} should be unknown");
                assert!(self.engine.evictable(row) && !self.engine.contains(row));
                self.seen.states.remove(&index);
                continue;
            };
            let view = view.unwrap_or_else(|| panic!("row {index} should be known"));
            assert!(self.engine.contains(row));
            if let Some((low, high)) = known.until_range.take() {
                let until = view.next_probe_at.expect("open after a failed probe");
                assert!((low..=high).contains(&until), "{low:?} {until:?} {high:?}");
                known.until = until;
            }
            let forced = matches!(known.state, State::ForcedOpen | State::ForcedClosed);
            let open = known.state == State::Open;
            assert_eq!(view.state, known.state, "row {index}");
            assert_eq!(view.generation, known.generation, "row {index}");
            assert_eq!(view.cooldown, known.cooldown, "row {index}");
            assert_eq!(view.floors, known.floors, "row {index}");
            let closed = known.state == State::Closed;
            assert_eq!(view.ramp_until, known.ramp_until.filter(|_| closed));
            if matches!(view.state, State::Open | State::HalfOpen) {
                assert_eq!(view.reason.window, known.opened_on, "row {index}");
            }
            assert_eq!(view.next_probe_at, open.then_some(known.until));
            assert_eq!(view.manual_until, forced.then_some(known.until));
            assert_eq!(view.next_redial_at.is_some(), known.waits_for_redial());
            assert_eq!(view.reason == Reason::NONE, view.state == State::Closed);
            assert_eq!(self.engine.state(row), Some(view.state));
            let evictable = matches!(view.state, State::Closed | State::HalfOpen);
            assert_eq!(self.engine.evictable(row), evictable);
            assert_eq!(
                self.seen
                    .states
                    .get(&index)
                    .copied()
                    .unwrap_or(State::Closed),
                view.state,
                "transitions tell the whole story"
            );
            if let Some(&(verdict, until)) = self.seen.verdicts.get(&index) {
                assert_eq!(verdict.generation, view.generation);
                let state = match known.ramp_until {
                    Some(_) if view.state == State::Closed => STATE_RAMP,
                    _ if known.tries() => State::HalfOpen.verdict_state(),
                    _ => view.state.verdict_state(),
                };
                assert_eq!(verdict.state, state);
                let by_exchange = (view.state == State::HalfOpen || known.tries())
                    && known.opened_on == WindowKind::Exchanges;
                assert_eq!(verdict.flags, u8::from(by_exchange));
                match view.state {
                    State::Open | State::ForcedOpen => {
                        assert_eq!(until, known.until + VERDICT_SLACK);
                    }
                    State::HalfOpen => {
                        assert_eq!(until, known.round_limit + VERDICT_SLACK);
                    }
                    State::Closed => assert_eq!(until, known.ramp_until.unwrap_or_default()),
                    State::ForcedClosed => assert_eq!(until, Nanos::ZERO),
                }
            }
        }
    }

    fn check_dials(&mut self, after_deadline: bool) {
        for number in 0..2 {
            let to = target(number);
            let waiting = self
                .model
                .rows
                .values()
                .any(|known| known.target == to && known.waits_for_redial());
            if !waiting {
                self.seen.waiting_since.remove(&to);
                continue;
            }
            let since = *self.seen.waiting_since.entry(to).or_insert(self.now);
            if after_deadline && !self.seen.in_flight.contains_key(&to) {
                let last = self.seen.last_dial.get(&to).copied().unwrap_or(since);
                let idle = self.now - last.max(since);
                assert!(idle < millis(4800), "not dialled for {idle:?}");
            }
        }
    }

    /// Every state has a way out that needs nothing but time and a destination that works.
    fn everything_closes(&mut self) {
        for _ in 0..2000 {
            let open = (0..ROWS).find_map(|index| {
                let view = self.engine.view(self.id(index), self.now)?;
                (view.state != State::Closed).then_some((index, view.state))
            });
            match open {
                None => return,
                Some((row, State::HalfOpen)) => self.run(&Op::ProbeEnded {
                    row,
                    late: 0,
                    outcome: ProbeOutcome::Success,
                }),
                Some(_) => self.run(&Op::WaitForDeadline),
            }
        }
        panic!("something never closed");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn does_what_the_model_does(
        seed: u64,
        policies in prop::collection::vec(settings(), POLICIES),
        ops in prop::collection::vec(any_op(), 1..250),
    ) {
        let mut driver = Driver::new(seed, policies);
        for row in 0..ROWS {
            driver.run(&Op::Configure { row, policy: 0 });
        }
        for op in &ops {
            driver.run(op);
        }
        driver.everything_closes();
    }

    #[test]
    fn the_same_events_give_the_same_actions(
        seed: u64,
        policies in prop::collection::vec(settings(), POLICIES),
        ops in prop::collection::vec(any_op(), 1..100),
    ) {
        let (mut one, mut two) = (Driver::new(seed, policies.clone()), Driver::new(seed, policies));
        for op in &ops {
            one.run(op);
            two.run(op);
            prop_assert_eq!(&one.seen.verdicts, &two.seen.verdicts);
            prop_assert_eq!(&one.seen.last_dial, &two.seen.last_dial);
        }
    }
}
