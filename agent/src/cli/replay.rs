//! `replay`.

use std::{
    fmt::Write as _,
    fs::File,
    io::{self, BufRead, BufReader, Write as _},
    path::Path,
};

use super::{
    Failure, ReplayArgs,
    output::Output,
    table,
    units::{clean, count, exact},
};
use crate::{
    policy,
    replay::{Recording, Replayed, RowReport, Transition, read, replay as run},
};

/// Reads, replays and prints.
pub fn replay(args: &ReplayArgs, out: &mut Output<'_>) -> Result<(), Failure> {
    let config = policy::load(&args.config).map_err(|error| Failure::Usage(error.to_string()))?;
    let recording = recording(&args.events)?;
    let replayed = run(&recording, &config);
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &replayed).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        out.write_all(text(&replayed).as_bytes())?;
    }
    Ok(())
}

fn recording(path: &Path) -> Result<Recording, Failure> {
    let name = path.display();
    let lines: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        let file = File::open(path)
            .map_err(|error| Failure::Usage(format!("open the events in {name}: {error}")))?;
        Box::new(BufReader::new(file))
    };
    read(lines).map_err(|error| Failure::Said(format!("{name}: {error}")))
}

/// For a person: the story first, then the sums, then what to know about them.
fn text(replayed: &Replayed) -> String {
    let mut text = String::new();
    for transition in &replayed.transitions {
        text.push_str(&line(transition));
    }
    if replayed.transitions.is_empty() {
        text.push_str("No breaker would have changed its state.\n");
    }
    if !replayed.rows.is_empty() {
        text.push('\n');
        text.push_str(&rows(&replayed.rows));
    }
    text.push('\n');
    notes(&mut text, replayed);
    text
}

fn line(transition: &Transition) -> String {
    let Transition { from, to, .. } = transition;
    let what = format!("{from} -> {to}  {}", table::reason(&transition.reason));
    format!(
        "{}  {:<21}  {}  ({})\n",
        transition.time.short(),
        clean(&transition.destination),
        what.trim_end(),
        clean(&transition.workload)
    )
}

fn rows(rows: &[RowReport]) -> String {
    let mut cells = vec![
        [
            "DESTINATION",
            "WORKLOAD",
            "POLICY",
            "CONNECTS",
            "EXCHANGES",
            "FAILED",
            "REFUSED",
            "OF THOSE GOOD",
            "STATE",
        ]
        .map(str::to_owned),
    ];
    cells.extend(rows.iter().map(|row| {
        [
            clean(&row.destination),
            clean(&row.workload),
            clean(&row.policy),
            count(row.connects),
            count(row.exchanges),
            count(row.failures),
            count(row.refused),
            count(row.refused_good),
            row.state.to_string(),
        ]
    }));
    let mut widths = [0; 9];
    for line in &cells {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for line in &cells {
        let padded = line
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:<width$}"));
        let padded = padded.collect::<Vec<_>>().join("  ");
        text.push_str(padded.trim_end());
        text.push('\n');
    }
    text
}

fn notes(text: &mut String, replayed: &Replayed) {
    let sum = |of: fn(&RowReport) -> u64| replayed.rows.iter().map(of).sum::<u64>();
    let mut note = |line: String| {
        let _ = writeln!(text, "{line}");
    };
    note(match (replayed.from, replayed.to) {
        (Some(from), Some(to)) => format!(
            "{} lines, {} long, from {from} to {to}.",
            count(replayed.lines),
            exact(u64::try_from(from.until(to).as_millis()).unwrap_or(u64::MAX))
        ),
        _ => format!(
            "{} lines, no calls among them. Were they recorded with `events --all --json`?",
            count(replayed.lines)
        ),
    });
    let (refused, good) = (sum(|row| row.refused), sum(|row| row.refused_good));
    if refused > 0 {
        note(format!(
            "Of {} refused connects {} had failed and {} had succeeded.",
            count(refused),
            count(refused - good),
            count(good)
        ));
    }
    let unknown = sum(|row| row.unknown);
    if unknown > 0 {
        note(format!(
            "{} connects were refused when this was recorded and would have been sent: what would have \
             become of them is not known.",
            count(unknown)
        ));
    }
    let may_be_slow = sum(|row| row.may_be_slow);
    if may_be_slow > 0 {
        note(format!(
            "{} good exchanges may have been slow by this configuration: a recording says only how long \
             the longest of a run took. They count as fast.",
            count(may_be_slow)
        ));
    }
    if replayed.missing > 0 {
        note(format!(
            "{} calls are missing in the recording; they end a run of failures and count as good.",
            count(replayed.missing)
        ));
    }
    if replayed.duplicates > 0 {
        note(format!("{} lines came twice.", count(replayed.duplicates)));
    }
    for row in &replayed.left_alone {
        let (destination, workload) = (clean(&row.destination), clean(&row.workload));
        note(format!(
            "{destination} ({workload}) has no breaker: {}.",
            row.why
        ));
    }
    if !replayed.skipped.is_empty() {
        let kinds = replayed.skipped.iter();
        let kinds = kinds.map(|(kind, n)| format!("{} {}", count(*n), clean(kind)));
        let kinds = kinds.collect::<Vec<_>>().join(", ");
        note(format!(
            "Skipped, since they say nothing of calls: {kinds}."
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINES: &str = r#"{"time":"2026-11-28T12:03:04.000Z","kind":"calls","destination":"10.0.0.5:5432","workload":"shop","netns":1,"window":"connects","from_seq":1,"to_seq":9,"first_time":"2026-11-28T12:03:03.000Z","last_time":"2026-11-28T12:03:04.000Z","latency_us":{"p50":1,"p99":1,"max":1},"slow":0}
{"time":"2026-11-28T12:03:05.000Z","kind":"failure","destination":"10.0.0.5:5432","workload":"shop","netns":1,"window":"connects","outcome":"refused","seq":10,"previous_call_time":null,"generation":0,"latency_us":1}
{"time":"2026-11-28T12:03:05.100Z","kind":"failure","destination":"10.0.0.5:5432","workload":"shop","netns":1,"window":"connects","outcome":"refused","seq":11,"previous_call_time":null,"generation":0,"latency_us":1}
{"time":"2026-11-28T12:03:05.200Z","kind":"failure","destination":"10.0.0.5:5432","workload":"shop","netns":1,"window":"connects","outcome":"refused","seq":12,"previous_call_time":null,"generation":0,"latency_us":1}
{"time":"2026-11-28T12:03:05.200Z","kind":"config","action":"started","message":"","by":null}
"#;

    fn replayed(lines: &str, config: &str, json: bool) -> Result<String, Failure> {
        let folder = tempfile::tempdir().expect("a folder");
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).expect("write");
            path
        };
        let args = ReplayArgs {
            events: file("events.jsonl", lines),
            config: file("tried.toml", config),
            json,
        };
        let mut printed = Vec::new();
        let mut out = Output::to(&mut printed);
        replay(&args, &mut out)?;
        drop(out);
        Ok(String::from_utf8(printed).expect("UTF-8"))
    }

    #[test]
    fn the_story_then_the_sums_then_what_to_know() {
        let strict = "[defaults.breaker]\nconsecutive_failures = 2\n";
        let expected = "\
11-28 12:03:05.100  10.0.0.5:5432          closed -> open  connects: consecutive_failures 2 >= 2  (shop)

DESTINATION    WORKLOAD  POLICY   CONNECTS  EXCHANGES  FAILED  REFUSED  OF THOSE GOOD  STATE
10.0.0.5:5432  shop      default  12        0          2       1        0              open

5 lines, 2s200ms long, from 2026-11-28T12:03:03.000Z to 2026-11-28T12:03:05.200Z.
Of 1 refused connects 1 had failed and 0 had succeeded.
Skipped, since they say nothing of calls: 1 config.
";
        assert_eq!(replayed(LINES, strict, false).unwrap(), expected);
        let calm = replayed(LINES, "", false).unwrap();
        assert!(
            calm.starts_with("No breaker would have changed its state.\n"),
            "{calm}"
        );
        let empty = replayed("", "", false).unwrap();
        assert!(empty.contains("0 lines, no calls among them."), "{empty}");
    }

    #[test]
    fn json_is_the_same_in_other_words() {
        let json = replayed(LINES, "", true).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["rows"][0]["connects"], 12);
        assert_eq!(json["skipped"]["config"], 1);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let failure = replayed("no event\n", "", false).unwrap_err();
        assert_eq!(failure.exit_code(), super::super::EXIT_FAILED);
        assert!(
            failure
                .to_string()
                .contains("events.jsonl: line 1: not an event")
        );
        let failure = replayed("", "cooldown = 1", false).unwrap_err();
        assert_eq!(failure.exit_code(), super::super::EXIT_USAGE);
        assert!(failure.to_string().contains("tried.toml"), "{failure}");
    }
}
