//! What an engineer on call is told: of what is missing, of what waits, of what holds for a row.

use std::{fs, net::SocketAddr, time::Duration};

use serde_json::Value;
use tests::{
    agent::{Agent, AgentOptions, Home, binary},
    cgroup::TestCgroup,
    dialer::Dialer,
    names::EtcFiles,
    net::{Namespace, TestNet},
    process::Program,
    server::Server,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const SOON: Duration = wait::LONGEST;

/// What is in force stays; but it is said, as the next start would fail.
#[test]
fn a_configuration_file_that_is_gone_is_said() {
    let group = TestCgroup::new("gone");
    let agent = Agent::start(&group, "mode = \"observe\"\n");
    let mut events = agent.follow(&[]);
    fs::remove_file(agent.home().config()).expect("remove the configuration");
    let gone = events.wait("it is gone", |event| event["action"] == "missing");
    let message = gone["message"].as_str().expect("text");
    assert!(
        message.contains("is gone") && message.contains("No such file"),
        "{gone:#}"
    );
    wait::until("a log line", SOON, || {
        let log = agent.log();
        log.contains("WARN the configuration file is gone")
            .then_some(())
    });
    assert_eq!(agent.status()["mode"], "observe");
    agent.home().write_config("mode = \"enforce\"\n");
    events.wait("it is back", |event| event["action"] == "reloaded");
    assert_eq!(agent.status()["mode"], "enforce");
}

/// A typo in a policy's name: the policy never holds, and that is said at the start, in `status`, and by
/// `explain`; and when it is over.
#[test]
fn a_name_that_cannot_be_looked_up_is_said() {
    let (group, etc) = (
        TestCgroup::new("typo"),
        EtcFiles::new("10.77.0.2 db.internal\n", None),
    );
    let config =
        "[[policy]]\nname = \"absent\"\ndestinations = [\"typo.invalid:1\", \"db.internal\"]\n";
    let options = AgentOptions::new(&group).config(config);
    let agent = options.start_as(etc.program(options.program()));
    let mut events = agent.follow(&[]);
    let missing = events.wait("it is missing", |event| event["action"] == "missing");
    let message = missing["message"].as_str().expect("text");
    assert!(
        message.contains("policy absent names typo.invalid, which cannot be looked up"),
        "{missing:#}"
    );
    let unresolved = &agent.status()["unresolved"];
    assert_eq!(unresolved[0]["name"], "typo.invalid", "{unresolved:#}");
    assert_eq!(unresolved[0]["named_by"], "policy absent", "{unresolved:#}");
    assert_eq!(unresolved[1], Value::Null, "{unresolved:#}");
    let text = agent.command(&["status"]).good();
    assert!(text.contains("policy absent names typo.invalid"), "{text}");
    let explained = agent.command(&["explain", "typo.invalid:1"]);
    assert_eq!(explained.code(), 1, "{explained}");
    let said = "policy absent names it, but it cannot be looked up";
    assert!(explained.stderr.contains(said), "{explained}");

    etc.hosts("10.77.0.2 db.internal\n10.77.0.3 typo.invalid\n");
    // A reload looks names up at once.
    agent
        .home()
        .write_config(&format!("{config}# looked up again\n"));
    events.wait("it is there", |event| event["action"] == "found");
    assert_eq!(agent.status()["unresolved"], Value::Array(Vec::new()));
}

/// Of several names the one that was asked for, and then the others.
#[test]
fn a_row_is_shown_with_the_name_that_was_asked_for() {
    let (net, group) = (TestNet::new(), TestCgroup::new("asked"));
    let etc = EtcFiles::new("10.77.0.2 db.internal svc.internal\n", None);
    let config = "[[policy]]\nname = \"p\"\ndestinations = [\"db.internal\", \"svc.internal\"]\n";
    let options = AgentOptions::new(&group).config(config);
    let agent = options.start_as(etc.program(options.program()));
    let _server = Server::start(&net.server, TO);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, 0);
    // (A row that the kernel has just made is known to the agent a moment later.)
    agent.wait_row(DESTINATION, "its names", |row| {
        row["names"]
            .as_array()
            .is_some_and(|names| names.len() == 2)
    });
    for (asked, other) in [
        ("db.internal", "svc.internal"),
        ("svc.internal", "db.internal"),
    ] {
        let to = format!("{asked}:8080");
        let status = agent.command(&["status", &to, "--json"]).good();
        let status: Value = serde_json::from_str(&status).expect("JSON");
        let row = &status["destinations"][0];
        assert_eq!(row["name"], asked, "{row:#}");
        let mut names: Vec<_> = row["names"].as_array().expect("names").clone();
        names.sort_by_key(ToString::to_string);
        assert_eq!(names, ["db.internal", "svc.internal"]);
        let text = agent.command(&["status", &to]).good();
        assert!(text.contains(&format!("{asked}, {other}")), "{text}");
    }
}

/// The row of all destinations without one of their own, as the end of the table names it.
#[test]
fn the_other_row_has_details() {
    let (namespace, group) = (Namespace::new("other"), TestCgroup::new("other"));
    let config = "[agent]\nmax_destinations = 16\n[defaults]\nbreaker = \"off\"\n";
    let agent = Agent::start_for_loops(&group, config);
    let none = agent.command(&["status", "other"]);
    assert_eq!(none.code(), 1, "{none}");
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    wait::until("calls that find no row", SOON, || {
        dialer.sweep("127.1.0.0".parse().expect("an address"), 80, 200);
        agent.rows("other").first().cloned()
    });
    let text = agent.command(&["status", "other"]).good();
    assert!(
        text.contains("\nother  ") && text.contains("  workload     other"),
        "{text}"
    );
}

/// Half-open for want of a call, not of an answer.
#[test]
fn a_breaker_that_waits_for_a_call_says_so() {
    let (net, group) = (TestNet::new(), TestCgroup::new("waits"));
    let agent = Agent::start_for_loops(&group, "");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(DESTINATION, "open");
    let _server = Server::start(&net.server, TO);
    let row = agent.wait_row(DESTINATION, "nobody calls", |row| {
        row["waits_for_call"] == true
    });
    assert_eq!(
        (&row["state"], &row["probe"]),
        (&"half_open".into(), &"free".into())
    );
    let text = agent.command(&["status"]).good();
    assert!(text.contains("half-open, waiting"), "{text}");
    let text = agent.command(&["status", DESTINATION]).good();
    assert!(
        text.contains("waiting for a call: the next connect is a probe"),
        "{text}"
    );
    assert_eq!(dialer.connect(TO).errno, 0);
    agent.wait_row(DESTINATION, "somebody called", |row| {
        row["waits_for_call"] == false
    });
}

/// What a policy does to the calls of a row, where it has done it.
#[test]
fn what_is_done_to_retries_is_shown() {
    let (net, group) = (TestNet::new(), TestCgroup::new("done"));
    let config = "[defaults]\nbreaker = \"off\"\n\
                  [defaults.retry]\nlimit = 3\nbackoff = { base = \"20ms\", max = \"200ms\" }\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    // (What comes much later than the attempt before is no retry: a busy machine may need more attempts.)
    let row = wait::until("a limit", SOON, || {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
        let row = agent.row(DESTINATION);
        (row["rejected"]["retry_limit"].as_u64() > Some(0)).then_some(row)
    });
    assert_eq!(row["breaker_off"], true, "{row:#}");
    let policy = &row["retry_policy"];
    assert_eq!(
        (&policy["limit"], &policy["backoff_base_ms"]),
        (&3.into(), &20.into())
    );
    for command in ["status", "explain"] {
        let text = agent.command(&[command, DESTINATION]).good();
        for said in [
            "10.77.0.2:8080  breaker off",
            "attempts an operation; at most 3 an operation, budget 10 %",
            "held up to 20ms, doubled up to 200ms",
        ] {
            assert!(text.contains(said), "{said}: {text}");
        }
    }
    let text = agent.command(&["status"]).good();
    assert!(text.contains("breaker off"), "{text}");
}

/// `resume` says what it has ended, and so does a pause whose time is over.
#[test]
fn the_end_of_a_pause_is_told_as_it_was() {
    let group = TestCgroup::new("resume");
    let agent = Agent::start(&group, "");
    let mut events = agent.follow(&[]);
    let text = agent.command(&["resume"]).good();
    assert!(text.contains("nothing was paused"), "{text}");
    agent.command(&["pause"]).good();
    let text = agent.command(&["resume"]).good();
    assert!(text.contains("resumed: "), "{text}");
    events.wait("by hand", |event| {
        event["action"] == "resumed" && !event["by"].is_null()
    });
    agent.command(&["pause", "--for", "1ms"]).good();
    let over = events.wait("by itself", |event| event["action"] == "resumed");
    let message = over["message"].as_str().expect("text");
    assert!(
        message.contains("time is over") && over["by"].is_null(),
        "{over:#}"
    );
}

/// No program could reach it, so the agent does not pretend.
#[test]
fn a_socket_path_that_nobody_can_reach_is_refused() {
    let home = Home::new();
    let socket = home.path().join("x".repeat(120));
    let run = Program::new(binary())
        .args(["run", "--listen", "none"])
        .arg("--socket")
        .arg(&socket)
        .arg("--state-dir")
        .arg(home.path())
        .run();
    assert_eq!(run.code(), 2, "{run}");
    assert!(run.stderr.contains("longer than 107"), "{run}");
    let status = Program::new(binary())
        .args(["status", "--socket"])
        .arg(&socket)
        .run();
    assert_eq!(status.code(), 2, "{status}");
    assert!(status.stderr.contains("longer than 107"), "{status}");
}

/// An order holds for its time, and its end is told: also if that was while no agent ran.
#[test]
fn an_order_that_ended_without_an_agent_is_told() {
    let group = TestCgroup::new("over");
    let agent = Agent::start(&group, "");
    let args = ["trip", DESTINATION, "--workload", "a/b", "--for", "10m"];
    agent.command(&args).good();
    agent.command(&["trip", "10.9.9.9:1"]).good();
    let options = agent.options().clone();
    let file = agent.home().path().join("state/state.json");
    assert_eq!(agent.stop().code(), 0);
    let text = fs::read_to_string(&file).expect("the state");
    let mut state: Value = serde_json::from_str(&text).expect("JSON");
    let order = &mut state["manual"][0];
    assert_eq!(order["workload"], "a/b", "{order:#}");
    order["until"] = order["since"].clone();
    let ended = order["since"].clone();
    fs::write(&file, state.to_string()).expect("write");
    let agent = options.start();
    let over = agent.follow(&[]).wait("its end", |event| {
        event["kind"] == "order" && event["action"] == "time_over"
    });
    let said = (&over["destination"], &over["workload"], &over["until"]);
    assert_eq!(said, (&DESTINATION.into(), &"a/b".into(), &ended));
    assert_eq!(over["rows"], 0, "{over:#}");
    let by = over["by"].as_str().unwrap_or_default();
    assert!(by.starts_with("uid "), "{over:#}");
    let orders = agent.status()["orders"].clone();
    assert_eq!(orders.as_array().map(Vec::len), Some(1), "{orders:#}");
    let text = agent.command(&["events"]).good();
    assert!(text.contains("while no agent ran"), "{text}");
    assert!(
        text.contains("0 breakers (closed) and 1 order by hand came back"),
        "{text}"
    );
}

/// A pattern would be an order for a workload of just that name, which nobody means.
#[test]
fn an_order_takes_no_pattern() {
    let group = TestCgroup::new("pattern");
    let agent = Agent::start(&group, "");
    for order in ["trip", "hold-closed", "reset"] {
        let args = [order, DESTINATION, "--workload", "*/billing-*"];
        let refused = agent.command(&args);
        assert_eq!(refused.code(), 2, "{refused}");
        assert!(refused.stderr.contains("is a pattern"), "{refused}");
    }
    assert_eq!(agent.status()["orders"], serde_json::json!([]));
    let target = format!("/v1/destinations/{DESTINATION}/trip?workload=%2A");
    assert_eq!(agent.request("POST", &target).status, 400);
}

#[test]
fn a_second_agent_on_a_control_group_is_said() {
    let group = TestCgroup::new("twice");
    let first = Agent::start(&group, "");
    let second = Agent::start(&group, "");
    let said = "another agent (process ";
    second.wait_log(&format!(
        "another agent (process {}) is attached to cgroup {}, too",
        first.pid(),
        group.path().display()
    ));
    assert!(!first.log().contains(said), "{}", first.log());
    let options = second.options().clone();
    assert_eq!(first.stop().code(), 0);
    // Whoever takes over from it is alone.
    let mut program = options.program();
    program = program.arg("--takeover");
    let third = options.start_as(program);
    let text = third.command(&["doctor"]).good();
    assert!(!text.contains(said), "{text}");
    assert!(!third.log().contains(said), "{}", third.log());
}

#[test]
fn an_agent_on_an_outer_or_inner_control_group_is_said() {
    let outer_group = TestCgroup::new("outer");
    let (middle_group, inner_group) = (
        outer_group.child("middle"),
        outer_group.child("middle/inner"),
    );
    let middle = Agent::start(&middle_group, "");
    let inner = Agent::start(&inner_group, "");
    inner.wait_log(&format!(
        "another agent (process {}) is attached to cgroup {}, which holds {}",
        middle.pid(),
        middle_group.path().display(),
        inner_group.path().display()
    ));
    let outer = Agent::start(&outer_group, "");
    for (agent, group) in [(&middle, &middle_group), (&inner, &inner_group)] {
        outer.wait_log(&format!(
            "another agent (process {}) is attached to cgroup {}, which is inside {}",
            agent.pid(),
            group.path().display(),
            outer_group.path().display()
        ));
    }
}
