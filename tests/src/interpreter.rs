//! A Python that does what it is told, one expression a line: for sockets that `dial` does not
//! know. A value is kept with `(name := ...)`.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::Path,
    process::{ChildStdin, ChildStdout},
};

use rustix::process::Signal;
use serde_json::Value;

use crate::{
    cgroup::TestCgroup,
    net::Namespace,
    process::{Program, Running, python},
};

/// What the interpreter runs, after `-c`.
pub const LOOP: &str = r#"
import json, os, socket, sys, time
for line in sys.stdin:
    try:
        answer = {"value": eval(line)}
    except OSError as error:
        answer = {"errno": error.errno}
    print(json.dumps(answer, default=repr), flush=True)
"#;

/// A running interpreter. It is killed when dropped.
pub struct Interpreter {
    process: Running,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Interpreter {
    /// Starts one inside a control group.
    pub fn start(group: &TestCgroup, namespace: &Namespace) -> Self {
        Self::from_program(Program::new(python()).in_cgroup(group).in_netns(namespace))
    }

    /// Starts one outside any control group of a test.
    pub fn start_outside(namespace: &Namespace) -> Self {
        Self::from_program(Program::new(python()).in_netns(namespace))
    }

    fn from_program(program: Program) -> Self {
        Self::start_by(program.args(["-c", LOOP]))
    }

    /// Starts a program that ends up running [`LOOP`], with its own input and output.
    pub fn start_by(program: Program) -> Self {
        let mut process = program.fed().spawn();
        let input = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        Self {
            process,
            input,
            output,
        }
    }

    /// Kills it and waits for its end.
    pub fn kill(self) {
        drop(self);
    }

    /// Moves the process, with the sockets that it has, into a control group.
    pub fn move_to(&self, group: &Path) {
        fs::write(group.join("cgroup.procs"), self.process.pid().to_string())
            .expect("move the interpreter");
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Runs statements; what they define is there for later expressions.
    #[track_caller]
    pub fn run(&mut self, code: &str) {
        let quoted = serde_json::to_string(code).expect("text");
        self.value(&format!("exec({quoted}, globals())"));
    }

    /// The value of an expression that must not fail.
    #[track_caller]
    pub fn value(&mut self, expression: &str) -> Value {
        let mut answer = self.answer(expression);
        assert_eq!(answer["errno"], Value::Null, "{expression}");
        answer["value"].take()
    }

    /// The errno that an expression fails with; 0 when it does not.
    pub fn errno(&mut self, expression: &str) -> i32 {
        let answer = self.answer(expression);
        answer["errno"].as_i64().unwrap_or(0) as i32
    }

    /// `value` or `errno` of an expression.
    pub fn answer(&mut self, expression: &str) -> Value {
        writeln!(self.input, "{expression}").expect("write to the interpreter");
        let mut line = String::new();
        self.output
            .read_line(&mut line)
            .expect("read from the interpreter");
        serde_json::from_str(&line)
            .unwrap_or_else(|_| panic!("{expression}: {}", self.process.stderr_so_far()))
    }
}
