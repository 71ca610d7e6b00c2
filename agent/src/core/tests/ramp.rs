//! Rule 15: after closing, admission ramps up rather than releasing the crowd.

use agent_common::{Verdict, verdict::STATE_RAMP};

use super::*;

fn just_closed(settings: BreakerSettings) -> One {
    let mut one = One::new(settings);
    one.bring_to(State::HalfOpen);
    one.probe(ProbeOutcome::Success);
    one.out.clear();
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
    one
}

fn verdicts(one: &One) -> Vec<(Verdict, Nanos)> {
    let verdict = |action: &Action| match *action {
        Action::SetVerdict { verdict, until, .. } => Some((verdict, until)),
        _ => None,
    };
    one.out.iter().filter_map(verdict).collect()
}

#[test]
fn the_verdict_ramps_for_two_seconds_and_then_costs_nothing() {
    let mut one = just_closed(BreakerSettings::default());
    let closed = one.now;
    let &[(verdict, until)] = &verdicts(&one)[..] else {
        panic!("one verdict: {:?}", one.out);
    };
    assert_eq!((verdict.state, until), (STATE_RAMP, closed + secs(2)));
    assert_eq!(one.view().ramp_until, Some(until));
    one.out.clear();
    one.pass(secs(2) - Nanos(1));
    assert_eq!(one.out, []);
    one.pass(Nanos(1));
    let &[(ended, until)] = &verdicts(&one)[..] else {
        panic!("one verdict: {:?}", one.out);
    };
    assert_eq!(
        (ended.state, until),
        (State::Closed.verdict_state(), Nanos::ZERO)
    );
    assert_eq!(
        ended.generation, verdict.generation,
        "calls under way count"
    );
    assert_eq!(one.view().ramp_until, None);
}

#[test]
fn a_breaker_is_not_forgotten_in_its_ramp() {
    let mut one = just_closed(BreakerSettings {
        window_age: secs(1),
        ..BreakerSettings::default()
    });
    one.pass(millis(1999));
    assert_eq!(one.state(), State::Closed);
    one.pass(secs(2));
    assert!(!one.engine.contains(ROW), "and not kept for ever");
    let last = verdicts(&one).last().copied().unwrap();
    assert_eq!(last.0.state, State::Closed.verdict_state());
}

#[test]
fn a_trip_in_the_ramp_is_a_failed_probe() {
    let mut one = just_closed(BreakerSettings::default());
    one.pass(secs(1));
    one.calls(5, true);
    let view = one.view();
    assert_eq!(view.state, State::Open);
    assert_eq!(view.reason.kind, ReasonKind::ConsecutiveFailures);
    assert_eq!(view.cooldown, secs(60));
    let left = view.next_probe_at.unwrap() - one.now;
    assert!(left >= secs(54) && left <= secs(66), "jittered: {left:?}");
    // After the ramp it is a new outage.
    let mut one = just_closed(BreakerSettings::default());
    one.pass(secs(2));
    one.calls(5, true);
    assert_eq!(one.view().next_probe_at, Some(one.now + secs(30)));
}

#[test]
fn calls_of_the_ramp_and_after_it_are_one_window() {
    let mut one = just_closed(BreakerSettings::default());
    one.pass(millis(1900));
    one.calls(3, true);
    one.pass(millis(200));
    assert_eq!(one.view().ramp_until, None);
    one.calls(2, true);
    assert_eq!(one.state(), State::Open);
}

#[test]
fn an_operator_and_a_policy_end_it_at_once() {
    let closed = State::Closed.verdict_state();
    let mut one = just_closed(BreakerSettings::default());
    let last_seqs = one.last_seqs();
    one.handle(Event::Reset {
        row: ROW,
        last_seqs,
    });
    assert_eq!(verdicts(&one).last().unwrap().0.state, closed);
    let mut one = just_closed(BreakerSettings::default());
    one.configure(BreakerSettings {
        enabled: false,
        ..BreakerSettings::default()
    });
    assert_eq!(verdicts(&one).last().unwrap().0.state, closed);
    let mut one = just_closed(BreakerSettings::default());
    let last_seqs = one.last_seqs();
    one.handle(Event::HoldClosed {
        row: ROW,
        until: one.now + secs(9),
        last_seqs,
    });
    let last = verdicts(&one).last().unwrap().0.state;
    assert_eq!(last, State::ForcedClosed.verdict_state());
    // Nor is there one where no probe has closed it.
    one.pass(secs(9));
    assert_eq!((one.state(), one.view().ramp_until), (State::Closed, None));
}

#[test]
fn another_errno_is_used_at_once() {
    let mut one = just_closed(BreakerSettings::default());
    let generation = one.view().generation;
    one.configure(BreakerSettings {
        errno: 113,
        ..BreakerSettings::default()
    });
    let (verdict, until) = verdicts(&one).last().copied().unwrap();
    assert_eq!((verdict.errno, verdict.generation), (113, generation));
    assert_eq!((verdict.state, until), (STATE_RAMP, one.now + secs(2)));
}
