//! Events as lines for people.

use super::{
    table,
    units::{clean, count, exact, micros},
};
use crate::control::api::{Event, EventRecord, Mode};

/// One line, without its end: time, kind, destination, what happened, and whose it is.
pub fn line(record: &EventRecord) -> String {
    let what = what(&record.event);
    let (destination, workload) = whose(&record.event);
    let mut text = format!("{}  {:<12}  ", record.time.short(), record.event.kind());
    if let Some(destination) = destination {
        text.push_str(&format!("{:<21}  ", clean(destination)));
    }
    text.push_str(&clean(&what));
    if let Some(workload) = workload {
        text.push_str(&format!("  ({})", clean(workload)));
    }
    text
}

fn whose(event: &Event) -> (Option<&str>, Option<&str>) {
    match event {
        Event::Breaker {
            destination,
            workload,
            ..
        }
        | Event::Timeout {
            destination,
            workload,
            ..
        }
        | Event::Rejected {
            destination,
            workload,
            ..
        }
        | Event::Drained {
            destination,
            workload,
            ..
        }
        | Event::NonIdempotent {
            destination,
            workload,
            ..
        }
        | Event::Held {
            destination,
            workload,
            ..
        }
        | Event::RetryBudget {
            destination,
            workload,
            ..
        }
        | Event::Failure {
            destination,
            workload,
            ..
        }
        | Event::Calls {
            destination,
            workload,
            ..
        } => (Some(destination), Some(workload)),
        Event::Safety {
            destination,
            workload,
            ..
        } => (destination.as_deref(), workload.as_deref()),
        Event::Redial { destination, .. } => (Some(destination), None),
        Event::Config { .. } | Event::Loss { .. } => (None, None),
    }
}

/// Says when something was only counted.
fn would(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "",
        Mode::Observe => "would have: ",
    }
}

fn what(event: &Event) -> String {
    match event {
        Event::Breaker {
            from, to, reason, ..
        } => format!("{from} -> {to}  {}", table::reason(reason))
            .trim_end()
            .to_owned(),
        Event::Timeout {
            which,
            value_ms,
            elapsed_ms,
            pid,
            comm,
            mode,
            ..
        } => format!(
            "{}{which} timeout of {} after {}, {comm}[{pid}]",
            would(*mode),
            exact(*value_ms),
            exact(*elapsed_ms),
        ),
        Event::Rejected {
            reason,
            count: calls,
            pid,
            comm,
            mode,
            ..
        } => {
            format!(
                "{}{} refused by {reason}, {comm}[{pid}]",
                would(*mode),
                count(*calls)
            )
        }
        Event::Drained {
            on_open,
            connections,
            ..
        } => format!(
            "{} connections ended by on_open = {on_open}",
            count(*connections)
        ),
        Event::NonIdempotent {
            method,
            refused,
            count: requests,
            pid,
            comm,
            mode,
            ..
        } => format!(
            "{}{} repeated after a failure ({method}), {}, {comm}[{pid}]",
            if *refused { would(*mode) } else { "" },
            count(*requests),
            if *refused { "refused" } else { "let pass" },
        ),
        Event::Held {
            reason,
            hold_ms,
            pid,
            comm,
            ..
        } => {
            format!("{reason}: held for {}, {comm}[{pid}]", exact(*hold_ms))
        }
        Event::RetryBudget {
            exhausted,
            ratio,
            budget_tokens,
            ..
        } => format!(
            "{}: retries are {:.0} % of attempts, {budget_tokens:.0} more allowed",
            if *exhausted {
                "exhausted"
            } else {
                "available again"
            },
            ratio * 100.0
        ),
        Event::Config {
            action,
            message,
            by,
        } => {
            let message = first_line(message);
            match by {
                Some(by) => format!("{action}: {message} (by {by})"),
                None => format!("{action}: {message}"),
            }
        }
        Event::Safety {
            action, message, ..
        } => format!("{action}: {message}"),
        Event::Loss { lost, message } => format!("{} lost: {message}", count(*lost)),
        Event::Redial { answered, .. } => if *answered {
            "the agent's dial was answered"
        } else {
            "the agent's dial was not answered: the server is gone"
        }
        .to_owned(),
        Event::Failure {
            window,
            outcome,
            seq,
            latency_us,
            ..
        } => {
            format!(
                "{window} #{seq} {outcome} after {}",
                micros(Some(*latency_us))
            )
        }
        Event::Calls {
            window,
            from_seq,
            to_seq,
            latency_us,
            slow,
            ..
        } => format!(
            "{window} #{from_seq} to #{to_seq} good, {slow} slow, p50 {}, p99 {}, max {}",
            micros(latency_us.p50),
            micros(latency_us.p99),
            micros(latency_us.max),
        ),
    }
}

/// Of a message with several problems the first: an event is a line.
fn first_line(message: &str) -> String {
    let more = message.lines().count().saturating_sub(1);
    match (message.lines().next(), more) {
        (Some(first), 0) => first.to_owned(),
        (Some(first), more) => {
            format!("{first} (and {more} more: `backstop check FILE` lists them)")
        }
        (None, _) => String::new(),
    }
}
