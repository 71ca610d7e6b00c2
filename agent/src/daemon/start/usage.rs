//! What was asked for on the command line: can it be had at all?

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};

/// Bad usage or configuration: exit code 2, and the text is all there is to say.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Usage(pub(super) String);

/// Canonical paths of the cgroups to attach to; one inside another is dropped, because programs
/// of both would run.
pub(super) fn cgroups(wanted: &[PathBuf], mount: &Path) -> Result<Vec<PathBuf>> {
    if wanted.is_empty() {
        return Ok(vec![mount.to_owned()]);
    }
    let mount = mount.canonicalize().unwrap_or_else(|_| mount.to_owned());
    let mut paths = Vec::new();
    for path in wanted {
        let canonical = path.canonicalize().map_err(|error| {
            Usage(format!(
                "--cgroup {}: {error}; give a directory below {}",
                path.display(),
                mount.display()
            ))
        })?;
        if !canonical.starts_with(&mount) || !canonical.is_dir() {
            bail!(Usage(format!(
                "--cgroup {}: not a directory of the cgroup v2 hierarchy at {}",
                path.display(),
                mount.display()
            )));
        }
        paths.push(canonical);
    }
    paths.sort();
    paths.dedup();
    let all = paths.clone();
    paths.retain(|path| {
        let outer = all
            .iter()
            .find(|other| *other != path && path.starts_with(other));
        if let Some(outer) = outer {
            tracing::warn!(
                "--cgroup {} lies inside {} and is covered by it; dropped",
                path.display(),
                outer.display()
            );
        }
        outer.is_none()
    });
    Ok(paths)
}

pub(super) fn writable(directory: &Path) -> std::io::Result<()> {
    let probe = directory.join(".writable");
    // What lies there may be a pipe.
    match fs::remove_file(&probe) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::File::create_new(&probe)?;
    fs::remove_file(&probe)
}
