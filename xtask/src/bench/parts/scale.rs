//! A large node: 100,000 destinations, 1,000 of them open and dialled by the agent, 20,000 calls a
//! second all over the others, some of which fail.

use anyhow::{Result, ensure};

use super::{
    cpu::used_while,
    reaction::{NAME, quantile},
};
use crate::bench::{
    agent::Agent,
    lab::{CLOSED_PORT, Lab, Running},
    load::Load,
    report::{Figure, Target},
};

/// Rows of the table: it is full at nine tenths, from where on the idlest are given up.
const TABLE: u32 = 112_000;
/// Destinations, in the end.
const DESTINATIONS: u32 = 100_000;
/// Destinations that open before anything is measured.
const OPEN: u32 = 1_000;
/// Destinations that open while it is measured.
const TRIPS: u32 = 1_200;
/// Healthy destinations: all others.
const HEALTHY: u32 = DESTINATIONS - OPEN - TRIPS;
/// Calls a second, how long, and how many of 1,000 fail.
const RATE: u32 = 20_000;
const TIME_MS: u32 = 10_000;
const FAILING: u32 = 50;
/// Between two destinations that trip, us: they are spread over the time.
const GAP_US: u32 = 7_000;
/// Targets.
const CORE_PERCENT: f64 = 20.0;
const REACTION_MS: f64 = 2.0;

/// Measures it.
///
/// # Errors
/// When agent or load cannot be started, or the destinations do not come about.
pub fn measure(lab: &Lab) -> Result<Vec<Figure>> {
    // With everything in force; only the cooldown is long, so that what is open stays so.
    let agent = Agent::start(
        lab,
        &format!("[agent]\nmax_destinations = {TABLE}\n[defaults.breaker]\ncooldown = \"5m\"\n"),
    )?;
    let running = Running {
        first: true,
        ..Running::default()
    };
    let mut crowd = Load::start(&lab.with, running)?;
    let mut tripping = Load::start(&lab.with, running)?;
    let order = format!("spread 0 {HEALTHY} {}", crowd.port);
    let established = crowd.order(&order)?[0];
    ensure!(
        established == u64::from(HEALTHY),
        "of {HEALTHY} connects on loopback {established} were established"
    );
    tripping.order(&format!("trips 0 {OPEN} 0 {CLOSED_PORT}"))?;
    let before = agent.metrics()?;
    let order = format!("crowd {HEALTHY} {RATE} {TIME_MS} {FAILING} {}", crowd.port);
    let mut failed = 0;
    let (used, note) = used_while(&agent, || {
        tripping.begin(&format!("trips {OPEN} {TRIPS} {GAP_US} {CLOSED_PORT}"))?;
        let answer = crowd.order(&order)?;
        failed = answer[1];
        tripping.answer()?;
        Ok(answer[0])
    })?;
    let after = agent.metrics()?;
    let kept = after.value("backstop_destinations")?;
    // Metrics show the busiest only.
    let open = agent.destinations()?.matches("\"state\":\"open\"").count();
    let buckets: Vec<(f64, f64)> = after
        .buckets(NAME)
        .into_iter()
        .zip(before.buckets(NAME))
        .map(|((bound, after), (_, before))| (bound, after - before))
        .collect();
    let count = buckets.last().map_or(0.0, |(_, count)| *count);
    ensure!(
        count >= f64::from(TRIPS) * 0.99,
        "of {TRIPS} destinations with five failures in a row {count} were tripped"
    );
    Ok(vec![
        Figure::new("agent", used, "% of a core")
            .target(Target::AtMost(CORE_PERCENT))
            .note(format!(
                "{note}; {failed} of them failed; {kept:.0} destinations, {open} open at the end"
            )),
        Figure::new("reaction, p99", quantile(&buckets, 0.99) * 1000.0, "ms")
            .target(Target::AtMost(REACTION_MS))
            .note(format!("{count:.0} trips meanwhile")),
    ])
}
