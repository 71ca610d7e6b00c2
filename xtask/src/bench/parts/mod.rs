//! The parts: each measures one thing and returns its figures.

pub mod connect;
pub mod cpu;
pub mod keepalive;
pub mod memory;
pub mod programs;
pub mod reaction;
pub mod refused;
pub mod scale;
