//! Self-tests of other agents are nobody's destinations; who only has such a name is treated like everybody.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use tests::{
    agent::{Agent, AgentOptions},
    cgroup::TestCgroup,
    dialer::Dialer,
    net::Namespace,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const NAME: &str = "backstop-canary-4711";
const DESTINATION: &str = "127.0.0.1:8080";
const SOON: Duration = Duration::from_secs(60);

/// What a self-test does: connects to a loopback port on which nobody listens.
fn connect(dialer: &mut Dialer, times: u32) {
    let to: SocketAddr = DESTINATION.parse().expect("an address");
    for _ in 0..times {
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
}

/// What the agent says of itself to `doctor`.
fn itself(agent: &Agent) -> Value {
    let report = agent.request("GET", "/v1/doctor");
    let mut report: Value = serde_json::from_str(&report.body).expect("JSON");
    report["agent"].take()
}

/// Waits until so many rows are in use, shown or not. (The agent's own self-test has one for a moment.)
fn wait_in_use(agent: &Agent, count: u64) {
    wait::until(&format!("{count} rows in use"), SOON, || {
        (itself(agent)["rows"]["in_use"] == count).then_some(())
    });
}

#[test]
fn self_tests_are_not_shown_and_given_up() {
    let group = TestCgroup::new("self-tests");
    let namespace = Namespace::new("self-tests");
    let agent = Agent::start_for_loops(&group, "");
    let nest = group.child(NAME);
    let mut dialer = Dialer::start(DIAL, &nest, &namespace);
    connect(&mut dialer, 3);
    // It is there, and judged.
    wait_in_use(&agent, 1);
    assert_eq!(agent.status()["destinations"], serde_json::json!([]));
    assert!(!agent.get("/metrics").body.contains(NAME));
    let told = agent.command(&["events", "--all", "--json"]).good();
    assert!(!told.contains(NAME), "{told}");
    drop(dialer);
    drop(nest);
    wait_in_use(&agent, 0);
    assert!(!agent.get("/metrics").body.contains(NAME));
    assert_eq!(
        agent.metric("backstop_destinations_evicted_total", &[]),
        Some(0.0)
    );
}

/// A name hides nobody, and protects nobody from being judged.
#[test]
fn who_only_has_such_a_name_is_judged_and_shown() {
    let group = TestCgroup::new("named-so");
    let namespace = Namespace::new("named-so");
    let agent = Agent::start_for_loops(&group, "[defaults.breaker]\nredial = false\n");
    let nest = group.child(NAME);
    let mut dialer = Dialer::start(DIAL, &nest, &namespace);
    connect(&mut dialer, 3);
    // Time enough to be given up, if that went by the name.
    let uptime = |agent: &Agent| itself(agent)["uptime_ms"].as_u64().expect("a time");
    let until = uptime(&agent) + 2_500;
    wait::until("two looks at the rows", SOON, || {
        (uptime(&agent) >= until).then_some(())
    });
    connect(&mut dialer, 2);
    let row = agent.wait_state(DESTINATION, "open");
    assert_eq!(row["workload"], nest.workload(), "{row:#}");
    assert_eq!(
        (&row["attempts"], &row["failures"]["refused"]),
        (&5.into(), &5.into())
    );
    connect(&mut dialer, 1);
    agent.wait_row(DESTINATION, "a refusal", |row| {
        row["rejected"]["breaker"] == 1
    });
    assert!(agent.get("/metrics").body.contains(NAME));
}

/// The real thing: each shows nothing of the other's self-test, whichever way they lie, enforcing or not.
#[test]
fn two_agents_do_not_show_each_other() {
    let outer_group = TestCgroup::new("two-agents");
    let group = outer_group.child("inner");
    let outer = Agent::start(&outer_group, "");
    let inner = AgentOptions::new(&group).start();
    let same = AgentOptions::new(&group)
        .config("mode = \"observe\"\n")
        .start();
    let above = AgentOptions::new(&outer_group).start();
    for agent in [&outer, &inner, &same, &above] {
        assert!(
            !agent.status().to_string().contains("backstop-canary"),
            "{:#}",
            agent.status()
        );
        assert!(!agent.get("/metrics").body.contains("backstop-canary"));
        let events = agent.command(&["events", "--all", "--json"]).good();
        assert!(!events.contains("backstop-canary"), "{events}");
        assert_eq!(agent.get("/readyz").status, 200, "{}", agent.log());
    }
}
