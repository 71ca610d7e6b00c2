//! Events as lines for people.

use super::{
    table,
    units::{clean, count, exact, micros, number, running},
};
use crate::control::api::{Cause, Event, EventRecord, Mode, OrderAction, Timestamp};

/// One line, without its end: time, kind, destination, what happened, and whose it is.
pub fn line(record: &EventRecord) -> String {
    let what = what(record);
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
        Event::Order {
            destination,
            workload,
            ..
        } => (
            Some(destination),
            Some(workload.as_deref().unwrap_or("all workloads")),
        ),
        Event::Config { .. } | Event::Loss { .. } => (None, None),
    }
}

/// What an operator has to do with a change of state.
fn because(cause: Cause, by: Option<&str>) -> String {
    let what = match cause {
        Cause::Trip => "manual: trip",
        Cause::HoldClosed => "manual: hold-closed",
        Cause::Reset => "reset",
        Cause::TimeOver => "the order's time is over",
        Cause::NotCovered => "the order's name has this address no longer",
        Cause::NewOwner => "the address belongs to another name now",
    };
    match by {
        Some(by) => format!("{what} by {by}"),
        None => what.to_owned(),
    }
}

/// What became of an operator's order.
fn order(
    action: OrderAction,
    until: Option<Timestamp>,
    rows: u64,
    orders: u64,
    by: &str,
    time: Timestamp,
) -> String {
    let rows = number(rows, "row");
    let length = until.map_or_else(String::new, |until| {
        let ms = time.until(until).as_millis();
        format!(" for {}", running(u64::try_from(ms).unwrap_or(u64::MAX)))
    });
    match action {
        OrderAction::Trip => format!("to be refused{length} by {by}: {rows}"),
        OrderAction::HoldClosed => format!("to be held closed{length} by {by}: {rows}"),
        OrderAction::Reset => {
            let taken = number(orders, "order");
            format!("reset by {by}, {taken} taken back: {rows}")
        }
        OrderAction::TimeOver => match until {
            Some(until) => format!(
                "the time of the order by {by} was over at {} UTC, while no agent ran: {rows}",
                until.short()
            ),
            None => format!("the time of the order by {by} is over: {rows}"),
        },
    }
}

/// Says when something was only counted.
fn would(mode: Mode) -> &'static str {
    match mode {
        Mode::Enforce => "",
        Mode::Observe => "would have: ",
    }
}

fn what(record: &EventRecord) -> String {
    match &record.event {
        Event::Breaker {
            from,
            to,
            reason,
            cause,
            by,
            ..
        } => {
            let why = match cause {
                Some(cause) => because(*cause, by.as_deref()),
                None => table::reason(reason),
            };
            format!("{from} -> {to}  {why}").trim_end().to_owned()
        }
        Event::Order {
            action,
            until,
            rows,
            orders,
            by,
            ..
        } => order(*action, *until, *rows, *orders, by, record.time),
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
                "{}{} refused by {reason}{}",
                would(*mode),
                count(*calls),
                process(comm, *pid)
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
            count: calls,
            hold_ms,
            pid,
            comm,
            ..
        } => {
            let hold = hold_ms.map_or_else(String::new, |ms| format!(" for {}", exact(ms)));
            let process = process(comm, *pid);
            format!("{} held{hold} by {reason}{process}", count(*calls))
        }
        Event::RetryBudget {
            exhausted,
            ratio,
            budget_tokens,
            mode,
            ..
        } => format!(
            "{}{}: retries are {:.0} % of attempts, {budget_tokens:.0} more allowed",
            would(*mode),
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

/// Whose call it was, if that is known.
fn process(comm: &str, pid: u32) -> String {
    match pid {
        0 => String::new(),
        pid => format!(", {comm}[{pid}]"),
    }
}

/// Of a message with several problems the first: an event is a line.
fn first_line(message: &str) -> String {
    let more = message.lines().count().saturating_sub(1);
    match (message.lines().next(), more) {
        (Some(first), 0) => first.to_owned(),
        (Some(first), more) => {
            let stays = message.rsplit_once("; ").map_or("", |(_, stays)| stays);
            format!("{first}, and {more} more, which `backstop check FILE` lists; {stays}")
        }
        (None, _) => String::new(),
    }
}
