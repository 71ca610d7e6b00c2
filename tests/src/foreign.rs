//! Somebody else's program on the connect hook, and somebody who takes ours off.

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::fs::MetadataExt as _,
    },
};

use crate::cgroup::TestCgroup;

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_ATTACH: libc::c_long = 8;
const BPF_PROG_TYPE_CGROUP_SOCK_ADDR: u32 = 18;
/// The hook on IPv4 connects (`enum bpf_attach_type`).
pub const CONNECT4: u32 = 10;
const BPF_F_ALLOW_MULTI: u32 = 1 << 1;
/// Helpers by number (include/uapi/linux/bpf.h).
const GET_RETVAL: i32 = 186;
const SET_RETVAL: i32 = 187;

/// `struct bpf_insn`; the byte of registers is the destination, and the source in its high half.
#[repr(C)]
struct Instruction {
    code: u8,
    registers: u8,
    offset: i16,
    immediate: i32,
}

const fn instruction(code: u8, registers: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction {
        code,
        registers,
        offset,
        immediate,
    }
}

/// The part of `union bpf_attr` that loading uses.
#[repr(C)]
#[derive(Default)]
struct Load {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
    prog_ifindex: u32,
    expected_attach_type: u32,
}

/// The part of `union bpf_attr` that attaching uses.
#[repr(C)]
struct Attach {
    target_fd: u32,
    attach_bpf_fd: u32,
    attach_type: u32,
    attach_flags: u32,
}

fn bpf<T>(command: libc::c_long, attributes: &mut T) -> i32 {
    // SAFETY: the attributes are as long as said, and what they point to outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes, size_of::<T>()) };
    assert!(
        result >= 0,
        "bpf({command}): {}",
        io::Error::last_os_error()
    );
    result as i32
}

/// Attaches a program to IPv4 connects of the group that gives every refusal of a program before
/// it another errno. It goes with the group.
pub fn rename_refusals(group: &TestCgroup, errno: i32) {
    attach(
        group,
        &[
            instruction(0x85, 0, 0, GET_RETVAL),
            instruction(0x55, 0, 2, 0), // if r0 != 0, skip the next two
            instruction(0xb7, 0, 0, 1),
            instruction(0x95, 0, 0, 0), // exit: pass
            instruction(0xb7, 1, 0, -errno),
            instruction(0x85, 0, 0, SET_RETVAL),
            instruction(0xb7, 0, 0, 0),
            instruction(0x95, 0, 0, 0), // exit: refuse
        ],
    );
}

/// Attaches a program to IPv4 connects of the group that refuses each of them with this errno. It
/// goes with the group.
pub fn refuse_all(group: &TestCgroup, errno: i32) {
    attach(
        group,
        &[
            instruction(0xb7, 1, 0, -errno),
            instruction(0x85, 0, 0, SET_RETVAL),
            instruction(0xb7, 0, 0, 0),
            instruction(0x95, 0, 0, 0), // exit: refuse
        ],
    );
}

/// Attaches a program to IPv4 connects of the group that lets everything pass, whatever programs before it
/// have decided. It goes with the group.
pub fn undo_refusals(group: &TestCgroup) {
    attach(
        group,
        &[
            instruction(0xb7, 1, 0, 0),
            instruction(0x85, 0, 0, SET_RETVAL),
            instruction(0xb7, 0, 0, 1),
            instruction(0x95, 0, 0, 0), // exit: pass
        ],
    );
}

/// Attaches a sock_ops program to the group that, once a connection is established, takes away every
/// callback that anybody has asked for. It goes with the group.
pub fn take_callbacks(group: &TestCgroup) {
    /// Helper and operation by number (include/uapi/linux/bpf.h).
    const SET_CALLBACKS: i32 = 59;
    const ACTIVE_ESTABLISHED: i32 = 4;
    /// BPF_PROG_TYPE_SOCK_OPS, BPF_CGROUP_SOCK_OPS.
    const SOCK_OPS: (u32, u32) = (13, 3);
    attach_as(
        group,
        SOCK_OPS,
        &[
            instruction(0x61, 0x12, 0, 0), // r2 = op
            instruction(0x55, 2, 2, ACTIVE_ESTABLISHED),
            instruction(0xb7, 2, 0, 0),
            instruction(0x85, 0, 0, SET_CALLBACKS),
            instruction(0xb7, 0, 0, 1),
            instruction(0x95, 0, 0, 0),
        ],
    );
}

/// Loads a program and attaches it to IPv4 connects of the group.
fn attach(group: &TestCgroup, code: &[Instruction]) {
    let kind = (BPF_PROG_TYPE_CGROUP_SOCK_ADDR, CONNECT4);
    attach_as(group, kind, code);
}

/// Loads a program of a type and attaches it as such to the group.
fn attach_as(group: &TestCgroup, (prog_type, attach_type): (u32, u32), code: &[Instruction]) {
    let license = c"GPL";
    let loaded = bpf(
        BPF_PROG_LOAD,
        &mut Load {
            prog_type,
            insn_cnt: code.len() as u32,
            insns: code.as_ptr() as u64,
            license: license.as_ptr() as u64,
            expected_attach_type: attach_type,
            ..Load::default()
        },
    );
    // SAFETY: the descriptor was just made and belongs to nobody else.
    let program = unsafe { OwnedFd::from_raw_fd(loaded) };
    let directory = File::open(group.path()).expect("open the control group");
    bpf(
        BPF_PROG_ATTACH,
        &mut Attach {
            target_fd: directory.as_raw_fd() as u32,
            attach_bpf_fd: program.as_raw_fd() as u32,
            attach_type,
            attach_flags: BPF_F_ALLOW_MULTI,
        },
    );
}

/// The part of `union bpf_attr` that asking for a link by its id uses.
#[repr(C)]
#[derive(Default)]
struct LinkId {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

/// Takes the programs of a process off a hook of the group, where they are attached by links.
pub fn detach(process: i32, group: &TestCgroup, attach_type: u32) {
    const LINK_GET_FD_BY_ID: libc::c_long = 30;
    const LINK_DETACH: libc::c_long = 34;
    let metadata = fs::metadata(group.path()).expect("stat the group");
    let wanted = [
        format!("cgroup_id:\t{}", metadata.ino()),
        format!("attach_type:\t{attach_type}"),
    ];
    let descriptors = fs::read_dir(format!("/proc/{process}/fdinfo")).expect("look at descriptors");
    let mut links = 0;
    for entry in descriptors.flatten() {
        // Closed meanwhile: none of those.
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let has = |line: &String| text.lines().any(|of| of == line);
        let id = text
            .lines()
            .find_map(|line| line.strip_prefix("link_id:\t"));
        let (Some(id), true) = (id, wanted.iter().all(has)) else {
            continue;
        };
        let id = id.parse().expect("an id");
        let fd = bpf(
            LINK_GET_FD_BY_ID,
            &mut LinkId {
                id,
                ..LinkId::default()
            },
        );
        // SAFETY: the descriptor was just made and belongs to nobody else.
        let link = unsafe { OwnedFd::from_raw_fd(fd) };
        bpf(LINK_DETACH, &mut [link.as_raw_fd() as u32]);
        links += 1;
    }
    assert_eq!(
        links,
        1,
        "links of process {process} on {}",
        group.path().display()
    );
}
