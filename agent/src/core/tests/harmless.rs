//! Properties of the whole: the core, a kernel, and news of which anything may happen to: they come in any
//! order, twice, or not at all.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::replay::{Shadow, Stamp};

/// What a step does.
#[derive(Clone, Debug)]
enum Step {
    /// A connect comes, and an exchange on it when it succeeds.
    Connect {
        draw: u64,
    },
    /// The n-th of those under way ends.
    End {
        which: usize,
        how: Ending,
    },
    /// The n-th piece of news is heard, and stays if it comes twice.
    Hear {
        which: usize,
        again: bool,
    },
    /// It is lost.
    Lose {
        which: usize,
    },
    /// A dial is answered or not, asked for or not.
    Dial {
        success: bool,
    },
    Wait {
        ms: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Ending {
    Well,
    Badly,
    Abandoned,
}

#[derive(Clone, Copy, Debug)]
enum News {
    Failure(WindowKind),
    Started(u32),
    Ended(u32, ProbeOutcome),
    Refused(u64),
}

#[derive(Clone, Copy)]
struct UnderWay {
    stamp: Stamp,
    exchange: Option<u32>,
}

struct World {
    engine: Engine,
    shadow: Shadow,
    settings: Arc<BreakerSettings>,
    now: Nanos,
    out: Vec<Action>,
    under_way: Vec<UnderWay>,
    news: Vec<News>,
    /// Probes under way, and probes that ended saying something, by generation.
    probes: BTreeMap<u32, (u32, u32)>,
    limits: BTreeMap<u32, u32>,
    came: u64,
    refused: u64,
    entered: u64,
    late: u64,
    said_nothing: u64,
}

impl World {
    fn new(settings: BreakerSettings, seed: u64) -> Self {
        Self {
            engine: Engine::new(seed),
            shadow: Shadow::default(),
            settings: Arc::new(settings),
            now: secs(1000),
            out: Vec::new(),
            under_way: Vec::new(),
            news: Vec::new(),
            probes: BTreeMap::new(),
            limits: BTreeMap::new(),
            came: 0,
            refused: 0,
            entered: 0,
            late: 0,
            said_nothing: 0,
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Connect { draw } => self.connect(draw),
            Step::End { which, how } if !self.under_way.is_empty() => {
                let call = self.under_way.swap_remove(which % self.under_way.len());
                self.end(call, how);
            }
            Step::Hear { which, again } if !self.news.is_empty() => {
                let which = which % self.news.len();
                let news = self.news[which];
                if !again {
                    self.news.swap_remove(which);
                }
                self.hear(news);
            }
            Step::Lose { which } if !self.news.is_empty() => {
                self.news.swap_remove(which % self.news.len());
            }
            Step::Dial { success } => {
                let target = target(1);
                self.handle(Event::DialEnded { target, success });
            }
            Step::Wait { ms } => {
                self.now = self.now + millis(ms);
                self.handle(Event::Deadline);
            }
            Step::End { .. } | Step::Hear { .. } | Step::Lose { .. } => {}
        }
    }

    fn connect(&mut self, draw: u64) {
        self.came += 1;
        let Some(stamp) = self.shadow.admit(self.now, draw) else {
            self.refused += 1;
            return self.news.push(News::Refused(self.refused));
        };
        if stamp.probe {
            self.probes.entry(stamp.generation).or_default().0 += 1;
            self.news.push(News::Started(stamp.generation));
        }
        let exchange = None;
        self.under_way.push(UnderWay { stamp, exchange });
    }

    fn end(&mut self, mut call: UnderWay, how: Ending) {
        let stamp = call.stamp;
        let (kind, generation) = match call.exchange {
            None => (WindowKind::Connects, stamp.generation),
            Some(generation) => (WindowKind::Exchanges, generation),
        };
        if how == Ending::Abandoned {
            self.said_nothing += 1;
            if stamp.probe {
                // The kernel gives the slot back, if the round is still that one.
                self.shadow.give_back(stamp);
                let probes = self.probes.entry(stamp.generation).or_default();
                probes.0 -= 1;
                let outcome = ProbeOutcome::Returned;
                self.news.push(News::Ended(stamp.generation, outcome));
            }
            return;
        }
        let failed = how == Ending::Badly;
        match self.shadow.enter(kind, generation, self.now, failed, false) {
            Some(_) => self.entered += 1,
            None => self.late += 1,
        }
        if failed {
            self.news.push(News::Failure(kind));
        }
        let goes_on = call.exchange.is_none() && !failed;
        if stamp.probe && !(goes_on && stamp.by_exchange) {
            // One that ended with its connect goes on as an ordinary call.
            let (outcome, ended) = if failed {
                (ProbeOutcome::Failure, stamp)
            } else {
                (ProbeOutcome::Success, stamp)
            };
            let probes = self.probes.entry(ended.generation).or_default();
            (probes.0, probes.1) = (probes.0 - 1, probes.1 + 1);
            self.news.push(News::Ended(ended.generation, outcome));
            call.stamp.probe = false;
        }
        if goes_on {
            self.came += 1;
            call.exchange = Some(self.shadow.generation());
            self.under_way.push(call);
        }
    }

    fn hear(&mut self, news: News) {
        let last_seqs = self.shadow.last_seqs();
        match news {
            News::Failure(kind) => {
                self.known();
                let event = self.shadow.calls(ROW, kind).unwrap();
                self.engine.handle(event, self.now, &mut self.out);
                self.apply();
            }
            News::Started(generation) => self.handle(Event::ProbeStarted {
                row: ROW,
                generation,
            }),
            News::Ended(generation, outcome) => self.handle(Event::ProbeEnded {
                row: ROW,
                generation,
                outcome,
                last_seqs,
            }),
            News::Refused(refused) => self.handle(Event::Refused { row: ROW, refused }),
        }
    }

    fn known(&mut self) {
        if !self.engine.contains(ROW) {
            let event = Event::Configure {
                row: ROW,
                target: target(1),
                settings: Arc::clone(&self.settings),
                generation: self.shadow.generation(),
            };
            self.engine.handle(event, self.now, &mut self.out);
        }
    }

    fn handle(&mut self, event: Event<'static>) {
        self.known();
        self.engine.handle(event, self.now, &mut self.out);
        self.apply();
    }

    fn apply(&mut self) {
        for action in std::mem::take(&mut self.out) {
            if let Action::SetVerdict {
                verdict,
                until,
                probe_limit,
                ..
            } = action
            {
                self.shadow.set(verdict, until, probe_limit);
                self.limits.insert(verdict.generation, probe_limit);
            }
        }
    }

    fn check(&self) {
        let ended = self.entered + self.late + self.said_nothing;
        assert_eq!(
            self.came,
            self.refused + ended + self.under_way.len() as u64,
            "every call is somewhere, and once"
        );
        for (generation, (under_way, ended)) in &self.probes {
            let limit = self.limits[generation].min(self.settings.probes);
            assert!(
                under_way + ended <= limit,
                "generation {generation}: {under_way} probes under way and {ended} ended, of {limit}"
            );
        }
    }

    /// From now on everything works, and what happens is heard.
    fn heal(&mut self) {
        for round in 0..5_000 {
            while let Some(call) = self.under_way.pop() {
                self.end(call, Ending::Well);
            }
            while let Some(news) = self.news.pop() {
                self.hear(news);
            }
            let closed = self.engine.state(ROW).unwrap_or(State::Closed) == State::Closed;
            if closed && !self.shadow.refuses(self.now) {
                return;
            }
            self.step(&Step::Connect { draw: round });
            self.step(&Step::Wait { ms: 500 });
            self.check();
        }
        panic!("it never closed: {:?}", self.engine.view(ROW, self.now));
    }
}

fn step() -> impl Strategy<Value = Step> {
    let how = prop_oneof![
        4 => Just(Ending::Badly),
        3 => Just(Ending::Well),
        1 => Just(Ending::Abandoned),
    ];
    let wait = prop_oneof![0u64..100, 0u64..5_000, 0u64..60_000];
    prop_oneof![
        8 => any::<u64>().prop_map(|draw| Step::Connect { draw }),
        8 => (any::<usize>(), how).prop_map(|(which, how)| Step::End { which, how }),
        8 => (any::<usize>(), any::<bool>()).prop_map(|(which, again)| Step::Hear { which, again }),
        2 => any::<usize>().prop_map(|which| Step::Lose { which }),
        1 => any::<bool>().prop_map(|success| Step::Dial { success }),
        2 => wait.prop_map(|ms| Step::Wait { ms }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// No state without an exit, never more probes than there may be, no call lost or counted twice,
    /// whatever becomes of the news.
    #[test]
    fn any_order_loss_or_repetition_of_news_is_harmless(
        seed: u64,
        steps in prop::collection::vec(step(), 0..400),
        probes in 1u32..4,
        successes_to_close in 1u32..4,
        redial: bool,
    ) {
        let settings = BreakerSettings {
            probes,
            successes_to_close,
            redial,
            cooldown: secs(5),
            cooldown_max: secs(40),
            exchange_lease: secs(4),
            ..BreakerSettings::default()
        };
        let mut world = World::new(settings, seed);
        for step in &steps {
            world.step(step);
            world.check();
        }
        world.heal();
    }
}
