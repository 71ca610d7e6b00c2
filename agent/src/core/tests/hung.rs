//! When silence is hung, and when it is only silence.

use proptest::prelude::*;

use crate::core::{
    Nanos,
    hung::{AUTO_LONGEST, AUTO_WAIT, Arrivals, HungRule, Past, Wait, is_hung},
};

const BEGUN: Nanos = Nanos::from_secs(1000);

fn secs(n: u64) -> Nanos {
    Nanos::from_secs(n)
}

/// Quick so far, silent since before the exchange began.
fn quick() -> Past {
    Past {
        responses: 100,
        is_quick: true,
        longest: Nanos::from_millis(300),
        last_answer: BEGUN - Nanos(1),
    }
}

/// `per_look` further exchanges in each second from `from` to `to` after the begin.
fn arrivals(per_look: u64, from: u64, to: u64) -> Arrivals {
    let mut arrivals = Arrivals::default();
    arrivals.note(BEGUN + Nanos(1), 1);
    for second in from..=to {
        arrivals.note(BEGUN + secs(second), 1 + per_look * (second - from + 1));
    }
    arrivals
}

fn auto(past: &Past, arrivals: &Arrivals, after: Nanos) -> bool {
    let wait = Wait {
        begun: BEGUN,
        asked: BEGUN,
        sending: false,
        operation: BEGUN,
    };
    is_hung(HungRule::Auto, wait, BEGUN + after, past, arrivals, 10)
}

#[test]
fn a_silent_destination_that_is_asked_again_and_again_hangs() {
    let busy = arrivals(2, 1, 10);
    assert!(auto(&quick(), &busy, AUTO_WAIT));
    assert!(!auto(&quick(), &busy, AUTO_WAIT - Nanos(1)));
}

#[test]
fn every_condition_is_needed() {
    let busy = arrivals(2, 1, 10);
    let past = quick();
    for (what, past, arrivals) in [
        (
            "somebody was answered",
            Past {
                last_answer: BEGUN,
                ..past
            },
            busy.clone(),
        ),
        (
            "history unknown",
            Past {
                responses: 9,
                ..past
            },
            busy.clone(),
        ),
        (
            "usually slow",
            Past {
                is_quick: false,
                ..past
            },
            busy.clone(),
        ),
        (
            "once took long",
            Past {
                longest: AUTO_LONGEST + Nanos(1),
                ..past
            },
            busy.clone(),
        ),
        ("nobody else asked", past, Arrivals::default()),
        ("few asked", past, arrivals(1, 1, 9)),
        ("all asked at once", past, arrivals(50, 10, 10)),
        ("asked at the beginning only", past, arrivals(5, 1, 5)),
    ] {
        assert!(!auto(&past, &arrivals, AUTO_WAIT), "{what}");
    }
}

#[test]
fn a_duration_asks_for_nothing_else() {
    let nothing = Past {
        responses: 0,
        is_quick: false,
        longest: Nanos::MAX,
        last_answer: BEGUN + secs(1),
    };
    let wait = Wait {
        begun: BEGUN,
        // A slow upload: the wait counts from its last byte.
        asked: BEGUN + secs(60),
        sending: false,
        operation: BEGUN,
    };
    let at = |rule, now| is_hung(rule, wait, now, &nothing, &Arrivals::default(), 10);
    let rule = HungRule::After(secs(3));
    assert!(!at(rule, BEGUN + secs(63) - Nanos(1)));
    assert!(at(rule, BEGUN + secs(63)));
    // One that is not over is waited for by nobody.
    let upload = Wait {
        sending: true,
        ..wait
    };
    assert!(!is_hung(
        rule,
        upload,
        Nanos::MAX,
        &nothing,
        &Arrivals::default(),
        10
    ));
    assert!(!at(HungRule::Off, Nanos::MAX));
    assert_eq!(HungRule::Off.shortest(), None);
    assert_eq!(HungRule::Auto.shortest(), Some(AUTO_WAIT));
}

#[test]
fn of_a_thousand_looks_the_last_are_remembered() {
    let mut arrivals = Arrivals::default();
    for second in 0..1000 {
        arrivals.note(BEGUN + secs(second), second);
    }
    assert_eq!(arrivals.since(BEGUN), (63, secs(62)));
    assert_eq!(arrivals.since(BEGUN + secs(990)), (9, secs(8)));
}

proptest! {
    /// Never more further exchanges than there were, never a longer spread.
    #[test]
    fn arrivals_never_exaggerate(
        steps in proptest::collection::vec((0u64..3_000_000_000, 0u64..5), 0..300),
        begun in 0u64..300_000_000_000,
    ) {
        let mut arrivals = Arrivals::default();
        let (mut now, mut count) = (0_u64, 0_u64);
        let (mut at_begin, mut passed) = (0, false);
        for (time, more) in steps {
            if !passed && now + time >= begun {
                at_begin = count;
                passed = true;
            }
            now += time;
            count += more;
            arrivals.note(Nanos(now), count);
        }
        let (further, spread) = arrivals.since(Nanos(begun));
        prop_assert!(further <= count.saturating_sub(at_begin));
        prop_assert!(spread.0 <= now.saturating_sub(begun));
    }
}
