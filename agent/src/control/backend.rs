//! The seam between the control interface and the daemon.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use tokio::sync::broadcast;

use super::api::{
    ApiError, ConfigView, DoctorReport, EventRecord, Explanation, Handover, Health, ManualResult,
    PauseResult, Peer, ReloadResult, StatusEnvelope,
};

/// An answer that the daemon gives when it gets to it.
pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, ApiError>> + Send>>;

/// A manual action on the breakers of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manual {
    /// Refuse every call for that long.
    Trip(Duration),
    /// Let every call pass for that long.
    HoldClosed(Duration),
    /// Clear windows, cooldown growth and manual state.
    Reset,
}

/// Whose connects a question is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Nobody's in particular.
    Any,
    /// Those of a workload.
    Workload(String),
    /// Those of a process, by its id in the agent's process namespace.
    Process(u32),
}

/// The kept events and those to come, without a gap and without an overlap: both are to be taken
/// under the lock (or on the thread) that publishes.
pub struct EventFeed {
    /// The last ones, oldest first.
    pub kept: Vec<Arc<EventRecord>>,
    /// The ones to come. Bounded: a reader that is too slow loses its place, nobody waits for it.
    pub coming: broadcast::Receiver<Arc<EventRecord>>,
}

/// What the server asks of the daemon. The daemon's loop answers through channels; nothing here
/// may block the caller.
pub trait Backend: Send + Sync + 'static {
    /// All rows, or those of one destination (empty when none was seen).
    ///
    /// Answers with `BadRequest` when the text is not a destination. Rows need not be sorted.
    fn status(&self, destination: Option<String>) -> Answer<StatusEnvelope>;

    /// What holds for a destination, and why.
    ///
    /// Answers with `BadRequest` when the text is not a destination, `NotFound` when there is no
    /// such process or workload.
    fn explain(&self, destination: String, caller: Caller) -> Answer<Explanation>;

    /// Trips, holds closed or resets a destination, for one workload or for all.
    ///
    /// Answers with `BadRequest` when the text is not a destination, `Conflict` when it is
    /// protected.
    fn manual(
        &self,
        destination: String,
        workload: Option<String>,
        action: Manual,
        by: Peer,
    ) -> Answer<ManualResult>;

    /// Switches every verdict and timeout off, for that long or until resume.
    fn pause(&self, duration: Option<Duration>, by: Peer) -> Answer<PauseResult>;

    /// Switches them on again; no error when nothing was paused.
    fn resume(&self, by: Peer) -> Answer<PauseResult>;

    /// Reads the configuration again. `BadRequest` with every problem when it is wrong; the old
    /// one is then still in force.
    fn reload(&self, by: Peer) -> Answer<ReloadResult>;

    /// Begins to hand over to the process that asks (a new agent), or goes on with it: the state. Until
    /// that process ends, whoever would change the agent is answered with `Conflict`.
    fn hand_over(&self, by: Peer) -> Answer<Handover>;

    /// The new agent is in charge: this one ends. `Conflict` when that process has not begun.
    fn end_handover(&self, by: Peer) -> Answer<()>;

    /// The configuration in force.
    fn config(&self) -> Answer<ConfigView>;

    /// Whether this node is really protected.
    fn doctor(&self) -> Answer<DoctorReport>;

    /// Events. With `all` also failures and calls, in as far as the daemon keeps them; the server
    /// filters the ones to come.
    fn events(&self, all: bool) -> EventFeed;

    /// The Prometheus text of [`crate::metrics`].
    fn metrics(&self) -> Answer<String>;

    /// Whether the agent is alive and ready; must not wait for the daemon's loop, which may be
    /// what is ill.
    fn health(&self) -> Health;
}
