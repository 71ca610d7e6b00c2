//! The commands.
//!
//! `run` and `check` are the daemon's and the configuration's own work and come in as [`Parts`];
//! `replay` needs nothing but files; every other command asks the agent over its socket and shows the answer.

mod args;
mod config;
#[cfg(test)]
mod deployed;
mod detail;
mod doctor;
mod event_text;
mod explain;
mod explain_text;
mod manual;
mod output;
mod replay;
mod status;
mod table;
#[cfg(test)]
mod tests;
mod top;
mod units;

use std::{
    io::{self, Write},
    path::Path,
    process::ExitCode,
    time::Duration,
};

use clap::Parser;

use crate::control::client::{Client, ClientError};
use output::Output;

pub use args::{Cli, Command, ExplainArgs, ForcedArgs, Listen, ReplayArgs, RunArgs, Target};
pub use config::{check, print_config};

/// Done.
pub const EXIT_DONE: u8 = 0;
/// Failed.
pub const EXIT_FAILED: u8 = 1;
/// Bad usage or configuration.
pub const EXIT_USAGE: u8 = 2;
/// No agent answers on the socket.
pub const EXIT_UNREACHABLE: u8 = 3;
/// The kernel lacks what is required.
pub const EXIT_KERNEL: u8 = 4;

/// An agent that does not answer `doctor` within this time is not well, whatever it does instead.
const DOCTORS_PATIENCE: Duration = Duration::from_secs(10);

/// The commands that other parts of the agent carry out.
pub struct Parts {
    /// `run`.
    pub run: fn(RunArgs) -> ExitCode,
    /// `run --print-config`.
    pub print_config: fn(&RunArgs) -> ExitCode,
    /// `check FILE`.
    pub check: fn(&Path) -> ExitCode,
}

/// Why a command ended without its result.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error("the agent's answer cannot be read: {0}; is it of another version?")]
    Answer(#[from] serde_json::Error),
    #[error("writing the output: {0}")]
    Output(#[from] io::Error),
    #[error("{0}")]
    Said(String),
    #[error("{0}")]
    Usage(String),
}

impl Failure {
    fn exit_code(&self) -> u8 {
        match self {
            Self::Client(error) => error.exit_code(),
            // The reader has seen enough (`| head`): nothing failed.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => EXIT_DONE,
            Self::Answer(_) | Self::Output(_) | Self::Said(_) => EXIT_FAILED,
            Self::Usage(_) => EXIT_USAGE,
        }
    }
}

/// The whole of the `backstop` command: reads the command line, does it, says how it ended.
pub fn main(parts: &Parts) -> ExitCode {
    let Cli { socket, command } = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors: clap knows, and prints each where it belongs.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(EXIT_USAGE));
        }
    };
    match command {
        Command::Run(mut args) => {
            args.socket = socket;
            if args.print_config {
                (parts.print_config)(&args)
            } else {
                (parts.run)(args)
            }
        }
        Command::Check { file } => (parts.check)(&file),
        Command::Doctor { json } => {
            let client = Client::new(&socket).with_patience(DOCTORS_PATIENCE);
            ExitCode::from(examine(&client, json, &mut Output::stdout()))
        }
        Command::Replay(args) => {
            let mut out = Output::stdout();
            let done = replay::replay(&args, &mut out).and_then(|()| Ok(out.flush()?));
            ExitCode::from(done.map_or_else(|failure| report(&failure), |()| EXIT_DONE))
        }
        command => ExitCode::from(ask(&Client::new(&socket), command, &mut Output::stdout())),
    }
}

/// Carries out `doctor`, which says by its exit code what it has found.
fn examine(client: &Client, json: bool, out: &mut Output<'_>) -> u8 {
    let found = runtime().and_then(|runtime| runtime.block_on(doctor::doctor(client, json, out)));
    match found.and_then(|code| Ok(out.flush().map(|()| code)?)) {
        Ok(code) => code,
        Err(failure) => report(&failure),
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::Said(format!("starting: {error}")))
}

/// Carries out a command that asks the agent; returns the exit code.
fn ask(client: &Client, command: Command, out: &mut Output<'_>) -> u8 {
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(failure) => return report(&failure),
    };
    let done = runtime.block_on(async {
        match command {
            Command::Status { destination, json } => {
                status::status(client, destination.as_deref(), json, out).await
            }
            Command::Events { follow, all, json } => {
                status::events(client, follow, all, json, out).await
            }
            Command::Explain(args) => explain::explain(client, &args, out).await,
            Command::Trip(args) => manual::trip(client, &args, out).await,
            Command::HoldClosed(args) => manual::hold_closed(client, &args, out).await,
            Command::Reset { target } => manual::reset(client, &target, out).await,
            Command::Pause { duration } => manual::pause(client, duration, out).await,
            Command::Resume => manual::resume(client, out).await,
            Command::Top => top::top(client, out).await,
            Command::Run(_)
            | Command::Check { .. }
            | Command::Doctor { .. }
            | Command::Replay(_) => Ok(()),
        }
    });
    match done.and_then(|()| Ok(out.flush()?)) {
        Ok(()) => EXIT_DONE,
        Err(failure) => report(&failure),
    }
}

fn report(failure: &Failure) -> u8 {
    let code = failure.exit_code();
    if code != EXIT_DONE {
        // With stderr gone, too, there is nobody left to tell.
        let _ = writeln!(io::stderr(), "backstop: {failure}");
    }
    code
}
