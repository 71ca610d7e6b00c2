//! The nightly compiler and bpf-linker.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::{paths, process};

/// The linker's version. Newer ones want an LLVM of the system; this one uses rustc's own.
const LINKER_VERSION: &str = "0.10.3";

/// Rustc's LLVM, as the linker's feature names it.
const LINKER_FEATURE: &str = "rust-llvm-22";

/// Names the rustup toolchain to use instead of `nightly`.
const TOOLCHAIN_VARIABLE: &str = "BACKSTOP_NIGHTLY";

/// The programs that compile and link the kernel object.
#[derive(Debug, Clone)]
pub struct Toolchain {
    /// The rustup toolchain's name.
    pub name: String,
    /// What `rustc --version` prints.
    pub rustc: String,
    /// Where that toolchain lies.
    pub sysroot: PathBuf,
    /// The linker's path.
    pub linker: PathBuf,
    /// What `bpf-linker --version` prints.
    pub linker_version: String,
}

impl Toolchain {
    /// Finds the compiler and the linker, building the linker if it is missing.
    ///
    /// # Errors
    /// When there is no nightly compiler or the linker cannot be built.
    pub fn obtain() -> Result<Self> {
        let (name, rustc, sysroot) = compiler()?;
        let linker = linker_path();
        if linker_version().is_none() {
            install_linker(&name)?;
        }
        let linker_version = linker_version().with_context(|| {
            format!(
                "{} is not bpf-linker {LINKER_VERSION} even now",
                linker.display()
            )
        })?;
        Ok(Self {
            name,
            rustc,
            sysroot,
            linker,
            linker_version,
        })
    }

    /// Compiler and linker, if both are here.
    pub fn at_hand() -> Option<Self> {
        let (name, rustc, sysroot) = compiler().ok()?;
        let linker_version = linker_version()?;
        Some(Self {
            name,
            rustc,
            sysroot,
            linker: linker_path(),
            linker_version,
        })
    }

    /// `major.minor` of the compiler, for example `1.97`.
    ///
    /// # Errors
    /// When the version string has another form.
    pub fn minor_version(&self) -> Result<String> {
        minor_version(&self.rustc).with_context(|| format!("read the version in '{}'", self.rustc))
    }

    /// This toolchain's cargo.
    pub fn cargo(&self) -> Command {
        rustup_proxy("cargo", &self.name)
    }
}

fn compiler() -> Result<(String, String, PathBuf)> {
    let name = std::env::var(TOOLCHAIN_VARIABLE).unwrap_or_else(|_| "nightly".to_owned());
    let version = process::output(rustup_proxy("rustc", &name).arg("--version")).with_context(|| {
        format!(
            "the kernel object needs a nightly compiler: `rustup toolchain install nightly`, or \
             name an installed one in {TOOLCHAIN_VARIABLE} (now '{name}')"
        )
    })?;
    let sysroot = process::output(rustup_proxy("rustc", &name).args(["--print", "sysroot"]))?;
    Ok((
        name,
        version.trim().to_owned(),
        PathBuf::from(sysroot.trim()),
    ))
}

/// A tool of another toolchain than the one that runs us.
fn rustup_proxy(tool: &str, toolchain: &str) -> Command {
    let mut command = Command::new(tool);
    command
        .arg(format!("+{toolchain}"))
        .current_dir(paths::root());
    process::clean(&mut command);
    // Set by the cargo that runs us; they would bring its compiler and flags into this build.
    for name in [
        "CARGO",
        "RUSTC",
        "RUSTDOC",
        "RUSTFLAGS",
        "RUSTC_WRAPPER",
        "RUSTUP_TOOLCHAIN",
    ] {
        command.env_remove(name);
    }
    command
}

fn linker_path() -> PathBuf {
    paths::tools().join("bin/bpf-linker")
}

/// The linker's version line, if it is there and the wanted one.
fn linker_version() -> Option<String> {
    let linker = linker_path();
    let text = linker
        .is_file()
        .then(|| process::output(Command::new(linker).arg("--version")).ok())??;
    let version = text.trim();
    (version.rsplit(' ').next() == Some(LINKER_VERSION)).then(|| version.to_owned())
}

fn install_linker(toolchain: &str) -> Result<()> {
    eprintln!("building bpf-linker {LINKER_VERSION} into target/tools (about a minute)");
    let mut command = rustup_proxy("cargo", toolchain);
    command
        .args([
            "install",
            "bpf-linker",
            "--version",
            LINKER_VERSION,
            "--locked",
            "--force",
        ])
        .args([
            "--no-default-features",
            "--features",
            LINKER_FEATURE,
            "--root",
        ])
        .arg(paths::tools())
        .arg("--target-dir")
        .arg(paths::target().join("bpf-linker"));
    if let Err(error) = process::run(&mut command) {
        bail!("bpf-linker {LINKER_VERSION} could not be built: {error:#}");
    }
    Ok(())
}

/// Reads `1.97` out of `rustc 1.97.0-nightly (e50aa6fba 2026-05-19)`.
fn minor_version(rustc: &str) -> Option<String> {
    let version = rustc.split_whitespace().nth(1)?;
    let mut numbers = version.split('.');
    let (major, minor) = (numbers.next()?, numbers.next()?);
    (major.parse::<u32>().is_ok() && minor.parse::<u32>().is_ok())
        .then(|| format!("{major}.{minor}"))
}

#[cfg(test)]
mod tests {
    use super::minor_version;

    #[test]
    fn minor_version_is_read_from_rustc() {
        let text = "rustc 1.97.0-nightly (e50aa6fba 2026-05-19)";
        assert_eq!(minor_version(text).as_deref(), Some("1.97"));
        assert_eq!(minor_version("rustc"), None);
        assert_eq!(minor_version("rustc next.97"), None);
    }
}
