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

/// How long a file may be missing without a word: it is being replaced.
const GONE: Duration = Duration::from_secs(1);

/// What has become of the file.
#[derive(Debug, PartialEq, Eq)]
pub enum Change {
    /// It has other contents, or is there again.
    Contents,
    /// It is not there any more, or cannot be read: why.
    Gone(String),
}

/// Watches one file.
pub struct Watch {
    file: PathBuf,
    events: EventStream<[u8; 4096]>,
    seen: Option<u64>,
    /// When the directory will have been quiet for long enough after the last event. Kept here,
    /// because the wait for it may be dropped and begun again at any time.
    quiet_at: Option<Instant>,
    /// When it was first found missing.
    missing_since: Option<Instant>,
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
            | WatchMask::MOVED_FROM
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
            seen: digest(file).ok(),
            quiet_at: None,
            missing_since: None,
        })
    }

    /// Waits until the file has other contents than before, or is gone. Cancel safe.
    pub async fn changed(&mut self) -> Change {
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
                    match digest(&self.file) {
                        Ok(now) => {
                            self.missing_since = None;
                            if Some(now) != self.seen {
                                self.seen = Some(now);
                                return Change::Contents;
                            }
                        }
                        Err(error) if self.seen.is_some() => {
                            let since = *self.missing_since.get_or_insert_with(Instant::now);
                            if since.elapsed() >= GONE {
                                self.missing_since = None;
                                self.seen = None;
                                return Change::Gone(error);
                            }
                            self.quiet_at = Some(Instant::now() + QUIET);
                        }
                        Err(_) => {}
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

fn digest(file: &Path) -> Result<u64, String> {
    let mut hasher = DefaultHasher::new();
    let text = crate::policy::read_file(file).map_err(|error| error.to_string())?;
    text.hash(&mut hasher);
    Ok(hasher.finish())
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
        assert_eq!(watch.changed().await, Change::Contents);

        fs::write(dir.path().join("fresh"), "other").unwrap();
        fs::rename(dir.path().join("fresh"), &file).unwrap();
        // As in the select loop, where other things happen all the time.
        while tokio::time::timeout(QUIET / 4, watch.changed())
            .await
            .is_err()
        {}
        assert_eq!(fs::read_to_string(&file).unwrap(), "other");
    }

    #[tokio::test]
    async fn a_file_that_is_gone_is_noticed_and_so_is_its_return() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("backstop.toml");
        for take_away in [fs::remove_file, |file: &Path| {
            fs::rename(file, file.with_extension("away"))
        }] {
            fs::write(&file, "some").unwrap();
            let mut watch = Watch::new(&file).unwrap();
            take_away(file.as_path()).unwrap();
            let Change::Gone(error) = watch.changed().await else {
                panic!("it is gone");
            };
            assert!(error.contains("No such file"), "{error}");
            fs::write(&file, "some").unwrap();
            assert_eq!(watch.changed().await, Change::Contents);
        }
    }
}
