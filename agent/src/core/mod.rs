//! The circuit breakers, as pure state machines.
//!
//! This module decides and does nothing else: no clock, no I/O, no randomness of its own, no
//! threads, no logging. Time comes in as [`Nanos`], jitter from a seed, what was seen as
//! [`Event`]s; what is to be done goes out as [`Action`]s, each with its reason. The same events at
//! the same times therefore always give the same actions, which is what the tests, and later
//! `backstop replay`, rest on.
//!
//! ```text
//! shell ── Event, now ──► Engine ──► Breaker (one per row)  ──► Action ──► shell
//!                           │          └─ window::evaluate (reads the kernel's ring of calls)
//!                           ├─ Scopes (which rows follow one that is open)
//!                           ├─ timers (one entry per breaker)
//!                           ├─ Groups (which rows share a name, and how many of them refuse)
//!                           └─ Redial (one schedule per dialled address)
//! ```
//!
//! Events are hints: any of them may be lost, repeated or late, and every state still has a way
//! back to closed that needs nothing but [`Event::Deadline`] and a destination that works. The
//! calls themselves lie in kernel memory ([`agent_common::CallWindow`]) and are read when a hint
//! says that something failed.
//!
//! A row has two windows, of connects and of exchanges. Each is judged by itself and with the same
//! thresholds, so that a server which accepts and then fails is not saved by its accepts. The
//! breaker is one: it remembers on which window it opened, and that decides how it is probed.

mod api;
mod breaker;
mod correlated;
mod engine;
mod groups;
mod hints;
pub mod hung;
mod redial;
pub mod refusing;
mod rng;
mod saved;
mod scope;
mod settings;
mod state;
mod time;
pub mod traits;
pub mod waits;
pub mod window;

pub use api::{Action, BreakerView, DialTarget, Event, Floor, ProbeOutcome, RowId, SharedProbe};
pub use breaker::VERDICT_SLACK;
pub use correlated::{Correlated, is_loopback};
pub use engine::Engine;
pub use groups::{Endpoint, Full, GroupId, Membership, may_be_open};
pub use hung::HungRule;
pub use redial::{DIAL_WRITE_OFF, MAX_DIALS_PER_SECOND};
pub use saved::Saved;
pub use settings::BreakerSettings;
pub use state::{Bypass, Reason, ReasonKind, State, WindowKind};
pub use time::Nanos;
pub use waits::{OptionLimits, WaitLimits};
pub use window::WindowStats;

#[cfg(test)]
mod tests;
