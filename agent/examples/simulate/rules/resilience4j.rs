//! resilience4j, as its documentation ("CircuitBreaker", "Create and configure a CircuitBreaker")
//! describes it, with its defaults: the last 100 calls (`slidingWindowSize`), at least 100 of them
//! (`minimumNumberOfCalls`), of which 50 % failed (`failureRateThreshold`) open it for 60 s
//! (`waitDurationInOpenState`); then 10 calls pass (`permittedNumberOfCallsInHalfOpenState`), and when
//! they are over, the same threshold opens or closes it. A half-open state waits for them without end
//! (`maxWaitDurationInHalfOpenState` 0). Slow calls are those of more than 60 s, and no call here is.
//!
//! Results of calls that began in an earlier state count in the state in which they come.

use std::collections::VecDeque;

use super::{Fate, Rule, Time};
use crate::world::SEC;

/// `slidingWindowSize` and `minimumNumberOfCalls`.
const WINDOW: usize = 100;
/// `failureRateThreshold`, percent.
const FAILURE_RATE: usize = 50;
/// `waitDurationInOpenState`.
const OPEN_FOR: Time = 60 * SEC;
/// `permittedNumberOfCallsInHalfOpenState`.
const PERMITTED: usize = 10;

#[derive(Clone, Copy, PartialEq)]
enum State {
    Closed,
    Open { until: Time },
    HalfOpen { left: usize },
}

struct Breaker {
    state: State,
    failed: VecDeque<bool>,
    failures: usize,
    transitions: u64,
}

/// One breaker for each endpoint.
pub struct Resilience4j {
    breakers: Vec<Breaker>,
}

impl Resilience4j {
    /// So many endpoints.
    pub fn new(endpoints: usize) -> Self {
        let breaker = || Breaker {
            state: State::Closed,
            failed: VecDeque::with_capacity(WINDOW),
            failures: 0,
            transitions: 0,
        };
        Self {
            breakers: (0..endpoints).map(|_| breaker()).collect(),
        }
    }
}

impl Breaker {
    fn enter(&mut self, state: State) {
        self.state = state;
        self.failed.clear();
        self.failures = 0;
        self.transitions += 1;
    }

    /// Notes a result; with `size` of them, whether the rate is reached.
    fn note(&mut self, failed: bool, size: usize) -> Option<bool> {
        if self.failed.len() == size && self.failed.pop_front() == Some(true) {
            self.failures -= 1;
        }
        self.failed.push_back(failed);
        self.failures += usize::from(failed);
        let reached = self.failures * 100 >= self.failed.len() * FAILURE_RATE;
        (self.failed.len() >= size).then_some(reached)
    }
}

impl Rule for Resilience4j {
    type Ticket = ();

    fn admit(&mut self, endpoint: usize, now: Time, _draw: u64) -> Option<()> {
        let breaker = &mut self.breakers[endpoint];
        if matches!(breaker.state, State::Open { until } if now >= until) {
            breaker.enter(State::HalfOpen { left: PERMITTED });
        }
        match &mut breaker.state {
            State::Closed => Some(()),
            State::HalfOpen { left } if *left > 0 => {
                *left -= 1;
                Some(())
            }
            State::HalfOpen { .. } | State::Open { .. } => None,
        }
    }

    fn ended(&mut self, endpoint: usize, _ticket: (), fate: &Fate, now: Time) {
        let breaker = &mut self.breakers[endpoint];
        let open = State::Open {
            until: now + OPEN_FOR,
        };
        let failed = !fate.is_good();
        match breaker.state {
            State::Closed => {
                if breaker.note(failed, WINDOW) == Some(true) {
                    breaker.enter(open);
                }
            }
            State::HalfOpen { .. } => match breaker.note(failed, PERMITTED) {
                Some(true) => breaker.enter(open),
                Some(false) => breaker.enter(State::Closed),
                None => {}
            },
            State::Open { .. } => {}
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
    use crate::rules::testing::calls;
    use crate::world::How;

    #[test]
    fn half_of_the_last_hundred_open_it() {
        let mut rule = Resilience4j::new(1);
        assert_eq!(calls(&mut rule, 99, How::Error, 0), 99);
        assert_eq!(calls(&mut rule, 2, How::Error, 0), 1, "opened by the 100th");
        assert_eq!(calls(&mut rule, 20, How::Error, 60 * SEC - 1), 0);
        assert_eq!(calls(&mut rule, 20, How::Error, 60 * SEC), 10);
        assert_eq!(calls(&mut rule, 5, How::Error, 120 * SEC), 5);
        // Five of ten: opened again.
        assert_eq!(calls(&mut rule, 50, How::Answered, 121 * SEC), 5);
        assert_eq!(calls(&mut rule, 4, How::Error, 200 * SEC), 4);
        assert_eq!(calls(&mut rule, 50, How::Answered, 200 * SEC), 50);
        // Closed, with 44 good calls: 50 failures are half of the last hundred.
        assert_eq!(calls(&mut rule, 99, How::Error, 201 * SEC), 56);
    }
}
