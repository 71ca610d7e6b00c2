//! Counters are exact under concurrency, also when events are lost.

use std::{net::SocketAddr, time::Duration};

use rustix::process::Signal;
use serde_json::Value;
use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    net::{Namespace, TestNet},
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");

/// Every failure is an event, the ring is the smallest, and the agent does not read it for a while:
/// events are lost, no count is. What the agent learns by events alone it makes up for.
#[test]
fn nothing_is_missed_when_events_are_lost() {
    let namespace = Namespace::new("flood");
    let group = TestCgroup::new("flood");
    let config = format!(
        "[agent]\nring_bytes = 65536\n\
         [defaults]\nbreaker = \"off\"\n\
         [[policy]]\nname = \"late\"\ndestinations = [\"127.4.0.0/16\"]\n\
         workloads = [\"{}\"]\nbreaker = {{ consecutive_failures = 3, redial = false }}\n",
        group.workload()
    );
    let agent = Agent::start_for_loops(&group, &config);
    let mut events = agent.follow(&[]);
    let (processes, rounds) = (4_u64, 300_u64);
    let mut dialers: Vec<Dialer> = (0..processes)
        .map(|_| Dialer::start(DIAL, &group, &namespace))
        .collect();
    agent.signal(Signal::STOP);
    for _ in 0..rounds {
        dialers
            .iter_mut()
            .for_each(|dialer| dialer.order("sweep 16 127.3.0.0:80"));
    }
    for _ in 0..rounds {
        for dialer in &mut dialers {
            assert_eq!(dialer.answer(), serde_json::json!({"111": 16}));
        }
    }
    // A destination whose first sign of life is among what is lost.
    let late: SocketAddr = "127.4.0.1:80".parse().expect("an address");
    assert_eq!(dialers[0].connect(late).errno, libc::ECONNREFUSED);
    agent.signal(Signal::CONT);

    let loss = events.wait("a loss", |event| event["kind"] == "loss");
    assert!(loss["lost"].as_u64() > Some(0), "{loss:#}");
    let status = agent.status();
    assert!(status["lost_events"].as_u64() > Some(0));
    let lost = agent.metric("backstop_events_lost_total", &[]);
    assert_eq!(lost.map(|lost| lost as u64), status["lost_events"].as_u64());
    let rows = status["destinations"].as_array().expect("a list");
    assert_eq!(rows.len(), 17);
    let flooded = |row: &&Value| row["destination"] != late.to_string();
    for row in rows.iter().filter(flooded) {
        assert_eq!(row["attempts"], processes * rounds, "{row:#}");
        assert_eq!(row["failures"]["refused"], row["attempts"], "{row:#}");
        assert_eq!(
            (&row["in_flight"], &row["state"]),
            (&0.into(), &"closed".into()),
            "{row:#}"
        );
        assert_balanced(row);
    }
    agent.wait_row(&late.to_string(), "its policy", |row| {
        row["policy"] == "late"
    });
    for _ in 0..2 {
        assert_eq!(dialers[0].connect(late).errno, libc::ECONNREFUSED);
    }
    let row = agent.wait_state(&late.to_string(), "open");
    assert_eq!(row["attempts"], 3, "{row:#}");
}

/// After a standstill the failures of that time are not taken for good calls before they have been read.
#[test]
fn failures_are_no_good_calls_after_a_standstill() {
    let (net, group) = (TestNet::new(), TestCgroup::new("standstill"));
    let agent = Agent::start(&group, "[defaults]\nbreaker = \"off\"\nretry = \"off\"\n");
    let mut events = agent.follow(&["--all"]);
    let to = TestNet::server4(8080);
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    agent.signal(Signal::STOP);
    // More than a window holds, fewer than the ring.
    const FAILURES: u64 = 100;
    for _ in 0..FAILURES {
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
    // It is the standstill that counts: for longer than the agent is between two looks at all calls.
    std::thread::sleep(Duration::from_millis(1_500));
    agent.signal(Signal::CONT);
    let _server = Server::start(&net.server, to);
    assert_eq!(dialer.connect(to).errno, 0);
    let good = events.wait("the good call", |event| {
        event["kind"] == "calls" && event["to_seq"].as_u64() > Some(FAILURES)
    });
    assert_eq!(good["from_seq"], FAILURES + 1, "{good:#}");
    let seen = events.seen();
    let runs: Vec<&Value> = seen.iter().filter(|e| e["kind"] == "calls").collect();
    assert_eq!(runs.len(), 1, "{runs:#?}");
    let failed = seen.iter().filter(|e| e["kind"] == "failure").count() as u64;
    assert_eq!(failed, FAILURES);
}

#[test]
fn successes_are_counted_from_many_threads() {
    let (net, group) = (TestNet::new(), TestCgroup::new("many"));
    let agent = Agent::start_for_loops(&group, "");
    let server = Server::start(&net.server, TestNet::server4(0));
    let to = server.address();
    let mut dialers: Vec<Dialer> = (0..2)
        .map(|_| Dialer::start(DIAL, &group, &net.client))
        .collect();
    for _ in 0..5 {
        dialers
            .iter_mut()
            .for_each(|dialer| dialer.order(&format!("burst 100 {to}")));
    }
    for _ in 0..5 {
        for dialer in &mut dialers {
            let ends = dialer.answer();
            assert!(
                ends.as_array()
                    .expect("a list")
                    .iter()
                    .all(|end| end["errno"] == 0)
            );
        }
    }
    let row = agent.row(&to.to_string());
    assert_eq!(
        (&row["attempts"], &row["established"]),
        (&1000.into(), &1000.into()),
        "{row:#}"
    );
    assert_eq!(row["connect_latency_us"]["count"], 1000, "{row:#}");
    assert_balanced(&row);
    server.wait_accepts(1000);
}

/// The loser of a race is not a failure of its destination: the program has just established
/// another connection.
#[test]
fn the_loser_of_a_race_is_abandoned() {
    let (net, group) = (TestNet::new(), TestCgroup::new("race"));
    let agent = Agent::start_for_loops(&group, "[defaults.breaker]\ngave_up = \"200ms\"\n");
    let server = Server::start(&net.server, TestNet::server4(0));
    let mut dialer = Dialer::start_promptly(DIAL, &group, &net.client);
    let slow = SocketAddr::new(TestNet::blackhole6(0), 80);
    // A busy machine may keep the program from closing it in time. The first one that it does not counts.
    let row = (1..=8).find_map(|count| {
        dialer.open(slow, 1, How::default());
        assert_eq!(
            dialer.settle(Duration::from_millis(300)),
            [libc::EINPROGRESS]
        );
        // Ordered together: what is established and what is closed are microseconds apart.
        dialer.order(&format!("connect {}", server.address()));
        dialer.order("close");
        assert_eq!(dialer.dialed().errno, 0);
        dialer.answer();
        let row = agent.row(&slow.to_string());
        assert_eq!(row["attempts"], count, "{row:#}");
        (row["abandoned"] == 1).then_some(row)
    });
    let row = row.expect("one that was abandoned");
    assert_balanced(&row);
}
