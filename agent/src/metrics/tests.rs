//! The page compared with its declarations, and the buckets with the values behind them.

use std::{collections::BTreeSet, time::Duration};

use agent_common::histogram::{BUCKETS, bucket};
use proptest::prelude::*;

use super::{declared::Kind, *};

fn row(destination: &str) -> RowMetrics {
    let mut buckets = vec![0; BUCKETS];
    buckets[bucket(400)] = 2;
    buckets[bucket(30_000)] = 1;
    buckets[bucket(20_000_000)] = 1;
    RowMetrics {
        destination: destination.to_owned(),
        workload: "system.slice/billing.service".to_owned(),
        policy: "default".to_owned(),
        state: State::Closed,
        attempts: 9,
        established: 4,
        in_flight: 1,
        abandoned: 1,
        throttled: 5,
        possible: Possible::default(),
        failures: Failures {
            refused: 3,
            status: 2,
            ..Failures::default()
        },
        rejected: Rejections {
            breaker: 7,
            ..Rejections::default()
        },
        would_reject: Rejections::default(),
        would_reject_outcomes: [3, 1],
        connections: 6,
        held: Held::default(),
        retries: 3,
        live_retries: 0,
        non_idempotent: [2, 1, 0],
        operation_attempts: 9,
        budget_tokens: Some(96),
        operations: [4, 1, 1, 0, 0],
        timeouts: [0; 5],
        transitions: vec![Transition {
            from: State::Closed,
            to: State::Open,
            reason: ReasonKind::FailureRate,
            count: 2,
        }],
        connect: Latencies {
            count: 4,
            sum_us: 20_030_800,
            buckets: buckets.clone(),
        },
        response: Latencies {
            count: 4,
            sum_us: 20_030_800,
            buckets,
        },
    }
}

fn node(all: Vec<RowMetrics>) -> NodeMetrics {
    let mut rows = Rows::default();
    for row in &all {
        rows.add(row);
    }
    let reaction = Reaction::default();
    reaction.observe(Duration::from_micros(120));
    reaction.observe(Duration::from_secs(5));
    NodeMetrics {
        version: "0.1.0".to_owned(),
        reaction: reaction.cumulative(),
        attached: vec![
            ("connect4".to_owned(), true),
            ("sock_ops".to_owned(), false),
        ],
        rows,
        ..NodeMetrics::default()
    }
}

/// The value of the one sample whose line begins with `series`.
fn value(page: &str, series: &str) -> f64 {
    let mut lines = page.lines().filter(|line| line.starts_with(series));
    let line = lines
        .next()
        .unwrap_or_else(|| panic!("no {series} in\n{page}"));
    assert!(lines.next().is_none(), "two of {series}");
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn every_declared_metric_is_on_the_page_and_no_other() {
    let page = render(&node(vec![row("10.0.0.5:5432")])).unwrap();
    let types: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    let declared: BTreeSet<&str> = declared::ALL.iter().map(|metric| metric.name).collect();
    assert_eq!(types, declared);
    assert_eq!(declared.len(), declared::ALL.len());
    for metric in declared::ALL {
        assert_eq!(
            metric.name.ends_with("_total"),
            metric.kind == Kind::Counter,
            "{}",
            metric.name
        );
        assert!(metric.help.ends_with('.'), "{}", metric.name);
    }
}

#[test]
fn samples_have_their_labels_and_values() {
    let page = render(&node(vec![row("10.0.0.5:5432")])).unwrap();
    let labels =
        r#"destination="10.0.0.5:5432",workload="system.slice/billing.service",policy="default""#;
    let sample =
        |name: &str, more: &str| value(&page, &format!("backstop_{name}{{{labels}{more}}} "));
    assert_eq!(sample("attempts_total", ""), 9.0);
    assert_eq!(sample("failures_total", r#",kind="refused""#), 3.0);
    assert_eq!(sample("failures_total", r#",kind="status""#), 2.0);
    assert_eq!(sample("failures_total", r#",kind="gave_up""#), 0.0);
    assert_eq!(sample("failures_total", r#",kind="closed_early""#), 0.0);
    assert_eq!(sample("rejected_total", r#",reason="breaker""#), 7.0);
    assert_eq!(sample("breaker_state", r#",state="closed""#), 1.0);
    assert_eq!(sample("breaker_state", r#",state="half_open""#), 0.0);
    let transition = r#",from="closed",to="open",reason="failure_rate""#;
    assert_eq!(sample("breaker_transitions_total", transition), 2.0);
    assert_eq!(
        sample("connect_duration_seconds_bucket", r#",le="0.0005""#),
        2.0
    );
    assert_eq!(
        sample("connect_duration_seconds_bucket", r#",le="0.05""#),
        3.0
    );
    assert_eq!(
        sample("connect_duration_seconds_bucket", r#",le="10""#),
        3.0
    );
    assert_eq!(
        sample("connect_duration_seconds_bucket", r#",le="+Inf""#),
        4.0
    );
    assert_eq!(sample("connect_duration_seconds_sum", ""), 20.0308);
    let response = |more: &str| sample("response_duration_seconds_bucket", more);
    assert_eq!(response(r#",le="0.0005""#), 2.0);
    assert_eq!(response(r#",le="10""#), 3.0);
    assert_eq!(response(r#",le="30""#), 4.0);
    assert_eq!(response(r#",le="60""#), 4.0);
    assert_eq!(sample("response_duration_seconds_count", ""), 4.0);
    assert_eq!(
        value(&page, "backstop_reaction_seconds_bucket{le=\"0.0002\"} "),
        1.0
    );
    assert_eq!(value(&page, "backstop_reaction_seconds_count "), 2.0);
    assert_eq!(value(&page, "backstop_attached{hook=\"sock_ops\"} "), 0.0);
}

/// What a policy makes possible is there before it happens; what it does not, is not.
#[test]
fn kinds_that_are_possible_begin_with_0() {
    let rare = [
        "failures_total{ kind=\"hung\"",
        "failures_total{ kind=\"read_timeout\"",
        "failures_total{ kind=\"write_timeout\"",
        "failures_total{ kind=\"deadline\"",
        "timeouts_total{ kind=\"read\"",
        "timeouts_total{ kind=\"write\"",
        "timeouts_total{ kind=\"stall\"",
        "timeouts_total{ kind=\"deadline\"",
        "rejected_total{ reason=\"limit\"",
        "rejected_total{ reason=\"deadline\"",
        "would_reject_total{ reason=\"limit\"",
        "would_reject_total{ reason=\"deadline\"",
    ];
    let shown = |page: &str| {
        let there = rare.iter().filter(|series| {
            let (name, label) = series.split_once(' ').unwrap();
            let name = format!("backstop_{name}");
            let is_it = |line: &str| line.starts_with(&name) && line.contains(label);
            page.lines().any(|line| is_it(line) && line.ends_with(" 0"))
        });
        there.count()
    };
    let mut all = row("10.0.0.5:5432");
    assert_eq!(shown(&render(&node(vec![all.clone()])).unwrap()), 0);
    all.possible = Possible {
        read: true,
        write: true,
        stall: true,
        deadline: true,
        hung: true,
        limit: true,
    };
    assert_eq!(shown(&render(&node(vec![all])).unwrap()), rare.len());
}

#[test]
fn rows_with_equal_labels_are_one_series_that_shows_the_worst_state() {
    let mut open = row("127.0.0.1:80");
    open.state = State::Open;
    open.connect.buckets.clear();
    let page = render(&node(vec![row("127.0.0.1:80"), open, row("127.0.0.1:80")])).unwrap();
    assert_eq!(value(&page, "backstop_attempts_total{"), 27.0);
    assert_eq!(
        value(&page, "backstop_connect_duration_seconds_count{"),
        12.0
    );
    let open = page
        .lines()
        .find(|line| line.contains("state=\"open\"}"))
        .unwrap();
    assert!(open.ends_with(" 1"), "{open}");
}

#[test]
fn rows_beyond_the_limit_share_one_series() {
    let names = (0..SERIES_ROWS + 3).map(|n| format!("10.0.0.1:{n}"));
    let page = render(&node(names.map(|name| row(&name)).collect())).unwrap();
    assert_eq!(
        value(&page, "backstop_attempts_total{destination=\"other\""),
        27.0
    );
    let series = page
        .lines()
        .filter(|line| line.starts_with("backstop_attempts_total{"))
        .count();
    assert_eq!(series, SERIES_ROWS + 1);
    assert!(!page.contains("backstop_breaker_state{destination=\"other\""));
}

#[test]
fn labels_are_escaped() {
    let mut odd = row("10.0.0.5:80");
    odd.workload = "a\"b\\c\nd".to_owned();
    let page = render(&node(vec![odd])).unwrap();
    assert!(page.contains(r#"workload="a\"b\\c\nd","#), "{page}");
}

proptest! {
    #[test]
    fn buckets_count_what_was_measured(
        values in prop::collection::vec(
            prop_oneof![0u64..2_000, 0u64..200_000, 0u64..20_000_000, any::<u64>()],
            0..200,
        ),
    ) {
        let mut buckets = vec![0; BUCKETS];
        for us in &values {
            buckets[bucket(*us)] += 1;
        }
        let all = values.len() as u64;
        let cumulative = cumulative(&RESPONSE_BOUNDS, &buckets, all, 0);
        prop_assert_eq!(cumulative.count, all);
        prop_assert_eq!(cumulative.buckets.len(), RESPONSE_BOUNDS.len());
        let mut before = 0;
        for (bound, up_to) in &cumulative.buckets {
            // A kernel bucket is at most a sixteenth wide: nothing is further off than that.
            let surely = values.iter().filter(|us| **us <= bound - bound / 16).count() as u64;
            let at_most = values.iter().filter(|us| **us <= bound + bound / 16).count() as u64;
            prop_assert!(surely <= *up_to && *up_to <= at_most, "{bound}");
            prop_assert!(before <= *up_to && *up_to <= all);
            before = *up_to;
        }
    }

    #[test]
    fn adding_is_counting_together(
        a in prop::collection::vec(0u64..1000, BUCKETS..=BUCKETS),
        b in prop::collection::vec(0u64..1000, BUCKETS..=BUCKETS),
    ) {
        let count = |buckets: &[u64]| buckets.iter().sum();
        let mut sum = cumulative(&CONNECT_BOUNDS, &a, count(&a), 3);
        sum.add(&cumulative(&CONNECT_BOUNDS, &b, count(&b), 4));
        let both: Vec<u64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        prop_assert_eq!(sum, cumulative(&CONNECT_BOUNDS, &both, count(&both), 7));
    }

    #[test]
    fn reactions_are_counted_once(times in prop::collection::vec(0u64..3_000_000, 0..50)) {
        let reaction = Reaction::default();
        for us in &times {
            reaction.observe(Duration::from_micros(*us));
        }
        let cumulative = reaction.cumulative();
        prop_assert_eq!(cumulative.count, times.len() as u64);
        prop_assert_eq!(cumulative.sum_us, times.iter().sum::<u64>());
        for (bound, up_to) in cumulative.buckets {
            prop_assert_eq!(up_to, times.iter().filter(|us| **us <= bound).count() as u64);
        }
    }
}
