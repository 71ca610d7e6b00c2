//! A running agent.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result, bail};

use super::lab::{Guarded, Lab, Running};
use crate::process;

/// An agent that is attached to the lab's cgroup; dropping it stops it in good order.
pub struct Agent {
    binary: PathBuf,
    socket: PathBuf,
    listen: String,
    process: Guarded,
}

impl Agent {
    /// As [`Agent::start`], for a load that is refused in a loop: without the spin guard, which would hold
    /// what it refuses, and without a limit of retries, which would refuse in the breaker's stead.
    pub fn start_for_loops(lab: &Lab, defaults: &str, rest: &str) -> Result<Self> {
        Self::start(
            lab,
            &format!("[defaults]\nretry = \"off\"\n{defaults}{rest}"),
        )
    }

    /// Starts one with this configuration and waits until enforcement is proven.
    ///
    /// # Errors
    /// When it does not become ready; the error holds the end of its log.
    pub fn start(lab: &Lab, configuration: &str) -> Result<Self> {
        let file = lab.folder.join("bench.toml");
        fs::write(&file, configuration).with_context(|| format!("write {}", file.display()))?;
        let state = lab.folder.join("state");
        // A pause or a verdict of the last part must not last into this one.
        let _ = fs::remove_dir_all(&state);
        let log = lab.folder.join("agent.log");
        let stderr = fs::File::create(&log).with_context(|| format!("make {}", log.display()))?;
        let socket = lab.folder.join("agent.sock");
        let mut command = Command::new(&lab.binary);
        command
            .arg("--socket")
            .arg(&socket)
            .arg("run")
            .arg("--config")
            .arg(&file);
        command
            .arg("--cgroup")
            .arg(&lab.with)
            .args(["--listen", "127.0.0.1:0"]);
        command.arg("--state-dir").arg(&state);
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr);
        let mut process = Guarded::start(&mut command, Running::default(), libc::SIGTERM)?;
        let stdout = process
            .child()
            .stdout
            .take()
            .context("read from the agent")?;
        let mut line = String::new();
        // It ends by itself, and with that this line, when it cannot become ready.
        BufReader::new(stdout)
            .read_line(&mut line)
            .context("read from the agent")?;
        let listen = line
            .split_whitespace()
            .find_map(|word| word.strip_prefix("listen="));
        let Some(listen) = listen else {
            let text = fs::read_to_string(&log).unwrap_or_default();
            let lines: Vec<&str> = text.lines().collect();
            let end = lines[lines.len().saturating_sub(5)..].join("\n");
            bail!("the agent did not become ready ({line:?}):\n{end}");
        };
        Ok(Self {
            binary: lab.binary.clone(),
            socket,
            listen: listen.to_owned(),
            process,
        })
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Runs one of its commands and returns what that prints.
    ///
    /// # Errors
    /// When the command fails.
    pub fn command(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(&self.binary);
        process::output(command.arg("--socket").arg(&self.socket).args(arguments))
    }

    /// All destinations as the control socket answers them: JSON, behind the head of the answer.
    ///
    /// # Errors
    /// When they cannot be had.
    pub fn destinations(&self) -> Result<String> {
        let what = || format!("ask {} for all destinations", self.socket.display());
        let mut stream = UnixStream::connect(&self.socket).with_context(what)?;
        let request = "GET /v1/destinations HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n\r\n";
        stream.write_all(request.as_bytes()).with_context(what)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).with_context(what)?;
        if !answer.starts_with("HTTP/1.1 200") {
            bail!("{}: {:?}", what(), answer.lines().next());
        }
        Ok(answer)
    }

    /// Its metrics.
    ///
    /// # Errors
    /// When they cannot be had.
    pub fn metrics(&self) -> Result<Metrics> {
        let what = || format!("read the agent's metrics at {}", self.listen);
        let mut stream = TcpStream::connect(&self.listen).with_context(what)?;
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .with_context(what)?;
        let request = format!(
            "GET /metrics HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n",
            self.listen
        );
        stream.write_all(request.as_bytes()).with_context(what)?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).with_context(what)?;
        if !answer.starts_with("HTTP/1.1 200") {
            bail!("{}: {:?}", what(), answer.lines().next());
        }
        Ok(Metrics(answer))
    }
}

/// A page of metrics.
pub struct Metrics(String);

impl Metrics {
    /// The value of a series without labels, or with these: written as on the page.
    ///
    /// # Errors
    /// When it is not there.
    pub fn value(&self, series: &str) -> Result<f64> {
        let line = self
            .0
            .lines()
            .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        line.and_then(|value| value.trim().parse().ok())
            .with_context(|| format!("find {series} among the agent's metrics"))
    }

    /// Sum of a metric's series that have this label, written as on the page (`reason="breaker"`).
    pub fn sum(&self, name: &str, label: &str) -> f64 {
        let series = self
            .0
            .lines()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix('{'));
        let values = series
            .filter(|series| series.contains(label))
            .filter_map(|series| series.rsplit(' ').next()?.trim().parse::<f64>().ok());
        // From plus zero: the sum of nothing is minus zero.
        values.fold(0.0, |sum, value| sum + value)
    }

    /// The buckets of a histogram without labels: upper bound in seconds, values up to it.
    pub fn buckets(&self, name: &str) -> Vec<(f64, f64)> {
        let prefix = format!("{name}_bucket{{le=\"");
        let buckets = self.0.lines().filter_map(|line| {
            let (bound, count) = line.strip_prefix(&prefix)?.split_once("\"} ")?;
            let bound = if bound == "+Inf" {
                f64::INFINITY
            } else {
                bound.parse().ok()?
            };
            Some((bound, count.trim().parse().ok()?))
        });
        buckets.collect()
    }

    /// Size of the page, bytes.
    pub fn len(&self) -> usize {
        self.0.len()
    }
}
