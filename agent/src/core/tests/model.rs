//! The reference: what each event has to do, written down as plainly as possible. It keeps every
//! call there ever was, knows no timers, and looks at every row at every deadline.

use std::collections::BTreeMap;

use super::evaluate::{Truth, naive};
use super::*;

#[derive(Clone)]
pub(super) struct ModelRow {
    pub(super) incarnation: u32,
    pub(super) target: DialTarget,
    pub(super) state: State,
    pub(super) generation: u32,
    pub(super) cooldown: Nanos,
    pub(super) floors: [Floor; 2],
    /// The window that tripped last, while open or half-open.
    pub(super) opened_on: WindowKind,
    /// Open: cooldown end; forced: end. After a failed probe only known to lie in `until_range`.
    pub(super) until: Nanos,
    /// Set by a failed probe, until the real cooldown is adopted.
    pub(super) until_range: Option<(Nanos, Nanos)>,
    settings: Arc<BreakerSettings>,
    highest_seqs: [u64; 2],
    /// A redial, not the cooldown, made it half-open.
    opened_by_redial: bool,
    /// Redials since closing after which a probe failed.
    misleading_redials: i32,
    last_failed_probe: Nanos,
    /// Open on exchanges: whether the first dial was answered, once it was over.
    server_is_there: Option<bool>,
    /// Open: a single connect may pass.
    trial: bool,
    refused_before: Option<u64>,
    /// Refusals in a row with 900 ms before each.
    far_apart: u64,
    /// Refusals heard of last, and when that or something of a probe or trial was heard of.
    refused_last: (u64, Nanos),
    /// When it opened, or let the last trial pass.
    opened_or_tried: Nanos,
    outage_began: Nanos,
    successes_in_a_row: u32,
    successes_in_round: u32,
    round_began: Nanos,
    /// Latest moment at which this round ends, in the verdict as well.
    pub(super) round_limit: Nanos,
    /// News of probes in this round, the first of them of a slot taken.
    news: Vec<Nanos>,
    healthy_period_began: Nanos,
    remember_since: Nanos,
    /// Closed: end of the ramp.
    pub(super) ramp_until: Option<Nanos>,
}

#[derive(Default)]
pub(super) struct Model {
    pub(super) rows: BTreeMap<u32, ModelRow>,
}

impl ModelRow {
    pub(super) fn waits_for_redial(&self) -> bool {
        let tells = self.opened_on == WindowKind::Connects || self.server_is_there != Some(true);
        self.state == State::Open && tells && self.settings.redial
    }

    /// The next dial says whether the server is there at all.
    pub(super) fn asks(&self) -> bool {
        let unknown = self.opened_on == WindowKind::Exchanges && self.server_is_there.is_none();
        self.waits_for_redial() && unknown
    }

    pub(super) fn tries(&self) -> bool {
        self.state == State::Open && self.trial
    }

    fn open(&mut self, now: Nanos) {
        self.go(State::Open);
        self.server_is_there = None;
        self.trial = false;
        self.refused_before = None;
        self.far_apart = 0;
        self.opened_or_tried = now;
    }

    fn let_one_try(&mut self, now: Nanos) {
        self.refused_before = Some(self.refused_last.0);
        self.opened_or_tried = now;
        self.go(State::Open);
        self.trial = true;
    }

    /// The probe or trial that fails now came as seldom as those before, and failed quickly.
    fn seldom_and_quick(&self, now: Nanos) -> bool {
        self.far_apart >= 2 && now - self.refused_last.1 <= secs(1)
    }

    pub(super) fn refused(&mut self, refused: u64, now: Nanos) {
        let useful = self.opened_on == WindowKind::Exchanges && self.server_is_there != Some(false);
        if self.state != State::Open || !useful || !self.settings.redial {
            return;
        }
        let Some(before) = self.refused_before else {
            self.refused_before = Some(refused);
            self.refused_last = (refused, now);
            self.far_apart = u64::from(now - self.opened_or_tried >= millis(900));
            return;
        };
        let (last, heard) = self.refused_last;
        if refused == last {
            return;
        }
        self.refused_last = (refused, now);
        self.far_apart = if now - heard >= millis(900 * (refused - last)) {
            self.far_apart + refused - last
        } else {
            0
        };
        let outage = now - self.outage_began;
        let wait = match outage {
            _ if self.trial => self.lease(),
            _ if self.far_apart >= 2 => millis(900),
            _ if outage < secs(60) => millis(500),
            _ if outage < secs(600) => secs(2),
            _ => secs(4),
        };
        let earned = refused - before >= 50 || self.far_apart >= 2;
        if earned && now - self.opened_or_tried >= wait {
            self.let_one_try(now);
        }
    }

    fn success(&mut self, now: Nanos) {
        self.misleading_redials = 0;
        self.successes_in_a_row += 1;
        if self.successes_in_a_row >= self.settings.successes_to_close {
            self.close(now, false);
            self.ramp_until = Some(now + secs(2));
        } else if self.successes_in_round >= self.settings.probes {
            self.new_round(now);
        }
    }

    /// Whether an answered redial is believed now.
    fn trusts_redials(&self, now: Nanos) -> bool {
        let seconds = 0.5 * 2f64.powi(self.misleading_redials);
        self.misleading_redials == 0
            || (now - self.last_failed_probe).0 as f64 >= seconds * 1_000_000_000.0
    }

    fn lease(&self) -> Nanos {
        if self.opened_on == WindowKind::Exchanges {
            self.settings.exchange_lease
        } else {
            self.settings.probe_lease
        }
    }

    fn go(&mut self, state: State) {
        self.state = state;
        self.generation = self.generation.wrapping_add(1);
    }

    fn close(&mut self, now: Nanos, time_floor: bool) {
        self.go(State::Closed);
        self.ramp_until = None;
        self.empty(now, time_floor);
        self.healthy_period_began = now;
        self.misleading_redials = 0;
    }

    fn empty(&mut self, now: Nanos, time_floor: bool) {
        let at = if time_floor { now } else { Nanos::ZERO };
        for window in 0..2 {
            let seq = self.highest_seqs[window];
            self.floors[window] = Floor { seq, at };
        }
        self.remember_since = now;
    }

    fn new_round(&mut self, now: Nanos) {
        self.go(State::HalfOpen);
        self.successes_in_round = 0;
        self.round_began = now;
        let lease = self.lease();
        self.round_limit = now + secs(60).max(lease) + lease.times(4);
        self.news.clear();
    }

    fn half_open(&mut self, by_redial: bool, now: Nanos) {
        self.opened_by_redial = by_redial;
        self.successes_in_a_row = 0;
        self.new_round(now);
    }

    /// What the mere passing of time does.
    fn time(&mut self, now: Nanos) {
        let lease = self.lease();
        let s = &self.settings;
        match self.state {
            State::Closed => {
                self.ramp_until = self.ramp_until.filter(|end| *end > now);
                while self.cooldown > s.cooldown && now >= self.healthy_period_began + self.cooldown
                {
                    self.healthy_period_began = self.healthy_period_began + self.cooldown;
                    self.cooldown = s.cooldown.max(Nanos(self.cooldown.0 / 2));
                    // The next period is as long as the cooldown is then.
                }
            }
            State::Open if now >= self.until => self.half_open(false, now),
            State::HalfOpen => {
                let over = match (self.news.first(), self.news.last()) {
                    (Some(&first), Some(&last)) => {
                        now >= last + lease || now >= first + lease.times(4)
                    }
                    _ => now >= self.round_began + secs(60).max(lease),
                };
                if over || now >= self.round_limit {
                    self.new_round(now);
                }
            }
            State::ForcedOpen | State::ForcedClosed if now >= self.until => self.close(now, true),
            _ => {}
        }
    }

    pub(super) fn configure(&mut self, target: DialTarget, new: Arc<BreakerSettings>, now: Nanos) {
        let old = std::mem::replace(&mut self.settings, new);
        self.target = target;
        let (low, high) = (
            self.settings.cooldown,
            self.settings.cooldown.max(self.settings.cooldown_max),
        );
        let had_grown = self.cooldown > old.cooldown;
        self.cooldown = if had_grown {
            self.cooldown.max(low).min(high)
        } else {
            low
        };
        let other_errno = old.errno != self.settings.errno;
        match self.state {
            State::Closed => {
                self.remember_since = now;
                if !self.settings.enabled {
                    self.ramp_until = None;
                }
            }
            State::Open | State::HalfOpen if !self.settings.enabled => self.close(now, true),
            State::HalfOpen if other_errno => self.new_round(now),
            State::Open | State::ForcedOpen if other_errno => self.go(self.state),
            _ => {}
        }
    }

    pub(super) fn is_a_hint(&self) -> bool {
        matches!(self.state, State::Open | State::HalfOpen)
            && self.opened_on == WindowKind::Connects
    }

    /// `hinted`: another row is open for connects to the same target.
    pub(super) fn calls(&mut self, kind: WindowKind, calls: &[Truth], hinted: bool, now: Nanos) {
        let window = match kind {
            WindowKind::Connects => 0,
            WindowKind::Exchanges => 1,
            WindowKind::None => return,
        };
        self.highest_seqs[window] = calls.len() as u64;
        if self.state != State::Closed {
            return;
        }
        let Floor { seq, at } = self.floors[window];
        let stats = naive(kind, calls, seq, at, now, &self.settings);
        if stats.failures > 0 || stats.consecutive > 0 || stats.slow_calls > 0 {
            self.remember_since = now;
        }
        let s = &self.settings;
        let one_suffices = hinted && window == 0 && s.enabled && s.consecutive_failures > 0;
        if stats.trip.is_some() || (one_suffices && stats.consecutive > 0) {
            self.opened_on = kind;
            self.open(now);
            self.until = now + self.cooldown;
            if self.ramp_until.is_some() {
                self.grow(now);
            } else {
                self.outage_began = now;
            }
        }
    }

    pub(super) fn probe_started(&mut self, generation: u32, now: Nanos) {
        let awaits = self.state == State::HalfOpen || self.tries();
        if !awaits || generation != self.generation {
            return;
        }
        self.refused_last.1 = now;
        if self.state == State::HalfOpen {
            self.news.push(now);
        }
    }

    pub(super) fn probe_ended(
        &mut self,
        generation: u32,
        outcome: ProbeOutcome,
        last_seqs: [u64; 2],
        now: Nanos,
    ) {
        self.highest_seqs = last_seqs;
        let outcome = match outcome {
            // Nothing is told here of exchanges that were broken off: what is not answered has failed.
            ProbeOutcome::Unanswered => ProbeOutcome::Failure,
            outcome => outcome,
        };
        if self.tries() && generation == self.generation {
            match outcome {
                ProbeOutcome::Returned => {}
                ProbeOutcome::Success => {
                    self.half_open(false, now);
                    self.success(now);
                }
                ProbeOutcome::Failure | ProbeOutcome::Unanswered => {
                    let came_seldom = now - self.opened_or_tried >= millis(900);
                    if came_seldom && self.seldom_and_quick(now) {
                        self.let_one_try(now);
                    } else {
                        self.trial = false;
                        self.far_apart = 0;
                        self.go(State::Open);
                    }
                }
            }
            return;
        }
        if self.state != State::HalfOpen || generation != self.generation {
            return;
        }
        // One that took no slot is no beginning.
        if outcome != ProbeOutcome::Returned || !self.news.is_empty() {
            self.news.push(now);
        }
        match outcome {
            ProbeOutcome::Returned => self.refused_last.1 = now,
            ProbeOutcome::Success => {
                self.refused_last.1 = now;
                self.successes_in_round += 1;
                self.success(now);
            }
            ProbeOutcome::Failure | ProbeOutcome::Unanswered => {
                let seldom = self.seldom_and_quick(now).then_some(self.far_apart);
                self.open(now);
                if let Some(far_apart) = seldom {
                    self.let_one_try(now);
                    self.far_apart = far_apart;
                }
                self.misleading_redials += i32::from(self.opened_by_redial);
                self.last_failed_probe = now;
                self.grow(now);
            }
        }
    }

    fn grow(&mut self, now: Nanos) {
        let cap = self.settings.cooldown.max(self.settings.cooldown_max);
        self.cooldown = self.cooldown.times(2).min(cap);
        let tenth = Nanos(self.cooldown.0 / 10);
        self.until_range = Some((
            now + (self.cooldown - tenth),
            now + (self.cooldown + tenth).min(cap),
        ));
    }

    pub(super) fn force(&mut self, to: State, until: Nanos, last_seqs: [u64; 2]) {
        self.highest_seqs = last_seqs;
        self.go(to);
        self.until = until;
    }

    pub(super) fn reset(&mut self, last_seqs: [u64; 2], now: Nanos) {
        self.highest_seqs = last_seqs;
        self.cooldown = self.settings.cooldown;
        if self.state == State::Closed {
            self.ramp_until = None;
            self.empty(now, false);
        } else {
            self.close(now, false);
        }
    }
}

impl Model {
    pub(super) fn get(&mut self, row: RowId) -> Option<&mut ModelRow> {
        self.rows
            .get_mut(&row.index)
            .filter(|known| known.incarnation == row.incarnation)
    }

    /// The row with its time brought up to date, as before any event about it.
    pub(super) fn at(&mut self, row: RowId, now: Nanos) -> Option<&mut ModelRow> {
        let known = self.get(row)?;
        known.time(now);
        Some(known)
    }

    pub(super) fn configure(
        &mut self,
        row: RowId,
        target: DialTarget,
        settings: &Arc<BreakerSettings>,
        generation: u32,
        now: Nanos,
    ) {
        if let Some(known) = self.at(row, now) {
            known.configure(target, settings.clone(), now);
            return;
        }
        self.rows.insert(
            row.index,
            ModelRow {
                incarnation: row.incarnation,
                target,
                state: State::Closed,
                generation,
                cooldown: settings.cooldown,
                floors: [Floor::default(); 2],
                opened_on: WindowKind::None,
                until: Nanos::ZERO,
                until_range: None,
                settings: settings.clone(),
                highest_seqs: [0; 2],
                server_is_there: None,
                trial: false,
                refused_before: None,
                far_apart: 0,
                refused_last: (0, Nanos::ZERO),
                opened_or_tried: Nanos::ZERO,
                outage_began: Nanos::ZERO,
                opened_by_redial: false,
                misleading_redials: 0,
                last_failed_probe: Nanos::ZERO,
                successes_in_a_row: 0,
                successes_in_round: 0,
                round_began: Nanos::ZERO,
                round_limit: Nanos::ZERO,
                news: Vec::new(),
                healthy_period_began: Nanos::ZERO,
                remember_since: now,
                ramp_until: None,
            },
        );
    }

    pub(super) fn redialled(&mut self, target: DialTarget, answered: bool, now: Nanos) {
        for known in self.rows.values_mut() {
            if known.target == target && known.waits_for_redial() {
                known.time(now);
                if known.asks() {
                    known.server_is_there = Some(answered);
                } else if answered && known.waits_for_redial() && known.trusts_redials(now) {
                    known.half_open(true, now);
                }
            }
        }
    }

    pub(super) fn deadline(&mut self, now: Nanos) {
        for known in self.rows.values_mut() {
            known.time(now);
        }
        self.rows.retain(|_, known| {
            known.state != State::Closed
                || known.ramp_until.is_some()
                || known.cooldown > known.settings.cooldown
                || now - known.remember_since <= known.settings.window_age
        });
    }
}
