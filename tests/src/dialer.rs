//! Drives the helper program `dial`: connects on demand from one process inside a control group.

use std::{
    io::{BufRead as _, BufReader, Write as _},
    net::{IpAddr, SocketAddr},
    process::{ChildStdin, ChildStdout},
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    cgroup::TestCgroup,
    net::Namespace,
    process::{Program, Running},
};

/// The first unanswered SYN is repeated after 1 s or sooner; ours are set then.
const LATEST_OPTION: Duration = Duration::from_millis(1_500);
/// And so long a busy machine may take for it.
const BUSY: Duration = Duration::from_secs(30);

/// How one connect ended.
#[derive(Clone, Debug)]
pub struct Dialed {
    /// 0: established.
    pub errno: i32,
    /// How long it took.
    pub elapsed: Duration,
    /// TCP_USER_TIMEOUT of the socket afterwards, ms.
    pub user_timeout: u32,
}

impl Dialed {
    fn from(value: &Value) -> Self {
        Self {
            errno: value["errno"].as_i64().expect("errno") as i32,
            elapsed: Duration::from_micros(value["elapsed_us"].as_u64().expect("a time")),
            user_timeout: value["user_timeout"].as_u64().expect("an option") as u32,
        }
    }
}

/// How to connect.
#[derive(Clone, Copy, Default)]
pub struct How {
    /// `O_NONBLOCK` and poll.
    pub nonblocking: bool,
    /// By io_uring.
    pub uring: bool,
    /// The program's own TCP_USER_TIMEOUT, ms.
    pub own_timeout: Option<u32>,
    /// Bind to this first.
    pub bind: Option<SocketAddr>,
}

impl How {
    fn words(self) -> String {
        let mut words = String::new();
        if self.nonblocking {
            words += " nonblocking";
        }
        if self.uring {
            words += " uring";
        }
        if let Some(ms) = self.own_timeout {
            words += &format!(" own={ms}");
        }
        if let Some(address) = self.bind {
            words += &format!(" bind={address}");
        }
        words
    }
}

/// A running `dial`. It is killed when dropped.
pub struct Dialer {
    process: Running,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Dialer {
    /// Starts it. `binary` is `env!("CARGO_BIN_EXE_dial")`, which only a test itself can name.
    pub fn start(binary: &str, cgroup: &TestCgroup, namespace: &Namespace) -> Self {
        let program = Program::new(binary).in_cgroup(cgroup).in_netns(namespace);
        Self::from_program(program)
    }

    /// Starts it before all ordinary programs, so that it measures connects and not the machine's
    /// load.
    pub fn start_promptly(binary: &str, cgroup: &TestCgroup, namespace: &Namespace) -> Self {
        let program = Program::new(binary).in_cgroup(cgroup).in_netns(namespace);
        Self::from_program(program.promptly())
    }

    /// Starts it outside any control group of a test.
    pub fn start_outside(binary: &str, namespace: &Namespace) -> Self {
        Self::from_program(Program::new(binary).in_netns(namespace))
    }

    fn from_program(program: Program) -> Self {
        let mut process = program.fed().spawn();
        let input = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped"));
        Self {
            process,
            input,
            output,
        }
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Sends a signal to it.
    pub fn signal(&self, signal: rustix::process::Signal) {
        self.process.signal(signal);
    }

    /// Kills it.
    pub fn kill(self) {
        drop(self);
    }

    /// Gives an order without waiting for the answer, see [`Dialer::answer`].
    pub fn order(&mut self, line: &str) {
        writeln!(self.input, "{line}").expect("write to dial");
    }

    /// Waits for the answer of the oldest order not yet answered.
    pub fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("read from dial");
        serde_json::from_str(&line)
            .unwrap_or_else(|_| panic!("dial answers {line:?}: {}", self.process.stderr_so_far()))
    }

    fn ask(&mut self, line: &str) -> Value {
        self.order(line);
        self.answer()
    }

    /// One blocking connect.
    pub fn connect(&mut self, to: SocketAddr) -> Dialed {
        self.connect_how(to, How::default())
    }

    /// One connect.
    pub fn connect_how(&mut self, to: SocketAddr, how: How) -> Dialed {
        self.order_connect(to, how);
        Dialed::from(&self.answer())
    }

    /// Begins a connect; [`Dialer::dialed`] gives its end.
    pub fn order_connect(&mut self, to: SocketAddr, how: How) {
        self.order(&format!("connect {to}{}", how.words()));
    }

    /// The end of the oldest ordered connect.
    pub fn dialed(&mut self) -> Dialed {
        Dialed::from(&self.answer())
    }

    /// `count` threads connect at once; the results in no order.
    pub fn burst(&mut self, to: SocketAddr, count: usize) -> Vec<Dialed> {
        let answer = self.ask(&format!("burst {count} {to}"));
        answer
            .as_array()
            .expect("a list")
            .iter()
            .map(Dialed::from)
            .collect()
    }

    /// Begins `count` connects that do not block, and keeps the sockets; the errnos.
    pub fn open(&mut self, to: SocketAddr, count: usize, how: How) -> Vec<i32> {
        numbers(&self.ask(&format!("open {count} {to}{}", how.words())))
    }

    /// TCP_USER_TIMEOUT of every kept socket, ms.
    pub fn user_timeouts(&mut self) -> Vec<i32> {
        numbers(&self.ask("user_timeouts"))
    }

    /// Waits until the kept sockets have these values; ours come when a SYN is not answered, which
    /// shows after 1 s at the latest.
    pub fn wait_user_timeouts(&mut self, expected: &[i32]) {
        let began = Instant::now();
        loop {
            let values = self.user_timeouts();
            if values == expected {
                return;
            }
            assert!(began.elapsed() < BUSY, "{values:?} instead of {expected:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The kept sockets have these values and keep them for longer than a SYN goes unanswered
    /// before ours come.
    pub fn keep_user_timeouts(&mut self, expected: &[i32]) {
        assert_eq!(self.user_timeouts(), expected);
        self.settle(LATEST_OPTION);
        assert_eq!(self.user_timeouts(), expected);
    }

    /// Waits until all kept sockets are connected or failed; their errnos, EINPROGRESS for those
    /// that were not done in time.
    pub fn settle(&mut self, longest: Duration) -> Vec<i32> {
        numbers(&self.ask(&format!("settle {}", longest.as_millis())))
    }

    /// Closes the kept sockets.
    pub fn close(&mut self) {
        self.ask("close");
    }

    /// Connects to `count` addresses from `first` on, one after the other; how often each errno
    /// came, as an object.
    pub fn sweep(&mut self, first: IpAddr, port: u16, count: usize) -> Value {
        self.ask(&format!("sweep {count} {}", SocketAddr::new(first, port)))
    }

    /// Begins to connect once a millisecond, until [`Dialer::enough`].
    pub fn begin_steady(&mut self, to: SocketAddr) {
        self.order(&format!("steady {to}"));
    }

    /// Ends that: how often each errno came, and when the first and the last were established.
    pub fn enough(&mut self) -> Value {
        self.order("enough");
        let answer = self.answer();
        self.answer();
        answer
    }

    /// Connects over and over until it is established; the time that took and the number of
    /// connects that were refused before.
    pub fn until_established(&mut self, to: SocketAddr, longest: Duration) -> Option<Duration> {
        let answer = self.ask(&format!("until {} {to}", longest.as_millis()));
        answer["elapsed_us"].as_u64().map(Duration::from_micros)
    }
}

fn numbers(value: &Value) -> Vec<i32> {
    let list = value
        .as_array()
        .unwrap_or_else(|| panic!("not a list: {value}"));
    list.iter()
        .map(|number| number.as_i64().expect("a number") as i32)
        .collect()
}
