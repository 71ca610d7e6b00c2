//! The place where it is measured: a network namespace, cgroups, a folder; and children that do not
//! outlive it.

use std::{
    ffi::CStr,
    fs, io,
    net::{Ipv4Addr, SocketAddrV4, TcpListener},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};

/// Every folder and cgroup of a run is called so, with the process id behind it.
const PREFIX: &str = "backstop-bench-";
/// A port at which nothing listens: below the range of ephemeral ports, and the namespace is ours.
pub const CLOSED_PORT: u16 = 9;

/// Where everything is measured. Dropping it removes cgroups and files.
pub struct Lab {
    /// The agent's binary.
    pub binary: PathBuf,
    /// Cgroup to which agents are attached.
    pub with: PathBuf,
    /// Two cgroups to which nothing is attached.
    pub without: [PathBuf; 2],
    /// For files and sockets.
    pub folder: PathBuf,
    _cgroups: Vec<Cgroup>,
    _folder: Folder,
}

impl Lab {
    /// Makes cgroups and moves this process into a network namespace of its own.
    ///
    /// # Errors
    /// When the system lacks a cgroup v2 mount or does not allow it.
    pub fn enter(binary: PathBuf) -> Result<Self> {
        let mount = cgroup_mount()?;
        sweep(&mount);
        sweep(&std::env::temp_dir());
        let id = std::process::id();
        let top = Cgroup::make(mount.join(format!("{PREFIX}{id}")))?;
        let with = Cgroup::make(top.path.join("with"))?;
        let first = Cgroup::make(top.path.join("without-a"))?;
        let second = Cgroup::make(top.path.join("without-b"))?;
        let folder = Folder::make(std::env::temp_dir().join(format!("{PREFIX}{id}")))?;
        enter_namespace()?;
        Ok(Self {
            binary,
            with: with.path.clone(),
            without: [first.path.clone(), second.path.clone()],
            folder: folder.path.clone(),
            // Dropped in this order: children before their parent.
            _cgroups: vec![with, first, second, top],
            _folder: folder,
        })
    }
}

/// Where cgroup v2 is mounted; on a hybrid host that is a folder below the usual one.
fn cgroup_mount() -> Result<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("read the mount table")?;
    mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .find(|words| words.get(2) == Some(&"cgroup2"))
        .and_then(|words| words.get(1).map(PathBuf::from))
        .context("no cgroup v2 is mounted: mount -t cgroup2 none /sys/fs/cgroup")
}

/// Removes the cgroups and files of runs that were killed.
fn sweep(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let id = name.to_str().and_then(|name| name.strip_prefix(PREFIX));
        let Some(id) = id else { continue };
        if Path::new("/proc").join(id).exists() {
            continue;
        }
        // Cgroups are removed as folders; the files in them are the kernel's.
        for child in fs::read_dir(entry.path()).into_iter().flatten().flatten() {
            let _ = fs::remove_dir(child.path());
        }
        if fs::remove_dir(entry.path()).is_err() {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    fn make(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).with_context(|| format!("make the cgroup {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A cgroup is busy for a moment after its last process has ended.
        let end = Instant::now() + Duration::from_secs(2);
        while fs::remove_dir(&self.path).is_err() {
            if Instant::now() >= end {
                eprintln!("xtask: the cgroup {} is still in use", self.path.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

struct Folder {
    path: PathBuf,
}

impl Folder {
    fn make(path: PathBuf) -> Result<Self> {
        // One of a run that was killed: its process id has come round.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).with_context(|| format!("make the folder {}", path.display()))?;
        Ok(Self { path })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Moves this process into a new network namespace with loopback up. Children follow.
fn enter_namespace() -> Result<()> {
    // SAFETY: no memory is passed; this process has one thread.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error()).context("make a network namespace");
    }
    loopback_up().context("set loopback up in the new network namespace")?;
    // Sockets in TIME_WAIT would make the search for a free port longer from slice to slice.
    for (name, value) in [
        ("tcp_max_tw_buckets", "0"),
        ("ip_local_port_range", "1024 65535"),
    ] {
        let path = format!("/proc/sys/net/ipv4/{name}");
        fs::write(&path, value).with_context(|| format!("write {value:?} to {path}"))?;
    }
    Ok(())
}

fn loopback_up() -> io::Result<()> {
    const LOOPBACK: &CStr = c"lo";
    // SAFETY: all zero is a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(LOOPBACK.to_bytes()) {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: plain arguments; then a valid descriptor and request; the descriptor is closed once.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if socket < 0 {
            return Err(io::Error::last_os_error());
        }
        let result = match libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw const request) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        libc::close(socket);
        result
    }
}

/// A listener on all of 127.0.0.0/8, made outside the measured cgroups: what it accepts belongs to
/// no agent.
///
/// # Errors
/// When there is no port.
pub fn listener() -> Result<(TcpListener, u16)> {
    let listener = TcpListener::bind(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0))
        .context("listen on loopback")?;
    let port = listener.local_addr().context("name the listener")?.port();
    Ok((listener, port))
}

/// How a child runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Running {
    /// Only on this processor.
    pub cpu: Option<usize>,
    /// Before other programs of the machine (nice -20).
    pub first: bool,
    /// At real-time priority, so that nothing else gets into a slice. Only for work that sleeps.
    pub real_time: bool,
}

/// A child that ends with its guard, and with this process.
pub struct Guarded {
    child: Child,
    /// Sent at the end; SIGKILL follows where it does not help within 5 s.
    signal: libc::c_int,
}

impl Guarded {
    /// Starts it; `signal` ends it.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command, running: Running, signal: libc::c_int) -> Result<Self> {
        // SAFETY: only system calls between fork and exec.
        unsafe { command.pre_exec(move || prepare(running)) };
        let child = command
            .spawn()
            .with_context(|| format!("start `{}`", crate::process::describe(command)))?;
        Ok(Self { child, signal })
    }

    /// The child.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: the child has not been waited for, so its id is its own.
        unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        self.signal(self.signal);
        let end = Instant::now() + Duration::from_secs(5);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn prepare(running: Running) -> io::Result<()> {
    let check = |result: libc::c_int| match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: plain arguments and valid structs.
    unsafe {
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
        if let Some(cpu) = running.cpu {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(cpu, &mut set);
            check(libc::sched_setaffinity(
                0,
                size_of_val(&set),
                &raw const set,
            ))?;
        }
        if running.first {
            check(libc::setpriority(libc::PRIO_PROCESS, 0, -20))?;
        }
        if running.real_time {
            let priority = libc::sched_param { sched_priority: 1 };
            check(libc::sched_setscheduler(
                0,
                libc::SCHED_FIFO,
                &raw const priority,
            ))?;
        }
    }
    Ok(())
}

/// Numbers of the processors that this process may run on, at least one.
pub fn processors() -> Vec<usize> {
    // SAFETY: all zero is an empty set; the kernel writes no more than its size.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of_val(&set), &raw mut set);
        set
    };
    // SAFETY: below the size of the set.
    let is_allowed = |cpu: &usize| unsafe { libc::CPU_ISSET(*cpu, &set) };
    let allowed: Vec<usize> = (0..libc::CPU_SETSIZE as usize).filter(is_allowed).collect();
    if allowed.is_empty() { vec![0] } else { allowed }
}

/// The processor of the load; what it talks to has the first one.
pub fn last_processor() -> Option<usize> {
    processors().last().copied()
}
