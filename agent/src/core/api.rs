//! What goes in and out of the [`Engine`](super::Engine).

use std::sync::Arc;

use agent_common::{CallWindow, DestinationKey, Verdict};

use super::{
    BreakerSettings, Bypass, Correlated, Endpoint, Full, Nanos, Reason, State, WindowKind,
};

/// A row of the kernel's table. The incarnation tells owners of one index apart: an event about a
/// former owner finds no breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RowId {
    /// Index in the table.
    pub index: u32,
    /// The row's incarnation ([`agent_common::Row::incarnation`]).
    pub incarnation: u32,
}

/// What a redial connects to. Rows of different workloads share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DialTarget {
    /// Network namespace to dial from, as in [`DestinationKey`].
    pub netns_cookie: u64,
    /// Address in 16-byte form.
    pub addr: [u8; 16],
    /// Interface of a link-local address, else 0.
    pub ifindex: u32,
    /// TCP port, network order.
    pub port_be: u16,
}

impl From<&DestinationKey> for DialTarget {
    fn from(key: &DestinationKey) -> Self {
        Self {
            netns_cookie: key.netns_cookie,
            addr: key.addr,
            ifindex: key.ifindex,
            port_be: key.port_be,
        }
    }
}

/// How a probe ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProbeOutcome {
    /// Established. Its slot stays taken until the next verdict.
    Success,
    /// A failure of the destination. Its slot stays taken until the next verdict.
    Failure,
    /// Abandoned, or never sent: says nothing, and the kernel has given its slot back already. Only
    /// for these does it do so.
    Returned,
}

/// Something that happened. Any event may be lost, repeated, late or about an unknown row.
///
/// `last_seqs` are the row's counts of calls ([`agent_common::Row::connect_calls`], then
/// [`agent_common::Row::exchange_calls`]; see [`WindowKind::index`]) when the shell handles the
/// event, and `generation` is that of the verdict under which the connect began.
pub enum Event<'a> {
    /// A row is seen for the first time, or its policy changed. Also brings back a breaker that
    /// was dropped for being quiet, so it comes before any other event of an unknown row.
    Configure {
        /// The row.
        row: RowId,
        /// What a redial connects to: the row's key has it, so it is the same for as long as the row
        /// has this owner. Not looked at when the breaker is known.
        target: DialTarget,
        /// The policy's numbers.
        settings: Arc<BreakerSettings>,
        /// Generation of the verdict in the row now, so that numbering goes on from there. Not
        /// looked at when the breaker is known.
        generation: u32,
    },
    /// Something failed or was slow, or may have: look at one of the two windows.
    Calls {
        /// The row.
        row: RowId,
        /// Which window; [`WindowKind::None`] says nothing.
        kind: WindowKind,
        /// Sequence number of that window's last call.
        last_seq: u64,
        /// That window's calls.
        window: &'a CallWindow,
    },
    /// A connect claimed a probe slot. After lost events also sent for a row whose slots the shell
    /// finds taken.
    ProbeStarted {
        /// The row.
        row: RowId,
        /// Generation of its verdict.
        generation: u32,
    },
    /// A probe ended.
    ProbeEnded {
        /// The row.
        row: RowId,
        /// Generation of its verdict.
        generation: u32,
        /// How it ended.
        outcome: ProbeOutcome,
        /// Sequence numbers of the row's last calls: connects, exchanges.
        last_seqs: [u64; 2],
    },
    /// Connects are being refused: a hint, of which there is one a second at most.
    Refused {
        /// The row.
        row: RowId,
        /// Connects of the row that were refused so far, by whatever verdict.
        refused: u64,
    },
    /// The answer to [`Action::Dial`].
    DialEnded {
        /// What was dialled.
        target: DialTarget,
        /// Whether a connection was established.
        success: bool,
    },
    /// An operator wants every connect refused.
    Trip {
        /// The row.
        row: RowId,
        /// Until when.
        until: Nanos,
        /// Sequence numbers of the row's last calls: connects, exchanges.
        last_seqs: [u64; 2],
    },
    /// An operator wants every connect to pass.
    HoldClosed {
        /// The row.
        row: RowId,
        /// Until when.
        until: Nanos,
        /// Sequence numbers of the row's last calls: connects, exchanges.
        last_seqs: [u64; 2],
    },
    /// An operator wants the breaker to start anew: window, cooldown growth and manual state.
    Reset {
        /// The row.
        row: RowId,
        /// Sequence numbers of the row's last calls: connects, exchanges.
        last_seqs: [u64; 2],
    },
    /// No order of an operator is in force for the row any more: a manual state ends, as when its time is
    /// over. Nothing happens in any other state.
    Lift {
        /// The row.
        row: RowId,
        /// Sequence numbers of the row's last calls: connects, exchanges.
        last_seqs: [u64; 2],
    },
    /// Each of these rows is one of the endpoints of these names, and of no others. Holds until it is said
    /// anew or the row is given up, whether it has a breaker in memory or not. Groups are judged once all
    /// have been told.
    Groups {
        /// The rows.
        endpoints: &'a [Endpoint],
    },
    /// The row is given up (evicted): nothing may come out for it any more.
    Forget {
        /// The row.
        row: RowId,
    },
    /// Time passed: [`Engine::next_deadline`](super::Engine::next_deadline) may have come.
    Deadline,
}

/// Something to be done, in the order given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Action {
    /// Write a verdict. For a half-open one and for a ramp, first write `pack_probe_slots(generation, 0)`.
    SetVerdict {
        /// The row.
        row: RowId,
        /// The verdict; its generation is one more than that of the verdict before, or the same
        /// where a ramp has ended or goes on with another errno.
        verdict: Verdict,
        /// When the kernel lets everything pass by itself: the end of a ramp, else in case the agent is
        /// stuck. Zero for verdicts that let everything pass anyway.
        until: Nanos,
        /// Probe slots of the policy; they matter while half-open.
        probe_limit: u32,
    },
    /// The state changed; to be logged, counted and published.
    Transition {
        /// The row.
        row: RowId,
        /// State before.
        from: State,
        /// State now.
        to: State,
        /// Why. Of kind `None` where it is no trip: cooldown ended, redial answered, probes
        /// succeeded, manual state ended, reset, breaker switched off.
        reason: Reason,
        /// Generation of the verdict that goes with it.
        generation: u32,
    },
    /// The breaker should be open and is not, because too many endpoints of the same name refuse
    /// already. Said when that begins; a row that recovers just stops failing.
    Bypassed {
        /// The row.
        row: RowId,
        /// Why it should be open; of kind `None` where it was open and is closed for the others' sake.
        reason: Reason,
        /// How many refuse already, or ramp up.
        group: Full,
    },
    /// Failures of many destinations at once have begun or are over: while they last, nothing is
    /// opened. To be said once.
    Correlated(Correlated),
    /// A dial was answered, or the one that asks whether the server of a breaker opened on exchanges is
    /// there at all was not. To be recorded, so that the course of events can be replayed; it comes
    /// before what follows from it.
    Redialled {
        /// One of the rows that the dial was for.
        row: RowId,
        /// Whether a connection was established.
        answered: bool,
    },
    /// Connect to the target and answer with [`Event::DialEnded`] within
    /// [`DIAL_WRITE_OFF`](super::DIAL_WRITE_OFF).
    Dial {
        /// What to dial.
        target: DialTarget,
    },
}

/// A breaker as `status` shows it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BreakerView {
    /// Its state.
    pub state: State,
    /// When it came into that state (or was first seen).
    pub since: Nanos,
    /// Why it is not closed; kept through half-open; [`Reason::NONE`] while closed.
    pub reason: Reason,
    /// End of the cooldown, while open.
    pub next_probe_at: Option<Nanos>,
    /// Generation of the verdict in force.
    pub generation: u32,
    /// Next dial by the agent, while it dials; not before `now`, later if the node's limit is
    /// reached.
    pub next_redial_at: Option<Nanos>,
    /// Closed though its calls said open, and why.
    pub bypassed: Option<Bypass>,
    /// Open only because this row's breaker is, of another workload (`scope = "node"`).
    pub follows: Option<RowId>,
    /// The one that it follows is half-open, and so, in truth, is this one; else `None`.
    pub shared_probe: Option<SharedProbe>,
    /// Half-open, and no probe is under way: the next connect is one.
    pub awaits_probe: bool,
    /// End of a manual state.
    pub manual_until: Option<Nanos>,
    /// Until when a share of the connects passes, just after closing.
    pub ramp_until: Option<Nanos>,
    /// Length of the next cooldown, before jitter.
    pub cooldown: Nanos,
    /// Where the windows of connects and exchanges begin ([`WindowKind::index`]).
    pub floors: [Floor; 2],
}

/// The probe of a breaker that several rows share, as one sees it that follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SharedProbe {
    /// Nobody's yet: this row's next connect may be it.
    Free,
    /// Another row's: this row refuses until it has ended.
    Taken,
}

impl BreakerView {
    /// Where that window begins; for [`WindowKind::None`] at the first call.
    pub fn floor(&self, kind: WindowKind) -> Floor {
        kind.index().map_or(Floor::default(), |i| self.floors[i])
    }
}

/// Where a window begins, see [`evaluate_since`](super::window::evaluate_since).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Floor {
    /// Calls up to this number do not count.
    pub seq: u64,
    /// Calls that ended before this do not count either: set where the window was emptied without
    /// a sequence number.
    pub at: Nanos,
}
