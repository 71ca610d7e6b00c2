//! Real-time priority for the event thread, with a cap on its run time.
//!
//! At SCHED_FIFO the thread wakes within 0.1 ms on a saturated machine, against 2 ms at normal
//! priority. RLIMIT_RTTIME bounds how long it may run without sleeping: beyond it the kernel
//! sends SIGXCPU, and the handler puts the thread back to normal priority, so that neither a bug
//! nor a flood of events can take a CPU away from the node.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use anyhow::{Context as _, Result};

/// Run time without sleep after which the priority is dropped, us.
const CAP_US: u64 = 100_000;

/// Kernel thread id of the event thread; 0: none at real-time priority.
static EVENT_THREAD: AtomicI32 = AtomicI32::new(0);
/// Whether SIGXCPU is handled; without that it would end the process.
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Installs the handler that drops the priority. Once per process, before [`raise`].
///
/// # Errors
/// When the handler cannot be installed.
pub fn install() -> Result<()> {
    // SAFETY: the handler makes one system call and touches one atomic.
    unsafe { signal_hook::low_level::register(libc::SIGXCPU, drop_priority) }
        .context("install the handler for SIGXCPU")?;
    INSTALLED.store(true, Ordering::Relaxed);
    Ok(())
}

/// Raises the calling thread; false where that is not allowed (no CAP_SYS_NICE), or where its run
/// time cannot be capped.
pub fn raise() -> bool {
    if !INSTALLED.load(Ordering::Relaxed) || arm_cap().is_err() {
        return false;
    }
    let tid = rustix::thread::gettid().as_raw_nonzero().get();
    EVENT_THREAD.store(tid, Ordering::Relaxed);
    // Threads and processes that it starts do not inherit the priority.
    set_policy(tid, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, 1)
}

/// Sets the soft limit. Again before each raise: with each SIGXCPU the kernel adds a second to it
/// (kernel/time/posix-cpu-timers.c, `check_thread_timers`).
fn arm_cap() -> std::io::Result<()> {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a valid struct.
    if unsafe { libc::getrlimit(libc::RLIMIT_RTTIME, &raw mut limit) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // At the hard limit the kernel kills: there must be room for the handler.
    if limit.rlim_max < 2 * CAP_US {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    limit.rlim_cur = CAP_US;
    // SAFETY: a valid struct.
    if unsafe { libc::setrlimit(libc::RLIMIT_RTTIME, &raw const limit) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// Whether the event thread has real-time priority now, as the kernel says.
pub fn is_raised() -> bool {
    let tid = EVENT_THREAD.load(Ordering::Relaxed);
    // SAFETY: takes a number and returns one.
    let policy = unsafe { libc::sched_getscheduler(tid) };
    tid != 0 && policy >= 0 && policy & !libc::SCHED_RESET_ON_FORK == libc::SCHED_FIFO
}

/// Whether the priority was dropped since [`raise`].
pub fn was_dropped() -> bool {
    EVENT_THREAD.load(Ordering::Relaxed) == 0
}

fn drop_priority() {
    let tid = EVENT_THREAD.swap(0, Ordering::Relaxed);
    if tid != 0 {
        set_policy(tid, libc::SCHED_OTHER, 0);
    }
}

fn set_policy(tid: i32, policy: i32, priority: i32) -> bool {
    let parameter = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: a valid struct.
    unsafe { libc::sched_setscheduler(tid, policy, &raw const parameter) == 0 }
}
