//! Options that we have set on programs' sockets, as the kernel's hooks know them: a program that asks
//! for such an option is told its own value, and one that sets it has it for itself.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use agent_common::{
    Lent, LentKey,
    lent::{RECEIVE, SEND, Timeval},
};
use aya::maps::{HashMap, MapData, MapError};

use crate::sockets::options::{Given, TimeOption};

/// See the module.
pub struct LentOptions(Mutex<HashMap<MapData, [u64; 2], [i64; 4]>>);

impl LentOptions {
    pub(super) fn new(map: HashMap<MapData, [u64; 2], [i64; 4]>) -> Self {
        Self(Mutex::new(map))
    }

    /// Notes an option that is ours now.
    ///
    /// # Errors
    /// When the map is full ([`agent_common::lent::LENT_MOST`]), or it is none of the two that can be
    /// noted.
    pub fn note(&self, cookie: u64, given: &Given) -> Result<(), MapError> {
        let key = key(cookie, given.option).ok_or(MapError::KeyNotFound)?;
        let lent = Lent {
            before: timeval(given.before.unwrap_or_default()),
            ours: timeval(given.ours),
        };
        self.map()
            .insert(key, bytemuck::cast::<_, [i64; 4]>(lent), 0)
    }

    /// Whether it is ours still: false once the program has set it.
    pub fn is_ours(&self, cookie: u64, option: TimeOption) -> bool {
        key(cookie, option).is_some_and(|key| self.map().get(&key, 0).is_ok())
    }

    /// Forgets it.
    pub fn forget(&self, cookie: u64, option: TimeOption) {
        if let Some(key) = key(cookie, option) {
            // Not there: as wanted.
            let _ = self.map().remove(&key);
        }
    }

    fn map(&self) -> MutexGuard<'_, HashMap<MapData, [u64; 2], [i64; 4]>> {
        // Nothing is half done when a holder panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(cookie: u64, option: TimeOption) -> Option<[u64; 2]> {
    let option = match option {
        TimeOption::Receive => RECEIVE,
        TimeOption::Send => SEND,
        TimeOption::User => return None,
    };
    Some(bytemuck::cast(LentKey { cookie, option }))
}

fn timeval(time: Duration) -> Timeval {
    Timeval {
        seconds: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        micros: time.subsec_micros().into(),
    }
}
