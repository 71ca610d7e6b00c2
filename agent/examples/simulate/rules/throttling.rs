//! Adaptive throttling as the book *Site Reliability Engineering* (Beyer et al. 2016, chapter "Handling
//! Overload", "Client-Side Throttling", equation 21-1) gives it: each client counts the requests of the
//! last two minutes, refused ones included, and those that were accepted; a request is refused with the
//! probability max(0, (requests - K * accepts) / (requests + 1)), with K = 2.
//!
//! Accepted is here what succeeds. The clients of a run share the two counts, as they share a breaker of
//! the other rules.

use super::{Fate, Rule, Time};
use crate::world::SEC;

/// "the last two minutes of its history", in buckets of a second.
const BUCKETS: usize = 120;
/// "K = 2".
const K: u64 = 2;

struct Counts {
    /// Requests and accepts by second.
    buckets: [(u64, u64); BUCKETS],
    sum: (u64, u64),
    second: u64,
}

/// Counts for each endpoint.
pub struct Throttling {
    counts: Vec<Counts>,
}

impl Throttling {
    /// So many endpoints.
    pub fn new(endpoints: usize) -> Self {
        let counts = || Counts {
            buckets: [(0, 0); BUCKETS],
            sum: (0, 0),
            second: 0,
        };
        Self {
            counts: (0..endpoints).map(|_| counts()).collect(),
        }
    }
}

impl Counts {
    fn bucket(&mut self, now: Time) -> &mut (u64, u64) {
        let second = now / SEC;
        while self.second < second {
            self.second += 1;
            let old = std::mem::take(&mut self.buckets[self.second as usize % BUCKETS]);
            self.sum.0 -= old.0;
            self.sum.1 -= old.1;
        }
        &mut self.buckets[second as usize % BUCKETS]
    }
}

impl Rule for Throttling {
    type Ticket = ();

    fn admit(&mut self, endpoint: usize, now: Time, draw: u64) -> Option<()> {
        let counts = &mut self.counts[endpoint];
        counts.bucket(now).0 += 1;
        // Before this request: it is counted, whatever becomes of it.
        let (requests, accepts) = counts.sum;
        counts.sum.0 += 1;
        let above = requests.saturating_sub(K * accepts);
        (draw % (requests + 1) >= above).then_some(())
    }

    fn ended(&mut self, endpoint: usize, _ticket: (), fate: &Fate, now: Time) {
        if fate.is_good() {
            let counts = &mut self.counts[endpoint];
            counts.bucket(now).1 += 1;
            counts.sum.1 += 1;
        }
    }

    /// It has no states.
    fn transitions(&self) -> u64 {
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::testing::calls;
    use crate::world::How;

    #[test]
    fn twice_what_is_accepted_passes() {
        let mut rule = Throttling::new(1);
        assert_eq!(calls(&mut rule, 1000, How::Answered, 0), 1000);
        // Up to twice 1,000 requests, nothing is refused; then ever more.
        assert_eq!(calls(&mut rule, 1000, How::Error, SEC), 1000);
        let passed = calls(&mut rule, 2000, How::Error, 2 * SEC);
        assert!((1300..1500).contains(&passed), "{passed}");
        // 120 s later the second of the successes is out of the window.
        let passed = calls(&mut rule, 1000, How::Error, 120 * SEC);
        assert!(passed < 20, "{passed}");
        assert_eq!(calls(&mut rule, 10, How::Answered, 300 * SEC), 10);
    }
}
