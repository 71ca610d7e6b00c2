//! Unmodified programs in a control group and a network namespace.

use std::{
    ffi::OsStr,
    fs::{File, OpenOptions},
    io::{self, Read},
    os::{
        fd::{AsRawFd as _, OwnedFd},
        unix::process::{CommandExt as _, ExitStatusExt as _},
    },
    path::{Path, PathBuf},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open},
};

use crate::{cgroup::TestCgroup, net::Namespace, wait};

/// Longest time that a program may take unless the test says otherwise.
const DEADLINE: Duration = Duration::from_secs(60);
/// Until a process that was sent SIGSTOP has stopped.
const STOPPED: Duration = Duration::from_secs(60);

/// Where a program is, or `None` when it is not installed.
pub fn find(program: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

/// A program to be run.
pub struct Program {
    command: Command,
    cgroup: Option<File>,
    netns: Option<File>,
    deadline: Duration,
    feed: bool,
    promptly: bool,
}

impl Program {
    /// By path or name. Its input is empty.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        Self {
            command: Command::new(program),
            cgroup: None,
            netns: None,
            deadline: DEADLINE,
            feed: false,
            promptly: false,
        }
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// The same command, run by another program that takes it as its last arguments.
    #[must_use]
    pub fn run_by(mut self, program: &str, args: &[String]) -> Self {
        let mut outer = Command::new(program);
        outer.args(args);
        outer.arg(self.command.get_program());
        outer.args(self.command.get_args());
        self.command = outer;
        self
    }

    /// Sets a variable of its environment.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs it in a control group from its first instruction on.
    #[must_use]
    pub fn in_cgroup(mut self, cgroup: &TestCgroup) -> Self {
        let path = cgroup.path().join("cgroup.procs");
        self.cgroup = Some(
            OpenOptions::new()
                .write(true)
                .open(path)
                .expect("open cgroup.procs"),
        );
        self
    }

    /// Runs it in a network namespace.
    #[must_use]
    pub fn in_netns(mut self, namespace: &Namespace) -> Self {
        self.netns = Some(File::open(namespace.path()).expect("open the namespace"));
        self
    }

    /// Sets the longest time that it may take.
    #[must_use]
    pub fn within(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Runs it before all ordinary programs (SCHED_FIFO, where allowed): what it measures is then
    /// not the queue for a busy machine's processors.
    #[must_use]
    pub fn promptly(mut self) -> Self {
        self.promptly = true;
        self
    }

    /// Gives it a pipe as input, see [`Running::stdin`].
    #[must_use]
    pub fn fed(mut self) -> Self {
        self.feed = true;
        self
    }

    /// Starts it. It is killed when the result is dropped or the calling thread ends.
    pub fn spawn(mut self) -> Running {
        let what = format!("{:?}", self.command);
        let (cgroup, netns) = (self.cgroup.take(), self.netns.take());
        let promptly = self.promptly;
        let enter = move || {
            // Only system calls here: this runs between fork and exec.
            if let Some(file) = &cgroup {
                rustix::io::write(file, b"0")?;
            }
            if let Some(file) = &netns {
                // SAFETY: plain system call on an open descriptor.
                if unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) } != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            if promptly {
                let parameters = libc::sched_param { sched_priority: 1 };
                // SAFETY: plain system call; a refusal costs only precision.
                unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const parameters) };
            }
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            Ok(())
        };
        // SAFETY: the closure makes system calls only and allocates nothing.
        unsafe { self.command.pre_exec(enter) };
        let stdin = if self.feed {
            Stdio::piped()
        } else {
            Stdio::null()
        };
        let began = Instant::now();
        let mut child = self
            .command
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("start {what}: {error}"));
        let pid = Pid::from_child(&child);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("open a pidfd of a child");
        Running {
            what,
            stdin: child.stdin.take(),
            stdout: child.stdout.take(),
            stderr: Some(Collected::from_stderr(child.stderr.take().expect("piped"))),
            child,
            pid,
            pidfd,
            began,
            deadline: self.deadline,
        }
    }

    /// Runs it to its end.
    pub fn run(self) -> Finished {
        self.spawn().wait()
    }
}

/// A program that runs.
pub struct Running {
    what: String,
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
    /// Its input, where [`Program::fed`] was asked for.
    pub stdin: Option<ChildStdin>,
    /// Its output; who takes it reads it.
    pub stdout: Option<ChildStdout>,
    stderr: Option<Collected>,
    began: Instant,
    deadline: Duration,
}

impl Running {
    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Sends a signal to it. After SIGSTOP it has stopped when this returns.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid, signal).unwrap_or_else(|e| panic!("signal {}: {e}", self.what));
        if signal == Signal::STOP {
            // One thread takes the signal and then stops the others, which go on until then
            // (`do_signal_stop` in kernel/signal.c).
            let what = format!("{} to stop", self.what);
            wait::until(&what, STOPPED, || self.is_stopped().then_some(()));
        }
    }

    /// Whether none of its threads runs any more.
    fn is_stopped(&self) -> bool {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{}/task", self.pid())) else {
            return true;
        };
        threads.flatten().all(|thread| {
            // "pid (comm) state ...": the name may contain anything. One that has gone does not run.
            let stat = std::fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
            let state = stat.rsplit(") ").next().unwrap_or_default();
            state.is_empty() || state.starts_with(['T', 't', 'Z', 'X'])
        })
    }

    /// What it has written to stderr so far.
    pub fn stderr_so_far(&self) -> String {
        self.stderr
            .as_ref()
            .map(Collected::so_far)
            .unwrap_or_default()
    }

    /// Whether it has ended.
    pub fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)))
    }

    /// Gives it this much more time from now on.
    pub fn extend_deadline(&mut self, more: Duration) {
        self.deadline = self.began.elapsed() + more;
    }

    /// Waits for its end, at most until the deadline; then it is killed and the test fails.
    pub fn wait(mut self) -> Finished {
        let stdout = self.stdout.take().map(Collected::from_stdout);
        let left = self.deadline.saturating_sub(self.began.elapsed());
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let timeout = Timespec::try_from(left).expect("a short time");
        let ended = matches!(poll(&mut fds, Some(&timeout)), Ok(1));
        let elapsed = self.began.elapsed();
        if !ended {
            let _ = self.child.kill();
        }
        let status = self.child.wait().expect("wait for a child");
        let finished = Finished {
            what: std::mem::take(&mut self.what),
            status,
            stdout: stdout.map(Collected::all).unwrap_or_default(),
            stderr: self.stderr.take().map(Collected::all).unwrap_or_default(),
            elapsed,
        };
        assert!(ended, "{finished} did not end within {:?}", self.deadline);
        finished
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Killing what has ended and was waited for does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program that has ended.
#[derive(Debug)]
pub struct Finished {
    what: String,
    /// How it ended.
    pub status: ExitStatus,
    /// Its output.
    pub stdout: String,
    /// Its errors.
    pub stderr: String,
    /// From its start to its end.
    pub elapsed: Duration,
}

impl Finished {
    /// Exit code; a signal counts as 128 and its number, as shells say.
    pub fn code(&self) -> i32 {
        self.status
            .code()
            .unwrap_or_else(|| 128 + self.status.signal().unwrap_or(0))
    }

    /// Panics unless it ended well; returns its output.
    #[track_caller]
    pub fn good(self) -> String {
        assert!(self.status.success(), "{self}");
        self.stdout
    }
}

impl std::fmt::Display for Finished {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            what,
            status,
            stdout,
            stderr,
            elapsed,
        } = self;
        write!(
            f,
            "{what} ({status}, {elapsed:?})\nstdout: {stdout}\nstderr: {stderr}"
        )
    }
}

/// Reads a pipe to its end beside everything else.
struct Collected {
    text: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Collected {
    fn from_stdout(pipe: ChildStdout) -> Self {
        Self::from_pipe(pipe)
    }

    fn from_stderr(pipe: ChildStderr) -> Self {
        Self::from_pipe(pipe)
    }

    fn from_pipe(mut pipe: impl Read + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(Vec::new()));
        let shared = Arc::clone(&text);
        let reader = std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = pipe.read(&mut buffer) {
                shared
                    .lock()
                    .expect("no panic holds it")
                    .extend_from_slice(&buffer[..count]);
            }
        });
        Self { text, reader }
    }

    fn so_far(&self) -> String {
        String::from_utf8_lossy(&self.text.lock().expect("no panic holds it")).into_owned()
    }

    fn all(self) -> String {
        let _ = self.reader.join();
        String::from_utf8_lossy(&self.text.lock().expect("no panic holds it")).into_owned()
    }
}

/// The Python that `python3` stands for, past any wrapper of it.
pub fn python() -> &'static Path {
    static PYTHON: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    PYTHON.get_or_init(|| {
        let says = Program::new("python3")
            .args(["-c", "import sys; print(sys.executable)"])
            .run();
        PathBuf::from(says.good().trim())
    })
}
