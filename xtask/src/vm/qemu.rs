//! One emulated machine: started, watched, and never left behind.

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::kernels::Kernel;
use crate::process;

/// The emulator.
const PROGRAM: &str = "qemu-system-x86_64";

/// The guest's memory in MiB: the initramfs, and the agent's tables, which are mapped whole.
const MEMORY: &str = "1024";

/// The kernel's command line. A panic ends the machine; what only slows down emulation is off.
const COMMAND_LINE: &str =
    "console=ttyS0 panic=-1 quiet mitigations=off nokaslr tsc=reliable no_timer_check rdinit=/init";

/// How many lines of the console are shown when the guest ends without a result.
const CONSOLE_LINES: usize = 40;

/// Boots the kernel with this initramfs, prints what the guest prints, each line after `name`, and
/// returns the exit code that the guest reports.
///
/// # Errors
/// When qemu cannot be started, the guest takes longer than `limit`, or it ends without a code.
pub fn run(
    name: &str,
    kernel: &Kernel,
    image: &Path,
    folder: &Path,
    limit: Duration,
) -> Result<i32> {
    let console = folder.join("console");
    let code = folder.join("code");
    let errors = folder.join("qemu-errors");
    for file in [&console, &code] {
        fs::write(file, "").with_context(|| format!("write {}", file.display()))?;
    }
    let mut command = Command::new(PROGRAM);
    // TCG: an emulation in software that works everywhere; /dev/kvm may exist and yet not boot
    // an ordinary kernel.
    command
        .args([
            "-M",
            "pc",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "2",
        ])
        .args([
            "-m",
            MEMORY,
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
        ])
        .args(["-monitor", "none", "-append", COMMAND_LINE])
        .arg("-kernel")
        .arg(&kernel.image)
        .arg("-initrd")
        .arg(image)
        .args(["-serial", &format!("file:{}", console.display())])
        .args([
            "-chardev",
            "stdio,id=out,signal=off",
            "-serial",
            "chardev:out",
        ])
        .args(["-serial", &format!("file:{}", code.display())])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(fs::File::create(&errors).with_context(|| format!("write {}", errors.display()))?);
    end_with_parent(&mut command);

    let line = process::describe(&command);
    let mut child = command.spawn().with_context(|| format!("start `{line}`"))?;
    let output = child.stdout.take().context("qemu's output is not piped")?;
    let (ended, end) = mpsc::channel::<()>();
    let timed_out = std::thread::scope(|scope| {
        scope.spawn(move || {
            show(name, output);
            // The other end may have given up waiting.
            let _ = ended.send(());
        });
        // The output ends when qemu does.
        let late = matches!(end.recv_timeout(limit), Err(RecvTimeoutError::Timeout));
        if late {
            // It may have ended this very moment; `wait` below tells.
            let _ = child.kill();
        }
        late
    });
    let status = child.wait().with_context(|| format!("wait for `{line}`"))?;

    let reported = fs::read_to_string(&code).unwrap_or_default();
    if let Ok(code) = reported.trim().parse() {
        return Ok(code);
    }
    let tail = tail(&fs::read(&console).unwrap_or_default());
    let complaint = fs::read_to_string(&errors).unwrap_or_default();
    let why = if timed_out {
        format!("no result within {} s", limit.as_secs())
    } else {
        format!(
            "no result from the guest (qemu ended with {status}) {}",
            complaint.trim()
        )
    };
    bail!("{why}; the end of its console:\n{tail}")
}

/// Lets the kernel kill the child when the thread that started it ends, however it ends.
fn end_with_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: between fork and exec only system calls are made: prctl and getppid take no memory
    // of ours and are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // The parent may have died before that call.
            if u32::try_from(libc::getppid()) != Ok(parent) {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
}

/// Prints line by line until the end; what is not UTF-8 is replaced.
fn show(name: &str, output: impl Read) {
    let mut reader = BufReader::new(output);
    let mut bytes = Vec::new();
    while reader
        .read_until(b'\n', &mut bytes)
        .is_ok_and(|count| count > 0)
    {
        let text = String::from_utf8_lossy(&bytes);
        println!("[{name}] {}", text.trim_end_matches(['\n', '\r']));
        bytes.clear();
    }
}

fn tail(console: &[u8]) -> String {
    let text = String::from_utf8_lossy(console).replace('\r', "");
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::{CONSOLE_LINES, tail};

    #[test]
    fn the_tail_is_bounded() {
        let text = "line\r\n".repeat(CONSOLE_LINES * 2);
        assert_eq!(tail(text.as_bytes()).lines().count(), CONSOLE_LINES);
        assert_eq!(tail(b""), "");
    }
}
