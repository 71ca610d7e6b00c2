//! Servers that speak first: what they owe, and what it means that they do not pay.

use std::{
    io::Write as _,
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use tests::{
    need,
    talk::{CONNECT, DESTINATION, PATIENCE, Talk, wait_end},
};

/// How the server behaves, from the next connection on.
const GREETS: u8 = 0;
const SILENT: u8 = 1;
const CLOSES: u8 = 2;
const ECHOES: u8 = 3;

struct Scene {
    talk: Talk,
    behaviour: Arc<AtomicU8>,
}

impl Scene {
    /// A server that greets after 120 ms.
    fn new(label: &str) -> Self {
        let behaviour = Arc::new(AtomicU8::new(GREETS));
        let of = Arc::clone(&behaviour);
        let handler = move |mut stream: TcpStream| match of.load(Ordering::SeqCst) {
            GREETS => {
                std::thread::sleep(Duration::from_millis(120));
                let _ = stream.write_all(b"220 ready\r\n");
                tests::talk::echo(stream);
            }
            SILENT => wait_end(stream),
            ECHOES => tests::talk::echo(stream),
            _ => drop(stream),
        };
        Self {
            talk: Talk::new(label, handler),
            behaviour,
        }
    }

    fn server(&self, behaviour: u8) {
        self.behaviour.store(behaviour, Ordering::SeqCst);
    }

    /// A connection that is greeted and then closed.
    #[track_caller]
    fn greeted(&mut self) {
        self.talk.value(CONNECT);
        assert_eq!(self.talk.python.value("len(s.recv(99))"), 11);
        self.talk.value("s.close()");
    }
}

#[test]
fn a_greeting_is_an_answer_with_a_latency() {
    need!("python3");
    let mut scene = Scene::new("greeting");
    for count in 1..=6 {
        // From the fourth on it is owed before it comes.
        scene.greeted();
        let row = scene.talk.expect(&[("responses", count)], (count, 0));
        let p50 = row["response_latency_us"]["p50"].as_u64();
        assert!((Some(110_000)..Some(20_000_000)).contains(&p50), "{row:#}");
    }
    // What comes after a greeting is an ordinary exchange.
    scene.talk.value(CONNECT);
    assert_eq!(scene.talk.python.value("len(s.recv(99))"), 11);
    scene.talk.ask(1);
    let row = scene.talk.expect(&[("responses", 8)], (8, 0));
    assert_eq!(
        row["traits"],
        serde_json::json!(["server-first"]),
        "{row:#}"
    );
    // Shown for people too, and forgotten by a reset.
    let status = |command: &str| scene.talk.agent.command(&[command, DESTINATION]).good();
    assert!(status("status").contains("server-first"));
    status("reset");
    assert!(!status("status").contains("server-first"));
}

#[test]
fn a_known_greeting_is_owed() {
    need!("python3");
    let mut scene = Scene::new("greeting-owed");
    for _ in 0..3 {
        scene.greeted();
    }
    scene.talk.expect(&[("responses", 3)], (3, 0));
    scene.server(SILENT);
    scene.talk.value(CONNECT);
    let row = scene.talk.agent.row(DESTINATION);
    assert_eq!(row["in_flight"], 1, "{row:#}");
    scene.talk.value(PATIENCE);
    scene.talk.value("s.close()");
    scene
        .talk
        .expect(&[("responses", 3), ("gave_up", 1)], (4, 1));
    scene.server(CLOSES);
    scene.talk.value(CONNECT);
    assert_eq!(scene.talk.python.value("len(s.recv(9))"), 0);
    scene.talk.value("s.close()");
    let wanted = [("responses", 3), ("gave_up", 1), ("closed_early", 1)];
    scene.talk.expect(&wanted, (5, 2));
}

/// Accepts and closes, five times: what a proxy in front of a dead server does.
#[test]
fn a_breaker_opens_where_greetings_do_not_come() {
    need!("python3");
    let mut scene = Scene::new("greeting-open");
    for _ in 0..3 {
        scene.greeted();
    }
    scene.server(CLOSES);
    for _ in 0..5 {
        scene.talk.value(CONNECT);
        assert_eq!(scene.talk.python.value("len(s.recv(9))"), 0);
        scene.talk.value("s.close()");
    }
    let row = scene.talk.agent.wait_state(DESTINATION, "open");
    assert_eq!(row["reason"]["window"], "exchanges", "{row:#}");
}

#[test]
fn a_port_check_of_a_server_that_greets_says_nothing() {
    need!("python3");
    let mut scene = Scene::new("greeting-check");
    for _ in 0..3 {
        scene.greeted();
    }
    // Its greeting comes late: never before the check has gone, however busy the machine is.
    scene.server(SILENT);
    for _ in 0..10 {
        let check = "socket.create_connection(('10.77.0.2', 8080)).close()";
        scene.talk.value(check);
    }
    let row = scene
        .talk
        .expect(&[("responses", 3), ("abandoned", 10)], (3, 0));
    assert_eq!(row["state"], "closed", "{row:#}");
}

/// The client speaks first after all: its request is the one that is owed, and nothing is expected of
/// the server any more.
#[test]
fn a_client_that_speaks_first_is_believed() {
    need!("python3");
    let mut scene = Scene::new("greeting-unlearned");
    for _ in 0..3 {
        scene.greeted();
    }
    scene.server(ECHOES);
    scene.talk.value(CONNECT);
    scene.talk.value("time.sleep(4)");
    scene.talk.ask(1);
    let row = scene.talk.expect(&[("responses", 4)], (4, 0));
    // The wait before the request is not the answer's.
    let max = row["response_latency_us"]["max"].as_u64();
    assert!(max < Some(3_900_000), "{row:#}");
    scene.talk.ask(1);
    scene.talk.value("s.close()");
    scene.talk.expect(&[("responses", 5)], (5, 0));
    scene.server(CLOSES);
    for _ in 0..5 {
        scene.talk.value(CONNECT);
        assert_eq!(scene.talk.python.value("len(s.recv(9))"), 0);
        scene.talk.value("s.close()");
    }
    scene.talk.expect(&[("responses", 5)], (5, 0));
}

/// Sent before the request arrived, and so no answer to it, though the client spoke first.
#[test]
fn what_crosses_a_request_does_not_answer_it() {
    need!("python3", "nft");
    let (go, may_go) = std::sync::mpsc::channel::<()>();
    let may_go = std::sync::Mutex::new(may_go);
    // Whoever closes within this time has not given up.
    let gave_up = "gave_up = \"10m\"\n";
    let mut talk = Talk::with("crossing", gave_up, move |mut stream| {
        let _ = may_go.lock().expect("no panic holds it").recv();
        let _ = stream.write_all(b"a push");
        wait_end(stream);
    });
    talk.value(CONNECT);
    // The request is on its way while the server speaks.
    talk.net.server.nft(
        "table inet slow { chain input { type filter hook input priority 0; tcp dport 8080 tcp flags & psh != 0 drop; }\n }\n",
    );
    talk.value("s.sendall(b'request')");
    go.send(()).expect("the server waits");
    assert_eq!(talk.python.value("len(s.recv(9))"), 6);
    let row = talk.agent.row(DESTINATION);
    assert_eq!(
        (&row["in_flight"], &row["responses"]),
        (&1.into(), &0.into()),
        "{row:#}"
    );
    talk.value("s.close()");
    talk.expect(&[("abandoned", 1)], (0, 0));
}

// --- statuses in greetings

/// A server that turns everybody away with these bytes.
fn turned_away(text: &'static [u8], failures: u64) {
    need!("python3");
    let mut talk = Talk::new("turned-away", move |mut stream| {
        let _ = stream.write_all(text);
        wait_end(stream);
    });
    for _ in 0..4 {
        talk.value(CONNECT);
        let length = text.len();
        assert_eq!(talk.python.value("len(s.recv(99))"), length);
        talk.value("s.close()");
    }
    let mut wanted = vec![("responses", 4)];
    if failures > 0 {
        wanted.push(("status", failures));
    }
    talk.expect(&wanted, (4, failures));
}

#[test]
fn smtp_that_is_not_available() {
    turned_away(b"421 4.3.2 Service not available\r\n", 4);
}

#[test]
fn smtp_that_does_not_want_this_client() {
    turned_away(b"554 5.7.1 Access denied\r\n", 0);
}

#[test]
fn imap_that_says_bye() {
    turned_away(b"* BYE Too many connections\r\n", 4);
}

/// The packet of MySQL 8.0, which has no SQLSTATE before the greeting.
#[test]
fn mysql_with_too_many_connections() {
    turned_away(b"\x17\0\0\0\xff\x10\x04Too many connections", 4);
}

/// This host may not connect: that is between the two of them.
#[test]
fn mysql_that_does_not_know_this_host() {
    turned_away(b"\x13\0\0\0\xff\x6a\x04Host is unknown.", 0);
}
