//! The kernel's statistics of programs and maps.

use std::{
    fs, io,
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
};

use anyhow::{Context as _, Result};

// include/uapi/linux/bpf.h, `enum bpf_cmd`.
const BPF_PROG_GET_FD_BY_ID: libc::c_int = 13;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
const BPF_ENABLE_STATS: libc::c_int = 32;

/// `name` in `struct bpf_prog_info`, and its length.
const INFO_NAME: usize = 64;
const NAME_LEN: usize = 16;

/// A loaded program.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its name, at most 15 bytes.
    pub name: String,
    /// How often it ran while statistics were on.
    pub runs: u64,
    /// Time of these runs, ns.
    pub ns: u64,
}

/// `bpf(2)` with an attribute of 64-bit words.
fn bpf(command: libc::c_int, attributes: &mut [u64]) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads and writes no more than the length that it is given; what the
    // attribute points to is the caller's.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            attributes.as_mut_ptr(),
            size_of_val(attributes),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn descriptor(result: libc::c_long) -> OwnedFd {
    // SAFETY: the kernel has just made this descriptor for us.
    unsafe { OwnedFd::from_raw_fd(result as i32) }
}

/// Switches statistics of run time on until the descriptor is closed.
///
/// # Errors
/// When the kernel refuses.
pub fn statistics() -> Result<OwnedFd> {
    // `type` is BPF_STATS_RUN_TIME, 0.
    bpf(BPF_ENABLE_STATS, &mut [0])
        .map(descriptor)
        .context("switch the kernel's statistics of programs on (bpf BPF_ENABLE_STATS)")
}

/// The programs that a process holds, by name.
///
/// # Errors
/// When the process is gone or the kernel does not tell.
pub fn programs(pid: u32) -> Result<Vec<Program>> {
    let mut programs = Vec::new();
    let mut seen = Vec::new();
    for text in descriptors(pid)? {
        let Some(id) = field(&text, "prog_id") else {
            continue;
        };
        if seen.contains(&id) {
            continue;
        }
        seen.push(id);
        // A link's text names its program too, without statistics.
        let (Some(ns), Some(runs)) = (field(&text, "run_time_ns"), field(&text, "run_cnt")) else {
            seen.pop();
            continue;
        };
        programs.push(Program {
            name: name(id)?,
            runs,
            ns,
        });
    }
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

fn name(id: u64) -> Result<String> {
    let what = || format!("ask the kernel for program {id}");
    let program = bpf(BPF_PROG_GET_FD_BY_ID, &mut [id])
        .map(descriptor)
        .with_context(what)?;
    let mut info = [0_u8; INFO_NAME + NAME_LEN];
    // bpf_fd (32 bits), info_len (32 bits), info.
    let head = program.as_raw_fd() as u64 | (info.len() as u64) << 32;
    bpf(
        BPF_OBJ_GET_INFO_BY_FD,
        &mut [head, info.as_mut_ptr() as u64],
    )
    .with_context(what)?;
    let name = info[INFO_NAME..]
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default();
    Ok(String::from_utf8_lossy(name).into_owned())
}

/// Memory of all maps that a process holds, bytes, each map once.
///
/// # Errors
/// When the process is gone.
pub fn map_memory(pid: u32) -> Result<u64> {
    let mut maps: Vec<(u64, u64)> = descriptors(pid)?
        .iter()
        .filter_map(|text| Some((field(text, "map_id")?, field(text, "memlock")?)))
        .collect();
    maps.sort_unstable();
    maps.dedup();
    Ok(maps.iter().map(|(_, bytes)| bytes).sum())
}

/// What the kernel says of each open descriptor of a process.
fn descriptors(pid: u32) -> Result<Vec<String>> {
    let folder = format!("/proc/{pid}/fdinfo");
    let entries = fs::read_dir(&folder).with_context(|| format!("read {folder}"))?;
    // One that was closed meanwhile is no error.
    Ok(entries
        .filter_map(|entry| fs::read_to_string(entry.ok()?.path()).ok())
        .collect())
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key == name).then(|| value.trim().parse().ok())?
    })
}
