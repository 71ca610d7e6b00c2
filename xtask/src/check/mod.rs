//! `cargo xtask check`: everything that can be known without root and without running a test.

mod object;
mod paths_in_code;
mod purity;
mod traces;

use std::process::{Command, ExitCode};

use anyhow::{Result, bail};

use crate::process;

/// A check's result: a note on what was looked at, or what is wrong.
type Outcome = Result<String>;

/// A check: its name and what runs it.
type Check = (&'static str, fn() -> Outcome);

/// All checks, in the order in which they run: the quick ones first.
const CHECKS: [Check; 7] = [
    ("formatting", formatting),
    ("purity of agent/src/core", purity::core),
    ("purity of agent-common", purity::common),
    ("no host, path or loose end in tracked files", traces::check),
    ("object matches its sources", object::sources),
    ("clippy", clippy),
    ("object is reproducible", object::rebuild),
];

/// Runs every check, whatever came of the others, and says of each in a line how it ended.
///
/// # Errors
/// Never by a check that fails; its failure is in the exit code.
pub fn run() -> Result<ExitCode> {
    let mut failed = 0;
    for (name, check) in CHECKS {
        match check() {
            Ok(note) if note.is_empty() => println!("ok      {name}"),
            Ok(note) => println!("ok      {name} ({note})"),
            Err(error) => {
                println!("failed  {name}: {error:#}");
                failed += 1;
            }
        }
    }
    if failed > 0 {
        println!("{failed} of {} checks failed", CHECKS.len());
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

fn formatting() -> Outcome {
    quietly(
        process::cargo().args(["fmt", "--all", "--check"]),
        "run `cargo fmt --all`",
    )
}

fn clippy() -> Outcome {
    // The kernel programs need another compiler and target; `object is reproducible` builds them.
    let mut command = process::cargo();
    command.args([
        "clippy",
        "--locked",
        "--workspace",
        "--exclude",
        "agent-ebpf",
    ]);
    command.args(["--all-targets", "--", "-D", "warnings"]);
    quietly(&mut command, "every warning counts as an error")
}

/// Runs a command and shows its output only if it fails.
fn quietly(command: &mut Command, advice: &str) -> Outcome {
    let output = command.output()?;
    if !output.status.success() {
        eprint!("{}", String::from_utf8_lossy(&output.stdout));
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        bail!(
            "`{}` ended with {}; {advice}",
            process::describe(command),
            output.status
        );
    }
    Ok(String::new())
}
