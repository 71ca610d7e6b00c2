//! Which timeout of an exchange fires, and when.

use crate::core::{
    Nanos,
    hung::Wait,
    waits::{Limit, WaitLimits},
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
    };
    for (read, deadline, wanted) in [
        (None, None, None),
        (Some(500), None, Some((3_500, Limit::Read, 500, 3_000))),
        (
            None,
            Some(4_000),
            Some((5_000, Limit::Deadline, 4_000, 1_000)),
        ),
        (
            Some(500),
            Some(4_000),
            Some((3_500, Limit::Read, 500, 3_000)),
        ),
        (
            Some(5_000),
            Some(4_000),
            Some((5_000, Limit::Deadline, 4_000, 1_000)),
        ),
    ] {
        let limits = WaitLimits {
            read: read.map(ms),
            deadline: deadline.map(ms),
        };
        let due = limits.due(wait).map(|due| {
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
        assert_eq!(limits.shortest(), shortest.map(ms));
    }
}

#[test]
fn times_at_the_end_of_all_time_never_come() {
    let limits = WaitLimits {
        read: Some(Nanos::MAX),
        deadline: None,
    };
    let wait = Wait {
        begun: ms(1),
        asked: ms(1),
    };
    assert_eq!(limits.due(wait).map(|due| due.at), Some(Nanos::MAX));
}
