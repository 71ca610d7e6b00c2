//! Looking at TCP sockets of a network namespace (sock_diag).

use std::net::IpAddr;

use rustix::io::Errno;
use thiserror::Error;

use super::{
    look::{INET_DIAG_INFO, Look, State, Tuple},
    namespace::EnterError,
    netlink::{Body, NLM_F_ACK, NLM_F_DUMP, Netlink, request},
};

/// include/uapi/linux/sock_diag.h.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;

/// Requests in one send: their answers fit into the receive buffer.
const AT_ONCE: usize = 128;

/// One socket: where the kernel finds it, and which one it must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Both ends.
    pub tuple: Tuple,
    /// Its cookie. Another socket with the same ends is another socket.
    pub cookie: u64,
}

/// Why nothing was learned.
#[derive(Debug, Error)]
pub enum DiagError {
    /// The namespace was not reached.
    #[error(transparent)]
    Enter(#[from] EnterError),
    /// The kernel gives no netlink socket, or does not take or answer a request.
    #[error("{what} by sock_diag netlink: {cause}")]
    Netlink {
        /// What was tried.
        what: &'static str,
        /// The kernel's words.
        cause: Errno,
    },
    /// An answer is missing or makes no sense.
    #[error(
        "{what} by sock_diag netlink: the kernel's answer is missing or not understood; \
         `ss -tein` in the same namespace shows whether sock_diag works"
    )]
    Answer {
        /// What was tried.
        what: &'static str,
    },
}

/// A way to ask about the sockets of one network namespace. Got from
/// [`Namespaces::diag`](super::namespace::Namespaces::diag), for the length of a batch.
pub struct Diag {
    netlink: Netlink,
    sequence: u32,
    requests: Vec<u8>,
}

impl Diag {
    /// In the calling thread's namespace.
    pub(super) fn open() -> Result<Self, DiagError> {
        let netlink = Netlink::open().map_err(failed("open a socket"))?;
        Ok(Self {
            netlink,
            sequence: 0,
            requests: Vec::new(),
        })
    }

    /// Looks at one socket; `None` when it is not there (any more).
    ///
    /// # Errors
    /// When the kernel does not answer.
    pub fn look(&mut self, target: &Target) -> Result<Option<Look>, DiagError> {
        let mut found = None;
        self.look_all(std::slice::from_ref(target), |_, look| found = look)?;
        Ok(found)
    }

    /// Looks at many, in order: `each` is told the index of the target and what was found.
    ///
    /// # Errors
    /// When the kernel does not answer. `each` has been told of a part then.
    pub fn look_all(
        &mut self,
        targets: &[Target],
        mut each: impl FnMut(usize, Option<Look>),
    ) -> Result<(), DiagError> {
        const WHAT: &str = "look at sockets";
        for (chunk, targets) in targets.chunks(AT_ONCE).enumerate() {
            self.requests.clear();
            let first = self.sequence.wrapping_add(1);
            for target in targets {
                self.add(SOCK_DIAG_BY_FAMILY, 0, &exact(target));
            }
            (self.netlink.send(&self.requests)).map_err(failed(WHAT))?;
            let mut answered = 0;
            while answered < targets.len() {
                let messages = self.netlink.read().map_err(failed(WHAT))?;
                for message in messages.ok_or(DiagError::Answer { what: WHAT })? {
                    // What is left of a request that failed half-way.
                    if message.sequence != first.wrapping_add(answered as u32) {
                        continue;
                    }
                    let found = match message.body {
                        Body::Answer(SOCK_DIAG_BY_FAMILY, bytes) => {
                            Some(Look::decode(bytes).ok_or(DiagError::Answer { what: WHAT })?)
                        }
                        Body::End(Err(Errno::NOENT | Errno::STALE)) => None,
                        Body::End(Err(errno)) => return Err(failed(WHAT)(errno)),
                        _ => return Err(DiagError::Answer { what: WHAT }),
                    };
                    // The kernel has compared; a wild card is a cookie too (INET_DIAG_NOCOOKIE).
                    let found = found.filter(|look| look.cookie == targets[answered].cookie);
                    each(chunk * AT_ONCE + answered, found);
                    answered += 1;
                }
            }
        }
        Ok(())
    }

    /// Every TCP socket of the namespace in one of these states; with `tcp`, details of each (it
    /// takes every socket's lock for a moment). Sockets that come, go or change meanwhile may be
    /// missing or told twice. Listening ports are `dump(&[State::Listen], false, …)`.
    ///
    /// # Errors
    /// When the kernel does not answer. `each` has been told of a part then.
    pub fn dump(
        &mut self,
        states: &[State],
        tcp: bool,
        mut each: impl FnMut(Look),
    ) -> Result<(), DiagError> {
        const WHAT: &str = "list sockets";
        let mask = states.iter().fold(0, |mask, state| mask | state.bit());
        for family in [libc::AF_INET, libc::AF_INET6] {
            let mut body = [0; REQUEST];
            body[0] = family as u8;
            body[1] = libc::IPPROTO_TCP as u8;
            body[2] = if tcp { INFO } else { 0 };
            body[4..8].copy_from_slice(&mask.to_ne_bytes());
            self.requests.clear();
            self.add(SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, &body);
            (self.netlink.send(&self.requests)).map_err(failed(WHAT))?;
            'dump: loop {
                let messages = self.netlink.read().map_err(failed(WHAT))?;
                for message in messages.ok_or(DiagError::Answer { what: WHAT })? {
                    if message.sequence != self.sequence {
                        continue;
                    }
                    match message.body {
                        Body::Answer(SOCK_DIAG_BY_FAMILY, bytes) => {
                            each(Look::decode(bytes).ok_or(DiagError::Answer { what: WHAT })?);
                        }
                        Body::End(Ok(())) => break 'dump,
                        // A kernel without IPv6.
                        Body::End(Err(Errno::NOENT)) if family == libc::AF_INET6 => break 'dump,
                        Body::End(Err(errno)) => return Err(failed(WHAT)(errno)),
                        Body::Answer(..) => return Err(DiagError::Answer { what: WHAT }),
                    }
                }
            }
        }
        Ok(())
    }

    /// Ends a socket, if it is that one.
    pub(super) fn destroy(&mut self, target: &Target) -> Result<(), Errno> {
        if target.cookie == ANY_COOKIE {
            return Err(Errno::NOENT);
        }
        self.requests.clear();
        self.add(SOCK_DESTROY, NLM_F_ACK, &exact(target));
        self.netlink.send(&self.requests)?;
        loop {
            let messages = self.netlink.read()?.ok_or(Errno::NOBUFS)?;
            for message in messages {
                if let (true, Body::End(result)) = (message.sequence == self.sequence, message.body)
                {
                    return result;
                }
            }
        }
    }

    fn add(&mut self, kind: u16, flags: u16, body: &[u8]) {
        self.sequence = self.sequence.wrapping_add(1);
        request(&mut self.requests, kind, flags, self.sequence, body);
    }
}

/// Length of `struct inet_diag_req_v2`.
const REQUEST: usize = 56;
/// Asks for `struct tcp_info`.
const INFO: u8 = 1 << (INET_DIAG_INFO - 1);
/// Both halves INET_DIAG_NOCOOKIE: the kernel would take any socket.
const ANY_COOKIE: u64 = u64::MAX;

/// A `struct inet_diag_req_v2` for one socket (include/uapi/linux/inet_diag.h).
fn exact(target: &Target) -> [u8; REQUEST] {
    let tuple = &target.tuple;
    let (family, local, remote) = match (tuple.local().ip(), tuple.remote().ip()) {
        (IpAddr::V4(local), IpAddr::V4(remote)) => {
            let wide = |octets: [u8; 4]| {
                let mut wide = [0; 16];
                wide[..4].copy_from_slice(&octets);
                wide
            };
            (libc::AF_INET, wide(local.octets()), wide(remote.octets()))
        }
        (local, remote) => {
            let wide = |ip| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            (libc::AF_INET6, wide(local), wide(remote))
        }
    };
    let mut body = [0; REQUEST];
    body[0] = family as u8;
    body[1] = libc::IPPROTO_TCP as u8;
    body[2] = INFO;
    body[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
    body[8..10].copy_from_slice(&tuple.local().port().to_be_bytes());
    body[10..12].copy_from_slice(&tuple.remote().port().to_be_bytes());
    body[12..28].copy_from_slice(&local);
    body[28..44].copy_from_slice(&remote);
    body[44..48].copy_from_slice(&tuple.ifindex().to_ne_bytes());
    body[48..52].copy_from_slice(&(target.cookie as u32).to_ne_bytes());
    body[52..56].copy_from_slice(&((target.cookie >> 32) as u32).to_ne_bytes());
    body
}

fn failed(what: &'static str) -> impl FnOnce(Errno) -> DiagError {
    move |cause| DiagError::Netlink { what, cause }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sockets::netlink::{u16_at, u32_at};

    proptest! {
        /// Whatever is asked for, the kernel is told those ends and that cookie.
        #[test]
        fn a_request_says_what_is_meant(
            local: std::net::SocketAddr,
            remote: std::net::SocketAddr,
            ifindex: u32,
            cookie: u64,
        ) {
            let target = Target { tuple: Tuple::new(local, remote, ifindex), cookie };
            let body = exact(&target);
            let v4 = local.ip().to_canonical().is_ipv4() && remote.ip().to_canonical().is_ipv4();
            prop_assert_eq!(body[0], if v4 { 2 } else { 10 });
            prop_assert_eq!(u16_at(&body, 8).map(u16::from_be), Some(local.port()));
            prop_assert_eq!(u16_at(&body, 10).map(u16::from_be), Some(remote.port()));
            for (at, end) in [(12, local), (28, remote)] {
                match end.ip().to_canonical() {
                    IpAddr::V4(ip) if v4 => prop_assert_eq!(&body[at..at + 4], &ip.octets()),
                    IpAddr::V4(ip) => {
                        prop_assert_eq!(&body[at..at + 16], &ip.to_ipv6_mapped().octets());
                    }
                    IpAddr::V6(ip) => prop_assert_eq!(&body[at..at + 16], &ip.octets()),
                }
            }
            prop_assert_eq!(u32_at(&body, 44), Some(ifindex));
            prop_assert_eq!(u32_at(&body, 48), Some(cookie as u32));
            prop_assert_eq!(u32_at(&body, 52), Some((cookie >> 32) as u32));
        }
    }
}
