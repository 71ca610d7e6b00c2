//! What a process uses, from /proc.

use std::fs;

use anyhow::{Context as _, Result};

/// Time on a processor, ns, by name of thread.
///
/// # Errors
/// When the process is gone, or the kernel keeps no scheduler statistics.
pub fn threads(pid: u32) -> Result<Vec<(String, u64)>> {
    let folder = format!("/proc/{pid}/task");
    let mut threads = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("read {folder}"))? {
        let path = entry.with_context(|| format!("read {folder}"))?.path();
        // A thread may end between the listing and the reading.
        let (Ok(name), Ok(usage)) = (
            fs::read_to_string(path.join("comm")),
            fs::read_to_string(path.join("schedstat")),
        ) else {
            continue;
        };
        let ns = usage
            .split_whitespace()
            .next()
            .and_then(|first| first.parse().ok())
            .with_context(|| format!("read {}/schedstat: {usage:?}", path.display()))?;
        threads.push((name.trim().to_owned(), ns));
    }
    Ok(threads)
}

/// System calls that write, so far: for a program that sends each request with one, the number of
/// requests.
///
/// # Errors
/// When the process is gone.
pub fn writes(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/io");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    value(&text, "syscw").with_context(|| format!("find syscw in {path}"))
}

/// Resident memory of a process, bytes.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// All of it.
    pub resident: u64,
    /// That of maps of the kernel, which the maps' own memory holds already.
    pub mapped: u64,
    /// That of no file: heap and stacks.
    pub anonymous: u64,
}

/// Reads it.
///
/// # Errors
/// When the process is gone.
pub fn memory(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let mut memory = Memory {
        resident: 0,
        mapped: 0,
        anonymous: 0,
    };
    let mut in_map = false;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let Some(key) = words.next() else { continue };
        if !key.ends_with(':') {
            in_map = line.contains("anon_inode:bpf-map");
            continue;
        }
        let bytes = words
            .next()
            .and_then(|kb| kb.parse::<u64>().ok())
            .unwrap_or(0)
            * 1024;
        match key {
            "Rss:" => {
                memory.resident += bytes;
                memory.mapped += if in_map { bytes } else { 0 };
            }
            "Anonymous:" => memory.anonymous += bytes,
            _ => {}
        }
    }
    Ok(memory)
}

/// Begins a new peak of resident memory (proc(5), clear_refs).
///
/// # Errors
/// When the process is gone.
pub fn forget_peak(pid: u32) -> Result<()> {
    let path = format!("/proc/{pid}/clear_refs");
    fs::write(&path, "5").with_context(|| format!("write {path}"))
}

/// Most resident memory since [`forget_peak`], bytes, mapped arrays included.
///
/// # Errors
/// When the process is gone.
pub fn peak(pid: u32) -> Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kb = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    Ok(kb.with_context(|| format!("find VmHWM in {path}"))? * 1024)
}

fn value(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key == name).then(|| value.trim().parse().ok())?
    })
}
