//! `run --takeover`: an upgrade without a gap. Both sides of it.
//!
//! The new agent loads everything, then asks the live one on the control socket for its state
//! (`POST /v1/handover`), makes the rows of its breakers and puts their verdicts in force before it
//! attaches, as after a restart. From then on both refuse: the old one's programs run first on each
//! connect, and what they refuse counts as `local` with the new one. When the new agent has adopted the
//! connections that exist and has seen itself enforce, it tells the old one to end (`POST
//! /v1/handover/end`), puts its own socket in place of the old one's, and takes the TCP listener when
//! that is free.
//!
//! Should the old agent end meanwhile (killed, most likely), the new one goes on as an ordinary start: with
//! the state that it has got already, else with what is in the state directory.
//!
//! Until it is told to end, the old agent is in charge and nothing of it has changed, whatever becomes of
//! the new one. As long as the new one lives, the old one refuses what would change its state (manual
//! states, pause, reload), so that nothing is said to an agent that is about to end.
//!
//! Calls are judged once: what the old agent has in its windows comes with the state, and what ends after
//! the new one has attached is in its own. The agent's own timeouts (read, write, deadline, stall) are
//! the old one's business until it has ended.

use std::{
    os::fd::OwnedFd,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::{memo::file::Document, node::Node};
use crate::control::{
    api::{ApiError, Handover, Paused, Peer},
    client::{Client, ClientError},
};

/// An agent that says nothing for so long is not taken over from.
const PATIENCE: Duration = Duration::from_secs(5);
/// From being told to end to the end: it gives options back on sockets that programs may keep locked.
const END: Duration = Duration::from_secs(30);
/// How often it is looked whether it has ended.
const LOOK: Duration = Duration::from_millis(2);

/// The agent that is taken over from.
pub struct Live {
    client: Client,
    process: OwnedFd,
    /// Its process.
    pub pid: u32,
    /// Its version.
    pub version: String,
    /// Its pause.
    pub paused: Option<Paused>,
    /// Names that its operators have given orders for.
    pub names: Vec<Arc<str>>,
}

impl Live {
    /// The agent on the socket, which from now on refuses to be changed; `None` when nobody answers
    /// there.
    ///
    /// # Errors
    /// When there is one that cannot be taken over from. Nothing has changed then.
    pub async fn find(socket: &Path) -> Result<Option<Self>> {
        let client = Client::new(socket).with_patience(PATIENCE);
        let mut answer = ask(&client).await;
        let deadline = Instant::now() + PATIENCE;
        let mut is_said = false;
        while let Err(error) = &answer
            && let Some(ClientError::Broken { .. }) = error.downcast_ref()
            && Instant::now() < deadline
        {
            // It may have ended in the middle of its answer: then nobody answers soon. (Who is killed closes one
            // descriptor after the other: a connection, and a moment later the listener.)
            if !std::mem::replace(&mut is_said, true) {
                tracing::warn!("{error:#}; asking again");
            }
            tokio::time::sleep(LOOK).await;
            answer = ask(&client).await;
        }
        let (handover, document) = match answer {
            Ok(answer) => answer,
            Err(error) => match error.downcast_ref::<ClientError>() {
                Some(ClientError::Unreachable { source, .. })
                    if source.kind() != std::io::ErrorKind::PermissionDenied =>
                {
                    return Ok(None);
                }
                _ => return Err(not_taken_over(error, socket)),
            },
        };
        let pid = i32::try_from(handover.pid).ok().and_then(Pid::from_raw);
        let pid = pid.context("the agent on the socket names no process of its own")?;
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => process,
            // It has ended since, or lives where nobody can see it: then it still answers.
            Err(_) if is_unreachable(&ask(&client).await) => return Ok(None),
            Err(error) => {
                return Err(error).with_context(|| {
                    format!(
                        "the agent on the socket says that it is process {}, which is not to be seen \
                         from here",
                        handover.pid
                    )
                });
            }
        };
        Ok(Some(Self {
            client,
            process,
            pid: handover.pid,
            version: handover.version,
            paused: handover.paused,
            names: document.names(),
        }))
    }

    /// Its state as it is now.
    ///
    /// # Errors
    /// When it does not answer any more, or with something else.
    pub async fn state(&self) -> Result<Document> {
        let (_, document) = ask(&self.client).await?;
        Ok(document)
    }

    /// Whether it has ended. One that is killed answers no more a moment before.
    pub async fn is_gone(&self) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if has_ended(&self.process) {
                return true;
            }
            tokio::time::sleep(LOOK).await;
        }
        false
    }

    /// Tells it to end. From here on there is no way back.
    ///
    /// # Errors
    /// When it does not take it: then it is still in charge.
    pub async fn tell(&self) -> Result<()> {
        match self.client.post("/v1/handover/end").await {
            // It may be gone before its answer is out.
            Ok(_) | Err(ClientError::Broken { .. }) => Ok(()),
            Err(error) => Err(error).context("tell the agent before to end"),
        }
    }

    /// Waits until it has ended. One that does not is killed.
    pub async fn ended(&self) {
        for (what, patience) in [("ends by itself", END), ("is killed", PATIENCE)] {
            let deadline = Instant::now() + patience;
            while Instant::now() < deadline {
                if has_ended(&self.process) {
                    return;
                }
                tokio::time::sleep(LOOK).await;
            }
            tracing::warn!(
                pid = self.pid,
                "the agent before has not ended within {patience:?} after it {what}"
            );
            let _ = pidfd_send_signal(&self.process, Signal::KILL);
        }
    }
}

/// Why the agent on a socket was not taken over from, and what to do about it.
pub(super) fn not_taken_over(error: anyhow::Error, socket: &Path) -> anyhow::Error {
    let what = format!(
        "take over from the agent on {}: nothing has changed",
        socket.display()
    );
    // Whoever says what is wrong says what to do, and is not to be killed for it.
    let is_mute = matches!(
        error.downcast_ref(),
        Some(ClientError::Silent { .. } | ClientError::Broken { .. })
    );
    if is_mute {
        error.context(format!("{what}; {}", remedy(socket)))
    } else {
        error.context(what)
    }
}

/// What to do about an agent that does not answer.
fn remedy(socket: &Path) -> String {
    let Some(pid) = listener(socket) else {
        return "if it cannot answer, end it and start without --takeover".to_owned();
    };
    if is_stopped(pid) {
        // Its heartbeat is old: the kernel refuses nothing for it.
        format!(
            "it is process {pid}, which is stopped, so that every connect passes: let it go on (`kill -CONT \
             {pid}`) and take over again, or end it (`kill -KILL {pid}`) and start without --takeover"
        )
    } else {
        format!("if it cannot answer, end it (it is process {pid}) and start without --takeover")
    }
}

/// The process that listens on a socket, if it can be seen from here.
fn listener(socket: &Path) -> Option<i32> {
    let stream = std::os::unix::net::UnixStream::connect(socket).ok()?;
    let peer = rustix::net::sockopt::socket_peercred(&stream).ok()?;
    Some(peer.pid.as_raw_nonzero().get())
}

fn is_stopped(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_some_and(|state| state.trim_start().starts_with(['T', 't']))
}

fn is_unreachable<T>(answer: &Result<T>) -> bool {
    let error = answer.as_ref().err().and_then(|error| error.downcast_ref());
    matches!(error, Some(ClientError::Unreachable { .. }))
}

async fn ask(client: &Client) -> Result<(Handover, Document)> {
    let body = match client.post("/v1/handover").await {
        Err(ClientError::Refused { status: 404, .. }) => {
            bail!("it is of a version that cannot be taken over from: restart it")
        }
        answer => answer?,
    };
    let handover: Handover =
        serde_json::from_slice(&body).context("its answer is not one of an agent")?;
    let document: Document = serde_json::from_value(handover.state.clone())
        .context("its state is of another form: restart it")?;
    ensure!(
        document.is_known(),
        "its state is of another form: restart it"
    );
    Ok((handover, document))
}

/// The process of an agent that is taking over from this one.
pub struct Heir {
    pid: i32,
    process: OwnedFd,
}

impl Heir {
    /// Its process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    fn of(by: Peer) -> Option<Self> {
        let pid = by.pid?;
        let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        Some(Self { pid, process })
    }
}

fn has_ended(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

impl Node {
    /// Begins to hand over, or goes on with it: the state as it is now.
    pub(super) async fn hand_over(&mut self, by: Peer) -> Result<Handover, ApiError> {
        self.may_change(Some(by))?;
        if self.heir.is_none() {
            let heir = Heir::of(by).ok_or_else(|| {
                ApiError::BadRequest(
                    "who takes over must live in this agent's process namespace".to_owned(),
                )
            })?;
            self.heir = Some(heir);
            tracing::info!(%by, "another agent begins to take over");
        }
        let document = self
            .state()
            .await
            .ok_or_else(|| ApiError::Unavailable("the event thread has ended".to_owned()))?;
        Ok(Handover {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            paused: self.pause.current().cloned(),
            state: serde_json::to_value(document)
                .map_err(|e| ApiError::Internal(format!("writing the state: {e}")))?,
        })
    }

    /// Ends, for another agent is in charge by now.
    pub(super) fn end_handover(&mut self, by: Peer) -> Result<(), ApiError> {
        if self
            .heir
            .as_ref()
            .is_none_or(|heir| Some(heir.pid) != by.pid)
        {
            return Err(ApiError::Conflict(
                "no takeover by this process has begun".to_owned(),
            ));
        }
        tracing::info!(%by, "another agent has taken over; this one ends");
        self.handed_over = true;
        Ok(())
    }

    /// Nothing is changed while another agent takes over.
    pub(super) fn may_change(&mut self, by: Option<Peer>) -> Result<(), ApiError> {
        let Some(heir) = &self.heir else {
            return Ok(());
        };
        if has_ended(&heir.process) {
            tracing::warn!("the agent that was taking over has ended; this one stays in charge");
            self.heir = None;
            return Ok(());
        }
        if by.and_then(|by| by.pid) == Some(heir.pid) {
            return Ok(());
        }
        Err(ApiError::Conflict(format!(
            "another agent (pid {}) is taking over; ask again in a moment",
            heir.pid
        )))
    }
}
