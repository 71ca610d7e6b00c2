//! Rule 16, first half: of the endpoints of one name the last path stays.

use std::collections::BTreeSet;

use super::*;

mod random;

/// Rows to as many addresses, each with a window of connects.
struct Endpoints {
    engine: Engine,
    rings: Vec<Ring>,
    now: Nanos,
    out: Vec<Action>,
}

impl Endpoints {
    /// So many, all of one name.
    fn of_one_name(count: u32) -> Self {
        let mut endpoints = Self::unnamed(count);
        for index in 0..count {
            endpoints.names(index, &[1]);
        }
        endpoints
    }

    fn unnamed(count: u32) -> Self {
        let mut endpoints = Self {
            engine: Engine::new(1),
            rings: (0..count).map(|_| Ring::new()).collect(),
            now: secs(1000),
            out: Vec::new(),
        };
        for index in 0..count {
            endpoints.configure(index, BreakerSettings::default().max_open_share);
        }
        endpoints
    }

    fn handle(&mut self, event: Event<'_>) {
        self.engine.handle(event, self.now, &mut self.out);
    }

    fn configure(&mut self, index: u32, max_open_share: Option<f64>) {
        let settings = BreakerSettings {
            max_open_share,
            ..BreakerSettings::default()
        };
        self.handle(Event::Configure {
            row: row(index),
            target: target(0x0a00_0001 + index),
            settings: Arc::new(settings),
            generation: 0,
        });
    }

    fn names(&mut self, index: u32, groups: &[GroupId]) {
        self.tell(&[endpoint(index, groups, 0)]);
    }

    fn tell(&mut self, endpoints: &[Endpoint]) {
        self.handle(Event::Groups { endpoints });
    }

    /// Calls of a row fail, and the agent looks after each.
    fn fail(&mut self, index: u32, times: u32) {
        for _ in 0..times {
            self.rings[index as usize].push(self.now, true);
            let ring = &self.rings[index as usize];
            let event = Event::Calls {
                row: row(index),
                kind: WindowKind::Connects,
                last_seq: ring.last_seq,
                window: &ring.window,
            };
            self.engine.handle(event, self.now, &mut self.out);
        }
    }

    fn last_seqs(&self, index: u32) -> [u64; 2] {
        [self.rings[index as usize].last_seq, 0]
    }

    fn trip(&mut self, index: u32) {
        let (until, last_seqs) = (self.now + secs(600), self.last_seqs(index));
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

    /// So many probes of a half-open row succeed.
    fn probes_succeed(&mut self, index: u32, times: u32) {
        for _ in 0..times {
            let view = self.engine.view(row(index), self.now).expect("a breaker");
            let last_seqs = self.last_seqs(index);
            self.handle(Event::ProbeEnded {
                row: row(index),
                generation: view.generation,
                outcome: ProbeOutcome::Success,
                last_seqs,
            });
        }
    }

    /// An open row closes by a redial and its probes.
    fn heal(&mut self, index: u32) {
        self.handle(Event::DialEnded {
            target: target(0x0a00_0001 + index),
            success: true,
        });
        assert_eq!(self.state(index), State::HalfOpen);
        self.probes_succeed(index, 2);
        assert_eq!(self.state(index), State::Closed);
    }

    fn ramps(&self, index: u32) -> bool {
        let view = self.engine.view(row(index), self.now);
        view.is_some_and(|view| view.ramp_until.is_some())
    }

    fn open(&self) -> Vec<u32> {
        (0..self.rings.len() as u32)
            .filter(|index| self.state(*index) == State::Open)
            .collect()
    }

    fn bypassed(&self) -> Vec<u32> {
        let is = |index: &u32| {
            let view = self.engine.view(row(*index), self.now);
            view.is_some_and(|view| view.bypassed.is_some())
        };
        (0..self.rings.len() as u32).filter(is).collect()
    }

    /// Rows that were reported as bypassed, each time.
    fn said(&self) -> Vec<(u32, Full)> {
        let said = self.out.iter().filter_map(|action| match *action {
            Action::Bypassed { row, group, .. } => Some((row.index, group)),
            _ => None,
        });
        said.collect()
    }
}

#[test]
fn a_name_with_one_address_opens_like_any_other() {
    let mut one = Endpoints::of_one_name(1);
    one.fail(0, 5);
    assert_eq!(one.state(0), State::Open);
}

#[test]
fn the_last_path_stays() {
    let mut two = Endpoints::of_one_name(2);
    two.fail(0, 5);
    two.fail(1, 50);
    assert_eq!(two.open(), [0]);
    assert_eq!(two.bypassed(), [1]);
    // Said once, though it goes on failing.
    assert_eq!(two.said(), [(1, Full { open: 1, of: 2 })]);
}

#[test]
fn half_of_many_may_be_open() {
    for (of, may) in [(3, 1), (4, 2), (5, 2), (10, 5)] {
        let mut many = Endpoints::of_one_name(of);
        for index in 0..of {
            many.fail(index, 5);
        }
        assert_eq!(many.open().len(), may, "{of}");
        assert_eq!(many.bypassed().len(), of as usize - may, "{of}");
    }
}

#[test]
fn when_one_closes_the_next_that_fails_may_open() {
    let mut two = Endpoints::of_one_name(2);
    two.fail(0, 5);
    two.fail(1, 5);
    two.reset(0);
    assert_eq!(two.open(), [0; 0]);
    two.fail(1, 1);
    assert_eq!(two.open(), [1]);
    assert_eq!(two.bypassed(), [0; 0]);
    two.fail(0, 5);
    assert_eq!(two.bypassed(), [0]);
}

#[test]
fn half_open_counts_as_open() {
    let mut two = Endpoints::of_one_name(2);
    two.fail(0, 5);
    two.handle(Event::DialEnded {
        target: target(0x0a00_0001),
        success: true,
    });
    assert_eq!(two.state(0), State::HalfOpen);
    two.fail(1, 5);
    assert_eq!((two.open(), two.bypassed()), (vec![], vec![1]));
    // It may open again.
    let generation = two.engine.view(row(0), two.now).unwrap().generation;
    let last_seqs = two.last_seqs(0);
    two.handle(Event::ProbeEnded {
        row: row(0),
        generation,
        outcome: ProbeOutcome::Failure,
        last_seqs,
    });
    assert_eq!(two.open(), [0]);
}

/// One that has just closed refuses a share: were the other one to open meanwhile, both would refuse.
#[test]
fn one_that_ramps_keeps_its_place() {
    let mut two = Endpoints::of_one_name(2);
    two.fail(0, 5);
    two.heal(0);
    assert!(two.ramps(0));
    two.fail(1, 5);
    assert_eq!((two.open(), two.bypassed()), (vec![], vec![1]));
    assert_eq!(two.said(), [(1, Full { open: 1, of: 2 })]);
    // It may open again itself,
    two.fail(0, 5);
    assert_eq!((two.open(), two.bypassed()), (vec![0], vec![1]));
    // and when its ramp is over, the other one may.
    two.heal(0);
    two.now = two.now + secs(2);
    two.handle(Event::Deadline);
    assert!(!two.ramps(0));
    two.fail(1, 1);
    assert_eq!((two.open(), two.bypassed()), (vec![1], vec![]));
}

#[test]
fn a_ramp_gives_way_first() {
    // A name that is heard late: one is open, another one has just closed.
    let mut two = Endpoints::unnamed(2);
    two.fail(0, 5);
    two.now = two.now + secs(1);
    two.fail(1, 5);
    two.heal(0);
    assert!(two.ramps(0));
    two.out.clear();
    two.tell(&[0, 1].map(|index| endpoint(index, &[1], 2)));
    assert_eq!((two.open(), two.ramps(0)), (vec![1], false));
    assert_eq!(two.said(), [], "it has closed already");
    assert!(two.out.iter().any(|action| matches!(
        action,
        Action::SetVerdict { row, verdict, .. }
            if row.index == 0 && verdict.state == State::Closed.verdict_state()
    )));
    // An operator takes one of two away while the other one ramps, or is about to.
    for in_the_ramp in [true, false] {
        let mut two = Endpoints::of_one_name(2);
        two.fail(0, 5);
        if in_the_ramp {
            two.heal(0);
            assert!(two.ramps(0));
            two.trip(1);
        } else {
            two.trip(1);
            two.heal(0);
        }
        assert_eq!(two.state(0), State::Closed);
        assert!(!two.ramps(0), "{in_the_ramp}");
    }
}

#[test]
fn an_operators_word_is_not_overruled_and_counts() {
    let mut two = Endpoints::of_one_name(2);
    two.trip(0);
    two.fail(1, 5);
    assert_eq!(two.state(1), State::Closed);
    assert_eq!(two.bypassed(), [1]);
    two.trip(1);
    assert_eq!(
        (two.state(0), two.state(1)),
        (State::ForcedOpen, State::ForcedOpen)
    );
}

/// An operator takes traffic away from healthy endpoints. What is open because it is dead stays so: else
/// the order for one would send traffic to the other.
#[test]
fn an_operators_word_closes_nobody_elses_breaker() {
    let mut four = Endpoints::of_one_name(4);
    four.fail(0, 5);
    for index in 1..4 {
        four.trip(index);
        assert_eq!(four.state(0), State::Open, "{index}");
    }
    assert_eq!(four.said(), []);
    // But it takes the places of those that would open after it.
    four.reset(3);
    four.fail(3, 5);
    assert_eq!((four.state(3), four.bypassed()), (State::Closed, vec![3]));
    // Nor does an order that ends in a state of the breaker's own close anything.
    four.now = four.now + secs(601);
    four.handle(Event::Deadline);
    assert_eq!(four.state(1), State::Closed);
}

/// As at a restart: two of four are open, and all are told in one go.
#[test]
fn a_group_is_judged_when_all_of_it_is_known() {
    let mut four = Endpoints::unnamed(4);
    four.fail(0, 5);
    four.fail(1, 5);
    let all = [0, 1, 2, 3].map(|index| endpoint(index, &[1], 4));
    four.tell(&all);
    assert_eq!((four.open(), four.said()), (vec![0, 1], vec![]));
    // One after the other, as names are heard: each knows how many there are.
    let mut four = Endpoints::unnamed(4);
    four.fail(0, 5);
    four.fail(1, 5);
    for one in all {
        four.tell(&[one]);
    }
    assert_eq!((four.open(), four.said()), (vec![0, 1], vec![]));
}

#[test]
fn an_address_without_a_row_is_a_path_too() {
    let mut two = Endpoints::unnamed(2);
    two.tell(&[0, 1].map(|index| endpoint(index, &[1], 4)));
    two.fail(0, 5);
    two.fail(1, 5);
    assert_eq!(two.open(), [0, 1], "two more addresses are known");
    // The name loses them.
    two.tell(&[0, 1].map(|index| endpoint(index, &[1], 2)));
    assert_eq!(two.open().len(), 1);
    // What is known of another family helps nobody who does not use it.
    let mut two = Endpoints::unnamed(2);
    let v6 = |index, v6| {
        let mut endpoint = endpoint(index, &[1], 2);
        endpoint.groups[0].v6 = v6;
        endpoint
    };
    two.tell(&[v6(0, false), v6(1, false)]);
    two.fail(0, 5);
    two.fail(1, 5);
    assert_eq!((two.open(), two.bypassed()), (vec![0], vec![1]));
    two.tell(&[v6(1, true)]);
    two.fail(1, 1);
    assert_eq!(two.open(), [0, 1], "of four, half may");
}

#[test]
fn why_it_is_bypassed_comes_back_with_a_restart() {
    let mut two = Endpoints::of_one_name(2);
    two.fail(0, 5);
    two.fail(1, 5);
    let saved = [0, 1].map(|index| two.engine.save(row(index)).unwrap());
    assert_eq!(saved[1].bypassed, Some(Bypass::MaxOpenShare));
    let mut after = Engine::new(2);
    for (index, saved) in (0..).zip(&saved) {
        let to = target(0x0a00_0001 + index);
        after.restore(row(index), to, Arc::default(), saved, two.now, &mut two.out);
    }
    let view = after.view(row(1), two.now).unwrap();
    assert_eq!(
        (view.state, view.bypassed),
        (State::Closed, Some(Bypass::MaxOpenShare))
    );
}

#[test]
fn a_manual_state_that_ends_frees_its_place() {
    let mut two = Endpoints::of_one_name(2);
    two.trip(0);
    two.fail(1, 5);
    two.now = two.now + secs(601);
    two.handle(Event::Deadline);
    assert_eq!(two.state(0), State::Closed);
    two.configure(1, Some(0.5));
    two.fail(1, 5);
    assert_eq!(two.open(), [1]);
    two.fail(0, 5);
    assert_eq!(two.open(), [1]);
}

#[test]
fn names_that_are_learned_late_close_what_is_too_much() {
    let mut three = Endpoints::unnamed(3);
    for index in 0..3 {
        three.now = three.now + secs(1);
        three.fail(index, 5);
    }
    assert_eq!(three.open(), [0, 1, 2]);
    for index in 0..3 {
        three.names(index, &[1]);
    }
    assert_eq!(three.open(), [0], "who opened first stays open");
    assert_eq!(three.said().len(), 2);
    // It needs failures of its own again (later than a quarter of a second, the resolution of a window),
    // and there is no room.
    three.now = three.now + secs(1);
    three.fail(1, 1);
    assert_eq!((three.open(), three.bypassed()), (vec![0], vec![2]));
    three.fail(1, 4);
    assert_eq!((three.open(), three.bypassed()), (vec![0], vec![1, 2]));
}

#[test]
fn a_group_that_shrinks_closes_what_is_too_much() {
    let mut four = Endpoints::of_one_name(4);
    for index in 0..2 {
        four.now = four.now + secs(1);
        four.fail(index, 5);
    }
    assert_eq!(four.open(), [0, 1]);
    four.names(3, &[]);
    assert_eq!(four.open(), [0]);
    four.handle(Event::Forget { row: row(2) });
    four.handle(Event::Forget { row: row(1) });
    // Alone, it opens like any other.
    assert_eq!(four.open(), [0]);
}

#[test]
fn the_share_is_the_policys() {
    let mut off = Endpoints::of_one_name(2);
    for index in 0..2 {
        off.configure(index, None);
        off.now = off.now + secs(1);
        off.fail(index, 5);
    }
    assert_eq!(off.open(), [0, 1]);
    // Of all of them, one after the other: who opened last gives way.
    for index in 0..2 {
        off.configure(index, Some(0.0));
    }
    assert_eq!(off.open(), [0, 1]);
    off.handle(Event::Deadline);
    assert_eq!(off.open(), [0]);
    assert_eq!(off.bypassed(), [1]);
}

#[test]
fn an_address_with_two_names_needs_room_in_both() {
    let mut three = Endpoints::unnamed(3);
    three.names(0, &[1]);
    three.names(1, &[1, 2]);
    three.names(2, &[2]);
    three.fail(0, 5);
    three.fail(1, 5);
    assert_eq!((three.open(), three.bypassed()), (vec![0], vec![1]));
    three.fail(2, 5);
    assert_eq!(three.open(), [0, 2]);
}

#[test]
fn a_row_without_a_breaker_in_memory_is_a_path_too() {
    let mut two = Endpoints::of_one_name(2);
    two.fail(0, 1);
    // Forgotten as quiet, both of them.
    two.now = two.now + secs(200);
    two.handle(Event::Deadline);
    assert!(!two.engine.contains(row(1)));
    two.configure(0, Some(0.5));
    two.fail(0, 5);
    assert_eq!(two.open(), [0]);
    two.configure(1, Some(0.5));
    two.fail(1, 5);
    assert_eq!(two.bypassed(), [1]);
}

#[test]
fn the_next_owner_of_a_row_is_in_no_group_of_the_former() {
    let mut two = Endpoints::of_one_name(2);
    two.fail(0, 5);
    two.handle(Event::Configure {
        row: RowId {
            index: 0,
            incarnation: 2,
        },
        target: target(99),
        settings: Arc::default(),
        generation: 0,
    });
    two.fail(1, 5);
    assert_eq!(two.open(), [1]);
}
