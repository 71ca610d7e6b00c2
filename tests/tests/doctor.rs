//! `backstop doctor`: whether a node is really protected, with an agent and without one.

use rustix::process::Signal;
use serde_json::{Value, json};
use tests::{
    agent::{Agent, AgentOptions, Home, binary},
    attached,
    cgroup::TestCgroup,
    foreign, need,
    process::{Finished, Program},
    wait,
};

const HOOKS: [&str; 6] = [
    "connect4",
    "connect6",
    "sock_ops",
    "sock_release",
    "egress",
    "ingress",
];

/// What `doctor --json` says, with its exit code.
fn doctor(agent: &Agent) -> (i32, Value) {
    parsed(agent.command(&["doctor", "--json"]))
}

fn parsed(finished: Finished) -> (i32, Value) {
    let json = serde_json::from_str(&finished.stdout).unwrap_or_else(|e| panic!("{e}: {finished}"));
    (finished.code(), json)
}

/// The checks of a name: status and text.
fn checks(report: &Value, name: &str) -> Vec<(String, String)> {
    let all = report["checks"].as_array().expect("a list");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    all.iter()
        .filter(|check| check["name"] == name)
        .map(|check| (text(&check["status"]), text(&check["what"])))
        .collect()
}

/// The one check of a name.
#[track_caller]
fn check(report: &Value, name: &str) -> (String, String) {
    let mut found = checks(report, name);
    assert_eq!(found.len(), 1, "{name}: {report:#}");
    found.remove(0)
}

/// One hook of a group.
fn hook<'a>(report: &'a Value, group: &TestCgroup, name: &str) -> &'a Value {
    let path = group.path().to_str().expect("ASCII");
    let all = report["hooks"].as_array().expect("a list");
    all.iter()
        .find(|hook| hook["hook"] == name && hook["cgroup"] == path)
        .unwrap_or_else(|| panic!("{name} of {path}: {report:#}"))
}

/// The others on a hook of a group, but for those that this machine has outside of `within`.
fn others(report: &Value, group: &TestCgroup, name: &str, within: &TestCgroup) -> Vec<Value> {
    let all = hook(report, group, name)["others"]
        .as_array()
        .expect("a list");
    let is_ours = |other: &&Value| {
        other["cgroup"]
            .as_str()
            .expect("a path")
            .starts_with(path(within))
    };
    all.iter().filter(is_ours).cloned().collect()
}

/// The checks of a name that are about this group.
fn about(report: &Value, name: &str, group: &TestCgroup) -> Vec<(String, String)> {
    let mut found = checks(report, name);
    found.retain(|(_, what)| what.contains(path(group)));
    found
}

fn path(group: &TestCgroup) -> &str {
    group.path().to_str().expect("ASCII")
}

#[test]
fn all_is_well() {
    let group = TestCgroup::new("well");
    let agent = Agent::start(&group, "");
    let (code, report) = doctor(&agent);
    assert_eq!((code, &report["ok"]), (0, &json!(true)), "{report:#}");
    assert_eq!(report["agent"]["pid"], agent.pid());
    assert_eq!(report["agent"]["mode"], "enforce");
    assert_eq!(report["agent"]["cgroups"], json!([path(&group)]));
    for name in HOOKS {
        let hook = hook(&report, &group, name);
        assert_eq!(hook["attached"], true, "{hook}");
        assert_eq!(
            others(&report, &group, name, &group),
            [Value::Null; 0],
            "{hook}"
        );
        let is_tried = ["connect4", "connect6", "sock_ops"].contains(&name);
        assert_eq!(hook["verified_ms_ago"].is_u64(), is_tried, "{hook}");
    }
    for name in [
        "mode",
        "event_thread",
        "self_test",
        "hooks",
        "state_dir",
        "sockets",
        "rows",
    ] {
        assert_eq!(check(&report, name).0, "ok", "{report:#}");
    }
    let text = agent.command(&["doctor"]).good();
    let first = text.lines().next().expect("a line");
    assert!(first.contains(": this node is protected"), "{text}");
    assert!(
        text.contains("\n  connect4      attached, proven "),
        "{text}"
    );
    let over_http = agent.request("GET", "/v1/doctor");
    assert_eq!(over_http.status, 200);
    assert_eq!(agent.request("GET", "/v1/doctor?x=1").status, 400);
    assert_eq!(agent.get("/v1/doctor").status, 404, "not over TCP");
}

#[test]
fn a_pause_protects_nobody() {
    let group = TestCgroup::new("paused");
    let agent = Agent::start(&group, "");
    agent.command(&["pause"]).good();
    let (code, report) = doctor(&agent);
    assert_eq!((code, &report["ok"]), (1, &json!(false)));
    let (status, what) = check(&report, "mode");
    assert!(status == "fail" && what.contains("Paused since"), "{what}");
    assert_eq!(report["checks"][0]["name"], "mode", "problems first");
    assert_eq!(report["checks"][0]["do"], "backstop resume");
    let text = agent.command(&["doctor"]);
    assert_eq!(text.code(), 1);
    assert!(text.stdout.contains("NOT PROTECTED, 1 problem"), "{text}");
    agent.command(&["resume"]).good();
    assert_eq!(doctor(&agent).0, 0);
}

#[test]
fn observe_mode_is_no_problem_and_is_said() {
    let group = TestCgroup::new("observed");
    let agent = Agent::start(&group, "mode = \"observe\"\n");
    let (code, report) = doctor(&agent);
    assert_eq!(code, 0, "{report:#}");
    assert_eq!(check(&report, "mode").0, "warn");
    for name in ["connect4", "connect6", "sock_ops"] {
        assert!(
            hook(&report, &group, name)["verified_ms_ago"].is_u64(),
            "{report:#}"
        );
    }
}

/// No agent, one that was killed, one that is stopped: exit code 3, and what the machine has is said.
#[test]
fn without_an_agent() {
    let group = TestCgroup::new("alone");
    let (home, directory) = (Home::new(), tempfile::tempdir().expect("a directory"));
    let ask = |socket: &std::path::Path| {
        let program = Program::new(binary()).arg("--socket").arg(socket);
        parsed(program.args(["doctor", "--json"]).run())
    };
    let missing = |(code, report): (i32, Value), said: &str| {
        assert_eq!(code, 3, "{report:#}");
        assert_eq!(
            (&report["ok"], &report["agent"]),
            (&json!(false), &Value::Null)
        );
        assert_eq!(report["hooks"], json!([]));
        let (status, what) = check(&report, "agent");
        assert!(status == "fail" && what.contains(said), "{what}");
        for name in ["kernel", "capabilities", "cgroup_v2", "programs", "tick"] {
            assert_eq!(check(&report, name).0, "ok", "{report:#}");
        }
    };
    missing(
        ask(&directory.path().join("none.sock")),
        "No agent answers on",
    );
    let agent = AgentOptions::new(&group).home(&home).start();
    agent.signal(Signal::STOP);
    missing(ask(&home.socket()), "does not answer");
    agent.signal(Signal::CONT);
    wait::until("the agent to answer again", wait::LONGEST, || {
        (ask(&home.socket()).0 == 0).then_some(())
    });
    agent.kill();
    missing(ask(&home.socket()), "No agent answers on");
}

/// Where `run` ends with 4, so does `doctor`, with the same words.
#[test]
fn a_machine_that_lacks_something() {
    need!("unshare");
    let group = TestCgroup::new("lacks");
    let within = |args: &[&str]| {
        Program::new("unshare")
            .args(["--pid", "--fork"])
            .arg(binary())
            .args(args)
            .arg("--socket")
            .arg(group.path().join("none"))
            .run()
    };
    let run = within(&["run", "--listen", "none", "--cgroup", path(&group)]);
    assert_eq!(run.code(), 4, "{run}");
    let why = run
        .stderr
        .trim()
        .strip_prefix("backstop: ")
        .expect("a reason");
    let (code, report) = parsed(within(&["doctor", "--json"]));
    assert_eq!(code, 4, "{report:#}");
    assert_eq!(
        check(&report, "pid_namespace"),
        ("fail".to_owned(), format!("{why}."))
    );
    assert_eq!(check(&report, "programs").0, "skip");
    assert_eq!(within(&["doctor"]).code(), 4);
}

/// Programs before and behind ours, on the same group and on an outer one.
#[test]
fn programs_of_others() {
    let outer = TestCgroup::new("others");
    let group = outer.child("watched");
    foreign::rename_refusals(&group, libc::EACCES);
    let agent = Agent::start(&group, "");
    let (code, report) = doctor(&agent);
    assert_eq!(code, 0, "{report:#}");
    let found = others(&report, &group, "connect4", &outer);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0]["position"], "before");
    assert_eq!(found[0]["can_change_verdict"], false);
    assert_eq!(found[0]["attach_flags"], json!(["multi"]));
    assert_eq!(about(&report, "other_programs", &outer), []);

    foreign::rename_refusals(&outer, libc::EACCES);
    foreign::rename_refusals(&group, libc::EPERM);
    foreign::take_callbacks(&group);
    // The next self-test may already have found that its refusal was changed.
    let (_, report) = doctor(&agent);
    let found: Vec<_> = others(&report, &group, "connect4", &outer)
        .iter()
        .map(|other| {
            json!([
                other["position"],
                other["cgroup"],
                other["can_change_verdict"]
            ])
        })
        .collect();
    let expected = [
        json!(["before", path(&group), false]),
        json!(["after", path(&group), true]),
        json!(["after", path(&outer), true]),
    ];
    assert_eq!(found, expected);
    assert_eq!(
        others(&report, &group, "connect6", &outer),
        [Value::Null; 0]
    );
    let said = about(&report, "other_programs", &outer);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said.iter().all(|(status, _)| status == "warn"), "{said:?}");
    assert!(
        said.iter().any(|(_, what)| what.starts_with("On sock_ops")),
        "{said:?}"
    );
}

/// A program behind ours that lets everything pass is found by the next self-test.
#[test]
fn a_program_that_undoes_refusals() {
    let group = TestCgroup::new("undone");
    let agent = Agent::start(&group, "");
    foreign::undo_refusals(&group);
    let report = wait::until("the self-test", wait::LONGEST, || {
        let (code, report) = doctor(&agent);
        (code == 1).then_some(report)
    });
    let (status, what) = check(&report, "self_test");
    assert_eq!(status, "fail");
    assert!(
        what.contains("was not refused") && what.contains(path(&group)),
        "{what}"
    );
    let said = about(&report, "other_programs", &group);
    assert!(said.len() == 1 && said[0].0 == "warn", "{said:?}");
    assert_eq!(hook(&report, &group, "connect4")["attached"], true);
}

/// Two agents on one group are told to each other; so are those on an outer and an inner one.
#[test]
fn other_agents() {
    let outer_group = TestCgroup::new("agents");
    let group = outer_group.child("inner");
    let outer = Agent::start(&outer_group, "");
    let (code, report) = doctor(&outer);
    assert_eq!(
        (code, about(&report, "other_agents", &outer_group)),
        (0, vec![])
    );
    let inner = Agent::start(&group, "");
    for (agent, other, place) in [
        (&outer, &inner, "which is inside"),
        (&inner, &outer, "which holds"),
    ] {
        let (code, report) = doctor(agent);
        assert_eq!(code, 0, "{report:#}");
        let said = about(&report, "other_agents", &outer_group);
        assert_eq!(said.len(), 1, "{said:?}");
        assert_eq!(said[0].0, "warn");
        assert!(said[0].1.contains(place), "{said:?}");
        assert!(
            said[0].1.contains(&format!("(process {})", other.pid())),
            "{said:?}"
        );
        let programs = about(&report, "other_programs", &outer_group);
        assert_eq!(programs, [], "they are told as an agent");
    }
    let second = Agent::start(&group, "");
    let (_, report) = doctor(&second);
    let said = about(&report, "other_agents", &outer_group);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(
        said.iter()
            .any(|(_, what)| what.contains(", too: both count")),
        "{said:?}"
    );
}

/// Nothing is watched once the control group is gone; all is well when it is back.
#[test]
fn a_control_group_that_vanishes() {
    let parent = TestCgroup::new("vanishes");
    let group = parent.child("service");
    let agent = Agent::start(&group, "");
    drop(group);
    let report = wait::until("the loss to be noticed", wait::LONGEST, || {
        let (code, report) = doctor(&agent);
        (code == 1).then_some(report)
    });
    let (status, what) = check(&report, "cgroups");
    assert!(
        status == "fail" && what.contains("Nothing is watched"),
        "{what}"
    );
    let group = parent.child("service");
    wait::until("it to be attached again", wait::LONGEST, || {
        (attached::programs(&group) == [1; 4]).then_some(())
    });
    let report = wait::until("the agent to be well again", wait::LONGEST, || {
        let (code, report) = doctor(&agent);
        (code == 0).then_some(report)
    });
    assert_eq!(hook(&report, &group, "connect4")["attached"], true);
}

/// The kernel is asked, and not the agent's memory.
#[test]
fn a_program_that_was_taken_off() {
    let group = TestCgroup::new("taken");
    let agent = Agent::start(&group, "");
    foreign::detach(agent.pid(), &group, foreign::CONNECT4);
    let (code, report) = doctor(&agent);
    assert_eq!(code, 1, "{report:#}");
    let (status, what) = check(&report, "hooks");
    assert_eq!(status, "fail");
    assert!(what.contains("do not hang on connect4 of"), "{what}");
    let taken = hook(&report, &group, "connect4");
    assert_eq!(
        (&taken["attached"], &taken["verified_ms_ago"]),
        (&json!(false), &Value::Null)
    );
    assert_eq!(hook(&report, &group, "connect6")["attached"], true);
}

#[test]
fn a_configuration_that_is_not_in_force() {
    let group = TestCgroup::new("configuration");
    let agent = Agent::start(&group, "mode = \"enforce\"\n");
    let file = agent.home().config();
    assert!(
        check(&doctor(&agent).1, "configuration")
            .1
            .contains(file.to_str().expect("ASCII"))
    );
    agent.home().write_config("mode = \"nonsense\"\n");
    assert_eq!(agent.request("POST", "/v1/reload").status, 400);
    let (code, report) = doctor(&agent);
    let (status, what) = check(&report, "configuration");
    assert_eq!((code, status.as_str()), (0, "warn"), "the old one protects");
    assert!(
        what.contains("nonsense") && what.contains("older configuration"),
        "{what}"
    );
    agent.home().write_config("mode = \"enforce\"\n");
    assert_eq!(agent.request("POST", "/v1/reload").status, 200);
    assert_eq!(check(&doctor(&agent).1, "configuration").0, "ok");
}
