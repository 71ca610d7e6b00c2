//! Connect and close on loopback, with and without Backstop.

use anyhow::Result;

use crate::bench::{
    agent::Agent,
    lab::{self, Lab, Running},
    load::Load,
    report::{Figure, Target},
    slices,
};

/// Rounds of one slice each.
const ROUNDS: usize = 600;
/// Connects in a slice: some 2 ms, shorter than what else runs on a machine lasts.
const CONNECTS: u32 = 128;

/// Measures it.
///
/// # Errors
/// When agent or load cannot be started, or a connect fails.
pub fn measure(lab: &Lab) -> Result<Vec<Figure>> {
    let _agent = Agent::start(lab, "")?;
    let mut loads = loads(lab)?;
    for load in &mut loads {
        load.allowed(CONNECTS)?;
    }
    let times = slices::interleave(ROUNDS, loads.len(), |subject| {
        loads[subject].allowed(CONNECTS)
    })?;
    let [with, first, second] = &times[..] else {
        unreachable!("three loads")
    };
    let (low, high) = slices::interval(with, first);
    Ok(vec![
        Figure::new(
            "connect and close, with / without",
            slices::ratio(with, first),
            "x",
        )
        .target(Target::AtMost(1.10))
        .control(slices::ratio(second, first))
        .note(format!(
            "{ROUNDS} slices of {CONNECTS} connects each; 95 %: {low:.3} to {high:.3}"
        )),
        Figure::new("with", slices::median(with), "us"),
        Figure::new("without", slices::median(first), "us"),
    ])
}

/// One load process with an agent on its cgroup, two without.
pub fn loads(lab: &Lab) -> Result<Vec<Load>> {
    let running = Running {
        cpu: lab::last_processor(),
        first: true,
        real_time: true,
    };
    let cgroups = [&lab.with, &lab.without[0], &lab.without[1]];
    cgroups
        .into_iter()
        .map(|cgroup| Load::start(cgroup, running))
        .collect()
}
