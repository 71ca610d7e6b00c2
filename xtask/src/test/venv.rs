//! Packages from PyPI, in a folder of their own below `target/`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use crate::{paths, process};

/// What is installed: clients under test, and the check of the Kubernetes manifests.
const PACKAGES: [&str; 6] = [
    "aiohttp==3.14.5",
    "kubernetes-validate==1.37.0",
    "psycopg2-binary==2.9.13",
    "redis==8.1.0",
    "tenacity==9.2.1",
    "urllib3==2.8.0",
];

/// Makes the folder if it is missing or holds other versions; returns its Python.
///
/// # Errors
/// When the folder cannot be made or a package cannot be installed.
pub fn ensure() -> Result<PathBuf> {
    let folder = paths::target().join("venv");
    let python = folder.join("bin/python3");
    let stamp = folder.join("installed");
    let wanted = PACKAGES.join("\n");
    if python.is_file() && fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
        return Ok(python);
    }
    println!(
        "installing from PyPI into {}: {}",
        folder.display(),
        PACKAGES.join(" ")
    );
    // Debian's own Python where there is one: python3-venv belongs to it.
    let debian = Path::new("/usr/bin/python3");
    let base = if debian.exists() {
        debian
    } else {
        Path::new("python3")
    };
    process::output(
        Command::new(base)
            .args(["-m", "venv", "--clear"])
            .arg(&folder),
    )
    .context("make a Python environment")?;
    process::output(
        Command::new(&python)
            .args(["-m", "pip", "install", "--quiet"])
            .args(PACKAGES),
    )
    .context("install the packages from PyPI")?;
    fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))?;
    Ok(python)
}
