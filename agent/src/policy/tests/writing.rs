//! Whatever is read can be written down, and read again as the same.

use std::{ops::RangeInclusive, time::Duration};

use proptest::{
    collection::vec,
    prelude::*,
    sample::{Index, select},
};

use super::{
    super::{
        AgentConfig, Backoff, BreakerPolicy, Config, DEFAULT_CONFIG, Errno, Hung, Limits,
        LogFormat, Mode, OnOpen, Policy, ReadAction, RetryPolicy, Scope, Stall, StatusPattern,
        Timeouts, WorkloadPattern, parse_str,
    },
    properties::pattern,
};

const DAY: u64 = 24 * 3_600_000;
const HOUR: u64 = 3_600_000;

fn read_back(config: &Config) -> Config {
    let text = config.to_toml();
    let read = parse_str(&config.source, &text);
    read.unwrap_or_else(|error| panic!("{error}\n{text}"))
}

#[test]
fn built_in_configuration_is_default_toml_without_comments() {
    let lines = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let lines = lines.filter(|line| !line.is_empty());
        lines.map(str::to_owned).collect()
    };
    let config = Config::default_config();
    // Durations are written in their one form.
    let expected = DEFAULT_CONFIG.replace("\"60s\"", "\"1m\"");
    assert_eq!(lines(&config.to_toml()), lines(&expected));
    assert_eq!(read_back(&config), config);
}

#[test]
fn policies_say_what_differs() {
    let text = r#"
        [defaults]
        retry = "off"
        timeouts.connect = "1s"
        [[policy]]
        name = 'the "db"'
        destinations = ["10.0.0.0/8:5432", "DB.Internal:5432"]
        workloads = ['a\b', "*/billing-*"]
        breaker = "off"
        retry = {}
        timeouts = { connect = "1000ms", read = "90s" }
        [[policy]]
        name = "says nothing"
        destinations = ["10.1.0.0/16"]
        breaker = { errno = "ECONNREFUSED" }
        retry = "off"
        [[policy]]
        name = "web"
        workloads = ["web"]
        limits.pending = 3
        breaker = { failure_rate = 1, consecutive_failures = 0, failure_status = ["503", "4xx"] }
        retry = { backoff = { base = "100ms", max = "10s" }, refuse_non_idempotent = true }
        [protected]
        destinations = []
        "#;
    let config = parse_str("f.toml", text).expect("a configuration");
    let written = config.to_toml();
    let expected = r#"
[[policy]]
name = 'the "db"'
destinations = ["10.0.0.0/8:5432", "db.internal:5432"]
workloads = ['a\b', "*/billing-*"]
breaker = "off"
[policy.timeouts]
read = "1m30s"
[policy.retry]

[[policy]]
name = "says nothing"
destinations = ["10.1.0.0/16"]

[[policy]]
name = "web"
workloads = ["web"]
[policy.breaker]
failure_rate = 1
consecutive_failures = "off"
failure_status = [503, "4xx"]
[policy.retry]
backoff = { base = "100ms", max = "10s" }
refuse_non_idempotent = true
[policy.limits]
pending = 3

[agent]
"#;
    assert!(written.contains(expected), "{written}");
    let start = "mode = \"enforce\"\n\n[defaults]\nretry = \"off\"\n\n[defaults.timeouts]\n";
    assert!(written.starts_with(start), "{written}");
    assert!(!written.contains("[defaults.retry]"), "{written}");
    assert!(
        written.ends_with("\n[protected]\ndestinations = []\n"),
        "{written}"
    );
    assert_eq!(read_back(&config), config);
}

/// Values below "off" that no file can have.
#[test]
fn settings_below_off_come_back_as_those_that_are_inherited() {
    let mut config = Config::default_config();
    let built_in = config.defaults.clone();
    config.defaults.breaker.enabled = false;
    config.defaults.breaker.window = 99;
    let mut policy = config.defaults.clone();
    policy.name = "on".to_owned();
    policy.workloads = vec!["a".parse().expect("a pattern")];
    policy.breaker.enabled = true;
    policy.retry.enabled = false;
    policy.retry.limit = None;
    config.policies.push(policy);

    let read = read_back(&config);
    assert!(!read.defaults.breaker.enabled && !read.policies[0].retry.enabled);
    assert_eq!(read.defaults.breaker.window, built_in.breaker.window);
    assert_eq!(read.policies[0].retry.limit, built_in.retry.limit);
    // What is on comes back even where it equals a value that does not.
    assert_eq!(read.policies[0].breaker, config.policies[0].breaker);
}

/// The configuration as it must come back: a file says nothing below "off".
fn without_what_is_off(mut config: Config) -> Config {
    let built_in = Config::default_config().defaults;
    inherit_below_off(&mut config.defaults, &built_in);
    for policy in &mut config.policies {
        inherit_below_off(policy, &config.defaults);
    }
    config
}

fn inherit_below_off(policy: &mut Policy, from: &Policy) {
    if !policy.breaker.enabled {
        policy.breaker = from.breaker.clone();
        policy.breaker.enabled = false;
    }
    if !policy.retry.enabled {
        policy.retry = from.retry.clone();
        policy.retry.enabled = false;
    }
}

proptest! {
    #[test]
    fn configurations_survive_being_written(config in config()) {
        let text = config.to_toml();
        let read = parse_str(&config.source, &text);
        prop_assert_eq!(read.as_ref(), Ok(&without_what_is_off(config)), "{}", text);
        // Exactly, now that it comes from a file.
        prop_assert_eq!(read.as_ref().map(Config::to_toml), Ok(text));
    }
}

/// A value that is often the same, so that policies inherit some of theirs.
fn often<T: Clone + std::fmt::Debug + 'static>(
    few: impl Into<Vec<T>>,
    any: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = T> {
    prop_oneof![3 => select(few.into()), 1 => any]
}

/// Durations in a range of milliseconds.
fn millis(range: RangeInclusive<u64>) -> impl Strategy<Value = Duration> {
    let few = [*range.start(), *range.end()].map(Duration::from_millis);
    often(few, range.prop_map(Duration::from_millis))
}

fn wait() -> impl Strategy<Value = Option<Duration>> {
    often([None], millis(1..=DAY).prop_map(Some))
}

fn count(few: u32, range: RangeInclusive<u32>) -> impl Strategy<Value = u32> {
    often([few], range)
}

fn count_or_off(range: RangeInclusive<u32>) -> impl Strategy<Value = Option<u32>> {
    often([None, Some(*range.end())], range.prop_map(Some))
}

/// Above 0, at most 1, or off.
fn ratio() -> impl Strategy<Value = Option<f64>> {
    let few = [None, Some(0.5), Some(1.0), Some(1e-9), Some(5e-324)];
    often(few, (f64::MIN_POSITIVE..=1.0).prop_map(Some))
}

fn ratio_or_zero() -> impl Strategy<Value = Option<f64>> {
    prop_oneof![Just(Some(0.0)), ratio()]
}

fn timeouts() -> impl Strategy<Value = Timeouts> {
    let keepalive = often([None], millis(1000..=9 * HOUR).prop_map(Some));
    let action = select(vec![ReadAction::Abort, ReadAction::Option]);
    let stall = prop_oneof![
        Just(Stall::Auto),
        Just(Stall::Off),
        millis(1..=DAY).prop_map(Stall::After)
    ];
    let waits = (wait(), wait(), wait(), stall);
    (millis(50..=300_000), waits, keepalive, action).prop_map(
        |(connect, (read, write, deadline, stall), keepalive, read_action)| Timeouts {
            connect,
            read,
            write,
            deadline,
            stall,
            keepalive,
            read_action,
        },
    )
}

fn breaker() -> impl Strategy<Value = BreakerPolicy> {
    let hung = prop_oneof![
        Just(Hung::Auto),
        Just(Hung::Off),
        millis(1..=DAY).prop_map(Hung::After)
    ];
    let status = prop_oneof![
        select(vec![StatusPattern::Class(4), StatusPattern::Class(5)]),
        (400..=599u16).prop_map(StatusPattern::Code)
    ];
    let when = (
        ratio(),
        (count(20, 1..=128), any::<Index>()),
        millis(1000..=HOUR),
        count_or_off(1..=128),
        (wait(), ratio()),
        hung,
        wait(),
    );
    let then = (
        select(vec![Scope::Workload, Scope::Node]),
        (millis(100..=HOUR), millis(100..=HOUR)),
        (count(1, 1..=1000), count(2, 1..=1000)),
        ratio_or_zero(),
        often([vec![StatusPattern::Class(5)]], vec(status, 0..4)),
        select(vec![OnOpen::Keep, OnOpen::DrainIdle, OnOpen::Abort]),
        select(Errno::ALL.to_vec()),
    );
    (any::<bool>(), any::<bool>(), when, then).prop_map(|(enabled, redial, when, then)| {
        let (failure_rate, (window, calls), window_age, failures, slow, hung, gave_up) = when;
        let (scope, (one, other), (probes, successes), share, statuses, on_open, errno) = then;
        BreakerPolicy {
            enabled,
            failure_rate,
            window,
            window_age,
            min_calls: 1 + calls.index(window as usize) as u32,
            consecutive_failures: failures,
            slow_call: slow.0,
            slow_call_rate: slow.1,
            hung,
            gave_up,
            scope,
            cooldown: one.min(other),
            cooldown_max: one.max(other),
            redial,
            probes,
            successes_to_close: successes,
            max_open_share: share,
            failure_status: statuses,
            on_open,
            errno,
        }
    })
}

fn retry() -> impl Strategy<Value = RetryPolicy> {
    let backoff = (millis(1..=HOUR), millis(1..=HOUR)).prop_map(|(one, other)| Backoff {
        base: one.min(other),
        max: one.max(other),
    });
    (
        (any::<bool>(), any::<bool>()),
        count_or_off(0..=100),
        ratio_or_zero(),
        millis(1000..=HOUR),
        count(10, 0..=1_000_000),
        often([None], backoff.prop_map(Some)),
        count(1000, 0..=1_000_000),
        count_or_off(1..=1_000_000),
    )
        .prop_map(
            |(flags, limit, budget, window, min_per_second, backoff, max_held, spin)| RetryPolicy {
                enabled: flags.0,
                limit,
                budget,
                window,
                min_per_second,
                backoff,
                max_held,
                spin_per_second: spin,
                refuse_non_idempotent: flags.1,
            },
        )
}

fn limits() -> impl Strategy<Value = Limits> {
    let limit = || count_or_off(1..=10_000_000);
    (limit(), limit(), limit()).prop_map(|(connections, pending, connects_per_second)| Limits {
        connections,
        pending,
        connects_per_second,
    })
}

type Settings = (Timeouts, BreakerPolicy, RetryPolicy, Limits);

fn settings() -> impl Strategy<Value = Settings> {
    (timeouts(), breaker(), retry(), limits())
}

/// Text with everything that is special in TOML, but no control characters.
fn awkward(most: usize) -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        select(vec![
            "'", "\"", "'''", "\"\"\"", "\\", "#", "]", "é", "\u{2028}", "{}"
        ])
        .prop_map(str::to_owned),
        "\\PC{1,8}",
    ];
    vec(piece, 0..=most / 8).prop_map(|pieces| pieces.concat())
}

fn workload() -> impl Strategy<Value = WorkloadPattern> {
    awkward(40).prop_filter_map("no pattern", |text| text.parse().ok())
}

fn config() -> impl Strategy<Value = Config> {
    let name = awkward(60).prop_filter("starts with a space", |name| name.trim_start() == name);
    // Each of the four sections is inherited as often as not.
    let changed = any::<[bool; 4]>();
    let policy = (
        name,
        vec(pattern(), 0..3),
        vec(workload(), 0..3),
        settings(),
        changed,
    );
    let agent = (16..=1_000_000u32, 16..=26u32, 0..=1_000_000u32).prop_map(
        |(max_destinations, ring, events_kept)| AgentConfig {
            max_destinations,
            ring_bytes: 1 << ring,
            events_kept,
            log: LogFormat::Text,
        },
    );
    let flags = any::<(bool, bool)>();
    (
        flags,
        settings(),
        vec(policy, 0..6),
        agent,
        vec(pattern(), 0..3),
    )
        .prop_map(|((enforce, json), defaults, policies, agent, protected)| {
            let mut config = Config::default_config();
            config.mode = if enforce {
                Mode::Enforce
            } else {
                Mode::Observe
            };
            config.agent = agent;
            if json {
                config.agent.log = LogFormat::Json;
            }
            config.protected = protected;
            apply(&mut config.defaults, defaults, [true; 4]);
            // What a policy in a file starts from.
            let mut inherited = config.defaults.clone();
            inherit_below_off(&mut inherited, &Config::default_config().defaults);
            for (i, (name, destinations, workloads, settings, changed)) in
                policies.into_iter().enumerate()
            {
                let mut policy = inherited.clone();
                // The number makes it unique, not empty, and no space its end.
                policy.name = format!("{name}{i}");
                policy.destinations = destinations;
                policy.workloads = workloads;
                if policy.destinations.is_empty() && policy.workloads.is_empty() {
                    policy.workloads = vec!["*".parse().expect("a pattern")];
                }
                apply(&mut policy, settings, changed);
                config.policies.push(policy);
            }
            config
        })
}

fn apply(policy: &mut Policy, settings: Settings, changed: [bool; 4]) {
    let (timeouts, breaker, retry, limits) = settings;
    // Also without any other change.
    policy.breaker.enabled = breaker.enabled;
    policy.retry.enabled = retry.enabled;
    if changed[0] {
        policy.timeouts = timeouts;
    }
    if changed[1] {
        policy.breaker = breaker;
    }
    if changed[2] {
        policy.retry = retry;
    }
    if changed[3] {
        policy.limits = limits;
    }
}
