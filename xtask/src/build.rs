//! `cargo xtask build`: static binaries that run on any Linux of this architecture.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use crate::{paths, process};

/// Builds one binary, statically linked, in release mode; returns where it lies.
///
/// # Errors
/// When the build fails.
pub fn release(package: &str, binary: &str) -> Result<PathBuf> {
    one(package, "--bin", binary, "")
}

/// As [`release`], for an example of a package: it shares the libraries of the binary.
///
/// # Errors
/// When the build fails.
pub fn release_example(package: &str, example: &str) -> Result<PathBuf> {
    one(package, "--example", example, "examples")
}

fn one(package: &str, kind: &str, name: &str, folder: &str) -> Result<PathBuf> {
    let target = target()?;
    let mut command = process::cargo();
    // With --target the flags apply to the binary only, not to build scripts and macros, and the
    // result has a folder of its own: plain builds are not thrown away.
    command
        .args([
            "build",
            "--release",
            "--locked",
            "--package",
            package,
            kind,
            name,
        ])
        .args(["--target", &target])
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static");
    process::run(&mut command).context(
        "build a static binary (it needs a linker and a static C library: gcc and libc6-dev on \
         Debian, gcc and glibc-static on Fedora)",
    )?;
    let release = paths::target().join(&target).join("release");
    let path = release.join(folder).join(name);
    if !path.is_file() {
        bail!("cargo built {name}, yet {} is not there", path.display());
    }
    Ok(path)
}

/// This machine's target with glibc, whose static variant Debian ships with libc6-dev.
fn target() -> Result<String> {
    match std::env::consts::ARCH {
        arch @ ("x86_64" | "aarch64") => Ok(format!("{arch}-unknown-linux-gnu")),
        other => bail!("Backstop runs on x86_64 and aarch64; this machine is {other}"),
    }
}

/// Runs the command.
///
/// # Errors
/// When the build fails.
pub fn run() -> Result<()> {
    let path = release("agent", "backstop")?;
    let bytes = fs::metadata(&path)
        .with_context(|| format!("look at {}", path.display()))?
        .len();
    let tenths = bytes / 100_000;
    println!(
        "{}: {}.{} MB, static",
        path.display(),
        tenths / 10,
        tenths % 10
    );
    Ok(())
}
