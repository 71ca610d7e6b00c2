//! What one workload has found out about a destination is a hint to the others of the node: while its
//! breaker is open for connect failures, one failure of their own suffices (rule 1).
//!
//! A hint opens nothing by itself, so a workload that alone cannot reach a destination (its own
//! firewall rules, its own route) takes nobody with it. Loopback, link-local addresses and 10.0.2.0/24
//! (the network inside many a virtual machine or container) are somebody else in each namespace: no hints.

use std::collections::HashMap;

use agent_common::key::IPV4_MAPPED_PREFIX;

use super::{DialTarget, is_loopback};

/// An address and port, of whatever namespace.
pub(super) type Place = ([u8; 16], u32, u16);

/// Destinations that breakers are open for, and how many.
#[derive(Default)]
pub(super) struct Hints(HashMap<Place, u32>);

impl Hints {
    /// One more breaker is open for connect failures, or one less.
    pub(super) fn change(&mut self, target: DialTarget, more: bool) {
        let place = place(target);
        if more {
            *self.0.entry(place).or_default() += 1;
        } else if let Some(count) = self.0.get_mut(&place) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&place);
            }
        }
    }

    /// Whether anybody's breaker is open for it.
    pub(super) fn has(&self, target: DialTarget) -> bool {
        !self.0.is_empty() && self.0.contains_key(&place(target))
    }
}

/// The address and port of a target.
pub(super) fn place(target: DialTarget) -> Place {
    (target.addr, target.ifindex, target.port_be)
}

/// Whether the address is the same host from everywhere on the node.
pub(super) fn is_shared(addr: &[u8; 16]) -> bool {
    let private = match (&addr[..12] == IPV4_MAPPED_PREFIX.as_slice(), &addr[12..]) {
        (true, [169, 254, ..] | [10, 0, 2, _]) => true,
        (true, _) => false,
        (false, _) => addr[0] == 0xfe && addr[1] & 0xc0 == 0x80,
    };
    !private && !is_loopback(addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_mean_something_else_elsewhere() {
        let shared = |text: &str| {
            let addr: std::net::IpAddr = text.parse().unwrap();
            let bytes = match addr {
                std::net::IpAddr::V4(addr) => addr.to_ipv6_mapped().octets(),
                std::net::IpAddr::V6(addr) => addr.octets(),
            };
            is_shared(&bytes)
        };
        for text in [
            "127.0.0.1",
            "::1",
            "169.254.1.1",
            "10.0.2.15",
            "fe80::1",
            "febf::1",
        ] {
            assert!(!shared(text), "{text}");
        }
        for text in [
            "10.0.3.1",
            "10.1.2.1",
            "192.0.2.1",
            "fd00::1",
            "2001:db8::1",
            "fec0::1",
        ] {
            assert!(shared(text), "{text}");
        }
    }
}
