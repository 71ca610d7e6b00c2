//! Read timeouts and deadlines: fires each when it is due, and not when the wait is the program's own.

use std::collections::{BTreeMap, HashMap, HashSet};

use agent_common::{Mode, Row};

use super::{
    Owed, Rows, Shared,
    abort::{Aborter, Firing},
};
use crate::{
    core::{
        Nanos,
        waits::{Due, Limit},
    },
    kernel::clock,
    sockets::look::Look,
};

/// What is due within this time is done in one go: less than a timer is late by anyway.
const SLACK: Nanos = Nanos::from_millis(1);
/// When a wait was found to be the program's own (it is stopped, or still sends), it is looked at
/// again after this long.
const AGAIN: Nanos = Nanos::from_millis(50);

#[derive(Default)]
pub(super) struct Timeouts {
    /// Exchanges with a timeout, by when it fires.
    due: BTreeMap<(Nanos, u64, u32), Owed>,
    /// Exchanges that were put off, and those whose timeout was only counted (never again).
    put_off: HashMap<(u64, u32), Nanos>,
}

impl Timeouts {
    /// When the next one fires, of those that were seen.
    pub(super) fn next(&self) -> Option<Nanos> {
        self.due.first_key_value().map(|((at, ..), _)| *at)
    }

    /// Takes in all exchanges that wait. After a sleep of the agent everything is put off a little,
    /// so that what happened meanwhile is seen first.
    pub(super) fn look(&mut self, shared: &Shared, owed: &[Owed], now: Nanos, slept: bool) {
        self.due.clear();
        if !self.put_off.is_empty() {
            let waiting: HashSet<_> = owed.iter().map(Owed::id).collect();
            self.put_off.retain(|id, _| waiting.contains(id));
        }
        // Paused: nothing fires.
        if shared.table.mode() == Mode::OFF {
            return;
        }
        let mut rows = Rows::default();
        for owed in owed {
            if let Some(row) = rows.get(shared, owed.row())
                && let Some(due) = due(shared, row, owed)
            {
                let not_before = self.put_off.get(&owed.id()).copied();
                let at = due.at.max(not_before.unwrap_or(Nanos::ZERO));
                let at = if slept { at.max(now + AGAIN) } else { at };
                if at < Nanos::MAX {
                    self.due.insert((at, owed.cookie, owed.number), *owed);
                }
            }
        }
    }

    /// Fires all that are due.
    pub(super) fn fire(&mut self, shared: &Shared, aborter: &mut Aborter, now: Nanos) {
        let mut firings = Vec::new();
        let mut rows = Rows::default();
        while let Some(entry) = self.due.first_entry()
            && entry.key().0 <= now + SLACK
        {
            let Some(owed) = shared.again(&entry.remove()) else {
                continue;
            };
            let Some(row) = rows.get(shared, owed.row()) else {
                continue;
            };
            let Some(due) = due(shared, row, &owed) else {
                continue;
            };
            if due.at > now + SLACK {
                // The program has sent more of its request since.
                self.due.insert((due.at, owed.cookie, owed.number), owed);
                continue;
            }
            let number = Some(owed.number);
            firings.push(Firing::new(owed.cookie, owed.stamp, number, due, *row));
        }
        if firings.is_empty() {
            return;
        }
        aborter.carry_out(shared, &mut firings, |firing, look| {
            !is_the_programs_own(look, firing.due.limit)
        });
        let again = clock::now() + AGAIN;
        for firing in firings {
            let id = (firing.cookie, firing.number.unwrap_or(0));
            let at = if firing.done { Nanos::MAX } else { again };
            self.put_off.insert(id, at);
            if !firing.done
                && let Some(owed) = Owed::of(firing.cookie, &firing.stamp)
            {
                self.due.insert((at, id.0, id.1), owed);
            }
        }
    }
}

/// The next timeout of an exchange.
fn due(shared: &Shared, row: &Row, owed: &Owed) -> Option<Due> {
    let mut limits = *shared.plan.waits(row.settings.policy);
    if owed.is_usual(row) {
        // No answer is owed, and the operation has ended with what was sent.
        (limits.read, limits.deadline) = (None, None);
    }
    let has_option =
        limits.options().is_some() && shared.bounded.before(owed.cookie, owed.wait.asked);
    limits.due(owed.wait, has_option)
}

/// Whether not the destination is waited for: the answer lies there unread, or the program has not
/// sent all of its request.
fn is_the_programs_own(look: &Look, limit: Limit) -> bool {
    let unsent = look.tcp.is_some_and(|tcp| tcp.notsent_bytes > 0);
    look.has_unread() || (limit == Limit::Read && unsent)
}
