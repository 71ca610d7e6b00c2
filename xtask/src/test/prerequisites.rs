//! What the kernel must offer before a privileged test makes sense.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};

/// Checks the running system; the error names everything that is missing and what to do.
///
/// # Errors
/// When something is missing.
pub fn check() -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").context("read /proc/self/mountinfo")?;
    let mut problems = Vec::new();
    if !has_cgroup2(&mounts) {
        problems.push(
            "no cgroup v2 is mounted: as root, `mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 \
             none /sys/fs/cgroup/unified`, or boot with systemd.unified_cgroup_hierarchy=1",
        );
    }
    if !Path::new("/sys/kernel/btf/vmlinux").exists() {
        problems.push(
            "the kernel has no BTF (/sys/kernel/btf/vmlinux): it must be built with \
             CONFIG_DEBUG_INFO_BTF, as those of the distributions are",
        );
    }
    if !Path::new("/proc/sys/kernel/unprivileged_bpf_disabled").exists() {
        problems.push("the kernel has no bpf system call (CONFIG_BPF_SYSCALL)");
    }
    if !problems.is_empty() {
        bail!("the tests cannot run here:\n  {}", problems.join("\n  "));
    }
    Ok(())
}

/// Whether a cgroup v2 tree is among the mounts (proc_pid_mountinfo(5): the type follows " - ").
fn has_cgroup2(mountinfo: &str) -> bool {
    mountinfo
        .lines()
        .filter_map(|line| line.split_once(" - "))
        .any(|(_, tail)| tail.split(' ').next() == Some("cgroup2"))
}

#[cfg(test)]
mod tests {
    use super::has_cgroup2;

    #[test]
    fn cgroup2_is_found_wherever_it_is_mounted() {
        let hybrid = "30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
                      31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:1 - cgroup2 none rw\n";
        assert!(has_cgroup2(hybrid));
        assert!(!has_cgroup2(
            "30 25 0:26 / /cgroup2 rw - cgroup cgroup2 rw,cpu\n"
        ));
    }
}
