//! What hangs on the hooks of the watched control groups, of those above and of those below.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

use super::{fail, list, locks, ok, some, warn};
use crate::{
    control::api::{Check, HookReport, OtherProgram, Position},
    kernel::{
        events::printable,
        programs::OwnProgram,
        query::{self, OnHook, ProgramNames},
    },
};

/// Control groups below a watched one that are looked at: each takes some 15 us.
const MOST_BELOW: usize = 10_000;
/// Other programs that are told of one hook.
const MOST_OTHERS: usize = 100;
/// Hooks whose later programs may change what connect() returns (`bpf_prog_run_array_cg` in
/// kernel/bpf/cgroup.c).
const DECIDE: [&str; 2] = ["connect4", "connect6"];
/// The hook on which all programs share one set of callbacks of a socket.
const FOLLOW: &str = "sock_ops";

/// A watched control group, as the agent knows it.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The directory.
    pub path: PathBuf,
    /// The agent has attached its programs there.
    pub is_attached: bool,
    /// Since the self-test last proved connect4 and sock_ops, ms.
    pub verified_ms: Option<u64>,
    /// The same of connect6.
    pub verified6_ms: Option<u64>,
}

/// Where another agent is, seen from a watched group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// On the same group.
    Same,
    /// On one that holds it.
    Above,
    /// On one inside it.
    Below,
}

/// Another agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OtherAgent {
    /// The group that it watches.
    pub cgroup: PathBuf,
    /// The one of ours that this concerns.
    pub ours: PathBuf,
    /// How they lie.
    pub place: Where,
    /// Its process, if it can be told.
    pub pid: Option<u32>,
}

impl OtherAgent {
    /// What that means, in a sentence.
    pub fn said(&self) -> String {
        let who = match self.pid {
            Some(pid) => format!("another agent (process {pid})"),
            None => "another agent".to_owned(),
        };
        let (theirs, ours) = (shown(&self.cgroup), shown(&self.ours));
        match self.place {
            Where::Same => format!(
                "{who} is attached to cgroup {theirs}, too: both count every call, and what either refuses is \
                 refused"
            ),
            Where::Above => format!(
                "{who} is attached to cgroup {theirs}, which holds {ours}: both count every call made in \
                 {ours}, and what either refuses is refused"
            ),
            Where::Below => format!(
                "{who} is attached to cgroup {theirs}, which is inside {ours}: both count every call made in \
                 {theirs}, and what either refuses is refused"
            ),
        }
    }
}

/// What is to be done about another agent.
pub const ONE_IS_ENOUGH: &str =
    "end one of them, or replace it with `backstop run --takeover` on its socket";

/// What was found.
#[derive(Default)]
pub struct Found {
    /// Every hook of every watched group.
    pub reports: Vec<HookReport>,
    /// Other agents.
    pub agents: Vec<OtherAgent>,
    /// The checks about all that.
    pub checks: Vec<Check>,
}

/// Looks at every watched group.
pub fn look(watched: &[Watched], own: &[OwnProgram], mount: &Path) -> Found {
    let mut names = ProgramNames::default();
    let own_ids: HashSet<u32> = own.iter().filter_map(|program| program.id).collect();
    let mut found = Found::default();
    let (mut missing, mut unread) = (Vec::new(), Vec::new());
    let mut is_cut = false;
    for group in watched {
        let around = Around::of(&group.path, mount, own, &own_ids);
        is_cut |= around.is_cut;
        found
            .agents
            .extend(around.agents(own, &own_ids, &mut names));
        let mut gone = Vec::new();
        for (index, program) in own.iter().enumerate() {
            let verified = match program.hook {
                "connect4" | FOLLOW => group.verified_ms,
                "connect6" => group.verified6_ms,
                _ => None,
            };
            let runs = match group.is_attached {
                true => query::effective(&group.path, program.attach_type),
                false => Ok(OnHook::default()),
            };
            let (runs, is_read) = match runs {
                Ok(runs) => (runs, program.id.is_some()),
                Err(error) => {
                    let hook = program.hook;
                    unread.push(format!("{hook} of {}: {error}", shown(&group.path)));
                    (OnHook::default(), false)
                }
            };
            let is_ours = |id: &u32| program.id == Some(*id);
            let at = runs.ids.iter().position(is_ours);
            if group.is_attached && is_read && at.is_none() {
                gone.push(program.hook.to_owned());
            }
            found.reports.push(HookReport {
                cgroup: shown(&group.path),
                hook: program.hook.to_owned(),
                attached: at.is_some(),
                verified_ms_ago: verified.filter(|_| at.is_some()),
                others: around.others((index, program), &runs, at, &own_ids, &mut names),
            });
        }
        if !gone.is_empty() {
            missing.push((shown(&group.path), gone));
        }
    }
    found.checks = checks(&found, own, watched, &missing, &unread, is_cut);
    found
}

/// Other agents on the same groups, on those above and on those below.
pub fn agents(watched: &[PathBuf], own: &[OwnProgram], mount: &Path) -> Vec<OtherAgent> {
    let mut names = ProgramNames::default();
    let own_ids: HashSet<u32> = own.iter().filter_map(|program| program.id).collect();
    watched
        .iter()
        .flat_map(|path| Around::of(path, mount, own, &own_ids).agents(own, &own_ids, &mut names))
        .collect()
}

/// Groups around a watched one that have other programs on our hooks.
struct Around {
    ours: PathBuf,
    /// Those below, then the watched one, then those above: as their programs run.
    groups: Vec<(Where, PathBuf, Vec<OnHook>)>,
    is_cut: bool,
}

impl Around {
    fn of(path: &Path, mount: &Path, own: &[OwnProgram], own_ids: &HashSet<u32>) -> Self {
        let mut groups = Vec::new();
        let mut add = |place, group: &Path| {
            let on = |program: &OwnProgram| {
                // Gone meanwhile: nothing hangs on it.
                query::attached(group, program.attach_type).unwrap_or_default()
            };
            let hooks: Vec<OnHook> = own.iter().map(on).collect();
            let is_foreign = |hook: &OnHook| hook.ids.iter().any(|id| !own_ids.contains(id));
            if hooks.iter().any(is_foreign) {
                groups.push((place, group.to_owned(), hooks));
            }
        };
        let (below, is_cut) = below(path);
        for group in &below {
            add(Where::Below, group);
        }
        add(Where::Same, path);
        let above = path.ancestors().skip(1);
        for group in above.take_while(|group| group.starts_with(mount)) {
            add(Where::Above, group);
        }
        Self {
            ours: path.to_owned(),
            groups,
            is_cut,
        }
    }

    /// Agents are known by what they call their programs: one that judges and one that follows.
    fn agents(
        &self,
        own: &[OwnProgram],
        own_ids: &HashSet<u32>,
        names: &mut ProgramNames,
    ) -> Vec<OtherAgent> {
        let mut agents = Vec::new();
        for (place, group, hooks) in &self.groups {
            let mut is_there = |hook: &str| {
                own.iter().zip(hooks).any(|(program, on)| {
                    let foreign = on.ids.iter().filter(|id| !own_ids.contains(id));
                    program.hook == hook
                        && foreign
                            .into_iter()
                            .any(|id| names.name(*id) == program.name)
                })
            };
            if is_there(DECIDE[0]) && is_there(FOLLOW) {
                let own_pid = std::process::id();
                agents.push(OtherAgent {
                    cgroup: group.clone(),
                    ours: self.ours.clone(),
                    place: *place,
                    pid: locks::holder(group).filter(|pid| *pid != own_pid),
                });
            }
        }
        agents
    }

    /// The other programs on a hook (`index` in our list); `runs` are those that run for the watched group, ours
    /// at `at`.
    fn others(
        &self,
        (index, program): (usize, &OwnProgram),
        runs: &OnHook,
        at: Option<usize>,
        own_ids: &HashSet<u32>,
        names: &mut ProgramNames,
    ) -> Vec<OtherProgram> {
        let mut others = Vec::new();
        let mut add = |id: u32, position, place: Where, group: &Path, on: &OnHook| {
            let is_later = position == Position::After;
            others.push(OtherProgram {
                id,
                name: names.name(id).to_owned(),
                position,
                cgroup: shown(group),
                attach_flags: on.flags(),
                can_change_verdict: is_later
                    && place != Where::Below
                    && DECIDE.contains(&program.hook),
            });
        };
        for (place, group, hooks) in &self.groups {
            let Some(on) = hooks.get(index) else { continue };
            for id in on.ids.iter().filter(|id| !own_ids.contains(id)) {
                let position = match (place, at) {
                    // They are run first (`compute_effective_progs`).
                    (Where::Below, _) => Position::Before,
                    (_, Some(at)) => match runs.ids.iter().position(|of| of == id) {
                        Some(their) if their < at => Position::Before,
                        Some(_) => Position::After,
                        // Overridden by another: it does not run here.
                        None => continue,
                    },
                    // Ours is not there.
                    (_, None) => Position::Before,
                };
                add(*id, position, *place, group, on);
            }
        }
        others.truncate(MOST_OTHERS);
        others
    }
}

fn shown(path: &Path) -> String {
    path.to_string_lossy().chars().map(printable).collect()
}

/// Groups below this one, parents first, and whether there are more than are told.
fn below(path: &Path) -> (Vec<PathBuf>, bool) {
    let mut found = Vec::new();
    let mut stack = vec![path.to_owned()];
    while let Some(path) = stack.pop() {
        for entry in fs::read_dir(&path).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            if found.len() == MOST_BELOW {
                return (found, true);
            }
            found.push(entry.path());
            stack.push(entry.path());
        }
    }
    (found, false)
}

fn checks(
    found: &Found,
    own: &[OwnProgram],
    watched: &[Watched],
    missing: &[(String, Vec<String>)],
    unread: &[String],
    is_cut: bool,
) -> Vec<Check> {
    let attached = watched.iter().filter(|group| group.is_attached).count();
    let mut checks = Vec::new();
    if !unread.is_empty() {
        checks.push(warn(
            "hooks",
            format!("The kernel does not say what hangs on {}.", some(unread)),
            "see whether the control group is still there, and the agent's log",
        ));
    }
    for (group, hooks) in missing {
        checks.push(fail(
            "hooks",
            format!(
                "Our programs do not hang on {} of {group} any more: something has taken them off.",
                list(hooks)
            ),
            "restart the agent, which attaches them again, and find out who removes them",
        ));
    }
    if missing.is_empty() && unread.is_empty() && attached > 0 {
        checks.push(ok(
            "hooks",
            format!(
                "The kernel has our programs on all {} hooks of {}.",
                own.len(),
                match attached {
                    1 => "the watched control group".to_owned(),
                    count => format!("{count} watched control groups"),
                }
            ),
        ));
    }
    checks.extend(others(found, own));
    if is_cut {
        checks.push(warn(
            "other_programs",
            format!("There are more than {MOST_BELOW} control groups below a watched one: the others were not looked at."),
            "`bpftool cgroup tree` shows all of them",
        ));
    }
    for agent in &found.agents {
        let what = super::machine::sentence(&agent.said());
        checks.push(warn("other_agents", what, ONE_IS_ENOUGH));
    }
    checks
}

/// What other programs are able to do to ours; those of other agents are told elsewhere.
fn others(found: &Found, own: &[OwnProgram]) -> Vec<Check> {
    const NAME: &str = "other_programs";
    let is_agents = |hook: &HookReport, other: &OtherProgram| {
        let called = own.iter().find(|program| program.hook == hook.hook);
        called.is_some_and(|program| program.name == other.name)
            && found
                .agents
                .iter()
                .any(|agent| shown(&agent.cgroup) == other.cgroup)
    };
    let all = found.reports.iter().flat_map(|hook| {
        let others = hook.others.iter().map(move |other| (hook, other));
        others.filter(|(hook, other)| !is_agents(hook, other))
    });
    let (mut later, mut followers, mut count) = (Vec::new(), Vec::new(), 0_usize);
    let mut is_above = false;
    for (hook, other) in all {
        count += 1;
        let name = match other.name.as_str() {
            "" => "a program without a name",
            name => name,
        };
        let said = format!(
            "{name} (id {}, on {} of {})",
            other.id, hook.hook, other.cgroup
        );
        if other.can_change_verdict {
            is_above |= other.cgroup != hook.cgroup;
            later.push(said);
        } else if hook.hook == FOLLOW {
            followers.push(said);
        }
    }
    let mut checks = Vec::new();
    if !later.is_empty() {
        checks.push(warn(
            NAME,
            format!(
                "Behind ours runs {}: it can change the errno of a refusal, undo it, refuse what we let pass, or \
                 send the connect elsewhere.",
                some(&later)
            ),
            match is_above {
                true => {
                    "watch the outer control group instead, or restart the agent after that program was attached, \
                     if it is on the same one; the self-test says if it undoes refusals"
                }
                false => {
                    "restart the agent: of one control group, what was attached last runs last; the self-test \
                     says if it undoes refusals"
                }
            },
        ));
    }
    if !followers.is_empty() {
        checks.push(warn(
            NAME,
            format!(
                "On sock_ops, where all programs share what the kernel tells of a socket, there is {}: if it \
                 sets that, established connections may count as live until they are closed.",
                some(&followers)
            ),
            "`bpftool prog dump xlated id ID` shows whether it calls bpf_sock_ops_cb_flags_set; ask its owner",
        ));
    }
    if checks.is_empty() {
        checks.push(ok(
            NAME,
            match count {
                0 => "Nobody else has a program on our hooks.".to_owned(),
                1 => "One other program is on our hooks; it cannot change a verdict.".to_owned(),
                count => {
                    format!("{count} other programs are on our hooks; none can change a verdict.")
                }
            },
        ));
    }
    checks
}

#[cfg(test)]
mod tests;
