//! The `backstop` command.

use std::{path::Path, process::ExitCode};

use backstop::{
    cli::{self, Parts},
    daemon::{canary, run},
};

fn main() -> ExitCode {
    // The canary is ours alone and no part of the command line.
    let mut args = std::env::args_os().skip(1);
    if args.next().is_some_and(|arg| arg == canary::COMMAND)
        && let (Some(cgroup), Some(port)) = (args.next(), args.next())
        && let Some(port) = port.to_str().and_then(|port| port.parse().ok())
    {
        return ExitCode::from(canary::play(Path::new(&cgroup), port));
    }
    cli::main(&Parts {
        run,
        print_config: cli::print_config,
        check: cli::check,
    })
}
