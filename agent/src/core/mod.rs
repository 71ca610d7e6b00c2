//! The pure state machines.
