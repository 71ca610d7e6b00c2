//! One row per (workload, network namespace, destination): identity, verdict, settings, counters.
//!
//! Rows lie in an array that the agent maps into its own memory: it writes verdicts and reads
//! counters without a system call. A key leads to a row through a hash map whose value is the
//! row's index. Who writes what is said at each field; counters are only ever added to by the
//! kernel, and all of them are cumulative.

use bytemuck::{Pod, Zeroable};

use crate::{DestinationKey, layout, limits};

/// Row 0 takes what finds no row of its own (all rows in use). It has no breaker.
pub const OTHER_ROW: u32 = 0;

/// Counted, never refused, never given a timeout.
pub const ROW_PROTECTED: u32 = 1;
/// Belongs to the agent's own self-test; not shown to anybody.
pub const ROW_CANARY: u32 = 1 << 1;
/// Some limit of the policy is on: `connect()` claims a place ([`crate::limits`]).
pub const ROW_LIMITED: u32 = 1 << 2;
/// Retries are told from fresh calls: the policy has a limit or a budget for them.
pub const ROW_RETRIES: u32 = 1 << 3;
/// With [`ROW_RETRIES`]: requests that are not idempotent are not let pass when they are repeated.
pub const ROW_REFUSES: u32 = 1 << 4;
/// The length of answers is followed, where they are HTTP/1 in the clear ([`crate::http`]).
pub const ROW_LENGTHS: u32 = 1 << 8;
/// As [`ROW_LENGTHS`], answers that come in chunks, too.
pub const ROW_CHUNKS: u32 = 1 << 9;
/// The end of requests is followed, where they are HTTP/1 in the clear ([`crate::request`]).
pub const ROW_REQUESTS: u32 = 1 << 10;

/// Settings of a policy as the kernel needs them. Copied into a row at its creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Settings {
    /// Longest time from SYN to established, ms; 0: none.
    pub connect_timeout_ms: u32,
    /// Reply to `BPF_SOCK_OPS_TIMEOUT_INIT`: first SYN timeout in ticks of the kernel; 0: no reply.
    pub syn_timeout_ticks: u32,
    /// A connect that a live program gives up after this long without an answer failed, ms;
    /// 0: never.
    pub gave_up_ms: u32,
    /// Probe slots while half-open.
    pub probe_limit: u32,
    /// Index of the policy these settings came from.
    pub policy: u32,
    /// `ROW_` flags.
    pub flags: u32,
    /// A successful exchange that took longer is slow, us; 0: off.
    pub slow_call_us: u32,
    /// Which statuses in the clear are failures: [`FAIL_5XX`], [`FAIL_LISTED`] or 0.
    pub fail_status: u32,
    /// As `gave_up_ms`, for an exchange without an answer, ms; 0: never.
    pub exchange_gave_up_ms: u32,
    /// Idle time after which keepalive asks whether the peer lives, s; 0: off.
    pub keepalive_s: u32,
    /// Live connections at most; 0: no limit. Looked at with [`ROW_LIMITED`] only, as are those below.
    pub connections_most: u32,
    /// Connects without an answer at most; 0: no limit.
    pub pending_most: u32,
    /// Connects a second at most; 0: no limit.
    pub connects_per_second: u32,
    /// What a `connect()` beyond a limit ends with (positive).
    pub limit_errno: u32,
}

/// In [`Settings::fail_status`]: every 5xx is a failure.
pub const FAIL_5XX: u32 = 1;
/// In [`Settings::fail_status`]: those that the policy lists ([`crate::Statuses`]).
pub const FAIL_LISTED: u32 = 2;

layout!(
    Settings, size 56,
    connect_timeout_ms at 0, policy at 16, flags at 20, slow_call_us at 24, connections_most at 40,
);

/// A row. 576 bytes, in lines of 64: what is written rarely is apart from what each call writes.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Row {
    // --- identity: written by whoever creates the row, before its key is published
    /// The key that leads here; all zero in a free row.
    pub key: DestinationKey,
    /// Inode of the network namespace (what `readlink /proc/PID/ns/net` shows); 0 if not found.
    pub netns_inode: u32,
    /// Raised when the row is freed: a socket stamped for the row's former owner counts as other.
    pub incarnation: u32,
    /// When the row was created (CLOCK_MONOTONIC, ns); 0 in a free row.
    pub created_ns: u64,
    /// Slot plus one of the histogram of connects; 0: none. Lent by the kernel at creation.
    pub histogram: u32,
    /// Slot plus one of the histogram of responses; 0: none. Lent by the kernel with the first
    /// exchange.
    pub response_histogram: u32,

    // --- verdict and settings: written by the agent, read by the connect hook
    /// A packed [`crate::Verdict`].
    pub verdict: u64,
    /// Settings of the row's policy.
    pub settings: Settings,

    // --- written by the kernel with every call
    /// SYNs begun.
    pub attempts: u64,
    /// Connects established.
    pub established: u64,
    /// Connects without an answer and live connections, in one word: see [`crate::limits`] and
    /// [`Row::pending`], [`Row::live`].
    pub places: u64,
    /// Calls in the window of connects so far: the sequence number of the last one.
    pub connect_calls: u64,
    /// Sum of the latencies of established connects, us.
    pub connect_latency_sum_us: u64,
    /// Time of the last `connect()` (CLOCK_MONOTONIC, ns).
    pub last_connect_ns: u64,
    /// Process (thread group) of the last `connect()`.
    pub last_pid: u32,
    /// Until when connects are looked at as possible retries, in units of 2^20 ns
    /// ([`crate::retry::tick`]); 0: not. Something has failed, or the pace of a program is being learnt.
    pub retry_watch: u32,
    /// Failed calls among `connect_calls`.
    pub connect_failures: u64,

    // --- written by the kernel when something fails
    /// RST to the SYN (ECONNREFUSED).
    pub failed_refused: u64,
    /// No answer to the SYN in time (ETIMEDOUT), ours or the program's or the kernel's limit.
    pub failed_connect_timeout: u64,
    /// ICMP or neighbour says unreachable (EHOSTUNREACH, ENETUNREACH and kin).
    pub failed_unreachable: u64,
    /// Reset during the handshake (ECONNRESET).
    pub failed_reset: u64,
    /// Closed by a live program that had waited `gave_up_ms` or longer without an answer.
    pub failed_gave_up: u64,
    /// Any other socket error before established.
    pub failed_other: u64,
    /// Closed by the program before an answer; never a failure.
    pub abandoned: u64,
    /// `connect()` calls that never sent a SYN: no route, no port, refused by another program.
    pub local: u64,

    // --- written by the kernel when it refuses, or would
    /// Connects refused because the breaker is open or half-open.
    pub rejected_breaker: u64,
    /// Connects that observe mode let pass and enforce mode would have refused.
    pub would_reject_breaker: u64,
    /// Connects ended by our connect timeout.
    pub timeouts_connect: u64,
    /// Connects that observe mode let live beyond the connect timeout.
    pub would_timeout: u64,
    /// Outcomes that came after the verdict had changed; counted, but not in the window.
    pub late: u32,
    /// Lengths and number of the session tickets of TLS 1.3 ([`crate::tls::received`]).
    pub ticket_lengths: u32,
    /// When the last `REJECTED` event was sent, in units of 2^20 ns ([`crate::retry::tick`]); 0: never.
    pub last_rejected_event: u32,
    /// The same of `HELD` events.
    pub last_held_event: u32,
    /// Longest latency of an established connect, us.
    pub connect_latency_max_us: u64,
    /// Answers that ask for fewer calls: HTTP 429, 503 with Retry-After, an account's own limit
    /// (MySQL, MariaDB).
    pub throttled: u32,
    /// Connections on which session tickets of TLS 1.3 were seen.
    pub ticket_connections: u32,

    // --- exchanges: written by the kernel with every one that ends. That they begin is counted in the next
    // --- line: both hooks of a connection may run on two CPUs, and a line that both write goes to and fro
    /// Entries of `COUNTED` for exchanges of this row: the agent adds, whoever takes one subtracts.
    /// While 0, no end is looked up there.
    pub counted_open: u32,
    /// Operations ended by their deadline, of exchanges that were not counted as hung before. Not in
    /// any window. Written by the agent.
    pub exchange_deadline: u32,
    /// Exchanges answered, with whatever status.
    pub responses: u64,
    /// Exchanges that ended without an answer, and parts of TLS handshakes that ended: see
    /// [`Row::exchanges_in_flight`].
    pub ended_otherwise: u64,
    /// Calls in the window of exchanges so far.
    pub exchange_calls: u64,
    /// Failed calls among them.
    pub exchange_failures: u64,
    /// Sum of the latencies of answered exchanges, us.
    pub response_latency_sum_us: u64,
    /// Longest latency of an answered exchange, us.
    pub response_latency_max_us: u64,
    /// When the last answer began (CLOCK_MONOTONIC, ns); 0: none yet.
    pub last_answer_ns: u64,

    // --- exchanges: written by the kernel with every one that begins
    /// Exchanges begun; parts of a TLS handshake are not counted here.
    pub requests: u64,

    // --- exchanges: written by the kernel when one fails
    /// Reset while an answer was owed.
    pub exchange_reset: u64,
    /// Closed by the peer while an answer was owed.
    pub exchange_closed_early: u64,
    /// Closed by a live program that had waited `gave_up_ms` or longer for an answer.
    pub exchange_gave_up: u64,
    /// Any other socket error while an answer was owed.
    pub exchange_other: u64,
    /// Answers whose status says that the server failed.
    pub exchange_status: u64,
    /// Resets and closes of a reused connection that had been idle; not failures.
    pub stale: u64,
    /// Exchanges that the program gave up before an answer; not failures.
    pub exchange_abandoned: u64,

    // --- exchanges that the agent counts while they are under way; written by it except where said
    /// Exchanges that the agent has counted as failed while they hung.
    pub exchange_hung: u64,
    /// Those of them that were answered after all. Written by whoever repairs the window.
    pub hung_recovered: u32,
    /// How connections end ([`crate::unanswered`]). Written by the kernel.
    pub unanswered: u32,
    /// Answers slower than the policy's `slow_call`. Written by the kernel.
    pub slow_calls: u64,
    /// Read timeouts, of exchanges that were not counted as hung before.
    pub exchange_read_timeout: u64,
    /// Write timeouts, likewise.
    pub exchange_write_timeout: u64,
    /// Connections on which the server spoke first. Written by the kernel, as is the next one.
    pub greeted: u32,
    /// Connections on which the client spoke first.
    pub spoke_first: u32,
    /// Read timeouts that fired; as those below, also after the exchange was counted as hung.
    pub fired_read: u32,
    /// Write timeouts that fired.
    pub fired_write: u32,
    /// Stall timeouts that fired; each is a read timeout among the failures.
    pub fired_stall: u32,
    /// Deadlines that fired.
    pub fired_deadline: u32,

    // --- what only some connects need
    /// When an open verdict ends by itself (CLOCK_MONOTONIC, ns), whatever becomes of the agent.
    /// Written by the agent.
    pub verdict_until_ns: u64,
    /// Packed probe slots ([`crate::verdict::pack_probe_slots`]); the kernel claims and returns.
    pub probe_slots: u64,
    /// The bucket of `connects_per_second` ([`crate::limits::has_token`]); the kernel takes.
    pub bucket: u64,
    /// Connects refused by a limit.
    pub rejected_limit: u64,
    /// Connects that observe mode let pass and a limit would have refused.
    pub would_reject_limit: u64,
    /// Of the connects that enforce mode would have refused, those that went well: established, and
    /// the first exchange, if there was any, did not fail.
    pub would_succeeded: u64,
    /// Those that failed.
    pub would_failed: u64,
    /// Parts of TLS handshakes that have begun. Written by the kernel.
    pub handshakes: u64,
}

/// Connections on which a server must have spoken first until it is known to.
pub const GREETED_OFTEN: u32 = 3;

impl Row {
    /// Connects begun and not ended (established, failed or abandoned). Where a limit is on, they
    /// count from `connect()` on.
    #[inline(always)]
    pub const fn pending(&self) -> u32 {
        limits::pending(self.places)
    }

    /// Live connections: begun, and neither closed by the program nor broken. Not counted in row
    /// `other`.
    #[inline(always)]
    pub const fn live(&self) -> u32 {
        limits::live(self.places)
    }

    /// Exchanges begun and not ended. In a copy of a row that calls go on for, one that began or ended just then
    /// may be missing; exact where none begins any more.
    #[inline(always)]
    pub const fn exchanges_in_flight(&self) -> u64 {
        let begun = self.requests.wrapping_add(self.handshakes);
        let ended = self.responses.wrapping_add(self.ended_otherwise);
        let left = begun.wrapping_sub(ended);
        if left as i64 > 0 { left } else { 0 }
    }

    /// Whether each connection is owed a greeting from its begin.
    #[inline(always)]
    pub const fn greets(greeted: u32, spoke_first: u32) -> bool {
        greeted >= GREETED_OFTEN && spoke_first == 0
    }
}

layout!(
    Row, size 576,
    key at 0, netns_inode at 40, created_ns at 48,
    verdict at 64, settings at 72,
    attempts at 128, failed_refused at 192, rejected_breaker at 256, responses at 328,
    requests at 384, exchange_reset at 392, exchange_hung at 448, verdict_until_ns at 512,
);
