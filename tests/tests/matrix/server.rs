//! The server of all cells: takes requests and never answers, and notes when its clients end.

use std::{
    io::{Read as _, Write as _},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::AsRawFd as _,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tests::{net::Namespace, server::Server, wait};

use super::cells::{Cell, Kind, is_postgres, kind_of};

/// How often is looked whether the data of a peer that writes still moves, ns.
const LOOK_EVERY: i64 = 20_000_000;
/// No client waits for longer.
const LONGEST: Duration = Duration::from_secs(60);

/// A connection that has ended.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    address: IpAddr,
    port: u16,
    /// When the first byte of the request came.
    first: Instant,
    /// When the last byte came, or the last that there was room for.
    last: Instant,
    /// When the connection ended.
    pub end: Instant,
    is_over: bool,
    /// Its client, which no other connection of the cell has.
    peer: SocketAddr,
}

impl Seen {
    /// How long the client waited, reckoned as its timeout does.
    pub fn waited(&self, kind: Kind) -> Duration {
        let since = if kind == Kind::Deadline {
            self.first
        } else {
            self.last
        };
        self.end - since
    }
}

type All = Arc<Mutex<Vec<Seen>>>;

/// Listens on every address and the ports of all cells.
pub struct Silent {
    _servers: Vec<Server>,
    seen: All,
}

impl Silent {
    pub fn start(namespace: &Namespace, ports: impl Iterator<Item = u16>) -> Self {
        let seen = All::default();
        let servers = ports.map(|port| {
            let seen = Arc::clone(&seen);
            let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
            Server::with(namespace, any, move |stream| serve(stream, &seen))
        });
        Self {
            _servers: servers.collect(),
            seen,
        }
    }

    /// The connections of a cell, once they have ended; they are forgotten then.
    pub fn take(&self, cell: Cell) -> Vec<Seen> {
        let is_its = |seen: &Seen| (seen.address, seen.port) == (cell.address(), cell.port());
        wait::until("the end of a cell's connections", LONGEST, || {
            let mut all = self.seen.lock().expect("no panic holds it");
            let its: Vec<Seen> = all.iter().copied().filter(is_its).collect();
            let are_over = its.iter().all(|seen| seen.is_over);
            if are_over {
                all.retain(|seen| !is_its(seen));
            }
            are_over.then_some(its)
        })
    }
}

fn serve(mut stream: TcpStream, all: &All) {
    let (Ok(local), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else {
        return;
    };
    let address = local.ip().to_canonical();
    let begin = Instant::now();
    let mut seen = Seen {
        address,
        port: local.port(),
        first: begin,
        last: begin,
        end: begin,
        is_over: false,
        peer,
    };
    all.lock().expect("no panic holds it").push(seen);
    if is_postgres(local.port()) {
        greet(&mut stream);
    }
    (seen.first, seen.last) = if kind_of(address) == Kind::Write {
        hold(&stream)
    } else {
        listen(&mut stream)
    };
    seen.end = Instant::now();
    seen.is_over = true;
    let mut all = all.lock().expect("no panic holds it");
    // (Two addresses may be called from one port.)
    let is_it = |other: &&mut Seen| {
        (other.address, other.port, other.peer) == (seen.address, seen.port, seen.peer)
    };
    if let Some(place) = all.iter_mut().find(is_it) {
        *place = seen;
    }
}

/// Takes what PostgreSQL's clients begin with, and lets them in.
fn greet(stream: &mut TcpStream) -> Option<()> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).ok()?;
    let rest = u32::from_be_bytes(length).checked_sub(4)?;
    stream.read_exact(&mut vec![0; rest as usize]).ok()?;
    // AuthenticationOk, ReadyForQuery.
    stream.write_all(b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I").ok()
}

/// Reads to the end; when the first and the last byte came.
fn listen(stream: &mut TcpStream) -> (Instant, Instant) {
    let mut times: Option<(Instant, Instant)> = None;
    let mut buffer = [0; 4096];
    while let Ok(1..) = stream.read(&mut buffer) {
        let now = Instant::now();
        times = Some((times.map_or(now, |(first, _)| first), now));
    }
    times.unwrap_or_else(|| (Instant::now(), Instant::now()))
}

/// Reads nothing until the end; when the first and the last byte came that there was room for.
fn hold(stream: &TcpStream) -> (Instant, Instant) {
    let begin = Instant::now();
    let (mut last, mut unread) = (begin, 0);
    while begin.elapsed() < LONGEST {
        let mut fds = [PollFd::new(stream, PollFlags::empty())];
        let every = Timespec {
            tv_sec: 0,
            tv_nsec: LOOK_EVERY,
        };
        if poll(&mut fds, Some(&every)).is_ok_and(|ready| ready > 0) {
            break;
        }
        let mut now: libc::c_int = 0;
        // SAFETY: plain system call with room for the number that it writes.
        unsafe { libc::ioctl(stream.as_raw_fd(), libc::FIONREAD, &raw mut now) };
        if now != unread {
            (last, unread) = (Instant::now(), now);
        }
    }
    (begin, last)
}
