//! Control groups of the v2 hierarchy.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
    time::Duration,
};

use crate::{unique, wait};

/// Where the v2 hierarchy is mounted, as the mount table says (not always /sys/fs/cgroup).
pub fn v2_mount() -> &'static Path {
    static MOUNT: OnceLock<PathBuf> = OnceLock::new();
    MOUNT.get_or_init(|| {
        let table = fs::read_to_string("/proc/self/mountinfo").expect("read the mount table");
        table
            .lines()
            .find_map(|line| {
                let (mount, kind) = line.split_once(" - ")?;
                kind.starts_with("cgroup2 ").then_some(())?;
                mount.split(' ').nth(4).map(PathBuf::from)
            })
            .expect("no cgroup v2 hierarchy in the mount table")
    })
}

/// A control group that ends with all its processes when dropped.
pub struct TestCgroup {
    path: PathBuf,
}

impl TestCgroup {
    /// Makes one directly below the mount.
    pub fn new(label: &str) -> Self {
        Self::make(v2_mount().join(unique(label)))
    }

    /// Makes one inside this one; it goes with its parent at the latest.
    pub fn child(&self, label: &str) -> Self {
        Self::make(self.path.join(label))
    }

    fn make(path: PathBuf) -> Self {
        if let Err(error) = fs::create_dir(&path) {
            panic!(
                "make the control group {}: {error}; these tests need root",
                path.display()
            );
        }
        Self { path }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path below the mount: how Backstop calls the workload.
    pub fn workload(&self) -> String {
        let below = self.path.strip_prefix(v2_mount()).expect("below the mount");
        below.to_str().expect("made of ASCII").to_owned()
    }

    /// Processes directly in this group.
    pub fn pids(&self) -> Vec<i32> {
        let text = fs::read_to_string(self.path.join("cgroup.procs")).unwrap_or_default();
        text.lines().filter_map(|line| line.parse().ok()).collect()
    }
}

impl Drop for TestCgroup {
    fn drop(&mut self) {
        remove(&self.path);
    }
}

/// Removes what is below it and has no processes.
fn remove_inner(path: &Path) {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    for inner in entries.map(|entry| entry.path()).filter(|e| e.is_dir()) {
        remove_inner(&inner);
        let _ = fs::remove_dir(inner);
    }
}

/// Kills what is in the group (and below it), waits for the end of it, removes the directories.
fn remove(path: &Path) {
    if !path.exists() {
        return;
    }
    let removed = std::panic::catch_unwind(|| {
        wait::until(
            "the processes of a control group to end",
            Duration::from_secs(60),
            || {
                // Each time: an agent may just have made a group for its self-test inside.
                // Kernel 5.14 and later; it kills the whole subtree.
                let _ = fs::write(path.join("cgroup.kill"), "1");
                remove_inner(path);
                (fs::remove_dir(path).is_ok() || !path.exists()).then_some(())
            },
        );
    });
    if removed.is_err() {
        eprintln!("the control group {} could not be removed", path.display());
    }
}
