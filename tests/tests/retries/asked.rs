//! What is known of a dial only by what it asks for: a pool dials when a connection has failed, and asks for whatever
//! is next.

use std::{io::Write as _, net::TcpStream};

use serde_json::Value;
use tests::{
    interpreter::Interpreter,
    server::{Server, read_head, reset},
};

use super::{DESTINATION, ECONNREFUSED, Scene, TO, number};

/// An operation lives longer than any test.
const LONG_WINDOW: &str =
    "[defaults]\nbreaker = \"off\"\n[defaults.retry]\nlimit = \"off\"\nwindow = \"1h\"\n";
/// As many retries as other attempts, and none beyond.
const ONE_FOR_ONE: &str = "budget = 1.0\nmin_per_second = 0\n";

/// Asks by a connection for each, one after the other.
const POOL: &str = r#"
def ask(path):
    s = socket.create_connection(('10.77.0.2', 8080))
    s.sendall(f'GET {path} HTTP/1.1\r\nHost: pool.example\r\n\r\n'.encode())
    try:
        while s.recv(4096):
            pass
    except ConnectionResetError:
        pass
    s.close()

def ask_all(paths):
    for path in paths.split():
        ask(path)
"#;

/// Resets what asks for `/fail`, and answers all else.
fn serve(scene: &Scene) -> Server {
    Server::with(&scene.net.server, TO, |mut stream: TcpStream| {
        let Some(head) = read_head(&mut stream) else {
            return;
        };
        if head.starts_with("GET /fail") {
            reset(stream);
        } else {
            let _ = stream
                .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
        }
    })
}

fn pool(scene: &Scene) -> Interpreter {
    let mut python = Interpreter::start(&scene.group, &scene.net.client);
    python.run(POOL);
    python
}

/// The row of one process that has asked for these, if `is` says that it is as expected. What is remembered of two
/// requests may lie at one place, once in some thousand runs: so another process tries, up to three times.
#[track_caller]
fn asked(config: &str, paths: &str, is: impl Fn(&Value) -> bool) -> (Scene, Value) {
    let mut tried = Vec::new();
    while tried.len() < 3 {
        let scene = Scene::new(config);
        let server = serve(&scene);
        pool(&scene).run(&format!("ask_all('{paths}')"));
        let row = scene.row();
        drop(server);
        if is(&row) {
            return (scene, row);
        }
        tried.push(row);
    }
    panic!("{paths}: {tried:#?}");
}

/// Retries, operations by their attempts, and retries that the budget still allows.
fn counts(row: &Value) -> (u64, &Value, &Value) {
    let retry = &row["retry"];
    (
        number(&retry["retries"]),
        &retry["operations"],
        &retry["budget_tokens"],
    )
}

/// A dial that follows a failure at once is a retry, if it asks for the same; connect() takes it for one.
#[test]
fn what_repeats_is_a_retry() {
    let config = format!("{LONG_WINDOW}{ONE_FOR_ONE}");
    let expected = (1, &Value::from(vec![0, 1, 0, 0, 0]), &Value::from(0.0));
    asked(&config, "/fail/1 /fail/1", |row| counts(row) == expected);
}

/// Else it is none. The budget allows one for each of the other attempts: so the third dial would be refused if the
/// second had cost a token for good.
#[test]
fn what_repeats_nothing_is_none_and_costs_nothing() {
    let config = format!("{LONG_WINDOW}{ONE_FOR_ONE}");
    let expected = (0, &Value::from(vec![3, 0, 0, 0, 0]), &Value::from(3.0));
    let (scene, row) = asked(&config, "/fail/1 /fail/2 /fail/3", |row| {
        counts(row) == expected
    });
    assert_eq!(row["attempts"], 3, "{row:#}");
    assert_eq!(row["rejected"]["retry_budget"], 0, "{row:#}");
    assert_eq!(row["retry"]["amplification"], 1.0, "{row:#}");
    assert_eq!(scene.agent.metric("backstop_retries_total", &[]), Some(0.0));
}

/// What a pool has failed at it asks for again, now and then, when others have dialled in its place.
#[test]
fn each_failure_is_worth_one_retry() {
    let config = format!("{LONG_WINDOW}budget = \"off\"\n");
    let operations = Value::from(vec![3, 1, 1, 0, 0]);
    let paths = "/fail/0 /good/1 /good/2 /fail/1 /fail/2 /fail/1 /fail/2 /fail/1";
    let (scene, row) = asked(&config, paths, |row| {
        let (retries, of, _) = counts(row);
        (retries, of) == (3, &operations)
    });
    assert_eq!(row["attempts"], 8, "{row:#}");
    assert_eq!(scene.agent.metric("backstop_retries_total", &[]), Some(3.0));
}

/// The same request of several, which all fail: as many retries as failures.
#[test]
fn several_that_fail_at_the_same_are_worth_as_many() {
    let config = format!("{LONG_WINDOW}budget = \"off\"\n");
    let at_once = "\
def all(path):
    made = [socket.create_connection(('10.77.0.2', 8080)) for _ in range(3)]
    for s in made:
        s.sendall(f'GET {path} HTTP/1.1\\r\\nHost: pool.example\\r\\n\\r\\n'.encode())
    for s in made:
        try:
            s.recv(1)
        except ConnectionResetError:
            pass
    for s in made:
        s.close()
";
    let mut tried = Vec::new();
    for _ in 0..3 {
        let scene = Scene::new(&config);
        let server = serve(&scene);
        let mut python = pool(&scene);
        python.run(at_once);
        python.run("ask_all('/fail/0 /good/1 /good/2')");
        python.run("all('/fail/1')");
        python.run("all('/fail/1')");
        drop(python);
        let row = scene.row();
        drop(server);
        assert_eq!(row["attempts"], 9, "{row:#}");
        if number(&row["retry"]["retries"]) == 3 {
            return;
        }
        tried.push(row);
    }
    panic!("{tried:#?}");
}

/// A connect that has failed has asked for nothing: whatever comes next may be what it was for.
#[test]
fn after_a_failed_connect_anything_may_repeat_it() {
    let scene = Scene::new(LONG_WINDOW);
    let mut python = pool(&scene);
    assert_eq!(i64::from(python.errno("ask('/good/1')")), ECONNREFUSED);
    let _server = serve(&scene);
    python.run("ask('/good/1')");
    let row = scene.row();
    assert_eq!(row["attempts"], 2, "{row:#}");
    assert_eq!(row["retry"]["retries"], 1, "{row:#}");
    assert_eq!(
        row["retry"]["operations"],
        serde_json::json!([0, 1, 0, 0, 0])
    );
}

/// A retry is counted when its first bytes leave, not before, and what cannot be compared is counted, too.
#[test]
fn other_protocols_are_not_compared() {
    let scene = Scene::new(LONG_WINDOW);
    let mut python = pool(&scene);
    assert_eq!(i64::from(python.errno("ask('/good/1')")), ECONNREFUSED);
    let _server = Server::with(&scene.net.server, TO, |stream| {
        let _ = std::io::copy(&mut &stream, &mut std::io::sink());
    });
    python.run("s = socket.create_connection(('10.77.0.2', 8080))");
    assert_eq!(scene.row()["retry"]["retries"], 0);
    python.run(r"s.sendall(b'\x00\x01\x02\x03')");
    let is_counted = |row: &Value| row["retry"]["retries"] == 1;
    scene.agent.wait_row(DESTINATION, "a retry", is_counted);
    // Once.
    python.run("s.close()");
    assert_eq!(scene.row()["retry"]["retries"], 1);
}

/// One that asks for nothing is counted at its end.
#[test]
fn a_dial_without_a_request_is_counted_at_its_end() {
    let scene = Scene::new(LONG_WINDOW);
    let mut python = pool(&scene);
    assert_eq!(i64::from(python.errno("ask('/good/1')")), ECONNREFUSED);
    let _server = serve(&scene);
    python.run("s = socket.create_connection(('10.77.0.2', 8080))");
    assert_eq!(scene.row()["retry"]["retries"], 0);
    python.run("s.close()");
    let is_counted = |row: &Value| row["retry"]["retries"] == 1;
    scene.agent.wait_row(DESTINATION, "a retry", is_counted);
}
