//! Runs a scenario under a rule, and counts.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::rules::Rule;
use super::scenarios::Scenario;
use super::world::{Fate, Luck, SEC, Time, World, hash};

/// What came of a scenario under a rule: sums over the runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Runs.
    pub runs: u64,
    /// Calls that came.
    pub calls: u64,
    /// Calls refused that would have succeeded.
    pub wrong: u64,
    /// Calls sent that failed.
    pub doomed: u64,
    /// Changes of state.
    pub transitions: u64,
    /// Runs in which a call was refused during the first outage, and the time from its begin to the
    /// first of those.
    pub opened: (u64, Time),
    /// Time from the end of the last outage until the last call was refused.
    pub closed: Time,
}

impl Tally {
    /// Wrong refusals and doomed calls.
    pub fn sum(&self) -> u64 {
        self.wrong + self.doomed
    }

    fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.calls += other.calls;
        self.wrong += other.wrong;
        self.doomed += other.doomed;
        self.transitions += other.transitions;
        self.opened.0 += other.opened.0;
        self.opened.1 += other.opened.1;
        self.closed += other.closed;
    }
}

/// Calls that came before are not counted: rules that begin without a past have one by then.
const COUNTED_FROM: Time = 30 * SEC;

/// A call that was sent.
struct Sent<T> {
    counts: bool,
    endpoint: usize,
    ticket: T,
    fate: Fate,
}

/// Times of calls under way: when something happens to one, its order, which, and what.
type Happenings = BinaryHeap<Reverse<(Time, u64, usize, bool)>>;

/// All runs of a scenario under a rule. `rule` makes a fresh one from the number of endpoints and a
/// seed.
pub fn all<R: Rule>(scenario: &Scenario, rule: impl Fn(usize, u64) -> R) -> Tally {
    let mut tally = Tally::default();
    for run in 1..=scenario.runs {
        let seed = hash(run);
        let mut rule = rule(scenario.endpoints, seed);
        tally.add(&one(scenario, seed, &mut rule));
    }
    tally
}

fn one<R: Rule>(scenario: &Scenario, seed: u64, rule: &mut R) -> Tally {
    let plan = scenario.plan(seed);
    let load = u64::from(scenario.clients) / scenario.endpoints as u64;
    let mut world = World::new(
        plan.phases.clone(),
        scenario.patience,
        load.max(1),
        scenario.endpoints,
    );
    let mut run = Run {
        rule,
        under_way: Vec::new(),
        free: Vec::new(),
        happenings: BinaryHeap::new(),
        order: 0,
        tally: Tally {
            runs: 1,
            ..Tally::default()
        },
    };
    let (mut first_refused, mut last_refused) = (None, plan.ends);
    // Where a refused call may go: to every endpoint of the name, one after the other.
    let tries = if scenario.one_name {
        scenario.endpoints
    } else {
        1
    };
    let mut arrivals = Vec::with_capacity(scenario.clients as usize);
    for second in 0..plan.length / SEC {
        // Each client calls once a second, at a time of its own in each.
        arrivals.clear();
        arrivals.extend((0..u64::from(scenario.clients)).map(|client| {
            let call = second << 32 | client;
            let draw = hash(seed ^ hash(call));
            (second * SEC + draw % SEC, call)
        }));
        arrivals.sort_unstable();
        for &(now, call) in &arrivals {
            run.until(&mut world, now);
            let luck = Luck::of(seed, call);
            let draw = hash(seed.wrapping_add(call));
            let first = (draw >> 32) as usize % scenario.endpoints;
            let endpoints = (first..first + tries).map(|n| n % scenario.endpoints);
            if run.arrive(&mut world, endpoints, now, luck, draw) {
                continue;
            }
            if now >= plan.begins && now < plan.first_ends {
                first_refused.get_or_insert(now);
            }
            if now >= plan.ends {
                last_refused = now;
            }
        }
    }
    let mut tally = run.tally;
    tally.transitions = rule.transitions();
    if let Some(at) = first_refused {
        tally.opened = (1, at - plan.begins);
    }
    tally.closed = last_refused - plan.ends;
    tally
}

struct Run<'a, R: Rule> {
    rule: &'a mut R,
    under_way: Vec<Option<Sent<R::Ticket>>>,
    free: Vec<usize>,
    happenings: Happenings,
    order: u64,
    tally: Tally,
}

impl<R: Rule> Run<'_, R> {
    /// Everything that happens before `now`: ends of calls first, then what the rule does by itself.
    fn until(&mut self, world: &mut World, now: Time) {
        loop {
            let happening = self.happenings.peek().map(|Reverse((at, ..))| *at);
            let wake = self.rule.wakes_at();
            match (happening, wake) {
                (Some(at), wake) if at <= now && wake.is_none_or(|wake| at <= wake) => {
                    self.happen()
                }
                (_, Some(at)) if at <= now => {
                    let mut dial = |endpoint, luck| world.dial(endpoint, at, luck);
                    self.rule.wake(at, &mut dial);
                }
                _ => return,
            }
        }
    }

    fn happen(&mut self) {
        let Some(Reverse((at, _, index, is_end))) = self.happenings.pop() else {
            return;
        };
        if !is_end {
            if let Some(sent) = &mut self.under_way[index] {
                self.rule.established(sent.endpoint, &mut sent.ticket, at);
                self.order += 1;
                let end = (sent.fate.end, self.order, index, true);
                self.happenings.push(Reverse(end));
            }
        } else if let Some(sent) = self.under_way[index].take() {
            self.free.push(index);
            self.tally.doomed += u64::from(sent.counts && !sent.fate.is_good());
            self.rule.ended(sent.endpoint, sent.ticket, &sent.fate, at);
        }
    }

    /// A call comes for the first of the endpoints, or those after it; whether it passes.
    fn arrive(
        &mut self,
        world: &mut World,
        mut endpoints: impl Iterator<Item = usize> + Clone,
        now: Time,
        luck: Luck,
        draw: u64,
    ) -> bool {
        let counts = now >= COUNTED_FROM;
        self.tally.calls += u64::from(counts);
        let asked = endpoints.clone();
        let admit = |endpoint| Some((endpoint, self.rule.admit(endpoint, now, draw)?));
        let Some((endpoint, ticket)) = endpoints.find_map(admit) else {
            // What the first one would have made of it.
            let fate = asked
                .into_iter()
                .next()
                .map(|endpoint| world.call(endpoint, now, luck, false));
            self.tally.wrong += u64::from(counts && fate.is_some_and(|fate| fate.is_good()));
            return false;
        };
        let fate = world.call(endpoint, now, luck, true);
        let sent = Some(Sent {
            counts,
            endpoint,
            ticket,
            fate,
        });
        let index = self.free.pop().unwrap_or_else(|| {
            self.under_way.push(None);
            self.under_way.len() - 1
        });
        self.under_way[index] = sent;
        self.order += 1;
        let (at, is_end) = match fate.established {
            Some(at) if R::HEARS_ESTABLISHED => (at, false),
            _ => (fate.end, true),
        };
        self.happenings
            .push(Reverse((at, self.order, index, is_end)));
        true
    }
}
