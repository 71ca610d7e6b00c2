//! No rule at all: every call is sent.

use super::{Fate, Rule, Time};

/// See the module.
pub struct NoRule;

impl Rule for NoRule {
    type Ticket = ();

    fn admit(&mut self, _endpoint: usize, _now: Time, _draw: u64) -> Option<()> {
        Some(())
    }

    fn ended(&mut self, _endpoint: usize, _ticket: (), _fate: &Fate, _now: Time) {}

    fn transitions(&self) -> u64 {
        0
    }
}
