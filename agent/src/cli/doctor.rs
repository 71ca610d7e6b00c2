//! `doctor`: asks the agent whether this node is really protected; without one, looks at what a start of it
//! would need.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
};

use super::{
    EXIT_DONE, EXIT_FAILED, EXIT_KERNEL, EXIT_UNREACHABLE, Failure,
    output::Output,
    table::{GREEN, RED, Style, YELLOW},
    units::{age, clean, number, running},
};
use crate::{
    control::{
        api::{
            Check, CheckStatus, DoctorReport, HookReport, Mode, OtherProgram, Position, Timestamp,
        },
        client::{Client, ClientError},
    },
    doctor::{self, machine},
    kernel::support::Unsupported,
};

/// How the check begins that finds out nothing.
const MAY_NOT_ASK: &str = "You may not ask the agent on";

/// Shows what was found; returns the exit code.
pub async fn doctor(client: &Client, json: bool, out: &mut Output<'_>) -> Result<u8, Failure> {
    let (body, report, code) = match client.get("/v1/doctor").await {
        Ok(body) => {
            let report: DoctorReport = serde_json::from_slice(&body)?;
            let code = if report.ok { EXIT_DONE } else { EXIT_FAILED };
            (body.to_vec(), report, code)
        }
        Err(error) if error.exit_code() == EXIT_UNREACHABLE => {
            let (report, code) = without_agent(&error);
            (serde_json::to_vec(&report)?, report, code)
        }
        Err(ClientError::Refused { status: 404, .. }) => {
            return Err(Failure::Said(
                "the agent is of a version that knows no doctor: restart it with this one"
                    .to_owned(),
            ));
        }
        Err(error) => return Err(error.into()),
    };
    if json {
        // As it came: keys of a newer agent are not lost.
        out.write_all(&body)?;
        writeln!(out)?;
        return Ok(code);
    }
    let style = Style {
        colour: out.colour,
        width: out.width,
        now: Timestamp::now(),
    };
    out.write_all(text(&report, style).as_bytes())?;
    Ok(code)
}

/// What this command finds by itself.
fn without_agent(error: &ClientError) -> (DoctorReport, u8) {
    let machine = machine::look();
    let code = exit_code(error, machine.lacks.as_ref());
    let mut checks = vec![no_agent(error, machine.lacks.is_some())];
    checks.extend(machine.checks);
    doctor::worst_first(&mut checks);
    let report = DoctorReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ok: false,
        agent: None,
        checks,
        hooks: Vec::new(),
    };
    (report, code)
}

pub(super) fn no_agent(error: &ClientError, could_not_run: bool) -> Check {
    let (what, remedy) = match error {
        ClientError::Unreachable { socket, source } if is_forbidden(error) => {
            let what = format!(
                "{MAY_NOT_ASK} {} ({source}), so whether this node is protected is not known.",
                socket.display()
            );
            return doctor::fail("agent", what, "the socket belongs to root: ask with sudo");
        }
        ClientError::Unreachable { socket, source } => {
            let what = format!("No agent answers on {} ({source}).", socket.display());
            let remedy = "start it: systemctl start backstop, or backstop run; or name its socket with --socket or \
                 BACKSTOP_SOCKET";
            (what, remedy)
        }
        error => (
            machine::sentence(&error.to_string()),
            "see whether its process is stopped (then kill -CONT PID) or overloaded, and its log; 3 s after its \
             last sign of life every connect passes",
        ),
    };
    let remedy = match could_not_run {
        true => "first see what `backstop run` needs, below",
        false => remedy,
    };
    let what = format!("{what} As far as that one goes, nothing on this node is protected.");
    doctor::fail("agent", what, remedy)
}

/// Whether an agent may be there, and only root may ask it.
fn is_forbidden(error: &ClientError) -> bool {
    matches!(
        error,
        ClientError::Unreachable { source, .. } if source.kind() == io::ErrorKind::PermissionDenied
    )
}

/// What the kernel lacks is worse than that no agent runs: none could. But who may not even ask for one is
/// told that.
pub(super) fn exit_code(error: &ClientError, lacks: Option<&Unsupported>) -> u8 {
    match lacks {
        Some(Unsupported::Rights { .. }) if is_forbidden(error) => EXIT_UNREACHABLE,
        Some(_) => EXIT_KERNEL,
        None => EXIT_UNREACHABLE,
    }
}

/// For people: a line on the whole, a line a check with the remedy of each problem below it, and the hooks.
pub(super) fn text(report: &DoctorReport, style: Style) -> String {
    let mut text = heading(report, style);
    text.push('\n');
    let width = report
        .checks
        .iter()
        .map(|check| check.name.chars().count())
        .max()
        .unwrap_or(0);
    for check in &report.checks {
        let (word, colour) = match check.status {
            CheckStatus::Fail => ("FAIL", RED),
            CheckStatus::Warn => ("warn", YELLOW),
            CheckStatus::Skip => ("skip", ""),
            CheckStatus::Ok => ("ok", ""),
        };
        let word = style.paint(colour, &format!("{word:<4}"));
        let _ = writeln!(
            text,
            "{word}  {:<width$}  {}",
            clean(&check.name),
            clean(&check.what)
        );
        if let Some(remedy) = &check.remedy {
            let _ = writeln!(text, "{:6}{:width$}  -> {}", "", "", clean(remedy));
        }
    }
    let mut cgroup = None;
    for hook in &report.hooks {
        if cgroup != Some(&hook.cgroup) {
            let _ = writeln!(text, "\nHooks of {}:", clean(&hook.cgroup));
            cgroup = Some(&hook.cgroup);
        }
        let _ = writeln!(text, "  {:<12}  {}", clean(&hook.hook), state(hook));
        for line in others(hook) {
            let _ = writeln!(text, "  {:12}  {line}", "");
        }
    }
    text
}

fn heading(report: &DoctorReport, style: Style) -> String {
    let count = |status: CheckStatus| {
        let of = |check: &&Check| check.status == status;
        report.checks.iter().filter(of).count() as u64
    };
    let (problems, warnings) = (count(CheckStatus::Fail), count(CheckStatus::Warn));
    let who = match &report.agent {
        Some(agent) => format!(
            "backstop {}  process {}  up {}: ",
            clean(&report.version),
            agent.pid,
            running(agent.uptime_ms)
        ),
        None => String::new(),
    };
    let observes = report
        .agent
        .as_ref()
        .is_some_and(|agent| agent.mode == Mode::Observe);
    let (verdict, colour) = match (report.ok, observes) {
        (true, false) => ("this node is protected".to_owned(), GREEN),
        (true, true) => (
            "this node is observed, and nothing is refused".to_owned(),
            YELLOW,
        ),
        (false, _) => {
            let verdict = match is_unknown(report) {
                true => "NOT KNOWN whether this node is protected",
                false => "NOT PROTECTED",
            };
            (format!("{verdict}, {}", number(problems, "problem")), RED)
        }
    };
    let warnings = match warnings {
        0 => String::new(),
        warnings => format!(", {}", number(warnings, "warning")),
    };
    let verdict = style.paint(colour, &verdict);
    format!("{who}{verdict}{warnings}\n")
}

/// Whether all that is known is that one may not ask.
fn is_unknown(report: &DoctorReport) -> bool {
    let forbidden = |check: &Check| check.name == "agent" && check.what.starts_with(MAY_NOT_ASK);
    report.agent.is_none() && report.checks.iter().any(forbidden)
}

fn state(hook: &HookReport) -> String {
    match (hook.attached, hook.verified_ms_ago) {
        (false, _) => "NOT attached".to_owned(),
        (true, Some(ms)) => format!("attached, proven {} ago", age(ms)),
        (true, None) => "attached".to_owned(),
    }
}

/// Lines on the others of one hook: each of the watched group and those above, and how many there are below.
fn others(hook: &HookReport) -> Vec<String> {
    let below = |other: &&OtherProgram| {
        other.cgroup != hook.cgroup && other.cgroup.starts_with(&format!("{}/", hook.cgroup))
    };
    let mut lines: Vec<String> = hook
        .others
        .iter()
        .filter(|other| !below(other))
        .map(line)
        .collect();
    let count = hook.others.iter().filter(below).count();
    if count > 0 {
        lines.push(format!(
            "{} on groups below",
            number(count as u64, "program")
        ));
    }
    lines
}

fn line(other: &OtherProgram) -> String {
    let place = match other.position {
        Position::Before => "before ours",
        Position::After => "after ours",
    };
    let name = match clean(&other.name) {
        name if name.is_empty() => "a program without a name".to_owned(),
        name => name,
    };
    let flags = match other.attach_flags.is_empty() {
        true => String::new(),
        false => format!(", {}", clean(&other.attach_flags.join(", "))),
    };
    format!(
        "{place}: {name} (id {}, on {}{flags})",
        other.id,
        clean(&other.cgroup)
    )
}
