//! Connections that the kernel follows, as the agent sees them: stamps in mapped slots and in the
//! hash map beside them, and the exchanges that the agent knows to hang.
//!
//! The kernel writes stamps at any time. A copy is therefore only a hint: it may be half of one
//! exchange and half of the next. Whoever acts on one looks again ([`Connections::get`]).

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
};

use agent_common::{
    COMM_LEN, Stamp, http,
    stamp::{CONNECTION_SLOTS, PHASE_OPEN, PROTOCOL_HTTP1, Slot, pack_counted, unpack_request},
};
use aya::maps::{HashMap, MapData, MapError};

use super::mapped::Mapped;

/// Entries of the hash map taken with one system call.
const BATCH: usize = 512;

/// See the module.
pub struct Connections {
    slots: Mapped<Slot>,
    /// Stamps whose slot another socket has, by cookie.
    spilled: MapData,
    hung: Mutex<HashMap<MapData, u64, u64>>,
}

impl Connections {
    /// Takes over the maps. They stay open as they are: programs that are loaded later name them by
    /// their descriptors.
    pub(super) fn new(
        slots: Mapped<Slot>,
        spilled: MapData,
        hung: HashMap<MapData, u64, u64>,
    ) -> Self {
        Self {
            slots,
            spilled,
            hung: Mutex::new(hung),
        }
    }

    /// Memory of the slots, bytes.
    pub fn bytes(&self) -> usize {
        self.slots.bytes()
    }

    /// Calls `found` with the cookie and the stamp of every connection on which an answer is owed.
    ///
    /// Costs about a millisecond for all slots, and some 0.2 us for each stamp in the hash map.
    pub fn each_owed(&self, mut found: impl FnMut(u64, &Stamp)) {
        for index in 0..CONNECTION_SLOTS {
            if let Some((cookie, stamp)) = self.owed_in(index) {
                found(cookie, &stamp);
            }
        }
        self.each_spilled(|cookie, stamp| {
            if stamp.owed().is_some() {
                found(cookie, stamp);
            }
        });
    }

    /// Calls `found` with the cookie and the stamp of every established connection. Copies all of
    /// them, so it costs more than [`Connections::each_owed`].
    pub fn each_open(&self, mut found: impl FnMut(u64, &Stamp)) {
        for index in 0..CONNECTION_SLOTS {
            if let Some((cookie, stamp)) = self.copy(index)
                && stamp.phase == PHASE_OPEN
            {
                found(cookie, &stamp);
            }
        }
        self.each_spilled(|cookie, stamp| {
            if stamp.phase == PHASE_OPEN {
                found(cookie, stamp);
            }
        });
    }

    /// As [`Connections::each_open`], but only those on which an answer in HTTP/1 may be unfinished. Costs
    /// what [`Connections::each_owed`] does.
    pub fn each_unfinished(&self, mut found: impl FnMut(u64, &Stamp)) {
        for index in 0..CONNECTION_SLOTS {
            if self.may_be_unfinished(index)
                && let Some((cookie, stamp)) = self.copy(index)
                && http::unfinished(&stamp).is_some()
            {
                found(cookie, &stamp);
            }
        }
        self.each_spilled(|cookie, stamp| {
            if http::unfinished(stamp).is_some() {
                found(cookie, stamp);
            }
        });
    }

    /// The stamp of the connection with this cookie, if it is still followed.
    pub fn get(&self, cookie: u64) -> Option<Stamp> {
        let index = (cookie as u32) & (CONNECTION_SLOTS - 1);
        match self.copy(index) {
            Some((owner, stamp)) if owner == cookie => Some(stamp),
            _ => self.get_spilled(cookie),
        }
    }

    /// Notes which process has an adopted connection, of which the kernel does not know any. Only of
    /// stamps in slots, which are words that both sides can write.
    pub fn set_process(&self, cookie: u64, pid: u32, comm: [u8; COMM_LEN]) {
        let Some(slot) = self.slots.get((cookie as u32) & (CONNECTION_SLOTS - 1)) else {
            return;
        };
        // SAFETY: within the mapping, aligned. Should the place get another owner in between, that
        // one has a process (or will be given one by the kernel), and keeps it.
        unsafe {
            let owner = AtomicU64::from_ptr(&raw mut (*slot).owner);
            if owner.load(Ordering::Acquire) != cookie {
                return;
            }
            let known = AtomicU32::from_ptr(&raw mut (*slot).stamp.pid);
            if known
                .compare_exchange(0, pid, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
            {
                (&raw mut (*slot).stamp.comm).write_volatile(comm);
            }
        }
    }

    /// Notes that exchange `number` of a connection hangs and stands in the window as call `seq`.
    ///
    /// # Errors
    /// When the map is full, or the socket has such a note already.
    pub fn note_counted(&self, cookie: u64, number: u32, seq: u64) -> Result<(), MapError> {
        const NOEXIST: u64 = 1;
        self.hung()
            .insert(cookie, pack_counted(number, seq), NOEXIST)
    }

    /// Whether there is such a note.
    pub fn is_counted(&self, cookie: u64) -> bool {
        self.hung().get(&cookie, 0).is_ok()
    }

    /// Takes such a note back; false when the kernel has taken it first.
    pub fn take_counted(&self, cookie: u64) -> bool {
        self.hung().remove(&cookie).is_ok()
    }

    fn hung(&self) -> std::sync::MutexGuard<'_, HashMap<MapData, u64, u64>> {
        // Nothing is half done when a holder panics.
        self.hung.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Only a few words of each slot are read, unless an answer is owed.
    fn owed_in(&self, index: u32) -> Option<(u64, Stamp)> {
        let slot = self.slots.get(index)?;
        // SAFETY: within the mapping; single words are never torn.
        let is_owed = unsafe {
            (&raw const (*slot).owner).read_volatile() != 0
                && (&raw const (*slot).stamp.phase).read_volatile() == PHASE_OPEN
                && unpack_request((&raw const (*slot).stamp.request).read_volatile()).0
                    != (&raw const (*slot).stamp.answers).read_volatile()
        };
        if !is_owed {
            return None;
        }
        self.copy(index).filter(|(_, stamp)| stamp.owed().is_some())
    }

    /// Only a few words of each slot are read.
    fn may_be_unfinished(&self, index: u32) -> bool {
        // SAFETY: within the mapping; single words are never torn.
        self.slots.get(index).is_some_and(|slot| unsafe {
            (&raw const (*slot).owner).read_volatile() != 0
                && (&raw const (*slot).stamp.phase).read_volatile() == PHASE_OPEN
                && (&raw const (*slot).stamp.protocol).read_volatile() == PROTOCOL_HTTP1
                && (&raw const (*slot).stamp.tls_seen).read_volatile() != http::BODY_NONE
        })
    }

    /// A copy of a slot that had one owner all the while.
    fn copy(&self, index: u32) -> Option<(u64, Stamp)> {
        let slot = self.slots.get(index)?;
        // SAFETY: within the mapping, aligned.
        let owner = unsafe { AtomicU64::from_ptr(&raw mut (*slot).owner) };
        let before = owner.load(Ordering::Acquire);
        if before == 0 {
            return None;
        }
        // SAFETY: within the mapping, and every bit pattern is a stamp.
        let stamp = unsafe { (&raw const (*slot).stamp).read_volatile() };
        fence(Ordering::Acquire);
        (owner.load(Ordering::Relaxed) == before).then_some((before, stamp))
    }

    fn get_spilled(&self, cookie: u64) -> Option<Stamp> {
        let mut stamp = Stamp::EMPTY;
        let mut attributes = ElementAttributes {
            map: self.spilled.fd().as_fd().as_raw_fd() as u32,
            reserved: 0,
            key: (&raw const cookie) as u64,
            value: (&raw mut stamp) as u64,
            flags: 0,
        };
        // SAFETY: key and value have the sizes that the map was made with.
        unsafe { bpf(LOOKUP_ELEMENT, &mut attributes) }.ok()?;
        Some(stamp)
    }

    fn each_spilled(&self, mut found: impl FnMut(u64, &Stamp)) {
        let mut cookies = [0_u64; BATCH];
        let mut stamps = vec![Stamp::EMPTY; BATCH];
        // Where the next batch begins: the kernel's own notion (32 bits for a hash map).
        let mut at = 0_u64;
        let mut is_first = true;
        loop {
            let mut attributes = BatchAttributes {
                from: if is_first { 0 } else { (&raw const at) as u64 },
                to: (&raw mut at) as u64,
                keys: cookies.as_mut_ptr() as u64,
                values: stamps.as_mut_ptr() as u64,
                count: BATCH as u32,
                map: self.spilled.fd().as_fd().as_raw_fd() as u32,
                element_flags: 0,
                flags: 0,
            };
            // SAFETY: the arrays hold `count` keys and values of the map's sizes.
            let result = unsafe { bpf(LOOKUP_BATCH, &mut attributes) };
            let is_last = match result {
                Ok(()) => false,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => true,
                // A bucket with more than `BATCH` entries cannot be, with twice as many buckets
                // as entries; anything else ends the look: the next one is soon.
                Err(_) => return,
            };
            let count = (attributes.count as usize).min(BATCH);
            for (cookie, stamp) in cookies.iter().zip(&stamps).take(count) {
                found(*cookie, stamp);
            }
            if is_last {
                return;
            }
            is_first = false;
        }
    }
}

/// Commands of bpf(2) (include/uapi/linux/bpf.h, `enum bpf_cmd`) that aya has not.
const LOOKUP_ELEMENT: libc::c_long = 1;
const LOOKUP_BATCH: libc::c_long = 24;

/// `union bpf_attr` for BPF_MAP_LOOKUP_ELEM.
#[repr(C)]
struct ElementAttributes {
    map: u32,
    reserved: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `union bpf_attr` for BPF_MAP_LOOKUP_BATCH (since Linux 5.6).
#[repr(C)]
struct BatchAttributes {
    from: u64,
    to: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    element_flags: u64,
    flags: u64,
}

/// # Safety
/// The attributes must be those of the command.
unsafe fn bpf<T>(command: libc::c_long, attributes: &mut T) -> io::Result<()> {
    // SAFETY: by contract.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attributes),
            size_of::<T>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
