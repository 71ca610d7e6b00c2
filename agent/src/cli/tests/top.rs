//! What `top` puts on a screen.

use std::time::Duration;

use super::super::top::frame::{Before, Frame};
use crate::control::api::{
    Mode, Paused, Row, State, StatusEnvelope, Timestamp,
    tests::{envelope, row},
};

const NOW: Timestamp = Timestamp::from_unix_ms(1_795_867_384_123);

fn counted(destination: &str, attempts: u64, refused: u64, rejected: u64) -> Row {
    let mut row = row(destination);
    row.attempts = attempts;
    row.failures.refused = refused;
    row.rejected.breaker = rejected;
    row
}

fn frame<'a>(
    envelope: &'a StatusEnvelope,
    before: Option<&'a Before>,
    size: (usize, usize),
) -> Frame<'a> {
    Frame {
        envelope,
        before,
        trouble: None,
        size,
        colour: false,
        now: NOW,
    }
}

#[test]
fn rates_stand_beside_the_sums() {
    let earlier = Before::of(&envelope(vec![counted("10.0.0.5:5432", 100, 10, 1)]));
    let mut open = counted("10.0.0.5:5432", 300, 15, 2_001);
    open.state = State::Open;
    let mut now = envelope(vec![open, counted("10.0.0.6:80", 8, 0, 0)]);
    now.uptime_ms += 2_000;
    let lines = frame(&now, Some(&earlier), (200, 24)).lines();
    assert_eq!(
        lines[0],
        "backstop 0.1.0  mode enforce  up 3h12m2s  lost events 0  rows 2 (1 open, 0 half-open)"
    );
    let words =
        |line: &str| -> Vec<String> { line.split_whitespace().map(str::to_owned).collect() };
    assert_eq!(
        words(&lines[2]).join(" "),
        "DESTINATION WORKLOAD STATE ATT/s FAIL/s REJ/s WINDOW P99 ATTEMPTS FAILED REJECTED"
    );
    assert_eq!(
        words(&lines[3]).join(" "),
        "10.0.0.5:5432 system.slice/billing.service open 0s 100 3 1000 0/0c - 300 15 2001"
    );
    // New since: 8 in two seconds.
    assert_eq!(words(&lines[4])[4..7], ["4", "0", "0"]);
    assert_eq!(lines.len(), 5);
}

#[test]
fn an_agent_that_was_restarted_has_no_rates_at_first() {
    let earlier = Before::of(&envelope(vec![counted("10.0.0.5:5432", 100, 10, 1)]));
    let mut now = envelope(vec![counted("10.0.0.5:5432", 5, 0, 0)]);
    now.uptime_ms = 900;
    let text = frame(&now, Some(&earlier), (200, 24)).lines().join("\n");
    assert!(
        text.contains("  closed 0s      -       -      -  "),
        "{text}"
    );
}

#[test]
fn observe_mode_counts_what_would_be_refused() {
    let mut before = envelope(vec![row("10.0.0.5:5432")]);
    before.mode = Mode::Observe;
    let mut now = before.clone();
    now.uptime_ms += 1_000;
    now.destinations[0].would_reject.breaker = 7;
    let lines = frame(&now, Some(&Before::of(&before)), (200, 24)).lines();
    let text = lines.join("\n");
    assert!(
        text.contains("WOULD/s") && text.contains("WOULD-REJ"),
        "{text}"
    );
    let words: Vec<_> = lines.last().unwrap().split_whitespace().collect();
    assert_eq!((words[6], words[11]), ("7", "7"), "{text}");
}

/// Whatever there is to say, it fits.
#[test]
fn it_fits_into_any_screen() {
    let mut rows: Vec<Row> = (0..100)
        .map(|at| counted(&format!("10.0.0.{at}:80"), at, 0, 0))
        .collect();
    rows[3].destination =
        "a-very-long-name.of-some.service.in.some.namespace.svc.cluster.local:443".to_owned();
    rows[4].workload = "kubepods.slice/".repeat(20);
    let mut all = envelope(rows);
    all.paused = Some(Paused {
        since: NOW,
        until: None,
        by: "uid 0, pid 4711 (backstop, from bash 4700)".to_owned(),
    });
    for width in [1, 5, 20, 21, 40, 79, 80, 100, 200] {
        for height in [1, 2, 3, 5, 10, 24, 200] {
            for trouble in [
                None,
                Some((
                    "no agent answers on /run/backstop/backstop.sock: gone",
                    Duration::ZERO,
                )),
            ] {
                let frame = Frame {
                    trouble,
                    ..frame(&all, None, (width, height))
                };
                let lines = frame.lines();
                assert!(
                    lines.len() <= height,
                    "{width}x{height}: {} lines",
                    lines.len()
                );
                let longest = lines.iter().map(|line| line.chars().count()).max().unwrap();
                assert!(
                    longest <= width,
                    "{width}x{height}: {longest}\n{}",
                    lines.join("\n")
                );
            }
        }
    }
    let lines = frame(&all, None, (100, 24)).lines();
    assert_eq!(lines.len(), 24);
    assert!(lines[23].starts_with("and 82 more"), "{}", lines[23]);
    assert!(
        frame(&all, None, (40, 24)).lines()[4].starts_with("DESTINATION"),
        "numbers before workloads"
    );
}

#[test]
fn an_agent_that_is_away_is_said_and_the_last_is_kept() {
    let earlier = Before::of(&envelope(vec![row("10.0.0.5:5432")]));
    let mut now = envelope(vec![row("10.0.0.5:5432")]);
    now.uptime_ms += 1_000;
    let away = Frame {
        trouble: Some(("no agent answers on /s", Duration::from_secs(12))),
        ..frame(&now, Some(&earlier), (100, 24))
    };
    let lines = away.lines();
    assert_eq!(lines[0], "For 12s: no agent answers on /s");
    assert!(
        lines.iter().any(|line| line.starts_with("10.0.0.5:5432 ")),
        "{lines:?}"
    );
    assert!(
        lines.last().unwrap().contains("  -  "),
        "no rates of an agent that says nothing: {lines:?}"
    );
}

#[test]
fn names_reach_the_terminal_harmless() {
    let mut hostile = row("10.0.0.5:80\u{1b}[2J");
    hostile.workload = "a\u{7}\u{9b}31m\u{202e}b\r\n".to_owned();
    let mut all = envelope(vec![hostile]);
    all.paused = Some(Paused {
        since: NOW,
        until: None,
        by: "x\u{1b}]0;y\u{7}".to_owned(),
    });
    let frame = Frame {
        trouble: Some(("no\u{1b}c", Duration::ZERO)),
        ..frame(&all, None, (200, 24))
    };
    let text = frame.lines().concat();
    assert!(
        !text.contains(|c: char| c.is_control() || c == '\u{202e}'),
        "{text:?}"
    );
    // Colours are ours alone.
    let coloured = Frame {
        colour: true,
        ..frame
    }
    .lines()
    .concat();
    for code in coloured.split('\u{1b}').skip(1) {
        let (code, _) = code.split_once('m').expect("a colour");
        let digits = code.strip_prefix('[').expect("a colour");
        assert!(
            digits.chars().all(|c| c.is_ascii_digit() || c == ';'),
            "{code:?}"
        );
    }
}
