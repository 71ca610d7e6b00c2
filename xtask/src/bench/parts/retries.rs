//! Time of the connect hook for each thing that it may decide about a retry, and with retries off.

use anyhow::{Result, ensure};

use crate::bench::{
    agent::Agent,
    bpf,
    lab::{self, CLOSED_PORT, Lab, Running},
    load::Load,
    report::{Figure, Target},
    slices,
};

/// Looks at the statistics, with that many connects between two of them.
const ROUNDS: usize = 60;
const CONNECTS: u32 = 512;
/// Of calls without a pause these, in so many rounds: the pace of such a caller is learnt in a part of the time,
/// and after each pause, so that short rounds would show nothing else.
const BUSY: (usize, u32) = (10, 16_384);
/// What the decision may take, ns.
const MOST_NS: f64 = 300.0;

const OFF: &str = "[defaults]\nbreaker = \"off\"\nretry = \"off\"\n";
/// All that is taken for a retry passes.
const PASSES: &str = "[defaults]\nbreaker = \"off\"\n\
                      [defaults.retry]\nlimit = \"off\"\nbudget = 1.0\nmin_per_second = 1000000\n";
/// All but the first three attempts of an operation are refused, at once, for as long as is measured.
const REFUSES: &str = "[defaults]\nbreaker = \"off\"\n\
                       [defaults.retry]\nwindow = \"1h\"\nspin_per_second = \"off\"\n";

/// What the caller does.
#[derive(Clone, Copy)]
enum State {
    /// Connects and closes without a pause, and nothing has failed of late.
    Busy,
    /// The same with pauses, so that its pace is learnt of every call.
    Calm,
    /// The same, while something has failed within the window.
    Watched,
    /// Connects to what refuses, closes, and connects again.
    Again,
}

/// Measures it.
///
/// # Errors
/// When agent or load cannot be started, the kernel keeps no statistics, or something else was decided than what
/// is to be measured.
pub fn measure(lab: &Lab) -> Result<Vec<Figure>> {
    let busy_off = connect4(lab, OFF, State::Busy)?;
    let calm_off = connect4(lab, OFF, State::Calm)?;
    let again_off = connect4(lab, OFF, State::Again)?;
    let busy = connect4(lab, PASSES, State::Busy)?;
    let calm = connect4(lab, PASSES, State::Calm)?;
    let watched = connect4(lab, PASSES, State::Watched)?;
    let passes = connect4(lab, PASSES, State::Again)?;
    let refused = connect4(lab, REFUSES, State::Again)?;
    let busy_again = connect4(lab, OFF, State::Busy)?;
    ensure!(
        busy.retries + calm.retries + watched.retries < 0.01
            && passes.retries > 0.95
            && refused.refused > 0.95,
        "of fresh calls {:.3}, {:.3} and {:.3} were taken for retries, of retries {:.3}, and {:.3} were refused",
        busy.retries,
        calm.retries,
        watched.retries,
        passes.retries,
        refused.refused
    );
    let more = |what: &str, with: &Spent, without: &Spent, note: &str| {
        Figure::new(what, with.ns - without.ns, "ns")
            .target(Target::AtMost(MOST_NS))
            .note(format!(
                "{:.0} ns against {:.0}; {note}",
                with.ns, without.ns
            ))
    };
    Ok(vec![
        more(
            "nothing has failed",
            &busy,
            &busy_off,
            "established, one after the other without a pause",
        )
        .control(busy_again.ns / busy_off.ns),
        more(
            "nothing has failed, and the pace is learnt",
            &calm,
            &calm_off,
            "established, after pauses",
        ),
        more(
            "a fresh call, while something fails",
            &watched,
            &calm_off,
            "established, too",
        ),
        more(
            "a retry that passes",
            &passes,
            &again_off,
            "refused by loopback",
        ),
        Figure::new("a retry that is refused, all of the hook", refused.ns, "ns").note(format!(
            "no socket is stamped; {:.0} ns for one that passes",
            passes.ns
        )),
    ])
}

/// What the hook does for one connect.
struct Spent {
    ns: f64,
    /// Share of what was taken for a retry and passed.
    retries: f64,
    /// Share of what was refused as a retry.
    refused: f64,
}

/// The median over many rounds.
fn connect4(lab: &Lab, configuration: &str, state: State) -> Result<Spent> {
    let running = Running {
        cpu: lab::last_processor(),
        first: true,
        real_time: true,
    };
    let agent = Agent::start(lab, configuration)?;
    let mut load = Load::start(&lab.with, running)?;
    let mut round = || match state {
        State::Busy => load.allowed(BUSY.1).map(|_| ()),
        State::Calm => load.allowed(CONNECTS).map(|_| ()),
        State::Watched => {
            let port = load.port;
            let sent = load.order(&format!("failed {port}"))?;
            ensure!(sent == [1], "no request was sent");
            load.allowed(CONNECTS).map(|_| ())
        }
        State::Again => {
            let others = load.order(&format!("again {CONNECTS} {CLOSED_PORT}"))?;
            ensure!(others == [0], "{others:?} connects were not refused");
            Ok(())
        }
    };
    round()?;
    let _statistics = bpf::statistics()?;
    let of = |agent: &Agent| -> Result<(u64, u64)> {
        let programs = bpf::programs(agent.pid())?;
        let found = programs.iter().find(|program| program.name == "connect4");
        found
            .map(|program| (program.runs, program.ns))
            .ok_or_else(|| anyhow::anyhow!("no connect4"))
    };
    let decided = |agent: &Agent| -> Result<(f64, f64)> {
        let metrics = agent.metrics()?;
        let refused = ["retry_limit", "retry_budget"]
            .map(|reason| metrics.sum("backstop_rejected_total", &format!("reason=\"{reason}\"")));
        Ok((
            metrics.sum("backstop_retries_total", ""),
            refused.iter().sum(),
        ))
    };
    let (first, before) = (of(&agent)?, decided(&agent)?);
    let mut last = first;
    let mut each = Vec::with_capacity(ROUNDS);
    let rounds = if matches!(state, State::Busy) {
        BUSY.0
    } else {
        ROUNDS
    };
    for _ in 0..rounds {
        round()?;
        let now = of(&agent)?;
        each.push((now.1 - last.1) as f64 / (now.0 - last.0).max(1) as f64);
        last = now;
    }
    let after = decided(&agent)?;
    let runs = (last.0 - first.0).max(1) as f64;
    Ok(Spent {
        ns: slices::median(&each),
        retries: (after.0 - before.0) / runs,
        refused: (after.1 - before.1) / runs,
    })
}
