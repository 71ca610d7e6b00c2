//! What a failure multiplies to: of many clients of one server, and along a chain of services.

use tests::truth::{
    chain::{BUDGETS_ALONE, load_on_d},
    storm::storm,
};

/// Attempts for each operation that a budget of a tenth allows, beside the floor.
const MOST_AMPLIFIED: f64 = 1.12;
/// Calls of D for each call of A that budgets of a tenth allow.
const MOST_LOAD: f64 = 1.35;
/// Calls a second of A's user, about.
const CALLS_A_SECOND: u64 = 20;

/// A storm without Backstop and with it; returns whether the budget was kept.
pub fn run(seconds: u64) -> bool {
    // The floor of one a second is in force in each of two windows of ten seconds, or as long as it lasts.
    let one_a_second =
        "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = \"off\"\nmin_per_second = 1\n";
    let cases = [
        ("without Backstop", None, None),
        (
            "budget, floor 1/s; limit and breaker off",
            Some(one_a_second),
            Some(1),
        ),
        (
            "built-in budget, floor 10/s, and limit; breaker off",
            Some("[defaults]\nbreaker = \"off\"\n"),
            Some(10),
        ),
        ("everything built in, breaker on", Some(""), None),
    ];
    println!(
        "| 50 clients, 5 retries, 60 % fail, {seconds} s | Operations | Attempts on the server | Per operation | Allowed | Went well |"
    );
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    let mut is_good = true;
    for (name, config, floor) in cases {
        eprintln!("a storm, {name}, for {seconds} s …");
        let storm = storm(config, seconds);
        let operations = storm.operations as f64;
        let allowed = floor.map(|floor| operations * MOST_AMPLIFIED + (floor * seconds) as f64);
        is_good &= allowed.is_none_or(|allowed| storm.attempts as f64 <= allowed);
        println!(
            "| {name} | {} | {} | {:.2} | {} | {:.0} % |",
            storm.operations,
            storm.attempts,
            storm.attempts as f64 / operations,
            allowed.map_or_else(|| "-".to_owned(), |allowed| format!("{allowed:.0}")),
            100.0 * storm.good as f64 / operations
        );
    }
    is_good
}

/// The chain; returns whether the budgets were kept.
pub fn chain(seconds: u64) -> bool {
    let calls = seconds * CALLS_A_SECOND;
    println!("| Calls of D for each of {calls} calls of A | D fails | D fails half |");
    println!("| --- | ---: | ---: |");
    let mut is_good = true;
    for (name, config) in [
        ("without Backstop", None),
        (
            "budgets alone (breaker and limit off, floor 0)",
            Some(BUDGETS_ALONE),
        ),
        ("everything built in", Some("")),
    ] {
        eprintln!("a chain, {name}, {calls} calls twice …");
        let [all, half] = [100, 50].map(|percent| load_on_d(config, percent, calls));
        is_good &= config != Some(BUDGETS_ALONE) || all <= MOST_LOAD;
        println!("| {name} | {all:.2} | {half:.2} |");
    }
    is_good
}
