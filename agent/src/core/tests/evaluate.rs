//! The window's judgement against a naive one.

use agent_common::window::decode;
use proptest::prelude::*;

use super::*;
use crate::core::window::evaluate;

/// A call as it really was; `None`: number taken, not written.
pub(super) type Truth = Option<(Nanos, How)>;

/// Straight from the rule's wording, over the list of all calls.
pub(super) fn naive(
    kind: WindowKind,
    calls: &[Truth],
    floor: u64,
    not_before: Nanos,
    now: Nanos,
    s: &BreakerSettings,
) -> WindowStats {
    let counted: Vec<Truth> = calls
        .iter()
        .enumerate()
        .map(|(index, truth)| (index as u64 + 1, truth))
        .filter(|(seq, _)| *seq > floor)
        .map(|(_, truth)| *truth)
        .collect();
    // Only what comes after the last call that is too old. Times are kept in units of 2^22 ns.
    let too_old = |at: Nanos| {
        let kept = Nanos(at.0 >> 22 << 22);
        now - kept > s.window_age || kept < not_before
    };
    let first = counted
        .iter()
        .rposition(|truth| truth.is_some_and(|(at, _)| too_old(at)))
        .map_or(0, |index| index + 1);
    let ring = &counted[first.max(counted.len().saturating_sub(SLOTS))..];
    let window = &ring[ring.len().saturating_sub(s.window as usize)..];

    let consecutive = ring
        .iter()
        .rev()
        .take_while(|truth| matches!(truth, Some((_, How::Badly))))
        .count() as u32;
    let calls = window.iter().flatten().count() as u32;
    let count = |wanted| {
        window
            .iter()
            .flatten()
            .filter(|(_, how)| *how == wanted)
            .count() as u32
    };
    let (failures, slow) = (count(How::Badly), count(How::Slowly));
    let of_all = |part: u32| f64::from(part) / window.len().max(1) as f64;
    let too_many = |part: u32, threshold: Option<f64>| {
        threshold.is_some_and(|t| of_all(part) >= t) && calls >= s.min_calls && part > 0
    };
    let trip = if !s.enabled {
        None
    } else if s.consecutive_failures > 0 && consecutive >= s.consecutive_failures {
        Some((ReasonKind::ConsecutiveFailures, f64::from(consecutive)))
    } else if too_many(failures, s.failure_rate) {
        Some((ReasonKind::FailureRate, of_all(failures)))
    } else if kind == WindowKind::Exchanges && too_many(slow, s.slow_call_rate) {
        Some((ReasonKind::SlowCallRate, of_all(slow)))
    } else {
        None
    };
    WindowStats {
        calls,
        failures,
        failure_rate: f64::from(failures) / f64::from(calls.max(1)),
        consecutive,
        slow_calls: slow,
        slow_call_rate: f64::from(slow) / f64::from(calls.max(1)),
        trip: trip.map(|(reason, value)| Reason {
            window: kind,
            kind: reason,
            value,
            threshold: match reason {
                ReasonKind::FailureRate => s.failure_rate.unwrap_or(f64::NAN),
                ReasonKind::SlowCallRate => s.slow_call_rate.unwrap_or(f64::NAN),
                _ => f64::from(s.consecutive_failures),
            },
        }),
    }
}

fn windows() -> impl Strategy<Value = WindowKind> {
    prop_oneof![Just(WindowKind::Connects), Just(WindowKind::Exchanges)]
}

/// Waits and calls, of which either failures or slow ones are many.
fn pushes() -> impl Strategy<Value = Vec<(u64, Option<How>)>> {
    prop_oneof![
        pushes_of(How::Badly, How::Slowly),
        pushes_of(How::Slowly, How::Badly)
    ]
}

fn pushes_of(many: How, few: How) -> impl Strategy<Value = Vec<(u64, Option<How>)>> {
    let push = prop_oneof![
        3 => Just(Some(How::Well)),
        7 => Just(Some(many)),
        1 => Just(Some(few)),
        1 => Just(None),
    ];
    let wait = prop_oneof![5 => 0u64..10_000_000, 1 => 0u64..2_000_000_000];
    prop::collection::vec((wait, push), 0..300)
}

fn settings() -> impl Strategy<Value = BreakerSettings> {
    (
        prop::array::uniform2(prop::option::of(0.0f64..=1.0)),
        prop_oneof![1u32..=6, 1u32..=128],
        0u32..20,
        0u32..12,
        0u64..6_000_000_000,
        prop::bool::weighted(0.9),
    )
        .prop_map(
            |(rates, window, min_calls, run, age, enabled)| BreakerSettings {
                enabled,
                failure_rate: rates[0],
                slow_call_rate: rates[1],
                window,
                min_calls,
                consecutive_failures: run,
                window_age: Nanos(age),
                ..BreakerSettings::default()
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn judges_like_the_naive_one(
        kind in windows(),
        pushes in pushes(),
        floor in 0u64..320,
        s in settings(),
        start in (1u64 << 40)..(1 << 60),
    ) {
        let mut ring = Ring::new();
        let mut truth = Vec::new();
        let mut now = Nanos(start);
        for (wait, push) in pushes {
            now = now + Nanos(wait);
            match push {
                None => ring.push_unwritten(),
                Some(how) => ring.push_how(now, how),
            }
            truth.push(push.map(|how| (now, how)));
        }
        let got = evaluate(kind, &ring.window, ring.last_seq, floor, now, &s);
        prop_assert_eq!(got, naive(kind, &truth, floor, Nanos::ZERO, now, &s));
    }

    #[test]
    fn any_bits_in_the_ring_are_judged_without_panic(
        kind in windows(),
        entries in prop::collection::vec(any::<u32>(), SLOTS),
        last_seq: u64,
        floor: u64,
        now: u64,
        s in settings(),
    ) {
        let window = CallWindow { entries: entries.try_into().unwrap() };
        let stats = evaluate(kind, &window, last_seq, floor, Nanos(now), &s);
        prop_assert!(stats.failures + stats.slow_calls <= stats.calls && stats.calls <= s.window);
        prop_assert!(u64::from(stats.calls) <= last_seq.saturating_sub(floor));
    }
}

#[test]
fn what_cannot_be_read_never_trips() {
    let s = BreakerSettings {
        window: 10,
        min_calls: 5,
        ..BreakerSettings::default()
    };
    let now = secs(100);
    // A hole in the run: it might have been a success.
    let mut ring = Ring::new();
    for _ in 0..2 {
        ring.push(now, true);
    }
    ring.push_unwritten();
    for _ in 0..2 {
        ring.push(now, true);
    }
    let stats = evaluate(
        WindowKind::Connects,
        &ring.window,
        ring.last_seq,
        0,
        now,
        &s,
    );
    assert_eq!((stats.consecutive, stats.trip), (2, None));
    // Five of nine known calls failed, but of ten at worst: exactly the threshold, a trip.
    let mut ring = Ring::new();
    for failed in [true, false, true, false, true, false, true, false, true] {
        ring.push(now, failed);
    }
    ring.push_unwritten();
    let trip = evaluate(
        WindowKind::Connects,
        &ring.window,
        ring.last_seq,
        0,
        now,
        &s,
    )
    .trip
    .unwrap();
    assert_eq!((trip.kind, trip.value), (ReasonKind::FailureRate, 0.5));
    // A second hole pushes the first failure out: four of ten at worst.
    ring.push_unwritten();
    let stats = evaluate(
        WindowKind::Connects,
        &ring.window,
        ring.last_seq,
        0,
        now,
        &s,
    );
    assert_eq!((stats.calls, stats.failures, stats.trip), (8, 4, None));
    assert_eq!(stats.failure_rate, 0.5);
    // The entry of a lap before is as unreadable as none.
    let entry = ring.window.entries[slot(1)];
    assert!(decode(entry, 1, now.0).is_some());
    assert!(decode(entry, 1 + SLOTS as u64, now.0).is_none());
}

#[test]
fn a_threshold_of_nothing_still_takes_a_failure() {
    let s = BreakerSettings {
        failure_rate: Some(0.0),
        min_calls: 0,
        ..BreakerSettings::default()
    };
    let mut ring = Ring::new();
    assert_eq!(
        evaluate(WindowKind::Connects, &ring.window, 0, 0, secs(1), &s).trip,
        None
    );
    ring.push(secs(1), false);
    assert_eq!(
        evaluate(WindowKind::Connects, &ring.window, 1, 0, secs(1), &s).trip,
        None
    );
    ring.push(secs(1), true);
    assert!(
        evaluate(WindowKind::Connects, &ring.window, 2, 0, secs(1), &s)
            .trip
            .is_some()
    );
}

#[test]
fn a_run_may_be_longer_than_the_window() {
    let s = BreakerSettings {
        window: 3,
        failure_rate: None,
        consecutive_failures: 6,
        ..BreakerSettings::default()
    };
    let mut ring = Ring::new();
    for calls in 1..=6 {
        ring.push(secs(1), true);
        let stats = evaluate(
            WindowKind::Connects,
            &ring.window,
            ring.last_seq,
            0,
            secs(1),
            &s,
        );
        assert_eq!((stats.calls, stats.consecutive), (calls.min(3), calls));
        assert_eq!(stats.trip.is_some(), calls == 6);
    }
}
