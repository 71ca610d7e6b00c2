//! A herd: many clients that fail at once and retry at once, with backoff on.

#![expect(
    clippy::print_stdout,
    reason = "figures for docs/RETRIES.md, shown by --nocapture"
)]

use std::time::Duration;

use backstop::kernel::clock;
use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    clients,
    interpreter::Interpreter,
    net::TestNet,
    process::{Program, python},
    wait,
};

const CLIENTS: usize = 1_000;
const LONGEST_MS: u64 = 100;
const MOST_TRIES: u32 = 12;
const CONFIG: &str = "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\n\
                      backoff = { base = \"100ms\", max = \"100ms\" }\n";

/// Notes when the kernel saw each SYN to port 8080 that came in, by its source port.
const SEE: &str = r#"
import struct, threading
packets = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
packets.setsockopt(socket.SOL_SOCKET, 33, 1 << 23)  # SO_RCVBUFFORCE
packets.setsockopt(socket.SOL_SOCKET, 35, 1)  # SO_TIMESTAMPNS
seen = []
def see():
    while True:
        data, said, _, sender = packets.recvmsg(128, 64)
        if len(data) < 34 or data[9] != 6 or sender[2] == socket.PACKET_OUTGOING:
            continue
        tcp = data[(data[0] & 15) * 4:]
        source, to = struct.unpack("!HH", tcp[:4])
        if to == 8080 and tcp[13] & 0x12 == 2:
            seconds, nanos = struct.unpack("qq", said[0][2][:16])
            seen.append([source, seconds * 10**9 + nanos])
threading.Thread(target=see, daemon=True).start()
"#;

/// Kolmogorov and Smirnov's largest distance at which the hypothesis of one distribution is not yet
/// rejected with p = 0.01.
fn largest_distance(samples: usize) -> f64 {
    1.628 / (samples as f64).sqrt()
}

/// When the SYN of each retry came (ns), and after how many ticks.
fn stampede() -> (Vec<u64>, Vec<u64>) {
    let (net, group) = (TestNet::new(), TestCgroup::new("herd"));
    let agent = Agent::start(&group, CONFIG);
    let mut server = Interpreter::start_outside(&net.server);
    server.run(SEE);
    let told: Vec<(u64, u64)> = serde_json::from_str(
        &Program::new(python())
            .arg(clients::source("herd.py"))
            .args([
                "10.77.0.2".to_owned(),
                "8080".to_owned(),
                CLIENTS.to_string(),
            ])
            .in_cgroup(&group)
            .in_netns(&net.client)
            .within(Duration::from_secs(180))
            .run()
            .good(),
    )
    .expect("times");
    assert_eq!(told.len(), CLIENTS);
    let row = agent.wait_row("10.77.0.2:8080", "quiet", |row| row["in_flight"] == 0);
    // (Of so many threads some share a place with another, and their retries are missed.)
    let retries = row["retry"]["retries"].as_u64() >= Some(CLIENTS as u64 * 97 / 100);
    assert!(retries, "{row:#}");
    // Who sees them may be behind.
    wait::until("all SYNs", Duration::from_secs(60), || {
        (server.value("len(seen)").as_u64() >= Some(2 * CLIENTS as u64)).then_some(())
    });
    let seen = server.value("seen");
    let seen = seen.as_array().expect("a list");
    assert_eq!(seen.len(), 2 * CLIENTS, "first attempts and retries");
    let number = |value: &Value| value.as_u64().expect("a number");
    let tick = clock::tick_ns();
    let (mut arrivals, mut waits) = (Vec::new(), Vec::new());
    for (port, called) in told {
        // A port may be used again when its connect has failed.
        let syns = seen.iter().filter(|syn| number(&syn[0]) == port);
        let at = syns.map(|syn| number(&syn[1])).filter(|&at| at >= called);
        let at = at.min().expect("its SYN");
        arrivals.push(at);
        waits.push((at - called).div_ceil(tick));
    }
    (arrivals, waits)
}

#[test]
fn a_herd_is_spread() {
    let tick = clock::tick_ns();
    let longest = LONGEST_MS * 1_000_000 / tick;
    // Whatever is random misses now and then, and so does a busy machine. (What is not uniform, or not
    // spread, misses always.)
    let (mut uniform, mut spread) = (0, 0);
    for _ in 0..MOST_TRIES {
        if uniform >= 2 && spread >= 2 {
            break;
        }
        let (mut arrivals, mut waits) = stampede();
        arrivals.sort_unstable();
        let busiest = arrivals
            .iter()
            .enumerate()
            .map(|(first, begin)| arrivals[first..].partition_point(|at| at - begin < 10_000_000))
            .max()
            .expect("arrivals");
        let share = arrivals.len() as u64 * 10 / LONGEST_MS;
        // (What is held for no tick leaves at once.)
        for wait in &mut waits {
            *wait = if *wait <= 1 { 0 } else { *wait }.min(longest);
        }
        waits.sort_unstable();
        let below = |ticks: u64| waits.partition_point(|&wait| wait <= ticks) as f64;
        let distance = (1..=longest)
            .map(|ticks| {
                let expected = (ticks + 1) as f64 / (longest + 1) as f64;
                (below(ticks) / waits.len() as f64 - expected).abs()
            })
            .fold(0.0, f64::max);
        println!(
            "busiest 10 ms: {busiest} of {} retries, uniform share {share}; distance {distance:.3} of {:.3}",
            arrivals.len(),
            largest_distance(waits.len())
        );
        spread += u32::from(busiest as u64 * 10 <= share * 16);
        // When connect() was called is known to a tick only: threads wait for their turn.
        let unsure = 1.0 / (longest + 1) as f64;
        uniform += u32::from(distance < largest_distance(waits.len()) + unsure);
    }
    assert!(
        uniform >= 2 && spread >= 2,
        "{uniform} and {spread} of {MOST_TRIES}"
    );
}
