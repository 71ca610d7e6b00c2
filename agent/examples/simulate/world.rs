//! The world that every rule meets: endpoints that are well or not, and what becomes of a call.
//!
//! Calls come at times of their own, whatever became of those before (an open loop), and each has its
//! luck from a hash of the run's seed and its number. So every rule meets the same calls, and of a call
//! that was refused it is known what would have become of it.
//!
//! A call is a connect and, once that is established, one exchange on the fresh connection.

/// A moment, or a duration, in nanoseconds.
pub type Time = u64;

/// A millisecond.
pub const MS: Time = 1_000_000;
/// A second.
pub const SEC: Time = 1_000 * MS;

/// From SYN to its answer.
pub const ROUND_TRIP: Time = MS;
/// A connect without an answer ends after this, for every rule alike. It is Backstop's default; the
/// peers leave it to the program.
pub const CONNECT_TIMEOUT: Time = 2 * SEC;
/// A SYN without an answer is sent once more after this (Linux: about a second).
const SYN_AGAIN: Time = SEC;
/// Shortest time from a request to its answer, and how much longer it may take.
const SERVICE: (Time, Time) = (20 * MS, 60 * MS);
/// An answer that says that the server has no capacity left comes as quickly as this.
const OVERLOADED_AFTER: Time = 5 * MS;

/// How endpoints are for a while.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Health {
    /// Every call succeeds.
    Good,
    /// So many percent of the connects are refused.
    Refused(u64),
    /// As `Refused(100)`, and what was under way when it began is reset: the process was killed.
    Killed,
    /// SYNs are not answered.
    Silent,
    /// So many percent of the requests are answered with an error, at the begin and at the end.
    Errors(u64, u64),
    /// Connections are accepted, requests are answered only when it is over.
    Hung,
    /// Answers take this long.
    Slow(Time),
    /// So many percent of the load can be served, at the begin and at the end; what is beyond it is
    /// answered with an error.
    Capacity(u64, u64),
}

/// From when to when endpoints are not [`Health::Good`].
#[derive(Clone, Copy, Debug)]
pub struct Phase {
    /// Begin.
    pub from: Time,
    /// End.
    pub to: Time,
    /// Endpoints 0 to this one, exclusively.
    pub endpoints: usize,
    /// How they are.
    pub health: Health,
}

/// How a call ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// Well.
    Answered,
    /// The connect was refused, at once.
    Refused,
    /// No answer to the SYN.
    ConnectTimeout,
    /// Answered with an error (a 5xx).
    Error,
    /// The connection was reset.
    Reset,
    /// The program had waited for as long as it waits.
    GaveUp,
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fate {
    /// When the connection is established, if it is.
    pub established: Option<Time>,
    /// When the call is over.
    pub end: Time,
    /// How it ends.
    pub how: How,
}

impl Fate {
    /// Whether the call succeeds.
    pub fn is_good(&self) -> bool {
        self.how == How::Answered
    }
}

/// The endpoints.
pub struct World {
    phases: Vec<Phase>,
    /// How long a program waits for an answer.
    patience: Time,
    /// Calls a second that come to each endpoint.
    load: u64,
    /// Of endpoints with little capacity: what the calls that were sent have left of it,
    left: Vec<Bucket>,
    /// and what those would have that were refused, beside them.
    left_beside: Vec<Bucket>,
}

/// Capacity that is left, in calls * 100 * [`SEC`].
#[derive(Clone, Copy, Default)]
struct Bucket {
    tokens: u128,
    since: Time,
}

/// A call in a [`Bucket`].
const CALL: u128 = 100 * SEC as u128;

impl Bucket {
    /// Fills up at that rate; whether there is capacity for a call.
    fn fill(&mut self, rate: u128, now: Time) -> bool {
        // As much as comes in a second may come at once, and one call in any case.
        let most = (rate * u128::from(SEC)).max(CALL);
        let passed = now.saturating_sub(self.since);
        self.tokens = (self.tokens + rate * u128::from(passed)).min(most);
        self.since = now.max(self.since);
        self.tokens >= CALL
    }

    fn take(&mut self) {
        self.tokens = self.tokens.saturating_sub(CALL);
    }
}

/// The luck of a call.
#[derive(Clone, Copy, Debug)]
pub struct Luck {
    /// 0 to 99: whether the connect is among those that are refused.
    pub connect: u64,
    /// 0 to 99: whether the request is among those that fail.
    pub request: u64,
    /// 0 to 999: how long the answer takes.
    pub latency: u64,
}

impl Luck {
    /// From the run's seed and the number of the call.
    pub fn of(seed: u64, call: u64) -> Self {
        let bits = hash(seed ^ call.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Self {
            connect: (bits & 0xffff_ffff) % 100,
            request: ((bits >> 16) & 0xffff_ffff) % 100,
            latency: (bits >> 32) % 1000,
        }
    }
}

/// The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
pub fn hash(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl World {
    /// Phases do not overlap. `load`: calls a second that come to each endpoint.
    pub fn new(phases: Vec<Phase>, patience: Time, load: u64, endpoints: usize) -> Self {
        Self {
            phases,
            patience,
            load,
            left: vec![Bucket::default(); endpoints],
            left_beside: vec![Bucket::default(); endpoints],
        }
    }

    /// What becomes of a call that comes now; of one that was not `sent`, what would have become. Where
    /// capacity is limited, all of those together would have had what was left of it, and no more.
    pub fn call(&mut self, endpoint: usize, at: Time, luck: Luck, sent: bool) -> Fate {
        let connected = match self.connect(endpoint, at, luck.connect) {
            Ok(connected) => connected,
            Err(fate) => return fate,
        };
        let (end, how) = self.request(endpoint, connected, luck, sent);
        // Whoever waits for longer than he waits has given up.
        let patience = connected + self.patience;
        let (end, how) = if end > patience {
            (patience, How::GaveUp)
        } else {
            (end, how)
        };
        let killed = self.phases.iter().find(|phase| {
            phase.health == Health::Killed
                && endpoint < phase.endpoints
                && (connected..end).contains(&phase.from)
        });
        let (end, how) = killed.map_or((end, how), |phase| (phase.from, How::Reset));
        Fate {
            established: Some(connected),
            end,
            how,
        }
    }

    /// Whether a connect alone succeeds, and when that is known.
    pub fn dial(&self, endpoint: usize, at: Time, luck: Luck) -> (bool, Time) {
        match self.connect(endpoint, at, luck.connect) {
            Ok(established) => (true, established),
            Err(fate) => (false, fate.end),
        }
    }

    fn connect(&self, endpoint: usize, at: Time, luck: u64) -> Result<Time, Fate> {
        let failed = |end, how| Fate {
            established: None,
            end,
            how,
        };
        match self.health(endpoint, at).0 {
            Health::Refused(percent) if luck < percent => {
                Err(failed(at + ROUND_TRIP, How::Refused))
            }
            Health::Killed => Err(failed(at + ROUND_TRIP, How::Refused)),
            Health::Silent => match self.health(endpoint, at + SYN_AGAIN).0 {
                Health::Silent => Err(failed(at + CONNECT_TIMEOUT, How::ConnectTimeout)),
                _ => Ok(at + SYN_AGAIN + ROUND_TRIP),
            },
            _ => Ok(at + ROUND_TRIP),
        }
    }

    /// When a request ends that is sent now, and how.
    fn request(&mut self, endpoint: usize, at: Time, luck: Luck, sent: bool) -> (Time, How) {
        let usual = at + SERVICE.0 + SERVICE.1 * luck.latency / 1000;
        let (health, phase) = self.health(endpoint, at);
        let now = |from: u64, to: u64| phase.map_or(from, |phase| between(from, to, phase, at));
        match health {
            Health::Errors(from, to) if luck.request < now(from, to) => (usual, How::Error),
            Health::Hung => {
                let over = phase.map_or(at, |phase| phase.to);
                (over + usual - at, How::Answered)
            }
            Health::Slow(latency) => (at + latency, How::Answered),
            Health::Capacity(from, to) => {
                let percent = now(from, to);
                if self.take(endpoint, at, percent, sent) {
                    (usual, How::Answered)
                } else {
                    (at + OVERLOADED_AFTER, How::Error)
                }
            }
            _ => (usual, How::Answered),
        }
    }

    /// Whether there is capacity for one more; takes it.
    fn take(&mut self, endpoint: usize, at: Time, percent: u64, sent: bool) -> bool {
        let rate = u128::from(self.load * percent);
        let enough = self.left[endpoint].fill(rate, at);
        let enough_beside = self.left_beside[endpoint].fill(rate, at);
        match sent {
            true if enough => {
                self.left[endpoint].take();
                self.left_beside[endpoint].take();
            }
            false if enough_beside => self.left_beside[endpoint].take(),
            _ => {}
        }
        if sent { enough } else { enough_beside }
    }

    fn health(&self, endpoint: usize, at: Time) -> (Health, Option<Phase>) {
        let phase = self
            .phases
            .iter()
            .find(|phase| endpoint < phase.endpoints && (phase.from..phase.to).contains(&at));
        phase.map_or((Health::Good, None), |phase| (phase.health, Some(*phase)))
    }
}

/// What a value that goes evenly from one to another is at that time of the phase.
fn between(from: u64, to: u64, phase: Phase, at: Time) -> u64 {
    let (length, passed) = ((phase.to - phase.from) / MS, (at - phase.from) / MS);
    let part = |value: u64, time: Time| value * time;
    (part(from, length - passed.min(length)) + part(to, passed)) / length.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LUCK: Luck = Luck {
        connect: 50,
        request: 50,
        latency: 500,
    };

    fn world(health: Health) -> World {
        let phase = Phase {
            from: 10 * SEC,
            to: 20 * SEC,
            endpoints: 1,
            health,
        };
        World::new(vec![phase], 3 * SEC, 10, 2)
    }

    fn fate(health: Health, at: Time) -> Fate {
        world(health).call(0, at, LUCK, true)
    }

    #[test]
    fn each_health_has_its_fate() {
        let established = Some(15 * SEC + ROUND_TRIP);
        let usual = 15 * SEC + ROUND_TRIP + 50 * MS;
        for (health, expected) in [
            (Health::Good, (established, usual, How::Answered)),
            (Health::Refused(51), (None, 15 * SEC + MS, How::Refused)),
            (Health::Refused(50), (established, usual, How::Answered)),
            (Health::Killed, (None, 15 * SEC + MS, How::Refused)),
            (Health::Silent, (None, 17 * SEC, How::ConnectTimeout)),
            (Health::Errors(51, 51), (established, usual, How::Error)),
            (Health::Errors(50, 50), (established, usual, How::Answered)),
            (Health::Hung, (established, 18 * SEC + MS, How::GaveUp)),
            (
                Health::Slow(SEC),
                (established, 16 * SEC + MS, How::Answered),
            ),
            (
                Health::Slow(5 * SEC),
                (established, 18 * SEC + MS, How::GaveUp),
            ),
        ] {
            let (established, end, how) = expected;
            let expected = Fate {
                established,
                end,
                how,
            };
            assert_eq!(fate(health, 15 * SEC), expected, "{health:?}");
        }
    }

    #[test]
    fn it_begins_and_ends() {
        for at in [10 * SEC - 1, 20 * SEC] {
            assert!(fate(Health::Refused(100), at).is_good());
        }
        for at in [10 * SEC, 20 * SEC - 1] {
            assert_eq!(fate(Health::Refused(100), at).how, How::Refused);
        }
        assert!(
            world(Health::Refused(100))
                .call(1, 15 * SEC, LUCK, true)
                .is_good()
        );
    }

    #[test]
    fn a_kill_ends_what_is_under_way_and_a_repeated_syn_may_be_answered() {
        let killed = fate(Health::Killed, 10 * SEC - 10 * MS);
        assert_eq!((killed.end, killed.how), (10 * SEC, How::Reset));
        let late = fate(Health::Silent, 19 * SEC + 500 * MS);
        assert_eq!(late.established, Some(20 * SEC + 500 * MS + ROUND_TRIP));
        let hung = fate(Health::Hung, 19 * SEC);
        assert_eq!((hung.end, hung.how), (20 * SEC + 50 * MS, How::Answered));
    }

    #[test]
    fn shares_grow_evenly() {
        let phase = Phase {
            from: 0,
            to: 10 * SEC,
            endpoints: 1,
            health: Health::Good,
        };
        let values = [0, 5 * SEC, 10 * SEC - MS].map(|at| between(90, 0, phase, at));
        assert_eq!(values, [90, 45, 0]);
    }

    #[test]
    fn capacity_is_used_up_by_what_is_sent() {
        // 20 % of 10 calls a second: two a second, and as many at once.
        let mut world = world(Health::Capacity(20, 20));
        let mut good = |from: Time, sent| {
            let calls = (0..500).map(|n| from + n * 10 * MS);
            calls
                .filter(|at| world.call(0, *at, LUCK, sent).is_good())
                .count()
        };
        assert!((11..=12).contains(&good(10 * SEC, true)));
        // Those that are not sent take nothing from others, but from one another.
        let refused = good(15 * SEC, false);
        assert!((10..=12).contains(&refused), "{refused}");
        assert!(
            good(19 * SEC, true) >= 2,
            "what is not sent uses nothing up"
        );
    }
}
