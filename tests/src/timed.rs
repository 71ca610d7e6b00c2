//! Real programs that ask a server many times and say how long each answer took.

use std::{net::SocketAddr, time::Duration};

use crate::{
    clients::{java, source},
    process::{Finished, Program, python},
};

/// A program that times its own requests.
#[derive(Clone, Copy)]
pub struct TimedClient {
    /// What it is called in messages.
    pub name: &'static str,
    /// Programs that must be installed for it.
    pub needs: &'static [&'static str],
    command: fn(SocketAddr, usize) -> Program,
    waits: fn(&Finished) -> Vec<Duration>,
}

impl TimedClient {
    /// The command line for so many requests on one connection.
    pub fn command(&self, to: SocketAddr, count: usize) -> Program {
        (self.command)(to, count)
    }

    /// The wait for each answer, as the program saw it.
    pub fn waits(&self, finished: &Finished) -> Vec<Duration> {
        (self.waits)(finished)
    }
}

/// Python, curl, Java, Node and hey, a Go program.
pub const TIMED: [TimedClient; 5] = [
    TimedClient {
        name: "Python",
        needs: &["python3"],
        command: |to, count| with_words(Program::new(python()).arg(source("timed.py")), to, count),
        waits: one_a_line,
    },
    TimedClient {
        name: "curl",
        needs: &["curl"],
        command: |to, count| {
            // From when the request may be sent to the first byte back.
            let format = "%{time_pretransfer} %{time_starttransfer}\\n";
            Program::new("curl")
                .args(["-q", "-sS", "-o", "/dev/null", "-w", format])
                .arg(format!("http://{to}/[1-{count}]"))
        },
        waits: |finished| {
            let lines = finished.stdout.lines();
            lines
                .map(|line| {
                    let times = line.split_once(' ').expect("two times");
                    Duration::from_secs_f64(number(times.1) - number(times.0))
                })
                .collect()
        },
    },
    TimedClient {
        name: "Java",
        needs: &["java", "javac"],
        command: |to, count| with_words(java("Timed"), to, count),
        waits: one_a_line,
    },
    TimedClient {
        name: "Node",
        needs: &["node"],
        command: |to, count| with_words(Program::new("node").arg(source("timed.js")), to, count),
        waits: one_a_line,
    },
    TimedClient {
        name: "hey",
        needs: &["hey"],
        command: |to, count| {
            Program::new("hey")
                .args(["-o", "csv", "-c", "1", "-n", &count.to_string()])
                .arg(format!("http://{to}/"))
        },
        // response-time,DNS+dialup,DNS,Request-write,Response-delay,Response-read,status-code,offset
        waits: |finished| {
            let lines = finished.stdout.lines().skip(1);
            lines
                .map(|line| {
                    let delay = line.split(',').nth(4).expect("eight columns");
                    Duration::from_secs_f64(number(delay))
                })
                .collect()
        },
    },
];

fn with_words(program: Program, to: SocketAddr, count: usize) -> Program {
    let words = [to.ip().to_string(), to.port().to_string()];
    program.args(words).arg(count.to_string())
}

fn one_a_line(finished: &Finished) -> Vec<Duration> {
    let lines = finished.stdout.lines();
    lines
        .map(|line| Duration::from_secs_f64(number(line) / 1e6))
        .collect()
}

fn number(text: &str) -> f64 {
    text.parse()
        .unwrap_or_else(|_| panic!("{text:?}: a number"))
}
