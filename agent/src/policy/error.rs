//! What is wrong with a configuration file: every problem at once, each with its place.

use std::fmt;

/// One thing that is wrong, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Line in the file, from 1; 0 when the file as a whole is meant.
    pub line: usize,
    /// Column in that line, in characters from 1; 0 when the file as a whole is meant.
    pub column: usize,
    /// Path of the key: `defaults.timeouts.connect`, `policy[orders-db].breaker.window`. A policy
    /// without a usable name goes by its number, from 1: `policy[2]`. Empty when there is no key.
    pub key: String,
    /// The value as it was written, cut to one short line; empty when there is none.
    pub value: String,
    /// What is wrong, to be read after the value.
    pub what: String,
    /// What would be accepted; may be empty.
    pub allowed: String,
}

/// Why a configuration was refused. Displays as one line for each problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError {
    /// Name of the file, as it was given.
    pub file: String,
    /// What is wrong, in the order of the lines; never empty.
    pub problems: Vec<Problem>,
}

impl fmt::Display for Problem {
    /// `key = value: what; allowed: …`, without the file and the line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key.is_empty() {
            f.write_str(&self.key)?;
            if !self.value.is_empty() {
                write!(f, " = {}", self.value)?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.what)?;
        if !self.allowed.is_empty() {
            write!(f, "; allowed: {}", self.allowed)?;
        }
        Ok(())
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, problem) in self.problems.iter().enumerate() {
            if i > 0 {
                f.write_str("\n")?;
            }
            match problem.line {
                0 => write!(f, "{}: {problem}", self.file)?,
                line => write!(f, "{}:{line}: {problem}", self.file)?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}

impl ConfigError {
    /// A problem with the file as a whole.
    pub(super) fn whole_file(file: &str, what: String, allowed: String) -> Self {
        let problem = Problem {
            line: 0,
            column: 0,
            key: String::new(),
            value: String::new(),
            what,
            allowed,
        };
        Self {
            file: file.to_owned(),
            problems: vec![problem],
        }
    }
}
