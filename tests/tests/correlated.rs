//! When everything fails at once, the fault is on this side: it is said once, and nothing is opened
//! until it is over (rule 16).

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    net::TestNet,
    server::Server,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const CONFIG: &str =
    "[defaults.timeouts]\nconnect = \"300ms\"\n[defaults.breaker]\nredial = false\n";

fn nowhere(i: u8) -> SocketAddr {
    SocketAddr::new(TestNet::blackhole4(i), 80)
}

/// Six destinations, none of which answers any more.
#[test]
fn many_that_fail_at_once_open_nothing() {
    const MANY: u8 = 6;
    let (net, group) = (TestNet::new(), TestCgroup::new("correlated"));
    let agent = Agent::start(&group, CONFIG);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let mut events = agent.follow(&[]);
    // All at once, once each: no breaker has enough of it yet.
    for i in 0..MANY {
        dialer.open(nowhere(i), 1, How::default());
    }
    let said = events.wait("the node to say so", |event| {
        event["kind"] == "safety" && event["action"] == "correlated"
    });
    assert_eq!(said["destination"], Value::Null, "{said:#}");
    let message = said["message"].as_str().expect("a sentence");
    assert!(
        message.contains("destinations with traffic fail at once"),
        "{message}"
    );

    for _ in 0..6 {
        for i in 0..MANY {
            dialer.open(nowhere(i), 1, How::default());
        }
        dialer.settle(Duration::from_secs(60));
    }
    for i in 0..MANY {
        let destination = nowhere(i).to_string();
        let row = agent.wait_row(&destination, "seven failures", |row| {
            row["failures"]["connect_timeout"] == 7 && row["bypassed_for_safety"] == true
        });
        assert_eq!(row["state"], "closed", "{row:#}");
        assert_eq!(row["rejected"]["breaker"], 0, "{row:#}");
    }
    let text = agent.command(&["status"]).good();
    assert!(text.contains("bypassed"), "{text}");

    // Nobody calls: it is over, which is said, too; then one that fails alone opens.
    wait::until("nothing to be held back", Duration::from_secs(120), || {
        (agent.row(&nowhere(0).to_string())["bypassed_for_safety"] == false).then_some(())
    });
    let over = events.wait("the end of it", |event| event["kind"] == "safety");
    let message = over["message"].as_str().expect("a sentence");
    assert!(message.contains("any more"), "{over:#}");
    for _ in 0..5 {
        dialer.connect(nowhere(0));
    }
    agent.wait_state(&nowhere(0).to_string(), "open");
}

/// A workload that scans dead addresses keeps its own breakers closed, and nobody else's.
#[test]
fn who_scans_keeps_no_breaker_of_another_closed() {
    const DEAD: u8 = 10;
    let (net, parent) = (TestNet::new(), TestCgroup::new("scan"));
    let (scans, calls) = (parent.child("scans"), parent.child("calls"));
    let config = format!("{CONFIG}cooldown = \"5m\"\n");
    let agent = Agent::start(&parent, &config);
    let mut scanner = Dialer::start(DIAL, &scans, &net.client);
    let mut caller = Dialer::start(DIAL, &calls, &net.client);
    let mut events = agent.follow(&[]);
    let servers: Vec<Server> = (8081..8086)
        .map(|port| {
            let server = Server::start(&net.server, TestNet::server4(port));
            assert_eq!(caller.connect(TestNet::server4(port)).errno, 0);
            server
        })
        .collect();
    for i in 0..DEAD {
        scanner.open(nowhere(i), 1, How::default());
    }
    let is_said = |event: &Value| event["kind"] == "safety" && event["action"] == "correlated";
    let first = events.wait("the node to say so", is_said);

    // While it goes on, one of the six that the other calls is down.
    let dead = TestNet::server4(8080);
    for _ in 0..6 {
        for i in 0..DEAD {
            scanner.open(nowhere(i), 1, How::default());
        }
        assert_eq!(caller.connect(dead).errno, libc::ECONNREFUSED);
        scanner.settle(Duration::from_secs(60));
    }
    agent.wait_state(&dead.to_string(), "open");
    // What the other one calls may not have been counted when it was said first.
    let said = match first["workload"] == scans.workload() {
        true => first,
        false => events.wait("it to say whose fault it is", is_said),
    };
    assert_eq!(said["workload"], scans.workload(), "{said:#}");
    let message = said["message"].as_str().expect("a sentence");
    assert!(
        message.contains("those of others are as always"),
        "{message}"
    );
    for i in 0..DEAD {
        let destination = nowhere(i).to_string();
        let row = agent.wait_row(&destination, "seven failures", |row| {
            row["failures"]["connect_timeout"] == 7 && row["bypassed_for_safety"] == true
        });
        assert_eq!(row["state"], "closed", "{row:#}");
        assert_eq!(row["rejected"]["breaker"], 0, "{row:#}");
    }
    drop(servers);
}

/// One host that is down takes all its ports with it, and each of them opens.
#[test]
fn many_ports_of_one_host_open() {
    let (net, group) = (TestNet::new(), TestCgroup::new("one-host"));
    let agent = Agent::start(&group, "[defaults.breaker]\nredial = false\n");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for port in 8080..8088 {
        let to = TestNet::server4(port);
        for _ in 0..5 {
            assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
        }
        agent.wait_state(&to.to_string(), "open");
    }
}
