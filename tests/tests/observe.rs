//! Observe mode, and the events that tell what was decided.

use std::{
    io::{Read as _, Write as _},
    net::SocketAddr,
    time::Duration,
};

use tests::{
    agent::{Agent, AgentOptions, assert_balanced},
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    interpreter::Interpreter,
    need,
    net::TestNet,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const BLACKHOLE: SocketAddr = SocketAddr::new(TestNet::blackhole4(0), 80);

#[test]
fn nothing_is_refused_and_everything_counted() {
    let (net, group) = (TestNet::new(), TestCgroup::new("observe"));
    let options = AgentOptions::new(&group).config("[defaults.breaker]\nredial = false\n");
    let agent = options.args(&["--mode", "observe"]).start();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(DESTINATION, "open");
    let server = Server::start(&net.server, TO);
    for _ in 0..7 {
        assert_eq!(dialer.connect(TO).errno, 0);
    }
    server.wait_accepts(7);
    let row = agent.row(DESTINATION);
    assert_eq!(row["would_reject"]["breaker"], 7, "{row:#}");
    assert_eq!(
        (&row["rejected"]["breaker"], &row["attempts"]),
        (&0.into(), &12.into()),
        "{row:#}"
    );
    assert_balanced(&row);
    let table = agent.command(&["status"]).good();
    assert!(
        table.contains("WOULD-REJ") && table.contains("mode observe"),
        "{table}"
    );
}

/// What observe mode would have refused is followed to its end: the cost of a policy before it is
/// switched on.
#[test]
fn what_became_of_them() {
    need!("python3");
    let (net, group) = (TestNet::new(), TestCgroup::new("became"));
    let config = "[defaults]\nretry = \"off\"\n[defaults.breaker]\nredial = false\ncooldown = \"5m\"\ngave_up = \"off\"\n";
    let options = AgentOptions::new(&group).config(config);
    let agent = options.args(&["--mode", "observe"]).start();
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(DESTINATION, "open");
    // Answers `x`, hangs up on `c`, and keeps `w` waiting.
    let server = Server::with(&net.server, TO, |mut stream| {
        let mut byte = [0];
        while stream.read_exact(&mut byte).is_ok() && byte != *b"c" {
            if byte == *b"x" {
                let _ = stream.write_all(b"y");
            }
        }
    });
    let mut python = Interpreter::start(&group, &net.client);
    let mut ask = |request: &str| {
        python.value("(s := socket.create_connection(('10.77.0.2', 8080))) and 0");
        if !request.is_empty() {
            python.value(&format!("s.sendall(b'{request}')"));
        }
        if !["", "w"].contains(&request) {
            python.value("len(s.recv(1))");
        }
        python.value("s.close()");
    };
    // Good: answered, or only connected. Bad: hung up on. Neither: closed by the program at once.
    for request in ["x", "x", "", "c", "w"] {
        ask(request);
    }
    let outcomes = |good: u64, bad: u64| {
        agent.wait_row(DESTINATION, "what became of them", |row| {
            row["would_reject_succeeded"] == good && row["would_reject_failed"] == bad
        })
    };
    outcomes(3, 1);
    server.stop();
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    let row = outcomes(3, 2);
    assert_eq!(row["would_reject"]["breaker"], 6, "{row:#}");
    let text = agent.command(&["status", DESTINATION]).good();
    assert!(
        text.contains("3 of those went well (60 % of 5 that tell)"),
        "{text}"
    );
    let explained = agent.command(&["explain", DESTINATION]).good();
    assert!(explained.contains("3 of those went well"), "{explained}");
    for (outcome, count) in [("succeeded", 3.0), ("failed", 2.0)] {
        let labels = [format!("outcome=\"{outcome}\"")];
        let metric = agent.metric("backstop_would_reject_outcomes_total", &labels);
        assert_eq!(metric, Some(count), "{outcome}");
    }
}

/// A connect that outlives its timeout counts as a failure at its value, and lives on.
#[test]
fn timeouts_count_and_touch_no_socket() {
    let (net, group) = (TestNet::new(), TestCgroup::new("observe-timeout"));
    let config = "mode = \"observe\"\n[defaults.timeouts]\nconnect = \"500ms\"\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let mut events = agent.follow(&[]);
    dialer.open(BLACKHOLE, 3, How::default());
    dialer.open(
        BLACKHOLE,
        1,
        How {
            own_timeout: Some(60_000),
            ..How::default()
        },
    );
    let destination = BLACKHOLE.to_string();
    let event = events.wait("a timeout", |event| event["kind"] == "timeout");
    assert_eq!(event["mode"], "observe", "{event:#}");
    assert_eq!(
        (&event["which"], &event["value_ms"]),
        (&"connect".into(), &500.into())
    );
    let row = agent.wait_row(&destination, "four timeouts", |row| {
        row["would_timeout"] == 4
    });
    assert_eq!(row["failures"]["connect_timeout"], 4, "{row:#}");
    assert_balanced(&row);
    assert_eq!(dialer.user_timeouts(), [0, 0, 0, 60_000]);
    assert_eq!(
        dialer.settle(Duration::from_millis(100)),
        [libc::EINPROGRESS; 4]
    );
}

/// One run through everything that makes events.
#[test]
fn events_tell_what_was_decided() {
    let (net, group) = (TestNet::new(), TestCgroup::new("events"));
    let config = "[defaults.timeouts]\nconnect = \"200ms\"\n";
    let agent = Agent::start(&group, config);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let mut all = agent.follow(&["--all"]);
    let mut decisions = agent.follow(&[]);
    let server = Server::start(&net.server, TO);
    for _ in 0..3 {
        assert_eq!(dialer.connect(TO).errno, 0);
    }
    server.stop();
    for _ in 0..5 {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    agent.wait_state(DESTINATION, "open");
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED, "by Backstop");
    assert_eq!(dialer.connect(BLACKHOLE).errno, libc::ETIMEDOUT);

    let open = decisions.wait_breaker(DESTINATION, "open");
    assert_eq!(
        (&open["from"], &open["workload"]),
        (&"closed".into(), &group.workload().into())
    );
    assert_eq!(open["reason"]["kind"], "consecutive_failures");
    assert_eq!(open["generation"], agent.row(DESTINATION)["generation"]);
    let rejected = decisions.find("a refusal", |event| event["kind"] == "rejected");
    assert_eq!(rejected["reason"], "breaker");
    assert_eq!(
        (&rejected["pid"], &rejected["comm"]),
        (&dialer.pid().into(), &"dial".into())
    );
    let timeout = decisions.find("a timeout", |event| event["kind"] == "timeout");
    assert_eq!(
        (&timeout["which"], &timeout["value_ms"]),
        (&"connect".into(), &200.into())
    );
    assert_eq!(
        (&timeout["pid"], &timeout["comm"]),
        (&dialer.pid().into(), &"dial".into())
    );
    let elapsed = timeout["elapsed_ms"].as_u64().expect("ms");
    // How exact timeouts are is shown in timeouts.rs; this is what is told of one.
    assert!((200..60_000).contains(&elapsed), "{timeout:#}");
    assert_eq!(
        decisions.seen()[0]["kind"],
        "config",
        "it began with the start"
    );
    let only_with_all = |kind: &serde_json::Value| kind == "failure" || kind == "calls";
    assert!(
        !decisions
            .seen()
            .iter()
            .any(|event| only_with_all(&event["kind"]))
    );

    // In whatever order: who needs one sorts by `seq`.
    let is_failure = |event: &serde_json::Value| {
        event["kind"] == "failure" && event["destination"] == DESTINATION
    };
    let mut failures: Vec<_> = (4..=8).map(|_| all.wait("a failure", is_failure)).collect();
    failures.sort_by_key(|event| event["seq"].as_u64());
    for (seq, event) in (4..=8_u64).zip(failures) {
        assert_eq!(
            (&event["seq"], &event["outcome"]),
            (&seq.into(), &"refused".into())
        );
        assert_eq!(
            (&event["destination"], &event["window"]),
            (&DESTINATION.into(), &"connects".into())
        );
        assert!(event["previous_call_time"].is_string(), "{event:#}");
    }
    let calls = all
        .seen()
        .iter()
        .find(|event| event["kind"] == "calls")
        .cloned();
    let calls =
        calls.unwrap_or_else(|| all.wait("the good calls", |event| event["kind"] == "calls"));
    assert_eq!(
        (&calls["from_seq"], &calls["to_seq"]),
        (&1.into(), &3.into()),
        "{calls:#}"
    );

    // Without --follow: what was kept, oldest first, and the end.
    let kept = agent.command(&["events", "--json"]).good();
    let kinds: Vec<String> = kept
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"))
        .map(|event| event["kind"].as_str().expect("a kind").to_owned())
        .collect();
    assert_eq!(kinds[0], "config");
    for kind in ["breaker", "rejected", "timeout"] {
        assert!(
            kinds.iter().any(|have| have == kind),
            "{kind} is not in {kinds:?}"
        );
    }
    let text = agent.command(&["events"]).good();
    assert!(
        text.contains(DESTINATION) && text.contains("200ms"),
        "{text}"
    );
}
