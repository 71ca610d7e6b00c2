//! Envoy's outlier detection, as its API reference (`config.cluster.v3.OutlierDetection`) and the pages
//! "Outlier detection" and "Panic threshold" describe it, with their defaults: 5 failures in a row
//! (`consecutive_5xx`; errors of connects count as such, since `split_external_local_origin_errors` is
//! off), or a success rate below the mean less 1.9 standard deviations in an interval of 10 s
//! (`success_rate_*`: at least 5 hosts with 100 requests each), eject a host. The time is 30 s
//! (`base_ejection_time`) times the number of its ejections, at most 300 s; the number falls by one in
//! each interval that it is well. At most 10 % of the hosts are ejected (`max_ejection_percent`; with
//! `always_eject_one_host` off therefore none of fewer than 10), and when less than half of them are
//! left, all are used. Hosts come back in the sweep each 10 s (`interval`); there is no half-open state.
//! What is off by default (`enforcing_*` 0, ejection by failure percentage) is left out.
//!
//! A proxy would send the call to another host; here a call to an ejected one is refused.

use super::{Fate, Luck, Rule, Time};
use crate::world::SEC;

/// `consecutive_5xx`.
const FAILURES: u32 = 5;
/// `interval`.
const INTERVAL: Time = 10 * SEC;
/// `base_ejection_time`.
const BASE: Time = 30 * SEC;
/// `max_ejection_time`.
const LONGEST: Time = 300 * SEC;
/// `max_ejection_percent`.
const MOST_PERCENT: usize = 10;
/// The cluster's `healthy_panic_threshold`, percent.
const PANIC_PERCENT: usize = 50;
/// `success_rate_minimum_hosts`.
const RATE_HOSTS: usize = 5;
/// `success_rate_request_volume`.
const RATE_VOLUME: u64 = 100;
/// `success_rate_stdev_factor` 1900, divided by 1000.
const RATE_DEVIATIONS: f64 = 1.9;

#[derive(Default)]
struct Host {
    failures: u32,
    ejected_at: Option<Time>,
    ejections: u64,
    /// Requests and successes in this interval.
    interval: (u64, u64),
}

/// A cluster of hosts.
pub struct Envoy {
    hosts: Vec<Host>,
    sweep_at: Time,
    transitions: u64,
}

impl Envoy {
    /// So many endpoints.
    pub fn new(endpoints: usize) -> Self {
        Self {
            hosts: (0..endpoints).map(|_| Host::default()).collect(),
            sweep_at: INTERVAL,
            transitions: 0,
        }
    }

    fn ejected(&self) -> usize {
        let ejected = self.hosts.iter().filter(|host| host.ejected_at.is_some());
        ejected.count()
    }

    fn eject(&mut self, endpoint: usize, now: Time) {
        let would_be = self.ejected() + 1;
        if self.hosts[endpoint].ejected_at.is_some()
            || would_be * 100 > self.hosts.len() * MOST_PERCENT
        {
            return;
        }
        let host = &mut self.hosts[endpoint];
        host.ejected_at = Some(now);
        host.ejections += 1;
        host.failures = 0;
        self.transitions += 1;
    }

    fn come_back(&mut self, now: Time) {
        for host in &mut self.hosts {
            match host.ejected_at {
                Some(at) if now >= at + (BASE * host.ejections).min(LONGEST) => {
                    host.ejected_at = None;
                    self.transitions += 1;
                }
                Some(_) => {}
                None => host.ejections = host.ejections.saturating_sub(1),
            }
        }
    }

    fn by_success_rate(&mut self, now: Time) {
        let rates: Vec<(usize, f64)> = (0..)
            .zip(&self.hosts)
            .filter(|(_, host)| host.interval.0 >= RATE_VOLUME)
            .map(|(n, host)| (n, host.interval.1 as f64 * 100.0 / host.interval.0 as f64))
            .collect();
        if rates.len() >= RATE_HOSTS {
            let count = rates.len() as f64;
            let mean = rates.iter().map(|(_, rate)| rate).sum::<f64>() / count;
            let squares = rates.iter().map(|(_, rate)| (rate - mean) * (rate - mean));
            let deviation = (squares.sum::<f64>() / count).sqrt();
            let threshold = mean - deviation * RATE_DEVIATIONS;
            for &(endpoint, rate) in &rates {
                if rate < threshold {
                    self.eject(endpoint, now);
                }
            }
        }
        for host in &mut self.hosts {
            host.interval = (0, 0);
        }
    }
}

impl Rule for Envoy {
    type Ticket = ();

    fn admit(&mut self, endpoint: usize, _now: Time, _draw: u64) -> Option<()> {
        if self.hosts[endpoint].ejected_at.is_none() {
            return Some(());
        }
        let healthy = self.hosts.len() - self.ejected();
        (healthy * 100 < self.hosts.len() * PANIC_PERCENT).then_some(())
    }

    fn ended(&mut self, endpoint: usize, _ticket: (), fate: &Fate, now: Time) {
        let host = &mut self.hosts[endpoint];
        host.interval.0 += 1;
        if fate.is_good() {
            host.interval.1 += 1;
            host.failures = 0;
        } else {
            host.failures += 1;
            if host.failures >= FAILURES {
                self.eject(endpoint, now);
            }
        }
    }

    fn wakes_at(&self) -> Option<Time> {
        Some(self.sweep_at)
    }

    fn wake(&mut self, now: Time, _dial: &mut dyn FnMut(usize, Luck) -> (bool, Time)) {
        self.sweep_at += INTERVAL;
        self.come_back(now);
        self.by_success_rate(now);
    }

    fn transitions(&self) -> u64 {
        self.transitions
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::How;

    fn call(rule: &mut Envoy, endpoint: usize, how: How, now: Time) -> bool {
        while rule.wakes_at().unwrap() <= now {
            rule.wake(rule.wakes_at().unwrap(), &mut |_, _| unreachable!());
        }
        let fate = Fate {
            established: None,
            end: now,
            how,
        };
        let passed = rule.admit(endpoint, now, 0).is_some();
        if passed {
            rule.ended(endpoint, (), &fate, now);
        }
        passed
    }

    #[test]
    fn five_in_a_row_eject_one_of_ten_for_ever_longer() {
        let mut rule = Envoy::new(10);
        for endpoint in [3, 4] {
            for _ in 0..5 {
                assert!(call(&mut rule, endpoint, How::Error, SEC));
            }
        }
        assert!(!call(&mut rule, 3, How::Error, 39 * SEC));
        assert!(call(&mut rule, 4, How::Error, 39 * SEC), "no second one");
        // 30 s after 1 s is 31 s: the sweep of 40 s lets it back.
        for _ in 0..5 {
            assert!(call(&mut rule, 3, How::Error, 40 * SEC));
        }
        assert!(!call(&mut rule, 3, How::Error, 99 * SEC));
        assert!(call(&mut rule, 3, How::Answered, 100 * SEC));
    }

    #[test]
    fn a_single_host_stays() {
        let mut rule = Envoy::new(1);
        assert!((0..100).all(|_| call(&mut rule, 0, How::Error, SEC)));
    }

    #[test]
    fn an_outlier_by_its_success_rate_is_ejected() {
        let mut rule = Envoy::new(10);
        for endpoint in 0..10 {
            for n in 0..100 {
                let bad = endpoint == 7 && n % 3 == 0;
                let how = if bad { How::Error } else { How::Answered };
                call(&mut rule, endpoint, how, SEC);
            }
        }
        assert!(call(&mut rule, 7, How::Answered, 9 * SEC));
        assert!(!call(&mut rule, 7, How::Answered, 10 * SEC));
        assert!(call(&mut rule, 6, How::Answered, 10 * SEC));
    }
}
