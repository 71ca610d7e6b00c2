//! `explain`: what an operator is told matches what the kernel does.

use std::net::SocketAddr;

use serde_json::{Value, json};
use tests::{
    agent::{Agent, AgentOptions},
    cgroup::TestCgroup,
    dialer::Dialer,
    net::TestNet,
    process::Program,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";

/// The policy for the workload is the last of three that match.
fn config(workload: &str) -> String {
    format!(
        "[[policy]]\n\
         name = \"wide\"\n\
         destinations = [\"10.77.0.0/16\"]\n\
         [[policy]]\n\
         name = \"exact\"\n\
         destinations = [\"{DESTINATION}\"]\n\
         timeouts = {{ connect = \"700ms\" }}\n\
         [[policy]]\n\
         name = \"ours\"\n\
         destinations = [\"10.77.0.0/16\"]\n\
         workloads = [\"{workload}\"]\n\
         breaker = {{ errno = \"EHOSTUNREACH\", redial = false, cooldown = \"5m\" }}\n\
         [protected]\n\
         destinations = [\"10.77.0.2:8081\"]\n"
    )
}

fn explain(agent: &Agent, args: &[&str]) -> Value {
    let mut all = vec!["explain", DESTINATION, "--json"];
    all.extend(args);
    serde_json::from_str(&agent.command(&all).good()).expect("JSON")
}

fn setting<'v>(explained: &'v Value, key: &str) -> &'v Value {
    let settings = explained["settings"].as_array().expect("a list");
    let found = settings.iter().find(|setting| setting["key"] == key);
    found.unwrap_or_else(|| panic!("{key} in {explained:#}"))
}

#[test]
fn the_policy_that_is_explained_is_the_one_in_force() {
    let (net, group) = (TestNet::new(), TestCgroup::new("explain"));
    let workload = group.workload();
    let agent = Agent::start_for_loops(&group, &config(&workload));

    // Before anything was seen, for anybody.
    let nobody = explain(&agent, &[]);
    assert_eq!(nobody["policy"], "exact");
    assert_eq!(nobody["rows"], json!([]));
    let connect = setting(&nobody, "timeouts.connect");
    assert_eq!(
        (&connect["value"], &connect["source"], &connect["line"]),
        (&json!("700ms"), &json!("policy"), &json!(7))
    );

    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for number in 0..5 {
        assert_ne!(dialer.connect(TO).errno, 0, "nothing listens there");
        if number == 0 {
            // The kernel knows no names: a moment later the agent has put it on.
            agent.wait_row(DESTINATION, "its policy", |row| row["policy"] == "ours");
        }
    }
    agent.wait_state(DESTINATION, "open");
    // The process by its id, its group by directory, and as `status` shows it.
    let pid = dialer.pid().to_string();
    let directory = group.path().to_str().expect("UTF-8");
    for who in [
        ["--pid", &pid],
        ["--cgroup", directory],
        ["--cgroup", &workload],
    ] {
        let explained = explain(&agent, &who);
        assert_eq!(explained["workload"], workload.as_str(), "{who:?}");
        assert_eq!(explained["policy"], "ours", "{who:?}");
        let row = &explained["rows"][0]["row"];
        assert_eq!(
            (&row["policy"], &row["state"]),
            (&json!("ours"), &json!("open"))
        );
        let fits: Vec<_> = explained["candidates"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|c| (c["policy"].clone(), c["fit"].clone()))
            .collect();
        let of = |name: &str, fit: &str| (json!(name), json!(fit));
        assert_eq!(
            fits,
            [
                of("ours", "applies"),
                of("exact", "loses"),
                of("wide", "loses"),
                of("default", "loses")
            ]
        );
    }
    // The errno that it names is the one that the program gets.
    let text = agent
        .command(&["explain", DESTINATION, "--pid", &pid])
        .good();
    assert!(
        text.contains("  connect now  is refused with EHOSTUNREACH\n"),
        "{text}"
    );
    assert_eq!(dialer.connect(TO).errno, libc::EHOSTUNREACH);
    assert!(
        text.lines().all(|line| line.chars().count() <= 100),
        "{text}"
    );

    // The agent itself knows the process, too.
    let target = format!("/v1/explain?destination={DESTINATION}&pid={pid}");
    let response = agent.request("GET", &target);
    assert_eq!(response.status, 200, "{}", response.body);
    let explained: Value = serde_json::from_str(&response.body).expect("JSON");
    assert_eq!(explained["workload"], workload.as_str());
}

#[test]
fn protection_manual_states_and_pauses_are_told() {
    let (net, group) = (TestNet::new(), TestCgroup::new("explain"));
    let agent = Agent::start(&group, &config("nobody"));
    let guarded = agent
        .command(&["explain", "10.77.0.2:8081", "--json"])
        .good();
    let guarded: Value = serde_json::from_str(&guarded).expect("JSON");
    assert_eq!(
        guarded["protected"],
        json!({"by": "10.77.0.2:8081", "line": 14})
    );
    assert_eq!(setting(&guarded, "timeouts.connect")["inert"], "protected");

    agent.command(&["trip", DESTINATION, "--for", "5m"]).good();
    let tripped = explain(&agent, &[]);
    assert_eq!(tripped["manual"][0]["state"], "forced_open");
    let left = tripped["manual"][0]["ends_in_ms"].as_u64().expect("a time");
    assert!((1..=300_000).contains(&left), "{left}");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    agent.wait_state(DESTINATION, "forced_open");
    agent.command(&["pause"]).good();
    let text = agent.command(&["explain", DESTINATION]).good();
    assert!(text.contains("passes, because of the pause"), "{text}");
    assert!(text.contains("\n  PAUSED       since "), "{text}");
}

#[test]
fn what_cannot_be_explained_says_why() {
    let group = TestCgroup::new("explain");
    let agent = AgentOptions::new(&group).start();
    let gone = Program::new("true").spawn();
    let pid = gone.pid().to_string();
    gone.wait();
    for (args, code, why) in [
        (vec!["nonsense"], 2, "has no port"),
        (vec!["10.0.0.0/8:80"], 2, "prefix"),
        (vec!["db.internal:5432"], 1, "no address is known"),
        (vec!["10.0.0.1:80", "--pid", &pid], 1, "there is no process"),
        (vec!["10.0.0.1:80", "--pid", "0"], 2, "--pid"),
        (
            vec!["10.0.0.1:80", "--cgroup", "no/such"],
            1,
            "no such control group",
        ),
        (vec!["10.0.0.1:80", "--cgroup", "/proc"], 1, "is not below"),
        (
            vec!["10.0.0.1:80", "--cgroup", "/", "--pid", "1"],
            2,
            "cannot be used with",
        ),
    ] {
        let mut all = vec!["explain"];
        all.extend(&args);
        let done = agent.command(&all);
        assert_eq!(done.code(), code, "{args:?}: {done}");
        assert!(done.stderr.contains(why), "{args:?}: {done}");
    }
    let response = agent.request(
        "GET",
        "/v1/explain?destination=10.0.0.1:80&workload=no%2Fsuch",
    );
    assert_eq!(response.status, 404, "{}", response.body);
    // The root is a workload like any other.
    agent
        .command(&["explain", "10.0.0.1:80", "--cgroup", "/"])
        .good();
}
