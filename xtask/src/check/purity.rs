//! The core decides and nothing else: no clock, file, network, thread, randomness or log of its
//! own. What it may not name is listed here and looked for in its tokens.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail};

use super::Outcome;
use super::paths_in_code::{Name, names};
use crate::paths;

/// What `agent/src/core` may not name.
const CORE: &[&str] = &[
    "aya",
    "axum",
    "hyper",
    "hyper_util",
    "inotify",
    "libc",
    "prometheus",
    "rand",
    "rustix",
    "sd_notify",
    "signal_hook",
    "tokio",
    "tokio_stream",
    "tracing",
    "tracing_subscriber",
    "crate::cli",
    "crate::control",
    "crate::daemon",
    "crate::kernel",
    "crate::metrics",
    "crate::sockets",
    "std::env",
    "std::fs",
    "std::net::TcpListener",
    "std::net::TcpStream",
    "std::net::UdpSocket",
    "std::os",
    "std::process",
    "std::thread",
    "std::time::Instant",
    "std::time::SystemTime",
    "std::time::UNIX_EPOCH",
    "dbg!",
    "eprint!",
    "eprintln!",
    "print!",
    "println!",
];

/// What `agent-common` may not name: it runs in the kernel.
const COMMON: &[&str] = &["alloc", "aya", "aya_ebpf", "libc", "std", "tokio"];

/// Checks `agent/src/core`.
pub fn core() -> Outcome {
    check(Path::new("agent/src/core"), CORE)
}

/// Checks `agent-common`.
pub fn common() -> Outcome {
    check(Path::new("agent-common/src"), COMMON)
}

fn check(folder: &Path, forbidden: &[&str]) -> Outcome {
    let base = paths::root().join(folder);
    let mut count = 0;
    let mut problems = Vec::new();
    for file in paths::files_below(&base)? {
        if file.extension().is_none_or(|end| end != "rs") {
            continue;
        }
        let path = base.join(&file);
        let code = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        count += 1;
        for (line, what) in violations(without_tests(&code), forbidden) {
            problems.push(format!(
                "{}:{line} names {what}",
                folder.join(&file).display()
            ));
        }
    }
    if count == 0 {
        bail!("{} holds no Rust file", folder.display());
    }
    if !problems.is_empty() {
        bail!("{}", problems.join("; "));
    }
    Ok(format!("{count} files"))
}

/// The code before the module of its tests, which run on the host. (By our convention that is the last
/// item of a file.)
fn without_tests(code: &str) -> &str {
    code.split("\n#[cfg(test)]\nmod tests {\n")
        .next()
        .unwrap_or(code)
}

/// Line and text of each name that is forbidden.
fn violations(code: &str, forbidden: &[&str]) -> Vec<(usize, String)> {
    names(code)
        .iter()
        .filter(|name| forbidden.iter().any(|rule| breaks(name, rule)))
        .map(|name| (name.line, name.segments.join("::")))
        .collect()
}

/// Whether a name is the forbidden one, lies below it, or is a module by whose short name it could
/// be reached (`use std::time;` or `use std::time::*;` for `std::time::Instant`).
fn breaks(name: &Name, rule: &str) -> bool {
    let rule: Vec<&str> = rule.split("::").collect();
    let mut segments: Vec<&str> = name.segments.iter().map(String::as_str).collect();
    // A single word is a variable, a module of ours or a crate's bare name, which alone does
    // nothing; macros are the exception.
    if segments.len() == 1 && rule.len() == 1 {
        return segments == rule && rule[0].ends_with('!');
    }
    if rule.len() == 1 && rule[0].ends_with('!') {
        return segments.last() == rule.last();
    }
    if segments.last() == Some(&"*") {
        segments.pop();
    }
    if segments.starts_with(&rule) {
        return true;
    }
    segments.len() > 1 && rule.starts_with(&segments)
}

#[cfg(test)]
mod tests {
    use super::{COMMON, CORE, violations, without_tests};

    fn core(code: &str) -> Vec<String> {
        violations(code, CORE)
            .into_iter()
            .map(|(_, what)| what)
            .collect()
    }

    #[test]
    fn what_reaches_outside_is_found() {
        for code in [
            "use aya::Ebpf;",
            "use std::fs;",
            "use std::{collections::HashMap, fs::File};",
            "use std::time::{Duration, Instant};",
            "let now = std::time::SystemTime::now();",
            "use std::time;",
            "use std::time::*;",
            "use std::net::{IpAddr, TcpStream};",
            "tokio::spawn(x)",
            "tracing::info!(x)",
            "println!(\"x\")",
            "std::println!(x)",
            "std::thread::sleep(d)",
            "use crate::kernel::Rows;",
        ] {
            assert_eq!(core(code).len(), 1, "{code}");
        }
    }

    #[test]
    fn what_is_pure_passes() {
        for code in [
            "use std::time::Duration;",
            "use std::net::{IpAddr, Ipv4Addr, SocketAddr};",
            "use std::collections::BTreeMap;",
            "// std::fs is not used\nfn f() {}",
            "let rand = seed; let process = 1;",
            "use crate::policy::Settings;",
            "writeln!(out)",
            "const WHY: &str = \"std::fs\";",
        ] {
            assert!(core(code).is_empty(), "{code}");
        }
    }

    #[test]
    fn the_shared_package_has_no_std() {
        assert_eq!(violations("use std::vec::Vec;", COMMON).len(), 1);
        assert!(violations("#![no_std] use core::mem::size_of;", COMMON).is_empty());
    }

    #[test]
    fn the_line_is_told() {
        assert_eq!(
            violations(
                without_tests("\n\nuse std::env;\n#[cfg(test)]\nmod tests {\nuse std::fs;\n}"),
                CORE
            ),
            [(3, "std::env".to_owned())]
        );
    }
}
