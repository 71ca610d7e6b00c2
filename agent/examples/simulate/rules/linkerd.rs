//! Linkerd's circuit breaking by consecutive failures, as its reference ("Circuit Breaking") describes
//! it, with the defaults of the annotations `balancer.linkerd.io/failure-accrual-consecutive-*`: 7
//! failures in a row make an endpoint unavailable; for 1 s, doubled up to 60 s after each failure in
//! probation, and up to half as long again at random; then a single call passes (probation), whose
//! success makes the endpoint available. Results that come while it is unavailable are ignored; in
//! probation any result decides.
//!
//! It is off until the annotation is there, and judges HTTP only: here it judges every call.

use super::{Fate, Luck, Rule, Time};
use crate::world::{SEC, hash};

/// `max-failures`.
const FAILURES: u32 = 7;
/// `min-penalty`.
const SHORTEST: Time = SEC;
/// `max-penalty`.
const LONGEST: Time = 60 * SEC;
/// `jitter-ratio`: 0.5, in permille.
const JITTER: u64 = 500;

#[derive(Clone, Copy, PartialEq)]
enum State {
    Available { failures: u32 },
    Shut { until: Time },
    Probation { taken: bool },
}

struct Breaker {
    state: State,
    backoff: Time,
    transitions: u64,
}

/// One breaker for each endpoint.
pub struct Linkerd {
    breakers: Vec<Breaker>,
    seed: u64,
}

impl Linkerd {
    /// So many endpoints; all jitter comes from the seed.
    pub fn new(endpoints: usize, seed: u64) -> Self {
        let breaker = || Breaker {
            state: State::Available { failures: 0 },
            backoff: SHORTEST,
            transitions: 0,
        };
        Self {
            breakers: (0..endpoints).map(|_| breaker()).collect(),
            seed,
        }
    }

    fn shut(&mut self, endpoint: usize, backoff: Time, now: Time) {
        self.seed = hash(self.seed);
        let jitter = backoff / 1000 * (self.seed % (JITTER + 1));
        let breaker = &mut self.breakers[endpoint];
        breaker.backoff = backoff;
        breaker.enter(State::Shut {
            until: now + (backoff + jitter).min(LONGEST),
        });
    }
}

impl Breaker {
    fn enter(&mut self, state: State) {
        self.state = state;
        self.transitions += 1;
    }
}

impl Rule for Linkerd {
    type Ticket = ();

    fn admit(&mut self, endpoint: usize, _now: Time, _draw: u64) -> Option<()> {
        match &mut self.breakers[endpoint].state {
            State::Available { .. } => Some(()),
            State::Probation { taken } if !*taken => {
                *taken = true;
                Some(())
            }
            State::Probation { .. } | State::Shut { .. } => None,
        }
    }

    fn ended(&mut self, endpoint: usize, _ticket: (), fate: &Fate, now: Time) {
        let breaker = &mut self.breakers[endpoint];
        match (&mut breaker.state, fate.is_good()) {
            (State::Available { failures }, true) => *failures = 0,
            (State::Available { failures }, false) => {
                *failures += 1;
                if *failures >= FAILURES {
                    self.shut(endpoint, SHORTEST, now);
                }
            }
            (State::Probation { .. }, true) => breaker.enter(State::Available { failures: 0 }),
            (State::Probation { .. }, false) => {
                let backoff = (breaker.backoff * 2).min(LONGEST);
                self.shut(endpoint, backoff, now);
            }
            (State::Shut { .. }, _) => {}
        }
    }

    fn wakes_at(&self) -> Option<Time> {
        let times = self
            .breakers
            .iter()
            .filter_map(|breaker| match breaker.state {
                State::Shut { until } => Some(until),
                _ => None,
            });
        times.min()
    }

    fn wake(&mut self, now: Time, _dial: &mut dyn FnMut(usize, Luck) -> (bool, Time)) {
        for breaker in &mut self.breakers {
            if matches!(breaker.state, State::Shut { until } if until <= now) {
                breaker.enter(State::Probation { taken: false });
            }
        }
    }

    fn transitions(&self) -> u64 {
        self.breakers
            .iter()
            .map(|breaker| breaker.transitions)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::How;

    #[test]
    fn seven_in_a_row_shut_it_for_ever_longer() {
        let mut rule = Linkerd::new(1, 1);
        let end = |rule: &mut Linkerd, how, now| {
            let fate = Fate {
                established: None,
                end: now,
                how,
            };
            rule.ended(0, (), &fate, now);
        };
        for _ in 0..7 {
            assert!(rule.admit(0, 0, 0).is_some());
            end(&mut rule, How::Error, 0);
        }
        let mut now = 0;
        for backoff in [1, 2, 4, 8, 16, 32, 60, 60] {
            assert!(rule.admit(0, now, 0).is_none());
            let until = rule.wakes_at().unwrap();
            let longest = (backoff * SEC * 3 / 2).min(LONGEST);
            assert!((now + backoff * SEC..=now + longest).contains(&until));
            now = until;
            rule.wake(now, &mut |_, _| unreachable!("it does not dial"));
            assert!(rule.admit(0, now, 0).is_some());
            assert!(rule.admit(0, now, 0).is_none(), "only one");
            end(&mut rule, How::Error, now);
        }
        rule.wake(rule.wakes_at().unwrap(), &mut |_, _| unreachable!());
        end(&mut rule, How::Answered, now);
        assert!((0..9).all(|_| rule.admit(0, now, 0).is_some()));
    }
}
