//! One program talks to one server: what most tests of exchanges begin with.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde_json::Value;

use crate::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    net::TestNet,
    outcome::{expect, judged},
    process::Program,
    server::Server,
};

/// Where the server listens.
pub const TO: SocketAddr = TestNet::server4(8080);
/// How the agent calls it.
pub const DESTINATION: &str = "10.77.0.2:8080";
/// A new connection of the program's, kept as `s`.
pub const CONNECT: &str = "(s := socket.create_connection(('10.77.0.2', 8080))) and 0";
/// The program waits for longer than the 500 ms after which a used connection counts as idle.
pub const IDLE: &str = "time.sleep(0.7)";
/// The program waits for longer than `gave_up`, also where a busy machine has made answers slow: three times
/// what a destination usually takes is not yet given up.
pub const PATIENCE: &str = "time.sleep(3)";

/// A server that the test writes, and an agent before it.
pub struct Scene {
    /// The server.
    pub server: Server,
    /// The namespaces: client and server.
    pub net: TestNet,
    /// The control group of programs.
    pub group: TestCgroup,
    /// The agent.
    pub agent: Agent,
}

impl Scene {
    /// With this configuration, and a server that does this with each connection.
    pub fn new(
        label: &str,
        config: &str,
        handler: impl Fn(TcpStream) + Send + Sync + 'static,
    ) -> Self {
        let net = TestNet::new();
        let server = Server::with(&net.server, TO, handler);
        let group = TestCgroup::new(label);
        let agent = Agent::start(&group, config);
        Self {
            server,
            net,
            group,
            agent,
        }
    }

    /// A program that has run this code.
    pub fn python(&self, code: &str) -> Interpreter {
        let mut python = Interpreter::start(&self.group, &self.net.client);
        python.run(code);
        python
    }

    /// Runs a program that ends well within a minute; what it prints.
    pub fn run(&self, program: Program) -> String {
        let program = program.in_cgroup(&self.group).in_netns(&self.net.client);
        program.within(Duration::from_secs(60)).run().good()
    }

    /// These were the outcomes.
    #[track_caller]
    pub fn expect(&self, wanted: &[(&str, u64)]) -> Value {
        expect(&self.agent, DESTINATION, wanted)
    }
}

/// A program, a server that the test writes, and an agent between them.
pub struct Talk {
    /// The server.
    pub server: Server,
    /// The namespaces: client and server.
    pub net: TestNet,
    /// The program's control group.
    pub group: TestCgroup,
    /// The agent.
    pub agent: Agent,
    /// The program.
    pub python: Interpreter,
}

impl Talk {
    /// With a server that does this with each connection.
    pub fn new(label: &str, handler: impl Fn(TcpStream) + Send + Sync + 'static) -> Self {
        Self::with(label, "", handler)
    }

    /// The same, with more in `[defaults.breaker]`.
    pub fn with(
        label: &str,
        breaker: &str,
        handler: impl Fn(TcpStream) + Send + Sync + 'static,
    ) -> Self {
        let net = TestNet::new();
        let server = Server::with(&net.server, TO, handler);
        let group = TestCgroup::new(label);
        // No call is too old to be counted, however slow the machine is.
        let config = format!("[defaults.breaker]\nwindow_age = \"30m\"\n{breaker}");
        let agent = Agent::start_for_loops(&group, &config);
        let python = Interpreter::start(&group, &net.client);
        Self {
            server,
            net,
            group,
            agent,
            python,
        }
    }

    /// With this configuration, and a program that has run this code.
    pub fn under(
        label: &str,
        config: &str,
        code: &str,
        handler: impl Fn(TcpStream) + Send + Sync + 'static,
    ) -> Self {
        let scene = Scene::new(label, config, handler);
        let python = scene.python(code);
        let Scene {
            server,
            net,
            group,
            agent,
        } = scene;
        Self {
            server,
            net,
            group,
            agent,
            python,
        }
    }

    /// Evaluates an expression that must not fail.
    #[track_caller]
    pub fn value(&mut self, expression: &str) {
        self.python.value(expression);
    }

    /// Sends a byte and gets `count` back.
    #[track_caller]
    pub fn ask(&mut self, count: usize) {
        self.value("s.sendall(b'x')");
        assert_eq!(self.python.value("len(s.recv(9))"), count);
    }

    /// These were the outcomes, and so many calls and failures of them are judged.
    #[track_caller]
    pub fn expect(&self, wanted: &[(&str, u64)], calls: (u64, u64)) -> Value {
        let row = expect(&self.agent, DESTINATION, wanted);
        assert_eq!(judged(&row), calls, "{row:#}");
        row
    }

    /// What curl says that asks the server once.
    pub fn curl(&self, options: &[&str]) -> String {
        let program = Program::new("curl").args(["-q", "-sS"]).args(options);
        let program = program.in_cgroup(&self.group).in_netns(&self.net.client);
        program.arg(format!("http://{TO}/")).run().good()
    }
}

/// Reads one byte; false at the end.
pub fn read_byte(stream: &mut TcpStream) -> bool {
    stream.read_exact(&mut [0]).is_ok()
}

/// Waits until the peer closes.
pub fn wait_end(mut stream: TcpStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

/// Answers every byte with another.
pub fn echo(mut stream: TcpStream) {
    while read_byte(&mut stream) {
        let _ = stream.write_all(b"y");
    }
}

/// Answers once; then waits for `end` and ends the connection as told.
pub fn once(end: fn(TcpStream)) -> impl Fn(TcpStream) + Send + Sync + 'static {
    move |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(b"y");
        end(stream);
    }
}
