//! The scenarios: kinds of outages, each with one, 30 and 1,000 clients of one endpoint, and some with
//! ten endpoints.

use super::world::{Health, MS, Phase, SEC, Time, hash};

/// Healthy time before the first outage, and up to [`LATER`] more.
const LEAD: Time = 60 * SEC;
/// Outages begin at another moment in each run, so that no timer of a rule is met by luck.
const LATER: Time = 10 * SEC;
/// Healthy time after the last outage: the longest cooldown of all rules (300 s) and more.
const TAIL: Time = 330 * SEC;
/// Each outage is up to this much shorter or longer, percent.
const VARIES: u64 = 20;
/// Flapping goes on for so long.
const FLAPPING: Time = 300 * SEC;
/// Runs of each scenario.
const RUNS: u64 = 4;

/// How long a program waits for an answer, where nothing else is said.
const PATIENCE: Time = 10 * SEC;

/// A kind of outage.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// One outage of that length.
    Once(Health, Time),
    /// Well and not, each for that long.
    Flapping(Health, Time),
    /// One after the other.
    Then(Health, Time, Health, Time),
}

/// A scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What happens.
    pub name: String,
    /// Programs, or threads of one: each calls once a second.
    pub clients: u32,
    /// Endpoints that they call, chosen anew for each call.
    pub endpoints: usize,
    /// Whether they are addresses of one name: a call that one refuses goes to the next, and a rule that
    /// knows of groups (Backstop's `max_open_share`) takes them for one.
    pub one_name: bool,
    /// Endpoints that the outage concerns.
    pub failing: usize,
    /// The outage.
    pub shape: Shape,
    /// How long a program waits for an answer.
    pub patience: Time,
    /// Runs with other luck.
    pub runs: u64,
}

/// When what happens in a run.
pub struct Plan {
    /// Everything that is not well.
    pub phases: Vec<Phase>,
    /// Begin of the first outage.
    pub begins: Time,
    /// Its end.
    pub first_ends: Time,
    /// End of the last outage.
    pub ends: Time,
    /// End of the run.
    pub length: Time,
}

impl Scenario {
    /// The tables that it is in: clients, endpoints, whether they have one name.
    pub fn group(&self) -> (u32, usize, bool) {
        (self.clients, self.endpoints, self.one_name)
    }

    /// The plan of a run.
    pub fn plan(&self, seed: u64) -> Plan {
        let mut luck = seed;
        let mut draw = |below: u64| {
            luck = hash(luck);
            luck % below.max(1)
        };
        let begins = LEAD + draw(LATER / MS) * MS;
        let mut varied = |length: Time| {
            let percent = 100 - VARIES + draw(2 * VARIES + 1);
            length / MS * percent / 100 * MS
        };
        let mut phases = Vec::new();
        let mut add = |from: Time, length: Time, health| {
            phases.push(Phase {
                from,
                to: from + length,
                endpoints: self.failing,
                health,
            });
            from + length
        };
        match self.shape {
            Shape::Once(health, length) => {
                add(begins, varied(length), health);
            }
            Shape::Then(first, length, second, then) => {
                let at = add(begins, varied(length), first);
                add(at, varied(then), second);
            }
            Shape::Flapping(health, length) => {
                let mut at = begins;
                while at < begins + FLAPPING {
                    at = add(at, varied(length), health) + varied(length);
                }
            }
        }
        let first_ends = phases.first().map_or(begins, |phase| phase.to);
        let ends = phases.last().map_or(begins, |phase| phase.to);
        Plan {
            phases,
            begins,
            first_ends,
            ends,
            length: ends + TAIL,
        }
    }
}

/// The kinds, with how long programs wait.
fn kinds() -> Vec<(String, Shape, Time)> {
    use Health::{Capacity, Errors, Hung, Killed, Refused, Silent, Slow};
    use Shape::{Flapping, Once, Then};
    let secs = |secs: u64| secs * SEC;
    let mut kinds = vec![
        (
            "all connects refused, 2 s",
            Once(Refused(100), secs(2)),
            PATIENCE,
        ),
        (
            "all connects refused, 30 s",
            Once(Refused(100), secs(30)),
            PATIENCE,
        ),
        (
            "all connects refused, 10 min",
            Once(Refused(100), secs(600)),
            PATIENCE,
        ),
        ("killed, back after 5 s", Once(Killed, secs(5)), PATIENCE),
        ("SYNs unanswered, 30 s", Once(Silent, secs(30)), PATIENCE),
        (
            "all answers 5xx, 30 s",
            Once(Errors(100, 100), secs(30)),
            PATIENCE,
        ),
        (
            "all answers 5xx, 10 min",
            Once(Errors(100, 100), secs(600)),
            PATIENCE,
        ),
        (
            "hung, 60 s (programs wait 30 s)",
            Once(Hung, secs(60)),
            secs(30),
        ),
        (
            "too slow, 60 s (5 s; programs wait 1 s)",
            Once(Slow(secs(5)), secs(60)),
            secs(1),
        ),
        (
            "slow but good, 60 s (5 s)",
            Once(Slow(secs(5)), secs(60)),
            PATIENCE,
        ),
        (
            "brown-out, 60 s at 30 % capacity, then 30 s of recovery",
            Then(Capacity(30, 30), secs(60), Capacity(30, 100), secs(30)),
            PATIENCE,
        ),
        (
            "refused 30 s, then 10 s of warming up from 10 % capacity",
            Then(Refused(100), secs(30), Capacity(10, 100), secs(10)),
            PATIENCE,
        ),
        (
            "5xx growing to 90 % and back, 60 s each",
            Then(Errors(0, 90), secs(60), Errors(90, 0), secs(60)),
            PATIENCE,
        ),
    ]
    .into_iter()
    .map(|(name, shape, patience)| (name.to_owned(), shape, patience))
    .collect::<Vec<_>>();
    for percent in [10, 30, 50, 70, 90] {
        let name = format!("{percent} % of connects refused, 2 min");
        kinds.push((name, Once(Refused(percent), secs(120)), PATIENCE));
    }
    for percent in [10, 30, 50, 70, 90] {
        let name = format!("{percent} % of answers 5xx, 2 min");
        kinds.push((name, Once(Errors(percent, percent), secs(120)), PATIENCE));
    }
    for length in [1, 5, 20, 60] {
        let name = format!("flapping each {length} s: refused, 5 min");
        kinds.push((name, Flapping(Refused(100), secs(length)), PATIENCE));
    }
    for length in [1, 5, 20, 60] {
        let name = format!("flapping each {length} s: 5xx, 5 min");
        kinds.push((name, Flapping(Errors(100, 100), secs(length)), PATIENCE));
    }
    kinds
}

/// Every scenario.
pub fn all() -> Vec<Scenario> {
    let mut scenarios = Vec::new();
    for clients in [1, 30, 1000] {
        for (name, shape, patience) in kinds() {
            scenarios.push(Scenario {
                name,
                clients,
                endpoints: 1,
                one_name: false,
                failing: 1,
                shape,
                patience,
                runs: RUNS,
            });
        }
    }
    let refused = Shape::Once(Health::Refused(100), 60 * SEC);
    let errors = Shape::Once(Health::Errors(100, 100), 60 * SEC);
    for (clients, one_name) in [(30, false), (1000, false), (30, true), (1000, true)] {
        for (name, failing, shape) in [
            ("one of ten refuses, 60 s", 1, refused),
            ("one of ten answers 5xx, 60 s", 1, errors),
            ("five of ten refuse, 60 s", 5, refused),
            ("five of ten answer 5xx, 60 s", 5, errors),
            ("all ten refuse, 60 s", 10, refused),
            ("all ten answer 5xx, 60 s", 10, errors),
        ] {
            scenarios.push(Scenario {
                name: name.to_owned(),
                clients,
                endpoints: 10,
                one_name,
                failing,
                shape,
                patience: PATIENCE,
                runs: RUNS,
            });
        }
    }
    scenarios
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_told_apart() {
        let mut names: Vec<_> = all()
            .into_iter()
            .map(|scenario| (scenario.group(), scenario.name))
            .collect();
        let before = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), before);
    }

    #[test]
    fn phases_follow_one_another() {
        for scenario in all() {
            let plan = scenario.plan(hash(1));
            let mut at = LEAD;
            for phase in &plan.phases {
                assert!(
                    at <= phase.from && phase.from < phase.to,
                    "{}",
                    scenario.name
                );
                at = phase.to;
            }
            assert_eq!(at, plan.ends);
            assert!(plan.length > plan.ends);
        }
    }
}
