//! A chain of services A, B, C, D in which each asks the next one twice: what a failure of D multiplies to.

#![expect(
    clippy::print_stdout,
    reason = "figures for docs/RETRIES.md, shown by --nocapture"
)]

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::SocketAddr,
    time::Duration,
};

use serde_json::Value;
use tests::{
    agent::AgentOptions,
    cgroup::TestCgroup,
    clients,
    net::TestNet,
    process::{Program, Running, python},
    server::{Server, read_head},
};

const D: SocketAddr = TestNet::server4(8080);
const LONG: Duration = Duration::from_secs(90);
/// Calls of A by its user, one after the other.
const CALLS: u64 = 300;

/// A layer that listens on this port and asks the one at that address.
fn layer(group: &TestCgroup, net: &TestNet, port: u16, next: SocketAddr) -> Running {
    let mut layer = Program::new(python())
        .arg(clients::source("layer.py"))
        .args([
            port.to_string(),
            next.ip().to_string(),
            next.port().to_string(),
        ])
        .in_cgroup(group)
        .in_netns(&net.client)
        .within(LONG)
        .spawn();
    let mut line = String::new();
    let output = layer.stdout.as_mut().expect("piped");
    BufReader::new(output).read_line(&mut line).expect("ready");
    assert_eq!(line, "ready\n");
    layer
}

/// Requests that D gets for each call of A's user while it fails, with this configuration.
fn load_on_d(config: &str) -> f64 {
    let net = TestNet::new();
    let parent = TestCgroup::new("chain");
    let groups = ["a", "b", "c"].map(|label| parent.child(label));
    let agent = AgentOptions::new(&parent).config(config).start();
    let server = Server::with(&net.server, D, |mut stream| {
        if read_head(&mut stream).is_some() {
            let _ = stream
                .write_all(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        }
    });
    let here = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let _layers = [
        layer(&groups[2], &net, 9003, D),
        layer(&groups[1], &net, 9002, here(9003)),
        layer(&groups[0], &net, 9001, here(9002)),
    ];
    // The user is none of the chain.
    let told: Value = serde_json::from_str(
        &Program::new(python())
            .arg(clients::source("retrying.py"))
            .args(["http://127.0.0.1:9001/", "sequence"])
            .args([
                CALLS.to_string(),
                "0.01".into(),
                "0".into(),
                "0".into(),
                "0".into(),
            ])
            .in_netns(&net.client)
            .within(LONG)
            .run()
            .good(),
    )
    .expect("counts");
    assert_eq!(told["failed"], CALLS);
    for row in agent.status()["destinations"].as_array().expect("rows") {
        println!(
            "{} of {}: {} attempts, {} retries, rejected {}",
            row["destination"],
            row["workload"],
            row["attempts"],
            row["retry"]["retries"],
            row["rejected"]
        );
    }
    server.accepts() as f64 / CALLS as f64
}

#[test]
fn budgets_alone_keep_a_chain_from_multiplying() {
    let without = load_on_d("[defaults]\nbreaker = \"off\"\nretry = \"off\"\n");
    let budgets = load_on_d(
        "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = \"off\"\nmin_per_second = 0\n",
    );
    let all = load_on_d("");
    println!(
        "load on D: {without:.2} without, {budgets:.2} with budgets alone, {all:.2} with everything"
    );
    assert!(without > 7.9, "{without}");
    assert!(budgets <= 1.35, "{budgets}");
    assert!(all <= 1.35, "{all}");
}
