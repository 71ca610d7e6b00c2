//! `check FILE` and `run --print-config`.

use std::{
    io::{self, Write as _},
    path::Path,
    process::ExitCode,
};

use super::{EXIT_DONE, EXIT_FAILED, EXIT_USAGE, RunArgs};
use crate::{
    control::api,
    policy::{self, Config, ConfigError},
};

/// Checks a file: says what is wrong, or what it holds. Returns the exit code.
pub fn check(file: &Path) -> ExitCode {
    match policy::load(file) {
        Ok(config) => {
            for warning in config.warnings() {
                complain(&format!("warning: {warning}"));
            }
            let count = config.policies.len();
            let plural = if count == 1 { "y" } else { "ies" };
            print(&format!(
                "{}: ok, {count} polic{plural} beside the defaults\n",
                file.display()
            ))
        }
        Err(error) => refused(&error),
    }
}

/// Prints the configuration that `run` would use. Returns the exit code.
pub fn print_config(args: &RunArgs) -> ExitCode {
    let mut config = match &args.config {
        Some(file) => match policy::load(file) {
            Ok(config) => config,
            Err(error) => return refused(&error),
        },
        // Word for word, comments and all.
        None if args.mode.is_none() => return print(policy::DEFAULT_CONFIG),
        None => Config::default_config(),
    };
    match args.mode {
        Some(api::Mode::Enforce) => config.mode = policy::Mode::Enforce,
        Some(api::Mode::Observe) => config.mode = policy::Mode::Observe,
        None => {}
    }
    print(&config.to_toml())
}

fn refused(error: &ConfigError) -> ExitCode {
    complain(&error.to_string());
    ExitCode::from(EXIT_USAGE)
}

fn complain(text: &str) {
    // With stderr gone there is nobody left to tell.
    let _ = writeln!(io::stderr(), "{text}");
}

fn print(text: &str) -> ExitCode {
    let mut stdout = io::stdout();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Ok(()) => ExitCode::from(EXIT_DONE),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::from(EXIT_DONE),
        Err(_) => ExitCode::from(EXIT_FAILED),
    }
}
