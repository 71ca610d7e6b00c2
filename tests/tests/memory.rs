//! What the agent costs in memory when it is at its worst, and that histograms are lent clean.

use std::{collections::HashMap, fs, net::IpAddr};

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    dialer::Dialer,
    net::{Namespace, TestNet},
    server::Server,
    wait::{self, LONGEST},
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const MIB: u64 = 1 << 20;

/// Heap and stacks of a process, bytes.
fn anonymous(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("read its status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.expect("RssAnon") * 1024
}

/// Memory of all maps that a process holds, bytes.
fn maps(pid: i32) -> u64 {
    let folder = fs::read_dir(format!("/proc/{pid}/fdinfo")).expect("list its descriptors");
    let texts = folder.filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok());
    let maps: HashMap<u64, u64> = texts
        .filter_map(|text| {
            let field = |name: &str| {
                let mut lines = text.lines();
                lines.find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok())
            };
            Some((field("map_id:")?, field("memlock:")?))
        })
        .collect();
    maps.values().sum()
}

/// 50,000 destinations that all fail: every row in use, the journal full. Heap, stacks and maps stay
/// below `bound` (MiB); the pages of the program (some 6 MiB of the release binary) come to that.
fn fifty_thousand_that_fail(label: &str, breaker: &str, bound: u64) {
    const DESTINATIONS: u64 = 50_000;
    let namespace = Namespace::new(label);
    let group = TestCgroup::new(label);
    let config = format!("[agent]\nmax_destinations = 50000\n[defaults.breaker]\n{breaker}\n");
    let agent = Agent::start(&group, &config);
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    // The last of them may find all rows taken, and count as other.
    for part in 0..5 {
        let first = format!("127.{}.0.0", 10 + part)
            .parse()
            .expect("an address");
        let errnos = dialer.sweep(first, 80, DESTINATIONS as usize / 5);
        assert_eq!(errnos, serde_json::json!({"111": DESTINATIONS / 5}));
    }
    wait::until("most rows in use", LONGEST, || {
        let rows = agent.metric("backstop_destinations", &[])? as u64;
        (rows >= DESTINATIONS * 85 / 100).then_some(())
    });
    // What was needed to answer that goes back within seconds.
    let pid = agent.pid();
    let mut last = (0, 0);
    let measured = wait::until("heap and maps within the bound", LONGEST, || {
        let measured = (anonymous(pid), maps(pid));
        let now = (measured.0 / MIB, measured.1 / MIB);
        if now != last {
            eprintln!("{} MiB of heap and stacks, {} MiB of maps", now.0, now.1);
            last = now;
        }
        (measured.0 + measured.1 < bound * MIB).then_some(measured)
    });
    // Maps that grow with the destinations: row, retries, both windows, key.
    assert!(measured.1 < 74 * MIB, "{measured:?}");
}

#[test]
fn fifty_thousand_failing_destinations_are_within_the_bound() {
    fifty_thousand_that_fail("memory", "", 94);
}

/// The worst that can be: each breaker open, with a schedule of dials.
#[test]
fn fifty_thousand_open_breakers_are_within_the_bound() {
    let opens = "consecutive_failures = 1\ncooldown = \"5m\"";
    fifty_thousand_that_fail("memory-open", opens, 108);
}

/// Rows come and go, with their histograms, while many threads make them: whatever histogram a row
/// gets is empty, and nobody else's. So each counts exactly what its row counts.
#[test]
fn histograms_are_lent_empty() {
    let (net, group) = (TestNet::new(), TestCgroup::new("lent"));
    let agent = Agent::start(
        &group,
        "[agent]\nmax_destinations = 64\n[defaults]\nbreaker = \"off\"\n",
    );
    // Ports of one server: more destinations than rows, and more rows than stay.
    let servers: Vec<Server> = (0..40)
        .map(|_| Server::start(&net.server, TestNet::server4(0)))
        .collect();
    let mut dialers: Vec<Dialer> = (0..2)
        .map(|_| Dialer::start(DIAL, &group, &net.client))
        .collect();
    let mut seen = 0;
    let mut shown = Value::Null;
    for round in 0..12 {
        for server in &servers {
            for dialer in &mut dialers {
                dialer.order(&format!("burst 4 {}", server.address()));
            }
        }
        for _ in &servers {
            for dialer in &mut dialers {
                dialer.answer();
            }
        }
        // Push them all out, so that the next round finds histograms that others have had.
        let others = IpAddr::from([127, 1, round, 1]);
        // A row that is being given up may be read in pieces: it is gone with the next look.
        seen += wait::until("each histogram to have what its row has", LONGEST, || {
            let status = agent.status();
            let rows = status["destinations"].as_array()?;
            // Row `other` has no histogram of connects.
            let own = || rows.iter().filter(|row| row["destination"] != "other");
            let count = |row: &Value| row["connect_latency_us"]["count"].as_u64();
            let other = own().find(|row| count(row) != row["established"].as_u64());
            let now = other.map_or(Value::Null, |row| {
                serde_json::json!([
                    row["destination"],
                    row["established"],
                    row["connect_latency_us"]
                ])
            });
            let exact = now.is_null();
            if now != shown {
                eprintln!("round {round}: {now}");
                shown = now;
            }
            exact.then(|| own().filter_map(count).sum::<u64>())
        });
        let mut port = 80;
        wait::until("the rows of the servers to go", LONGEST, || {
            let status = agent.status();
            let rows = status["destinations"].as_array()?.clone();
            let of_servers = |row: &&Value| {
                row["established"].as_u64() > Some(0) && row["destination"] != "other"
            };
            if rows.iter().filter(of_servers).count() <= 8 {
                return Some(());
            }
            dialers[0].sweep(others, port, 60);
            port += 1;
            None
        });
    }
    assert!(seen > 1000, "{seen}");
}
