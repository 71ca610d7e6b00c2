//! `status` for people: the table, and the block about one destination.
//!
//! Pure: from an envelope to text.

use std::fmt::Write as _;

use super::units::{age, clean, count, exact, micros, number, running, short_count, shorten_left};
use crate::control::api::{
    Bypass, Held, Latency, ManualState, Mode, Reason, ReasonKind, Retry, Row, State,
    StatusEnvelope, Timestamp, Window, Windows,
};

/// How to write.
#[derive(Clone, Copy)]
pub struct Style {
    /// ANSI colours for states.
    pub colour: bool,
    /// Columns to stay within, as far as destinations allow, which are never cut.
    pub width: usize,
    /// For how long a pause still lasts.
    pub now: Timestamp,
}

const RED: &str = "31";
const YELLOW: &str = "33";
const MAGENTA: &str = "35";
const LOUD: &str = "1;37;41";

/// Fewest columns for a workload.
const WORKLOAD_MIN: usize = 12;
const GAP: usize = 2;

/// Orders that are listed.
const ORDERS: usize = 10;

impl Style {
    fn paint(self, code: &str, text: &str) -> String {
        if self.colour && !code.is_empty() {
            format!("\x1b[{code}m{text}\x1b[0m")
        } else {
            text.to_owned()
        }
    }
}

/// The table of all destinations. Rows appear in the order given.
pub fn table(envelope: &StatusEnvelope, style: Style) -> String {
    let mut text = heading(envelope, style);
    if envelope.destinations.is_empty() {
        text.push_str(
            "\nNo destination seen yet: those that programs in the watched cgroups connect to \
             appear here.\n",
        );
        return text;
    }
    text.push('\n');
    let lines: Vec<[Cell; 8]> = std::iter::once(titles(envelope.mode))
        .chain(
            envelope
                .destinations
                .iter()
                .map(|row| cells(row, envelope.mode)),
        )
        .collect();
    let mut widths = [0; 8];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.text.chars().count());
        }
    }
    let others: usize = widths.iter().sum::<usize>() - widths[1] + GAP * (widths.len() - 1);
    widths[1] = widths[1].min(style.width.saturating_sub(others).max(WORKLOAD_MIN));
    for line in &lines {
        text.push_str(&joined(line, &widths, style));
    }
    if let Some(worst) = envelope.destinations.first() {
        let _ = write!(
            text,
            "\nWINDOW: failed or slow of the last calls: connects (c) or exchanges (e), whichever are \
             worse.\nP99: of responses, in brackets of connects, last 5 minutes. More:\n\
             backstop status {}, backstop events\n",
            clean(&worst.destination)
        );
    }
    text
}

/// All there is to know about each row.
pub fn details(envelope: &StatusEnvelope, style: Style) -> String {
    let mut text = heading(envelope, style);
    for row in &envelope.destinations {
        text.push('\n');
        detail(&mut text, row, style);
    }
    text
}

fn heading(envelope: &StatusEnvelope, style: Style) -> String {
    let affected = |states: &[State]| {
        let rows = envelope.destinations.iter();
        rows.filter(|row| states.contains(&row.state)).count()
    };
    let open = affected(&[State::Open, State::ForcedOpen]);
    let half_open = affected(&[State::HalfOpen]);
    let mut text = format!(
        "backstop {}  mode {}  up {}  lost events {}  rows {}",
        envelope.version,
        envelope.mode,
        running(envelope.uptime_ms),
        count(envelope.lost_events),
        count(envelope.destinations.len() as u64),
    );
    if open + half_open > 0 {
        let _ = write!(text, " ({open} open, {half_open} half-open)");
    }
    text.push('\n');
    if envelope.mode == Mode::Observe {
        text.push_str("Observe mode: everything is decided and counted, nothing is refused.\n");
    }
    if let Some(paused) = &envelope.paused {
        let end = match paused.until {
            Some(until) => {
                let left = style.now.until(until).as_millis();
                format!(
                    "for another {}",
                    running(u64::try_from(left).unwrap_or(u64::MAX))
                )
            }
            None => "until `backstop resume`".to_owned(),
        };
        let line = format!(
            "PAUSED since {} UTC by {}, {end}.",
            paused.since.short(),
            clean(&paused.by),
        );
        text.push_str(&style.paint(LOUD, &line));
        text.push_str("\nNo verdict and no timeout is enforced; counting goes on.\n");
    }
    if !envelope.orders.is_empty() {
        let orders = number(envelope.orders.len() as u64, "order");
        let _ = writeln!(
            text,
            "By hand, {orders}, newest first (that is in force for a row):"
        );
    }
    for standing in envelope.orders.iter().take(ORDERS) {
        let (what, who) = order(standing);
        let _ = writeln!(text, "  {what}\n    {who}");
    }
    if envelope.orders.len() > ORDERS {
        let more = envelope.orders.len() - ORDERS;
        let _ = writeln!(text, "  and {more} more, see backstop status --json");
    }
    text
}

/// An operator's order: what it says, and who gave it when.
pub fn order(order: &ManualState) -> (String, String) {
    let what = match order.state {
        State::ForcedOpen => "refused",
        _ => "held closed",
    };
    let whom = order.workload.as_deref().map_or_else(
        || "all workloads".to_owned(),
        |workload| format!("workload {}", clean(workload)),
    );
    let rows = match order.rows {
        0 => "no row".to_owned(),
        rows => number(rows, "row"),
    };
    let what = format!(
        "{} {what} for another {}, {whom}: {rows}",
        clean(&order.destination),
        running(order.ends_in_ms)
    );
    let who = format!("since {} UTC by {}", order.since.short(), clean(&order.by));
    (what, who)
}

struct Cell {
    text: String,
    right: bool,
    colour: &'static str,
}

fn left(text: impl Into<String>) -> Cell {
    Cell {
        text: text.into(),
        right: false,
        colour: "",
    }
}

fn right(text: impl Into<String>) -> Cell {
    Cell {
        right: true,
        ..left(text)
    }
}

fn titles(mode: Mode) -> [Cell; 8] {
    [
        left("DESTINATION"),
        left("WORKLOAD"),
        left("STATE"),
        right("WINDOW"),
        right("ATTEMPTS"),
        right("FAILED"),
        right(match mode {
            Mode::Enforce => "REJECTED",
            Mode::Observe => "WOULD-REJ",
        }),
        right("P99"),
    ]
}

fn cells(row: &Row, mode: Mode) -> [Cell; 8] {
    let (state, colour) = state(row);
    let rejected = match mode {
        Mode::Enforce => row.rejected.total(),
        Mode::Observe => row.would_reject.total(),
    };
    [
        left(clean(&row.destination)),
        left(clean(&row.workload)),
        Cell {
            colour,
            ..left(format!("{state} {}", age(row.state_age_ms)))
        },
        right(window(row)),
        right(short_count(row.attempts)),
        right(short_count(row.failures.total())),
        right(short_count(rejected)),
        right(p99(row)),
    ]
}

/// The window that says most: the one that opened the breaker, else the one with the larger share of
/// failed and slow calls.
fn window(row: &Row) -> String {
    let Windows {
        connects,
        exchanges,
    } = &row.windows;
    let bad = exchanges.failures.saturating_add(exchanges.slow_calls);
    let is_exchanges = match row.reason.window {
        Window::Connects => false,
        Window::Exchanges => true,
        Window::None => {
            let share = exchanges.failure_rate + exchanges.slow_call_rate;
            exchanges.calls > 0 && share >= connects.failure_rate
        }
    };
    if is_exchanges {
        format!("{bad}/{}e", exchanges.calls)
    } else {
        format!("{}/{}c", connects.failures, connects.calls)
    }
}

fn p99(row: &Row) -> String {
    match (row.response_latency_us.p99, row.connect_latency_us.p99) {
        (None, Some(connect)) => format!("({})", micros(Some(connect))),
        (response, _) => micros(response),
    }
}

fn state(row: &Row) -> (&'static str, &'static str) {
    match row.state {
        State::Open => ("open", RED),
        State::ForcedOpen => ("forced open", RED),
        State::HalfOpen => ("half-open", YELLOW),
        State::ForcedClosed => ("forced closed", MAGENTA),
        State::Closed if row.bypassed_for_safety => ("bypassed", MAGENTA),
        State::Closed => ("closed", ""),
    }
}

fn joined(line: &[Cell; 8], widths: &[usize; 8], style: Style) -> String {
    let mut text = String::new();
    for (at, (cell, &width)) in line.iter().zip(widths).enumerate() {
        let cut = shorten_left(&cell.text, width);
        let padded = if cell.right {
            format!("{cut:>width$}")
        } else {
            format!("{cut:<width$}")
        };
        if at > 0 {
            text.push_str(&" ".repeat(GAP));
        }
        text.push_str(&style.paint(cell.colour, &padded));
    }
    text.push('\n');
    text
}

/// `connects: consecutive_failures 5 >= 5`, `exchanges: failure_rate 0.60 >= 0.50`, `manual`; empty
/// for none.
pub fn reason(reason: &Reason) -> String {
    let kind = reason.kind;
    let (value, threshold) = (reason.value, reason.threshold);
    let why = match kind {
        ReasonKind::None => String::new(),
        ReasonKind::Manual | ReasonKind::ProbeFailed => kind.to_string(),
        ReasonKind::ConsecutiveFailures => format!("{kind} {value:.0} >= {threshold:.0}"),
        ReasonKind::FailureRate | ReasonKind::SlowCallRate => {
            format!("{kind} {value:.2} >= {threshold:.2}")
        }
    };
    match reason.window {
        Window::None => why,
        window => format!("{window}: {why}"),
    }
}

/// All there is to know about one row.
pub fn detail(text: &mut String, row: &Row, style: Style) {
    let (state, colour) = state(row);
    let state = format!("{state} for {}", running(row.state_age_ms));
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
    line("name", row.name.as_deref().map(clean).unwrap_or_default());
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
    line("retries", retries(&row.retry));
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
            "it should be open, and all pass: so many endpoints of {} refuse already (max_open_share)",
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

/// What was told of retries; empty: none.
fn retries(retry: &Retry) -> String {
    if retry.retries == 0 {
        return String::new();
    }
    format!(
        "{} ({:.0} % of the attempts), {:.2} attempts an operation, {:.0} left in the budget",
        count(retry.retries),
        retry.ratio * 100.0,
        retry.amplification,
        retry.budget_tokens
    )
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
    probe
        .into_iter()
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
