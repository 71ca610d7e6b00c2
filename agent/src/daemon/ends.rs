//! What an agent has for itself alone: the control socket, the TCP listener, and its state directory.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result};
use rustix::fs::{FlockOperation, flock};
use tokio::net::{TcpListener, UnixListener};

use super::takeover::Live;
use crate::{
    cli::{Listen, RunArgs},
    control::server::{ControlSocket, bind_control, bind_http},
};

/// So long an agent that was killed may take to end, with all its memory.
const DYING: Duration = Duration::from_secs(2);
/// How often it is looked whether it has ended.
const LOOK: Duration = Duration::from_millis(10);

/// All of them.
pub struct Ends {
    /// The control socket.
    pub control: UnixListener,
    /// Its file.
    pub socket: ControlSocket,
    /// The listener, if one is wanted.
    pub http: Option<TcpListener>,
    /// The lock of the state directory; `None` where it could not be had after a takeover.
    pub state: Option<File>,
}

impl Ends {
    /// Opens them.
    ///
    /// # Errors
    /// When one of them is in use, or cannot be had.
    pub async fn open(args: &RunArgs) -> Result<Self> {
        let (control, socket) = bind_control(&args.socket, false)?;
        let http = http(args).await?;
        let state = Some(lock(&args.state_dir).await?);
        Ok(Self {
            control,
            socket,
            http,
            state,
        })
    }

    /// Ends the agent before, which this one has joined in enforcing, and takes its places.
    ///
    /// # Errors
    /// As [`Ends::open`]; and when the agent before does not take the order: then it is still in charge.
    pub async fn take_over(live: &Live, args: &RunArgs) -> Result<Self> {
        if let Err(error) = live.tell().await {
            if live.is_gone().await {
                tracing::warn!(
                    pid = live.pid,
                    "the agent before has ended by itself ({error:#}); this one takes its places"
                );
                return Self::open(args).await;
            }
            return Err(error);
        }
        // There is no moment without a socket. The port is free when the other one has ended.
        let (control, socket) = bind_control(&args.socket, true)?;
        live.ended().await;
        let http = http(args).await?;
        // Too late to leave things as they were.
        let state = lock(&args.state_dir)
            .await
            .inspect_err(|error| tracing::warn!("{error:#}"))
            .ok();
        Ok(Self {
            control,
            socket,
            http,
            state,
        })
    }

    /// The listener's address, or none.
    ///
    /// # Errors
    /// When the system does not tell it.
    pub fn listening(&self) -> Result<String> {
        let address = self.http.as_ref().map(TcpListener::local_addr);
        let address = address.transpose().context("name the listener")?;
        Ok(address.map_or("none".to_owned(), |address| address.to_string()))
    }
}

/// Takes the state directory: two agents would write over each other's state. The lock goes with the
/// process, however it ends. One that is killed may have let go of its socket and not of this yet.
async fn lock(directory: &Path) -> Result<File> {
    let path = directory.join("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        // A pipe in its place is an error, and nothing to wait for.
        .custom_flags(libc::O_NONBLOCK)
        .open(&path)
        .with_context(|| format!("open {}", path.display()))?;
    let deadline = Instant::now() + DYING;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(_) if Instant::now() < deadline => tokio::time::sleep(LOOK).await,
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "state directory {}: another agent uses it; give this one another with \
                         --state-dir",
                        directory.display()
                    )
                });
            }
        }
    }
}

async fn http(args: &RunArgs) -> Result<Option<TcpListener>> {
    Ok(match args.listen {
        Listen::None => None,
        Listen::Address(address) => Some(bind_http(address).await?),
    })
}
