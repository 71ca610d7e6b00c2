//! Configuration: with which numbers everything else works.
//!
//! A file is read by [`load`] (the only function here that touches the file system) or
//! [`parse_str`]: either a [`Config`] whose every value is typed and in range, or a [`ConfigError`]
//! with every problem in the file. [`Config::resolve`] says which policy is for a connection and
//! why, [`Config::explain`] the same at length, [`Config::kernel_entries`] tells it to the kernel, [`diff`] tells what a reload
//! changed, [`Config::warnings`] what is accepted but cannot be had, and [`Config::to_toml`]
//! writes the whole as a file.
//!
//! Defaults are written once, in `config/default.toml`, which is compiled in. Any other file is
//! read over it, and each of its policies over its own defaults.

mod destination;
mod diff;
mod duration;
mod entries;
mod error;
mod explain;
mod model;
mod origins;
mod pattern;
mod reader;
mod resolve;
mod rules;
mod schema;
mod sections;
mod settings;
mod to_toml;
mod warnings;
mod workload;

#[cfg(test)]
mod tests;

use std::{io, path::Path, sync::OnceLock};

use crate::files;

pub use destination::{Destination, DestinationArg, DestinationError, host_name};
pub use diff::{Change, diff};
pub use duration::{format_duration, read_duration};
pub use entries::KernelEntry;
pub use error::{ConfigError, Problem};
pub use explain::{Candidate, Explained, Fit, Guard, SettingSource, SourcedSetting};
pub use model::{
    AgentConfig, Backoff, BreakerPolicy, Config, Errno, Hung, Limits, LogFormat, Mode, OnOpen,
    Policy, ReadAction, RetryPolicy, Scope, Stall, StatusPattern, Timeouts,
};
pub use origins::Origins;
pub use pattern::{DestinationPattern, KnownName, Target};
pub use resolve::Resolution;
pub use schema::{MAX_KERNEL_ENTRIES, MAX_POLICIES};
pub use workload::{WorkloadError, WorkloadPattern};

/// The built-in configuration: `config/default.toml`, word for word.
pub const DEFAULT_CONFIG: &str = include_str!("../../../config/default.toml");

/// Name of the policy that applies where no other one does. No policy in a file may have it.
pub const DEFAULT_POLICY: &str = "default";

/// What [`Config::source`] is when there is no file.
const NO_FILE: &str = "built-in";

/// Largest file that is read, in bytes: as much as a Kubernetes ConfigMap may hold.
const MAX_FILE: u64 = 1 << 20;

/// Reads and checks a configuration file.
///
/// # Errors
///
/// The file cannot be read, is too large or is not UTF-8: one problem without a line. Otherwise
/// as [`parse_str`].
pub fn load(path: &Path) -> Result<Config, ConfigError> {
    let name = path.display().to_string();
    let bytes = read_file(path).map_err(|error| {
        let what = format!("the configuration file cannot be read: {error}");
        ConfigError::whole_file(&name, what, String::new())
    })?;
    if bytes.len() as u64 > MAX_FILE {
        let what = "the configuration file is too large".to_owned();
        return Err(ConfigError::whole_file(
            &name,
            what,
            format!("at most {MAX_FILE} bytes"),
        ));
    }
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..at]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count();
        let what = format!("the configuration file is not UTF-8 from line {line} on");
        ConfigError::whole_file(&name, what, "UTF-8 text".to_owned())
    })?;
    parse_str(&name, &text)
}

/// Reads a regular file, up to one byte more than [`MAX_FILE`]. Never waits: a pipe or a device in
/// the file's place is an error.
///
/// # Errors
///
/// What the system says, or that it is no regular file.
pub fn read_file(path: &Path) -> io::Result<Vec<u8>> {
    files::read(path, MAX_FILE + 1)
}

/// Reads and checks a configuration. `file` is only what problems are reported under.
///
/// # Errors
///
/// Every problem in the text, in the order of the lines. Text that is no TOML is reported with
/// its syntax errors alone.
pub fn parse_str(file: &str, text: &str) -> Result<Config, ConfigError> {
    schema::parse_over(built_in(), file, text)
}

impl Config {
    /// The built-in configuration, [`DEFAULT_CONFIG`].
    pub fn default_config() -> Self {
        built_in().clone()
    }
}

/// The built-in configuration, parsed once.
fn built_in() -> &'static Config {
    static BUILT_IN: OnceLock<Config> = OnceLock::new();
    BUILT_IN.get_or_init(|| {
        match schema::parse_over(&schema::blank_config(), NO_FILE, DEFAULT_CONFIG) {
            Ok(config) => config,
            Err(error) => unreachable!("the built-in configuration is tested: {error}"),
        }
    })
}
