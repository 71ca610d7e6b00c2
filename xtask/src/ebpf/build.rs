//! Compiling and linking the object, without a trace of the machine that does it.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};

use super::{Tools, strip, wrapper};
use crate::{paths, process};

/// The package's binary.
const BINARY: &str = "backstop-ebpf";

/// The target: one little-endian object for every supported machine.
pub const TARGET: &str = "bpfel-unknown-none";

/// Flags that shape the object.
pub const FLAGS: [&str; 5] = [
    // The layout of the registers that tracing programs see; the hooks used here are the same on
    // all machines, but the bindings want one named.
    "--cfg=bpf_target_arch=\"x86_64\"",
    // BTF is made from debug information.
    "-Cdebuginfo=2",
    "-Clink-arg=--btf",
    "-Clink-arg=--disable-expand-memcpy-in-order",
    // Atomic operations that return a value (kernel 5.12); the default only has XADD.
    "-Ctarget-cpu=v3",
];

/// Builds the object and returns its bytes, ready to be committed.
///
/// # Errors
/// When the build fails, or the object holds a name of this machine.
pub fn build(tools: &Tools) -> Result<Vec<u8>> {
    let target = paths::target().join("ebpf");
    let mut flags: Vec<OsString> = FLAGS.iter().map(OsString::from).collect();
    for (from, to) in remaps(tools)? {
        let mut flag = OsString::from("--remap-path-prefix=");
        flag.push(from);
        flag.push("=");
        flag.push(to);
        flags.push(flag);
    }
    let mut command = tools.toolchain.cargo();
    command
        .args([
            "build",
            "--release",
            "--locked",
            "--package",
            "agent-ebpf",
            "--bin",
            BINARY,
        ])
        .args(["--target", TARGET, "-Z", "build-std=core", "--target-dir"])
        .arg(&target)
        .env(
            "CARGO_TARGET_BPFEL_UNKNOWN_NONE_LINKER",
            &tools.toolchain.linker,
        )
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}".as_ref()))
        .env(
            "RUSTC_WRAPPER",
            std::env::current_exe().context("find this program's path")?,
        )
        .env(wrapper::VARIABLE, "1")
        // Where cargo looks for the standard library's source instead of the toolchain.
        .env("__CARGO_TESTS_ONLY_SRC_ROOT", &tools.core.library)
        // The agent's release profile is not the object's.
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "2")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "3")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "1")
        .env("CARGO_PROFILE_RELEASE_PANIC", "abort")
        .env("CARGO_INCREMENTAL", "0");
    process::run(&mut command)?;

    let built = target.join(TARGET).join("release").join(BINARY);
    let bytes = fs::read(&built).with_context(|| format!("read {}", built.display()))?;
    let bytes = strip::strip(&bytes).with_context(|| format!("strip {}", built.display()))?;
    let found = leaks(&bytes, &traces(tools));
    if !found.is_empty() {
        bail!(
            "the object holds what is only true of this machine: {}",
            found.join(", ")
        );
    }
    Ok(bytes)
}

/// Folders of this machine and what stands for them, the widest first (the last match counts).
fn remaps(tools: &Tools) -> Result<Vec<(PathBuf, &'static str)>> {
    let mut remaps = Vec::new();
    remaps.extend(paths::home().map(|home| (home, "/home")));
    remaps.push((tools.toolchain.sysroot.clone(), "/rustc"));
    if let Some(home) = paths::cargo_home() {
        let sources = home.join("registry/src");
        remaps.push((home, "/cargo"));
        remaps.push((sources.clone(), "/registry"));
        // One folder for each registry, named after its host.
        if sources.is_dir() {
            let entries = fs::read_dir(&sources)
                .with_context(|| format!("read the folder {}", sources.display()))?;
            for entry in entries {
                remaps.push((entry?.path(), "/registry"));
            }
        }
    }
    remaps.push((paths::root(), "/backstop"));
    let library = &tools.core.library;
    remaps.push((library.clone(), "/rustc/library"));
    // Cargo names files below the workspace by their path relative to it.
    if let Ok(relative) = library.strip_prefix(paths::root()) {
        remaps.push((relative.to_path_buf(), "/rustc/library"));
    }
    Ok(remaps)
}

/// Texts that must not be in the object.
fn traces(tools: &Tools) -> Vec<String> {
    let mut traces = vec![
        "registry/src".to_owned(),
        "http:".to_owned(),
        "https:".to_owned(),
    ];
    let folders = [Some(paths::root()), paths::home(), paths::cargo_home()];
    let folders = folders.into_iter().flatten();
    for folder in folders.chain([tools.toolchain.sysroot.clone(), tools.core.library.clone()]) {
        traces.push(folder.to_string_lossy().into_owned());
    }
    traces
}

/// Those of `traces` that occur in `bytes`.
fn leaks(bytes: &[u8], traces: &[String]) -> Vec<String> {
    traces
        .iter()
        .filter(|trace| !trace.is_empty() && contains(bytes, trace.as_bytes()))
        .cloned()
        .collect()
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::leaks;

    #[test]
    fn leaks_are_found_wherever_they_stand() {
        let traces = ["/home/me".to_owned(), "http:".to_owned(), String::new()];
        assert_eq!(leaks(b"\0/home/me/x\0", &traces), ["/home/me"]);
        assert_eq!(leaks(b"http:", &traces), ["http:"]);
        assert!(leaks(b"/home/you", &traces).is_empty());
        assert!(leaks(b"", &traces).is_empty());
    }
}
