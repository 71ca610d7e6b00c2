//! Opened on exchanges: what ends it before the cooldown does.

use agent_common::Verdict;
use agent_common::verdict::{STATE_HALF_OPEN, STATE_OPEN, VERDICT_PROBE_BY_EXCHANGE};

use super::*;

/// Open since now, and the first refusal was heard of.
fn open() -> One {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to_by_exchanges(State::Open);
    refused(&mut one, 1);
    one
}

fn refused(one: &mut One, refused: u64) {
    one.handle(Event::Refused { row: ROW, refused });
}

fn last_verdict(one: &One) -> (Verdict, u32) {
    let last = one.out.iter().rev().find_map(|action| match *action {
        Action::SetVerdict {
            verdict,
            probe_limit,
            ..
        } => Some((verdict, probe_limit)),
        _ => None,
    });
    last.expect("a verdict was written")
}

/// Whether one connect passes as a trial.
fn tries(one: &One) -> bool {
    let (verdict, slots) = last_verdict(one);
    match verdict.state {
        STATE_HALF_OPEN => {
            assert_eq!((slots, verdict.flags), (1, VERDICT_PROBE_BY_EXCHANGE));
            true
        }
        STATE_OPEN => false,
        other => panic!("the state is {}, the verdict {other}", one.state().as_str()),
    }
}

fn ended(one: &mut One, outcome: ProbeOutcome) {
    let generation = one.view().generation;
    let last_seqs = one.last_seqs();
    one.handle(Event::ProbeEnded {
        row: ROW,
        generation,
        outcome,
        last_seqs,
    });
}

fn dials(one: &One) -> usize {
    let is_dial = |action: &&Action| matches!(action, Action::Dial { .. });
    one.out.iter().filter(is_dial).count()
}

#[test]
fn fifty_refusals_and_half_a_second_earn_one_trial() {
    let mut one = open();
    one.now = one.now + secs(1);
    refused(&mut one, 50);
    assert!(!tries(&one), "49 since the first");
    refused(&mut one, 51);
    assert!(tries(&one));
    assert_eq!(one.state(), State::Open, "it refuses all others");
    let transitions = |one: &One| {
        let is_transition = |action: &&Action| matches!(action, Action::Transition { .. });
        one.out.iter().filter(is_transition).count()
    };
    assert_eq!(transitions(&one), 1);
    // Nor does any number of refusals earn another one meanwhile.
    refused(&mut one, 10_000);
    let (generation, cooldown) = (one.view().generation, one.view().cooldown);
    ended(&mut one, ProbeOutcome::Failure);
    assert!(!tries(&one));
    assert_eq!(one.view().generation, generation + 1);
    assert_eq!(one.view().cooldown, cooldown, "nothing doubles");
    assert_eq!(transitions(&one), 1, "and nothing is said");
    refused(&mut one, 20_000);
    assert!(!tries(&one), "not yet");
    one.now = one.now + millis(500);
    refused(&mut one, 20_001);
    assert!(tries(&one));
}

#[test]
fn it_is_rarer_the_longer_the_outage() {
    let mut one = open();
    let began = one.now;
    let mut trials = Vec::new();
    for tick in 1..=7200u64 {
        one.pass_until(began + millis(500 * tick), true, |_| false);
        refused(&mut one, tick * 1000);
        if one.state() == State::HalfOpen {
            ended(&mut one, ProbeOutcome::Failure);
        } else if tries(&one) {
            trials.push(one.now - began);
            ended(&mut one, ProbeOutcome::Failure);
        }
    }
    let between = |from, to| {
        let within = |at: &&Nanos| (secs(from)..secs(to)).contains(*at);
        trials.iter().filter(within).count()
    };
    assert!((100..=120).contains(&between(0, 60)), "{}", between(0, 60));
    assert!((255..=270).contains(&between(60, 600)));
    assert!((725..=750).contains(&between(600, 3600)));
}

#[test]
fn a_trial_that_succeeds_is_the_first_success() {
    let mut one = open();
    one.now = one.now + secs(1);
    refused(&mut one, 100);
    ended(&mut one, ProbeOutcome::Success);
    assert_eq!(one.state(), State::HalfOpen);
    ended(&mut one, ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
    assert!(one.view().ramp_until.is_some());
}

#[test]
fn a_late_end_and_one_that_says_nothing_change_nothing() {
    let mut one = open();
    one.now = one.now + secs(1);
    refused(&mut one, 100);
    ended(&mut one, ProbeOutcome::Returned);
    assert!(tries(&one), "the slot is free for the next one");
    let (generation, last_seqs) = (one.view().generation - 1, one.last_seqs());
    for outcome in [ProbeOutcome::Success, ProbeOutcome::Failure] {
        one.handle(Event::ProbeEnded {
            row: ROW,
            generation,
            outcome,
            last_seqs,
        });
        assert!(tries(&one));
    }
}

#[test]
fn a_trial_that_never_reports_gives_its_slot_back() {
    let mut one = open();
    // Out of the way.
    one.dial_ended(true);
    one.now = one.now + secs(1);
    refused(&mut one, 100);
    let generation = one.view().generation;
    one.pass(secs(28));
    refused(&mut one, 200_000);
    assert_eq!(one.view().generation, generation);
    // The cooldown's end frees it in any case.
    one.pass(secs(1));
    assert_eq!(one.state(), State::HalfOpen);
    // And before a longer one ends, the lease does.
    ended(&mut one, ProbeOutcome::Failure);
    refused(&mut one, 200_001);
    one.now = one.now + secs(1);
    refused(&mut one, 300_000);
    assert!(tries(&one));
    let generation = one.view().generation;
    one.now = one.now + secs(33) - Nanos(1);
    refused(&mut one, 400_000);
    assert_eq!(one.view().generation, generation);
    one.now = one.now + Nanos(1);
    refused(&mut one, 400_001);
    assert!(tries(&one));
    assert_eq!(one.view().generation, generation + 1);
}

#[test]
fn opened_on_connects_the_agent_dials_and_no_program_pays() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    for refusals in 1..100 {
        one.pass(millis(100));
        refused(&mut one, refusals * 1000);
        assert!(!tries(&one));
    }
}

#[test]
fn a_server_that_is_gone_is_dialled_until_it_is_back() {
    let mut one = open();
    // At once, not half a second later.
    one.handle(Event::Deadline);
    assert_eq!(dials(&one), 1);
    one.dial_ended(false);
    assert_eq!(one.state(), State::Open);
    let told = |one: &One| {
        let all = one.out.iter().filter_map(|action| match action {
            Action::Redialled { answered, .. } => Some(*answered),
            _ => None,
        });
        all.collect::<Vec<_>>()
    };
    assert_eq!(told(&one), [false]);
    one.pass(secs(2));
    assert_eq!(told(&one), [false], "said once");
    assert!((3..=6).contains(&(dials(&one) - 1)), "{}", dials(&one));
    refused(&mut one, 100_000);
    assert!(!tries(&one), "no call is spent where a dial can tell");
    one.pass_until(one.now + millis(600), true, |one| {
        one.state() == State::HalfOpen
    });
    assert_eq!(one.state(), State::HalfOpen);
    assert_eq!(told(&one), [false, true]);
    let (verdict, _) = last_verdict(&one);
    assert_eq!(verdict.flags, VERDICT_PROBE_BY_EXCHANGE);
}

#[test]
fn a_server_that_is_there_is_dialled_once() {
    let mut one = open();
    one.pass_until(one.now + secs(29), true, |_| false);
    assert_eq!((dials(&one), one.state()), (1, State::Open));
    assert_eq!(one.view().next_redial_at, None);
    // Answers to dials for other rows say nothing either.
    one.dial_ended(false);
    one.dial_ended(true);
    assert_eq!(one.state(), State::Open);
}

#[test]
fn without_redial_neither_happens() {
    let mut one = One::new(BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    });
    one.bring_to_by_exchanges(State::Open);
    for refusals in 1..25 {
        one.pass(secs(1));
        refused(&mut one, refusals * 1000);
        assert!(!tries(&one));
    }
    assert_eq!(dials(&one), 0);
}

#[test]
fn what_lets_some_through_does_not_mislead() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    one.probe(ProbeOutcome::Failure);
    one.dial_ended(true);
    assert_eq!(one.state(), State::Open, "misled once: not believed");
    one.now = one.now + secs(1);
    one.dial_ended(true);
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Failure);
    assert_eq!(one.state(), State::Open);
    one.now = one.now + secs(1);
    one.dial_ended(true);
    assert_eq!(one.state(), State::HalfOpen, "as if it had been the first");
}

/// A health check a second.
fn check(one: &mut One, refusals: &mut u64) {
    one.pass(secs(1));
    if tries(one) {
        let generation = one.view().generation;
        one.handle(Event::ProbeStarted {
            row: ROW,
            generation,
        });
        one.pass(millis(5));
        ended(one, ProbeOutcome::Failure);
    } else {
        *refusals += 1;
        refused(one, *refusals);
    }
}

#[test]
fn who_calls_seldom_is_told_the_truth() {
    let mut one = open();
    one.dial_ended(true);
    let mut refusals = 1;
    for _ in 0..3 {
        check(&mut one, &mut refusals);
    }
    assert_eq!(refusals, 3, "the first ones do not know yet");
    // Over many cooldowns.
    for _ in 0..500 {
        check(&mut one, &mut refusals);
    }
    assert_eq!(refusals, 3);
    assert!(tries(&one) || one.state() == State::HalfOpen);
    // It is seen at once.
    one.pass(secs(1));
    for _ in 0..2 {
        ended(&mut one, ProbeOutcome::Success);
    }
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn it_ends_when_calls_come_faster_or_wait_long() {
    for faster in [true, false] {
        let mut one = open();
        one.dial_ended(true);
        let mut refusals = 1;
        for _ in 0..6 {
            check(&mut one, &mut refusals);
        }
        assert!(tries(&one));
        let generation = one.view().generation;
        let step = if faster { millis(300) } else { secs(2) };
        one.pass(step);
        one.handle(Event::ProbeStarted {
            row: ROW,
            generation,
        });
        one.pass(if faster { millis(5) } else { millis(1001) });
        ended(&mut one, ProbeOutcome::Failure);
        assert!(!tries(&one), "{faster}");
        one.pass(secs(1));
        refused(&mut one, refusals + 1);
        assert!(!tries(&one), "begins anew");
    }
}

#[test]
fn two_a_second_are_not_seldom() {
    let mut one = open();
    one.dial_ended(true);
    for calls in 1..40 {
        one.pass(millis(500));
        refused(&mut one, 1 + calls);
        assert!(!tries(&one));
    }
}
