//! More destinations than there are rows.

use std::{fs, net::SocketAddr, time::Instant};

use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    dialer::Dialer,
    net::Namespace,
    wait,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const ROWS: u64 = 1_000;
const DESTINATIONS: u64 = 20_000;
const CONFIG: &str = r#"
[agent]
max_destinations = 1000
[defaults.breaker]
redial = false
consecutive_failures = 3
# Longer than the test on a busy machine.
cooldown = "5m"
"#;

/// Resident memory of a process, KiB.
fn resident_kib(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("read its status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .expect("VmRSS");
    line.trim()
        .trim_end_matches(" kB")
        .parse()
        .expect("a number")
}

#[test]
fn many_destinations_neither_grow_nor_forget() {
    let began = Instant::now();
    let namespace = Namespace::new("many");
    let group = TestCgroup::new("many");
    let agent = Agent::start(&group, CONFIG);
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    let sick: SocketAddr = "127.255.0.1:80".parse().expect("an address");
    for _ in 0..3 {
        assert_eq!(dialer.connect(sick).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(&sick.to_string(), "open");

    let mut resident = Vec::new();
    let rounds = 10;
    for round in 0..rounds {
        let first = format!("127.{}.0.0", 10 + round)
            .parse()
            .expect("an address");
        let errnos = dialer.sweep(first, 80, DESTINATIONS as usize);
        assert_eq!(
            errnos,
            serde_json::json!({"111": DESTINATIONS}),
            "nobody listens"
        );
        assert!(agent.metric("backstop_destinations", &[]) <= Some(ROWS as f64));
        resident.push(resident_kib(agent.pid()));
    }
    // What the allocator keeps goes up and down by some 11 MiB from round to round. Whatever was
    // kept for each destination would come on top: 100 bytes are 18 MiB by the end.
    let growth = resident[resident.len() - 1].saturating_sub(resident[0]);
    assert!(growth < 16 * 1024, "{resident:?} KiB, round by round");

    // Each destination was called once: in a row that is still there, in one that was given up,
    // or in the row of all others. Rows are given up until there is room; then the sum holds.
    let evicted = || {
        agent
            .metric("backstop_destinations_evicted_total", &[])
            .expect("the counter")
    };
    let called = rounds * DESTINATIONS;
    // What a row that is on its way out has counted is nowhere for a moment.
    let (shown, evicted, other) = wait::until("the last eviction", wait::LONGEST, || {
        let (before, status) = (evicted(), agent.status());
        let rows = status["destinations"].as_array().expect("a list");
        let others: Vec<_> = rows
            .iter()
            .filter(|row| row["destination"] == "other")
            .collect();
        let [other] = others[..] else {
            panic!("{} rows named other", others.len())
        };
        let shown = rows.len() as u64 - 2; // not `other`, not the sick one
        let all = shown + before as u64 + other["attempts"].as_u64().expect("a count");
        let is_over = before == evicted() && all >= called;
        is_over.then(|| (shown, before, other.clone()))
    });
    assert_eq!(
        (&other["state"], &other["workload"]),
        (&"closed".into(), &"other".into())
    );
    assert_balanced(&other);
    let in_other = other["attempts"].as_u64().expect("a count");
    assert_eq!(other["failures"]["refused"], in_other);
    assert!(evicted > 0.0);
    let all = shown + evicted as u64 + in_other;
    // The agent's own canaries have rows, too, that are not shown and may have been given up: one at the
    // start, and one each 30 s.
    let own = 8 + began.elapsed().as_secs() / 30;
    assert!(
        (called..=called + own).contains(&all),
        "{shown} + {evicted} + {in_other} = {all}"
    );

    // What is open is not forgotten, nor is there any doubt about it in the kernel.
    let row = agent.row(&sick.to_string());
    assert_eq!(
        (&row["state"], &row["attempts"]),
        (&"open".into(), &3.into()),
        "{row:#}"
    );
    assert_eq!(dialer.connect(sick).errno, libc::ECONNREFUSED);
    assert_eq!(agent.row(&sick.to_string())["rejected"]["breaker"], 1);
}

/// There is room again once the crowd has passed: a new destination has a breaker of its own.
#[test]
fn after_the_crowd_there_is_room() {
    let namespace = Namespace::new("room");
    let group = TestCgroup::new("room");
    let agent = Agent::start(&group, CONFIG);
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    dialer.sweep("127.1.0.0".parse().expect("an address"), 80, 5_000);
    wait::until("room", wait::LONGEST, || {
        (agent.metric("backstop_destinations", &[])? < ROWS as f64 * 0.95).then_some(())
    });
    let late: SocketAddr = "127.200.0.1:80".parse().expect("an address");
    for _ in 0..3 {
        assert_eq!(dialer.connect(late).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(&late.to_string(), "open");
}
