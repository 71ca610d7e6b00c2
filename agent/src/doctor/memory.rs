//! Memory of the agent, of the kernel's objects that belong to it, and what it may take.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::control::api::DoctorMemory;

/// What this process takes and may take, and how much of the limit is used.
pub fn look(mount: &Path) -> (DoctorMemory, Option<u64>) {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let (limit, used) = bound(mount).unzip();
    let memory = DoctorMemory {
        resident: resident(&status),
        kernel: kernel(),
        limit,
    };
    (memory, used)
}

/// `VmRSS:    1234 kB` (fs/proc/task_mmu.c).
fn resident(status: &str) -> Option<u64> {
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib * 1024)
}

/// Maps and programs charged to whoever has them open: `memlock` of their descriptors.
fn kernel() -> Option<u64> {
    let descriptors = fs::read_dir("/proc/self/fdinfo").ok()?;
    let texts = descriptors
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path()).ok());
    Some(texts.filter_map(|text| memlock(&text)).sum())
}

fn memlock(fdinfo: &str) -> Option<u64> {
    let value = fdinfo
        .lines()
        .find_map(|line| line.strip_prefix("memlock:"))?;
    value.trim().parse().ok()
}

/// The nearest limit at or above the process's control group, and what is used of it; none where nothing is
/// bounded, or the v2 hierarchy does not account memory.
fn bound(mount: &Path) -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    let below = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let group: PathBuf = mount.join(below);
    let number =
        |path: PathBuf| -> Option<u64> { fs::read_to_string(path).ok()?.trim().parse().ok() };
    group
        .ancestors()
        .take_while(|path| path.starts_with(mount))
        .find_map(|path| {
            Some((
                number(path.join("memory.max"))?,
                number(path.join("memory.current"))?,
            ))
        })
}

/// `512 KiB`, `85.3 MiB`.
pub fn size(bytes: u64) -> String {
    const MIB: u64 = 1024 * 1024;
    match bytes {
        0..MIB => format!("{} KiB", bytes / 1024),
        _ => format!("{}.{} MiB", bytes / MIB, bytes % MIB * 10 / MIB),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_proc_says() {
        assert_eq!(
            resident("VmHWM:\t 9 kB\nVmRSS:\t     250 kB\n"),
            Some(256_000)
        );
        assert_eq!(resident(""), None);
        assert_eq!(
            memlock("pos:\t0\nmap_type:\t2\nmemlock:\t4096\n"),
            Some(4096)
        );
        assert_eq!(memlock("pos:\t0\n"), None);
    }

    #[test]
    fn sizes() {
        assert_eq!(size(512 * 1024), "512 KiB");
        assert_eq!(size(85 * 1024 * 1024 + 400_000), "85.3 MiB");
    }

    #[test]
    fn this_process_takes_something() {
        let (memory, _) = look(Path::new("/no/such/mount"));
        assert!(memory.resident.is_some_and(|bytes| bytes > 100_000));
        assert!(memory.kernel.is_some() && memory.limit.is_none());
    }
}
