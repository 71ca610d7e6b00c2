//! Offsets of kernel fields from the running kernel's type information (BTF).
//!
//! Rust has no CO-RE relocations, so the agent looks the offsets up and hands them to the
//! programs as read-only constants. The format is Documentation/bpf/btf.rst; only what leads to
//! a member's offset is parsed here. Input is a kernel file, yet every length is checked.

use std::collections::HashMap;

use agent_common::{AdoptOffsets, Offsets, control::NO_OFFSET};
use thiserror::Error;

/// Where the running kernel shows its types.
pub const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
const KIND_ARRAY: u32 = 3;
const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;

/// Why type information cannot be used.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BtfError {
    /// Not BTF, or not of this machine's byte order.
    #[error("not BTF of this machine's byte order")]
    Magic,
    /// Ends in the middle of something.
    #[error("truncated at type {0}")]
    Truncated(u32),
    /// A kind of type that this parser does not know: everything after it is unreadable.
    #[error("unknown kind {kind} at type {id}")]
    Kind {
        /// The type's number.
        id: u32,
        /// Its kind.
        kind: u32,
    },
}

#[derive(Clone, Copy)]
struct Member {
    name: u32,
    type_id: u32,
    bit_offset: u32,
    bit_size: u32,
}

struct Composite {
    members: std::ops::Range<usize>,
}

/// Parsed structs and unions.
pub struct Btf<'a> {
    strings: &'a [u8],
    composites: HashMap<u32, Composite>,
    by_name: HashMap<&'a [u8], u32>,
    members: Vec<Member>,
    /// Typedefs and qualifiers, to what they stand for.
    aliases: HashMap<u32, u32>,
}

/// Where a member lies in a struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Bits from the struct's begin.
    pub bits: u32,
    /// Bits of a bit field, else 0.
    pub bit_size: u32,
    /// Its type.
    pub type_id: u32,
}

impl<'a> Btf<'a> {
    /// Parses BTF.
    ///
    /// # Errors
    /// When the data is not BTF, cut short, or of a newer kind.
    pub fn parse(data: &'a [u8]) -> Result<Self, BtfError> {
        let u16_at = |at: usize| {
            data.get(at..at + 2)
                .map(|b| u16::from_ne_bytes([b[0], b[1]]))
        };
        let u32_at = |at: usize| {
            let bytes = data.get(at..at.checked_add(4)?)?;
            Some(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        if u16_at(0) != Some(MAGIC) {
            return Err(BtfError::Magic);
        }
        let header = |at| u32_at(at).map(|v| v as usize).ok_or(BtfError::Truncated(0));
        let (head, type_off, type_len) = (header(4)?, header(8)?, header(12)?);
        let (str_off, str_len) = (header(16)?, header(20)?);
        let section = |off: usize, len: usize| {
            let begin = head.checked_add(off)?;
            data.get(begin..begin.checked_add(len)?)
        };
        let types = section(type_off, type_len).ok_or(BtfError::Truncated(0))?;
        let strings = section(str_off, str_len).ok_or(BtfError::Truncated(0))?;
        let mut btf = Self {
            strings,
            composites: HashMap::new(),
            by_name: HashMap::new(),
            members: Vec::new(),
            aliases: HashMap::new(),
        };
        btf.read_types(types)?;
        Ok(btf)
    }

    fn read_types(&mut self, types: &'a [u8]) -> Result<(), BtfError> {
        let word = |at: usize| {
            let bytes = types.get(at..at.checked_add(4)?)?;
            Some(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
        };
        let (mut at, mut id) = (0_usize, 1_u32);
        while at < types.len() {
            let cut = || BtfError::Truncated(id);
            let name = word(at).ok_or_else(cut)?;
            let info = word(at + 4).ok_or_else(cut)?;
            let size_or_type = word(at + 8).ok_or_else(cut)?;
            at += 12;
            let (count, kind) = ((info & 0xffff) as usize, (info >> 24) & 0x1f);
            let has_bit_sizes = info >> 31 == 1;
            // Bytes that follow, by kind: include/uapi/linux/btf.h.
            let extra = match kind {
                1 | 14 | 17 => 4,
                KIND_ARRAY => 12,
                KIND_STRUCT | KIND_UNION | 15 | 19 => count * 12,
                6 | 13 => count * 8,
                2 | 7..=12 | 16 | 18 => 0,
                _ => return Err(BtfError::Kind { id, kind }),
            };
            if at.checked_add(extra).is_none_or(|end| end > types.len()) {
                return Err(cut());
            }
            match kind {
                KIND_STRUCT | KIND_UNION => {
                    let begin = self.members.len();
                    for i in 0..count {
                        let m = at + i * 12;
                        let offset = word(m + 8).ok_or_else(cut)?;
                        let (bit_offset, bit_size) = if has_bit_sizes {
                            (offset & 0xff_ffff, offset >> 24)
                        } else {
                            (offset, 0)
                        };
                        self.members.push(Member {
                            name: word(m).ok_or_else(cut)?,
                            type_id: word(m + 4).ok_or_else(cut)?,
                            bit_offset,
                            bit_size,
                        });
                    }
                    let members = begin..self.members.len();
                    self.composites.insert(id, Composite { members });
                    if kind == KIND_STRUCT && name != 0 {
                        let name = self.string(name);
                        self.by_name.entry(name).or_insert(id);
                    }
                }
                8..=11 | 18 => {
                    self.aliases.insert(id, size_or_type);
                }
                _ => {}
            }
            at += extra;
            id += 1;
        }
        Ok(())
    }

    fn string(&self, offset: u32) -> &'a [u8] {
        let rest = self.strings.get(offset as usize..).unwrap_or(&[]);
        let end = rest.iter().position(|b| *b == 0).unwrap_or(rest.len());
        &rest[..end]
    }

    fn resolve(&self, mut type_id: u32) -> u32 {
        // A chain longer than this is a loop.
        for _ in 0..32 {
            match self.aliases.get(&type_id) {
                Some(next) => type_id = *next,
                None => break,
            }
        }
        type_id
    }

    /// Where a member lies in a struct or union, looking into unnamed members too.
    fn member(&self, type_id: u32, name: &str, depth: u32) -> Option<Place> {
        let composite = self.composites.get(&self.resolve(type_id))?;
        for member in &self.members[composite.members.clone()] {
            let its_name = self.string(member.name);
            if its_name == name.as_bytes() {
                return Some(Place {
                    bits: member.bit_offset,
                    bit_size: member.bit_size,
                    type_id: member.type_id,
                });
            }
            if its_name.is_empty()
                && depth < 8
                && let Some(inner) = self.member(member.type_id, name, depth + 1)
            {
                return Some(Place {
                    bits: member.bit_offset.checked_add(inner.bits)?,
                    ..inner
                });
            }
        }
        None
    }

    /// Where `path` (member by member) lies in the struct of that name.
    pub fn place(&self, structure: &str, path: &[&str]) -> Option<Place> {
        let type_id = *self.by_name.get(structure.as_bytes())?;
        let mut place = Place {
            bits: 0,
            bit_size: 0,
            type_id,
        };
        for name in path {
            let inner = self.member(place.type_id, name, 0)?;
            place = Place {
                bits: place.bits.checked_add(inner.bits)?,
                ..inner
            };
        }
        Some(place)
    }

    /// The offsets that the programs want; what is not found is marked so.
    pub fn offsets(&self) -> Offsets {
        let byte = |structure, path: &[&str]| {
            self.place(structure, path)
                .map_or(NO_OFFSET, |place| place.bits / 8)
        };
        let kern = self.place("sock", &["sk_kern_sock"]);
        Offsets {
            sock_err: byte("sock", &["sk_err"]),
            sock_kern: kern.map_or(NO_OFFSET, |place| place.bits / 8),
            // Bit fields are numbered from the least significant bit on little-endian machines.
            sock_kern_mask: kern.map_or(0, |place| 1 << (place.bits % 8)),
            sock_net: byte("sock", &["__sk_common", "skc_net", "net"]),
            net_inum: byte("net", &["ns", "inum"]),
            task_flags: byte("task_struct", &["flags"]),
            user_timeout: byte("inet_connection_sock", &["icsk_user_timeout"]),
            sock_shutdown: byte("sock", &["sk_shutdown"]),
            received: byte("tcp_sock", &["rcv_nxt"]),
            copied: byte("tcp_sock", &["copied_seq"]),
            sock_cookie: byte("sock", &["__sk_common", "skc_cookie"]),
            callbacks: byte("tcp_sock", &["bpf_sock_ops_cb_flags"]),
            task_pid: byte("task_struct", &["pid"]),
            task_tgid: byte("task_struct", &["tgid"]),
            task_comm: byte("task_struct", &["comm"]),
            task_cgroups: byte("task_struct", &["cgroups"]),
            default_cgroup: byte("css_set", &["dfl_cgrp"]),
            cgroup_node: byte("cgroup", &["kn"]),
            node_id: byte("kernfs_node", &["id"]),
            errors_queued: byte("sock", &["sk_error_queue", "qlen"]),
            first_error: byte("sock", &["sk_error_queue", "next"]),
            error_of_packet: [
                byte("sk_buff", &["cb"]),
                byte("sock_exterr_skb", &["ee", "ee_errno"]),
            ]
            .into_iter()
            .try_fold(0_u32, |sum, offset| {
                (offset != NO_OFFSET).then(|| sum.checked_add(offset))?
            })
            .unwrap_or(NO_OFFSET),
        }
    }
}

impl Btf<'_> {
    /// The offsets that adoption wants; `None` when one is not found, for it needs every one.
    pub fn adopt_offsets(&self) -> Option<AdoptOffsets> {
        let byte = |structure, path: &[&str]| {
            let place = self.place(structure, path)?;
            Some(place.bits / 8)
        };
        let common = |name| byte("sock", &["__sk_common", name]);
        let tcp = |name| byte("tcp_sock", &[name]);
        let connection = |path| byte("inet_connection_sock", path);
        Some(AdoptOffsets {
            family: common("skc_family")?,
            state: common("skc_state")?,
            local_port: common("skc_num")?,
            peer_port: common("skc_dport")?,
            local4: common("skc_rcv_saddr")?,
            peer4: common("skc_daddr")?,
            local6: common("skc_v6_rcv_saddr")?,
            peer6: common("skc_v6_daddr")?,
            ifindex: common("skc_bound_dev_if")?,
            cgroup: byte("sock", &["sk_cgrp_data", "cgroup"])?,
            cgroup_node: byte("cgroup", &["kn"])?,
            node_id: byte("kernfs_node", &["id"])?,
            net_cookie: byte("net", &["net_cookie"])?,
            backlog: byte("sock", &["sk_max_ack_backlog"])?,
            bucket: connection(&["icsk_bind_hash"])?,
            fast_reuse: byte("inet_bind_bucket", &["fastreuse"])?,
            received_at: connection(&["icsk_ack", "lrcvtime"])?,
            sent_at: tcp("lsndtime")?,
            acknowledged: tcp("snd_una")?,
            sent: tcp("snd_nxt")?,
            written: tcp("write_seq")?,
            received: tcp("rcv_nxt")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_running_kernel_is_understood() {
        let Ok(data) = std::fs::read(VMLINUX) else {
            return;
        };
        let offsets = Btf::parse(&data).unwrap().offsets();
        for offset in [
            offsets.sock_err,
            offsets.sock_kern,
            offsets.sock_net,
            offsets.net_inum,
            offsets.task_flags,
            offsets.user_timeout,
            offsets.sock_shutdown,
            offsets.received,
            offsets.copied,
            offsets.sock_cookie,
            offsets.callbacks,
            offsets.task_pid,
            offsets.task_tgid,
            offsets.task_comm,
            offsets.task_cgroups,
            offsets.default_cgroup,
            offsets.cgroup_node,
            offsets.node_id,
        ] {
            assert_ne!(offset, NO_OFFSET, "{offsets:?}");
        }
        assert!(Btf::parse(&data).unwrap().adopt_offsets().is_some());
        assert!(offsets.sock_kern_mask.is_power_of_two() && offsets.sock_kern_mask < 256);
    }

    #[test]
    fn not_btf() {
        assert_eq!(Btf::parse(b"\x7fELF").err(), Some(BtfError::Magic));
        assert_eq!(
            Btf::parse(&MAGIC.to_ne_bytes()).err(),
            Some(BtfError::Truncated(0))
        );
    }

    proptest! {
        #[test]
        fn garbage_never_panics(mut data: Vec<u8>) {
            if data.len() >= 24 {
                data[0..2].copy_from_slice(&MAGIC.to_ne_bytes());
                data[4..8].copy_from_slice(&24_u32.to_ne_bytes());
                data[8..12].copy_from_slice(&0_u32.to_ne_bytes());
                let len = (data.len() as u32 - 24).to_ne_bytes();
                data[12..16].copy_from_slice(&len);
                data[20..24].copy_from_slice(&len);
                data[16..20].copy_from_slice(&0_u32.to_ne_bytes());
            }
            if let Ok(btf) = Btf::parse(&data) {
                let _ = (btf.offsets(), btf.adopt_offsets());
            }
        }
    }
}
