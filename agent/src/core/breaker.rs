//! One breaker.
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
//! half-open verdicts carry [`VERDICT_PROBE_BY_EXCHANGE`] (a probe then ends with its first exchange, or
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
//! empty windows if it opened last.
//!
//! *Scope.* With `scope = "node"` a breaker may be open because that of another row is ([`super::scope`]). Such
//! a follower is `Open`, has no timer, no redial and no round of its own, and does what its leader does.
//!
//! *Ramp.* Probes that succeed close the breaker, but a destination that is just back is not handed its
//! whole crowd at once: for 2 s the verdict says [`STATE_RAMP`], by which the kernel lets a growing share
//! pass ([`agent_common::ramp`]), and the state is Closed. What passes is judged as ever, under one
//! generation, so that no call is lost to the window when the ramp ends. A trip in the ramp says that
//! the destination was not back: it counts as a failed probe.
//!
//! *Rounds and leases.* Probe slots are claimed by the kernel, and news of them may be lost. The
//! kernel itself gives a slot back only for a probe that said nothing ([`ProbeOutcome::Returned`]);
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

mod following;

use std::sync::Arc;

use agent_common::ramp;
use agent_common::verdict::{STATE_HALF_OPEN, STATE_RAMP, VERDICT_PROBE_BY_EXCHANGE};
use agent_common::{CallWindow, Verdict};

use super::groups::Full;
use super::hints::is_shared;
use super::redial::base_interval;
use super::rng::SplitMix64;
use super::scope::Follows;
use super::window::{WindowStats, evaluate_since};
use super::{
    Action, BreakerSettings, BreakerView, DialTarget, Floor, Nanos, ProbeOutcome, Reason, RowId,
    Saved, State, WindowKind,
};

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
    /// Too many endpoints of the same name refuse already.
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
    bypassed: bool,
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
    /// Highest sequence numbers heard of, of connects and exchanges ([`WindowKind::index`]).
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
            bypassed: false,
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

    // --- over a restart

    /// What outlives the agent. A manual state is kept by whoever knows who asked for it.
    pub(super) fn save(&self) -> Saved {
        let own = match self.state {
            State::Closed | State::Open | State::HalfOpen => self.state,
            State::ForcedOpen | State::ForcedClosed => State::Closed,
        };
        Saved {
            state: own,
            since: self.since,
            reason: if own == State::Closed {
                Reason::NONE
            } else {
                self.reason
            },
            generation: self.generation,
            until: self.until,
            cooldown: self.cooldown,
            healthy_since: self.healthy_since,
            misled: u32::from(self.misled),
            distrust_until: self.distrust_until,
            outage_since: self.outage_since,
            floor_seqs: self.floor_seqs,
            floor_at: self.floor_at,
        }
    }

    /// Takes over what an earlier agent has saved; `self` is fresh. An open breaker goes on with its
    /// cooldown, a half-open one with a fresh round: probes under way have ended with that agent.
    /// Nothing is believed that would keep it open for longer than a cooldown.
    pub(super) fn restore(&mut self, saved: &Saved, step: &mut Step<'_>) {
        let now = step.now;
        let latest = now + self.settings.cooldown_cap();
        self.cooldown = saved
            .cooldown
            .clamp(self.settings.cooldown, self.settings.cooldown_cap());
        self.healthy_since = saved.healthy_since.min(now);
        self.misled = u8::try_from(saved.misled).unwrap_or(u8::MAX);
        self.distrust_until = saved.distrust_until.min(latest);
        self.outage_since = saved.outage_since.min(now);
        self.floor_seqs = saved.floor_seqs;
        self.last_seqs = saved.floor_seqs;
        self.floor_at = saved.floor_at.min(now);
        self.generation = saved.generation;
        self.since = saved.since.min(now);
        if !self.settings.enabled {
            return;
        }
        match saved.state {
            State::Closed | State::ForcedOpen | State::ForcedClosed => return,
            State::Open => {
                self.reason = saved.reason;
                self.state = State::Open;
                self.round_since = now;
                self.until = saved.until.min(latest);
                if self.wants_redial() && !self.asks() {
                    self.until = self.until.max(now + CONFIRMED_WITHIN);
                }
            }
            State::HalfOpen => {
                self.reason = saved.reason;
                self.state = State::HalfOpen;
                self.start_round(now);
            }
        }
        self.set_verdict(step);
    }

    // --- what it is

    pub(super) fn state(&self) -> State {
        self.state
    }

    pub(super) fn target(&self) -> DialTarget {
        self.target
    }

    pub(super) fn since(&self) -> Nanos {
        self.since
    }

    pub(super) fn max_open_share(&self) -> Option<f64> {
        self.settings.max_open_share
    }

    /// Nothing is held back any more; whether it opens, its next failure says.
    pub(super) fn released(&mut self) {
        self.bypassed = false;
    }

    pub(super) fn outage_since(&self) -> Nanos {
        self.outage_since
    }

    /// As `status` shows it. When the agent dials next, the engine knows.
    pub(super) fn view(&self, next_redial_at: Option<Nanos>, leader: Option<RowId>) -> BreakerView {
        let ramp_until = self.ramps().then_some(self.until);
        let forced = matches!(self.state, State::ForcedOpen | State::ForcedClosed);
        BreakerView {
            state: self.state,
            since: self.since,
            reason: self.reason,
            next_probe_at: (self.state == State::Open).then_some(self.until),
            generation: self.generation,
            next_redial_at,
            follows: leader.filter(|_| self.is_follower()),
            shared_probe: self.shared_probe(),
            awaits_probe: self.state == State::HalfOpen
                && self.lease_since == Nanos::MAX
                && self.used == 0,
            manual_until: forced.then_some(self.until),
            ramp_until,
            bypassed: self.bypassed,
            cooldown: self.cooldown,
            floors: self.floor_seqs.map(|seq| Floor {
                seq,
                at: self.floor_at,
            }),
        }
    }

    /// Whether the agent should dial: open, the policy says so, and the answer says something.
    pub(super) fn wants_redial(&self) -> bool {
        let tells = match self.reason.window {
            WindowKind::Connects => true,
            WindowKind::Exchanges => self.server != Server::There,
            WindowKind::None => false,
        };
        self.state == State::Open && !self.is_follower() && tells && self.settings.redial
    }

    /// Whether the first dial is to find out if the server is there at all: it cannot be too early.
    pub(super) fn asks(&self) -> bool {
        self.wants_redial()
            && self.reason.window == WindowKind::Exchanges
            && self.server == Server::Unknown
    }

    /// Whether others are to take its word: it is open, or not yet closed, for connect failures.
    pub(super) fn gives_hints(&self) -> bool {
        matches!(self.state, State::Open | State::HalfOpen)
            && !self.is_follower()
            && self.reason.window == WindowKind::Connects
            && is_shared(&self.target.addr)
    }

    /// When time alone changes something.
    pub(super) fn deadline(&self) -> Nanos {
        match self.state {
            State::Closed if self.ramps() => self.until,
            State::Closed if self.cooldown > self.settings.cooldown => self.halve_at(),
            // Kept in memory, so that it can follow.
            State::Closed if self.shares_scope() => Nanos::MAX,
            // A call exactly `window_age` old still counts.
            State::Closed => self.heard + self.settings.window_age + Nanos(1),
            State::Open if self.is_follower() => Nanos::MAX,
            State::Open | State::ForcedOpen | State::ForcedClosed => self.until,
            State::HalfOpen => self.round_end(),
        }
    }

    /// Whether nothing would be lost by dropping it: closed, cooldown at its base, and whatever it
    /// had heard of (failures, the floor) is too old to count.
    pub(super) fn is_quiet(&self, now: Nanos) -> bool {
        self.state == State::Closed
            && !self.ramps()
            && !self.shares_scope()
            && self.cooldown <= self.settings.cooldown
            && now - self.heard > self.settings.window_age
    }

    /// A window as this breaker judges it; of none, nothing.
    pub(super) fn window_stats(
        &self,
        kind: WindowKind,
        window: &CallWindow,
        last_seq: u64,
        now: Nanos,
    ) -> Option<WindowStats> {
        let (seq, at) = (self.floor_seqs[kind.index()?], self.floor_at);
        let s = &self.settings;
        Some(evaluate_since(kind, window, last_seq, seq, at, now, s))
    }

    // --- what happens to it

    /// Changed numbers apply from now on; the state stays, and a cooldown that runs ends as it
    /// would have. Switched off: an open or half-open breaker closes.
    pub(super) fn configure(&mut self, settings: Arc<BreakerSettings>, step: &mut Step<'_>) {
        let old = std::mem::replace(&mut self.settings, settings);
        // Growth is kept within the new bounds; without growth the new base applies.
        self.cooldown = if self.cooldown <= old.cooldown {
            self.settings.cooldown
        } else {
            self.cooldown
                .clamp(self.settings.cooldown, self.settings.cooldown_cap())
        };
        match self.state {
            State::Closed => {
                self.heard = step.now;
                if self.ramps() && !self.settings.enabled {
                    self.end_ramp(step);
                } else if self.ramps() && old.errno != self.settings.errno {
                    self.write_verdict(step);
                }
            }
            State::Open | State::HalfOpen if !self.settings.enabled => {
                self.close(None, Nanos::ZERO, step);
            }
            State::HalfOpen if old.errno != self.settings.errno => self.begin_round(step),
            State::Open | State::ForcedOpen if old.errno != self.settings.errno => {
                self.set_verdict(step);
            }
            State::Open | State::HalfOpen | State::ForcedOpen | State::ForcedClosed => {}
        }
    }

    /// Something may have failed or been slow.
    pub(super) fn calls(
        &mut self,
        kind: WindowKind,
        last_seq: u64,
        window: &CallWindow,
        step: &mut Step<'_>,
    ) {
        let Some(index) = kind.index() else {
            return;
        };
        self.last_seqs[index] = self.last_seqs[index].max(last_seq);
        match self.state {
            State::Closed => {
                let Some(stats) = self.window_stats(kind, window, last_seq, step.now) else {
                    return;
                };
                if stats.failures > 0 || stats.consecutive > 0 || stats.slow_calls > 0 {
                    self.heard = step.now;
                }
                let hint = || {
                    let takes = self.settings.enabled && self.settings.consecutive_failures > 0;
                    let fails = kind == WindowKind::Connects && stats.consecutive > 0;
                    (step.hinted && takes && fails).then_some(Reason::HINTED)
                };
                let trip = stats.trip.or_else(hint);
                // A look at the other window says nothing of this one; the next failure does.
                let held = step.holds || step.full.is_some();
                let before = std::mem::replace(&mut self.bypassed, trip.is_some() && held);
                if let (Some(reason), Some(group)) = (trip, step.full)
                    && !before
                    && !step.holds
                {
                    let row = step.row;
                    step.out.push(Action::Bypassed { row, reason, group });
                }
                if let Some(reason) = trip
                    && !held
                {
                    let cooldown = if self.ramps() {
                        // The outage goes on.
                        self.grow(step)
                    } else {
                        self.outage_since = step.now;
                        self.cooldown
                    };
                    self.open(cooldown, reason, step);
                }
            }
            // The probe's own report decides.
            State::HalfOpen => {}
            State::Open | State::ForcedOpen | State::ForcedClosed => {}
        }
    }

    /// A probe slot was claimed, or found taken.
    pub(super) fn probe_started(&mut self, generation: u32, step: &mut Step<'_>) {
        match self.state {
            State::HalfOpen if generation == self.generation => self.slot_taken(step.now),
            State::Open if generation == self.generation && self.tries() => self.heard = step.now,
            State::HalfOpen
            | State::Closed
            | State::Open
            | State::ForcedOpen
            | State::ForcedClosed => {}
        }
    }

    /// A probe ended.
    pub(super) fn probe_ended(
        &mut self,
        generation: u32,
        outcome: ProbeOutcome,
        last_seqs: [u64; 2],
        step: &mut Step<'_>,
    ) {
        self.note_seqs(last_seqs);
        match (self.state, outcome) {
            (State::HalfOpen | State::Open, _) if generation != self.generation => {}
            (State::HalfOpen, ProbeOutcome::Success) => {
                self.slot_taken(step.now);
                self.used += 1;
                self.succeeded(last_seqs, step);
            }
            (State::HalfOpen, ProbeOutcome::Failure) => {
                let goes_on = self.is_seldom() && self.is_quick(step.now);
                let cooldown = self.grow(step);
                if self.by_redial {
                    self.misled = self.misled.saturating_add(1);
                }
                if self.misled > 0 {
                    let distrust = DISTRUST.times(1 << self.misled.min(63));
                    self.distrust_until = step.now + distrust;
                }
                let reason = Reason::probe_failed(self.reason.window);
                let (seldom, refusals) = (self.seldom, self.refusals);
                self.open(cooldown, reason, step);
                if goes_on {
                    self.counts_refusals = true;
                    self.seldom = seldom;
                    self.refusals = refusals;
                    self.begin_trial(step);
                }
            }
            // Takes no slot, so it begins no lease.
            (State::HalfOpen, ProbeOutcome::Returned) => self.heard = step.now,
            (State::Open, ProbeOutcome::Success) if self.tries() => {
                self.half_open(false, step);
                self.succeeded(last_seqs, step);
            }
            (State::Open, ProbeOutcome::Failure) if self.tries() && self.still_seldom(step.now) => {
                self.begin_trial(step);
            }
            (State::Open, ProbeOutcome::Failure) if self.tries() => {
                self.used = 0;
                self.seldom = 0;
                self.set_verdict(step);
            }
            // A trial that said nothing: its slot is free for the next one.
            (State::Open, _) => {}
            (State::Closed | State::ForcedOpen | State::ForcedClosed, _) => {}
        }
    }

    /// A probe or trial succeeded.
    fn succeeded(&mut self, last_seqs: [u64; 2], step: &mut Step<'_>) {
        self.successes += 1;
        self.misled = 0;
        self.distrust_until = Nanos::ZERO;
        if self.successes >= self.settings.successes_needed() {
            self.close(Some(last_seqs), Nanos(ramp::LENGTH_NS), step);
        } else if self.used >= self.settings.probe_limit() {
            self.begin_round(step);
        }
    }

    /// Connects are being refused, so many up to now. Enough of them earn a trial, or few enough.
    pub(super) fn refused(&mut self, refused: u64, step: &mut Step<'_>) {
        let useful = self.reason.window == WindowKind::Exchanges && self.server != Server::Gone;
        if self.state != State::Open || self.is_follower() || !useful || !self.settings.redial {
            return;
        }
        let refused = refused as u32;
        if !self.counts_refusals {
            self.counts_refusals = true;
            self.successes = refused;
            self.refusals = refused;
            self.heard = step.now;
            self.seldom = u8::from(step.now - self.round_since >= SELDOM_GAP);
            return;
        }
        let more = refused.wrapping_sub(self.refusals);
        if more == 0 {
            return;
        }
        let gap = step.now - self.heard;
        self.seldom = if gap >= SELDOM_GAP.times(u64::from(more)) {
            SELDOM.min(self.seldom.saturating_add(more.min(255) as u8))
        } else {
            0
        };
        self.refusals = refused;
        self.heard = step.now;
        let passed = step.now - self.round_since;
        let wait = if self.tries() {
            // Its end was not heard of.
            self.lease()
        } else if self.is_seldom() {
            SELDOM_GAP
        } else {
            base_interval(step.now - self.outage_since)
        };
        let many = refused.wrapping_sub(self.successes) >= REFUSED_PER_TRIAL;
        if (many || self.is_seldom()) && passed >= wait {
            self.begin_trial(step);
        }
    }

    fn is_seldom(&self) -> bool {
        self.seldom >= SELDOM
    }

    fn begin_trial(&mut self, step: &mut Step<'_>) {
        self.successes = self.refusals;
        self.round_since = step.now;
        self.used = 1;
        self.set_verdict(step);
    }

    /// Whether a probe or trial that fails now has failed quickly.
    fn is_quick(&self, now: Nanos) -> bool {
        now - self.heard <= QUICK
    }

    /// A trial fails now: whether the next call may be one, too.
    fn still_seldom(&self, now: Nanos) -> bool {
        self.is_seldom() && self.is_quick(now) && now - self.round_since >= SELDOM_GAP
    }

    /// A dial of the agent was answered, or not. An answer is ignored for a while after misleading ones.
    pub(super) fn redialled(&mut self, answered: bool, step: &mut Step<'_>) {
        if self.asks() {
            self.server = if answered {
                Server::There
            } else {
                Server::Gone
            };
        } else if answered && self.wants_redial() && step.now >= self.distrust_until {
            self.half_open(true, step);
        }
    }

    /// An operator's word: `to` is one of the forced states.
    pub(super) fn force(
        &mut self,
        to: State,
        until: Nanos,
        last_seqs: [u64; 2],
        step: &mut Step<'_>,
    ) {
        self.note_seqs(last_seqs);
        self.until = until;
        self.successes = 0;
        self.follows = Follows::Nobody;
        self.enter(to, Reason::MANUAL, step);
    }

    /// Too many endpoints of its name refuse, and this one is to be the one less.
    pub(super) fn bypass(&mut self, group: Full, step: &mut Step<'_>) {
        self.close(None, Nanos::ZERO, step);
        self.bypassed = true;
        step.out.push(Action::Bypassed {
            row: step.row,
            reason: Reason::NONE,
            group,
        });
    }

    /// Starts anew.
    pub(super) fn reset(&mut self, last_seqs: [u64; 2], step: &mut Step<'_>) {
        self.cooldown = self.settings.cooldown;
        match self.state {
            State::Closed => {
                self.empty_windows(Some(last_seqs), step.now);
                if self.ramps() {
                    self.end_ramp(step);
                }
            }
            State::Open | State::HalfOpen | State::ForcedOpen | State::ForcedClosed => {
                self.close(Some(last_seqs), Nanos::ZERO, step);
            }
        }
    }

    /// What time alone does. Safe to call at any time.
    pub(super) fn tick(&mut self, step: &mut Step<'_>) {
        match self.state {
            // At most 64 times: halving ends at the base or at nothing.
            State::Closed => {
                if self.ramps() && step.now >= self.until {
                    self.end_ramp(step);
                }
                while self.cooldown > self.settings.cooldown && step.now >= self.halve_at() {
                    self.healthy_since = self.halve_at();
                    self.cooldown = self.cooldown.half().max(self.settings.cooldown);
                }
            }
            State::Open if self.is_follower() => {}
            State::Open if step.now >= self.until => self.half_open(false, step),
            State::HalfOpen if step.now >= self.round_end() => self.begin_round(step),
            State::ForcedOpen | State::ForcedClosed if step.now >= self.until => {
                self.close(None, Nanos::ZERO, step);
            }
            State::Open | State::HalfOpen | State::ForcedOpen | State::ForcedClosed => {}
        }
    }

    // --- how it moves

    /// Open: whether a trial may pass, or is under way.
    fn tries(&self) -> bool {
        self.state == State::Open && self.used > 0
    }

    /// Whether it has just closed and admits a share only.
    pub(super) fn ramps(&self) -> bool {
        self.state == State::Closed && self.until > Nanos::ZERO
    }

    /// Everything passes. The generation stays: calls under way are judged like those to come.
    fn end_ramp(&mut self, step: &mut Step<'_>) {
        self.until = Nanos::ZERO;
        self.write_verdict(step);
    }

    /// Doubles the cooldown; returns it with its jitter.
    fn grow(&mut self, step: &mut Step<'_>) -> Nanos {
        let cap = self.settings.cooldown_cap();
        self.cooldown = self.cooldown.times(2).min(cap);
        let cooldown = step.rng.jitter(self.cooldown, COOLDOWN_JITTER_PERCENT);
        cooldown.min(cap)
    }

    fn open(&mut self, cooldown: Nanos, reason: Reason, step: &mut Step<'_>) {
        self.until = step.now + cooldown;
        self.successes = 0;
        self.used = 0;
        self.counts_refusals = false;
        self.seldom = 0;
        self.server = Server::Unknown;
        self.round_since = step.now;
        self.enter(State::Open, reason, step);
    }

    fn half_open(&mut self, by_redial: bool, step: &mut Step<'_>) {
        self.by_redial = by_redial;
        self.successes = 0;
        self.start_round(step.now);
        self.enter(State::HalfOpen, Reason::NONE, step);
    }

    /// A fresh half-open verdict: all slots are free, late probes of the round before are void.
    fn begin_round(&mut self, step: &mut Step<'_>) {
        self.start_round(step.now);
        self.set_verdict(step);
    }

    fn start_round(&mut self, now: Nanos) {
        self.used = 0;
        self.round_since = now;
        self.lease_since = Nanos::MAX;
        self.until = self.idle_end() + self.lease().times(ROUND_LEASES);
    }

    fn slot_taken(&mut self, now: Nanos) {
        self.lease_since = self.lease_since.min(now);
        self.heard = now;
    }

    /// How long a probe may take: until established, or until its first exchange is over.
    fn lease(&self) -> Nanos {
        self.settings.lease(self.reason.window)
    }

    fn halve_at(&self) -> Nanos {
        self.healthy_since + self.cooldown
    }

    fn idle_end(&self) -> Nanos {
        self.round_since + IDLE_ROUND.max(self.lease())
    }

    /// Never after `until`, even if the lease was changed meanwhile: the verdict would run out.
    fn round_end(&self) -> Nanos {
        let lease = self.lease();
        let end = if self.lease_since == Nanos::MAX {
            self.idle_end()
        } else {
            (self.heard + lease).min(self.lease_since + lease.times(ROUND_LEASES))
        };
        end.min(self.until)
    }

    /// With a ramp of that length; zero: none.
    fn close(&mut self, last_seqs: Option<[u64; 2]>, ramp: Nanos, step: &mut Step<'_>) {
        self.until = if ramp > Nanos::ZERO {
            step.now + ramp
        } else {
            Nanos::ZERO
        };
        self.follows = Follows::Nobody;
        self.empty_windows(last_seqs, step.now);
        self.successes = 0;
        self.misled = 0;
        self.distrust_until = Nanos::ZERO;
        self.healthy_since = step.now;
        self.enter(State::Closed, Reason::NONE, step);
    }

    /// Nothing that happened until now counts any more, in either window. Without sequence numbers,
    /// time decides.
    fn empty_windows(&mut self, last_seqs: Option<[u64; 2]>, now: Nanos) {
        self.note_seqs(last_seqs.unwrap_or_default());
        self.floor_at = if last_seqs.is_some() {
            Nanos::ZERO
        } else {
            now
        };
        self.floor_seqs = self.last_seqs;
        self.heard = now;
        self.bypassed = false;
    }

    fn enter(&mut self, to: State, reason: Reason, step: &mut Step<'_>) {
        let from = std::mem::replace(&mut self.state, to);
        self.bypassed = false;
        // Half-open still shows why it opened, and is probed accordingly.
        if to != State::HalfOpen {
            self.reason = reason;
        }
        self.set_verdict(step);
        // A manual state that is prolonged is no transition.
        if from != to {
            self.since = step.now;
            step.out.push(Action::Transition {
                row: step.row,
                from,
                to,
                reason,
                generation: self.generation,
            });
        }
    }

    fn set_verdict(&mut self, step: &mut Step<'_>) {
        self.generation = self.generation.wrapping_add(1);
        self.write_verdict(step);
    }

    /// The verdict of this generation.
    fn write_verdict(&mut self, step: &mut Step<'_>) {
        let (state, until) = if self.ramps() {
            (STATE_RAMP, self.until)
        } else if self.tries() || self.follows == Follows::Offered {
            (STATE_HALF_OPEN, self.until + VERDICT_SLACK)
        } else if self.state.refuses() {
            (self.state.verdict_state(), self.until + VERDICT_SLACK)
        } else {
            (self.state.verdict_state(), Nanos::ZERO)
        };
        let by_exchange = state == STATE_HALF_OPEN && self.reason.window == WindowKind::Exchanges;
        let flags = if by_exchange {
            VERDICT_PROBE_BY_EXCHANGE
        } else {
            0
        };
        step.out.push(Action::SetVerdict {
            row: step.row,
            verdict: Verdict {
                generation: self.generation,
                errno: self.settings.errno,
                state,
                flags,
            },
            until,
            probe_limit: if self.tries() {
                1
            } else {
                self.settings.probe_limit()
            },
        });
    }

    fn note_seqs(&mut self, seqs: [u64; 2]) {
        for (known, seq) in self.last_seqs.iter_mut().zip(seqs) {
            *known = seq.max(*known);
        }
    }
}
