//! The pause, kept in the state directory so that it survives a restart.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::memo::file::replace;
use crate::control::api::{Paused, Timestamp};

/// Where the pause is kept, and the pause itself.
pub struct Pause {
    file: PathBuf,
    current: Option<Paused>,
}

impl Pause {
    /// Reads the state of the last run. A damaged file is set aside, and nothing is paused.
    ///
    /// # Errors
    /// When the file is there and cannot be read.
    pub fn restore(state_dir: &Path) -> Result<Self> {
        let file = state_dir.join("pause.json");
        let current = match fs::read(&file) {
            Ok(bytes) => match serde_json::from_slice::<Paused>(&bytes) {
                Ok(paused) => Some(paused),
                Err(error) => {
                    let aside = file.with_extension("json.damaged");
                    tracing::warn!(
                        "{}: {error}; set aside as {}, nothing is paused",
                        file.display(),
                        aside.display()
                    );
                    fs::rename(&file, &aside)
                        .with_context(|| format!("set {} aside", file.display()))?;
                    None
                }
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => {
                return Err(error).with_context(|| format!("read {}", file.display()));
            }
        };
        Ok(Self { file, current })
    }

    /// The state directory.
    pub fn directory(&self) -> &Path {
        self.file.parent().unwrap_or(&self.file)
    }

    /// The pause in force.
    pub fn current(&self) -> Option<&Paused> {
        self.current.as_ref()
    }

    /// Whether the pause's time is over.
    pub fn is_over(&self, now: Timestamp) -> bool {
        self.current
            .as_ref()
            .and_then(|paused| paused.until)
            .is_some_and(|until| until <= now)
    }

    /// Begins (or changes) a pause, on disk first.
    ///
    /// # Errors
    /// When the file cannot be written: then nothing has changed.
    pub fn begin(&mut self, paused: Paused) -> Result<()> {
        let bytes = serde_json::to_vec(&paused).context("write down the pause")?;
        replace(&self.file, |file| file.write_all(&bytes))
            .with_context(|| format!("write {}", self.file.display()))?;
        self.current = Some(paused);
        Ok(())
    }

    /// Ends the pause, on disk first.
    ///
    /// # Errors
    /// When the file cannot be removed: then the pause goes on.
    pub fn end(&mut self) -> Result<Option<Paused>> {
        match fs::remove_file(&self.file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("remove {}", self.file.display()));
            }
            _ => {}
        }
        Ok(self.current.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paused(until: Option<u64>) -> Paused {
        Paused {
            since: Timestamp::from_unix_ms(1000),
            until: until.map(Timestamp::from_unix_ms),
            by: "uid 0".to_owned(),
        }
    }

    #[test]
    fn survives_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let mut pause = Pause::restore(dir.path()).unwrap();
        assert_eq!(pause.current(), None);
        pause.begin(paused(Some(5000))).unwrap();
        let mut again = Pause::restore(dir.path()).unwrap();
        assert_eq!(again.current(), Some(&paused(Some(5000))));
        assert!(!again.is_over(Timestamp::from_unix_ms(4999)));
        assert!(again.is_over(Timestamp::from_unix_ms(5000)));
        assert_eq!(again.end().unwrap(), Some(paused(Some(5000))));
        assert_eq!(again.end().unwrap(), None);
        assert_eq!(Pause::restore(dir.path()).unwrap().current(), None);
    }

    #[test]
    fn a_damaged_file_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pause.json"), b"{half").unwrap();
        assert_eq!(Pause::restore(dir.path()).unwrap().current(), None);
        assert!(dir.path().join("pause.json.damaged").exists());
        assert!(!dir.path().join("pause.json").exists());
    }
}
