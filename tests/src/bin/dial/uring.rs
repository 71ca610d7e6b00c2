//! One `connect()` by io_uring, by its system calls alone (include/uapi/linux/io_uring.h).

use std::{
    io,
    net::SocketAddr,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    ptr,
    sync::atomic::{AtomicU32, Ordering},
};

use crate::socket::{Raw, Socket};

const IORING_OFF_SQ_RING: i64 = 0;
const IORING_OFF_SQES: i64 = 0x1000_0000;
const IORING_ENTER_GETEVENTS: u32 = 1;
const IORING_OP_CONNECT: u8 = 16;
const ENTRIES: u32 = 4;

/// `struct io_sqring_offsets` and `struct io_cqring_offsets`: ten words each, of which these count.
#[repr(C)]
#[derive(Default)]
struct Offsets {
    head: u32,
    tail: u32,
    ring_mask: u32,
    ring_entries: u32,
    rest: [u32; 6],
}

impl Offsets {
    /// `array` of the submission ring: its seventh word.
    fn array(&self) -> u32 {
        self.rest[2]
    }

    /// `cqes` of the completion ring: its sixth word.
    fn cqes(&self) -> u32 {
        self.rest[1]
    }
}

/// `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    wq_fd: u32,
    resv: [u32; 3],
    sq_off: Offsets,
    cq_off: Offsets,
}

/// The parts of `struct io_uring_sqe` that a connect needs.
#[repr(C)]
struct Sqe {
    opcode: u8,
    flags: u8,
    ioprio: u16,
    fd: i32,
    off: u64,
    addr: u64,
    rest: [u64; 5],
}

/// `struct io_uring_cqe`.
#[repr(C)]
struct Cqe {
    user_data: u64,
    res: i32,
    flags: u32,
}

/// Connects; the errno, 0 when established.
pub fn connect(socket: &Socket, to: SocketAddr) -> i32 {
    let mut params = Params::default();
    let raw = Raw::from(to);
    // SAFETY: system calls as their manual pages say; the mappings are as large as the kernel says
    // and live until the process ends; the address outlives the request, which is waited for.
    unsafe {
        let fd = libc::syscall(libc::SYS_io_uring_setup, ENTRIES, &raw mut params);
        assert!(fd >= 0, "io_uring_setup: {}", io::Error::last_os_error());
        let ring = OwnedFd::from_raw_fd(fd as i32);
        let rings_size = (params.sq_off.array() + params.sq_entries * 4)
            .max(params.cq_off.cqes() + params.cq_entries * size_of::<Cqe>() as u32);
        let rings = map(&ring, rings_size as usize, IORING_OFF_SQ_RING);
        let sqes = map(
            &ring,
            params.sq_entries as usize * size_of::<Sqe>(),
            IORING_OFF_SQES,
        );

        sqes.cast::<Sqe>().write(Sqe {
            opcode: IORING_OP_CONNECT,
            flags: 0,
            ioprio: 0,
            fd: socket.raw(),
            off: u64::from(raw.length),
            addr: raw.pointer() as u64,
            rest: [0; 5],
        });
        rings
            .add(params.sq_off.array() as usize)
            .cast::<u32>()
            .write(0);
        let tail = rings.add(params.sq_off.tail as usize).cast::<AtomicU32>();
        (*tail).store(1, Ordering::Release);
        let head = rings.add(params.cq_off.head as usize).cast::<AtomicU32>();
        let ended = rings.add(params.cq_off.tail as usize).cast::<AtomicU32>();
        let mut submit = 1;
        while (*ended).load(Ordering::Acquire) == (*head).load(Ordering::Relaxed) {
            let done = libc::syscall(
                libc::SYS_io_uring_enter,
                ring.as_raw_fd(),
                submit,
                1,
                IORING_ENTER_GETEVENTS,
                ptr::null::<u8>(),
                0,
            );
            assert!(done >= 0, "io_uring_enter: {}", io::Error::last_os_error());
            submit = 0;
        }
        let cqe = rings
            .add(params.cq_off.cqes() as usize)
            .cast::<Cqe>()
            .read();
        -cqe.res
    }
}

/// # Safety
/// `size` must be what the kernel gave for this offset.
unsafe fn map(ring: &OwnedFd, size: usize, offset: i64) -> *mut u8 {
    // SAFETY: a new mapping.
    let memory = unsafe {
        libc::mmap(
            ptr::null_mut(),
            size,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_POPULATE,
            ring.as_raw_fd(),
            offset,
        )
    };
    assert_ne!(
        memory,
        libc::MAP_FAILED,
        "mmap of io_uring: {}",
        io::Error::last_os_error()
    );
    memory.cast()
}
