//! A program on a terminal of its own, as somebody would sit before it.

use std::{
    fs::File,
    io::{Read as _, Write as _},
    os::{fd::AsRawFd as _, unix::process::CommandExt as _},
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Mutex},
    time::Duration,
};

use rustix::{
    fs::{Mode, OFlags, open},
    process::{Pid, Signal, kill_process, setsid},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Termios, Winsize, tcgetattr, tcsetwinsize},
};

use crate::wait;

/// For whatever it shows or does: the machine may have a lot else to do.
const LONGEST: Duration = Duration::from_secs(60);
/// Where a screen begins, and where it ends.
const BEGIN: &str = "\x1b[H";
const END: &str = "\x1b[J";

/// See the module. The program is killed when this is dropped.
pub struct Terminal {
    child: Child,
    /// Somebody's end: keys go in, what is shown comes out.
    ours: File,
    /// The program's end, kept open so that its settings can be read when it has ended.
    theirs: File,
    shown: Arc<Mutex<Vec<u8>>>,
    /// As it was before the program.
    before: Termios,
}

impl Terminal {
    /// Starts a program on a terminal of so many columns and lines.
    pub fn start(program: &Path, args: &[&str], (columns, lines): (u16, u16)) -> Self {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let ours = openpt(flags).expect("a pseudo-terminal");
        grantpt(&ours).expect("grant it");
        unlockpt(&ours).expect("unlock it");
        let name = ptsname(&ours, Vec::new()).expect("its name");
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let theirs = File::from(open(name.as_c_str(), flags, Mode::empty()).expect("open it"));
        resize(&theirs, columns, lines);
        let before = tcgetattr(&theirs).expect("its settings");
        let end = || Stdio::from(theirs.try_clone().expect("a copy"));
        let mut command = Command::new(program);
        command
            .args(args)
            .env("TERM", "xterm")
            .env_remove("COLUMNS")
            .env_remove("NO_COLOR")
            .stdin(end())
            .stdout(end())
            .stderr(end());
        let number = theirs.as_raw_fd();
        let enter = move || {
            // Only system calls here: this runs between fork and exec.
            setsid()?;
            // SAFETY: the descriptor is open until exec.
            if unsafe { libc::ioctl(number, libc::TIOCSCTTY, 0) } != 0 {
                return Err(std::io::Error::last_os_error());
            }
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            Ok(())
        };
        // SAFETY: the closure makes system calls only and allocates nothing.
        unsafe { command.pre_exec(enter) };
        let child = command.spawn().expect("start the program");
        let ours = File::from(ours);
        let shown = Arc::new(Mutex::new(Vec::new()));
        let (mut output, into) = (ours.try_clone().expect("a copy"), Arc::clone(&shown));
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // EIO: the other end is closed for good.
            while let Ok(count @ 1..) = output.read(&mut buffer) {
                let mut shown = into.lock().expect("no panic holds it");
                shown.extend_from_slice(&buffer[..count]);
            }
        });
        Self {
            child,
            ours,
            theirs,
            shown,
            before,
        }
    }

    /// Everything that was written to it.
    pub fn all(&self) -> String {
        String::from_utf8_lossy(&self.shown.lock().expect("no panic holds it")).into_owned()
    }

    /// The lines of the last whole screen, without colours.
    pub fn screen(&self) -> Vec<String> {
        let all = self.all();
        let Some((whole, _)) = all.rsplit_once(END) else {
            return Vec::new();
        };
        let last = whole.rsplit_once(BEGIN).map_or(whole, |(_, last)| last);
        // The terminal adds a carriage return of its own.
        last.split('\n')
            .map(|line| plain(line.trim_end_matches('\r')))
            .collect()
    }

    /// Waits until a screen is as wanted; returns it.
    #[track_caller]
    pub fn wait_screen(&self, what: &str, is: impl Fn(&[String]) -> bool) -> Vec<String> {
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait::until(what, LONGEST, || {
                Some(self.screen()).filter(|screen| is(screen))
            })
        }));
        found.unwrap_or_else(|panic| {
            eprintln!("the screen was {:#?}", self.screen());
            std::panic::resume_unwind(panic)
        })
    }

    /// Types.
    pub fn type_in(&mut self, keys: &str) {
        self.ours.write_all(keys.as_bytes()).expect("type");
    }

    /// Gives it another size.
    pub fn resize(&self, columns: u16, lines: u16) {
        resize(&self.theirs, columns, lines);
    }

    /// Sends a signal to the program.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("send a signal");
    }

    /// Whether the terminal is set as before the program: keys are shown again, line by line.
    pub fn is_as_before(&self) -> bool {
        let now = tcgetattr(&self.theirs).expect("its settings");
        (now.local_modes, now.input_modes, now.output_modes)
            == (
                self.before.local_modes,
                self.before.input_modes,
                self.before.output_modes,
            )
    }

    /// Waits for the program's end, and until the last that it was to write has come; everything that it has
    /// shown.
    #[track_caller]
    pub fn wait(&mut self, last: &str) -> (ExitStatus, String) {
        let status = wait::until("the program to end", LONGEST, || {
            self.child.try_wait().expect("wait for a child")
        });
        // What is written is read beside everything else.
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait::until("the last of its output", LONGEST, || {
                self.all().ends_with(last).then_some(())
            });
        }));
        found.unwrap_or_else(|panic| {
            eprintln!("it has shown {:?}", self.all());
            std::panic::resume_unwind(panic)
        });
        (status, self.all())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Killing what has ended and was waited for does nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn resize(terminal: &File, columns: u16, lines: u16) {
    let size = Winsize {
        ws_row: lines,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(terminal, size).expect("set its size");
}

/// Without escape sequences.
fn plain(line: &str) -> String {
    let mut parts = line.split("\x1b[");
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find(|c: char| c.is_ascii_alphabetic());
        text.push_str(end.map_or("", |at| &part[at + 1..]));
    }
    text
}
