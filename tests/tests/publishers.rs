//! Programs that publish: most of what they send is answered by nobody, and nobody is judged for it. What asks for
//! an answer is owed one as ever.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use rustix::process::Signal;
use serde_json::json;
use tests::{
    agent::Agent,
    interpreter::Interpreter,
    need,
    outcome::{expect, judged},
    place::{DESTINATION, Place, START},
    process::{Program, Running},
    talk::{CONNECT, PATIENCE, Talk, read_byte, wait_end},
};

/// No answer takes as long on the busiest machine; the publishers are idle for longer.
const READ: &str = "[defaults.timeouts]\nread = \"5s\"\n[defaults.breaker]\nwindow_age = \"30m\"\n";
const IDLE: Duration = Duration::from_secs(7);

/// A publisher of Debian's that publishes what it reads, and stays as long as it may read.
fn publisher(place: &Place, qos: &str) -> Running {
    let program = Program::new("mosquitto_pub").args(["-h", "10.77.0.2", "-p", "8080"]);
    let program = program.args(["-t", "temperature", "-l", "-q", qos]).fed();
    let mut publisher = place.client(program).within(START).spawn();
    let input = publisher.stdin.as_mut().expect("piped");
    input.write_all(b"21.5\n").expect("it reads");
    publisher
}

fn ends(mut publisher: Running) {
    publisher.stdin = None;
    publisher.extend_deadline(START);
    publisher.wait().good();
}

#[test]
fn what_is_published_over_mqtt_is_owed_no_answer() {
    need!("mosquitto", "mosquitto_pub", "python3");
    let place = Place::new("mosquitto");
    let file = place.directory.path().join("conf");
    let config = "listener 8080 10.77.0.2\nallow_anonymous true\nuser root\n";
    fs::write(&file, config).expect("write the configuration");
    let broker = Program::new("mosquitto").arg("-c").arg(&file);
    let broker = place
        .server(broker)
        .within(Duration::from_secs(600))
        .spawn();
    place.listening();
    let agent = Agent::start(&place.group, READ);

    // QoS 0: nothing but the login is answered.
    let publishers: Vec<_> = (0..6).map(|_| publisher(&place, "0")).collect();
    agent.wait_row(DESTINATION, "six logins, and no more", |row| {
        row["responses"] == 6 && row["in_flight"] == 0
    });
    std::thread::sleep(IDLE);
    publishers.into_iter().for_each(ends);
    let row = expect(&agent, DESTINATION, &[("responses", 6)]);
    assert_eq!(
        (judged(&row), &row["state"]),
        ((6, 0), &json!("closed")),
        "{row:#}"
    );

    // QoS 1: what is published is answered, too.
    let one = publisher(&place, "1");
    agent.wait_row(DESTINATION, "an acknowledgement", |row| {
        row["responses"] == 8
    });
    ends(one);
    let row = expect(&agent, DESTINATION, &[("responses", 8)]);
    assert_eq!(judged(&row), (8, 0), "{row:#}");

    // It hangs: the kernel still accepts, and nobody answers a login.
    broker.signal(Signal::STOP);
    let mut python = Interpreter::start(&place.group, &place.net.client);
    for _ in 0..5 {
        python.value(CONNECT);
        python.value(r"s.sendall(b'\x10\x0f\0\x04MQTT\x04\2\0\x3c\0\3abc')");
        assert_eq!(python.errno("s.recv(9)"), libc::ECONNABORTED);
        python.value("s.close()");
    }
    let row = agent.wait_state(DESTINATION, "open");
    assert_eq!(row["reason"]["window"], "exchanges", "{row:#}");
    broker.signal(Signal::CONT);
}

/// Greets, and answers each PING.
fn nats(mut stream: TcpStream) {
    let _ = stream.write_all(b"INFO {\"max_payload\":1048576}\r\n");
    let lines = BufReader::new(stream.try_clone().expect("another handle")).lines();
    for line in lines.map_while(Result::ok) {
        if line.starts_with("PING") {
            let _ = stream.write_all(b"PONG\r\n");
        }
    }
}

#[test]
fn what_is_published_over_nats_is_owed_no_answer() {
    need!("python3");
    let mut talk = Talk::new("nats", nats);
    for _ in 0..6 {
        talk.value(CONNECT);
        assert_eq!(talk.python.value("s.recv(99)[:4].decode()"), "INFO");
        talk.value(r#"s.sendall(b'CONNECT {"verbose":false}\r\n')"#);
        talk.value(r"s.sendall(b'PING\r\n')");
        assert_eq!(talk.python.value("s.recv(99)[:4].decode()"), "PONG");
        talk.value(r"s.sendall(b'PUB foo 5\r\nhello\r\n')");
        talk.value(PATIENCE);
        talk.value("s.close()");
    }
    talk.expect(&[("responses", 12)], (12, 0));
}

/// Answers the preface and whatever else is asked, in frames of 13 bytes.
fn amqp(mut stream: TcpStream) {
    let mut message = [0; 64];
    while let Ok(1..) = std::io::Read::read(&mut stream, &mut message) {
        let is_publish = message[0] == 1 && message[8] == 60;
        if !is_publish {
            let _ = stream.write_all(b"\x01\0\x01\0\0\0\x05\0\x14\0\x0b\0\xce");
        }
    }
}

#[test]
fn what_is_published_over_amqp_is_owed_an_answer_where_confirms_are_on() {
    need!("python3");
    let publish = r"s.sendall(b'\x01\0\x01\0\0\0\x0d\0\x3c\0\x28\0\0\x01q\0\0\0\0\xce')";
    let mut talk = Talk::new("amqp", amqp);
    let ask = |talk: &mut Talk, what: &str| {
        talk.value(&format!("s.sendall(b'{what}')"));
        assert_eq!(talk.python.value("len(s.recv(99))"), 13);
    };
    for _ in 0..6 {
        talk.value(CONNECT);
        ask(&mut talk, r"AMQP\0\0\x09\x01");
        ask(&mut talk, r"\x01\0\x01\0\0\0\x05\0\x14\0\x0a\0\xce");
        talk.value(publish);
        talk.value(PATIENCE);
        talk.value("s.close()");
    }
    talk.expect(&[("responses", 12)], (12, 0));
    // confirm.select
    talk.value(CONNECT);
    ask(&mut talk, r"AMQP\0\0\x09\x01");
    ask(&mut talk, r"\x01\0\x01\0\0\0\x05\0\x55\0\x0a\0\xce");
    talk.value(publish);
    talk.value(PATIENCE);
    talk.value("s.close()");
    talk.expect(&[("responses", 14), ("gave_up", 1)], (15, 1));
}

/// Of a protocol that nobody knows: the first message is answered, what comes after it never. Three connections
/// are believed to have given up.
#[test]
fn what_is_never_answered_is_learned() {
    need!("python3");
    let hangs = Arc::new(AtomicBool::new(false));
    let of = Arc::clone(&hangs);
    let handler = move |mut stream: TcpStream| {
        if read_byte(&mut stream) && !of.load(Ordering::SeqCst) {
            let _ = stream.write_all(b"y");
        }
        wait_end(stream);
    };
    // (Longer than PATIENCE, and than any answer takes on the busiest machine.)
    let read = "[defaults.timeouts]\nread = \"8s\"\n";
    let mut talk = Talk::with("partly-one-way", read, handler);
    for given_up in 1..=7 {
        talk.value(CONNECT);
        talk.ask(1);
        talk.value("s.sendall(b'a message')");
        talk.value(PATIENCE);
        talk.value("s.close()");
        let row = talk.expect(
            &[("responses", given_up), ("gave_up", given_up)],
            (given_up + given_up.min(3), given_up.min(3)),
        );
        let learned = if given_up < 3 {
            json!([])
        } else {
            json!(["partly-one-way"])
        };
        assert_eq!(
            (&row["traits"], &row["state"]),
            (&learned, &json!("closed")),
            "{row:#}"
        );
    }
    // Nor is it waited for.
    talk.value(CONNECT);
    talk.ask(1);
    talk.value("s.sendall(b'a message')");
    talk.value("time.sleep(11)");
    talk.value("s.close()");
    talk.expect(&[("responses", 8), ("gave_up", 8)], (11, 3));
    // The first message of a connection is owed its answer as ever.
    hangs.store(true, Ordering::SeqCst);
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    assert_eq!(talk.python.errno("s.recv(9)"), libc::ECONNABORTED);
    talk.value("s.close()");
    talk.agent.wait_row(DESTINATION, "a read timeout", |row| {
        row["failures"]["read_timeout"] == 1 && judged(row).1 == 4 && row["in_flight"] == 0
    });
    // It is forgotten by a reset.
    talk.agent.command(&["reset", DESTINATION]).good();
    assert_eq!(talk.agent.row(DESTINATION)["traits"], json!([]));
}

/// A worker that gets a job late says nothing of how quickly others are answered, and is not slow.
#[test]
fn a_command_that_waits_has_no_latency() {
    need!("python3");
    let mut talk = Talk::with("waits-by-right", "slow_call = \"100ms\"\n", |mut stream| {
        let mut command = [0; 29];
        if std::io::Read::read_exact(&mut stream, &mut command).is_ok() {
            std::thread::sleep(Duration::from_millis(700));
            let _ = stream.write_all(b"*-1\r\n");
        }
        wait_end(stream);
    });
    talk.value(CONNECT);
    talk.value(r"s.sendall(b'*3\r\n$5\r\nBLPOP\r\n$1\r\nq\r\n$1\r\n1\r\n')");
    assert_eq!(talk.python.value("len(s.recv(99))"), 5);
    talk.value("s.close()");
    let row = talk.expect(&[("responses", 1)], (1, 0));
    assert_eq!(row["response_latency_us"]["count"], 0, "{row:#}");
    assert_eq!(row["windows"]["exchanges"]["slow_calls"], 0, "{row:#}");
}

/// A protocol that answers everything is known by its begin: there nothing is learned of this kind.
#[test]
fn redis_answers_everything() {
    need!("python3");
    let mut talk = Talk::new("answers-all", |mut stream| {
        let mut command = [0; 14];
        if std::io::Read::read_exact(&mut stream, &mut command).is_ok() {
            let _ = stream.write_all(b"+PONG\r\n");
        }
        wait_end(stream);
    });
    for given_up in 1..=5 {
        talk.value(CONNECT);
        talk.value(r"s.sendall(b'*1\r\n$4\r\nPING\r\n')");
        assert_eq!(talk.python.value("len(s.recv(99))"), 7);
        talk.value(r"s.sendall(b'*1\r\n$4\r\nPING\r\n')");
        talk.value(PATIENCE);
        talk.value("s.close()");
        talk.expect(
            &[("responses", given_up), ("gave_up", given_up)],
            (2 * given_up, given_up),
        );
    }
    talk.agent.wait_state(DESTINATION, "open");
}
