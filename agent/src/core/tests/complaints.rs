//! What users of other breakers complained about, and what becomes of it here: one test for each
//! complaint that concerns the core.

use proptest::prelude::*;

use super::*;

/// Half-open by an answered dial.
fn half_open() -> One {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    one
}

fn ended(one: &mut One, generation: u32, outcome: ProbeOutcome) {
    let last_seqs = one.last_seqs();
    one.handle(Event::ProbeEnded {
        row: ROW,
        generation,
        outcome,
        last_seqs,
    });
}

/// resilience4j hung half-open for ever when permitted calls never finished.
#[test]
fn complaint_01_half_open_does_not_wait_for_ever() {
    let mut one = half_open();
    let generation = one.view().generation;
    one.handle(Event::ProbeStarted {
        row: ROW,
        generation,
    });
    one.pass(secs(3));
    assert_ne!(one.view().generation, generation);
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
}

/// In Polly an outcome that was not of a handled kind left the breaker half-open; in Sentinel another
/// rule that blocked the probe did.
#[test]
fn complaint_02_and_04_an_outcome_that_says_nothing_blocks_nothing() {
    let mut one = half_open();
    for _ in 0..10 {
        one.probe(ProbeOutcome::Returned);
        assert_eq!(one.state(), State::HalfOpen);
    }
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
}

/// In Polly, results of calls that began before the trip moved the state.
#[test]
fn complaint_03_results_from_before_the_trip_move_nothing() {
    let mut one = half_open();
    let generation = one.view().generation;
    for old in 0..generation {
        ended(&mut one, old, ProbeOutcome::Failure);
        ended(&mut one, old, ProbeOutcome::Success);
    }
    // Nor do calls that end in the window meanwhile.
    one.calls(50, true);
    one.exchange(50, How::Badly);
    assert_eq!(one.state(), State::HalfOpen);
}

/// In Hystrix one success closed fully and a crowd returned, and nobody could see why a breaker was open.
#[test]
fn complaint_05_the_crowd_comes_in_steps_and_the_state_explains_itself() {
    let mut one = half_open();
    let view = one.view();
    assert_eq!(view.reason.kind, ReasonKind::ConsecutiveFailures);
    assert_eq!((view.reason.value, view.reason.threshold), (5.0, 5.0));
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::HalfOpen, "one is not enough");
    one.probe(ProbeOutcome::Success);
    assert!(one.view().ramp_until.is_some());
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    one.pass(secs(1));
    let view = one.view();
    assert_eq!(one.now - view.since, secs(1));
    assert!(view.next_probe_at.is_some() && view.next_redial_at.is_some());
}

/// In Envoy a counter was not reset after an ejection, and the ejection time grew and never shrank; all
/// hosts came back at the same moment.
#[test]
fn complaint_07_counters_begin_anew_growth_shrinks_and_times_are_jittered() {
    let settings = || BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    };
    let mut one = One::new(settings());
    one.bring_to(State::Open);
    one.pass(secs(30));
    one.probe(ProbeOutcome::Failure);
    one.pass(one.view().next_probe_at.unwrap() - one.now);
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.stats(WindowKind::Connects).consecutive, 0);
    one.calls(4, true);
    assert_eq!(one.state(), State::Closed, "four, not nine");
    one.pass(secs(60));
    one.configure(settings());
    assert_eq!(one.view().cooldown, secs(30));
    let returns = |seed| {
        let mut one = One::new(settings());
        one.engine = Engine::new(seed);
        one.configure(settings());
        one.bring_to(State::Open);
        one.pass(secs(30));
        one.probe(ProbeOutcome::Failure);
        one.view().next_probe_at.unwrap()
    };
    let mut times: Vec<_> = (0..20).map(returns).collect();
    times.sort_unstable();
    times.dedup();
    assert_eq!(times.len(), 20);
}

/// In Istio a name that was resolved again reset the ejections.
#[test]
fn complaint_09_a_policy_or_name_that_is_read_again_resets_nothing() {
    for state in State::ALL {
        let mut one = One::new(BreakerSettings::default());
        one.bring_to(state);
        let before = one.view();
        for _ in 0..10 {
            one.configure(BreakerSettings::default());
        }
        assert_eq!(one.view(), before);
    }
}

/// Connects that a program gave up by itself were counted as failures elsewhere.
#[test]
fn complaint_15_what_says_nothing_never_trips() {
    let mut one = One::new(BreakerSettings::default());
    let last_seqs = one.last_seqs();
    for generation in 0..20 {
        one.handle(Event::ProbeEnded {
            row: ROW,
            generation,
            outcome: ProbeOutcome::Returned,
            last_seqs,
        });
    }
    assert_eq!((one.state(), one.out.len()), (State::Closed, 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Out-of-order events killed a tracker; floods were lost silently. Here a hint decides nothing: the
    /// window does, however often and in whatever order hints come.
    #[test]
    fn complaint_25_hints_decide_nothing(
        calls in prop::collection::vec(any::<bool>(), 0..60),
        hints in prop::collection::vec(prop_oneof![Just(0u8), Just(1), Just(2)], 1..30),
    ) {
        let tell = |hints: &[u8]| {
            let mut one = One::new(BreakerSettings::default());
            for failed in &calls {
                one.ring.push(one.now, *failed);
            }
            for hint in hints {
                match hint {
                    0 => one.look(),
                    1 => one.look_at(WindowKind::Exchanges),
                    _ => one.look_at(WindowKind::None),
                }
            }
            one.look();
            one.state()
        };
        prop_assert_eq!(tell(&hints), tell(&[]));
    }
}
