//! Control groups that come and go, lie inside one another, or are named in strange ways.

use std::net::SocketAddr;

use tests::{
    agent::{Agent, AgentOptions},
    attached,
    cgroup::TestCgroup,
    dialer::Dialer,
    net::TestNet,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const SOON: std::time::Duration = std::time::Duration::from_secs(60);

/// One that vanishes is attached again when it returns.
#[test]
fn a_control_group_that_returns() {
    let net = TestNet::new();
    let parent = TestCgroup::new("returns");
    let group = parent.child("service");
    let agent = Agent::start(&group, "");
    assert_eq!(attached::programs(&group), [1; 4]);
    drop(group);
    let log = |word: &str| agent.log().contains(word).then_some(());
    wait::until("a warning", SOON, || log("service"));
    let group = parent.child("service");
    wait::until("programs", SOON, || {
        (attached::programs(&group) == [1; 4]).then_some(())
    });
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..6 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    let row = agent.wait_state(DESTINATION, "open");
    assert_eq!(row["workload"], group.workload());
}

/// One inside another is covered by it: programs that run twice would count twice.
#[test]
fn one_inside_another_is_dropped() {
    let net = TestNet::new();
    let parent = TestCgroup::new("nested");
    let (a, b) = (parent.child("a"), parent.child("b"));
    let agent = AgentOptions::new(&a).and(&parent).and(&b).and(&a).start();
    let ready = agent.ready_line();
    assert!(
        ready.contains(&format!("cgroups={} ", parent.path().display())),
        "{ready}"
    );
    assert_eq!(attached::programs(&parent), [1; 4]);
    assert_eq!(attached::programs(&a), [0; 4]);
    // The log is read beside the line that it is ready.
    wait::until("what it says of the inner ones", SOON, || {
        let inner = a.path().to_str().expect("ASCII");
        agent.log().contains(inner).then_some(())
    });
    let mut dialer = Dialer::start(DIAL, &a, &net.client);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    assert_eq!(agent.row(DESTINATION)["attempts"], 1);
}

/// Paths are taken as what they mean.
#[test]
fn a_path_by_way_of_a_link() {
    let parent = TestCgroup::new("link");
    let group = parent.child("inner");
    let link = tempfile::tempdir().expect("a directory");
    let path = link.path().join("link");
    std::os::unix::fs::symlink(group.path(), &path).expect("a link");
    let roundabout = group.path().join("../inner");
    let options = AgentOptions::new(&group).args(&[
        "--cgroup",
        path.to_str().expect("ASCII"),
        "--cgroup",
        roundabout.to_str().expect("ASCII"),
    ]);
    let agent = options.start();
    assert_eq!(attached::programs(&group), [1; 4]);
    let ready = agent.ready_line();
    assert!(
        ready.contains(&format!("cgroups={} ", group.path().display())),
        "{ready}"
    );
}

/// What is no control group of the v2 hierarchy is refused at the start.
#[test]
fn what_is_no_control_group() {
    let group = TestCgroup::new("not-a-group");
    for wrong in ["/tmp", "/proc/self/status", "/no/such/group"] {
        let run = AgentOptions::new(&group)
            .args(&["--cgroup", wrong])
            .program()
            .run();
        assert_eq!(run.code(), 2, "{run}");
        assert!(run.stderr.contains(wrong), "{run}");
    }
}

/// A workload is the caller's leaf: the one it is in when it connects, in a socket made before.
#[test]
fn a_process_that_moves() {
    let net = TestNet::new();
    let parent = TestCgroup::new("moves");
    let (a, b) = (parent.child("a"), parent.child("b"));
    let agent = Agent::start(&parent, "");
    let mut dialer = Dialer::start(DIAL, &a, &net.client);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    std::fs::write(b.path().join("cgroup.procs"), dialer.pid().to_string()).expect("move it");
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let mut workloads: Vec<_> = agent
        .rows(DESTINATION)
        .iter()
        .map(|row| row["workload"].as_str().expect("a name").to_owned())
        .collect();
    workloads.sort();
    assert_eq!(workloads, [a.workload(), b.workload()]);
}
