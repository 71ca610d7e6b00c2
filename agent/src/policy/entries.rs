//! The policies as the kernel finds them: entries of a table that is searched by longest prefix.
//!
//! The kernel looks for the longest prefix under the connection's port, and if there is none, for
//! the longest under port 0 (see [`PolicyKey`]). Policies with workloads are not in it: the agent
//! resolves those once a row exists. Names are in it as the addresses that the agent has resolved them to.
//! A connection without an entry has the defaults.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use agent_common::{
    PolicyKey,
    key::{CLASS_POLICY, CLASS_PROTECTED, POLICY_KEY_EXACT_BITS},
};

use super::{
    destination::{Destination, to_bytes},
    model::Config,
    pattern::{DestinationPattern, KnownName, Target},
};

/// Bits before an IPv4 address in its 16-byte form.
const V4_OFFSET: u32 = 96;

/// One entry of the kernel's address table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelEntry {
    /// Class, port and first address.
    pub key: PolicyKey,
    /// Length of the prefix in bits, [`POLICY_KEY_EXACT_BITS`] included.
    pub prefix_len: u32,
    /// Class policy: 0 for the defaults, i + 1 for `policies[i]`. Class protected: 1, and only
    /// the entry's presence counts.
    pub policy: u32,
}

/// An address prefix in its 16-byte form, without [`POLICY_KEY_EXACT_BITS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Prefix {
    addr: [u8; 16],
    bits: u32,
}

/// 0.0.0.0 in its 16-byte form.
const V4_ZERO: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0];

/// All IPv4 addresses.
const ALL_V4: Prefix = Prefix {
    addr: V4_ZERO,
    bits: V4_OFFSET,
};

/// A prefix, its port, and what it leads to.
#[derive(Clone, Copy)]
struct Rule {
    prefix: Prefix,
    port: Option<u16>,
    policy: u32,
}

impl Config {
    /// The entries of the kernel's address table, in no order that matters, no key twice.
    pub fn kernel_entries(&self) -> Vec<KernelEntry> {
        let policies: Vec<Rule> = self
            .policies
            .iter()
            .zip(1..)
            .filter(|(policy, _)| policy.workloads.is_empty())
            .flat_map(|(policy, index)| rules(&policy.destinations, index))
            .collect();
        let protected: Vec<Rule> = rules(&self.protected, 1).collect();

        let mut entries = Vec::new();
        for (port, mut table) in by_port(&policies) {
            // An IPv6 prefix is for IPv6 alone. One that is so short that the IPv4 addresses lie
            // in it must not reach them: they go on to the defaults.
            if table.keys().any(|prefix| covers_v4(*prefix)) {
                table.entry(ALL_V4).or_insert(0);
            }
            extend(&mut entries, CLASS_POLICY, port, table);
        }
        for (port, table) in by_port(&without_v4(&protected)) {
            extend(&mut entries, CLASS_PROTECTED, port, table);
        }
        entries
    }

    /// The entries for addresses whose names the agent has resolved itself, to be added to
    /// [`Config::kernel_entries`], where an equal key gives way to these.
    pub fn named_entries(&self, addresses: &[(IpAddr, Vec<KnownName>)]) -> Vec<KernelEntry> {
        let patterns = |all: &mut dyn Iterator<Item = &DestinationPattern>| -> BTreeSet<u16> {
            all.filter_map(|pattern| pattern.port).chain([0]).collect()
        };
        let destinations = |policy: &super::Policy| policy.destinations.clone();
        let of_policies: Vec<DestinationPattern> =
            self.policies.iter().flat_map(destinations).collect();
        let ports = patterns(&mut of_policies.iter());
        let guarded = patterns(&mut self.protected.iter());
        let by_name = |pattern: &DestinationPattern| matches!(pattern.target, Target::Name { .. });
        let mut entries = Vec::new();
        for (addr, names) in addresses {
            let entry = |class: u32, port: u16, policy: u32| KernelEntry {
                key: PolicyKey {
                    class,
                    port_be: port.to_be(),
                    reserved: 0,
                    addr: to_bytes(*addr),
                },
                prefix_len: POLICY_KEY_EXACT_BITS + 128,
                policy,
            };
            for &port in &ports {
                let to = Destination::new(*addr, port, 0);
                let matches = self.matches(&to, None, names);
                let winner = matches
                    .first()
                    .filter(|winner| winner.destination.is_some_and(by_name));
                if let Some(winner) = winner {
                    entries.push(entry(CLASS_POLICY, port, winner.index as u32));
                }
            }
            for &port in &guarded {
                let to = Destination::new(*addr, port, 0);
                if self.guard(&to, names).is_some_and(|(_, by)| by_name(by)) {
                    entries.push(entry(CLASS_PROTECTED, port, 1));
                }
            }
        }
        entries
    }

    /// Every exact name that a policy or `[protected]` names, once, in order of appearance.
    pub fn exact_names(&self) -> Vec<std::sync::Arc<str>> {
        let mut names: Vec<std::sync::Arc<str>> = Vec::new();
        let policies = self.policies.iter().flat_map(|policy| &policy.destinations);
        for pattern in policies.chain(&self.protected) {
            if let Target::Name {
                name,
                wildcard: false,
            } = &pattern.target
                && !names.iter().any(|known| **known == **name)
            {
                names.push(name.as_str().into());
            }
        }
        names
    }

    /// What names a destination by this name in full: `policy NAME`, in the order of the file, and
    /// `[protected]`.
    pub fn naming(&self, name: &str) -> Vec<String> {
        let is_it = |pattern: &DestinationPattern| matches!(&pattern.target, Target::Name { name: own, wildcard: false } if *own == name);
        let policies = self.policies.iter();
        let mut naming: Vec<String> = policies
            .filter(|policy| policy.destinations.iter().any(is_it))
            .map(|policy| format!("policy {}", policy.name))
            .collect();
        if self.protected.iter().any(is_it) {
            naming.push("[protected]".to_owned());
        }
        naming
    }
}

fn rules(patterns: &[DestinationPattern], policy: u32) -> impl Iterator<Item = Rule> {
    patterns.iter().filter_map(move |pattern| {
        let Target::Address(net) = &pattern.target else {
            return None;
        };
        let offset = match net.addr() {
            IpAddr::V4(_) => V4_OFFSET,
            IpAddr::V6(_) => 0,
        };
        let bits = offset + u32::from(net.prefix_len());
        Some(Rule {
            prefix: Prefix {
                addr: to_bytes(net.addr()),
                bits,
            },
            port: pattern.port,
            policy,
        })
    })
}

/// One table for each port that is named, and one for port 0. Rules with the port go before those
/// without, and earlier ones before later ones.
fn by_port(rules: &[Rule]) -> BTreeMap<u16, BTreeMap<Prefix, u32>> {
    let ports: BTreeSet<u16> = rules
        .iter()
        .filter_map(|rule| rule.port)
        .chain([0])
        .collect();
    ports
        .into_iter()
        .map(|port| {
            let with = rules.iter().filter(|rule| rule.port == Some(port));
            let without = rules.iter().filter(|rule| rule.port.is_none());
            let mut table = BTreeMap::new();
            for rule in with.chain(without) {
                table.entry(rule.prefix).or_insert(rule.policy);
            }
            (port, table)
        })
        .collect()
}

fn extend(entries: &mut Vec<KernelEntry>, class: u32, port: u16, table: BTreeMap<Prefix, u32>) {
    entries.extend(
        table
            .into_iter()
            .map(|(Prefix { addr, bits }, policy)| KernelEntry {
                key: PolicyKey {
                    class,
                    port_be: port.to_be(),
                    reserved: 0,
                    addr,
                },
                prefix_len: POLICY_KEY_EXACT_BITS + bits,
                policy,
            }),
    );
}

/// Whether an IPv6 prefix is so short that the IPv4 addresses lie in it.
fn covers_v4(prefix: Prefix) -> bool {
    prefix.bits < V4_OFFSET && truncated(V4_ZERO, prefix.bits) == prefix.addr
}

/// Protected prefixes with the IPv4 addresses cut out of the IPv6 ones.
///
/// Presence is all that counts in that class, so there is no entry that could except them; a short
/// IPv6 prefix becomes its parts instead: for each bit down to the IPv4 range, the half in which
/// that range is not. Not needed where all of IPv4 is protected too.
fn without_v4(rules: &[Rule]) -> Vec<Rule> {
    let all_v4 = |port: Option<u16>| {
        rules
            .iter()
            .any(|rule| rule.prefix == ALL_V4 && (rule.port.is_none() || rule.port == port))
    };
    let mut parts = Vec::new();
    for rule in rules {
        if !covers_v4(rule.prefix) || all_v4(rule.port) {
            parts.push(*rule);
            continue;
        }
        parts.extend((rule.prefix.bits..V4_OFFSET).map(|bit| {
            let mut addr = truncated(V4_ZERO, bit + 1);
            addr[bit as usize / 8] ^= 0x80 >> (bit % 8);
            Rule {
                prefix: Prefix {
                    addr,
                    bits: bit + 1,
                },
                ..*rule
            }
        }));
    }
    parts
}

/// The first `bits` bits of an address, the others zero.
fn truncated(addr: [u8; 16], bits: u32) -> [u8; 16] {
    let mask = u128::MAX.checked_shl(128 - bits).unwrap_or(0);
    (u128::from_be_bytes(addr) & mask).to_be_bytes()
}
