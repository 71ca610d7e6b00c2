//! The cgroup v2 tree: where it is mounted, and the paths behind cgroup ids.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::support::Unsupported;

/// The mount point of the cgroup v2 hierarchy. On hybrid hosts it is not /sys/fs/cgroup.
///
/// # Errors
/// When none is mounted.
pub fn mount_point() -> Result<PathBuf, Unsupported> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    find_mount(&mounts).ok_or(Unsupported::NoCgroup2)
}

/// The first cgroup2 mount that shows the whole hierarchy, else the first one.
fn find_mount(mountinfo: &str) -> Option<PathBuf> {
    let mut partial = None;
    for line in mountinfo.lines() {
        let (left, right) = line.split_once(" - ")?;
        if right.split(' ').next() != Some("cgroup2") {
            continue;
        }
        let mut fields = left.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        let point = PathBuf::from(unescape(point));
        if root == "/" {
            return Some(point);
        }
        partial.get_or_insert(point);
    }
    partial
}

/// Where a controller of the v1 hierarchies is mounted.
pub fn find_v1_mount(mountinfo: &str, controller: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let mut right = right.split(' ');
        let (kind, options) = (right.next()?, right.nth(1)?);
        let has = options.split(',').any(|option| option == controller);
        let point = left.split(' ').nth(4)?;
        (kind == "cgroup" && has).then(|| PathBuf::from(unescape(point)))
    })
}

/// Undoes the octal escapes of /proc/PID/mountinfo (fs/proc_namespace.c, `mangle`).
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let code = rest
            .get(at + 1..at + 4)
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                out.push(char::from(code));
                rest = &rest[at + 4..];
            }
            None => {
                out.push('\\');
                rest = &rest[at + 1..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// Names of workloads by cgroup id (the inode of the cgroup's directory).
pub struct Names {
    mount: PathBuf,
    known: HashMap<u64, String>,
    scanned: Option<Instant>,
}

/// A look at the whole tree is not repeated sooner than this, however many cgroups come and go.
const SCAN_EVERY: Duration = Duration::from_secs(1);

impl Names {
    /// For the hierarchy mounted there.
    pub fn new(mount: PathBuf) -> Self {
        Self {
            mount,
            known: HashMap::new(),
            scanned: None,
        }
    }

    /// Where the hierarchy is mounted.
    pub fn mount(&self) -> &Path {
        &self.mount
    }

    /// Path below the mount without leading slash (`/` for the root). `pid` is a process that was
    /// in it. A cgroup that is gone keeps the name it had; one never seen is `cgroup:ID`.
    pub fn name(&mut self, id: u64, pid: u32) -> String {
        if let Some(name) = self.known.get(&id) {
            return name.clone();
        }
        if let Some(name) = self.of_process(pid, id) {
            return self.known.entry(id).or_insert(name).clone();
        }
        if self.scanned.is_some_and(|at| at.elapsed() < SCAN_EVERY) {
            return format!("cgroup:{id}");
        }
        self.scan();
        self.scanned = Some(Instant::now());
        // Remembered even if not found: the id is never used again.
        self.known
            .entry(id)
            .or_insert_with(|| format!("cgroup:{id}"))
            .clone()
    }

    /// Whether there is a control group of this name.
    pub fn exists(&self, workload: &str) -> bool {
        let below = if workload == "/" { "" } else { workload };
        self.mount.join(below).is_dir()
    }

    /// The workload of a process.
    ///
    /// # Errors
    /// See [`of_process`].
    pub fn of_pid(&self, pid: u32) -> Result<String, NoWorkload> {
        of_process(&self.mount, pid)
    }

    /// The name by way of a process, if that is (still) in the cgroup, and if our view of the
    /// hierarchy is the same as the kernel's (not so in a cgroup namespace).
    fn of_process(&self, pid: u32, id: u64) -> Option<String> {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
        let path = self.mount.join(path);
        (fs::metadata(&path).ok()?.ino() == id).then(|| relative(&self.mount, &path))
    }

    /// Whether a name was found, or is known not to exist any more.
    pub fn knows(&self, id: u64) -> bool {
        self.known.contains_key(&id)
    }

    /// Drops names of cgroups that no row belongs to.
    pub fn keep(&mut self, used: impl Fn(u64) -> bool) {
        self.known.retain(|id, _| used(*id));
    }

    fn scan(&mut self) {
        let mount = self.mount.clone();
        let mut stack = vec![mount.clone()];
        while let Some(path) = stack.pop() {
            let Ok(metadata) = fs::metadata(&path) else {
                continue;
            };
            self.known
                .entry(metadata.ino())
                .or_insert_with(|| relative(&mount, &path));
            let Ok(entries) = fs::read_dir(&path) else {
                continue;
            };
            for entry in entries.flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    stack.push(entry.path());
                }
            }
        }
    }
}

/// Why a process has no workload that can be named.
#[derive(Debug, thiserror::Error)]
pub enum NoWorkload {
    /// There is no such process.
    #[error("there is no process {0} here (ids are those of this process namespace)")]
    NoProcess(u32),
    /// The kernel does not say.
    #[error("process {0}: /proc/{0}/cgroup names no v2 control group")]
    NoGroup(u32),
    /// Its path begins above what we see.
    #[error(
        "process {0} is outside of this cgroup namespace ({1}); ask on the host, or name its \
         control group instead"
    )]
    Outside(u32, String),
    /// Its path is not in our mount.
    #[error(
        "process {0} is in {1}, which does not exist: is another part of the tree mounted here?"
    )]
    NotMounted(u32, PathBuf),
}

/// The workload of a process, in the hierarchy mounted at `mount`.
///
/// # Errors
/// When there is no such process, or its control group cannot be seen from here, as in a container
/// with a cgroup namespace of its own.
pub fn of_process(mount: &Path, pid: u32) -> Result<String, NoWorkload> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup"))
        .map_err(|_| NoWorkload::NoProcess(pid))?;
    let below = text
        .lines()
        .find_map(|line| line.strip_prefix("0::/"))
        .ok_or(NoWorkload::NoGroup(pid))?;
    // The kernel says so of a group whose directory is gone; a process may still be in it.
    let below = below.strip_suffix(" (deleted)").unwrap_or(below);
    if below.split('/').any(|part| part == "..") {
        return Err(NoWorkload::Outside(pid, format!("/{below}")));
    }
    let path = mount.join(below);
    if !path.is_dir() {
        return Err(NoWorkload::NotMounted(pid, path));
    }
    Ok(relative(mount, &path))
}

/// The workload's name for a path in the hierarchy.
pub fn relative(mount: &Path, path: &Path) -> String {
    let relative = path.strip_prefix(mount).unwrap_or(path).to_string_lossy();
    if relative.is_empty() {
        return "/".to_owned();
    }
    // Whoever may make cgroups may name them: nothing of that goes to a terminal or a log as it is.
    relative.chars().map(super::events::printable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hybrid_and_unified_hosts() {
        let hybrid = "30 24 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro\n\
                      31 30 0:27 / /sys/fs/cgroup/unified rw shared:5 - cgroup2 cgroup2 rw\n\
                      32 30 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n";
        assert_eq!(find_mount(hybrid), Some("/sys/fs/cgroup/unified".into()));
        let bind = "40 1 0:27 /kubepods /mnt/part rw - cgroup2 cgroup2 rw\n\
                    41 1 0:27 / /mnt/a\\040b rw - cgroup2 cgroup2 rw\n";
        assert_eq!(find_mount(bind), Some("/mnt/a b".into()));
        assert_eq!(
            find_mount("32 30 0:28 / /x rw - cgroup cgroup rw,cpu\n"),
            None
        );
        let hybrid = format!("{hybrid}33 30 0:29 / /f rw - cgroup cgroup rw,freezer\n");
        assert_eq!(find_v1_mount(&hybrid, "freezer"), Some("/f".into()));
        assert_eq!(find_v1_mount(bind, "freezer"), None);
    }

    #[test]
    fn names() {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir_all(tree.path().join("system.slice/billing.service")).unwrap();
        let inode = |path: &str| fs::metadata(tree.path().join(path)).unwrap().ino();
        let mut names = Names::new(tree.path().to_owned());
        assert_eq!(
            names.name(inode("system.slice/billing.service"), 0),
            "system.slice/billing.service"
        );
        assert_eq!(names.name(inode(""), 0), "/");
        assert_eq!(names.name(u64::MAX, 0), format!("cgroup:{}", u64::MAX));
        fs::create_dir(tree.path().join("new")).unwrap();
        names.scanned = None;
        assert_eq!(names.name(inode("new"), 0), "new");
    }
}
