//! A kernel, its clients and a destination on a virtual clock, around a real engine.
//!
//! The kernel does what the hooks do: it reads the packed verdict, claims and returns probe slots
//! in the packed word, lets everything pass once a verdict has run out, writes outcomes of the
//! current generation into the real rings of calls, and sends events, of which some are lost,
//! repeated or late. It counts lost ones, and the shell looks at the row when it sees that. Each
//! connection carries one exchange.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use agent_common::Verdict;
use agent_common::ramp;
use agent_common::verdict::{
    STATE_FORCED_OPEN, STATE_HALF_OPEN, STATE_OPEN, STATE_RAMP, VERDICT_PROBE_BY_EXCHANGE,
    pack_probe_slots, unpack_probe_slots,
};

use super::super::*;
use crate::core::refusing::{Refusing, TOLD_EVERY};

/// How the destination answers a SYN, of a program or of the agent's dial, and a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Established,
    Refused,
    Silence,
    /// The agent is answered, programs are refused.
    Misleading,
    /// Connections are established, and reset when a request comes.
    Broken,
}

/// From when to when the destination answers otherwise than established.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outage {
    pub(super) from: Nanos,
    pub(super) to: Nanos,
    pub(super) answer: Answer,
}

pub(super) struct Plan {
    pub(super) settings: BreakerSettings,
    pub(super) clients: u32,
    /// Pause of a client between two connects.
    pub(super) pause: Nanos,
    pub(super) outages: Vec<Outage>,
    /// Percent of kernel events and dial answers that are lost.
    pub(super) lost: u64,
    /// Percent that come twice.
    pub(super) twice: u64,
    /// Percent of connects that a client abandons before an answer.
    pub(super) abandoned: u64,
    pub(super) seed: u64,
}

const CONNECT_TIMEOUT: Nanos = Nanos::from_secs(2);
/// How long it may take until the shell sees that events were lost.
const LOSS_UNSEEN: Nanos = Nanos::from_millis(500);
const ROUND_TRIP: Nanos = Nanos::from_millis(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Happening {
    Connect {
        client: u32,
    },
    Outcome {
        client: u32,
        stamp: Stamp,
        end: End,
    },
    Exchanged {
        client: u32,
        generation: u32,
        probe: Option<u32>,
    },
    Heard(News),
    LossSeen,
    DialAnswer {
        success: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Stamp {
    generation: u32,
    probe: bool,
    /// A probe that ends with its exchange.
    by_exchange: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Established,
    Failed,
    Abandoned,
}

/// An event in the ring buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum News {
    /// In this window ([`WindowKind::index`]).
    Failure {
        window: usize,
    },
    ProbeStarted {
        generation: u32,
    },
    ProbeEnded {
        generation: u32,
        end: End,
    },
    Refused,
}

/// SYNs of one half-open verdict.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Round {
    /// When its last SYN left.
    pub(super) at: Nanos,
    pub(super) syns: u32,
    pub(super) abandoned: u32,
}

pub(super) struct World {
    plan: Plan,
    pub(super) now: Nanos,
    queue: BinaryHeap<Reverse<(Nanos, u64, Happening)>>,
    order: u64,
    random: u64,
    engine: Engine,
    out: Vec<Action>,
    // the row
    verdict: u64,
    verdict_until: Nanos,
    slots: u64,
    probe_limit: u32,
    rings: [Ring; 2],
    // what was seen
    pub(super) rounds: BTreeMap<u32, Round>,
    pub(super) transitions: Vec<(Nanos, State, State, Reason)>,
    pub(super) dials: Vec<Nanos>,
    /// SYNs that met no answer or a refusal.
    pub(super) bad_syns: u64,
    /// Exchanges that failed.
    pub(super) bad_exchanges: u64,
    pub(super) refused: Vec<Nanos>,
    refusal_told: Option<Nanos>,
    refusing: Refusing,
    /// Connects that passed since the verdict had run out. The agent lives: none.
    pub(super) ran_out: u64,
}

impl World {
    pub(super) fn new(plan: Plan) -> Self {
        let mut world = Self {
            now: Nanos::ZERO,
            queue: BinaryHeap::new(),
            order: 0,
            random: plan.seed,
            engine: Engine::new(plan.seed),
            out: Vec::new(),
            verdict: 0,
            verdict_until: Nanos::ZERO,
            slots: 0,
            probe_limit: 0,
            rings: [Ring::new(), Ring::new()],
            rounds: BTreeMap::new(),
            transitions: Vec::new(),
            dials: Vec::new(),
            bad_syns: 0,
            bad_exchanges: 0,
            refused: Vec::new(),
            refusal_told: None,
            refusing: Refusing::default(),
            ran_out: 0,
            plan,
        };
        for client in 0..world.plan.clients {
            let at = Nanos(world.draw(world.plan.pause.0));
            world.schedule(at, Happening::Connect { client });
        }
        world
    }

    pub(super) fn state(&self) -> State {
        self.engine
            .view(ROW, self.now)
            .map_or(State::Closed, |view| view.state)
    }

    pub(super) fn run_until(&mut self, end: Nanos) {
        loop {
            let happening = self.queue.peek().map(|Reverse((at, ..))| *at);
            let deadline = self.engine.next_deadline();
            let look = self.refusing.next_look();
            let Some(at) = [happening, deadline, look].into_iter().flatten().min() else {
                break;
            };
            if at > end {
                break;
            }
            self.now = self.now.max(at);
            if happening == Some(at) {
                if let Some(Reverse((_, _, happening))) = self.queue.pop() {
                    self.happen(happening);
                }
            } else if deadline == Some(at) {
                self.engine.handle(Event::Deadline, self.now, &mut self.out);
                self.apply();
            } else {
                self.look_at_refusals();
            }
        }
        self.now = end;
    }

    /// Uniform below `end` (xorshift; 0 when `end` is 0).
    fn draw(&mut self, end: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % end.max(1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.draw(100) < percent
    }

    fn schedule(&mut self, at: Nanos, happening: Happening) {
        self.order += 1;
        self.queue.push(Reverse((at, self.order, happening)));
    }

    fn answer(&self) -> Answer {
        self.plan
            .outages
            .iter()
            .find(|outage| outage.from <= self.now && self.now < outage.to)
            .map_or(Answer::Established, |outage| outage.answer)
    }

    // --- kernel and clients

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Connect { client } => self.connect(client),
            Happening::Outcome { client, stamp, end } => self.outcome(client, stamp, end),
            Happening::Exchanged {
                client,
                generation,
                probe,
            } => self.exchanged(client, generation, probe),
            Happening::Heard(news) => self.hear(news),
            Happening::LossSeen => self.look_after_loss(),
            Happening::DialAnswer { success } => {
                let event = Event::DialEnded {
                    target: target(1),
                    success,
                };
                self.engine.handle(event, self.now, &mut self.out);
                self.apply();
            }
        }
    }

    fn connect(&mut self, client: u32) {
        let verdict = Verdict::unpack(self.verdict);
        let mut stamp = Stamp {
            generation: verdict.generation,
            probe: false,
            by_exchange: verdict.flags & VERDICT_PROBE_BY_EXCHANGE != 0,
        };
        let in_force = self.now < self.verdict_until;
        let refusing = [STATE_OPEN, STATE_HALF_OPEN, STATE_FORCED_OPEN];
        self.ran_out += u64::from(refusing.contains(&verdict.state) && !in_force);
        let refuse = match verdict.state {
            STATE_OPEN | STATE_FORCED_OPEN => in_force,
            STATE_HALF_OPEN if in_force => {
                let (generation, taken) = unpack_probe_slots(self.slots);
                stamp.probe = generation == verdict.generation && taken < self.probe_limit;
                if stamp.probe {
                    self.slots = pack_probe_slots(generation, taken + 1);
                    let round = self.rounds.entry(generation).or_default();
                    round.syns += 1;
                    round.at = self.now;
                    self.tell(News::ProbeStarted { generation });
                }
                !stamp.probe
            }
            STATE_RAMP if in_force => {
                let left = (self.verdict_until - self.now).0;
                let (generation, taken) = unpack_probe_slots(self.slots);
                let floor = taken < ramp::floor(left);
                if floor {
                    self.slots = pack_probe_slots(generation, taken + 1);
                }
                !floor && !self.chance(u64::from(ramp::share(left)))
            }
            _ => false,
        };
        if refuse {
            self.refused.push(self.now);
            if self
                .refusal_told
                .is_none_or(|at| self.now - at >= TOLD_EVERY)
            {
                self.refusal_told = Some(self.now);
                self.tell(News::Refused);
            }
            return self.again(client);
        }
        let answer = self.answer();
        if !matches!(answer, Answer::Established | Answer::Broken) {
            self.bad_syns += 1;
        }
        let (end, after) = match answer {
            _ if self.chance(self.plan.abandoned) => (End::Abandoned, ROUND_TRIP),
            Answer::Established | Answer::Broken => (End::Established, ROUND_TRIP),
            Answer::Refused | Answer::Misleading => (End::Failed, ROUND_TRIP),
            Answer::Silence => (End::Failed, CONNECT_TIMEOUT),
        };
        self.schedule(self.now + after, Happening::Outcome { client, stamp, end });
    }

    fn outcome(&mut self, client: u32, stamp: Stamp, end: End) {
        let generation = Verdict::unpack(self.verdict).generation;
        let current = stamp.generation == generation;
        if end == End::Abandoned {
            let (generation, taken) = unpack_probe_slots(self.slots);
            if stamp.probe {
                self.rounds.entry(stamp.generation).or_default().abandoned += 1;
                if generation == stamp.generation {
                    self.slots = pack_probe_slots(generation, taken - 1);
                }
            }
        } else if current {
            self.rings[0].push(self.now, end == End::Failed);
            if end == End::Failed {
                self.tell(News::Failure { window: 0 });
            }
        }
        let goes_on = end == End::Established;
        if stamp.probe && !(goes_on && stamp.by_exchange) {
            self.tell(News::ProbeEnded {
                generation: stamp.generation,
                end,
            });
        }
        if !goes_on {
            return self.again(client);
        }
        // The exchange begins under the verdict there is now.
        let probe = (stamp.probe && stamp.by_exchange).then_some(stamp.generation);
        let happening = Happening::Exchanged {
            client,
            generation,
            probe,
        };
        self.schedule(self.now + ROUND_TRIP, happening);
    }

    /// `generation`: of the verdict under which it began; `probe`: of the round that it is a probe
    /// of.
    fn exchanged(&mut self, client: u32, generation: u32, probe: Option<u32>) {
        self.again(client);
        let failed = self.answer() == Answer::Broken;
        self.bad_exchanges += u64::from(failed);
        if generation == Verdict::unpack(self.verdict).generation {
            self.rings[1].push(self.now, failed);
            if failed {
                self.tell(News::Failure { window: 1 });
            }
        }
        if let Some(generation) = probe {
            let end = if failed {
                End::Failed
            } else {
                End::Established
            };
            self.tell(News::ProbeEnded { generation, end });
        }
    }

    fn again(&mut self, client: u32) {
        let pause = self.plan.pause;
        let at = self.now + pause.half() + Nanos(self.draw(pause.0));
        self.schedule(at, Happening::Connect { client });
    }

    fn tell(&mut self, news: News) {
        if self.chance(self.plan.lost) {
            let seen = self.now + Nanos(self.draw(LOSS_UNSEEN.0));
            return self.schedule(seen, Happening::LossSeen);
        }
        let soon = Nanos(10_000 + self.draw(100_000));
        self.schedule(self.now + soon, Happening::Heard(news));
        if self.chance(self.plan.twice) {
            let later = Nanos(self.draw(100_000_000));
            self.schedule(self.now + later, Happening::Heard(news));
        }
    }

    // --- the shell

    fn look_after_loss(&mut self) {
        for window in 0..2 {
            self.hear(News::Failure { window });
        }
        let (generation, taken) = unpack_probe_slots(self.slots);
        if taken > 0 {
            self.hear(News::ProbeStarted { generation });
        }
    }

    fn hear(&mut self, news: News) {
        if !self.engine.contains(ROW) {
            let event = Event::Configure {
                row: ROW,
                target: target(1),
                settings: Arc::new(self.plan.settings.clone()),
                generation: Verdict::unpack(self.verdict).generation,
            };
            self.engine.handle(event, self.now, &mut self.out);
        }
        let event = match news {
            News::Failure { window } => Event::Calls {
                row: ROW,
                kind: [WindowKind::Connects, WindowKind::Exchanges][window],
                last_seq: self.rings[window].last_seq,
                window: &self.rings[window].window,
            },
            News::ProbeStarted { generation } => Event::ProbeStarted {
                row: ROW,
                generation,
            },
            News::Refused => Event::Refused {
                row: ROW,
                refused: self.refused.len() as u64,
            },
            News::ProbeEnded { generation, end } => Event::ProbeEnded {
                row: ROW,
                generation,
                outcome: match end {
                    End::Established => ProbeOutcome::Success,
                    End::Failed => ProbeOutcome::Failure,
                    End::Abandoned => ProbeOutcome::Returned,
                },
                last_seqs: [self.rings[0].last_seq, self.rings[1].last_seq],
            },
        };
        let is_refusal = matches!(event, Event::Refused { .. });
        self.engine.handle(event, self.now, &mut self.out);
        if is_refusal && self.state() == State::Open {
            self.refusing.heard(ROW, self.now);
        }
        self.apply();
    }

    fn look_at_refusals(&mut self) {
        let is_open = |row| self.engine.state(row) == Some(State::Open);
        for row in self.refusing.due(self.now, is_open) {
            let refused = self.refused.len() as u64;
            let event = Event::Refused { row, refused };
            self.engine.handle(event, self.now, &mut self.out);
            self.apply();
        }
    }

    fn apply(&mut self) {
        for action in std::mem::take(&mut self.out) {
            match action {
                Action::SetVerdict {
                    verdict,
                    until,
                    probe_limit,
                    ..
                } => {
                    self.slots = pack_probe_slots(verdict.generation, 0);
                    self.probe_limit = probe_limit;
                    self.verdict_until = until;
                    self.verdict = verdict.pack();
                }
                Action::Transition {
                    from, to, reason, ..
                } => self.transitions.push((self.now, from, to, reason)),
                Action::Bypassed { .. } => panic!("no row has a name"),
                Action::Redialled { .. } => {}
                Action::Correlated(_) => panic!("one destination is not many"),
                Action::Dial { .. } => {
                    self.dials.push(self.now);
                    let (success, after) = match self.answer() {
                        Answer::Established | Answer::Misleading | Answer::Broken => {
                            (true, ROUND_TRIP)
                        }
                        Answer::Refused => (false, ROUND_TRIP),
                        Answer::Silence => (false, CONNECT_TIMEOUT),
                    };
                    if !self.chance(self.plan.lost) {
                        self.schedule(self.now + after, Happening::DialAnswer { success });
                    }
                }
            }
        }
    }
}
