//! The load process: joins a cgroup, then obeys one order a line.
//!
//! It has one thread and its server is its own listener, made outside the cgroup: connections are
//! made in batches, and accepted after the clock was stopped. On loopback all of a connect happens
//! inside the call, so the time of a batch is that of the calling program, without any other
//! process.

use std::{
    io::{BufRead as _, Write as _},
    net::Ipv4Addr,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::Args;

/// Descriptor of the listener; high enough to be nobody else's.
pub const LISTENER: libc::c_int = 100;
/// Connections made before the first is accepted; less than any backlog.
const BATCH: usize = 64;
/// Failures in a row that trip a breaker by default.
const TRIP: u32 = 5;
const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;

/// What the load process is told.
#[derive(Debug, Args)]
pub struct Arguments {
    cgroup: PathBuf,
}

/// Obeys until its standard input ends.
///
/// # Errors
/// When an order is not understood or the system fails it.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    std::fs::write(arguments.cgroup.join("cgroup.procs"), "0")
        .with_context(|| format!("join the cgroup {}", arguments.cgroup.display()))?;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("read an order")?;
        let answer = obey(&line).with_context(|| format!("obey {line:?}"))?;
        let words: Vec<String> = answer.iter().map(u64::to_string).collect();
        let mut stdout = std::io::stdout().lock();
        writeln!(stdout, "{}", words.join(" ")).context("answer")?;
        stdout.flush().context("answer")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn obey(line: &str) -> Result<Vec<u64>> {
    let mut words = line.split_whitespace();
    let order = words.next().unwrap_or_default();
    let numbers: Result<Vec<u32>, _> = words.map(str::parse).collect();
    let numbers = numbers.context("numbers are wanted")?;
    match (order, &numbers[..]) {
        ("allowed", [count, port]) => allowed(*count as usize, narrow(*port)?),
        ("refused", [count, port]) => refused(*count as usize, narrow(*port)?),
        ("pace", [rate, ms, port]) => pace(*rate, *ms, narrow(*port)?),
        ("crowd", [count, rate, ms, failing, port]) => {
            crowd(*count, *rate, *ms, *failing, narrow(*port)?)
        }
        ("spread", [first, count, port]) => spread(*first, *count, narrow(*port)?),
        ("unanswered", [first, count, port]) => unanswered(*first, *count, narrow(*port)?),
        ("trips", [first, count, gap_us, port]) => trips(
            *first,
            *count,
            Duration::from_micros((*gap_us).into()),
            narrow(*port)?,
        ),
        ("spin", [ms]) => {
            let end = Instant::now() + Duration::from_millis((*ms).into());
            while Instant::now() < end {
                std::hint::spin_loop();
            }
            Ok(vec![0])
        }
        ("close", []) => {
            close(LISTENER);
            Ok(vec![0])
        }
        _ => bail!("no such order"),
    }
}

fn narrow(port: u32) -> Result<u16> {
    u16::try_from(port).context("a port has 16 bits")
}

/// Connects and closes, timed; answers ns and failed connects.
fn allowed(count: usize, port: u16) -> Result<Vec<u64>> {
    let address = address(HERE, port);
    let (mut ns, mut failed) = (0, 0);
    for batch in batches(count) {
        let sockets = sockets(batch)?;
        let begun = Instant::now();
        let mut made = 0;
        for socket in &sockets {
            made += usize::from(connect(*socket, &address) == 0);
            close(*socket);
        }
        ns += begun.elapsed().as_nanos() as u64;
        failed += (batch - made) as u64;
        accept(made)?;
    }
    Ok(vec![ns, failed])
}

/// Connects to a port that refuses, timed without the closing; answers ns and connects that ended
/// in another way.
fn refused(count: usize, port: u16) -> Result<Vec<u64>> {
    let address = address(HERE, port);
    let (mut ns, mut others) = (0, 0);
    for batch in batches(count) {
        let sockets = sockets(batch)?;
        let begun = Instant::now();
        for socket in &sockets {
            others += u64::from(connect(*socket, &address) != libc::ECONNREFUSED);
        }
        ns += begun.elapsed().as_nanos() as u64;
        sockets.into_iter().for_each(close);
    }
    Ok(vec![ns, others])
}

/// `rate` connects a second for `ms`, in bursts of a millisecond; answers how many there were, and
/// how many of them failed.
fn pace(rate: u32, ms: u32, port: u16) -> Result<Vec<u64>> {
    let address = address(HERE, port);
    let begun = Instant::now();
    let end = Duration::from_millis(ms.into());
    let (mut done, mut failed) = (0_u64, 0_u64);
    loop {
        let elapsed = begun.elapsed();
        if elapsed >= end {
            return Ok(vec![done, failed]);
        }
        let due = (u128::from(rate) * elapsed.as_micros() / 1_000_000) as u64;
        let burst = due.saturating_sub(done).min(BATCH as u64) as usize;
        let mut made = 0;
        for socket in sockets(burst)? {
            made += usize::from(connect(socket, &address) == 0);
            close(socket);
        }
        accept(made)?;
        done += burst as u64;
        failed += (burst - made) as u64;
        if burst < BATCH {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// `rate` calls a second for `ms`, each to one of `count` addresses of 127.0.0.0/8, in bursts of a
/// millisecond. Of 1,000 calls `failing` send a request that the server resets; the others are a
/// connect and a close. Answers how many there were, and how many failed.
fn crowd(count: u32, rate: u32, ms: u32, failing: u32, port: u16) -> Result<Vec<u64>> {
    let begun = Instant::now();
    let end = Duration::from_millis(ms.into());
    let (mut done, mut failed) = (0_u64, 0_u64);
    loop {
        let elapsed = begun.elapsed();
        if elapsed >= end {
            return Ok(vec![done, failed]);
        }
        let due = (u128::from(rate) * elapsed.as_micros() / 1_000_000) as u64;
        let burst = due.saturating_sub(done).min(BATCH as u64);
        for call in done..done + burst {
            // Knuth's multiplicative hash: every address in turn, in no order.
            let draw = call.wrapping_mul(2_654_435_761);
            let number = (draw % u64::from(count)) as u32;
            let socket = socket()?;
            if connect(socket, &address(numbered(number), port)) == 0 {
                // Where it fails is drawn apart from where it goes, else the same ones fail always.
                if (draw >> 20) % 1000 < u64::from(failing) {
                    send(socket, b"request");
                    failed += 1;
                }
                // Closed with the request unread: a reset.
                accept(1)?;
            }
            close(socket);
        }
        done += burst;
        if burst < BATCH as u64 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// One connect to each of `count` addresses of 127.0.0.0/8; answers how many were established.
fn spread(first: u32, count: u32, port: u16) -> Result<Vec<u64>> {
    let mut established = 0;
    for number in first..first + count {
        let socket = socket()?;
        let made = connect(socket, &address(numbered(number), port)) == 0;
        close(socket);
        accept(usize::from(made))?;
        established += u64::from(made);
    }
    Ok(vec![established])
}

/// One request to each of `count` addresses, which the server resets; answers how many there were.
fn unanswered(first: u32, count: u32, port: u16) -> Result<Vec<u64>> {
    let mut sent = 0;
    for number in first..first + count {
        let socket = socket()?;
        if connect(socket, &address(numbered(number), port)) == 0 {
            let written = send(socket, b"request");
            // Closed with the request unread: a reset.
            accept(1)?;
            sent += u64::from(written);
        }
        close(socket);
    }
    Ok(vec![sent])
}

/// Five refused connects to each of `count` addresses, with a pause after each address.
fn trips(first: u32, count: u32, gap: Duration, port: u16) -> Result<Vec<u64>> {
    let mut refused = 0;
    for number in first..first + count {
        let address = address(numbered(number), port);
        for _ in 0..TRIP {
            let socket = socket()?;
            refused += u64::from(connect(socket, &address) == libc::ECONNREFUSED);
            close(socket);
        }
        std::thread::sleep(gap);
    }
    Ok(vec![refused])
}

/// The address with this number in 127.0.0.0/8, beyond those that anything else uses.
fn numbered(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(127, 16, 0, 1)) + number)
}

fn batches(count: usize) -> impl Iterator<Item = usize> {
    (0..count.div_ceil(BATCH)).map(move |batch| BATCH.min(count - batch * BATCH))
}

fn sockets(count: usize) -> Result<Vec<libc::c_int>> {
    (0..count).map(|_| socket()).collect()
}

// Plain system calls: what a library adds would be measured too.

fn socket() -> Result<libc::c_int> {
    // SAFETY: plain arguments.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    ensure!(
        socket >= 0,
        "make a socket: {}",
        std::io::Error::last_os_error()
    );
    Ok(socket)
}

fn address(ip: Ipv4Addr, port: u16) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: port.to_be(),
        sin_addr: libc::in_addr {
            s_addr: u32::from(ip).to_be(),
        },
        sin_zero: [0; 8],
    }
}

/// The errno, 0 when connected.
fn connect(socket: libc::c_int, address: &libc::sockaddr_in) -> libc::c_int {
    let length = size_of_val(address) as libc::socklen_t;
    // SAFETY: a valid address of the length that is given.
    if unsafe { libc::connect(socket, std::ptr::from_ref(address).cast(), length) } == 0 {
        return 0;
    }
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() }
}

/// Whether anything was taken.
fn send(socket: libc::c_int, request: &[u8]) -> bool {
    let bytes = (request.as_ptr().cast(), request.len());
    // SAFETY: the buffer is as long as is said.
    unsafe { libc::send(socket, bytes.0, bytes.1, libc::MSG_NOSIGNAL) > 0 }
}

fn close(descriptor: libc::c_int) {
    // SAFETY: a descriptor of ours, not used again.
    unsafe { libc::close(descriptor) };
}

/// Accepts and closes connections that were established already.
fn accept(count: usize) -> Result<()> {
    for _ in 0..count {
        let null = std::ptr::null_mut();
        // SAFETY: no address is asked for.
        let socket = unsafe { libc::accept4(LISTENER, null, null.cast(), libc::SOCK_CLOEXEC) };
        ensure!(socket >= 0, "accept: {}", std::io::Error::last_os_error());
        close(socket);
    }
    Ok(())
}
