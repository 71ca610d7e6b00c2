//! Proof that what is attached works: a connect of our own that must be refused.
//!
//! "Attach returned no error" proves little: programs have sat on wrong or dying cgroups, or been
//! taken off again by others. So a small process of ours goes into a cgroup below each attached
//! one and connects to a loopback port that the agent holds without listening. The row that
//! appears proves the hook; then the row is told to refuse with an errno that the network would
//! not give, and the second connect must end with exactly that.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddrV4},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use agent_common::{Mode, Row, Settings, Verdict, verdict::STATE_FORCED_OPEN};
use anyhow::{Context as _, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketType, bind, connect, getsockname, socket};

use crate::{
    core::{Nanos, RowId},
    kernel::{Table, clock},
};

/// Name of the hidden command that plays the canary.
pub const COMMAND: &str = "canary-connect";
/// What the canary must get; loopback never gives it by itself.
const CANARY_ERRNO: u16 = libc::EXFULL as u16;
/// Longest time for one step of the canary.
const PATIENCE: Duration = Duration::from_secs(5);

/// The row that a canary has left, to be given up by the caller.
pub struct Trace {
    /// Cgroup id of the canary's own cgroup.
    pub cgroup_id: u64,
    /// The row.
    pub row: Option<RowId>,
}

/// Proves enforcement in a cgroup. `Ok` says so; the trace is to be removed either way.
pub fn prove(table: &Table, cgroup: &Path) -> (Trace, Result<()>) {
    let mut trace = Trace {
        cgroup_id: 0,
        row: None,
    };
    let result = run(table, cgroup, &mut trace)
        .with_context(|| format!("prove enforcement in cgroup {}", cgroup.display()));
    (trace, result)
}

fn run(table: &Table, cgroup: &Path, trace: &mut Trace) -> Result<()> {
    // Bound, not listening: a connect is refused, and nobody else can take the port meanwhile.
    let held = socket(AddressFamily::INET, SocketType::STREAM, None).context("make a socket")?;
    bind(&held, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).context("bind a loopback port")?;
    let address = SocketAddrV4::try_from(getsockname(&held).context("name the loopback port")?)?;

    let nest = Nest::make(cgroup)?;
    trace.cgroup_id = nest.id;
    let mut canary = Canary::start(&nest, address.port())?;

    canary.connect()?;
    let find = || {
        table.used().find(|(_, row)| {
            row.key.cgroup_id == nest.id && row.key.port_be == address.port().to_be()
        })
    };
    let Some((id, row)) = find() else {
        bail!("a connect from there was not seen: the programs are attached but do not run");
    };
    trace.row = Some(id);
    ensure!(
        row.attempts == 1,
        "a connect from there was seen but not followed (sock_ops)"
    );
    let mode = table.mode();
    if mode == Mode::OFF {
        return Ok(());
    }
    // Whatever policy loopback has, the canary's own row has none.
    table.set_settings(
        id,
        Settings {
            flags: agent_common::row::ROW_CANARY,
            ..row.settings
        },
    );
    let verdict = Verdict {
        generation: 1,
        errno: CANARY_ERRNO,
        state: STATE_FORCED_OPEN,
    };
    table.set_verdict(id, verdict, Nanos(clock::now().0 + 60_000_000_000), 1);
    let errno = canary.connect()?;
    let (_, row): (RowId, Row) = find().context("the canary's row is gone")?;
    if mode == Mode::ENFORCE {
        ensure!(
            errno == i32::from(CANARY_ERRNO) && row.rejected_breaker == 1,
            "a connect from there was not refused (errno {errno}): is there another program on \
             the connect hooks that changes the result?"
        );
    } else {
        ensure!(
            row.would_reject_breaker == 1,
            "a connect from there was not judged"
        );
    }
    Ok(())
}

/// A cgroup below the one to be proven, removed again on drop.
struct Nest {
    path: PathBuf,
    id: u64,
}

impl Nest {
    fn make(cgroup: &Path) -> Result<Self> {
        let path = cgroup.join(format!("backstop-canary-{}", std::process::id()));
        match fs::create_dir(&path) {
            // Left over from a run that was killed: pids are used again.
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => made.with_context(|| format!("make cgroup {}", path.display()))?,
        }
        let id = fs::metadata(&path)
            .with_context(|| format!("stat {}", path.display()))?
            .ino();
        Ok(Self { path, id })
    }
}

impl Drop for Nest {
    fn drop(&mut self) {
        // A cgroup is busy for a moment after its last process has ended.
        let end = Instant::now() + Duration::from_secs(1);
        while fs::remove_dir(&self.path).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

struct Canary {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Canary {
    fn start(nest: &Nest, port: u16) -> Result<Self> {
        let mut child = Command::new("/proc/self/exe")
            .arg(COMMAND)
            .arg(&nest.path)
            .arg(port.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .context("start the canary process")?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("read from the canary")?);
        Ok(Self {
            child,
            orders,
            answers,
        })
    }

    /// Has it connect once; the errno, 0 when it was connected.
    fn connect(&mut self) -> Result<i32> {
        let orders = self.orders.as_mut().context("the canary is gone")?;
        orders.write_all(b"\n").context("order the canary")?;
        let mut fds = [rustix::event::PollFd::new(
            self.answers.get_ref(),
            rustix::event::PollFlags::IN,
        )];
        let patience = rustix::event::Timespec {
            tv_sec: PATIENCE.as_secs() as i64,
            tv_nsec: 0,
        };
        let ready =
            rustix::event::poll(&mut fds, Some(&patience)).context("wait for the canary")?;
        ensure!(
            ready > 0,
            "the canary did not answer within {} s",
            PATIENCE.as_secs()
        );
        let mut line = String::new();
        self.answers
            .read_line(&mut line)
            .context("read from the canary")?;
        line.trim()
            .parse()
            .with_context(|| format!("the canary said {line:?}"))
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.orders = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The canary process: joins the cgroup, then connects once for each line on stdin and prints the
/// errno. Returns the exit code.
pub fn play(cgroup: &Path, port: u16) -> u8 {
    let join = fs::write(cgroup.join("cgroup.procs"), std::process::id().to_string());
    if let Err(error) = join {
        let mut stderr = std::io::stderr();
        let _ = writeln!(
            stderr,
            "backstop: canary: join cgroup {}: {error}",
            cgroup.display()
        );
        return 1;
    }
    let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line).is_ok_and(|n| n > 0) {
        line.clear();
        // The socket's cgroup is that of its creation: only now it is the right one.
        let result = socket(AddressFamily::INET, SocketType::STREAM, None)
            .and_then(|socket| connect(&socket, &address));
        let errno = result.err().map_or(0, rustix::io::Errno::raw_os_error);
        let mut stdout = std::io::stdout();
        if writeln!(stdout, "{errno}")
            .and_then(|()| stdout.flush())
            .is_err()
        {
            return 1;
        }
    }
    0
}
