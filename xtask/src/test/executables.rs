//! Building a package's tests without running them, so that root need not run cargo.

use std::path::PathBuf;
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::process;

/// A line of `cargo --message-format=json`, as far as it matters.
#[derive(Debug, Deserialize)]
struct Message {
    reason: String,
    executable: Option<PathBuf>,
    #[serde(default)]
    profile: Profile,
}

#[derive(Debug, Default, Deserialize)]
struct Profile {
    #[serde(default)]
    test: bool,
}

/// Builds the tests of a package, or those that `which` names to cargo, and returns their executables.
///
/// # Errors
/// When the build fails.
pub fn build(package: &str, which: &[&str]) -> Result<Vec<PathBuf>> {
    let mut command = process::cargo();
    command.args(["test", "--locked", "--package", package, "--no-run"]);
    command
        .args(which)
        .args(["--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit());
    let line = process::describe(&command);
    eprintln!("+ {line}");
    let output = command
        .output()
        .with_context(|| format!("start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` ended with {}", output.status);
    }
    parse(&String::from_utf8_lossy(&output.stdout))
}

fn parse(text: &str) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for line in text.lines().filter(|line| line.starts_with('{')) {
        let message: Message =
            serde_json::from_str(line).with_context(|| format!("read cargo's message {line}"))?;
        if message.reason == "compiler-artifact" && message.profile.test {
            found.extend(message.executable);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::parse;
    use std::path::PathBuf;

    #[test]
    fn only_test_executables_are_taken() {
        let text = r#"{"reason":"compiler-artifact","executable":"/t/a-1","profile":{"test":true}}
{"reason":"compiler-artifact","executable":"/t/bin","profile":{"test":false}}
{"reason":"compiler-artifact","executable":null,"profile":{"test":true}}
{"reason":"build-finished","success":true}"#;
        assert_eq!(parse(text).unwrap(), [PathBuf::from("/t/a-1")]);
    }
}
