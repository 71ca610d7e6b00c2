//! What an agent says about itself: from what it knows, and what it finds when it looks again.

use std::{fs, path::Path, path::PathBuf};

use super::{fail, hooks, is_well, machine, memory, ok, some, warn, worst_first};
use crate::{
    control::api::{
        Check, DoctorAgent, DoctorMemory, DoctorReport, DoctorRows, Health, Mode, Paused,
        Timestamp, Unresolved,
    },
    kernel::{events::printable, programs::OwnProgram},
    sockets::abort,
};

/// Two rounds of the self-test may be late before somebody should look.
const PROVEN_WITHIN_MS: u64 = 90_000;
/// Share of the rows from which on the idlest are given up, per cent.
const FULL_PERCENT: u64 = 90;
/// Share of the memory limit from which on it is said, per cent.
const MEMORY_PERCENT: u64 = 90;

/// What the agent knows, for whoever looks into the rest.
#[derive(Clone, Debug)]
pub struct Facts {
    /// As configured.
    pub mode: Mode,
    /// The pause in force.
    pub paused: Option<Paused>,
    /// Since it was ready, ms.
    pub uptime_ms: u64,
    /// Of the event thread and of enforcement.
    pub health: Health,
    /// Since the last heartbeat, ms.
    pub heartbeat_ms: u64,
    /// The event thread has real-time priority.
    pub is_prompt: bool,
    /// The watched control groups.
    pub watched: Vec<hooks::Watched>,
    /// What hangs on each.
    pub own: Vec<OwnProgram>,
    /// Where the v2 hierarchy is mounted.
    pub mount: PathBuf,
    /// The configuration file.
    pub config_file: Option<PathBuf>,
    /// Why the file is not what is in force: since when, and the whole message.
    pub config_problem: Option<(Timestamp, String)>,
    /// What is allowed but probably not meant.
    pub config_warnings: Vec<String>,
    /// Names that cannot be looked up.
    pub unresolved: Vec<Unresolved>,
    /// Where the state is kept.
    pub state_dir: PathBuf,
    /// Events without room.
    pub lost_events: u64,
    /// The table.
    pub rows: DoctorRows,
    /// Connections that were there at the start.
    pub adopted: u64,
    /// The kernel lets us visit sockets at a stop.
    pub can_settle: bool,
    /// The kernel lets us visit sockets at a start.
    pub can_adopt: bool,
    /// A policy has connections ended from outside.
    pub ends_connections: bool,
    /// The process that is taking over.
    pub heir: Option<i32>,
}

/// Looks into everything; takes some ms, and more on machines with very many control groups.
pub fn report(facts: &Facts) -> DoctorReport {
    let found = hooks::look(&facts.watched, &facts.own, &facts.mount);
    let (memory, used) = memory::look(&facts.mount);
    let mut checks = judged(facts);
    checks.extend(found.checks);
    checks.extend([
        memory_check(&memory, used),
        state_dir(&facts.state_dir),
        sockets(facts.ends_connections),
    ]);
    // That it could not have started without these does not say that they are the same still.
    for needed in [
        machine::kernel(),
        machine::capabilities(),
        machine::cgroup_v2(),
    ] {
        checks.push(needed.unwrap_or_else(|error| {
            let what = machine::sentence(&error.to_string());
            fail("kernel", what, "restart the agent where that is there")
        }));
    }
    checks.extend(machine::extras(facts.can_settle, facts.can_adopt));
    checks.extend([machine::tick(), machine::lockdown(), machine::mptcp()]);
    checks.push(not_covered(&facts.watched, &facts.mount));
    worst_first(&mut checks);
    DoctorReport {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ok: is_well(&checks),
        agent: Some(DoctorAgent {
            pid: std::process::id(),
            mode: facts.mode,
            paused: facts.paused.clone(),
            uptime_ms: facts.uptime_ms,
            ready: facts.health.ready,
            heartbeat_ms_ago: facts.heartbeat_ms,
            cgroups: facts
                .watched
                .iter()
                .map(|group| shown(&group.path))
                .collect(),
            config_file: facts.config_file.as_deref().map(shown),
            state_dir: shown(&facts.state_dir),
            lost_events: facts.lost_events,
            rows: facts.rows,
            memory,
            adopted: facts.adopted,
        }),
        checks,
        hooks: found.reports,
    }
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().chars().map(printable).collect()
}

/// What follows from what the agent knows.
fn judged(facts: &Facts) -> Vec<Check> {
    let mut checks = vec![agent(facts), event_thread(facts)];
    checks.extend(cgroups(&facts.watched));
    checks.extend([
        self_test(facts),
        configuration(facts),
        names(&facts.unresolved),
    ]);
    checks.extend([
        rows(&facts.rows),
        events(facts.lost_events),
        priority(facts.is_prompt),
    ]);
    checks.push(adopted(facts));
    if let Some(pid) = facts.heir {
        checks.push(warn(
            "takeover",
            format!("Another agent (process {pid}) is taking over from this one."),
            "ask again in a moment, which asks the new one",
        ));
    }
    checks
}

fn agent(facts: &Facts) -> Check {
    if let Some(paused) = &facts.paused {
        let end = match paused.until {
            Some(until) => format!("until {} UTC", until.short()),
            None => "until somebody ends it".to_owned(),
        };
        return fail(
            "mode",
            format!(
                "Paused since {} UTC by {}, {end}: no verdict and no timeout is enforced; counting goes on.",
                paused.since.short(),
                paused.by
            ),
            "backstop resume",
        );
    }
    match facts.mode {
        Mode::Enforce => ok("mode", "Verdicts and timeouts are enforced (mode enforce)."),
        Mode::Observe => warn(
            "mode",
            "Observe mode: everything is decided and counted, nothing is refused or timed out.",
            "when the counts under `would_reject` are as they should be: mode = \"enforce\", or --mode enforce",
        ),
    }
}

fn event_thread(facts: &Facts) -> Check {
    match facts.health.alive {
        true => ok("event_thread", "The event thread is alive."),
        false => fail(
            "event_thread",
            format!(
                "The event thread was last seen {} ms ago: after 3,000 ms the kernel refuses nothing more.",
                facts.heartbeat_ms
            ),
            "if that goes on, restart the agent; is its control group frozen, or its CPU limit too low?",
        ),
    }
}

fn cgroups(watched: &[hooks::Watched]) -> Vec<Check> {
    let gone: Vec<String> = watched
        .iter()
        .filter(|group| !group.is_attached)
        .map(|group| shown(&group.path))
        .collect();
    let what = match gone.as_slice() {
        [] => {
            let names: Vec<String> = watched.iter().map(|group| shown(&group.path)).collect();
            return vec![ok(
                "cgroups",
                format!("Watched, with all below: {}.", some(&names)),
            )];
        }
        [one] => format!("The watched control group {one} is not there or cannot be attached to."),
        many => format!(
            "{} watched control groups are not there: {}.",
            many.len(),
            some(many)
        ),
    };
    let remedy = "they are attached again within a second when they return; if they have another name now, \
                  restart with --cgroup";
    // Where nothing is left, nothing is protected.
    vec![match gone.len() == watched.len() {
        true => fail("cgroups", format!("{what} Nothing is watched."), remedy),
        false => warn("cgroups", what, remedy),
    }]
}

fn self_test(facts: &Facts) -> Check {
    const NAME: &str = "self_test";
    if !facts.health.ready {
        return fail(
            NAME,
            machine::sentence(&facts.health.reason),
            "see `other_programs` and `hooks` here, the agent's log, and \"Is it enforcing?\" in docs/OPERATING.md; \
             the next self-test is within 30 s",
        );
    }
    let there = || facts.watched.iter().filter(|group| group.is_attached);
    let late: Vec<String> = there()
        .filter(|group| group.verified_ms.is_none_or(|ms| ms > PROVEN_WITHIN_MS))
        .map(|group| shown(&group.path))
        .collect();
    if !late.is_empty() {
        return warn(
            NAME,
            format!(
                "No self-test has come through in the last 90 s for {}.",
                some(&late)
            ),
            "it runs every 30 s; if the group was frozen, busy or has just returned, ask again in a minute",
        );
    }
    let oldest = there()
        .filter_map(|group| group.verified_ms)
        .max()
        .unwrap_or(0);
    ok(
        NAME,
        match facts.paused {
            Some(_) => format!(
                "A connect of our own was seen {} s ago; refusals are not tried in a pause.",
                oldest / 1000
            ),
            None if facts.mode == Mode::Observe => {
                format!(
                    "A connect of our own was seen and judged {} s ago.",
                    oldest / 1000
                )
            }
            None => format!(
                "A connect of our own was refused as it should {} s ago.",
                oldest / 1000
            ),
        },
    )
}

fn configuration(facts: &Facts) -> Check {
    const NAME: &str = "configuration";
    let file = facts.config_file.as_deref().map(shown);
    if let Some((since, problem)) = &facts.config_problem {
        let file = file.as_deref().unwrap_or("FILE");
        return warn(
            NAME,
            format!(
                "Since {} UTC an older configuration is in force: {problem}",
                since.short()
            ),
            format!(
                "correct it (`backstop check {file}` lists every problem); it is read again when it changes"
            ),
        );
    }
    if !facts.config_warnings.is_empty() {
        return warn(
            NAME,
            machine::sentence(&facts.config_warnings.join("; ")),
            "if it is meant so, nothing",
        );
    }
    ok(
        NAME,
        match file {
            Some(file) => format!("{file} is in force."),
            None => "The built-in configuration is in force.".to_owned(),
        },
    )
}

fn names(unresolved: &[Unresolved]) -> Check {
    if unresolved.is_empty() {
        return ok("names", "Every name in the configuration is known.");
    }
    let each: Vec<String> = unresolved
        .iter()
        .map(|name| format!("{} ({}, named by {})", name.name, name.error, name.named_by))
        .collect();
    warn(
        "names",
        format!(
            "Cannot be looked up: {}. What is said of them holds for no address but those that programs are told.",
            some(&each)
        ),
        "correct them, or see why this host's resolver does not know them",
    )
}

fn rows(rows: &DoctorRows) -> Check {
    const NAME: &str = "rows";
    let DoctorRows {
        in_use,
        most,
        evicted,
        other_attempts,
        histograms,
        histograms_most,
    } = *rows;
    let use_ = format!(
        "{in_use} of {most} rows are in use, {evicted} were given up to make room; {histograms} of \
         {histograms_most} latency histograms are lent."
    );
    let raise = "raise agent.max_destinations and restart; `backstop status` shows who takes them";
    if other_attempts > 0 {
        let what = format!(
            "{other_attempts} connects found no row: they are counted together as `other`, with no breaker and \
             no timeout. {use_}"
        );
        return warn(NAME, what, raise);
    }
    if evicted > 0 || in_use * 100 >= most * FULL_PERCENT {
        return warn(NAME, use_, raise);
    }
    ok(NAME, use_)
}

fn events(lost: u64) -> Check {
    match lost {
        0 => ok("events", "No event was lost."),
        lost => warn(
            "events",
            format!(
                "{lost} events found no room since the start: lines may be missing in `backstop events`; \
                 counters and breakers do not depend on them."
            ),
            "raise agent.ring_bytes and restart, if it goes on",
        ),
    }
}

fn priority(is_prompt: bool) -> Check {
    match is_prompt {
        true => ok(
            "priority",
            "The event thread has real-time priority, with a cap.",
        ),
        false => warn(
            "priority",
            "The event thread has no real-time priority: on a busy machine verdicts come some ms later.",
            "give the agent CAP_SYS_NICE and an RLIMIT_RTTIME without a hard limit",
        ),
    }
}

fn adopted(facts: &Facts) -> Check {
    const NAME: &str = "adopted";
    ok(
        NAME,
        match facts.adopted {
            0 => "No connection that existed at the start is followed.".to_owned(),
            count => format!(
                "{count} connections that existed at the start are followed since; their connects were not \
                 counted."
            ),
        },
    )
}

fn memory_check(memory: &DoctorMemory, used: Option<u64>) -> Check {
    const NAME: &str = "memory";
    let size = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), memory::size);
    let what = format!(
        "{} resident, mapped arrays included; the kernel's maps and programs {}.",
        size(memory.resident),
        size(memory.kernel)
    );
    match (memory.limit, used) {
        (Some(limit), Some(used))
            if used.saturating_mul(100) >= limit.saturating_mul(MEMORY_PERCENT) =>
        {
            warn(
                NAME,
                format!(
                    "{what} Its control group uses {} of {}.",
                    memory::size(used),
                    memory::size(limit)
                ),
                "raise the limit (memory.max), or lower agent.max_destinations: what is killed protects nothing",
            )
        }
        _ => ok(NAME, what),
    }
}

fn state_dir(directory: &Path) -> Check {
    const NAME: &str = "state_dir";
    // A name of its own: the agent itself may be writing.
    let probe = directory.join(".doctor");
    let tried = fs::write(&probe, b"").and_then(|()| fs::remove_file(&probe));
    match tried {
        Ok(()) => ok(NAME, format!("{} is writable.", shown(directory))),
        Err(error) => warn(
            NAME,
            format!(
                "{} is not writable ({error}): pauses, orders and open breakers will not survive a restart.",
                shown(directory)
            ),
            "make room or make it writable; see `df` and the mount's options",
        ),
    }
}

/// Whether connections can be ended from outside; tried on a listening socket of our own.
fn sockets(wanted: bool) -> Check {
    const NAME: &str = "sockets";
    match abort::support() {
        Ok(()) => ok(NAME, "Connections can be ended from outside (sock_diag)."),
        Err(error) => {
            let what = machine::sentence(&error.to_string());
            let remedy = "use a kernel with CONFIG_INET_DIAG_DESTROY and the module tcp_diag";
            match wanted {
                true => fail(
                    NAME,
                    format!(
                        "{what} So no read, write or stall timeout, deadline or `on_open` works."
                    ),
                    remedy,
                ),
                false => warn(NAME, format!("{what} No policy asks for it now."), remedy),
            }
        }
    }
}

/// What no setting can bring (docs/LIMITS.md has all of it).
fn not_covered(watched: &[hooks::Watched], mount: &Path) -> Check {
    let root = watched.iter().any(|group| group.path == mount);
    let outside = match root {
        true => "",
        false => "processes outside the watched control groups; ",
    };
    ok(
        "not_covered",
        format!(
            "Not covered, whatever is configured: {outside}UDP (QUIC, HTTP/3, DNS) and unix sockets; connections \
             that existed at the start and could not be told; sockets made before their process came into a \
             watched group; the kernel's own sockets (NFS, CIFS)."
        ),
    )
}

#[cfg(test)]
mod tests;
