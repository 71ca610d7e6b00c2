//! The control server on the unix socket, and the read-only listener for scrapes and probes.
//!
//! Nothing that a client does or fails to do may disturb the agent: a connection takes one request,
//! heads and bodies are bounded, a client that sends or reads too slowly is cut off, connections,
//! event readers and large answers are limited in number, and the daemon never waits for any of
//! them.

mod events;
#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod flood_tests;
mod heads;
mod large;
mod routes;
mod socket;
mod stall;
#[cfg(test)]
pub(crate) mod tests;

use std::{
    io,
    pin::pin,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{Extension, Router, middleware};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{Mutex, Semaphore},
    task::JoinSet,
};

use super::{Backend, api::Peer};
use heads::{Arrival, Waiting};
use large::{Page, Turns};
use stall::StallGuard;

pub use socket::{BindError, ControlSocket, bind_control, bind_http};

/// What a client may take up.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time, per listener; more are answered with 503 at once. On the TCP
    /// listener those that are being answered, probes not counted.
    pub connections: usize,
    /// Connections of the TCP listener that have not sent a request yet; one more cuts the oldest
    /// of them off.
    pub http_waiting: usize,
    /// Time to send the head of a request to the TCP listener.
    pub http_head: Duration,
    /// How long a page of metrics is shared by all who ask.
    pub page: Duration,
    /// A page of metrics below this size, bytes, is not shared but made anew.
    pub page_bytes: usize,
    /// Pages of metrics being sent at a time. The bytes are the same for all, but each has a
    /// buffer in the kernel.
    pub pages: usize,
    /// Answers to `status` in memory at a time: up to some 75 MB each.
    pub statuses: usize,
    /// Longest wait for one of those before the answer is 503.
    pub turn: Duration,
    /// Readers of `events?follow=true` at a time; fewer than `connections`, so that `status`
    /// always gets through.
    pub followers: usize,
    /// Time to send the head of a request.
    pub head: Duration,
    /// Largest head of a request, bytes.
    pub head_bytes: usize,
    /// Largest body of a request, bytes. No request needs one.
    pub body_bytes: u64,
    /// Longest time that the client takes nothing while something is to be sent.
    pub stall: Duration,
    /// Longest time that the daemon's loop may take to answer.
    pub answer: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 64,
            http_waiting: 256,
            http_head: Duration::from_secs(1),
            page: Duration::from_secs(1),
            page_bytes: 8 * 1024 * 1024,
            pages: 4,
            statuses: 2,
            turn: Duration::from_secs(2),
            followers: 32,
            head: Duration::from_secs(5),
            head_bytes: 16 * 1024,
            body_bytes: 4 * 1024,
            stall: Duration::from_secs(10),
            answer: Duration::from_secs(10),
        }
    }
}

/// What the handlers share.
struct Shared {
    backend: Arc<dyn Backend>,
    limits: Limits,
    followers: Arc<Semaphore>,
    pages: Turns,
    page: Arc<Page>,
    statuses: Turns,
    /// Locked while rows are collected and written: they are larger than what is sent.
    collecting: Mutex<()>,
}

impl Shared {
    fn new(backend: Arc<dyn Backend>, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            backend,
            limits,
            followers: Arc::new(Semaphore::new(limits.followers)),
            pages: Turns::new(limits.pages, limits.turn, "pages of metrics"),
            page: Page::new(&limits),
            statuses: Turns::new(limits.statuses, limits.turn, "answers to status"),
            collecting: Mutex::default(),
        })
    }
}

/// Serves the control interface; ends only when dropped, and its connections with it.
pub async fn serve_control(listener: UnixListener, backend: Arc<dyn Backend>, limits: Limits) {
    let router = routes::control(Shared::new(backend, limits));
    serve(listener, router, limits).await;
}

/// Serves `/metrics`, `/healthz` and `/readyz`; ends only when dropped.
pub async fn serve_http(listener: TcpListener, backend: Arc<dyn Backend>, limits: Limits) {
    let router =
        routes::http(Shared::new(backend, limits)).layer(middleware::from_fn(heads::enter));
    let limits = Limits {
        head: limits.http_head,
        ..limits
    };
    let places = Arc::new(Semaphore::new(limits.connections));
    let mut waiting = Waiting::new(limits.http_waiting);
    let mut connections = JoinSet::new();
    let mut failures = Failures::default();
    loop {
        let Some((stream, _)) = accept(&listener, &mut connections, &mut failures).await else {
            continue;
        };
        let arrival = Arrival::new(&places);
        let weak = Arc::downgrade(&arrival);
        let router = router.clone().layer(Extension(arrival));
        let task = connections.spawn(connection(stream, router, limits));
        waiting.push(weak, task);
        // Connections that bring a request at once are to be seen before many more are accepted.
        tokio::task::yield_now().await;
    }
}

/// A listener of either kind.
trait Listener {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;
    async fn accept(&self) -> io::Result<(Self::Stream, Option<Peer>)>;
    /// Sends what fits without waiting.
    fn try_write(stream: &Self::Stream, bytes: &[u8]) -> io::Result<usize>;
}

impl Listener for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, Option<Peer>)> {
        let (stream, _) = UnixListener::accept(self).await?;
        let credentials = stream.peer_cred()?;
        let peer = Peer {
            uid: credentials.uid(),
            // 0 is the kernel's word for a process outside our process namespace.
            pid: credentials.pid().filter(|pid| *pid > 0),
        };
        Ok((stream, Some(peer)))
    }

    fn try_write(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
        stream.try_write(bytes)
    }
}

impl Listener for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, Option<Peer>)> {
        let (stream, _) = TcpListener::accept(self).await?;
        Ok((stream, None))
    }

    fn try_write(stream: &TcpStream, bytes: &[u8]) -> io::Result<usize> {
        stream.try_write(bytes)
    }
}

const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n\
    Connection: close\r\n\r\n{\"error\":\"too many connections to the agent; try again\"}";

async fn serve<L: Listener>(listener: L, router: Router, limits: Limits) {
    let slots = Arc::new(Semaphore::new(limits.connections));
    let mut connections = JoinSet::new();
    let mut failures = Failures::default();
    loop {
        let Some((stream, peer)) = accept(&listener, &mut connections, &mut failures).await else {
            continue;
        };
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            // Whether it arrives or not, the connection ends here.
            let _ = L::try_write(&stream, BUSY);
            continue;
        };
        let router = match peer {
            Some(peer) => router.clone().layer(Extension(peer)),
            None => router.clone(),
        };
        connections.spawn(async move {
            connection(stream, router, limits).await;
            drop(slot);
        });
    }
}

/// The next connection; `None` when there was something else to do.
async fn accept<L: Listener>(
    listener: &L,
    connections: &mut JoinSet<()>,
    failures: &mut Failures,
) -> Option<(L::Stream, Option<Peer>)> {
    let accepted = tokio::select! {
        accepted = listener.accept() => accepted,
        Some(_) = connections.join_next() => return None,
    };
    match accepted {
        Ok(accepted) => Some(accepted),
        Err(error) => {
            // Out of descriptors, or a client that is gone already: the next one may be luckier.
            if let Some(unsaid) = failures.say(Instant::now()) {
                tracing::warn!(
                    %error,
                    "accept on a control listener failed (and {unsaid} times before that were not logged; \
                     this is said once a minute at most)"
                );
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}

/// A line once a minute at most, of what fails twenty times a second while descriptors are out.
#[derive(Default)]
struct Failures {
    /// When it was last said.
    said: Option<Instant>,
    /// Not said since.
    unsaid: u64,
}

impl Failures {
    const EVERY: Duration = Duration::from_secs(60);

    /// One more; how many before it were not said, where it is to be said.
    fn say(&mut self, now: Instant) -> Option<u64> {
        if self.said.is_some_and(|said| now - said < Self::EVERY) {
            self.unsaid += 1;
            return None;
        }
        self.said = Some(now);
        Some(std::mem::take(&mut self.unsaid))
    }
}

/// One request and its answer.
async fn connection<S>(stream: S, router: Router, limits: Limits)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let io = TokioIo::new(StallGuard::new(stream, limits.stall));
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head)
        // At least 8 KiB, says hyper.
        .max_buf_size(limits.head_bytes.max(8192))
        // One request a connection: a client that lingers takes no slot.
        .keep_alive(false)
        .serve_connection(io, TowerToHyperService::new(router));
    if let Err(error) = pin!(served).await {
        tracing::debug!(%error, "a control connection ended early");
    }
}
