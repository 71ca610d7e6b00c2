//! The near end of a load process (see `worker`).

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    os::{fd::AsRawFd as _, unix::process::CommandExt as _},
    path::Path,
    process::{ChildStdin, ChildStdout, Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

use super::{
    lab::{self, Guarded, Running},
    worker::LISTENER,
};

/// A process in a cgroup that makes connections when told so.
pub struct Load {
    // Before the guard: a load process ends when nobody can give it orders any more.
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    _process: Guarded,
    /// Port of its own listener, which belongs to no measured cgroup.
    pub port: u16,
    listener: Option<TcpListener>,
}

impl Load {
    /// Starts one.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(cgroup: &Path, running: Running) -> Result<Self> {
        let (listener, port) = lab::listener()?;
        let mut command = Command::new("/proc/self/exe");
        command.arg("bench-load").arg(cgroup);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let fd = listener.as_raw_fd();
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(move || match libc::dup2(fd, LISTENER) {
                LISTENER => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let mut process = Guarded::start(&mut command, running, libc::SIGKILL)?;
        let orders = process
            .child()
            .stdin
            .take()
            .context("write to the load process")?;
        let answers = process
            .child()
            .stdout
            .take()
            .context("read from the load process")?;
        Ok(Self {
            orders,
            answers: BufReader::new(answers),
            _process: process,
            port,
            listener: Some(listener),
        })
    }

    /// Gives an order without waiting for the answer.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn begin(&mut self, order: &str) -> Result<()> {
        self.orders
            .write_all(format!("{order}\n").as_bytes())
            .with_context(|| format!("order the load process to {order:?}"))
    }

    /// Waits for the answer to the last order.
    ///
    /// # Errors
    /// When the order failed.
    pub fn answer(&mut self) -> Result<Vec<u64>> {
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .context("read from the load process")?;
        let numbers: Result<Vec<u64>, _> = line.split_whitespace().map(str::parse).collect();
        let numbers = numbers.with_context(|| format!("the load process says {line:?}"))?;
        ensure!(!numbers.is_empty(), "the load process has ended");
        Ok(numbers)
    }

    /// Gives an order and waits.
    ///
    /// # Errors
    /// When the order failed.
    pub fn order(&mut self, order: &str) -> Result<Vec<u64>> {
        self.begin(order)?;
        self.answer()
    }

    /// `count` connects to its own listener, each closed again; us a connect.
    ///
    /// # Errors
    /// When one of them fails.
    pub fn allowed(&mut self, count: u32) -> Result<f64> {
        let answer = self.order(&format!("allowed {count} {}", self.port))?;
        let [ns, failed] = answer[..] else {
            anyhow::bail!("an answer of {answer:?}")
        };
        ensure!(
            failed == 0,
            "{failed} of {count} connects on loopback failed"
        );
        Ok(ns as f64 / f64::from(count) / 1000.0)
    }

    /// `count` connects that must be refused; us a connect.
    ///
    /// # Errors
    /// When one of them is not.
    pub fn refused(&mut self, count: u32, port: u16) -> Result<f64> {
        let answer = self.order(&format!("refused {count} {port}"))?;
        let [ns, others] = answer[..] else {
            anyhow::bail!("an answer of {answer:?}")
        };
        ensure!(
            others == 0,
            "{others} of {count} connects to a closed port were not refused"
        );
        Ok(ns as f64 / f64::from(count) / 1000.0)
    }

    /// Closes the listener here and there: from now on its port refuses.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn close_listener(&mut self) -> Result<()> {
        self.listener = None;
        self.order("close").map(|_| ())
    }
}
