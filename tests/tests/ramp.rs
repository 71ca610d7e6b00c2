//! After closing, a crowd comes in steps, and who calls seldom notices nothing (rule 15).

use std::net::SocketAddr;

use serde_json::Value;
use tests::{agent::Agent, cgroup::TestCgroup, dialer::Dialer, net::TestNet, server::Server, wait};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const CROWD: usize = 300;
/// Bounds what passes by the floor, and half of the rest, which is the share of the last step.
const MOST: usize = 70 + (CROWD - 70) * 6 / 10;

/// The breaker has opened, the server is back, two probes have closed it. Returns the server.
///
/// (What is open may be half-open by the time that somebody looks.)
fn just_closed(agent: &Agent, net: &TestNet, dialer: &mut Dialer, to: SocketAddr) -> Server {
    for _ in 0..5 {
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
    let destination = to.to_string();
    agent.wait_row(&destination, "has opened", |row| row["state"] != "closed");
    let server = Server::start(&net.server, to);
    agent.wait_state(&destination, "half_open");
    for _ in 0..2 {
        // The second slot comes with the next verdict.
        dialer
            .until_established(to, wait::LONGEST)
            .expect("a probe");
    }
    agent.wait_state(&destination, "closed");
    server
}

#[test]
fn a_crowd_comes_in_steps() {
    let (net, group) = (TestNet::new(), TestCgroup::new("crowd"));
    let agent = Agent::start(&group, "");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    // On a busy machine the ramp may be over before the crowd has called.
    let seen = (8080..8090).find_map(|port| {
        let to = TestNet::server4(port);
        let _server = just_closed(&agent, &net, &mut dialer, to);
        let ends = dialer.burst(to, CROWD);
        let row = agent.row(&to.to_string());
        row["ramp_ends_in_ms"].as_u64()?;
        Some((to, ends, row, _server))
    });
    let (to, ends, row, _server) = seen.expect("a crowd that calls within two seconds");
    assert_eq!(row["state"], "closed", "{row:#}");
    let passed = ends.iter().filter(|end| end.errno == 0).count();
    let refused = ends.iter().filter(|end| end.errno == libc::ECONNREFUSED);
    assert_eq!(passed + refused.count(), CROWD);
    assert!((30..=MOST).contains(&passed), "{passed} passed");
    // The probes may have met a refusal, too.
    let rejected = row["rejected"]["breaker"].as_u64().expect("a count");
    assert!(rejected >= (CROWD - passed) as u64, "{row:#}");
    let text = agent.command(&["status", &to.to_string()]).good();
    let shown = agent.row(&to.to_string())["ramp_ends_in_ms"].is_u64();
    assert!(!shown || text.contains("all connects pass in"), "{text}");

    let row = agent.wait_row(&to.to_string(), "the end of the ramp", |row| {
        row["ramp_ends_in_ms"] == Value::Null
    });
    let generation = row["generation"].clone();
    let ends = dialer.burst(to, CROWD);
    assert!(ends.iter().all(|end| end.errno == 0), "everybody passes");
    let row = agent.row(&to.to_string());
    assert_eq!(row["generation"], generation, "{row:#}");
    assert_eq!(row["state"], "closed");
}

#[test]
fn who_calls_seldom_is_not_refused() {
    let (net, group) = (TestNet::new(), TestCgroup::new("seldom"));
    let agent = Agent::start(&group, "");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let to = TestNet::server4(8080);
    let _server = just_closed(&agent, &net, &mut dialer, to);
    for _ in 0..25 {
        assert_eq!(dialer.connect(to).errno, 0);
    }
}

/// What passes in the ramp is judged: a server that is not back is not called on.
#[test]
fn a_server_that_falls_again_opens_it_again() {
    let (net, group) = (TestNet::new(), TestCgroup::new("again"));
    let agent = Agent::start(
        &group,
        "[defaults.breaker]\nredial = false\ncooldown = \"1s\"\n",
    );
    let mut events = agent.follow(&[]);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let to = TestNet::server4(8080);
    let destination = to.to_string();
    let server = just_closed(&agent, &net, &mut dialer, to);
    events.wait_breaker(&destination, "closed");
    server.stop();
    for _ in 0..5 {
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
    let open = events.wait_breaker(&destination, "open");
    assert_eq!(open["reason"]["kind"], "consecutive_failures", "{open:#}");
    events.wait_breaker(&destination, "half_open");
}
