//! What an engineer on call has to know of a row beyond its state: whether anything is done to its calls,
//! and what it waits for.

use super::super::{
    detail::details,
    event_text, explain_text,
    table::{Style, table},
};
use crate::control::api::{
    ConfigAction, Event, EventRecord, Mode, Probe, RetryPolicy, Row, State, Timestamp, Unresolved,
    tests::{envelope, explanation, row},
};

const PLAIN: Style = Style {
    colour: false,
    width: 100,
    now: Timestamp::from_unix_ms(1_795_867_384_123),
};

fn detail(row: Row) -> String {
    details(&envelope(vec![row]), PLAIN)
}

/// The line of a row with this name.
fn line(text: &str, name: &str) -> Option<String> {
    let mut lines = text.lines();
    let found = lines.find_map(|line| line.strip_prefix(&format!("  {name:<13}")));
    found.map(str::to_owned)
}

#[test]
fn a_breaker_that_is_off_is_not_closed() {
    let mut off = row("10.0.0.5:80");
    off.breaker_off = true;
    let text = table(&envelope(vec![off.clone()]), PLAIN);
    assert!(text.contains("  breaker off 0s  "), "{text}");
    assert!(detail(off).contains("10.0.0.5:80  breaker off\n"));
}

#[test]
fn retries_are_shown_with_what_bounds_them() {
    let mut retried = row("10.0.0.5:80");
    assert_eq!(line(&detail(retried.clone()), "retries"), None);
    retried.rejected.retry_limit = 8;
    assert_eq!(
        line(&detail(retried.clone()), "retries").unwrap(),
        "0 (0 % of the attempts), 0.00 attempts an operation; any number an operation"
    );
    retried.retry.retries = 3;
    retried.retry.ratio = 0.75;
    retried.retry.amplification = 4.0;
    retried.retry.budget_tokens = 97.0;
    retried.held.backoff = 3;
    retried.retry_policy = RetryPolicy {
        limit: Some(3),
        budget: Some(0.1),
        backoff_base_ms: Some(100),
        backoff_max_ms: Some(1000),
        spin_per_second: Some(100),
    };
    let text = detail(retried);
    assert_eq!(
        line(&text, "retries").unwrap(),
        "3 (75 % of the attempts), 4.00 attempts an operation; at most 3 an operation, budget 10 %: 97 \
         left, held up to 100ms, doubled up to 1s"
    );
    let mut repeated = row("10.0.0.5:80");
    repeated.retry.live = 2;
    repeated.retry.non_idempotent = 5;
    repeated.retry.non_idempotent_refused = 4;
    assert_eq!(
        line(&detail(repeated), "retries").unwrap(),
        "0 (0 % of the attempts), 0.00 attempts an operation, 2 on kept connections, 5 not idempotent, 4 of \
         those refused; any number an operation"
    );
    assert_eq!(
        line(&text, "held").unwrap(),
        "3 backoff, before a retry's SYN"
    );
}

/// It stays half-open for as long as nobody calls: that says nothing against the server.
#[test]
fn half_open_for_want_of_a_call_comes_after_what_fails() {
    let mut waits = row("10.0.0.1:80");
    waits.state = State::HalfOpen;
    waits.state_age_ms = 1_140_000;
    waits.probe = Some(Probe::Free);
    waits.waits_for_call = true;
    waits.failures.refused = 500;
    let mut fails = row("10.0.0.2:80");
    fails.failures.refused = 1;
    let healthy = row("10.0.0.0:80");
    let mut probing = row("10.0.0.3:80");
    probing.state = State::HalfOpen;
    probing.probe = Some(Probe::Taken);
    let mut envelope = envelope(vec![healthy, waits.clone(), fails, probing.clone()]);
    envelope.sort();
    let order: Vec<_> = envelope
        .destinations
        .iter()
        .map(|row| row.destination.as_str())
        .collect();
    assert_eq!(
        order,
        ["10.0.0.3:80", "10.0.0.2:80", "10.0.0.1:80", "10.0.0.0:80"]
    );
    let text = table(&envelope, PLAIN);
    assert!(text.contains("  half-open, waiting 19m  "), "{text}");
    let text = detail(waits);
    assert!(text.contains("10.0.0.1:80  half-open for 19m\n"), "{text}");
    assert_eq!(
        line(&text, "next").unwrap(),
        "waiting for a call: the next connect is a probe"
    );
    assert_eq!(
        line(&detail(probing), "next").unwrap(),
        "a probe is under way"
    );
}

#[test]
fn a_shared_breaker_that_is_half_open() {
    let mut explanation = explanation("10.0.0.5:5432", None);
    let now = |explanation: &_| {
        let mut lines = explain_text::text(explanation, PLAIN);
        lines = lines.replace("\n               ", " ");
        line(&lines, "connect now").unwrap()
    };
    let explained = &mut explanation.rows[0];
    explained.row.state = State::HalfOpen;
    explained.row.probe = Some(Probe::Free);
    assert_eq!(now(&explanation), "passes as a probe");
    explanation.rows[0].opened_by = Some("billing".to_owned());
    assert_eq!(
        now(&explanation),
        "passes as the probe, unless another workload's connect is first: then it is refused with the \
         policy's errno"
    );
    explanation.rows[0].row.probe = Some(Probe::TakenElsewhere);
    assert_eq!(
        now(&explanation),
        "is refused with the policy's errno: the probe is another workload's"
    );
    let text = explain_text::text(&explanation, PLAIN);
    assert!(
        line(&text, "next")
            .unwrap()
            .starts_with("another workload's probe is under way"),
        "{text}"
    );
}

#[test]
fn all_names_are_shown_first_the_one_that_was_asked_for() {
    let mut named = row("10.0.0.5:80");
    named.name = Some("db.test".to_owned());
    named.names = ["svc.test", "db.test"].map(str::to_owned).to_vec();
    assert_eq!(line(&detail(named), "name").unwrap(), "db.test, svc.test");
}

#[test]
fn names_that_cannot_be_looked_up_are_above_the_table() {
    let mut envelope = envelope(Vec::new());
    envelope.unresolved.push(Unresolved {
        name: "nosuch.test".to_owned(),
        named_by: "policy absent".to_owned(),
        error: "Name or service not known".to_owned(),
    });
    let text = table(&envelope, PLAIN);
    let said =
        "policy absent names nosuch.test, which cannot be looked up (Name or service not known)";
    assert!(text.contains(said), "{text}");
}

fn event(event: Event) -> String {
    let time = PLAIN.now;
    event_text::line(&EventRecord { time, event })
}

#[test]
fn held_connects_and_budgets() {
    let held = |count, hold_ms, pid| {
        event(Event::Held {
            destination: "10.0.0.5:5432".to_owned(),
            workload: "shop".to_owned(),
            netns: None,
            reason: "backoff".to_owned(),
            count,
            hold_ms,
            pid,
            comm: "curl".to_owned(),
        })
    };
    let text = held(1, Some(84), 41);
    assert!(
        text.ends_with("1 held for 84ms by backoff, curl[41]  (shop)"),
        "{text}"
    );
    let text = held(1_200, None, 0);
    assert!(text.ends_with("1,200 held by backoff  (shop)"), "{text}");
    let budget = |exhausted, mode| {
        event(Event::RetryBudget {
            destination: "10.0.0.5:5432".to_owned(),
            workload: "shop".to_owned(),
            netns: None,
            exhausted,
            ratio: 0.09,
            budget_tokens: 0.0,
            mode,
        })
    };
    let text = budget(true, Mode::Observe);
    assert!(
        text.contains("would have: exhausted: retries are 9 % of attempts, 0 more allowed"),
        "{text}"
    );
    let text = budget(false, Mode::Enforce);
    assert!(text.contains("  available again: retries are"), "{text}");
}

/// An event is a line, whatever it has to tell.
#[test]
fn several_problems_are_one_line() {
    let text = event(Event::Config {
        action: ConfigAction::Refused,
        message: "b.toml:1: mode = x: no mode; allowed: enforce\nb.toml:3: y: no\nb.toml:4: z: no; allowed: \
                  1; the old configuration stays in force"
            .to_owned(),
        by: None,
    });
    assert!(
        text.ends_with(
            "refused: b.toml:1: mode = x: no mode; allowed: enforce, and 2 more, which `backstop check \
             FILE` lists; the old configuration stays in force"
        ),
        "{text}"
    );
}
