//! What Backstop takes an attempt for, read from the stamp of its socket.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
    sync::Mutex,
};

use agent_common::{
    retry::is_retry,
    stamp::{CONNECTION_SLOTS, STAMP_CORRECTED, Slot},
};

use crate::{
    agent::Agent,
    maps::{BPF_MAP_LOOKUP_ELEM, element, find},
    net::Namespace,
};

/// include/uapi/linux/sock_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
/// `struct nlmsghdr`.
const HEAD: usize = 16;
/// `struct inet_diag_req_v2`.
const REQUEST: usize = 56;
/// The cookie in `struct inet_diag_msg`, after its head.
const COOKIE: usize = HEAD + 44;

/// What a connection was taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Label {
    /// A retry, as it is counted: what the first request has shown is part of it.
    pub retry: bool,
    /// A retry, by `connect()` alone.
    pub by_connect: bool,
}

/// Tells of connections to a server whether Backstop took their connect for a retry.
///
/// The client's socket has a stamp for its life, by its cookie, which sock_diag tells.
pub struct Labels {
    connections: OwnedFd,
    diag: Mutex<OwnedFd>,
}

impl Labels {
    /// For clients in this namespace, watched by this agent.
    pub fn new(agent: &Agent, clients: &Namespace) -> Self {
        Self {
            connections: find(agent, "CONNECTIONS").0,
            diag: Mutex::new(clients.enter(open)),
        }
    }

    /// What a connection was taken for whose first request has come in. `None` when the stamp is not at its
    /// place: the client is gone, or another socket was first.
    pub fn of(&self, accepted: &TcpStream) -> Option<Label> {
        let (client, server) = (accepted.peer_addr().ok()?, accepted.local_addr().ok()?);
        let cookie = self.cookie(client, server)?;
        let index = cookie as u32 & (CONNECTION_SLOTS - 1);
        let mut bytes = [0_u64; size_of::<Slot>() / 8];
        let at = (&raw const index as u64, bytes.as_mut_ptr() as u64);
        if !element(BPF_MAP_LOOKUP_ELEM, &self.connections, at.0, at.1) {
            return None;
        }
        let slot: Slot = bytemuck::cast(bytes);
        (slot.owner == cookie).then(|| {
            let retry = is_retry(slot.stamp.operation);
            let is_corrected = slot.stamp.flags & STAMP_CORRECTED != 0;
            let by_connect = retry != is_corrected;
            Label { retry, by_connect }
        })
    }

    /// Cookie of the client's socket.
    fn cookie(&self, client: SocketAddr, server: SocketAddr) -> Option<u64> {
        let (IpAddr::V4(from), IpAddr::V4(to)) = (client.ip(), server.ip()) else {
            return None;
        };
        let mut message = [0; HEAD + REQUEST];
        message[0..4].copy_from_slice(&((HEAD + REQUEST) as u32).to_ne_bytes());
        message[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        message[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
        let request = &mut message[HEAD..];
        request[0] = libc::AF_INET as u8;
        request[1] = libc::IPPROTO_TCP as u8;
        request[4..8].fill(0xff);
        request[8..10].copy_from_slice(&client.port().to_be_bytes());
        request[10..12].copy_from_slice(&server.port().to_be_bytes());
        request[12..16].copy_from_slice(&from.octets());
        request[28..32].copy_from_slice(&to.octets());
        // Any cookie (INET_DIAG_NOCOOKIE).
        request[48..56].fill(0xff);
        let diag = self.diag.lock().expect("no panic holds it");
        let mut answer = [0_u8; 4096];
        // SAFETY: both buffers are as long as said.
        let length = unsafe {
            libc::send(diag.as_raw_fd(), message.as_ptr().cast(), message.len(), 0);
            libc::recv(
                diag.as_raw_fd(),
                answer.as_mut_ptr().cast(),
                answer.len(),
                0,
            )
        };
        let length = usize::try_from(length).expect("an answer of sock_diag");
        // (An error is shorter: there is no such socket.)
        let is_answer = length >= COOKIE + 8 && answer[4..6] == SOCK_DIAG_BY_FAMILY.to_ne_bytes();
        is_answer.then(|| {
            let cookie = answer[COOKIE..COOKIE + 8].try_into().expect("eight bytes");
            u64::from_ne_bytes(cookie)
        })
    }
}

/// A sock_diag socket in the calling thread's namespace.
fn open() -> OwnedFd {
    // SAFETY: plain arguments; the descriptor is new and ours.
    unsafe {
        let socket = libc::socket(
            libc::AF_NETLINK,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            libc::NETLINK_SOCK_DIAG,
        );
        assert!(socket >= 0, "sock_diag: {}", io::Error::last_os_error());
        OwnedFd::from_raw_fd(socket)
    }
}
