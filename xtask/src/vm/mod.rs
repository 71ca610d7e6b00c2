//! `cargo xtask vm`: the agent on other kernels, booted in emulated machines.
//!
//! Debian's cloud kernels are downloaded and unpacked, never installed. The guest is an initramfs
//! written here: busybox, an init script, the kernel modules that the check needs, the agent and
//! the check program (`vmcheck` of the package `tests`), whose exit code is the result.

mod cpio;
mod initramfs;
mod kernels;
mod modules;
mod qemu;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use self::kernels::{Kernel, Series};
use crate::apt::packages;
use crate::{build, paths};

/// Machines that run at once. Each takes one to two cores while it boots.
const AT_ONCE: usize = 2;

/// What the user asked for.
#[derive(Debug)]
pub struct Request {
    /// Names of kernel series; empty: all of [`kernels::SERIES`].
    pub kernels: Vec<String>,
    /// Only say which kernels there are.
    pub list: bool,
    /// Look for newer kernels than those downloaded before.
    pub refresh: bool,
    /// A machine that takes longer is stopped and has failed.
    pub limit: Duration,
}

/// Runs the command; the exit code says whether the check passed on every kernel.
///
/// # Errors
/// When this machine cannot emulate another, a build fails, or a name is unknown.
pub fn run(request: &Request) -> Result<ExitCode> {
    if request.list {
        for series in kernels::SERIES {
            let held = kernels::cached(&series).map(|kernel| kernel.abi);
            let held = held.unwrap_or_else(|| "not downloaded yet".to_owned());
            println!("{:8} {:32} {held}", series.name, series.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if std::env::consts::ARCH != "x86_64" {
        bail!(
            "kernels are booted on x86_64 machines only; this is {}",
            std::env::consts::ARCH
        );
    }
    let wanted = Series::select(&request.kernels)?;
    packages::ensure(packages::VM)?;
    let agent = build::release("agent", "backstop")?;
    let check = build::release("tests", "vmcheck")?;

    let mut failed = 0;
    let mut kernels = Vec::new();
    for series in wanted {
        match kernels::obtain(&series, request.refresh) {
            Ok(kernel) => kernels.push((series, kernel)),
            Err(error) => {
                println!("FAIL {} (no kernel): {error:#}", series.name);
                failed += 1;
            }
        }
    }
    let payload = Payload { agent, check };
    failed += boot_all(kernels, &payload, request.limit);
    Ok(if failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// The programs that go into the guest.
#[derive(Debug)]
struct Payload {
    agent: PathBuf,
    check: PathBuf,
}

/// Boots every kernel, a few at once, and returns how many failed.
fn boot_all(kernels: Vec<(Series, Kernel)>, payload: &Payload, limit: Duration) -> usize {
    let workers = AT_ONCE.min(kernels.len());
    let queue = Mutex::new(kernels.into_iter());
    let next = || queue.lock().ok()?.next();
    let work = || {
        let mut failed = 0;
        while let Some((series, kernel)) = next() {
            let start = Instant::now();
            let result = boot(&series, &kernel, payload, limit);
            let seconds = start.elapsed().as_secs_f64();
            let name = format!("{} ({}) {seconds:.1} s", series.name, kernel.abi);
            match result {
                Ok(()) => println!("PASS {name}"),
                Err(error) => {
                    println!("FAIL {name}: {error:#}");
                    failed += 1;
                }
            }
        }
        failed
    };
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        // A worker that panicked has said so; its kernel did not pass.
        handles
            .into_iter()
            .map(|handle| handle.join().unwrap_or(1))
            .sum()
    })
}

fn boot(series: &Series, kernel: &Kernel, payload: &Payload, limit: Duration) -> Result<()> {
    let folder = paths::target().join("vm").join(series.name).join("run");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    let mut arguments = vec!["/payload/vmcheck", "/payload/backstop"];
    if !series.supported {
        arguments.push("--expect-unsupported");
    }
    let image = folder.join("initramfs.cpio");
    let programs = [
        ("vmcheck", payload.check.as_path()),
        ("backstop", payload.agent.as_path()),
    ];
    initramfs::write(&image, kernel, &programs, &arguments)?;
    match qemu::run(series.name, kernel, &image, &folder, limit)? {
        0 => Ok(()),
        code => bail!("the check ended with code {code}"),
    }
}
