//! Backstop's build, test and measuring commands.
#![allow(
    clippy::print_stdout,
    reason = "the commands' results go to standard output"
)]

mod apt;
mod bench;
mod ebpf;
mod paths;
mod process;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Builds, tests and measures Backstop.
///
/// `cargo build` and `cargo test` alone work with a stable compiler and nothing else; these
/// commands do the rest, and install what they need themselves.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    disable_version_flag = true
)]
struct Arguments {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Rebuild the committed kernel object and its record.
    ///
    /// Needs a nightly compiler (rustup's `nightly`, or the one named in BACKSTOP_NIGHTLY). Fetches
    /// bpf-linker and the source of core into target/tools. The result is the same on every
    /// machine with the same compiler, linker and source of core.
    Ebpf,
    /// Measure cost and reaction time; needs root.
    ///
    /// Builds the release binary and measures it in a network namespace and cgroups of its own.
    /// docs/COST.md says what the figures mean.
    Bench(bench::Arguments),
    /// The load process of `bench`.
    #[command(hide = true)]
    BenchLoad(bench::worker::Arguments),
}

fn main() -> ExitCode {
    let result = if std::env::var_os(ebpf::wrapper::VARIABLE).is_some() {
        ebpf::wrapper::exec(std::env::args_os().skip(1))
    } else {
        run(Arguments::parse().command)
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<ExitCode> {
    match task {
        Task::Ebpf => ebpf::run().map(|()| ExitCode::SUCCESS),
        Task::Bench(arguments) => bench::run(&arguments),
        Task::BenchLoad(arguments) => bench::worker::run(&arguments),
    }
}
