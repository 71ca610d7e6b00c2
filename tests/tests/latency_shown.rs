//! Where latencies are shown: `status` has the last minute and the last five, `events --all` has those
//! of each run of good calls.

use std::{io::Write as _, net::SocketAddr, time::Duration};

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    server::{Server, read_head},
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const WAIT: Duration = Duration::from_millis(20);

#[test]
fn status_and_events_show_latencies() {
    need!("python3");
    let (net, group) = (TestNet::new(), TestCgroup::new("shown"));
    let agent = Agent::start(&group, "");
    let _server = Server::with(&net.server, TO, |mut stream| {
        while read_head(&mut stream).is_some() {
            std::thread::sleep(WAIT);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
    });
    let mut events = agent.follow(&["--all"]);
    let mut python = Interpreter::start(&group, &net.client);
    python.value("(s := socket.create_connection(('10.77.0.2', 8080))) and 0");
    let ask = "(s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n'), s.recv(999))";
    python.value(&format!("[{ask} for _ in range(5)] and 0"));

    let row = agent.wait_row(DESTINATION, "all answers", |row| {
        row["responses"] == 5 && row["in_flight"] == 0
    });
    for kind in ["connect", "response"] {
        let minute = &row[format!("{kind}_latency_1m_us")];
        assert_eq!(minute, &row[format!("{kind}_latency_us")], "{row:#}");
    }
    assert_eq!(row["connect_latency_1m_us"]["count"], 1, "{row:#}");
    assert_eq!(row["response_latency_1m_us"]["count"], 5, "{row:#}");
    let human = agent.command(&["status", DESTINATION]).good();
    for time in ["(5 in the last minute)", "(5 in the last 5 minutes)"] {
        assert!(human.contains(time), "{human}");
    }

    // A call that is under way may be counted in a line before its own: some line has them.
    let waited = WAIT.as_micros() as u64 * 19 / 20;
    let is_run = |event: &Value, window: &str| {
        event["kind"] == "calls" && event["window"] == window && event["latency_us"]["p50"].is_u64()
    };
    let run = events.wait("exchanges", |event| is_run(event, "exchanges"));
    let latency = |name: &str| run["latency_us"][name].as_u64().expect("a time");
    assert!(latency("p50") >= waited, "{run:#}");
    assert!(latency("p50") <= latency("p99") && latency("p99") <= latency("max"));
    if !events.seen().iter().any(|event| is_run(event, "connects")) {
        events.wait("connects", |event| is_run(event, "connects"));
    }
}
