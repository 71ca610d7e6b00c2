//! Requests that are repeated after a failure: what is told of those that are not idempotent, what is
//! refused, and what is learnt of programs that take up something else.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex},
    time::Duration,
};

use rustix::process::Signal;
use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    server::{Server, read_head},
    tls::{self, Behaviour, Certificate, TlsServer},
    wait,
};

const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";
const SOON: Duration = Duration::from_secs(60);
const ECONNABORTED: i64 = 103;
/// Retries are told, and none is refused. The window is longer than a test takes.
const COUNTS: &str = "[defaults]\nbreaker = \"off\"\n\
     [defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\nwindow = \"5m\"\n";
const REFUSES: &str = "[defaults]\nbreaker = \"off\"\n\
     [defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\nwindow = \"5m\"\n\
     refuse_non_idempotent = true\n";

/// What the program can do: `ask` makes a call on a connection of its own, `kept` one on a connection that
/// it keeps as long as it lasts. Both return the first line of the answer, or an errno. Who pauses far longer
/// before one retry than before another does not retry: a pause that no busy machine makes 16 times longer.
const PROGRAM: &str = "
TO = ('10.77.0.2', 8080)

def first_line(s):
    got = b''
    while b'\\r\\n\\r\\n' not in got:
        more = s.recv(4096)
        if not more:
            break
        got += more
    return got.split(b'\\r\\n')[0].decode()

def request(line, *headers, body=''):
    size = [f'Content-Length: {len(body)}'] if body else []
    return '\\r\\n'.join([line + ' HTTP/1.1', 'Host: test', *headers, *size, '', body]).encode()

def ask(*words, times=1, **more):
    time.sleep(0.1)
    s = socket.socket()
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        s.connect(TO)
        for _ in range(times):
            s.sendall(request(*words, **more))
        return first_line(s)
    except OSError as error:
        return error.errno
    finally:
        s.close()

def apart(*words, body, rest=None):
    s = socket.create_connection(TO)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        whole = request(*words, body=body)
        rest = rest or len(body)
        s.sendall(whole[:-rest])
        s.sendall(whole[-rest:])
        return first_line(s)
    finally:
        s.close()

held = None
def kept(*words, **more):
    global held
    if held is None:
        held = socket.create_connection(TO)
    try:
        held.sendall(request(*words, **more))
        return first_line(held)
    except OSError as error:
        held.close()
        held = None
        return error.errno
";

/// A server that hangs up on every request whose target begins with `/bad`, and says 503 to those that begin
/// with `/ill`. It remembers their first lines.
struct Scene {
    agent: Agent,
    program: Interpreter,
    asked: Arc<Mutex<Vec<String>>>,
    _server: Server,
    net: TestNet,
    _group: TestCgroup,
}

impl Scene {
    fn new(config: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new("idempotent");
        let agent = Agent::start(&group, config);
        let asked = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&asked);
        let server = Server::with(&net.server, TO, move |stream| serve(stream, &heard));
        let mut program = Interpreter::start(&group, &net.client);
        program.run(PROGRAM);
        Self {
            agent,
            program,
            asked,
            _server: server,
            net,
            _group: group,
        }
    }

    fn do_(&mut self, call: &str) -> Value {
        self.program.value(call)
    }

    /// Requests that have reached the server and begin so.
    fn reached(&self, begin: &str) -> usize {
        let asked = self.asked.lock().expect("a list");
        asked.iter().filter(|line| line.starts_with(begin)).count()
    }

    fn row(&self) -> Value {
        (self.agent).wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0)
    }

    /// The events of repeated requests, once there are so many.
    fn events(&self, least: usize) -> Vec<Value> {
        wait::until("events", SOON, || {
            let all = self.agent.command(&["events", "--json"]).good();
            let all: Vec<Value> = (all.lines())
                .map(|line| serde_json::from_str(line).expect("JSON"))
                .filter(|event: &Value| event["kind"] == "non_idempotent")
                .collect();
            (all.len() >= least).then_some(all)
        })
    }
}

fn serve(mut stream: TcpStream, heard: &Mutex<Vec<String>>) {
    while let Some(head) = read_head(&mut stream) {
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("Content-Length: "))
            .map_or(0, |length| length.parse().expect("a length"));
        let mut body = vec![0; length];
        if stream.read_exact(&mut body).is_err() {
            return;
        }
        let line = head.lines().next().unwrap_or_default().to_owned();
        let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
        heard.lock().expect("a list").push(line);
        if target.starts_with("/bad") {
            return;
        }
        let status = if target.starts_with("/ill") {
            "503 No"
        } else {
            "200 OK"
        };
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// Calls of one program to a destination of its own, that all fail; how many of them are retries, and how
/// many of those are not idempotent.
struct Case {
    name: &'static str,
    calls: [&'static str; 2],
    non_idempotent: u64,
}

const CASES: [Case; 15] = [
    Case {
        name: "a post that is repeated",
        calls: ["ask('POST /bad/order', body='{}')"; 2],
        non_idempotent: 1,
    },
    Case {
        name: "without a body",
        calls: ["ask('PATCH /bad/order')"; 2],
        non_idempotent: 1,
    },
    Case {
        name: "LOCK",
        calls: ["ask('LOCK /ill/order', body='{}')"; 2],
        non_idempotent: 1,
    },
    Case {
        name: "with a key",
        calls: ["ask('POST /bad/order', 'X: y', 'idempotency-key: 7', body='{}')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "with a head longer than is searched",
        calls: ["ask('POST /bad/order', 'Cookie: ' + 'c' * 5000, body='{}')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "GET",
        calls: ["ask('GET /bad/order')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "PUT",
        calls: ["ask('PUT /bad/order', body='{}')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "DELETE",
        calls: ["ask('DELETE /bad/order')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "a method that is not known",
        calls: ["ask('REPORT /bad/order', body='{}')"; 2],
        non_idempotent: 0,
    },
    Case {
        name: "another target",
        calls: ["ask('POST /bad/order/1')", "ask('POST /bad/order/2')"],
        non_idempotent: 0,
    },
    Case {
        name: "the same long target",
        calls: ["ask('POST /bad/' + 'o' * 80 + '/1')"; 2],
        non_idempotent: 1,
    },
    Case {
        name: "another long target",
        calls: [
            "ask('POST /bad/' + 'o' * 80 + '/1')",
            "ask('POST /bad/' + 'o' * 80 + '/2')",
        ],
        non_idempotent: 0,
    },
    Case {
        name: "another body",
        calls: [
            "ask('POST /bad/order', 'A: ' + 'a' * 40, body='{\"id\": 7}')",
            "ask('POST /bad/order', 'A: ' + 'a' * 40, body='{\"id\": 8}')",
        ],
        non_idempotent: 0,
    },
    Case {
        name: "a body with another middle",
        calls: [
            "ask('POST /bad/order', body='a' * 400 + '7' + 'b' * 400)",
            "ask('POST /bad/order', body='a' * 400 + '8' + 'b' * 400)",
        ],
        non_idempotent: 0,
    },
    Case {
        name: "a body that may be the same, as far as it is compared",
        calls: [
            "ask('POST /bad/order', body='a' * 1400 + '7' + 'b' * 400)",
            "ask('POST /bad/order', body='a' * 1400 + '8' + 'b' * 400)",
        ],
        non_idempotent: 1,
    },
];

#[test]
fn what_counts() {
    let mut scene = Scene::new(COUNTS);
    let mut servers = Vec::new();
    for (port, case) in (8081..).zip(CASES) {
        let asked = Arc::clone(&scene.asked);
        let serve = move |stream| serve(stream, &asked);
        servers.push(Server::with(
            &scene.net.server,
            TestNet::server4(port),
            serve,
        ));
        scene.program.run(&format!("TO = ('10.77.0.2', {port})"));
        for call in case.calls {
            let is_ill = call.contains("/ill");
            let expected = if is_ill { "HTTP/1.1 503 No" } else { "" };
            assert_eq!(scene.do_(call), expected, "{}", case.name);
        }
        let destination = format!("10.77.0.2:{port}");
        let quiet = |row: &Value| row["in_flight"] == 0;
        let row = scene.agent.wait_row(&destination, "quiet", quiet);
        assert_eq!(row["attempts"], 2, "{}: {row:#}", case.name);
        let retry = &row["retry"];
        // (What asks for something else is none, which is asserted where two may not share a place by chance.)
        if case.calls[0] == case.calls[1] || case.non_idempotent != 0 {
            assert_eq!(retry["retries"], 1, "{}: {row:#}", case.name);
        }
        let counted = &retry["non_idempotent"];
        assert_eq!(counted, case.non_idempotent, "{}: {row:#}", case.name);
        assert_eq!(retry["non_idempotent_refused"], 0, "{}: {row:#}", case.name);
        assert_eq!(retry["live"], 0, "{}: {row:#}", case.name);
    }
}

/// Nothing that was not sent can be sent twice.
#[test]
fn a_connect_that_failed_has_asked_for_nothing() {
    let mut scene = Scene::new(REFUSES);
    scene.program.run("TO = ('10.77.0.2', 8081)");
    let refused = scene.do_("ask('POST /order', body='{}')");
    assert_eq!(refused, i64::from(libc::ECONNREFUSED));
    let asked = Arc::clone(&scene.asked);
    let at = TestNet::server4(8081);
    let _other = Server::with(&scene.net.server, at, move |stream| serve(stream, &asked));
    assert_eq!(scene.do_("ask('POST /bad/order', body='{}')"), "");
    let row = (scene.agent).wait_row("10.77.0.2:8081", "quiet", |row| row["in_flight"] == 0);
    assert_eq!(row["retry"]["retries"], 1, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent"], 0, "{row:#}");
    // But what is sent then can.
    let again = scene.do_("ask('POST /bad/order', body='{}')");
    assert_eq!(again, ECONNABORTED);
}

#[test]
fn a_refusal_ends_the_connection_before_anything_has_left() {
    let mut scene = Scene::new(REFUSES);
    let post = "ask('POST /bad/order', body='{\"id\": 7}')";
    assert_eq!(scene.do_(post), "");
    for _ in 0..2 {
        assert_eq!(scene.do_(post), ECONNABORTED);
    }
    // Other requests pass, and so does what is no retry.
    assert_eq!(scene.do_("ask('GET /bad/order')"), "");
    assert_eq!(scene.do_("ask('GET /order')"), "HTTP/1.1 200 OK");
    assert_eq!(
        scene.do_("ask('POST /order', body='{\"id\": 8}')"),
        "HTTP/1.1 200 OK"
    );
    assert_eq!(scene.reached("POST /bad"), 1);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 2, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 2, "{row:#}");
    assert_eq!(row["failures"]["closed_early"], 2, "{row:#}");
    let told = &scene.events(1)[0];
    assert_eq!(told["destination"], DESTINATION, "{told:#}");
    assert_eq!(told["workload"], scene.row()["workload"], "{told:#}");
    assert_eq!(told["method"], "POST", "{told:#}");
    assert_eq!(told["refused"], true, "{told:#}");
    assert_eq!(told["mode"], "enforce", "{told:#}");
    let is_python = |comm: &Value| comm.as_str().is_some_and(|comm| comm.starts_with("python"));
    assert!(is_python(&told["comm"]), "{told:#}");
    let metric = |result: &str| {
        let labels = [format!("result=\"{result}\"")];
        scene.agent.metric("backstop_non_idempotent_total", &labels)
    };
    assert_eq!(metric("refused"), Some(2.0));
    assert_eq!(metric("passed"), Some(0.0));
    wait::until("a line in the log", SOON, || {
        let log = scene.agent.log();
        assert!(!log.contains("not enforced"), "{log}");
        let line = "POST repeated after a failure and refused";
        log.contains(line).then_some(())
    });
}

/// What the program sends next makes the kernel try again at once: the packet is dropped again, whether its
/// connection has been ended by then or not.
#[test]
fn what_is_sent_behind_a_refused_request_does_not_leave() {
    let mut scene = Scene::new(REFUSES);
    let post = "ask('POST /bad/order', body='{\"id\": 7}')";
    assert_eq!(scene.do_(post), "");
    for _ in 0..15 {
        let more = "ask('POST /bad/order', body='{\"id\": 7}', times=20)";
        let got = scene.do_(more);
        assert!(
            got == ECONNABORTED || got == i64::from(libc::EPIPE),
            "{got}"
        );
    }
    assert_eq!(scene.reached("POST"), 1);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 15, "{row:#}");
    // What was refused within a second of another is told when it is over.
    wait::until("fifteen told", SOON, || {
        let counts = scene.events(1);
        let told: u64 = (counts.iter())
            .filter_map(|event| event["count"].as_u64())
            .sum();
        assert!(told <= 15, "{counts:#?}");
        (told == 15).then_some(())
    });
}

/// An agent that is stopped refuses nothing: the request leaves with its next resend, and is answered. What the
/// agent was told before is void by then.
#[test]
fn a_request_that_has_left_after_all_is_not_ended() {
    let mut scene = Scene::new(REFUSES);
    let post = "('POST /ill/order', body='{\"id\": 7}')";
    assert_eq!(scene.do_(&format!("ask{post}")), "HTTP/1.1 503 No");
    scene.agent.signal(Signal::STOP);
    let got = scene.do_(&format!("kept{post}"));
    scene.agent.signal(Signal::CONT);
    assert_eq!(got, "HTTP/1.1 503 No");
    // It has taken up what was to be done.
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 1, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    scene.events(1);
    assert_eq!(scene.do_("kept('GET /order')"), "HTTP/1.1 200 OK");
    assert_eq!(scene.row()["attempts"], 2);
}

#[test]
fn observe_mode_lets_pass() {
    let mut scene = Scene::new(&format!("mode = \"observe\"\n{REFUSES}"));
    let post = "ask('POST /bad/order', body='{\"id\": 7}')";
    for _ in 0..2 {
        assert_eq!(scene.do_(post), "");
    }
    assert_eq!(scene.reached("POST /bad"), 2);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 1, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_would_refuse"], 1, "{row:#}");
    let told = &scene.events(1)[0];
    assert_eq!(
        (&told["refused"], &told["mode"]),
        (&true.into(), &"observe".into())
    );
}

#[test]
fn what_is_held_closed_or_paused_passes() {
    let mut scene = Scene::new(REFUSES);
    let post = "ask('POST /bad/order', body='{\"id\": 7}')";
    assert_eq!(scene.do_(post), "");
    scene.agent.command(&["hold-closed", DESTINATION]).good();
    assert_eq!(scene.do_(post), "");
    scene.agent.command(&["pause"]).good();
    assert_eq!(scene.do_(post), "");
    scene.agent.command(&["resume"]).good();
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    assert_eq!(scene.reached("POST /bad"), 3);
}

/// The same head does not make the same request: the body may be another one.
#[test]
fn a_body_that_comes_by_itself_is_in_doubt() {
    let mut scene = Scene::new(REFUSES);
    for number in 0..2 {
        let post = format!("apart('POST /bad/order', body='{{\"id\": {number}}}')");
        assert_eq!(scene.do_(&post), "");
    }
    assert_eq!(scene.reached("POST /bad"), 2);
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent"], 1, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
}

/// Refused is only what was compared to its last byte, wherever the difference may lie.
#[test]
fn what_differs_anywhere_or_is_not_known_to_the_end_is_never_refused() {
    let mut scene = Scene::new(REFUSES);
    let calls = [
        // Nowhere the same.
        "ask('POST /bad/order', body='a' * 400 + '{}' + 'b' * 400)",
        // Longer than what is compared.
        "ask('POST /bad/long', body='a' * 1800 + '{}' + 'b' * 50)",
        // The last bytes come later.
        "apart('POST /bad/late', body='a' * 100 + '{}', rest=1)",
        // It comes in chunks, of which there may be more.
        "ask('POST /bad/chunks', 'Transfer-Encoding: chunked\\r\\n\\r\\n1\\r\\n{}')",
        // It says nothing of its end that holds.
        "ask('POST /bad/twice', 'Content-Length: 1', body='{}')",
    ];
    for (at, call) in calls.iter().enumerate() {
        for number in 0..2 {
            // Only the first ones differ within what was looked at.
            let number = if at < 3 { number } else { 7 };
            let got = scene.do_(&call.replace("{}", &number.to_string()));
            // (It has not read the chunk.)
            assert!(
                got == "" || got == i64::from(libc::ECONNRESET),
                "{call}: {got}"
            );
        }
    }
    let row = scene.row();
    assert_eq!(row["attempts"], 10, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent_refused"], 0, "{row:#}");
    // And one that is the same to the last byte is.
    let post = "ask('POST /bad/order', body='a' * 801)";
    assert_eq!(scene.do_(post), "");
    assert_eq!(scene.do_(post), ECONNABORTED);
}

/// A program that keeps its connection, and asks for something else each time but when something has failed.
fn keeps(scene: &mut Scene) {
    assert_eq!(scene.do_("kept('GET /ill')"), "HTTP/1.1 503 No");
    for number in 0..12 {
        let call = format!("kept('GET /{number}')");
        assert_eq!(scene.do_(&call), "HTTP/1.1 200 OK");
    }
}

#[test]
fn retries_on_a_connection_that_is_kept() {
    let mut scene = Scene::new(COUNTS);
    keeps(&mut scene);
    let post = "kept('POST /ill/order', body='{\"id\": 7}')";
    // All at once: who pauses for long between them, because a test is slow to ask, does not retry.
    let calls = [post, post, post, "kept('GET /7')", "kept('GET /7')"].join(", ");
    scene.do_(&format!("[{calls}]"));
    let row = scene.row();
    assert_eq!(row["attempts"], 1, "{row:#}");
    assert_eq!(row["retry"]["live"], 2, "{row:#}");
    assert_eq!(row["retry"]["retries"], 0, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent"], 2, "{row:#}");
    // 18 requests: one operation took three.
    let operations = serde_json::json!([15, 0, 1, 0, 0]);
    assert_eq!(row["retry"]["operations"], operations, "{row:#}");
    assert_eq!(row["retry"]["amplification"], 18.0 / 16.0, "{row:#}");
    let live = scene.agent.metric("backstop_live_retries_total", &[]);
    assert_eq!(live, Some(2.0));
}

#[test]
fn a_retry_on_a_connection_that_is_kept_is_refused() {
    let mut scene = Scene::new(REFUSES);
    keeps(&mut scene);
    let post = "kept('POST /ill/order', body='{\"id\": 7}')";
    let both = scene.do_(&format!("[{post}, {post}]"));
    let expected = serde_json::json!(["HTTP/1.1 503 No", ECONNABORTED]);
    assert_eq!(both, expected);
    assert_eq!(scene.reached("POST /ill"), 1);
    let other = "kept('POST /order', body='{\"id\": 8}')";
    assert_eq!(scene.do_(other), "HTTP/1.1 200 OK");
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 1, "{row:#}");
}

/// Polls look like retries, but that they are as frequent when all is well.
#[test]
fn who_always_asks_the_same_is_not_taken_to_retry() {
    let mut scene = Scene::new(COUNTS);
    scene.do_("kept('GET /ill')");
    // Sooner than after a failure, whatever the machine does.
    scene.do_("[kept('GET /') for _ in range(40)]");
    scene.do_("[time.sleep(0.02) or kept('GET /ill') for _ in range(20)]");
    let row = scene.row();
    assert_eq!(row["retry"]["live"], 0, "{row:#}");
}

#[test]
fn who_takes_up_something_else_is_known_soon_and_forgiven() {
    let mut scene = Scene::new(COUNTS);
    for number in 0..12 {
        assert_eq!(scene.do_(&format!("ask('GET /bad/{number}')")), "");
    }
    let row = scene.row();
    assert_eq!(row["attempts"], 12, "{row:#}");
    // The first three that come after a failure look like retries, until they have asked. (Once in thousands of runs two
    // of them share a place; then one stays.)
    let by_chance = row["retry"]["retries"].as_u64().expect("a count");
    assert!(by_chance <= 1, "{row:#}");
    // It begins to retry: two tell, and those behind them count.
    for _ in 0..4 {
        assert_eq!(scene.do_("ask('GET /bad/11')"), "");
    }
    let row = scene.row();
    assert_eq!(row["attempts"], 16, "{row:#}");
    assert_eq!(row["retry"]["retries"], by_chance + 2, "{row:#}");
}

#[test]
fn tls_tells_nothing() {
    need!("openssl");
    let net = TestNet::new();
    let group = TestCgroup::new("idempotent");
    // Long enough for a handshake on a busy machine.
    let config = format!("{REFUSES}[defaults.timeouts]\nread = \"2s\"\n");
    let agent = Agent::start(&group, &config);
    let certificate = Certificate::new();
    let hangs = Behaviour {
        version: "1.3",
        tickets: 0,
        answers: 0,
        delay_ms: 0,
    };
    let _server = TlsServer::start(&net.server, &certificate.both(), hangs);
    let mut program = Interpreter::start(&group, &net.client);
    program.value(tls::CONTEXT);
    for _ in 0..4 {
        program.value(tls::CONNECT);
        let post =
            "s.sendall(b'POST /order HTTP/1.1\\r\\nContent-Length: 2\\r\\n\\r\\n{}') or s.recv(9)";
        // To Python the end of a TLS stream is as good as any.
        assert_eq!(program.value(post), "b''");
        program.value("s.close()");
    }
    // (The program is told before it is counted.)
    let all = |row: &Value| row["failures"]["read_timeout"] == 4;
    let row = agent.wait_row(DESTINATION, "four timeouts", all);
    assert_eq!(row["attempts"], 4, "{row:#}");
    assert_eq!(row["retry"]["non_idempotent"], 0, "{row:#}");
}
