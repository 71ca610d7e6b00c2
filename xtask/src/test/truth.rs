//! `cargo xtask retries`: what is taken for a retry, program by program, and what limit and budget make of
//! storms, chains and herds.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};

use super::{
    AGENT_VARIABLE, NODE_VARIABLE, PYTHON_VARIABLE, executables, npm, prerequisites, privileged,
    venv,
};
use crate::apt::packages;
use crate::{build, paths, process};

/// What `retries` is told.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Parts to measure [default: all]
    #[arg(value_enum, value_name = "PART")]
    parts: Vec<Part>,
    /// Seconds that each measurement takes [default: 15 for a program, 60 for storm and chain]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: Option<u32>,
    /// Only programs with this text in their names
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
}

/// The parts, in the order in which they are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Programs whose retries are known, and programs that never retry
    Programs,
    /// Fifty clients with five retries each, against a server that fails 60 %
    Storm,
    /// A chain of services in which each asks the next one twice
    Chain,
    /// A thousand clients that fail at once, with backoff on
    Herd,
}

impl Part {
    /// Its name, and how long a measurement takes.
    const fn order(self) -> (&'static str, u32) {
        match self {
            Self::Programs => ("programs", 15),
            Self::Storm => ("storm", 60),
            Self::Chain => ("chain", 60),
            Self::Herd => ("herd", 0),
        }
    }
}

/// Runs the command; the exit code says whether every target was met.
///
/// # Errors
/// When something is missing that cannot be installed, or a build fails.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    prerequisites::check()?;
    packages::ensure(packages::TESTS)?;
    packages::ensure(packages::RETRIES)?;
    let python = venv::ensure()?;
    let node = npm::ensure()?;
    let agent = build::release("agent", "backstop")?;
    process::run(process::cargo().args(["build", "--locked", "--package", "tests", "--bins"]))?;
    let variables = [
        (AGENT_VARIABLE, agent.into_os_string()),
        (PYTHON_VARIABLE, python.into_os_string()),
        (NODE_VARIABLE, node.into_os_string()),
        // Where HOME is not set, Go has no place for what it compiles.
        ("GOPATH", paths::target().join("go").into_os_string()),
    ];
    let mut is_good = true;
    for part in Part::value_variants() {
        if !arguments.parts.is_empty() && !arguments.parts.contains(part) {
            continue;
        }
        let (name, seconds) = part.order();
        let mut command = privileged(&variables)?;
        if *part == Part::Herd {
            command.arg(herd()?).arg("--nocapture");
        } else {
            let seconds = arguments.seconds.unwrap_or(seconds);
            command.arg(paths::target().join("debug/truth"));
            command.arg(name).arg(seconds.to_string());
            command.args(&arguments.only);
        }
        println!("\n{name}\n");
        is_good &= follow(command)?;
    }
    Ok(if is_good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Runs it with this terminal's output; returns whether it ended well.
fn follow(mut command: Command) -> Result<bool> {
    command.current_dir(paths::root().join("tests"));
    Ok(process::status(&mut command)?.success())
}

/// The test of a herd.
fn herd() -> Result<PathBuf> {
    let mut built = executables::build("tests", &["--test", "herd"])?;
    let Some(herd) = built.pop().filter(|_| built.is_empty()) else {
        bail!("cargo built no test `herd`, or more than one");
    };
    herd.canonicalize()
        .with_context(|| format!("find {}", herd.display()))
}
