//! Reading kernel structures by offsets that the agent took from the running kernel's BTF.

use core::mem::MaybeUninit;

use agent_common::{Offsets, control::NO_OFFSET};
use aya_ebpf::helpers::generated::{bpf_get_current_task, bpf_probe_read_kernel};

/// Set by the agent before loading (a read-only global, which the verifier knows as constants).
#[unsafe(no_mangle)]
static OFFSETS: Offsets = Offsets {
    sock_err: NO_OFFSET,
    sock_kern: NO_OFFSET,
    sock_kern_mask: 0,
    sock_net: NO_OFFSET,
    net_inum: NO_OFFSET,
    task_flags: NO_OFFSET,
};

/// PF_EXITING (include/linux/sched.h): set by do_exit() before it closes files.
const PF_EXITING: u32 = 0x4;

#[inline(always)]
fn offsets() -> Offsets {
    // SAFETY: a static of this object; volatile because the agent replaces its bytes before load.
    unsafe { core::ptr::read_volatile(&OFFSETS) }
}

#[inline(always)]
fn read<T: Copy>(address: u64) -> Option<T> {
    let mut value = MaybeUninit::<T>::uninit();
    // SAFETY: the helper checks the address and writes the whole value, or reports failure.
    unsafe {
        (bpf_probe_read_kernel(
            value.as_mut_ptr().cast(),
            size_of::<T>() as u32,
            address as *const _,
        ) == 0)
            .then(|| value.assume_init())
    }
}

/// The address behind a pointer of the verifier's, as a number that may be calculated with.
/// (The verifier forbids arithmetic on socket pointers; through memory it becomes a scalar.)
#[inline(always)]
pub fn address_of<T>(pointer: *const T) -> Option<u64> {
    let slot = pointer;
    read::<u64>(&raw const slot as u64)
}

/// `sk->sk_err`, positive; `None` when it cannot be read.
#[inline(always)]
pub fn socket_error(sk: u64) -> Option<u32> {
    let offset = offsets().sock_err;
    if offset == NO_OFFSET {
        return None;
    }
    read::<i32>(sk + u64::from(offset)).map(i32::unsigned_abs)
}

/// Whether the kernel itself owns the socket (NFS, CIFS, NVMe over TCP and kin).
#[inline(always)]
pub fn is_kernel_socket(sk: u64) -> bool {
    let offsets = offsets();
    if offsets.sock_kern == NO_OFFSET {
        return false;
    }
    match read::<u8>(sk + u64::from(offsets.sock_kern)) {
        Some(byte) => u32::from(byte) & offsets.sock_kern_mask != 0,
        None => false,
    }
}

/// Inode of the socket's network namespace, 0 when it cannot be read.
#[inline(always)]
pub fn netns_inode(sk: u64) -> u32 {
    let offsets = offsets();
    if offsets.sock_net == NO_OFFSET || offsets.net_inum == NO_OFFSET {
        return 0;
    }
    let Some(net) = read::<u64>(sk + u64::from(offsets.sock_net)) else {
        return 0;
    };
    read::<u32>(net + u64::from(offsets.net_inum)).unwrap_or(0)
}

/// Whether the current task is on its way out: its sockets are closed by its death, not by it.
#[inline(always)]
pub fn current_is_exiting() -> bool {
    let offset = offsets().task_flags;
    if offset == NO_OFFSET {
        return false;
    }
    // SAFETY: no arguments.
    let task = unsafe { bpf_get_current_task() };
    read::<u32>(task + u64::from(offset)).is_some_and(|flags| flags & PF_EXITING != 0)
}
