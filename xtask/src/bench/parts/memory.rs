//! Memory of agent and maps with 50,000 destinations.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use crate::bench::{
    agent::Agent,
    bpf,
    lab::{Lab, Running},
    load::Load,
    report::{Figure, Target},
    usage,
};

const DESTINATIONS: u32 = 50_000;
const MIB: f64 = 1024.0 * 1024.0;

/// Measures it.
///
/// # Errors
/// When agent or load cannot be started, or the destinations do not come about.
pub fn measure(lab: &Lab) -> Result<Vec<Figure>> {
    let agent = Agent::start(
        lab,
        &format!("[agent]\nmax_destinations = {DESTINATIONS}\n"),
    )?;
    let mut load = Load::start(&lab.with, Running::default())?;
    let order = format!("spread 0 {DESTINATIONS} {}", load.port);
    let established = load.order(&order)?[0];
    ensure!(
        established == u64::from(DESTINATIONS),
        "of {DESTINATIONS} connects on loopback {established} were established"
    );
    // A failure makes the agent look at a destination: the worst case is one for each.
    load.close_listener()?;
    let refused = load.order(&order)?[0];
    ensure!(
        refused == 0,
        "{refused} connects to a closed port were established"
    );
    let pid = agent.pid();
    settle(pid)?;
    let maps = bpf::map_memory(pid)? as f64;
    let own = || usage::memory(pid).map(|memory| (memory.resident - memory.mapped) as f64);
    let (idle, heap) = (own()?, usage::memory(pid)?.anonymous as f64);
    let metrics = agent.metrics()?;
    let kept = metrics.value("backstop_destinations")?;
    settle(pid)?;
    let scraped = own()?;
    let status = agent.command(&["status", "--json"])?;
    settle(pid)?;
    let asked = own()?;
    let mib = |what: &str, bytes: f64| Figure::new(what, bytes / MIB, "MiB");
    Ok(vec![
        mib("agent and maps, 50,000 destinations", idle + maps)
            .target(Target::AtMost(96.0))
            .note(format!(
                "{kept:.0} kept, each with a success and a failure; mapped arrays counted once"
            )),
        mib("agent, without mapped arrays", idle)
            .note(format!("{:.1} MiB of it heap and stacks", heap / MIB)),
        mib("maps", maps),
        mib("agent and maps, after a scrape", scraped + maps)
            .note(format!("{:.0} MiB of text", metrics.len() as f64 / MIB)),
        mib("agent and maps, after status --json", asked + maps)
            .note(format!("{:.0} MiB of text", status.len() as f64 / MIB)),
    ])
}

/// Waits until the agent has dealt with all that was said to it: until it uses almost no processor.
fn settle(pid: u32) -> Result<()> {
    const LOOK: Duration = Duration::from_millis(250);
    let end = Instant::now() + Duration::from_secs(20);
    let used = || usage::threads(pid).map(|all| all.iter().map(|(_, ns)| ns).sum::<u64>());
    let mut last = used()?;
    let mut quiet = 0;
    while quiet < 8 && Instant::now() < end {
        std::thread::sleep(LOOK);
        let now = used()?;
        // Under 4 % of a core: heartbeats and the like.
        quiet = if now - last < 10_000_000 {
            quiet + 1
        } else {
            0
        };
        last = now;
    }
    Ok(())
}
