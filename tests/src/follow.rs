//! `backstop events --follow --json`, read while it runs.

use std::{
    io::{BufRead as _, BufReader},
    sync::mpsc::{self, Receiver},
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::process::{Program, Running};

/// Longest wait for an event.
const DEADLINE: Duration = Duration::from_secs(60);

/// A reader of events.
pub struct Follow {
    process: Running,
    lines: Receiver<Value>,
    seen: Vec<Value>,
}

impl Follow {
    /// Starts the command.
    pub fn start(program: Program) -> Self {
        let mut process = program.spawn();
        let stdout = process.stdout.take().expect("piped");
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let event = serde_json::from_str(&line)
                    .unwrap_or_else(|e| panic!("not an event: {line:?}: {e}"));
                if sender.send(event).is_err() {
                    return;
                }
            }
        });
        Self {
            process,
            lines,
            seen: Vec::new(),
        }
    }

    /// Waits for the next event that is as wanted; those before it are kept in
    /// [`Follow::seen`].
    pub fn wait(&mut self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let began = Instant::now();
        loop {
            let left = DEADLINE.saturating_sub(began.elapsed());
            let Ok(event) = self.lines.recv_timeout(left) else {
                let errors = self.process.stderr_so_far();
                panic!("no event: {what}; seen: {:#?}; stderr: {errors}", self.seen);
            };
            self.seen.push(event.clone());
            if is(&event) {
                return event;
            }
        }
    }

    /// An event that is as wanted, one of those seen already or one to come: for events that may come in any
    /// order.
    pub fn find(&mut self, what: &str, is: impl Fn(&Value) -> bool) -> Value {
        let seen = self.seen.iter().find(|event| is(event)).cloned();
        seen.unwrap_or_else(|| self.wait(what, is))
    }

    /// Waits for a change of a destination's breaker into this state.
    pub fn wait_breaker(&mut self, destination: &str, to: &str) -> Value {
        self.wait(&format!("{destination} becomes {to}"), |event| {
            event["kind"] == "breaker" && event["destination"] == destination && event["to"] == to
        })
    }

    /// Everything read so far.
    pub fn seen(&self) -> &[Value] {
        &self.seen
    }
}
