//! What the agent remembers over a restart, in `state.json` of the state directory: breakers that are
//! not quiet, with their windows, and manual states.
//!
//! [`file`] is the file, [`keeper`] when it is written and by whom, [`restore`] the way back.

pub mod file;
pub mod keeper;
pub mod restore;
