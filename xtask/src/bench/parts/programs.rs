//! Time of each kernel program, from the kernel's own statistics.

use anyhow::Result;

use crate::bench::{
    agent::Agent,
    bpf,
    lab::{self, CLOSED_PORT, Lab, Running},
    load::Load,
    report::{Figure, Target},
    slices,
};

/// Looks at the statistics, with that many connects between two of them. The median of what lies
/// between is free of what else the machine does.
const ROUNDS: usize = 100;
const CONNECTS: u32 = 512;

/// Measures it.
///
/// # Errors
/// When agent or load cannot be started, or the kernel keeps no statistics.
pub fn measure(lab: &Lab) -> Result<Vec<Figure>> {
    let running = Running {
        cpu: lab::last_processor(),
        first: true,
        real_time: true,
    };
    let agent = Agent::start_for_loops(lab, "", "")?;
    let mut load = Load::start(&lab.with, running)?;
    load.allowed(CONNECTS)?;
    agent.command(&["trip", &format!("127.0.0.1:{CLOSED_PORT}")])?;
    load.refused(CONNECTS, CLOSED_PORT)?;

    let _statistics = bpf::statistics()?;
    let connects = rounds(&agent, || load.allowed(CONNECTS))?;
    let refusals = rounds(&agent, || load.refused(CONNECTS, CLOSED_PORT))?;
    let sum = |programs: &[Spent]| programs.iter().map(|spent| spent.ns).sum::<f64>() / 1000.0;
    let mut figures = vec![
        Figure::new("all programs, one connection", sum(&connects), "us")
            .target(Target::AtMost(1.5))
            .note("connect to close; the statistics themselves are a part of it"),
    ];
    for spent in connects.iter().filter(|spent| spent.runs > 0.0) {
        figures.push(
            Figure::new(
                format!("{}, one run", spent.name),
                spent.ns / spent.runs,
                "ns",
            )
            .note(format!("{:.2} runs a connection", spent.runs)),
        );
    }
    figures.push(Figure::new(
        "all programs, one refusal",
        sum(&refusals),
        "us",
    ));
    Ok(figures)
}

/// What a program does for one connect.
struct Spent {
    name: String,
    runs: f64,
    ns: f64,
}

/// The median of what each program does, over many rounds.
fn rounds(agent: &Agent, mut round: impl FnMut() -> Result<f64>) -> Result<Vec<Spent>> {
    let mut looks = vec![bpf::programs(agent.pid())?];
    for _ in 0..ROUNDS {
        round()?;
        looks.push(bpf::programs(agent.pid())?);
    }
    let of = |program: usize, field: fn(&bpf::Program) -> u64| {
        let each: Vec<f64> = looks
            .windows(2)
            .map(|pair| field(&pair[1][program]) - field(&pair[0][program]))
            .map(|sum| sum as f64 / f64::from(CONNECTS))
            .collect();
        slices::median(&each)
    };
    let programs = looks[0].iter().enumerate();
    Ok(programs
        .map(|(index, program)| Spent {
            name: program.name.clone(),
            runs: of(index, |program| program.runs),
            ns: of(index, |program| program.ns),
        })
        .collect())
}
