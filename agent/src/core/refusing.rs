//! When the agent looks at the counters of rows that refuse.
//!
//! What opened on exchanges finds out by a trial that its server is back, and who may try is counted in
//! refusals. The kernel says once a second that a row refuses ([`TOLD_EVERY`]): too seldom for a schedule of
//! half a second. So the row's counter is looked at more often until the word is older than a second:
//! then nobody calls any more, or the kernel says it again. The agent, `replay` and the simulation all do
//! so by this one.

use std::collections::BTreeMap;

use super::{Nanos, RowId};

/// The kernel tells of refusals at most this often for each row (`agent-ebpf/src/refusal.rs`).
pub const TOLD_EVERY: Nanos = Nanos::from_secs(1);
/// Between two looks.
const LOOK_EVERY: Nanos = Nanos::from_millis(250);
/// How long the kernel's word of refusals holds.
const HOLDS_FOR: Nanos = Nanos::from_secs(1);

/// Rows that refuse, and the next look at them. There are as many as rows that are open and called: all
/// that it does takes time by their number, four times a second.
#[derive(Debug, Default)]
pub struct Refusing {
    /// By row, when the kernel last said so. In order, so that the same events give the same looks.
    rows: BTreeMap<RowId, Nanos>,
    /// When they are looked at next; without a meaning while there are none.
    next: Nanos,
}

impl Refusing {
    /// The kernel says that a row refuses, and the row's breaker is open.
    pub fn heard(&mut self, row: RowId, now: Nanos) {
        if self.rows.is_empty() {
            self.next = now + LOOK_EVERY;
        }
        self.rows.insert(row, now);
    }

    /// When to look next; `None`: not before something is heard.
    pub fn next_look(&self) -> Option<Nanos> {
        (!self.rows.is_empty()).then_some(self.next)
    }

    /// The rows to look at now, of those that `is_open`: the core is to be told how many each has refused
    /// ([`Event::Refused`](super::Event)). Empty until [`Refusing::next_look`].
    pub fn due(&mut self, now: Nanos, is_open: impl Fn(RowId) -> bool) -> Vec<RowId> {
        if self.next_look().is_none_or(|next| now < next) {
            return Vec::new();
        }
        self.next = now + LOOK_EVERY;
        self.rows
            .retain(|row, heard| now - *heard <= HOLDS_FOR && is_open(*row));
        self.rows.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: RowId = RowId {
        index: 7,
        incarnation: 1,
    };

    fn ms(ms: u64) -> Nanos {
        Nanos::from_millis(ms)
    }

    /// When a row is looked at whose refusals the kernel tells of at these times.
    fn looks(told: &[u64], is_open: impl Fn(Nanos) -> bool) -> Vec<u64> {
        let (mut refusing, mut looks) = (Refusing::default(), Vec::new());
        for now in (0..5000).map(ms) {
            if told.contains(&now.as_millis()) {
                refusing.heard(ROW, now);
            }
            let due = refusing.due(now, |_| is_open(now));
            looks.extend(due.iter().map(|_| now.as_millis()));
        }
        assert_eq!(refusing.next_look(), None, "it ends by itself");
        looks
    }

    #[test]
    fn four_looks_for_each_word() {
        assert_eq!(looks(&[10], |_| true), [260, 510, 760, 1010]);
        let often = looks(&[10, 1010, 2010], |_| true);
        let wanted: Vec<_> = (1..=12).map(|look| 10 + look * 250).collect();
        assert_eq!(often, wanted);
        // Once there was nothing to look at, the first look is a quarter of a second after the word again.
        assert_eq!(looks(&[10, 3000], |_| true)[4..], [3250, 3500, 3750, 4000]);
    }

    #[test]
    fn none_of_what_is_no_longer_open() {
        assert_eq!(looks(&[10], |now| now < ms(600)), [260, 510]);
    }

    #[test]
    fn each_row_by_its_own_word() {
        let other = RowId { index: 8, ..ROW };
        let mut refusing = Refusing::default();
        refusing.heard(ROW, ms(0));
        refusing.heard(other, ms(900));
        assert_eq!(refusing.due(ms(900), |_| true), [ROW, other]);
        assert_eq!(refusing.due(ms(1149), |_| true), []);
        assert_eq!(refusing.due(ms(1150), |_| true), [other]);
    }
}
