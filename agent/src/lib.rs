//! Backstop's node agent.
//!
//! Layers, from the inside out: [`core`] decides and is pure; [`policy`] says with which numbers;
//! [`kernel`] and [`sockets`] are the hands; [`daemon`] runs them; [`control`], [`metrics`] and
//! [`cli`] show what happens and take orders; [`doctor`] says whether all of it really holds; [`replay`] feeds what happened through the core again.

pub mod cli;
pub mod control;
pub mod core;
pub mod daemon;
pub mod doctor;
pub mod hosts;
pub mod kernel;
pub mod metrics;
pub mod policy;
pub mod replay;
pub mod sockets;
