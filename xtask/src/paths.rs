//! Where things lie. Everything that these commands fetch or build is below `target/`, so that
//! `cargo clean` leaves no residue on the machine.

use std::path::{Path, PathBuf};

/// The workspace's root folder.
pub fn root() -> PathBuf {
    // `cargo run` names the package at run time; the compile-time value is for a binary that was
    // started by hand.
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    package
        .parent()
        .map_or_else(|| package.clone(), Path::to_path_buf)
}

/// Cargo's target folder: `$CARGO_TARGET_DIR`, else `target` below the root.
pub fn target() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Tools that these commands install for themselves: bpf-linker, the source of `core`.
pub fn tools() -> PathBuf {
    target().join("tools")
}

/// The committed kernel object.
pub fn object() -> PathBuf {
    root().join("agent-ebpf/object/backstop-ebpf.o")
}

/// What the committed kernel object was made from and with.
pub fn record() -> PathBuf {
    root().join("agent-ebpf/object/RECORD.toml")
}

/// Cargo's home: `$CARGO_HOME`, else `.cargo` in the home folder.
pub fn cargo_home() -> Option<PathBuf> {
    match std::env::var_os("CARGO_HOME") {
        Some(dir) => Some(PathBuf::from(dir)),
        None => home().map(|home| home.join(".cargo")),
    }
}

/// The user's home folder, if the environment names one.
pub fn home() -> Option<PathBuf> {
    std::env::var_os("HOME")
        .map(PathBuf::from)
        .filter(|home| home.parent().is_some())
}

/// Every regular file below a folder, sorted, as paths relative to it.
///
/// # Errors
/// When a folder cannot be read; the error names it.
pub fn files_below(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    use anyhow::Context as _;
    let mut files = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(current) = folders.pop() {
        let entries = std::fs::read_dir(&current)
            .with_context(|| format!("read the folder {}", current.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("read the folder {}", current.display()))?;
            let kind = entry.file_type()?;
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path().strip_prefix(folder)?.to_path_buf());
            }
        }
    }
    files.sort();
    Ok(files)
}
