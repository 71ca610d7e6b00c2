//! Throughput of wrk against nginx on kept-alive connections.
//!
//! Three wrk processes live throughout, one in each cgroup, and all but one are stopped (SIGSTOP):
//! so a slice can be short, and no start of wrk is measured. A request is one write call of wrk,
//! and the kernel counts those (/proc/PID/io).

use std::{
    fs,
    net::TcpStream,
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};

use crate::bench::{
    agent::Agent,
    lab::{self, Guarded, Lab, Running},
    report::{Figure, Target},
    slices, usage,
};

const ROUNDS: usize = 200;
const SLICE: Duration = Duration::from_millis(50);
/// The namespace is ours: nobody else has it.
const PORT: u16 = 8080;
const CONNECTIONS: &str = "16";

/// Measures it.
///
/// # Errors
/// When nginx or wrk are missing, or a process cannot be started.
pub fn measure(lab: &Lab) -> Result<Vec<Figure>> {
    for program in ["nginx", "wrk"] {
        ensure!(
            crate::process::exists(program) || Path::new("/usr/sbin").join(program).exists(),
            "{program} is not installed: apt-get install nginx-light wrk"
        );
    }
    let _agent = Agent::start(lab, "")?;
    let _nginx = nginx(lab)?;
    let cgroups = [&lab.with, &lab.without[0], &lab.without[1]];
    let wrks: Result<Vec<Guarded>> = cgroups.into_iter().map(|cgroup| wrk(cgroup)).collect();
    let wrks = wrks?;
    let rates = slices::interleave(ROUNDS, wrks.len(), |subject| slice(&wrks[subject]))?;
    let [with, first, second] = &rates[..] else {
        unreachable!("three of them")
    };
    let (low, high) = slices::interval(with, first);
    Ok(vec![
        Figure::new(
            "wrk to nginx, with / without",
            slices::ratio(with, first),
            "x",
        )
        .target(Target::AtLeast(0.97))
        .control(slices::ratio(second, first))
        .note(format!(
            "{ROUNDS} slices of {} ms each, {CONNECTIONS} connections; 95 %: {low:.3} to {high:.3}",
            SLICE.as_millis()
        )),
        Figure::new("with", slices::median(with), "requests/s"),
        Figure::new("without", slices::median(first), "requests/s"),
    ])
}

/// Requests a second while this one runs and the others stand still.
fn slice(wrk: &Guarded) -> Result<f64> {
    let before = usage::writes(wrk.pid())?;
    let begun = Instant::now();
    wrk.signal(libc::SIGCONT);
    std::thread::sleep(SLICE);
    wrk.signal(libc::SIGSTOP);
    let elapsed = begun.elapsed().as_secs_f64();
    let requests = usage::writes(wrk.pid())? - before;
    Ok(requests as f64 / elapsed)
}

fn nginx(lab: &Lab) -> Result<Guarded> {
    let folder = lab.folder.join("nginx");
    fs::create_dir(&folder).with_context(|| format!("make {}", folder.display()))?;
    let place = folder.display();
    let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|kind| format!("{kind}_temp_path {place}/{kind}; "))
        .collect();
    let configuration = format!(
        "daemon off; master_process off; pid {place}/pid; error_log stderr crit;\n\
         events {{ worker_connections 256; }}\n\
         http {{ access_log off; keepalive_requests 1000000000; keepalive_timeout 1h; {temporary}\n\
         server {{ listen 127.0.0.1:{PORT}; location / {{ return 200 \"fine\\n\"; }} }} }}\n"
    );
    let file = folder.join("nginx.conf");
    fs::write(&file, configuration).with_context(|| format!("write {}", file.display()))?;
    let mut command = Command::new("nginx");
    command.env(
        "PATH",
        "/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin:/bin",
    );
    command
        .arg("-e")
        .arg("stderr")
        .arg("-p")
        .arg(&folder)
        .arg("-c")
        .arg(&file);
    command.stdin(Stdio::null());
    let running = Running {
        cpu: lab::processors().first().copied(),
        first: true,
        real_time: false,
    };
    let guard = Guarded::start(&mut command, running, libc::SIGTERM)?;
    let end = Instant::now() + Duration::from_secs(10);
    while TcpStream::connect(("127.0.0.1", PORT)).is_err() {
        ensure!(
            Instant::now() < end,
            "nginx does not answer at 127.0.0.1:{PORT}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(guard)
}

/// Starts wrk in a cgroup, waits until it sends, and stops it.
fn wrk(cgroup: &Path) -> Result<Guarded> {
    let procs = std::ffi::CString::new(
        cgroup
            .join("cgroup.procs")
            .into_os_string()
            .into_encoded_bytes(),
    )
    .context("name the cgroup")?;
    let mut command = Command::new("wrk");
    command.args(["-t", "1", "-c", CONNECTIONS, "-d", "1h"]);
    command.arg(format!("http://127.0.0.1:{PORT}/"));
    command.stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: only system calls between fork and exec.
    unsafe { command.pre_exec(move || join(&procs)) };
    let running = Running {
        cpu: lab::last_processor(),
        first: true,
        real_time: false,
    };
    let guard = Guarded::start(&mut command, running, libc::SIGKILL)?;
    let end = Instant::now() + Duration::from_secs(10);
    while usage::writes(guard.pid())? < 1000 {
        ensure!(Instant::now() < end, "wrk sends nothing to nginx");
        std::thread::sleep(Duration::from_millis(2));
    }
    guard.signal(libc::SIGSTOP);
    Ok(guard)
}

/// Moves the calling process into a cgroup; "0" names the caller.
fn join(procs: &std::ffi::CStr) -> std::io::Result<()> {
    // SAFETY: a string that ends with zero; one byte of a constant; a descriptor closed once.
    unsafe {
        let file = libc::open(procs.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file < 0 {
            return Err(std::io::Error::last_os_error());
        }
        let written = libc::write(file, c"0".as_ptr().cast(), 1);
        let error = std::io::Error::last_os_error();
        libc::close(file);
        if written == 1 { Ok(()) } else { Err(error) }
    }
}
