//! The control server's view of the daemon: requests go to the select loop over a channel.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::{mpsc, oneshot};

use super::{journal::Journal, reactor::HEARTBEAT_MAX_AGE, view::OTHER};
use crate::{
    control::{
        Answer, Backend, Caller, EventFeed, Manual,
        api::{
            ApiError, ConfigView, DoctorReport, Explanation, Handover, Health, ManualResult,
            PauseResult, Peer, ReloadResult, StatusEnvelope, parse_destination,
        },
    },
    kernel::{Table, clock},
    policy::DestinationArg,
};

/// Requests that may wait for the loop.
const QUEUE: usize = 256;

/// Where an answer goes.
pub type Reply<T> = oneshot::Sender<Result<T, ApiError>>;

/// Whose rows are to be shown.
pub enum Wanted {
    /// All.
    All,
    /// The one of all those without a row of their own.
    Other,
    /// Those of a destination.
    One(DestinationArg),
}

impl Wanted {
    fn parse(text: Option<&str>) -> Result<Self, ApiError> {
        match text {
            None => Ok(Self::All),
            Some(OTHER) => Ok(Self::Other),
            Some(text) => destination(text).map(Self::One),
        }
    }
}

/// What the control server asks of the select loop.
pub enum Request {
    /// These rows.
    Status(Wanted, Reply<StatusEnvelope>),
    /// What holds for a destination when this caller connects.
    Explain(DestinationArg, Caller, Reply<Explanation>),
    /// An operator's order for a destination, for one workload or all.
    Manual(
        DestinationArg,
        Option<String>,
        Manual,
        Peer,
        Reply<ManualResult>,
    ),
    /// Switch everything off.
    Pause(Option<Duration>, Peer, Reply<PauseResult>),
    /// Switch it on again.
    Resume(Peer, Reply<PauseResult>),
    /// Give the state to an agent that takes over.
    HandOver(Peer, Reply<Handover>),
    /// End, for it has.
    EndHandover(Peer, Reply<()>),
    /// Read the configuration again.
    Reload(Peer, Reply<ReloadResult>),
    /// The configuration in force.
    Config(Reply<ConfigView>),
    /// Whether this node is protected.
    Doctor(Reply<DoctorReport>),
    /// Prometheus text.
    Metrics(Reply<String>),
}

/// Shared between the loop and the servers.
pub struct Handle {
    requests: mpsc::Sender<Request>,
    journal: Arc<Journal>,
    table: Arc<Table>,
    ready: AtomicBool,
    reason: std::sync::Mutex<String>,
}

impl Handle {
    /// A handle, and the loop's end of it.
    pub fn new(journal: Arc<Journal>, table: Arc<Table>) -> (Arc<Self>, mpsc::Receiver<Request>) {
        let (requests, receiver) = mpsc::channel(QUEUE);
        let handle = Self {
            requests,
            journal,
            table,
            ready: AtomicBool::new(false),
            reason: std::sync::Mutex::new("enforcement is not proven yet".to_owned()),
        };
        (Arc::new(handle), receiver)
    }

    /// Says whether enforcement is proven, and why not.
    pub fn set_ready(&self, ready: bool, reason: String) {
        *self
            .reason
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner) = reason;
        self.ready.store(ready, Ordering::Release);
    }

    fn ask<T: Send + 'static>(&self, request: impl FnOnce(Reply<T>) -> Request) -> Answer<T> {
        let (reply, answer) = oneshot::channel();
        let sent = self.requests.try_send(request(reply));
        Box::pin(async move {
            if sent.is_err() {
                return Err(ApiError::Unavailable(
                    "the agent is too busy to answer; try again".to_owned(),
                ));
            }
            answer
                .await
                .unwrap_or_else(|_| Err(ApiError::Unavailable("the agent is stopping".to_owned())))
        })
    }
}

fn destination(text: &str) -> Result<DestinationArg, ApiError> {
    parse_destination(text).map_err(ApiError::BadRequest)
}

fn refuse<T: Send + 'static>(error: ApiError) -> Answer<T> {
    Box::pin(async move { Err(error) })
}

impl Backend for Handle {
    fn status(&self, wanted: Option<String>) -> Answer<StatusEnvelope> {
        match Wanted::parse(wanted.as_deref()) {
            Ok(wanted) => self.ask(|reply| Request::Status(wanted, reply)),
            Err(error) => refuse(error),
        }
    }

    fn explain(&self, wanted: String, caller: Caller) -> Answer<Explanation> {
        match destination(&wanted) {
            Ok(wanted) => self.ask(|reply| Request::Explain(wanted, caller, reply)),
            Err(error) => refuse(error),
        }
    }

    fn manual(
        &self,
        wanted: String,
        workload: Option<String>,
        action: Manual,
        by: Peer,
    ) -> Answer<ManualResult> {
        match destination(&wanted) {
            Ok(wanted) => self.ask(|reply| Request::Manual(wanted, workload, action, by, reply)),
            Err(error) => refuse(error),
        }
    }

    fn pause(&self, duration: Option<Duration>, by: Peer) -> Answer<PauseResult> {
        self.ask(|reply| Request::Pause(duration, by, reply))
    }

    fn resume(&self, by: Peer) -> Answer<PauseResult> {
        self.ask(|reply| Request::Resume(by, reply))
    }

    fn reload(&self, by: Peer) -> Answer<ReloadResult> {
        self.ask(|reply| Request::Reload(by, reply))
    }

    fn hand_over(&self, by: Peer) -> Answer<Handover> {
        self.ask(|reply| Request::HandOver(by, reply))
    }

    fn end_handover(&self, by: Peer) -> Answer<()> {
        self.ask(|reply| Request::EndHandover(by, reply))
    }

    fn config(&self) -> Answer<ConfigView> {
        self.ask(Request::Config)
    }

    fn doctor(&self) -> Answer<DoctorReport> {
        self.ask(Request::Doctor)
    }

    fn events(&self, all: bool) -> EventFeed {
        self.journal.feed(all)
    }

    fn metrics(&self) -> Answer<String> {
        self.ask(Request::Metrics)
    }

    fn health(&self) -> Health {
        let beat = self.table.heartbeat();
        let age = clock::now().0.saturating_sub(beat.0);
        let alive = age <= HEARTBEAT_MAX_AGE.0;
        let reason = self
            .reason
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone();
        Health {
            alive,
            ready: alive && self.ready.load(Ordering::Acquire),
            reason: if alive {
                reason
            } else {
                format!(
                    "the event thread has not been seen for {} ms",
                    age / 1_000_000
                )
            },
        }
    }
}
