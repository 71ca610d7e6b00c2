//! What people read, word for word: the table, the details, lines of events, units.

use super::super::{
    detail::details,
    event_text, explain_text,
    table::{Style, table},
    units,
};
use crate::control::api::{
    ByHand, Bypass, Cause, Event, EventRecord, Latency, ManualState, Mode, OrderAction, Paused,
    Reason, ReasonKind, Row, State, StatusEnvelope, TimeoutKind, Timestamp, Window,
    tests::{envelope, explanation, row},
};

/// 2026-11-28 12:03:04.123 UTC.
const NOW: Timestamp = Timestamp::from_unix_ms(1_795_867_384_123);

const PLAIN: Style = Style {
    colour: false,
    width: 100,
    now: NOW,
};

fn consecutive() -> Reason {
    Reason {
        window: Window::Connects,
        kind: ReasonKind::ConsecutiveFailures,
        value: 5.0,
        threshold: 5.0,
    }
}

/// One open, one half-open, one bypassed and one healthy destination.
fn busy() -> StatusEnvelope {
    let mut open = row("10.0.0.5:5432");
    open.state = State::Open;
    open.state_age_ms = 12_400;
    open.reason = consecutive();
    open.next_probe_in_ms = Some(17_600);
    open.next_redial_in_ms = Some(412);
    open.windows.connects.calls = 20;
    open.windows.connects.failures = 12;
    open.windows.connects.failure_rate = 0.6;
    open.windows.connects.consecutive = 5;
    open.attempts = 1_234;
    open.established = 1_200;
    open.abandoned = 3;
    open.in_flight = 1;
    open.failures.refused = 20;
    open.failures.connect_timeout = 10;
    open.rejected.breaker = 12_345;
    open.connect_latency_us.count = 1_180;
    open.connect_latency_us.p50 = Some(850);
    open.connect_latency_us.p90 = Some(1_234);
    open.connect_latency_us.p99 = Some(35_000);
    open.connect_latency_us.p999 = Some(999_999);
    open.connect_latency_us.max = 2_000_000;
    open.connect_latency_1m_us = Latency {
        count: 80,
        p50: Some(900),
        p90: Some(1_100),
        p99: Some(2_000),
        p999: Some(2_000),
        max: 2_000,
    };
    let mut half_open = row("[2001:db8::1]:443");
    half_open.workload =
        "kubepods.slice/kubepods-burstable.slice/cri-0123456789abcdef.scope".into();
    half_open.state = State::HalfOpen;
    half_open.state_age_ms = 190_000;
    half_open.reason = Reason {
        window: Window::Exchanges,
        kind: ReasonKind::SlowCallRate,
        value: 0.75,
        threshold: 0.5,
    };
    half_open.windows.connects.calls = 4;
    half_open.windows.exchanges.calls = 20;
    half_open.windows.exchanges.failures = 1;
    half_open.windows.exchanges.failure_rate = 0.05;
    half_open.windows.exchanges.slow_calls = 14;
    half_open.windows.exchanges.slow_call_rate = 0.7;
    half_open.responses = 5_432;
    half_open.stale = 2;
    half_open.failures.status = 6;
    half_open.response_latency_us.count = 5_000;
    half_open.response_latency_us.p50 = Some(2_100);
    half_open.response_latency_us.p90 = Some(1_100_000);
    half_open.response_latency_us.p99 = Some(1_234_000);
    half_open.response_latency_us.p999 = Some(1_300_000);
    half_open.response_latency_us.max = 1_400_000;
    let mut bypassed = row("10.0.0.7:80");
    bypassed.bypassed_for_safety = true;
    bypassed.bypassed_reason = Some(Bypass::MaxOpenShare);
    bypassed.workload = "/".into();
    let mut healthy = row("10.0.0.8:80");
    healthy.attempts = 45_600_000;
    healthy.windows.connects.calls = 20;
    healthy.windows.exchanges.calls = 20;
    healthy.connect_latency_us.p99 = Some(900);
    healthy.response_latency_us.p99 = Some(4_200);
    healthy.state_age_ms = 9 * 86_400_000;
    let mut envelope = envelope(vec![healthy, bypassed, half_open, open]);
    envelope.sort();
    envelope
}

#[test]
fn the_table() {
    let expected = "\
backstop 0.1.0  mode enforce  up 3h12m  lost events 0  rows 4 (1 open, 1 half-open)

DESTINATION        WORKLOAD                 STATE         WINDOW  ATTEMPTS  FAILED  REJECTED     P99
10.0.0.5:5432      ….slice/billing.service  open 12s      12/20c      1234      30     12.3k  (35ms)
[2001:db8::1]:443  …0123456789abcdef.scope  half-open 3m  15/20e         1       6         0    1.2s
10.0.0.7:80        /                        bypassed 0s     0/0c         1       0         0       -
10.0.0.8:80        ….slice/billing.service  closed 9d      0/20e     45.6M       0         0   4.2ms

WINDOW: failed or slow of the last calls: connects (c) or exchanges (e), whichever are worse.
P99: of responses, in brackets of connects, last 5 minutes. More:
backstop status 10.0.0.5:5432, backstop events
";
    let text = table(&busy(), PLAIN);
    assert_eq!(text, expected);
}

#[test]
fn the_table_keeps_to_its_width_and_is_coloured_on_request() {
    let text = table(&busy(), PLAIN);
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
    let coloured = table(
        &busy(),
        Style {
            colour: true,
            ..PLAIN
        },
    );
    assert!(coloured.contains("\x1b[31mopen 12s"));
    let mut plain = coloured;
    for code in ["\x1b[31m", "\x1b[33m", "\x1b[35m", "\x1b[0m"] {
        plain = plain.replace(code, "");
    }
    assert_eq!(plain, text);
}

#[test]
fn a_pause_and_observe_mode_are_loud() {
    let mut envelope = envelope(Vec::new());
    envelope.mode = Mode::Observe;
    envelope.paused = Some(Paused {
        since: NOW,
        until: Some(Timestamp::from_unix_ms(NOW.unix_ms() + 900_000)),
        by: "uid 0, pid 7".to_owned(),
    });
    let expected = "\
backstop 0.1.0  mode observe  up 3h12m  lost events 0  rows 0
Observe mode: everything is decided and counted, nothing is refused.
PAUSED since 11-28 12:03:04.123 UTC by uid 0, pid 7, for another 15m.
No verdict and no timeout is enforced; counting goes on.

No destination seen yet: those that programs in the watched cgroups connect to appear here.
";
    assert_eq!(table(&envelope, PLAIN), expected);
}

#[test]
fn the_details() {
    let mut envelope = busy();
    envelope.destinations.truncate(1);
    let expected = "\
backstop 0.1.0  mode enforce  up 3h12m  lost events 0  rows 1 (1 open, 0 half-open)

10.0.0.5:5432  open for 12s
  workload     system.slice/billing.service
  namespace    4026531840
  policy       default: timeouts connect 2s
  reason       connects: consecutive_failures 5 >= 5
  next         probe in 17.6s, the agent dials in 412ms
  window       12 of the last 20 connects failed (60 %), 5 in a row
  attempts     1,234: 1,200 established
  in flight    1
  abandoned    3
  failures     30: refused 20, connect_timeout 10
  rejected     breaker 12,345
  latency      connect p50 900us, p90 1.1ms, p99 2.0ms, p99.9 2.0ms, max 2.0ms (80 in the last minute)
               connect p50 850us, p90 1.2ms, p99 35ms, p99.9 999ms, max 2.0s (1,180 in the last 5 minutes)
";
    assert_eq!(details(&envelope, PLAIN), expected);
}

#[test]
fn the_details_of_exchanges() {
    let mut envelope = busy();
    envelope.destinations.drain(..1);
    envelope.destinations.truncate(1);
    let expected = "\
  reason       exchanges: slow_call_rate 0.75 >= 0.50
  window       0 of the last 4 connects failed (0 %), 0 in a row
               1 of the last 20 exchanges failed (5 %), 0 in a row, 14 slow (70 %)
  attempts     1: 1 established
  responses    5,432, 2 stale
  failures     6: status 6
  latency      response p50 2.1ms, p90 1.1s, p99 1.2s, p99.9 1.3s, max 1.4s (5,000 in the last 5 minutes)
";
    let text = details(&envelope, PLAIN);
    assert!(text.ends_with(expected), "{text}");
}

/// The window that opened the breaker is shown, else the one with more failed and slow calls.
#[test]
fn the_worse_window_is_shown() {
    let shown = |change: &dyn Fn(&mut Row)| {
        let mut row = row("10.0.0.5:80");
        row.windows.connects.calls = 10;
        row.windows.connects.failures = 2;
        row.windows.connects.failure_rate = 0.2;
        change(&mut row);
        let text = table(&envelope(vec![row]), PLAIN);
        let line = text.lines().nth(3).unwrap_or_default();
        line.split_whitespace()
            .nth(4)
            .unwrap_or_default()
            .to_owned()
    };
    assert_eq!(shown(&|_| {}), "2/10c");
    let healthy = |row: &mut Row| row.windows.exchanges.calls = 20;
    assert_eq!(shown(&healthy), "2/10c");
    let slow = |row: &mut Row| {
        row.windows.exchanges.calls = 20;
        row.windows.exchanges.slow_calls = 5;
        row.windows.exchanges.slow_call_rate = 0.25;
    };
    assert_eq!(shown(&slow), "5/20e");
    let opened_on_connects = |row: &mut Row| {
        slow(row);
        row.reason = consecutive();
    };
    assert_eq!(shown(&opened_on_connects), "2/10c");
}

#[test]
fn names_cannot_steer_the_terminal() {
    let mut evil = row("10.0.0.5:80");
    evil.workload = "a\x1b[2Jb\n".into();
    evil.policy = "p\x07".into();
    let envelope = envelope(vec![evil]);
    assert!(table(&envelope, PLAIN).contains("a?[2Jb?"));
    assert!(!details(&envelope, PLAIN).contains(['\x1b', '\x07']));
}

/// An order for a destination that nobody has called, and one that is in force.
#[test]
fn orders_are_shown_with_or_without_a_row() {
    let order = |destination: &str, state, workload: Option<&str>, rows| ManualState {
        destination: destination.to_owned(),
        state,
        workload: workload.map(str::to_owned),
        ends_in_ms: 598_000,
        since: NOW,
        by: "uid 0, pid 7 (backstop, from bash 6)".to_owned(),
        rows,
    };
    let typo = order("10.9.9.9:1", State::ForcedOpen, Some("typo/\x07x"), 0);
    let held = order("db.internal:5432", State::ForcedClosed, None, 4);
    let mut envelope = envelope(Vec::new());
    envelope.orders = vec![typo.clone(), held];
    let lines = "\
By hand, 2 orders, newest first (that is in force for a row):
  10.9.9.9:1 refused for another 9m58s, workload typo/?x: no row
    since 11-28 12:03:04.123 UTC by uid 0, pid 7 (backstop, from bash 6)
  db.internal:5432 held closed for another 9m58s, all workloads: 4 rows
    since 11-28 12:03:04.123 UTC by uid 0, pid 7 (backstop, from bash 6)
";
    for text in [table(&envelope, PLAIN), details(&envelope, PLAIN)] {
        assert!(text.contains(lines), "{text}");
    }
    envelope.orders = vec![typo; 13];
    let text = table(&envelope, PLAIN);
    assert_eq!(text.matches("10.9.9.9:1").count(), 10);
    assert!(text.contains("  and 3 more, see backstop status --json\n"));
}

#[test]
fn why_a_row_is_bypassed() {
    let mut row = row("10.0.0.7:80");
    row.bypassed_for_safety = true;
    row.name = Some("web.internal".to_owned());
    row.manual = Some(ByHand {
        since: NOW,
        until: Timestamp::from_unix_ms(NOW.unix_ms() + 90_000),
        by: "uid 0, pid 7".to_owned(),
        destination: "web.internal:80".to_owned(),
        workload: None,
    });
    for (reason, said) in [
        (
            Bypass::MaxOpenShare,
            "as many endpoints of web.internal as may refuse already refuse, or let only a share pass \
             after an outage (max_open_share)",
        ),
        (
            Bypass::Correlated,
            "most destinations fail at once (correlated)",
        ),
    ] {
        row.bypassed_reason = Some(reason);
        let text = details(&envelope(vec![row.clone()]), PLAIN);
        assert!(text.contains(said), "{text}");
        let by = "  by hand      by the order for web.internal:80, all workloads, since 11-28 \
                  12:03:04.123 UTC by uid 0, pid 7, for another 1m30s\n";
        assert!(text.contains(by), "{text}");
    }
}

#[test]
fn events_of_orders_say_who() {
    let by = || "uid 0, pid 7 (backstop, from bash 6)".to_owned();
    let order = |action, until, rows, orders| {
        text(Event::Order {
            action,
            destination: "10.0.0.5:5432".to_owned(),
            workload: None,
            until,
            rows,
            orders,
            by: by(),
        })
    };
    let until = Some(Timestamp::from_unix_ms(NOW.unix_ms() + 600_000));
    let begin = "11-28 12:03:04.123  order         10.0.0.5:5432          ";
    let said = [
        (
            order(OrderAction::Trip, until, 0, 0),
            "to be refused for 10m by uid 0, pid 7 (backstop, from bash 6): 0 rows",
        ),
        (
            order(OrderAction::HoldClosed, until, 1, 0),
            "to be held closed for 10m by uid 0, pid 7 (backstop, from bash 6): 1 row",
        ),
        (
            order(OrderAction::Reset, None, 4, 1),
            "reset by uid 0, pid 7 (backstop, from bash 6), 1 order taken back: 4 rows",
        ),
        (
            order(OrderAction::TimeOver, None, 4, 0),
            "the time of the order by uid 0, pid 7 (backstop, from bash 6) is over: 4 rows",
        ),
        (
            order(OrderAction::TimeOver, Some(NOW), 0, 0),
            "the time of the order by uid 0, pid 7 (backstop, from bash 6) was over at 11-28 12:03:04.123 \
             UTC, while no agent ran: 0 rows",
        ),
    ];
    for (line, what) in said {
        assert_eq!(line, format!("{begin}{what}  (all workloads)"));
    }
    let breaker = |cause, by| {
        text(Event::Breaker {
            destination: "10.0.0.5:5432".to_owned(),
            name: None,
            workload: "w".to_owned(),
            netns: None,
            from: State::ForcedOpen,
            to: State::Closed,
            reason: Reason::NONE,
            generation: 4,
            cause: Some(cause),
            by,
        })
    };
    let line = breaker(Cause::Reset, Some(by()));
    let end = "forced_open -> closed  reset by uid 0, pid 7 (backstop, from bash 6)  (w)";
    assert!(line.ends_with(end), "{line}");
    let line = breaker(Cause::TimeOver, None);
    assert!(
        line.ends_with("closed  the order's time is over  (w)"),
        "{line}"
    );
}

fn text(event: Event) -> String {
    event_text::line(&EventRecord { time: NOW, event })
}

#[test]
fn event_lines() {
    let destination = || "10.0.0.5:5432".to_owned();
    let workload = || "system.slice/billing.service".to_owned();
    let breaker = text(Event::Breaker {
        destination: destination(),
        name: None,
        workload: workload(),
        netns: None,
        from: State::Closed,
        to: State::Open,
        reason: consecutive(),
        generation: 4,
        cause: None,
        by: None,
    });
    assert_eq!(
        breaker,
        "11-28 12:03:04.123  breaker       10.0.0.5:5432          closed -> open  connects: consecutive_failures 5 >= 5  (system.slice/billing.service)"
    );
    let timeout = text(Event::Timeout {
        destination: destination(),
        workload: workload(),
        netns: None,
        which: TimeoutKind::Connect,
        value_ms: 2_000,
        elapsed_ms: 2_009,
        pid: 41,
        comm: "bil\x1bling".to_owned(),
        mode: Mode::Enforce,
    });
    assert_eq!(
        timeout,
        "11-28 12:03:04.123  timeout       10.0.0.5:5432          connect timeout of 2s after 2s9ms, bil?ling[41]  (system.slice/billing.service)"
    );
    let rejected = text(Event::Rejected {
        destination: destination(),
        workload: workload(),
        netns: None,
        reason: "breaker".to_owned(),
        count: 1_200,
        pid: 41,
        comm: "billing".to_owned(),
        mode: Mode::Observe,
        generation: 4,
    });
    assert_eq!(
        rejected,
        "11-28 12:03:04.123  rejected      10.0.0.5:5432          would have: 1,200 refused by breaker, billing[41]  (system.slice/billing.service)"
    );
    let loss = text(Event::Loss {
        lost: 24,
        message: "cut off".to_owned(),
    });
    assert_eq!(loss, "11-28 12:03:04.123  loss          24 lost: cut off");
}

#[test]
fn units_read_well() {
    let counts = [
        0,
        9_999,
        10_000,
        99_999,
        100_000,
        999_999,
        45_600_000,
        u64::MAX,
    ];
    assert_eq!(
        counts.map(units::short_count),
        [
            "0",
            "9999",
            "10.0k",
            "99.9k",
            "100k",
            "999k",
            "45.6M",
            "18446744073G"
        ]
    );
    assert_eq!(
        [999, 1_000, 1_234_567].map(units::count),
        ["999", "1,000", "1,234,567"]
    );
    assert_eq!(
        [999, 1_000, 9_999, 10_000, 999_999, 2_049_999].map(|us| units::micros(Some(us))),
        ["999us", "1.0ms", "9.9ms", "10ms", "999ms", "2.0s"]
    );
    assert_eq!(
        [59_999, 60_000, 3_600_000, 86_400_000].map(units::age),
        ["59s", "1m", "1h", "1d"]
    );
    assert_eq!(units::shorten_left("äbcdef", 4), "…def");
    assert_eq!(units::shorten_left("äbcd", 4), "äbcd");
}

#[test]
fn an_explanation() {
    let expected = "\
10.0.0.5:5432, called by billing
  policy       orders-db: destination 10.0.0.0/8:5432 matches
  file         /etc/backstop/backstop.toml
  protected    no
  by hand      10.0.0.5:5432 refused for another 1m30s, all workloads: 1 row; since 11-28
               12:03:04.123 UTC by uid 0, pid 4711

Policies, the one that applies first
  applies   orders-db  destination 10.0.0.0/8:5432 matches (line 12)
  no match  web        none of its destinations: 10.1.0.0/16:80 (line 20)

Settings of orders-db
  timeouts.connect  1s            the policy, line 14
  timeouts.read     3s            [defaults], line 3; no effect: protected
  breaker.errno     ECONNREFUSED  built in

10.0.0.5:5432  closed for 0s
  workload     system.slice/billing.service
  namespace    4026531840
  policy       default: timeouts connect 2s
  window       0 of the last 0 connects failed (0 %), 0 in a row
  attempts     1: 1 established
  gave up      counts as a failure after 500ms of a connect, never of an exchange
  connect now  passes
";
    let text = explain_text::text(&explanation("10.0.0.5:5432", Some("billing")), PLAIN);
    assert_eq!(text, expected);
}

#[test]
fn an_explanation_keeps_to_its_width_and_counts_what_does_not_match() {
    let mut explanation = explanation("10.0.0.5:5432", None);
    let many = vec![explanation.candidates[1].clone(); 30];
    explanation.candidates.extend(many);
    explanation.candidates[0].why = "why ".repeat(60);
    explanation.rows[0].why = "because ".repeat(30);
    let text = explain_text::text(&explanation, PLAIN);
    assert!(
        text.contains("\n  and 21 more that do not match\n"),
        "{text}"
    );
    for line in text.lines() {
        assert!(line.chars().count() <= 100, "{line}");
    }
}

#[test]
fn an_explanation_says_what_becomes_of_a_connect() {
    let mut explanation = explanation("10.0.0.5:5432", None);
    let now = |explanation: &_| {
        let text = explain_text::text(explanation, PLAIN);
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("  connect now  "));
        line.expect("the line").to_owned()
    };
    assert_eq!(now(&explanation), "passes");
    explanation.rows[0].row.state = State::Open;
    assert_eq!(now(&explanation), "is refused with the policy's errno");
    explanation.rows[0].row.policy = "orders-db".to_owned();
    assert_eq!(now(&explanation), "is refused with ECONNREFUSED");
    explanation.mode = Mode::Observe;
    let would = "passes; in enforce mode it is refused with ECONNREFUSED";
    assert_eq!(now(&explanation), would);
    explanation.paused = Some(Paused {
        since: NOW,
        until: None,
        by: "uid 0".to_owned(),
    });
    assert_eq!(now(&explanation), "passes, because of the pause");
}
