//! Setting options on a program's own descriptor, and giving them back.
//!
//! The program's file table is the only way to a socket that the kernel offers from outside: the
//! descriptor is found by the socket's inode, copied (pidfd_getfd), the cookie of the copy compared,
//! and the copy closed before anything else is done.
//!
//! Options are only ever tightened; what the program had set stricter stays. What we set is remembered
//! as the kernel has it (it rounds to ticks), and given back only while it is still that: a program
//! that has set the option meanwhile keeps its own value. Between reading a value and setting ours lie
//! some microseconds in which a value that the program sets is lost.

use std::{
    collections::HashMap,
    io,
    ops::ControlFlow,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd},
    time::Duration,
};

use rustix::{
    fs::{OFlags, fcntl_getfl},
    io::Errno,
    net::sockopt::{self, Timeout},
    process::{PidfdGetfdFlags, pidfd_getfd},
};
use thiserror::Error;

use super::process::Process;

/// A socket that some program has open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wanted {
    /// Its number in `/proc/PID/fd`, from a [`Look`](super::look::Look).
    pub inode: u32,
    /// Its cookie.
    pub cookie: u64,
    /// Where it was before ([`Socket::spot`]): tried first, so that giving an option back needs no
    /// search.
    pub spot: Option<Spot>,
}

/// A descriptor of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Spot {
    /// The process.
    pub pid: u32,
    /// The descriptor's number in it.
    pub fd: RawFd,
}

/// Why a socket was not reached, or an option not set.
#[derive(Debug, Error)]
pub enum OptionError {
    /// No handle of a process.
    #[error("open a handle of process {pid}: {cause}")]
    Open {
        /// Which one.
        pid: u32,
        /// What went wrong.
        cause: io::Error,
    },
    /// Its descriptors are not shown.
    #[error("list /proc/{pid}/fd (needs CAP_SYS_PTRACE): {cause}")]
    List {
        /// Which process.
        pid: u32,
        /// What went wrong.
        cause: io::Error,
    },
    /// Its descriptor is not given.
    #[error(
        "copy descriptor {fd} of process {pid} (needs CAP_SYS_PTRACE, and sysctl \
         kernel.yama.ptrace_scope below 3): {cause}"
    )]
    Copy {
        /// Which process.
        pid: u32,
        /// Which descriptor.
        fd: RawFd,
        /// The kernel's words.
        cause: Errno,
    },
    /// The option.
    #[error("{what} on descriptor {fd} of process {pid}: {cause}")]
    Option {
        /// What was tried.
        what: &'static str,
        /// Which process.
        pid: u32,
        /// Which descriptor.
        fd: RawFd,
        /// The kernel's words.
        cause: Errno,
    },
}

/// What [`reach`] found.
#[derive(Debug)]
pub struct Reached<T> {
    /// In the order of what was wanted; `None` where no process has the socket open.
    pub results: Vec<Option<T>>,
    /// The first thing that stood in the way, if anything did.
    pub problem: Option<OptionError>,
}

/// Reaches sockets through the processes that have them open, and runs `work` on each once; it is
/// told the index of what was wanted; no socket is wanted twice. Processes are tried in order, and no further than needed: first
/// the one that connected, then those of its workload ([`in_cgroup`](super::process::in_cgroup)), for
/// a child or a process that was handed the descriptor may have it now. Each process that is searched
/// costs 3 to 4 us for each descriptor that it has, however many sockets are wanted: ask for many at
/// once. No copy of a descriptor is
/// left when this returns.
pub fn reach<T>(
    wanted: &[Wanted],
    pids: impl IntoIterator<Item = u32>,
    mut work: impl FnMut(usize, &Socket<'_>) -> T,
) -> Reached<T> {
    let mut reached = Reached {
        results: wanted.iter().map(|_| None).collect(),
        problem: None,
    };
    let mut left: HashMap<u32, usize> = HashMap::new();
    let mut last: Option<Process> = None;
    for (at, socket) in wanted.iter().enumerate() {
        let done = socket.spot.is_some_and(|Spot { pid, fd }| {
            if last.as_ref().is_none_or(|process| process.pid() != pid) {
                last = Process::open(pid).ok().flatten();
            }
            last.as_ref().is_some_and(|process| {
                // Nothing but a socket is ever copied.
                process.socket(fd) == Some(socket.inode)
                    && reached.at(process, fd, at, socket.cookie, &mut work)
            })
        });
        if !done {
            left.insert(socket.inode, at);
        }
    }
    for pid in pids {
        if left.is_empty() {
            break;
        }
        let process = match Process::open(pid) {
            Ok(Some(process)) => process,
            Ok(None) => continue,
            Err(cause) => {
                reached
                    .problem
                    .get_or_insert(OptionError::Open { pid, cause });
                continue;
            }
        };
        let read = process.each_socket(|fd, inode| {
            if let Some(&at) = left.get(&inode)
                && reached.at(&process, fd, at, wanted[at].cookie, &mut work)
            {
                left.remove(&inode);
            }
            match left.is_empty() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        });
        if let Err(cause) = read {
            reached
                .problem
                .get_or_insert(OptionError::List { pid, cause });
        }
    }
    reached
}

impl<T> Reached<T> {
    /// Runs `work` on the descriptor, if it is that socket; says whether.
    fn at(
        &mut self,
        process: &Process,
        fd: RawFd,
        at: usize,
        cookie: u64,
        work: &mut impl FnMut(usize, &Socket<'_>) -> T,
    ) -> bool {
        match copy(process, fd, cookie) {
            Ok(Some(copy)) => {
                let spot = Spot {
                    pid: process.pid(),
                    fd,
                };
                let socket = Socket {
                    copy: copy.as_fd(),
                    spot,
                };
                self.results[at] = Some(work(at, &socket));
                true
            }
            Ok(None) => false,
            Err(error) => {
                self.problem.get_or_insert(error);
                false
            }
        }
    }
}

/// A copy of a descriptor, if it is that socket still.
fn copy(process: &Process, fd: RawFd, cookie: u64) -> Result<Option<OwnedFd>, OptionError> {
    match pidfd_getfd(process, fd, PidfdGetfdFlags::empty()) {
        // Closed, or something else by now.
        Ok(copy) if sockopt::socket_cookie(&copy) != Ok(cookie) => Ok(None),
        Ok(copy) => Ok(Some(copy)),
        Err(Errno::BADF | Errno::SRCH) => Ok(None),
        Err(cause) => Err(OptionError::Copy {
            pid: process.pid(),
            fd,
            cause,
        }),
    }
}

/// An option that is a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TimeOption {
    /// SO_RCVTIMEO: longest wait of a blocking receive, owed an answer or not. One that sleeps
    /// already is not affected.
    Receive,
    /// SO_SNDTIMEO: longest wait of a blocking send.
    Send,
    /// TCP_USER_TIMEOUT: longest time that data may stay unacknowledged. Only while keepalive is off:
    /// with it, one lost probe would end an idle connection.
    User,
}

/// An option that we have set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Given {
    /// Which.
    pub option: TimeOption,
    /// What was there; `None`: off.
    pub before: Option<Duration>,
    /// What we set, as the kernel has it.
    pub ours: Duration,
}

/// What became of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tightened {
    /// It is set now.
    Ours(Given),
    /// The program's own is at least as strict, and stays.
    Theirs(Duration),
    /// TCP_USER_TIMEOUT alone: keepalive is on, so nothing was set.
    KeepaliveOn,
}

/// Keepalive, in the kernel's units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Idle time before the first probe, s; 1 to 32,767.
    pub idle_s: u16,
    /// Between probes, s; 1 to 32,767.
    pub interval_s: u16,
    /// Unanswered probes that end the connection; 1 to 127.
    pub count: u8,
}

/// What became of keepalive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeptAlive {
    /// It is on now.
    Ours(GivenKeepalive),
    /// The program has it on, and keeps its own.
    Theirs,
    /// The program has set TCP_USER_TIMEOUT, which would end an idle connection with the first lost
    /// probe: nothing was set.
    UserTimeout,
}

/// Keepalive that we have switched on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GivenKeepalive {
    /// The numbers that were there while it was off.
    pub before: Keepalive,
    /// Ours.
    pub ours: Keepalive,
}

/// A program's socket, at hand for the moment.
pub struct Socket<'a> {
    copy: BorrowedFd<'a>,
    spot: Spot,
}

impl Socket<'_> {
    /// Where it was reached.
    pub fn spot(&self) -> Spot {
        self.spot
    }

    /// Whether calls on it wait (no O_NONBLOCK): only those feel SO_RCVTIMEO and SO_SNDTIMEO.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn is_blocking(&self) -> Result<bool, OptionError> {
        let flags = fcntl_getfl(self.copy).map_err(self.failed("read the flags"))?;
        Ok(!flags.contains(OFlags::NONBLOCK))
    }

    /// The value of an option; `None`: off.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn time(&self, option: TimeOption) -> Result<Option<Duration>, OptionError> {
        let value = match option {
            TimeOption::Receive => sockopt::socket_timeout(self.copy, Timeout::Recv),
            TimeOption::Send => sockopt::socket_timeout(self.copy, Timeout::Send),
            TimeOption::User => sockopt::tcp_user_timeout(self.copy).map(|ms| match ms {
                0 => None,
                ms => Some(Duration::from_millis(ms.into())),
            }),
        };
        value.map_err(self.failed(option.name()))
    }

    fn set_time(&self, option: TimeOption, value: Option<Duration>) -> Result<(), OptionError> {
        match option {
            TimeOption::Receive => sockopt::set_socket_timeout(self.copy, Timeout::Recv, value),
            TimeOption::Send => sockopt::set_socket_timeout(self.copy, Timeout::Send, value),
            TimeOption::User => {
                // Off is 0; a limit is never rounded down to it, and i32::MAX is the most there is.
                let ms = value.map_or(0, |value| value.as_millis().clamp(1, i32::MAX as u128));
                sockopt::set_tcp_user_timeout(self.copy, ms as u32)
            }
        }
        .map_err(self.failed(option.name()))
    }

    /// Sets a limit if none is there, or a longer one.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub fn tighten(&self, option: TimeOption, limit: Duration) -> Result<Tightened, OptionError> {
        if option == TimeOption::User && self.has_keepalive()? {
            return Ok(Tightened::KeepaliveOn);
        }
        let before = self.time(option)?;
        if let Some(theirs) = before.filter(|theirs| *theirs <= limit) {
            return Ok(Tightened::Theirs(theirs));
        }
        self.set_time(option, Some(limit))?;
        let ours = self.time(option)?.unwrap_or(limit);
        Ok(Tightened::Ours(Given {
            option,
            before,
            ours,
        }))
    }

    /// Puts back what was there, unless the program has set something else meanwhile; says whether.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub fn give_back(&self, given: &Given) -> Result<bool, OptionError> {
        let is_ours = self.time(given.option)? == Some(given.ours);
        if is_ours {
            self.set_time(given.option, given.before)?;
        }
        Ok(is_ours)
    }

    /// Whether the program (or we) switched keepalive on.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn has_keepalive(&self) -> Result<bool, OptionError> {
        sockopt::socket_keepalive(self.copy).map_err(self.failed("read SO_KEEPALIVE"))
    }

    /// The numbers of keepalive, on or off.
    ///
    /// # Errors
    /// When the kernel does not say.
    pub fn keepalive(&self) -> Result<Keepalive, OptionError> {
        let read = || {
            Ok(Keepalive {
                idle_s: seconds(sockopt::tcp_keepidle(self.copy)?),
                interval_s: seconds(sockopt::tcp_keepintvl(self.copy)?),
                count: sockopt::tcp_keepcnt(self.copy)?
                    .try_into()
                    .unwrap_or(u8::MAX),
            })
        };
        read().map_err(self.failed("read keepalive"))
    }

    /// Switches keepalive on where it is off.
    ///
    /// # Errors
    /// When the kernel does not take it; it may have taken a part then, which stays off.
    pub fn keep_alive(&self, ours: Keepalive) -> Result<KeptAlive, OptionError> {
        if self.has_keepalive()? {
            return Ok(KeptAlive::Theirs);
        }
        if self.time(TimeOption::User)?.is_some() {
            return Ok(KeptAlive::UserTimeout);
        }
        let before = self.keepalive()?;
        self.set_keepalive(ours, true)?;
        Ok(KeptAlive::Ours(GivenKeepalive { before, ours }))
    }

    /// Switches keepalive off again, unless the program has set something else meanwhile; says
    /// whether.
    ///
    /// # Errors
    /// When the kernel does not take it.
    pub fn give_back_keepalive(&self, given: &GivenKeepalive) -> Result<bool, OptionError> {
        let is_ours = self.has_keepalive()? && self.keepalive()? == given.ours;
        if is_ours {
            self.set_keepalive(given.before, false)?;
        }
        Ok(is_ours)
    }

    /// Never on with numbers that are half ours: the first probe would come at the wrong time.
    fn set_keepalive(&self, numbers: Keepalive, on: bool) -> Result<(), OptionError> {
        let set = || {
            if !on {
                sockopt::set_socket_keepalive(self.copy, false)?;
            }
            let time = |seconds: u16| Duration::from_secs(seconds.into());
            sockopt::set_tcp_keepidle(self.copy, time(numbers.idle_s))?;
            sockopt::set_tcp_keepintvl(self.copy, time(numbers.interval_s))?;
            sockopt::set_tcp_keepcnt(self.copy, numbers.count.into())?;
            if on {
                sockopt::set_socket_keepalive(self.copy, true)?;
            }
            Ok(())
        };
        set().map_err(self.failed("set keepalive"))
    }

    fn failed(&self, what: &'static str) -> impl FnOnce(Errno) -> OptionError {
        let Spot { pid, fd } = self.spot;
        move |cause| OptionError::Option {
            what,
            pid,
            fd,
            cause,
        }
    }
}

impl TimeOption {
    fn name(self) -> &'static str {
        match self {
            Self::Receive => "SO_RCVTIMEO",
            Self::Send => "SO_SNDTIMEO",
            Self::User => "TCP_USER_TIMEOUT",
        }
    }
}

/// The kernel holds them in 16 bits or fewer (MAX_TCP_KEEPIDLE in include/net/tcp.h).
fn seconds(time: Duration) -> u16 {
    time.as_secs().try_into().unwrap_or(u16::MAX)
}
