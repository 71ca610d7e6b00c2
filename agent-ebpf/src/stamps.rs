//! Where the stamp of a socket lies: see [`agent_common::stamp::Slot`].

use agent_common::{
    Stamp,
    stamp::{PHASE_IDLE, Slot},
};
use aya_ebpf::{
    bindings::{__sk_buff, BPF_SK_STORAGE_GET_F_CREATE},
    cty::c_void,
    helpers::generated::{bpf_sk_fullsock, bpf_sk_storage_get},
};

use crate::{atomics, maps};

/// A socket's stamp.
#[derive(Clone, Copy)]
pub struct Found {
    /// The stamp.
    pub stamp: *mut Stamp,
    /// Its slot; null: it lies in socket storage.
    slot: *mut Slot,
}

impl Found {
    /// Gives the slot back: the connect has ended.
    ///
    /// # Safety
    /// The stamp must not be used any more.
    #[inline(always)]
    pub unsafe fn give_back(self) {
        if !self.slot.is_null() {
            // SAFETY: map memory.
            unsafe { (&raw mut (*self.slot).owner).write_volatile(0) };
        }
    }
}

/// The slot that a cookie names.
#[inline(always)]
fn slot(cookie: u64) -> Option<*mut Slot> {
    maps::CONNECTIONS.get_ptr_mut((cookie as u32) & (maps::CONNECTION_SLOTS - 1))
}

/// # Safety
/// `sk` must be what the program type takes for socket storage, not null.
#[inline(always)]
unsafe fn stored(sk: *mut c_void, flags: u64) -> Option<Found> {
    // SAFETY: by contract.
    let stamp = unsafe {
        bpf_sk_storage_get(
            (&raw const maps::STAMPS).cast_mut().cast(),
            sk,
            core::ptr::null_mut(),
            flags,
        )
    }
    .cast::<Stamp>();
    if stamp.is_null() {
        return None;
    }
    Some(Found {
        stamp,
        slot: core::ptr::null_mut(),
    })
}

/// The stamp of a socket, if it has one.
///
/// # Safety
/// `sk` must be what the program type takes for socket storage, not null; `cookie` its cookie.
#[inline(always)]
pub unsafe fn find(cookie: u64, sk: *mut c_void) -> Option<Found> {
    let slot = slot(cookie)?;
    // SAFETY: map memory.
    unsafe {
        if atomics::load(&raw const (*slot).owner) == cookie {
            return Some(Found {
                stamp: &raw mut (*slot).stamp,
                slot,
            });
        }
        if atomics::load(&raw const (*slot).spilled) == 0 {
            return None;
        }
        stored(sk, 0)
    }
}

/// [`find`] for a packet of the socket.
///
/// # Safety
/// `skb` must be the program's context, `cookie` the cookie of its socket (0: it has none).
#[inline(always)]
pub unsafe fn find_by_packet(cookie: u64, skb: *mut __sk_buff) -> Option<*mut Stamp> {
    if cookie == 0 {
        return None;
    }
    let slot = slot(cookie)?;
    // SAFETY: map memory; the helper takes what the context has.
    unsafe {
        if atomics::load(&raw const (*slot).owner) == cookie {
            return Some(&raw mut (*slot).stamp);
        }
        if atomics::load(&raw const (*slot).spilled) == 0 {
            return None;
        }
        let sk = (*skb).__bindgen_anon_2.sk;
        if sk.is_null() {
            return None;
        }
        let sk = bpf_sk_fullsock(sk);
        if sk.is_null() {
            return None;
        }
        Some(stored(sk.cast(), 0)?.stamp)
    }
}

/// A stamp for a socket that has none; `None` when there is no memory for it. Only the socket
/// itself claims with its cookie, and the kernel has it locked.
///
/// # Safety
/// As [`find`].
#[inline(always)]
pub unsafe fn claim(cookie: u64, sk: *mut c_void) -> Option<Found> {
    let slot = slot(cookie)?;
    // SAFETY: map memory.
    unsafe {
        let owner = atomics::load(&raw const (*slot).owner);
        if owner == cookie || (owner == 0 && atomics::replace(&raw mut (*slot).owner, 0, cookie)) {
            let stamp = &raw mut (*slot).stamp;
            (*stamp).phase = PHASE_IDLE;
            return Some(Found { stamp, slot });
        }
        (&raw mut (*slot).spilled).write_volatile(1);
        stored(sk, BPF_SK_STORAGE_GET_F_CREATE.into())
    }
}
