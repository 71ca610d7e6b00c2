//! Rule 16 where several workloads call: one that fails at everything keeps the breakers of no other
//! closed.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;
use crate::core::correlated::Correlation;

/// So much of a window must fail that the breaker should open.
const ENOUGH: u32 = 5;

/// A node with one row for each destination, which belongs to a workload.
struct Node {
    engine: Engine,
    workloads: Vec<Workload>,
    rings: Vec<Ring>,
    now: Nanos,
    out: Vec<Action>,
}

impl Node {
    /// So many destinations of each of these workloads; no address is that of two.
    fn new(workloads: &[(Workload, usize)]) -> Self {
        let whose: Vec<Workload> = workloads
            .iter()
            .flat_map(|(workload, count)| std::iter::repeat_n(*workload, *count))
            .collect();
        let mut node = Self {
            engine: Engine::new(1),
            rings: whose.iter().map(|_| Ring::new()).collect(),
            workloads: whose,
            now: secs(1000),
            out: Vec::new(),
        };
        let settings = Arc::new(BreakerSettings::default());
        for (index, workload) in (0..).zip(node.workloads.clone()) {
            let event = Event::Configure {
                row: row(index),
                target: target(0x0a00_0001 + index),
                settings: Arc::clone(&settings),
                generation: 0,
            };
            node.engine.handle(event, node.now, &mut node.out);
            node.engine.belongs(row(index), workload);
        }
        node.count();
        node
    }

    /// All of them have traffic.
    fn count(&mut self) {
        let rows = (0_u32..).zip(self.workloads.iter().copied());
        let traffic = Traffic::of(rows);
        self.engine.traffic(traffic, self.now, &mut self.out);
    }

    fn fail(&mut self, index: u32, times: u32) {
        for _ in 0..times {
            let ring = &mut self.rings[index as usize];
            ring.push(self.now, true);
            let event = Event::Calls {
                row: row(index),
                kind: WindowKind::Connects,
                last_seq: ring.last_seq,
                window: &ring.window,
            };
            self.engine.handle(event, self.now, &mut self.out);
        }
    }

    /// Goes on for so long, while all of these fail once a second.
    fn go_on(&mut self, seconds: u64, failing: &[u32]) {
        for _ in 0..seconds {
            let end = self.now + secs(1);
            while let Some(at) = self.engine.next_deadline()
                && at <= end
            {
                self.now = self.now.max(at);
                self.engine.handle(Event::Deadline, self.now, &mut self.out);
            }
            self.now = end;
            self.count();
            for index in failing {
                self.fail(*index, 1);
            }
        }
    }

    fn state(&self, index: u32) -> State {
        self.engine.state(row(index)).unwrap_or(State::Closed)
    }

    fn is_held(&self, index: u32) -> bool {
        let view = self.engine.view(row(index), self.now).unwrap();
        view.bypassed == Some(Bypass::Correlated) && view.state == State::Closed
    }

    /// Of each change, whether it is a beginning.
    fn said(&self) -> Vec<bool> {
        let said = |action: &Action| match action {
            Action::Correlated(change) => Some(change.begins),
            _ => None,
        };
        self.out.iter().filter_map(said).collect()
    }
}

/// Workload 1 scans twelve dead addresses; of the six that workload 2 calls one is down.
#[test]
fn who_scans_keeps_no_breaker_of_another_closed() {
    let mut node = Node::new(&[(1, 12), (2, 6)]);
    for index in 0..12 {
        node.fail(index, 1);
    }
    node.go_on(1, &[]);
    assert_eq!(node.said(), [true]);
    assert_eq!(node.engine.correlated_within(), Some(1));
    node.fail(12, ENOUGH);
    assert_eq!(node.state(12), State::Open, "it is down, and nothing else");
    for index in 0..12 {
        node.fail(index, ENOUGH);
        assert!(node.is_held(index), "{index}");
    }
    // However long it goes on.
    let all: Vec<u32> = (0..12).collect();
    node.go_on(30, &all);
    node.fail(13, ENOUGH);
    assert_eq!(node.state(13), State::Open);
    assert_eq!(node.said(), [true], "once");
}

/// Even where the other one calls nothing else.
#[test]
fn one_or_two_addresses_of_others_prove_no_fault_of_the_node() {
    let mut node = Node::new(&[(1, 12), (2, 2)]);
    for index in 0..12 {
        node.fail(index, 1);
    }
    node.go_on(1, &[]);
    for index in [12, 13] {
        node.fail(index, ENOUGH);
        assert_eq!(node.state(index), State::Open);
    }
    assert_eq!(node.engine.correlated_within(), Some(1));
}

#[test]
fn a_fault_of_the_node_holds_back_every_workload_that_shows_it() {
    let mut node = Node::new(&[(1, 3), (2, 3), (3, 2), (4, 1)]);
    for index in (0..6).chain([8]) {
        node.fail(index, 1);
    }
    assert_eq!(node.engine.correlated_within(), None);
    for index in (0..6).chain([8]) {
        node.fail(index, ENOUGH);
        assert!(node.is_held(index), "{index}");
    }
    // One of two: that workload is well, but for this one.
    node.fail(6, ENOUGH);
    assert_eq!(node.state(6), State::Open);
}

#[test]
fn that_others_fail_too_is_said_once() {
    let mut node = Node::new(&[(1, 8), (2, 4)]);
    for index in 0..8 {
        node.fail(index, 1);
    }
    assert_eq!(node.engine.correlated_within(), Some(1));
    node.go_on(1, &[]);
    let (mine, all): (Vec<u32>, Vec<u32>) = ((0..8).collect(), (0..12).collect());
    node.go_on(2, &all);
    assert_eq!(node.said(), [true, true]);
    assert_eq!(node.engine.correlated_within(), None);
    // The others are well again, and then are not: no news.
    node.go_on(12, &mine);
    assert_eq!(node.engine.correlated_within(), Some(1));
    node.go_on(2, &all);
    assert_eq!(node.said(), [true, true]);
    node.go_on(20, &[]);
    assert_eq!(node.said(), [true, true, false]);
}

/// The count may be older than what the others call.
#[test]
fn that_others_are_well_is_said_once_it_is_known() {
    let mut node = Node::new(&[(1, 8), (2, 4)]);
    node.engine.traffic(0, node.now, &mut node.out);
    let mine: Vec<u32> = (0..8).collect();
    for index in &mine {
        node.fail(*index, 1);
    }
    assert_eq!(
        (node.said(), node.engine.correlated_within()),
        (vec![true], None)
    );
    node.go_on(5, &mine);
    assert_eq!(node.said(), [true, true]);
    assert_eq!(node.engine.correlated_within(), Some(1));
}

/// Each workload is let go when it has been well for ten seconds, though another goes on.
#[test]
fn a_workload_that_is_well_again_is_let_go() {
    let mut node = Node::new(&[(1, 8), (2, 4)]);
    let (mine, all): (Vec<u32>, Vec<u32>) = ((0..8).collect(), (0..12).collect());
    node.go_on(8, &all);
    assert!(node.is_held(0) && node.is_held(8));
    // Its failures count for five seconds, and then it is to be calm for ten.
    node.go_on(13, &mine);
    assert!(node.is_held(8));
    node.go_on(4, &mine);
    assert!(node.is_held(0) && !node.is_held(8));
    node.fail(8, ENOUGH);
    assert_eq!(node.state(8), State::Open);
}

/// What two workloads call is exclusive to neither, and what one calls from two namespaces is one.
#[test]
fn what_traffic_is_made_of() {
    let rows = [(1, 7), (1, 7), (1, 8), (2, 7), (3, 9)];
    let traffic = Traffic::of(rows);
    assert_eq!(traffic.destinations, 3);
    let share = |destinations, exclusive| Share {
        destinations,
        exclusive,
    };
    let expected = [(7, share(2, 1)), (8, share(1, 0)), (9, share(1, 1))];
    assert_eq!(traffic.workloads, expected.into());
    assert_eq!(Traffic::of::<u8>([]), Traffic::from(0));
}

/// The rules as they are written, over everything that ever failed.
#[derive(Default)]
struct Model {
    failures: Vec<(Nanos, Workload, u32)>,
    seen: Option<Nanos>,
    held: BTreeMap<Workload, Nanos>,
}

impl Model {
    fn look(&mut self, rows: &BTreeSet<(u32, Workload)>, now: Nanos) {
        let fresh: BTreeSet<(u32, Workload)> = self
            .failures
            .iter()
            .filter(|(at, ..)| now - *at <= secs(5))
            .map(|(_, workload, place)| (*place, *workload))
            .collect();
        // Of these workloads: destinations that fail, and all.
        let of = |is: &dyn Fn(Workload) -> bool| {
            let places = |rows: &BTreeSet<(u32, Workload)>| {
                let of_them = rows.iter().filter(|(_, workload)| is(*workload));
                of_them.map(|(place, _)| *place).collect::<BTreeSet<_>>()
            };
            (places(&fresh).len(), places(rows).len())
        };
        let too_many = |(failing, all): (usize, usize)| failing * 10 > all * 6;
        let node = of(&|_| true);
        if node.1 >= 5 && too_many(node) && node.0 >= 3 {
            self.seen = Some(now);
            let all: BTreeSet<Workload> = fresh.iter().map(|(_, workload)| *workload).collect();
            let mut worst = None;
            for workload in &all {
                let failing = of(&|one| one == *workload).0;
                if worst.is_none_or(|(_, most)| failing > most) {
                    worst = Some((*workload, failing));
                }
            }
            let (worst, _) = worst.expect("somebody fails");
            let others = of(&|one| one != worst);
            let only = !(too_many(others) && others.0 >= 3);
            for workload in all {
                if too_many(of(&|one| one == workload)) && (!only || workload == worst) {
                    self.held.insert(workload, now);
                }
            }
        } else if self.seen.is_some_and(|seen| now - seen >= secs(10)) {
            self.seen = None;
        }
        self.held.retain(|_, seen| now - *seen < secs(10));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever fails wherever, the same workloads are held back as by the rules as they are written.
    #[test]
    fn as_the_rules_say(
        rows in prop::collection::btree_set((0u32..10, 1u64..4), 5..14),
        steps in prop::collection::vec((any::<prop::sample::Index>(), 1usize..8, 0u64..3_000), 1..60),
    ) {
        let mut engine = Correlation::default();
        let mut model = Model::default();
        let rows_in_order: Vec<_> = rows.iter().copied().collect();
        let mut now = secs(1000);
        for (first, count, wait) in steps {
            now = now + millis(wait);
            engine.count(Traffic::of(rows.iter().copied()), now);
            model.look(&rows, now);
            for n in 0..count {
                let (place, workload) =
                    rows_in_order[(first.index(rows.len()) + n) % rows.len()];
                engine.failed(target(0x0a00_0001 + place), workload, now, now);
                engine.look(now);
                model.failures.push((now, workload, place));
                model.look(&rows, now);
            }
            for workload in 1..4 {
                prop_assert_eq!(
                    engine.holds(workload),
                    model.held.contains_key(&workload),
                    "workload {}", workload
                );
            }
            prop_assert_eq!(engine.deadline().is_some(), model.seen.is_some() || !model.held.is_empty());
        }
    }
}
