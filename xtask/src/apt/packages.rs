//! Debian packages that the tests and the VMs need: one list, each with its reason.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::process;

/// A package and why it is needed.
#[derive(Debug, Clone, Copy)]
pub struct Package {
    /// Its name in Debian 12 and 13.
    pub name: &'static str,
    /// What it is for.
    pub why: &'static str,
}

const fn package(name: &'static str, why: &'static str) -> Package {
    Package { name, why }
}

/// What the privileged tests run: programs that nobody changed, and the servers they talk to.
pub const TESTS: &[Package] = &[
    package(
        "ca-certificates",
        "downloads of the packages from other registries",
    ),
    package("curl", "client under test (poll, happy eyeballs)"),
    package("wget", "client under test (blocking reads)"),
    package(
        "default-jdk-headless",
        "client under test (mapped IPv4); runs one-file programs",
    ),
    package("gcc", "clients in C: blocking, epoll, io_uring"),
    package(
        "libc6-dev",
        "clients in C; the static C library of the release binary",
    ),
    package("liburing-dev", "client in C that connects through io_uring"),
    package("nodejs", "client under test (250 ms for each address)"),
    package("python3", "clients and servers under test"),
    package(
        "python3-venv",
        "clients from PyPI, in a folder of their own",
    ),
    package("postgresql", "server and client (libpq) under test"),
    package(
        "redis-server",
        "server under test (BLPOP waits long and rightly)",
    ),
    package("bsdutils", "logger: a client of a protocol without answers"),
    package(
        "nginx-light",
        "server under test, and a client by its proxy_pass",
    ),
    package(
        "haproxy",
        "client under test, and the proxy to compare with",
    ),
    package(
        "mariadb-server",
        "server under test, and its client: the server speaks first",
    ),
    package(
        "openssh-server",
        "server under test: the server speaks first, and so does its client",
    ),
    package(
        "mosquitto",
        "server under test: answers some messages and never others",
    ),
    package("mosquitto-clients", "publisher under test"),
    package("openssh-client", "client under test"),
    package("openssl", "certificates of TLS servers under test"),
    package("hey", "many connections at once"),
    package("wrk", "throughput on keep-alive connections"),
    package("apache2-utils", "ab: counts the answers that it gets"),
    package(
        "nghttp2-client",
        "h2load: counts the answers that it gets, HTTP/2 too",
    ),
    package(
        "iproute2",
        "namespaces, links, routes: the faults that tests make",
    ),
    package("nftables", "firewall rules: the faults that tests make"),
    package("libcap2-bin", "capsh: the agent with fewer capabilities"),
    package("procps", "ps, sysctl"),
    package("runc", "containers with programs under test"),
    package("util-linux", "nsenter, unshare"),
    package("systemd", "systemd-analyze checks the unit file"),
    package("prometheus", "promtool checks the page of metrics"),
];

/// What `cargo xtask retries` takes beside them.
pub const RETRIES: &[Package] = &[package(
    "golang-go",
    "client under test (goroutines hop threads)",
)];

/// For what comes from the npm registry, where Node brings no npm.
pub const NPM: &[Package] = &[package("npm", "clients from the npm registry")];

/// What booting kernels takes.
pub const VM: &[Package] = &[
    package("busybox-static", "the guest's tools"),
    package("libc6-dev", "the static C library of the guest's programs"),
    package("gcc", "the linker of the guest's programs"),
    package("kmod", "depmod: which kernel module needs which"),
    package(
        "qemu-system-x86",
        "the machine itself, emulated: no KVM needed",
    ),
    package("xz-utils", "kernel modules are compressed (6.12)"),
    package("zstd", "kernel modules are compressed"),
];

/// Installs what is missing of `packages`, saying so first; returns quickly when nothing is.
///
/// Services that come with a package (nginx, redis, postgresql, mariadb, mosquitto, ssh) are not started.
///
/// # Errors
/// When there is no apt, no way to become root, or a package cannot be installed.
pub fn ensure(packages: &[Package]) -> Result<()> {
    if !process::exists("dpkg-query") || !process::exists("apt-get") {
        bail!(
            "no apt on this machine, so these Debian packages, or what is the same elsewhere, must \
             be installed by hand:\n{}",
            table(packages)
        );
    }
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    println!(
        "installing {} Debian packages:\n{}",
        missing.len(),
        table(&missing)
    );
    install(
        &missing
            .iter()
            .map(|package| package.name)
            .collect::<Vec<_>>(),
    )
}

fn table(packages: &[Package]) -> String {
    let lines = packages
        .iter()
        .map(|package| format!("  {:22} {}", package.name, package.why));
    lines.collect::<Vec<_>>().join("\n")
}

fn missing(packages: &[Package]) -> Result<Vec<Package>> {
    let mut command = Command::new("dpkg-query");
    command.args(["-W", "-f=${Package}\\t${db:Status-Status}\\n"]);
    command
        .args(packages.iter().map(|package| package.name))
        .env("LC_ALL", "C.UTF-8");
    // It fails when a name is unknown, which is what is asked here: only its lines count.
    let output = command
        .output()
        .with_context(|| format!("start `{}`", process::describe(&command)))?;
    let installed = installed(&String::from_utf8_lossy(&output.stdout));
    Ok(packages
        .iter()
        .filter(|package| !installed.contains(package.name))
        .copied()
        .collect())
}

/// Names of the packages that dpkg-query calls installed.
fn installed(text: &str) -> BTreeSet<String> {
    text.lines()
        .filter_map(|line| line.split_once('\t'))
        .filter(|(_, status)| *status == "installed")
        .map(|(name, _)| name.to_owned())
        .collect()
}

/// Run by sh with the packages as arguments. While it runs, services are kept from starting (see
/// invoke-rc.d(8)), unless the machine has a policy of its own. A source that is out of reach does
/// not matter as long as the packages are to be had.
const INSTALL: &str = r#"
set -eu
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM HUP
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -q=2 update || echo "apt-get update failed for some source; trying with what is known" >&2
apt-get -q=2 -y --no-install-recommends -o Dpkg::Use-Pty=0 install "$@" >/dev/null
"#;

fn install(names: &[&str]) -> Result<()> {
    let mut command = process::as_root("sh")?;
    command.args(["-c", INSTALL, "install"]).args(names);
    let status = command
        .status()
        .context("start the installation of packages")?;
    if !status.success() {
        bail!(
            "the Debian packages {} could not be installed: {status}",
            names.join(" ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{NPM, RETRIES, TESTS, VM, installed};
    use std::collections::BTreeSet;

    #[test]
    fn only_installed_packages_count() {
        let text = "curl\tinstalled\nwget\tconfig-files\nhey\tnot-installed\n\nodd line\n";
        assert_eq!(installed(text), BTreeSet::from(["curl".to_owned()]));
    }

    #[test]
    fn the_lists_name_each_package_once() {
        for list in [TESTS, RETRIES, NPM, VM] {
            let names: BTreeSet<_> = list.iter().map(|package| package.name).collect();
            assert_eq!(names.len(), list.len());
        }
    }
}
