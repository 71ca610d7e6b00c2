//! The source of `core`, which has to be compiled for the kernel's target.
//!
//! In this order: the `rust-src` of the toolchain itself; Debian's package `rust-src` of the same
//! minor version, unpacked below `target/` and never installed; the rustup component.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use super::record::hash_files;
use super::toolchain::Toolchain;
use crate::apt::archive::{Archive, Offer};
use crate::{paths, process};

/// Debian suites that carry recent compilers, the most settled first.
const SUITES: [&str; 3] = ["trixie-backports", "forky", "sid"];

/// A folder with the source of the standard library.
#[derive(Debug, Clone)]
pub struct CoreSource {
    /// The `library` folder.
    pub library: PathBuf,
    /// Where it came from, for example `debian rust-src 1.97.1+dfsg1-1`.
    pub origin: String,
}

impl CoreSource {
    /// Finds the source, downloading it if need be.
    ///
    /// # Errors
    /// When no way led to it; the error names every way tried.
    pub fn obtain(toolchain: &Toolchain) -> Result<Self> {
        if let Some(found) = Self::at_hand(toolchain) {
            return Ok(found);
        }
        let debian = match Self::from_debian(toolchain) {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        let component = match Self::from_rustup(toolchain) {
            Ok(found) => return Ok(found),
            Err(error) => error,
        };
        bail!(
            "the source of core for {} is not to be had: the toolchain has no rust-src; \
             Debian: {debian:#}; rustup: {component:#}. Install it with `rustup component add \
             rust-src --toolchain {}`",
            toolchain.rustc,
            toolchain.name
        )
    }

    /// The source, if it is on this machine already.
    pub fn at_hand(toolchain: &Toolchain) -> Option<Self> {
        Self::installed(toolchain).or_else(|| Self::unpacked(&toolchain.minor_version().ok()?))
    }

    /// One line on what this is.
    pub fn describe(&self) -> String {
        format!("{} in {}", self.origin, self.library.display())
    }

    /// SHA-256 over the files that are compiled into the object.
    ///
    /// # Errors
    /// When a file cannot be read.
    pub fn sha256(&self) -> Result<String> {
        let mut files = Vec::new();
        for folder in ["core/src", "compiler-builtins/compiler-builtins/src"] {
            let base = self.library.join(folder);
            if base.is_dir() {
                let below = paths::files_below(&base)?;
                files.extend(below.into_iter().map(|file| Path::new(folder).join(file)));
            }
        }
        hash_files(&self.library, &files)
    }

    fn installed(toolchain: &Toolchain) -> Option<Self> {
        let library = toolchain.sysroot.join("lib/rustlib/src/rust/library");
        let origin = format!("rust-src of {}", toolchain.rustc);
        library
            .join("core/src/lib.rs")
            .is_file()
            .then_some(Self { library, origin })
    }

    fn folder(minor: &str) -> PathBuf {
        paths::tools().join(format!("rust-src-{minor}"))
    }

    fn unpacked(minor: &str) -> Option<Self> {
        let folder = Self::folder(minor);
        let version = fs::read_to_string(folder.join("version")).ok()?;
        let library = library_below(&folder)?;
        Some(Self {
            library,
            origin: format!("debian rust-src {}", version.trim()),
        })
    }

    fn from_debian(toolchain: &Toolchain) -> Result<Self> {
        let minor = toolchain.minor_version()?;
        let mut problems = Vec::new();
        for suite in SUITES {
            match Self::from_suite(suite, &minor) {
                Ok(found) => return Ok(found),
                Err(error) => problems.push(format!("{suite}: {error:#}")),
            }
        }
        bail!("{}", problems.join("; "))
    }

    fn from_suite(suite: &str, minor: &str) -> Result<Self> {
        let archive = Archive::open(suite)?;
        let offers = archive.offers("rust-src")?;
        let offer = matching(&offers, minor)
            .with_context(|| format!("no rust-src {minor} among {} on offer", offers.len()))?;
        let folder = Self::folder(minor);
        if folder.exists() {
            fs::remove_dir_all(&folder).with_context(|| format!("remove {}", folder.display()))?;
        }
        archive.unpack(&[format!("rust-src={}", offer.version)], &folder)?;
        // Written last: an interrupted download is no source.
        fs::write(folder.join("version"), &offer.version)
            .with_context(|| format!("write into {}", folder.display()))?;
        Self::unpacked(minor)
            .with_context(|| format!("{}: no usr/src/rustc-*/library inside", folder.display()))
    }

    fn from_rustup(toolchain: &Toolchain) -> Result<Self> {
        process::output(Command::new("rustup").args([
            "component",
            "add",
            "rust-src",
            "--toolchain",
            &toolchain.name,
        ]))?;
        Self::installed(toolchain).context("rustup added rust-src, yet it is not there")
    }
}

fn matching<'a>(offers: &'a [Offer], minor: &str) -> Option<&'a Offer> {
    offers.iter().find(|offer| {
        let tail = offer.version.strip_prefix(minor);
        tail.is_some_and(|tail| tail.starts_with('.') || tail.starts_with('+'))
    })
}

fn library_below(folder: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(folder.join("usr/src")).ok()?;
    entries
        .filter_map(|entry| Some(entry.ok()?.path().join("library")))
        .find(|library| library.join("core/src/lib.rs").is_file())
}

#[cfg(test)]
mod tests {
    use super::matching;
    use crate::apt::archive::Offer;

    fn offer(version: &str) -> Offer {
        Offer {
            package: "rust-src".into(),
            version: version.into(),
        }
    }

    #[test]
    fn only_the_same_minor_version_matches() {
        let offers = [
            offer("1.98.0+dfsg1-1"),
            offer("1.97.1+dfsg1-1~bpo13+1"),
            offer("1.9.7-1"),
        ];
        assert_eq!(matching(&offers, "1.97"), Some(&offers[1]));
        assert_eq!(matching(&offers, "1.9"), Some(&offers[2]));
        assert_eq!(matching(&offers, "1.96"), None);
    }
}
