//! Exchanges that waited and were broken off: a probe that waits as they did is a good one.

use proptest::prelude::*;

use super::*;

/// Exchanges that fail now, each after it had lived for so long; `None`: by silence.
fn fail(one: &mut One, lives: &[Option<Nanos>]) {
    for &broken_after in lives {
        one.exchanges.push(one.now, true);
        let at = one.now;
        one.handle(Event::ExchangeFailed {
            row: ROW,
            at,
            broken_after,
        });
    }
    one.look_at(WindowKind::Exchanges);
}

/// What breaks off exchanges that have lived for so long.
fn broken(one: &mut One, lives: &[Nanos]) {
    let lives: Vec<_> = lives.iter().copied().map(Some).collect();
    fail(one, &lives);
}

/// Half-open after this; whether the agent's first dial finds the server there.
fn half_open(one: &mut One, there: bool) {
    assert_eq!(one.state(), State::Open);
    one.handle(Event::Deadline);
    one.dial_ended(there);
    let until = one.view().next_probe_at.expect("it is open");
    one.pass_until(until, true, |one| one.state() == State::HalfOpen);
    assert_eq!(one.state(), State::HalfOpen);
}

/// A probe begins.
fn begins(one: &mut One) -> u32 {
    let generation = one.view().generation;
    one.handle(Event::ProbeStarted {
        row: ROW,
        generation,
    });
    generation
}

/// It has waited for so long.
fn waits(one: &mut One, generation: u32, waited: Nanos, answers_nobody: bool) {
    let last_seqs = one.last_seqs();
    one.handle(Event::ProbeWaits {
        row: ROW,
        generation,
        waited,
        answers_nobody,
        last_seqs,
    });
}

fn ends(one: &mut One, generation: u32, outcome: ProbeOutcome) {
    let last_seqs = one.last_seqs();
    one.handle(Event::ProbeEnded {
        row: ROW,
        generation,
        outcome,
        last_seqs,
    });
}

/// How long a probe has to wait; `None`: it never waits enough.
fn least(one: &mut One, answers_nobody: bool) -> Option<Nanos> {
    let generation = begins(one);
    (0..4000).map(|n| millis(n * 10)).find(|&waited| {
        waits(one, generation, waited, answers_nobody);
        one.view().generation != generation
    })
}

/// A restart: the server is gone for a moment.
#[test]
fn long_polls_come_back_after_a_restart() {
    let mut one = One::new(BreakerSettings::default());
    broken(&mut one, &[secs(6); 8]);
    half_open(&mut one, false);
    let first = begins(&mut one);
    waits(&mut one, first, millis(1490), false);
    assert_eq!(one.view().generation, first, "not yet");
    waits(&mut one, first, millis(1500), false);
    // The next may go at once, and what becomes of this one is not heard any more.
    assert_eq!(one.state(), State::HalfOpen);
    assert!(one.view().awaits_probe);
    ends(&mut one, first, ProbeOutcome::Failure);
    let second = begins(&mut one);
    assert_ne!(first, second);
    waits(&mut one, first, secs(3), false);
    assert_eq!(one.state(), State::HalfOpen, "a probe counts once");
    waits(&mut one, second, millis(1500), false);
    assert_eq!(one.state(), State::Closed);
    assert_eq!(one.view().cooldown, secs(30));
}

/// A server that hangs, is killed, and is back to hang again.
#[test]
fn what_breaks_off_again_soon_must_be_answered() {
    for (answers_nobody, expected) in [(false, None), (true, Some(millis(1500)))] {
        let mut one = One::new(BreakerSettings::default());
        for again in [false, true] {
            broken(&mut one, &[secs(2), secs(3), secs(4), secs(5), secs(5)]);
            half_open(&mut one, false);
            let least = [(); 2].map(|()| least(&mut one, answers_nobody));
            if again {
                assert_eq!(least, [expected; 2]);
            } else {
                assert_eq!(least, [Some(millis(1500)); 2]);
                assert_eq!(one.state(), State::Closed);
                one.pass(secs(5));
                // It is killed, and nobody listens for a moment.
                for _ in 0..5 {
                    one.ring.push(one.now, true);
                }
                one.look_at(WindowKind::Connects);
                assert_eq!(one.state(), State::Open);
                one.dial_ended(true);
                for _ in 0..2 {
                    let generation = begins(&mut one);
                    ends(&mut one, generation, ProbeOutcome::Success);
                }
                assert_eq!(one.state(), State::Closed);
                one.pass(secs(5));
            }
        }
    }
}

#[test]
fn one_way_destinations_come_back() {
    for lives in [[secs(3600); 6], [millis(2); 6]] {
        let mut one = One::new(BreakerSettings::default());
        broken(&mut one, &lives);
        half_open(&mut one, false);
        assert_eq!(least(&mut one, true), Some(millis(1500)));
        assert_eq!(least(&mut one, true), Some(millis(1500)));
        assert_eq!(one.state(), State::Closed);
    }
    // The server accepts all the time, so that it is not known what has broken them off.
    for (lived, wanted) in [
        (secs(3600), secs(20)),
        (secs(4), secs(5)),
        (millis(1), millis(1500)),
    ] {
        let mut one = One::new(BreakerSettings::default());
        broken(&mut one, &[lived; 6]);
        half_open(&mut one, true);
        assert_eq!(least(&mut one, true), Some(wanted), "{lived:?}");
    }
}

/// A server that breaks off what takes too long fails in this very way, and its probes must live longer.
#[test]
fn a_server_that_fails_slowly_is_not_outlived() {
    let mut one = One::new(BreakerSettings::default());
    for _ in 0..5 {
        one.now = one.now + millis(400);
        broken(&mut one, &[secs(10)]);
    }
    half_open(&mut one, true);
    let probe = begins(&mut one);
    waits(&mut one, probe, secs(10), false);
    one.now = one.now + secs(10);
    broken(&mut one, &[secs(10)]);
    ends(&mut one, probe, ProbeOutcome::Failure);
    assert_eq!(one.state(), State::Open);
    assert_eq!(one.view().reason.kind, ReasonKind::ProbeFailed);
    half_open(&mut one, true);
    assert_eq!(least(&mut one, false), Some(millis(12_500)));
}

/// Exchanges of different ages that end at once have met an event.
#[test]
fn what_ends_together_was_no_limit_on_time() {
    let lives = [secs(2), secs(9), secs(30), secs(40), secs(41)];
    let mut one = One::new(BreakerSettings::default());
    broken(&mut one, &lives);
    half_open(&mut one, true);
    assert_eq!(least(&mut one, false), Some(millis(1500)));
    // One after the other they may have met anything.
    let mut one = One::new(BreakerSettings::default());
    for lived in lives {
        one.now = one.now + millis(251);
        broken(&mut one, &[lived]);
    }
    half_open(&mut one, true);
    assert_eq!(least(&mut one, false), None, "more than is tried here");
}

/// Who is answered at once is owed an answer by a server that is back.
#[test]
fn quick_exchanges_must_be_answered() {
    let mut one = One::new(BreakerSettings::default());
    broken(&mut one, &[millis(1400); 6]);
    half_open(&mut one, false);
    assert_eq!(least(&mut one, false), None);
    let probe = one.view().generation;
    ends(&mut one, probe, ProbeOutcome::Failure);
    assert_eq!(one.state(), State::Open);
}

#[test]
fn after_silence_a_probe_must_be_answered() {
    for lives in [
        vec![None; 5],
        vec![
            None,
            Some(secs(9)),
            Some(secs(9)),
            Some(secs(9)),
            Some(secs(9)),
        ],
        vec![
            Some(secs(9)),
            Some(secs(9)),
            Some(secs(9)),
            Some(secs(9)),
            None,
        ],
    ] {
        let mut one = One::new(BreakerSettings::default());
        fail(&mut one, &lives);
        half_open(&mut one, false);
        assert_eq!(least(&mut one, true), None, "{lives:?}");
        let probe = one.view().generation;
        ends(&mut one, probe, ProbeOutcome::Unanswered);
        assert_eq!(one.state(), State::Open, "{lives:?}");
    }
    // Nor does it matter how a probe fails, or when.
    let mut one = One::new(BreakerSettings::default());
    fail(&mut one, &[None; 5]);
    half_open(&mut one, true);
    one.pass(secs(61));
    let probe = begins(&mut one);
    broken(&mut one, &[secs(9)]);
    ends(&mut one, probe, ProbeOutcome::Failure);
    half_open(&mut one, false);
    assert_eq!(least(&mut one, false), None);
    // Long before, it was something else.
    let mut one = One::new(BreakerSettings::default());
    fail(&mut one, &[None]);
    one.now = one.now + secs(61);
    broken(&mut one, &[secs(9); 5]);
    half_open(&mut one, false);
    assert_eq!(least(&mut one, false), Some(millis(1500)));
}

/// Nobody waits for an answer there, so that nothing is said by who does not wait longer.
#[test]
fn what_is_given_up_on_a_one_way_destination_says_nothing() {
    let mut one = One::new(BreakerSettings::default());
    broken(&mut one, &[secs(5); 6]);
    half_open(&mut one, false);
    let first = begins(&mut one);
    ends(&mut one, first, ProbeOutcome::Unanswered);
    assert_eq!(one.state(), State::HalfOpen);
    assert!(one.view().awaits_probe, "the slot is free");
    assert_eq!(one.view().cooldown, secs(30));
    let second = begins(&mut one);
    ends(&mut one, second, ProbeOutcome::Failure);
    assert_eq!(
        one.state(),
        State::Open,
        "broken off, it has failed as ever"
    );
}

#[test]
fn opened_on_connects_nothing_of_it_matters() {
    let mut one = One::new(BreakerSettings::default());
    let at = one.now;
    one.handle(Event::ExchangeFailed {
        row: ROW,
        at,
        broken_after: Some(secs(9)),
    });
    one.calls(5, true);
    one.dial_ended(true);
    assert_eq!(one.state(), State::HalfOpen);
    assert_eq!(least(&mut one, true), None);
}

/// A trial is a probe, too.
#[test]
fn a_trial_that_waits_makes_half_open() {
    let mut one = One::new(BreakerSettings::default());
    broken(&mut one, &[secs(2), secs(3), secs(4), secs(5), secs(6)]);
    one.handle(Event::Deadline);
    one.dial_ended(true);
    one.handle(Event::Refused {
        row: ROW,
        refused: 1,
    });
    one.now = one.now + secs(2);
    one.handle(Event::Refused {
        row: ROW,
        refused: 100,
    });
    let generation = begins(&mut one);
    waits(&mut one, generation, millis(1500), false);
    assert_eq!(one.state(), State::HalfOpen);
    assert_eq!(least(&mut one, false), Some(millis(1500)));
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn it_outlives_the_agent() {
    let mut one = One::new(BreakerSettings::default());
    broken(&mut one, &[secs(4); 5]);
    let saved = one.engine.save(ROW).expect("it is known");
    assert_eq!(saved.broken_after, Some(secs(4)));
    let mut next = One::new(BreakerSettings::default());
    next.engine = Engine::new(2);
    let settings = Arc::new(BreakerSettings::default());
    next.engine
        .restore(ROW, target(1), settings, &saved, next.now, &mut next.out);
    half_open(&mut next, true);
    assert_eq!(least(&mut next, false), Some(secs(5)));
    // What says nothing of waits is not kept.
    let mut one = One::new(BreakerSettings::default());
    broken(&mut one, &[millis(4); 5]);
    assert_eq!(one.engine.save(ROW).unwrap().broken_after, None);
}

proptest! {
    /// Whatever fails how, and whatever the dials say: a probe counts by waiting only if it has lived longer than
    /// the shortest of what was broken off just before, or one event has broken them off or the server was gone.
    #[test]
    fn what_fails_slowly_never_closes_it(
        lives in prop::collection::vec(prop::option::weighted(0.9, 1..20_000_u64), 5..20),
        apart in 0..2000_u64,
        there: bool,
        answers_nobody: bool,
    ) {
        let lives: Vec<_> = lives.into_iter().map(|lived| lived.map(millis)).collect();
        let mut one = One::new(BreakerSettings::default());
        for lived in &lives {
            if one.state() == State::Closed {
                one.now = one.now + millis(apart);
                fail(&mut one, &[*lived]);
            }
        }
        prop_assume!(one.state() == State::Open);
        half_open(&mut one, there);
        let Some(least) = least(&mut one, answers_nobody) else {
            return Ok(());
        };
        let counted = &lives[..5];
        prop_assert!(least >= millis(1500));
        prop_assert!(counted.iter().all(Option::is_some), "one was silent");
        let waited = counted.iter().flatten().any(|lived| *lived >= millis(1500));
        prop_assert!(waited || answers_nobody);
        if there && apart > 250 {
            prop_assert!(least > counted[4].unwrap() || least == secs(20));
        }
    }
}
