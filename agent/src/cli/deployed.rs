//! What is deployed, compared with what the agent understands: the files under `config/` are not
//! compiled, so that nothing else would notice when they fall behind.

use std::{collections::BTreeSet, path::Path};

use clap::Parser;

use super::{Cli, Command, Listen, RunArgs};

const MANIFEST: &str = include_str!("../../../config/kubernetes/backstop.yaml");
const UNIT: &str = include_str!("../../../config/systemd/backstop.service");
const DEFAULT_CONFIG: &str = include_str!("../../../config/default.toml");

/// The lines of a YAML list below the line `key`, without their comments.
fn list(key: &str) -> Vec<&'static str> {
    let mut lines = MANIFEST.lines().skip_while(|line| line.trim() != key);
    let indent = |line: &str| line.len() - line.trim_start().len();
    let own = indent(lines.next().expect(key));
    lines
        .take_while(|line| indent(line) > own)
        .filter_map(|line| line.trim().strip_prefix("- "))
        .collect()
}

fn run_args(line: &[&str]) -> RunArgs {
    let cli = Cli::try_parse_from([&["backstop"], line].concat()).unwrap();
    match cli.command {
        Command::Run(args) => args,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_config_map_is_the_built_in_configuration() {
    let text: String = MANIFEST
        .lines()
        .skip_while(|line| *line != "  backstop.toml: |")
        .skip(1)
        .take_while(|line| *line != "---")
        .map(|line| format!("{}\n", line.strip_prefix("    ").unwrap_or(line)))
        .collect();
    assert_eq!(
        text, DEFAULT_CONFIG,
        "copy config/default.toml into the ConfigMap of config/kubernetes/backstop.yaml"
    );
}

#[test]
fn the_pod_runs_this_version_with_flags_that_exist() {
    let image = concat!("image: backstop:", env!("CARGO_PKG_VERSION"));
    assert!(MANIFEST.contains(image), "want {image}");
    let args = run_args(&list("args:"));
    assert_eq!(
        args.config.as_deref(),
        Some(Path::new("/etc/backstop/backstop.toml"))
    );
    let Listen::Address(address) = args.listen else {
        panic!("the probes need a listener");
    };
    let probes = MANIFEST.matches("httpGet:").count();
    assert_eq!(probes, 3);
    assert_eq!(
        MANIFEST.matches(&format!("host: {}", address.ip())).count(),
        probes
    );
    assert_eq!(
        MANIFEST
            .matches(&format!("port: {}", address.port()))
            .count(),
        probes
    );
    let defaults = run_args(&["run"]);
    for directory in [defaults.state_dir.as_path(), Path::new("/run/backstop")] {
        let mount = format!("mountPath: {}\n", directory.display());
        assert!(MANIFEST.contains(&mount), "{mount}");
    }
}

#[test]
fn the_service_runs_it_as_the_pod_does() {
    let value = |key: &str| {
        let mut lines = UNIT.lines().filter_map(|line| line.strip_prefix(key));
        let value = lines.next().unwrap_or_else(|| panic!("no {key}"));
        assert!(lines.next().is_none(), "two of {key}");
        value
    };
    let command: Vec<_> = value("ExecStart=").split(' ').collect();
    assert_eq!(command[1..], ["run", "$BACKSTOP_ARGS"]);
    assert_eq!(value("Environment="), "BACKSTOP_ARGS=");
    let defaults = run_args(&["run"]);
    let state = Path::new("/var/lib").join(value("StateDirectory="));
    assert_eq!(state, defaults.state_dir);
    let bounding = value("CapabilityBoundingSet=").split(' ');
    let bounding: BTreeSet<_> = bounding
        .filter_map(|name| name.strip_prefix("CAP_"))
        .collect();
    let added: BTreeSet<_> = list("add:").into_iter().collect();
    assert_eq!(bounding, added);
}
