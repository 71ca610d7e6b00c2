//! A storm: fifty programs, each of which retries five times at once, against a server that fails most of what
//! it is asked.

use std::time::Duration;

use serde_json::Value;

use super::{TO, server::Labelling};
use crate::{
    agent::Agent,
    cgroup::TestCgroup,
    clients,
    net::TestNet,
    process::{Program, Running, python},
};

const CLIENTS: u32 = 50;
/// Calls a second of each.
const RATE: &str = "2.5";
const RETRIES: &str = "5";
/// So many of a hundred requests fail.
const PERCENT: u64 = 60;

/// What came out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Storm {
    /// Operations of all clients: their first attempts.
    pub operations: u64,
    /// Operations that went well in the end.
    pub good: u64,
    /// Requests that the server got.
    pub attempts: u64,
}

/// Makes one, with this configuration, or without Backstop.
pub fn storm(config: Option<&str>, seconds: u64) -> Storm {
    let (net, group) = (TestNet::new(), TestCgroup::new("storm"));
    let _agent = config.map(|config| Agent::start(&group, config));
    let server = Labelling::start(&net.server, &[TO], PERCENT, None);
    let clients: Vec<Running> = (0..CLIENTS)
        .map(|_| {
            Program::new(python())
                .arg(clients::source("truth.py"))
                .args(["sequence".to_owned(), TO.ip().to_string()])
                .args([TO.port().to_string(), seconds.to_string()])
                .args([RATE, RETRIES])
                .in_cgroup(&group)
                .in_netns(&net.client)
                .within(Duration::from_secs(seconds + 60))
                .spawn()
        })
        .collect();
    let mut storm = Storm::default();
    for client in clients {
        let told: Value = serde_json::from_str(&client.wait().good()).expect("counts");
        let number = |key: &str| told[key].as_u64().expect("a count");
        storm.operations += number("calls");
        storm.good += number("good");
    }
    storm.attempts = server.seen().requests;
    storm
}
