//! docs/OPERATING.md against a running agent.

use std::{collections::BTreeSet, fs, path::Path};

use tests::{agent::Agent, cgroup::TestCgroup, dialer::Dialer, net::Namespace};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");

/// Every metric of a page of an agent that has seen a breaker open is explained, and no other.
#[test]
fn every_metric_is_explained() {
    let namespace = Namespace::new("metrics");
    let group = TestCgroup::new("metrics");
    // The budget of retries is shown where there is one; the third attempt is the last to pass.
    let config = "[defaults.breaker]\nconsecutive_failures = 3\n[defaults.retry]\nlimit = 2\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    for _ in 0..6 {
        let to = "127.0.0.1:80".parse().expect("an address");
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
    agent.wait_state("127.0.0.1:80", "open");
    let page = agent.get("/metrics").body;
    let mut given: BTreeSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next())
        .collect();
    // Only in observe mode.
    given.insert("backstop_would_reject_outcomes_total");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/OPERATING.md");
    let text = fs::read_to_string(path).expect("docs/OPERATING.md");
    let explained: BTreeSet<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `backstop_").map(|_| &line[3..]))
        .filter_map(|line| line.split(['`', '{']).next())
        .collect();
    assert_eq!(explained, given);
}
