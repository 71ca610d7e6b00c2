//! Packages from the npm registry, in a folder of their own below `target/`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::apt::packages;
use crate::{paths, process};

/// What is installed: a client under test. (The newest that runs on Node 18.)
const PACKAGES: &str = "undici@6.29.1";

/// Makes the folder if it is missing or holds other versions; returns where Node finds the packages.
///
/// # Errors
/// When there is no npm and it cannot be installed, or a package cannot be.
pub fn ensure() -> Result<PathBuf> {
    let folder = paths::target().join("npm");
    let modules = folder.join("node_modules");
    let stamp = folder.join("installed");
    if modules.is_dir() && fs::read_to_string(&stamp).is_ok_and(|have| have == PACKAGES) {
        return Ok(modules);
    }
    // Other packages of Node than Debian's bring their own.
    if !process::exists("npm") {
        packages::ensure(packages::NPM)?;
    }
    println!("installing from npm into {}: {PACKAGES}", folder.display());
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    process::output(
        Command::new("npm")
            .args([
                "install",
                "--no-save",
                "--no-audit",
                "--no-fund",
                "--prefix",
            ])
            .arg(&folder)
            .arg(PACKAGES)
            .current_dir(&folder),
    )
    .context("install the packages from npm")?;
    fs::write(&stamp, PACKAGES).with_context(|| format!("write {}", stamp.display()))?;
    Ok(modules)
}
