//! A connect refused by an open breaker, against one refused by the network.

use anyhow::Result;

use super::connect::loads;
use crate::bench::{
    agent::Agent,
    lab::{CLOSED_PORT, Lab},
    report::{Figure, Target},
    slices,
};

const ROUNDS: usize = 600;
const CONNECTS: u32 = 128;

/// Measures it.
///
/// # Errors
/// When agent or load cannot be started, or a connect is not refused.
pub fn measure(lab: &Lab) -> Result<Vec<Figure>> {
    let agent = Agent::start_for_loops(lab, "", "")?;
    let mut loads = loads(lab)?;
    agent.command(&["trip", &format!("127.0.0.1:{CLOSED_PORT}")])?;
    for load in &mut loads {
        load.refused(CONNECTS, CLOSED_PORT)?;
    }
    let times = slices::interleave(ROUNDS, loads.len(), |subject| {
        loads[subject].refused(CONNECTS, CLOSED_PORT)
    })?;
    let [with, first, second] = &times[..] else {
        unreachable!("three loads")
    };
    // Both sorts end with the same errno: make sure that it was Backstop.
    let refused = agent
        .metrics()?
        .sum("backstop_rejected_total", "reason=\"breaker\"");
    let made = (ROUNDS as u32 + 1) * CONNECTS;
    anyhow::ensure!(
        refused >= f64::from(made),
        "of {made} connects to a tripped destination Backstop refused {refused}"
    );
    let (low, high) = slices::interval(with, first);
    Ok(vec![
        Figure::new(
            "refused by Backstop / by loopback",
            slices::ratio(with, first),
            "x",
        )
        .target(Target::AtMost(0.5))
        .control(slices::ratio(second, first))
        .note(format!(
            "{ROUNDS} slices of {CONNECTS} connects each, closing not timed; 95 %: {low:.3} to {high:.3}"
        )),
        Figure::new("by Backstop", slices::median(with), "us"),
        Figure::new("by loopback", slices::median(first), "us"),
    ])
}
