//! Programs that make all of their calls at once, in one process: tests/clients/cells.*.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    path::PathBuf,
    process::ChildStdout,
    time::Duration,
};

use tests::{
    cgroup::TestCgroup,
    clients::{java, source},
    net::Namespace,
    process::{Program, Running, python},
};

use super::{
    Ended,
    cells::{Cell, Client, Family},
};

/// A program that is ready to call.
pub struct Caller {
    process: Running,
    output: BufReader<ChildStdout>,
    cells: Vec<Cell>,
}

/// Starts what makes these calls, all of one client.
pub fn start(
    cells: Vec<Cell>,
    c_program: &PathBuf,
    group: &TestCgroup,
    namespace: &Namespace,
) -> Vec<Caller> {
    // Java's sockets are all of IPv6 or all of IPv4.
    let (four, six): (Vec<Cell>, Vec<Cell>) = cells.into_iter().partition(|cell| {
        matches!(cell.client, Client::Java | Client::Nio) && cell.family == Family::V4
    });
    let mut callers = Vec::new();
    for (cells, only_four) in [(four, true), (six, false)] {
        let Some(first) = cells.first() else { continue };
        let stack = if only_four { "4" } else { "6" };
        let program = match first.client {
            Client::C => Program::new(c_program),
            Client::Uring => Program::new(c_program).arg("uring"),
            Client::Python => python_program("blocking"),
            Client::Asyncio => python_program("asyncio"),
            Client::Node => Program::new("node").arg(source("cells.js")),
            Client::Java => java("Cells").args(["blocking", stack]),
            Client::Nio => java("Cells").args(["nio", stack]),
            other => panic!("{other:?} makes one call"),
        };
        let program = program.in_cgroup(group).in_netns(namespace).fed();
        let mut process = program.within(Duration::from_secs(120)).spawn();
        let output = BufReader::new(process.stdout.take().expect("piped"));
        callers.push(Caller {
            process,
            output,
            cells,
        });
    }
    callers
}

fn python_program(how: &str) -> Program {
    Program::new(python()).arg(source("cells.py")).arg(how)
}

impl Caller {
    /// Waits until the program runs: from here on it costs little.
    pub fn wait_ready(&mut self) {
        assert_eq!(self.line().as_deref(), Some("ready"));
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        let count = self.output.read_line(&mut line).expect("read its output");
        (count > 0).then(|| line.trim_end().to_owned())
    }

    /// Lets it make its calls.
    pub fn go(&mut self) {
        let mut input = self.process.stdin.take().expect("piped");
        for cell in &self.cells {
            let (kind, value_ms) = (cell.kind.name(), cell.value().as_millis());
            writeln!(input, "{kind} {value_ms} {} {}", cell.host(), cell.port())
                .expect("write to the program");
        }
    }

    /// How its calls ended, as it saw them.
    pub fn ends(mut self) -> Vec<(Cell, Ended)> {
        let mut ends = Vec::new();
        while let Some(line) = self.line() {
            let words: Vec<&str> = line.split(' ').collect();
            let [index, said, elapsed_us] = words[..] else {
                panic!("an unknown answer: {line}");
            };
            let cell = self.cells[index.parse::<usize>().expect("an index")];
            let waited = Duration::from_micros(elapsed_us.parse().expect("a time"));
            let ended = Ended {
                waited: vec![waited],
                said: said.to_owned(),
                lingered: Duration::ZERO,
            };
            ends.push((cell, ended));
        }
        let count = self.cells.len();
        let finished = self.process.wait();
        assert_eq!(ends.len(), count, "{finished}");
        assert_eq!(finished.code(), 0, "{finished}");
        ends
    }
}
