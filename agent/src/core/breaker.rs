//! One breaker: here what it is made of; each of its jobs has a file of its own.
//!
//! ```text
//!            a window trips           cooldown ends, or a redial is answered (and believed)
//!   Closed ───────────────► Open ─────────────────────────────────────────► HalfOpen ─┐ next round
//!     ▲                      ▲                                                │  │ ▲  │ (all slots
//!     │                      └──────────────── a probe fails ─────────────────┘  │ └──┘ used, lease
//!     │                                                                          │      or time over)
//!     └──────────────────────── successes_to_close probes succeed ───────────────┘
//!
//!   any state ── Trip ──► ForcedOpen ──┐
//!   any state ── HoldClosed ──► ForcedClosed ──┴─ its time ends ──► Closed
//!   any state ── Reset ──► Closed            Open, HalfOpen ── switched off ──► Closed
//!   ForcedOpen, ForcedClosed ── Lift ──► Closed
//! ```
//!
//! What each transition does to numbers:
//!
//! | to | verdict | both windows | cooldown | successes |
//! | --- | --- | --- | --- | --- |
//! | Open by trip | generation + 1, until cooldown end + slack | kept: no connect is added while open, since the kernel adds only outcomes of the current generation; nothing is judged by what exchanges of living connections add | as it is | 0 |
//! | HalfOpen | generation + 1, until latest end of the round + slack | probes are added to it, but nothing is judged by it | as it is | 0 |
//! | HalfOpen, next round | generation + 1, until as above, all slots free | as above | as it is | kept |
//! | Open by failed probe | generation + 1, until cooldown end + slack | kept | doubled up to its maximum, jittered by 10 % | 0 |
//! | Open, trial | generation + 1, half-open with one slot; and + 1 when its exchange failed | kept, nothing is judged | as it is | 0 |
//! | Closed | generation + 1; after probes a ramp of 2 s, whose end keeps the generation | empty: each floor is the last call so far | as it is; then halved for each full cooldown spent closed, down to the base | 0 |
//! | Open by trip in the ramp | as by trip | kept | doubled and jittered, as by a failed probe | 0 |
//! | ForcedOpen, ForcedClosed | generation + 1 | empty when it ends | as it is | 0 |
//! | Closed by reset | generation + 1, unless it was closed | empty | base | 0 |
//!
//! Counters of the row (attempts, failures, ...) are the kernel's and are never touched.
//!
//! *Two windows.* Connects and exchanges are judged one by one, each when there is news of it; the
//! first that trips opens the breaker, and the breaker remembers which it was (`reason.window`) until
//! it closes, through half-open rounds and failed probes. Opened on connects, a probe is a connect,
//! and redials may shorten the cooldown. Opened on exchanges, an accepted connect proves nothing:
//! half-open verdicts carry [`VERDICT_PROBE_BY_EXCHANGE`](agent_common::verdict::VERDICT_PROBE_BY_EXCHANGE) (a probe then ends with its first exchange, or
//! with a connect that fails), and a probe's lease is that of an exchange.
//!
//! *Opened on exchanges: what shortens the cooldown.* Both only with `redial`.
//!
//! - A server that is killed resets what is under way, and so opens breakers on exchanges. Therefore the
//!   agent dials once, at once. Answered: the server is there and fails, dials say no more. Not answered:
//!   it is gone, and from then on an answered dial makes half-open, as with connects.
//! - Trials. When [`REFUSED_PER_TRIAL`] connects have been refused, and the time between two dials has
//!   passed, one connect is let pass: the kernel's verdict is a half-open one with a single slot, the
//!   state stays Open. Its exchange fails: refused as before, nothing doubles. It succeeds: half-open,
//!   with one success. So a crowd finds out within a second or so, at the price of one call in fifty or
//!   fewer, and who calls rarely waits for the cooldown.
//! - Who calls seldom and regularly, as the health checks of a load balancer do that has taken the server
//!   out: refusing such calls spares the server nothing. When [`SELDOM`] refusals in a row were
//!   [`SELDOM_GAP`] apart, each further call is a trial, for as long as they fail quickly and come no
//!   faster. So a balancer sees the truth at each of its checks.
//!
//! *Misleading redials.* A dial of the agent may be answered where connects of programs still fail
//! (a firewall rule for their cgroup, a source address that the destination refuses). Then each dial
//! would cost a program a connect, twice a second, and no cooldown would ever apply. So the breaker
//! counts the redials whose half-open state ended in a failed probe, and after the k-th of them
//! ignores answered dials for 500 ms * 2^k from the failure: 1 s, 2 s, 4 s and so on. When a probe
//! that the cooldown admitted fails, that time begins anew, uncounted: else the next dial would cost
//! a second probe per cooldown. The cooldown runs regardless and admits its probe in any case, so no
//! redial is ignored for longer than that, and a target that misleads for ever costs one probe per
//! cooldown in the long run. A probe that succeeds forgets the count (what lets some through does not
//! mislead, it fails in part), and so does closing, by a reset as well. Dials go on as
//! scheduled, since other rows may share them; the first one answered after that time is acted upon.
//!
//! *Hints.* While somebody else's breaker is open for connects to the same destination, one failed connect
//! of one's own suffices ([`Reason::HINTED`]), unless the policy has no run of failures to count.
//!
//! *Groups.* Of the endpoints of one name only so many may refuse ([`super::groups`]). A breaker that
//! should open and may not stays closed and is bypassed, until it opens with a later failure, or has
//! nothing against it any more. One that is open when its group shrinks, or becomes known, is closed with
//! empty windows if it opened last, and too many have opened by themselves: an operator's word closes nobody
//! else's breaker.
//!
//! *Scope.* With `scope = "node"` a breaker may be open because that of another row is ([`super::scope`]). Such
//! a follower is `Open`, has no timer, no redial and no round of its own, and does what its leader does.
//!
//! *Ramp.* Probes that succeed close the breaker, but a destination that is just back is not handed its
//! whole crowd at once: for 2 s the verdict says [`STATE_RAMP`](agent_common::verdict::STATE_RAMP), by which the kernel lets a growing share
//! pass ([`agent_common::ramp`]), and the state is Closed. What passes is judged as ever, under one
//! generation, so that no call is lost to the window when the ramp ends. A trip in the ramp says that
//! the destination was not back: it counts as a failed probe. In its groups a breaker that ramps counts
//! as one that refuses; where there is no room for that, it does not ramp.
//!
//! *Rounds and leases.* Probe slots are claimed by the kernel, and news of them may be lost. The
//! kernel itself gives a slot back only for a probe that said nothing ([`ProbeOutcome::Returned`](super::ProbeOutcome::Returned));
//! one that succeeded or failed keeps its slot until the next verdict, and a fresh half-open verdict
//! frees all slots. It comes when successes have used all of them, else when the round ends:
//!
//! - No taken slot was heard of: [`IDLE_ROUND`] after its begin. Nobody calls, so there is nothing
//!   to take back, and thousands of idle rows cost nearly no verdicts.
//! - One was: a lease after the last news of a probe, and four leases after the first in any case.
//!   Such a round may outlast the idle one, else a call once a minute could be voided every time.
//!
//! The verdict is written once for both, so it holds until the latest end there may be. Successes
//! count on across rounds, else a destination that is called rarely would never close.

mod events;
mod following;
mod looks;
mod moves;
mod restart;
mod trials;

use std::sync::Arc;

use super::groups::Full;
use super::rng::SplitMix64;
use super::scope::Follows;
use super::{Action, BreakerSettings, Bypass, DialTarget, Nanos, Reason, RowId, State};

/// A refusing verdict outlives its cooldown, half-open round or manual state by this much: time for
/// the agent to replace it, after which the kernel lets everything pass.
pub const VERDICT_SLACK: Nanos = Nanos::from_secs(5);

/// A half-open round in which no probe was heard of lasts this long (or a lease, if that is longer:
/// a probe that was not heard of is given its time too). It bounds how long a slot stays blocked
/// whose probe never reported and whose start was lost unnoticed, and keeps 50,000 idle rows at
/// fewer than 1,000 verdicts a second.
const IDLE_ROUND: Nanos = Nanos::from_secs(60);

/// Leases from the first news of a probe to the end of its round: no slot that was heard of stays
/// lost for longer, whatever else is heard.
const ROUND_LEASES: u64 = 4;

/// Jitter of a cooldown after a failed probe.
const COOLDOWN_JITTER_PERCENT: u64 = 10;

/// After a failed probe, answered redials are ignored for this long, doubled for each misleading
/// one so far. It is the first interval between dials, so the first misleading dial costs about two.
const DISTRUST: Nanos = Nanos::from_millis(500);

/// A restored breaker whose cooldown is (nearly) over stays open for this long, if the agent dials:
/// the answer comes first, and no program pays for a probe that the dial could have saved.
const CONFIRMED_WITHIN: Nanos = Nanos::from_millis(1500);

/// Connects that are refused for each one that is let pass as a trial.
pub(super) const REFUSED_PER_TRIAL: u32 = 50;

/// Refusals in a row, with [`SELDOM_GAP`] before each, after which calls are seldom.
pub(super) const SELDOM: u8 = 2;

/// The shortest usual interval of health checks is a second (HAProxy, nginx: 2 s and more by default);
/// timers are late or early by a little.
const SELDOM_GAP: Nanos = Nanos::from_millis(900);

/// A trial of a call that is seldom fails quickly within this: nobody is made to wait for it.
const QUICK: Nanos = Nanos::from_secs(1);

/// Opened on exchanges: what the agent's dial has said of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    /// Not asked yet.
    Unknown,
    /// Accepts connections: another dial would say no more.
    There,
    /// Does not.
    Gone,
}

/// What a step needs beside the breaker.
pub(super) struct Step<'a> {
    pub(super) row: RowId,
    pub(super) now: Nanos,
    pub(super) rng: &'a mut SplitMix64,
    /// Nothing more is opened: too much fails at once.
    pub(super) holds: bool,
    /// Somebody else's breaker is open for this destination, for connect failures.
    pub(super) hinted: bool,
    /// As many endpoints of the same name as may refuse already, or ramp up.
    pub(super) full: Option<Full>,
    pub(super) out: &'a mut Vec<Action>,
}

/// A breaker. Every method is one event; each looks at every state.
///
/// There may be one for each of 50,000 destinations, so its size is bounded (a test in `engine.rs`).
pub(super) struct Breaker {
    settings: Arc<BreakerSettings>,
    target: DialTarget,
    state: State,
    since: Nanos,
    reason: Reason,
    generation: u32,
    /// Open: cooldown end. HalfOpen: latest end of the round. ForcedOpen, ForcedClosed: end of the
    /// manual state. Closed: end of the ramp, zero without one.
    until: Nanos,
    /// Next cooldown without jitter: between the base and the maximum.
    cooldown: Nanos,
    /// Closed: when it was closed, or the cooldown was halved last. It is halved again when it has
    /// passed once more.
    healthy_since: Nanos,
    /// HalfOpen: successes in a row. Open: refusals (their low half) when the last trial began, or when
    /// the first was heard of ([`Breaker::counts_refusals`]): one word for both, since there are many
    /// breakers.
    successes: u32,
    /// HalfOpen: slots of this round whose probes succeeded. Open: 1 while a trial may pass or is under
    /// way.
    used: u32,
    /// Open: whether another one's breaker is open instead of this one.
    follows: Follows,
    /// Open: whether a refusal was heard of.
    counts_refusals: bool,
    /// Open, HalfOpen: refusals in a row that came one by one, [`SELDOM`] at most.
    seldom: u8,
    /// Open: refusals (their low half) heard of last.
    refusals: u32,
    /// Open on exchanges: whether the server is there.
    server: Server,
    /// HalfOpen: whether a redial led here, not the cooldown.
    by_redial: bool,
    /// Closed: it would have opened, but may not.
    bypassed: Option<Bypass>,
    /// Redials that led to a failed probe, since it was last closed.
    misled: u8,
    /// Open: redials answered before this are ignored. Zero unless `misled`.
    distrust_until: Nanos,
    /// HalfOpen: when this round began. Open: when it opened, or when the last trial began.
    round_since: Nanos,
    /// HalfOpen: first news of a slot taken in this round, [`Nanos::MAX`] before: only then does the
    /// lease run.
    lease_since: Nanos,
    /// HalfOpen with a lease: last news of a probe. Open: last news of a refusal, or of a trial that has
    /// begun. Closed: last time that something spoke for keeping the breaker in memory.
    heard: Nanos,
    /// When it last left Closed by a trip: begin of the outage.
    outage_since: Nanos,
    /// Highest sequence numbers heard of, of connects and exchanges ([`WindowKind::index`](super::WindowKind::index)).
    last_seqs: [u64; 2],
    /// Where the windows of connects and exchanges begin: calls up to these numbers do not count,
    floor_seqs: [u64; 2],
    /// and none that ended before this.
    floor_at: Nanos,
}

impl Breaker {
    pub(super) fn new(
        target: DialTarget,
        settings: Arc<BreakerSettings>,
        generation: u32,
        now: Nanos,
    ) -> Self {
        Self {
            cooldown: settings.cooldown,
            settings,
            target,
            state: State::Closed,
            since: now,
            reason: Reason::NONE,
            generation,
            until: Nanos::ZERO,
            healthy_since: Nanos::ZERO,
            successes: 0,
            used: 0,
            follows: Follows::Nobody,
            counts_refusals: false,
            seldom: 0,
            refusals: 0,
            server: Server::Unknown,
            by_redial: false,
            bypassed: None,
            misled: 0,
            distrust_until: Nanos::ZERO,
            round_since: Nanos::ZERO,
            lease_since: Nanos::MAX,
            heard: now,
            outage_since: Nanos::ZERO,
            last_seqs: [0; 2],
            floor_seqs: [0; 2],
            floor_at: Nanos::ZERO,
        }
    }
}
