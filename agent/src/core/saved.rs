//! What of a breaker outlives the agent.

use super::{Bypass, Nanos, Reason, State};

/// A breaker as it is kept over a restart: [`Engine::save`](super::Engine::save) gives it,
/// [`Engine::restore`](super::Engine::restore) takes it.
///
/// Times are of CLOCK_MONOTONIC, so it is of use until the machine is started anew. It may come from
/// a file that anybody has edited: whatever it says, a restored breaker is in a state from which time
/// alone leads back to closed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Saved {
    /// [`State::Closed`], [`State::Open`] or [`State::HalfOpen`]. A manual state is none of the
    /// breaker's own: it is saved as closed, and whoever keeps manual states sets it again.
    pub state: State,
    /// When it came into that state.
    pub since: Nanos,
    /// Why it is not closed.
    pub reason: Reason,
    /// Closed: why it was not open though it should have been.
    pub bypassed: Option<Bypass>,
    /// Generation of the last verdict.
    pub generation: u32,
    /// Open: the cooldown's end.
    pub until: Nanos,
    /// Next cooldown, before jitter.
    pub cooldown: Nanos,
    /// Closed: since when the cooldown shrinks.
    pub healthy_since: Nanos,
    /// Redials that led to a failed probe, since it was last closed.
    pub misled: u32,
    /// Answered redials are ignored before this.
    pub distrust_until: Nanos,
    /// When the outage began.
    pub outage_since: Nanos,
    /// Calls up to these numbers (connects, exchanges) do not count,
    pub floor_seqs: [u64; 2],
    /// nor do those that ended before this.
    pub floor_at: Nanos,
    /// It opened because exchanges were broken off that had waited in health, at most for so long.
    pub broken_after: Option<Nanos>,
}
