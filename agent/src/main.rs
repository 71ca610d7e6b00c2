//! The `backstop` command.

use std::{path::Path, process::ExitCode};

use backstop::cli::{self, Parts, RunArgs};

fn main() -> ExitCode {
    // SEAM: the daemon and the configuration take these three places when they are merged.
    cli::main(&Parts {
        run: |_: RunArgs| ExitCode::from(cli::EXIT_FAILED),
        print_config: |_: &RunArgs| ExitCode::from(cli::EXIT_FAILED),
        check: |_: &Path| ExitCode::from(cli::EXIT_FAILED),
    })
}
