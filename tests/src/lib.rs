//! Guards and helpers of the privileged tests.
//!
//! The tests run the real binary and real programs against the real kernel. Each makes control
//! groups and network namespaces of its own, named by process and counter, so that all of them can
//! run at once; every guard removes what it made when it is dropped, also on a panic. Helpers
//! panic instead of returning errors: the backtrace then names the line of the test.

pub mod agent;
pub mod attached;
pub mod cgroup;
pub mod clients;
pub mod dialer;
pub mod follow;
pub mod foreign;
pub mod http;
pub mod interpreter;
pub mod maps;
pub mod names;
pub mod net;
pub mod nginx;
pub mod outcome;
pub mod place;
pub mod process;
pub mod server;
pub mod talk;
pub mod terminal;
pub mod timed;
pub mod tls;
pub mod truth;
pub mod wait;

use std::{
    io::Write as _,
    sync::atomic::{AtomicU32, Ordering},
};

/// A name that no other test, of this process or another, uses at the same time.
pub fn unique(label: &str) -> String {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let number = COUNTER.fetch_add(1, Ordering::Relaxed);
    format!("bst-{}-{number}-{label}", std::process::id())
}

/// Ends the test here and says why: the reason names the missing program or kernel feature.
#[macro_export]
macro_rules! skip {
    ($($reason:tt)*) => {{
        $crate::say_skipped(format_args!($($reason)*));
        return;
    }};
}

/// Skips the test when one of these programs is not installed.
#[macro_export]
macro_rules! need {
    ($($program:expr),+) => {
        $(if $crate::process::find($program).is_none() {
            $crate::skip!("the program {} is not installed", $program);
        })+
    };
}

/// Prints the line of a skipped test past the capture of the test runner.
pub fn say_skipped(reason: std::fmt::Arguments<'_>) {
    let thread = std::thread::current();
    let test = thread.name().unwrap_or("test");
    // Nothing can be done where even stderr is gone.
    let _ = writeln!(std::io::stderr(), "SKIP {test}: {reason}");
}
