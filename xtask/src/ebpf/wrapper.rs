//! A wrapper around rustc, so that symbols do not depend on where this workspace lies.
//!
//! Cargo gives every crate a `-C metadata`, which enters the names of all its symbols. For `core`
//! built from source it is made from the absolute path of that source. Here, where no two crates
//! of the object share a name, the crate's name does as well.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use anyhow::{Context as _, Result};

use super::build::TARGET;

/// Set to anything, it makes this program behave as a wrapper around rustc.
pub const VARIABLE: &str = "BACKSTOP_RUSTC_WRAPPER";

/// Replaces this process by the compiler; the first argument is its path, as cargo calls it.
///
/// # Errors
/// When no compiler is named, or it cannot be started. On success this does not return.
pub fn exec(arguments: impl Iterator<Item = OsString>) -> Result<std::process::ExitCode> {
    let mut arguments = arguments;
    let rustc = arguments
        .next()
        .context("cargo names no compiler to its wrapper")?;
    let arguments = with_stable_metadata(arguments.collect());
    let error = Command::new(&rustc).args(arguments).exec();
    Err(error).with_context(|| format!("start {}", rustc.display()))
}

fn with_stable_metadata(mut arguments: Vec<OsString>) -> Vec<OsString> {
    let text = |argument: &OsString| argument.to_string_lossy().into_owned();
    // Build scripts and macros run on this machine and leave no symbol in the object.
    if !arguments.iter().any(|argument| text(argument) == TARGET) {
        return arguments;
    }
    let position = arguments
        .iter()
        .position(|argument| text(argument) == "--crate-name");
    let name = position
        .and_then(|position| arguments.get(position + 1))
        .map(text);
    if let Some(name) = name {
        for argument in &mut arguments {
            if text(argument).starts_with("metadata=") {
                *argument = format!("metadata={name}").into();
            }
        }
    }
    arguments
}

#[cfg(test)]
mod tests {
    use super::with_stable_metadata;
    use std::ffi::OsString;

    fn change(line: &str) -> String {
        let arguments = line.split(' ').map(OsString::from).collect();
        let changed = with_stable_metadata(arguments);
        changed.join(" ".as_ref()).to_string_lossy().into_owned()
    }

    #[test]
    fn metadata_of_kernel_crates_is_their_name() {
        assert_eq!(
            change(
                "--crate-name core a.rs -C metadata=1f -C extra-filename=-2e --target bpfel-unknown-none"
            ),
            "--crate-name core a.rs -C metadata=core -C extra-filename=-2e --target bpfel-unknown-none"
        );
    }

    #[test]
    fn crates_for_this_machine_stay_as_they_are() {
        let line = "--crate-name syn a.rs -C metadata=1f";
        assert_eq!(change(line), line);
    }
}
