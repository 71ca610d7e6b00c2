//! Noticing that the configuration file has changed.
//!
//! The directory is watched, not the file: an editor replaces the file, and a mounted ConfigMap
//! swaps a symbolic link beside it; a watch on the file itself dies with either.

use std::{
    hash::{DefaultHasher, Hash as _, Hasher as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use inotify::{EventStream, Inotify, WatchMask};
use tokio::time::Instant;
use tokio_stream::StreamExt as _;

/// How long the directory must be quiet: a change comes as several events.
const QUIET: Duration = Duration::from_millis(200);

/// Watches one file.
pub struct Watch {
    file: PathBuf,
    events: EventStream<[u8; 4096]>,
    seen: Option<u64>,
    /// When the directory will have been quiet for long enough after the last event. Kept here,
    /// because the wait for it may be dropped and begun again at any time.
    quiet_at: Option<Instant>,
}

impl Watch {
    /// Watches the file's directory; needs a tokio runtime.
    ///
    /// # Errors
    /// When the directory cannot be watched.
    pub fn new(file: &Path) -> Result<Self> {
        let directory = match file.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let inotify = Inotify::init().context("start watching files")?;
        let mask = WatchMask::CREATE
            | WatchMask::MOVED_TO
            | WatchMask::CLOSE_WRITE
            | WatchMask::DELETE
            | WatchMask::ONLYDIR;
        inotify
            .watches()
            .add(directory, mask)
            .with_context(|| format!("watch directory {}", directory.display()))?;
        let events = inotify
            .into_event_stream([0; 4096])
            .context("watch files")?;
        Ok(Self {
            file: file.to_owned(),
            events,
            seen: digest(file),
            quiet_at: None,
        })
    }

    /// Waits until the file has other contents than before. Cancel safe.
    pub async fn changed(&mut self) {
        loop {
            let quiet_at = self.quiet_at;
            tokio::select! {
                event = self.events.next() => match event {
                    Some(_) => self.quiet_at = Some(Instant::now() + QUIET),
                    // The kernel has taken the watch away (the directory is gone): SIGHUP remains.
                    None => std::future::pending::<()>().await,
                },
                () = until(quiet_at) => {
                    self.quiet_at = None;
                    let now = digest(&self.file);
                    // A file that is gone for a moment is being replaced.
                    if now.is_some() && now != self.seen {
                        self.seen = now;
                        return;
                    }
                }
            }
        }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

fn digest(file: &Path) -> Option<u64> {
    let mut hasher = DefaultHasher::new();
    crate::policy::read_file(file).ok()?.hash(&mut hasher);
    Some(hasher.finish())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn replaced_and_swapped_files_are_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("backstop.toml");
        // As a ConfigMap: file -> ..data/backstop.toml, ..data -> ..1
        for version in ["..1", "..2"] {
            fs::create_dir(dir.path().join(version)).unwrap();
            fs::write(dir.path().join(version).join("backstop.toml"), version).unwrap();
        }
        std::os::unix::fs::symlink("..1", dir.path().join("..data")).unwrap();
        std::os::unix::fs::symlink("..data/backstop.toml", &file).unwrap();
        let mut watch = Watch::new(&file).unwrap();
        std::os::unix::fs::symlink("..2", dir.path().join("..data_tmp")).unwrap();
        fs::rename(dir.path().join("..data_tmp"), dir.path().join("..data")).unwrap();
        watch.changed().await;

        fs::write(dir.path().join("fresh"), "other").unwrap();
        fs::rename(dir.path().join("fresh"), &file).unwrap();
        // As in the select loop, where other things happen all the time.
        while tokio::time::timeout(QUIET / 4, watch.changed())
            .await
            .is_err()
        {}
        assert_eq!(fs::read_to_string(&file).unwrap(), "other");
    }
}
