//! Who has locked a file: agents lock the directories of the control groups that they watch.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

/// The process that has locked this file for itself (flock), if the kernel tells. Nothing is locked to find
/// that out.
pub fn holder(path: &Path) -> Option<u32> {
    let file = fs::metadata(path).ok()?;
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let device = (rustix::fs::major(file.dev()), rustix::fs::minor(file.dev()));
    find(&locks, device, file.ino())
}

/// Lines are `1: FLOCK  ADVISORY  WRITE 4711 00:1b:5678 0 EOF`; those that wait for a lock have `->` behind
/// the number (fs/locks.c, `lock_get_status`).
fn find(locks: &str, (major, minor): (u32, u32), inode: u64) -> Option<u32> {
    let place = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let is_lock = words.next() == Some("FLOCK") && words.nth(1) == Some("WRITE");
        let pid = words.next()?.parse().ok()?;
        (is_lock && words.next() == Some(place.as_str())).then_some(pid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_holds_a_lock() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 00:1b:5678 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 12 00:1c:5678 0 EOF\n\
                     3: FLOCK  ADVISORY  READ  13 00:1b:5678 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 14 00:1b:5678 0 EOF\n\
                     4: -> FLOCK  ADVISORY  WRITE 15 00:1b:5679 0 EOF\n\
                     weird\n";
        assert_eq!(find(locks, (0, 0x1b), 5678), Some(14));
        assert_eq!(find(locks, (0, 0x1c), 5678), Some(12));
        assert_eq!(find(locks, (0, 0x1b), 5679), None);
        assert_eq!(find(locks, (1, 0x1b), 5678), None);
    }

    #[test]
    fn a_lock_of_our_own_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(holder(file.path()), None);
        let lock = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(file.as_file(), lock).unwrap();
        assert_eq!(holder(file.path()), Some(std::process::id()));
    }
}
