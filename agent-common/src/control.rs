//! What concerns the whole node: mode, heartbeat, and counters that belong to no row.

use bytemuck::{Pod, Zeroable};

use crate::layout;

/// Written by the agent, read by every program. One entry of an array mapped into the agent.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Control {
    /// One of the [`Mode`] constants.
    pub mode: u32,
    /// The agent's own process: its connects pass uncounted.
    pub agent_pid: u32,
    /// When the agent was last seen at work (CLOCK_MONOTONIC, ns). Older than
    /// `heartbeat_max_age_ns`: no refusal and no timeout, whatever the verdicts say.
    pub heartbeat_ns: u64,
    /// Age beyond which the heartbeat counts as dead, ns.
    pub heartbeat_max_age_ns: u64,
    /// Length of a kernel tick, ns (CONFIG_HZ is 100, 250, 300 or 1000).
    pub tick_ns: u64,
    /// 1 where the first SYNs are repeated at equal distances (kernel 6.5 and later), else 0.
    pub syn_linear: u32,
    /// Zero.
    pub reserved0: u32,
    /// Zero.
    pub reserved: [u64; 3],
}

layout!(Control, size 64, mode at 0, agent_pid at 4, heartbeat_ns at 8, heartbeat_max_age_ns at 16);

/// Values of [`Control::mode`].
pub struct Mode;

impl Mode {
    /// Count everything, touch nothing (also before the agent is ready, and while it stops).
    pub const OFF: u32 = 0;
    /// Count what would have been refused or timed out; touch nothing.
    pub const OBSERVE: u32 = 1;
    /// Refuse and time out.
    pub const ENFORCE: u32 = 2;
}

/// Written by the kernel, read by the agent. One entry, mapped.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub struct Counters {
    /// Events that found no room in the ring buffer.
    pub lost_events: u64,
    /// Connects counted in the `other` row because no row was free.
    pub without_row: u64,
    /// Connects that passed uncounted because no place for their stamp could be had.
    pub unstamped: u64,
    /// Rows created by the kernel.
    pub rows_created: u64,
    /// Connections that existed before and are followed since the agent's start.
    pub adopted: u64,
    /// Connects whose SYN is held now.
    pub held: u64,
    /// Zero.
    pub reserved: [u64; 2],
}

layout!(Counters, size 64, lost_events at 0, rows_created at 24);

/// Byte offsets of kernel fields, found by the agent in the running kernel's BTF and given to the
/// programs as a read-only global (Rust has no CO-RE). An offset of `u32::MAX` means: not found,
/// do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Offsets {
    /// `sk_err` in `struct sock`.
    pub sock_err: u32,
    /// Byte of `sk_kern_sock` in `struct sock`.
    pub sock_kern: u32,
    /// Bit mask of `sk_kern_sock` in that byte.
    pub sock_kern_mask: u32,
    /// `__sk_common.skc_net.net` in `struct sock`.
    pub sock_net: u32,
    /// `ns.inum` in `struct net`.
    pub net_inum: u32,
    /// `flags` in `struct task_struct`.
    pub task_flags: u32,
    /// `icsk_user_timeout` in `struct inet_connection_sock`.
    pub user_timeout: u32,
    /// `sk_shutdown` in `struct sock`.
    pub sock_shutdown: u32,
    /// `rcv_nxt` in `struct tcp_sock`.
    pub received: u32,
    /// `copied_seq` in `struct tcp_sock`.
    pub copied: u32,
    /// `__sk_common.skc_cookie` in `struct sock`.
    pub sock_cookie: u32,
    /// `sk_error_queue.qlen` in `struct sock`.
    pub errors_queued: u32,
    /// `sk_error_queue.next` in `struct sock`.
    pub first_error: u32,
    /// `ee.ee_errno` of the `struct sock_exterr_skb` that lies in `cb` of a `struct sk_buff` of that
    /// queue; `ee_origin` is the byte behind it (include/uapi/linux/errqueue.h).
    pub error_of_packet: u32,
    /// `bpf_sock_ops_cb_flags` in `struct tcp_sock`, a byte.
    pub callbacks: u32,
    /// `pid` in `struct task_struct`: the thread.
    pub task_pid: u32,
    /// `tgid` in `struct task_struct`: the process.
    pub task_tgid: u32,
    /// `comm` in `struct task_struct`.
    pub task_comm: u32,
    /// `cgroups` in `struct task_struct`.
    pub task_cgroups: u32,
    /// `dfl_cgrp` in `struct css_set`: the control group of version 2.
    pub default_cgroup: u32,
    /// `kn` in `struct cgroup`.
    pub cgroup_node: u32,
    /// `id` in `struct kernfs_node`.
    pub node_id: u32,
}

layout!(Offsets, size 88, sock_err at 0, task_flags at 20, user_timeout at 24, received at 32);

/// Marks an [`Offsets`] field as not found.
pub const NO_OFFSET: u32 = u32::MAX;
