//! A process that may have a socket open: named so that no other is meant, which sockets it has, and
//! whether it can run.

use std::{
    collections::HashMap,
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::readlinkat_raw,
    io::Errno,
    process::{Pid, PidfdFlags, pidfd_open},
};

use crate::kernel::cgroup;

/// A process, held by a pidfd: its id may go to another one, the handle does not.
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
}

/// Whether a process can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// Nothing holds it up.
    Running,
    /// By SIGSTOP, job control or a debugger: every thread of it.
    Stopped,
    /// Its control group is frozen (v2 or v1).
    Frozen,
    /// It has ended.
    Ended,
}

impl Process {
    /// The process that has this id now; `None` when there is none (or it is a thread).
    ///
    /// # Errors
    /// When the system gives no descriptor.
    pub fn open(pid: u32) -> io::Result<Option<Self>> {
        let Some(raw) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        match pidfd_open(raw, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Some(Self { pid, pidfd })),
            // A thread: EINVAL, from 6.15 or so on ENOENT.
            Err(Errno::SRCH | Errno::INVAL | Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Its id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it has not ended. As long as it has not, the id is its own.
    pub fn is_alive(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        // A failure says nothing; what follows compares more than the process.
        !matches!(poll(&mut fds, Some(&Timespec::default())), Ok(1..))
    }

    /// Descriptors of the process that are one of these inodes' sockets, in the order of their
    /// numbers; one socket may have several. Takes about a microsecond for each descriptor that the
    /// process has. None when the process has ended.
    ///
    /// # Errors
    /// When `/proc/PID/fd` cannot be read (needs CAP_SYS_PTRACE).
    pub fn sockets<T: Copy>(&self, wanted: &HashMap<u32, T>) -> io::Result<Vec<(RawFd, T)>> {
        let mut found = Vec::new();
        if let Err(error) = self.scan(wanted, &mut found) {
            return if self.is_alive() {
                Err(error)
            } else {
                Ok(Vec::new())
            };
        }
        // Else what was read may have been of another process with the same id.
        if !self.is_alive() {
            found.clear();
        }
        Ok(found)
    }

    fn scan<T: Copy>(
        &self,
        wanted: &HashMap<u32, T>,
        found: &mut Vec<(RawFd, T)>,
    ) -> io::Result<()> {
        let path = format!("/proc/{}/fd", self.pid);
        let directory = fs::File::open(&path)?;
        let mut link = [std::mem::MaybeUninit::uninit(); 64];
        for entry in fs::read_dir(&path)? {
            let name = entry?.file_name();
            // Closed meanwhile, or something longer than any socket's name.
            let Ok((link, _)) = readlinkat_raw(&directory, &name, &mut link) else {
                continue;
            };
            let number = name.to_str().and_then(|name| name.parse().ok());
            let wanted = socket_inode(link).and_then(|inode| wanted.get(&inode));
            if let (Some(number), Some(what)) = (number, wanted) {
                found.push((number, *what));
            }
        }
        Ok(())
    }

    /// Whether it can run now. What cannot be read does not hold it up.
    pub fn run_state(&self, freezers: &Freezers) -> RunState {
        let state = if stopped(self.pid) {
            RunState::Stopped
        } else if freezers.froze(self.pid) {
            RunState::Frozen
        } else {
            RunState::Running
        };
        if self.is_alive() {
            state
        } else {
            RunState::Ended
        }
    }
}

impl AsFd for Process {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// The number in `socket:[NUMBER]`.
fn socket_inode(link: &[u8]) -> Option<u32> {
    let number = link.strip_prefix(b"socket:[")?.strip_suffix(b"]")?;
    std::str::from_utf8(number).ok()?.parse().ok()
}

/// Whether every living thread of a process is stopped.
fn stopped(pid: u32) -> bool {
    match state_of(&format!("/proc/{pid}/stat")) {
        Some('T' | 't') => {}
        // The first thread of a process may end before the others.
        Some('Z') => {}
        _ => return false,
    }
    let mut any = false;
    for task in fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten()
    {
        match state_of(&task.path().join("stat").to_string_lossy()) {
            Some('T' | 't') => any = true,
            Some('Z' | 'X') | None => {}
            Some(_) => return false,
        }
    }
    any
}

fn state_of(stat: &str) -> Option<char> {
    let text = fs::read(stat).ok()?;
    // The name in parentheses may hold anything, parentheses too.
    let end = text.iter().rposition(|byte| *byte == b')')?;
    text.get(end + 2).map(|byte| char::from(*byte))
}

/// Where control groups are frozen.
#[derive(Clone, Debug, Default)]
pub struct Freezers {
    v2: Option<PathBuf>,
    v1: Option<PathBuf>,
}

impl Freezers {
    /// As the mount table says now.
    pub fn find() -> Self {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        Self {
            v2: cgroup::mount_point().ok(),
            v1: cgroup::find_v1_mount(&mounts, "freezer"),
        }
    }

    /// Whether the group of a process is frozen, or one above it: a group below a frozen one is.
    fn froze(&self, pid: u32) -> bool {
        let Ok(groups) = fs::read_to_string(format!("/proc/{pid}/cgroup")) else {
            return false;
        };
        groups.lines().any(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
                return false;
            };
            let below = |mount: &Option<PathBuf>, file: &str| {
                let group = mount.as_ref()?.join(path.trim_start_matches('/'));
                fs::read_to_string(group.join(file)).ok()
            };
            if controllers.is_empty() {
                below(&self.v2, "cgroup.events")
                    .is_some_and(|events| events.lines().any(|line| line == "frozen 1"))
            } else if controllers.split(',').any(|name| name == "freezer") {
                // THAWED, FREEZING or FROZEN; a group below a frozen one says so, too.
                below(&self.v1, "freezer.state").is_some_and(|state| state.starts_with('F'))
            } else {
                false
            }
        })
    }
}

/// Processes of a control group (v2) and of all below it.
pub fn in_cgroup(group: &Path) -> Vec<u32> {
    let mut found = Vec::new();
    let mut rest = vec![group.to_owned()];
    while let Some(group) = rest.pop() {
        let text = fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default();
        found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
        let entries = fs::read_dir(&group).into_iter().flatten().flatten();
        let inner = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        rest.extend(inner.map(|entry| entry.path()));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_of_sockets() {
        assert_eq!(socket_inode(b"socket:[4242]"), Some(4242));
        for other in [
            "pipe:[7]",
            "socket:[]",
            "socket:[7",
            "anon_inode:[x]",
            "/socket:[7]",
        ] {
            assert_eq!(socket_inode(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn our_own_sockets_are_found() {
        use std::os::{fd::AsRawFd as _, unix::fs::MetadataExt as _};
        let (one, _two) = std::os::unix::net::UnixStream::pair().expect("a pair");
        let again = one.try_clone().expect("a copy");
        let file = fs::File::from(OwnedFd::from(one.try_clone().expect("a copy")));
        let inode = file.metadata().expect("its inode").ino() as u32;
        drop(file);
        let process = Process::open(std::process::id())
            .expect("open")
            .expect("we live");
        let found = process.sockets(&HashMap::from([(inode, 'x'), (1, 'y')]));
        let mut numbers = found.expect("list");
        numbers.sort_unstable();
        let mut expected = [(one.as_raw_fd(), 'x'), (again.as_raw_fd(), 'x')];
        expected.sort_unstable();
        assert_eq!(numbers, expected);
    }

    #[test]
    fn an_ended_process_is_nobody() {
        let mut child = std::process::Command::new("/bin/cat")
            .stdin(std::process::Stdio::piped())
            .spawn()
            .expect("run cat");
        let process = Process::open(child.id()).expect("open").expect("it lives");
        let freezers = Freezers::find();
        assert_eq!(process.run_state(&freezers), RunState::Running);
        assert!(process.is_alive());
        let link = fs::read_link(format!("/proc/{}/fd/0", child.id())).expect("its input");
        assert!(link.to_string_lossy().starts_with("pipe:"));
        drop(child.stdin.take());
        child.wait().expect("wait");
        assert!(!process.is_alive());
        assert_eq!(process.run_state(&freezers), RunState::Ended);
        assert!(
            process
                .sockets(&HashMap::from([(1, ())]))
                .expect("list")
                .is_empty()
        );
        assert!(Process::open(child.id()).expect("open").is_none());
    }

    #[test]
    fn ids_that_nobody_has() {
        for pid in [0, u32::MAX, i32::MAX as u32] {
            assert!(Process::open(pid).expect("open").is_none(), "{pid}");
        }
    }
}
