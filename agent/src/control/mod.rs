//! The control interface: what the agent says about itself and which orders it takes.
//!
//! [`api`] holds the types that travel as JSON. [`server`] answers on the unix socket and on the
//! TCP listener, and asks a [`Backend`] (the daemon) for everything it says. [`client`] is the
//! other end, for the command line. The interface is HTTP/1.1 so that
//! `curl --unix-socket /run/backstop/backstop.sock http://backstop/v1/destinations` works.

pub mod api;
mod backend;
pub mod client;
pub mod server;

pub use backend::{Answer, Backend, Caller, EventFeed, Manual};
