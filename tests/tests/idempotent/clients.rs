//! Real clients that post, and post again what has failed.

use tests::{
    clients::{has_urllib3, java, source},
    need,
    process::{Finished, Program, python},
    skip,
};

use crate::scene::{REFUSES, Scene};

/// How a client is run: with the URL, the methods, bodies and keys of two calls, one after the other.
struct Client {
    program: fn() -> Program,
    /// What it prints of a call that was refused.
    refused: &'static str,
}

/// Runs a client, and returns the lines that it prints: one for each call.
fn run(scene: &Scene, client: &Client, target: &str, calls: &[&str]) -> Vec<String> {
    let program = (client.program)();
    let done = program
        .arg(format!("http://10.77.0.2:8080{target}"))
        .args(calls)
        .in_cgroup(scene.group())
        .in_netns(&scene.net.client)
        .run();
    let lines: Vec<String> = done.stdout.lines().map(str::to_owned).collect();
    assert_eq!(lines.len(), calls.len(), "{}{}", done.stdout, done.stderr);
    lines
}

/// Two posts that are the same reach the server once; what is known not to be the same, or may be repeated, twice.
fn posts(client: &Client) {
    let scene = Scene::new(REFUSES);
    let lines = run(&scene, client, "/bad/same", &["POST {\"id\":7}"; 3]);
    for line in &lines[1..] {
        assert!(line.contains(client.refused), "{lines:?}");
    }
    assert!(!lines[0].contains(client.refused), "{lines:?}");
    assert_eq!(scene.reached("POST /bad/same"), 1, "{lines:?}");
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 2, "{row:#}");
    for (target, calls) in [
        ("/bad/others", ["POST {\"id\":7}", "POST {\"id\":8}"]),
        ("/bad/key", ["KEY {\"id\":7}"; 2]),
        ("/bad/get", ["GET"; 2]),
    ] {
        let lines = run(&scene, client, target, &calls);
        // (Some repeat by themselves what is idempotent.)
        let reached = asked(&scene, target);
        assert!(reached >= 2, "{target}: {lines:?}");
        assert!(target == "/bad/get" || reached == 2, "{target}: {lines:?}");
    }
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 2, "{row:#}");
}

/// Requests to a target that have reached the server.
fn asked(scene: &Scene, target: &str) -> usize {
    scene.reached(&format!("POST {target}")) + scene.reached(&format!("GET {target}"))
}

fn post_py(how: &str) -> Program {
    Program::new(python()).arg(source("post.py")).arg(how)
}

#[test]
fn python_http_client() {
    need!("python3");
    posts(&Client {
        program: || post_py("http.client"),
        refused: "103",
    });
}

#[test]
fn python_urllib3() {
    if !has_urllib3() {
        skip!("the Python of the tests has no urllib3");
    }
    posts(&Client {
        program: || post_py("urllib3"),
        refused: "103",
    });
}

#[test]
fn python_requests() {
    need!("python3");
    let has = Program::new(python()).args(["-c", "import requests"]).run();
    if !has.status.success() {
        skip!("the Python of the tests has no requests");
    }
    posts(&Client {
        program: || post_py("requests"),
        refused: "103",
    });
}

#[test]
fn node_fetch() {
    need!("node");
    posts(&Client {
        program: || Program::new("node").arg(source("post.js")),
        refused: "ECONNABORTED",
    });
}

#[test]
fn java_http_client() {
    need!("java", "javac");
    posts(&Client {
        program: || java("Post"),
        refused: "abort",
    });
}

/// urllib3's own retries, of a method that its user has added.
#[test]
fn urllib3_that_retries_posts() {
    if !has_urllib3() {
        skip!("the Python of the tests has no urllib3");
    }
    let scene = Scene::new(REFUSES);
    for target in ["/ill/order", "/bad/order"] {
        let client = Client {
            program: || post_py("Retry"),
            refused: "103",
        };
        let lines = run(&scene, &client, target, &["POST {\"id\":7}"]);
        assert!(lines[0].contains("103"), "{target}: {lines:?}");
        assert_eq!(scene.reached(&format!("POST {target}")), 1, "{target}");
    }
    let row = scene.row();
    assert_eq!(row["retry"]["non_idempotent_refused"], 6, "{row:#}");
}

fn curl(scene: &Scene, target: &str, data: &str, more: &[&str]) -> Finished {
    let program = Program::new("curl").args(["-q", "-sS", "--retry", "1", "--retry-delay", "1"]);
    program
        .args(["--data", data, "-H", "Content-Type: application/json"])
        .args(more)
        .arg(format!("http://10.77.0.2:8080{target}"))
        .in_cgroup(scene.group())
        .in_netns(&scene.net.client)
        .run()
}

/// curl retries after a 503, on the same connection; and, where it is told to, after whatever has failed.
#[test]
fn curl_that_retries() {
    need!("curl");
    let scene = Scene::new(REFUSES);
    let done = curl(&scene, "/ill/order", "{\"id\":7}", &[]);
    // CURLE_RECV_ERROR.
    assert_eq!(done.code(), 56, "{}", done.stderr);
    assert_eq!(scene.reached("POST /ill/order"), 1);
    let done = curl(&scene, "/bad/order", "{\"id\":7}", &["--retry-all-errors"]);
    assert_eq!(done.code(), 56, "{}", done.stderr);
    assert_eq!(scene.reached("POST /bad/order"), 1);
    // A body that is sent only when the server has said that it may be.
    let body = "x".repeat(30_000);
    let waits = ["--retry-all-errors", "-H", "Expect: 100-continue"];
    let done = curl(&scene, "/bad/long", &body, &waits);
    assert_eq!(done.code(), 56, "{}", done.stderr);
    assert_eq!(scene.reached("POST /bad/long"), 1);
    let refused = |scene: &Scene| scene.row()["retry"]["non_idempotent_refused"].as_u64();
    let before = refused(&scene);
    // (It dials once more by itself where a connection that it has kept is lost.)
    assert!(before >= Some(3), "{before:?}");
    let key = ["-H", "Idempotency-Key: 7"];
    assert_eq!(curl(&scene, "/ill/key", "{}", &key).code(), 0);
    assert_eq!(scene.reached("POST /ill/key"), 2);
    assert_eq!(refused(&scene), before);
}
