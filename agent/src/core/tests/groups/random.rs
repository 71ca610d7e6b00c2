//! Any sequence of what can happen to the endpoints of names.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Op {
    Fail(u32),
    Names(u32, Vec<GroupId>),
    Configure(u32, Option<f64>),
    Trip(u32),
    HoldClosed(u32),
    Reset(u32),
    Forget(u32),
    Probe(u32, ProbeOutcome),
    Dial(u32),
    Wait(u64),
}

const ROWS: u32 = 5;

fn op() -> impl Strategy<Value = Op> {
    let row = || 0..ROWS;
    let outcome = prop_oneof![
        Just(ProbeOutcome::Success),
        Just(ProbeOutcome::Failure),
        Just(ProbeOutcome::Returned)
    ];
    let share = prop::option::weighted(0.9, prop_oneof![Just(0.5), 0.0..=1.0]);
    prop_oneof![
        30 => row().prop_map(Op::Fail),
        6 => (row(), prop::collection::vec(1..4u64, 0..3)).prop_map(|(r, g)| Op::Names(r, g)),
        4 => (row(), share).prop_map(|(r, share)| Op::Configure(r, share)),
        1 => row().prop_map(Op::Trip),
        1 => row().prop_map(Op::HoldClosed),
        2 => row().prop_map(Op::Reset),
        1 => row().prop_map(Op::Forget),
        8 => (row(), outcome).prop_map(|(r, outcome)| Op::Probe(r, outcome)),
        4 => row().prop_map(Op::Dial),
        6 => prop_oneof![0..3u64, 0..700u64].prop_map(Op::Wait),
    ]
}

/// What the shell knows: the names and the share of each row.
struct Known {
    names: BTreeMap<u32, BTreeSet<GroupId>>,
    shares: BTreeMap<u32, Option<f64>>,
}

impl Known {
    /// Whether nothing is open beyond its share, counted anew from states alone.
    fn check(&self, endpoints: &Endpoints) {
        for name in 1..4u64 {
            let members: Vec<u32> = self
                .names
                .iter()
                .filter(|(_, names)| names.contains(&name))
                .map(|(index, _)| *index)
                .collect();
            let is_own = |index: u32| {
                matches!(endpoints.state(index), State::Open | State::HalfOpen)
                    || endpoints.ramps(index)
            };
            let count = |is: &dyn Fn(u32) -> bool| members.iter().filter(|i| is(**i)).count();
            let own = count(&is_own);
            let any = count(&|index| is_own(index) || endpoints.state(index).refuses());
            for index in &members {
                // A ramp makes room for an operator's word.
                let open = if endpoints.ramps(*index) { any } else { own };
                let own = is_own(*index);
                let Some(Some(share)) = self.shares.get(index).filter(|_| own) else {
                    continue;
                };
                let most = ((members.len() as f64 * share + 1e-9) as usize).max(1);
                let fits = members.len() < 2 || open <= most;
                assert!(fits, "{open} of {members:?} are open, at most {most} may");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn no_more_than_the_share_is_ever_open(ops in prop::collection::vec(op(), 1..200)) {
        let mut endpoints = Endpoints::unnamed(ROWS);
        let mut known = Known { names: BTreeMap::new(), shares: BTreeMap::new() };
        for index in 0..ROWS {
            known.shares.insert(index, Some(0.5));
        }
        for op in ops {
            let before = endpoints.out.len();
            match op {
                Op::Fail(index) => {
                    if !endpoints.engine.contains(row(index)) {
                        endpoints.configure(index, known.shares[&index]);
                    }
                    endpoints.fail(index, 1);
                }
                Op::Names(index, groups) => {
                    endpoints.names(index, &groups);
                    known.names.insert(index, groups.into_iter().collect());
                }
                Op::Configure(index, share) => {
                    known.shares.insert(index, share);
                    endpoints.configure(index, share);
                    endpoints.handle(Event::Deadline);
                }
                Op::Trip(index) => endpoints.trip(index),
                Op::HoldClosed(index) => {
                    let (until, last_seqs) = (endpoints.now + secs(60), endpoints.last_seqs(index));
                    endpoints.handle(Event::HoldClosed { row: row(index), until, last_seqs });
                }
                Op::Reset(index) => endpoints.reset(index),
                Op::Forget(index) => {
                    endpoints.handle(Event::Forget { row: row(index) });
                    known.names.remove(&index);
                }
                Op::Probe(index, outcome) => {
                    let view = endpoints.engine.view(row(index), endpoints.now);
                    let generation = view.map_or(0, |view| view.generation);
                    let last_seqs = endpoints.last_seqs(index);
                    let row = row(index);
                    endpoints.handle(Event::ProbeStarted { row, generation });
                    endpoints.handle(Event::ProbeEnded { row, generation, outcome, last_seqs });
                }
                Op::Dial(index) => endpoints.handle(Event::DialEnded {
                    target: target(0x0a00_0001 + index),
                    success: true,
                }),
                Op::Wait(time) => {
                    endpoints.now = endpoints.now + secs(time);
                    endpoints.handle(Event::Deadline);
                }
            }
            known.check(&endpoints);
            // Who is bypassed passes everything.
            for index in endpoints.bypassed() {
                prop_assert_eq!(endpoints.state(index), State::Closed);
            }
            for action in &endpoints.out[before..] {
                if let Action::Bypassed { row, group, .. } = action {
                    prop_assert!(group.of >= 2 && group.open >= 1, "{:?} {:?}", row, group);
                }
            }
        }
    }

    #[test]
    fn the_share_of_whole_percents(of in 0..1000usize, percent in 0..=100usize) {
        let most = may_be_open(of, Some(percent as f64 / 100.0));
        let exact = if of < 2 { of } else { (of * percent / 100).max(1) };
        prop_assert_eq!(most, exact);
        prop_assert_eq!(may_be_open(of, None), of);
    }
}
