//! What adopting sockets that exist when the agent starts needs to know of the running kernel.

use bytemuck::{Pod, Zeroable};

use crate::{control::NO_OFFSET, layout};

/// Byte offsets, as [`crate::Offsets`], of what only adoption reads. It needs every one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct AdoptOffsets {
    /// `__sk_common.skc_family` in `struct sock`.
    pub family: u32,
    /// `__sk_common.skc_state`.
    pub state: u32,
    /// `__sk_common.skc_num`: local port, host order.
    pub local_port: u32,
    /// `__sk_common.skc_dport`: the peer's, network order.
    pub peer_port: u32,
    /// `__sk_common.skc_rcv_saddr`.
    pub local4: u32,
    /// `__sk_common.skc_daddr`.
    pub peer4: u32,
    /// `__sk_common.skc_v6_rcv_saddr`.
    pub local6: u32,
    /// `__sk_common.skc_v6_daddr`.
    pub peer6: u32,
    /// `__sk_common.skc_bound_dev_if`.
    pub ifindex: u32,
    /// `sk_cgrp_data.cgroup`.
    pub cgroup: u32,
    /// `kn` in `struct cgroup`.
    pub cgroup_node: u32,
    /// `id` in `struct kernfs_node`.
    pub node_id: u32,
    /// `net_cookie` in `struct net`.
    pub net_cookie: u32,
    /// `sk_max_ack_backlog` in `struct sock`.
    pub backlog: u32,
    /// `icsk_bind_hash` in `struct inet_connection_sock`.
    pub bucket: u32,
    /// `fastreuse` in `struct inet_bind_bucket`.
    pub fast_reuse: u32,
    /// `icsk_ack.lrcvtime`: when data came last, ticks.
    pub received_at: u32,
    /// `lsndtime` in `struct tcp_sock`: when data was sent last, ticks.
    pub sent_at: u32,
    /// `snd_una` in `struct tcp_sock`: what the peer has acknowledged.
    pub acknowledged: u32,
    /// `snd_nxt`: what was sent.
    pub sent: u32,
    /// `write_seq`: what the program has written.
    pub written: u32,
    /// `rcv_nxt`: what has come in.
    pub received: u32,
}

layout!(AdoptOffsets, size 88, family at 0, cgroup at 36, received at 84);

impl AdoptOffsets {
    /// None of them is known.
    pub const UNKNOWN: Self = Self {
        family: NO_OFFSET,
        state: NO_OFFSET,
        local_port: NO_OFFSET,
        peer_port: NO_OFFSET,
        local4: NO_OFFSET,
        peer4: NO_OFFSET,
        local6: NO_OFFSET,
        peer6: NO_OFFSET,
        ifindex: NO_OFFSET,
        cgroup: NO_OFFSET,
        cgroup_node: NO_OFFSET,
        node_id: NO_OFFSET,
        net_cookie: NO_OFFSET,
        backlog: NO_OFFSET,
        bucket: NO_OFFSET,
        fast_reuse: NO_OFFSET,
        received_at: NO_OFFSET,
        sent_at: NO_OFFSET,
        acknowledged: NO_OFFSET,
        sent: NO_OFFSET,
        written: NO_OFFSET,
        received: NO_OFFSET,
    };
}
