//! A chain of services A, B, C, D in which each asks the next one twice: what a failure of D multiplies to.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use serde_json::Value;

use super::server::scattered;
use crate::{
    agent::AgentOptions,
    cgroup::TestCgroup,
    clients,
    net::TestNet,
    process::{Program, Running, python},
    server::{Server, read_head},
};

const D: SocketAddr = TestNet::server4(8080);

/// Breaker and limit off, no floor.
pub const BUDGETS_ALONE: &str =
    "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = \"off\"\nmin_per_second = 0\n";

/// A layer that listens on this port and asks the one at that address.
fn layer(
    group: &TestCgroup,
    net: &TestNet,
    port: u16,
    next: SocketAddr,
    within: Duration,
) -> Running {
    let mut layer = Program::new(python())
        .arg(clients::source("layer.py"))
        .args([
            port.to_string(),
            next.ip().to_string(),
            next.port().to_string(),
        ])
        .in_cgroup(group)
        .in_netns(&net.client)
        .within(within)
        .spawn();
    let mut line = String::new();
    let output = layer.stdout.as_mut().expect("piped");
    BufReader::new(output).read_line(&mut line).expect("ready");
    assert_eq!(line, "ready\n");
    layer
}

/// Requests that D gets for each of `calls` calls of A's user, while D fails so many of a hundred requests, with
/// this configuration, or without Backstop.
pub fn load_on_d(config: Option<&str>, percent: u64, calls: u64) -> f64 {
    let within = Duration::from_secs(60) + Duration::from_millis(500) * calls as u32;
    let net = TestNet::new();
    let parent = TestCgroup::new("chain");
    let groups = ["a", "b", "c"].map(|label| parent.child(label));
    let _agent = config.map(|config| AgentOptions::new(&parent).config(config).start());
    let served = AtomicU64::new(0);
    let server = Server::with(&net.server, D, move |mut stream| {
        if read_head(&mut stream).is_some() {
            let random = scattered(served.fetch_add(1, Ordering::Relaxed));
            let status = if random % 100 < percent {
                "503 No"
            } else {
                "200 OK"
            };
            let head = "Content-Length: 0\r\nConnection: close\r\n\r\n";
            let _ = stream.write_all(format!("HTTP/1.1 {status}\r\n{head}").as_bytes());
        }
    });
    let here = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let _layers = [
        layer(&groups[2], &net, 9003, D, within),
        layer(&groups[1], &net, 9002, here(9003), within),
        layer(&groups[0], &net, 9001, here(9002), within),
    ];
    // The user is none of the chain.
    let told: Value = serde_json::from_str(
        &Program::new(python())
            .arg(clients::source("retrying.py"))
            .args(["http://127.0.0.1:9001/", "sequence"])
            .args([
                calls.to_string(),
                "0.01".into(),
                "0".into(),
                "0".into(),
                "0".into(),
            ])
            .in_netns(&net.client)
            .within(within)
            .run()
            .good(),
    )
    .expect("counts");
    assert_eq!(told["made"], calls);
    server.accepts() as f64 / calls as f64
}
