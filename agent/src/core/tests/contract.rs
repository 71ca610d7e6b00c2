//! The contract's rules about the breaker, each by its number: the shortest story that shows it. What
//! surrounds each rule stands in the other files here.
//!
//! Not here, because the core alone cannot show them: the kernel's half of 13 (claims are atomic) and 18
//! (the heartbeat), and of 16 what goes by names.

use agent_common::verdict::{STATE_HALF_OPEN, STATE_OPEN, STATE_RAMP};
use proptest::prelude::*;

use super::*;
use crate::core::hung::{Arrivals, Past, Wait, is_hung};

fn without_redial() -> BreakerSettings {
    BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    }
}

fn dials(one: &One) -> usize {
    let is_dial = |action: &&Action| matches!(action, Action::Dial { .. });
    one.out.iter().filter(is_dial).count()
}

#[test]
fn rule_12a_a_server_that_accepts_and_then_fails_is_not_saved_by_its_accepts() {
    let mut one = One::new(BreakerSettings::default());
    for _ in 0..5 {
        one.calls(10, false);
        one.exchange(1, How::Badly);
    }
    assert_eq!(one.state(), State::Open);
    assert_eq!(one.view().reason.window, WindowKind::Exchanges);
}

#[test]
fn rule_12a_a_threshold_trips_when_it_is_reached() {
    let mut one = One::new(BreakerSettings {
        consecutive_failures: 0,
        ..without_redial()
    });
    one.calls(10, false);
    one.calls(9, true);
    assert_eq!(one.state(), State::Closed, "9 of 19");
    one.calls(1, true);
    assert_eq!(one.state(), State::Open, "10 of 20");
}

#[test]
fn rule_13_a_probe_that_never_reports_gives_its_slot_back() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    let generation = one.view().generation;
    one.handle(Event::ProbeStarted {
        row: ROW,
        generation,
    });
    one.pass(secs(3));
    assert_eq!(one.view().generation, generation + 1, "all slots are free");
    assert_eq!(one.state(), State::HalfOpen);
}

#[test]
fn rule_13_outcomes_of_an_earlier_verdict_are_dropped() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    let (generation, last_seqs) = (one.view().generation - 1, one.last_seqs());
    for outcome in [ProbeOutcome::Failure, ProbeOutcome::Success] {
        for _ in 0..3 {
            one.handle(Event::ProbeEnded {
                row: ROW,
                generation,
                outcome,
                last_seqs,
            });
        }
    }
    assert_eq!(one.state(), State::HalfOpen);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever dials say, whenever: half-open is never later than without any.
    #[test]
    fn rule_14_redial_only_shortens(
        answers in prop::collection::vec((0u64..40_000, any::<bool>()), 0..20),
        on_exchanges: bool,
        failed_before in 0u32..3,
    ) {
        let mut one = One::new(BreakerSettings::default());
        let open = |one: &mut One| {
            if on_exchanges {
                one.bring_to_by_exchanges(State::Open);
            } else {
                one.bring_to(State::Open);
            }
        };
        open(&mut one);
        for _ in 0..failed_before {
            one.pass(one.view().next_probe_at.unwrap() - one.now);
            one.probe(ProbeOutcome::Failure);
        }
        let (began, until) = (one.now, one.view().next_probe_at.unwrap());
        let cooldown = one.view().cooldown;
        let mut answers = answers;
        answers.sort_unstable();
        for (ms, answered) in answers {
            let at = (began + millis(ms)).min(until);
            while one.engine.next_deadline().is_some_and(|due| due <= at)
                && one.state() == State::Open
            {
                one.now = one.now.max(one.engine.next_deadline().unwrap());
                one.handle(Event::Deadline);
            }
            one.now = one.now.max(at);
            one.dial_ended(answered);
            if one.state() == State::HalfOpen {
                break;
            }
            prop_assert_eq!(one.view().next_probe_at, Some(until));
        }
        prop_assert_eq!(one.view().cooldown, cooldown, "no dial doubles it");
        one.now = until.max(one.now);
        one.handle(Event::Deadline);
        prop_assert_eq!(one.state(), State::HalfOpen);
    }
}

#[test]
fn rule_14_a_good_dial_is_not_one_of_the_successes() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    one.dial_ended(true);
    assert_eq!(one.state(), State::HalfOpen);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::HalfOpen, "two of programs are needed");
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn rule_14_every_half_second_then_two_then_four() {
    let mut one = One::new(BreakerSettings {
        cooldown: secs(3600),
        cooldown_max: secs(3600),
        ..BreakerSettings::default()
    });
    one.bring_to(State::Open);
    let mut before = 0;
    for (length, fewest, most) in [(60, 100, 150), (540, 225, 340), (600, 125, 190)] {
        one.pass(secs(length));
        let dialled = dials(&one) - before;
        assert!(
            (fewest..=most).contains(&dialled),
            "{dialled} in {length} s"
        );
        before = dials(&one);
    }
}

#[test]
fn rule_14_a_restart_of_two_seconds_is_no_outage_of_thirty() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    one.pass(secs(2));
    let back = one.now;
    one.pass_until(back + secs(30), true, |one| one.state() == State::HalfOpen);
    assert!(one.now - back <= millis(600), "{:?}", one.now - back);
}

#[test]
fn rule_15_probes_at_a_time_until_enough_succeed() {
    let mut one = One::new(BreakerSettings {
        probes: 2,
        successes_to_close: 3,
        ..BreakerSettings::default()
    });
    one.bring_to(State::HalfOpen);
    let limits = one.out.iter().filter_map(|action| match action {
        Action::SetVerdict {
            verdict,
            probe_limit,
            ..
        } if verdict.state == STATE_HALF_OPEN => Some(*probe_limit),
        _ => None,
    });
    assert_eq!(limits.collect::<Vec<_>>(), [2]);
    for _ in 0..2 {
        one.probe(ProbeOutcome::Success);
        assert_eq!(one.state(), State::HalfOpen);
    }
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn rule_15_admission_ramps_up_after_closing() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    one.probe(ProbeOutcome::Success);
    one.out.clear();
    one.probe(ProbeOutcome::Success);
    let state = one.out.iter().find_map(|action| match action {
        Action::SetVerdict { verdict, .. } => Some(verdict.state),
        _ => None,
    });
    assert_eq!(state, Some(STATE_RAMP));
    assert_eq!(one.view().ramp_until, Some(one.now + secs(2)));
}

#[test]
fn rule_15_the_cooldown_doubles_while_probes_fail_and_shrinks_with_health() {
    let mut one = One::new(without_redial());
    one.bring_to(State::Open);
    for expected in [60, 120, 240, 300, 300] {
        one.pass(one.view().next_probe_at.unwrap() - one.now);
        one.probe(ProbeOutcome::Failure);
        assert_eq!(one.view().cooldown, secs(expected));
        let left = one.view().next_probe_at.unwrap() - one.now;
        let longest = secs(expected + expected / 10).min(secs(300));
        assert!((secs(expected - expected / 10)..=longest).contains(&left));
    }
    one.pass(one.view().next_probe_at.unwrap() - one.now);
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    for (passed, expected) in [(300, 150), (150, 75), (75, 38), (38, 30)] {
        one.pass(secs(passed));
        one.configure(without_redial());
        assert!(one.view().cooldown <= secs(expected), "after {passed} s");
    }
}

#[test]
fn rule_16_failures_of_most_destinations_at_once_open_nothing_more() {
    let mut engine = Engine::new(1);
    let (mut out, now) = (Vec::new(), secs(1000));
    let settings = Arc::new(BreakerSettings::default());
    engine.traffic(5, now, &mut out);
    for index in 0..5 {
        engine.handle(
            Event::Configure {
                row: row(index),
                target: target(0x0a00_0100 + index),
                settings: Arc::clone(&settings),
                generation: 0,
            },
            now,
            &mut out,
        );
    }
    // One after the other: each has failed once, then all go on failing.
    for failures in [1, 5] {
        for index in 0..5 {
            let mut ring = Ring::new();
            for _ in 0..failures {
                ring.push(now, true);
            }
            let event = Event::Calls {
                row: row(index),
                kind: WindowKind::Connects,
                last_seq: ring.last_seq,
                window: &ring.window,
            };
            engine.handle(event, now, &mut out);
        }
    }
    for index in 0..5 {
        let view = engine.view(row(index), now).unwrap();
        let closed = (State::Closed, Some(Bypass::Correlated));
        assert_eq!((view.state, view.bypassed), closed);
    }
    let said = out
        .iter()
        .filter(|action| matches!(action, Action::Correlated(_)));
    assert_eq!(said.count(), 1, "said once");
}

#[test]
fn rule_17_hung_work_counts_while_it_hangs() {
    // Nobody has given up; the destination answered within a second until all fell silent.
    let past = Past {
        responses: 100,
        is_quick: true,
        longest: millis(800),
        last_answer: secs(99),
    };
    let mut arrivals = Arrivals::default();
    for second in 100..=110 {
        arrivals.note(secs(second), 100 + second * 10);
    }
    let wait = Wait {
        begun: secs(100),
        asked: secs(100),
        sending: false,
        operation: secs(100),
    };
    let hangs = |now| is_hung(HungRule::Auto, wait, now, &past, &arrivals, 10);
    assert!(!hangs(secs(110) - Nanos(1)) && hangs(secs(110)));
    let mut one = One::new(BreakerSettings::default());
    one.exchange(5, How::Badly);
    assert_eq!(one.state(), State::Open);
}

#[test]
fn rule_18_every_verdict_that_refuses_ends_by_itself() {
    for by_exchanges in [false, true] {
        for state in State::ALL {
            let mut one = One::new(BreakerSettings::default());
            if by_exchanges {
                one.bring_to_by_exchanges(state);
            } else {
                one.bring_to(state);
            }
            one.handle(Event::Refused {
                row: ROW,
                refused: 1,
            });
            one.now = one.now + secs(1);
            one.handle(Event::Refused {
                row: ROW,
                refused: 100,
            });
            for action in &one.out {
                let Action::SetVerdict { verdict, until, .. } = *action else {
                    continue;
                };
                let refuses = [STATE_OPEN, STATE_HALF_OPEN, STATE_RAMP, 3].contains(&verdict.state);
                assert_eq!(refuses, until > Nanos::ZERO, "{verdict:?}");
                assert!(until <= one.now + secs(605), "{verdict:?} until {until:?}");
            }
        }
    }
}

#[test]
fn rule_19_a_new_owner_starts_anew() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    let new = RowId {
        incarnation: ROW.incarnation + 1,
        ..ROW
    };
    one.handle(Event::Configure {
        row: new,
        target: target(1),
        settings: Arc::new(BreakerSettings::default()),
        generation: 0,
    });
    assert_eq!(one.engine.state(new), Some(State::Closed));
    assert_eq!(one.engine.view(ROW, one.now), None);
    one.dial_ended(true);
    assert_eq!(one.engine.state(new), Some(State::Closed));
}

#[test]
fn rule_19_restored_state_is_confirmed_by_a_dial() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    let saved = one.engine.save(ROW).unwrap();
    let mut engine = Engine::new(2);
    let (now, mut out) = (one.now + secs(5), Vec::new());
    let settings = Arc::new(BreakerSettings::default());
    engine.restore(ROW, target(1), settings, &saved, now, &mut out);
    engine.handle(Event::Deadline, now, &mut out);
    assert!(
        out.iter()
            .any(|action| matches!(action, Action::Dial { .. }))
    );
}
