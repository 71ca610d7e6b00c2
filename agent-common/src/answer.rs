//! What programs are told about names: DNS answers, as they came.

use bytemuck::{Pod, Zeroable};

use crate::layout;

/// Longest message that is handed up; longer ones, which hold some 50 addresses, are left out. Resolvers
/// ask for at most 512 bytes, or 1,232 (<https://www.dnsflagday.net/2020/>). A power of two, by which
/// the verifier sees that nothing longer is copied.
pub const ANSWER_MOST: usize = 1024;
const _: () = assert!(ANSWER_MOST.is_power_of_two());

/// Shortest message with an answer: head, question (a name of one letter), and a record with an address.
pub const ANSWER_LEAST: usize = 35;

/// Messages a second that are handed up; the rest is left out.
pub const ANSWERS_A_SECOND: u64 = 2000;

/// A message from port 53 that claims to be an answer. Nothing in it has been checked.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct HeardAnswer {
    /// The network namespace of the socket that it came to, as in [`crate::DestinationKey`].
    pub netns_cookie: u64,
    /// Bytes of the message, [`ANSWER_LEAST`] to [`ANSWER_MOST`].
    pub length: u32,
    /// Zero.
    pub reserved: u32,
    /// The message; beyond its length whatever lay there.
    pub message: [u8; ANSWER_MOST],
}

layout!(HeardAnswer, size 1040, netns_cookie at 0, length at 8, message at 16);
