//! Configuration: printed, checked, reloaded, and never in force when it is wrong.

use std::{fs, net::SocketAddr, path::Path};

use rustix::process::Signal;
use tests::{
    agent::{Agent, AgentOptions, Home, binary},
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    net::TestNet,
    process::{Finished, Program},
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const BLACKHOLE: SocketAddr = SocketAddr::new(TestNet::blackhole4(0), 80);

fn backstop(args: &[&str]) -> Finished {
    Program::new(binary()).args(args).run()
}

#[test]
fn the_printed_configuration_is_the_file() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../config/default.toml");
    let printed = backstop(&["run", "--print-config"]).good();
    assert_eq!(
        printed,
        fs::read_to_string(&file).expect("config/default.toml")
    );
    let check = backstop(&["check", file.to_str().expect("ASCII")]);
    assert_eq!(check.code(), 0, "{check}");
}

/// Every problem in one go, each with line, key, value and what is allowed.
#[test]
fn every_problem_is_reported_at_once() {
    let home = Home::new();
    home.write_config(
        "mode = \"enforce\"\n\
         surprise = 1\n\
         [defaults.timeouts]\n\
         connect = \"soon\"\n\
         [defaults.breaker]\n\
         failure_rate = 1.5\n\
         window = 5\n\
         min_calls = 10\n\
         errno = \"EBADF\"\n\
         [[policy]]\n\
         name = \"twice\"\n\
         destinations = [\"10.0.0.1:0\"]\n\
         [[policy]]\n\
         name = \"twice\"\n\
         destinations = [\"10.0.0.2\"]\n",
    );
    let file = home.config();
    let file = file.to_str().expect("ASCII");
    let check = backstop(&["check", file]);
    assert_eq!(check.code(), 2, "{check}");
    let expected: [(u32, &[&str]); 7] = [
        (2, &["surprise"]),
        (4, &["defaults.timeouts.connect", "soon", "50ms", "5m"]),
        (6, &["defaults.breaker.failure_rate", "1.5", "at most 1"]),
        (7, &["defaults.breaker.window", "5", "min_calls"]),
        (9, &["defaults.breaker.errno", "EBADF", "ECONNREFUSED"]),
        (12, &["destinations", "10.0.0.1:0", "65535"]),
        (14, &["name", "twice"]),
    ];
    for (line, words) in expected {
        let place = format!("{file}:{line}: ");
        let problem = check.stderr.lines().find(|text| text.contains(&place));
        let problem = problem.unwrap_or_else(|| panic!("nothing about line {line}: {check}"));
        for word in words {
            assert!(problem.contains(word), "{word:?} is not in {problem:?}");
        }
    }

    // `run` says the same and does not start.
    let group = TestCgroup::new("bad-config");
    let run = AgentOptions::new(&group).home(&home).program().run();
    assert_eq!(run.code(), 2, "{run}");
    for line in [2, 4, 6, 7, 9, 12, 14] {
        assert!(
            run.stderr.contains(&format!("{file}:{line}: ")),
            "line {line}: {run}"
        );
    }
    assert_eq!(run.stdout, "");
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let missing = backstop(&["check", "/no/such/file.toml"]);
    assert_eq!(missing.code(), 2, "{missing}");
    assert!(missing.stderr.contains("/no/such/file.toml"), "{missing}");
    let directory = backstop(&["run", "--config", "/tmp", "--listen", "none"]);
    assert_eq!(directory.code(), 2, "{directory}");
    let home = Home::new();
    fs::write(home.config(), b"\xff\xfe").expect("write");
    let garbage = backstop(&["check", home.config().to_str().expect("ASCII")]);
    assert_eq!(garbage.code(), 2, "{garbage}");
}

fn with_timeout(ms: u32) -> String {
    format!("[defaults.timeouts]\nconnect = \"{ms}ms\"\n")
}

/// SIGHUP puts a new file in force for what exists and what is to come; a bad one changes nothing.
#[test]
fn sighup_reloads() {
    let (net, group) = (TestNet::new(), TestCgroup::new("reload"));
    let agent = Agent::start(&group, &with_timeout(70_000));
    let mut events = agent.follow(&[]);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    dialer.open(BLACKHOLE, 1, How::default());
    dialer.wait_user_timeouts(&[70_000]);

    agent.home().write_config(&with_timeout(80_000));
    agent.signal(Signal::HUP);
    events.wait("reloaded", |event| event["action"] == "reloaded");
    dialer.open(BLACKHOLE, 1, How::default());
    dialer.wait_user_timeouts(&[70_000, 80_000]);
    agent.wait_row(&BLACKHOLE.to_string(), "its timeout", |row| {
        row["timeouts_ms"]["connect"] == 80_000
    });

    agent
        .home()
        .write_config("[defaults.timeouts]\nconnect = \"never\"\n");
    agent.signal(Signal::HUP);
    let refused = events.wait("refused", |event| event["action"] == "refused");
    let message = refused["message"].as_str().expect("a message");
    assert!(message.contains("defaults.timeouts.connect"), "{message}");
    dialer.open(BLACKHOLE, 1, How::default());
    dialer.wait_user_timeouts(&[70_000, 80_000, 80_000]);
    // SIGHUP and the change of the file may each have been read.
    let reloads = |result: &str| {
        agent.metric(
            "backstop_config_reloads_total",
            &[format!("result=\"{result}\"")],
        )
    };
    assert!(reloads("ok") >= Some(1.0) && reloads("error") >= Some(1.0));
    assert_eq!(agent.get("/readyz").status, 200);
}

/// The file alone is enough, also when it is replaced by a rename as editors and ConfigMaps do.
#[test]
fn a_changed_file_is_noticed() {
    let group = TestCgroup::new("watch");
    let agent = Agent::start(&group, &with_timeout(1_000));
    let mut events = agent.follow(&[]);
    fs::write(agent.home().config(), with_timeout(3_000)).expect("write");
    events.wait("reloaded", |event| event["action"] == "reloaded");
    let new = agent.home().path().join("new.toml");
    fs::write(&new, with_timeout(4_000)).expect("write");
    fs::rename(&new, agent.home().config()).expect("rename");
    let has = |event: &serde_json::Value| {
        let message = event["message"].as_str().unwrap_or_default();
        event["action"] == "reloaded" && message.contains("4s")
    };
    events.wait("the renamed file", has);
}

/// What the agent says is in force, in TOML.
fn in_force(agent: &Agent) -> String {
    let answer: serde_json::Value =
        serde_json::from_str(&agent.request("GET", "/v1/config").body).expect("JSON");
    answer["toml"].as_str().expect("TOML").to_owned()
}

/// The control interface reloads, too, and answers with every problem.
#[test]
fn the_interface_reloads() {
    let group = TestCgroup::new("post");
    let agent = Agent::start(&group, &with_timeout(1_000));
    agent.home().write_config(&with_timeout(3_000));
    assert_eq!(agent.request("POST", "/v1/reload").status, 200);
    assert!(
        in_force(&agent).contains("connect = \"3s\""),
        "{}",
        in_force(&agent)
    );
    agent.home().write_config("window = 3\n");
    let refused = agent.request("POST", "/v1/reload");
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.body.contains("window"), "{}", refused.body);
    assert!(
        in_force(&agent).contains("connect = \"3s\""),
        "{}",
        in_force(&agent)
    );
}

/// `--mode` wins over the file, at the start and on every reload.
#[test]
fn flags_win_over_the_file() {
    let group = TestCgroup::new("flags");
    let options = AgentOptions::new(&group).config("mode = \"enforce\"\n");
    let agent = options.args(&["--mode", "observe"]).start();
    assert!(
        agent.ready_line().contains("mode=observe"),
        "{}",
        agent.ready_line()
    );
    let mut events = agent.follow(&[]);
    agent
        .home()
        .write_config("mode = \"enforce\"\n[defaults.timeouts]\nconnect = \"1s\"\n");
    agent.signal(Signal::HUP);
    events.wait("reloaded", |event| event["action"] == "reloaded");
    assert_eq!(agent.status()["mode"], "observe");
}

/// The most specific policy wins, and the first connect already meets it.
#[test]
fn policies_by_prefix_port_and_workload() {
    let (net, parent) = (TestNet::new(), TestCgroup::new("policies"));
    let (mine, other) = (parent.child("mine"), parent.child("other"));
    let config = format!(
        "[defaults.timeouts]\nconnect = \"90s\"\n\
         [[policy]]\nname = \"net\"\ndestinations = [\"10.77.0.0/24\"]\ntimeouts = {{ connect = \"80s\" }}\n\
         [[policy]]\nname = \"port\"\ndestinations = [\"10.77.0.0/24:81\"]\ntimeouts = {{ connect = \"70s\" }}\n\
         [[policy]]\nname = \"host\"\ndestinations = [\"10.77.0.101\"]\ntimeouts = {{ connect = \"60s\" }}\n\
         [[policy]]\nname = \"six\"\ndestinations = [\"[fd77::]/64:82\"]\ntimeouts = {{ connect = \"50s\" }}\n\
         [[policy]]\nname = \"mine\"\ndestinations = [\"10.77.0.0/24:83\"]\nworkloads = [\"{}\"]\n\
         timeouts = {{ connect = \"40s\" }}\n",
        mine.workload()
    );
    let agent = Agent::start(&parent, &config);
    let mut dialer = Dialer::start(DIAL, &mine, &net.client);
    let cases = [
        (TestNet::blackhole4(0), 80, "net", 80_000),
        (TestNet::blackhole4(0), 81, "port", 70_000),
        (TestNet::blackhole4(1), 80, "host", 60_000),
        (TestNet::blackhole6(0), 82, "six", 50_000),
        (TestNet::blackhole6(0), 80, "default", 90_000),
    ];
    for (address, port, ..) in cases {
        dialer.open(SocketAddr::new(address, port), 1, How::default());
    }
    for (address, port, policy, _) in cases {
        let to = SocketAddr::new(address, port);
        assert_eq!(agent.row(&to.to_string())["policy"], policy, "{to}");
    }
    dialer.wait_user_timeouts(&cases.map(|(.., ms)| ms));
    dialer.close();
    // A policy for a workload: the kernel does not know names, so the first connect may come
    // before the agent has named the row.
    let to = SocketAddr::new(TestNet::blackhole4(2), 83);
    dialer.open(to, 1, How::default());
    dialer.close();
    agent.wait_row(&to.to_string(), "the policy", |row| row["policy"] == "mine");
    dialer.open(to, 1, How::default());
    dialer.wait_user_timeouts(&[40_000]);
    let mut stranger = Dialer::start(DIAL, &other, &net.client);
    stranger.open(to, 1, How::default());
    stranger.wait_user_timeouts(&[80_000]);
}
