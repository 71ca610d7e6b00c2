//! `scope = "node"`: what opens for one workload refuses the others, and one probe closes it for all
//! (rule 1).

use std::net::SocketAddr;

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    dialer::Dialer,
    net::TestNet,
    server::Server,
    wait::{self, LONGEST},
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const CONFIG: &str = "[defaults.breaker]\nscope = \"node\"\n";

fn row_of(agent: &Agent, group: &TestCgroup) -> Value {
    let rows = agent.rows(DESTINATION);
    let mine = rows
        .into_iter()
        .find(|row| row["workload"] == group.workload());
    mine.unwrap_or_default()
}

fn wait_state(agent: &Agent, group: &TestCgroup, state: &str) -> Value {
    wait::until(state, LONGEST, || {
        Some(row_of(agent, group)).filter(|row| row["state"] == state)
    })
}

#[test]
fn what_opens_for_one_workload_refuses_the_others() {
    let (net, parent) = (TestNet::new(), TestCgroup::new("scope"));
    let [a, b, c] = ["a", "b", "c"].map(|name| parent.child(name));
    let agent = Agent::start_for_loops(&parent, CONFIG);
    let mut one = Dialer::start(DIAL, &a, &net.client);
    let mut other = Dialer::start(DIAL, &b, &net.client);
    let server = Server::start(&net.server, TO);
    assert_eq!(other.connect(TO).errno, 0);
    server.stop();
    for _ in 0..5 {
        assert_eq!(one.connect(TO).errno, libc::ECONNREFUSED);
    }
    wait_state(&agent, &a, "open");
    let row = wait_state(&agent, &b, "open");
    assert_eq!(row["reason"]["kind"], "consecutive_failures", "{row:#}");
    assert_eq!(row["failures"]["refused"], 0, "{row:#}");
    assert_eq!(other.connect(TO).errno, libc::ECONNREFUSED);
    let row = row_of(&agent, &b);
    assert_eq!(
        (&row["rejected"]["breaker"], &row["attempts"]),
        (&1.into(), &1.into()),
        "{row:#}"
    );

    let explained = agent.request("GET", &format!("/v1/explain?destination={DESTINATION}"));
    let explained: Value = serde_json::from_str(&explained.body).expect("JSON");
    let rows = explained["rows"].as_array().expect("rows");
    let opened_by = |group: &TestCgroup| {
        let mut rows = rows.iter();
        let row = rows.find(|row| row["row"]["workload"] == group.workload());
        row.expect("a row")["opened_by"].clone()
    };
    assert_eq!(opened_by(&a), Value::Null);
    assert_eq!(opened_by(&b), a.workload());
    let text = agent.command(&["explain", DESTINATION]).good();
    assert!(text.contains("opened by"), "{text}");

    // A workload that was not there before is refused as well, once its row is known.
    let mut third = Dialer::start(DIAL, &c, &net.client);
    third.connect(TO);
    wait_state(&agent, &c, "open");

    // It is back, the agent notices, and the probes of others than the one that opened it close it for all.
    let _server = Server::start(&net.server, TO);
    wait::until("two probes", LONGEST, || {
        other.connect(TO);
        let row = row_of(&agent, &b);
        (row["state"] == "closed").then_some(())
    });
    for group in [&a, &c] {
        wait_state(&agent, group, "closed");
    }
    assert_eq!(one.connect(TO).errno, 0);
    let row = row_of(&agent, &a);
    assert_eq!(row["rejected"]["breaker"], 0, "{row:#}");
}

/// Half-open is half-open for all that share the breaker, and only a probe that failed is said to have.
#[test]
fn a_shared_breaker_that_is_half_open_is_shown_so() {
    let (net, parent) = (TestNet::new(), TestCgroup::new("shown"));
    let [a, b, c] = ["a", "b", "c"].map(|name| parent.child(name));
    let agent = Agent::start_for_loops(&parent, CONFIG);
    let mut dialers = [&a, &b, &c].map(|group| Dialer::start(DIAL, group, &net.client));
    for dialer in &mut dialers {
        assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
    }
    for _ in 0..4 {
        assert_eq!(dialers[0].connect(TO).errno, libc::ECONNREFUSED);
    }
    for group in [&a, &b, &c] {
        wait_state(&agent, group, "open");
    }
    let _server = Server::start(&net.server, TO);
    for group in [&a, &b, &c] {
        let row = wait_state(&agent, group, "half_open");
        assert_eq!(row["probe"], "free", "{row:#}");
        assert_eq!(row["next_probe_in_ms"], Value::Null, "{row:#}");
    }
    let explained = agent.command(&["explain", DESTINATION]).good();
    let words = explained.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("connect now passes as a probe"),
        "{explained}"
    );
    let shared = "connect now passes as the probe, unless another workload's connect is first";
    assert_eq!(words.matches(shared).count(), 2, "{explained}");
    // As said.
    assert_eq!(dialers[2].connect(TO).errno, 0);
    wait::until("two probes", LONGEST, || {
        dialers[1].connect(TO);
        (row_of(&agent, &b)["state"] == "closed").then_some(())
    });
    for group in [&a, &c] {
        wait_state(&agent, group, "closed");
    }
    let changes = |group: &TestCgroup| -> Vec<String> {
        let lines = agent.command(&["events", "--json"]).good();
        let events = lines
            .lines()
            .map(|line| serde_json::from_str(line).expect("JSON"));
        let of = events.filter(|event: &Value| {
            event["kind"] == "breaker" && event["workload"] == group.workload()
        });
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        of.map(|event| word(&event["from"]) + " " + &word(&event["to"]))
            .collect()
    };
    let leads = ["closed open", "open half_open", "half_open closed"];
    for group in [&a, &b, &c] {
        let told = wait::until("the last change", LONGEST, || {
            let told = changes(group);
            told.last()?.ends_with(" closed").then_some(told)
        });
        // Whether b was in time to lead the second probe is up to who was first.
        assert!(
            told == leads || told == ["closed open", "open closed"],
            "{told:?}"
        );
    }
    assert_eq!(changes(&a), leads);
    assert_eq!(changes(&c), leads);
    let failed = ["from=\"half_open\"".to_owned(), "to=\"open\"".to_owned()];
    assert_eq!(
        agent.metric("backstop_breaker_transitions_total", &failed),
        None
    );
}

/// Loopback is another host in each namespace; and who has a breaker of his own keeps it.
#[test]
fn what_is_not_shared() {
    let (net, parent) = (TestNet::new(), TestCgroup::new("not-shared"));
    let [a, b] = ["a", "b"].map(|name| parent.child(name));
    let config = format!(
        "{CONFIG}redial = false\n[[policy]]\nname = \"own\"\nworkloads = [\"*/b\"]\n\
         breaker = {{ scope = \"workload\" }}\n"
    );
    let agent = Agent::start_for_loops(&parent, &config);
    let mut one = Dialer::start(DIAL, &a, &net.client);
    let mut other = Dialer::start(DIAL, &b, &net.client);
    assert_eq!(other.connect(TO).errno, libc::ECONNREFUSED);
    wait::until("the policy of b", LONGEST, || {
        (row_of(&agent, &b)["policy"] == "own").then_some(())
    });
    for _ in 0..5 {
        assert_eq!(one.connect(TO).errno, libc::ECONNREFUSED);
    }
    wait_state(&agent, &a, "open");
    assert_eq!(row_of(&agent, &b)["state"], "closed");

    // A reload lets b share it, too.
    agent
        .home()
        .write_config(&format!("{CONFIG}redial = false\n"));
    wait_state(&agent, &b, "open");
    agent.command(&["reset", DESTINATION]).good();
    for group in [&a, &b] {
        wait_state(&agent, group, "closed");
    }
}
