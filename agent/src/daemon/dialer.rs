//! The agent's own dials to sick destinations (redial): a thread of its own, because entering a
//! namespace concerns a thread.
//!
//! A dial is a plain connect that is closed as soon as it is established; no byte is sent. The
//! agent's connects pass the hook uncounted.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6},
    os::fd::OwnedFd,
    sync::mpsc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, connect, socket_with, sockopt},
};

use super::reactor::{Command, Commander};
use crate::{
    core::{DialTarget, Nanos},
    kernel::clock,
    sockets::namespace::{Namespaces, Place, netns_cookie},
};

/// A dial ends after this long at the latest, so that one to a silent host does not delay the
/// next by more (the kernel repeats a SYN after one second).
const LONGEST: Nanos = Nanos::from_secs(1);
/// How often new dials are looked for while others are pending.
const TURN: Duration = Duration::from_millis(5);

/// One dial.
#[derive(Clone, Copy, Debug)]
pub struct Dial {
    /// Whom.
    pub target: DialTarget,
    /// From which network namespace.
    pub netns_inode: u32,
    /// A process that was in it.
    pub pid: u32,
    /// The policy's connect timeout, ms; 0: none.
    pub timeout_ms: u32,
}

struct Pending {
    target: DialTarget,
    socket: OwnedFd,
    until: Nanos,
}

/// Starts the thread; it ends when the sender is dropped.
///
/// # Errors
/// When the system gives no thread.
pub fn start(
    orders: mpsc::Receiver<Dial>,
    commander: Commander,
) -> Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new()
        .name("backstop-dials".into())
        .spawn(move || run(&orders, &commander))
        .context("start the dialer thread")
}

fn run(orders: &mpsc::Receiver<Dial>, commander: &Commander) {
    let mut namespaces = Namespaces::default();
    let mut pending: Vec<Pending> = Vec::new();
    loop {
        if pending.is_empty() {
            let Ok(dial) = orders.recv() else { return };
            begin(&mut namespaces, dial, &mut pending, commander);
        }
        loop {
            match orders.try_recv() {
                Ok(dial) => begin(&mut namespaces, dial, &mut pending, commander),
                Err(mpsc::TryRecvError::Empty) => break,
                Err(mpsc::TryRecvError::Disconnected) => return,
            }
        }
        finish(&mut pending, commander);
    }
}

fn begin(
    namespaces: &mut Namespaces,
    dial: Dial,
    pending: &mut Vec<Pending>,
    commander: &Commander,
) {
    let target = dial.target;
    let place = Place {
        inode: dial.netns_inode,
        pids: &[dial.pid],
    };
    match dialled(namespaces, place, &target) {
        Ok(Some(socket)) => {
            let longest = match dial.timeout_ms {
                0 => LONGEST,
                ms => LONGEST.min(Nanos::from_millis(u64::from(ms))),
            };
            let until = Nanos(clock::now().0.saturating_add(longest.0));
            pending.push(Pending {
                target,
                socket,
                until,
            });
        }
        Ok(None) => commander.send(Command::DialEnded(target, true)),
        Err(error) => {
            tracing::debug!("redial of {}: {error:#}", address(&target));
            commander.send(Command::DialEnded(target, false));
        }
    }
}

fn dialled(
    namespaces: &mut Namespaces,
    place: Place<'_>,
    target: &DialTarget,
) -> Result<Option<OwnedFd>> {
    Ok(namespaces.within(place, || open(target))??)
}

/// Begins a connect; `None` when it was established at once.
fn open(target: &DialTarget) -> Result<Option<OwnedFd>, Errno> {
    let address = address(target);
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    // Inodes of namespaces are used again, cookies are not.
    if netns_cookie(&socket).is_some_and(|cookie| cookie != target.netns_cookie) {
        return Err(Errno::NXIO);
    }
    match connect(&socket, &address) {
        Ok(()) => Ok(None),
        Err(Errno::INPROGRESS) => Ok(Some(socket)),
        Err(error) => Err(error),
    }
}

/// Reports what has ended, waiting at most one turn.
fn finish(pending: &mut Vec<Pending>, commander: &Commander) {
    let mut fds: Vec<PollFd<'_>> = pending
        .iter()
        .map(|dial| PollFd::new(&dial.socket, PollFlags::OUT))
        .collect();
    let timeout = Timespec {
        tv_sec: 0,
        tv_nsec: TURN.as_nanos() as i64,
    };
    let _ = poll(&mut fds, Some(&timeout));
    let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    let now = clock::now();
    let mut ready = ready.into_iter();
    pending.retain(|dial| {
        if ready.next() == Some(true) {
            let success = matches!(sockopt::socket_error(&dial.socket), Ok(Ok(())));
            commander.send(Command::DialEnded(dial.target, success));
            return false;
        }
        if now >= dial.until {
            commander.send(Command::DialEnded(dial.target, false));
            return false;
        }
        true
    });
}

fn address(target: &DialTarget) -> SocketAddr {
    let port = u16::from_be(target.port_be);
    match Ipv6Addr::from(target.addr).to_canonical() {
        IpAddr::V6(addr) => SocketAddr::V6(SocketAddrV6::new(addr, port, 0, target.ifindex)),
        addr => SocketAddr::new(addr, port),
    }
}
