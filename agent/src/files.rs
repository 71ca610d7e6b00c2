//! Files that the agent reads and writes by path: it never waits for one, and a start does not fail
//! because of what lies in the place of one of its own.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

/// Reads a regular file, at most so many bytes of it. Never waits: a pipe, a socket, a device or a
/// directory in the file's place is an error ([`is_no_file`]).
///
/// # Errors
/// What the system says, or that it is no regular file.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path);
    let file = match opened {
        // A socket, or a device that is not there.
        Err(error) if error.raw_os_error() == Some(libc::ENXIO) => return Err(no_file()),
        opened => opened?,
    };
    if !file.metadata()?.is_file() {
        return Err(no_file());
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn no_file() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")
}

/// Whether [`read`] says that there is something else than a regular file.
pub fn is_no_file(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::InvalidInput
}

/// Sets something aside that cannot be used, as `NAME.json.damaged`, with a warning of why, and of what
/// follows (`so`). Where it cannot be set aside, that is a warning, too: it is written over when there is
/// something to be written.
pub fn set_aside(path: &Path, why: &str, so: &str) {
    let aside = path.with_extension("json.damaged");
    match fs::rename(path, &aside) {
        Ok(()) => tracing::warn!(
            "{}: {why}; set aside as {}, {so}",
            path.display(),
            aside.display()
        ),
        Err(error) => tracing::warn!(
            "{}: {why}; it cannot be set aside as {} ({error}: remove one of them) and will be written over; {so}",
            path.display(),
            aside.display()
        ),
    }
}

/// Replaces a file by what `fill` writes, under another name first. What has that name is removed.
///
/// # Errors
/// When that fails; the old file is untouched then.
pub fn replace(path: &Path, fill: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    let fresh = path.with_extension("json.new");
    // Not opened: it may be a pipe.
    match fs::remove_file(&fresh) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::create_new(&fresh)?;
    fill(&mut file)?;
    file.sync_all()?;
    fs::rename(&fresh, path)
}

#[cfg(test)]
mod tests {
    use std::{io::Write as _, os::unix::net::UnixListener};

    use super::*;

    fn fifo(path: &Path) {
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    }

    #[test]
    fn only_regular_files_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fifo(&path("fifo"));
        fs::create_dir(path("directory")).unwrap();
        let _socket = UnixListener::bind(path("socket")).unwrap();
        for name in ["fifo", "directory", "socket"] {
            let error = read(&path(name), 10).unwrap_err();
            assert!(is_no_file(&error), "{name}: {error}");
        }
        let error = read(&path("nothing"), 10).unwrap_err();
        assert!(error.kind() == io::ErrorKind::NotFound && !is_no_file(&error));
        fs::write(path("file"), "words").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        assert_eq!(read(&path("link"), 10).unwrap(), b"words");
        assert_eq!(read(&path("file"), 3).unwrap(), b"wor");
    }

    #[test]
    fn whatever_lies_in_the_way_is_set_aside_or_written_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state.json");
        let aside = dir.path().join("state.json.damaged");
        let write = |text: &[u8]| replace(&path, |file| file.write_all(text));
        fifo(&path);
        fs::create_dir(&aside).unwrap();
        set_aside(&path, "not a regular file", "nothing is known");
        assert!(
            read(&path, 10).is_err_and(|error| is_no_file(&error)),
            "still there"
        );
        fifo(&dir.path().join("state.json.new"));
        write(b"new").unwrap();
        assert_eq!(read(&path, 10).unwrap(), b"new");
        fs::remove_dir(&aside).unwrap();
        set_aside(&path, "damaged", "nothing is known");
        assert!(!path.exists());
        assert_eq!(fs::read(&aside).unwrap(), b"new");
    }
}
