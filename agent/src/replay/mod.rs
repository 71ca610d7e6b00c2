//! What a configuration would have done to calls that were recorded: `backstop replay`.
//!
//! [`read`] takes the lines of `backstop events --all --json`, [`replay`] feeds the calls in them to the
//! same core that the agent runs, on a virtual clock, through a [`Shadow`] of what the kernel does. The
//! same recording and configuration always give the same result.
//!
//! What a recording cannot tell is taken as it was: which calls failed or were slow, and how long they
//! took. Timeouts of the configuration are therefore not tried out. Calls that the agent refused when
//! the recording was made have no outcome: they count as refused where this configuration would have
//! refused them too, else as unknown.

mod read;
mod report;
mod run;
mod shadow;
#[cfg(test)]
mod tests;

pub use read::{ReadError, Recording, read};
pub use report::{LeftAlone, Replayed, RowReport, Transition};
pub use run::replay;
pub use shadow::{Shadow, Stamp};
