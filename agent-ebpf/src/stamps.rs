//! Where the stamp of a socket lies: see [`agent_common::stamp::Slot`].

use agent_common::{
    Stamp,
    stamp::{CONNECTION_SLOTS, PHASE_ENDED, PHASE_IDLE, Slot},
};
use aya_ebpf::bindings::BPF_NOEXIST;

use crate::{atomics, maps};

/// What a new entry of the hash map begins with. In read-only data, not on the stack.
static EMPTY: Stamp = Stamp::EMPTY;

/// A socket's stamp.
#[derive(Clone, Copy)]
pub struct Found {
    /// The stamp.
    pub stamp: *mut Stamp,
    /// Its slot; null: it lies in the hash map.
    slot: *mut Slot,
    /// The socket's cookie.
    cookie: u64,
}

impl Found {
    /// The connection has ended. The place is kept until the program closes the socket, and so knows.
    ///
    /// # Safety
    /// As [`Found::give_back`].
    #[inline(always)]
    pub unsafe fn ended(self) {
        // SAFETY: map memory.
        unsafe {
            if (*self.stamp).released != 0 {
                self.give_back();
            } else {
                (&raw mut (*self.stamp).phase).write_volatile(PHASE_ENDED);
            }
        }
    }

    /// Gives the place back: the connection has ended.
    ///
    /// # Safety
    /// The stamp must not be used any more.
    #[inline(always)]
    pub unsafe fn give_back(self) {
        if self.slot.is_null() {
            let _ = maps::SPILLED.remove(self.cookie);
        } else {
            // The next owner may be an adopted socket, whose packets do not wait until its stamp is
            // written.
            // SAFETY: map memory.
            unsafe {
                (&raw mut (*self.stamp).phase).write_volatile(PHASE_IDLE);
                (&raw mut (*self.slot).owner).write_volatile(0);
            }
        }
    }
}

/// The slot that a cookie names.
#[inline(always)]
fn slot(cookie: u64) -> Option<*mut Slot> {
    maps::CONNECTIONS.get_ptr_mut((cookie as u32) & (CONNECTION_SLOTS - 1))
}

#[inline(always)]
fn spilled(cookie: u64) -> Option<Found> {
    Some(Found {
        stamp: maps::SPILLED.get_ptr_mut(cookie)?,
        slot: core::ptr::null_mut(),
        cookie,
    })
}

/// The stamp of the socket with this cookie, if it has one. (Cookie 0, of a packet without a
/// socket, finds nothing.)
#[inline(always)]
pub fn find(cookie: u64) -> Option<Found> {
    let slot = slot(cookie)?;
    // SAFETY: map memory.
    unsafe {
        if atomics::load(&raw const (*slot).owner) == cookie {
            if cookie == 0 {
                return None;
            }
            return Some(Found {
                stamp: &raw mut (*slot).stamp,
                slot,
                cookie,
            });
        }
        if atomics::load(&raw const (*slot).spilled) == 0 {
            return None;
        }
    }
    spilled(cookie)
}

/// A stamp for a socket that has none; `None` when there is no room for it. Only the socket itself
/// claims with its cookie, and the kernel has it locked.
#[inline(always)]
pub fn claim(cookie: u64) -> Option<Found> {
    let slot = slot(cookie)?;
    // SAFETY: map memory.
    unsafe {
        let owner = atomics::load(&raw const (*slot).owner);
        if owner == cookie || (owner == 0 && atomics::replace(&raw mut (*slot).owner, 0, cookie)) {
            let stamp = &raw mut (*slot).stamp;
            (*stamp).phase = PHASE_IDLE;
            return Some(Found {
                stamp,
                slot,
                cookie,
            });
        }
        (&raw mut (*slot).spilled).write_volatile(1);
    }
    if let Some(found) = spilled(cookie) {
        return Some(found);
    }
    let _ = maps::SPILLED.insert(cookie, &EMPTY, u64::from(BPF_NOEXIST));
    spilled(cookie)
}
