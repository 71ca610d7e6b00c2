//! Looks into the kernel maps of a running agent, past the agent: what must be empty again is.

use std::{
    io,
    mem::offset_of,
    os::fd::{AsRawFd as _, OwnedFd},
};

use agent_common::Row;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::agent::Agent;

pub(crate) const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_GET_NEXT_KEY: libc::c_long = 4;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;

/// `union bpf_attr` for a map's element: key, then value or next key (include/uapi/linux/bpf.h).
#[repr(C)]
struct Element {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `union bpf_attr` for `BPF_OBJ_GET_INFO_BY_FD`.
#[repr(C)]
struct Ask {
    fd: u32,
    length: u32,
    info: u64,
}

/// `struct bpf_map_info`, as far as the name.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Info {
    kind: u32,
    id: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
    name: [u8; 16],
}

/// What the agent and the kernel have noted of exchanges that the agent itself counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noted {
    /// Entries of `COUNTED`.
    pub notes: usize,
    /// The sum of `counted_open` over all rows: as many, when nothing is under way.
    pub open: u64,
}

/// Reads it.
pub fn noted(agent: &Agent) -> Noted {
    let (counted, _) = find(agent, "COUNTED");
    let (mut notes, mut key) = (0, None::<u64>);
    loop {
        let mut next = 0_u64;
        let from = key.as_ref().map_or(0, |key| &raw const *key as u64);
        if !element(BPF_MAP_GET_NEXT_KEY, &counted, from, &raw mut next as u64) {
            break;
        }
        notes += 1;
        key = Some(next);
    }
    let (rows, info) = find(agent, "ROWS");
    assert_eq!(
        info.value_size as usize,
        size_of::<Row>(),
        "one version of Row"
    );
    let mut value = vec![0_u8; size_of::<Row>()];
    let open = (0..info.max_entries).map(|index| {
        let at = &raw const index as u64;
        assert!(element(
            BPF_MAP_LOOKUP_ELEM,
            &rows,
            at,
            value.as_mut_ptr() as u64
        ));
        let field = &value[offset_of!(Row, counted_open)..][..4];
        u64::from(u32::from_ne_bytes(field.try_into().expect("four bytes")))
    });
    Noted {
        open: open.sum(),
        notes,
    }
}

/// A map of the agent, by a copy of its descriptor.
pub(crate) fn find(agent: &Agent, name: &str) -> (OwnedFd, Info) {
    let pid = Pid::from_raw(agent.pid()).expect("a process id");
    let process = pidfd_open(pid, PidfdFlags::empty()).expect("the agent runs");
    let directory = format!("/proc/{}/fd", agent.pid());
    for entry in std::fs::read_dir(&directory)
        .expect("its descriptors")
        .flatten()
    {
        let is_map = std::fs::read_link(entry.path())
            .is_ok_and(|link| link.to_string_lossy().contains("bpf-map"));
        let number = entry.file_name().to_string_lossy().parse::<i32>();
        let (true, Ok(number)) = (is_map, number) else {
            continue;
        };
        let Ok(map) = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) else {
            continue;
        };
        let mut info = Info::default();
        let mut ask = Ask {
            fd: map.as_raw_fd() as u32,
            length: size_of::<Info>() as u32,
            info: &raw mut info as u64,
        };
        bpf(BPF_OBJ_GET_INFO_BY_FD, &mut ask).expect("what the map is");
        if info.name.starts_with(name.as_bytes()) && info.name[name.len()] == 0 {
            return (map, info);
        }
    }
    panic!("the agent has no map {name}");
}

/// One operation on a map's element; false: there is none.
pub(crate) fn element(command: libc::c_long, map: &OwnedFd, key: u64, value: u64) -> bool {
    let mut element = Element {
        map_fd: map.as_raw_fd() as u32,
        padding: 0,
        key,
        value,
        flags: 0,
    };
    match bpf(command, &mut element) {
        Ok(()) => true,
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => false,
        Err(error) => panic!("bpf command {command}: {error}"),
    }
}

fn bpf<T>(command: libc::c_long, attr: &mut T) -> io::Result<()> {
    // SAFETY: the structure is as long as said, and what it points to is as large as the map's info
    // says and lives until the call ends.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, &raw mut *attr, size_of::<T>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
