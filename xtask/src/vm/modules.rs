//! Kernel modules: which the check needs, what those need, and unpacking them.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::process;

/// Modules that are loaded in the guest, where the kernel has not built them in.
pub const WANTED: [&str; 15] = [
    // Aborting sockets and looking at them.
    "inet_diag",
    "tcp_diag",
    // Links between namespaces, and links that go nowhere.
    "veth",
    "dummy",
    "tun",
    // Delay, jitter and loss.
    "sch_netem",
    "sch_tbf",
    "sch_ingress",
    // Firewall rules that drop and reject.
    "nf_tables",
    "nft_ct",
    "nft_counter",
    "nft_limit",
    "nft_reject",
    "nft_reject_inet",
    "nft_reject_ipv4",
];

/// Writes the wanted modules of an unpacked kernel and all that they need into `into`, decompressed;
/// returns their file names in the order in which they must be loaded.
///
/// # Errors
/// When the kernel has no modules, depmod fails, or a module cannot be decompressed.
pub fn extract(unpacked: &Path, abi: &str, into: &Path) -> Result<Vec<String>> {
    let bases = [unpacked.to_path_buf(), unpacked.join("usr")];
    let base = bases
        .iter()
        .find(|base| base.join("lib/modules").join(abi).join("kernel").is_dir())
        .with_context(|| format!("no lib/modules/{abi}/kernel in {}", unpacked.display()))?;
    // The package leaves the table of dependencies to its installation.
    process::output(Command::new(depmod()).arg("-b").arg(base).arg(abi))?;
    let folder = base.join("lib/modules").join(abi);
    let table = folder.join("modules.dep");
    let text = fs::read_to_string(&table).with_context(|| format!("read {}", table.display()))?;
    fs::create_dir_all(into).with_context(|| format!("create {}", into.display()))?;
    let mut order = Vec::new();
    for module in closure(&text, &WANTED)? {
        let name = format!("{}.ko", name_of(&module));
        decompress(&folder.join(&module), &into.join(&name))?;
        order.push(name);
    }
    Ok(order)
}

/// Where it lies on Debian; /usr/sbin is not on everybody's PATH.
fn depmod() -> &'static Path {
    let known = ["/usr/sbin/depmod", "/sbin/depmod"].map(Path::new);
    known
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or(Path::new("depmod"))
}

fn decompress(from: &Path, to: &Path) -> Result<()> {
    let program = match from.extension().and_then(|end| end.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => {
            return fs::copy(from, to)
                .with_context(|| format!("copy {} to {}", from.display(), to.display()))
                .map(drop);
        }
    };
    let mut command = Command::new(program);
    command.arg("-dc").arg(from);
    let line = process::describe(&command);
    let output = command
        .output()
        .with_context(|| format!("start `{line}`"))?;
    if !output.status.success() {
        bail!("`{line}` ended with {}", output.status);
    }
    fs::write(to, output.stdout).with_context(|| format!("write {}", to.display()))
}

/// A module's name: the file's without endings, `-` as `_` (modprobe holds them to be the same).
fn name_of(path: &str) -> String {
    let file = path.rsplit('/').next().unwrap_or(path);
    let end = file.find(".ko").unwrap_or(file.len());
    file[..end].replace('-', "_")
}

/// Paths of the wanted modules and all that they need, each after what it needs. Modules that are
/// not in the table are built into the kernel or not there; the check will tell which.
///
/// # Errors
/// When a line of the table has no colon.
fn closure(table: &str, wanted: &[&str]) -> Result<Vec<String>> {
    let mut needs: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut by_name = HashMap::new();
    for line in table.lines().filter(|line| !line.trim().is_empty()) {
        let (path, rest) = line
            .split_once(':')
            .with_context(|| format!("modules.dep: no colon in '{line}'"))?;
        needs.insert(path, rest.split_whitespace().collect());
        by_name.insert(name_of(path), path);
    }
    let mut order: Vec<String> = Vec::new();
    for name in wanted {
        let Some(path) = by_name.get(*name) else {
            continue;
        };
        // The table lists all that a module needs, however far, the deepest last.
        let list = needs.get(path).into_iter().flatten().rev().chain([path]);
        for path in list {
            if !order.iter().any(|known| known == path) {
                order.push((*path).to_owned());
            }
        }
    }
    Ok(order)
}

/// The modules' paths in the guest.
pub fn guest_path(module: &Path) -> Option<PathBuf> {
    Some(Path::new("lib/modules").join(module.file_name()?))
}

#[cfg(test)]
mod tests {
    use super::{closure, name_of};

    const TABLE: &str = "kernel/net/a.ko.xz: kernel/net/b.ko.xz kernel/net/c-d.ko.xz\n\
        kernel/net/b.ko.xz: kernel/net/c-d.ko.xz\nkernel/net/c-d.ko.xz:\nkernel/net/e.ko:\n";

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let order = closure(TABLE, &["a", "b", "absent"]).unwrap();
        assert_eq!(
            order,
            [
                "kernel/net/c-d.ko.xz",
                "kernel/net/b.ko.xz",
                "kernel/net/a.ko.xz"
            ]
        );
    }

    #[test]
    fn names_ignore_dashes_and_compression() {
        assert_eq!(name_of("kernel/x/c-d.ko.zst"), "c_d");
        assert_eq!(closure(TABLE, &["c_d", "e"]).unwrap().len(), 2);
    }

    #[test]
    fn a_broken_table_is_an_error() {
        assert!(closure("kernel/a.ko", &["a"]).is_err());
        assert!(closure("", &["a"]).unwrap().is_empty());
    }
}
