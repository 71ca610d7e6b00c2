//! gobreaker (github.com/sony/gobreaker), as its README and the comments of `Settings` describe it:
//! more than 5 failures in a row open it ("default ReadyToTrip"), for 60 s ("Timeout"); then one call
//! passes ("MaxRequests is 0: only 1"), whose success closes it and whose failure opens it again.
//! Counts are never cleared while closed ("Interval" 0). Results of an earlier generation are ignored,
//! and a half-open state does not end without a result.

use super::{Fate, Rule, Time};
use crate::world::SEC;

/// "ConsecutiveFailures > 5".
const FAILURES: u32 = 6;
/// "Timeout": 60 s.
const OPEN_FOR: Time = 60 * SEC;

#[derive(Clone, Copy, PartialEq)]
enum State {
    Closed { failures: u32 },
    Open { until: Time },
    HalfOpen { taken: bool },
}

struct Breaker {
    state: State,
    generation: u64,
}

/// One breaker for each endpoint.
pub struct Gobreaker {
    breakers: Vec<Breaker>,
}

impl Gobreaker {
    /// So many endpoints.
    pub fn new(endpoints: usize) -> Self {
        let breaker = || Breaker {
            state: State::Closed { failures: 0 },
            generation: 0,
        };
        Self {
            breakers: (0..endpoints).map(|_| breaker()).collect(),
        }
    }
}

impl Breaker {
    fn enter(&mut self, state: State) {
        self.state = state;
        self.generation += 1;
    }

    fn look(&mut self, now: Time) {
        if matches!(self.state, State::Open { until } if until < now) {
            self.enter(State::HalfOpen { taken: false });
        }
    }
}

impl Rule for Gobreaker {
    /// The generation.
    type Ticket = u64;

    fn admit(&mut self, endpoint: usize, now: Time, _draw: u64) -> Option<u64> {
        let breaker = &mut self.breakers[endpoint];
        breaker.look(now);
        match &mut breaker.state {
            State::Closed { .. } => Some(breaker.generation),
            State::HalfOpen { taken } if !*taken => {
                *taken = true;
                Some(breaker.generation)
            }
            State::HalfOpen { .. } | State::Open { .. } => None,
        }
    }

    fn ended(&mut self, endpoint: usize, generation: u64, fate: &Fate, now: Time) {
        let breaker = &mut self.breakers[endpoint];
        breaker.look(now);
        if breaker.generation != generation {
            return;
        }
        let open = State::Open {
            until: now + OPEN_FOR,
        };
        match (&mut breaker.state, fate.is_good()) {
            (State::Closed { failures }, true) => *failures = 0,
            (State::Closed { failures }, false) => {
                *failures += 1;
                if *failures >= FAILURES {
                    breaker.enter(open);
                }
            }
            (State::HalfOpen { .. }, true) => breaker.enter(State::Closed { failures: 0 }),
            (State::HalfOpen { .. }, false) => breaker.enter(open),
            (State::Open { .. }, _) => {}
        }
    }

    fn transitions(&self) -> u64 {
        self.breakers.iter().map(|breaker| breaker.generation).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::How;

    fn end(rule: &mut Gobreaker, ticket: u64, how: How, now: Time) {
        let fate = Fate {
            established: None,
            end: now,
            how,
        };
        rule.ended(0, ticket, &fate, now);
    }

    #[test]
    fn six_in_a_row_open_it_and_one_success_closes_it() {
        let mut rule = Gobreaker::new(1);
        for failures in [5, 6] {
            for _ in 0..failures {
                let ticket = rule.admit(0, 0, 0).unwrap();
                end(&mut rule, ticket, How::Refused, 0);
            }
            if failures == 5 {
                let ticket = rule.admit(0, 0, 0).unwrap();
                end(&mut rule, ticket, How::Answered, 0);
            }
        }
        assert!(rule.admit(0, 60 * SEC, 0).is_none());
        let probe = rule.admit(0, 60 * SEC + 1, 0).unwrap();
        assert!(rule.admit(0, 61 * SEC, 0).is_none(), "only one");
        end(&mut rule, probe, How::Refused, 61 * SEC);
        assert!(rule.admit(0, 120 * SEC, 0).is_none());
        let probe = rule.admit(0, 122 * SEC, 0).unwrap();
        end(&mut rule, probe, How::Answered, 122 * SEC);
        assert!(rule.admit(0, 122 * SEC, 0).is_some());
        assert_eq!(rule.transitions(), 5);
    }
}
