//! One sock_diag netlink socket, and the bytes of its messages.
//!
//! By hand, because it is little: a request is 72 bytes of fixed layout. The kernel answers every
//! request within the send that brings it (net/netlink/af_netlink.c, `netlink_unicast_kernel`), so
//! nothing here ever waits for an answer: one that is not there has been lost.

use std::os::fd::OwnedFd;

use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType,
        netlink::{self, SocketAddrNetlink},
        recvfrom, send, socket_with, sockopt,
    },
};

/// include/uapi/linux/netlink.h.
pub const NLM_F_REQUEST: u16 = 1;
/// Answer with an error code, which is 0 when all went well.
pub const NLM_F_ACK: u16 = 4;
/// All of them (NLM_F_ROOT | NLM_F_MATCH).
pub const NLM_F_DUMP: u16 = 0x300;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;

/// Length of a message's header.
const HEADER: usize = 16;

/// Room for answers that wait to be read: 256 of them, each charged with up to 4 KiB.
const RECEIVE_BUFFER: usize = 1 << 20;
/// The kernel fills at most this much at once (`netlink_dump`).
const LARGEST_READ: usize = 32 << 10;

/// An open netlink socket; it belongs to the network namespace in which it was opened.
pub struct Netlink {
    socket: OwnedFd,
    buffer: Vec<u8>,
}

/// What a message is.
#[derive(Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// An answer of this type.
    Answer(u16, &'a [u8]),
    /// The end of a request, well or with an error.
    End(Result<(), Errno>),
}

/// One message.
#[derive(Debug, PartialEq, Eq)]
pub struct Message<'a> {
    /// Number of the request that it answers.
    pub sequence: u32,
    /// What it is.
    pub body: Body<'a>,
}

impl Netlink {
    /// Opens one in the calling thread's namespace.
    pub fn open() -> Result<Self, Errno> {
        let socket = socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::SOCK_DIAG),
        )?;
        // The default would do for most, but an administrator may have made it tiny.
        sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER)
            .or_else(|_| sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER))?;
        Ok(Self {
            socket,
            buffer: Vec::new(),
        })
    }

    /// Sends requests to the kernel, all at once.
    pub fn send(&self, requests: &[u8]) -> Result<(), Errno> {
        loop {
            match send(&self.socket, requests, SendFlags::empty()) {
                Err(Errno::INTR) => {}
                done => return done.map(drop),
            }
        }
    }

    /// Reads what lies there: one answer, or many of a dump. `None` when nothing does.
    pub fn read(&mut self) -> Result<Option<Messages<'_>>, Errno> {
        self.buffer.resize(LARGEST_READ, 0);
        let length = loop {
            let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC;
            match recvfrom(&self.socket, self.buffer.as_mut_slice(), flags) {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(errno) => return Err(errno),
                Ok((_, length, from)) => {
                    let from = from.and_then(|from| SocketAddrNetlink::try_from(from).ok());
                    // The root of a container may write to sockets in its namespace.
                    if from.is_some_and(|from| from.pid() == 0) {
                        break length;
                    }
                }
            }
        };
        if length > LARGEST_READ {
            return Err(Errno::MSGSIZE);
        }
        Ok(Some(Messages {
            rest: &self.buffer[..length],
        }))
    }
}

/// Appends one request.
pub fn request(out: &mut Vec<u8>, kind: u16, flags: u16, sequence: u32, payload: &[u8]) {
    let length = HEADER + payload.len();
    out.extend_from_slice(&(length as u32).to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
    out.extend_from_slice(&sequence.to_ne_bytes());
    out.extend_from_slice(&0_u32.to_ne_bytes());
    out.extend_from_slice(payload);
    out.resize(out.len().next_multiple_of(4), 0);
}

/// The messages of one read. It ends at the first one that makes no sense.
pub struct Messages<'a> {
    rest: &'a [u8],
}

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        let rest = self.rest;
        let length = u32_at(rest, 0)? as usize;
        let kind = u16_at(rest, 4)?;
        let sequence = u32_at(rest, 8)?;
        let payload = rest.get(HEADER..length)?;
        self.rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        let body = match kind {
            // An error code comes first in both; of a dump's end since 4.14 or so.
            NLMSG_ERROR | NLMSG_DONE => Body::End(match u32_at(payload, 0)? as i32 {
                0.. => Ok(()),
                code => Err(Errno::from_raw_os_error(code.checked_neg()?)),
            }),
            kind => Body::Answer(kind, payload),
        };
        Some(Message { sequence, body })
    }
}

/// The attributes that follow a fixed part: type and value.
pub struct Attributes<'a> {
    rest: &'a [u8],
}

impl<'a> Attributes<'a> {
    /// Of these bytes.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }
}

impl<'a> Iterator for Attributes<'a> {
    type Item = (u16, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.rest;
        let length = usize::from(u16_at(rest, 0)?);
        let kind = u16_at(rest, 2)?;
        let value = rest.get(4..length)?;
        self.rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        // The two highest bits are flags (NLA_F_NESTED, NLA_F_NET_BYTEORDER).
        Some((kind & 0x3fff, value))
    }
}

pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes
        .get(at..)?
        .first_chunk()
        .map(|b| u16::from_ne_bytes(*b))
}

pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes
        .get(at..)?
        .first_chunk()
        .map(|b| u32::from_ne_bytes(*b))
}

pub fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes
        .get(at..)?
        .first_chunk()
        .map(|b| u64::from_ne_bytes(*b))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(bytes: &[u8]) -> Vec<Message<'_>> {
        Messages { rest: bytes }.collect()
    }

    #[test]
    fn an_error_and_the_end() {
        let mut bytes = Vec::new();
        let error = (-libc::ENOENT).to_ne_bytes();
        request(&mut bytes, NLMSG_ERROR, 0, 7, &error);
        request(&mut bytes, NLMSG_ERROR, 0, 8, &[0; 4]);
        request(&mut bytes, 20, 0, 9, b"abc");
        request(&mut bytes, NLMSG_DONE, 0, 9, &[0; 4]);
        let ends: Vec<_> = all(&bytes);
        let expected = [
            (7, Body::End(Err(Errno::NOENT))),
            (8, Body::End(Ok(()))),
            (9, Body::Answer(20, b"abc")),
            (9, Body::End(Ok(()))),
        ];
        let expected = expected.map(|(sequence, body)| Message { sequence, body });
        assert_eq!(ends, expected);
    }

    proptest! {
        #[test]
        fn garbage_ends(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(all(&bytes).len() <= bytes.len() / HEADER);
            prop_assert!(Attributes::new(&bytes).count() <= bytes.len() / 4);
        }

        #[test]
        fn what_is_written_is_read(
            messages in proptest::collection::vec(
                (4_u16..100, any::<u32>(), proptest::collection::vec(any::<u8>(), 0..40)),
                0..8,
            ),
        ) {
            let mut bytes = Vec::new();
            for (kind, sequence, payload) in &messages {
                request(&mut bytes, *kind, 0, *sequence, payload);
            }
            let read = all(&bytes);
            prop_assert_eq!(read.len(), messages.len());
            for (read, (kind, sequence, payload)) in read.iter().zip(&messages) {
                prop_assert_eq!(read.sequence, *sequence);
                prop_assert_eq!(&read.body, &Body::Answer(*kind, payload.as_slice()));
            }
        }
    }
}
