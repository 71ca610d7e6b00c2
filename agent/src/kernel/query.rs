//! What hangs on the hooks of control groups, as the kernel says (BPF_PROG_QUERY).
//!
//! Nobody's word is taken for it that our programs are attached: others may have taken them off, and
//! run before or behind them.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    path::Path,
};

use super::events::comm;

/// `enum bpf_cmd` (include/uapi/linux/bpf.h).
const BPF_PROG_QUERY: libc::c_long = 16;
/// Those that run for the group, of outer groups too, in their order.
const BPF_F_QUERY_EFFECTIVE: u32 = 1;
/// `attach_flags` of a hook.
const BPF_F_ALLOW_OVERRIDE: u32 = 1;
const BPF_F_ALLOW_MULTI: u32 = 2;
/// Programs that are told at most: 64 may be attached to a group (kernel/bpf/cgroup.c,
/// `BPF_CGROUP_MAX_PROGS`), and as many to each outer one.
const MOST: usize = 256;

/// The part of `union bpf_attr` that a query uses. What lies behind it is newer than 6.1.
#[repr(C)]
#[derive(Default)]
struct Query {
    target_fd: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    reserved: u32,
}

/// The programs on one hook of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OnHook {
    /// Their ids, in the order in which they run.
    pub ids: Vec<u32>,
    /// How they are attached; 0 where that cannot be told (all that run).
    flags: u32,
}

impl OnHook {
    /// How they are attached, in words.
    pub fn flags(&self) -> Vec<String> {
        let words = [
            (BPF_F_ALLOW_OVERRIDE, "override"),
            (BPF_F_ALLOW_MULTI, "multi"),
        ];
        let set = words.iter().filter(|(flag, _)| self.flags & flag != 0);
        set.map(|(_, word)| (*word).to_owned()).collect()
    }
}

/// The programs that are attached to the group itself.
///
/// # Errors
/// When the group is not there, or the kernel does not tell.
pub fn attached(group: &Path, attach_type: u32) -> io::Result<OnHook> {
    query(group, attach_type, 0)
}

/// The programs that run for processes in the group, of outer groups too.
///
/// # Errors
/// As [`attached`].
pub fn effective(group: &Path, attach_type: u32) -> io::Result<OnHook> {
    query(group, attach_type, BPF_F_QUERY_EFFECTIVE)
}

fn query(group: &Path, attach_type: u32, query_flags: u32) -> io::Result<OnHook> {
    use std::os::fd::AsFd as _;
    let directory = File::open(group)?;
    ask(directory.as_fd(), attach_type, query_flags)
}

fn ask(group: BorrowedFd<'_>, attach_type: u32, query_flags: u32) -> io::Result<OnHook> {
    let mut ids = [0_u32; MOST];
    let mut query = Query {
        target_fd: group.as_raw_fd() as u32,
        attach_type,
        query_flags,
        prog_ids: ids.as_mut_ptr() as u64,
        prog_cnt: MOST as u32,
        ..Query::default()
    };
    let size = size_of::<Query>();
    // SAFETY: the structure is as long as said, and the list has as many places as it says.
    let result = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_QUERY, &raw mut query, size) };
    if result != 0 {
        let error = io::Error::last_os_error();
        // There are more than fit: those that did are told.
        if error.raw_os_error() != Some(libc::ENOSPC) {
            return Err(error);
        }
    }
    let count = (query.prog_cnt as usize).min(MOST);
    Ok(OnHook {
        ids: ids[..count].to_vec(),
        flags: query.attach_flags,
    })
}

/// Names of the programs that are loaded, made harmless for a terminal, by id. Read when first asked for:
/// that looks at every program of the machine.
#[derive(Default)]
pub struct ProgramNames(Option<HashMap<u32, String>>);

impl ProgramNames {
    /// The name of a program; empty where it has none, or has gone.
    pub fn name(&mut self, id: u32) -> &str {
        let names = self.0.get_or_insert_with(|| {
            // One that ends meanwhile is an error; the others are still told.
            let programs = aya::programs::loaded_programs().filter_map(Result::ok);
            programs
                .map(|program| (program.id(), comm(program.name())))
                .collect()
        });
        names.get(&id).map_or("", String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_in_words() {
        let words = |flags| OnHook { ids: vec![], flags }.flags();
        assert_eq!(words(0), Vec::<String>::new());
        assert_eq!(words(2), ["multi"]);
        assert_eq!(words(1), ["override"]);
        assert_eq!(size_of::<Query>(), 32);
    }

    #[test]
    fn what_is_no_control_group() {
        assert!(attached(Path::new("/proc/self"), 10).is_err());
        assert!(effective(Path::new("/no/such/group"), 10).is_err());
    }
}
