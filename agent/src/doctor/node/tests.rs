use std::collections::BTreeSet;

use super::*;
use crate::control::api::CheckStatus;

fn group(path: &str, is_attached: bool, verified_ms: Option<u64>) -> hooks::Watched {
    hooks::Watched {
        path: path.into(),
        is_attached,
        verified_ms,
        verified6_ms: verified_ms,
    }
}

fn well() -> Facts {
    Facts {
        mode: Mode::Enforce,
        paused: None,
        uptime_ms: 60_000,
        health: Health {
            alive: true,
            ready: true,
            reason: "enforcement is proven".to_owned(),
        },
        heartbeat_ms: 5,
        is_prompt: true,
        watched: vec![group("/c/a", true, Some(4_000))],
        own: Vec::new(),
        mount: "/c".into(),
        config_file: None,
        config_problem: None,
        config_warnings: Vec::new(),
        unresolved: Vec::new(),
        state_dir: "/var/lib/backstop".into(),
        lost_events: 0,
        rows: DoctorRows {
            in_use: 5,
            most: 50_000,
            histograms: 5,
            histograms_most: 4_096,
            ..DoctorRows::default()
        },
        adopted: 0,
        can_settle: true,
        can_adopt: true,
        ends_connections: false,
        heir: None,
    }
}

/// The only check that is not well, or none.
fn unwell(facts: &Facts) -> Option<(CheckStatus, String, String)> {
    let bad: Vec<_> = judged(facts)
        .into_iter()
        .filter(|check| check.status != CheckStatus::Ok)
        .collect();
    assert!(bad.len() <= 1, "{bad:#?}");
    let check = bad.into_iter().next()?;
    assert!(check.remedy.is_some(), "{check:?}");
    Some((check.status, check.name, check.what))
}

#[test]
fn all_is_well() {
    assert_eq!(unwell(&well()), None);
}

#[test]
fn each_trouble_is_one_check() {
    use CheckStatus::{Fail, Warn};
    let at = Timestamp::from_unix_ms(0);
    let paused = Paused {
        since: at,
        until: None,
        by: "uid 0".to_owned(),
    };
    let health = |alive, ready| Health {
        alive,
        ready,
        reason: "cgroup /c/a: not refused".to_owned(),
    };
    type Change = Box<dyn Fn(&mut Facts)>;
    let cases: Vec<(CheckStatus, &str, &str, Change)> = vec![
        (
            Fail,
            "mode",
            "Paused since",
            Box::new(move |f| f.paused = Some(paused.clone())),
        ),
        (
            Warn,
            "mode",
            "Observe mode",
            Box::new(|f| f.mode = Mode::Observe),
        ),
        (
            Fail,
            "self_test",
            "Cgroup /c/a: not refused.",
            Box::new(move |f| f.health = health(true, false)),
        ),
        (
            Warn,
            "self_test",
            "No self-test has come through in the last 90 s for /c/a.",
            Box::new(|f| f.watched = vec![group("/c/a", true, Some(90_001))]),
        ),
        (
            Warn,
            "self_test",
            "for /c/a",
            Box::new(|f| f.watched = vec![group("/c/a", true, None)]),
        ),
        (
            Fail,
            "cgroups",
            "Nothing is watched.",
            Box::new(|f| f.watched = vec![group("/c/a", false, None)]),
        ),
        (
            Warn,
            "cgroups",
            "The watched control group /c/b is not there",
            Box::new(|f| f.watched.push(group("/c/b", false, None))),
        ),
        (
            Warn,
            "configuration",
            "node.toml:3: no",
            Box::new(move |f| f.config_problem = Some((at, "node.toml:3: no".to_owned()))),
        ),
        (
            Warn,
            "configuration",
            "A policy matches nothing.",
            Box::new(|f| f.config_warnings = vec!["a policy matches nothing".to_owned()]),
        ),
        (
            Warn,
            "names",
            "db.internal (no such name, named by policy orders)",
            Box::new(|f| {
                f.unresolved = vec![Unresolved {
                    name: "db.internal".to_owned(),
                    named_by: "policy orders".to_owned(),
                    error: "no such name".to_owned(),
                }];
            }),
        ),
        (
            Warn,
            "rows",
            "7 connects found no row",
            Box::new(|f| f.rows.other_attempts = 7),
        ),
        (
            Warn,
            "rows",
            "3 were given up",
            Box::new(|f| f.rows.evicted = 3),
        ),
        (
            Warn,
            "rows",
            "45000 of 50000",
            Box::new(|f| f.rows.in_use = 45_000),
        ),
        (Warn, "events", "9 events", Box::new(|f| f.lost_events = 9)),
        (
            Warn,
            "priority",
            "no real-time priority",
            Box::new(|f| f.is_prompt = false),
        ),
        (
            Warn,
            "takeover",
            "process 12",
            Box::new(|f| f.heir = Some(12)),
        ),
    ];
    for (status, name, what, change) in cases {
        let mut facts = well();
        change(&mut facts);
        let found = unwell(&facts).unwrap_or_else(|| panic!("{name}: {what}"));
        assert_eq!((found.0, found.1.as_str()), (status, name), "{found:?}");
        assert!(found.2.contains(what), "{found:?}");
    }
    let mut facts = well();
    (facts.health, facts.heartbeat_ms) = (health(false, false), 5_000);
    let names: Vec<_> = judged(&facts)
        .into_iter()
        .filter(|check| check.status == Fail)
        .map(|check| check.name)
        .collect();
    assert_eq!(names, ["event_thread", "self_test"]);
}

#[test]
fn memory_and_its_limit() {
    let memory = |limit| DoctorMemory {
        resident: Some(80 << 20),
        kernel: Some(60 << 20),
        limit,
    };
    assert_eq!(memory_check(&memory(None), None).status, CheckStatus::Ok);
    assert_eq!(
        memory_check(&memory(Some(1000)), Some(899)).status,
        CheckStatus::Ok
    );
    assert_eq!(
        memory_check(&memory(Some(1000)), Some(900)).status,
        CheckStatus::Warn
    );
}

#[test]
fn where_state_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(state_dir(directory.path()).status, CheckStatus::Ok);
    assert_eq!(
        fs::read_dir(directory.path()).unwrap().count(),
        0,
        "nothing stays"
    );
    let missing = directory.path().join("gone");
    assert_eq!(state_dir(&missing).status, CheckStatus::Warn);
}

/// The whole of it, without any watched group: nothing here needs root.
#[test]
fn a_report_is_sorted_and_whole() {
    let directory = tempfile::tempdir().unwrap();
    let facts = Facts {
        watched: Vec::new(),
        state_dir: directory.path().to_owned(),
        ..well()
    };
    let report = report(&facts);
    assert_eq!(report.ok, is_well(&report.checks));
    let mut sorted = report.checks.clone();
    worst_first(&mut sorted);
    assert_eq!(report.checks, sorted);
    let json = serde_json::to_value(&report).unwrap();
    for check in json["checks"].as_array().unwrap() {
        let keys: Vec<_> = check
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(keys.len(), 4, "{keys:?}");
        assert!(check["what"].as_str().unwrap().ends_with('.'), "{check}");
        let is_bad = ["warn", "fail"].contains(&check["status"].as_str().unwrap());
        assert_eq!(check["do"].is_string(), is_bad, "{check}");
    }
}

/// What a check is about is said in docs/OPERATING.md.
#[test]
fn every_check_is_explained() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/OPERATING.md");
    let text = fs::read_to_string(path).unwrap();
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("| Check |"));
    let explained: BTreeSet<&str> = rows
        .take_while(|line| line.starts_with('|'))
        .filter_map(|line| line.split('|').nth(1))
        .flat_map(|names| names.split('`').skip(1).step_by(2))
        .collect();
    let directory = tempfile::tempdir().unwrap();
    let facts = Facts {
        heir: Some(12),
        state_dir: directory.path().to_owned(),
        ..well()
    };
    let report = report(&facts);
    let mut said: BTreeSet<&str> = report
        .checks
        .iter()
        .map(|check| check.name.as_str())
        .collect();
    // Where others are, and without an agent.
    said.extend([
        "agent",
        "hooks",
        "other_agents",
        "pid_namespace",
        "cgroup_v2",
        "programs",
    ]);
    assert_eq!(explained, said);
}
