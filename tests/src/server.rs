//! TCP servers that can be stopped and started again on the same port.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
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
        let accepts = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&accepts);
        let stop = eventfd(0, EventfdFlags::CLOEXEC).expect("make an eventfd");
        let stopped = stop.try_clone().expect("copy a descriptor");
        let listener = namespace.enter(|| {
            TcpListener::bind(address).unwrap_or_else(|e| panic!("listen on {address}: {e}"))
        });
        let address = listener.local_addr().expect("the listener's address");
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let _ = ready.send(());
            serve(&listener, &stopped, &counter);
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
            Duration::from_secs(5),
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

fn serve(listener: &TcpListener, stop: &OwnedFd, accepts: &AtomicU64) {
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
            std::thread::spawn(move || answer(stream));
        }
    }
}

/// Reads one request's head and answers it.
fn answer(mut stream: TcpStream) {
    // A peer that says nothing must not keep a thread beyond its test for long.
    let _ = stream.set_read_timeout(Some(Duration::from_secs(30)));
    let mut head = Vec::new();
    let mut buffer = [0; 2048];
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        match stream.read(&mut buffer) {
            Ok(count @ 1..) => head.extend_from_slice(&buffer[..count]),
            _ => return,
        }
    }
    let _ = stream.write_all(ANSWER);
}
