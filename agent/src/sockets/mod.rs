//! What the agent does to the sockets of other programs, from outside.
//!
//! - [`diag`] looks at TCP sockets: their state, queues and timers as the kernel has them.
//! - [`abort`] ends them (SOCK_DESTROY), with a look immediately before each act.
//! - [`options`] sets timeouts and keepalive on a program's descriptor, and gives them back.
//! - [`process`] says whether a program can run at all: it may be stopped or frozen.
//! - [`namespace`] leads into the network namespace that the sockets are in.
//!
//! Nothing here decides: who calls says which socket and why. Every call blocks for as long as the
//! kernel takes (microseconds, but see below), so it is made on a thread of its own. No descriptor of
//! another program, and nothing that keeps its namespace alive, is held when a call has returned.
//!
//! **A socket is meant, never a number.** Addresses, ports, pids, inodes and descriptors are all used
//! again. The cookie of a socket is not, on the whole machine (net/core/sock_diag.c,
//! `__sock_gen_cookie`), so every act compares it: in the kernel for what goes by address, on the
//! copied descriptor for options.
//!
//! A look and an abort take the lock of the socket. A program can hold that lock for as long as it
//! likes (a send from memory that a userfaultfd or FUSE serves); the calling thread then waits for it.

pub mod abort;
pub mod diag;
pub mod look;
pub mod namespace;
mod netlink;
pub mod options;
pub mod process;
