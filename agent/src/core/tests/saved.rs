//! Breakers over a restart of the agent.

use proptest::prelude::*;

use super::*;

/// The agent ends and another one begins `gap` later, with the same kernel counters.
fn restart(mut before: One, settings: BreakerSettings, gap: Nanos) -> One {
    let saved = before.engine.save(ROW).expect("it is in memory");
    before.now = before.now + gap;
    before.engine = Engine::new(2);
    before.out.clear();
    let settings = Arc::new(settings);
    let (now, out) = (before.now, &mut before.out);
    before
        .engine
        .restore(ROW, target(1), settings, &saved, now, out);
    before
}

fn dials(one: &One) -> usize {
    let is_dial = |action: &&Action| matches!(action, Action::Dial { .. });
    one.out.iter().filter(is_dial).count()
}

#[test]
fn an_open_breaker_refuses_again_and_is_confirmed_by_a_dial_at_once() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    let (opened, before) = (one.now, one.view());
    let mut one = restart(one, BreakerSettings::default(), secs(3));
    let view = one.view();
    assert_eq!(view.state, State::Open);
    assert_eq!(view.since, opened);
    assert_eq!(view.reason, before.reason);
    assert_eq!(view.next_probe_at, Some(opened + secs(30)));
    let &[Action::SetVerdict { verdict, until, .. }] = &one.out[..] else {
        panic!("a verdict and no transition: {:?}", one.out);
    };
    assert_eq!(verdict.state, State::Open.verdict_state());
    assert_eq!(verdict.generation, before.generation + 1);
    assert_eq!(until, opened + secs(30) + VERDICT_SLACK);
    // Not half a second later: now.
    assert_eq!(one.engine.next_deadline(), Some(one.now));
    one.handle(Event::Deadline);
    assert_eq!(dials(&one), 1);
    one.dial_ended(false);
    assert_eq!(one.state(), State::Open, "the dial says the same");
    one.dial_ended(true);
    assert_eq!(one.state(), State::HalfOpen);
}

#[test]
fn a_cooldown_that_ended_meanwhile_still_waits_for_the_dial() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    let mut one = restart(one, BreakerSettings::default(), secs(120));
    assert_eq!(one.state(), State::Open);
    one.handle(Event::Deadline);
    assert_eq!((dials(&one), one.state()), (1, State::Open));
    // An answer never comes: a program has to find out.
    one.pass(secs(2));
    assert_eq!(one.state(), State::HalfOpen);
}

#[test]
fn opened_on_exchanges_runs_its_remaining_cooldown_whatever_a_dial_says() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to_by_exchanges(State::Open);
    let mut one = restart(one, BreakerSettings::default(), secs(10));
    one.pass_until(one.now + secs(20) - Nanos(1), true, |_| false);
    assert_eq!((one.state(), dials(&one)), (State::Open, 1));
    one.pass(Nanos(1));
    assert_eq!((one.state(), dials(&one)), (State::HalfOpen, 1));
}

#[test]
fn a_half_open_breaker_begins_a_fresh_round() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    let generation = one.view().generation;
    let mut one = restart(one, BreakerSettings::default(), secs(1));
    assert_eq!(one.state(), State::HalfOpen);
    assert_eq!(one.view().generation, generation + 1);
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn a_window_goes_on_where_it_was() {
    let mut one = One::new(BreakerSettings::default());
    one.calls(4, true);
    let mut one = restart(one, BreakerSettings::default(), secs(1));
    assert_eq!(one.state(), State::Closed);
    one.calls(1, true);
    assert_eq!(one.state(), State::Open, "the fifth in a row");
    // What was before a floor does not come back.
    let mut one = One::new(BreakerSettings::default());
    one.calls(4, true);
    let last_seqs = one.last_seqs();
    one.handle(Event::Reset {
        row: ROW,
        last_seqs,
    });
    let mut one = restart(one, BreakerSettings::default(), secs(1));
    one.calls(1, true);
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn the_growth_of_the_cooldown_survives() {
    let mut one = One::new(BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    });
    one.bring_to(State::Open);
    one.pass(secs(30));
    one.probe(ProbeOutcome::Failure);
    assert_eq!(one.view().cooldown, secs(60));
    let one = restart(one, BreakerSettings::default(), secs(1));
    assert_eq!(one.view().cooldown, secs(60));
    // Within the bounds of whatever policy holds now.
    let mut shorter = BreakerSettings::default();
    (shorter.cooldown, shorter.cooldown_max) = (secs(10), secs(20));
    let one = restart(one, shorter, secs(1));
    assert_eq!(one.view().cooldown, secs(20));
    assert!(one.view().next_probe_at <= Some(one.now + secs(20)));
}

#[test]
fn switched_off_meanwhile_it_comes_back_closed() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    let off = BreakerSettings {
        enabled: false,
        ..BreakerSettings::default()
    };
    let one = restart(one, off, secs(1));
    assert_eq!((one.state(), &one.out[..]), (State::Closed, &[][..]));
}

#[test]
fn a_manual_state_is_not_the_breakers() {
    for state in [State::ForcedOpen, State::ForcedClosed] {
        let mut one = One::new(BreakerSettings::default());
        one.bring_to(state);
        let one = restart(one, BreakerSettings::default(), secs(1));
        assert_eq!(
            (one.state(), one.view().reason),
            (State::Closed, Reason::NONE)
        );
    }
}

#[test]
fn a_row_that_has_a_breaker_keeps_it() {
    let mut open = One::new(BreakerSettings::default());
    open.bring_to(State::Open);
    let saved = open.engine.save(ROW).unwrap();
    let mut one = One::new(BreakerSettings::default());
    let settings = Arc::new(BreakerSettings::default());
    one.engine
        .restore(ROW, target(1), settings, &saved, one.now, &mut one.out);
    assert_eq!((one.state(), one.out.len()), (State::Closed, 0));
}

fn any_saved() -> impl Strategy<Value = Saved> {
    let nanos = || {
        prop_oneof![
            any::<u64>(),
            (0u64..4_000_000_000_000),
            Just(u64::MAX),
            Just(0)
        ]
        .prop_map(Nanos)
    };
    let window = prop_oneof![
        Just(WindowKind::Connects),
        Just(WindowKind::Exchanges),
        Just(WindowKind::None)
    ];
    (
        prop::sample::select(&State::ALL[..]),
        window,
        any::<(u32, u32, u64, u64)>(),
        prop::array::uniform7(nanos()),
    )
        .prop_map(|(state, window, (generation, misled, a, b), t)| Saved {
            state,
            since: t[0],
            reason: Reason {
                window,
                ..Reason::probe_failed(window)
            },
            bypassed: Some(Bypass::MaxOpenShare),
            generation,
            until: t[1],
            cooldown: t[2],
            healthy_since: t[3],
            misled,
            distrust_until: t[4],
            outage_since: t[5],
            floor_seqs: [a, b],
            floor_at: t[6],
            broken_after: Some(t[5]).filter(|_| misled % 2 == 0),
        })
}

proptest! {
    /// Whatever a file says, time and a destination that works lead back to closed.
    #[test]
    fn odd_numbers_have_an_exit(saved in any_saved(), redial: bool) {
        let mut one = One::new(BreakerSettings::default());
        one.engine = Engine::new(3);
        let settings = Arc::new(BreakerSettings { redial, ..BreakerSettings::default() });
        one.engine.restore(ROW, target(1), settings, &saved, one.now, &mut one.out);
        let end = one.now + secs(301);
        one.pass_until(end, false, |_| false);
        if let Some(view) = one.engine.view(ROW, one.now) {
            prop_assert!(matches!(view.state, State::Closed | State::HalfOpen), "{:?}", view);
            if view.state == State::HalfOpen {
                one.probe(ProbeOutcome::Success);
                one.probe(ProbeOutcome::Success);
                prop_assert_eq!(one.state(), State::Closed);
            }
        }
    }
}
