//! Requests that are not idempotent and were repeated, told by events. The kernel reports at most one a second
//! and row; what it counts meanwhile is told when the second is over, so that the events' counts add up to
//! the counter.

use std::collections::HashMap;

use agent_common::{
    Event as KernelEvent,
    event::{EVENT_REFUSED, EVENT_WOULD},
    method::METHODS,
};

use super::{
    journal::WallClock,
    node::{Node, netns},
    view,
};
use crate::{
    control::api::{self, Event, Timestamp},
    core::{Nanos, RowId},
    kernel::{clock, events::comm},
};

/// The kernel reports the next one after this time at the soonest.
const EVERY: Nanos = Nanos::from_secs(1);
/// Looks that find nothing until a row is left alone: who counts is slower than who looks now and then.
const LOOKS: u8 = 2;

/// What was told of a row.
#[derive(Default)]
struct Told {
    /// How many; the counter wraps as well.
    count: u32,
    /// The last report.
    last: Option<KernelEvent>,
    /// When the row is looked at again, and how often that may still find nothing; 0: it is not.
    due: Nanos,
    looks: u8,
}

/// See the module.
#[derive(Default)]
pub struct Repeated(HashMap<RowId, Told>);

impl Repeated {
    /// The kernel reports one: how many are to be told.
    fn reported(&mut self, row: RowId, total: u32, event: &KernelEvent) -> u32 {
        let told = self.0.entry(row).or_default();
        told.last = Some(*event);
        told.looks = LOOKS;
        told.due = Nanos(event.at_ns) + EVERY;
        told.grown(total)
    }

    /// Rows whose second is over.
    fn due(&self, now: Nanos) -> Vec<RowId> {
        let due = (self.0.iter()).filter(|(_, told)| told.looks != 0 && told.due <= now);
        due.map(|(row, _)| *row).collect()
    }

    /// What was not told, and of whom the last report was. (Of a row without one nothing is known to tell.)
    fn rest(&mut self, row: RowId, total: u32, now: Nanos) -> Option<(u32, KernelEvent)> {
        let told = self.0.get_mut(&row)?;
        let event = told.last?;
        let grown = told.grown(total);
        told.due = now + EVERY;
        told.looks = if grown != 0 {
            LOOKS
        } else {
            told.looks.saturating_sub(1)
        };
        (grown != 0).then_some((grown, event))
    }

    /// The row is given up.
    pub fn forget(&mut self, row: RowId) {
        self.0.remove(&row);
    }
}

impl Told {
    /// How many there are that were not told; now they are.
    fn grown(&mut self, total: u32) -> u32 {
        let before = std::mem::replace(&mut self.count, total);
        total.wrapping_sub(before)
    }
}

impl Node {
    /// The kernel reports a repeated request.
    pub(super) fn repeated(&mut self, id: RowId, event: &KernelEvent) {
        if self.shown(id).is_none() {
            return;
        }
        let total = self.table.retries(id.index).non_idempotent;
        let count = self.repeated.reported(id, total, event);
        if count != 0 {
            let time = WallClock::read().at(Nanos(event.at_ns));
            self.tell_repeated(id, event, count, time);
        }
    }

    /// Rows whose second is over.
    pub(super) fn tell_repeated_due(&mut self, now: Nanos) {
        for id in self.repeated.due(now) {
            match self.shown(id) {
                Some(_) => self.tell_repeated_rest(id),
                None => self.repeated.forget(id),
            }
        }
    }

    /// What of a row was not told yet.
    pub(super) fn tell_repeated_rest(&mut self, id: RowId) {
        let total = self.table.retries(id.index).non_idempotent;
        if let Some((count, event)) = self.repeated.rest(id, total, clock::now()) {
            self.tell_repeated(id, &event, count, Timestamp::now());
        }
    }

    fn tell_repeated(&mut self, id: RowId, event: &KernelEvent, count: u32, time: Timestamp) {
        let Some(row) = self.shown(id) else { return };
        let is_would = event.flags & EVENT_WOULD != 0;
        let method = (event.outcome as usize).checked_sub(1);
        let method = method.and_then(|number| METHODS.get(number));
        let event = Event::NonIdempotent {
            destination: view::destination(id, &row),
            workload: view::workload(id, &row, &mut self.names),
            netns: netns(&row),
            method: (*method.unwrap_or(&"?")).to_owned(),
            refused: is_would || event.flags & EVENT_REFUSED != 0,
            count: u64::from(count),
            pid: event.pid,
            comm: comm(&event.comm),
            mode: if is_would {
                api::Mode::Observe
            } else {
                api::Mode::Enforce
            },
        };
        self.journal.publish(time, event);
    }
}

#[cfg(test)]
mod tests {
    use bytemuck::Zeroable as _;

    use super::*;

    const ROW: RowId = RowId {
        index: 1,
        incarnation: 0,
    };

    #[test]
    fn the_tail_is_told_when_the_second_is_over() {
        let mut repeated = Repeated::default();
        let at = Nanos::from_secs;
        let event = KernelEvent {
            at_ns: at(10).0,
            outcome: 1,
            ..KernelEvent::zeroed()
        };
        assert_eq!(repeated.reported(ROW, 1, &event), 1);
        assert!(repeated.due(at(10)).is_empty());
        assert_eq!(repeated.due(at(11)), [ROW]);
        let (count, last) = repeated.rest(ROW, 4, at(11)).expect("three more");
        assert_eq!((count, last.outcome), (3, 1));
        // What is counted late is told, too. Then the row is left alone.
        assert!(repeated.rest(ROW, 4, at(12)).is_none());
        assert_eq!(
            repeated.rest(ROW, 5, at(13)).map(|(count, _)| count),
            Some(1)
        );
        for second in 14..16 {
            assert_eq!(repeated.due(at(second)), [ROW]);
            assert!(repeated.rest(ROW, 5, at(second)).is_none());
        }
        assert!(repeated.due(at(99)).is_empty());
        // A report that was overtaken by a look tells nothing twice.
        assert_eq!(repeated.reported(ROW, 5, &event), 0);
        assert_eq!(repeated.reported(ROW, 6, &event), 1);
    }
}
