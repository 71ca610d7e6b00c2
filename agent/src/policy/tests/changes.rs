//! What a reload reports, and what is accepted but without effect.

use super::super::{Config, diff, parse_str};

fn parsed(text: &str) -> Config {
    parse_str("f.toml", text).unwrap_or_else(|error| panic!("{error}"))
}

fn changes(old: &str, new: &str) -> Vec<String> {
    diff(&parsed(old), &parsed(new))
        .iter()
        .map(ToString::to_string)
        .collect()
}

const DB: &str = "[[policy]]\nname = \"orders-db\"\ndestinations = [\"10.0.0.0/8:5432\"]\n";
const CACHE: &str = "[[policy]]\nname = \"cache\"\ndestinations = [\"10.0.0.0/8:6379\"]\n";

#[test]
fn nothing_changed() {
    assert_eq!(
        changes(
            DB,
            &format!("# a comment\n{DB}timeouts.connect = \"2000ms\"")
        ),
        [""; 0]
    );
}

#[test]
fn settings_of_a_policy() {
    assert_eq!(
        changes(
            &format!("{DB}timeouts = {{ connect = \"2s\" }}"),
            &format!(
                "{DB}timeouts = {{ connect = \"1s\", read = \"3s\" }}\nbreaker.hung = \"off\""
            ),
        ),
        [
            "orders-db: connect 2s -> 1s",
            "orders-db: read off -> 3s",
            "orders-db: breaker.hung auto -> off",
        ]
    );
    assert_eq!(
        changes(DB, &format!("{DB}breaker = \"off\"")),
        ["orders-db: breaker on -> off"]
    );
    assert_eq!(
        changes(DB, &DB.replace("5432\"", "5432\", \"db.internal\"")),
        ["orders-db: destinations [10.0.0.0/8:5432] -> [10.0.0.0/8:5432, db.internal]"]
    );
}

#[test]
fn policies_come_and_go() {
    assert_eq!(
        changes(DB, CACHE),
        ["policy orders-db removed", "policy cache added"]
    );
    let (one, other) = (format!("{DB}{CACHE}"), format!("{CACHE}{DB}"));
    assert_eq!(changes(&one, &other), ["order of the policies changed"]);
    assert_eq!(changes(&one, CACHE), ["policy orders-db removed"]);
}

#[test]
fn defaults_and_the_rest() {
    let new = "mode = \"observe\"\n\
        defaults.timeouts.connect = \"1s\"\n\
        defaults.retry.backoff = { base = \"1s\", max = \"2s\" }\n\
        agent.log = \"json\"\nprotected.destinations = []\n";
    assert_eq!(
        changes("", new),
        [
            "mode enforce -> observe",
            "agent.log text -> json",
            "protected.destinations [169.254.0.0/16, 0.0.0.0/0:53, [::]/0:53] -> []",
            "defaults: connect 2s -> 1s",
            "defaults: retry.backoff off -> 1s to 2s",
        ]
    );
}

#[test]
fn a_policy_that_follows_the_defaults_is_not_repeated() {
    let own = format!("{DB}timeouts.connect = \"5s\"\n");
    let slow = format!("defaults.timeouts.connect = \"3s\"\n{CACHE}{own}");
    let fast = format!("defaults.timeouts.connect = \"1s\"\n{CACHE}{own}");
    assert_eq!(changes(&slow, &fast), ["defaults: connect 3s -> 1s"]);
}

#[test]
fn what_cannot_be_had_is_said() {
    let config = parsed(
        r#"
        [defaults.timeouts]
        read = "10s"
        [defaults.breaker]
        hung = "off"
        slow_call = "1s"
        [[policy]]
        name = "a"
        destinations = ["10.0.0.1", "db.internal:5432"]
        workloads = ["*/billing-*"]
        timeouts = { connect = "1s", read = "3s", read_action = "option" }
        breaker = { scope = "node", on_open = "abort", hung = "20s", failure_status = "off" }
        retry = { limit = 3, backoff = { base = "1s", max = "2s" }, refuse_non_idempotent = true }
        limits = { pending = 5 }
        [[policy]]
        name = "b"
        destinations = ["10.0.0.2"]
        timeouts = { read = "off" }
        breaker = "off"
        retry = "off"
        [[policy]]
        name = "c"
        destinations = ["10.0.0.3"]
        breaker = { failure_status = ["5xx", 429], slow_call_rate = 0.9 }
        [protected]
        destinations = ["*.internal"]
        "#,
    );
    assert_eq!(
        config.warnings(),
        [
            "protected: destinations: *.internal protects only names that stand in full in a policy \
             or here: what programs are told is believed for nothing that is protected"
                .to_owned(),
        ]
    );
}
