//! Rule 1: what one workload has found out is a hint to the others.

use super::*;

struct Two {
    engine: Engine,
    rings: [[Ring; 2]; 2],
    now: Nanos,
    out: Vec<Action>,
}

impl Two {
    /// Two workloads, in a namespace each, and one destination.
    fn new(to: DialTarget, settings: BreakerSettings) -> Self {
        let mut two = Self {
            engine: Engine::new(1),
            rings: std::array::from_fn(|_| [Ring::new(), Ring::new()]),
            now: secs(1000),
            out: Vec::new(),
        };
        let settings = Arc::new(settings);
        for index in 0..2 {
            let event = Event::Configure {
                row: row(index),
                target: DialTarget {
                    netns_cookie: u64::from(index),
                    ..to
                },
                settings: Arc::clone(&settings),
                generation: 0,
            };
            two.engine.handle(event, two.now, &mut two.out);
        }
        two
    }

    fn fail(&mut self, index: u32, kind: WindowKind, times: u32) {
        for _ in 0..times {
            self.rings[index as usize][kind.index().unwrap()].push(self.now, true);
        }
        self.look(index, kind);
    }

    fn look(&mut self, index: u32, kind: WindowKind) {
        let ring = &self.rings[index as usize][kind.index().unwrap()];
        let event = Event::Calls {
            row: row(index),
            kind,
            last_seq: ring.last_seq,
            window: &ring.window,
        };
        self.engine.handle(event, self.now, &mut self.out);
    }

    fn states(&self) -> [State; 2] {
        [0, 1].map(|index| self.engine.state(row(index)).unwrap())
    }
}

const CONNECTS: WindowKind = WindowKind::Connects;
const SOMEWHERE: u32 = 0x0a01_0001;

#[test]
fn one_failure_of_its_own_suffices_and_none_opens_nothing() {
    let mut two = Two::new(target(SOMEWHERE), BreakerSettings::default());
    two.fail(0, CONNECTS, 5);
    two.look(1, CONNECTS);
    two.rings[1][0].push(two.now, false);
    two.look(1, CONNECTS);
    assert_eq!(two.states(), [State::Open, State::Closed]);
    two.fail(1, CONNECTS, 1);
    assert_eq!(two.states(), [State::Open, State::Open]);
    let view = two.engine.view(row(1), two.now).unwrap();
    assert_eq!(view.reason, Reason::HINTED);
}

#[test]
fn the_hint_ends_with_the_outage() {
    let mut two = Two::new(target(SOMEWHERE), BreakerSettings::default());
    two.fail(0, CONNECTS, 5);
    let last_seqs = [two.rings[0][0].last_seq, 0];
    let reset = Event::Reset {
        row: row(0),
        last_seqs,
    };
    two.engine.handle(reset, two.now, &mut two.out);
    two.fail(1, CONNECTS, 4);
    assert_eq!(two.states(), [State::Closed, State::Closed]);
    // So it does when the row is given up.
    let mut two = Two::new(target(SOMEWHERE), BreakerSettings::default());
    two.fail(0, CONNECTS, 5);
    let event = Event::Forget { row: row(0) };
    two.engine.handle(event, two.now, &mut two.out);
    two.fail(1, CONNECTS, 4);
    assert_eq!(two.engine.state(row(1)), Some(State::Closed));
}

#[test]
fn exchanges_give_no_hint_and_take_none() {
    let mut two = Two::new(target(SOMEWHERE), BreakerSettings::default());
    two.fail(0, WindowKind::Exchanges, 5);
    two.fail(1, CONNECTS, 4);
    assert_eq!(two.states(), [State::Open, State::Closed]);
    let mut two = Two::new(target(SOMEWHERE), BreakerSettings::default());
    two.fail(0, CONNECTS, 5);
    two.fail(1, WindowKind::Exchanges, 4);
    assert_eq!(two.states(), [State::Open, State::Closed]);
}

#[test]
fn no_hints_about_what_is_another_host_for_everyone() {
    for to in [0x7f00_0001, 0xa9fe_0101, 0x0a00_020f] {
        let mut two = Two::new(target(to), BreakerSettings::default());
        two.fail(0, CONNECTS, 5);
        two.fail(1, CONNECTS, 4);
        assert_eq!(two.states(), [State::Open, State::Closed], "{to:x}");
    }
}

#[test]
fn a_policy_without_a_run_of_failures_takes_no_hint() {
    let settings = BreakerSettings {
        consecutive_failures: 0,
        ..BreakerSettings::default()
    };
    let mut two = Two::new(target(SOMEWHERE), settings);
    two.fail(0, CONNECTS, 10);
    two.fail(1, CONNECTS, 9);
    assert_eq!(two.states(), [State::Open, State::Closed]);
}
