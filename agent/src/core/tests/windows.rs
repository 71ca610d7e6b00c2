//! Two windows, one breaker.

use agent_common::verdict::VERDICT_PROBE_BY_EXCHANGE;

use super::*;
use crate::core::window::evaluate;

const CONNECTS: WindowKind = WindowKind::Connects;
const EXCHANGES: WindowKind = WindowKind::Exchanges;

/// Flags of the last verdict.
fn flags(one: &One) -> u8 {
    let last = one.out.iter().rev().find_map(|action| match action {
        Action::SetVerdict { verdict, .. } => Some(verdict.flags),
        _ => None,
    });
    last.expect("a verdict was written")
}

fn cooldown_passes(one: &mut One) {
    one.pass(one.view().next_probe_at.unwrap() - one.now);
    assert_eq!(one.state(), State::HalfOpen);
}

#[test]
fn exchanges_trip_alone_while_connects_succeed() {
    let mut one = One::new(BreakerSettings::default());
    for failures in 1..=5 {
        assert_eq!(one.state(), State::Closed);
        one.calls(1, false);
        one.exchange(1, How::Badly);
        assert_eq!(one.stats(EXCHANGES).consecutive, failures);
    }
    assert_eq!(one.state(), State::Open);
    let reason = one.view().reason;
    assert_eq!(
        (reason.window, reason.kind, reason.value),
        (EXCHANGES, ReasonKind::ConsecutiveFailures, 5.0)
    );
    let connects = one.stats(CONNECTS);
    assert_eq!((connects.calls, connects.failures), (5, 0));
}

#[test]
fn connects_trip_alone_while_exchanges_succeed() {
    // Connections that live on are answered, new ones are refused.
    let mut one = One::new(BreakerSettings::default());
    for _ in 0..5 {
        assert_eq!(one.state(), State::Closed);
        one.exchange(1, How::Well);
        one.calls(1, true);
    }
    assert_eq!(one.state(), State::Open);
    assert_eq!(one.view().reason.window, CONNECTS);
    assert!(one.view().next_redial_at.is_some());
}

#[test]
fn failures_of_the_two_windows_do_not_add_up() {
    let mut one = One::new(BreakerSettings::default());
    one.calls(4, true);
    one.exchange(4, How::Badly);
    one.look();
    assert_eq!(one.state(), State::Closed);
    // Nor does news of none of them say anything.
    one.ring.push(one.now, true);
    one.look_at(WindowKind::None);
    assert_eq!(one.state(), State::Closed);
    let (window, last_seq) = (&one.ring.window, one.ring.last_seq);
    let none = one
        .engine
        .window_stats(ROW, WindowKind::None, window, last_seq, one.now);
    assert_eq!(none, None);
    let s = BreakerSettings::default();
    let none = evaluate(WindowKind::None, window, last_seq, 0, one.now, &s);
    assert_eq!((none.consecutive, none.trip), (5, None));
    one.look();
    assert_eq!(one.state(), State::Open);
}

#[test]
fn a_breaker_opened_on_exchanges_is_probed_by_exchanges() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to_by_exchanges(State::Open);
    assert_eq!(flags(&one), 0);
    cooldown_passes(&mut one);
    assert_eq!(flags(&one), VERDICT_PROBE_BY_EXCHANGE);
    assert_eq!(one.view().reason.window, EXCHANGES);
    one.probe(ProbeOutcome::Failure);
    assert_eq!(one.state(), State::Open);
    assert_eq!(one.view().reason, Reason::probe_failed(EXCHANGES));
    assert_eq!(one.view().cooldown, secs(60));
    assert_eq!(flags(&one), 0);
    cooldown_passes(&mut one);
    assert_eq!(flags(&one), VERDICT_PROBE_BY_EXCHANGE);
    // The next round as well.
    one.probe(ProbeOutcome::Success);
    assert_eq!(flags(&one), VERDICT_PROBE_BY_EXCHANGE);
    one.probe(ProbeOutcome::Success);
    assert_eq!(one.state(), State::Closed);
    assert_eq!(flags(&one), 0);
    // Afterwards it opens on connects like any other.
    one.bring_to(State::HalfOpen);
    assert_eq!(flags(&one), 0);
}

#[test]
fn only_rows_that_opened_on_connects_act_on_a_dial() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::Open);
    let other = row(8);
    one.handle(Event::Configure {
        row: other,
        target: target(1),
        settings: Arc::new(BreakerSettings::default()),
        generation: 0,
    });
    for _ in 0..5 {
        one.exchanges.push(one.now, true);
    }
    let event = Event::Calls {
        row: other,
        kind: EXCHANGES,
        last_seq: 5,
        window: &one.exchanges.window,
    };
    one.engine.handle(event, one.now, &mut one.out);
    assert_eq!(one.engine.state(other), Some(State::Open));
    one.dial_ended(true);
    assert_eq!(one.state(), State::HalfOpen);
    assert_eq!(flags(&one), 0);
    assert_eq!(one.engine.state(other), Some(State::Open));
    assert_eq!(one.engine.row_waiting_for(target(1)), None);
}

#[test]
fn a_probe_by_exchange_has_the_lease_of_an_exchange() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to_by_exchanges(State::HalfOpen);
    let began = one.now;
    let generation = one.view().generation;
    let until = match one.out[..] {
        [
            ..,
            Action::SetVerdict { until, .. },
            Action::Transition { .. },
        ] => until,
        _ => panic!("a verdict and a transition expected, got {:?}", one.out),
    };
    assert_eq!(until, began + secs(60 + 4 * 33) + VERDICT_SLACK);
    one.pass(secs(10));
    one.handle(Event::ProbeStarted {
        row: ROW,
        generation,
    });
    one.pass(secs(33) - Nanos(1));
    assert_eq!(one.view().generation, generation);
    one.pass(Nanos(1));
    assert_eq!(one.view().generation, generation + 1);
    assert_eq!(flags(&one), VERDICT_PROBE_BY_EXCHANGE);
}

fn slow_is_bad() -> BreakerSettings {
    BreakerSettings {
        slow_call_rate: Some(0.5),
        ..BreakerSettings::default()
    }
}

#[test]
fn slow_exchanges_trip_where_a_policy_says_so() {
    for (settings, expected) in [
        (BreakerSettings::default(), State::Closed),
        (slow_is_bad(), State::Open),
    ] {
        let mut one = One::new(settings);
        one.exchange(5, How::Well);
        one.exchange(4, How::Slowly);
        let stats = one.stats(EXCHANGES);
        assert_eq!((stats.calls, stats.slow_calls, stats.failures), (9, 4, 0));
        assert_eq!(stats.slow_call_rate, 4.0 / 9.0);
        assert_eq!(one.state(), State::Closed);
        // The tenth call makes half of ten slow.
        one.exchange(1, How::Slowly);
        assert_eq!(one.state(), expected);
    }
    let mut one = One::new(slow_is_bad());
    one.exchange(10, How::Slowly);
    assert_eq!(
        one.view().reason,
        Reason {
            window: EXCHANGES,
            kind: ReasonKind::SlowCallRate,
            value: 1.0,
            threshold: 0.5,
        }
    );
}

#[test]
fn slow_calls_take_their_minimum_and_are_none_among_connects() {
    let mut one = One::new(slow_is_bad());
    one.exchange(9, How::Slowly);
    assert_eq!(one.state(), State::Closed, "nine of at least ten calls");
    for _ in 0..20 {
        one.ring.push_how(one.now, How::Slowly);
    }
    one.look();
    assert_eq!(one.state(), State::Closed);
    one.exchange(1, How::Slowly);
    assert_eq!(one.state(), State::Open);
}

#[test]
fn a_run_is_named_before_a_rate_and_failures_before_slowness() {
    let kind = |calls: &[(u32, How)]| {
        let mut ring = Ring::new();
        for &(count, how) in calls {
            (0..count).for_each(|_| ring.push_how(secs(1), how));
        }
        let s = BreakerSettings {
            failure_rate: Some(0.3),
            slow_call_rate: Some(0.3),
            ..BreakerSettings::default()
        };
        let stats = evaluate(EXCHANGES, &ring.window, ring.last_seq, 0, secs(1), &s);
        stats.trip.map(|reason| reason.kind)
    };
    use How::{Badly, Slowly, Well};
    let all_three = kind(&[(5, Slowly), (5, Badly)]);
    assert_eq!(all_three, Some(ReasonKind::ConsecutiveFailures));
    let both_rates = kind(&[(4, Badly), (6, Slowly)]);
    assert_eq!(both_rates, Some(ReasonKind::FailureRate));
    let slowness = kind(&[(2, Badly), (4, Well), (4, Slowly)]);
    assert_eq!(slowness, Some(ReasonKind::SlowCallRate));
    assert_eq!(kind(&[(2, Badly), (6, Well), (2, Slowly)]), None);
    // A slow answer is an answer: it ends a run of failures.
    assert_eq!(kind(&[(4, Badly), (1, Slowly), (12, Well)]), None);
}

#[test]
fn a_call_that_failed_is_not_slow_as_well() {
    let mut ring = Ring::new();
    for seq in 1..=10 {
        ring.push(secs(1), true);
        ring.window.entries[slot(seq)] = encode(seq, secs(1).0, seq % 2 == 0, true);
    }
    let stats = evaluate(EXCHANGES, &ring.window, 10, 0, secs(1), &slow_is_bad());
    assert_eq!((stats.failures, stats.slow_calls), (5, 5));
}

/// Closed again after it opened, with failures left in both windows from before.
fn assert_both_are_empty(mut one: One) {
    assert_eq!(one.state(), State::Closed);
    for first in [CONNECTS, EXCHANGES] {
        one.look_at(first);
        assert_eq!(one.state(), State::Closed, "failures of before count");
        let stats = one.stats(first);
        assert_eq!((stats.calls, stats.consecutive), (0, 0), "{first:?}");
    }
    one.calls(4, true);
    one.exchange(4, How::Badly);
    assert_eq!(one.state(), State::Closed);
    for kind in [CONNECTS, EXCHANGES] {
        assert_eq!(one.stats(kind).calls, 4);
    }
    one.exchange(1, How::Badly);
    assert_eq!(one.state(), State::Open);
}

#[test]
fn closing_empties_both_windows() {
    for on in [CONNECTS, EXCHANGES] {
        let mut one = One::new(BreakerSettings::default());
        // Both are one failure from a trip, then one trips.
        one.calls(4, true);
        one.exchange(4, How::Badly);
        match on {
            CONNECTS => one.calls(1, true),
            _ => one.exchange(1, How::Badly),
        }
        cooldown_passes(&mut one);
        // What living connections add while it is not closed.
        for _ in 0..5 {
            one.exchanges.push(one.now, true);
        }
        one.probe(ProbeOutcome::Success);
        one.probe(ProbeOutcome::Success);
        let floors = one.view().floors;
        assert_eq!(floors.map(|floor| floor.seq), one.last_seqs());
        assert_eq!(one.view().floor(EXCHANGES), floors[1]);
        assert_eq!(one.view().floor(WindowKind::None), Floor::default());
        assert_both_are_empty(one);
    }
}

#[test]
fn a_reset_empties_both_windows() {
    for state in [State::Closed, State::Open] {
        let mut one = One::new(BreakerSettings::default());
        one.calls(4, true);
        one.exchange(4, How::Badly);
        one.exchange(u32::from(state == State::Open), How::Badly);
        assert_eq!(one.state(), state);
        one.handle(Event::Reset {
            row: ROW,
            last_seqs: one.last_seqs(),
        });
        assert_both_are_empty(one);
    }
}

#[test]
fn the_end_of_a_manual_state_empties_both_windows() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to(State::ForcedClosed);
    one.pass(secs(590));
    // Never announced: only their time tells them from later ones.
    for _ in 0..20 {
        one.ring.push(one.now, true);
        one.exchanges.push(one.now, true);
    }
    one.pass(secs(10) + millis(10));
    let ended = one.view().floors;
    assert!(ended.iter().all(|floor| floor.at > secs(1000)));
    assert_both_are_empty(one);
}

#[test]
fn an_operators_word_forgets_on_which_window_it_opened() {
    let mut one = One::new(BreakerSettings::default());
    one.bring_to_by_exchanges(State::HalfOpen);
    one.bring_to(State::ForcedOpen);
    assert_eq!(flags(&one), 0);
    assert_eq!(one.view().reason, Reason::MANUAL);
    one.pass(secs(600));
    assert_eq!(one.state(), State::Closed);
    // Calls are timed to within 4.2 ms.
    one.pass(millis(10));
    one.bring_to(State::Open);
    assert!(one.view().next_redial_at.is_some());
}

#[test]
fn slow_calls_keep_a_breaker_in_memory_as_failures_do() {
    let mut one = One::new(slow_is_bad());
    one.pass(secs(30));
    one.exchange(1, How::Slowly);
    one.pass(secs(60));
    assert!(one.engine.contains(ROW));
    one.pass(Nanos(1));
    assert!(!one.engine.contains(ROW));
}
