//! What one workload has found out is a hint to the others of the node (rule 1): their own first failure
//! suffices, and nothing but a failure of their own opens.

use std::net::SocketAddr;

use tests::{agent::Agent, cgroup::TestCgroup, dialer::Dialer, net::TestNet, server::Server};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const CONFIG: &str = "[defaults.breaker]\nredial = false\ncooldown = \"5m\"\n";

#[test]
fn one_failure_suffices_while_anothers_breaker_is_open() {
    let (net, parent) = (TestNet::new(), TestCgroup::new("hints"));
    let (a, b) = (parent.child("a"), parent.child("b"));
    let agent = Agent::start(&parent, CONFIG);
    let mut one = Dialer::start(DIAL, &a, &net.client);
    let mut other = Dialer::start(DIAL, &b, &net.client);
    let row_of = |group: &TestCgroup| {
        let rows = agent.rows(DESTINATION);
        let mine = rows
            .into_iter()
            .find(|row| row["workload"] == group.workload());
        mine.unwrap_or_default()
    };
    let wait_open = |group: &TestCgroup| {
        tests::wait::until("it to open", std::time::Duration::from_secs(60), || {
            Some(row_of(group)).filter(|row| row["state"] == "open")
        })
    };
    for _ in 0..5 {
        assert_eq!(one.connect(TO).errno, libc::ECONNREFUSED);
    }
    wait_open(&a);
    // A hint opens nothing: where it works for the other one, it goes on.
    let server = Server::start(&net.server, TO);
    for _ in 0..3 {
        assert_eq!(other.connect(TO).errno, 0);
    }
    assert_eq!(row_of(&b)["state"], "closed");
    assert_eq!(
        one.connect(TO).errno,
        libc::ECONNREFUSED,
        "its own cooldown"
    );
    server.stop();
    assert_eq!(other.connect(TO).errno, libc::ECONNREFUSED);
    let row = wait_open(&b);
    assert_eq!(row["failures"]["refused"], 1, "{row:#}");
    assert_eq!(row["reason"]["kind"], "consecutive_failures", "{row:#}");
    assert_eq!(row["reason"]["threshold"], 1.0, "{row:#}");
    assert_eq!(other.connect(TO).errno, libc::ECONNREFUSED);
    assert_eq!(row_of(&b)["rejected"]["breaker"], 1);
}
