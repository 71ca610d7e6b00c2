//! The work of `cargo xtask retries`: truth PART SECONDS [ONLY]. Prints tables in Markdown; progress goes to
//! standard error.

#![expect(clippy::print_stdout, reason = "the tables are its output")]

mod programs;
mod storm;

use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [part, seconds, only @ ..] = &words[..] else {
        eprintln!("usage: truth PART SECONDS [ONLY]");
        return ExitCode::from(2);
    };
    let seconds = seconds.parse().expect("seconds");
    let is_good = match part.as_str() {
        "programs" => programs::run(seconds, only.first().map(String::as_str)),
        "storm" => storm::run(seconds),
        "chain" => storm::chain(seconds),
        _ => panic!("no part {part}"),
    };
    if is_good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}
