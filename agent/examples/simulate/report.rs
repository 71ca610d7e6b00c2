//! The tables.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result};

use super::rules::backstop::Backstop;
use super::rules::envoy::Envoy;
use super::rules::gobreaker::Gobreaker;
use super::rules::hystrix::Hystrix;
use super::rules::linkerd::Linkerd;
use super::rules::none::NoRule;
use super::rules::resilience4j::Resilience4j;
use super::rules::throttling::Throttling;
use super::run::{Tally, all};
use super::scenarios::Scenario;
use super::world::MS;

/// What is compared, in the order of the columns.
pub const RULES: [&str; 8] = [
    "Backstop",
    "Envoy",
    "Linkerd",
    "resilience4j",
    "Hystrix",
    "gobreaker",
    "throttling",
    "none",
];

/// Where the tables stand in the page.
const BEGIN: &str = "<!-- tables: made by `cargo xtask simulate` -->\n";
const END: &str = "<!-- end of tables -->\n";

/// A scenario and what came of it under each rule.
pub type Result1 = (Scenario, [Tally; RULES.len()]);

/// Runs scenarios under every rule, on all processors.
pub fn run(scenarios: Vec<Scenario>) -> Vec<Result1> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    // The largest first, so that no thread is left alone with one at the end.
    let mut order: Vec<usize> = (0..scenarios.len()).collect();
    order.sort_by_key(|&n| std::cmp::Reverse(scenarios[n].clients));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(&n) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let tallies = under_each(&scenarios[n]);
                    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                    done.push((n, tallies));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_unstable_by_key(|(n, _)| *n);
    let tallies = done.into_iter().map(|(_, tallies)| tallies);
    scenarios.into_iter().zip(tallies).collect()
}

/// A scenario under each of [`RULES`].
pub fn under_each(scenario: &Scenario) -> [Tally; RULES.len()] {
    [
        all(scenario, |endpoints, seed| {
            Backstop::new(endpoints, scenario.one_name, seed)
        }),
        all(scenario, |endpoints, _| Envoy::new(endpoints)),
        all(scenario, Linkerd::new),
        all(scenario, |endpoints, _| Resilience4j::new(endpoints)),
        all(scenario, |endpoints, _| Hystrix::new(endpoints)),
        all(scenario, |endpoints, _| Gobreaker::new(endpoints)),
        all(scenario, |endpoints, _| Throttling::new(endpoints)),
        all(scenario, |_, _| NoRule),
    ]
}

/// A mean over the runs, rounded.
fn mean(sum: u64, runs: u64) -> u64 {
    (sum + runs / 2) / runs.max(1)
}

/// The page's part that is made.
pub fn tables(results: &[Result1]) -> String {
    let mut text = String::new();
    let mut groups = Vec::new();
    for (scenario, _) in results {
        let group = scenario.group();
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    ranks(&mut text, results);
    for which in groups {
        let of_group = results
            .iter()
            .filter(|(scenario, _)| scenario.group() == which);
        group(&mut text, which, of_group);
    }
    text
}

/// How often each rule is the best.
fn ranks(text: &mut String, results: &[Result1]) {
    let mut best = [0; RULES.len()];
    let mut near = [0; RULES.len()];
    for (_, tallies) in results {
        let sums = tallies.map(|tally| mean(tally.sum(), tally.runs));
        let least = sums.into_iter().min().unwrap_or(0);
        for (n, sum) in sums.into_iter().enumerate() {
            best[n] += u32::from(sum == least);
            // Within a tenth, or a call.
            near[n] += u32::from(sum <= least + (least / 10).max(1));
        }
    }
    let _ = writeln!(text, "### How often\n");
    let _ = writeln!(
        text,
        "| of {} scenarios | {} |",
        results.len(),
        RULES.join(" | ")
    );
    let _ = writeln!(text, "| --- |{}", " ---: |".repeat(RULES.len()));
    for (what, counts) in [("best or equal", best), ("within 10 %, or a call", near)] {
        let counts = counts.map(|count| count.to_string()).join(" | ");
        let _ = writeln!(text, "| {what} | {counts} |");
    }
    let _ = writeln!(text);
}

fn group<'a>(
    text: &mut String,
    (clients, endpoints, one_name): (u32, usize, bool),
    results: impl Iterator<Item = &'a Result1> + Clone,
) {
    let many = |count: u64, what: &str| {
        let s = if count == 1 { "" } else { "s" };
        format!("{count} {what}{s}")
    };
    let title = format!(
        "{}, {}{}",
        many(u64::from(clients), "client"),
        many(endpoints as u64, "endpoint"),
        if one_name { " of one name" } else { "" },
    );
    let _ = writeln!(text, "### {title}: wrong refusals + doomed calls\n");
    let _ = writeln!(text, "| scenario | {} |", RULES.join(" | "));
    let _ = writeln!(text, "| --- |{}", " ---: |".repeat(RULES.len()));
    for (scenario, tallies) in results.clone() {
        let sums = tallies.map(|tally| mean(tally.sum(), tally.runs));
        let least = sums.into_iter().min().unwrap_or(0);
        let cells = sums.map(|sum| {
            if sum == least {
                format!("**{sum}**")
            } else {
                sum.to_string()
            }
        });
        let _ = writeln!(text, "| {} | {} |", scenario.name, cells.join(" | "));
    }
    let _ = writeln!(text, "\n### {title}: in detail\n");
    let _ = writeln!(
        text,
        "Each cell: wrong refusals / doomed calls / time to open / time to close / transitions.\n"
    );
    let _ = writeln!(
        text,
        "| scenario | {} |",
        RULES[..RULES.len() - 1].join(" | ")
    );
    let _ = writeln!(text, "| --- |{}", " --- |".repeat(RULES.len() - 1));
    for (scenario, tallies) in results {
        let cells: Vec<String> = tallies[..RULES.len() - 1].iter().map(detail).collect();
        let _ = writeln!(text, "| {} | {} |", scenario.name, cells.join(" | "));
    }
    let _ = writeln!(text);
}

fn detail(tally: &Tally) -> String {
    let runs = tally.runs;
    let opened = if tally.opened.0 == 0 {
        "never".to_owned()
    } else {
        seconds(mean(tally.opened.1, tally.opened.0))
    };
    format!(
        "{} / {} / {opened} / {} / {}",
        mean(tally.wrong, runs),
        mean(tally.doomed, runs),
        seconds(mean(tally.closed, runs)),
        mean(tally.transitions, runs),
    )
}

/// Seconds with as many digits as matter.
fn seconds(time: u64) -> String {
    let ms = mean(time, MS);
    match ms {
        0..10_000 => format!("{}.{:02} s", ms / 1000, ms % 1000 / 10),
        _ => format!("{} s", mean(ms, 1000)),
    }
}

/// The page with other tables.
pub fn put(page: &str, tables: &str) -> Result<String> {
    let missing = |mark: &str| format!("there is no line `{}`", mark.trim_end());
    let (before, rest) = page.split_once(BEGIN).with_context(|| missing(BEGIN))?;
    let (_, after) = rest.split_once(END).with_context(|| missing(END))?;
    Ok(format!("{before}{BEGIN}\n{tables}{END}{after}"))
}

/// The first line that differs: its number, and both.
pub fn difference(is: &str, becomes: &str) -> Option<(usize, String, String)> {
    let end = "(end of file)";
    let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
    let (is, becomes) = (lines(is), lines(becomes));
    let line = |lines: &[String], n: usize| lines.get(n).cloned().unwrap_or_else(|| end.to_owned());
    (0..is.len().max(becomes.len()))
        .find(|&n| is.get(n) != becomes.get(n))
        .map(|n| (n + 1, line(&is, n), line(&becomes, n)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_keeps_what_is_not_made() {
        let page = format!("before\n{BEGIN}old\n{END}after\n");
        let put = put(&page, "new\n").unwrap();
        assert_eq!(put, format!("before\n{BEGIN}\nnew\n{END}after\n"));
        assert!(super::put("nothing", "new\n").is_err());
        let (line, is, becomes) = difference(&page, &put).unwrap();
        assert_eq!((line, is.as_str(), becomes.as_str()), (3, "old", ""));
        assert_eq!(difference(&put, &put), None);
    }

    /// All of it takes a release build (`cargo xtask simulate --check`); the scenarios of a single client
    /// are quick.
    #[test]
    fn the_committed_tables_are_what_comes_out() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/SIMULATION.md");
        let page = std::fs::read_to_string(path).unwrap();
        let mut scenarios = crate::scenarios::all();
        scenarios.retain(|scenario| scenario.clients == 1);
        let results = run(scenarios);
        let mut text = String::new();
        group(&mut text, (1, 1, false), results.iter());
        assert!(text.lines().count() > 60);
        for line in text.lines() {
            assert!(
                page.lines().any(|known| known == line),
                "not in docs/SIMULATION.md (run `cargo xtask simulate`):\n{line}"
            );
        }
    }

    #[test]
    fn every_scenario_is_in_the_page() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/SIMULATION.md");
        let page = std::fs::read_to_string(path).unwrap();
        let scenarios = crate::scenarios::all();
        assert!(page.contains(&format!("| of {} scenarios |", scenarios.len())));
        for scenario in scenarios {
            assert!(
                page.contains(&format!("| {} |", scenario.name)),
                "{}",
                scenario.name
            );
        }
    }

    /// What the page says in words.
    #[test]
    fn backstop_does_what_it_is_for() {
        let result = |name: &str, clients: u32| {
            let all = crate::scenarios::all();
            let scenario = all
                .iter()
                .find(|scenario| scenario.name == name && scenario.clients == clients);
            under_each(scenario.unwrap())
        };
        let mean = |tally: Tally| super::mean(tally.sum(), tally.runs);
        for (name, most) in [
            ("all connects refused, 30 s", 20),
            ("killed, back after 5 s", 20),
            ("all answers 5xx, 30 s", 80),
            ("too slow, 60 s (5 s; programs wait 1 s)", 120),
            ("slow but good, 60 s (5 s)", 0),
        ] {
            let tallies = result(name, 30);
            let sums = tallies.map(mean);
            assert!(sums[0] <= most, "{name}: {sums:?}");
            assert!(sums.iter().all(|sum| sums[0] <= *sum), "{name}: {sums:?}");
        }
    }

    #[test]
    fn numbers_are_rounded() {
        assert_eq!([mean(5, 4), mean(6, 4), mean(0, 0)], [1, 2, 0]);
        assert_eq!(seconds(1_234_567_890), "1.23 s");
        assert_eq!(seconds(12_600_000_000), "13 s");
    }
}
