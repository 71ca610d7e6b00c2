//! Backstop: the real core, and around it what the kernel's programs and the agent do.
//!
//! The kernel's part: the packed verdict, probe slots, the admission ramp, calls of the current
//! generation in the real rings. The agent's: news that come [`NEWS`] late, deadlines, dials, the look
//! for exchanges that hang, the count of destinations with traffic. Every number of a policy is the
//! default.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use agent_common::key;
use backstop::core::hung::{AUTO_USUAL, Arrivals, Past, Wait, is_hung};
use backstop::core::{
    Action, BreakerSettings, DialTarget, Endpoint, Engine, Event, HungRule, Membership, Nanos,
    ProbeOutcome, RowId, State, WindowKind,
    refusing::{Refusing, TOLD_EVERY},
};
use backstop::replay::{self, Shadow};

use super::{Fate, Luck, Rule, Time};
use crate::world::{How, MS, SEC, hash};

/// From the kernel's event to the agent's reaction: p99 of `cargo xtask bench reaction`.
const NEWS: Time = 50_000;
/// The agent looks at exchanges that wait at least this often.
const LOOK: Time = SEC;
/// Exchanges that have waited for less do not make their row worth a look.
const YOUNG: Time = 500 * MS;
/// While connects fail, the agent counts the destinations with traffic this often.
const TRAFFIC: Time = 500 * MS;
/// It goes on for so long after a failure.
const TRAFFIC_AFTER: Time = 10 * SEC;
/// Traffic is a connect within this time.
const TRAFFIC_WITHIN: Time = 60 * SEC;

/// An exchange that waits for its answer.
struct Waiting {
    begun: Time,
    generation: u32,
    /// Counted as hung, with this number in the ring.
    counted: Option<u64>,
}

/// A row of the kernel's table, and what the agent knows of it.
struct Row {
    shadow: Shadow,
    last_connect: Time,
    refused: u64,
    refused_told: Option<Time>,
    requests: u64,
    responses: u64,
    slow_responses: u64,
    longest: Time,
    last_answer: Time,
    waiting: BTreeMap<u64, Waiting>,
    arrivals: Arrivals,
}

/// What the agent hears.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    /// In exchanges, else in connects.
    Failure(usize, bool),
    ProbeStarted(usize, u32),
    /// Whether it succeeded.
    ProbeEnded(usize, u32, bool),
    DialEnded(usize, bool),
    Refused(usize),
}

const CONNECTS: WindowKind = WindowKind::Connects;
const EXCHANGES: WindowKind = WindowKind::Exchanges;

/// What a call takes along: the stamp of its socket.
#[derive(Clone, Copy)]
pub struct Stamp {
    call: u64,
    kernels: replay::Stamp,
    /// The verdict under which the exchange began.
    exchange_generation: u32,
    is_open: bool,
}

/// See the module.
pub struct Backstop {
    engine: Engine,
    settings: Arc<BreakerSettings>,
    rows: Vec<Row>,
    news: BinaryHeap<Reverse<(Time, u64, News)>>,
    order: u64,
    seed: u64,
    look_at: Time,
    traffic_at: Time,
    failed_at: Option<Time>,
    refusing: Refusing,
    actions: Vec<Action>,
    transitions: u64,
}

impl Backstop {
    /// So many endpoints, of one name or strangers to one another; all jitter comes from the seed.
    pub fn new(endpoints: usize, one_name: bool, seed: u64) -> Self {
        let row = || Row {
            shadow: Shadow::default(),
            last_connect: 0,
            refused: 0,
            refused_told: None,
            requests: 0,
            responses: 0,
            slow_responses: 0,
            longest: 0,
            last_answer: 0,
            waiting: BTreeMap::new(),
            arrivals: Arrivals::default(),
        };
        let (mut engine, mut actions) = (Engine::new(seed), Vec::new());
        // All of them have been called before anything happens: the group is complete.
        let membership = Membership {
            group: 1,
            addresses: endpoints as u32,
            v6: false,
        };
        let all = (0..endpoints).filter(|_| one_name).map(|row| Endpoint {
            row: id(row),
            groups: [membership].into(),
        });
        let members: Vec<Endpoint> = all.collect();
        let group = Event::Groups {
            endpoints: &members,
        };
        engine.handle(group, Nanos(0), &mut actions);
        Self {
            engine,
            settings: Arc::new(BreakerSettings::default()),
            rows: (0..endpoints).map(|_| row()).collect(),
            news: BinaryHeap::new(),
            order: 0,
            seed,
            look_at: LOOK,
            traffic_at: TRAFFIC,
            failed_at: None,
            refusing: Refusing::default(),
            actions,
            transitions: 0,
        }
    }

    // --- the kernel

    fn tell(&mut self, at: Time, news: News) {
        self.order += 1;
        self.news.push(Reverse((at, self.order, news)));
    }

    /// A call is over: it is in the ring if it began under the verdict there is now.
    fn call(
        &mut self,
        endpoint: usize,
        window: WindowKind,
        generation: u32,
        failed: bool,
        now: Time,
    ) {
        let shadow = &mut self.rows[endpoint].shadow;
        let entered = shadow.enter(window, generation, Nanos(now), failed, false);
        if entered.is_some() && failed {
            let news = News::Failure(endpoint, window == EXCHANGES);
            self.tell(now + NEWS, news);
        }
    }

    fn exchange_ended(&mut self, endpoint: usize, stamp: Stamp, fate: &Fate, now: Time) {
        let row = &mut self.rows[endpoint];
        let waiting = row.waiting.remove(&stamp.call);
        let failed = !fate.is_good();
        if matches!(fate.how, How::Answered | How::Error) {
            let begun = waiting.as_ref().map_or(now, |waiting| waiting.begun);
            row.responses += 1;
            row.slow_responses += u64::from(now - begun >= AUTO_USUAL.0);
            row.longest = row.longest.max(now - begun);
            row.last_answer = now;
        }
        match waiting.and_then(|waiting| waiting.counted) {
            // Counted while it hung: the window is repaired if it was answered after all.
            Some(seq) if !failed => row.shadow.repair(EXCHANGES, seq),
            Some(_) => {}
            None => self.call(endpoint, EXCHANGES, stamp.exchange_generation, failed, now),
        }
    }

    // --- the agent

    fn hear(&mut self, news: News, now: Time) {
        let (endpoint, event) = match news {
            News::DialEnded(endpoint, success) => {
                let target = target(endpoint);
                (endpoint, Event::DialEnded { target, success })
            }
            News::Failure(endpoint, in_exchanges) => {
                self.failed_at = Some(now);
                let kind = if in_exchanges { EXCHANGES } else { CONNECTS };
                let Some(event) = self.rows[endpoint].shadow.calls(id(endpoint), kind) else {
                    return;
                };
                (endpoint, event)
            }
            News::Refused(endpoint) => {
                let row = id(endpoint);
                let refused = self.rows[endpoint].refused;
                (endpoint, Event::Refused { row, refused })
            }
            News::ProbeStarted(endpoint, generation) => {
                let row = id(endpoint);
                (endpoint, Event::ProbeStarted { row, generation })
            }
            News::ProbeEnded(endpoint, generation, good) => {
                let event = Event::ProbeEnded {
                    row: id(endpoint),
                    generation,
                    outcome: if good {
                        ProbeOutcome::Success
                    } else {
                        ProbeOutcome::Failure
                    },
                    last_seqs: self.rows[endpoint].shadow.last_seqs(),
                };
                (endpoint, event)
            }
        };
        if !self.engine.contains(id(endpoint)) {
            let configure = Event::Configure {
                row: id(endpoint),
                target: target(endpoint),
                settings: Arc::clone(&self.settings),
                generation: self.rows[endpoint].shadow.generation(),
            };
            self.engine.handle(configure, Nanos(now), &mut self.actions);
        }
        let is_refusal = matches!(event, Event::Refused { .. });
        self.engine.handle(event, Nanos(now), &mut self.actions);
        if is_refusal && self.engine.state(id(endpoint)) == Some(State::Open) {
            self.refusing.heard(id(endpoint), Nanos(now));
        }
    }

    /// Looks at rows that refuse.
    fn look_at_refusals(&mut self, now: Time) {
        let engine = &self.engine;
        let is_open = |row| engine.state(row) == Some(State::Open);
        for row in self.refusing.due(Nanos(now), is_open) {
            let refused = self.rows[row.index as usize].refused;
            let event = Event::Refused { row, refused };
            self.engine.handle(event, Nanos(now), &mut self.actions);
        }
    }

    fn perform(&mut self, dial: &mut dyn FnMut(usize, Luck) -> (bool, Time)) {
        for action in std::mem::take(&mut self.actions) {
            match action {
                Action::SetVerdict {
                    row,
                    verdict,
                    until,
                    probe_limit,
                } => {
                    let shadow = &mut self.rows[row.index as usize].shadow;
                    shadow.set(verdict, until, probe_limit);
                }
                Action::Transition { .. } => self.transitions += 1,
                Action::Correlated(_) | Action::Bypassed { .. } | Action::Redialled { .. } => {}
                Action::Dial { target } => {
                    let endpoint = u16::from_be(target.port_be) as usize;
                    self.seed = hash(self.seed);
                    let (success, at) = dial(endpoint, Luck::of(self.seed, 0));
                    self.tell(at, News::DialEnded(endpoint, success));
                }
            }
        }
    }

    /// Looks for exchanges that hang ([`is_hung`]).
    fn look(&mut self, now: Time) {
        let mut found = Vec::new();
        for (endpoint, row) in self.rows.iter_mut().enumerate() {
            let oldest = row.waiting.values().map(|waiting| waiting.begun).min();
            if oldest.is_none_or(|begun| now - begun < YOUNG) {
                row.arrivals = Arrivals::default();
                continue;
            }
            row.arrivals.note(Nanos(now), row.requests);
            let past = Past {
                responses: row.responses,
                is_quick: row.slow_responses * 100 <= row.responses,
                longest: Nanos(row.longest),
                last_answer: Nanos(row.last_answer),
            };
            for waiting in row.waiting.values_mut() {
                let begun = Nanos(waiting.begun);
                let wait = Wait {
                    begun,
                    asked: begun,
                    sending: false,
                    operation: begun,
                };
                let hangs = waiting.counted.is_none()
                    && waiting.generation == row.shadow.generation()
                    && is_hung(
                        HungRule::Auto,
                        wait,
                        Nanos(now),
                        &past,
                        &row.arrivals,
                        self.settings.min_calls,
                    );
                if hangs {
                    let generation = waiting.generation;
                    let at = Nanos(now);
                    waiting.counted = row.shadow.enter(EXCHANGES, generation, at, true, false);
                    found.push(endpoint);
                }
            }
        }
        for endpoint in found {
            self.tell(now + NEWS, News::Failure(endpoint, true));
        }
    }

    fn count_traffic(&mut self, now: Time) {
        if self.failed_at.is_some_and(|at| now - at <= TRAFFIC_AFTER) {
            let active =
                |row: &&Row| row.last_connect > 0 && now - row.last_connect <= TRAFFIC_WITHIN;
            let destinations = self.rows.iter().filter(active).count();
            self.engine
                .traffic(destinations, Nanos(now), &mut self.actions);
        }
    }
}

impl Rule for Backstop {
    type Ticket = Stamp;

    const HEARS_ESTABLISHED: bool = true;

    fn admit(&mut self, endpoint: usize, now: Time, draw: u64) -> Option<Stamp> {
        let row = &mut self.rows[endpoint];
        row.last_connect = now;
        let Some(kernels) = row.shadow.admit(Nanos(now), draw) else {
            row.refused += 1;
            if row.refused_told.is_none_or(|at| now - at >= TOLD_EVERY.0) {
                row.refused_told = Some(now);
                self.tell(now + NEWS, News::Refused(endpoint));
            }
            return None;
        };
        if kernels.probe {
            let started = News::ProbeStarted(endpoint, kernels.generation);
            self.tell(now + NEWS, started);
        }
        self.order += 1;
        Some(Stamp {
            call: self.order,
            kernels,
            exchange_generation: 0,
            is_open: false,
        })
    }

    fn established(&mut self, endpoint: usize, stamp: &mut Stamp, now: Time) {
        self.call(endpoint, CONNECTS, stamp.kernels.generation, false, now);
        if stamp.kernels.probe && !stamp.kernels.by_exchange {
            let ended = News::ProbeEnded(endpoint, stamp.kernels.generation, true);
            self.tell(now + NEWS, ended);
        }
        let row = &mut self.rows[endpoint];
        stamp.is_open = true;
        stamp.exchange_generation = row.shadow.generation();
        row.requests += 1;
        let waiting = Waiting {
            begun: now,
            generation: stamp.exchange_generation,
            counted: None,
        };
        row.waiting.insert(stamp.call, waiting);
    }

    fn ended(&mut self, endpoint: usize, stamp: Stamp, fate: &Fate, now: Time) {
        let good = fate.is_good();
        if stamp.is_open {
            self.exchange_ended(endpoint, stamp, fate, now);
        } else {
            self.call(endpoint, CONNECTS, stamp.kernels.generation, true, now);
        }
        // A probe by exchange ends with its exchange, and every probe with a connect that fails.
        if stamp.kernels.probe && (stamp.kernels.by_exchange || !stamp.is_open) {
            let ended = News::ProbeEnded(endpoint, stamp.kernels.generation, good);
            self.tell(now + NEWS, ended);
        }
    }

    fn wakes_at(&self) -> Option<Time> {
        let news = self.news.peek().map(|Reverse((at, ..))| *at);
        let deadline = self.engine.next_deadline().map(|at| at.0);
        let looks = Some(self.look_at.min(self.traffic_at));
        let refusals = self.refusing.next_look().map(|at| at.0);
        let all = [news, deadline, looks, refusals];
        all.into_iter().flatten().min()
    }

    fn wake(&mut self, now: Time, dial: &mut dyn FnMut(usize, Luck) -> (bool, Time)) {
        while let Some(Reverse((at, _, news))) = self.news.peek().copied()
            && at <= now
        {
            self.news.pop();
            self.hear(news, now);
            self.perform(dial);
        }
        if self.engine.next_deadline().is_some_and(|at| at.0 <= now) {
            self.engine
                .handle(Event::Deadline, Nanos(now), &mut self.actions);
        }
        self.look_at_refusals(now);
        if now >= self.look_at {
            self.look_at = now + LOOK;
            self.look(now);
        }
        if now >= self.traffic_at {
            self.traffic_at = now + TRAFFIC;
            self.count_traffic(now);
        }
        self.perform(dial);
    }

    fn transitions(&self) -> u64 {
        self.transitions
    }
}

fn id(endpoint: usize) -> RowId {
    RowId {
        index: endpoint as u32,
        incarnation: 1,
    }
}

/// 10.1.0.n:n, each endpoint at an address of its own.
fn target(endpoint: usize) -> DialTarget {
    DialTarget {
        netns_cookie: 1,
        addr: key::mapped([10, 1, 0, endpoint as u8]),
        ifindex: 0,
        port_be: (endpoint as u16).to_be(),
    }
}
