//! `status` for people: the table.
//!
//! Pure: from an envelope to text.

use std::fmt::Write as _;

use super::units::{age, clean, count, micros, number, running, short_count, shorten_left};
use crate::control::api::{
    ManualState, Mode, Reason, ReasonKind, Row, State, StatusEnvelope, Timestamp, Window, Windows,
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

pub(super) const RED: &str = "31";
pub(super) const GREEN: &str = "32";
pub(super) const YELLOW: &str = "33";
const MAGENTA: &str = "35";
pub(super) const LOUD: &str = "1;37;41";

/// Fewest columns for a workload.
pub(super) const WORKLOAD_MIN: usize = 12;
pub(super) const GAP: usize = 2;

/// Orders that are listed.
const ORDERS: usize = 10;

impl Style {
    pub(super) fn paint(self, code: &str, text: &str) -> String {
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

pub(super) fn heading(envelope: &StatusEnvelope, style: Style) -> String {
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
    for name in &envelope.unresolved {
        let _ = writeln!(
            text,
            "{} names {}, which cannot be looked up ({}): it holds for no address of it but those that \
             programs are told.",
            clean(&name.named_by),
            clean(&name.name),
            clean(&name.error)
        );
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

/// One field of a table.
pub(super) struct Cell {
    /// What it says, harmless for a terminal.
    pub text: String,
    /// Set to the right, as numbers are.
    pub right: bool,
    /// ANSI code; empty: none.
    pub colour: &'static str,
}

pub(super) fn left(text: impl Into<String>) -> Cell {
    Cell {
        text: text.into(),
        right: false,
        colour: "",
    }
}

pub(super) fn right(text: impl Into<String>) -> Cell {
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
pub(super) fn window(row: &Row) -> String {
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

pub(super) fn p99(row: &Row) -> String {
    match (row.response_latency_us.p99, row.connect_latency_us.p99) {
        (None, Some(connect)) => format!("({})", micros(Some(connect))),
        (response, _) => micros(response),
    }
}

/// The word for a row's state, and its colour.
pub(super) fn state(row: &Row) -> (&'static str, &'static str) {
    match row.state {
        State::Open => ("open", RED),
        State::ForcedOpen => ("forced open", RED),
        State::HalfOpen if row.waits_for_call => ("half-open, waiting", ""),
        State::HalfOpen => ("half-open", YELLOW),
        State::ForcedClosed => ("forced closed", MAGENTA),
        State::Closed if row.bypassed_for_safety => ("bypassed", MAGENTA),
        State::Closed if row.breaker_off => ("breaker off", ""),
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
