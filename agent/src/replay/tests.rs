use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;
use crate::control::api::{self, CallsLatency, Event, EventRecord, ReasonKind, Timestamp, Window};
use crate::policy::{Config, parse_str};

const START: u64 = 1_700_000_000_000;

fn at(ms: u64) -> Timestamp {
    Timestamp::from_unix_ms(START + ms)
}

fn line(ms: u64, event: Event) -> String {
    let record = EventRecord {
        time: at(ms),
        event,
    };
    serde_json::to_string(&record).unwrap() + "\n"
}

fn failure_of(window: Window, seq: u64, ms: u64, outcome: &str) -> String {
    let event = Event::Failure {
        destination: "10.0.0.5:5432".to_owned(),
        workload: "w".to_owned(),
        netns: Some(7),
        window,
        outcome: outcome.to_owned(),
        seq,
        previous_call_time: None,
        generation: 0,
        latency_us: 200,
    };
    line(ms, event)
}

fn failure(seq: u64, ms: u64) -> String {
    failure_of(Window::Connects, seq, ms, "refused")
}

fn calls_of(window: Window, seqs: (u64, u64), ms: (u64, u64)) -> String {
    let event = Event::Calls {
        destination: "10.0.0.5:5432".to_owned(),
        workload: "w".to_owned(),
        netns: Some(7),
        window,
        from_seq: seqs.0,
        to_seq: seqs.1,
        first_time: at(ms.0),
        last_time: at(ms.1),
        latency_us: CallsLatency {
            p50: Some(1000),
            p99: Some(2000),
            max: Some(80_000),
        },
        slow: 0,
    };
    line(ms.1, event)
}

fn calls(seqs: (u64, u64), ms: (u64, u64)) -> String {
    calls_of(Window::Connects, seqs, ms)
}

fn rejected(ms: u64, count: u64) -> String {
    let event = Event::Rejected {
        destination: "10.0.0.5:5432".to_owned(),
        workload: "w".to_owned(),
        netns: Some(7),
        reason: "breaker".to_owned(),
        count,
        pid: 1,
        comm: "curl".to_owned(),
        mode: api::Mode::Enforce,
        generation: 1,
    };
    line(ms, event)
}

fn redial(ms: u64, answered: bool) -> String {
    let event = Event::Redial {
        destination: "10.0.0.5:5432".to_owned(),
        netns: Some(7),
        answered,
    };
    line(ms, event)
}

fn config(text: &str) -> Config {
    parse_str("test", text).unwrap()
}

fn under(text: &str, lines: &str) -> Replayed {
    replay(&read(lines.as_bytes()).unwrap(), &config(text))
}

/// Times since the start, ms, and states.
fn story(replayed: &Replayed) -> Vec<(u64, &'static str)> {
    let told = replayed.transitions.iter();
    told.map(|transition| (transition.time.unix_ms() - START, transition.to.as_str()))
        .collect()
}

/// Twenty good connects, then five refused ones, 100 ms apart; the agent's dial is answered at 8 s, and
/// two probes come.
fn outage() -> String {
    let mut text = calls((1, 20), (0, 1900));
    for n in 0..5 {
        text += &failure(21 + n, 2000 + 100 * n);
    }
    text += &rejected(2450, 1);
    text += &redial(8000, true);
    text += &failure_of(Window::Exchanges, 1, 8100, "status");
    text += &calls((26, 27), (8050, 8150));
    text
}

#[test]
fn the_same_configuration_does_what_was_done() {
    let replayed = under("", &outage());
    assert_eq!(
        story(&replayed),
        [(2400, "open"), (8000, "half_open"), (8150, "closed")]
    );
    let reason = &replayed.transitions[0].reason;
    assert_eq!(reason.kind, ReasonKind::ConsecutiveFailures);
    let row = &replayed.rows[0];
    assert_eq!((row.connects, row.exchanges, row.failures), (27, 1, 6));
    assert_eq!((row.refused, row.refused_then, row.unknown), (0, 1, 0));
    assert_eq!((replayed.lines, replayed.missing), (10, 0));
    assert_eq!(replayed.from, Some(at(0)));
    assert_eq!(replayed.to, Some(at(8150)));
}

#[test]
fn a_trial_passes_between_two_lines_of_refusals() {
    // Five answers of 503 open it at 400 ms; from then on all is refused, but for a connect that tries.
    let mut text = calls((1, 5), (0, 400));
    for n in 0..5 {
        text += &failure_of(Window::Exchanges, 1 + n, 4 + 100 * n, "status");
    }
    text += &rejected(410, 1);
    text += &redial(420, true);
    text += &rejected(1410, 200);
    text += &calls((6, 6), (1000, 1000));
    text += &calls_of(Window::Exchanges, (6, 6), (1010, 1010));
    let replayed = under("", &text);
    // By 1,160 ms 150 have been refused; by 910 ms a hundred, and half a second is over.
    assert_eq!(story(&replayed)[..2], [(404, "open"), (1010, "half_open")]);
    assert_eq!(replayed.rows[0].refused, 0);
}

#[test]
fn a_stricter_one_opens_earlier_and_refuses_what_came_after() {
    let strict = "[defaults.breaker]\nconsecutive_failures = 3\n";
    let replayed = under(strict, &outage());
    assert_eq!(story(&replayed)[0], (2200, "open"));
    let row = &replayed.rows[0];
    // The fourth and the fifth failure.
    assert_eq!((row.refused, row.refused_good, row.failures), (2, 0, 4));
}

#[test]
fn a_more_patient_one_never_opens_and_does_not_know_what_would_have_been() {
    let patient = "[defaults.breaker]\nconsecutive_failures = \"off\"\nfailure_rate = \"off\"\n";
    let replayed = under(patient, &outage());
    assert_eq!(story(&replayed), []);
    assert_eq!(replayed.rows[0].unknown, 1);
    assert_eq!(replayed.rows[0].state, api::State::Closed);
}

#[test]
fn good_calls_that_would_have_been_refused_are_told() {
    // Open at 400 ms, no dial is answered by what was recorded, and the good calls come meanwhile.
    let mut text = String::new();
    for n in 0..5 {
        text += &failure(1 + n, 100 * n);
    }
    text += &calls((6, 15), (500, 1400));
    let replayed = under("[defaults.breaker]\nredial = false\n", &text);
    assert_eq!(story(&replayed), [(400, "open")]);
    let row = &replayed.rows[0];
    assert_eq!((row.refused, row.refused_good), (10, 10));
    assert_eq!(row.state, api::State::Open);
}

#[test]
fn lines_may_be_out_of_order_and_come_twice() {
    let in_order = under("", &outage());
    let mut lines: Vec<_> = outage().lines().map(str::to_owned).collect();
    lines.swap(1, 3);
    lines.swap(2, 6);
    let again = lines[4].clone();
    lines.push(again);
    let replayed = under("", &lines.join("\n"));
    assert_eq!(replayed.transitions, in_order.transitions);
    assert_eq!(replayed.duplicates, 1);
}

#[test]
fn missing_calls_end_a_run() {
    let mut text = failure(1, 0) + &failure(2, 100) + &failure(3, 200);
    text += &(failure(6, 500) + &failure(7, 600));
    let replayed = under("", &text);
    assert_eq!((story(&replayed), replayed.missing), (vec![], 2));
    text += &(failure(8, 700) + &failure(9, 800) + &failure(10, 900));
    assert_eq!(story(&under("", &text)), [(900, "open")]);
}

#[test]
fn numbers_that_begin_anew_are_other_calls() {
    // The agent was started anew: its numbers begin with 1 again.
    let mut text = calls((1, 50), (0, 5000)) + &failure(51, 5100) + &failure(52, 5200);
    for n in 0..3 {
        text += &failure(1 + n, 20_000 + 100 * n);
    }
    let replayed = under("", &text);
    assert_eq!(replayed.rows[0].connects, 55);
    assert_eq!(replayed.duplicates, 0);
    assert_eq!(story(&replayed), [(20_200, "open")]);
}

#[test]
fn opened_on_exchanges_it_is_probed_by_them() {
    let mut text = calls((1, 5), (0, 400));
    for n in 0..5 {
        text += &failure_of(Window::Exchanges, 1 + n, 50 + 100 * n, "status");
    }
    // A probe and a second one, after the cooldown.
    text += &calls((6, 6), (31_000, 31_000));
    text += &calls_of(Window::Exchanges, (6, 6), (31_050, 31_050));
    text += &calls((7, 7), (31_100, 31_100));
    text += &calls_of(Window::Exchanges, (7, 7), (31_150, 31_150));
    let replayed = under("", &text);
    assert_eq!(
        story(&replayed),
        [(450, "open"), (30_450, "half_open"), (31_150, "closed")]
    );
    assert_eq!(replayed.transitions[0].reason.window, Window::Exchanges);
}

#[test]
fn slow_calls_are_those_that_were_slow() {
    let slow = "[defaults.breaker]\nslow_call = \"50ms\"\nslow_call_rate = 0.5\n";
    let mut text = calls_of(Window::Exchanges, (1, 10), (0, 900));
    for n in 0..10 {
        text += &failure_of(Window::Exchanges, 11 + n, 1000 + 100 * n, "slow");
    }
    let replayed = under(slow, &text);
    assert_eq!(story(&replayed), [(1900, "open")]);
    assert_eq!(
        replayed.transitions[0].reason.kind,
        ReasonKind::SlowCallRate
    );
    assert_eq!(replayed.rows[0].may_be_slow, 10, "the longest took 80 ms");
    assert_eq!(story(&under("", &text)), []);
}

#[test]
fn what_says_nothing_of_calls_is_skipped_and_counted() {
    let text = format!(
        "\n{}{}{}\n  \n",
        r#"{"time":"2026-11-28T12:03:04.123Z","kind":"from the future","x":[1,{}]}"#,
        "\n",
        r#"{"kind":"breaker"}"#
    );
    let replayed = under("", &text);
    assert_eq!(replayed.lines, 2);
    let skipped: Vec<_> = replayed.skipped.into_iter().collect();
    assert_eq!(
        skipped,
        [("breaker".to_owned(), 1), ("from the future".to_owned(), 1)]
    );
}

#[test]
fn an_empty_recording_is_none() {
    let replayed = under("", "");
    assert_eq!((replayed.lines, replayed.from), (0, None));
    assert!(replayed.transitions.is_empty() && replayed.rows.is_empty());
}

#[test]
fn protected_and_other_rows_are_left_alone() {
    let text = failure(1, 0).replace("10.0.0.5:5432", "10.0.0.5:53")
        + &failure(1, 0).replace("10.0.0.5:5432", "other");
    let replayed = under("", &text);
    let why: Vec<_> = replayed
        .left_alone
        .iter()
        .map(|row| (row.destination.as_str(), row.why.as_str()))
        .collect();
    assert_eq!(
        why,
        [
            ("10.0.0.5:53", "protected"),
            ("other", "no destination with a breaker")
        ]
    );
}

#[test]
fn errors_name_the_line() {
    for (bad, says) in [
        ("{", "not an event"),
        ("[]", "not an event"),
        ("11-28 12:03:05.100  config  started", "--all --json"),
        (r#"{"kind":1}"#, "not an event"),
        (r#"{"kind":"failure"}"#, "missing field `time`"),
        (
            &failure(1, 0).replace("\"seq\":1", "\"seq\":-1"),
            "not an event",
        ),
        (&failure(0, 0), "begin with 1"),
        (&calls((9, 3), (0, 1)), "begin with 1 and go up"),
        (&calls((1, u64::MAX), (0, 1)), "at most 10000000"),
        (
            &failure(1, 0).replace("connects", "none"),
            "want connects or exchanges",
        ),
        (&failure(1, 0).replace("T22", " at ten"), "not an event"),
    ] {
        let text = format!("{}\n{bad}", failure(1, 0));
        let error = read(text.as_bytes()).unwrap_err();
        assert_eq!(error.line, 3, "{bad}: {error}");
        assert!(error.to_string().starts_with("line 3: "), "{error}");
        assert!(error.what.contains(says), "{bad}: {error}");
    }
    let error = read(&b"{\"kind\":\"\xff\"}"[..]).unwrap_err();
    assert!(error.what.contains("UTF-8"), "{error}");
    let long = "x".repeat(2 << 20);
    let error = read(long.as_bytes()).unwrap_err();
    assert!(error.what.contains("longer than"), "{error}");
}

#[test]
fn json_has_every_key() {
    let replayed = under("", &outage());
    let json = serde_json::to_value(&replayed).unwrap();
    let keys: Vec<_> = json.as_object().unwrap().keys().cloned().collect();
    let mut expected = [
        "from",
        "to",
        "transitions",
        "rows",
        "left_alone",
        "lines",
        "skipped",
        "duplicates",
        "missing",
    ];
    expected.sort_unstable();
    let mut keys = keys;
    keys.sort_unstable();
    assert_eq!(keys, expected);
    assert_eq!(
        json["transitions"][0]["reason"]["kind"],
        "consecutive_failures"
    );
    assert_eq!(json["rows"][0]["refused_good"], 0);
}

/// A recording in which anything may stand.
fn any_line() -> impl Strategy<Value = String> {
    let seq = prop_oneof![0u64..60, any::<u64>()];
    let ms = prop_oneof![0u64..100_000, any::<u64>()];
    let window = prop_oneof![
        Just(Window::Connects),
        Just(Window::Exchanges),
        Just(Window::None)
    ];
    (0..6u8, seq, 0u64..200, ms, 0u64..100_000, window).prop_map(
        |(kind, seq, more, ms, later, window)| match kind {
            0 => failure_of(window, seq, ms.min(1 << 50), "refused"),
            1 => failure_of(window, seq, ms.min(1 << 50), "slow"),
            2 => {
                let ms = ms.min(1 << 50);
                calls_of(window, (seq, seq.saturating_add(more)), (ms, ms + later))
            }
            3 => rejected(ms.min(1 << 50), seq.min(1 << 40)),
            4 => redial(ms.min(1 << 50), seq % 2 == 0),
            _ => format!("{{\"kind\":\"k{seq}\"}}\n"),
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = read(&bytes[..]);
    }

    /// Whatever stands in it: no panic, the same result twice, and every call is somewhere.
    #[test]
    fn odd_recordings_are_harmless(lines in prop::collection::vec(any_line(), 0..60)) {
        let text = lines.concat();
        let Ok(recording) = read(text.as_bytes()) else {
            return Ok(());
        };
        let config = config("");
        let replayed = replay(&recording, &config);
        prop_assert_eq!(&replayed, &replay(&recording, &config));
        for (row, recorded) in replayed.rows.iter().zip(recording.rows.values()) {
            let calls = |window: usize| {
                recorded.windows[window].iter().map(|segment| segment.len()).sum::<u64>()
            };
            prop_assert_eq!(row.connects, calls(0));
            prop_assert_eq!(row.exchanges, calls(1));
            prop_assert!(row.refused_good <= row.refused && row.refused <= row.connects);
            for segments in &recorded.windows {
                let mut last = crate::core::Nanos::ZERO;
                for segment in segments {
                    prop_assert!(last <= segment.first && segment.first <= segment.last);
                    last = segment.last;
                }
            }
        }
        let mut at = Timestamp::default();
        for transition in &replayed.transitions {
            prop_assert!(transition.time >= at);
            at = transition.time;
        }
    }

    /// Each order of the same lines says the same.
    #[test]
    fn the_order_of_lines_within_seconds_does_not_matter(
        seed in any::<u64>(),
        swaps in prop::collection::vec((0usize..40, 0usize..40), 0..40),
    ) {
        let mut text = String::new();
        let mut luck = seed;
        for seq in 1..=40u64 {
            luck ^= luck << 13;
            luck ^= luck >> 7;
            luck ^= luck << 17;
            if luck.is_multiple_of(2) {
                text += &failure(seq, seq * 100);
            } else {
                let _ = write!(text, "{}", calls((seq, seq), (seq * 100, seq * 100)));
            }
        }
        let expected = under("", &text);
        let mut lines: Vec<_> = text.lines().collect();
        for (a, b) in swaps {
            lines.swap(a, b);
        }
        let got = under("", &lines.join("\n"));
        prop_assert_eq!(got.transitions, expected.transitions);
        prop_assert_eq!(got.rows, expected.rows);
    }
}
