//! Running programs: every error says which program, with which arguments, and how it ended.

use std::ffi::OsStr;
use std::process::{Command, ExitStatus, Stdio};

use anyhow::{Context as _, Result, bail};

/// A command as one would type it, for messages.
pub fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for argument in command.get_args() {
        text.push(' ');
        let argument = argument.to_string_lossy();
        // The separator of CARGO_ENCODED_RUSTFLAGS and blanks would be misread without quotes.
        if argument.is_empty() || argument.contains([' ', '"', '\'', '$', '*']) {
            text.push('\'');
            text.push_str(&argument);
            text.push('\'');
        } else {
            text.push_str(&argument);
        }
    }
    text
}

/// Runs a command with this terminal's output and returns how it ended.
///
/// # Errors
/// When the program cannot be started.
pub fn status(command: &mut Command) -> Result<ExitStatus> {
    eprintln!("+ {}", describe(command));
    command
        .status()
        .with_context(|| format!("start `{}`", describe(command)))
}

/// Runs a command with this terminal's output; anything but success is an error.
///
/// # Errors
/// When the program cannot be started or ends with another code than 0.
pub fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    if !status.success() {
        bail!("`{}` ended with {status}", describe(command));
    }
    Ok(())
}

/// Runs a command quietly and returns its standard output; its error output is part of the error.
///
/// # Errors
/// When the program cannot be started, ends with another code than 0, or prints no UTF-8.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start `{}`", describe(command)))?;
    if !output.status.success() {
        bail!(
            "`{}` ended with {}: {}",
            describe(command),
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("read the output of `{}`", describe(command)))
}

/// Whether a program of this name is on the PATH.
pub fn exists(program: impl AsRef<OsStr>) -> bool {
    let Some(path) = std::env::var_os("PATH") else {
        return false;
    };
    let program = program.as_ref();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    // SAFETY: geteuid has no arguments, touches no memory and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// A command that runs `program` as root: directly, or through sudo where we are not.
///
/// # Errors
/// When we are not root and there is no sudo.
pub fn as_root(program: impl AsRef<OsStr>) -> Result<Command> {
    if is_root() {
        return Ok(Command::new(program));
    }
    let program = program.as_ref();
    if !exists("sudo") {
        bail!(
            "{} has to run as root; this is not root and there is no sudo: run it in a root shell",
            program.display()
        );
    }
    eprintln!("not root: running {} through sudo", program.display());
    let mut command = Command::new("sudo");
    command.arg("--").arg(program);
    Ok(command)
}

/// The cargo that runs us, so that the same toolchain builds what we ask for.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(crate::paths::root());
    clean(&mut command);
    command
}

/// Takes away what `cargo run` added for our own sake and what would leak into an inner build.
pub fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let Some(name) = name.to_str() else { continue };
        let package = name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        if package
            || matches!(
                name,
                "LD_LIBRARY_PATH" | "CARGO_BIN_NAME" | "CARGO_CRATE_NAME"
            )
        {
            command.env_remove(name);
        }
    }
}
