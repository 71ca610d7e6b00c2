//! Judges the last calls of a row, connects or exchanges.
//!
//! What counts: the last `window` calls above the floor that are not older than `window_age`. A
//! run of failures is counted from the newest call backwards, over the whole ring (a policy may ask
//! for a longer run than its window), and ends at the first call that is too old.
//!
//! An entry that cannot be read (another CPU has taken the number and not written the call yet)
//! may be anything, and must not cause a trip: it ends a run, and it counts as a fast success when
//! rates are compared. If it turns out to be a failure, that failure's own event makes the agent
//! look again.

use agent_common::CallWindow;
use agent_common::window::{SLOTS, decode, slot};

use super::{BreakerSettings, Nanos, Reason, ReasonKind, WindowKind};

/// A window in numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WindowStats {
    /// Calls that count.
    pub calls: u32,
    /// Failures among them.
    pub failures: u32,
    /// `failures / calls`; 0 without calls.
    pub failure_rate: f64,
    /// Failures in a row, the newest call backwards. May exceed `calls`: a run is not limited to
    /// the window.
    pub consecutive: u32,
    /// Slow calls among `calls`. A call that failed is never slow.
    pub slow_calls: u32,
    /// `slow_calls / calls`; 0 without calls.
    pub slow_call_rate: f64,
    /// Why the breaker must trip, if it must.
    pub trip: Option<Reason>,
}

/// Judges the calls `floor_seq + 1` to `last_seq` of a row's window of that kind at `now`. Slow
/// calls are judged in a window of exchanges only; of no window ([`WindowKind::None`]), nothing is.
pub fn evaluate(
    kind: WindowKind,
    window: &CallWindow,
    last_seq: u64,
    floor_seq: u64,
    now: Nanos,
    s: &BreakerSettings,
) -> WindowStats {
    evaluate_since(kind, window, last_seq, floor_seq, Nanos::ZERO, now, s)
}

/// As [`evaluate`]; calls that ended before `not_before` do not count either.
pub fn evaluate_since(
    kind: WindowKind,
    window: &CallWindow,
    last_seq: u64,
    floor_seq: u64,
    not_before: Nanos,
    now: Nanos,
    s: &BreakerSettings,
) -> WindowStats {
    let slots = SLOTS as u64;
    let size = u64::from(s.window).clamp(1, slots);
    let not_before = not_before.max(now - s.window_age);
    // Call numbers begin with 1. With the floor at or above the last call the range is empty, also
    // at the end of the numbers.
    let lowest = floor_seq
        .min(u64::MAX - 1)
        .saturating_add(1)
        .max(last_seq.saturating_sub(slots - 1));
    let last_seq = if floor_seq < last_seq { last_seq } else { 0 };

    let mut seen = Seen::default();
    let mut in_run = true;
    for seq in (lowest..=last_seq).rev() {
        let in_window = last_seq - seq < size;
        if !in_window && !in_run {
            break;
        }
        let Some(call) = decode(window.entries[slot(seq)], seq, now.0) else {
            in_run = false;
            seen.unreadable += u32::from(in_window);
            continue;
        };
        // Numbers are given in the order of time (to within microseconds): what is before a call
        // that is too old is too old as well.
        if Nanos(call.at_ns) < not_before {
            break;
        }
        in_run &= call.failed;
        seen.consecutive += u32::from(in_run);
        if in_window {
            seen.calls += 1;
            seen.failures += u32::from(call.failed);
            seen.slow += u32::from(call.slow && !call.failed);
        }
    }
    WindowStats {
        calls: seen.calls,
        failures: seen.failures,
        failure_rate: ratio(seen.failures, seen.calls),
        consecutive: seen.consecutive,
        slow_calls: seen.slow,
        slow_call_rate: ratio(seen.slow, seen.calls),
        trip: seen.trip(kind, s),
    }
}

/// Counts of calls that count.
#[derive(Default)]
struct Seen {
    calls: u32,
    failures: u32,
    slow: u32,
    /// In the window, and not readable.
    unreadable: u32,
    consecutive: u32,
}

impl Seen {
    /// The first reason to trip, in this order: failures in a row, failure rate, slow call rate.
    fn trip(&self, window: WindowKind, s: &BreakerSettings) -> Option<Reason> {
        let slow_call_rate = match window {
            WindowKind::Connects => None,
            WindowKind::Exchanges => s.slow_call_rate,
            WindowKind::None => return None,
        };
        if !s.enabled {
            return None;
        }
        if s.consecutive_failures > 0 && self.consecutive >= s.consecutive_failures {
            return Some(Reason {
                window,
                kind: ReasonKind::ConsecutiveFailures,
                value: f64::from(self.consecutive),
                threshold: f64::from(s.consecutive_failures),
            });
        }
        let reached = |kind, part: u32, threshold: Option<f64>| {
            let threshold = threshold?;
            let value = ratio(part, self.calls + self.unreadable);
            // A threshold of 0 still takes one such call: nothing trips on health.
            (part > 0 && self.calls >= s.min_calls && value >= threshold).then_some(Reason {
                window,
                kind,
                value,
                threshold,
            })
        };
        reached(ReasonKind::FailureRate, self.failures, s.failure_rate)
            .or_else(|| reached(ReasonKind::SlowCallRate, self.slow, slow_call_rate))
    }
}

fn ratio(part: u32, whole: u32) -> f64 {
    if whole == 0 {
        return 0.0;
    }
    f64::from(part) / f64::from(whole)
}
