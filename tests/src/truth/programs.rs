//! The programs.

use std::{
    path::PathBuf,
    sync::Mutex,
    time::{Duration, Instant},
};

use serde_json::Value;

use super::{Cell, Kind, Own, Scene, TO, proxies};
use crate::{
    clients,
    process::{Program, find, python},
};

/// A program, and how often it retries.
#[derive(Debug)]
pub struct Caller {
    /// Its name in the table.
    pub name: &'static str,
    /// How it calls.
    pub kind: Kind,
    /// Retries of an operation at most; 0: it never retries.
    pub retries: u32,
    /// Calls a second that it is measured at.
    pub rates: &'static [u32],
    /// What is needed for it.
    pub needs: Need,
    /// Runs it to its end.
    pub run: fn(&Scene, &Cell) -> Own,
}

/// What must be there.
#[derive(Clone, Copy, Debug)]
pub enum Need {
    /// A program.
    Program(&'static str),
    /// A module of the Python of the tests.
    Python(&'static str),
    /// A package for Node.
    Node(&'static str),
}

impl Need {
    /// Whether it is there.
    pub fn is_met(self) -> bool {
        let imports = |program: Program| program.run().status.success();
        match self {
            Self::Program(name) => find(name).is_some(),
            Self::Python(module) => {
                imports(Program::new(interpreter()).args(["-c", &format!("import {module}")]))
            }
            Self::Node(package) => {
                find("node").is_some()
                    && imports(Program::new("node").args(["-e", &format!("require('{package}')")]))
            }
        }
    }
}

impl std::fmt::Display for Need {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Program(name) => write!(out, "the program {name}"),
            Self::Python(module) => write!(out, "the Python module {module}"),
            Self::Node(package) => write!(out, "the Node package {package}"),
        }
    }
}

const SLOW: &[u32] = &[10, 100];
const QUICK: &[u32] = &[100, 2_000];

macro_rules! callers {
    ($($name:literal, $kind:ident, $retries:literal, $rates:expr, $need:ident $what:literal, $run:expr;)*) => {
        &[$(Caller {
            name: $name,
            kind: Kind::$kind,
            retries: $retries,
            rates: $rates,
            needs: Need::$need($what),
            run: $run,
        }),*]
    };
}

/// All of them.
pub static CALLERS: &[Caller] = callers! {
    "Python, one after the other", Sequential, 0, SLOW, Program "python3", |s, c| by_python(s, c, "sequence");
    "Python, 20 threads", ThreadPerRequest, 0, SLOW, Program "python3", |s, c| by_python(s, c, "threads");
    "Python, a thread for each call", ThreadPerRequest, 0, SLOW, Program "python3", |s, c| by_python(s, c, "thread_each");
    "Python, 20 kept connections", ThreadPerRequest, 0, SLOW, Program "python3", |s, c| by_python(s, c, "kept");
    "Python, a crawler", ThreadPerRequest, 0, SLOW, Program "python3", |s, c| by_python(s, c, "crawl");
    "Python, asyncio", EventLoop, 0, &[10, 100, 500], Program "python3", |s, c| by_python(s, c, "asyncio");
    "aiohttp", EventLoop, 0, SLOW, Python "aiohttp", |s, c| by_python(s, c, "aiohttp");
    "libpq, three hosts", Sequential, 0, SLOW, Python "psycopg2", |s, c| by_python(s, c, "libpq");
    "Node, http", EventLoop, 0, SLOW, Program "node", |s, c| by_node(s, c, "http");
    "Node, fetch", EventLoop, 0, SLOW, Program "node", |s, c| by_node(s, c, "fetch");
    "nginx, proxy_next_upstream off", EventLoop, 0, SLOW, Program "nginx", proxies::nginx;
    "hey, 20 workers", Go, 0, QUICK, Program "hey", hey;
    "Go, 20 goroutines", Go, 0, QUICK, Program "go", by_go;
    "Rust, 20 threads", ThreadPerRequest, 0, QUICK, Program "python3", |s, c| by_rust(s, c, "threads");
    "tokio, 20 tasks", Tokio, 0, QUICK, Program "python3", |s, c| by_rust(s, c, "tokio");
    "curl --retry 3", Sequential, 3, &[10], Program "curl", curl;
    "wget --tries=4", Sequential, 3, &[10], Program "wget", wget;
    "urllib3 Retry(3)", Sequential, 3, SLOW, Python "urllib3", |s, c| by_python(s, c, "urllib3");
    "tenacity, stop_after_attempt(4)", Sequential, 3, SLOW, Python "tenacity", |s, c| by_python(s, c, "tenacity");
    "tenacity, wait_random(0, 50 ms)", Sequential, 3, SLOW, Python "tenacity", |s, c| by_python(s, c, "tenacity_waits");
    "redis-py Retry(NoBackoff(), 3)", Sequential, 3, SLOW, Python "redis", |s, c| by_python(s, c, "redis");
    "Java HttpURLConnection, a loop", Sequential, 3, SLOW, Program "javac", |s, c| by_java(s, c, "connection");
    "Java HttpClient, a loop", EventLoop, 3, SLOW, Program "javac", |s, c| by_java(s, c, "client");
    "Python, a thread for each call, a loop", ThreadPerRequest, 3, SLOW, Program "python3", |s, c| by_python(s, c, "thread_each");
    "Python, 20 threads, a loop", ThreadPerRequest, 3, SLOW, Program "python3", |s, c| by_python(s, c, "threads");
    "Rust, 20 threads, a loop", ThreadPerRequest, 3, QUICK, Program "python3", |s, c| by_rust(s, c, "threads");
    "aiohttp, a loop", EventLoop, 3, SLOW, Python "aiohttp", |s, c| by_python(s, c, "aiohttp");
    "Node, fetch, a loop", EventLoop, 3, SLOW, Program "node", |s, c| by_node(s, c, "fetch");
    "Node, undici RetryAgent", EventLoop, 3, SLOW, Node "undici", |s, c| by_node(s, c, "undici");
    "nginx proxy_next_upstream", EventLoop, 3, SLOW, Program "nginx", proxies::nginx;
    "HAProxy retries 3", EventLoop, 3, SLOW, Program "haproxy", proxies::haproxy;
    "Go, 20 goroutines, a loop", Go, 3, QUICK, Program "go", by_go;
    "tokio, 20 tasks, a loop", Tokio, 3, QUICK, Program "python3", |s, c| by_rust(s, c, "tokio");
};

/// HOST PORT SECONDS RATE RETRIES.
fn told(scene: &Scene, cell: &Cell, program: Program) -> Own {
    let words = [
        TO.ip().to_string(),
        TO.port().to_string(),
        cell.seconds.to_string(),
        cell.rate.to_string(),
        cell.caller.retries.to_string(),
    ];
    let output = scene.client(program.args(words), cell.seconds).run().good();
    let told: Value = serde_json::from_str(&output).expect("counts");
    let number = |key: &str| told[key].as_u64().expect("a count");
    Own {
        calls: number("calls"),
        retries: number("retries"),
    }
}

fn by_python(scene: &Scene, cell: &Cell, how: &str) -> Own {
    let program = Program::new(interpreter()).arg(clients::source("truth.py"));
    told(scene, cell, program.arg(how))
}

/// The Python with the packages from PyPI, where there is one.
fn interpreter() -> PathBuf {
    std::env::var_os("BACKSTOP_PYTHON").map_or_else(|| python().to_owned(), PathBuf::from)
}

fn by_node(scene: &Scene, cell: &Cell, how: &str) -> Own {
    let program = Program::new("node").arg(clients::source("truth.js"));
    told(scene, cell, program.arg(how))
}

fn by_java(scene: &Scene, cell: &Cell, how: &str) -> Own {
    told(scene, cell, clients::java("Truth").arg(how))
}

fn by_rust(scene: &Scene, cell: &Cell, how: &str) -> Own {
    told(
        scene,
        cell,
        Program::new(clients::profile().join("truthful")).arg(how),
    )
}

fn by_go(scene: &Scene, cell: &Cell) -> Own {
    let program = Program::new(go_program());
    told(scene, cell, program.arg("20"))
}

/// Builds the client in Go once.
fn go_program() -> PathBuf {
    static ONE_AT_A_TIME: Mutex<bool> = Mutex::new(false);
    let built = clients::profile().join("truth-go");
    let mut is_built = ONE_AT_A_TIME.lock().expect("no panic holds it");
    if !*is_built {
        Program::new("go")
            .args(["build", "-o"])
            .arg(&built)
            .arg(clients::source("truth.go"))
            .env("GOFLAGS", "-mod=mod")
            .env("CGO_ENABLED", "0")
            .env("GOCACHE", clients::profile().join("go-cache"))
            .within(Duration::from_secs(300))
            .run()
            .good();
        *is_built = true;
    }
    built
}

/// A process for each call, begun steadily.
fn each(scene: &Scene, cell: &Cell, program: fn() -> Program, log: &str) -> Own {
    let end = Instant::now() + Duration::from_secs(cell.seconds);
    let mut all = Vec::new();
    let mut next = Instant::now();
    while next < end {
        let program = program().arg(format!("http://{TO}/{}", all.len()));
        all.push(scene.client(program, cell.seconds).spawn());
        next += Duration::from_secs(1) / cell.rate;
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    let calls = all.len() as u64;
    let logged = all.into_iter().map(|one| {
        let finished = one.wait();
        finished.stderr.matches(log).count() as u64
    });
    Own {
        calls,
        retries: logged.sum(),
    }
}

fn curl(scene: &Scene, cell: &Cell) -> Own {
    let program = || {
        let words = [
            "-q",
            "--no-progress-meter",
            "--retry",
            "3",
            "--retry-delay",
            "1",
        ];
        let program = Program::new("curl").args(words);
        program.args(["--retry-all-errors", "-o", "/dev/null"])
    };
    each(scene, cell, program, "Will retry in")
}

fn wget(scene: &Scene, cell: &Cell) -> Own {
    let program = || {
        let words = ["--no-config", "--tries=4", "--waitretry=1"];
        let program = Program::new("wget").args(words);
        program.args(["--retry-on-http-error=503", "-O", "/dev/null"])
    };
    each(scene, cell, program, "(try:")
}

/// It asks for one thing only, and never again for what has failed.
fn hey(scene: &Scene, cell: &Cell) -> Own {
    let each = f64::from(cell.rate) / 20.0;
    let program = Program::new("hey").args([
        "-z".to_owned(),
        format!("{}s", cell.seconds),
        "-c".into(),
        "20".into(),
        "-q".into(),
        each.to_string(),
        "-disable-keepalive".into(),
        format!("http://{TO}/"),
    ]);
    scene.client(program, cell.seconds).run().good();
    Own {
        calls: scene.server.seen().requests,
        retries: 0,
    }
}
