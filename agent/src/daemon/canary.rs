//! Proof that what is attached works: a connect of our own that must be refused.
//!
//! "Attach returned no error" proves little: programs have sat on wrong or dying cgroups, or been
//! taken off again by others. So a small process of ours goes into a cgroup below each attached
//! one and connects to a loopback port that the agent holds without listening. The row that
//! appears proves the hook; then the row is told to refuse with an errno that the network would
//! not give, and the second connect must end with exactly that.

use std::{
    collections::HashSet,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::{Ipv4Addr, SocketAddrV4, SocketAddrV6},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
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

/// Cgroups of canaries: their rows are nobody's business.
#[derive(Clone, Default)]
pub struct Hidden(Arc<Mutex<HashSet<u64>>>);

impl Hidden {
    fn set(&self) -> std::sync::MutexGuard<'_, HashSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this is the cgroup (id) of a canary.
    pub fn contains(&self, cgroup_id: u64) -> bool {
        self.set().contains(&cgroup_id)
    }

    /// All of them.
    pub fn all(&self) -> HashSet<u64> {
        self.set().clone()
    }

    /// Forgets one whose row is gone.
    pub fn remove(&self, cgroup_id: u64) {
        self.set().remove(&cgroup_id);
    }
}

/// What came of a proof.
pub struct Proof {
    /// The cgroup that was to be proven.
    pub cgroup: PathBuf,
    /// What was found.
    pub finding: Finding,
    /// Cgroup id of the canary's own cgroup, in [`Hidden`] until it is taken out.
    pub canary: Option<u64>,
    /// The row that the canary has left, to be given up.
    pub row: Option<RowId>,
    /// Connects by an IPv6 socket were seen, too; false where there is no IPv6.
    pub connect6: bool,
}

/// See [`Proof`].
pub enum Finding {
    /// Enforcement works there.
    Proven,
    /// Nothing can be said this time: the mode was changed meanwhile, or no row was free.
    Nothing,
    /// It does not.
    Failed(anyhow::Error),
}

/// Proves enforcement in a cgroup. Takes some 20 ms, at worst [`PATIENCE`] a step.
pub fn prove(table: &Table, hidden: &Hidden, cgroup: &Path) -> Proof {
    let mut proof = Proof {
        cgroup: cgroup.to_owned(),
        finding: Finding::Nothing,
        canary: None,
        row: None,
        connect6: false,
    };
    let found = run(table, hidden, cgroup, &mut proof)
        .with_context(|| format!("prove enforcement in cgroup {}", cgroup.display()));
    proof.finding = match found {
        Ok(true) => Finding::Proven,
        Ok(false) => Finding::Nothing,
        Err(error) => Finding::Failed(error),
    };
    proof
}

/// True when enforcement is proven, false when nothing can be said.
fn run(table: &Table, hidden: &Hidden, cgroup: &Path, proof: &mut Proof) -> Result<bool> {
    // Bound, not listening: a connect is refused, and nobody else can take the port meanwhile.
    let held = socket(AddressFamily::INET, SocketType::STREAM, None).context("make a socket")?;
    bind(&held, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).context("bind a loopback port")?;
    let address = SocketAddrV4::try_from(getsockname(&held).context("name the loopback port")?)?;

    let nest = Nest::make(cgroup)?;
    hidden.set().insert(nest.id);
    proof.canary = Some(nest.id);
    let mut canary = Canary::start(&nest, address.port())?;

    let without_row = table.counters().without_row;
    canary.connect(Family::V4)?;
    let find = || {
        table.used().find(|(_, row)| {
            row.key.cgroup_id == nest.id && row.key.port_be == address.port().to_be()
        })
    };
    let Some((id, row)) = find() else {
        if table.counters().without_row != without_row {
            return Ok(false);
        }
        bail!("a connect from there was not seen: the programs are attached but do not run");
    };
    proof.row = Some(id);
    ensure!(
        row.attempts == 1,
        "a connect from there was seen but not followed (sock_ops)"
    );
    let mode = table.mode();
    if mode == Mode::OFF {
        proof.connect6 = canary.by_ipv6(find, |row| row.attempts == 2)?;
        return Ok(true);
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
        flags: 0,
    };
    table.set_verdict(id, verdict, Nanos(clock::now().0 + 60_000_000_000), 1);
    let errno = canary.connect(Family::V4)?;
    let (_, row): (RowId, Row) = find().context("the canary's row is gone")?;
    if table.mode() != mode {
        return Ok(false);
    }
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
    proof.connect6 = canary.by_ipv6(find, |row| match mode {
        Mode::ENFORCE => row.rejected_breaker == 2,
        _ => row.would_reject_breaker == 2,
    })?;
    Ok(true)
}

/// By which socket the canary connects.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Family {
    V4,
    /// An IPv6 socket, to the same address in its mapped form: another hook, and the same row.
    Mapped,
}

impl Family {
    /// The canary's order.
    const fn word(self) -> &'static str {
        match self {
            Self::V4 => "4",
            Self::Mapped => "6",
        }
    }
}

/// Name of a canary's cgroup, before the agent's process id.
const NEST: &str = "backstop-canary-";

/// Whether a workload is called like the cgroup of a canary, ours or another agent's. Anybody may call one so.
pub fn is_nest(workload: &str) -> bool {
    let name = workload.rsplit('/').next().unwrap_or_default();
    let owner = name.strip_prefix(NEST).unwrap_or_default();
    !owner.is_empty() && owner.bytes().all(|byte| byte.is_ascii_digit())
}

/// Removes canary cgroups that a killed agent has left below a cgroup: an empty one in the way
/// keeps its parent from being removed.
pub fn sweep(cgroup: &Path) {
    for entry in fs::read_dir(cgroup).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let owner = name.to_str().and_then(|name| name.strip_prefix(NEST));
        let owner = owner.and_then(|pid| pid.parse::<u32>().ok());
        if owner.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            // Not empty, or gone already: not ours to mend.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// A cgroup below the one to be proven, removed again on drop.
struct Nest {
    path: PathBuf,
    id: u64,
}

impl Nest {
    fn make(cgroup: &Path) -> Result<Self> {
        let path = cgroup.join(format!("{NEST}{}", std::process::id()));
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

    /// Has it connect once by IPv6; whether that was `seen` in its row. False where it cannot be told: there
    /// is no IPv6, another program has refused before ours, or the mode was changed meanwhile.
    fn by_ipv6(
        &mut self,
        find: impl Fn() -> Option<(RowId, Row)>,
        seen: impl Fn(&Row) -> bool,
    ) -> Result<bool> {
        let (_, before) = find().context("the canary's row is gone")?;
        let errno = self.connect(Family::Mapped)?;
        if errno == libc::EAFNOSUPPORT {
            return Ok(false);
        }
        let (_, row) = find().context("the canary's row is gone")?;
        // Whichever way it was counted, the hook has run.
        let counted =
            |row: &Row| row.attempts + row.local + row.rejected_breaker + row.would_reject_breaker;
        ensure!(
            counted(&row) != counted(&before),
            "a connect from there by IPv6 was not seen: the program on connect6 is attached but does not run"
        );
        Ok(seen(&row))
    }

    /// Has it connect once; the errno, 0 when it was connected.
    fn connect(&mut self, family: Family) -> Result<i32> {
        let orders = self.orders.as_mut().context("the canary is gone")?;
        writeln!(orders, "{}", family.word()).context("order the canary")?;
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
            "the canary did not answer within {} s (is the cgroup frozen?)",
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

/// The canary process: joins the cgroup, then connects once for each line on stdin (by an IPv6 socket if it
/// says 6) and prints the errno. Returns the exit code.
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
        // The socket's cgroup is that of its creation: only now it is the right one.
        let result = if line.trim() == Family::Mapped.word() {
            by_ipv6_socket(address)
        } else {
            socket(AddressFamily::INET, SocketType::STREAM, None)
                .and_then(|socket| connect(&socket, &address))
        };
        line.clear();
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

fn by_ipv6_socket(address: SocketAddrV4) -> rustix::io::Result<()> {
    let socket = socket(AddressFamily::INET6, SocketType::STREAM, None)?;
    // Whatever net.ipv6.bindv6only says.
    rustix::net::sockopt::set_ipv6_v6only(&socket, false)?;
    let mapped = SocketAddrV6::new(address.ip().to_ipv6_mapped(), address.port(), 0, 0);
    connect(&socket, &mapped)
}
