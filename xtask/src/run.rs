//! `cargo xtask run`: from a fresh clone to a running agent.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;

use anyhow::{Context as _, Result};

use crate::{build, process};

/// Builds the agent and becomes it; returns only when that fails.
///
/// # Errors
/// When the build fails, there is no way to become root, or the agent cannot be started.
pub fn run(arguments: &[OsString]) -> Result<std::convert::Infallible> {
    let agent = build::release("agent", "backstop")?;
    let mut command = process::as_root(&agent)?;
    command.arg("run").args(arguments);
    process::clean(&mut command);
    let line = process::describe(&command);
    eprintln!("+ {line}");
    // Replaced, not started: signals reach the agent itself, and its exit code is ours.
    Err(command.exec()).with_context(|| format!("start `{line}`"))
}
