//! What the agent remembers over a restart, in the state directory: breakers that are not quiet, with their
//! windows, and manual states in `state.json`, names that programs were told in `names.json`.
//!
//! [`file`] is the files, [`keeper`] when they are written and by whom, [`restore`] the way back.

pub mod file;
pub mod keeper;
pub mod restore;
