//! The agent under test: the real binary, with a socket, a state directory and ports of its own.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::{SocketAddr, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, mpsc},
    time::Duration,
};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    cgroup::TestCgroup,
    follow::Follow,
    http::{self, Response},
    process::{Finished, Program, Running},
    wait,
};

/// From start to the `ready` line; the machine may be busy with other tests.
const READY: Duration = Duration::from_secs(180);
/// From SIGTERM to the end.
const STOP: Duration = Duration::from_secs(60);
/// For what the agent does by itself and soon.
const SOON: Duration = Duration::from_secs(60);

/// The binary: `BACKSTOP_BIN`, else the newer of the release and debug builds beside this test.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        if let Some(path) = std::env::var_os("BACKSTOP_BIN") {
            return path.into();
        }
        let own = std::env::current_exe().expect("the path of this test");
        let target = own.ancestors().nth(3).expect("target/PROFILE/deps/TEST");
        ["release", "debug"]
            .map(|profile| target.join(profile).join("backstop"))
            .into_iter()
            .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
            .max()
            .expect("no backstop binary: cargo build --package agent, or name it in BACKSTOP_BIN")
            .1
    })
}

/// What an agent keeps between two runs: configuration, state, the path of its socket.
#[derive(Clone)]
pub struct Home(Arc<TempDir>);

impl Home {
    /// An empty one.
    pub fn new() -> Self {
        Self(Arc::new(
            tempfile::Builder::new()
                .prefix("bst-")
                .tempdir()
                .expect("a directory"),
        ))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// The agent's socket.
    pub fn socket(&self) -> PathBuf {
        self.path().join("backstop.sock")
    }

    /// The configuration file.
    pub fn config(&self) -> PathBuf {
        self.path().join("backstop.toml")
    }

    /// Replaces the configuration file, at once: who reads it meanwhile never finds it empty.
    pub fn write_config(&self, text: &str) {
        let new = self.path().join("backstop.toml.new");
        fs::write(&new, text).expect("write the configuration");
        fs::rename(new, self.config()).expect("put the configuration in place");
    }
}

impl Default for Home {
    fn default() -> Self {
        Self::new()
    }
}

/// How to run an agent.
#[derive(Clone)]
pub struct AgentOptions {
    home: Home,
    cgroups: Vec<PathBuf>,
    args: Vec<String>,
    listen: String,
}

impl AgentOptions {
    /// Watching one control group, with the built-in configuration.
    pub fn new(cgroup: &TestCgroup) -> Self {
        Self {
            home: Home::new(),
            cgroups: vec![cgroup.path().to_owned()],
            args: Vec::new(),
            listen: "127.0.0.1:0".into(),
        }
    }

    /// Watches one more.
    #[must_use]
    pub fn and(mut self, cgroup: &TestCgroup) -> Self {
        self.cgroups.push(cgroup.path().to_owned());
        self
    }

    /// With this configuration file.
    #[must_use]
    pub fn config(self, text: &str) -> Self {
        self.home.write_config(text);
        self
    }

    /// With this configuration file, in which retries are left alone: for a test that dials what fails in a
    /// loop, without a breaker that opens. The built-in limit would take that for one operation, and refuse
    /// all but its first three attempts.
    #[must_use]
    pub fn config_for_loops(self, text: &str) -> Self {
        const OFF: &str = "[defaults]\nretry = \"off\"\n";
        if text.contains("[defaults]\n") {
            self.config(&text.replacen("[defaults]\n", OFF, 1))
        } else {
            self.config(&format!("{text}\n{OFF}"))
        }
    }

    /// With more arguments.
    #[must_use]
    pub fn args(mut self, args: &[&str]) -> Self {
        self.args.extend(args.iter().map(|arg| (*arg).to_owned()));
        self
    }

    /// In the home of an agent that ran before.
    #[must_use]
    pub fn home(mut self, home: &Home) -> Self {
        self.home = home.clone();
        self
    }

    /// With this TCP listener.
    #[must_use]
    pub fn listen(mut self, listen: &str) -> Self {
        listen.clone_into(&mut self.listen);
        self
    }

    /// The command, not yet started.
    pub fn program(&self) -> Program {
        let mut program = Program::new(binary())
            .arg("run")
            .arg("--socket")
            .arg(self.home.socket())
            .arg("--state-dir")
            .arg(self.home.path().join("state"))
            .arg("--listen")
            .arg(&self.listen)
            .args(&self.args);
        for cgroup in &self.cgroups {
            program = program.arg("--cgroup").arg(cgroup);
        }
        if self.home.config().exists() {
            program = program.arg("--config").arg(self.home.config());
        }
        program.within(READY)
    }

    /// Starts it and waits for its `ready` line.
    pub fn start(&self) -> Agent {
        self.start_as(self.program())
    }

    /// As [`AgentOptions::start`], by a changed command.
    pub fn start_as(&self, program: Program) -> Agent {
        let mut process = program.spawn();
        let stdout = process.stdout.take().expect("piped");
        let (lines, first) = mpsc::channel();
        std::thread::spawn(move || {
            // Everything is read, so that the agent never waits for this end.
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = lines.send(line);
            }
        });
        let ready = first
            .recv_timeout(READY)
            .unwrap_or_else(|_| panic!("no ready line; stderr:\n{}", process.stderr_so_far()));
        assert!(ready.starts_with("ready "), "the first line is {ready:?}");
        let listen = word(&ready, "listen").and_then(|address| address.parse().ok());
        Agent {
            process,
            ready,
            listen,
            options: self.clone(),
        }
    }
}

/// The value of `key=` in the ready line.
fn word<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split(' ')
        .find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

/// An agent that is ready. It is killed when dropped.
pub struct Agent {
    process: Running,
    ready: String,
    listen: Option<SocketAddr>,
    options: AgentOptions,
}

impl Agent {
    /// Starts one with this configuration, for one control group.
    pub fn start(cgroup: &TestCgroup, config: &str) -> Self {
        AgentOptions::new(cgroup).config(config).start()
    }

    /// As [`Agent::start`], for a test that dials what fails in a loop
    /// ([`AgentOptions::config_for_loops`]).
    pub fn start_for_loops(cgroup: &TestCgroup, config: &str) -> Self {
        AgentOptions::new(cgroup).config_for_loops(config).start()
    }

    /// What it was started with.
    pub fn options(&self) -> &AgentOptions {
        &self.options
    }

    /// Its home.
    pub fn home(&self) -> &Home {
        &self.options.home
    }

    /// The `ready` line.
    pub fn ready_line(&self) -> &str {
        &self.ready
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        self.process.stderr_so_far()
    }

    /// Waits until its log has this text, which is read beside everything else: a line may be on its way.
    #[track_caller]
    pub fn wait_log(&self, text: &str) {
        wait::until(&format!("{text:?} in the log"), SOON, || {
            self.log().contains(text).then_some(())
        });
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Ends it in order; returns how it ended.
    pub fn stop(self) -> Finished {
        self.process.signal(Signal::TERM);
        let mut process = self.process;
        process.extend_deadline(STOP);
        process.wait()
    }

    /// Kills it; returns when it has ended.
    pub fn kill(self) {
        self.process.signal(Signal::KILL);
        let mut process = self.process;
        process.extend_deadline(STOP);
        process.wait();
    }

    /// Runs one of the commands that ask an agent.
    pub fn command(&self, args: &[&str]) -> Finished {
        Program::new(binary())
            .arg("--socket")
            .arg(self.home().socket())
            .args(args)
            .env("TERM", "dumb")
            .run()
    }

    /// Asks over the socket.
    pub fn request(&self, method: &str, target: &str) -> Response {
        UnixStream::connect(self.home().socket())
            .and_then(|stream| http::request(stream, method, target))
            .unwrap_or_else(|e| panic!("{method} {target}: {e}; the agent says:\n{}", self.log()))
    }

    /// Asks the TCP listener.
    pub fn get(&self, target: &str) -> Response {
        let address = self.listen.expect("an agent with a listener");
        TcpStream::connect(address)
            .and_then(|stream| http::request(stream, "GET", target))
            .unwrap_or_else(|e| panic!("GET {address}{target}: {e}"))
    }

    /// The value of a sample of /metrics whose line begins with the name and has all of `labels`.
    pub fn metric(&self, name: &str, labels: &[String]) -> Option<f64> {
        let text = self.get("/metrics").body;
        let line = text.lines().find(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with(['{', ' ']))
                && labels.iter().all(|label| line.contains(label.as_str()))
        })?;
        line.rsplit(' ').next()?.parse().ok()
    }

    /// The envelope of `status --json`.
    pub fn status(&self) -> Value {
        let response = self.request("GET", "/v1/destinations");
        assert_eq!(response.status, 200, "{}", response.body);
        serde_json::from_str(&response.body).expect("JSON")
    }

    /// All rows of a destination.
    pub fn rows(&self, destination: &str) -> Vec<Value> {
        let status = self.status();
        let rows = status["destinations"].as_array().expect("a list of rows");
        rows.iter()
            .filter(|row| row["destination"] == destination)
            .cloned()
            .collect()
    }

    /// The only row of a destination; null when there is none yet.
    pub fn row(&self, destination: &str) -> Value {
        let mut rows = self.rows(destination);
        assert!(rows.len() <= 1, "more than one row: {rows:#?}");
        rows.pop().unwrap_or_default()
    }

    /// Waits until the only row of a destination is as wanted; returns it.
    pub fn wait_row(
        &self,
        destination: &str,
        what: &str,
        mut is: impl FnMut(&Value) -> bool,
    ) -> Value {
        let mut last = Value::Null;
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait::until(&format!("{destination}: {what}"), SOON, || {
                last = self.row(destination);
                is(&last).then(|| last.clone())
            })
        }));
        result.unwrap_or_else(|panic| {
            eprintln!("the row was {last:#}\nthe agent says:\n{}", self.log());
            std::panic::resume_unwind(panic)
        })
    }

    /// Waits until the breaker of a destination's only row is in this state.
    pub fn wait_state(&self, destination: &str, state: &str) -> Value {
        self.wait_row(destination, state, |row| row["state"] == state)
    }

    /// Follows its events, beginning with those it has kept.
    pub fn follow(&self, args: &[&str]) -> Follow {
        let program = Program::new(binary())
            .arg("--socket")
            .arg(self.home().socket())
            .args(["events", "--follow", "--json"])
            .args(args);
        Follow::start(program)
    }
}

/// Panics unless attempts = established + connect failures + abandoned + pending. Only for rows
/// whose exchanges were all answered: those that were not are in the same counters.
#[track_caller]
pub fn assert_balanced(row: &Value) {
    let number = |value: &Value| value.as_u64().expect("a count");
    let failures: u64 = row["failures"]
        .as_object()
        .expect("an object")
        .values()
        .map(number)
        .sum();
    let ended = number(&row["established"]) + failures + number(&row["abandoned"]);
    assert_eq!(
        number(&row["attempts"]),
        ended + number(&row["in_flight"]),
        "{row:#}"
    );
}
