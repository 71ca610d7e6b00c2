//! Between the look and the act a socket goes and another takes its place: 10,000 times.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    sync::{
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use backstop::sockets::{
    abort::Fate,
    diag::Target,
    look::Tuple,
    options::{Tightened, TimeOption, Wanted, reach},
};
use rustix::net::{
    AddressFamily, SocketType, bind, connect, socket,
    sockopt::{self, Timeout},
};
use tests::net::Namespace;

use crate::common::diag;

const TRIES: usize = 10_000;

/// The port that every connection of the program comes from.
const FROM: u16 = 7777;

/// A connection with always the same two ends; closing it leaves nothing (a reset, no TIME_WAIT).
struct Same {
    ours: OwnedFd,
    theirs: TcpStream,
    target: Target,
}

fn same(listener: &TcpListener) -> Same {
    let to = listener.local_addr().expect("its address");
    let from: SocketAddr = (to.ip(), FROM).into();
    let ours = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    sockopt::set_socket_reuseaddr(&ours, true).expect("SO_REUSEADDR");
    sockopt::set_socket_linger(&ours, Some(Duration::ZERO)).expect("SO_LINGER");
    bind(&ours, &from).expect("bind");
    connect(&ours, &to).expect("connect");
    let theirs = listener.accept().expect("accept").0;
    let target = Target {
        tuple: Tuple::new(from, to, 0),
        cookie: sockopt::socket_cookie(&ours).expect("its cookie"),
    };
    Same {
        ours,
        theirs,
        target,
    }
}

/// Whether a byte still goes through.
fn works(same: &Same) -> bool {
    let sent = rustix::io::write(&same.ours, b"x") == Ok(1);
    sent && matches!(std::io::Read::read(&mut &same.theirs, &mut [0]), Ok(1))
}

/// Closes a connection, and makes one with the same ends.
fn replaced(old: Same, listener: &TcpListener) -> Same {
    let Same {
        ours, mut theirs, ..
    } = old;
    drop(ours);
    // Not before the server's end has gone: it would hold up the new connection for a second.
    while std::io::Read::read(&mut theirs, &mut [0]).is_ok_and(|count| count > 0) {}
    drop(theirs);
    same(listener)
}

#[test]
fn an_abort_never_hits_the_successor() {
    let namespace = Namespace::new("successor");
    namespace.enter(|| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let (replace, orders) = mpsc::channel::<Same>();
        let (done, successors) = mpsc::channel::<Same>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for old in orders {
                    done.send(replaced(old, &listener)).expect("wanted");
                }
            });
            succeed(&namespace, &listener, replace, &successors);
        });
    });
}

fn succeed(
    namespace: &Namespace,
    listener: &TcpListener,
    replace: mpsc::Sender<Same>,
    successors: &mpsc::Receiver<Same>,
) {
    let mut now = Some(same(listener));
    let (mut gone, mut aborted) = (0, 0);
    diag(namespace, &[], |diag| {
        for at in 0..TRIES {
            let target = now.as_ref().expect("one").target;
            // Mostly the successor is there when the act comes; else it comes about just then.
            let meanwhile = at % 4 == 0;
            let mut next = None;
            let fates = diag.abort(&[target], |look| {
                assert_eq!(look.cookie, target.cookie);
                let old = now.take().expect("once");
                if meanwhile {
                    replace.send(old).expect("send");
                } else {
                    next = Some(replaced(old, listener));
                }
                true
            });
            let next = next.unwrap_or_else(|| successors.recv().expect("one"));
            match fates[..] {
                [Fate::Gone] => gone += 1,
                [Fate::Aborted] if meanwhile => aborted += 1,
                _ => panic!("{fates:?}"),
            }
            assert!(works(&next), "try {at}: the successor was hit");
            assert_ne!(next.target.cookie, target.cookie);
            assert_eq!(next.target.tuple, target.tuple);
            now = Some(next);
        }
    });
    assert_eq!(gone + aborted, TRIES);
}

/// A descriptor's number stands for one socket and then for another, while options are set.
#[test]
fn an_option_never_hits_the_successor() {
    use std::os::unix::fs::MetadataExt as _;
    let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
    let to = listener.local_addr().expect("its address");
    let open = || TcpStream::connect(to).expect("connect");
    let (meant, foreign) = (open(), open());
    let mut number = rustix::io::dup(&foreign).expect("a copy");
    // Descriptors are looked at by their numbers: the one that changes comes first.
    let first = number.as_raw_fd();
    let original = meant;
    let meant = rustix::io::fcntl_dupfd_cloexec(&original, first + 1).expect("a higher number");
    drop(original);
    let inode = std::fs::metadata(format!("/proc/self/fd/{}", meant.as_raw_fd()));
    let wanted = [Wanted {
        inode: inode.expect("its inode").ino() as u32,
        cookie: sockopt::socket_cookie(&meant).expect("its cookie"),
        spot: None,
    }];
    let ended = AtomicBool::new(false);
    let mut by_first = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for socket in [meant.as_fd(), foreign.as_fd()] {
                    rustix::io::dup3(socket, &mut number, rustix::io::DupFlags::CLOEXEC)
                        .expect("replace");
                }
            }
        });
        for at in 0..TRIES {
            let reached = reach(&wanted, [std::process::id()], |_, socket| {
                let limit = Duration::from_secs(5);
                let given = match socket.tighten(TimeOption::Receive, limit).expect("set") {
                    Tightened::Ours(given) => given,
                    other => panic!("{other:?}"),
                };
                let hit = sockopt::socket_timeout(&foreign, Timeout::Recv).expect("read");
                assert_eq!(hit, None, "try {at}: the foreign socket was touched");
                assert!(socket.give_back(&given).expect("give back"));
                socket.spot().fd
            });
            assert!(reached.problem.is_none(), "{:?}", reached.problem);
            let fd = reached.results[0].expect("its own number, at the latest");
            by_first += usize::from(fd == first);
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert!(by_first > 0, "the number that changes was never taken");
}
