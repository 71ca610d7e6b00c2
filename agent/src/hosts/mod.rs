//! Names of destinations: which names an address is known by.
//!
//! Names come from two sides. The agent itself resolves those that stand in full in the configuration, or
//! in an operator's order ([`resolver`]). And it hears what the resolvers of programs answer them
//! ([`listener`], [`answer`]): DNS over UDP, in the namespace in which it was said. Whoever answers programs decides
//! what is heard, so a heard name can choose a policy and be shown, and nothing else: it protects nothing,
//! and there is an end to how many there are and to how long they are ([`table`]).

pub mod answer;
pub mod listener;
pub mod resolver;
pub mod table;

pub use answer::Answer;
pub use table::{Change, HostNames, Place};
