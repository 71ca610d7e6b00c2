//! The agent as a running whole: start, select loop, stop.
//!
//! Threads: the event thread ([`reactor`]: ring, core, verdicts), the dialer ([`dialer`]), the one
//! that looks at exchanges without an answer ([`waiting`]), and the main thread with the select loop ([`node`]) and the servers. The start is in [`start`].

pub mod adopt;
mod backend;
pub mod buckets;
pub mod canary;
pub mod checkup;
pub mod dialer;
mod ends;
pub mod evict;
mod explain;
mod gone;
pub mod journal;
pub mod latency;
mod manual;
pub mod memo;
pub mod memory;
mod named;
mod neighbours;
pub mod node;
mod operations;
mod orders;
pub mod pause;
pub mod plan;
pub mod priority;
pub mod reactor;
mod refusals;
mod repeated;
pub mod requests;
pub mod scrape;
pub mod settle;
pub mod start;
mod takeover;
pub mod tally;
mod told;
pub mod upkeep;
pub mod view;
pub mod waiting;
pub mod watch;
mod who;

pub use start::run;
