//! Processor time of the agent at 20,000 connects a second.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::Result;

use crate::bench::{
    agent::Agent,
    lab::{CLOSED_PORT, Lab, Running},
    load::Load,
    report::Figure,
    usage,
};

/// Connects a second.
const RATE: u32 = 20_000;
const TIME: Duration = Duration::from_secs(10);

/// Measures it.
///
/// # Errors
/// When agent or load cannot be started.
pub fn measure(lab: &Lab) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    {
        let agent = Agent::start(lab, "")?;
        let mut load = load(lab)?;
        let port = load.port;
        figures.push(usage_at(
            &agent,
            &mut load,
            port,
            "agent, connects established",
        )?);
    }
    let agent = Agent::start_for_loops(lab, "breaker = \"off\"\n", "")?;
    let mut load = load(lab)?;
    let what = "agent, connects refused, breaker off";
    figures.push(usage_at(&agent, &mut load, CLOSED_PORT, what)?);
    Ok(figures)
}

fn load(lab: &Lab) -> Result<Load> {
    let running = Running {
        first: true,
        ..Running::default()
    };
    Load::start(&lab.with, running)
}

fn usage_at(agent: &Agent, load: &mut Load, port: u16, what: &str) -> Result<Figure> {
    let order = format!("pace {RATE} {} {port}", TIME.as_millis());
    let (percent, note) = used_while(agent, || Ok(load.order(&order)?[0]))?;
    Ok(Figure::new(what, percent, "% of a core").note(note))
}

/// Processor time of the agent in per cent of a core while `work` goes on, which says how many
/// connects it made; and a note with their rate and the shares of threads.
///
/// # Errors
/// When the agent is gone, or the work fails.
pub fn used_while(agent: &Agent, work: impl FnOnce() -> Result<u64>) -> Result<(f64, String)> {
    let before = by_name(agent.pid())?;
    let begun = Instant::now();
    let connects = work()?;
    let ns = begun.elapsed().as_nanos() as f64;
    let after = by_name(agent.pid())?;
    let rate = connects as f64 / (ns / 1e9);
    let percent = |name: &str| {
        let used = after[name] - before.get(name).copied().unwrap_or(0);
        used as f64 / ns * 100.0
    };
    let names: Vec<&String> = after.keys().collect();
    let all: f64 = names.iter().map(|name| percent(name)).sum();
    let share: Vec<String> = names
        .iter()
        .map(|name| (name, percent(name)))
        .filter(|(_, percent)| *percent >= 0.05)
        .map(|(name, percent)| format!("{name} {percent:.1}"))
        .collect();
    let mut note = format!("at {rate:.0} connects/s");
    if !share.is_empty() {
        note = format!("{note}; {}", share.join(", "));
    }
    Ok((all, note))
}

/// Time on a processor by name of thread; threads of one name together.
fn by_name(pid: u32) -> Result<BTreeMap<String, u64>> {
    let mut names = BTreeMap::new();
    for (name, ns) in usage::threads(pid)? {
        *names.entry(name).or_default() += ns;
    }
    Ok(names)
}
