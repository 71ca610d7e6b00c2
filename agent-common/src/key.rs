//! What a row is about: who connects, from where, and to which address and port.

use bytemuck::{Pod, Zeroable};

use crate::layout;

/// Key of a row: one breaker belongs to (workload, network namespace, destination).
///
/// Addresses are always 16 bytes: IPv4 as `::ffff:a.b.c.d`, so that a mapped IPv4 address (Java's
/// default) and a plain one are the same destination. `0.0.0.0` and `::` never appear: connecting
/// to them reaches loopback, and they are stored as `127.0.0.1` and `::1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C)]
pub struct DestinationKey {
    /// The caller's leaf cgroup at `connect()` (cgroup v2 id, the inode of its directory).
    pub cgroup_id: u64,
    /// Cookie of the socket's network namespace (`bpf_get_netns_cookie`).
    pub netns_cookie: u64,
    /// IPv6 address, or IPv4-mapped, in network order.
    pub addr: [u8; 16],
    /// Interface index for a link-local address whose socket is bound to one, else 0.
    pub ifindex: u32,
    /// TCP port, network order.
    pub port_be: u16,
    /// Zero.
    pub reserved: u16,
}

layout!(DestinationKey, size 40, cgroup_id at 0, netns_cookie at 8, addr at 16, ifindex at 32, port_be at 36);

/// First 12 bytes of an IPv4 address in its 16-byte form.
pub const IPV4_MAPPED_PREFIX: [u8; 12] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff];

/// The 16-byte form of an IPv4 address.
#[inline(always)]
pub fn mapped(addr: [u8; 4]) -> [u8; 16] {
    let [a, b, c, d] = addr;
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, a, b, c, d]
}

/// Data part of a key of the policy trie: exact class and port first, then an address prefix.
///
/// Policies without a port are entered under port 0. For each port that any policy names, all
/// policies without a port are entered under that port too, so that the longest prefix under the
/// real port, else under port 0, is the right one: prefix length beats port, port breaks ties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C)]
pub struct PolicyKey {
    /// [`CLASS_POLICY`] or [`CLASS_PROTECTED`].
    pub class: u32,
    /// TCP port in network order, or 0 for any.
    pub port_be: u16,
    /// Zero.
    pub reserved: u16,
    /// Address (prefix), 16-byte form.
    pub addr: [u8; 16],
}

layout!(PolicyKey, size 24, class at 0, port_be at 4, addr at 8);

/// Class of the entries that map a destination to a policy.
pub const CLASS_POLICY: u32 = 0;
/// Class of the entries that mark a destination as protected; they win over any policy.
pub const CLASS_PROTECTED: u32 = 1;
/// Bits of a [`PolicyKey`] before the address: always part of the prefix.
pub const POLICY_KEY_EXACT_BITS: u32 = 64;

/// Key of a manual state that an operator set for a destination, whatever the workload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C)]
pub struct ManualKey {
    /// 16-byte form of the address.
    pub addr: [u8; 16],
    /// As in [`DestinationKey`].
    pub ifindex: u32,
    /// TCP port, network order.
    pub port_be: u16,
    /// Zero.
    pub reserved: u16,
}

layout!(ManualKey, size 24, addr at 0, ifindex at 16, port_be at 20);
