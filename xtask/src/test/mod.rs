//! `cargo xtask test`: every test, from the installation of what they need to one line of counts.

mod executables;
mod npm;
mod prerequisites;
mod report;
pub mod truth;
mod venv;

use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result, bail};

use self::report::Report;
use crate::apt::packages;
use crate::{build, paths, process};

/// Tells the privileged tests where the agent's binary lies.
const AGENT_VARIABLE: &str = "BACKSTOP_BIN";

/// Tells the privileged tests where the Python with the packages from PyPI lies.
const PYTHON_VARIABLE: &str = "BACKSTOP_PYTHON";

/// Tells Node where the packages from npm lie.
const NODE_VARIABLE: &str = "NODE_PATH";

/// Tells the test harness how many tests of a program it may run at once.
const THREADS_VARIABLE: &str = "RUST_TEST_THREADS";
/// Privileged tests at once, at least: they wait for most of their time.
const THREADS: usize = 4;

/// Runs the command; the exit code says whether every test passed.
///
/// # Errors
/// When something is missing that cannot be installed, or a build fails.
pub fn run(filter: Option<&str>) -> Result<ExitCode> {
    prerequisites::check()?;
    packages::ensure(packages::TESTS)?;
    let python = venv::ensure()?;

    let mut report = Report::default();
    let mut unit = process::cargo();
    unit.args(["test", "--locked", "--no-fail-fast"])
        .args(filter);
    unit.args(["--", "--show-output"]);
    let unit_passed = follow(&mut unit, &mut report)?;

    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::var_os(THREADS_VARIABLE)
        .unwrap_or_else(|| processors.max(THREADS).to_string().into());
    let agent = build::release("agent", "backstop")?;
    let mut all_passed = unit_passed;
    for executable in executables::build("tests", &[])? {
        let mut command = privileged(&[
            (AGENT_VARIABLE, agent.clone().into()),
            (PYTHON_VARIABLE, python.clone().into()),
            (THREADS_VARIABLE, threads.clone()),
        ])?;
        command.arg(&executable).args(filter).arg("--show-output");
        command.current_dir(paths::root().join("tests"));
        all_passed &= follow(&mut command, &mut report)?;
    }

    if report.total() == 0 {
        match filter {
            Some(filter) => bail!("no test has '{filter}' in its name"),
            None => bail!("no test ran"),
        }
    }
    print!("{report}");
    let good = all_passed && report.failed == 0;
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// `env` as root, with what the tests are told.
fn privileged(variables: &[(&str, OsString)]) -> Result<Command> {
    let mut command = process::as_root("env")?;
    process::clean(&mut command);
    // Sudo clears the environment, so everything that matters is named.
    let passed_on = std::env::vars_os().filter(|(name, _)| {
        name.to_str().is_some_and(|name| {
            name.starts_with("BACKSTOP_") || ["PATH", "RUST_BACKTRACE", "RUST_LOG"].contains(&name)
        })
    });
    let named = variables
        .iter()
        .map(|(name, value)| (OsString::from(name), value.clone()));
    for (mut assignment, value) in passed_on.chain(named) {
        assignment.push("=");
        assignment.push(value);
        command.arg(assignment);
    }
    Ok(command)
}

/// Runs a test program, shows what it prints and reads the counts from it.
fn follow(command: &mut Command, report: &mut Report) -> Result<bool> {
    let line = process::describe(command);
    eprintln!("+ {line}");
    // One pipe for both streams keeps their order; a test says that it skips itself on either.
    let (output, input) = std::io::pipe().context("make a pipe")?;
    command
        .stdout(input.try_clone().context("copy the pipe's end")?)
        .stderr(input);
    let mut child = command.spawn().with_context(|| format!("start `{line}`"))?;
    // The command holds the pipe's other end, too: without this the output would never end.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut reader = BufReader::new(output);
    let mut bytes = Vec::new();
    let mut view = report.start();
    while reader
        .read_until(b'\n', &mut bytes)
        .context("read the test program's output")?
        > 0
    {
        let text = String::from_utf8_lossy(&bytes);
        if view.line(text.trim_end_matches('\n')) {
            print!("{text}");
        }
        bytes.clear();
    }
    let status = child.wait().with_context(|| format!("wait for `{line}`"))?;
    Ok(status.success())
}
