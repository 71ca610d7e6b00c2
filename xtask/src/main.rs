//! Backstop's build, test and measuring commands.
#![allow(
    clippy::print_stdout,
    reason = "the commands' results go to standard output"
)]

mod apt;
mod bench;
mod build;
mod check;
mod ebpf;
mod paths;
mod process;
mod run;
mod simulate;
mod test;
mod vm;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

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
    /// Build the one static release binary and say where it lies.
    Build,

    /// Build the agent and run it: `backstop run ARGUMENTS`.
    ///
    /// A stable compiler is all it takes: the kernel object is part of the repository. Asks sudo
    /// where this is not root. Try `cargo xtask run --print-config`.
    Run {
        /// Passed on to `backstop run`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },

    /// Run every test: unit tests, then the privileged ones against the real kernel.
    ///
    /// Installs the Debian packages that the tests need (it names them first; no service is
    /// started) and packages from PyPI into target/venv. Needs root for the privileged part and
    /// asks sudo where this is not root. Ends with the list of skipped tests and why, and one line
    /// `N passed, N failed, N skipped`.
    Test {
        /// Run only tests with this text in their names.
        filter: Option<String>,
    },

    /// Check what can be known without running a test; one line for each check.
    ///
    /// Formatting, clippy, purity of the core, the kernel object against its sources (and byte by
    /// byte, where the tools that built it are here), and that no tracked file names a registry
    /// host, a path of this machine or a loose end. Needs no root and installs nothing.
    Check,

    /// Boot other kernels in emulated machines and check the agent there.
    ///
    /// Installs qemu and busybox, downloads Debian's kernels into target/vm (they are not
    /// installed), and runs `vmcheck` of the package `tests` in each. No KVM is needed; a kernel
    /// takes some ten seconds to boot. Prints PASS or FAIL for each.
    Vm {
        /// Kernel series to boot, as --list names them; all if none is given.
        kernels: Vec<String>,
        /// Only list the series and which kernels have been downloaded.
        #[arg(long)]
        list: bool,
        /// Look for newer kernels than those downloaded before.
        #[arg(long)]
        refresh: bool,
        /// Stop a machine after this many seconds; it has then failed.
        #[arg(long, default_value_t = 240, value_name = "SECONDS")]
        limit: u64,
    },

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
    /// Print what Backstop takes for a retry, program by program, and what becomes of storms.
    ///
    /// Programs that never retry, and programs whose retries are known, at several rates and shares of
    /// failures; then a storm, a chain of services and a herd, without Backstop and with it. Prints
    /// tables; exit code 1 when a target is missed. All of it takes about half an hour. Needs what `cargo xtask
    /// test` needs, and installs Go and a package from npm (target/npm).
    Retries(test::truth::Arguments),

    /// Simulate outages under Backstop's breakers and under the published rules of others.
    ///
    /// Builds agent/examples/simulate in release mode, runs every scenario (about a minute of
    /// processor time) and puts the tables into docs/SIMULATION.md. The same on every machine.
    Simulate {
        /// Only scenarios with this text in their names; prints their tables and touches no file.
        filter: Option<String>,
        /// Compare the tables in docs/SIMULATION.md with those that come out, and change nothing.
        #[arg(long, conflicts_with = "filter")]
        check: bool,
    },
    /// The load process of `bench`.
    #[command(hide = true)]
    BenchLoad(bench::worker::Arguments),
}

fn main() -> ExitCode {
    let result = if std::env::var_os(ebpf::wrapper::VARIABLE).is_some() {
        ebpf::wrapper::exec(std::env::args_os().skip(1))
    } else {
        perform(Arguments::parse().command)
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn perform(task: Task) -> Result<ExitCode> {
    match task {
        Task::Build => build::run().map(|()| ExitCode::SUCCESS),
        Task::Check => check::run(),
        Task::Run { arguments } => match run::run(&arguments)? {},
        Task::Test { filter } => test::run(filter.as_deref()),
        Task::Vm {
            kernels,
            list,
            refresh,
            limit,
        } => {
            let limit = Duration::from_secs(limit);
            vm::run(&vm::Request {
                kernels,
                list,
                refresh,
                limit,
            })
        }
        Task::Ebpf => ebpf::run().map(|()| ExitCode::SUCCESS),
        Task::Retries(arguments) => test::truth::run(&arguments),
        Task::Simulate { filter, check } => simulate::run(filter.as_deref(), check),
        Task::Bench(arguments) => bench::run(&arguments),
        Task::BenchLoad(arguments) => bench::worker::run(&arguments),
    }
}
