//! Real programs whose retries are known: those that the server has served beyond the operations asked for.

use std::{fs, net::TcpStream};

use tests::{
    clients, http, need,
    process::{Program, find},
    wait,
};

use super::{DESTINATION, LONG, ONLY_COUNTS, SOON, Scene, TO, number};

/// So many operations.
const OPERATIONS: u64 = 60;
/// Time between two of them, ms.
const PAUSE_MS: u64 = 50;
/// So many of a hundred requests fail.
const PERCENT: u64 = 30;
/// Where a proxy listens.
const PROXY: &str = "127.0.0.1:8000";

/// Asks for `least` of a hundred retries to be seen, and for hardly any fresh call to be taken for one.
#[track_caller]
fn judge(scene: &Scene, program: &str, operations: u64, least: u64) {
    let row = scene.row();
    let attempts = number(&row["attempts"]);
    let (truth, seen) = (attempts - operations, number(&row["retry"]["retries"]));
    println!("{program}, {PERCENT} % fail: {seen} of {truth} retries seen");
    assert!(truth >= 10, "{truth}: {row:#}");
    assert!(seen * 100 >= truth * least, "{seen} of {truth}: {row:#}");
    assert!(
        seen <= truth + operations / 50,
        "{seen} of {truth}: {row:#}"
    );
}

/// A program that makes all operations itself.
#[track_caller]
fn makes_all(name: &str, program: Program, least: u64) {
    let scene = Scene::new(ONLY_COUNTS);
    let _server = scene.server(PERCENT);
    let words = [
        TO.ip().to_string(),
        TO.port().to_string(),
        OPERATIONS.to_string(),
        "2".to_owned(),
        PAUSE_MS.to_string(),
    ];
    program
        .args(words)
        .in_cgroup(&scene.group)
        .in_netns(&scene.net.client)
        .within(LONG)
        .run()
        .good();
    judge(&scene, name, OPERATIONS, least);
}

#[test]
fn node() {
    need!("node");
    let program = Program::new("node").arg(clients::source("retrying.js"));
    // It dials again before it has closed what failed; then it cannot be told.
    makes_all("Node, a loop", program, 0);
}

#[test]
fn java() {
    need!("java", "javac");
    makes_all("Java, a loop", clients::java("Retrying"), 90);
}

/// One process for each operation.
#[track_caller]
fn each_by_its_own(name: &str, program: impl Fn() -> Program, operations: u64) {
    let scene = Scene::new(ONLY_COUNTS);
    let _server = scene.server(PERCENT);
    let all: Vec<_> = (0..operations)
        .map(|_| {
            program()
                .in_cgroup(&scene.group)
                .in_netns(&scene.net.client)
                .within(LONG)
                .spawn()
        })
        .collect();
    for one in all {
        one.wait();
    }
    judge(&scene, name, operations, 90);
}

#[test]
fn curl() {
    need!("curl");
    let words = ["-q", "-sS", "--retry", "3", "--retry-delay", "1"];
    let url = format!("http://{TO}/");
    let curl = || {
        let program = Program::new("curl").args(words);
        program.arg("--retry-all-errors").arg(&url)
    };
    each_by_its_own("curl --retry 3", curl, 40);
}

#[test]
fn wget() {
    need!("wget");
    let words = ["--no-config", "--tries=4", "--waitretry=1"];
    let url = format!("http://{TO}/");
    let wget = || {
        let program = Program::new("wget").args(words);
        program.args(["--retry-on-http-error=503", "-O", "-", &url])
    };
    each_by_its_own("wget --tries=4", wget, 40);
}

/// A proxy that tries again what it is asked once.
#[track_caller]
fn proxy(name: &str, program: &str, config: &dyn Fn(&str) -> String, words: &[&str], least: u64) {
    let scene = Scene::new(ONLY_COUNTS);
    let _server = scene.server(PERCENT);
    let directory = tempfile::tempdir().expect("a directory");
    let at = directory.path().display().to_string();
    let file = directory.path().join("config");
    fs::write(&file, config(&at)).expect("write the configuration");
    let proxy = Program::new(find(program).expect("installed"))
        .args(words)
        .arg(&file)
        .in_cgroup(&scene.group)
        .in_netns(&scene.net.client)
        .within(LONG)
        .spawn();
    let ask = || {
        scene.net.client.enter(|| {
            let stream = TcpStream::connect(PROXY).ok()?;
            http::request(stream, "GET", "/").ok()
        })
    };
    wait::until("the proxy to listen", SOON, ask);
    for _ in 1..OPERATIONS {
        std::thread::sleep(std::time::Duration::from_millis(PAUSE_MS));
        assert!(ask().is_some(), "{}", proxy.stderr_so_far());
    }
    judge(&scene, name, OPERATIONS, least);
}

#[test]
fn nginx() {
    need!("nginx");
    let config = |at: &str| {
        format!(
            "daemon off;\nworker_processes 1;\npid {at}/pid;\nerror_log {at}/error.log;\n\
             events {{ worker_connections 64; }}\n\
             http {{\n\
               access_log off;\n\
               client_body_temp_path {at}/body;\n\
               proxy_temp_path {at}/proxy;\n\
               fastcgi_temp_path {at}/fastcgi;\n\
               uwsgi_temp_path {at}/uwsgi;\n\
               scgi_temp_path {at}/scgi;\n\
               upstream twice {{ server {DESTINATION} max_fails=0; server {DESTINATION} max_fails=0; }}\n\
               server {{ listen {PROXY}; location / {{\n\
                 proxy_pass http://twice; proxy_next_upstream error timeout http_503; }} }}\n\
             }}\n"
        )
    };
    proxy(
        "nginx proxy_next_upstream",
        "nginx",
        &config,
        &["-e", "stderr", "-c"],
        90,
    );
}

#[test]
fn haproxy() {
    need!("haproxy");
    let config = |_: &str| {
        format!(
            "defaults\n  mode http\n  timeout connect 500ms\n  timeout client 5s\n  timeout server 5s\n\
             \u{20} retries 3\n  retry-on all-retryable-errors\n  http-reuse never\n\
             listen proxy\n  bind {PROXY}\n  option http-server-close\n  server one {DESTINATION}\n"
        )
    };
    proxy("HAProxy retries", "haproxy", &config, &["-db", "-f"], 90);
}

/// Another port is another destination.
#[test]
fn several_hosts_are_no_retries() {
    need!("psql");
    let scene = Scene::new(ONLY_COUNTS);
    for _ in 0..10 {
        let hosts = "host=10.77.0.2,10.77.0.2,10.77.0.2 port=8080,8081,8082 connect_timeout=5";
        let finished = Program::new("psql")
            .args(["-w", "-c", "select 1", hosts])
            .in_cgroup(&scene.group)
            .in_netns(&scene.net.client)
            .within(LONG)
            .run();
        assert_ne!(finished.code(), 0, "{finished}");
    }
    let row = scene.row();
    println!(
        "libpq, several hosts, all fail: {} of 10 taken for retries",
        row["retry"]["retries"]
    );
    assert_eq!(
        (&row["attempts"], &row["retry"]["retries"]),
        (&10.into(), &0.into()),
        "{row:#}"
    );
}
