//! Events to the agent. One that finds no room is counted, never waited for.

use agent_common::{COMM_LEN, Event, Stamp};

use crate::{maps, rows};

/// An event with every field zero.
pub const EMPTY: Event = Event {
    kind: 0,
    row: 0,
    incarnation: 0,
    generation: 0,
    at_ns: 0,
    seq: 0,
    elapsed_us: 0,
    outcome: 0,
    errno: 0,
    pid: 0,
    tid: 0,
    timeout_ms: 0,
    flags: 0,
    comm: [0; COMM_LEN],
};

/// An event about a connection: whose it is, and nothing else yet.
///
/// # Safety
/// `stamp` must be map memory.
#[inline(always)]
pub unsafe fn about(stamp: *mut Stamp, at_ns: u64) -> Event {
    // SAFETY: by contract.
    unsafe {
        Event {
            row: (*stamp).row,
            incarnation: (*stamp).incarnation,
            generation: (*stamp).generation,
            at_ns,
            pid: (*stamp).pid,
            tid: (*stamp).tid,
            comm: (*stamp).comm,
            ..EMPTY
        }
    }
}

/// Sends an event.
#[inline(always)]
pub fn send(event: &Event) {
    try_send(event);
}

/// Sends an event; whether there was room for it.
#[inline(always)]
pub fn try_send(event: &Event) -> bool {
    let is_sent = maps::EVENTS.output::<Event>(event, 0).is_ok();
    if !is_sent {
        rows::count(|c| unsafe { &raw mut (*c).lost_events });
    }
    is_sent
}
