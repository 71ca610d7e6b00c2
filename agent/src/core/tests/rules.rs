//! Rules that a table of states does not show.

use super::*;

#[test]
fn five_failures_in_a_row_open_and_two_probes_close() {
    let mut one = One::new(BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    });
    one.calls(4, true);
    assert_eq!(one.state(), State::Closed);
    one.calls(1, true);
    let opened = one.now;
    assert_eq!(
        one.out,
        [
            Action::SetVerdict {
                row: ROW,
                verdict: agent_common::Verdict {
                    generation: 1,
                    errno: 111,
                    state: agent_common::verdict::STATE_OPEN,
                    flags: 0,
                },
                until: opened + secs(30) + VERDICT_SLACK,
                probe_limit: 1,
            },
            Action::Transition {
                row: ROW,
                from: State::Closed,
                to: State::Open,
                reason: Reason {
                    window: WindowKind::Connects,
                    kind: ReasonKind::ConsecutiveFailures,
                    value: 5.0,
                    threshold: 5.0,
                },
                generation: 1,
            },
        ]
    );
    one.pass(secs(30) - Nanos(1));
    assert_eq!(one.state(), State::Open);
    one.pass(Nanos(1));
    assert_eq!(one.state(), State::HalfOpen);
    assert_eq!(one.view().reason.kind, ReasonKind::ConsecutiveFailures);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::HalfOpen);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
    assert_eq!(one.view().reason, Reason::NONE);
}

#[test]
fn half_of_the_calls_failing_opens() {
    let mut one = One::new(BreakerSettings::default());
    for _ in 0..9 {
        one.calls(1, false);
        one.calls(1, true);
        if one.state() == State::Open {
            break;
        }
    }
    let reason = one.view().reason;
    assert_eq!(reason.kind, ReasonKind::FailureRate);
    assert_eq!((reason.value, reason.threshold), (0.5, 0.5));
    assert_eq!(one.ring.last_seq, 10, "the floor of calls is 10");
}

#[test]
fn a_run_expires_with_the_age_of_its_window() {
    let mut one = One::new(BreakerSettings::default());
    one.calls(4, true);
    one.pass(secs(61));
    one.configure(BreakerSettings::default());
    one.calls(1, true);
    assert_eq!(one.state(), State::Closed);
    one.calls(4, true);
    assert_eq!(one.state(), State::Open);
}

#[test]
fn closing_starts_with_an_empty_window() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    one.look();
    assert_eq!(one.state(), State::Closed);
    one.calls(4, true);
    assert_eq!(one.state(), State::Closed);
    one.calls(1, true);
    assert_eq!(one.state(), State::Open);
}

#[test]
fn a_manual_state_ends_with_an_empty_window() {
    // The failures under HoldClosed are never announced, so no sequence number tells them apart:
    // only their time does.
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::ForcedClosed);
    assert_eq!(one.view().reason, Reason::MANUAL);
    for _ in 0..20 {
        one.ring.push(one.now, true);
    }
    one.look();
    assert_eq!(one.state(), State::ForcedClosed);
    one.pass(secs(590));
    for _ in 0..20 {
        one.ring.push(one.now, true);
    }
    one.pass(secs(10));
    assert_eq!(one.state(), State::Closed);
    one.pass(millis(10));
    one.calls(4, true);
    assert_eq!(one.state(), State::Closed);
    let stats = one.stats(WindowKind::Connects);
    assert_eq!((stats.calls, stats.failures), (4, 4));
    one.calls(1, true);
    assert_eq!(one.state(), State::Open);
}

#[test]
fn failed_probes_double_the_cooldown_and_health_shrinks_it() {
    let mut one = One::new(BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    });
    one.calls(5, true);
    for expected in [60, 120, 240, 300, 300] {
        one.pass(one.view().next_probe_at.unwrap() - one.now);
        one.probe(ProbeOutcome::Failure);
        assert_eq!(one.state(), State::Open);
        assert_eq!(one.view().reason.kind, ReasonKind::ProbeFailed);
        assert_eq!(one.view().reason.window, WindowKind::Connects);
        assert_eq!(one.view().cooldown, secs(expected));
        let cooldown = one.view().next_probe_at.unwrap() - one.now;
        assert!(cooldown >= secs(expected * 9 / 10));
        assert!(cooldown <= secs((expected * 11 / 10).min(300)));
    }
    one.pass(one.view().next_probe_at.unwrap() - one.now);
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
    // 300, then 150, 75, 37.5 s later it is half as long.
    one.pass(secs(300) - Nanos(1));
    assert_eq!(one.view().cooldown, secs(300));
    one.pass(Nanos(1));
    assert_eq!(one.view().cooldown, secs(150));
    one.pass(secs(150));
    assert_eq!(one.view().cooldown, secs(75));
    one.pass(secs(75));
    assert_eq!(one.view().cooldown, millis(37_500));
    // A trip meanwhile starts from the cooldown reached.
    one.configure(BreakerSettings::default());
    one.calls(5, true);
    assert_eq!(one.view().next_probe_at.unwrap() - one.now, millis(37_500));
}

/// Closed just now, with a cooldown grown to 120 s.
fn closed_after_two_failed_probes() -> One {
    let mut one = One::new(BreakerSettings {
        redial: false,
        ..BreakerSettings::default()
    });
    one.calls(5, true);
    for _ in 0..2 {
        one.pass(one.view().next_probe_at.unwrap() - one.now);
        one.probe(ProbeOutcome::Failure);
    }
    one.pass(one.view().next_probe_at.unwrap() - one.now);
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    assert_eq!(
        (one.state(), one.view().cooldown),
        (State::Closed, secs(120))
    );
    one
}

#[test]
fn a_cooldown_that_a_new_policy_cuts_is_halved_after_the_new_one() {
    let mut one = closed_after_two_failed_probes();
    one.pass(secs(10));
    one.configure(BreakerSettings {
        cooldown_max: secs(80),
        ..BreakerSettings::default()
    });
    one.pass(secs(70) - Nanos(1));
    assert_eq!(one.view().cooldown, secs(80));
    one.pass(Nanos(1));
    assert_eq!(one.view().cooldown, secs(40));
}

#[test]
fn a_late_agent_halves_the_cooldown_no_later_the_next_time() {
    let mut one = closed_after_two_failed_probes();
    one.now = one.now + secs(130);
    one.handle(Event::Deadline);
    assert_eq!(one.view().cooldown, secs(60));
    one.pass(secs(50) - Nanos(1));
    assert_eq!(one.view().cooldown, secs(60));
    // Back at its base, and quiet for long enough to be dropped.
    one.pass(Nanos(1));
    assert!(!one.engine.contains(ROW));
}

#[test]
fn a_quiet_breaker_is_dropped_and_comes_back() {
    let mut one = One::new(BreakerSettings::default());
    one.calls(3, true);
    one.pass(secs(60));
    assert!(one.engine.contains(ROW));
    one.pass(Nanos(1));
    assert!(!one.engine.contains(ROW));
    assert_eq!(one.engine.next_deadline(), None);
    assert_eq!(one.out, []);
    assert!(one.engine.evictable(ROW));
    one.handle(Event::Configure {
        row: ROW,
        target: target(1),
        settings: Arc::new(BreakerSettings::default()),
        generation: u32::MAX,
    });
    one.calls(5, true);
    assert_eq!(one.view().generation, 0, "numbering goes on, and wraps");
}

#[test]
fn a_breaker_that_hides_failures_is_kept_until_they_are_old() {
    // Opened and closed within a second: dropping it would bring back the failures before.
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    one.pass(secs(1));
    one.probe(ProbeOutcome::Success);
    one.probe(ProbeOutcome::Success);
    one.pass(secs(60));
    assert!(one.engine.contains(ROW));
    one.pass(secs(1));
    assert!(!one.engine.contains(ROW));
}

#[test]
fn changed_settings_apply_without_changing_the_state() {
    let mut one = One::new(BreakerSettings::default());
    one.calls(4, true);
    let strict = BreakerSettings {
        consecutive_failures: 3,
        ..BreakerSettings::default()
    };
    one.configure(strict.clone());
    assert_eq!(one.state(), State::Closed);
    one.look();
    assert_eq!(one.state(), State::Open);
    one.out.clear();
    one.configure(strict.clone());
    assert_eq!(one.out, []);
    let until = one.view().next_probe_at.unwrap();
    one.configure(BreakerSettings {
        errno: 113,
        redial: false,
        cooldown: secs(1),
        ..strict
    });
    let [
        Action::SetVerdict {
            verdict,
            until: verdict_until,
            ..
        },
    ] = one.out[..]
    else {
        panic!("one verdict expected, got {:?}", one.out);
    };
    assert_eq!((verdict.errno, verdict.generation), (113, 2));
    assert_eq!(verdict_until, until + VERDICT_SLACK);
    assert_eq!(one.view().next_redial_at, None);
    one.pass(secs(10));
    assert!(!one.out.iter().any(|a| matches!(a, Action::Dial { .. })));
}

#[test]
fn a_breaker_switched_off_can_still_be_tripped_by_hand() {
    let mut one = One::new(BreakerSettings {
        enabled: false,
        ..BreakerSettings::default()
    });
    one.calls(100, true);
    assert_eq!(one.state(), State::Closed);
    one.bring_to(State::ForcedOpen);
    assert!(!one.engine.evictable(ROW));
    let until = one.view().manual_until.unwrap();
    assert!(matches!(
        one.out[0],
        Action::SetVerdict { until: at, .. } if at == until + VERDICT_SLACK
    ));
    one.pass(secs(600));
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn a_manual_state_is_prolonged_without_a_transition() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::ForcedOpen);
    let since = one.view().since;
    one.out.clear();
    one.pass(secs(300));
    let until = one.now + secs(600);
    one.handle(Event::Trip {
        row: ROW,
        until,
        last_seqs: [0; 2],
    });
    assert!(matches!(one.out[..], [Action::SetVerdict { .. }]));
    one.pass(secs(599));
    assert_eq!(one.state(), State::ForcedOpen);
    assert_eq!(one.view().since, since);
}

#[test]
fn a_new_owner_of_a_row_starts_anew() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    one.out.clear();
    let newer = RowId {
        incarnation: 2,
        ..ROW
    };
    let configure = |row| Event::Configure {
        row,
        target: target(1),
        settings: Arc::new(BreakerSettings::default()),
        generation: 5,
    };
    one.handle(configure(newer));
    assert!(one.engine.contains(newer) && !one.engine.contains(ROW));
    // Late news of the former owner changes nothing.
    one.handle(configure(ROW));
    one.handle(Event::Reset {
        row: ROW,
        last_seqs: [0; 2],
    });
    one.handle(Event::Forget { row: ROW });
    one.dial_ended(true);
    assert_eq!(one.out, []);
    assert_eq!(
        one.engine.view(newer, one.now).unwrap().state,
        State::Closed
    );
    assert_eq!(one.engine.view(newer, one.now).unwrap().generation, 5);
}

#[test]
fn incarnations_wrap() {
    let mut one = One::new(BreakerSettings::default());
    let mut owner = |incarnation: u32| {
        let row = RowId {
            index: 9,
            incarnation,
        };
        one.handle(Event::Configure {
            row,
            target: target(1),
            settings: Arc::new(BreakerSettings::default()),
            generation: 0,
        });
        one.engine.contains(row)
    };
    assert!(owner(u32::MAX - 1));
    assert!(owner(1), "newer, beyond the wrap");
    assert!(!owner(u32::MAX - 1), "older");
    assert!(!owner(u32::MAX));
    assert!(owner(1));
}

#[test]
fn a_forgotten_row_is_dialled_no_more() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    one.out.clear();
    one.handle(Event::Forget { row: ROW });
    assert_eq!(one.engine.next_deadline(), None);
    one.pass(secs(60));
    one.dial_ended(true);
    assert_eq!(one.out, []);
}

#[test]
fn only_rows_that_somebody_holds_shut_or_open_must_stay() {
    for (state, evictable) in [
        (State::Closed, true),
        (State::Open, false),
        (State::HalfOpen, true),
        (State::ForcedOpen, false),
        (State::ForcedClosed, false),
    ] {
        let mut one = One::new(BreakerSettings::default());
        one.bring_to(state);
        assert_eq!(one.engine.evictable(ROW), evictable, "{state:?}");
        assert_eq!(one.engine.state(ROW), Some(state));
    }
    let one = One::new(BreakerSettings::default());
    assert_eq!(one.engine.state(row(8)), None);
    assert!(one.engine.evictable(row(8)));
}

#[test]
fn a_half_open_row_is_forgotten_without_a_trace() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::HalfOpen);
    let generation = one.view().generation;
    one.handle(Event::ProbeStarted {
        row: ROW,
        generation,
    });
    one.out.clear();
    one.handle(Event::Forget { row: ROW });
    assert_eq!(one.engine.next_deadline(), None);
    assert_eq!(one.engine.row_waiting_for(target(1)), None);
    // Its probe reports, a dial comes back, time passes: nobody is there.
    one.handle(Event::ProbeEnded {
        row: ROW,
        generation,
        outcome: ProbeOutcome::Failure,
        last_seqs: [0; 2],
    });
    one.dial_ended(true);
    one.pass(secs(600));
    assert_eq!(one.out, []);
    assert_eq!(one.engine.state(ROW), None);
    // If it comes back it is closed, and late news of the probe still says nothing.
    one.handle(Event::Configure {
        row: ROW,
        target: target(1),
        settings: Arc::new(BreakerSettings::default()),
        generation,
    });
    one.handle(Event::ProbeEnded {
        row: ROW,
        generation,
        outcome: ProbeOutcome::Failure,
        last_seqs: [0; 2],
    });
    assert_eq!(one.state(), State::Closed);
    assert_eq!(one.view().cooldown, secs(30));
    assert_eq!(one.out, []);
}

#[test]
fn time_that_goes_backwards_stands_still() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    let opened = one.now;
    one.now = secs(1);
    one.handle(Event::Trip {
        row: ROW,
        until: secs(2000),
        last_seqs: [0; 2],
    });
    assert_eq!(one.view().since, opened);
    one.handle(Event::Reset {
        row: ROW,
        last_seqs: [0; 2],
    });
    assert_eq!(one.view().since, opened);
    one.now = Nanos::ZERO;
    one.handle(Event::Deadline);
    assert_eq!(one.state(), State::Closed);
}
