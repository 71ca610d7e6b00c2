//! Sockets that programs keep locked.
//!
//! A look and an abort wait for the socket's lock, in the kernel, where no signal wakes them. A program can
//! hold it for as long as it likes: by a send from memory that nobody serves (userfaultfd, FUSE). So each
//! such call is noted in a [`Beat`]. When one does not end, another thread takes the place of the one that
//! hangs, and leaves the sockets alone that the call was about. The first one ends when the call does.
//!
//! Before Linux 6.9 all of sock_diag stands behind one lock (net/core/sock_diag.c, `sock_diag_mutex`): there
//! the next thread hangs as well, and after some of them that is said.

use std::{
    collections::HashSet,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use crate::core::Nanos;

/// A call that takes longer hangs. It is some microseconds of work.
const HANGS: Nanos = Nanos::from_secs(2);
/// And it was seen so often: when the agent itself was stopped, its clock went on.
const HANGS_CHECKS: u32 = 10;

/// What a thread is waiting for.
#[derive(Default)]
pub(super) struct Beat {
    /// Odd during a call; each call has numbers of its own.
    number: AtomicU64,
    /// Cookies of the sockets that the last call was about.
    about: Mutex<Vec<u64>>,
    /// Another thread has taken its place.
    replaced: AtomicBool,
}

impl Beat {
    /// Makes a call that may wait for the locks of these sockets.
    pub(super) fn during<T>(
        &self,
        cookies: impl Iterator<Item = u64>,
        call: impl FnOnce() -> T,
    ) -> T {
        {
            let mut about = lock(&self.about);
            about.clear();
            about.extend(cookies);
        }
        self.number.fetch_add(1, Ordering::AcqRel);
        let result = call();
        self.number.fetch_add(1, Ordering::AcqRel);
        result
    }

    /// Whether the thread is to do nothing more.
    pub(super) fn is_replaced(&self) -> bool {
        self.replaced.load(Ordering::Acquire)
    }

    /// Tells it so.
    pub(super) fn replace(&self) {
        self.replaced.store(true, Ordering::Release);
    }

    /// The sockets that it waits for.
    pub(super) fn about(&self) -> Vec<u64> {
        lock(&self.about).clone()
    }
}

/// Whether a [`Beat`] has stopped. Asked several times a second.
#[derive(Default)]
pub(super) struct Watchdog {
    number: u64,
    since: Nanos,
    checks: u32,
}

impl Watchdog {
    /// True when the same call goes on for too long.
    pub(super) fn hangs(&mut self, beat: &Beat, now: Nanos) -> bool {
        let number = beat.number.load(Ordering::Acquire);
        if number.is_multiple_of(2) || number != self.number {
            *self = Self {
                number,
                since: now,
                checks: 0,
            };
            return false;
        }
        self.checks = self.checks.saturating_add(1);
        now - self.since >= HANGS && self.checks >= HANGS_CHECKS
    }
}

/// Sockets that are left alone for now, by cookie.
#[derive(Default)]
pub(super) struct Avoided(Mutex<HashSet<u64>>);

impl Avoided {
    /// A copy of them.
    pub(super) fn all(&self) -> HashSet<u64> {
        lock(&self.0).clone()
    }

    pub(super) fn add(&self, cookies: &[u64]) {
        lock(&self.0).extend(cookies);
    }

    pub(super) fn remove(&self, cookies: &[u64]) {
        let mut all = lock(&self.0);
        for cookie in cookies {
            all.remove(cookie);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing is half done when a holder panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK: Nanos = Nanos::from_millis(100);

    /// How often a watchdog is asked until it says so, the clock going on by `tick` each time.
    fn checks(beat: &Beat, watchdog: &mut Watchdog, tick: Nanos) -> Option<u32> {
        let mut now = Nanos::from_secs(100);
        (0..100).find(|_| {
            now = now + tick;
            watchdog.hangs(beat, now)
        })
    }

    #[test]
    fn a_call_that_goes_on_hangs() {
        let beat = Beat::default();
        let mut watchdog = Watchdog::default();
        assert_eq!(checks(&beat, &mut watchdog, TICK), None);
        beat.during([7].into_iter(), || {
            assert_eq!(checks(&beat, &mut watchdog, TICK), Some(20));
            assert_eq!(beat.about(), [7]);
        });
        assert_eq!(checks(&beat, &mut watchdog, TICK), None);
        // The next one is another one.
        beat.during([8].into_iter(), || {
            assert!(!watchdog.hangs(&beat, Nanos::from_secs(200)));
        });
    }

    #[test]
    fn a_sleep_of_the_agent_is_no_hang() {
        let beat = Beat::default();
        let mut watchdog = Watchdog::default();
        beat.during([7].into_iter(), || {
            let often = Some(HANGS_CHECKS);
            assert_eq!(checks(&beat, &mut watchdog, Nanos::from_secs(8)), often);
        });
    }
}
