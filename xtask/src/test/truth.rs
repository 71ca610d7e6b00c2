//! `cargo xtask retries`: what is taken for a retry, program by program, as a table.

use std::io::{BufRead as _, BufReader};
use std::process::{ExitCode, Stdio};

use anyhow::{Context as _, Result, bail};

use super::{AGENT_VARIABLE, PYTHON_VARIABLE, executables, prerequisites, privileged, venv};
use crate::apt::packages;
use crate::{build, paths, process};

/// The tests that say what they have seen.
const TESTS: &[&str] = &["retries", "chain", "herd"];

/// What a line of the tests says.
#[derive(Debug, PartialEq, Eq)]
struct Truth {
    program: String,
    /// What it is a share of: retries, or fresh calls.
    of: String,
    taken: u64,
    all: u64,
    is_retrying: bool,
}

impl Truth {
    /// `PROGRAM, FAILURES: N of M retries seen`, or `... of M taken for retries`.
    fn parse(line: &str) -> Option<Self> {
        let (program, rest) = line.rsplit_once(": ")?;
        let (program, failures) = program.rsplit_once(", ")?;
        let mut words = rest.split(' ');
        let taken = words.next()?.parse().ok()?;
        (words.next()? == "of").then_some(())?;
        let all = words.next()?.parse().ok()?;
        let is_retrying = match words.collect::<Vec<_>>()[..] {
            ["retries", "seen"] => true,
            ["taken", "for", "retries"] => false,
            _ => return None,
        };
        Some(Self {
            program: program.to_owned(),
            of: failures.trim_end_matches(" fail").to_owned(),
            taken,
            all,
            is_retrying,
        })
    }
}

/// Runs the command; the exit code says whether every bound was kept.
///
/// # Errors
/// When something is missing that cannot be installed, a build fails, or nothing was said.
pub fn run() -> Result<ExitCode> {
    prerequisites::check()?;
    packages::ensure(packages::TESTS)?;
    let python = venv::ensure()?;
    let agent = build::release("agent", "backstop")?;
    let (mut truths, mut others, mut good) = (Vec::new(), Vec::new(), true);
    for executable in executables::build("tests")? {
        let name = executable.file_stem().and_then(|name| name.to_str());
        let name = name.and_then(|name| name.rsplit_once('-'));
        if !name.is_some_and(|(name, _)| TESTS.contains(&name)) {
            continue;
        }
        let mut command = privileged(&[
            (AGENT_VARIABLE, agent.clone().into()),
            (PYTHON_VARIABLE, python.clone().into()),
        ])?;
        command.arg(&executable).arg("--nocapture");
        command.current_dir(paths::root().join("tests"));
        let line = process::describe(&command);
        eprintln!("+ {line}");
        let mut child = command
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("start `{line}`"))?;
        let output = child
            .stdout
            .take()
            .context("read the output of the tests")?;
        for line in BufReader::new(output).lines() {
            let line = line.context("read the output of the tests")?;
            match Truth::parse(&line) {
                Some(truth) => truths.push(truth),
                None if line.starts_with("test ") && line.ends_with("FAILED") => others.push(line),
                None if ["storm", "load on D", "busiest"]
                    .iter()
                    .any(|word| line.starts_with(word)) =>
                {
                    others.push(line.trim_end_matches(": {").to_owned());
                }
                None => {}
            }
        }
        let status = child.wait().with_context(|| format!("wait for `{line}`"))?;
        good &= status.success();
    }
    if truths.is_empty() {
        bail!("no test has said anything");
    }
    print(&truths);
    println!();
    for line in others {
        println!("{line}");
    }
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn print(truths: &[Truth]) {
    for (is_retrying, title) in [
        (
            false,
            [
                "Program that never retries",
                "Taken for retries",
                "of calls",
            ],
        ),
        (true, ["Program that retries", "Seen", "of retries"]),
    ] {
        let [program, taken, all] = title;
        println!("\n| {program} | Failures | {taken} | {all} | % |");
        println!("| --- | ---: | ---: | ---: | ---: |");
        for truth in truths
            .iter()
            .filter(|truth| truth.is_retrying == is_retrying)
        {
            // In tenths of a percent.
            let share = truth.taken * 1_000 / truth.all.max(1);
            println!(
                "| {} | {} | {} | {} | {}.{} |",
                truth.program,
                truth.of,
                truth.taken,
                truth.all,
                share / 10,
                share % 10
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let truth = Truth::parse("sequence 600 0.005 0 0 0, 20 % fail: 1 of 600 taken for retries");
        let truth = truth.expect("a line of the tests");
        assert_eq!((truth.taken, truth.all, truth.is_retrying), (1, 600, false));
        assert_eq!(
            (&*truth.program, &*truth.of),
            ("sequence 600 0.005 0 0 0", "20 %")
        );
        let truth = Truth::parse("curl --retry 3, 30 % fail: 16 of 16 retries seen");
        assert!(truth.expect("a line of the tests").is_retrying);
        for other in [
            "test a ... ok",
            "busiest 10 ms: 97 of 1000 retries, uniform share 100",
            "",
        ] {
            assert_eq!(Truth::parse(other), None);
        }
    }
}
