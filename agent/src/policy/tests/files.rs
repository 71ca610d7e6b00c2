//! What is accepted, and what comes of it.

use std::time::Duration;

use toml::de::{DeTable, DeValue};

use super::super::{
    Backoff, Config, DEFAULT_CONFIG, Errno, Hung, LogFormat, Mode, OnOpen, ReadAction, Scope,
    Stall, StatusPattern, load, parse_str,
    schema::{AGENT, DEFAULTS, PROTECTED, ROOT},
    sections::{BREAKER, LIMITS, RETRY, TIMEOUTS},
};

fn parsed(text: &str) -> Config {
    parse_str("f.toml", text).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn default_file_is_the_built_in_configuration() {
    let built_in = Config::default_config();
    assert_eq!(built_in.source, "built-in");
    assert_eq!(built_in.warnings(), [""; 0]);
    for text in ["", DEFAULT_CONFIG] {
        assert_eq!(
            Config {
                source: "built-in".into(),
                ..parsed(text)
            },
            built_in
        );
    }
}

/// A key that default.toml leaves out would have no default at all.
#[test]
fn default_file_names_every_key() {
    let root = DeTable::parse(DEFAULT_CONFIG).expect("TOML");
    let table = |path: &[&str]| {
        path.iter()
            .fold(root.get_ref(), |table, key| match table[*key].get_ref() {
                DeValue::Table(table) => table,
                other => panic!("{key} is {other:?}"),
            })
    };
    for (path, keys) in [
        (&["defaults"][..], DEFAULTS),
        (&["defaults", "timeouts"], TIMEOUTS),
        (&["defaults", "breaker"], BREAKER),
        (&["defaults", "retry"], RETRY),
        (&["defaults", "limits"], LIMITS),
        (&["agent"], AGENT),
        (&["protected"], PROTECTED),
    ] {
        let mut missing = keys.to_vec();
        missing.retain(|key| !table(path).contains_key(*key));
        assert_eq!(missing, [""; 0], "in {path:?}");
    }
    let missing: Vec<_> = ROOT
        .iter()
        .filter(|key| !root.get_ref().contains_key(**key))
        .collect();
    assert_eq!(missing, [&"policy"]);
}

/// The numbers that are promised to operators, spelled out once more.
#[test]
fn default_numbers() {
    let config = Config::default_config();
    let seconds = Duration::from_secs;
    assert_eq!(config.mode, Mode::Enforce);
    assert_eq!(config.defaults.name, "default");
    assert_eq!(config.defaults.timeouts.connect, seconds(2));
    let breaker = &config.defaults.breaker;
    assert!(breaker.enabled && breaker.redial);
    assert_eq!(breaker.failure_rate, Some(0.5));
    assert_eq!((breaker.window, breaker.min_calls), (20, 10));
    assert_eq!(breaker.window_age, seconds(60));
    assert_eq!(breaker.consecutive_failures, Some(5));
    assert_eq!(breaker.slow_call, None);
    assert_eq!(breaker.hung, Hung::Auto);
    assert_eq!(breaker.gave_up, Some(Duration::from_millis(500)));
    assert_eq!(
        (breaker.cooldown, breaker.cooldown_max),
        (seconds(30), seconds(300))
    );
    assert_eq!((breaker.probes, breaker.successes_to_close), (1, 2));
    assert_eq!(breaker.failure_status, [StatusPattern::Class(5)]);
    assert_eq!(breaker.errno.number(), 111);
    let retry = &config.defaults.retry;
    assert_eq!(
        (retry.limit, retry.budget, retry.window),
        (Some(2), Some(0.1), seconds(10))
    );
    assert_eq!(config.agent.max_destinations, 50_000);
    assert_eq!(config.agent.ring_bytes, 1 << 20);
    let protected: Vec<_> = config.protected.iter().map(ToString::to_string).collect();
    assert_eq!(protected, ["169.254.0.0/16", "0.0.0.0/0:53", "[::]/0:53"]);
}

#[test]
fn a_policy_is_read_over_the_defaults_of_its_file() {
    let config = parsed(
        r#"
        [[policy]]
        name = "orders-db"
        destinations = ["10.0.0.0/8:5432", "DB.Internal.:5432"]
        workloads = ["*/billing-*"]
        timeouts = { read = "3s", deadline = "5s" }
        breaker = { consecutive_failures = 3 }
        [defaults.timeouts]
        connect = "1s"
        "#,
    );
    let policy = &config.policies[0];
    assert_eq!(policy.destinations[1].to_string(), "db.internal:5432");
    assert_eq!(policy.timeouts.connect, Duration::from_secs(1));
    assert_eq!(policy.timeouts.read, Some(Duration::from_secs(3)));
    assert_eq!(policy.breaker.consecutive_failures, Some(3));
    assert_eq!(policy.breaker.failure_rate, Some(0.5));
    assert_eq!(policy.retry, config.defaults.retry);
    assert_eq!(config.policy(0).map(|p| p.name.as_str()), Some("default"));
    assert_eq!(config.policy(1).map(|p| p.name.as_str()), Some("orders-db"));
    assert_eq!(config.policy(2), None);
}

#[test]
fn every_key_can_be_set() {
    let config = parsed(
        r#"
        mode = "observe"
        [defaults.timeouts]
        connect = "250ms"
        read = "1m30s"
        write = "1h"
        deadline = "24h"
        stall = "1ms"
        keepalive = "1s"
        read_action = "option"
        [defaults.breaker]
        failure_rate = 1
        window = 0x80
        window_age = "1h"
        min_calls = 128
        consecutive_failures = 0
        slow_call = "2s"
        slow_call_rate = "off"
        hung = "10s"
        gave_up = "off"
        scope = "node"
        cooldown = "100ms"
        cooldown_max = "100ms"
        redial = false
        probes = 3
        successes_to_close = 5
        max_open_share = 0.0
        failure_status = ["4xx", "503", 504]
        on_open = "drain-idle"
        errno = "EPERM"
        [defaults.retry]
        limit = "off"
        budget = 0
        window = "1s"
        min_per_second = 0
        backoff = { base = "100ms", max = "10s" }
        max_held = 0
        spin_per_second = "off"
        refuse_non_idempotent = true
        [defaults.limits]
        connections = 1
        pending = 2
        connects_per_second = 3
        [agent]
        max_destinations = 16
        ring_bytes = 65536
        events_kept = 0
        log = "json"
        [protected]
        destinations = []
        "#,
    );
    let millis = Duration::from_millis;
    assert_eq!(config.mode, Mode::Observe);
    let timeouts = &config.defaults.timeouts;
    assert_eq!(timeouts.connect, millis(250));
    assert_eq!(timeouts.read, Some(millis(90_000)));
    assert_eq!(timeouts.write, Some(millis(3_600_000)));
    assert_eq!(timeouts.deadline, Some(millis(86_400_000)));
    assert_eq!(timeouts.stall, Stall::After(millis(1)));
    assert_eq!(timeouts.keepalive, Some(millis(1000)));
    assert_eq!(timeouts.read_action, ReadAction::Option);
    let breaker = &config.defaults.breaker;
    assert_eq!(breaker.failure_rate, Some(1.0));
    assert_eq!((breaker.window, breaker.min_calls), (128, 128));
    assert_eq!(breaker.consecutive_failures, None);
    assert_eq!(breaker.slow_call, Some(millis(2000)));
    assert_eq!(breaker.slow_call_rate, None);
    assert_eq!(breaker.hung, Hung::After(millis(10_000)));
    assert_eq!(breaker.gave_up, None);
    assert_eq!(breaker.scope, Scope::Node);
    assert_eq!(
        (breaker.cooldown, breaker.cooldown_max),
        (millis(100), millis(100))
    );
    assert!(!breaker.redial);
    assert_eq!((breaker.probes, breaker.successes_to_close), (3, 5));
    assert_eq!(breaker.max_open_share, Some(0.0));
    use StatusPattern::{Class, Code};
    assert_eq!(breaker.failure_status, [Class(4), Code(503), Code(504)]);
    assert_eq!(breaker.on_open, OnOpen::DrainIdle);
    assert_eq!(breaker.errno, Errno::Perm);
    let retry = &config.defaults.retry;
    assert_eq!(
        (retry.limit, retry.budget, retry.min_per_second),
        (None, Some(0.0), 0)
    );
    assert_eq!(
        retry.backoff,
        Some(Backoff {
            base: millis(100),
            max: millis(10_000)
        })
    );
    assert_eq!((retry.max_held, retry.spin_per_second), (0, None));
    assert!(retry.refuse_non_idempotent);
    let limits = config.defaults.limits;
    assert_eq!(
        (
            limits.connections,
            limits.pending,
            limits.connects_per_second
        ),
        (Some(1), Some(2), Some(3))
    );
    assert_eq!(
        (config.agent.max_destinations, config.agent.events_kept),
        (16, 0)
    );
    assert_eq!(config.agent.log, LogFormat::Json);
    assert_eq!(config.protected, []);
}

#[test]
fn breaker_and_retry_are_switched_as_a_whole() {
    let config = parsed(
        r#"
        defaults.breaker = "off"
        [[policy]]
        name = "as-the-defaults"
        destinations = ["10.0.0.1"]
        retry = "off"
        [[policy]]
        name = "on-again"
        destinations = ["10.0.0.2"]
        breaker = {}
        [[policy]]
        name = "on-with"
        destinations = ["10.0.0.3"]
        breaker.failure_rate = 0.3
        "#,
    );
    let built_in = Config::default_config().defaults.breaker;
    assert!(!config.defaults.breaker.enabled);
    assert!(!config.policies[0].breaker.enabled);
    assert!(!config.policies[0].retry.enabled);
    assert_eq!(config.policies[1].breaker, built_in);
    assert!(config.policies[1].retry.enabled);
    assert!(config.policies[2].breaker.enabled);
    assert_eq!(config.policies[2].breaker.failure_rate, Some(0.3));
}

#[test]
fn part_of_an_inherited_backoff() {
    let config = parsed(
        r#"
        defaults.retry.backoff = { base = "100ms", max = "10s" }
        [[policy]]
        name = "a"
        destinations = ["10.0.0.1"]
        retry.backoff.max = "1s"
        "#,
    );
    let expected = Backoff {
        base: Duration::from_millis(100),
        max: Duration::from_secs(1),
    };
    assert_eq!(config.policies[0].retry.backoff, Some(expected));
}

#[test]
fn examples_are_accepted_without_warnings() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../config/examples");
    let mut seen = 0;
    for entry in std::fs::read_dir(folder).expect("the examples") {
        let path = entry.expect("an entry").path();
        let config = load(&path).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(config.warnings(), [""; 0], "{}", path.display());
        assert_eq!(config.source, path.display().to_string());
        seen += 1;
    }
    assert!(seen >= 2, "{seen} examples in {folder}");
}

#[test]
fn errno_numbers_and_names() {
    let all = Errno::ALL.map(|errno| (errno.as_str(), errno.number()));
    assert_eq!(
        all,
        [
            ("ECONNREFUSED", 111),
            ("ETIMEDOUT", 110),
            ("EHOSTUNREACH", 113),
            ("ENETUNREACH", 101),
            ("ECONNRESET", 104),
            ("EPERM", 1),
        ]
    );
}
