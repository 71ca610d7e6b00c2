//! Rule 16, second half: many destinations that fail at once are one fault, on this side.

use proptest::prelude::*;

use super::*;

/// A node with a number of destinations, one row each.
struct Many {
    engine: Engine,
    rings: Vec<Ring>,
    now: Nanos,
    out: Vec<Action>,
}

impl Many {
    /// With these targets.
    fn new(targets: &[DialTarget]) -> Self {
        let mut many = Self {
            engine: Engine::new(1),
            rings: targets.iter().map(|_| Ring::new()).collect(),
            now: secs(1000),
            out: Vec::new(),
        };
        let settings = Arc::new(BreakerSettings::default());
        for (index, target) in (0..).zip(targets) {
            let event = Event::Configure {
                row: row(index),
                target: *target,
                settings: Arc::clone(&settings),
                generation: 0,
            };
            many.engine.handle(event, many.now, &mut many.out);
        }
        many
    }

    /// `count` destinations at as many addresses.
    fn apart(count: u32) -> Self {
        let targets: Vec<_> = (0..count).map(|n| target(0x0a00_0001 + n)).collect();
        Self::new(&targets)
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

    fn traffic(&mut self, destinations: usize) {
        self.engine.traffic(destinations, self.now, &mut self.out);
    }

    fn pass(&mut self, time: Nanos) {
        let end = self.now + time;
        while let Some(at) = self.engine.next_deadline()
            && at <= end
        {
            self.now = self.now.max(at);
            self.engine.handle(Event::Deadline, self.now, &mut self.out);
        }
        self.now = end;
    }

    fn state(&self, index: u32) -> State {
        self.engine.state(row(index)).unwrap_or(State::Closed)
    }

    fn said(&self) -> Vec<Correlated> {
        let said = |action: &Action| match *action {
            Action::Correlated(change) => Some(change),
            _ => None,
        };
        self.out.iter().filter_map(said).collect()
    }
}

#[test]
fn four_of_five_failing_is_said_once_and_opens_nothing_more() {
    let mut many = Many::apart(5);
    many.traffic(5);
    many.fail(0, 5);
    assert_eq!(many.state(0), State::Open, "one alone opens");
    for index in 1..4 {
        many.fail(index, 1);
    }
    let begins = Correlated {
        begins: true,
        failing: 4,
        destinations: 5,
    };
    assert_eq!(many.said(), [begins]);
    for index in 1..5 {
        many.fail(index, 10);
        assert_eq!(many.state(index), State::Closed);
        let view = many.engine.view(row(index), many.now).unwrap();
        assert_eq!(view.bypassed, Some(Bypass::Correlated), "{view:?}");
    }
    assert_eq!(many.said().len(), 1, "once");
    assert_eq!(many.state(0), State::Open, "what is open stays so");
}

#[test]
fn sixty_percent_are_not_more_than_sixty_and_four_are_not_five() {
    let mut many = Many::apart(5);
    many.traffic(5);
    for index in 0..3 {
        many.fail(index, 5);
    }
    assert!((0..3).all(|index| many.state(index) == State::Open));
    let mut many = Many::apart(4);
    many.traffic(4);
    for index in 0..4 {
        many.fail(index, 5);
    }
    assert!((0..4).all(|index| many.state(index) == State::Open));
    assert_eq!(many.said(), []);
}

#[test]
fn failures_more_than_five_seconds_apart_are_no_one_fault() {
    let mut many = Many::apart(6);
    for index in 0..6 {
        many.traffic(6);
        many.fail(index, 1);
        many.pass(millis(2_000));
    }
    assert_eq!(many.said(), []);
}

/// One host that is down takes all its ports with it.
#[test]
fn many_ports_of_one_host_are_one_fault_of_that_host() {
    let ports: Vec<_> = (0..10)
        .map(|n| DialTarget {
            port_be: (8080_u16 + n).to_be(),
            ..target(1)
        })
        .collect();
    let mut many = Many::new(&ports);
    many.traffic(10);
    for index in 0..10 {
        many.fail(index, 5);
        assert_eq!(many.state(index), State::Open);
    }
    // Nor are pods that all fail on the same one.
    let pods: Vec<_> = (0..10)
        .map(|n| DialTarget {
            netns_cookie: n,
            ..target(1)
        })
        .collect();
    let mut many = Many::new(&pods);
    many.traffic(1);
    for index in 0..10 {
        many.fail(index, 5);
        assert_eq!(many.state(index), State::Open);
    }
}

#[test]
fn loopback_is_no_network() {
    let targets: Vec<_> = (0..10).map(|n| target(0x7f00_0001 + n)).collect();
    let mut many = Many::new(&targets);
    many.traffic(10);
    for index in 0..10 {
        many.fail(index, 5);
        assert_eq!(many.state(index), State::Open);
    }
    let mut six = [0; 16];
    six[15] = 1;
    assert!(is_loopback(&six) && !is_loopback(&[0; 16]));
}

#[test]
fn it_ends_when_it_has_been_calm_and_breakers_open_again() {
    let mut many = Many::apart(6);
    many.traffic(6);
    for index in 0..6 {
        many.fail(index, 1);
    }
    assert_eq!(many.said().len(), 1);
    many.pass(secs(8));
    many.traffic(6);
    many.fail(1, 10);
    assert_eq!(many.state(1), State::Closed, "not calm for long enough");
    many.pass(secs(8));
    let last = *many.said().last().unwrap();
    assert!(!last.begins, "{last:?}");
    assert_eq!(many.said().len(), 2);
    let view = many.engine.view(row(1), many.now).unwrap();
    assert_eq!(view.bypassed, None);
    many.traffic(6);
    many.fail(1, 5);
    assert_eq!(many.state(1), State::Open);
}

#[test]
fn without_a_fresh_count_nothing_is_correlated() {
    let mut many = Many::apart(10);
    many.traffic(10);
    many.pass(secs(6));
    for index in 0..10 {
        many.fail(index, 5);
        assert_eq!(many.state(index), State::Open);
    }
}

proptest! {
    /// Whatever fails, begin and end alternate, and time alone leads to the end.
    #[test]
    fn it_always_ends(
        steps in prop::collection::vec((0u32..8, 0u64..4_000, 0usize..12), 1..80),
    ) {
        let mut many = Many::apart(8);
        for (index, wait, traffic) in steps {
            many.pass(millis(wait));
            many.traffic(traffic);
            many.fail(index, 1);
        }
        many.pass(secs(30));
        let said: Vec<bool> = many.said().iter().map(|change| change.begins).collect();
        let alternating = said.iter().enumerate().all(|(at, begins)| *begins == (at % 2 == 0));
        prop_assert!(alternating && said.len().is_multiple_of(2), "{:?}", said);
    }
}
