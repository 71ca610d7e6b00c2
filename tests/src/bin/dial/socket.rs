//! TCP sockets by plain system calls: nothing between the test and `connect()`.

use std::{
    mem,
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd},
};

pub const EINPROGRESS: i32 = libc::EINPROGRESS;

/// How to connect, from the words of an order.
#[derive(Default)]
pub struct Plan {
    pub nonblocking: bool,
    pub uring: bool,
    pub own_timeout: Option<u32>,
    pub bind: Option<SocketAddr>,
}

impl From<&[&str]> for Plan {
    fn from(words: &[&str]) -> Self {
        let mut plan = Self::default();
        for word in words {
            match word.split_once('=') {
                None if *word == "nonblocking" => plan.nonblocking = true,
                None if *word == "uring" => plan.uring = true,
                Some(("own", ms)) => plan.own_timeout = Some(ms.parse().expect("milliseconds")),
                Some(("bind", to)) => plan.bind = Some(to.parse().expect("an address")),
                _ => panic!("unknown word {word:?}"),
            }
        }
        plan
    }
}

pub struct Socket(OwnedFd);

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Socket {
    pub fn new(to: SocketAddr, plan: &Plan) -> Self {
        let family = if to.is_ipv4() {
            libc::AF_INET
        } else {
            libc::AF_INET6
        };
        let kind = libc::SOCK_STREAM
            | libc::SOCK_CLOEXEC
            | if plan.nonblocking {
                libc::SOCK_NONBLOCK
            } else {
                0
            };
        // SAFETY: plain system call; a descriptor that is returned belongs to nobody else.
        let socket = unsafe {
            let fd = libc::socket(family, kind, 0);
            assert!(fd >= 0, "socket: {}", std::io::Error::last_os_error());
            Self(OwnedFd::from_raw_fd(fd))
        };
        if let Some(ms) = plan.own_timeout {
            socket.set(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, ms as i32);
        }
        if let Some(address) = plan.bind {
            socket.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, 1);
            let raw = Raw::from(address);
            // SAFETY: the address is as long as said.
            let result = unsafe { libc::bind(socket.raw(), raw.pointer(), raw.length) };
            assert_eq!(
                result,
                0,
                "bind {address}: {}",
                std::io::Error::last_os_error()
            );
        }
        socket
    }

    pub fn raw(&self) -> i32 {
        self.0.as_raw_fd()
    }

    /// One `connect()`; its errno, 0 when established.
    pub fn connect(&self, to: SocketAddr) -> i32 {
        let raw = Raw::from(to);
        // SAFETY: the address is as long as said.
        match unsafe { libc::connect(self.raw(), raw.pointer(), raw.length) } {
            0 => 0,
            _ => std::io::Error::last_os_error().raw_os_error().unwrap_or(-1),
        }
    }

    /// SO_ERROR, which clears it.
    pub fn error(&self) -> i32 {
        self.get(libc::SOL_SOCKET, libc::SO_ERROR)
    }

    /// TCP_USER_TIMEOUT, ms.
    pub fn user_timeout(&self) -> i32 {
        self.get(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT)
    }

    /// Has the close reset the connection: no port waits for stragglers.
    pub fn reset_at_close(&self) {
        let option = libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        let length = mem::size_of::<libc::linger>() as u32;
        let (level, name) = (libc::SOL_SOCKET, libc::SO_LINGER);
        // SAFETY: the structure is as long as said.
        let result = unsafe {
            libc::setsockopt(self.raw(), level, name, (&raw const option).cast(), length)
        };
        assert_eq!(result, 0, "SO_LINGER: {}", std::io::Error::last_os_error());
    }

    fn set(&self, level: i32, option: i32, value: i32) {
        // SAFETY: the value is an int.
        let result =
            unsafe { libc::setsockopt(self.raw(), level, option, (&raw const value).cast(), INT) };
        assert_eq!(result, 0, "setsockopt: {}", std::io::Error::last_os_error());
    }

    fn get(&self, level: i32, option: i32) -> i32 {
        let mut value = 0_i32;
        let mut length = INT;
        // SAFETY: the value is an int and its length is said.
        let result = unsafe {
            libc::getsockopt(
                self.raw(),
                level,
                option,
                (&raw mut value).cast(),
                &raw mut length,
            )
        };
        assert_eq!(result, 0, "getsockopt: {}", std::io::Error::last_os_error());
        value
    }
}

const INT: u32 = mem::size_of::<i32>() as u32;

/// An address as system calls take it.
pub struct Raw {
    storage: libc::sockaddr_storage,
    pub length: u32,
}

impl Raw {
    pub fn pointer(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }
}

impl From<SocketAddr> for Raw {
    fn from(address: SocketAddr) -> Self {
        // SAFETY: all zero is a valid value.
        let mut storage: libc::sockaddr_storage = unsafe { mem::zeroed() };
        let length = match address {
            SocketAddr::V4(v4) => {
                let raw = libc::sockaddr_in {
                    sin_family: libc::AF_INET as u16,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from_ne_bytes(v4.ip().octets()),
                    },
                    sin_zero: [0; 8],
                };
                // SAFETY: a storage is larger than and aligned for every kind of address.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in>().write(raw) };
                mem::size_of::<libc::sockaddr_in>()
            }
            SocketAddr::V6(v6) => {
                let raw = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as u16,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr {
                        s6_addr: v6.ip().octets(),
                    },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: as above.
                unsafe { (&raw mut storage).cast::<libc::sockaddr_in6>().write(raw) };
                mem::size_of::<libc::sockaddr_in6>()
            }
        };
        Self {
            storage,
            length: length as u32,
        }
    }
}
