//! What is said at the start: the log's form, and that the agent is ready.

use std::io::Write as _;

use anyhow::{Context as _, Result};

use crate::{
    cli::RunArgs,
    control::api::{ConfigAction, Event},
    daemon::node::Node,
    policy::{self, LogFormat},
};

/// Says that the agent is ready: to whoever reads stdout, to systemd, and in the events.
pub(super) fn started(
    node: &mut Node,
    args: &RunArgs,
    mode: policy::Mode,
    listening: &str,
) -> Result<()> {
    let cgroups = node
        .cgroups
        .iter()
        .map(|path| path.display().to_string())
        .collect::<Vec<_>>()
        .join(",");
    let mut stdout = std::io::stdout();
    writeln!(
        stdout,
        "ready cgroups={cgroups} mode={mode} socket={} listen={listening}",
        args.socket.display()
    )
    .and_then(|()| stdout.flush())
    .context("write the ready line")?;
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    let message = match (&args.config, node.pause.current()) {
        (_, Some(paused)) => format!(
            "started, and paused since {} by {}",
            paused.since, paused.by
        ),
        (Some(file), None) => format!("started with {}", file.display()),
        (None, None) => "started with the built-in configuration".to_owned(),
    };
    let message = match &node.restored {
        Some(restored) => format!("{message}; {restored}"),
        None => message,
    };
    node.say(Event::Config {
        action: ConfigAction::Started,
        message,
        by: None,
    });
    node.say_what_is_over();
    Ok(())
}

/// The log goes to stderr.
pub(super) fn logging(format: LogFormat) {
    use tracing_subscriber::{EnvFilter, fmt};
    let filter = EnvFilter::try_from_env("BACKSTOP_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let builder = fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_target(false);
    // A logger that is installed already (in a test) stays.
    let _ = match format {
        LogFormat::Text => builder
            .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
            .try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
