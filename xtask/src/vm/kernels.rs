//! Which kernels, and how to get them: from Debian's archive, the newest of each series.

use std::cmp::Ordering;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use super::modules;
use crate::apt::archive::Archive;
use crate::paths;

/// The flavour of kernel: small, for virtual machines.
const FLAVOUR: &str = "-cloud-amd64";

/// A series of kernels and the Debian suites that carry it, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Series {
    /// What one types: `6.1`.
    pub name: &'static str,
    /// What its kernels' versions begin with; empty: any, and the newest wins.
    prefix: &'static str,
    suites: &'static [&'static str],
    /// Whether Backstop supports it; if not, the check is that it says so.
    pub supported: bool,
    /// One line for the list.
    pub about: &'static str,
}

/// Every series, oldest first.
pub const SERIES: [Series; 4] = [
    Series {
        name: "5.10",
        prefix: "5.10.",
        suites: &["bullseye-security", "bullseye"],
        supported: false,
        about: "too old: must be refused clearly",
    },
    Series {
        name: "6.1",
        prefix: "6.1.",
        suites: &["bookworm-security", "bookworm"],
        supported: true,
        about: "the oldest supported",
    },
    Series {
        name: "6.12",
        prefix: "6.12.",
        suites: &[
            "trixie-security",
            "trixie",
            "bookworm-security",
            "bookworm-backports",
        ],
        supported: true,
        about: "the current long-term series",
    },
    Series {
        name: "newest",
        prefix: "",
        suites: &["trixie-backports", "forky", "sid"],
        supported: true,
        about: "the newest with its modules",
    },
];

impl Series {
    /// The series of these names; all of them if there are none.
    ///
    /// # Errors
    /// When a name is unknown; the error lists the known ones.
    pub fn select(names: &[String]) -> Result<Vec<Self>> {
        if names.is_empty() {
            return Ok(SERIES.to_vec());
        }
        let find = |name: &String| {
            let known = SERIES.map(|series| series.name).join(", ");
            let found = SERIES.into_iter().find(|series| series.name == name);
            found.with_context(|| format!("no kernel series '{name}'; there are {known}"))
        };
        names.iter().map(find).collect()
    }

    fn folder(&self) -> PathBuf {
        paths::target().join("vm").join(self.name)
    }
}

/// A kernel on this machine's disk, ready to boot.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// What `uname -r` prints in the guest.
    pub abi: String,
    /// The compressed image.
    pub image: PathBuf,
    /// The unpacked modules, in the order in which they must be loaded.
    pub modules: Vec<PathBuf>,
}

/// The kernel downloaded before, if it is whole and has the modules wanted now.
pub fn cached(series: &Series) -> Option<Kernel> {
    let folder = series.folder();
    let read = |name: &str| fs::read_to_string(folder.join(name)).ok();
    if read("wanted")? != modules::WANTED.join("\n") {
        return None;
    }
    let modules = read("order")?
        .lines()
        .map(|name| folder.join("modules").join(name))
        .collect();
    let image = folder.join("vmlinuz");
    image.is_file().then_some(Kernel {
        abi: read("abi")?,
        image,
        modules,
    })
}

/// Returns the kernel, downloading it unless it is here and `refresh` is not asked for.
///
/// # Errors
/// When no suite has it, with the reason for each.
pub fn obtain(series: &Series, refresh: bool) -> Result<Kernel> {
    if !refresh && let Some(kernel) = cached(series) {
        return Ok(kernel);
    }
    let mut problems = Vec::new();
    for suite in series.suites {
        match fetch(series, suite) {
            Ok(kernel) => return Ok(kernel),
            Err(error) => problems.push(format!("{suite}: {error:#}")),
        }
    }
    bail!("{}", problems.join("; "))
}

fn fetch(series: &Series, suite: &str) -> Result<Kernel> {
    let archive = Archive::open(suite)?;
    let names = archive.names("linux-")?;
    let abis = choose(&names, series.prefix);
    let abi = abis.first().with_context(|| {
        format!(
            "no package linux-image-{}*{FLAVOUR} whose modules are there too",
            series.prefix
        )
    })?;
    let mut packages = Vec::new();
    for part in ["linux-image", "linux-binary", "linux-modules"] {
        let package = format!("{part}-{abi}");
        if names.contains(&package) {
            packages.push(package);
        }
    }
    // Made aside, so that a failure leaves the kernel that was here.
    let folder = paths::target()
        .join("vm")
        .join(format!("{}.new", series.name));
    remove(&folder)?;
    let unpacked = folder.join("unpacked");
    archive.unpack(&packages, &unpacked)?;
    let image = paths::files_below(&unpacked)?
        .into_iter()
        .find(|file| is_image(file))
        .with_context(|| format!("no vmlinuz in {}", packages.join(", ")))?;
    copy(&unpacked.join(image), &folder.join("vmlinuz"))?;
    let order = modules::extract(&unpacked, abi, &folder.join("modules"))?;
    // Hundreds of megabytes of other modules.
    remove(&unpacked)?;
    write(&folder.join("abi"), abi)?;
    write(&folder.join("order"), &order.join("\n"))?;
    write(&folder.join("wanted"), &modules::WANTED.join("\n"))?;
    remove(&series.folder())?;
    fs::rename(&folder, series.folder())
        .with_context(|| format!("move {} to its place", folder.display()))?;
    cached(series).context("the kernel was unpacked, yet is not whole")
}

fn is_image(file: &Path) -> bool {
    file.file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("vmlinuz"))
}

fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("copy {} to {}", from.display(), to.display()))
        .map(drop)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// The kernels among package names whose version begins with `prefix`, newest first.
///
/// From 6.19 on an image package is a shell around linux-binary and linux-modules, and the archive
/// drops the modules of superseded ones: those cannot be used.
fn choose(names: &[String], prefix: &str) -> Vec<String> {
    let has = |part: &str, abi: &str| names.iter().any(|name| *name == format!("{part}-{abi}"));
    let mut abis: Vec<String> = names
        .iter()
        .filter_map(|name| name.strip_prefix("linux-image-"))
        .filter(|abi| abi.starts_with(|char: char| char.is_ascii_digit()))
        .filter(|abi| abi.starts_with(prefix) && abi.ends_with(FLAVOUR))
        .filter(|abi| !has("linux-binary", abi) || has("linux-modules", abi))
        .map(str::to_owned)
        .collect();
    abis.sort_by(|a, b| by_version(b, a));
    abis
}

/// Compares versions as people do: runs of digits by value, everything else by character.
fn by_version(a: &str, b: &str) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        let (text_a, rest_a) = split(a, false);
        let (text_b, rest_b) = split(b, false);
        let (number_a, next_a) = split(rest_a, true);
        let (number_b, next_b) = split(rest_b, true);
        let value = |digits: &str| digits.parse::<u64>().unwrap_or(0);
        let order = text_a
            .cmp(text_b)
            .then(value(number_a).cmp(&value(number_b)));
        if order != Ordering::Equal || (next_a.is_empty() && next_b.is_empty()) {
            return order;
        }
        (a, b) = (next_a, next_b);
    }
}

/// Splits after the leading run of digits, or of anything else.
fn split(text: &str, digits: bool) -> (&str, &str) {
    let end = text
        .find(|char: char| char.is_ascii_digit() != digits)
        .unwrap_or(text.len());
    text.split_at(end)
}

#[cfg(test)]
mod tests {
    use super::{SERIES, Series, by_version, choose};
    use std::cmp::Ordering;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_newest_of_a_series_comes_first() {
        let list = names(&[
            "linux-image-6.1.0-9-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64",
            "linux-image-6.1.0-57-cloud-amd64-unsigned",
            "linux-image-6.1.0-58-amd64",
            "linux-image-6.12.9+deb12-cloud-amd64",
            "linux-image-cloud-amd64",
        ]);
        assert_eq!(
            choose(&list, "6.1."),
            ["6.1.0-57-cloud-amd64", "6.1.0-9-cloud-amd64"]
        );
        assert_eq!(
            choose(&list, "").first().unwrap(),
            "6.12.9+deb12-cloud-amd64"
        );
        assert!(choose(&list, "7.").is_empty());
    }

    #[test]
    fn kernels_whose_modules_are_gone_are_passed_over() {
        let list = names(&[
            "linux-image-7.1.1-cloud-amd64",
            "linux-binary-7.1.1-cloud-amd64",
            "linux-image-7.0.3-cloud-amd64",
            "linux-binary-7.0.3-cloud-amd64",
            "linux-modules-7.0.3-cloud-amd64",
        ]);
        assert_eq!(choose(&list, ""), ["7.0.3-cloud-amd64"]);
    }

    #[test]
    fn versions_compare_by_value() {
        assert_eq!(by_version("6.9.1", "6.12.0"), Ordering::Less);
        assert_eq!(by_version("7.3.10+deb13", "7.3.9+deb13"), Ordering::Greater);
        assert_eq!(by_version("6.1", "6.1"), Ordering::Equal);
        assert_eq!(by_version("6.1", "6.1.1"), Ordering::Less);
        assert_eq!(by_version("", ""), Ordering::Equal);
    }

    #[test]
    fn series_are_selected_by_name() {
        assert_eq!(Series::select(&[]).unwrap().len(), SERIES.len());
        assert_eq!(Series::select(&names(&["6.1"])).unwrap(), [SERIES[1]]);
        assert!(
            Series::select(&names(&["6.2"]))
                .unwrap_err()
                .to_string()
                .contains("6.12")
        );
    }
}
