//! What the committed object was made from and with (`agent-ebpf/object/RECORD.toml`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{Tools, build};
use crate::paths;

/// The packages of this workspace that are compiled into the object.
const PACKAGES: [&str; 2] = ["agent-common", "agent-ebpf"];

/// How the names of packages from outside begin whose code is compiled into the object.
const SHAPING: [&str; 2] = ["aya-ebpf", "bytemuck"];

/// What the object's content depends on, as far as it lies in this repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inputs {
    /// SHA-256 over manifests and sources of the two packages.
    pub sources_sha256: String,
    /// The compiler's flags, without paths.
    pub flags: Vec<String>,
    /// Versions and checksums of the packages from outside that go into it.
    pub packages: BTreeMap<String, String>,
}

/// The whole record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// SHA-256 of the object.
    pub object_sha256: String,
    /// The compiler's version line.
    pub rustc: String,
    /// The linker's version line.
    pub linker: String,
    /// Where the source of `core` came from.
    pub core: String,
    /// SHA-256 over that source.
    pub core_sha256: String,
    /// What came from this repository.
    pub inputs: Inputs,
}

impl Record {
    /// The record of an object that was just built.
    ///
    /// # Errors
    /// When a source cannot be read.
    pub fn of(object: &[u8], tools: &Tools) -> Result<Self> {
        Ok(Self {
            object_sha256: sha256(object),
            rustc: tools.toolchain.rustc.clone(),
            linker: tools.toolchain.linker_version.clone(),
            core: tools.core.origin.clone(),
            core_sha256: tools.core.sha256()?,
            inputs: Inputs::now()?,
        })
    }

    /// Reads the committed record.
    ///
    /// # Errors
    /// When it is missing or not of this form.
    pub fn read() -> Result<Self> {
        let path = paths::record();
        let text = fs::read_to_string(&path)
            .with_context(|| format!("read {} (`cargo xtask ebpf` writes it)", path.display()))?;
        toml::from_str(&text).with_context(|| format!("parse {}", path.display()))
    }

    /// Writes the record beside the object.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self) -> Result<()> {
        let path = paths::record();
        let text = format!(
            "# What backstop-ebpf.o was made from and with. Written by `cargo xtask ebpf`, compared\n\
             # by `cargo xtask check`; not meant for editing.\n{}",
            toml::to_string_pretty(self).context("write the record as TOML")?
        );
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }

    /// Whether the same tools are at hand, so that bytes can be compared.
    ///
    /// # Errors
    /// When the source of `core` cannot be read.
    pub fn same_tools(&self, tools: &Tools) -> Result<bool> {
        Ok(self.rustc == tools.toolchain.rustc
            && self.linker == tools.toolchain.linker_version
            && self.core_sha256 == tools.core.sha256()?)
    }
}

impl Inputs {
    /// The inputs as they are now.
    ///
    /// # Errors
    /// When a source or a manifest cannot be read.
    pub fn now() -> Result<Self> {
        let root = paths::root();
        let mut files = Vec::new();
        for package in PACKAGES {
            files.push(PathBuf::from(package).join("Cargo.toml"));
            let folder = PathBuf::from(package).join("src");
            let below = paths::files_below(&root.join(&folder))?;
            files.extend(below.into_iter().map(|file| folder.join(file)));
        }
        Ok(Self {
            sources_sha256: hash_files(&root, &files)?,
            flags: build::FLAGS.iter().map(|flag| (*flag).to_owned()).collect(),
            packages: packages(&root)?,
        })
    }
}

/// SHA-256 in hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// SHA-256 over names and contents of files, whatever order they are given in.
///
/// # Errors
/// When a file cannot be read.
pub fn hash_files(base: &Path, files: &[PathBuf]) -> Result<String> {
    let mut hash = Sha256::new();
    for file in files.iter().collect::<BTreeSet<_>>() {
        let path = base.join(file);
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        let name = file.to_string_lossy();
        // Lengths first, so that no two sets of files give the same stream.
        hash.update(u64::try_from(name.len())?.to_le_bytes());
        hash.update(name.as_bytes());
        hash.update(u64::try_from(bytes.len())?.to_le_bytes());
        hash.update(&bytes);
    }
    Ok(hex(&hash.finalize()))
}

/// The packages from outside whose code shapes the object, with versions and checksums. What only
/// helps to build them is left out: a new version of it would call the object stale for nothing.
fn packages(root: &Path) -> Result<BTreeMap<String, String>> {
    let path = root.join("Cargo.lock");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let lock: Lock = toml::from_str(&text).with_context(|| format!("parse {}", path.display()))?;
    Ok(shaping(lock))
}

/// What is read of the lock file.
#[derive(Debug, Deserialize)]
struct Lock {
    package: Vec<Locked>,
}

#[derive(Debug, Deserialize)]
struct Locked {
    name: String,
    version: String,
    checksum: Option<String>,
}

fn shaping(lock: Lock) -> BTreeMap<String, String> {
    let ours = |name: &str| SHAPING.iter().any(|prefix| name.starts_with(prefix));
    let packages = lock
        .package
        .into_iter()
        .filter(|package| ours(&package.name));
    packages
        .map(|package| {
            let checksum = package.checksum.unwrap_or_else(|| "local".to_owned());
            (package.name, format!("{} {checksum}", package.version))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{hash_files, sha256, shaping};
    use std::fs;

    #[test]
    fn sha256_of_a_known_text() {
        // FIPS 180-2, appendix B.1.
        assert_eq!(
            sha256(b"abc"),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }

    #[test]
    fn the_hash_depends_on_names_and_contents_and_not_on_order() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a"), "1").unwrap();
        fs::write(folder.path().join("b"), "2").unwrap();
        let both = hash_files(folder.path(), &["a".into(), "b".into()]).unwrap();
        assert_eq!(
            hash_files(folder.path(), &["b".into(), "a".into()]).unwrap(),
            both
        );
        fs::rename(folder.path().join("b"), folder.path().join("c")).unwrap();
        let renamed = hash_files(folder.path(), &["a".into(), "c".into()]).unwrap();
        assert_ne!(renamed, both);
        fs::write(folder.path().join("c"), "3").unwrap();
        assert_ne!(
            hash_files(folder.path(), &["a".into(), "c".into()]).unwrap(),
            renamed
        );
    }

    #[test]
    fn only_packages_that_shape_the_object_are_recorded() {
        let lock = r#"
            [[package]]
            name = "aya-ebpf-cty"
            version = "1.0.0"
            checksum = "c0"
            [[package]]
            name = "aya"
            version = "2.0.0"
            [[package]]
            name = "bytemuck"
            version = "3.0.0"
        "#;
        let found = shaping(toml::from_str(lock).unwrap());
        let found: Vec<_> = found
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        assert_eq!(
            found,
            [("aya-ebpf-cty", "1.0.0 c0"), ("bytemuck", "3.0.0 local")]
        );
    }
}
