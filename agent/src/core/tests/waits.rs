//! Which timeout of an exchange fires, and when.

use crate::core::{
    Nanos,
    hung::Wait,
    waits::{Limit, OptionLimits, Progress, WaitLimits},
};

fn ms(n: u64) -> Nanos {
    Nanos::from_millis(n)
}

#[test]
fn the_first_of_those_that_are_on() {
    // Asked for two seconds: a slow upload.
    let wait = Wait {
        begun: ms(1_000),
        asked: ms(3_000),
        sending: false,
        operation: ms(900),
    };
    for (read, deadline, wanted) in [
        (None, None, None),
        (Some(500), None, Some((3_500, Limit::Read, 500, 3_000))),
        (
            None,
            Some(4_000),
            Some((4_900, Limit::Deadline, 4_000, 900)),
        ),
        (
            Some(500),
            Some(4_000),
            Some((3_500, Limit::Read, 500, 3_000)),
        ),
        (
            Some(5_000),
            Some(4_000),
            Some((4_900, Limit::Deadline, 4_000, 900)),
        ),
    ] {
        let limits = WaitLimits {
            read: read.map(ms),
            deadline: deadline.map(ms),
            ..WaitLimits::default()
        };
        let due = limits.due(wait, false).map(|due| {
            let millis = |time: Nanos| time.as_millis();
            (
                millis(due.at),
                due.limit,
                millis(due.value),
                millis(due.since),
            )
        });
        assert_eq!(due, wanted);
        let shortest = [read, deadline].into_iter().flatten().min();
        assert_eq!(limits.look_every(), shortest.map(|value| ms(value).half()));
    }
}

/// Of a request that is not finished no answer is owed; the operation takes its time all the same.
#[test]
fn a_request_that_goes_on_is_bounded_by_the_deadline_alone() {
    let wait = Wait {
        begun: ms(1_000),
        asked: ms(1_000),
        sending: true,
        operation: ms(1_000),
    };
    let mut limits = WaitLimits {
        read: Some(ms(100)),
        ..WaitLimits::default()
    };
    assert_eq!(limits.due(wait, false), None);
    limits.deadline = Some(ms(5_000));
    let due = limits.due(wait, false).map(|due| (due.limit, due.at));
    assert_eq!(due, Some((Limit::Deadline, ms(6_000))));
}

/// The abort comes behind an option, and never before it.
#[test]
fn an_option_goes_first() {
    let wait = Wait {
        begun: ms(1_000),
        asked: ms(3_000),
        sending: false,
        operation: ms(1_000),
    };
    for (read, at) in [(200, 3_300), (1_000, 4_100), (5_000, 8_500)] {
        let limits = WaitLimits {
            read: Some(ms(read)),
            by_option: true,
            ..WaitLimits::default()
        };
        let due = limits.due(wait, true).expect("it is on");
        assert_eq!(
            (due.at, due.value, due.since),
            (ms(at), ms(read), ms(3_000))
        );
        let due = limits.due(wait, false).expect("it is on");
        assert_eq!(due.at, ms(3_000 + read));
    }
    // A deadline does not wait for anything.
    let limits = WaitLimits {
        read: Some(ms(1_000)),
        deadline: Some(ms(3_000)),
        ..WaitLimits::default()
    };
    let due = limits.due(wait, true).map(|due| (due.at, due.limit));
    assert_eq!(due, Some((ms(4_000), Limit::Deadline)));
}

#[test]
fn what_options_bound() {
    let limits = |read, write, by_option| WaitLimits {
        read,
        write,
        by_option,
        ..WaitLimits::default()
    };
    assert_eq!(limits(Some(ms(1)), None, false).options(), None);
    assert_eq!(limits(None, Some(ms(1)), true).options(), None);
    let both = |receive, send| {
        Some(OptionLimits {
            receive: ms(receive),
            send: ms(send),
        })
    };
    assert_eq!(limits(Some(ms(1)), None, true).options(), both(1, 1));
    assert_eq!(limits(Some(ms(1)), Some(ms(2)), true).options(), both(1, 2));
}

#[test]
fn times_at_the_end_of_all_time_never_come() {
    let limits = WaitLimits {
        read: Some(Nanos::MAX),
        ..WaitLimits::default()
    };
    let wait = Wait {
        begun: ms(1),
        asked: ms(1),
        sending: false,
        operation: ms(1),
    };
    assert_eq!(limits.due(wait, true).map(|due| due.at), Some(Nanos::MAX));
}

#[test]
fn data_that_lies_still() {
    let mut progress = Progress::default();
    let mut see = |at, acked, queued| progress.see(ms(at), acked, queued).map(Nanos::as_millis);
    // Nothing queued, then something, which moves, stops, moves, and is through.
    assert_eq!(see(10, 1, 0), None);
    assert_eq!(see(20, 1, 500), Some(20));
    assert_eq!(see(30, 200, 300), Some(30));
    assert_eq!(see(40, 200, 300), Some(30));
    // More is queued behind it: that is no progress.
    assert_eq!(see(50, 200, 900), Some(30));
    assert_eq!(see(60, 201, 899), Some(60));
    assert_eq!(see(70, 1100, 0), None);
    assert_eq!(see(80, 1100, 1), Some(80));
    assert!(progress.is_queued());
}

#[test]
fn how_often_is_looked() {
    let limits = |read: Option<u64>, write: Option<u64>| WaitLimits {
        read: read.map(ms),
        write: write.map(ms),
        ..WaitLimits::default()
    };
    assert_eq!(limits(None, None).look_every(), None);
    assert_eq!(limits(Some(3_000), None).look_every(), Some(ms(1_500)));
    assert_eq!(limits(Some(3_000), Some(100)).look_every(), Some(ms(25)));
    assert_eq!(limits(None, Some(60_000)).look_every(), Some(ms(200)));
    assert!(!limits(Some(1), None).watch_connections());
    assert!(limits(None, Some(1)).watch_connections());
}
