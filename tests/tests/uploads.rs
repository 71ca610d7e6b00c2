//! Uploads whose producers pause: no answer is owed to a request that is not finished. To one that is, it is.

use std::{
    io::{Read as _, Write as _},
    net::TcpStream,
    thread,
    time::Duration,
};

use serde_json::json;
use tests::{
    need,
    outcome::judged,
    server::read_head,
    talk::{CONNECT, DESTINATION, Scene, wait_end},
};

#[path = "uploads/programs.rs"]
mod programs;

/// The read timeout of these tests, ms.
const READ_MS: i64 = 1_000;
/// What is not over by so much more than its time is not over at all: the machine may be busy.
const LATE_MS: i64 = 20_000;

/// Twice the read timeout and more, for a server.
const PAUSE: Duration = Duration::from_millis(2_200);

/// Twice the read timeout and more, and more than `gave_up`, for a program.
const PAUSES: &str = "time.sleep(2.2)";

fn config() -> String {
    format!("[defaults.timeouts]\nread = \"{READ_MS}ms\"\n")
}

/// Reads the body that belongs to a head. False when the peer ends before.
fn read_body(stream: &mut TcpStream, head: &str) -> bool {
    let head = head.to_ascii_lowercase();
    let value = |name: &str| {
        let (_, value) = head.split_once(&format!("\r\n{name}: "))?;
        value.lines().next().map(str::trim)
    };
    if let Some(length) = value("content-length") {
        let length: u64 = length.parse().expect("a length");
        let read = std::io::copy(&mut stream.take(length), &mut std::io::sink());
        return read.is_ok_and(|read| read == length);
    }
    if value("transfer-encoding") != Some("chunked") {
        return true;
    }
    loop {
        let Some(line) = read_line(stream) else {
            return false;
        };
        let size = line.split(';').next().unwrap_or_default().trim();
        let size = usize::from_str_radix(size, 16).expect("a size");
        let mut data = vec![0; size];
        if stream.read_exact(&mut data).is_err() || read_line(stream).is_none() {
            return false;
        }
        if size == 0 {
            return true;
        }
    }
}

fn read_line(stream: &mut TcpStream) -> Option<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    while byte[0] != b'\n' {
        stream.read_exact(&mut byte).ok()?;
        line.push(byte[0]);
    }
    Some(String::from_utf8_lossy(&line).into_owned())
}

/// Answers each request when all of it is there; at `/silent` never. At `/continue` it takes its time to ask
/// for the body.
fn receive(mut stream: TcpStream) {
    while let Some(head) = read_head(&mut stream) {
        if head.contains(" /continue ") {
            thread::sleep(PAUSE);
            let _ = stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n");
        }
        if !read_body(&mut stream, &head) {
            return;
        }
        if head.contains(" /silent ") {
            return wait_end(stream);
        }
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
    }
}

/// `pieces(list)`: sends them on `s`, with a pause before each but the first. `timed(f)`: what `f` ends with,
/// and after how many milliseconds. `length(n)`, `chunks()`: heads.
const PIECES: &str = r"
def pieces(all):
    for i, piece in enumerate(all):
        if i:
            time.sleep(2.2)
        s.sendall(piece)
    return 0
def timed(f):
    begin = time.monotonic()
    try:
        result = len(f())
    except OSError as error:
        result = -error.errno
    return [result, round((time.monotonic() - begin) * 1000)]
def head(path, line):
    return f'POST {path} HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n'.encode()
def length(n, path='/'):
    return head(path, f'Content-Length: {n}')
def chunks(path='/'):
    return head(path, 'Transfer-Encoding: chunked')
";

/// With a length, with the first part in the segment of the head and without.
#[test]
fn of_a_known_length() {
    need!("python3");
    let scene = Scene::new("up-length", &config(), receive);
    let mut python = scene.python(PIECES);
    python.value(CONNECT);
    for sent in [
        "[length(30), b'x' * 10, b'GET /x HTTP/1.1\\n'[:10], b'x' * 10]",
        "[length(20) + b'x' * 10, b'x' * 9, b'x']",
        "[length(0)]",
    ] {
        python.value(&format!("pieces({sent})"));
        assert_eq!(python.value("len(s.recv(99))"), 40, "{sent}");
    }
    let row = scene.expect(&[("responses", 3)]);
    assert_eq!(judged(&row), (3, 0), "{row:#}");
}

/// In chunks that pause between and within them, and that have in them what looks like their end.
#[test]
fn in_chunks() {
    need!("python3");
    let scene = Scene::new("up-chunks", &config(), receive);
    let mut python = scene.python(PIECES);
    python.value(CONNECT);
    for sent in [
        r"[chunks(), b'3\r\n0\r\n\r\n', b'2', b'\r\nxy\r\n0\r\n\r\n']",
        r"[chunks() + b'5\r\nhello\r\n', b'A;x=y\r\n01234', b'56789\r\n', b'0\r\n\r\n']",
        r"[chunks() + b'5\r\nhello\r\n0\r\n\r\n']",
    ] {
        python.value(&format!("pieces({sent})"));
        assert_eq!(python.value("len(s.recv(99))"), 40, "{sent}");
    }
    let row = scene.expect(&[("responses", 3)]);
    assert_eq!(judged(&row), (3, 0), "{row:#}");
}

/// Heads that say it in other ways, and heads of which no end can be told: all are left to their pauses.
#[test]
fn in_other_words() {
    need!("python3");
    let scene = Scene::new("up-words", &config(), |mut stream| {
        let mut got = Vec::new();
        let mut byte = [0];
        while !got.ends_with(b"END") {
            if stream.read_exact(&mut byte).is_err() {
                return;
            }
            got.push(byte[0]);
        }
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        wait_end(stream);
    });
    let mut python = scene.python(PIECES);
    python.run(
        r"
def at_once(heads):
    all = []
    for line, method, body in heads:
        s = socket.create_connection(('10.77.0.2', 8080))
        s.sendall(f'{method} / HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n'.encode())
        all.append((s, body))
    for i in range(2):
        time.sleep(2.2)
        for s, body in all:
            s.sendall(body[i])
    return [len(s.recv(99)) for s, _ in all]
plain = [b'xyzxyz', b'END']
pieces = [b'3\r\nxyz\r\n', b'3\r\nEND\r\n0\r\n\r\n']
",
    );
    let answers = python.value(
        r"at_once([
            ('content-length:  9', 'POST', plain), ('Content-Length: 9 \t', 'PUT', plain),
            ('Content-Length: 0000000000009', 'POST', plain), ('Content-Length: 90000000000', 'PUT', plain),
            ('Content-Length: 9, 9', 'POST', plain), ('Content-Length: 9\r\nContent-Length: 9', 'POST', plain),
            ('Content-Length: 9\r\nTransfer-Encoding: chunked', 'POST', pieces),
            ('Transfer-Encoding: gzip, chunked', 'POST', pieces), ('Transfer-Encoding: gzip', 'POST', plain),
            ('Content-Length: 9', 'PROPFIND', plain), ('Content-Length: 9', 'REPORT', plain)])"
            .replace('\n', " ")
            .as_str(),
    );
    assert_eq!(answers, json!(vec![40; 11]));
    let row = scene.expect(&[("responses", 11)]);
    assert_eq!(judged(&row), (11, 0), "{row:#}");
}

/// Pauses in a body that are not known as such, and ends that are not.
#[test]
fn what_is_not_told() {
    need!("python3");
    let config = format!(
        "{}[defaults]\nbreaker = \"off\"\nretry = \"off\"\n",
        config()
    );
    let scene = Scene::new("up-untold", &config, |mut stream| {
        let Some(head) = read_head(&mut stream) else {
            return;
        };
        if head.contains(" /early ") {
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n");
        }
        wait_end(stream);
    });
    let mut python = scene.python(PIECES);
    let mut ended = 0;
    for (head, answer, rest) in [
        // Methods of which no body is expected, or that are not known.
        (
            r"b'GET / HTTP/1.1\r\nContent-Length: 9\r\n\r\n'",
            0,
            "b'xyz'",
        ),
        (
            r"b'QUERY / HTTP/1.1\r\nContent-Length: 9\r\n\r\n'",
            0,
            "b'xyz'",
        ),
        // The rest after an early answer that looks like a request.
        ("length(99, '/early')", 53, r"b'GET / HTTP/1.1\r\n\r\n'"),
    ] {
        python.value(CONNECT);
        python.value(&format!("s.sendall({head}) or 0"));
        if answer > 0 {
            assert_eq!(
                python.value(&format!("len(s.recv({answer}))")),
                answer,
                "{head}"
            );
        }
        let answer = python.value(&format!("timed(lambda: s.sendall({rest}) or s.recv(9))"));
        assert_eq!(answer[0], -libc::ECONNABORTED, "{head}: {answer}");
        ended += 1;
    }
    scene.expect(&[("read_timeout", ended), ("responses", 1)]);
    // Lines of chunks that end without a carriage return: finished, and waited for in vain.
    python.value(CONNECT);
    python.value(r"s.sendall(chunks() + b'3\nxyz\n0\n\n') or 0");
    python.value(&format!("{PAUSES} or s.sendall(b'') or s.close() or 0"));
    // An empty line before a request that is not the first one on its connection.
    python.value(CONNECT);
    python.value("s.sendall(length(0, '/early')) or 0");
    assert_ne!(python.value("len(s.recv(99))"), 0);
    python.value(r"s.sendall(b'\r\nGET / HTTP/1.1\r\n\r\n') or 0");
    python.value(&format!("{PAUSES} or s.sendall(b'') or s.close() or 0"));
    scene.expect(&[("read_timeout", ended), ("responses", 2), ("abandoned", 1)]);
}

/// The body waits for a 100 that is late, or never comes, and then pauses, too.
#[test]
fn behind_an_expectation() {
    need!("python3");
    let scene = Scene::new("up-100", &config(), receive);
    let mut python = scene.python(PIECES);
    python.value(CONNECT);
    let line = r"'Content-Length: 20\r\nExpect: 100-continue'";
    for (path, interim) in [("/continue", 25), ("/", 0)] {
        python.value(&format!("pieces([head('{path}', {line})])"));
        let wait = if interim > 0 {
            "len(s.recv(99))"
        } else {
            "time.sleep(2.2) or 0"
        };
        assert_eq!(python.value(wait), interim, "{path}");
        python.value("pieces([b'x' * 10, b'x' * 10])");
        assert_eq!(python.value("len(s.recv(99))"), 40, "{path}");
    }
    let row = scene.expect(&[("responses", 2)]);
    assert_eq!(judged(&row), (2, 0), "{row:#}");
}

/// The timeout counts from the last byte, and counts.
#[test]
fn what_is_finished_is_waited_for() {
    need!("python3");
    let config = format!(
        "{}[defaults]\nbreaker = \"off\"\nretry = \"off\"\n",
        config()
    );
    let scene = Scene::new("up-silent", &config, receive);
    let mut python = scene.python(PIECES);
    for (pieces, last) in [
        ("[length(20, '/silent'), b'x' * 10]", "b'x' * 10"),
        (r"[chunks('/silent'), b'5\r\nhello\r\n']", r"b'0\r\n\r\n'"),
        (r"[chunks('/silent')]", r"b'5\r\nhello\r\n0\r\n\r\n'"),
        (r"[chunks('/silent') + b'5\r\nhello\r\n0\r\n']", r"b'\r\n'"),
        ("[]", "length(3, '/silent') + b'xyz'"),
        ("[length(' 00000000003 ', '/silent'), b'xy']", "b'z'"),
        ("[]", r"chunks('/silent') + b'3\r\nxyz\r\n0\r\n\r\n'"),
        ("[]", r"b'GET /silent HTTP/1.1\r\nHost: x\r\n\r\n'"),
    ] {
        python.value(CONNECT);
        python.value(&format!("pieces({pieces})"));
        let answer = python.value(&format!("timed(lambda: s.sendall({last}) or s.recv(9))"));
        assert_eq!(answer[0], -libc::ECONNABORTED, "{pieces} {last}: {answer}");
        let took = answer[1].as_i64().expect("a number");
        assert!(
            (READ_MS..READ_MS + LATE_MS).contains(&took),
            "{pieces} {last}: {took} ms"
        );
    }
    let row = scene.expect(&[("read_timeout", 8)]);
    assert_eq!(row["responses"], 0, "{row:#}");
}

/// What is left of an upload that was answered early is no request, whatever it looks like.
#[test]
fn the_rest_after_an_early_answer() {
    need!("python3");
    let scene = Scene::new("up-early", &config(), |mut stream| {
        if read_head(&mut stream).is_some() {
            let _ = stream.write_all(b"HTTP/1.1 413 No\r\nContent-Length: 0\r\n\r\n");
            wait_end(stream);
        }
    });
    let mut python = scene.python(PIECES);
    python.value(CONNECT);
    python.value("pieces([length(100)])");
    assert_eq!(python.value("len(s.recv(99))"), 38);
    python.value("pieces([b'BASE64', b'AND/MORE', b'OF+IT'])");
    python.value(&format!("{PAUSES} or 0"));
    let row = scene.expect(&[("responses", 1)]);
    assert_eq!(judged(&row), (1, 0), "{row:#}");
    assert_eq!(python.value("s.close() or 0"), 0);
    scene.expect(&[("responses", 1)]);
}

/// Once a connection was handed over, nothing that the client sends is a request, whatever it looks like.
#[test]
fn nothing_is_asked_on_a_connection_that_was_handed_over() {
    need!("python3");
    let scene = Scene::new("up-upgrade", &config(), |mut stream| {
        // Behind an ordinary one: a CONNECT with which a connection begins makes it a tunnel from the start.
        for answer in [
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
            "HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n",
        ] {
            let Some(head) = read_head(&mut stream) else {
                return;
            };
            let answer = if head.starts_with("CONNECT") {
                "HTTP/1.1 200 Connected\r\n\r\n"
            } else {
                answer
            };
            let _ = stream.write_all(answer.as_bytes());
        }
        wait_end(stream);
    });
    let mut python = scene.python(PIECES);
    for (i, upgrade) in [
        "head('/containers/x/attach', 'Upgrade: tcp\\r\\nContent-Length: 0')",
        "b'CONNECT a:4222 HTTP/1.1\\r\\nHost: a\\r\\n\\r\\n'",
    ]
    .into_iter()
    .enumerate()
    {
        python.value(CONNECT);
        python.value(r"pieces([b'GET / HTTP/1.1\r\nHost: x\r\n\r\n'])");
        assert_eq!(python.value("s.recv(99)[-2:].decode()"), "ok");
        python.value(&format!("pieces([{upgrade}])"));
        assert_ne!(python.value("len(s.recv(99))"), 0, "{upgrade}");
        python.value(r"pieces([b'HELLO WORLD\n', b'GET /x HTTP/1.1\r\n\r\n', b'PUB x 5\r\n'])");
        python.value(&format!(
            "{PAUSES} or s.sendall(b'alive') or s.close() or 0"
        ));
        let row = scene.expect(&[("responses", 2 * (i as u64 + 1))]);
        assert_eq!(judged(&row), (2 * (i as u64 + 1), 0), "{row:#}");
    }
}

/// A program that gives up in the middle of its own upload has waited for nobody; one that has sent all has.
#[test]
fn nobody_is_given_up_on_in_the_middle() {
    need!("python3");
    let config = "[defaults.timeouts]\nread = \"60s\"\n[defaults.breaker]\ngave_up = \"300ms\"\n";
    let scene = Scene::new("up-gave-up", config, receive);
    let mut python = scene.python(PIECES);
    for sent in ["length(20) + b'x'", r"chunks() + b'5\r\nhel'"] {
        python.value(CONNECT);
        python.value(&format!("pieces([{sent}])"));
        python.value(&format!("{PAUSES} or s.close() or 0"));
    }
    scene.expect(&[("abandoned", 2)]);
    python.value(CONNECT);
    python.value("pieces([length(2, '/silent') + b'xy'])");
    python.value(&format!("{PAUSES} or s.close() or 0"));
    scene.expect(&[("abandoned", 2), ("gave_up", 1)]);
}

/// Nor does it hang.
#[test]
fn nothing_hangs_in_the_middle() {
    need!("python3");
    let config = "[defaults.breaker]\nhung = \"1s\"\n";
    let scene = Scene::new("up-hung", config, receive);
    let mut python = scene.python(PIECES);
    python.value(CONNECT);
    python.value("pieces([length(20), b'x' * 10, b'x' * 10])");
    assert_eq!(python.value("len(s.recv(99))"), 40);
    scene.expect(&[("responses", 1)]);
    python.value("pieces([length(2, '/silent'), b'xy'])");
    scene.agent.wait_row(DESTINATION, "a hung exchange", |row| {
        row["failures"]["hung"] == 1
    });
}

/// Which answer belongs to which of several requests at once is not known: no silence is a stall.
#[test]
fn of_answers_to_pipelined_requests_nothing_is_known() {
    need!("python3");
    let config = "[defaults.timeouts]\nstall = \"1s\"\n";
    let scene = Scene::new("up-pipelined", config, |mut stream| {
        let answers: [(&[u8], bool); 3] = [
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", false),
            // To HEAD: it ends with its head.
            (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n", false),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", true),
        ];
        // The second request is there before the first is answered, the third before the second is.
        if read_head(&mut stream).is_none() || read_head(&mut stream).is_none() {
            return;
        }
        let _ = stream.write_all(answers[0].0);
        if read_head(&mut stream).is_none() {
            return;
        }
        for (answer, late) in &answers[1..] {
            if *late {
                thread::sleep(PAUSE);
            }
            let _ = stream.write_all(answer);
        }
        wait_end(stream);
    });
    let mut python = scene.python(PIECES);
    python.value(CONNECT);
    python.value(r"s.sendall(b'GET / HTTP/1.1\r\nHost: x\r\n\r\n') or 0");
    python.value(r"s.sendall(b'HEAD / HTTP/1.1\r\nHost: x\r\n\r\n') or 0");
    assert_eq!(python.value("len(s.recv(99))"), 40);
    python.value(r"s.sendall(b'GET / HTTP/1.1\r\nHost: x\r\n\r\n') or 0");
    python.run("\ndef rest(n):\n    got = b''\n    while len(got) < n:\n        got += s.recv(n - len(got))\n    return len(got)\n");
    assert_eq!(python.value("rest(79)"), 79);
    let row = scene.expect(&[("responses", 2)]);
    assert_eq!(judged(&row), (2, 0), "{row:#}");
}
