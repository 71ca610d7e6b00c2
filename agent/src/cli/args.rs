//! What may be written on the command line.

use std::{net::SocketAddr, path::PathBuf, str::FromStr, time::Duration};

use clap::{Args, Parser, Subcommand};

use crate::control::api::{Mode, parse_for};

/// Timeouts and circuit breakers under programs that nobody can change.
///
/// Exit codes: 0 done, 1 failed, 2 bad usage or configuration, 3 agent not reachable, 4 the kernel
/// lacks what is required.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "backstop",
    version,
    max_term_width = 100,
    arg_required_else_help = true
)]
pub struct Cli {
    /// Unix socket of the agent: `run` answers on it, the other commands ask there.
    #[arg(
        long,
        global = true,
        value_name = "PATH",
        env = "BACKSTOP_SOCKET",
        hide_env_values = true,
        default_value = "/run/backstop/backstop.sock"
    )]
    pub socket: PathBuf,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands of this version.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Run the agent in the foreground until SIGTERM or SIGINT; SIGHUP reloads the configuration.
    Run(RunArgs),
    /// Switch every verdict and timeout off; counting goes on.
    ///
    /// A pause survives a restart of the agent and is shown by status, events and metrics.
    Pause {
        /// End the pause by itself after this time, such as 90s, 15m or 2h [default: until resume]
        #[arg(long = "for", value_name = "DURATION", value_parser = parse_for)]
        duration: Option<Duration>,
    },
    /// Switch verdicts and timeouts on again after a pause.
    Resume,
    /// Show the destinations, worst first; with DESTINATION all there is to know about one.
    Status {
        /// Address or name with port, such as 10.0.0.5:5432, [2001:db8::1]:443 or db.internal:5432
        /// [default: all]
        destination: Option<String>,
        /// Print JSON, with every key always present [default: a table]
        #[arg(long)]
        json: bool,
    },
    /// Show the destinations live, worst first, with what happens a second; q or Ctrl-C ends it.
    ///
    /// Refreshed each second. Where the output is no terminal: one table, with the rates of one second.
    Top,
    /// Print the events that the agent has kept, oldest first. Times are UTC.
    Events {
        /// Go on with new events as they happen, until interrupted [default: end after the kept
        /// ones]
        #[arg(long)]
        follow: bool,
        /// Print failures, runs of good calls and redials, too [default: decisions, refusals and
        /// timeouts]
        #[arg(long)]
        all: bool,
        /// Print one JSON object a line [default: one line of text each]
        #[arg(long)]
        json: bool,
    },
    /// Say which policy is for DESTINATION and why, where each number comes from, and what state
    /// its breakers are in.
    Explain(ExplainArgs),
    /// Open the breaker of DESTINATION by hand: its calls are refused.
    Trip(ForcedArgs),
    /// Hold the breaker of DESTINATION closed by hand: its calls pass, whatever fails.
    HoldClosed(ForcedArgs),
    /// Close the breaker of DESTINATION, clear its window and the growth of its cooldown, and take back
    /// what was ordered for it in the same words; says what is left.
    Reset {
        /// Whose.
        #[command(flatten)]
        target: Target,
    },
    /// Check a configuration file and report every problem in it.
    Check {
        /// The file, in TOML
        file: PathBuf,
    },
    /// Say whether this node is really protected, what stands in the way, and what to do about it.
    ///
    /// Asks the agent; without one it looks at what `run` would need, which loads the programs for a moment
    /// and attaches nothing. Exit codes: 0 protected (perhaps with warnings), 1 a problem because of which it
    /// is not, 3 no agent answers, 4 the kernel lacks what is required.
    Doctor {
        /// Print JSON, with every key always present [default: text]
        #[arg(long)]
        json: bool,
    },
    /// Say what a configuration would have done to calls that were recorded.
    ///
    /// EVENTS are lines of `backstop events --all --json`. Their failures and runs of good calls are
    /// fed through the breakers again, on a virtual clock; printed are the changes of state and, for
    /// each destination, how many of its calls would have been refused. What failed then fails here:
    /// timeouts are not tried out. Needs no agent.
    Replay(ReplayArgs),
}

/// What `run` is told.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Configuration file, in TOML [default: the built-in one, see --print-config]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Directory of a v2 cgroup whose processes are watched, with all below it; may be given more
    /// than once [default: the root of the v2 mount]
    #[arg(long = "cgroup", value_name = "PATH")]
    pub cgroups: Vec<PathBuf>,
    /// What to do with verdicts; wins over the file [default: that of the file, else enforce]
    #[arg(long, value_enum)]
    pub mode: Option<Mode>,
    /// Address of /metrics, /healthz and /readyz, or none; port 0 takes a free one
    #[arg(long, value_name = "ADDR:PORT|none", default_value = "127.0.0.1:9469")]
    pub listen: Listen,
    /// Directory for what survives a restart: pause, orders by hand, breakers, names
    #[arg(long, value_name = "DIR", default_value = "/var/lib/backstop")]
    pub state_dir: PathBuf,
    /// Take over from the agent that is live on the socket, without a gap: it ends once this one
    /// enforces [default: refuse to start beside it]
    #[arg(long)]
    pub takeover: bool,
    /// Print the configuration that would be used, and end
    #[arg(long)]
    pub print_config: bool,
    /// The common --socket.
    #[arg(skip)]
    pub socket: PathBuf,
}

/// What `replay` is told.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// File with events, one JSON object a line; - is standard input
    pub events: PathBuf,
    /// Configuration file to try, in TOML
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
    /// Print JSON, with every key always present [default: text]
    #[arg(long)]
    pub json: bool,
}

/// What `explain` is about.
#[derive(Clone, Debug, Args)]
pub struct ExplainArgs {
    /// Address or name with port, such as 10.0.0.5:5432 or db.internal:5432; it need not have been seen
    /// yet
    pub destination: String,
    /// As this process calls it, by its id where this command runs [default: any caller, without
    /// policies that name workloads]
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "cgroup")]
    pub pid: Option<u32>,
    /// As the processes of this control group call it: its directory, or a workload as `status`
    /// shows it [default: as for --pid]
    #[arg(long, value_name = "PATH")]
    pub cgroup: Option<PathBuf>,
    /// Print JSON, with every key always present [default: text]
    #[arg(long)]
    pub json: bool,
}

/// Whose breakers a manual command is about.
#[derive(Clone, Debug, Args)]
pub struct Target {
    /// Address or name with port, such as 10.0.0.5:5432 or db.internal:5432; it need not have been seen
    /// yet
    pub destination: String,
    /// Only for this workload: a cgroup path below the v2 mount, without leading slash
    /// [default: all]
    #[arg(long, value_name = "W")]
    pub workload: Option<String>,
}

/// What `trip` and `hold-closed` are told.
#[derive(Clone, Debug, Args)]
pub struct ForcedArgs {
    /// Whose.
    #[command(flatten)]
    pub target: Target,
    /// How long it holds, such as 90s, 15m or 2h
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_for, default_value = "10m")]
    pub duration: Duration,
}

/// Where the TCP listener is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listen {
    /// Nowhere.
    None,
    /// On this address.
    Address(SocketAddr),
}

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::None);
        }
        text.parse().map(Self::Address).map_err(|_| {
            "want an IP address and a port, such as 127.0.0.1:9469 or [::1]:0, or \"none\""
                .to_owned()
        })
    }
}

impl std::fmt::Display for Listen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Address(address) => address.fmt(f),
        }
    }
}
