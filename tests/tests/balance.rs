//! attempts = established + connect failures + abandoned + pending, whatever programs do.

use std::{net::SocketAddr, time::Duration};

use serde_json::Value;
use tests::{
    agent::{Agent, assert_balanced},
    cgroup::TestCgroup,
    dialer::Dialer,
    net::TestNet,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");

/// Numbers that look random and are the same for the same seed (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Programs that connect in every way, give up, are killed, while breakers trip, an operator
/// interferes and the server comes and goes. When all of it has ended, nothing is in flight.
#[test]
fn holds_in_a_storm() {
    let seed = std::env::var("BACKSTOP_TEST_SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    let seed =
        seed.unwrap_or_else(|| u64::from(std::process::id()).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    eprintln!("BACKSTOP_TEST_SEED={seed} repeats this storm");
    let mut dice = Dice(seed | 1);
    let net = TestNet::new();
    let group = TestCgroup::new("storm");
    let config = "[defaults.timeouts]\nconnect = \"120ms\"\n\
                  [defaults.breaker]\ncooldown = \"300ms\"\ngave_up = \"50ms\"\nprobes = 2\n";
    let agent = Agent::start(&group, config);
    let served = TestNet::server4(8080);
    let targets: [SocketAddr; 7] = [
        served,
        TestNet::server4(8081),
        SocketAddr::new(TestNet::SERVER6, 8080),
        SocketAddr::new(TestNet::blackhole4(0), 80),
        SocketAddr::new(TestNet::blackhole6(0), 80),
        SocketAddr::new(TestNet::UNREACHABLE, 80),
        SocketAddr::new(TestNet::NO_ROUTE, 80),
    ];
    let start = || Dialer::start(DIAL, &group, &net.client);
    let mut dialers: Vec<Dialer> = (0..3).map(|_| start()).collect();
    // Orders without an answer so far, by dialer.
    let mut owed = [0; 3];
    let mut server = None;
    for _ in 0..400 {
        let i = dice.below(3) as usize;
        let to = targets[dice.below(7) as usize];
        let count = 1 + dice.below(12);
        let order = match dice.below(20) {
            // Their own timeout ends them while ours are off in a pause.
            0..=4 => format!("connect {to} own=150"),
            5 => format!("connect {to} uring own=150"),
            6 => format!("connect {to} nonblocking own=60"),
            7..=9 => format!("burst {count} {to} own=150"),
            10..=12 => format!("open {count} {to}"),
            13 => format!("settle {}", dice.below(80)),
            14..=15 => "close".to_owned(),
            16 => {
                server = match server.take() {
                    None => Some(Server::start(&net.server, served)),
                    Some(_) => None,
                };
                continue;
            }
            17 => {
                dialers[i] = start();
                owed[i] = 0;
                continue;
            }
            18 => {
                let action = ["trip", "hold-closed", "reset"][dice.below(3) as usize];
                agent.request("POST", &format!("/v1/destinations/{to}/{action}"));
                continue;
            }
            _ => {
                let action = ["pause", "resume", "reload"][dice.below(3) as usize];
                assert_eq!(agent.request("POST", &format!("/v1/{action}")).status, 200);
                continue;
            }
        };
        dialers[i].order(&order);
        owed[i] += 1;
        // No long queues: what happens later shall meet what happens now.
        while owed[i] > 3 {
            dialers[i].answer();
            owed[i] -= 1;
        }
    }
    drop(dialers);
    let nothing_in_flight = || {
        let status = agent.status();
        let rows = status["destinations"].as_array().expect("a list").clone();
        rows.iter().all(|row| row["in_flight"] == 0).then_some(rows)
    };
    let rows: Vec<Value> = tests::wait::until(
        "nothing in flight",
        Duration::from_secs(60),
        nothing_in_flight,
    );
    assert_eq!(rows.len(), targets.len(), "{rows:#?}");
    for row in &rows {
        assert_balanced(row);
        // Without an answer at the hook nothing is an attempt.
        if [targets[5], targets[6]].map(|to| to.to_string()).contains(
            &row["destination"]
                .as_str()
                .expect("a destination")
                .to_owned(),
        ) {
            assert_eq!(row["attempts"], 0, "{row:#}");
        }
    }
    // And nothing is left that refuses: every breaker can be closed again. (With a timeout that connects to
    // a server keep, however busy the machine is.)
    agent.home().write_config("");
    assert_eq!(agent.request("POST", "/v1/reload").status, 200);
    assert_eq!(agent.request("POST", "/v1/resume").status, 200);
    let _server = server.unwrap_or_else(|| Server::start(&net.server, served));
    assert_eq!(
        agent
            .request("POST", &format!("/v1/destinations/{served}/reset"))
            .status,
        200
    );
    agent.wait_state(&served.to_string(), "closed");
    let mut dialer = start();
    for end in dialer.burst(served, 20) {
        assert_eq!(end.errno, 0);
    }
}
