//! Hystrix, as its wiki ("Configuration", "How it Works") describes it: at least 20 calls within the
//! rolling 10 s, of which 50 % failed, open the circuit; after a sleep window of 5 s a single call
//! passes; its success closes the circuit and clears the numbers, its failure begins another sleep
//! window. The numbers are looked at every 500 ms (`metrics.healthSnapshot.intervalInMilliseconds`).
//!
//! Its timeout of 1 s for a call is not applied: here the programs have timeouts of their own, the same
//! for all rules.

use super::{Fate, Luck, Rule, Time};
use crate::world::{MS, SEC};

/// `metrics.healthSnapshot.intervalInMilliseconds`.
const SNAPSHOT: Time = 500 * MS;
/// `metrics.rollingStats.timeInMilliseconds`: 10 s, in snapshots.
const BUCKETS: usize = 20;
/// `circuitBreaker.requestVolumeThreshold`.
const VOLUME: u64 = 20;
/// `circuitBreaker.errorThresholdPercentage`.
const ERROR_PERCENT: u64 = 50;
/// `circuitBreaker.sleepWindowInMilliseconds`.
const SLEEP: Time = 5 * SEC;

#[derive(Clone, Copy, PartialEq)]
enum State {
    Closed,
    Open { since: Time },
    HalfOpen,
}

struct Circuit {
    state: State,
    /// Calls and errors by snapshot; the last one is under way.
    buckets: [(u64, u64); BUCKETS],
    transitions: u64,
}

/// One circuit for each endpoint.
pub struct Hystrix {
    circuits: Vec<Circuit>,
    next: Time,
}

impl Hystrix {
    /// So many endpoints.
    pub fn new(endpoints: usize) -> Self {
        let circuit = || Circuit {
            state: State::Closed,
            buckets: [(0, 0); BUCKETS],
            transitions: 0,
        };
        Self {
            circuits: (0..endpoints).map(|_| circuit()).collect(),
            next: SNAPSHOT,
        }
    }
}

impl Circuit {
    fn enter(&mut self, state: State) {
        self.state = state;
        self.transitions += 1;
    }

    fn snapshot(&mut self, now: Time) {
        let (calls, errors) = self
            .buckets
            .iter()
            .fold((0, 0), |sum, bucket| (sum.0 + bucket.0, sum.1 + bucket.1));
        let trips = calls >= VOLUME && errors * 100 >= calls * ERROR_PERCENT;
        if self.state == State::Closed && trips {
            self.enter(State::Open { since: now });
        }
        self.buckets.rotate_left(1);
        self.buckets[BUCKETS - 1] = (0, 0);
    }
}

impl Rule for Hystrix {
    type Ticket = ();

    fn admit(&mut self, endpoint: usize, now: Time, _draw: u64) -> Option<()> {
        let circuit = &mut self.circuits[endpoint];
        match circuit.state {
            State::Closed => Some(()),
            State::Open { since } if now > since + SLEEP => {
                circuit.enter(State::HalfOpen);
                Some(())
            }
            State::Open { .. } | State::HalfOpen => None,
        }
    }

    fn ended(&mut self, endpoint: usize, _ticket: (), fate: &Fate, now: Time) {
        let circuit = &mut self.circuits[endpoint];
        let bucket = &mut circuit.buckets[BUCKETS - 1];
        bucket.0 += 1;
        bucket.1 += u64::from(!fate.is_good());
        // The result of whatever call decides, also of one that began before the circuit opened.
        if circuit.state == State::HalfOpen {
            if fate.is_good() {
                circuit.enter(State::Closed);
                circuit.buckets = [(0, 0); BUCKETS];
            } else {
                circuit.enter(State::Open { since: now });
            }
        }
    }

    fn wakes_at(&self) -> Option<Time> {
        Some(self.next)
    }

    fn wake(&mut self, now: Time, _dial: &mut dyn FnMut(usize, Luck) -> (bool, Time)) {
        self.next += SNAPSHOT;
        for circuit in &mut self.circuits {
            circuit.snapshot(now);
        }
    }

    fn transitions(&self) -> u64 {
        self.circuits
            .iter()
            .map(|circuit| circuit.transitions)
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::calls;
    use crate::world::How;

    fn until(rule: &mut Hystrix, now: Time) {
        while let Some(at) = rule.wakes_at().filter(|at| *at <= now) {
            rule.wake(at, &mut |_, _| unreachable!("it does not dial"));
        }
    }

    #[test]
    fn half_of_twenty_within_ten_seconds_open_it() {
        let mut rule = Hystrix::new(1);
        calls(&mut rule, 10, How::Answered, SEC);
        calls(&mut rule, 9, How::Error, SEC);
        until(&mut rule, 2 * SEC);
        assert_eq!(rule.transitions(), 0, "19 calls are too few");
        calls(&mut rule, 1, How::Error, 2 * SEC);
        until(&mut rule, 2 * SEC + SNAPSHOT);
        assert_eq!(rule.transitions(), 1);
        let opened = 2 * SEC + SNAPSHOT;
        assert_eq!(calls(&mut rule, 9, How::Error, opened + SLEEP), 0);
        // One call passes, fails, and the next sleep begins.
        assert_eq!(calls(&mut rule, 9, How::Error, opened + SLEEP + 1), 1);
        assert_eq!(calls(&mut rule, 9, How::Answered, opened + 2 * SLEEP), 0);
        assert_eq!(calls(&mut rule, 9, How::Answered, opened + 3 * SLEEP), 9);
    }

    #[test]
    fn what_is_older_than_ten_seconds_is_forgotten() {
        let mut rule = Hystrix::new(1);
        calls(&mut rule, 19, How::Error, SEC);
        until(&mut rule, 11 * SEC);
        calls(&mut rule, 1, How::Error, 11 * SEC);
        until(&mut rule, 12 * SEC);
        assert_eq!(rule.transitions(), 0);
    }
}
