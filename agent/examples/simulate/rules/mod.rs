//! The rules that are compared, each behind the same few methods.

pub mod backstop;
pub mod envoy;
pub mod gobreaker;
pub mod hystrix;
pub mod linkerd;
pub mod none;
pub mod resilience4j;
pub mod throttling;

use super::world::{Fate, Luck, Time};

/// Decides which calls pass.
///
/// Time never goes backwards between two calls of any method. What [`Rule::wakes_at`] says is looked
/// at after each of them.
pub trait Rule {
    /// What a call that passes takes along until its end.
    type Ticket: Copy;

    /// Whether the rule wants to hear of the moment at which a connection is established.
    const HEARS_ESTABLISHED: bool = false;

    /// Whether a call to that endpoint passes now. `draw` is uniform, for rules that leave it to chance.
    fn admit(&mut self, endpoint: usize, now: Time, draw: u64) -> Option<Self::Ticket>;

    /// A call's connection is established.
    fn established(&mut self, _endpoint: usize, _ticket: &mut Self::Ticket, _now: Time) {}

    /// A call is over.
    fn ended(&mut self, endpoint: usize, ticket: Self::Ticket, fate: &Fate, now: Time);

    /// When time alone changes something.
    fn wakes_at(&self) -> Option<Time> {
        None
    }

    /// That time has come. What the rule dials by itself is answered by `dial`.
    fn wake(&mut self, _now: Time, _dial: &mut dyn FnMut(usize, Luck) -> (bool, Time)) {}

    /// Changes of state so far.
    fn transitions(&self) -> u64;
}

#[cfg(test)]
mod testing {
    use super::{Fate, Rule, Time};
    use crate::world::{How, hash};

    /// So many calls, one after the other, that end so; how many passed.
    pub fn calls<R: Rule>(rule: &mut R, count: u64, how: How, now: Time) -> u64 {
        let fate = Fate {
            established: None,
            end: now,
            how,
        };
        let mut passed = 0;
        for call in 0..count {
            if let Some(ticket) = rule.admit(0, now, hash(call)) {
                rule.ended(0, ticket, &fate, now);
                passed += 1;
            }
        }
        passed
    }
}
