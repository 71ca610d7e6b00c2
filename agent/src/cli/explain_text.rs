//! `explain` for people. Pure: from an explanation to text.

use std::fmt::Write as _;

use super::{
    detail,
    table::{self, Style},
    units::{clean, exact},
};
use crate::control::api::{
    Candidate, ExplainedRow, Explanation, Fit, Limits, Mode, Probe, Setting, SettingSource, State,
};

/// Policies that do not match: so many are named, the others counted. `--json` has all.
const MISSES: usize = 10;

/// Columns of the names in the first block, as in `status DESTINATION`.
const NAME: usize = 15;

/// The whole text.
pub fn text(explanation: &Explanation, style: Style) -> String {
    let mut text = String::new();
    let caller = match &explanation.workload {
        Some(workload) => format!("called by {}", clean(workload)),
        None => "whoever calls it; with --pid or --cgroup: as that workload calls it".to_owned(),
    };
    let _ = writeln!(text, "{}, {caller}", clean(&explanation.destination));
    heading(&mut text, explanation, style);
    candidates(&mut text, &explanation.candidates, style);
    settings(&mut text, explanation, style);
    rows(&mut text, explanation, style);
    text
}

fn heading(text: &mut String, explanation: &Explanation, style: Style) {
    let mut line = |name: &str, value: &str| {
        let _ = write!(text, "  {name:<width$}", width = NAME - 2);
        wrapped(text, value, NAME, style.width);
    };
    let file = explanation.file.as_deref();
    if !explanation.addresses.is_empty() {
        line("addresses", &clean(&explanation.addresses.join(", ")));
    }
    if !explanation.names.is_empty() {
        line("names", &clean(&explanation.names.join(", ")));
    }
    line("policy", &clean(&explanation.why));
    line(
        "file",
        &file.map_or("none: the built-in configuration".to_owned(), clean),
    );
    line(
        "protected",
        &match &explanation.protected {
            None => "no".to_owned(),
            Some(guard) => format!(
                "by {} ({}): it is counted, never refused, and no timeout is set",
                clean(&guard.by),
                place(guard.line)
            ),
        },
    );
    if explanation.mode == Mode::Observe {
        line(
            "mode",
            "observe: everything is decided and counted, nothing is refused",
        );
    }
    if let Some(paused) = &explanation.paused {
        let said = format!(
            "since {} UTC by {}: no verdict and no timeout is enforced",
            paused.since.short(),
            clean(&paused.by)
        );
        line("PAUSED", &said);
    }
    for manual in &explanation.manual {
        let (what, who) = table::order(manual);
        line("by hand", &format!("{what}; {who}"));
    }
}

fn candidates(text: &mut String, candidates: &[Candidate], style: Style) {
    text.push_str("\nPolicies, the one that applies first\n");
    let widest = candidates
        .iter()
        .map(|candidate| candidate.policy.chars().count())
        .max()
        .unwrap_or_default()
        .min(24);
    let mut misses = 0;
    for candidate in candidates {
        if candidate.fit == Fit::NoMatch {
            misses += 1;
            if misses > MISSES {
                continue;
            }
        }
        let fit = match candidate.fit {
            Fit::Applies => "applies",
            Fit::Loses => "loses",
            Fit::NoMatch => "no match",
        };
        let name = clean(&candidate.policy);
        let _ = write!(text, "  {fit:<8}  {name:<widest$}  ");
        let mut why = clean(&candidate.why);
        if let Some(line) = candidate.line {
            let _ = write!(why, " (line {line})");
        }
        wrapped(text, &why, 14 + widest, style.width);
    }
    if misses > MISSES {
        let _ = writeln!(text, "  and {} more that do not match", misses - MISSES);
    }
}

fn settings(text: &mut String, explanation: &Explanation, style: Style) {
    let _ = writeln!(text, "\nSettings of {}", clean(&explanation.policy));
    let settings = &explanation.settings;
    let width = |of: fn(&Setting) -> &str| {
        let lengths = settings.iter().map(|setting| of(setting).chars().count());
        lengths.max().unwrap_or_default()
    };
    let (keys, values) = (width(|s| &s.key), width(|s| &s.value).min(24));
    for setting in settings {
        let _ = write!(
            text,
            "  {:<keys$}  {:<values$}  ",
            setting.key,
            clean(&setting.value)
        );
        let mut from = match setting.source {
            SettingSource::Policy => format!("the policy, {}", place(setting.line)),
            SettingSource::Defaults => format!("[defaults], {}", place(setting.line)),
            SettingSource::BuiltIn => "built in".to_owned(),
        };
        if let Some(inert) = &setting.inert {
            let _ = write!(from, "; no effect: {inert}");
        }
        wrapped(text, &from, 6 + keys + values, style.width);
    }
}

fn rows(text: &mut String, explanation: &Explanation, style: Style) {
    text.push('\n');
    if explanation.rows.is_empty() {
        text.push_str("No connect seen yet, so there is no breaker.\n");
    }
    for explained in &explanation.rows {
        detail::detail(text, &explained.row, style);
        let mut line = |name: &str, value: &str| {
            let _ = write!(text, "  {name:<width$}", width = NAME - 2);
            wrapped(text, value, NAME, style.width);
        };
        if explained.why != explanation.why {
            line("because", &clean(&explained.why));
        }
        if let Some(workload) = &explained.opened_by {
            let workload = clean(workload);
            let shared = "whose breaker this one shares (scope = \"node\")";
            // While it is half-open, whoever has the probe leads.
            let name = match explained.row.state {
                State::HalfOpen => "led by",
                _ => "opened by",
            };
            line(name, &format!("{workload}, {shared}"));
        }
        let waited = |ms: Option<u64>| ms.map_or("never".to_owned(), exact);
        let (connect, exchange) = (explained.gave_up_connect_ms, explained.gave_up_exchange_ms);
        line(
            "gave up",
            &format!(
                "counts as a failure after {} of a connect, {} of an exchange",
                waited(connect),
                waited(exchange)
            ),
        );
        line("connect now", &now(explanation, explained));
    }
}

/// What would become of a connect.
fn now(explanation: &Explanation, explained: &ExplainedRow) -> String {
    let errno = explanation
        .settings
        .iter()
        .find(|setting| setting.key == "breaker.errno")
        .filter(|_| explained.row.policy == explanation.policy)
        .map_or("the policy's errno", |setting| &setting.value);
    let refused = match explained.row.state {
        State::Closed if explained.row.ramp_ends_in_ms.is_some() => format!(
            "passes, or is refused with {errno} if it is one of a crowd: the breaker has just closed"
        ),
        State::Closed | State::ForcedClosed => match full(&explained.row.limits) {
            Some(full) => format!("is refused with {errno}: {full}"),
            None => return "passes".to_owned(),
        },
        State::Open | State::ForcedOpen => format!("is refused with {errno}"),
        State::HalfOpen => match (explained.row.probe, &explained.opened_by) {
            (Some(Probe::TakenElsewhere), _) => {
                format!("is refused with {errno}: the probe is another workload's")
            }
            (Some(Probe::Free), Some(_)) => format!(
                "passes as the probe, unless another workload's connect is first: then it is refused \
                 with {errno}"
            ),
            (Some(Probe::Free), None) => "passes as a probe".to_owned(),
            _ => format!("passes if a probe slot is free, else is refused with {errno}"),
        },
    };
    if explanation.paused.is_some() {
        return "passes, because of the pause".to_owned();
    }
    if explanation.protected.is_some() {
        return "passes, because the destination is protected".to_owned();
    }
    match explanation.mode {
        Mode::Enforce => refused,
        Mode::Observe => format!("passes; in enforce mode it {refused}"),
    }
}

/// Which limit lets nobody pass just now.
fn full(limits: &Limits) -> Option<String> {
    let limits = limits.each();
    let (word, full) = limits
        .iter()
        .find(|(_, of)| of.limit.is_some_and(|limit| of.used >= limit))?;
    Some(format!("{} of {} {word}", full.used, full.limit?))
}

fn place(line: Option<u64>) -> String {
    line.map_or("built in".to_owned(), |line| format!("line {line}"))
}

/// Writes `value` in lines that end before `width`, each but the first indented. Words that are
/// longer are not cut: they are names.
fn wrapped(text: &mut String, value: &str, indent: usize, width: usize) {
    let mut column = indent;
    for (at, word) in value.split(' ').enumerate() {
        let length = word.chars().count();
        if at > 0 {
            if column + 1 + length > width {
                let _ = write!(text, "\n{:indent$}", "");
                column = indent;
            } else {
                text.push(' ');
                column += 1;
            }
        }
        text.push_str(word);
        column += length;
    }
    text.push('\n');
}
