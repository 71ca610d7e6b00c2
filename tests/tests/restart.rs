//! What comes back with the next agent: open breakers, windows and manual states, each only for what
//! it was for.

use std::{
    fs,
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::Value;
use tests::{agent::Agent, cgroup::TestCgroup, dialer::Dialer, net::TestNet, server::Server, wait};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const NO_REDIAL: &str = "[defaults.breaker]\nredial = false\n";
const SOON: Duration = wait::LONGEST;

fn state_file(agent: &Agent) -> PathBuf {
    agent.home().path().join("state/state.json")
}

/// Five real refusals.
fn open(agent: &Agent, dialer: &mut Dialer) -> Value {
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(DESTINATION, "open")
}

#[test]
fn an_open_breaker_refuses_from_the_first_connect_on() {
    let (net, group) = (TestNet::new(), TestCgroup::new("open"));
    let agent = Agent::start(&group, "");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let before = open(&agent, &mut dialer);
    let options = agent.options().clone();
    assert_eq!(agent.stop().code(), 0);
    let agent = options.start();
    let row = agent.row(DESTINATION);
    assert_eq!(row["state"], "open", "{row:#}");
    assert_eq!(row["reason"], before["reason"]);
    assert_eq!(row["workload"], group.workload());
    assert_eq!(row["netns"], net.client.inode());
    assert!(row["next_redial_in_ms"].is_u64(), "{row:#}");
    assert!(row["state_age_ms"].as_u64() >= before["state_age_ms"].as_u64());
    assert!(row["generation"].as_u64() > before["generation"].as_u64());
    assert_eq!(row["windows"]["connects"]["failures"], 5, "{row:#}");
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let row = agent.row(DESTINATION);
    assert_eq!(row["rejected"]["breaker"], 1, "{row:#}");
    assert_eq!(row["attempts"], 0, "no SYN left: {row:#}");
    // And the way back is open, too.
    let _server = Server::start(&net.server, TO);
    dialer
        .until_established(TO, SOON)
        .expect("the redial lets it through");
    let started = agent.command(&["events"]).good();
    assert!(started.contains("came back"), "{started}");
}

/// The dial comes at once: what was true is not taken for true.
#[test]
fn a_server_that_came_back_meanwhile_is_not_refused_for_the_cooldown() {
    let (net, group) = (TestNet::new(), TestCgroup::new("back"));
    let agent = Agent::start(&group, "");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    open(&agent, &mut dialer);
    let options = agent.options().clone();
    assert_eq!(agent.stop().code(), 0);
    let _server = Server::start(&net.server, TO);
    let agent = options.start();
    agent.wait_row(DESTINATION, "believed to be back", |row| {
        row["state"] != "open"
    });
    // The first is a probe; a second one may come before its outcome is judged.
    assert_eq!(dialer.connect(TO).errno, 0);
    dialer
        .until_established(TO, SOON)
        .expect("closed, or another probe");
    agent.wait_state(DESTINATION, "closed");
}

#[test]
fn a_killed_agent_has_written_it_down() {
    let (net, group) = (TestNet::new(), TestCgroup::new("killed"));
    let agent = Agent::start(&group, NO_REDIAL);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    open(&agent, &mut dialer);
    agent.command(&["trip", "10.77.0.2:8081"]).good();
    let options = agent.options().clone();
    let file = state_file(&agent);
    wait::until("the file", SOON, || {
        let text = fs::read_to_string(&file).ok()?;
        (text.contains("\"open\"") && text.contains(":8081")).then_some(())
    });
    agent.kill();
    let agent = options.start();
    let row = agent.row(DESTINATION);
    assert_eq!(row["state"], "open", "{row:#}");
    assert!(row["next_probe_in_ms"].as_u64() <= Some(30_000), "{row:#}");
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let _server = Server::start(&net.server, TestNet::server4(8081));
    assert_eq!(
        dialer.connect(TestNet::server4(8081)).errno,
        libc::ECONNREFUSED
    );
}

#[test]
fn a_window_is_continued() {
    let (net, group) = (TestNet::new(), TestCgroup::new("window"));
    let agent = Agent::start(&group, NO_REDIAL);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..4 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    agent.wait_row(DESTINATION, "four failures", |row| {
        row["windows"]["connects"]["failures"] == 4
    });
    let options = agent.options().clone();
    assert_eq!(agent.stop().code(), 0);
    let agent = options.start();
    let row = agent.row(DESTINATION);
    assert_eq!(row["state"], "closed", "{row:#}");
    assert_eq!(row["windows"]["connects"]["consecutive"], 4, "{row:#}");
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let row = agent.wait_state(DESTINATION, "open");
    assert_eq!(row["attempts"], 1, "{row:#}");
}

#[test]
fn manual_states_hold_on_with_who_and_when() {
    let (net, group) = (TestNet::new(), TestCgroup::new("manual"));
    let agent = Agent::start(&group, "");
    let _server = Server::start(&net.server, TO);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    // One for all, of a destination not seen yet; one for a workload, of one that is.
    let other = TestNet::server4(8081).to_string();
    let workload = group.workload();
    agent.command(&["hold-closed", &other]).good();
    assert_eq!(dialer.connect(TO).errno, 0);
    let trip = ["trip", DESTINATION, "--workload", &workload, "--for", "1h"];
    agent.command(&trip).good();
    agent.wait_state(DESTINATION, "forced_open");
    let options = agent.options().clone();
    assert_eq!(agent.stop().code(), 0);

    let agent = options.start();
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let row = agent.row(DESTINATION);
    assert_eq!(row["state"], "forced_open", "{row:#}");
    let by = row["manual"]["by"].as_str().expect("who");
    assert!(by.starts_with("uid ") && by.contains("pid "), "{row:#}");
    assert!(row["manual"]["since"].is_string() && row["manual"]["until"].is_string());
    let text = agent.command(&["status", DESTINATION]).good();
    assert!(text.contains("by hand") && text.contains(by), "{text}");
    let text = agent.command(&["explain", DESTINATION]).good();
    assert!(text.contains(by), "{text}");
    for _ in 0..20 {
        assert_eq!(
            dialer.connect(TestNet::server4(8081)).errno,
            libc::ECONNREFUSED
        );
    }
    let row = agent.wait_state(&other, "forced_closed");
    assert_eq!(row["failures"]["refused"], 20, "{row:#}");
    // What is reset does not come back another time.
    agent.command(&["reset", DESTINATION]).good();
    agent.wait_state(DESTINATION, "closed");
    assert_eq!(agent.stop().code(), 0);
    let agent = options.start();
    assert_eq!(dialer.connect(TO).errno, 0);
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["state"], &row["manual"]),
        (&"closed".into(), &Value::Null)
    );
}

#[test]
fn a_manual_state_ends_at_its_time_though_agents_come_and_go() {
    let (net, group) = (TestNet::new(), TestCgroup::new("time"));
    let agent = Agent::start(&group, "");
    let _server = Server::start(&net.server, TO);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let began = Instant::now();
    agent.command(&["trip", DESTINATION, "--for", "8s"]).good();
    let options = agent.options().clone();
    assert_eq!(agent.stop().code(), 0);
    let _agent = options.start();
    if began.elapsed() < Duration::from_secs(7) {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    dialer
        .until_established(TO, SOON)
        .expect("its time is over");
    assert!(began.elapsed() >= Duration::from_millis(7_900));
}

/// Rule 19: a control group or a namespace of the same name or number is somebody else.
#[test]
fn what_is_gone_does_not_come_back() {
    let net = TestNet::new();
    let parent = TestCgroup::new("gone");
    let (stays, goes) = (parent.child("stays"), parent.child("goes"));
    let agent = Agent::start(&parent, NO_REDIAL);
    let options = agent.options().clone();
    let other_net = TestNet::new();
    {
        let mut one = Dialer::start(DIAL, &stays, &net.client);
        let mut two = Dialer::start(DIAL, &goes, &net.client);
        let mut three = Dialer::start(DIAL, &stays, &other_net.client);
        for _ in 0..5 {
            for dialer in [&mut one, &mut two, &mut three] {
                assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
            }
        }
        wait::until("all to open", SOON, || {
            let rows = agent.rows(DESTINATION);
            (rows.len() == 3 && rows.iter().all(|row| row["state"] == "open")).then_some(())
        });
    }
    assert_eq!(agent.stop().code(), 0);
    drop((goes, other_net));
    let agent = options.start();
    let rows = agent.rows(DESTINATION);
    assert_eq!(rows.len(), 1, "{rows:#?}");
    assert_eq!(rows[0]["workload"], stays.workload());
    assert_eq!(rows[0]["netns"], net.client.inode());
}

#[test]
fn a_damaged_file_is_set_aside() {
    let (net, group) = (TestNet::new(), TestCgroup::new("damaged"));
    let agent = Agent::start(&group, NO_REDIAL);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    open(&agent, &mut dialer);
    let (options, file) = (agent.options().clone(), state_file(&agent));
    assert_eq!(agent.stop().code(), 0);
    let text = fs::read_to_string(&file).expect("the state");
    fs::write(&file, &text[..text.len() / 2]).expect("cut it");
    let agent = options.start();
    assert_eq!(agent.row(DESTINATION), Value::Null);
    agent.wait_log("set aside");
    assert!(file.with_extension("json.damaged").exists());
    let _server = Server::start(&net.server, TO);
    assert_eq!(dialer.connect(TO).errno, 0);
}

/// Pipes where the files should be, one of which cannot even be set aside.
#[test]
fn what_is_no_file_does_not_hang_the_start() {
    let group = TestCgroup::new("pipes");
    let agent = Agent::start(&group, NO_REDIAL);
    let (options, file) = (agent.options().clone(), state_file(&agent));
    assert_eq!(agent.stop().code(), 0);
    for name in ["state.json", "names.json", "pause.json"] {
        let path = file.with_file_name(name);
        let _ = fs::remove_file(&path);
        let made = std::process::Command::new("mkfifo").arg(&path).status();
        assert!(made.expect("mkfifo").success());
    }
    fs::create_dir(file.with_extension("json.damaged")).expect("in its way");
    let agent = options.start();
    agent.wait_log("cannot be set aside");
    for name in ["names.json.damaged", "pause.json.damaged"] {
        assert!(file.with_file_name(name).exists(), "{name}");
    }
    // It is written over, and read again.
    agent.command(&["trip", DESTINATION]).good();
    assert_eq!(agent.stop().code(), 0);
    assert!(fs::metadata(&file).expect("the state").is_file());
    let agent = options.start();
    let orders = agent.status()["orders"].clone();
    assert_eq!(orders.as_array().map(Vec::len), Some(1), "{orders:#}");
}

#[test]
fn what_is_protected_now_is_left_alone() {
    let (net, group) = (TestNet::new(), TestCgroup::new("guarded"));
    let agent = Agent::start(&group, NO_REDIAL);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    open(&agent, &mut dialer);
    agent.command(&["trip", "10.77.0.2:8081"]).good();
    let options = agent.options().clone();
    assert_eq!(agent.stop().code(), 0);
    let options = options.config("[protected]\ndestinations = [\"10.77.0.0/24\"]\n");
    let agent = options.start();
    assert_eq!(agent.row(DESTINATION), Value::Null);
    let _servers = [TO, TestNet::server4(8081)].map(|to| Server::start(&net.server, to));
    assert_eq!(dialer.connect(TO).errno, 0);
    assert_eq!(dialer.connect(TestNet::server4(8081)).errno, 0);
}
