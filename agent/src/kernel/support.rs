//! Whether this machine can do what Backstop needs, said in one sentence with the remedy.

use thiserror::Error;

/// A reason why enforcement is impossible here (exit code 4).
#[derive(Debug, Error)]
pub enum Unsupported {
    /// Older than 5.18, where every refusal would be EPERM.
    #[error(
        "kernel {release} is too old: refusing a connect with an errno needs bpf_set_retval (5.18), \
         and 6.1 is the oldest kernel tested; run Backstop on a node with kernel 6.1 or later"
    )]
    Kernel {
        /// As `uname -r` says.
        release: String,
    },
    /// No type information.
    #[error(
        "the kernel shows no type information at {path} ({cause}); use a kernel built with \
         CONFIG_DEBUG_INFO_BTF=y, and see that /sys is mounted"
    )]
    Btf {
        /// Where it was looked for.
        path: &'static str,
        /// What went wrong.
        cause: String,
    },
    /// No cgroup v2.
    #[error(
        "no cgroup v2 hierarchy is mounted; mount one (mount -t cgroup2 none /sys/fs/cgroup/unified) \
         or boot with systemd.unified_cgroup_hierarchy=1"
    )]
    NoCgroup2,
    /// Rights are missing.
    #[error(
        "not allowed to load kernel programs: run as root, or with the capabilities BPF, PERFMON, \
         NET_ADMIN and SYS_ADMIN (missing: {missing})"
    )]
    Rights {
        /// Names of the missing capabilities.
        missing: String,
    },
    /// In a pid namespace of its own.
    #[error(
        "Backstop sees only the processes of its own pid namespace; run it in the host's \
         (hostPID: true in Kubernetes, --pid=host for a container)"
    )]
    PidNamespace,
    /// The kernel refuses the programs.
    #[error("the kernel refuses the program {program}: {cause}")]
    Program {
        /// Which program, or "object".
        program: String,
        /// The kernel's words.
        cause: String,
    },
}

/// Capabilities without which nothing works: number (include/uapi/linux/capability.h) and name.
const NEEDED: [(u32, &str); 4] = [
    (39, "BPF"),
    (38, "PERFMON"),
    (12, "NET_ADMIN"),
    (21, "SYS_ADMIN"),
];

/// Those without which something works less well (docs/OPERATING.md says what).
const EXTRAS: [(u32, &str); 2] = [(19, "SYS_PTRACE"), (23, "SYS_NICE")];

/// Inode of the initial pid namespace (include/linux/proc_ns.h, `PROC_PID_INIT_INO`).
const INITIAL_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// Checks what can be told before anything is loaded.
///
/// # Errors
/// The first thing that is missing.
pub fn check() -> Result<(), Unsupported> {
    version_is_known()?;
    rights()?;
    pid_namespace()
}

/// The running kernel, as `uname -r` says.
pub fn release() -> String {
    let uname = rustix::system::uname();
    uname.release().to_string_lossy().into_owned()
}

/// Whether the kernel is new enough.
///
/// # Errors
/// [`Unsupported::Kernel`].
pub fn version_is_known() -> Result<(), Unsupported> {
    let release = release();
    if version(&release).is_some_and(|v| v < (5, 18)) {
        return Err(Unsupported::Kernel { release });
    }
    Ok(())
}

/// Whether the kernel is at least of that version; one that says something odd is.
pub fn is_at_least(major: u32, minor: u32) -> bool {
    version(&release()).is_none_or(|v| v >= (major, minor))
}

/// Whether this process has the capabilities without which nothing works.
///
/// # Errors
/// [`Unsupported::Rights`].
pub fn rights() -> Result<(), Unsupported> {
    let missing = missing_capabilities(&own_status(), &NEEDED);
    if missing.is_empty() {
        return Ok(());
    }
    Err(Unsupported::Rights {
        missing: missing.join(", "),
    })
}

/// Capabilities that this process lacks and could do without.
pub fn missing_extras() -> Vec<&'static str> {
    missing_capabilities(&own_status(), &EXTRAS)
}

/// Whether this process lives in the host's pid namespace.
///
/// # Errors
/// [`Unsupported::PidNamespace`].
pub fn pid_namespace() -> Result<(), Unsupported> {
    use std::os::unix::fs::MetadataExt as _;
    if let Ok(namespace) = std::fs::metadata("/proc/self/ns/pid")
        && namespace.ino() != INITIAL_PID_NAMESPACE
    {
        return Err(Unsupported::PidNamespace);
    }
    Ok(())
}

fn own_status() -> String {
    std::fs::read_to_string("/proc/self/status").unwrap_or_default()
}

/// Major and minor version from `uname -r`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn missing_capabilities(status: &str, wanted: &[(u32, &'static str)]) -> Vec<&'static str> {
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    let Some(effective) = effective else {
        return Vec::new();
    };
    wanted
        .iter()
        .filter(|(bit, _)| effective >> bit & 1 == 0)
        .map(|(_, name)| *name)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(version("6.1.0-57-cloud-amd64"), Some((6, 1)));
        assert_eq!(version("5.10.0"), Some((5, 10)));
        assert_eq!(version("6.18.44-fc-v509"), Some((6, 18)));
        assert_eq!(version("weird"), None);
        assert!((5, 18) > (5, 9) && (6, 1) > (5, 18));
    }

    #[test]
    fn capabilities() {
        assert!(missing_capabilities("CapEff:\t000001ffffffffff\n", &NEEDED).is_empty());
        assert_eq!(
            missing_capabilities("CapEff:\t000000c000201000\n", &NEEDED),
            Vec::<&str>::new()
        );
        assert_eq!(
            missing_capabilities("CapEff:\t000000c000201000\n", &EXTRAS),
            ["SYS_PTRACE", "SYS_NICE"]
        );
        assert_eq!(
            missing_capabilities("CapEff:\t0000000000000000\n", &NEEDED),
            ["BPF", "PERFMON", "NET_ADMIN", "SYS_ADMIN"]
        );
    }
}
