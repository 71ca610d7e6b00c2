//! Which workloads a policy is for: globs over the path of a control group.
//!
//! A workload is the path of its control group below the cgroup v2 mount, without the leading
//! slash (`system.slice/billing.service`); the root is `/`.

use std::{fmt, str::FromStr};

/// Longest pattern that is accepted, in bytes: the longest path that the kernel takes (`PATH_MAX`).
const MAX_LEN: usize = 4096;

/// A glob: `*` is any run of characters, slashes too; `?` is any one character.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkloadPattern(String);

impl WorkloadPattern {
    /// Whether the pattern covers the whole of `workload`.
    ///
    /// Takes time in proportion to the product of both lengths at worst: on a mismatch only the
    /// last `*` is tried again, as earlier ones can gain nothing from taking more.
    pub fn matches(&self, workload: &str) -> bool {
        let mut pattern = self.0.chars();
        let mut text = workload.chars();
        // Where to go on after a mismatch: behind the last `*`, with one more character swallowed.
        let mut retry: Option<(std::str::Chars<'_>, std::str::Chars<'_>)> = None;
        loop {
            match (pattern.next(), text.clone().next()) {
                (None, None) => return true,
                (Some('*'), _) => {
                    retry = Some((pattern.clone(), text.clone()));
                    continue;
                }
                (Some(want), Some(have)) if want == '?' || want == have => {
                    text.next();
                    continue;
                }
                _ => {}
            }
            let Some((after_star, swallowed)) = &mut retry else {
                return false;
            };
            if swallowed.next().is_none() {
                return false;
            }
            pattern = after_star.clone();
            text = swallowed.clone();
        }
    }

    /// The pattern as it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for WorkloadPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why text is no [`WorkloadPattern`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkloadError {
    /// No text.
    #[error("is empty")]
    Empty,
    /// Longer than any path.
    #[error("is longer than {MAX_LEN} bytes")]
    TooLong,
    /// Paths begin below the mount.
    #[error("has a leading slash, which no workload has but the root \"/\"; write it as {0:?}")]
    LeadingSlash(String),
    /// No path ends like this.
    #[error("ends with a slash, which no workload does but the root \"/\"")]
    TrailingSlash,
    /// A character that no one means.
    #[error("holds a control character")]
    Control,
}

impl FromStr for WorkloadPattern {
    type Err = WorkloadError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Err(WorkloadError::Empty);
        }
        if text.len() > MAX_LEN {
            return Err(WorkloadError::TooLong);
        }
        if text.chars().any(char::is_control) {
            return Err(WorkloadError::Control);
        }
        if text != "/" {
            if text.starts_with('/') {
                let below = text.trim_start_matches('/');
                let better = if below.is_empty() { "/" } else { below };
                return Err(WorkloadError::LeadingSlash(better.to_owned()));
            }
            if text.ends_with('/') {
                return Err(WorkloadError::TrailingSlash);
            }
        }
        Ok(Self(text.to_owned()))
    }
}
