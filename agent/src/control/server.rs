//! The control server on the unix socket, and the read-only listener for scrapes and probes.
//!
//! Nothing that a client does or fails to do may disturb the agent: a connection takes one request,
//! heads and bodies are bounded, a client that sends or reads too slowly is cut off, connections
//! and event readers are limited in number, and the daemon never waits for any of them.

mod events;
#[cfg(test)]
pub(crate) mod fake;
mod routes;
mod socket;
mod stall;
#[cfg(test)]
pub(crate) mod tests;

use std::{io, pin::pin, sync::Arc, time::Duration};

use axum::{Extension, Router};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::Semaphore,
    task::JoinSet,
};

use super::{Backend, api::Peer};
use stall::StallGuard;

pub use socket::{BindError, ControlSocket, bind_control, bind_http};

/// What a client may take up.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections at a time, per listener; more are answered with 503 at once.
    pub connections: usize,
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
}

impl Shared {
    fn new(backend: Arc<dyn Backend>, limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            backend,
            limits,
            followers: Arc::new(Semaphore::new(limits.followers)),
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
    let router = routes::http(Shared::new(backend, limits));
    serve(listener, router, limits).await;
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
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors, or a client that is gone already: the next one may be luckier.
                tracing::warn!(%error, "accept on a control listener failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
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
