//! Packages of any Debian release, downloaded and unpacked but never installed.
//!
//! A private apt state below `target/` leaves the machine's own sources untouched. The mirror and
//! its keyring are the ones this machine is already configured with, found at run time, so that no
//! file here names a host.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};

use super::sources::{self, Mirrors};
use crate::{paths, process};

/// Package lists younger than this are used as they are.
const LISTS_FRESH: Duration = Duration::from_secs(24 * 60 * 60);

/// One release of Debian ("suite"), seen through a private apt state.
#[derive(Debug)]
pub struct Archive {
    suite: String,
    folder: PathBuf,
}

/// A version of a package on offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The package's name.
    pub package: String,
    /// Its Debian version, for example `1.97.1+dfsg1-1`.
    pub version: String,
}

impl Archive {
    /// Opens a suite, downloading its package lists unless those here are fresh.
    ///
    /// # Errors
    /// When this is not a Debian machine, no mirror is configured, or the lists cannot be had.
    pub fn open(suite: &str) -> Result<Self> {
        if !process::exists("apt-get") || !process::exists("dpkg-deb") {
            bail!("apt-get and dpkg-deb are needed to look into Debian's archive; neither is here");
        }
        let mirrors = sources::configured()?;
        let archive = Self {
            suite: suite.to_owned(),
            folder: paths::target().join("apt").join(suite),
        };
        archive.prepare(&mirrors)?;
        Ok(archive)
    }

    fn prepare(&self, mirrors: &Mirrors) -> Result<()> {
        for folder in ["lists/partial", "cache/archives/partial"] {
            let folder = self.folder.join(folder);
            fs::create_dir_all(&folder)
                .with_context(|| format!("create the folder {}", folder.display()))?;
        }
        let list = self.folder.join("sources.list");
        let uri = if self.suite.ends_with("-security") {
            &mirrors.security
        } else {
            &mirrors.main
        };
        let line = format!(
            "deb [signed-by={}] {uri} {} main\n",
            mirrors.keyring, self.suite
        );
        let unchanged = fs::read_to_string(&list).is_ok_and(|old| old == line);
        fs::write(&list, line).with_context(|| format!("write {}", list.display()))?;
        fs::write(self.config(), self.config_text())
            .with_context(|| format!("write {}", self.config().display()))?;

        let stamp = self.folder.join("updated");
        let fresh = fs::metadata(&stamp)
            .and_then(|meta| meta.modified())
            .is_ok_and(|at| {
                SystemTime::now()
                    .duration_since(at)
                    .is_ok_and(|age| age < LISTS_FRESH)
            });
        if unchanged && fresh {
            return Ok(());
        }
        eprintln!("fetching the package lists of Debian {}", self.suite);
        process::output(self.apt("apt-get").args(["-q=2", "update"]))
            .with_context(|| format!("fetch the package lists of Debian {}", self.suite))?;
        fs::write(&stamp, "").with_context(|| format!("write {}", stamp.display()))
    }

    fn config(&self) -> PathBuf {
        self.folder.join("apt.conf")
    }

    /// Read after the machine's own configuration (which may name a proxy), so that it wins.
    fn config_text(&self) -> String {
        let folder = self.folder.display();
        // Only root can be another user; without root apt says so and goes on.
        format!(
            "#clear APT::Update::Post-Invoke;\n\
             #clear APT::Update::Post-Invoke-Success;\n\
             #clear DPkg::Post-Invoke;\n\
             Dir::Etc::sourcelist \"{folder}/sources.list\";\n\
             Dir::Etc::sourceparts \"-\";\n\
             Dir::Etc::preferences \"-\";\n\
             Dir::Etc::preferencesparts \"-\";\n\
             Dir::State::lists \"{folder}/lists\";\n\
             Dir::Cache \"{folder}/cache\";\n\
             APT::Sandbox::User \"root\";\n\
             APT::Default-Release \"\";\n\
             Acquire::Languages \"none\";\n\
             Acquire::IndexTargets::deb::DEP-11::DefaultEnabled \"false\";\n\
             Acquire::IndexTargets::deb::DEP-11-icons-small::DefaultEnabled \"false\";\n\
             Acquire::IndexTargets::deb::DEP-11-icons::DefaultEnabled \"false\";\n\
             Acquire::IndexTargets::deb::DEP-11-icons-hidpi::DefaultEnabled \"false\";\n"
        )
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .arg("-c")
            .arg(self.config())
            .env("LC_ALL", "C.UTF-8");
        command
    }

    /// The names of all packages that begin with `prefix`.
    ///
    /// # Errors
    /// When apt-cache fails.
    pub fn names(&self, prefix: &str) -> Result<Vec<String>> {
        let text = process::output(self.apt("apt-cache").args(["pkgnames", prefix]))?;
        Ok(text.lines().map(str::to_owned).collect())
    }

    /// The versions of a package on offer, newest first; empty if there is none.
    ///
    /// # Errors
    /// When apt-cache fails.
    pub fn offers(&self, package: &str) -> Result<Vec<Offer>> {
        let text = process::output(self.apt("apt-cache").args(["madison", package]))?;
        Ok(parse_madison(&text))
    }

    /// Downloads packages (`name` or `name=version`) and unpacks them together into `folder`.
    /// Nothing is installed, no script of a package runs.
    ///
    /// # Errors
    /// When a download or dpkg-deb fails.
    pub fn unpack(&self, packages: &[String], folder: &Path) -> Result<()> {
        let download = self.folder.join(format!("download-{}", std::process::id()));
        fs::create_dir_all(&download)
            .with_context(|| format!("create the folder {}", download.display()))?;
        let result = self.unpack_through(packages, &download, folder);
        // The packages are large and of no further use, whatever came out.
        fs::remove_dir_all(&download)
            .with_context(|| format!("remove the folder {}", download.display()))?;
        result
    }

    fn unpack_through(&self, packages: &[String], download: &Path, folder: &Path) -> Result<()> {
        eprintln!(
            "downloading {} from Debian {}",
            packages.join(", "),
            self.suite
        );
        process::output(
            self.apt("apt-get")
                .current_dir(download)
                .args(["-q=2", "download"])
                .args(packages),
        )?;
        fs::create_dir_all(folder)
            .with_context(|| format!("create the folder {}", folder.display()))?;
        for name in paths::files_below(download)? {
            let package = download.join(name);
            process::output(Command::new("dpkg-deb").arg("-x").arg(&package).arg(folder))?;
        }
        Ok(())
    }
}

/// Reads the table that `apt-cache madison` prints: ` name | version | source`.
fn parse_madison(text: &str) -> Vec<Offer> {
    let mut offers = Vec::new();
    for line in text.lines() {
        let mut fields = line.split('|').map(str::trim);
        if let (Some(package), Some(version), Some(kind)) =
            (fields.next(), fields.next(), fields.next())
            && !kind.ends_with("Sources")
        {
            let offer = Offer {
                package: package.to_owned(),
                version: version.to_owned(),
            };
            if !offers.contains(&offer) {
                offers.push(offer);
            }
        }
    }
    offers
}

#[cfg(test)]
mod tests {
    use super::{Offer, parse_madison};

    #[test]
    fn madison_lists_binary_packages_once() {
        let text = " rust-src | 1.97.1+dfsg1-1 | mirror:/ sid/main amd64 Packages\n \
                    rust-src | 1.97.1+dfsg1-1 | mirror:/ sid/main arm64 Packages\n \
                    rust-src | 1.97.1+dfsg1-1 | mirror:/ sid/main Sources\n";
        assert_eq!(
            parse_madison(text),
            [Offer {
                package: "rust-src".into(),
                version: "1.97.1+dfsg1-1".into()
            }]
        );
    }

    #[test]
    fn madison_of_nothing_is_empty() {
        assert_eq!(parse_madison(""), []);
    }
}
