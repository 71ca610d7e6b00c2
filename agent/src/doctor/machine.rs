//! What this machine must have, with or without an agent: the checks that `run` makes, one by one.

use std::fs;

use super::{fail, ok, skip, warn};
use crate::{
    control::api::Check,
    kernel::{
        Kernel, LoadOptions, cgroup, clock,
        support::{self, Unsupported},
    },
};

/// What was found without an agent.
pub struct Machine {
    /// The checks.
    pub checks: Vec<Check>,
    /// Why `run` would end here with exit code 4: the first reason, as there.
    pub lacks: Option<Unsupported>,
}

/// Looks at what a start of the agent needs, up to loading the programs (which takes some 0.5 s of processor
/// time; nothing is attached).
pub fn look() -> Machine {
    let mut machine = Machine {
        checks: Vec::new(),
        lacks: None,
    };
    // In the order of `run`, so that the first reason is the same.
    machine.needs("kernel", kernel());
    machine.needs("capabilities", capabilities());
    machine.needs("pid_namespace", pid_namespace());
    machine.needs("cgroup_v2", cgroup_v2());
    if machine.lacks.is_none() {
        machine.programs();
    } else {
        machine.checks.push(skip(
            "programs",
            "Not tried: the kernel is asked to take the programs once the rest is there.",
        ));
    }
    machine.checks.extend([tick(), lockdown(), mptcp()]);
    machine
}

impl Machine {
    fn needs(&mut self, name: &str, found: Result<Check, Unsupported>) {
        let check = found.unwrap_or_else(|error| {
            let check = fail(name, sentence(&error.to_string()), remedy(&error));
            self.lacks.get_or_insert(error);
            check
        });
        self.checks.push(check);
    }

    /// Has the kernel check the very programs that `run` attaches.
    fn programs(&mut self) {
        const NAME: &str = "programs";
        // The programs are the same whatever the sizes of the maps.
        let small = LoadOptions {
            max_destinations: 16,
            ring_bytes: 65_536,
            window_calls: 32,
            histograms: 2,
            policies: 2,
        };
        let check = match Kernel::load(small) {
            Ok((kernel, _)) => match extras(kernel.can_settle(), kernel.can_adopt()) {
                None => ok(
                    NAME,
                    "The kernel takes every program, and refuses with an errno.",
                ),
                Some(extra) => extra,
            },
            Err(error) => match error.downcast::<Unsupported>() {
                Ok(error) => return self.needs(NAME, Err(error)),
                Err(error) => fail(
                    NAME,
                    sentence(&format!("the programs could not be loaded: {error:#}")),
                    "see what the kernel says; `backstop run` would end with exit code 1",
                ),
            },
        };
        self.checks.push(check);
    }
}

/// What the kernel cannot do and enforcement does without.
pub fn extras(can_settle: bool, can_adopt: bool) -> Option<Check> {
    let what = match (can_settle, can_adopt) {
        (true, true) => return None,
        (false, true) => {
            "The kernel does not let us visit sockets at a stop: connects that are pending then keep their \
             connect timeout."
        }
        (true, false) => {
            "The kernel does not let us visit sockets at a start: connections that exist already are not \
             followed."
        }
        (false, false) => {
            "The kernel does not let us visit sockets: connections that exist at a start are not followed, and \
             connects that are pending at a stop keep their connect timeout."
        }
    };
    let remedy = "nothing is needed for enforcement; the agent's log says at its start why";
    Some(warn("programs", what, remedy))
}

fn remedy(error: &Unsupported) -> &'static str {
    match error {
        Unsupported::Kernel { .. } => "run Backstop on a node with kernel 6.1 or later",
        Unsupported::Btf { .. } => {
            "use a kernel built with CONFIG_DEBUG_INFO_BTF=y, and see that /sys is mounted"
        }
        Unsupported::NoCgroup2 => {
            "mount one (mount -t cgroup2 none /sys/fs/cgroup/unified), or boot with \
             systemd.unified_cgroup_hierarchy=1"
        }
        Unsupported::Rights { .. } => "run it as root, or with these capabilities",
        Unsupported::PidNamespace => {
            "run it in the host's pid namespace (hostPID: true in Kubernetes, --pid=host for a container)"
        }
        Unsupported::Program { .. } => {
            "run Backstop on a node with kernel 6.1 or later; on one that has it, the kernel's words above \
             say what it lacks"
        }
    }
}

/// With a capital at its begin and a full stop at its end.
pub fn sentence(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|c| c.to_uppercase().to_string());
    let mut sentence = first.unwrap_or_default() + chars.as_str();
    if !sentence.ends_with('.') {
        sentence.push('.');
    }
    sentence
}

/// The kernel's version.
///
/// # Errors
/// When it is too old.
pub fn kernel() -> Result<Check, Unsupported> {
    support::version_is_known()?;
    let release = support::release();
    Ok(if support::is_at_least(6, 1) {
        ok(
            "kernel",
            format!("Linux {release}; 6.1 or later is needed."),
        )
    } else {
        warn(
            "kernel",
            format!(
                "Linux {release} is newer than 5.18, which is needed, and older than 6.1, the oldest tested."
            ),
            "use a node with kernel 6.1 or later",
        )
    })
}

/// Capabilities of this process.
///
/// # Errors
/// When one is missing without which nothing works.
pub fn capabilities() -> Result<Check, Unsupported> {
    support::rights()?;
    let missing = support::missing_extras();
    let without: Vec<&str> = missing
        .iter()
        .map(|name| match *name {
            "SYS_PTRACE" => {
                "SYS_PTRACE is missing: network namespaces of other users' processes cannot be found, so \
                 that nothing is dialled there and the cooldown alone brings traffic back."
            }
            _ => "SYS_NICE is missing: no real-time priority, and slower reactions on a busy machine.",
        })
        .collect();
    Ok(match without.is_empty() {
        true => ok("capabilities", "Every capability that is of use is there."),
        false => warn(
            "capabilities",
            without.join(" "),
            format!("give the agent {}", missing.join(" and ")),
        ),
    })
}

fn pid_namespace() -> Result<Check, Unsupported> {
    support::pid_namespace()?;
    Ok(ok(
        "pid_namespace",
        "Every process of this machine can be seen.",
    ))
}

/// The v2 hierarchy.
///
/// # Errors
/// When none is mounted.
pub fn cgroup_v2() -> Result<Check, Unsupported> {
    let mount = cgroup::mount_point()?;
    Ok(ok(
        "cgroup_v2",
        format!("The v2 hierarchy is mounted at {}.", mount.display()),
    ))
}

/// The length of the kernel's tick, by which connect timeouts are laid.
pub fn tick() -> Check {
    described(clock::tick_ns())
}

fn described(tick_ns: u64) -> Check {
    const SECOND_NS: u64 = 1_000_000_000;
    // Other rates than these are rare, and work as well (rule 22 asks only that it is known).
    if tick_ns == 0 || tick_ns > SECOND_NS / 10 {
        return warn(
            "tick",
            format!("The kernel says that its tick is {tick_ns} ns, which cannot be."),
            "connect timeouts may be off; measure one against a silent address",
        );
    }
    let hz = (SECOND_NS + tick_ns / 2) / tick_ns;
    let (ms, hundredths) = (tick_ns / 1_000_000, tick_ns / 10_000 % 100);
    let length = match hundredths {
        0 => format!("{ms}"),
        _ => format!("{ms}.{hundredths:02}"),
    };
    ok(
        "tick",
        format!("The kernel ticks every {length} ms (HZ {hz})."),
    )
}

/// Whether the kernel is locked down so far that programs may not read its memory.
pub fn lockdown() -> Check {
    let text = fs::read_to_string("/sys/kernel/security/lockdown").ok();
    locked_down(text.as_deref())
}

/// The file is `none [integrity] confidentiality`, with the one in force in brackets (security/lockdown/lockdown.c).
fn locked_down(text: Option<&str>) -> Check {
    const NAME: &str = "lockdown";
    let in_force = text.and_then(|text| text.split_once('[')?.1.split_once(']'));
    match in_force.map(|(word, _)| word) {
        None => ok(NAME, "The kernel is not locked down, as far as it says."),
        Some("confidentiality") => warn(
            NAME,
            "The kernel is locked down for confidentiality: programs may not read its memory.",
            "boot with lockdown=integrity or none, if the programs are refused",
        ),
        Some(word) => ok(
            NAME,
            format!("The kernel's lockdown is \"{word}\", which does not matter."),
        ),
    }
}

/// MPTCP sockets are counted and never refused: whether there are any.
pub fn mptcp() -> Check {
    let enabled = fs::read_to_string("/proc/sys/net/mptcp/enabled").ok();
    let is_on = enabled.is_some_and(|text| text.trim() != "0");
    let counters = fs::read_to_string("/proc/net/netstat").unwrap_or_default();
    multipath(is_on, mptcp_connects(&counters))
}

fn multipath(is_on: bool, connects: u64) -> Check {
    const NAME: &str = "mptcp";
    match (is_on, connects) {
        (false, _) => ok(
            NAME,
            "MPTCP is switched off here: every TCP socket can be refused.",
        ),
        (true, 0) => ok(
            NAME,
            "MPTCP sockets would be counted and never refused; in this network namespace nobody has connected \
             by one.",
        ),
        (true, connects) => warn(
            NAME,
            format!(
                "MPTCP is in use: {connects} connects in this network namespace since it was made. Such \
                 sockets are counted, and neither refused nor timed out."
            ),
            "have those programs use plain TCP, or switch it off: sysctl net.mptcp.enabled=0",
        ),
    }
}

/// SYNs with the option that were sent (net/mptcp/mib.c, `MPCapableSYNTX`): names on one line, values on
/// the next.
fn mptcp_connects(netstat: &str) -> u64 {
    let mut lines = netstat
        .lines()
        .filter_map(|line| line.strip_prefix("MPTcpExt: "));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else {
        return 0;
    };
    let mut both = names.split(' ').zip(values.split(' '));
    let found = both.find(|(name, _)| *name == "MPCapableSYNTX");
    found.and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::api::CheckStatus;

    #[test]
    fn ticks() {
        for (ns, said) in [
            (4_000_000, "every 4 ms (HZ 250)"),
            (1_000_000, "every 1 ms (HZ 1000)"),
            (3_333_333, "every 3.33 ms (HZ 300)"),
            (10_000_000, "every 10 ms (HZ 100)"),
        ] {
            let check = described(ns);
            assert_eq!(check.status, CheckStatus::Ok);
            assert!(check.what.contains(said), "{}", check.what);
        }
        assert_eq!(described(0).status, CheckStatus::Warn);
        assert_eq!(described(1_000_000_000).status, CheckStatus::Warn);
    }

    #[test]
    fn lockdowns() {
        let status = |text| locked_down(text).status;
        assert_eq!(status(None), CheckStatus::Ok);
        assert_eq!(
            status(Some("[none] integrity confidentiality\n")),
            CheckStatus::Ok
        );
        assert_eq!(
            status(Some("none [integrity] confidentiality\n")),
            CheckStatus::Ok
        );
        assert_eq!(
            status(Some("none integrity [confidentiality]\n")),
            CheckStatus::Warn
        );
        assert_eq!(status(Some("odd")), CheckStatus::Ok);
    }

    #[test]
    fn mptcp_in_use() {
        let netstat = "TcpExt: A B\nTcpExt: 1 2\nMPTcpExt: MPCapableSYNRX MPCapableSYNTX X\nMPTcpExt: 5 7 9\n";
        assert_eq!(mptcp_connects(netstat), 7);
        assert_eq!(mptcp_connects("TcpExt: A\nTcpExt: 1\n"), 0);
        assert_eq!(mptcp_connects("MPTcpExt: MPCapableSYNTX\n"), 0);
        assert_eq!(multipath(true, 7).status, CheckStatus::Warn);
        assert_eq!(multipath(true, 0).status, CheckStatus::Ok);
        assert_eq!(multipath(false, 7).status, CheckStatus::Ok);
    }

    #[test]
    fn sentences() {
        assert_eq!(
            sentence("kernel 5.10 is too old"),
            "Kernel 5.10 is too old."
        );
        assert_eq!(sentence("No."), "No.");
        assert_eq!(sentence(""), ".");
    }

    /// What is said of each reason is what `run` says of it.
    #[test]
    fn a_reason_is_said_as_run_says_it() {
        let mut machine = Machine {
            checks: Vec::new(),
            lacks: None,
        };
        let old = || Unsupported::Kernel {
            release: "5.10.0".to_owned(),
        };
        machine.needs("kernel", Err(old()));
        machine.needs("cgroup_v2", Err(Unsupported::NoCgroup2));
        assert_eq!(machine.checks[0].what, sentence(&old().to_string()));
        assert!(machine.checks.iter().all(|check| check.remedy.is_some()));
        assert!(
            matches!(machine.lacks, Some(Unsupported::Kernel { .. })),
            "the first"
        );
    }
}
