//! What an operator sees: status, exit codes, the listener, the control interface.

use std::{collections::BTreeSet, net::SocketAddr};

use serde_json::{Value, json};
use tests::{
    agent::{Agent, AgentOptions, Home, binary},
    cgroup::TestCgroup,
    dialer::Dialer,
    need,
    net::TestNet,
    process::Program,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";

/// The contract's example of `status --json`.
const CONTRACT: &str = r#"{"version":"0.1.0","mode":"enforce","uptime_ms":1,"lost_events":0,"destinations":[{
 "destination":"10.0.0.5:5432","workload":"system.slice/billing.service","name":null,"netns":null,"policy":"default",
 "state":"closed","state_age_ms":1,
 "reason":{"window":"connects","kind":"failure_rate","value":0.6,"threshold":0.5},
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
 "timeouts_ms":{"connect":2000,"read":null,"write":null,"deadline":null,"stall":null,"keepalive":null}}]}"#;

/// Every path of keys in a value; the elements of lists count as one.
fn keys(value: &Value, path: &str, all: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) => {
            for (key, value) in object {
                let path = format!("{path}.{key}");
                keys(value, &path, all);
                all.insert(path);
            }
        }
        Value::Array(list) => list.iter().for_each(|value| keys(value, path, all)),
        _ => {}
    }
}

fn key_set(value: &Value) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    keys(value, "", &mut all);
    all
}

/// One closed, one tripped and one half-open destination.
fn three_rows(net: &TestNet, group: &TestCgroup) -> (Agent, Vec<Server>) {
    let config = "[defaults.breaker]\nredial = false\ncooldown = \"100ms\"\n";
    let agent = Agent::start(group, config);
    let servers = vec![Server::start(&net.server, TO)];
    let mut dialer = Dialer::start(DIAL, group, &net.client);
    assert_eq!(dialer.connect(TO).errno, 0);
    for _ in 0..5 {
        assert_eq!(
            dialer.connect(TestNet::server4(8081)).errno,
            libc::ECONNREFUSED
        );
    }
    agent.command(&["trip", "10.77.0.2:8082"]).good();
    assert_eq!(
        dialer.connect(TestNet::server4(8082)).errno,
        libc::ECONNREFUSED
    );
    agent.wait_state("10.77.0.2:8081", "half_open");
    agent.wait_state("10.77.0.2:8082", "forced_open");
    (agent, servers)
}

#[test]
fn status_has_every_key_of_the_contract() {
    let (net, group) = (TestNet::new(), TestCgroup::new("keys"));
    let (agent, _servers) = three_rows(&net, &group);
    let text = agent.command(&["status", "--json"]).good();
    let status: Value = serde_json::from_str(&text).expect("JSON");
    let contract = key_set(&serde_json::from_str(CONTRACT).expect("JSON"));
    for row in status["destinations"].as_array().expect("a list") {
        let mut envelope = status.clone();
        envelope["destinations"] = json!([row]);
        let have = key_set(&envelope);
        let missing: Vec<_> = contract.difference(&have).collect();
        assert!(missing.is_empty(), "{missing:?} missing in {row:#}");
        // Additions: the pause in force, operators' orders, names that are not known, all names of a row, why
        // a row is bypassed, what the next connect is, a breaker that is off, who asked for fewer calls, what
        // was learned, who set a manual state, the ramp, the last minute, the limits, what observe mode saw,
        // the attempts that operations take, what the policy says of retries.
        let is_added = |key: &str| {
            key == ".paused"
                || key.starts_with(".orders")
                || key.ends_with(".bypassed_reason")
                || key.ends_with(".throttled")
                || key.ends_with(".traits")
                || key.contains(".destinations.manual")
                || key.ends_with(".ramp_ends_in_ms")
                || key.contains("_1m_us")
                || key.contains(".destinations.limits")
                || key.contains(".would_reject_")
                || key.ends_with(".retry.amplification")
                || key.contains(".retry.operations")
                || key.contains(".unresolved")
                || key.contains(".destinations.names")
                || key.ends_with(".probe")
                || key.ends_with(".waits_for_call")
                || key.ends_with(".breaker_off")
                || key.contains(".retry_policy")
                || key.ends_with(".retry.live")
                || key.contains(".retry.non_idempotent_")
        };
        let more: Vec<_> = have
            .difference(&contract)
            .filter(|key| !is_added(key))
            .collect();
        assert!(more.is_empty(), "{more:?} are not in the contract");
    }
    let closed = agent.row(DESTINATION);
    assert_eq!(
        closed["reason"],
        json!({"window":"none","kind":"none","value":0.0,"threshold":0.0})
    );
    assert_eq!(closed["connect_latency_us"]["count"], 1);
    assert!(closed["connect_latency_us"]["p50"].is_u64(), "{closed:#}");
    assert_eq!(closed["response_latency_us"]["p50"], Value::Null);
    assert_eq!(closed["policy"], "default");
    assert_eq!(agent.row("10.77.0.2:8082")["reason"]["kind"], "manual");

    let one = agent.command(&["status", DESTINATION, "--json"]).good();
    let one: Value = serde_json::from_str(&one).expect("JSON");
    assert_eq!(one["destinations"].as_array().map(Vec::len), Some(1));
    let none = agent.command(&["status", "10.9.9.9:1", "--json"]);
    assert_eq!(none.code(), 1, "{none}");
    let none: Value = serde_json::from_str(&none.stdout).expect("JSON");
    assert_eq!(none["destinations"], json!([]));
}

#[test]
fn the_table_reads_well() {
    let (net, group) = (
        TestNet::new(),
        TestCgroup::new("table-of-a-workload-with-a-long-name"),
    );
    let (agent, _servers) = three_rows(&net, &group);
    let table = agent.command(&["status"]).good();
    assert!(
        table.lines().all(|line| line.chars().count() <= 100),
        "{table}"
    );
    assert!(
        !table.contains('\x1b'),
        "no colour where there is no terminal"
    );
    let at = |port: u16| {
        let mut lines = table.lines();
        lines
            .position(|line| line.starts_with(&format!("10.77.0.2:{port} ")))
            .expect("a row")
    };
    assert!(
        at(8082) < at(8081) && at(8081) < at(8080),
        "worst first: {table}"
    );
    assert!(
        table.contains("forced open") && table.contains("half-open"),
        "{table}"
    );
    let details = agent.command(&["status", "10.77.0.2:8081"]).good();
    assert!(details.contains(&group.workload()), "{details}");
}

#[test]
fn the_listener_tells_and_changes_nothing() {
    let (net, group) = (TestNet::new(), TestCgroup::new("listener"));
    let (agent, _servers) = three_rows(&net, &group);
    assert_eq!(agent.get("/healthz").status, 200);
    assert_eq!(agent.get("/readyz").status, 200);
    assert_eq!(agent.get("/v1/destinations").status, 404);
    let of = |destination: &str, more: &[(&str, &str)]| {
        let mut labels = vec![
            format!("destination=\"{destination}\""),
            format!("workload=\"{}\"", group.workload()),
            "policy=\"default\"".to_owned(),
        ];
        labels.extend(more.iter().map(|(key, value)| format!("{key}=\"{value}\"")));
        labels
    };
    let sick = "10.77.0.2:8081";
    let tripped = "10.77.0.2:8082";
    let expected = [
        ("backstop_attempts_total", of(sick, &[]), 5.0),
        ("backstop_attempts_total", of(DESTINATION, &[]), 1.0),
        ("backstop_established_total", of(DESTINATION, &[]), 1.0),
        (
            "backstop_failures_total",
            of(sick, &[("kind", "refused")]),
            5.0,
        ),
        (
            "backstop_rejected_total",
            of(tripped, &[("reason", "breaker")]),
            1.0,
        ),
        (
            "backstop_breaker_state",
            of(sick, &[("state", "half_open")]),
            1.0,
        ),
        (
            "backstop_breaker_state",
            of(sick, &[("state", "open")]),
            0.0,
        ),
        (
            "backstop_connect_duration_seconds_count",
            of(DESTINATION, &[]),
            1.0,
        ),
        ("backstop_in_flight", of(sick, &[]), 0.0),
        (
            "backstop_breaker_transitions_total",
            of(
                sick,
                &[
                    ("from", "closed"),
                    ("to", "open"),
                    ("reason", "consecutive_failures"),
                ],
            ),
            1.0,
        ),
    ];
    for (name, labels, value) in expected {
        assert_eq!(
            agent.metric(name, &labels),
            Some(value),
            "{name} {labels:?}"
        );
    }
    assert_eq!(agent.metric("backstop_events_lost_total", &[]), Some(0.0));
    assert!(agent.metric("backstop_reaction_seconds_count", &[]) >= Some(1.0));
    for hook in ["connect4", "connect6"] {
        let hook = format!("hook=\"{hook}\"");
        assert_eq!(agent.metric("backstop_attached", &[hook]), Some(1.0));
    }
}

/// The control interface is plain HTTP, and the socket belongs to root alone.
#[test]
fn curl_reaches_the_socket() {
    need!("curl");
    let (net, group) = (TestNet::new(), TestCgroup::new("curl"));
    let agent = Agent::start(&group, "");
    let socket = agent.home().socket();
    let mode = std::fs::metadata(&socket)
        .expect("the socket")
        .permissions();
    assert_eq!(
        std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777,
        0o600
    );
    let curl = |args: &[&str]| {
        let output = Program::new("curl")
            .args(["-q", "-sS", "-g", "--unix-socket"])
            .arg(&socket);
        let text = output
            .args(["-w", "\n%{http_code}"])
            .args(args)
            .run()
            .good();
        let (body, code) = text.rsplit_once('\n').expect("a code");
        let body: Value = serde_json::from_str(body).expect("JSON");
        (code.to_owned(), body)
    };
    let six = SocketAddr::new(TestNet::SERVER6, 8080);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(six).errno, libc::ECONNREFUSED);
    for path in ["[fd77::2]:8080", "%5Bfd77::2%5D%3A8080"] {
        let (code, body) = curl(&[&format!("http://backstop/v1/destinations/{path}")]);
        assert_eq!(
            (code.as_str(), &body["destinations"][0]["attempts"]),
            ("200", &json!(1))
        );
    }
    let (code, body) = curl(&[
        "-X",
        "POST",
        "http://backstop/v1/destinations/[fd77::2]:8080/trip?for=5m",
    ]);
    assert_eq!((code.as_str(), &body["rows"]), ("200", &json!(1)), "{body}");
    agent.wait_state("[fd77::2]:8080", "forced_open");
    for (expected, args) in [
        ("400", &["http://backstop/v1/destinations/nonsense"][..]),
        ("404", &["http://backstop/v1/nothing"]),
        (
            "400",
            &[
                "-X",
                "POST",
                "http://backstop/v1/destinations/10.0.0.1:80/trip?for=soon",
            ],
        ),
        (
            "409",
            &[
                "-X",
                "POST",
                "http://backstop/v1/destinations/10.0.0.1:53/trip",
            ],
        ),
    ] {
        let (code, body) = curl(args);
        assert_eq!(code, expected, "{body}");
        assert!(body["error"].is_string(), "{body}");
    }
}

/// As many events as the file says are kept, the last ones.
#[test]
fn old_events_are_forgotten() {
    let group = TestCgroup::new("kept");
    let agent = Agent::start(&group, "[agent]\nevents_kept = 4\n");
    let mut events = agent.follow(&[]);
    for _ in 0..3 {
        agent.command(&["pause"]).good();
        agent.command(&["resume"]).good();
    }
    for _ in 0..3 {
        events.wait("resumed", |event| event["action"] == "resumed");
    }
    let kept = agent.command(&["events", "--json"]).good();
    let actions: Vec<Value> = kept
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["action"].clone())
        .collect();
    assert_eq!(actions, ["paused", "resumed", "paused", "resumed"]);
}

#[test]
fn exit_codes_of_the_commands() {
    let home = Home::new();
    let run = |args: &[&str]| {
        Program::new(binary())
            .arg("--socket")
            .arg(home.socket())
            .args(args)
            .run()
    };
    for args in [
        &["status"][..],
        &["events"],
        &["trip", DESTINATION],
        &["reset", DESTINATION],
        &["pause"],
        &["resume"],
    ] {
        let finished = run(args);
        assert_eq!(finished.code(), 3, "{finished}");
        assert_eq!(finished.stderr.lines().count(), 1, "{finished}");
    }
    assert_eq!(run(&["status", "--no-such-flag"]).code(), 2);
    assert_eq!(run(&["no-such-command"]).code(), 2);
    assert_eq!(run(&["trip", DESTINATION, "--for", "soon"]).code(), 2);

    let group = TestCgroup::new("codes");
    let agent = Agent::start(&group, "");
    for bad in [
        "10.0.0.5",
        "10.0.0.5:0",
        "10.0.0.5:99999",
        "not a destination",
    ] {
        let finished = agent.command(&["trip", bad]);
        assert_eq!(finished.code(), 2, "{finished}");
    }
    assert_eq!(agent.command(&["status"]).code(), 0);

    let missing = AgentOptions::new(&group);
    let gone = group.path().join("gone");
    let missing = missing
        .args(&["--cgroup", gone.to_str().expect("ASCII")])
        .program()
        .run();
    assert_eq!(missing.code(), 2, "{missing}");
    assert!(missing.stderr.contains("gone"), "{missing}");
}

/// Without what it needs `run` ends with 4 and one sentence with the remedy.
#[test]
fn a_machine_that_lacks_something_is_told_so() {
    need!("setpriv", "unshare");
    let home = Home::new();
    // A copy that anybody may execute: the build may lie in a private home.
    let copy = tempfile::Builder::new()
        .prefix("bst-bin-")
        .tempdir()
        .expect("a directory");
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(copy.path(), everybody).expect("open the directory");
    let program = copy.path().join("backstop");
    std::fs::copy(binary(), &program).expect("copy the binary");
    let run = format!(
        "exec {} --socket {} run --state-dir {} --listen none",
        program.display(),
        home.socket().display(),
        home.path().join("state").display()
    );
    let nobody = [
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "sh",
        "-c",
        &run,
    ];
    let no_cgroup = format!("umount -l -a -t cgroup2 && {run}");
    let no_btf = format!("mount -t tmpfs none /sys/kernel/btf && {run}");
    let cases = [
        (Program::new("setpriv").args(nobody), "as root"),
        (
            Program::new("unshare").args(["-m", "sh", "-c", &no_cgroup]),
            "cgroup v2",
        ),
        (
            Program::new("unshare").args(["-m", "sh", "-c", &no_btf]),
            "CONFIG_DEBUG_INFO_BTF",
        ),
    ];
    for (program, remedy) in cases {
        let finished = program.run();
        assert_eq!(finished.code(), 4, "{finished}");
        assert_eq!(
            finished.stderr.lines().count(),
            1,
            "one sentence: {finished}"
        );
        assert!(finished.stderr.contains(remedy), "{finished}");
        assert_eq!(finished.stdout, "", "no ready line");
    }
}
