//! Tests of the core: a table of transitions, a reference model, a simulation, and odd numbers.

mod broken;
mod complaints;
mod contract;
mod correlated;
mod ends;
mod evaluate;
mod groups;
mod harmless;
mod hints;
mod hung;
mod misleading;
mod model;
mod ops;
mod ramp;
mod random;
mod redial;
mod rounds;
mod rules;
mod saved;
mod scope;
mod simulation;
mod table;
mod trials;
mod waits;
mod windows;
mod workloads;

use std::sync::Arc;

use agent_common::CallWindow;
use agent_common::window::{SLOTS, encode, slot};

use super::*;

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum How {
    Well,
    Slowly,
    Badly,
}

/// A row in these groups, of which so many IPv4 addresses are known.
fn endpoint(index: u32, groups: &[GroupId], addresses: u32) -> Endpoint {
    let membership = |group: &GroupId| Membership {
        group: *group,
        addresses,
        v6: false,
    };
    Endpoint {
        row: row(index),
        groups: groups.iter().map(membership).collect(),
    }
}

/// One window of a row's calls as the kernel keeps them.
struct Ring {
    window: CallWindow,
    last_seq: u64,
}

impl Ring {
    fn new() -> Self {
        Self {
            window: CallWindow {
                entries: [0; SLOTS],
            },
            last_seq: 0,
        }
    }

    fn push(&mut self, at: Nanos, failed: bool) {
        self.push_how(at, if failed { How::Badly } else { How::Well });
    }

    fn push_how(&mut self, at: Nanos, how: How) {
        self.last_seq += 1;
        let (failed, slow) = (how == How::Badly, how == How::Slowly);
        self.window.entries[slot(self.last_seq)] = encode(self.last_seq, at.0, failed, slow);
    }

    /// A call whose number is taken and whose entry is not written yet.
    fn push_unwritten(&mut self) {
        self.last_seq += 1;
    }
}

const fn row(index: u32) -> RowId {
    RowId {
        index,
        incarnation: 1,
    }
}

fn target(number: u32) -> DialTarget {
    DialTarget {
        netns_cookie: 1,
        addr: agent_common::key::mapped(number.to_be_bytes()),
        ifindex: 0,
        port_be: 5432_u16.to_be(),
    }
}

fn secs(secs: u64) -> Nanos {
    Nanos::from_secs(secs)
}

fn millis(millis: u64) -> Nanos {
    Nanos::from_millis(millis)
}

/// An engine with one row, for tests that tell a story.
struct One {
    engine: Engine,
    /// Its connects.
    ring: Ring,
    /// Its exchanges.
    exchanges: Ring,
    now: Nanos,
    /// Everything that came out, in order.
    out: Vec<Action>,
}

const ROW: RowId = row(7);

impl One {
    fn new(settings: BreakerSettings) -> Self {
        let mut one = Self {
            engine: Engine::new(1),
            ring: Ring::new(),
            exchanges: Ring::new(),
            now: secs(1000),
            out: Vec::new(),
        };
        one.configure(settings);
        one
    }

    fn handle(&mut self, event: Event<'_>) {
        self.engine.handle(event, self.now, &mut self.out);
    }

    fn configure(&mut self, settings: BreakerSettings) {
        self.handle(Event::Configure {
            row: ROW,
            target: target(1),
            settings: Arc::new(settings),
            generation: 0,
        });
    }

    fn last_seqs(&self) -> [u64; 2] {
        [self.ring.last_seq, self.exchanges.last_seq]
    }

    fn look(&mut self) {
        self.look_at(WindowKind::Connects);
    }

    fn look_at(&mut self, kind: WindowKind) {
        let ring = match kind {
            WindowKind::Connects | WindowKind::None => &self.ring,
            WindowKind::Exchanges => &self.exchanges,
        };
        self.engine.handle(
            Event::Calls {
                row: ROW,
                kind,
                last_seq: ring.last_seq,
                window: &ring.window,
            },
            self.now,
            &mut self.out,
        );
    }

    fn stats(&self, kind: WindowKind) -> WindowStats {
        let ring = match kind {
            WindowKind::Connects | WindowKind::None => &self.ring,
            WindowKind::Exchanges => &self.exchanges,
        };
        self.engine
            .window_stats(ROW, kind, &ring.window, ring.last_seq, self.now)
            .expect("the row is known")
    }

    /// That many exchanges end now, then the agent looks.
    fn exchange(&mut self, count: u32, how: How) {
        for _ in 0..count {
            self.exchanges.push_how(self.now, how);
        }
        self.look_at(WindowKind::Exchanges);
    }

    /// That many connects end now, then the agent looks.
    fn calls(&mut self, count: u32, failed: bool) {
        for _ in 0..count {
            self.ring.push(self.now, failed);
        }
        self.look();
    }

    /// Time passes; deadlines are met on the way, dials fail.
    fn pass(&mut self, time: Nanos) {
        self.pass_until(self.now + time, false, |_| false);
    }

    /// Time passes as in [`One::pass`], with dials `answered` or not, until `end` or until `done`.
    fn pass_until(&mut self, end: Nanos, answered: bool, done: impl Fn(&Self) -> bool) {
        while let Some(at) = self.engine.next_deadline()
            && at <= end
        {
            self.now = self.now.max(at);
            let before = self.out.len();
            self.handle(Event::Deadline);
            let dialled = self.out[before..]
                .iter()
                .any(|action| matches!(action, Action::Dial { .. }));
            if dialled {
                self.dial_ended(answered);
            }
            if done(self) {
                return;
            }
        }
        self.now = end;
    }

    fn probe(&mut self, outcome: ProbeOutcome) {
        let generation = self.view().generation;
        let last_seqs = self.last_seqs();
        self.handle(Event::ProbeStarted {
            row: ROW,
            generation,
        });
        self.handle(Event::ProbeEnded {
            row: ROW,
            generation,
            outcome,
            last_seqs,
        });
    }

    fn dial_ended(&mut self, success: bool) {
        self.handle(Event::DialEnded {
            target: target(1),
            success,
        });
    }

    fn view(&self) -> BreakerView {
        self.engine.view(ROW, self.now).expect("the row is known")
    }

    fn state(&self) -> State {
        self.view().state
    }

    /// Brings a fresh breaker into a state by ordinary means; open and half-open for connects.
    fn bring_to(&mut self, state: State) {
        let until = self.now + secs(600);
        let last_seqs = self.last_seqs();
        match state {
            State::Closed => {}
            State::Open => self.calls(5, true),
            State::HalfOpen => {
                self.calls(5, true);
                self.dial_ended(true);
            }
            State::ForcedOpen => self.handle(Event::Trip {
                row: ROW,
                until,
                last_seqs,
            }),
            State::ForcedClosed => self.handle(Event::HoldClosed {
                row: ROW,
                until,
                last_seqs,
            }),
        }
        assert_eq!(self.state(), state);
    }

    /// As [`One::bring_to`]; open and half-open for exchanges.
    fn bring_to_by_exchanges(&mut self, state: State) {
        match state {
            State::Open | State::HalfOpen => {
                // (By servers that close at once.)
                let at = self.now;
                self.handle(Event::ExchangeFailed {
                    row: ROW,
                    at,
                    broken_after: Some(millis(1)),
                });
                self.exchange(5, How::Badly);
                assert_eq!(self.state(), State::Open);
                if state == State::HalfOpen {
                    self.pass(self.view().next_probe_at.unwrap() - self.now);
                }
                assert_eq!(self.state(), state);
            }
            State::Closed | State::ForcedOpen | State::ForcedClosed => self.bring_to(state),
        }
    }
}
