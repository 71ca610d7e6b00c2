//! Half-open rounds: how long they last, and what their leases do.

use super::*;

/// Half-open since this moment, by a redial.
fn half_open(settings: BreakerSettings) -> One {
    let mut one = One::new(settings);
    one.bring_to(State::HalfOpen);
    one.out.clear();
    one
}

fn started(one: &mut One) {
    let generation = one.view().generation;
    one.handle(Event::ProbeStarted {
        row: ROW,
        generation,
    });
}

/// A probe of whose start nothing was heard.
fn ended(one: &mut One, outcome: ProbeOutcome) {
    one.handle(Event::ProbeEnded {
        row: ROW,
        generation: one.view().generation,
        outcome,
        last_seqs: one.last_seqs(),
    });
}

/// The round that is on ends exactly after this time.
fn assert_lasts(one: &mut One, time: Nanos) {
    let generation = one.view().generation;
    one.pass(time - Nanos(1));
    assert_eq!(one.view().generation, generation, "ended early");
    one.pass(Nanos(1));
    assert_eq!(one.view().generation, generation + 1, "ended late");
    assert_eq!(one.state(), State::HalfOpen);
}

#[test]
fn a_lost_probe_gives_its_slot_back() {
    let mut one = One::new(BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    });
    one.bring_to(State::Open);
    one.pass(secs(30));
    let generation = one.view().generation;
    one.out.clear();
    one.pass(secs(2));
    one.handle(Event::ProbeStarted {
        row: ROW,
        generation,
    });
    one.pass(secs(3) - Nanos(1));
    assert_eq!(one.out, []);
    one.pass(Nanos(1));
    assert_eq!(one.out.len(), 1, "a verdict and no transition");
    assert_eq!(one.view().generation, generation + 1);
    // The lost probe reports after all: void.
    one.handle(Event::ProbeEnded {
        row: ROW,
        generation,
        outcome: ProbeOutcome::Failure,
        last_seqs: [0; 2],
    });
    assert_eq!(one.state(), State::HalfOpen);
    // Successes count on across rounds.
    one.probe(ProbeOutcome::Success);
    one.pass(secs(10));
    assert_eq!(one.state(), State::HalfOpen);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn a_round_ends_even_when_abandoned_probes_keep_it_busy() {
    let mut one = One::new(BreakerSettings {
        redial: false,
        probes: 2,
        ..BreakerSettings::default()
    });
    one.bring_to(State::Open);
    one.pass(secs(30));
    let generation = one.view().generation;
    for _ in 0..11 {
        one.handle(Event::ProbeStarted {
            row: ROW,
            generation,
        });
        one.handle(Event::ProbeEnded {
            row: ROW,
            generation,
            outcome: ProbeOutcome::Returned,
            last_seqs: [0; 2],
        });
        one.pass(secs(1));
        assert_eq!(one.view().generation, generation);
    }
    one.pass(secs(1));
    assert_eq!(one.view().generation, generation + 1);
}

#[test]
fn a_round_goes_on_while_it_has_slots() {
    let mut one = One::new(BreakerSettings {
        probes: 2,
        successes_to_close: 5,
        ..BreakerSettings::default()
    });
    one.bring_to(State::HalfOpen);
    let first = one.view().generation;
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.view().generation, first);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.view().generation, first + 1, "both slots are used");
    one.probe(ProbeOutcome::Returned);
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::HalfOpen);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn an_idle_row_costs_one_verdict_a_minute() {
    let mut one = half_open(BreakerSettings::default());
    for _ in 0..10 {
        assert_lasts(&mut one, secs(60));
    }
    assert_eq!(one.out.len(), 10, "verdicts and nothing else");
    // An idle minute, a probe that begins at its end and four leases of 3 s.
    let Some(&Action::SetVerdict { until, .. }) = one.out.last() else {
        panic!("a verdict expected, got {:?}", one.out);
    };
    assert_eq!(until, one.now + secs(60 + 12) + VERDICT_SLACK);
}

#[test]
fn only_news_of_a_slot_taken_in_this_round_begins_a_lease() {
    let mut one = half_open(BreakerSettings::default());
    let generation = one.view().generation;
    one.pass(secs(10));
    // Late: of the round before.
    one.handle(Event::ProbeStarted {
        row: ROW,
        generation: generation - 1,
    });
    // Its slot is free again.
    ended(&mut one, ProbeOutcome::Returned);
    assert_lasts(&mut one, secs(50));
    started(&mut one);
    assert_lasts(&mut one, secs(3));
    // And the next round is idle again.
    assert_lasts(&mut one, secs(60));
}

#[test]
fn a_success_whose_start_was_lost_begins_a_lease() {
    let mut one = half_open(BreakerSettings {
        probes: 2,
        successes_to_close: 3,
        ..BreakerSettings::default()
    });
    one.pass(secs(10));
    ended(&mut one, ProbeOutcome::Success);
    assert_lasts(&mut one, secs(3));
}

#[test]
fn a_probe_at_the_end_of_an_idle_round_is_waited_for() {
    let mut one = half_open(BreakerSettings::default());
    let generation = one.view().generation;
    one.pass(secs(60) - Nanos(1));
    started(&mut one);
    one.pass(secs(3) - Nanos(1));
    assert_eq!(one.view().generation, generation);
    // The four leases count from its start, not from the begin of the round.
    for _ in 0..4 {
        ended(&mut one, ProbeOutcome::Returned);
        started(&mut one);
        one.pass(secs(2));
        assert_eq!(one.view().generation, generation);
    }
    one.pass(secs(1));
    assert_eq!(one.view().generation, generation + 1);
}

#[test]
fn a_destination_called_once_a_minute_closes() {
    for early in [millis(1), Nanos::ZERO] {
        let mut one = half_open(BreakerSettings::default());
        for _ in 0..2 {
            one.pass(secs(60) - early);
            started(&mut one);
            one.pass(early);
            ended(&mut one, ProbeOutcome::Success);
        }
        assert_eq!(one.state(), State::Closed);
    }
}

#[test]
fn a_lease_longer_than_an_idle_round_is_given() {
    let mut one = half_open(BreakerSettings {
        probe_lease: secs(100),
        ..BreakerSettings::default()
    });
    assert_lasts(&mut one, secs(100));
}

#[test]
fn no_round_outlasts_its_verdict_when_the_lease_grows() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    one.configure(BreakerSettings {
        probe_lease: secs(1000),
        ..BreakerSettings::default()
    });
    started(&mut one);
    // As the verdict was written: see above.
    assert_lasts(&mut one, secs(60 + 12));
    started(&mut one);
    assert_lasts(&mut one, secs(1000));
}
