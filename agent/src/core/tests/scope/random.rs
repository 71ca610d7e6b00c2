//! Any sequence of what can happen to rows that share a breaker.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Op {
    Fail(u32),
    Connect(u32),
    ProbeEnds(ProbeOutcome),
    Dial(u32),
    Wait(u64),
    Trip(u32),
    Reset(u32),
    Forget(u32),
    Scope(u32, bool),
}

const ROWS: u32 = 4;

fn op() -> impl Strategy<Value = Op> {
    let row = || 0..ROWS;
    let outcome = prop_oneof![
        4 => Just(ProbeOutcome::Success),
        2 => Just(ProbeOutcome::Failure),
        1 => Just(ProbeOutcome::Returned),
    ];
    prop_oneof![
        20 => row().prop_map(Op::Fail),
        20 => row().prop_map(Op::Connect),
        16 => outcome.prop_map(Op::ProbeEnds),
        8 => row().prop_map(Op::Dial),
        8 => prop_oneof![0..3u64, 0..40u64].prop_map(Op::Wait),
        1 => row().prop_map(Op::Trip),
        1 => row().prop_map(Op::Reset),
        1 => row().prop_map(Op::Forget),
        2 => (row(), prop::bool::weighted(0.8)).prop_map(|(r, node)| Op::Scope(r, node)),
    ]
}

impl Node {
    fn run(&mut self, op: &Op, members: &mut BTreeMap<u32, bool>) {
        match *op {
            Op::Fail(index) => {
                if !self.engine.contains(row(index)) {
                    self.configure(index, shared());
                    members.insert(index, true);
                }
                self.fail(index, 1);
            }
            Op::Connect(index) => {
                let passes = self.connect(index);
                let verdict = self.verdicts.get(&index).copied().unwrap_or_default();
                // With the slot claimed, nobody else has one to offer.
                if passes && verdict.state == STATE_HALF_OPEN && members.get(&index) == Some(&true)
                {
                    for (other, verdict) in &self.verdicts {
                        let is_member = members.get(other) == Some(&true);
                        let offers = *other != index && verdict.state == STATE_HALF_OPEN;
                        assert!(!(is_member && offers), "{other} offers one beside {index}");
                    }
                }
            }
            Op::ProbeEnds(outcome) => self.probe_ends(outcome),
            Op::Dial(index) => self.answered_dial(index),
            Op::Wait(time) => self.pass(secs(time)),
            Op::Trip(index) => self.trip(index),
            Op::Reset(index) => self.reset(index),
            Op::Forget(index) => {
                self.handle(Event::Forget { row: row(index) });
                // The row is freed; the next owner passes everything.
                self.verdicts.remove(&index);
                members.insert(index, false);
            }
            Op::Scope(index, node) => {
                let settings = BreakerSettings {
                    node_scope: node,
                    ..BreakerSettings::default()
                };
                self.configure(index, settings);
                members.insert(index, node);
            }
        }
    }

    /// All members that no operator has spoken about are open together, or none is; one leads.
    fn check(&self, members: &BTreeMap<u32, bool>) {
        let mut leaders = Vec::new();
        let mut states = Vec::new();
        for (&index, &is_member) in members {
            let Some(view) = self.engine.view(row(index), self.now) else {
                continue;
            };
            let own = matches!(view.state, State::Open | State::HalfOpen);
            if !is_member {
                assert_eq!(view.follows, None, "{index} is no member");
                continue;
            }
            if own && view.follows.is_none() {
                leaders.push(index);
            }
            match view.state {
                State::Open | State::HalfOpen => states.push((index, true)),
                State::Closed => states.push((index, false)),
                State::ForcedOpen | State::ForcedClosed => assert_eq!(view.follows, None),
            }
        }
        let any_open = states.iter().any(|(_, open)| *open);
        assert!(
            states.iter().all(|(_, open)| *open == any_open),
            "{states:?}"
        );
        assert_eq!(
            leaders.len(),
            usize::from(any_open),
            "{leaders:?} {states:?}"
        );
        for index in members.keys().filter(|index| members[index]) {
            let follows = self.follows(*index);
            assert!(follows.is_none_or(|leader| leaders == [leader]));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn members_open_and_close_together(ops in prop::collection::vec(op(), 1..200)) {
        let mut node = Node::new(ROWS);
        let mut members: BTreeMap<u32, bool> = (0..ROWS).map(|index| (index, true)).collect();
        for op in &ops {
            node.run(op, &mut members);
            node.check(&members);
        }
        // Every state has an exit: with a destination that works, all close.
        for _ in 0..300 {
            node.pass(secs(10));
            for index in 0..ROWS {
                node.connect(index);
                node.probe_ends(ProbeOutcome::Success);
            }
            node.check(&members);
            if node.states().iter().all(|state| *state == State::Closed) {
                return Ok(());
            }
        }
        prop_assert!(false, "{:?}", node.states());
    }
}
