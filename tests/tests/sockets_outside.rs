//! What the agent's hands do to sockets of other processes, and to no other.

#[path = "sockets_outside/abort.rs"]
mod abort;
#[path = "sockets_outside/common.rs"]
mod common;
#[path = "sockets_outside/look.rs"]
mod look;
#[path = "sockets_outside/options.rs"]
mod options;
#[path = "sockets_outside/process.rs"]
mod process;
#[path = "sockets_outside/races.rs"]
mod races;
