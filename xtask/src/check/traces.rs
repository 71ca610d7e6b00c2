//! Nothing of one machine in tracked files: no host of a package registry or mirror, no path of a
//! workspace or home, and no loose end.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail};

use super::Outcome;
use crate::{paths, process};

/// Hosts that package managers use without being told. In two parts each, so that this list does
/// not find itself.
const KNOWN_HOSTS: [(&str, &str); 10] = [
    ("crates", ".io"),
    ("static.rust-", "lang.org"),
    ("pypi", ".org"),
    ("python", "hosted.org"),
    ("npmjs", ".org"),
    ("npmjs", ".com"),
    ("deb.debian", ".org"),
    ("security.debian", ".org"),
    ("snapshot.debian", ".org"),
    ("proxy.golang", ".org"),
];

/// Words that stand for work not done.
const LOOSE_ENDS: [(&str, &str); 2] = [("XX", "X"), ("FIX", "ME")];

/// Top-level folders that every machine has; alone they say nothing of this one.
const ORDINARY: [&str; 12] = [
    "/", "/home", "/media", "/mnt", "/opt", "/root", "/run", "/src", "/srv", "/tmp", "/usr", "/var",
];

/// Files that name their registry by design: cargo writes these.
const EXEMPT_FROM_HOSTS: [&str; 2] = ["Cargo.lock", "tests/fuzz/Cargo.lock"];

/// Something that must not be in a tracked file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Pattern {
    text: String,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Host,
    Path,
    Word,
}

/// Runs the check.
pub fn check() -> Outcome {
    let root = paths::root();
    let patterns = patterns();
    let files = tracked(&root)?;
    let mut problems = Vec::new();
    for file in &files {
        let path = root.join(file);
        // Deleted but not yet committed, or a link to elsewhere.
        if !path.is_file() {
            continue;
        }
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        for (line, pattern) in search(&bytes, &patterns) {
            let exempt = EXEMPT_FROM_HOSTS.iter().any(|name| Path::new(name) == file);
            if !(exempt && pattern.kind == Kind::Host) {
                problems.push(format!("{}:{line} has '{}'", file.display(), pattern.text));
            }
        }
    }
    if !problems.is_empty() {
        bail!("{}", problems.join("; "));
    }
    Ok(format!(
        "{} files, {} patterns",
        files.len(),
        patterns.len()
    ))
}

fn tracked(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    // Files not yet added count too: they are what is committed next.
    let text = process::output(
        Command::new("git")
            // A checkout that belongs to another user (a container's) is as good.
            .args(["-c", "safe.directory=*"])
            .args([
                "ls-files",
                "-z",
                "--cached",
                "--others",
                "--exclude-standard",
            ])
            .current_dir(root),
    )
    .context("list the files of this repository")?;
    Ok(text
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from)
        .collect())
}

fn patterns() -> BTreeSet<Pattern> {
    let mut patterns = BTreeSet::new();
    let mut add = |text: String, kind| patterns.insert(Pattern { text, kind });
    for (first, second) in KNOWN_HOSTS {
        add(format!("{first}{second}"), Kind::Host);
    }
    for text in configurations() {
        for host in hosts(&text) {
            add(host, Kind::Host);
        }
    }
    let folders = [Some(paths::root()), paths::home(), paths::cargo_home()];
    for folder in folders.iter().flatten().flat_map(|path| telling(path)) {
        add(folder, Kind::Path);
    }
    for (first, second) in LOOSE_ENDS {
        add(format!("{first}{second}"), Kind::Word);
    }
    patterns
}

/// The configurations of this machine's package managers, as far as they exist.
fn configurations() -> Vec<String> {
    let mut files: Vec<PathBuf> = vec!["/etc/apt/sources.list".into(), "/etc/pip.conf".into()];
    if let Ok(entries) = fs::read_dir("/etc/apt/sources.list.d") {
        files.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
    }
    if let Some(home) = paths::home() {
        let names = [
            ".npmrc",
            ".pip/pip.conf",
            ".config/pip/pip.conf",
            ".config/go/env",
        ];
        files.extend(names.iter().map(|name| home.join(name)));
    }
    if let Some(cargo) = paths::cargo_home() {
        files.push(cargo.join("config.toml"));
    }
    let mut texts: Vec<String> = files
        .iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .collect();
    let names = [
        "PIP_INDEX_URL",
        "PIP_EXTRA_INDEX_URL",
        "GOPROXY",
        "NPM_CONFIG_REGISTRY",
    ];
    texts.extend(names.iter().filter_map(|name| std::env::var(name).ok()));
    texts.extend(std::env::vars().filter_map(|(name, value)| {
        (name.starts_with("CARGO_REGISTR") && name.ends_with("INDEX")).then_some(value)
    }));
    texts
}

/// The hosts of all addresses in a text. Those of a loopback or without a dot say nothing.
fn hosts(text: &str) -> BTreeSet<String> {
    let mut hosts = BTreeSet::new();
    for (position, _) in text.match_indices("://") {
        let tail = &text[position + 3..];
        let end = tail.find(|char: char| {
            char.is_whitespace() || matches!(char, '/' | '"' | '\'' | '?' | '#' | ',' | ']')
        });
        let authority = &tail[..end.unwrap_or(tail.len())];
        let host = authority.rsplit('@').next().unwrap_or_default();
        let host = host.split(':').next().unwrap_or_default();
        if host.contains('.') && !host.starts_with("127.") {
            hosts.insert(host.to_ascii_lowercase());
        }
    }
    hosts
}

/// A folder and those above it, except what is on every machine.
fn telling(path: &Path) -> Vec<String> {
    path.ancestors()
        .map(|folder| folder.to_string_lossy().into_owned())
        .filter(|folder| !ORDINARY.contains(&folder.as_str()))
        .collect()
}

/// Line and pattern of each find.
fn search<'a>(bytes: &[u8], patterns: &'a BTreeSet<Pattern>) -> Vec<(usize, &'a Pattern)> {
    let mut found = Vec::new();
    for (number, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
        let lower = line.to_ascii_lowercase();
        for pattern in patterns {
            let hay = if pattern.kind == Kind::Host {
                &lower
            } else {
                line
            };
            if occurs(hay, pattern) {
                found.push((number + 1, pattern));
            }
        }
    }
    found
}

fn occurs(line: &[u8], pattern: &Pattern) -> bool {
    let text = pattern.text.as_bytes();
    line.windows(text.len()).enumerate().any(|(start, window)| {
        if window != text {
            return false;
        }
        let before = start.checked_sub(1).map(|at| line[at]);
        let after = line.get(start + text.len()).copied();
        let word = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
        match pattern.kind {
            Kind::Host => !word(before) || before == Some(b'.'),
            // Part of a longer path or name is something else.
            Kind::Path => {
                !word(before)
                    && !matches!(before, Some(b'_' | b'-' | b'.' | b'}' | b'~'))
                    && !word(after)
                    && !matches!(after, Some(b'_' | b'-'))
            }
            Kind::Word => !word(before) && !word(after),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::{Kind, Pattern, hosts, search, telling};
    use std::collections::BTreeSet;
    use std::path::Path;

    fn finds(text: &str, kind: Kind, line: &str) -> bool {
        let patterns = BTreeSet::from([Pattern {
            text: text.to_owned(),
            kind,
        }]);
        !search(line.as_bytes(), &patterns).is_empty()
    }

    #[test]
    fn hosts_are_read_from_addresses() {
        let text = "registry=https://user:secret@Mirror.example:8443/npm/\nURIs: http://a.example\n\
                    x = \"sparse+https://b.example/index/\" http://localhost/ http://127.0.0.1:80/";
        let found: Vec<_> = hosts(text).into_iter().collect();
        assert_eq!(found, ["a.example", "b.example", "mirror.example"]);
    }

    #[test]
    fn hosts_are_found_with_their_subdomains() {
        assert!(finds(
            "a.example",
            Kind::Host,
            "see https://index.A.example/x"
        ));
        assert!(!finds(
            "a.example",
            Kind::Host,
            "see https://data.example/x"
        ));
    }

    #[test]
    fn paths_are_found_whole() {
        assert!(finds("/build/me", Kind::Path, "cd /build/me/x"));
        assert!(finds("/build/me", Kind::Path, "(/build/me)"));
        assert!(!finds("/build/me", Kind::Path, "/build/mess"));
        assert!(!finds("/build/me", Kind::Path, "agent/build/me"));
    }

    #[test]
    fn words_are_found_whole_and_with_their_line() {
        let patterns = BTreeSet::from([Pattern {
            text: "AB".to_owned(),
            kind: Kind::Word,
        }]);
        let lines: Vec<_> = search(b"x\n// AB: later\nABC CAB", &patterns);
        assert_eq!(lines.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn only_what_tells_this_machine_apart_is_a_pattern() {
        assert_eq!(
            telling(Path::new("/home/me/src")),
            ["/home/me/src", "/home/me"]
        );
        assert!(telling(Path::new("/root")).is_empty());
    }
}
