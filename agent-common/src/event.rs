//! What the kernel tells the agent at once. Healthy traffic makes no event.

use bytemuck::{Pod, Zeroable};

use crate::{COMM_LEN, layout};

/// An event in the ring buffer. Fields that a kind does not use are zero.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Event {
    /// One of the [`EventKind`] constants.
    pub kind: u32,
    /// The row it is about.
    pub row: u32,
    /// The row's incarnation.
    pub incarnation: u32,
    /// Generation of the verdict under which the connect began.
    pub generation: u32,
    /// When it happened (CLOCK_MONOTONIC, ns).
    pub at_ns: u64,
    /// The call's sequence number in the window, 0 if it is not in the window.
    pub seq: u64,
    /// From SYN to outcome, us.
    pub elapsed_us: u64,
    /// One of the `OUTCOME_` constants.
    pub outcome: u32,
    /// The socket's error, positive; 0: none.
    pub errno: u32,
    /// Process (thread group) that called `connect()`.
    pub pid: u32,
    /// Thread that called `connect()`.
    pub tid: u32,
    /// The connect timeout that we had set, ms; 0: none. In a `HELD` event: for how long it is held.
    pub timeout_ms: u32,
    /// `EVENT_` flags.
    pub flags: u32,
    /// Name of the thread.
    pub comm: [u8; COMM_LEN],
}

layout!(Event, size 80, kind at 0, at_ns at 16, outcome at 40, flags at 60, comm at 64);

/// Values of [`Event::kind`].
pub struct EventKind;

impl EventKind {
    /// A row was created for a key not seen before.
    pub const ROW_CREATED: u32 = 1;
    /// A call failed; it is in the window already when `seq` is not 0.
    pub const FAILURE: u32 = 2;
    /// A probe slot was claimed.
    pub const PROBE_STARTED: u32 = 3;
    /// A probe ended: `outcome` says how.
    pub const PROBE_ENDED: u32 = 4;
    /// Connects are being refused (at most one event a second and row).
    pub const REJECTED: u32 = 5;
    /// A request that is not idempotent was repeated: `outcome` is its method ([`crate::method::method`]),
    /// `seq` the socket's cookie, `timeout_ms` the number of the last exchange: the one before it, or its own
    /// ([`EVENT_UNDER_WAY`]). With [`EVENT_REFUSED`] its connection is to be ended, while that exchange is the
    /// last. Else at most one event a second, row, method and fate.
    pub const REPEATED: u32 = 6;
    /// Connects are being held (at most one event a second and row).
    pub const HELD: u32 = 7;
}

/// Our connect timeout ended it (not the program's or the kernel's own limit).
pub const EVENT_OUR_TIMEOUT: u32 = 1;
/// The connect held a probe slot.
pub const EVENT_PROBE: u32 = 1 << 1;
/// It is about an exchange, not a connect.
pub const EVENT_EXCHANGE: u32 = 1 << 3;
/// Refused as a retry: its operation had had its number of them.
pub const EVENT_RETRY_LIMIT: u32 = 1 << 4;
/// Refused as a retry: the budget was spent.
pub const EVENT_RETRY_BUDGET: u32 = 1 << 5;
/// In a `REJECTED` event: the deadline of the operation had passed.
pub const EVENT_RETRY_DEADLINE: u32 = 1 << 6;
/// Observe mode: it would have been refused, or timed out, and was not.
pub const EVENT_WOULD: u32 = 1 << 2;
/// Refused by a limit, not by the breaker.
pub const EVENT_LIMIT: u32 = 1 << 7;

/// In a `HELD` event: a refusal of a task that was refused too often, not a retry that waits its turn.
pub const EVENT_HELD_SPIN: u32 = 1 << 9;
/// In a `REPEATED` event: the request has not left.
pub const EVENT_REFUSED: u32 = 1 << 8;
/// In a `REPEATED` event: nothing that is to be told; another one has.
pub const EVENT_QUIET: u32 = 1 << 9;
/// In a `REPEATED` event with [`EVENT_REFUSED`]: what has not left is the end of the request. The exchange is under
/// way.
pub const EVENT_UNDER_WAY: u32 = 1 << 10;

/// Established.
pub const OUTCOME_ESTABLISHED: u32 = 1;
/// ECONNREFUSED.
pub const OUTCOME_REFUSED: u32 = 2;
/// ETIMEDOUT.
pub const OUTCOME_CONNECT_TIMEOUT: u32 = 3;
/// EHOSTUNREACH, ENETUNREACH and kin.
pub const OUTCOME_UNREACHABLE: u32 = 4;
/// ECONNRESET during the handshake.
pub const OUTCOME_RESET: u32 = 5;
/// Closed by a live program after a long wait.
pub const OUTCOME_GAVE_UP: u32 = 6;
/// Any other socket error.
pub const OUTCOME_OTHER: u32 = 7;
/// Closed by the program, or by its end.
pub const OUTCOME_ABANDONED: u32 = 8;
/// Never sent a SYN.
pub const OUTCOME_LOCAL: u32 = 9;
/// Answered.
pub const OUTCOME_RESPONSE: u32 = 10;
/// Answered with a status that says that the server failed.
pub const OUTCOME_STATUS: u32 = 11;
/// Closed by the peer while an answer was owed.
pub const OUTCOME_CLOSED_EARLY: u32 = 12;
/// Answered, but slower than the policy's `slow_call`.
pub const OUTCOME_SLOW: u32 = 13;
/// No answer, and counted as failed while it hangs. Found by the agent, never sent by the kernel.
pub const OUTCOME_HUNG: u32 = 14;
/// Ended by the policy's read timeout. Found by the agent, as are the next three.
pub const OUTCOME_READ_TIMEOUT: u32 = 15;
/// Ended by the policy's write timeout.
pub const OUTCOME_WRITE_TIMEOUT: u32 = 16;
/// Ended by the policy's stall timeout, in the middle of an answer.
pub const OUTCOME_STALL: u32 = 17;
/// Ended by the policy's deadline; says nothing of the destination.
pub const OUTCOME_DEADLINE: u32 = 18;
