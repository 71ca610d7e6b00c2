//! Long and rightful waits. They come first, beside the tests of servers that follow.

use std::{io::Write as _, time::Duration};

use tests::{
    agent::Agent,
    need,
    outcome::judged,
    place::{DESTINATION, Place, START, TO},
    process::{Program, Running},
    server::{Server, read_head},
    skip,
};

use crate::{
    postgres::{self, Postgres},
    redis::Redis,
};

/// Longer than the 10 s after which silence may count, and than most timeouts.
const LONG: Duration = Duration::from_secs(25);

/// It waits, and meanwhile nothing else happens. It ends well, nothing failed, nobody was judged. Whether the wait is
/// measured as an answer's.
fn ends_well(agent: &Agent, waiting: Running, says: &str, is_measured: bool) {
    let finished = waiting.wait();
    assert!(finished.elapsed >= LONG, "{finished}");
    assert_eq!(finished.good(), says);
    let row = agent.wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0);
    let failures = row["failures"].as_object().expect("an object");
    assert!(failures.values().all(|count| *count == 0), "{row:#}");
    assert_eq!(row["state"], "closed", "{row:#}");
    assert_eq!(judged(&row).1, 0, "{row:#}");
    if !is_measured {
        return;
    }
    let slowest = row["response_latency_us"]["max"].as_u64();
    assert!(slowest >= Some(LONG.as_micros() as u64), "{row:#}");
    let traits = row["traits"].as_array().expect("a list");
    assert!(
        traits.iter().any(|learned| learned == "long-waits"),
        "{row:#}"
    );
}

/// A query, a worker that waits for something to do, a long poll.
#[test]
fn waits_of_25_seconds_are_healthy() {
    need!("psql", "setpriv", "redis-server", "redis-cli", "curl");
    let Some(programs) = postgres::programs() else {
        skip!("PostgreSQL is not installed");
    };
    let postgres = Postgres::start("long-query", &programs);
    let redis = Redis::start("long-worker", &[]);
    let poll = Place::new("long-poll");
    let _server = Server::with(&poll.net.server, TO, |mut stream| {
        if read_head(&mut stream).is_some() {
            std::thread::sleep(LONG);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
    });
    let agents = [&postgres.place, &redis.place, &poll].map(|place| {
        place.listening();
        Agent::start(&place.group, "")
    });
    postgres.serving();

    let most = 5 * START;
    let query = postgres.query("select pg_sleep(25)").within(most).spawn();
    let worker = redis.cli(&["blpop", "nothing", "25"]).within(most).spawn();
    let curl = Program::new("curl").args(["-q", "-sS", &format!("http://{TO}/")]);
    let curl = poll.client(curl).within(most).spawn();
    for agent in &agents {
        agent.wait_row(DESTINATION, "waiting", |row| row["in_flight"] == 1);
    }
    // Others are answered meanwhile on one of them.
    let pings = redis.cli(&["-r", "50", "-i", "0.5", "ping"]).within(most);
    assert_eq!(pings.run().good(), "PONG\n".repeat(50));
    ends_well(&agents[0], query, "\n", true);
    // (It waits by right, and says nothing of how quickly others are answered.)
    ends_well(&agents[1], worker, "\n", false);
    ends_well(&agents[2], curl, "ok", true);
}
