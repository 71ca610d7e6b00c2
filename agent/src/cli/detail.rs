//! `status DESTINATION` for people: all there is to know about a row.
//!
//! Pure: from an envelope to text.

use std::fmt::Write as _;

use super::{
    table::{Style, heading, reason, state},
    units::{clean, count, exact, micros, running},
};
use crate::control::api::{
    Bypass, Held, Latency, Probe, Reason, ReasonKind, Row, State, StatusEnvelope,
};

/// All there is to know about each row.
pub fn details(envelope: &StatusEnvelope, style: Style) -> String {
    let mut text = heading(envelope, style);
    for row in &envelope.destinations {
        text.push('\n');
        detail(&mut text, row, style);
    }
    text
}

/// All there is to know about one row.
pub fn detail(text: &mut String, row: &Row, style: Style) {
    let (state, colour) = state(row);
    let state = match row.state {
        State::Closed if row.breaker_off => state.to_owned(),
        State::HalfOpen => format!("half-open for {}", running(row.state_age_ms)),
        _ => format!("{state} for {}", running(row.state_age_ms)),
    };
    let _ = writeln!(
        text,
        "{}  {}",
        clean(&row.destination),
        style.paint(colour, &state)
    );
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            let _ = writeln!(text, "  {name:<13}{value}");
        }
    };
    let is_first = |name: &&String| row.name.as_ref() != Some(*name);
    let names: Vec<_> = row
        .name
        .iter()
        .chain(row.names.iter().filter(is_first))
        .map(|name| clean(name))
        .collect();
    line("name", names.join(", "));
    line("workload", clean(&row.workload));
    let namespace = row.netns.map(|inode| inode.to_string());
    line(
        "namespace",
        namespace.unwrap_or_else(|| "not known".to_owned()),
    );
    line(
        "policy",
        format!("{}: {}", clean(&row.policy), timeouts(row)),
    );
    line("reason", reason_line(&row.reason));
    if let Some(manual) = &row.manual {
        let left = style.now.until(manual.until).as_millis();
        line(
            "by hand",
            format!(
                "by the order for {}, {}, since {} UTC by {}, for another {}",
                clean(&manual.destination),
                manual.workload.as_deref().map_or_else(
                    || "all workloads".to_owned(),
                    |workload| format!("workload {}", clean(workload))
                ),
                manual.since.short(),
                clean(&manual.by),
                running(u64::try_from(left).unwrap_or(u64::MAX))
            ),
        );
    }
    line("bypassed", bypassed(row));
    line("next", next(row));
    let window = &row.windows.connects;
    line(
        "window",
        format!(
            "{} of the last {} connects failed ({:.0} %), {} in a row",
            window.failures,
            window.calls,
            window.failure_rate * 100.0,
            window.consecutive
        ),
    );
    let has_exchanges = row.responses > 0 || row.windows.exchanges.calls > 0;
    if has_exchanges {
        line("", exchanges(row));
    }
    line(
        "attempts",
        format!(
            "{}: {} established",
            count(row.attempts),
            count(row.established)
        ),
    );
    if has_exchanges || row.stale > 0 {
        let (responses, stale) = (count(row.responses), count(row.stale));
        line("responses", format!("{responses}, {stale} stale"));
    }
    line("traits", row.traits.join(", "));
    let counts = [
        ("throttled", row.throttled),
        ("in flight", row.in_flight),
        ("live", row.limits.connections.used),
        ("abandoned", row.abandoned),
    ];
    for (name, calls) in counts {
        if calls > 0 {
            line(name, count(calls));
        }
    }
    line("limits", limits(row));
    let failures = listed(&row.failures.each());
    if !failures.is_empty() {
        let total = count(row.failures.total());
        line("failures", format!("{total}: {failures}"));
    }
    line("rejected", listed(&row.rejected.each()));
    line("would reject", listed(&row.would_reject.each()));
    line("in truth", would_have(row));
    if row.would_timeout > 0 {
        line(
            "would end",
            format!("{} by a timeout", count(row.would_timeout)),
        );
    }
    line("held", held(&row.held));
    line("retries", retries(row));
    if row.local > 0 {
        line("local", format!("{} never sent a SYN", count(row.local)));
    }
    let latencies = [
        ("connect", "minute", &row.connect_latency_1m_us),
        ("connect", "5 minutes", &row.connect_latency_us),
        ("response", "minute", &row.response_latency_1m_us),
        ("response", "5 minutes", &row.response_latency_us),
    ];
    let mut name = "latency";
    for (what, time, latency) in latencies.into_iter().filter(|(.., of)| of.count > 0) {
        line(name, percentiles(what, time, latency));
        name = "";
    }
}

/// Why it is closed though it should be open; empty: it should not.
fn bypassed(row: &Row) -> String {
    match row.bypassed_reason {
        None => String::new(),
        Some(Bypass::Correlated) => {
            "it should be open, and all pass: most destinations fail at once (correlated)"
                .to_owned()
        }
        Some(Bypass::MaxOpenShare) => format!(
            "it should be open, and all pass: as many endpoints of {} as may refuse already refuse, or \
             let only a share pass after an outage (max_open_share)",
            row.name
                .as_deref()
                .map_or_else(|| "its name".to_owned(), clean)
        ),
    }
}

/// Connects that were made to wait; empty: none.
fn held(held: &Held) -> String {
    let counts = [
        (held.backoff, "backoff, before a retry's SYN"),
        (held.spin, "spin, refused too often"),
    ];
    let said = counts.iter().filter(|(calls, _)| *calls > 0);
    let said: Vec<_> = said
        .map(|(calls, why)| format!("{} {why}", count(*calls)))
        .collect();
    said.join("; ")
}

/// Retries, and what bounds them; empty: there were none, and none were refused or held.
fn retries(row: &Row) -> String {
    let (retry, policy) = (&row.retry, &row.retry_policy);
    let (refused, would) = (&row.rejected, &row.would_reject);
    let is_bounded = [
        retry.retries,
        refused.retry_limit + would.retry_limit,
        refused.retry_budget + would.retry_budget,
        row.held.backoff,
        retry.non_idempotent,
        retry.live,
    ];
    if is_bounded == [0; 6] {
        return String::new();
    }
    let mut text = format!(
        "{} ({:.0} % of the attempts), {:.2} attempts an operation",
        count(retry.retries),
        retry.ratio * 100.0,
        retry.amplification
    );
    for (number, of) in [
        (retry.live, "on kept connections"),
        (retry.non_idempotent, "not idempotent"),
        (retry.non_idempotent_refused, "of those refused"),
        (
            retry.non_idempotent_would_refuse,
            "of those would be refused",
        ),
    ] {
        if number != 0 {
            let _ = write!(text, ", {} {of}", count(number));
        }
    }
    match policy.limit {
        Some(limit) => {
            let _ = write!(text, "; at most {limit} an operation");
        }
        None => text.push_str("; any number an operation"),
    }
    if let Some(share) = policy.budget {
        let percent = share * 100.0;
        let left = retry.budget_tokens;
        let _ = write!(text, ", budget {percent:.0} %: {left:.0} left");
    }
    if let (Some(base), Some(max)) = (policy.backoff_base_ms, policy.backoff_max_ms) {
        let _ = write!(
            text,
            ", held up to {}, doubled up to {}",
            exact(base),
            exact(max)
        );
    }
    text
}

fn exchanges(row: &Row) -> String {
    let window = &row.windows.exchanges;
    let slow = match window.slow_calls {
        0 => String::new(),
        slow => format!(", {slow} slow ({:.0} %)", window.slow_call_rate * 100.0),
    };
    format!(
        "{} of the last {} exchanges failed ({:.0} %), {} in a row{slow}",
        window.failures,
        window.calls,
        window.failure_rate * 100.0,
        window.consecutive,
    )
}

fn percentiles(what: &str, time: &str, latency: &Latency) -> String {
    format!(
        "{what} p50 {}, p90 {}, p99 {}, p99.9 {}, max {} ({} in the last {time})",
        micros(latency.p50),
        micros(latency.p90),
        micros(latency.p99),
        micros(latency.p999),
        micros(Some(latency.max)),
        count(latency.count),
    )
}

fn reason_line(why: &Reason) -> String {
    match why.kind {
        ReasonKind::None => String::new(),
        ReasonKind::Manual => "manual: an operator said so".to_owned(),
        _ => reason(why),
    }
}

fn next(row: &Row) -> String {
    let probe = row.next_probe_in_ms.map(|ms| {
        let what = match row.state {
            State::ForcedOpen | State::ForcedClosed => "manual state ends",
            State::Open | State::HalfOpen | State::Closed => "probe",
        };
        format!("{what} in {}", soon(ms))
    });
    let redial = row
        .next_redial_in_ms
        .map(|ms| format!("the agent dials in {}", soon(ms)));
    let ramp = row
        .ramp_ends_in_ms
        .map(|ms| format!("all connects pass in {}, a share until then", soon(ms)));
    let call = match row.probe {
        None => None,
        Some(Probe::Free) if row.waits_for_call => {
            Some("waiting for a call: the next connect is a probe".to_owned())
        }
        Some(Probe::Free) => Some("the next connect is a probe".to_owned()),
        Some(Probe::Taken) => Some("a probe is under way".to_owned()),
        Some(Probe::TakenElsewhere) => {
            Some("another workload's probe is under way, on the breaker that it shares".to_owned())
        }
    };
    probe
        .into_iter()
        .chain(call)
        .chain(redial)
        .chain(ramp)
        .collect::<Vec<_>>()
        .join(", ")
}

/// To a tenth below a minute: that is what one waits for; to the second beyond.
fn soon(ms: u64) -> String {
    match ms {
        0..60_000 => micros(Some(ms * 1_000)),
        _ => running(ms),
    }
}

fn timeouts(row: &Row) -> String {
    let timeouts = &row.timeouts_ms;
    let set: Vec<_> = [
        ("connect", timeouts.connect),
        ("read", timeouts.read),
        ("write", timeouts.write),
        ("deadline", timeouts.deadline),
        ("stall", timeouts.stall),
        ("keepalive", timeouts.keepalive),
    ]
    .into_iter()
    .filter_map(|(name, ms)| Some(format!("{name} {}", exact(ms?))))
    .collect();
    if set.is_empty() {
        "no timeouts".to_owned()
    } else {
        format!("timeouts {}", set.join(", "))
    }
}

/// What became of the calls that enforce mode would have refused.
fn would_have(row: &Row) -> String {
    let (good, bad) = (row.would_reject_succeeded, row.would_reject_failed);
    let told = good + bad;
    if told == 0 {
        return String::new();
    }
    let share = 100.0 * good as f64 / told as f64;
    format!(
        "{} of those went well ({share:.0} % of {} that tell)",
        count(good),
        count(told)
    )
}

fn limits(row: &Row) -> String {
    let limits = row.limits.each();
    let set = limits.iter().filter_map(|(word, of)| {
        let limit = count(of.limit?);
        Some(format!("{word} {} of {limit}", count(of.used)))
    });
    set.collect::<Vec<_>>().join(", ")
}

fn listed(counts: &[(&str, u64)]) -> String {
    let some: Vec<_> = counts
        .iter()
        .filter(|(_, n)| *n > 0)
        .map(|(word, n)| format!("{word} {}", count(*n)))
        .collect();
    some.join(", ")
}
