//! Waiting for something that shows itself only when looked at.

use std::time::{Duration, Instant};

/// For whatever comes by itself and soon, on a machine that may have a lot else to do: how quickly it comes
/// is not what such a wait is about.
pub const LONGEST: Duration = Duration::from_secs(60);

/// Time between two looks: short beside everything that is waited for.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// Looks until there is a result; panics at the deadline with what was waited for.
pub fn until<T>(what: &str, deadline: Duration, mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(result) = look() {
            return result;
        }
        assert!(
            began.elapsed() < deadline,
            "waited {deadline:?} in vain for {what}"
        );
        std::thread::sleep(LOOK_EVERY);
    }
}
