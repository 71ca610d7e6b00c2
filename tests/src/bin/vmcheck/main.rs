//! Checks the real binary on whatever kernel this runs: load, attach, adopt, refuse, time out, bound, stall,
//! detach; and what the agent does to sockets of other programs.
//!
//! `vmcheck BACKSTOP` expects all of that to work; `vmcheck BACKSTOP --expect-unsupported` expects
//! `backstop run` to end with exit code 4 and one sentence. Needs nothing but a cgroup v2 mount and
//! loopback, so that a virtual machine with nothing else will do. Run by `cargo xtask vm`.
#![expect(clippy::print_stdout, reason = "its output is its result")]

mod client;

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    os::unix::{fs::MetadataExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use backstop::sockets::{
    abort::{Fate, support},
    diag::Target,
    look::{Look, Tuple},
    namespace::{Namespaces, Place},
    options::{Tightened, TimeOption, Wanted, reach},
};
use rustix::net::sockopt;

use client::{Talker, connect, fetch, receive, serve, talk};

/// A guest without hardware virtualisation is slow: connects may end this much late.
const LATE: Duration = Duration::from_millis(150);

/// For what the agent sees at once, in a slow guest.
const SOON: Duration = Duration::from_secs(30);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    let result = match args.iter().map(String::as_str).collect::<Vec<_>>()[1..] {
        ["connect", address] => connect(address),
        ["talk", address] => talk(address),
        ["receive", address] => receive(address),
        ["fetch", address] => fetch(address),
        [backstop] => supported(Path::new(backstop)),
        [backstop, "--expect-unsupported"] => unsupported(Path::new(backstop)),
        _ => Err(anyhow::anyhow!(
            "usage: vmcheck BACKSTOP [--expect-unsupported]"
        )),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("vmcheck: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn unsupported(backstop: &Path) -> Result<()> {
    let output = Command::new(backstop)
        .args([
            "run",
            "--listen",
            "none",
            "--state-dir",
            "/tmp/vmcheck-state",
        ])
        .args(["--socket", "/tmp/vmcheck.sock"])
        .output()
        .with_context(|| format!("run {}", backstop.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    println!("{}", said.trim());
    ensure!(
        output.status.code() == Some(4),
        "exit code {:?}, want 4",
        output.status.code()
    );
    ensure!(output.stdout.is_empty(), "it said something on stdout");
    let lines = said
        .lines()
        .filter(|line| line.starts_with("backstop: "))
        .count();
    ensure!(lines == 1, "want one sentence");
    Ok(())
}

fn supported(backstop: &Path) -> Result<()> {
    let mut check = Check::start(backstop)?;
    check.adoption()?;
    check.refusal()?;
    check.timeout()?;
    check.option()?;
    check.stall()?;
    check.end()?;
    sockets()
}

struct Check {
    backstop: PathBuf,
    cgroup: PathBuf,
    agent: Child,
    /// Two clients that were connected before the agent's start, and their server.
    talkers: Vec<Talker>,
    server: SocketAddr,
}

const SOCKET: &str = "/tmp/vmcheck.sock";
/// Where receives are bounded by an option.
const BOUNDED: &str = "127.0.0.9";
/// Where answers may stop in the middle, and for how long.
const STALLING: &str = "127.0.0.10";
const STALL: Duration = Duration::from_millis(400);
const CONFIG: &str = "[defaults.timeouts]
connect = \"700ms\"
[defaults.breaker]
redial = false
[[policy]]
name = \"bounded\"
destinations = [\"127.0.0.9\"]
timeouts = { read = \"300ms\", read_action = \"option\" }
[[policy]]
name = \"stalling\"
destinations = [\"127.0.0.10\"]
timeouts = { read = \"400ms\" }
";

impl Check {
    fn start(backstop: &Path) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").context("read the mount table")?;
        let mount = mounts
            .lines()
            .filter(|line| line.contains(" - cgroup2 "))
            .find_map(|line| line.split(' ').nth(4))
            .context("find a cgroup v2 mount")?;
        let cgroup = Path::new(mount).join(format!("vmcheck-{}", std::process::id()));
        fs::create_dir(&cgroup).with_context(|| format!("make {}", cgroup.display()))?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let server = listener.local_addr()?;
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || serve(stream));
            }
        });
        let mut talkers = vec![
            Talker::start(&cgroup, server)?,
            Talker::start(&cgroup, server)?,
        ];
        for talker in &mut talkers {
            talker.say("GET")?;
            ensure!(talker.line()? == "19", "no answer before the start");
        }
        fs::write("/tmp/vmcheck.toml", CONFIG).context("write the configuration")?;
        let mut agent = Command::new(backstop)
            .args([
                "run",
                "--listen",
                "none",
                "--state-dir",
                "/tmp/vmcheck-state",
            ])
            .args([
                "--socket",
                SOCKET,
                "--config",
                "/tmp/vmcheck.toml",
                "--cgroup",
            ])
            .arg(&cgroup)
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("run {}", backstop.display()))?;
        let mut line = String::new();
        let stdout = agent.stdout.take().context("read the agent's stdout")?;
        BufReader::new(stdout)
            .read_line(&mut line)
            .context("wait for the agent")?;
        println!("{}", line.trim());
        let check = Self {
            backstop: backstop.to_owned(),
            cgroup,
            agent,
            talkers,
            server,
        };
        ensure!(line.starts_with("ready "), "the agent did not get ready");
        Ok(check)
    }

    /// Runs the client in the cgroup: errno and time.
    fn client(&self, address: SocketAddr) -> Result<(i32, Duration)> {
        let (errno, ms) = self.run("connect", address)?;
        Ok((errno as i32, Duration::from_millis(ms as u64)))
    }

    /// Runs this program in the cgroup: the two numbers that it prints.
    fn run(&self, what: &str, address: SocketAddr) -> Result<(i64, i64)> {
        let procs = self.cgroup.join("cgroup.procs");
        let mut command = Command::new("/proc/self/exe");
        command.args([what, &address.to_string()]);
        // SAFETY: the child only writes a file before it runs the program.
        unsafe { command.pre_exec(move || fs::write(&procs, std::process::id().to_string())) };
        let output = command.output().context("run the client")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let mut words = text.split_whitespace();
        let mut number = || words.next().and_then(|word| word.parse::<i64>().ok());
        match (number(), number()) {
            (Some(a), Some(b)) => Ok((a, b)),
            _ => bail!("the client said {text:?}"),
        }
    }

    /// A receive is bounded by SO_RCVTIMEO, and the program is told that it has set none.
    fn option(&self) -> Result<()> {
        let listener = TcpListener::bind((BOUNDED, 0))?;
        let address = listener.local_addr()?;
        std::thread::spawn(move || {
            // Longer than the timeout: a receive that nothing bounds lasts until then.
            for mut stream in listener.incoming().flatten() {
                while stream.write_all(b"y").is_ok() {
                    std::thread::sleep(Duration::from_secs(1));
                }
            }
        });
        let told = self.run("receive", address)?;
        ensure!(
            told == (0, 0),
            "told of limits that are not the program's: {told:?}"
        );
        println!("bounded by an option: EAGAIN, and the program is told that it has set none");
        Ok(())
    }

    /// An answer that stops before the end of its Content-Length is ended.
    fn stall(&self) -> Result<()> {
        let listener = TcpListener::bind((STALLING, 0))?;
        let address = listener.local_addr()?;
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let _ = stream.read(&mut [0; 64]);
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf");
                let _ = stream.read(&mut [0; 64]);
            }
        });
        let (errno, ms) = self.run("fetch", address)?;
        println!("stall of 400 ms: errno {errno} after {ms} ms");
        ensure!(
            errno == i64::from(libc::ECONNABORTED),
            "errno {errno}, want ECONNABORTED"
        );
        let took = Duration::from_millis(ms as u64);
        ensure!(
            took >= STALL && took <= STALL * 3 / 2 + SOON,
            "took {took:?}"
        );
        let row = self.status(address)?;
        let counted = (&row["responses"], &row["failures"]["read_timeout"]);
        ensure!(counted == (&1.into(), &1.into()), "counted {counted:?}");
        Ok(())
    }

    fn status(&self, address: SocketAddr) -> Result<serde_json::Value> {
        let output = Command::new(&self.backstop)
            .args(["status", &address.to_string(), "--json", "--socket", SOCKET])
            .output()
            .context("ask for the status")?;
        let envelope: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("read the status")?;
        Ok(envelope["destinations"][0].clone())
    }

    /// Connections from before the start: their later requests are counted, and what ends them is
    /// seen, whether or not this kernel tells of it before the socket's release.
    fn adoption(&mut self) -> Result<()> {
        let [first, second] = self.talkers.as_mut_slice() else {
            bail!("two clients");
        };
        // The last one is closed by the server while its answer is owed.
        first.say("GET GET GET END")?;
        for wanted in ["19", "19", "19", "0"] {
            let got = first.line()?;
            ensure!(got == wanted, "an answer of {got} bytes, want {wanted}");
        }
        second.say("PUT")?;
        let row = self.wait_status("an answer owed", |row| row["in_flight"] != 0)?;
        ensure!(row["attempts"] == 0, "attempts {}", row["attempts"]);
        // One ends by itself, one is killed.
        self.talkers.clear();
        let row = self.wait_status("the end", |row| row["in_flight"] == 0)?;
        for (key, wanted) in [("responses", 3), ("abandoned", 1), ("stale", 0)] {
            ensure!(row[key] == wanted, "{key} {}", row[key]);
        }
        ensure!(
            row["failures"]["closed_early"] == 1,
            "failures {}",
            row["failures"]
        );
        println!("adopted: 3 answers, 1 closed early, 1 abandoned");
        Ok(())
    }

    fn wait_status(
        &self,
        what: &str,
        is: impl Fn(&serde_json::Value) -> bool,
    ) -> Result<serde_json::Value> {
        let begin = Instant::now();
        loop {
            let row = self.status(self.server)?;
            if is(&row) {
                return Ok(row);
            }
            ensure!(begin.elapsed() < SOON, "{what}: {row}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Five real refusals, then one by Backstop.
    fn refusal(&self) -> Result<()> {
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        for i in 0..6 {
            let (errno, _) = self.client(address)?;
            ensure!(errno == libc::ECONNREFUSED, "connect {i}: errno {errno}");
        }
        let row = self.status(address)?;
        ensure!(row["state"] == "open", "the breaker is {}", row["state"]);
        ensure!(
            row["failures"]["refused"] == 5,
            "failures {}",
            row["failures"]
        );
        ensure!(
            row["rejected"]["breaker"] == 1,
            "rejected {}",
            row["rejected"]
        );
        println!("refused: 5 by the network, 1 by the breaker");
        Ok(())
    }

    /// A listener whose queue is full lets SYNs go unanswered.
    fn timeout(&self) -> Result<()> {
        // SAFETY: plain system calls on a socket of our own.
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        {
            use std::os::fd::AsRawFd as _;
            // SAFETY: the descriptor is open.
            let result = unsafe { libc::listen(listener.as_raw_fd(), 0) };
            ensure!(result == 0, "listen again with a backlog of 0");
        }
        let mut queued = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_millis(300)) {
            queued.push(stream);
            ensure!(
                queued.len() < 10,
                "the queue of a backlog of 0 does not fill"
            );
        }
        let (errno, took) = self.client(address)?;
        println!(
            "timeout of 700 ms: errno {errno} after {} ms",
            took.as_millis()
        );
        ensure!(errno == libc::ETIMEDOUT, "errno {errno}, want ETIMEDOUT");
        let wanted = Duration::from_millis(700);
        ensure!(
            took >= wanted - Duration::from_millis(5) && took <= wanted + LATE,
            "took {took:?}"
        );
        let row = self.status(address)?;
        ensure!(
            row["failures"]["connect_timeout"] == 1,
            "failures {}",
            row["failures"]
        );
        ensure!(row["in_flight"] == 0, "in_flight {}", row["in_flight"]);
        Ok(())
    }

    fn end(mut self) -> Result<()> {
        // SAFETY: our own child, not waited for yet.
        unsafe { libc::kill(self.agent.id() as i32, libc::SIGTERM) };
        let status = self.agent.wait().context("wait for the agent")?;
        ensure!(status.code() == Some(0), "the agent ended with {status}");
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        for _ in 0..7 {
            ensure!(
                self.client(address)?.0 == libc::ECONNREFUSED,
                "after the stop"
            );
        }
        println!("stopped");
        Ok(())
    }
}

/// What the agent does to sockets of others, here to our own, from another network namespace.
fn sockets() -> Result<()> {
    support().context("end a socket")?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (mut server, _) = listener.accept()?;
    let target = Target {
        tuple: Tuple::new(client.local_addr()?, client.peer_addr()?, 0),
        cookie: sockopt::socket_cookie(&client)?,
    };
    let inode = fs::metadata("/proc/self/ns/net")?.ino() as u32;
    let (look, fates) = std::thread::spawn(move || -> Result<(Option<Look>, Vec<Fate>)> {
        // SAFETY: a plain system call that concerns this thread.
        let result = unsafe { libc::unshare(libc::CLONE_NEWNET) };
        ensure!(result == 0, "make a network namespace");
        let pids = [std::process::id()];
        let place = Place { inode, pids: &pids };
        Namespaces::default().diag(place, |diag| {
            let other = Target {
                cookie: target.cookie + 1,
                ..target
            };
            let fates = diag.abort(&[other], |_| true);
            Ok((diag.look(&target)?, fates))
        })?
    })
    .join()
    .expect("no panic")?;
    ensure!(
        matches!(fates[..], [Fate::Gone]),
        "another cookie: {fates:?}"
    );
    let look = look.context("find the socket")?;
    let tcp = look.tcp.context("details of the socket")?;
    ensure!(look.cgroup_id != 0, "no control group: {look:?}");

    let wanted = Wanted {
        inode: look.inode,
        cookie: look.cookie,
        spot: None,
    };
    let limit = Duration::from_millis(100);
    let set = reach(&[wanted], [std::process::id()], |_, socket| {
        socket.tighten(TimeOption::Receive, limit)
    });
    ensure!(
        matches!(set.results[..], [Some(Ok(Tightened::Ours(_)))]),
        "{set:?}"
    );
    let errno = |error: std::io::Error| error.raw_os_error().unwrap_or(0);
    let timed_out = client.read(&mut [0]).map_err(errno);
    ensure!(timed_out == Err(libc::EAGAIN), "SO_RCVTIMEO: {timed_out:?}");

    let fates = Namespaces::default().diag(Place { inode, pids: &[] }, |diag| {
        diag.abort(&[target], |look| !look.has_unread())
    })?;
    ensure!(matches!(fates[..], [Fate::Aborted]), "{fates:?}");
    let aborted = client.read(&mut [0]).map_err(errno);
    ensure!(aborted == Err(libc::ECONNABORTED), "abort: {aborted:?}");
    let reset = server.read(&mut [0]).map_err(errno);
    ensure!(reset == Err(libc::ECONNRESET), "the peer: {reset:?}");
    let window = tcp.receive_window;
    println!("socket seen (own window {window:?}), limited, ended from outside");
    Ok(())
}

impl Drop for Check {
    fn drop(&mut self) {
        let _ = self.agent.kill();
        let _ = self.agent.wait();
        let _ = fs::remove_dir(&self.cgroup);
    }
}
