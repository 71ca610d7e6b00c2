//! `scope = "node"`: one breaker for all workloads that call a destination (rule 1).

use std::collections::BTreeMap;

use agent_common::{Verdict, verdict::STATE_HALF_OPEN};

use super::*;

mod random;

/// Rows of as many workloads to one destination, and what the kernel would do with their verdicts.
struct Node {
    engine: Engine,
    rings: Vec<Ring>,
    now: Nanos,
    out: Vec<Action>,
    verdicts: BTreeMap<u32, Verdict>,
    /// Probes that began under a verdict, and have not ended.
    probes: Vec<(u32, u32)>,
    taken: BTreeMap<u32, u32>,
    dials: u32,
}

fn shared() -> BreakerSettings {
    BreakerSettings {
        node_scope: true,
        ..BreakerSettings::default()
    }
}

impl Node {
    fn new(workloads: u32) -> Self {
        let mut node = Self {
            engine: Engine::new(1),
            rings: (0..workloads).map(|_| Ring::new()).collect(),
            now: secs(1000),
            out: Vec::new(),
            verdicts: BTreeMap::new(),
            probes: Vec::new(),
            taken: BTreeMap::new(),
            dials: 0,
        };
        for index in 0..workloads {
            node.configure(index, shared());
        }
        node
    }

    fn handle(&mut self, event: Event<'_>) {
        self.engine.handle(event, self.now, &mut self.out);
        for action in std::mem::take(&mut self.out) {
            match action {
                Action::SetVerdict { row, verdict, .. } => {
                    let before = self.verdicts.insert(row.index, verdict);
                    if before.map(|verdict| verdict.generation) != Some(verdict.generation) {
                        self.taken.insert(row.index, 0);
                    }
                }
                Action::Dial { .. } => self.dials += 1,
                Action::Transition { from, to, .. } => assert_ne!(from, to),
                Action::Bypassed { .. } | Action::Correlated(_) | Action::Redialled { .. } => {}
            }
        }
    }

    fn configure(&mut self, index: u32, settings: BreakerSettings) {
        let generation = self.verdicts.get(&index).map_or(0, |v| v.generation);
        self.handle(Event::Configure {
            row: row(index),
            // Each in a namespace of its own.
            target: DialTarget {
                netns_cookie: 100 + u64::from(index),
                ..target(0x0a00_0001)
            },
            settings: Arc::new(settings),
            generation,
        });
    }

    fn last_seqs(&self, index: u32) -> [u64; 2] {
        [self.rings[index as usize].last_seq, 0]
    }

    fn fail(&mut self, index: u32, times: u32) {
        for _ in 0..times {
            // The kernel enters nothing while it refuses.
            if self.state(index).refuses() {
                return;
            }
            self.rings[index as usize].push(self.now, true);
            let ring = &self.rings[index as usize];
            let (last_seq, window) = (ring.last_seq, ring.window);
            self.handle(Event::Calls {
                row: row(index),
                kind: WindowKind::Connects,
                last_seq,
                window: &window,
            });
        }
    }

    /// A connect: whether it passes, as a probe or otherwise.
    fn connect(&mut self, index: u32) -> bool {
        let verdict = self.verdicts.get(&index).copied().unwrap_or_default();
        if verdict.state != STATE_HALF_OPEN {
            return !self.state(index).refuses();
        }
        let taken = self.taken.entry(index).or_default();
        if *taken >= 1 {
            return false;
        }
        *taken += 1;
        self.probes.push((index, verdict.generation));
        let generation = verdict.generation;
        self.handle(Event::ProbeStarted {
            row: row(index),
            generation,
        });
        true
    }

    fn probe_ends(&mut self, outcome: ProbeOutcome) {
        let Some((index, generation)) = self.probes.pop() else {
            return;
        };
        let last_seqs = self.last_seqs(index);
        if outcome == ProbeOutcome::Returned
            && self.verdicts.get(&index).map(|verdict| verdict.generation) == Some(generation)
            && let Some(taken) = self.taken.get_mut(&index)
        {
            *taken = taken.saturating_sub(1);
        }
        self.handle(Event::ProbeEnded {
            row: row(index),
            generation,
            outcome,
            last_seqs,
        });
    }

    fn answered_dial(&mut self, index: u32) {
        self.handle(Event::DialEnded {
            target: DialTarget {
                netns_cookie: 100 + u64::from(index),
                ..target(0x0a00_0001)
            },
            success: true,
        });
    }

    fn pass(&mut self, time: Nanos) {
        let end = self.now + time;
        while let Some(at) = self.engine.next_deadline()
            && at <= end
        {
            self.now = self.now.max(at);
            self.handle(Event::Deadline);
        }
        self.now = end;
    }

    fn trip(&mut self, index: u32) {
        let (until, last_seqs) = (self.now + secs(60), self.last_seqs(index));
        self.handle(Event::Trip {
            row: row(index),
            until,
            last_seqs,
        });
    }

    fn reset(&mut self, index: u32) {
        let last_seqs = self.last_seqs(index);
        self.handle(Event::Reset {
            row: row(index),
            last_seqs,
        });
    }

    fn state(&self, index: u32) -> State {
        self.engine.state(row(index)).unwrap_or(State::Closed)
    }

    fn states(&self) -> Vec<State> {
        (0..self.rings.len() as u32)
            .map(|index| self.state(index))
            .collect()
    }

    fn follows(&self, index: u32) -> Option<u32> {
        let view = self.engine.view(row(index), self.now)?;
        view.follows.map(|leader| leader.index)
    }
}

#[test]
fn what_opens_for_one_refuses_all() {
    let mut node = Node::new(3);
    node.fail(1, 5);
    assert_eq!(node.states(), [State::Open; 3]);
    assert_eq!([0, 1, 2].map(|i| node.follows(i)), [Some(1), None, Some(1)]);
    let view = node.engine.view(row(0), node.now).unwrap();
    assert_eq!(view.reason.kind, ReasonKind::ConsecutiveFailures);
    // One that comes later, too.
    node.rings.push(Ring::new());
    node.configure(3, shared());
    assert_eq!(node.state(3), State::Open);
    for index in 0..4 {
        assert!(!node.connect(index));
    }
}

#[test]
fn one_dials_for_all() {
    let mut node = Node::new(10);
    node.fail(0, 5);
    node.pass(secs(2));
    assert_eq!(node.dials, 1, "the first one is not answered yet");
    node.answered_dial(0);
    assert_eq!(node.state(0), State::HalfOpen);
    // What is shown of the others stays open: no event for each of them.
    assert_eq!(node.state(1), State::Open);
}

#[test]
fn one_probe_for_all_and_whoever_calls_may_be_it() {
    let mut node = Node::new(3);
    node.fail(0, 5);
    node.answered_dial(0);
    // The workload that opened it calls no more.
    assert!(node.connect(2));
    for index in 0..3 {
        assert!(!node.connect(index), "{index}: the slot is taken");
    }
    assert_eq!([0, 1, 2].map(|i| node.follows(i)), [Some(2), Some(2), None]);
    node.probe_ends(ProbeOutcome::Success);
    // The next one, of another workload; then all close together.
    assert!(node.connect(1));
    assert!(!node.connect(2));
    node.probe_ends(ProbeOutcome::Success);
    assert_eq!(node.states(), [State::Closed; 3]);
    for index in 0..3 {
        let view = node.engine.view(row(index), node.now).unwrap();
        assert!(view.ramp_until.is_some(), "{index}");
    }
}

/// What `status` says of a row whose breaker is another one's.
#[test]
fn a_follower_knows_whose_the_probe_is() {
    let mut node = Node::new(3);
    let shown = |node: &Node| {
        [0, 1, 2].map(|index| {
            let view = node.engine.view(row(index), node.now).unwrap();
            (view.shared_probe, view.awaits_probe)
        })
    };
    node.fail(0, 5);
    assert_eq!(shown(&node), [(None, false); 3]);
    node.answered_dial(0);
    let free = (Some(SharedProbe::Free), false);
    assert_eq!(shown(&node), [(None, true), free, free]);
    assert!(node.connect(2));
    let taken = (Some(SharedProbe::Taken), false);
    assert_eq!(shown(&node), [taken, taken, (None, false)]);
    node.probe_ends(ProbeOutcome::Success);
    assert_eq!(shown(&node), [free, free, (None, true)]);
    assert!(node.connect(0));
    node.probe_ends(ProbeOutcome::Failure);
    assert_eq!(shown(&node), [(None, false); 3]);
}

/// Whichever row comes first: the next connect of any of them is a probe.
#[test]
fn half_open_together_they_are_so_after_a_restart() {
    for order in [[0, 1, 2], [2, 1, 0], [1, 0, 2]] {
        let mut before = Node::new(3);
        before.fail(0, 5);
        before.pass(secs(31));
        let saved = order.map(|index| (index, before.engine.save(row(index)).unwrap()));
        let mut node = Node::new(0);
        node.now = before.now + secs(1);
        node.rings = before.rings;
        let settings = Arc::new(shared());
        for (index, saved) in saved {
            let target = DialTarget {
                netns_cookie: 100 + u64::from(index),
                ..target(0x0a00_0001)
            };
            let (now, mut out) = (node.now, Vec::new());
            node.engine.restore(
                row(index),
                target,
                Arc::clone(&settings),
                &saved,
                now,
                &mut out,
            );
            for action in out {
                if let Action::SetVerdict { row, verdict, .. } = action {
                    node.verdicts.insert(row.index, verdict);
                }
            }
        }
        assert!(node.connect(2), "{order:?}");
        assert!(!node.connect(0) && !node.connect(1), "{order:?}");
        node.probe_ends(ProbeOutcome::Success);
        assert!(node.connect(0), "{order:?}");
        node.probe_ends(ProbeOutcome::Success);
        assert_eq!(node.states(), [State::Closed; 3], "{order:?}");
    }
}

/// Since when, as `status` says it: a follower is half-open as long as the one that it follows.
#[test]
fn rows_that_share_have_been_so_for_as_long() {
    let mut node = Node::new(3);
    node.fail(0, 5);
    node.pass(secs(31));
    let since = |node: &Node| {
        [0, 1, 2].map(|index| node.now - node.engine.view(row(index), node.now).unwrap().since)
    };
    assert_eq!(since(&node), [since(&node)[0]; 3]);
    assert!(since(&node)[0] < secs(5));
    node.pass(secs(2));
    assert!(node.connect(2));
    assert_eq!(since(&node), [since(&node)[0]; 3]);
    assert!(since(&node)[0] >= secs(2));
}

#[test]
fn a_probe_that_fails_keeps_all_open_for_twice_as_long() {
    let mut node = Node::new(2);
    node.fail(0, 5);
    node.pass(secs(30));
    assert!(node.connect(1));
    node.probe_ends(ProbeOutcome::Failure);
    assert_eq!(node.states(), [State::Open; 2]);
    for index in 0..2 {
        let view = node.engine.view(row(index), node.now).unwrap();
        let left = view.next_probe_at.unwrap() - node.now;
        assert!(left >= secs(54), "{index}: {left:?}");
        assert_eq!(view.cooldown, secs(60));
    }
}

#[test]
fn a_probe_that_says_nothing_is_offered_again_to_all() {
    let mut node = Node::new(2);
    node.fail(0, 5);
    node.pass(secs(30));
    assert!(node.connect(1));
    node.probe_ends(ProbeOutcome::Returned);
    // Its slot is free again, and when its time is over, every one's.
    assert!(node.connect(1));
    assert!(!node.connect(0));
    node.pass(secs(20));
    assert!(node.connect(0));
}

#[test]
fn loopback_is_not_shared() {
    let mut node = Node::new(2);
    for index in 0..2 {
        node.handle(Event::Forget { row: row(index) });
        node.handle(Event::Configure {
            row: row(index),
            target: DialTarget {
                addr: agent_common::key::mapped([127, 0, 0, 1]),
                ..target(1)
            },
            settings: Arc::new(shared()),
            generation: 0,
        });
    }
    node.fail(0, 5);
    assert_eq!(node.states(), [State::Open, State::Closed]);
}

#[test]
fn a_workload_with_a_breaker_of_its_own_is_left_alone() {
    let mut node = Node::new(3);
    node.configure(2, BreakerSettings::default());
    node.fail(0, 5);
    assert_eq!(node.states(), [State::Open, State::Open, State::Closed]);
    // Its own breaker is its own affair.
    node.reset(0);
    node.fail(2, 5);
    assert_eq!(node.states(), [State::Closed, State::Closed, State::Open]);
}

#[test]
fn a_reset_of_one_is_a_reset_of_what_is_shared() {
    let mut node = Node::new(3);
    node.fail(0, 5);
    node.reset(2);
    assert_eq!(node.states(), [State::Closed; 3]);
    node.fail(1, 4);
    assert_eq!(node.states(), [State::Closed; 3]);
}

#[test]
fn an_operators_word_is_about_one_row() {
    let mut node = Node::new(3);
    node.trip(0);
    assert_eq!(
        node.states(),
        [State::ForcedOpen, State::Closed, State::Closed]
    );
    node.fail(1, 5);
    assert_eq!(node.states(), [State::ForcedOpen, State::Open, State::Open]);
    // The leader is held closed: the others go on without it.
    let (until, last_seqs) = (node.now + secs(600), node.last_seqs(1));
    node.handle(Event::HoldClosed {
        row: row(1),
        until,
        last_seqs,
    });
    assert_eq!(
        node.states(),
        [State::ForcedOpen, State::ForcedClosed, State::Open]
    );
    assert_eq!(node.follows(2), None);
}

#[test]
fn when_the_leader_is_given_up_another_one_leads() {
    let mut node = Node::new(3);
    node.fail(0, 5);
    node.handle(Event::Forget { row: row(0) });
    assert_eq!([1, 2].map(|i| node.state(i)), [State::Open; 2]);
    assert_eq!([1, 2].map(|i| node.follows(i)), [None, Some(1)]);
    node.pass(secs(30));
    assert!(node.connect(2));
    // And while half-open.
    node.handle(Event::Forget { row: row(2) });
    assert!(node.connect(1));
    for _ in 0..2 {
        node.probe_ends(ProbeOutcome::Success);
        node.connect(1);
    }
    assert_eq!(node.state(1), State::Closed);
}

#[test]
fn a_full_group_is_not_cut_off_for_another_workload() {
    let mut node = Node::new(2);
    // Workload 1 calls the destination by a name whose other endpoint refuses already.
    node.handle(Event::Configure {
        row: row(9),
        target: target(0x0a00_0009),
        settings: Arc::default(),
        generation: 0,
    });
    let endpoints = [1, 9].map(|index| endpoint(index, &[7], 0));
    node.handle(Event::Groups {
        endpoints: &endpoints,
    });
    node.trip(1);
    node.reset(1);
    let until = node.now + secs(600);
    node.handle(Event::Trip {
        row: row(9),
        until,
        last_seqs: [0; 2],
    });
    node.fail(0, 5);
    assert_eq!(node.states(), [State::Open, State::Closed]);
}
