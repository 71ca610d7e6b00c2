//! What is deployed: the manifest, the unit, the page for Prometheus, and the capabilities that
//! they grant.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use tests::{
    agent::{Agent, AgentOptions, binary},
    cgroup::TestCgroup,
    need,
    process::{Program, find},
    wait,
};

fn config(file: &str) -> String {
    format!("{}/../config/{file}", env!("CARGO_MANIFEST_DIR"))
}

/// Capabilities that the unit grants, as `setpriv` names them.
fn granted() -> Vec<String> {
    let unit = fs::read_to_string(config("systemd/backstop.service")).expect("the unit");
    let line = unit
        .lines()
        .find_map(|line| line.strip_prefix("CapabilityBoundingSet="))
        .expect("the unit names its capabilities");
    line.split_whitespace()
        .map(|name| name.trim_start_matches("CAP_").to_lowercase())
        .collect()
}

/// The agent's command with these capabilities and no others.
fn with(capabilities: &[String], options: &AgentOptions) -> Program {
    let names: Vec<String> = capabilities.iter().map(|name| format!("+{name}")).collect();
    let set = format!("-all,{}", names.join(","));
    options.program().run_by(
        "setpriv",
        &[
            format!("--bounding-set={set}"),
            format!("--inh-caps={set}"),
            "--ambient-caps=-all".to_owned(),
        ],
    )
}

#[test]
fn the_granted_capabilities_suffice() {
    need!("setpriv");
    let group = TestCgroup::new("caps");
    let options = AgentOptions::new(&group);
    let agent = options.start_as(with(&granted(), &options));
    wait::until(
        "the agent says that it has started",
        Duration::from_secs(60),
        || agent.log().contains("started").then_some(()),
    );
    // Real-time priority is part of what is granted.
    assert!(!agent.log().contains("normal priority"), "{}", agent.log());
    assert_eq!(agent.stop().code(), 0);
}

#[test]
fn a_missing_capability_is_named() {
    need!("setpriv");
    let group = TestCgroup::new("caps");
    for missing in ["bpf", "perfmon", "net_admin", "sys_admin"] {
        let rest: Vec<String> = granted()
            .into_iter()
            .filter(|name| name != missing)
            .collect();
        let ended = with(&rest, &AgentOptions::new(&group)).run();
        assert_eq!(ended.code(), 4, "without {missing}: {}", ended.stderr);
        let name = missing.to_uppercase();
        assert!(
            ended.stderr.contains(&format!("missing: {name}")),
            "{}",
            ended.stderr
        );
    }
}

#[test]
fn the_manifest_is_valid() {
    // Beside the Python that `cargo xtask test` has set up.
    let validate = std::env::var_os("BACKSTOP_PYTHON")
        .map(|python| PathBuf::from(python).with_file_name("kubernetes-validate"))
        .filter(|path| path.exists())
        .or_else(|| find("kubernetes-validate"));
    let Some(validate) = validate else {
        tests::skip!("the program kubernetes-validate is not installed (cargo xtask test does it)");
    };
    let ended = Program::new(validate)
        .arg("--strict")
        .arg(config("kubernetes/backstop.yaml"))
        .run();
    assert_eq!(ended.code(), 0, "{}{}", ended.stdout, ended.stderr);
}

#[test]
fn the_unit_is_valid() {
    need!("systemd-analyze");
    let unit = fs::read_to_string(config("systemd/backstop.service")).expect("the unit");
    let here = tempfile::tempdir().expect("a directory");
    let file = here.path().join("backstop.service");
    // The program need not be installed for its unit to be right.
    let text = unit.replace("/usr/local/bin/backstop", &binary().display().to_string());
    assert_ne!(text, unit, "the unit runs /usr/local/bin/backstop");
    fs::write(&file, text).expect("a file");
    let ended = Program::new("systemd-analyze")
        .arg("verify")
        .arg(&file)
        .run();
    let said = format!("{}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code(), 0, "{said}");
    // Remarks about other units of this machine are not ours.
    assert!(!said.contains("backstop.service"), "{said}");
}

#[test]
fn prometheus_accepts_the_page() {
    need!("promtool");
    let group = TestCgroup::new("page");
    let agent = Agent::start(&group, "");
    for word in ["a\"b", "plain"] {
        let inner = group.child(word);
        let ended = Program::new("curl")
            .arg("-s")
            .arg("http://127.0.0.1:9/")
            .in_cgroup(&inner)
            .run();
        assert_eq!(ended.code(), 7);
    }
    wait::until(
        "both workloads have their row",
        Duration::from_secs(60),
        || (agent.rows("127.0.0.1:9").len() == 2).then_some(()),
    );
    let page = agent.get("/metrics").body;
    let here = tempfile::tempdir().expect("a directory");
    let file = here.path().join("page");
    fs::write(&file, &page).expect("a file");
    let promtool = find("promtool").expect("needed above");
    let done = Command::new(promtool)
        .args(["check", "metrics"])
        .stdin(fs::File::open(&file).expect("the file"))
        .output()
        .expect("promtool runs");
    let said = String::from_utf8_lossy(&done.stdout) + String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success() && said.is_empty(), "{said}\n{page}");
}
