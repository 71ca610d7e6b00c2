//! Real-time priority for the event thread, with a cap on its run time.
//!
//! At SCHED_FIFO the thread wakes within 0.1 ms on a saturated machine, against 2 ms at normal
//! priority. RLIMIT_RTTIME bounds how long it may run without sleeping: beyond it the kernel
//! sends SIGXCPU, and the handler puts the thread back to normal priority, so that neither a bug
//! nor a flood of events can take a CPU away from the node.

use std::sync::atomic::{AtomicI32, Ordering};

use anyhow::{Context as _, Result};

/// Run time without sleep after which the priority is dropped, us.
const CAP_US: u64 = 100_000;

/// Kernel thread id of the event thread; 0: none at real-time priority.
static EVENT_THREAD: AtomicI32 = AtomicI32::new(0);

/// Installs the cap. Once per process, before [`raise`].
///
/// # Errors
/// When the limit cannot be set or the handler not installed.
pub fn install_cap() -> Result<()> {
    // SAFETY: the handler makes one system call and touches one atomic.
    unsafe { signal_hook::low_level::register(libc::SIGXCPU, drop_priority) }
        .context("install the handler for SIGXCPU")?;
    let limit = libc::rlimit {
        rlim_cur: CAP_US,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: a valid struct.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_RTTIME, &raw const limit) };
    if result == 0 {
        return Ok(());
    }
    // The hard limit may be lower already and not ours to raise.
    let limit = libc::rlimit {
        rlim_cur: CAP_US,
        rlim_max: CAP_US * 10,
    };
    // SAFETY: as above.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_RTTIME, &raw const limit) };
    if result == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error()).context("limit the run time of real-time threads")
    }
}

/// Raises the calling thread; false where that is not allowed (no CAP_SYS_NICE).
pub fn raise() -> bool {
    let tid = rustix::thread::gettid().as_raw_nonzero().get();
    EVENT_THREAD.store(tid, Ordering::Relaxed);
    // Threads and processes that it starts do not inherit the priority.
    set_policy(tid, libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, 1)
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
