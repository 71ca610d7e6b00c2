//! A process that may have a socket open: named so that no other is meant, which sockets it has, and
//! whether it can run.

use std::{
    ffi::OsStr,
    fs, io,
    mem::MaybeUninit,
    ops::ControlFlow,
    os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{CWD, readlinkat_raw},
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

    /// Tells each descriptor of the process that is a socket, and the socket's inode, in the order of
    /// the numbers, until told to break. Says whether it was this process all the time: when it ends
    /// meanwhile, another one may have its id. Takes 3 to 4 us for each descriptor, socket or not.
    ///
    /// # Errors
    /// When `/proc/PID/fd` cannot be read (needs CAP_SYS_PTRACE).
    pub fn each_socket(&self, each: impl FnMut(RawFd, u32) -> ControlFlow<()>) -> io::Result<bool> {
        let read = self.scan(each);
        let same = self.is_alive();
        if same { read.map(|()| true) } else { Ok(false) }
    }

    fn scan(&self, mut each: impl FnMut(RawFd, u32) -> ControlFlow<()>) -> io::Result<()> {
        let path = format!("/proc/{}/fd", self.pid);
        let directory = fs::File::open(&path)?;
        for entry in fs::read_dir(&path)? {
            let name = entry?.file_name();
            let number = name.to_str().and_then(|name| name.parse().ok());
            if let (Some(number), Some(inode)) = (number, socket_at(&directory, &name))
                && each(number, inode).is_break()
            {
                break;
            }
        }
        Ok(())
    }

    /// The inode of the socket that a descriptor of the process is, if it is one.
    pub(super) fn socket(&self, fd: RawFd) -> Option<u32> {
        let path = format!("/proc/{}/fd/{fd}", self.pid);
        socket_at(CWD, OsStr::new(&path))
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

fn socket_at(directory: impl AsFd, name: &OsStr) -> Option<u32> {
    let mut link = [MaybeUninit::uninit(); 64];
    // Closed meanwhile, or something with a longer name than any socket.
    let (link, _) = readlinkat_raw(directory, name, &mut link).ok()?;
    socket_inode(link)
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
        let mut numbers = Vec::new();
        let same = process.each_socket(|fd, of| {
            if of == inode {
                numbers.push(fd);
            }
            ControlFlow::Continue(())
        });
        assert!(same.expect("list"));
        numbers.sort_unstable();
        let mut expected = [one.as_raw_fd(), again.as_raw_fd()];
        expected.sort_unstable();
        assert_eq!(numbers, expected);
        assert_eq!(process.socket(expected[1]), Some(inode));
        let mut told = 0;
        let same = process.each_socket(|_, _| {
            told += 1;
            ControlFlow::Break(())
        });
        assert!(same.expect("list"));
        assert_eq!(told, 1);
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
            !process
                .each_socket(|_, _| ControlFlow::Continue(()))
                .expect("list")
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
