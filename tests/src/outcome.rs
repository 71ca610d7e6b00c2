//! What became of exchanges: the counters of a row that tell it.

use serde_json::Value;

use crate::agent::Agent;

/// Counters outside `failures` that an exchange may end in.
const BESIDE: [&str; 3] = ["responses", "abandoned", "stale"];

/// Counters of a row that are not 0, `failures` by their kind.
fn counted(row: &Value) -> Vec<(String, u64)> {
    let failures = row["failures"].as_object().into_iter().flatten();
    let beside = BESIDE.iter().map(|name| ((*name).to_owned(), &row[name]));
    let mut all: Vec<_> = failures
        .map(|(name, value)| (name.clone(), value))
        .chain(beside)
        .filter_map(|(name, value)| Some((name, value.as_u64()?)))
        .filter(|(_, value)| *value != 0)
        .collect();
    all.sort();
    all
}

/// Waits until these outcomes have been counted, no other, and nothing is under way.
#[track_caller]
pub fn expect(agent: &Agent, destination: &str, wanted: &[(&str, u64)]) -> Value {
    let mut wanted: Vec<_> = wanted
        .iter()
        .map(|(name, value)| ((*name).to_owned(), *value))
        .collect();
    wanted.sort();
    agent.wait_row(destination, &format!("{wanted:?}"), |row| {
        row["in_flight"] == 0 && counted(row) == wanted
    })
}

/// The calls and failures in the window of exchanges.
pub fn judged(row: &Value) -> (u64, u64) {
    let window = &row["windows"]["exchanges"];
    let number = |name: &str| window[name].as_u64().expect("a count");
    (number("calls"), number("failures"))
}
