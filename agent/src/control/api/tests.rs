//! The JSON compared with the contract.

use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use serde_json::Value;

use super::*;

/// The skeleton of the contract, word for word.
const SKELETON: &str = r#"{"version":"0.1.0","mode":"enforce","uptime_ms":1,"lost_events":0,"destinations":[{
 "destination":"10.0.0.5:5432","workload":"system.slice/billing.service","name":null,"netns":null,"policy":"default",
 "state":"closed|open|half_open|forced_open|forced_closed","state_age_ms":1,
 "reason":{"window":"connects|exchanges|none","kind":"failure_rate|consecutive_failures|slow_call_rate|probe_failed|manual|none","value":0.6,"threshold":0.5},
 "next_probe_in_ms":null,"generation":3,"next_redial_in_ms":null,"bypassed_for_safety":false,
 "windows":{"connects":{"calls":20,"failures":12,"failure_rate":0.6,"consecutive":5},
            "exchanges":{"calls":20,"failures":0,"failure_rate":0.0,"consecutive":0,"slow_calls":0,"slow_call_rate":0.0}},
 "attempts":0,"established":0,"responses":0,"in_flight":0,"abandoned":0,"stale":0,"local":0,
 "failures":{"refused":0,"connect_timeout":0,"unreachable":0,"reset":0,"closed_early":0,"hung":0,"gave_up":0,"read_timeout":0,"write_timeout":0,"deadline":0,"status":0,"other":0},
 "rejected":{"breaker":0,"retry_budget":0,"retry_limit":0,"deadline":0,"limit":0},
 "would_reject":{"breaker":0,"retry_budget":0,"retry_limit":0,"deadline":0,"limit":0},
 "held":{"backoff":0,"spin":0},"would_timeout":0,"hung_recovered":0,
 "retry":{"retries":0,"ratio":0.0,"budget_tokens":0.0,"non_idempotent":0},
 "connect_latency_us":{"count":0,"p50":0,"p90":0,"p99":0,"p999":0,"max":0},
 "response_latency_us":{"count":0,"p50":0,"p90":0,"p99":0,"p999":0,"max":0},
 "connect_latency_1m_us":{"count":0,"p50":0,"p90":0,"p99":0,"p999":0,"max":0},
 "response_latency_1m_us":{"count":0,"p50":0,"p90":0,"p99":0,"p999":0,"max":0},
 "timeouts_ms":{"connect":2000,"read":null,"write":null,"deadline":null,"stall":null,"keepalive":null}}]}"#;

/// A row as a destination shows itself after its first connect.
pub(crate) fn row(destination: &str) -> Row {
    Row {
        destination: destination.to_owned(),
        workload: "system.slice/billing.service".to_owned(),
        name: None,
        names: Vec::new(),
        netns: Some(4_026_531_840),
        policy: "default".to_owned(),
        state: State::Closed,
        state_age_ms: 1,
        reason: Reason::NONE,
        next_probe_in_ms: None,
        generation: 3,
        next_redial_in_ms: None,
        bypassed_for_safety: false,
        bypassed_reason: None,
        probe: None,
        waits_for_call: false,
        breaker_off: false,
        ramp_ends_in_ms: None,
        manual: None,
        windows: Windows::default(),
        attempts: 1,
        established: 1,
        responses: 0,
        in_flight: 0,
        abandoned: 0,
        stale: 0,
        throttled: 0,
        traits: Vec::new(),
        local: 0,
        failures: Failures::default(),
        rejected: Rejections::default(),
        would_reject: Rejections::default(),
        would_reject_succeeded: 0,
        would_reject_failed: 0,
        limits: Limits::default(),
        held: Held::default(),
        would_timeout: 0,
        hung_recovered: 0,
        retry: Retry::default(),
        retry_policy: RetryPolicy::default(),
        connect_latency_us: Latency::default(),
        response_latency_us: Latency::default(),
        connect_latency_1m_us: Latency::default(),
        response_latency_1m_us: Latency::default(),
        timeouts_ms: TimeoutsMs {
            connect: Some(2000),
            ..TimeoutsMs::default()
        },
    }
}

/// As of a node on which all is well but the priority.
pub(crate) fn doctor_report() -> DoctorReport {
    let check = |name: &str, status, what: &str, remedy: Option<&str>| Check {
        name: name.to_owned(),
        status,
        what: what.to_owned(),
        remedy: remedy.map(str::to_owned),
    };
    DoctorReport {
        version: "0.1.0".to_owned(),
        ok: true,
        agent: Some(DoctorAgent {
            pid: 812,
            mode: Mode::Enforce,
            paused: None,
            uptime_ms: 182_000,
            ready: true,
            heartbeat_ms_ago: 5,
            cgroups: vec!["/sys/fs/cgroup/shop".to_owned()],
            config_file: None,
            state_dir: "/var/lib/backstop".to_owned(),
            lost_events: 0,
            rows: DoctorRows::default(),
            memory: DoctorMemory::default(),
            adopted: 0,
        }),
        checks: vec![
            check(
                "priority",
                CheckStatus::Warn,
                "The event thread has no real-time priority.",
                Some("give the agent CAP_SYS_NICE"),
            ),
            check("mode", CheckStatus::Ok, "Verdicts are enforced.", None),
        ],
        hooks: vec![HookReport {
            cgroup: "/sys/fs/cgroup/shop".to_owned(),
            hook: "connect4".to_owned(),
            attached: true,
            verified_ms_ago: Some(4_000),
            others: vec![OtherProgram {
                id: 12,
                name: "lb4".to_owned(),
                position: Position::After,
                cgroup: "/sys/fs/cgroup".to_owned(),
                attach_flags: vec!["multi".to_owned()],
                can_change_verdict: true,
            }],
        }],
    }
}

pub(crate) fn envelope(destinations: Vec<Row>) -> StatusEnvelope {
    StatusEnvelope {
        version: "0.1.0".to_owned(),
        mode: Mode::Enforce,
        uptime_ms: 11_520_000,
        lost_events: 0,
        paused: None,
        orders: Vec::new(),
        unresolved: Vec::new(),
        destinations,
    }
}

/// As a policy that is alone in matching explains itself.
pub(crate) fn explanation(destination: &str, workload: Option<&str>) -> Explanation {
    let candidate = |policy: &str, fit, why: &str, line| Candidate {
        policy: policy.to_owned(),
        fit,
        destination: (fit != Fit::NoMatch).then(|| "10.0.0.0/8:5432".to_owned()),
        workload: None,
        why: why.to_owned(),
        line,
    };
    let setting = |key: &str, value: &str, source, line, inert: Option<&str>| Setting {
        key: key.to_owned(),
        value: value.to_owned(),
        source,
        line,
        inert: inert.map(str::to_owned),
    };
    Explanation {
        destination: destination.to_owned(),
        names: Vec::new(),
        addresses: Vec::new(),
        workload: workload.map(str::to_owned),
        mode: Mode::Enforce,
        paused: None,
        file: Some("/etc/backstop/backstop.toml".to_owned()),
        policy: "orders-db".to_owned(),
        why: "orders-db: destination 10.0.0.0/8:5432 matches".to_owned(),
        protected: None,
        candidates: vec![
            candidate(
                "orders-db",
                Fit::Applies,
                "destination 10.0.0.0/8:5432 matches",
                Some(12),
            ),
            candidate(
                "web",
                Fit::NoMatch,
                "none of its destinations: 10.1.0.0/16:80",
                Some(20),
            ),
        ],
        settings: vec![
            setting(
                "timeouts.connect",
                "1s",
                SettingSource::Policy,
                Some(14),
                None,
            ),
            setting(
                "timeouts.read",
                "3s",
                SettingSource::Defaults,
                Some(3),
                Some("protected"),
            ),
            setting(
                "breaker.errno",
                "ECONNREFUSED",
                SettingSource::BuiltIn,
                None,
                None,
            ),
        ],
        manual: vec![ManualState {
            destination: destination.to_owned(),
            rows: 1,
            state: State::ForcedOpen,
            workload: None,
            ends_in_ms: 90_000,
            since: Timestamp::from_unix_ms(1_795_867_384_123),
            by: "uid 0, pid 4711".to_owned(),
        }],
        rows: vec![ExplainedRow {
            opened_by: None,
            why: "orders-db: destination 10.0.0.0/8:5432 matches".to_owned(),
            gave_up_connect_ms: Some(500),
            gave_up_exchange_ms: None,
            row: row(destination),
        }],
    }
}

/// The keys of a JSON text in the order in which they are written, each with its depth.
/// Escapes do not occur in these texts.
fn keys(json: &str) -> Vec<(usize, String)> {
    let mut keys = Vec::new();
    let mut depth = 0;
    let mut rest = json;
    while let Some(at) = rest.find(['{', '[', '}', ']', '"']) {
        let found = rest.as_bytes()[at];
        rest = &rest[at + 1..];
        match found {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            _ => {
                let end = rest.find('"').unwrap();
                let text = &rest[..end];
                rest = &rest[end + 1..];
                if rest.trim_start().starts_with(':') {
                    keys.push((depth, text.to_owned()));
                }
            }
        }
    }
    keys
}

fn event(event: Event) -> String {
    let time = Timestamp::from_unix_ms(1_795_867_384_123);
    serde_json::to_string(&EventRecord { time, event }).unwrap()
}

#[test]
fn the_envelope_has_the_keys_of_the_contract_in_their_order() {
    let mut ours = keys(&serde_json::to_string(&envelope(vec![row("10.0.0.5:5432")])).unwrap());
    // Additions: after lost_events (three), after name, after bypassed_for_safety (six), after stale (two),
    // after would_reject (three, the last with keys of its own), five at the end of retry, and retry_policy
    // with keys of its own.
    for added in ["paused", "orders", "unresolved"] {
        assert_eq!(ours.remove(4), (1, added.to_owned()));
    }
    let policy = ours
        .iter()
        .position(|(_, key)| key == "retry_policy")
        .unwrap();
    let below: Vec<_> = ours.drain(policy..policy + 6).map(|(_, key)| key).collect();
    let keys_of_policy = [
        "retry_policy",
        "limit",
        "budget",
        "backoff_base_ms",
        "backoff_max_ms",
        "spin_per_second",
    ];
    assert_eq!(below, keys_of_policy);
    let added = [
        "names",
        "bypassed_reason",
        "probe",
        "waits_for_call",
        "breaker_off",
        "ramp_ends_in_ms",
        "manual",
        "throttled",
        "traits",
        "would_reject_succeeded",
        "would_reject_failed",
        "amplification",
        "operations",
        "live",
        "non_idempotent_refused",
        "non_idempotent_would_refuse",
    ];
    ours.retain(|(_, key)| !added.contains(&key.as_str()));
    let limits = ours.iter().position(|(_, key)| key == "limits").unwrap();
    let within = ours[limits + 1..].iter().position(|(_, key)| key == "held");
    let below: Vec<_> = ours.drain(limits..=limits + within.unwrap()).collect();
    let below: Vec<_> = below.iter().map(|(_, key)| key.as_str()).collect();
    let one = ["limit", "used"];
    let each =
        ["connections", "pending", "connects_per_second"].map(|of| [&[of][..], &one].concat());
    assert_eq!(below, [&["limits"][..], &each.concat()].concat());
    assert_eq!(ours, keys(SKELETON));
}

#[test]
fn words_are_those_of_the_contract() {
    let skeleton: Value = serde_json::from_str(SKELETON).unwrap();
    let row = &skeleton["destinations"][0];
    let joined = |words: &[&str]| Value::from(words.join("|"));
    let states: Vec<_> = State::ALL.iter().map(|w| w.as_str()).collect();
    let windows: Vec<_> = Window::ALL.iter().map(|w| w.as_str()).collect();
    let kinds: Vec<_> = ReasonKind::ALL.iter().map(|w| w.as_str()).collect();
    assert_eq!(joined(&states), row["state"]);
    assert_eq!(joined(&windows), row["reason"]["window"]);
    assert_eq!(joined(&kinds), row["reason"]["kind"]);
    for state in State::ALL {
        assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
    }
}

#[test]
fn failures_and_rejections_name_every_key() {
    let json = serde_json::to_value(row("a")).unwrap();
    let keys =
        |key: &str| -> Vec<String> { json[key].as_object().unwrap().keys().cloned().collect() };
    let mut failures: Vec<_> = Failures::default().each().map(|(word, _)| word).to_vec();
    let mut reasons: Vec<_> = Rejections::default().each().map(|(word, _)| word).to_vec();
    failures.sort_unstable();
    reasons.sort_unstable();
    assert_eq!(failures, keys("failures"));
    assert_eq!(reasons, keys("rejected"));
}

#[test]
fn percentiles_are_null_without_calls_and_the_reason_is_zero() {
    let json = serde_json::to_value(row("a")).unwrap();
    assert_eq!(
        serde_json::to_string(&json["connect_latency_us"]["p50"]).unwrap(),
        "null"
    );
    assert_eq!(json["connect_latency_us"]["max"], 0);
    assert_eq!(
        json["reason"],
        serde_json::json!({"window":"none","kind":"none","value":0.0,"threshold":0.0})
    );
}

#[test]
fn rows_are_sorted_worst_first() {
    let with = |name: &str, change: &dyn Fn(&mut Row)| {
        let mut row = row(name);
        change(&mut row);
        row
    };
    let mut envelope = envelope(vec![
        with("f", &|_| {}),
        with("e", &|_| {}),
        with("d", &|row| row.failures.refused = 1),
        with("z", &|row| row.bypassed_for_safety = true),
        with("y", &|row| row.state = State::HalfOpen),
        with("x", &|row| row.state = State::ForcedOpen),
        with("w", &|row| {
            row.state = State::Open;
            row.failures.other = 7;
        }),
    ]);
    envelope.sort();
    let order: Vec<_> = envelope
        .destinations
        .iter()
        .map(|r| r.destination.as_str())
        .collect();
    assert_eq!(order, ["w", "x", "y", "z", "d", "e", "f"]);
}

#[test]
fn events_have_the_keys_of_the_contract() {
    let breaker = event(Event::Breaker {
        destination: "10.0.0.5:5432".to_owned(),
        name: None,
        workload: "w".to_owned(),
        netns: Some(1),
        from: State::Closed,
        to: State::Open,
        reason: Reason {
            window: Window::Connects,
            kind: ReasonKind::ConsecutiveFailures,
            value: 5.0,
            threshold: 5.0,
        },
        generation: 4,
        cause: None,
        by: None,
    });
    assert_eq!(
        breaker,
        r#"{"time":"2026-11-28T12:03:04.123Z","kind":"breaker","destination":"10.0.0.5:5432","workload":"w","netns":1,"from":"closed","to":"open","reason":{"window":"connects","kind":"consecutive_failures","value":5.0,"threshold":5.0},"generation":4}"#
    );
    let failure = event(Event::Failure {
        destination: "d".to_owned(),
        workload: "w".to_owned(),
        netns: Some(1),
        window: Window::Connects,
        outcome: "refused".to_owned(),
        seq: 41,
        previous_call_time: None,
        generation: 3,
        latency_us: 210,
    });
    let contract = r#"{"time":0,"kind":"failure","destination":0,"workload":0,"netns":0,"window":"connects","outcome":"refused","seq":41,"previous_call_time":0,"generation":3,"latency_us":210}"#;
    assert_eq!(keys(&failure), keys(contract));
    let calls = event(Event::Calls {
        destination: "d".to_owned(),
        workload: "w".to_owned(),
        netns: Some(1),
        window: Window::Exchanges,
        from_seq: 1,
        to_seq: 40,
        first_time: Timestamp::from_unix_ms(1),
        last_time: Timestamp::from_unix_ms(2),
        latency_us: CallsLatency::default(),
        slow: 0,
    });
    let contract = r#"{"time":0,"kind":"calls","destination":0,"workload":0,"netns":0,"window":"exchanges","from_seq":1,"to_seq":40,"first_time":0,"last_time":0,"latency_us":{"p50":0,"p99":0,"max":0},"slow":0}"#;
    assert_eq!(keys(&calls), keys(contract));
    for line in [breaker, failure, calls] {
        let record: EventRecord = serde_json::from_str(&line).unwrap();
        assert_eq!(serde_json::to_string(&record).unwrap(), line);
        assert!(line.contains(&format!("\"kind\":\"{}\"", record.event.kind())));
    }
}

#[test]
fn durations_of_for() {
    assert_eq!(parse_for("15m"), Ok(Duration::from_secs(900)));
    assert_eq!(parse_for("1h 30m"), Ok(Duration::from_secs(5400)));
    assert_eq!(parse_for("250ms"), Ok(Duration::from_millis(250)));
    for bad in [
        "",
        "0s",
        "10",
        "-1s",
        "soon",
        "100us",
        "400days",
        "99999999999999999999s",
        // humantime 2.4 panics.
        "18446744073709551615s0.5s0.5s",
        &"1s".repeat(1000),
    ] {
        let message = parse_for(bad).unwrap_err();
        assert!(
            message.contains("want a duration from 1ms") && !message.starts_with("for:"),
            "{bad}: {message}"
        );
    }
}

#[test]
fn workloads_that_cannot_be() {
    for good in [
        "/",
        "a",
        "system.slice/billing.service",
        "a..b/c",
        "ns/pod",
        "ä b",
    ] {
        assert_eq!(check_workload(good), Ok(()), "{good}");
    }
    let long = "x".repeat(4097);
    for bad in [
        "", "//", "/a", "a/", "..", "a/..", "../a", "a/../b", "a\nb", "\u{7f}", &long,
    ] {
        let message = check_workload(bad).unwrap_err();
        assert!(
            message.contains("a cgroup path below the v2 mount without leading slash"),
            "{bad}: {message}"
        );
        assert!(message.len() < 400, "{message}");
    }
    assert_eq!(check_order_workload("system.slice/a-1.service"), Ok(()));
    assert!(check_order_workload("a/").is_err());
    for pattern in ["*", "*/billing-*", "a?"] {
        assert_eq!(check_workload(pattern), Ok(()));
        let message = check_order_workload(pattern).unwrap_err();
        assert!(message.contains("is a pattern"), "{message}");
    }
}

#[test]
fn times_are_rfc_3339_in_utc() {
    assert_eq!(Timestamp::default().to_string(), "1970-01-01T00:00:00.000Z");
    assert_eq!(
        Timestamp::from_unix_ms(u64::MAX).to_string(),
        "9999-12-31T23:59:59.999Z"
    );
    assert_eq!(
        Timestamp::from_unix_ms(1_795_867_384_123).short(),
        "11-28 12:03:04.123"
    );
    let before_1970 = SystemTime::UNIX_EPOCH - Duration::from_secs(1);
    assert_eq!(Timestamp::from(before_1970), Timestamp::default());
    let shifted: Timestamp = serde_json::from_str("\"2026-11-28T13:03:04.123+01:00\"").unwrap();
    assert_eq!(shifted.unix_ms(), 1_795_867_384_123);
}

proptest! {
    #[test]
    fn times_survive_json(ms in 0u64..=253_402_300_799_999) {
        let time = Timestamp::from_unix_ms(ms);
        let json = serde_json::to_string(&time).unwrap();
        prop_assert_eq!(json.len(), 26);
        prop_assert_eq!(serde_json::from_str::<Timestamp>(&json).unwrap(), time);
    }
}

/// The list is that of the enum itself.
#[test]
fn every_kind_of_event_is_listed() {
    let text = r#"{"time":"2026-11-28T12:03:04.123Z","kind":"nothing"}"#;
    let error = serde_json::from_str::<EventRecord>(text).unwrap_err();
    let error = error.to_string();
    let known: Vec<_> = error.split('`').skip(3).step_by(2).collect();
    assert_eq!(known, Event::KINDS, "{error}");
}
