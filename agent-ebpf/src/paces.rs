//! How soon processes call again: see [`agent_common::pace`].

use agent_common::{
    OTHER_ROW, Row, Stamp,
    pace::{self, PACE_SLOTS, Pace},
    retry::{ENDED_WELL, is_to_come, owner, place, tick},
    row::ROW_RETRIES,
    stamp::{KIND_HANDSHAKE, PROTOCOL_HTTP1, PROTOCOL_TLS},
};

use crate::{maps, opaque::hidden};

/// A connection that speaks neither HTTP/1 nor TLS may begin with a login of so many exchanges (of Redis: HELLO,
/// CLIENT SETINFO twice, SELECT). They follow one another at once, and say nothing of the program's pace.
const MOST_LOGIN: u32 = 4;

/// What is known of a process and a row ([`owner`]).
///
/// # Safety
/// None beyond that of map memory.
#[inline(always)]
pub unsafe fn pace_of(process: u64) -> Option<*mut Pace> {
    let pace = maps::PACES.get_ptr_mut(place(process, PACE_SLOTS))?;
    // SAFETY: map memory.
    unsafe {
        if (*pace).owner != process {
            *pace = bytemuck::Zeroable::zeroed();
            (*pace).owner = process;
        }
    }
    Some(pace)
}

/// Whether the pause before a request on a connection that has answered `number` of them is to be noted:
/// none within a handshake, a login or beside what waits by right; else while nothing fails of the first few, and of one in 32. `kinds` are
/// those of the exchange before and of this one (`KIND_`).
///
/// # Safety
/// As [`kept`].
#[inline(always)]
pub unsafe fn is_wanted(
    stamp: *mut Stamp,
    row: *mut Row,
    number: u32,
    kinds: u64,
    now: u64,
) -> bool {
    // SAFETY: by contract, map memory.
    unsafe {
        if (&raw const (*stamp).is_long).read_volatile() != 0 || kinds & KIND_HANDSHAKE != 0 {
            return false;
        }
        let login = match (*stamp).protocol {
            // (Within TLS there may be one, too. But most of it is HTTP, and in doubt a call is fresh.)
            PROTOCOL_HTTP1 | PROTOCOL_TLS => 0,
            _ => MOST_LOGIN,
        };
        if number <= login {
            return false;
        }
        number < login + 4
            || number & 31 == 0
            || is_to_come((&raw const (*row).retry_watch).read_volatile(), tick(now))
    }
}

/// A request follows so long after the answer to the one before, on the same connection: a pause after a
/// good call.
///
/// # Safety
/// `stamp` must be the connection's and `row` its row.
#[inline(never)]
pub unsafe fn kept(stamp: *mut Stamp, row: *mut Row, now: u64) {
    // SAFETY: by contract, map memory.
    unsafe {
        let index = (*stamp).row;
        let flags = (*row).settings.flags;
        if (*stamp).ended != ENDED_WELL || index == OTHER_ROW || flags & ROW_RETRIES == 0 {
            return;
        }
        let Some(pace) = pace_of(owner((*stamp).pid, index)) else {
            return;
        };
        let pause_ns = now.saturating_sub((*stamp).answered_ns);
        (*pace).good = pace::with((*pace).good, hidden(pace::bucket(pause_ns)));
    }
}
