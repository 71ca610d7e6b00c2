//! The kernel side as seen from the agent: load, attach, map into memory, read events.
//!
//! Nothing here decides anything. All `unsafe` that has to do with shared memory is in
//! [`mapped`], [`table`] and [`connections`].

pub mod btf;
pub mod cgroup;
pub mod clock;
pub mod connections;
pub mod events;
pub mod grace;
pub mod lent;
pub mod mapped;
pub mod programs;
pub mod query;
mod sockopt;
pub mod support;
pub mod table;

pub use connections::Connections;
pub use lent::LentOptions;
pub use programs::{Kernel, LoadOptions, Visit};
pub use table::Table;
