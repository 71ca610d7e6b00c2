//! docs/CONFIGURATION.md tells the truth.

use super::super::{
    Config, parse_str,
    schema::{AGENT, PROTECTED},
};

const PAGE: &str = include_str!("../../../../docs/CONFIGURATION.md");

/// Every setting has a row with its default.
#[test]
fn every_key_has_a_row() {
    let config = Config::default_config();
    let mut expected = vec![("mode".to_owned(), config.mode.to_string())];
    let settings = config.defaults.settings().into_iter();
    // `breaker` and `retry` as a whole are told about in the text.
    let settings = settings.filter(|(key, _)| key.contains('.'));
    expected.extend(settings.map(|(key, value)| (key.to_owned(), value)));
    for (key, value) in &expected {
        let row = format!("| `{key}` | {value} | ");
        assert!(PAGE.contains(&row), "no row {row}");
    }
    for (section, keys) in [("agent", AGENT), ("protected", PROTECTED)] {
        for key in keys {
            let row = format!("| `{section}.{key}` | ");
            assert!(PAGE.contains(&row), "no row {row}");
        }
    }
}

#[test]
fn examples_are_accepted_without_warnings() {
    let blocks: Vec<_> = PAGE
        .split("```toml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    assert_eq!(blocks.len(), 2);
    for block in blocks {
        let config = parse_str("page", block).unwrap_or_else(|error| panic!("{error}\n{block}"));
        assert_eq!(config.warnings(), [""; 0]);
    }
}

/// The table of connections under "Which policy wins".
#[test]
fn the_example_of_resolution_is_right() {
    let block = PAGE
        .split("```toml\n")
        .nth(2)
        .and_then(|rest| rest.split("```").next());
    let config = parse_str("page", block.expect("a second example")).expect("a configuration");
    let table = PAGE
        .split("| Connection | Policy | Why |\n")
        .nth(1)
        .expect("the table");
    let mut rows = 0;
    for row in table
        .lines()
        .skip(1)
        .take_while(|line| line.starts_with('|'))
    {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let (from, to) = cells[1].split_once("to ").expect("from … to …");
        let workload = from.trim().strip_prefix("from ");
        let to = to.parse().expect("a destination");
        let found = config.resolve(&to, workload, &[]);
        let name = config
            .policy(found.policy)
            .map(|policy| policy.name.as_str());
        assert_eq!(name, Some(cells[2]), "{row} {}", found.why);
        rows += 1;
    }
    assert_eq!(rows, 6);
}
