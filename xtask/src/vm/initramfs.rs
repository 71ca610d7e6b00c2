//! The guest's root: busybox, the init script, modules, the programs under test.

use std::fs;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::cpio::Archive;
use super::kernels::Kernel;
use super::modules;

/// A statically linked shell and tools, from Debian's busybox-static.
const BUSYBOX: [&str; 2] = ["/bin/busybox", "/usr/bin/busybox"];

/// The guest's first process.
const INIT: &str = include_str!("init.sh");

/// The guest's folders, parents first.
const FOLDERS: [&str; 13] = [
    "bin",
    "dev",
    "etc",
    "lib",
    "lib/modules",
    "payload",
    "proc",
    "root",
    "run",
    "sys",
    "tmp",
    "usr",
    "var",
];

/// Writes the archive for one kernel to `image`. `programs` are (name in `/payload`, file here);
/// `arguments` is the command that is run in the guest.
///
/// # Errors
/// When a file cannot be read or the archive cannot be written.
pub fn write(
    image: &Path,
    kernel: &Kernel,
    programs: &[(&str, &Path)],
    arguments: &[&str],
) -> Result<()> {
    let what = || format!("write {}", image.display());
    let file = fs::File::create(image).with_context(what)?;
    let mut archive = Archive::new(BufWriter::new(file));
    for folder in FOLDERS {
        archive.directory(folder).with_context(what)?;
    }
    // The kernel opens it for init before anything is mounted.
    archive.device("dev/console", 5, 1).with_context(what)?;
    let busybox = BUSYBOX
        .map(Path::new)
        .into_iter()
        .find(|path| path.is_file());
    let busybox = busybox.context("no busybox in /bin or /usr/bin; install busybox-static")?;
    archive
        .file("bin/busybox", &read(busybox)?)
        .with_context(what)?;
    archive.link("bin/sh", "busybox").with_context(what)?;
    archive.file("init", INIT.as_bytes()).with_context(what)?;
    let mut order = String::new();
    for module in &kernel.modules {
        let path = modules::guest_path(module).context("a module without a file name")?;
        archive
            .file(&path.to_string_lossy(), &read(module)?)
            .with_context(what)?;
        order.extend(
            path.file_name()
                .map(|name| format!("{}\n", name.to_string_lossy())),
        );
    }
    archive
        .file("lib/modules/order", order.as_bytes())
        .with_context(what)?;
    for (name, path) in programs {
        archive
            .file(&format!("payload/{name}"), &read(path)?)
            .with_context(what)?;
    }
    let script = format!("exec {}\n", arguments.join(" "));
    archive
        .file("payload/run", script.as_bytes())
        .with_context(what)?;
    archive.finish().with_context(what)?;
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("read {}", path.display()))
}
