//! Ending connections of other programs (SOCK_DESTROY).
//!
//! The program's next or sleeping call on the socket fails with ECONNABORTED, poll and epoll wake with
//! an error, and the peer gets a reset (net/ipv4/tcp.c, `tcp_abort`). Nothing else of a connection can
//! be ended from outside that every program feels.

use std::net::{Ipv4Addr, SocketAddr};

use rustix::{
    io::Errno,
    net::{
        AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with, sockopt,
    },
};
use thiserror::Error;

use super::{
    diag::{Diag, DiagError, Target},
    look::{Look, Tuple},
};

/// What became of one socket of a batch.
#[derive(Debug)]
pub enum Fate {
    /// It has ended now, by us.
    Aborted,
    /// It had ended by itself, or no program had it open any more.
    Gone,
    /// The look showed that it is not to be ended any more.
    Changed,
    /// The kernel does not do it.
    Refused(Errno),
    /// The look failed, so nothing was done.
    Unseen(DiagError),
}

impl Diag {
    /// Ends sockets, one after the other: a look, `still` says whether what it shows is still what
    /// the caller wants to end, and the act follows at once (some microseconds later). The result
    /// has the order of the targets.
    pub fn abort(&mut self, targets: &[Target], mut still: impl FnMut(&Look) -> bool) -> Vec<Fate> {
        let one = |target| self.abort_one(target, &mut still);
        targets.iter().map(one).collect()
    }

    /// As [`Diag::abort`], one socket.
    pub fn abort_one(&mut self, target: &Target, still: impl FnOnce(&Look) -> bool) -> Fate {
        let look = match self.look(target) {
            Ok(Some(look)) if look.is_in_use() => look,
            Ok(_) => return Fate::Gone,
            Err(error) => return Fate::Unseen(error),
        };
        if !still(&look) {
            return Fate::Changed;
        }
        match self.destroy(target) {
            Ok(()) => Fate::Aborted,
            Err(Errno::NOENT | Errno::STALE) => Fate::Gone,
            Err(errno) => Fate::Refused(errno),
        }
    }
}

/// Why no connection can be ended on this machine.
#[derive(Debug, Error)]
pub enum NoAbort {
    /// Not built in.
    #[error(
        "the kernel cannot end connections from outside: it is built without \
         CONFIG_INET_DIAG_DESTROY; read and write timeouts need a kernel that has it"
    )]
    NotBuilt,
    /// Not even looking works.
    #[error(
        "the kernel does not show TCP sockets: load the module tcp_diag, or use a kernel built with \
         CONFIG_INET_TCP_DIAG"
    )]
    NoDiag,
    /// It says no.
    #[error("ending a socket of our own to see whether it works (needs CAP_NET_ADMIN): {0}")]
    Refused(Errno),
    /// Nothing could be tried.
    #[error("make a socket of our own, to see whether it can be ended from outside: {0}")]
    NotTried(Errno),
    /// No netlink socket.
    #[error(transparent)]
    Diag(#[from] DiagError),
}

/// Whether connections can be ended here: tried on a listening socket of our own, in the calling
/// thread's network namespace. Connects nowhere.
///
/// # Errors
/// Why not, and what would help.
pub fn support() -> Result<(), NoAbort> {
    let mut diag = Diag::open()?;
    let (_socket, target) = listener().map_err(NoAbort::NotTried)?;
    // Without the module every socket seems not to be there.
    if diag.look(&target)?.is_none() {
        return Err(NoAbort::NoDiag);
    }
    match diag.destroy(&target) {
        Ok(()) => Ok(()),
        Err(Errno::OPNOTSUPP) => Err(NoAbort::NotBuilt),
        Err(errno) => Err(NoAbort::Refused(errno)),
    }
}

fn listener() -> Result<(std::os::fd::OwnedFd, Target), Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
    bind(&socket, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    listen(&socket, 0)?;
    let local = SocketAddr::try_from(getsockname(&socket)?)?;
    let target = Target {
        tuple: Tuple::new(local, (Ipv4Addr::UNSPECIFIED, 0).into(), 0),
        cookie: sockopt::socket_cookie(&socket)?,
    };
    Ok((socket, target))
}
