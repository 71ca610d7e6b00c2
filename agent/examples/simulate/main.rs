//! What breakers do to calls, on a virtual clock: Backstop's core beside the published rules of others.
//!
//! `cargo xtask simulate` runs it; docs/SIMULATION.md says what is simulated and what came of it.
#![expect(clippy::print_stdout, reason = "its output is its result")]

mod report;
mod rules;
mod run;
mod scenarios;
mod world;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Parser;

/// Simulates scripted outages under Backstop's rules and those of others.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask simulate", disable_version_flag = true)]
struct Arguments {
    /// Only scenarios with this text in their names; prints their tables and touches no file
    filter: Option<String>,
    /// Compare the tables in FILE with those that come out, and change nothing
    #[arg(long, requires = "file")]
    check: bool,
    /// Put the tables into FILE, between its two marks
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

fn main() -> ExitCode {
    match perform(&Arguments::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("simulate: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(arguments: &Arguments) -> Result<ExitCode> {
    let filter = arguments.filter.as_deref().unwrap_or_default();
    let mut scenarios = scenarios::all();
    scenarios.retain(|scenario| scenario.name.contains(filter));
    let results = report::run(scenarios);
    let tables = report::tables(&results);
    let Some(file) = arguments.file.as_deref().filter(|_| filter.is_empty()) else {
        print!("{tables}");
        return Ok(ExitCode::SUCCESS);
    };
    let text = std::fs::read_to_string(file).with_context(|| format!("read {}", file.display()))?;
    let wanted =
        report::put(&text, &tables).with_context(|| format!("look at {}", file.display()))?;
    if arguments.check {
        if let Some((line, is, becomes)) = report::difference(&text, &wanted) {
            eprintln!(
                "{}:{line} is not what comes out:\n  there: {is}\n  here:  {becomes}\nrun `cargo \
                 xtask simulate` and look at what changed",
                file.display()
            );
            return Ok(ExitCode::FAILURE);
        }
        println!("{}: as it comes out", file.display());
    } else {
        std::fs::write(file, wanted).with_context(|| format!("write {}", file.display()))?;
        println!("{tables}\nwritten to {}", file.display());
    }
    Ok(ExitCode::SUCCESS)
}
