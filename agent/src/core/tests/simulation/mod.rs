//! Stories on a virtual clock, see [`world`].

mod world;

use proptest::prelude::*;

use super::*;
use world::{Answer, Outage, Plan, World};

fn crowd(settings: BreakerSettings, outage: Outage) -> Plan {
    Plan {
        settings,
        clients: 200,
        pause: millis(100),
        outages: vec![outage],
        lost: 0,
        twice: 0,
        abandoned: 0,
        seed: 7,
    }
}

fn refusing(from: u64, to: u64) -> Outage {
    Outage {
        from: secs(from),
        to: secs(to),
        answer: Answer::Refused,
    }
}

#[test]
fn a_crowd_meets_a_restart_and_the_redial_ends_it_within_a_second() {
    let mut world = World::new(crowd(BreakerSettings::default(), refusing(10, 25)));
    world.run_until(secs(10));
    assert_eq!((world.transitions.len(), world.refused.len()), (0, 0));
    world.run_until(secs(25));
    let &[(opened, State::Closed, State::Open, reason)] = &world.transitions[..] else {
        panic!("one opening expected, got {:?}", world.transitions);
    };
    assert!(opened < secs(10) + millis(20), "opened at {opened:?}");
    assert_eq!(reason.kind, ReasonKind::ConsecutiveFailures);
    // 2,000 connects a second would have met the refusal for 15 s.
    assert!(world.bad_syns < 20, "{} SYNs met it", world.bad_syns);
    assert!(world.dials.len() >= 24);
    assert!(world.rounds.is_empty(), "no user paid for a probe");
    world.run_until(secs(26));
    assert_eq!(world.state(), State::Closed, "{:?}", world.transitions);
    assert_eq!(world.rounds.len(), 2);
    assert!(world.rounds.values().all(|round| round.syns == 1));
    // The crowd comes in steps: of 1,300 connects in each, 10, 25 and 50 % and a few more pass.
    let closed = world.transitions.last().unwrap().0;
    world.run_until(secs(40));
    let refused = |from, to| {
        let step = |n: u64| closed + Nanos(2_000_000_000 / 3 * n);
        let within = |at: &&Nanos| (step(from)..step(to)).contains(*at);
        world.refused.iter().filter(within).count()
    };
    let steps = [refused(0, 1), refused(1, 2), refused(2, 3)];
    assert!(steps[0] > 1_000 && steps[0] < 1_250, "{steps:?}");
    assert!(steps[1] > 800 && steps[1] < 1_100, "{steps:?}");
    assert!(steps[2] > 500 && steps[2] < 800, "{steps:?}");
    assert_eq!(refused(3, 100), 0, "nothing is refused afterwards");
    assert_eq!(world.transitions.len(), 3);
}

#[test]
fn without_redial_the_cooldown_ends_it() {
    let settings = BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    };
    let mut world = World::new(crowd(settings, refusing(10, 25)));
    world.run_until(secs(40));
    assert_eq!(world.state(), State::Open);
    assert_eq!(world.dials, []);
    world.run_until(secs(41));
    assert_eq!(world.state(), State::Closed);
}

#[test]
fn a_half_open_round_lets_exactly_its_probes_through() {
    let settings = BreakerSettings {
        redial: false,
        probes: 3,
        successes_to_close: 9,
        ..BreakerSettings::default()
    };
    let mut world = World::new(crowd(settings, refusing(10, 100)));
    world.run_until(secs(300));
    assert_eq!(world.state(), State::Closed);
    let rounds: Vec<u32> = world.rounds.values().map(|round| round.syns).collect();
    // Two rounds fail (40 s, about 100 s), each at its first refusal; then three of three succeed.
    let good = &rounds[rounds.len() - 3..];
    assert_eq!(good, [3, 3, 3]);
    assert!(
        rounds.iter().all(|&syns| (1..=3).contains(&syns)),
        "{rounds:?}"
    );
}

#[test]
fn silence_opens_after_the_connect_timeout_and_probes_wait_for_theirs() {
    let outage = Outage {
        answer: Answer::Silence,
        ..refusing(10, 80)
    };
    let settings = BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    };
    let mut world = World::new(crowd(settings, outage));
    world.run_until(secs(12) + millis(20));
    assert_eq!(world.state(), State::Open);
    // Everything in flight ends after the opening: late, so it says nothing.
    world.run_until(secs(20));
    assert_eq!(world.transitions.len(), 1);
    // A probe at 42 s fails at 44 s; the next cooldown is twice as long.
    world.run_until(secs(44) + millis(100));
    let &(failed, from, to, reason) = world.transitions.last().unwrap();
    assert_eq!((from, to), (State::HalfOpen, State::Open));
    assert_eq!(reason.kind, ReasonKind::ProbeFailed);
    assert!(failed >= secs(44));
    world.run_until(secs(112));
    assert_eq!(world.state(), State::Closed);
    assert_eq!(world.rounds.len(), 3);
    assert!(world.rounds.values().all(|round| round.syns == 1));
}

#[test]
fn a_target_that_answers_only_the_agent_costs_a_probe_per_cooldown() {
    let mut plan = crowd(BreakerSettings::default(), refusing(10, 7210));
    plan.clients = 20;
    plan.outages[0].answer = Answer::Misleading;
    let mut world = World::new(plan);
    // While trust runs out: after 1, 2, 4, ... 256 s.
    world.run_until(secs(610));
    assert!(world.bad_syns < 20, "{} SYNs were refused", world.bad_syns);
    let before = world.rounds.len();
    world.run_until(secs(7210));
    // 6,600 s, with cooldowns of 270 to 300 s.
    let probes = world.rounds.len() - before;
    assert!((20..=25).contains(&probes), "{probes} probes");
    assert!(world.dials.len() > 1600, "dials go on as ever");
    assert_eq!(world.state(), State::Open);
    // The next probe, at the cooldown's end at the latest, finds it well.
    world.run_until(secs(7211 + 300));
    assert_eq!(world.state(), State::Closed);
    let refused = world.refused.len();
    world.run_until(secs(7600));
    assert_eq!(world.refused.len(), refused);
}

#[test]
fn a_restart_that_misleads_once_ends_soon_after() {
    for seed in 1..=20 {
        let mut plan = crowd(BreakerSettings::default(), refusing(10, 12));
        plan.seed = seed;
        // Shorter than the first time of distrust, longer than the wait between dials.
        let good = secs(12) + millis(700);
        plan.outages.push(Outage {
            from: secs(12),
            to: good,
            answer: Answer::Misleading,
        });
        let mut world = World::new(plan);
        world.run_until(good);
        assert_eq!(world.rounds.len(), 1, "seed {seed}: one probe was misled");
        // Distrust ends 1 s after the failure, the next dial is at most 600 ms later.
        world.run_until(good + millis(1_700));
        assert_eq!(world.state(), State::Closed, "{:?}", world.transitions);
    }
}

#[test]
fn a_server_that_accepts_and_fails_is_probed_by_exchanges() {
    let outage = Outage {
        answer: Answer::Broken,
        ..refusing(10, 60)
    };
    let mut world = World::new(crowd(BreakerSettings::default(), outage));
    world.run_until(secs(40));
    let &[(opened, State::Closed, State::Open, reason)] = &world.transitions[..] else {
        panic!("one opening expected, got {:?}", world.transitions);
    };
    assert!(opened < secs(10) + millis(20), "opened at {opened:?}");
    assert_eq!(reason.window, WindowKind::Exchanges);
    // The agent's dial was answered, as every connect is.
    assert_eq!(world.dials.len(), 1);
    // Of 2,000 calls a second one in 500 to 750 ms is a trial: the kernel says once a second that there are
    // refusals, and the agent looks four times as often.
    let trials: Vec<Nanos> = world.rounds.values().map(|round| round.at).collect();
    assert!((39..=60).contains(&trials.len()), "{}", trials.len());
    for pair in trials.windows(2) {
        let gap = pair[1] - pair[0];
        assert!((millis(490)..millis(770)).contains(&gap), "{gap:?}");
    }
    let failed = world.bad_exchanges;
    assert!(failed < 20 + trials.len() as u64, "{failed} failed");
    // The cooldown has ended, its probe has failed, and the next one is twice as long.
    world.run_until(secs(60));
    let &(_, from, to, reason) = world.transitions.last().unwrap();
    assert_eq!((from, to), (State::HalfOpen, State::Open));
    assert_eq!(reason, Reason::probe_failed(WindowKind::Exchanges));
    let failed = world.bad_exchanges;
    assert!(failed < 20 + world.rounds.len() as u64, "{failed} failed");
    // Two calls find out that it is back, the first within 750 ms.
    world.run_until(millis(60_800));
    assert_eq!(world.state(), State::Closed, "{:?}", world.transitions);
    assert!(world.rounds.values().all(|round| round.syns == 1));
    assert_eq!((world.bad_syns, world.ran_out), (0, 0));
    world.run_until(secs(64));
    let refused = world.refused.len();
    world.run_until(secs(200));
    assert_eq!(world.refused.len(), refused);
}

#[test]
fn without_redial_the_cooldown_alone_ends_what_opened_on_exchanges() {
    let outage = Outage {
        answer: Answer::Broken,
        ..refusing(10, 60)
    };
    let settings = BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    };
    let mut world = World::new(crowd(settings, outage));
    world.run_until(secs(40));
    assert_eq!((world.dials.len(), world.rounds.len()), (0, 0));
    let before = world.bad_exchanges;
    world.run_until(secs(60));
    assert_eq!(world.bad_exchanges, before + 1, "one probe, at 40 s");
    // The next cooldown is twice as long, 10 % either way.
    world.run_until(secs(94));
    assert_eq!(world.state(), State::Open);
    world.run_until(secs(107));
    assert_eq!(world.state(), State::Closed);
    assert_eq!(world.rounds.len(), 3);
}

#[test]
fn rare_failures_never_open() {
    // Now and then a few connects of 2,000 a second fail: neither a run nor a rate.
    let mut plan = crowd(BreakerSettings::default(), refusing(0, 0));
    plan.outages = (0..100)
        .map(|n| Outage {
            from: millis(1000 + n * 1000),
            to: millis(1000 + n * 1000) + Nanos(300_000),
            answer: Answer::Refused,
        })
        .collect();
    let mut world = World::new(plan);
    world.run_until(secs(60));
    assert!(world.bad_syns > 20);
    assert_eq!(world.transitions.len(), 0);
}

fn outages() -> impl Strategy<Value = Vec<Outage>> {
    let answer = prop_oneof![
        Just(Answer::Refused),
        Just(Answer::Silence),
        Just(Answer::Misleading),
        Just(Answer::Broken)
    ];
    prop::collection::vec((1u64..60_000, 1u64..60_000, answer), 1..4).prop_map(|parts| {
        let mut at = Nanos::ZERO;
        let outage = |(pause, length, answer)| {
            let from = at + millis(pause);
            at = from + millis(length);
            Outage {
                from,
                to: at,
                answer,
            }
        };
        parts.into_iter().map(outage).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A third of all news is lost, a third comes twice, some connects are abandoned.
    #[test]
    fn bad_news_service_breaks_nothing(
        outages in outages(),
        redial: bool,
        probes in 1u32..4,
        successes_to_close in 1u32..5,
        seed in 1u64..,
    ) {
        let settings = BreakerSettings {
            redial,
            probes,
            successes_to_close,
            cooldown: secs(5),
            cooldown_max: secs(20),
            exchange_lease: secs(4),
            ..BreakerSettings::default()
        };
        let last = outages.last().map_or(Nanos::ZERO, |outage| outage.to);
        let mut world = World::new(Plan {
            settings,
            clients: 20,
            pause: millis(100),
            outages,
            lost: 33,
            twice: 33,
            abandoned: 10,
            seed,
        });
        // 22 s of cooldown at most, and then rounds of which each loses what it loses; a failure
        // of the outage may still be on its way.
        world.run_until(last + secs(120));
        prop_assert_eq!(world.state(), State::Closed, "{:?}", &world.transitions);
        let refused = world.refused.len();
        world.run_until(last + secs(150));
        prop_assert_eq!(world.refused.len(), refused);
        prop_assert_eq!(world.ran_out, 0);
        for (generation, round) in &world.rounds {
            prop_assert!(
                round.syns - round.abandoned <= probes,
                "round {} had {:?}",
                generation,
                round
            );
        }
    }
}
