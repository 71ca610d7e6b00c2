//! The command line, and whole commands against a server with a fake backend.

mod doctor;
mod texts;
mod told;
mod top;

use clap::CommandFactory;

use super::*;
use crate::control::{
    api::{Explanation, Mode, StatusEnvelope},
    server::{
        Limits,
        fake::{Fake, failure, started},
        tests::serve_fake,
    },
};

#[test]
fn the_command_line_is_the_one_of_the_contract() {
    Cli::command().debug_assert();
    let names: Vec<_> = Cli::command()
        .get_subcommands()
        .map(|c| c.get_name().to_owned())
        .collect();
    assert_eq!(
        names,
        [
            "run",
            "pause",
            "resume",
            "status",
            "top",
            "events",
            "explain",
            "trip",
            "hold-closed",
            "reset",
            "check",
            "doctor",
            "replay"
        ]
    );
    let line = "backstop run --config c --cgroup /a --cgroup /b --mode observe --socket /s --listen \
                none --state-dir /d --takeover --print-config";
    let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
    assert_eq!(cli.socket, Path::new("/s"));
    let Command::Run(args) = cli.command else {
        panic!("{line}");
    };
    assert_eq!(args.cgroups.len(), 2);
    assert_eq!(args.mode, Some(Mode::Observe));
    assert_eq!(args.listen, Listen::None);
    assert!(args.takeover && args.print_config);
    for bad in [
        "backstop",
        "backstop top 10.0.0.5:5432",
        "backstop run --mode off",
        "backstop run --listen localhost:1",
        "backstop run --listen 127.0.0.1",
        "backstop trip",
        "backstop trip a:1 --for 0s",
        "backstop pause --for soon",
        "backstop reset a:1 --for 1s",
        "backstop check",
        "backstop explain",
        "backstop explain a:1 --pid 0",
        "backstop explain a:1 --pid x",
        "backstop explain a:1 --pid 1 --cgroup /",
    ] {
        let error = Cli::try_parse_from(bad.split_whitespace()).unwrap_err();
        assert_eq!(error.exit_code(), 2, "{bad}");
    }
    let defaults = Cli::try_parse_from(["backstop", "trip", "a:1"]).unwrap();
    let Command::Trip(args) = defaults.command else {
        panic!("trip");
    };
    assert_eq!(args.duration, crate::control::api::MANUAL_DEFAULT);
}

/// Every option of every command says what happens without it.
#[test]
fn every_option_says_its_default() {
    for command in Cli::command().get_subcommands() {
        for argument in command.get_arguments().filter(|a| !a.is_positional()) {
            let help = argument
                .get_help()
                .map(ToString::to_string)
                .unwrap_or_default();
            let said = help.contains("[default:") || !argument.get_default_values().is_empty();
            let none_needed = ["print_config"].contains(&argument.get_id().as_str())
                || argument.is_required_set();
            assert!(
                said || none_needed,
                "{} {}",
                command.get_name(),
                argument.get_id()
            );
        }
    }
}

#[test]
fn run_help() {
    let mut command = Cli::command();
    command.build();
    let run = command.find_subcommand_mut("run").unwrap();
    let help = run.clone().term_width(100).render_help().to_string();
    let expected = "\
Run the agent in the foreground until SIGTERM or SIGINT; SIGHUP reloads the configuration

Usage: backstop run [OPTIONS]

Options:
      --config <FILE>            Configuration file, in TOML [default: the built-in one, see
                                 --print-config]
      --socket <PATH>            Unix socket of the agent: `run` answers on it, the other commands
                                 ask there [env: BACKSTOP_SOCKET] [default:
                                 /run/backstop/backstop.sock]
      --cgroup <PATH>            Directory of a v2 cgroup whose processes are watched, with all
                                 below it; may be given more than once [default: the root of the v2
                                 mount]
      --mode <MODE>              What to do with verdicts; wins over the file [default: that of the
                                 file, else enforce] [possible values: enforce, observe]
      --listen <ADDR:PORT|none>  Address of /metrics, /healthz and /readyz, or none; port 0 takes a
                                 free one [default: 127.0.0.1:9469]
      --state-dir <DIR>          Directory for what survives a restart: pause, orders by hand,
                                 breakers, names [default: /var/lib/backstop]
      --takeover                 Take over from the agent that is live on the socket, without a gap:
                                 it ends once this one enforces [default: refuse to start beside it]
      --print-config             Print the configuration that would be used, and end
  -h, --help                     Print help (see more with '--help')
";
    assert_eq!(help, expected);
}

/// Runs a command line as the binary would; returns the exit code and what it printed.
async fn command(client: &Client, line: &str) -> (u8, String) {
    let (client, line) = (client.clone(), format!("backstop {line}"));
    tokio::task::spawn_blocking(move || {
        let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
        let mut printed = Vec::new();
        let code = ask(&client, cli.command, &mut Output::to(&mut printed));
        (code, String::from_utf8(printed).unwrap())
    })
    .await
    .unwrap()
}

#[tokio::test]
async fn commands_against_an_agent() {
    let backend = Fake::new();
    backend
        .kept
        .lock()
        .unwrap()
        .extend([started("one"), failure()]);
    let served = serve_fake(&backend, Limits::default());
    let client = &served.client;

    let (code, text) = command(client, "status").await;
    assert_eq!(code, 0);
    assert!(
        text.contains("DESTINATION") && text.contains("10.0.0.9:80"),
        "{text}"
    );
    let (code, text) = command(client, "status --json").await;
    assert_eq!(code, 0);
    let json: StatusEnvelope = serde_json::from_str(&text).unwrap();
    assert_eq!(json.destinations.len(), 2);
    let (code, text) = command(client, "status 10.0.0.5:5432").await;
    assert!(
        code == 0 && text.contains("  policy       default"),
        "{text}"
    );
    assert_eq!(
        command(client, "status 10.1.1.1:1").await,
        (1, String::new())
    );
    let (code, text) = command(client, "status 10.1.1.1:1 --json").await;
    assert!(
        code == 1 && text.ends_with("\"destinations\":[]}\n"),
        "{text}"
    );
    assert_eq!(command(client, "status nonsense").await, (2, String::new()));

    let (code, text) = command(client, "explain 10.0.0.5:5432").await;
    assert_eq!(code, 0);
    assert!(text.contains("  applies   orders-db  "), "{text}");
    let (code, text) = command(client, "explain 10.0.0.5:5432 --json").await;
    let json: Explanation = serde_json::from_str(&text).unwrap();
    assert_eq!((code, json.policy.as_str()), (0, "orders-db"));
    assert!(text.ends_with("}\n"), "{text}");
    let none = "explain a:1 --cgroup /no/such/group";
    assert_eq!(command(client, none).await, (1, String::new()));

    let (code, text) = command(client, "events").await;
    assert_eq!(
        (code, text.as_str()),
        (0, "01-01 00:00:00.000  config        started: one\n")
    );
    let (code, text) = command(client, "events --all --json").await;
    assert_eq!((code, text.lines().count()), (0, 2));

    let (code, text) = command(client, "trip [2001:db8::1]:443 --workload a/b --for 90s").await;
    assert_eq!(code, 0);
    assert_eq!(
        text,
        "[2001:db8::1]:443 is refused for 1m30s, for workload a/b: 2 rows now, and those still to come\n"
    );
    let (_, text) = command(client, "trip [2001:db8::1]:443 --for 365d").await;
    assert!(text.contains(" is refused for 365d, "), "{text}");
    let (code, _) = command(client, "trip [2001:db8::1]:443 --workload a/b --for 90s").await;
    assert_eq!(code, 0);
    let asked = backend.asked().last().cloned();
    assert_eq!(
        asked.as_deref(),
        Some("[2001:db8::1]:443 Some(\"a/b\") Trip(90s)")
    );
    assert_eq!(command(client, "trip 10.0.0.53:53").await.0, 1);
    assert_eq!(command(client, "hold-closed a:1 --for 366days").await.0, 0);
    let (_, text) = command(client, "reset a:1").await;
    assert_eq!(
        text,
        "a:1 is reset, for all workloads: 1 order taken back, 2 rows closed\n"
    );
    let (_, text) = command(client, "pause --for 15m").await;
    assert_eq!(text, "paused for 15m; `backstop resume` ends it sooner\n");
    assert_eq!(command(client, "resume").await.0, 0);
}

/// What cannot be meant is bad usage, whether or not an agent is there to say so.
#[tokio::test]
async fn bad_usage_needs_no_agent() {
    let client = Client::new(Path::new("/nonexistent/b.sock"));
    for line in [
        "trip nonsense",
        "trip 10.0.0.5",
        "hold-closed 10.0.0.0/8:80",
        "reset 10.0.0.5:0",
        "status nonsense",
        "status nonsense --json",
        "explain nonsense",
        "explain 10.0.0.5 --json",
        "trip a:1 --workload /a",
        "hold-closed a:1 --workload a/",
        "reset a:1 --workload a/../b",
    ] {
        assert_eq!(command(&client, line).await, (2, String::new()), "{line}");
    }
    let error = Cli::try_parse_from(["backstop", "pause", "--for", "abc"]).unwrap_err();
    let message = error.to_string();
    assert!(
        message.contains("'--for <DURATION>': \"abc\" is no duration"),
        "{message}"
    );
}

#[tokio::test]
async fn without_an_agent_the_exit_code_is_3() {
    let client = Client::new(Path::new("/nonexistent/b.sock"));
    for line in [
        "status",
        "events --follow",
        "explain a:1",
        "trip a:1",
        "reset a:1",
        "pause",
        "resume",
    ] {
        assert_eq!(command(&client, line).await, (3, String::new()), "{line}");
    }
}

/// What `backstop status | head -0` writes to.
struct Broken;

impl Write for Broken {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn a_reader_that_has_seen_enough_is_no_failure() {
    let backend = Fake::new();
    backend.kept.lock().unwrap().push(started("one"));
    let served = serve_fake(&backend, Limits::default());
    for line in [
        "backstop status",
        "backstop events --follow",
        "backstop resume",
    ] {
        let client = served.client.clone();
        let code = tokio::task::spawn_blocking(move || {
            let cli = Cli::try_parse_from(line.split_whitespace()).unwrap();
            ask(&client, cli.command, &mut Output::to(Broken))
        });
        assert_eq!(code.await.unwrap(), 0, "{line}");
    }
}
