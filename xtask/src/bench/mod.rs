//! `cargo xtask bench`: what Backstop costs, and how fast it reacts.
//!
//! Everything runs in a network namespace and below a cgroup of its own. Comparisons are made of
//! many short slices, one after the other in turn, with and without Backstop: what else the
//! machine does hits all of them alike, and the median of the ratios within a round is steady where
//! the absolute numbers are not. Beside each ratio stands the A/A ratio, of two cgroups without
//! Backstop measured in the same way: what differs from 1 there is noise.

mod agent;
mod bpf;
mod lab;
mod load;
mod parts;
mod report;
mod slices;
mod usage;
pub mod worker;

use std::{path::PathBuf, process::ExitCode, time::Instant};

use anyhow::{Context as _, Result, ensure};
use clap::{Args, ValueEnum};

use self::{lab::Lab, report::Report};
use crate::{paths, process};

/// What `bench` is told.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Parts to measure [default: all]
    #[arg(value_enum, value_name = "NAME")]
    names: Vec<Part>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
    /// End with exit code 1 when a figure misses its target
    #[arg(long)]
    strict: bool,
    /// Measure this `backstop` instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
}

/// The parts, in the order in which they are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Connect and close on loopback, with and without Backstop
    Connect,
    /// A connect refused by an open breaker, against one refused by the network
    Refused,
    /// Time of each kernel program, and of all of them for one connection
    Programs,
    /// Throughput of wrk against nginx on kept-alive connections
    Keepalive,
    /// Processor time of the agent at 20,000 connects a second
    Cpu,
    /// Memory of agent and maps with 50,000 destinations
    Memory,
    /// From the failure that trips a breaker to the verdict in the kernel
    Reaction,
    /// Processor time and reaction with 100,000 destinations, 1,000 of them open
    Scale,
}

/// Measures and prints. Progress goes to standard error.
///
/// # Errors
/// When a part cannot be measured; the figures of the others are printed all the same.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    ensure!(
        process::is_root(),
        "bench needs root: it makes cgroups and a network namespace and loads programs into the \
         kernel; run it with sudo"
    );
    let binary = match &arguments.binary {
        Some(path) => path
            .canonicalize()
            .with_context(|| format!("find the agent {}", path.display()))?,
        None => build()?,
    };
    let lab = Lab::enter(binary)?;
    let mut report = Report::default();
    let mut failures = Vec::new();
    for part in Part::value_variants() {
        if !arguments.names.is_empty() && !arguments.names.contains(part) {
            continue;
        }
        let name = part
            .to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned());
        let begun = Instant::now();
        eprintln!("measuring {name} …");
        let measured = match part {
            Part::Connect => parts::connect::measure(&lab),
            Part::Refused => parts::refused::measure(&lab),
            Part::Programs => parts::programs::measure(&lab),
            Part::Keepalive => parts::keepalive::measure(&lab),
            Part::Cpu => parts::cpu::measure(&lab),
            Part::Memory => parts::memory::measure(&lab),
            Part::Reaction => parts::reaction::measure(&lab),
            Part::Scale => parts::scale::measure(&lab),
        };
        eprintln!("measured {name} in {:.0} s", begun.elapsed().as_secs_f64());
        match measured {
            Ok(figures) => report.add(&name, figures),
            Err(error) => failures.push(error.context(format!("measure {name}"))),
        }
    }
    drop(lab);
    if arguments.json {
        println!("{}", report.json());
    } else if !report.is_empty() {
        print!("{}", report.table());
    }
    for failure in &failures {
        eprintln!("xtask: {failure:#}");
    }
    let missed = arguments.strict && report.missed() > 0;
    Ok(if missed || !failures.is_empty() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// The release build of the agent: a debug build would measure the compiler.
fn build() -> Result<PathBuf> {
    process::run(process::cargo().args(["build", "--release", "--package", "agent"]))?;
    Ok(paths::target().join("release/backstop"))
}
