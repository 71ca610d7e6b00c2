//! Reading kernel structures by offsets that the agent took from the running kernel's BTF.
//!
//! A TCP socket that the verifier knows by type ([`TcpSocket`]) is read by plain loads; the
//! verifier checks each offset against the type, and sees the offsets as constants because they lie
//! in a frozen read-only map. Elsewhere the memory is copied by a helper.

use core::mem::MaybeUninit;

use agent_common::{COMM_LEN, Offsets, control::NO_OFFSET};
use aya_ebpf::{
    bindings::{BPF_SOCK_OPS_STATE_CB_FLAG, bpf_sock},
    cty::c_void,
    helpers::generated::{
        bpf_get_current_task, bpf_get_current_task_btf, bpf_probe_read_kernel, bpf_skc_to_tcp_sock,
    },
};

/// Set by the agent before loading (a read-only global, which the verifier knows as constants).
#[unsafe(no_mangle)]
static OFFSETS: Offsets = Offsets {
    sock_err: NO_OFFSET,
    sock_kern: NO_OFFSET,
    sock_kern_mask: 0,
    sock_net: NO_OFFSET,
    net_inum: NO_OFFSET,
    task_flags: NO_OFFSET,
    user_timeout: NO_OFFSET,
    sock_shutdown: NO_OFFSET,
    received: NO_OFFSET,
    copied: NO_OFFSET,
    sock_cookie: NO_OFFSET,
    errors_queued: NO_OFFSET,
    first_error: NO_OFFSET,
    error_of_packet: NO_OFFSET,
    callbacks: NO_OFFSET,
    task_pid: NO_OFFSET,
    task_tgid: NO_OFFSET,
    task_comm: NO_OFFSET,
    task_cgroups: NO_OFFSET,
    default_cgroup: NO_OFFSET,
    cgroup_node: NO_OFFSET,
    node_id: NO_OFFSET,
};

/// PF_EXITING (include/linux/sched.h): set by do_exit() before it closes files.
const PF_EXITING: u32 = 0x4;

/// One of the offsets. Read singly: a copy of the whole struct would hide the constants.
macro_rules! offset {
    ($field:ident) => {
        // SAFETY: a static of this object; volatile because the agent replaces its bytes.
        unsafe { core::ptr::read_volatile(&raw const OFFSETS.$field) }
    };
}

/// A full TCP socket as the kernel has it (`struct tcp_sock`, `struct sock` at its begin).
#[derive(Clone, Copy)]
pub struct TcpSocket(*const u8);

impl TcpSocket {
    /// The socket of a context, or `None` if it is no full TCP socket.
    ///
    /// # Safety
    /// `sk` must be a socket pointer of the program's context, not null.
    #[inline(always)]
    pub unsafe fn of(sk: *mut bpf_sock) -> Option<Self> {
        // SAFETY: by contract.
        let tcp = unsafe { bpf_skc_to_tcp_sock(sk.cast()) };
        if tcp.is_null() {
            return None;
        }
        Some(Self(tcp.cast()))
    }

    /// The socket that an iterator visits, or `None` if it is no full TCP socket.
    ///
    /// # Safety
    /// `common` must be the iterator's, not null.
    #[inline(always)]
    pub unsafe fn visited(common: *mut c_void) -> Option<Self> {
        // SAFETY: by contract.
        let tcp = unsafe { bpf_skc_to_tcp_sock(common) };
        if tcp.is_null() {
            return None;
        }
        Some(Self(tcp.cast()))
    }

    /// For helpers that take the socket.
    #[inline(always)]
    pub fn pointer(self) -> *mut c_void {
        self.0.cast_mut().cast()
    }

    /// A member.
    ///
    /// # Safety
    /// As [`load`].
    #[inline(always)]
    pub unsafe fn member<T: Copy>(self, offset: u32) -> T {
        // SAFETY: by contract.
        unsafe { load(self.0, offset) }
    }

    /// `sk->sk_err`, positive; 0 where its offset is not known.
    #[inline(always)]
    pub fn error(self) -> u32 {
        let offset = offset!(sock_err);
        if offset == NO_OFFSET {
            return 0;
        }
        // SAFETY: the verifier has checked the offset against the type.
        unsafe { load::<i32>(self.0, offset) }.unsigned_abs()
    }

    /// What an ICMP error said that came while the socket was in use, positive; 0: none came, or it
    /// cannot be told. The kernel ends a connect by such an error, but only when the socket is not just
    /// then owned by a call (net/ipv4/tcp_ipv4.c, `tcp_v4_err`): on a short path the error is back
    /// before connect() has returned. Then it is queued, the program polls POLLERR, reads the error by
    /// SO_ERROR, and closes a socket that as such has none.
    #[inline(never)]
    pub fn error_told(self) -> u32 {
        /// SO_EE_ORIGIN_ICMP, SO_EE_ORIGIN_ICMP6 (include/uapi/linux/errqueue.h); others are no errors.
        const ICMP: [u8; 2] = [2, 3];
        let (queued, first) = (offset!(errors_queued), offset!(first_error));
        let of_packet = offset!(error_of_packet);
        if queued == NO_OFFSET || first == NO_OFFSET || of_packet == NO_OFFSET {
            return 0;
        }
        let at = |offset: u32| self.0.wrapping_add(offset as usize) as u64;
        if read::<u32>(at(queued)).unwrap_or(0) == 0 {
            return 0;
        }
        let Some(packet) = read::<u64>(at(first)) else {
            return 0;
        };
        // ee_errno, ee_origin, and three bytes more.
        let Some(said) = read::<u64>(packet.wrapping_add(u64::from(of_packet))) else {
            return 0;
        };
        let origin = (said >> 32) as u8;
        if origin == ICMP[0] || origin == ICMP[1] {
            said as u32
        } else {
            0
        }
    }

    /// Whether the kernel itself owns the socket (NFS, CIFS, NVMe over TCP and kin).
    #[inline(always)]
    pub fn is_kernels(self) -> bool {
        let offset = offset!(sock_kern);
        if offset == NO_OFFSET {
            return false;
        }
        // SAFETY: as above.
        u32::from(unsafe { load::<u8>(self.0, offset) }) & offset!(sock_kern_mask) != 0
    }

    /// `sk->sk_shutdown`; 0 where its offset is not known.
    #[inline(always)]
    pub fn shutdown(self) -> u32 {
        let offset = offset!(sock_shutdown);
        if offset == NO_OFFSET {
            return 0;
        }
        // SAFETY: as above.
        u32::from(unsafe { load::<u8>(self.0, offset) })
    }

    /// Bytes that have come and that the program has not read; 0 where that cannot be told.
    #[inline(always)]
    pub fn unread(self) -> u32 {
        let (received, copied) = (offset!(received), offset!(copied));
        if received == NO_OFFSET || copied == NO_OFFSET {
            return 0;
        }
        // SAFETY: as above.
        unsafe { load::<u32>(self.0, received).wrapping_sub(load::<u32>(self.0, copied)) }
    }

    /// TCP_USER_TIMEOUT, ms; 0: none (or its offset is not known).
    #[inline(always)]
    pub fn user_timeout(self) -> u32 {
        let offset = offset!(user_timeout);
        if offset == NO_OFFSET {
            return 0;
        }
        // SAFETY: as above.
        unsafe { load::<u32>(self.0, offset) }
    }

    /// `struct net` of its network namespace; null where that cannot be read.
    #[inline(always)]
    pub fn net(self) -> *const u8 {
        let to_net = offset!(sock_net);
        if to_net == NO_OFFSET {
            return core::ptr::null();
        }
        // SAFETY: as above; a pointer loaded from a typed one is typed, too.
        unsafe { load::<*const u8>(self.0, to_net) }
    }

    /// The cookie of its network namespace, which lies at `to_cookie`; `None` where that cannot be read.
    #[inline(always)]
    pub fn netns_cookie(self, to_cookie: u32) -> Option<u64> {
        let to_net = offset!(sock_net);
        if to_net == NO_OFFSET || to_cookie == NO_OFFSET {
            return None;
        }
        // SAFETY: as above; a pointer loaded from a typed one is typed, too, and a socket always has one.
        unsafe { Some(load::<u64>(load::<*const u8>(self.0, to_net), to_cookie)) }
    }

    /// Inode of its network namespace, 0 where that cannot be read.
    #[inline(always)]
    pub fn netns_inode(self) -> u32 {
        let (to_net, to_inum) = (offset!(sock_net), offset!(net_inum));
        if to_net == NO_OFFSET || to_inum == NO_OFFSET {
            return 0;
        }
        // SAFETY: as above; a pointer loaded from a typed one is typed, too.
        unsafe {
            let net = load::<*const u8>(self.0, to_net);
            if net.is_null() {
                return 0;
            }
            load::<u32>(net, to_inum)
        }
    }
}

/// The task that runs now, as the kernel has it (`struct task_struct`). One helper for what else takes three, and
/// each of them returns more than once.
#[derive(Clone, Copy)]
pub struct Task(*const u8);

impl Task {
    /// `None` where an offset is not known.
    #[inline(always)]
    pub fn current() -> Option<Self> {
        let offsets = [
            offset!(task_pid),
            offset!(task_tgid),
            offset!(task_comm),
            offset!(task_cgroups),
            offset!(default_cgroup),
            offset!(cgroup_node),
            offset!(node_id),
        ];
        for offset in offsets {
            if offset == NO_OFFSET {
                return None;
            }
        }
        // SAFETY: no arguments.
        Some(Self(unsafe { bpf_get_current_task_btf() } as *const u8))
    }

    /// Process and thread, as `bpf_get_current_pid_tgid` packs them.
    #[inline(always)]
    pub fn pid_tgid(self) -> u64 {
        let (process, thread) = (offset!(task_tgid), offset!(task_pid));
        // SAFETY: the verifier has checked the offsets against the type.
        let (process, thread) =
            unsafe { (load::<u32>(self.0, process), load::<u32>(self.0, thread)) };
        u64::from(process) << 32 | u64::from(thread)
    }

    /// As `bpf_get_current_cgroup_id`.
    #[inline(always)]
    pub fn cgroup_id(self) -> u64 {
        let (to_sets, to_cgroup) = (offset!(task_cgroups), offset!(default_cgroup));
        let (to_node, to_id) = (offset!(cgroup_node), offset!(node_id));
        // SAFETY: as above; a pointer loaded from a typed one is typed, too, and none of them is ever null.
        unsafe {
            let sets = load::<*const u8>(self.0, to_sets);
            let cgroup = load::<*const u8>(sets, to_cgroup);
            load::<u64>(load::<*const u8>(cgroup, to_node), to_id)
        }
    }

    /// Its name. (The kernel fills it up with zeros.)
    #[inline(always)]
    pub fn comm(self) -> [u64; COMM_LEN / 8] {
        let at = offset!(task_comm);
        // SAFETY: as above.
        unsafe { [load::<u64>(self.0, at), load::<u64>(self.0, at + 8)] }
    }
}

/// # Safety
/// The verifier must know the type behind `base` and find a member at `offset`.
#[inline(always)]
pub unsafe fn load<T: Copy>(base: *const u8, offset: u32) -> T {
    // SAFETY: by contract.
    unsafe { base.add(offset as usize).cast::<T>().read_volatile() }
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

/// `sk->sk_err`, positive, of a program whose context is the socket; 0 where it cannot be read.
#[inline(always)]
pub fn error_of_context(sk: *const bpf_sock) -> u32 {
    let offset = offset!(sock_err);
    if offset == NO_OFFSET {
        return 0;
    }
    // The verifier forbids arithmetic on the pointer; through memory it becomes a number.
    let slot = sk;
    let Some(address) = read::<u64>(&raw const slot as u64) else {
        return 0;
    };
    read::<i32>(address + u64::from(offset)).map_or(0, i32::unsigned_abs)
}

/// Whether sock_ops programs will be told of the end of a program's own socket (its context): another
/// one may have taken the flag for it away. True where that cannot be read.
#[inline(always)]
pub fn tells_of_context(sk: *const bpf_sock) -> bool {
    let offset = offset!(callbacks);
    if offset == NO_OFFSET {
        return true;
    }
    // As above.
    let slot = sk;
    let Some(address) = read::<u64>(&raw const slot as u64) else {
        return true;
    };
    read::<u8>(address + u64::from(offset))
        .is_none_or(|flags| u32::from(flags) & BPF_SOCK_OPS_STATE_CB_FLAG != 0)
}

/// The cookie of a socket that a context points to; 0 where it has none yet, or it cannot be read. For
/// programs that have no helper for it.
#[inline(always)]
pub fn cookie_of_context(sk: *const bpf_sock) -> u64 {
    let offset = offset!(sock_cookie);
    if offset == NO_OFFSET {
        return 0;
    }
    // As above.
    let slot = sk;
    let Some(address) = read::<u64>(&raw const slot as u64) else {
        return 0;
    };
    read::<u64>(address + u64::from(offset)).unwrap_or(0)
}

/// The cookie of the network namespace of a socket that a context points to; 0 where it cannot be read.
/// There is a helper, but not for packets on the oldest kernels.
#[inline(always)]
pub fn netns_cookie_of_context(sk: *const bpf_sock, to_cookie: u32) -> u64 {
    let to_net = offset!(sock_net);
    if to_net == NO_OFFSET || to_cookie == NO_OFFSET {
        return 0;
    }
    // As above.
    let slot = sk;
    let Some(address) = read::<u64>(&raw const slot as u64) else {
        return 0;
    };
    match read::<u64>(address + u64::from(to_net)) {
        Some(net) => read::<u64>(net + u64::from(to_cookie)).unwrap_or(0),
        None => 0,
    }
}

/// Whether the current task is on its way out: its sockets are closed by its death, not by it.
#[inline(always)]
pub fn current_is_exiting() -> bool {
    let offset = offset!(task_flags);
    if offset == NO_OFFSET {
        return false;
    }
    // SAFETY: no arguments.
    let task = unsafe { bpf_get_current_task() };
    read::<u32>(task + u64::from(offset)).is_some_and(|flags| flags & PF_EXITING != 0)
}
