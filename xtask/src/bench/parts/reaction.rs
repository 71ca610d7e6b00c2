//! From the failure that trips a breaker to the verdict in the kernel.
//!
//! The agent measures it itself (`backstop_reaction_seconds`): from the kernel's time of the fifth
//! refusal to the moment at which the verdict lies in the row. More than 1,000 destinations trip
//! once each. The bounds of the targets are bounds of the histogram, so whether they hold is exact;
//! the percentiles between bounds are interpolated.

use std::time::Instant;

use anyhow::{Result, ensure};

use crate::bench::{
    agent::Agent,
    lab::{self, CLOSED_PORT, Lab, Running},
    load::Load,
    report::{Figure, Target},
};

/// Destinations that trip in each situation.
const TRIPS: u32 = 1200;
/// Pause after each, us: one reaction must not wait for another.
const GAP_US: u32 = 3000;
/// Longer than the trips take.
const LOAD_MS: u32 = 120_000;
/// The agent's histogram of it.
pub const NAME: &str = "backstop_reaction_seconds";

/// Measures it.
///
/// # Errors
/// When agent or load cannot be started, or breakers do not trip.
pub fn measure(lab: &Lab) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    figures.extend(situation(lab, "idle", 0.5, || Ok(Vec::new()))?);
    figures.extend(situation(lab, "at 20,000 connects/s", 1.0, || {
        let running = Running {
            first: true,
            ..Running::default()
        };
        let mut load = Load::start(&lab.with, running)?;
        let port = load.port;
        load.begin(&format!("pace 20000 {LOAD_MS} {port}"))?;
        Ok(vec![load])
    })?);
    figures.extend(situation(lab, "all cores busy", 2.0, || {
        let spin = |_| {
            let mut load = Load::start(&lab.without[0], Running::default())?;
            load.begin(&format!("spin {LOAD_MS}"))?;
            Ok(load)
        };
        lab::processors().into_iter().map(spin).collect()
    })?);
    Ok(figures)
}

fn situation(
    lab: &Lab,
    name: &str,
    target_ms: f64,
    background: impl FnOnce() -> Result<Vec<Load>>,
) -> Result<[Figure; 2]> {
    // No redials, and nothing closes again: only trips are measured.
    let agent = Agent::start_for_loops(
        lab,
        "",
        "[defaults.breaker]\nredial = false\ncooldown = \"5m\"\n",
    )?;
    let mut load = Load::start(&lab.with, Running::default())?;
    let background = background()?;
    let begun = Instant::now();
    load.order(&format!("trips 0 {TRIPS} {GAP_US} {CLOSED_PORT}"))?;
    let seconds = begun.elapsed().as_secs_f64();
    let metrics = agent.metrics()?;
    drop(background);
    let established = metrics.sum("backstop_established_total", "destination=");
    let buckets = metrics.buckets(NAME);
    let count = buckets.last().map_or(0.0, |(_, count)| *count);
    ensure!(
        count >= f64::from(TRIPS) * 0.99,
        "of {TRIPS} destinations with five failures in a row {count} were tripped"
    );
    let within = buckets
        .iter()
        .find(|(bound, _)| bound * 1000.0 >= target_ms - 1e-9)
        .map_or(0.0, |(_, up_to)| up_to / count * 100.0);
    Ok([
        Figure::new(
            format!("{name}, p50"),
            quantile(&buckets, 0.5) * 1000.0,
            "ms",
        ),
        Figure::new(
            format!("{name}, p99"),
            quantile(&buckets, 0.99) * 1000.0,
            "ms",
        )
        .target(Target::AtMost(target_ms))
        .note(format!(
            "{count:.0} trips, {within:.2} % of them within {target_ms} ms; beside them {:.0} \
             connects/s",
            established / seconds
        )),
    ])
}

/// The quantile of cumulative buckets, by straight lines between their bounds; the bound below for
/// what lies beyond the last one.
pub fn quantile(buckets: &[(f64, f64)], share: f64) -> f64 {
    let rank = buckets.last().map_or(0.0, |(_, count)| count * share);
    let (mut low, mut below) = (0.0, 0.0);
    for (bound, up_to) in buckets {
        if *up_to >= rank {
            if bound.is_infinite() || *up_to <= below {
                return low;
            }
            return low + (bound - low) * (rank - below) / (up_to - below);
        }
        (low, below) = (*bound, *up_to);
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_lie_between_their_bounds() {
        let buckets = [
            (1.0, 50.0),
            (2.0, 90.0),
            (4.0, 100.0),
            (f64::INFINITY, 100.0),
        ];
        assert_eq!(quantile(&buckets, 0.25), 0.5);
        assert_eq!(quantile(&buckets, 0.5), 1.0);
        assert_eq!(quantile(&buckets, 0.95), 3.0);
        assert_eq!(quantile(&[(1.0, 0.0), (f64::INFINITY, 10.0)], 0.99), 1.0);
        assert_eq!(quantile(&[], 0.99), 0.0);
    }
}
