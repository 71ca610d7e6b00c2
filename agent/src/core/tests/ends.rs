//! Time and numbers at the ends of their ranges.

use proptest::prelude::*;

use super::ops::{POLICIES, any_op, event_of, settings};
use super::*;

/// Numbers near either end, or anywhere.
fn extreme() -> impl Strategy<Value = u64> {
    prop_oneof![
        0u64..3,
        (u64::MAX - 3)..=u64::MAX,
        (u64::MAX - 400_000_000_000)..=u64::MAX,
        any::<u64>(),
    ]
}

fn extreme_settings() -> impl Strategy<Value = BreakerSettings> {
    (
        settings(),
        prop::array::uniform5(extreme()),
        prop::array::uniform2(prop::option::of(prop_oneof![
            Just(f64::NAN),
            Just(f64::INFINITY),
            Just(-1.0),
            any::<f64>()
        ])),
        prop::array::uniform5(any::<u32>()),
    )
        .prop_map(|(base, times, rates, numbers)| BreakerSettings {
            failure_rate: rates[0],
            slow_call_rate: rates[1],
            window_age: Nanos(times[0]),
            cooldown: Nanos(times[1]),
            cooldown_max: Nanos(times[2]),
            probe_lease: Nanos(times[3]),
            exchange_lease: Nanos(times[4]),
            window: (numbers[0] % 3).wrapping_mul(numbers[1]),
            min_calls: numbers[1] % 4,
            consecutive_failures: numbers[2] % 4,
            probes: numbers[3] % 3,
            successes_to_close: numbers[4] % 3,
            ..base
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn nothing_panics_whatever_comes_whenever(
        seed: u64,
        policies in prop::collection::vec(extreme_settings(), POLICIES),
        steps in prop::collection::vec((extreme(), extreme(), [extreme(), extreme()], any_op()), 1..80),
    ) {
        let policies: Vec<_> = policies.into_iter().map(Arc::new).collect();
        let mut engine = Engine::new(seed);
        let mut ring = Ring::new();
        for index in 0..SLOTS as u64 {
            let how = [How::Well, How::Badly, How::Badly, How::Slowly][index as usize % 4];
            ring.push_how(Nanos(index << 55), how);
        }
        let mut out = Vec::new();
        for (now, until, last_seqs, op) in steps {
            let now = Nanos(now);
            let generation = op
                .row()
                .and_then(|index| engine.view(row(index), now))
                .map_or(0, |view| view.generation);
            let event = event_of(
                &op, row, generation, Nanos(until), last_seqs[0], last_seqs, [&ring.window; 2], &policies,
            );
            if let Some(event) = event {
                engine.handle(event, now, &mut out);
            }
            engine.next_deadline();
            for index in 0..4 {
                engine.view(row(index), now);
                engine.evictable(row(index));
            }
            prop_assert!(out.len() < 4096, "one call gave {} actions", out.len());
            out.clear();
        }
    }
}

#[test]
fn the_last_moments_of_time_do_not_hang() {
    let mut one = One::new(BreakerSettings::default());
    one.now = Nanos(u64::MAX - 1_000_000_000);
    one.bring_to(State::Open);
    assert_eq!(one.view().next_probe_at, Some(Nanos::MAX));
    one.now = Nanos::MAX;
    for _ in 0..3 {
        one.handle(Event::Deadline);
    }
    assert_eq!(one.state(), State::HalfOpen);
    // A lease that begins at the end of time is over at once, so each event meets a new round;
    // only an operator gets it closed.
    one.handle(Event::Reset {
        row: ROW,
        last_seqs: one.last_seqs(),
    });
    assert_eq!(one.state(), State::Closed);
}

#[test]
fn time_zero_is_a_time_like_any_other() {
    let mut one = One::new(BreakerSettings::default());
    one.engine = Engine::new(0);
    one.now = Nanos::ZERO;
    one.configure(BreakerSettings::default());
    one.bring_to(State::Open);
    one.pass(secs(30));
    assert_eq!(one.state(), State::HalfOpen);
}
