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
        &format!(
            "[agent]\nmax_destinations = {DESTINATIONS}\n[defaults.breaker]\ncooldown = \"5m\"\n"
        ),
    )?;
    let mut load = Load::start(&lab.with, Running::default())?;
    // The worst case: each has a failed exchange, and a breaker that opens on connects, with a
    // schedule of dials. Open ones are never given up, so all rows are in use in the end.
    let order = format!("unanswered 0 {DESTINATIONS} {}", load.port);
    let sent = load.order(&order)?[0];
    ensure!(
        sent == u64::from(DESTINATIONS),
        "of {DESTINATIONS} requests on loopback {sent} were sent"
    );
    load.close_listener()?;
    let order = format!("trips 0 {DESTINATIONS} 0 {}", load.port);
    load.order(&order)?;
    let pid = agent.pid();
    settle(pid)?;
    let maps = bpf::map_memory(pid)? as f64;
    let own = || usage::memory(pid).map(|memory| (memory.resident - memory.mapped) as f64);
    let (idle, heap) = (own()?, usage::memory(pid)?.anonymous as f64);

    usage::forget_peak(pid)?;
    let begun = Instant::now();
    let metrics = agent.metrics()?;
    let scrape_ms = begun.elapsed().as_secs_f64() * 1000.0;
    // What is mapped is all resident by now, and in both.
    let peak = || usage::peak(pid).map(|peak| peak as f64);
    let mapped = usage::memory(pid)?.mapped as f64;
    let scraping = peak()? - mapped;
    let kept = metrics.value("backstop_destinations")?;
    let open = metrics.sum("backstop_breaker_state", "state=\"open\"");
    settle(pid)?;
    let scraped = own()?;

    usage::forget_peak(pid)?;
    let begun = Instant::now();
    let status = agent.destinations()?.len();
    let status_ms = begun.elapsed().as_secs_f64() * 1000.0;
    let asking = peak()? - mapped;
    settle(pid)?;
    let asked = own()?;
    let mib = |what: &str, bytes: f64| Figure::new(what, bytes / MIB, "MiB");
    Ok(vec![
        mib("agent and maps, 50,000 destinations", idle + maps)
            .target(Target::AtMost(96.0))
            .note(format!(
                "{kept:.0} kept, {open:.0} open, each with a failed exchange; mapped arrays \
                 counted once"
            )),
        mib("agent, without mapped arrays", idle)
            .note(format!("{:.1} MiB of it heap and stacks", heap / MIB)),
        mib("maps", maps),
        Figure::new("a scrape takes", scrape_ms, "ms").note(format!(
            "{:.0} MiB of text; {:.0} MiB of memory meanwhile, maps included",
            metrics.len() as f64 / MIB,
            (scraping + maps) / MIB
        )),
        mib("agent and maps, after a scrape", scraped + maps),
        Figure::new("a status of all takes", status_ms, "ms").note(format!(
            "{:.0} MiB of JSON; {:.0} MiB of memory meanwhile, maps included",
            status as f64 / MIB,
            (asking + maps) / MIB
        )),
        mib("agent and maps, after a status of all", asked + maps),
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
        quiet = if now.saturating_sub(last) < 10_000_000 {
            quiet + 1
        } else {
            0
        };
        last = now;
    }
    Ok(())
}
