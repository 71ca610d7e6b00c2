//! `cargo xtask simulate`: the tables of docs/SIMULATION.md.

use std::process::{Command, ExitCode};

use anyhow::Result;

use crate::{build, paths, process};

/// Where the tables stand.
const PAGE: &str = "docs/SIMULATION.md";

/// Builds the simulator and runs it; its exit code is ours.
///
/// # Errors
/// When the build fails, or the simulator cannot be started.
pub fn run(filter: Option<&str>, check: bool) -> Result<ExitCode> {
    let simulator = build::release_example("agent", "simulate")?;
    let mut command = Command::new(simulator);
    match filter {
        Some(filter) => command.arg("--").arg(filter),
        None => command.arg("--file").arg(paths::root().join(PAGE)),
    };
    if check {
        command.arg("--check");
    }
    let status = process::status(&mut command)?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
