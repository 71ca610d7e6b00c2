//! Options that the agent has set on sockets of programs, so that a program that asks is told its own.

use bytemuck::{Pod, Zeroable};

use crate::layout;

/// Which option of which socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LentKey {
    /// The socket's cookie.
    pub cookie: u64,
    /// One of [`RECEIVE`] and [`SEND`].
    pub option: u64,
}

layout!(LentKey, size 16, cookie at 0, option at 8);

/// SO_RCVTIMEO.
pub const RECEIVE: u64 = 0;
/// SO_SNDTIMEO.
pub const SEND: u64 = 1;

/// A time as these options have it; zero: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Timeval {
    /// Whole seconds.
    pub seconds: i64,
    /// Microseconds beyond, below 1,000,000.
    pub micros: i64,
}

layout!(Timeval, size 16, seconds at 0, micros at 8);

/// An option that is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Lent {
    /// What the program had set.
    pub before: Timeval,
    /// What we have set, as the kernel has it.
    pub ours: Timeval,
}

layout!(Lent, size 32, before at 0, ours at 16);

/// Options at most that can be ours; of what finds no place, programs read our value.
pub const LENT_MOST: u32 = 65_536;
