//! What is taken for a retry, program by program.

use std::{
    collections::VecDeque,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Mutex,
};

use tests::truth::{Cell, Figures, Kind, measure, programs::CALLERS};

/// So many of a hundred requests fail.
const PERCENTS: [u64; 4] = [1, 10, 20, 40];
/// Fresh calls that may be taken for retries, of all.
const MOST_FRESH: f64 = 0.01;
/// Retries that must be seen, of programs that call in sequence or by threads.
const LEAST_RECALL: f64 = 0.9;

/// Measures all programs whose name has this text; returns whether every target is met.
pub fn run(seconds: u64, only: Option<&str>) -> bool {
    let mut cells = Vec::new();
    for caller in CALLERS {
        if only.is_some_and(|only| !caller.name.contains(only)) {
            continue;
        }
        if !caller.needs.is_met() {
            eprintln!("left out: {} needs {}", caller.name, caller.needs);
            continue;
        }
        for &rate in caller.rates {
            for percent in PERCENTS {
                // The slowest get twice the time: else they make hardly any retry.
                let seconds = if rate <= 10 { 2 * seconds } else { seconds };
                cells.push(Cell {
                    caller,
                    percent,
                    rate,
                    seconds,
                });
            }
        }
    }
    let all = cells.len();
    let mut figures = Vec::new();
    // What needs little of the machine goes side by side.
    for (rates, at_once) in [(0..=10, 12), (11..=100, 4), (101..=u32::MAX, 1)] {
        let queue: Mutex<VecDeque<(usize, Cell)>> = cells
            .iter()
            .enumerate()
            .filter(|(_, cell)| rates.contains(&cell.rate))
            .map(|(index, cell)| (index, *cell))
            .collect::<VecDeque<_>>()
            .into();
        let done = Mutex::new(&mut figures);
        std::thread::scope(|scope| {
            for _ in 0..at_once {
                scope.spawn(|| {
                    loop {
                        let next = queue.lock().expect("no panic holds it").pop_front();
                        let Some((index, cell)) = next else { return };
                        // One that cannot be measured must not lose the others.
                        let measured = catch_unwind(AssertUnwindSafe(|| measure(cell)));
                        let mut done = done.lock().expect("no panic holds it");
                        match measured {
                            Ok(measured) => done.push((index, measured)),
                            Err(_) => eprintln!("not measured: {}", cell.caller.name),
                        }
                        eprintln!("{} of {all}: {}", done.len(), cell.caller.name);
                    }
                });
            }
        });
    }
    figures.sort_by_key(|(index, _)| *index);
    let figures: Vec<Figures> = figures.into_iter().map(|(_, figures)| figures).collect();
    summarize(&figures);
    println!();
    print(&figures);
    figures.len() == all && figures.iter().all(|figures| missed(figures).is_empty())
}

/// What is missed.
fn missed(figures: &Figures) -> Vec<String> {
    let mut missed = Vec::new();
    let cell = &figures.cell;
    // (One is more than that of few.)
    if figures.fresh_share() > MOST_FRESH && figures.fresh_taken() > 1 {
        missed.push(format!("{} fresh", figures.fresh_taken()));
    }
    let must_see = matches!(cell.caller.kind, Kind::Sequential | Kind::ThreadPerRequest);
    if must_see && figures.recall().is_some_and(|recall| recall < LEAST_RECALL) {
        missed.push("recall".to_owned());
    }
    if cell.caller.retries == 0 && figures.by_limit + figures.by_budget > 0 {
        missed.push("refused".to_owned());
    }
    missed
}

/// A share of them, where there are any.
fn share(some: u64, all: u64) -> String {
    match all {
        0 => "-".to_owned(),
        _ => format!("{:.2}", some as f64 / all as f64),
    }
}

/// A row for each program: all its measurements together, and the worst.
fn summarize(figures: &[Figures]) {
    println!(
        "| Program | Kind | Calls | Fresh taken | % | At worst | Retries | Seen at 10/s | 100/s | 500 and 2,000/s \
         | Refused | connect() alone: fresh taken, % | Seen |"
    );
    println!(
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    );
    for rows in figures.chunk_by(|a, b| std::ptr::eq(a.cell.caller, b.cell.caller)) {
        let sum = |of: fn(&Figures) -> u64| rows.iter().map(of).sum::<u64>();
        let (calls, fresh) = (sum(|row| row.own.calls), sum(Figures::fresh_taken));
        let worst = rows.iter().map(Figures::fresh_share).fold(0.0, f64::max);
        let seen = [0..=10, 11..=100, 101..=u32::MAX].map(|rates| {
            let rows = rows.iter().filter(|row| rates.contains(&row.cell.rate));
            let (taken, all) = rows.fold((0, 0), |(taken, all), row| {
                (taken + row.seen.retries_taken, all + row.seen.retries)
            });
            share(taken, all)
        });
        let caller = rows[0].cell.caller;
        let percent = |of: u64| 100.0 * of as f64 / calls.max(1) as f64;
        println!(
            "| {} | {} | {calls} | {fresh} | {:.2} | {:.1} | {} | {} | {} | {:.2} | {} |",
            caller.name,
            caller.kind.name(),
            percent(fresh),
            100.0 * worst,
            sum(|row| row.seen.retries),
            seen.join(" | "),
            if caller.retries == 0 {
                sum(|row| row.by_limit + row.by_budget).to_string()
            } else {
                "-".to_owned()
            },
            percent(sum(Figures::fresh_by_connect)),
            share(
                sum(|row| row.seen.retries_by_connect),
                sum(|row| row.seen.retries)
            )
        );
    }
}

fn print(figures: &[Figures]) {
    println!(
        "| Program | Kind | Failures | Calls/s | Calls | Retries | Dialled | Taken for retries \
         | Fresh taken | % | Recall | connect() alone: fresh taken | Recall | Refused: limit | budget | Missed |"
    );
    println!(
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    );
    for row in figures {
        let Figures {
            cell, own, seen, ..
        } = row;
        let recall = share(seen.retries_taken, seen.retries);
        let by_connect = share(seen.retries_by_connect, seen.retries);
        println!(
            "| {} | {} | {} % | {} | {} | {} | {} | {} | {} | {:.1} | {recall} | {} | {by_connect} \
             | {} | {} | {} |",
            cell.caller.name,
            cell.caller.kind.name(),
            cell.percent,
            cell.rate,
            own.calls,
            own.retries,
            seen.retries,
            row.taken,
            row.fresh_taken(),
            100.0 * row.fresh_share(),
            row.fresh_by_connect(),
            row.by_limit,
            row.by_budget,
            missed(row).join(", ")
        );
        if seen.unknown > 0 {
            eprintln!("{}: {} attempts not known", cell.caller.name, seen.unknown);
        }
    }
}
