//! Which kernel programs hang on a control group: what `bpftool cgroup show` tells.

use std::{fs::File, os::fd::AsRawFd as _};

use crate::cgroup::TestCgroup;

const BPF_PROG_QUERY: libc::c_long = 16;
/// `enum bpf_attach_type`: sock_ops, inet4_connect, inet6_connect, inet_sock_release.
const ATTACH_TYPES: [u32; 4] = [3, 10, 11, 34];

/// cgroup_getsockopt and cgroup_setsockopt, attached only while a policy needs them.
const SOCKOPT_TYPES: [u32; 2] = [21, 22];

/// The part of `union bpf_attr` that a query uses (include/uapi/linux/bpf.h).
#[repr(C)]
#[derive(Default)]
struct Query {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    rest: [u32; 5],
}

/// Programs on sock_ops, connect4, connect6 and sock_release of the group itself.
pub fn programs(group: &TestCgroup) -> [u32; 4] {
    ATTACH_TYPES.map(|attach_type| count(group, attach_type))
}

/// Programs on getsockopt and setsockopt of the group itself.
pub fn sockopt_programs(group: &TestCgroup) -> [u32; 2] {
    SOCKOPT_TYPES.map(|attach_type| count(group, attach_type))
}

fn count(group: &TestCgroup, attach_type: u32) -> u32 {
    let directory = File::open(group.path()).expect("open the control group");
    let mut query = Query {
        target_fd: directory.as_raw_fd() as u32,
        attach_type,
        ..Query::default()
    };
    // SAFETY: the structure is as long as said; without a list of ids only the count is written.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_QUERY,
            &raw mut query,
            size_of::<Query>(),
        )
    };
    assert_eq!(
        result,
        0,
        "query programs: {}",
        std::io::Error::last_os_error()
    );
    query.prog_cnt
}
