//! Redials that are answered where probes of programs fail.

use super::*;

/// Time passes, with every dial answered, until a probe is admitted; the time that took.
fn until_half_open(one: &mut One) -> Nanos {
    let from = one.now;
    one.pass_until(from + secs(1000), true, |one| {
        one.state() == State::HalfOpen
    });
    assert_eq!(one.state(), State::HalfOpen);
    one.now - from
}

/// Misled so many times in a row; open after the last failed probe.
fn misled(times: u32, settings: BreakerSettings) -> One {
    let mut one = One::new(settings);
    one.bring_to(State::Open);
    for _ in 0..times {
        until_half_open(&mut one);
        one.probe(ProbeOutcome::Failure);
        assert_eq!(one.state(), State::Open);
    }
    one
}

/// Whether a dial answered that long from now is believed.
fn believes_after(one: &mut One, time: Nanos) -> bool {
    one.now = one.now + time;
    one.dial_ended(true);
    one.state() == State::HalfOpen
}

#[test]
fn each_misleading_redial_doubles_the_time_of_distrust() {
    for times in 1..=6 {
        let distrust = secs(1 << (times - 1));
        let mut one = misled(times, long_cooldown());
        assert!(!believes_after(&mut one, Nanos::ZERO), "after {times}");
        assert!(!believes_after(&mut one, distrust - Nanos(1)));
        assert!(believes_after(&mut one, Nanos(1)), "after {times}");
    }
}

/// Cooldowns that no test here waits for.
fn long_cooldown() -> BreakerSettings {
    BreakerSettings {
        cooldown: secs(900),
        cooldown_max: secs(900),
        ..BreakerSettings::default()
    }
}

#[test]
fn a_restart_that_fails_one_probe_is_over_a_second_and_a_half_later() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    one.pass(secs(2));
    assert_eq!(one.state(), State::Open);
    let wait = until_half_open(&mut one);
    assert!(wait <= millis(600), "{wait:?}");
    one.probe(ProbeOutcome::Failure);
    // From now on it works.
    let wait = until_half_open(&mut one);
    assert!((secs(1)..=millis(1_600)).contains(&wait), "{wait:?}");
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn a_target_that_always_misleads_gets_a_probe_per_cooldown() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    let mut waits = Vec::new();
    for _ in 0..20 {
        waits.push(until_half_open(&mut one));
        one.probe(ProbeOutcome::Failure);
    }
    // Dials are half a second apart, then 2 s, after ten minutes 4 s (and 20 %).
    for (k, &wait) in waits.iter().enumerate().skip(1).take(8) {
        let distrust = secs(1 << (k - 1));
        assert!(
            (distrust..=distrust + millis(2_400)).contains(&wait),
            "{waits:?}"
        );
    }
    for &wait in &waits[10..] {
        assert!((secs(270)..=secs(300)).contains(&wait), "{waits:?}");
    }
}

#[test]
fn the_cooldown_ends_whatever_redials_have_done() {
    let mut one = misled(
        3,
        BreakerSettings {
            cooldown: secs(1),
            cooldown_max: secs(2),
            ..BreakerSettings::default()
        },
    );
    let wait = until_half_open(&mut one);
    assert!(wait <= secs(2), "{wait:?}");
}

#[test]
fn a_failed_probe_of_the_cooldown_renews_distrust_and_does_not_add_to_it() {
    let mut one = misled(2, BreakerSettings::default());
    let until = one.view().next_probe_at.unwrap();
    one.pass(until - one.now);
    assert_eq!(one.state(), State::HalfOpen);
    one.probe(ProbeOutcome::Failure);
    assert!(!believes_after(&mut one, secs(2) - Nanos(1)));
    assert!(believes_after(&mut one, Nanos(1)));
}

#[test]
fn failed_probes_of_the_cooldown_alone_cost_no_trust() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    for _ in 0..2 {
        let until = one.view().next_probe_at.unwrap();
        one.pass(until - one.now);
        one.probe(ProbeOutcome::Failure);
        assert_eq!(one.state(), State::Open);
    }
    assert!(believes_after(&mut one, Nanos::ZERO));
}

#[test]
fn a_later_round_is_still_the_redials() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    one.probe(ProbeOutcome::Success);
    one.pass(secs(10));
    one.probe(ProbeOutcome::Failure);
    assert_eq!(one.state(), State::Open);
    assert!(!believes_after(&mut one, secs(1) - Nanos(1)));
    assert!(believes_after(&mut one, Nanos(1)));
}

#[test]
fn closing_and_an_operators_reset_restore_trust() {
    let by_probes = |one: &mut One| {
        until_half_open(one);
        one.probe(ProbeOutcome::Success);
        one.probe(ProbeOutcome::Success);
    };
    let by_reset = |one: &mut One| {
        one.handle(Event::Reset {
            row: ROW,
            last_seqs: one.last_seqs(),
        });
    };
    for close in [&by_probes as &dyn Fn(&mut One), &by_reset] {
        let mut one = misled(4, long_cooldown());
        close(&mut one);
        assert_eq!(one.state(), State::Closed);
        one.calls(5, true);
        assert_eq!(one.state(), State::Open);
        assert!(believes_after(&mut one, Nanos::ZERO));
        // And it is counted from the start.
        one.probe(ProbeOutcome::Failure);
        assert!(!believes_after(&mut one, secs(1) - Nanos(1)));
        assert!(believes_after(&mut one, Nanos(1)));
    }
}

#[test]
fn one_rows_distrust_is_not_the_others() {
    let mut one = misled(3, long_cooldown());
    let other = row(8);
    one.handle(Event::Configure {
        row: other,
        target: target(1),
        settings: Arc::new(BreakerSettings::default()),
        generation: 0,
    });
    let mut ring = Ring::new();
    for _ in 0..5 {
        ring.push(one.now, true);
    }
    one.handle(Event::Calls {
        kind: WindowKind::Connects,
        row: other,
        last_seq: 5,
        window: &ring.window,
    });
    one.dial_ended(true);
    let state = |one: &One, row| one.engine.view(row, one.now).unwrap().state;
    assert_eq!(state(&one, other), State::HalfOpen);
    assert_eq!(state(&one, ROW), State::Open);
    assert!(one.view().next_redial_at.is_some(), "it is still dialled");
}
