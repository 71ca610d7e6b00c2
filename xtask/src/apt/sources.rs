//! The Debian mirrors that this machine is configured with.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

/// Where Debian installs the keys of its archive.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The addresses of Debian's two archives, and the keyring that vouches for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirrors {
    /// The main archive (`bookworm`, `trixie-backports`, `sid`, ...).
    pub main: String,
    /// The archive of security fixes (suites that end in `-security`).
    pub security: String,
    /// The file with the archive's keys.
    pub keyring: String,
}

/// One entry of the machine's package sources.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Source {
    uri: String,
    suites: Vec<String>,
    components: Vec<String>,
    keyring: Option<String>,
}

/// Reads the mirrors from `/etc/apt`.
///
/// # Errors
/// When this is not Debian or no source of the running release is configured.
pub fn configured() -> Result<Mirrors> {
    let release = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
    let codename = codename(&release).context(
        "/etc/os-release has no ID=debian with a VERSION_CODENAME: this needs a Debian machine",
    )?;
    let mut sources = Vec::new();
    for (path, text) in files(Path::new("/etc/apt"))? {
        let deb822 = path
            .extension()
            .is_some_and(|extension| extension == "sources");
        sources.extend(if deb822 {
            parse_deb822(&text)
        } else {
            parse_lines(&text)
        });
    }
    choose(&sources, &codename)
        .with_context(|| format!("no source of Debian {codename} is configured in /etc/apt"))
}

fn files(folder: &Path) -> Result<Vec<(PathBuf, String)>> {
    let mut found = vec![folder.join("sources.list")];
    if let Ok(entries) = fs::read_dir(folder.join("sources.list.d")) {
        found.extend(entries.filter_map(|entry| Some(entry.ok()?.path())));
    }
    found.sort();
    let mut texts = Vec::new();
    for path in found {
        let known = path
            .extension()
            .is_some_and(|end| end == "list" || end == "sources");
        if known && path.is_file() {
            let text =
                fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            texts.push((path, text));
        }
    }
    if texts.is_empty() {
        bail!(
            "{} holds no sources.list and no *.sources",
            folder.display()
        );
    }
    Ok(texts)
}

fn codename(os_release: &str) -> Option<String> {
    let fields: HashMap<_, _> = os_release
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(key, value)| (key, value.trim_matches('"')))
        .collect();
    (fields.get("ID") == Some(&"debian")).then(|| {
        fields
            .get("VERSION_CODENAME")
            .map(|name| (*name).to_owned())
    })?
}

fn choose(sources: &[Source], codename: &str) -> Option<Mirrors> {
    let of = |suite: &str| {
        sources.iter().find(|source| {
            source
                .components
                .iter()
                .any(|component| component == "main")
                && source.suites.iter().any(|name| name == suite)
        })
    };
    let main = of(codename)?;
    // Without a source of its own, security fixes lie beside the main archive by convention.
    let security = of(&format!("{codename}-security")).map_or_else(
        || format!("{}-security", main.uri.trim_end_matches('/')),
        |source| source.uri.clone(),
    );
    let keyring = main.keyring.clone().unwrap_or_else(|| KEYRING.to_owned());
    Some(Mirrors {
        main: main.uri.clone(),
        security,
        keyring,
    })
}

/// Parses stanzas of `Key: value` lines (man 5 sources.list, "DEB822-STYLE FORMAT").
fn parse_deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut fields: HashMap<String, String> = HashMap::new();
    for line in text.lines().chain([""]) {
        if line.trim().is_empty() {
            sources.extend(stanza(&fields));
            fields.clear();
        } else if let Some((key, value)) = line.split_once(':')
            && !line.starts_with(['#', ' ', '\t'])
        {
            fields.insert(key.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
    sources
}

fn stanza(fields: &HashMap<String, String>) -> Vec<Source> {
    let words = |key: &str| -> Vec<String> {
        fields.get(key).map_or_else(Vec::new, |value| {
            value.split_whitespace().map(str::to_owned).collect()
        })
    };
    if !words("types").iter().any(|kind| kind == "deb")
        || fields.get("enabled").is_some_and(|value| value == "no")
    {
        return Vec::new();
    }
    words("uris")
        .into_iter()
        .map(|uri| Source {
            uri,
            suites: words("suites"),
            components: words("components"),
            keyring: fields
                .get("signed-by")
                .filter(|value| value.starts_with('/'))
                .cloned(),
        })
        .collect()
}

/// Parses lines of the form `deb [options] uri suite component...`.
fn parse_lines(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for line in text.lines() {
        let Some(rest) = line.trim().strip_prefix("deb ") else {
            continue;
        };
        let rest = rest.trim();
        let (options, rest) = match rest.strip_prefix('[').and_then(|tail| tail.split_once(']')) {
            Some((options, rest)) => (options, rest),
            None => ("", rest),
        };
        let mut words = rest.split_whitespace().map(str::to_owned);
        let (Some(uri), Some(suite)) = (words.next(), words.next()) else {
            continue;
        };
        let keyring = options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(str::to_owned);
        sources.push(Source {
            uri,
            suites: vec![suite],
            components: words.collect(),
            keyring,
        });
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::{KEYRING, Mirrors, choose, codename, parse_deb822, parse_lines};

    const DEB822: &str = "Types: deb\n# a note\nURIs: mirror:/debian\nSuites: trixie trixie-updates\n\
        Components: main\nSigned-By: /keys/debian.gpg\n\n\
        Types: deb\nURIs: mirror:/fixes\nSuites: trixie-security\nComponents: main\n\n\
        Types: deb\nURIs: mirror:/old\nSuites: trixie\nComponents: main\nEnabled: no\n";

    #[test]
    fn deb822_names_both_archives_and_the_keyring() {
        let mirrors = choose(&parse_deb822(DEB822), "trixie");
        assert_eq!(
            mirrors,
            Some(Mirrors {
                main: "mirror:/debian".into(),
                security: "mirror:/fixes".into(),
                keyring: "/keys/debian.gpg".into(),
            })
        );
    }

    #[test]
    fn one_line_sources_work_and_other_vendors_are_passed_over() {
        let text = "deb mirror:/vendor trixie stable\n# deb mirror:/off trixie main\n\
                    deb [arch=amd64 signed-by=/keys/a.gpg] mirror:/debian/ trixie main contrib\n";
        let mirrors = choose(&parse_lines(text), "trixie");
        assert_eq!(
            mirrors,
            Some(Mirrors {
                main: "mirror:/debian/".into(),
                security: "mirror:/debian-security".into(),
                keyring: "/keys/a.gpg".into(),
            })
        );
    }

    #[test]
    fn the_usual_keyring_stands_in_for_an_unnamed_one() {
        let mirrors = choose(&parse_lines("deb mirror:/debian sid main\n"), "sid");
        assert_eq!(mirrors.map(|found| found.keyring).as_deref(), Some(KEYRING));
    }

    #[test]
    fn a_release_without_source_is_not_guessed() {
        assert_eq!(choose(&parse_deb822(DEB822), "sid"), None);
    }

    #[test]
    fn only_debian_has_a_codename_here() {
        assert_eq!(
            codename("ID=debian\nVERSION_CODENAME=trixie\n").as_deref(),
            Some("trixie")
        );
        assert_eq!(codename("ID=ubuntu\nVERSION_CODENAME=noble\n"), None);
    }
}
