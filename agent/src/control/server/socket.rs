//! Opening the listeners.
//!
//! The socket file is made under a second name, with mode 0600 before anybody can connect, and
//! then moved to its place: there is no moment at which it is open to others, and a takeover has
//! no moment without a socket.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
};

use rustix::{
    fd::OwnedFd,
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType},
};
use tokio::net::{TcpListener, UnixListener};

/// Why a listener could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another agent answers there.
    #[error(
        "socket {}: a live agent answers there; stop it, start this one with --takeover, or give this one another --socket", .path.display()
    )]
    InUse {
        /// The socket.
        path: PathBuf,
    },
    /// Something that is no socket has that name.
    #[error("socket {}: exists and is not a socket; remove it or choose another --socket", .path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refused a step.
    #[error("socket {}: cannot {step}: {error}", .path.display())]
    Socket {
        /// The path of the step.
        path: PathBuf,
        /// What was tried.
        step: &'static str,
        /// What the system said; no `source`, as the sentence has it already.
        error: io::Error,
    },
    /// The TCP listener could not be opened.
    #[error(
        "listen {address}: {error}; choose another port with --listen, or --listen none to do without"
    )]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// What the system said; no `source`, as the sentence has it already.
        error: io::Error,
    },
}

/// The socket file, removed when this is dropped unless another agent has put its own in its place.
#[derive(Debug)]
pub struct ControlSocket {
    path: PathBuf,
    id: (u64, u64),
}

impl ControlSocket {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|id| id == self.id) {
            // Left behind it does no harm: the next start finds it dead.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// Opens the control socket at `path`, with mode 0600; must run inside a tokio runtime.
///
/// A socket that nobody answers on is replaced. One of a live agent is replaced only with
/// `takeover`: connections that it has accepted stay with it, new ones come here.
///
/// # Errors
/// See [`BindError`].
pub fn bind_control(
    path: &Path,
    takeover: bool,
) -> Result<(UnixListener, ControlSocket), BindError> {
    let failed = |step| {
        move |error| BindError::Socket {
            path: path.to_owned(),
            step,
            error,
        }
    };
    let directory = path.parent().unwrap_or(Path::new("."));
    if !directory.as_os_str().is_empty() {
        fs::create_dir_all(directory).map_err(failed("create its directory"))?;
    }
    remove_stale(directory);
    // A short name: socket paths end after 107 bytes.
    let fresh = directory.join(format!(".b{}", std::process::id()));
    let _ = fs::remove_file(&fresh);
    let listener = listen(&fresh).map_err(failed("open a socket in its directory"))?;
    let placed = place(&fresh, path, takeover);
    if let Err(error) = placed {
        let _ = fs::remove_file(&fresh);
        return Err(error);
    }
    let id = identity(path).map_err(failed("look at it"))?;
    let listener = UnixListener::from_std(listener).map_err(failed("watch it"))?;
    let path = path.to_owned();
    Ok((listener, ControlSocket { path, id }))
}

/// Removes what agents left that ended between opening a socket and giving it its real name.
fn remove_stale(directory: &Path) {
    let directory = match directory.as_os_str().is_empty() {
        true => Path::new("."),
        false => directory,
    };
    // Best effort: such a file is litter and no harm.
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let pid = name
            .to_str()
            .and_then(|name| name.strip_prefix(".b")?.parse::<u32>().ok())
            .and_then(|pid| i32::try_from(pid).ok());
        let socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
        if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw)
            && socket
            && rustix::process::test_kill_process(pid) == Err(Errno::SRCH)
            // Of another process namespace, perhaps.
            && !is_live(&entry.path())
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether somebody listens there. A full backlog is a process that does not accept: one that is
/// stopped, but alive. To wait for it could take for ever.
fn is_live(path: &Path) -> bool {
    let connected = SocketAddrUnix::new(path)
        .and_then(|address| rustix::net::connect(stream_socket()?, &address));
    matches!(connected, Ok(()) | Err(Errno::AGAIN))
}

fn stream_socket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )
}

fn listen(path: &Path) -> io::Result<std::os::unix::net::UnixListener> {
    let socket = stream_socket()?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket.into())
}

/// Gives the open socket its real name.
fn place(fresh: &Path, path: &Path, takeover: bool) -> Result<(), BindError> {
    let failed = |step| {
        move |error| BindError::Socket {
            path: path.to_owned(),
            step,
            error,
        }
    };
    if !takeover {
        // Unlike a rename, a link fails when the name is taken: of two agents that start at once,
        // one is told.
        match fs::hard_link(fresh, path) {
            Ok(()) => return fs::remove_file(fresh).map_err(failed("remove its second name")),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(failed("put it in its place")(error)),
        }
    }
    match fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(BindError::NotASocket { path: path.into() });
        }
        Ok(_) if !takeover && is_live(path) => {
            return Err(BindError::InUse { path: path.into() });
        }
        _ => {}
    }
    fs::rename(fresh, path).map_err(failed("put it in its place"))
}

/// Opens the TCP listener. Port 0 takes a free one: ask the listener which.
///
/// # Errors
/// [`BindError::Tcp`] when the address is in use or not of this host.
pub async fn bind_http(address: SocketAddr) -> Result<TcpListener, BindError> {
    TcpListener::bind(address)
        .await
        .map_err(|error| BindError::Tcp { address, error })
}
