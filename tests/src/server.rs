//! TCP servers that can be stopped and started again on the same port.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread::JoinHandle,
    time::Duration,
};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::{net::Namespace, wait};

/// Every request gets this.
const ANSWER: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\nConnection: close\r\n\r\nok\n";

/// More than any test connects at once.
const BACKLOG: i32 = 4096;

/// An HTTP server that answers everything with "ok". It stops when dropped; nobody listens then
/// and connects are refused.
pub struct Server {
    address: SocketAddr,
    accepts: Arc<AtomicU64>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Listens on `address` (port 0: any) inside the namespace.
    pub fn start(namespace: &Namespace, address: SocketAddr) -> Self {
        Self::with(namespace, address, answer)
    }

    /// Accepts as fast as it can, and hangs up at once.
    pub fn hanging_up(namespace: &Namespace, address: SocketAddr) -> Self {
        Self::begin(namespace, address, drop)
    }

    /// As [`Server::start`], but does with each connection what the test says, on a thread of its
    /// own.
    pub fn with(
        namespace: &Namespace,
        address: SocketAddr,
        handler: impl Fn(TcpStream) + Send + Sync + 'static,
    ) -> Self {
        let handler = Arc::new(handler);
        Self::begin(namespace, address, move |stream| {
            let handler = Arc::clone(&handler);
            std::thread::spawn(move || handler(stream));
        })
    }

    fn begin(
        namespace: &Namespace,
        address: SocketAddr,
        handler: impl Fn(TcpStream) + Send + 'static,
    ) -> Self {
        let accepts = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&accepts);
        let stop = eventfd(0, EventfdFlags::CLOEXEC).expect("make an eventfd");
        let stopped = stop.try_clone().expect("copy a descriptor");
        let listener = namespace.enter(|| {
            let listener =
                TcpListener::bind(address).unwrap_or_else(|e| panic!("listen on {address}: {e}"));
            // The standard library's backlog is 128. When more connect at once, the kernel answers
            // with SYN cookies, and one cookie may make two connections: a repeated segment of a
            // client whose first one is closed already makes another.
            rustix::net::listen(&listener, BACKLOG).expect("listen with room for all");
            listener
        });
        let address = listener.local_addr().expect("the listener's address");
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let _ = ready.send(());
            serve(&listener, &stopped, &counter, &handler);
        });
        is_ready.recv().expect("the server's thread");
        Self {
            address,
            accepts,
            stop,
            thread: Some(thread),
        }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections accepted so far.
    pub fn accepts(&self) -> u64 {
        self.accepts.load(Ordering::SeqCst)
    }

    /// Waits until this many connections were accepted; more than that fails the test.
    #[track_caller]
    pub fn wait_accepts(&self, count: u64) {
        let enough = || (self.accepts() >= count).then_some(());
        wait::until(
            &format!("{count} connections"),
            Duration::from_secs(60),
            enough,
        );
        assert_eq!(self.accepts(), count);
    }

    /// Stops it; when this returns, connects are refused.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(
    listener: &TcpListener,
    stop: &OwnedFd,
    accepts: &AtomicU64,
    handler: &impl Fn(TcpStream),
) {
    loop {
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        if poll(&mut fds, None).is_err() {
            continue;
        }
        if !fds[1].revents().is_empty() {
            // Closing would not do: a program that another test starts at this moment has a copy
            // of every descriptor until it executes.
            let _ = rustix::net::shutdown(listener, rustix::net::Shutdown::Both);
            return;
        }
        if let Ok((stream, _)) = listener.accept() {
            accepts.fetch_add(1, Ordering::SeqCst);
            // A peer that says nothing must not keep a thread beyond its test for ever.
            let _ = stream.set_read_timeout(Some(Duration::from_secs(300)));
            let _ = stream.set_nodelay(true);
            handler(stream);
        }
    }
}

/// Reads one request's head and answers it.
fn answer(mut stream: TcpStream) {
    if read_head(&mut stream).is_some() {
        let _ = stream.write_all(ANSWER);
    }
}

/// Reads up to the empty line that ends the head of an HTTP request, and not further; `None` when
/// the peer ends before.
pub fn read_head(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read(&mut byte) {
            Ok(1..) => head.push(byte[0]),
            _ => return None,
        }
    }
    Some(String::from_utf8_lossy(&head).into_owned())
}

/// Closes a connection by a reset.
pub fn reset(stream: TcpStream) {
    let option = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // SAFETY: plain system call with a structure of the said length.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const option).cast(),
            size_of::<libc::linger>() as libc::socklen_t,
        )
    };
    assert_eq!(result, 0, "SO_LINGER: {}", std::io::Error::last_os_error());
    drop(stream);
}
