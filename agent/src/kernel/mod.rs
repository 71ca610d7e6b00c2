//! The kernel side as seen from the agent: load, attach, map into memory, read events.
//!
//! Nothing here decides anything. All `unsafe` that has to do with shared memory is in
//! [`mapped`] and [`table`].

pub mod btf;
pub mod cgroup;
pub mod clock;
pub mod events;
pub mod grace;
pub mod mapped;
pub mod programs;
pub mod support;
pub mod table;

pub use programs::{Kernel, LoadOptions};
pub use table::Table;
