//! Which destinations a policy is for: an address, a prefix or a name, with or without a port.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
    sync::Arc,
};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::destination::{Destination, DestinationError, Host, parse_host, parse_port};

/// Bits before the address in an IPv4-mapped IPv6 address.
const MAPPED_BITS: u8 = 96;

/// One entry of `destinations`.
///
/// Displays in its one canonical form, which parses to an equal pattern.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DestinationPattern {
    /// Which hosts.
    pub target: Target,
    /// Which port; `None`: every port. Never 0.
    pub port: Option<u16>,
}

/// Which hosts a pattern is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Target {
    /// A prefix, or one address as a prefix of full length. Without bits beyond the prefix, and
    /// never IPv4-mapped: an IPv6 prefix is for IPv6 alone, even where it is so short that the
    /// mapped addresses lie in it.
    Address(IpNet),
    /// A name: lower case, without a trailing dot.
    Name {
        /// The name, or what follows `*.`.
        name: String,
        /// True for `*.name`: everything below the name, at any depth, but not itself.
        wildcard: bool,
    },
}

/// A name that an address is known by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownName {
    /// Lower case, without a trailing dot.
    pub name: Arc<str>,
    /// Whether the agent has resolved it itself. Otherwise it comes from what programs were told, which
    /// whoever answers them decides.
    pub own: bool,
}

impl DestinationPattern {
    /// Whether the pattern covers a destination that is known by these names.
    pub fn matches(&self, destination: &Destination, names: &[KnownName]) -> bool {
        if self.port.is_some_and(|port| port != destination.port()) {
            return false;
        }
        match &self.target {
            Target::Address(net) => net.contains(&destination.addr()),
            Target::Name { .. } => names.iter().any(|known| self.covers_name(&known.name)),
        }
    }

    /// Whether it is a pattern of names and covers this one, whatever the port.
    pub fn covers_name(&self, name: &str) -> bool {
        match &self.target {
            Target::Address(_) => false,
            Target::Name {
                name: wanted,
                wildcard: false,
            } => name == wanted,
            Target::Name {
                name: wanted,
                wildcard: true,
            } => name
                .strip_suffix(wanted.as_str())
                .is_some_and(|below| below.len() > 1 && below.ends_with('.')),
        }
    }
}

impl fmt::Display for DestinationPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.target {
            Target::Address(net) => {
                let bracket = net.addr().is_ipv6() && self.port.is_some();
                if bracket {
                    write!(f, "[{}]", net.addr())?;
                } else {
                    write!(f, "{}", net.addr())?;
                }
                if net.prefix_len() != net.max_prefix_len() {
                    write!(f, "/{}", net.prefix_len())?;
                }
            }
            Target::Name {
                name,
                wildcard: true,
            } => write!(f, "*.{name}")?,
            Target::Name {
                name,
                wildcard: false,
            } => f.write_str(name)?,
        }
        match self.port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

impl FromStr for DestinationPattern {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        use DestinationError as E;
        if let Some(rest) = text.strip_prefix('[') {
            let (inside, after) = rest.split_once(']').ok_or(E::Bracket)?;
            let (length, port) = match after.split_once(':') {
                Some((length, port)) => (length, Some(parse_port(port)?)),
                None => (after, None),
            };
            let length = match length.strip_prefix('/') {
                Some(length) => Some(length),
                None if length.is_empty() => None,
                None => return Err(E::AfterBracket(after.to_owned())),
            };
            return Ok(Self {
                target: Target::Address(v6_prefix(inside, length)?),
                port,
            });
        }
        if text.matches(':').count() > 1 {
            let (addr, length) = split_length(text);
            if let Some((length, port)) = length.and_then(|length| length.split_once(':')) {
                return Err(E::BracketsPrefix(format!("[{addr}]/{length}:{port}")));
            }
            return Ok(Self {
                target: Target::Address(v6_prefix(addr, length)?),
                port: None,
            });
        }
        let (host, port) = match text.split_once(':') {
            Some((host, port)) => (host, Some(parse_port(port)?)),
            None => (text, None),
        };
        let (host, length) = split_length(host);
        if host.contains('%') {
            return Err(E::PatternZone);
        }
        let target = match (parse_host(host)?, length) {
            (Host::V4(addr), length) => Target::Address(v4_prefix(addr, length)?),
            (Host::Name { .. }, Some(_)) => return Err(E::NamePrefix),
            (Host::Name { name, wildcard }, None) => Target::Name { name, wildcard },
        };
        Ok(Self { target, port })
    }
}

fn split_length(text: &str) -> (&str, Option<&str>) {
    match text.split_once('/') {
        Some((addr, length)) => (addr, Some(length)),
        None => (text, None),
    }
}

fn v4_prefix(addr: Ipv4Addr, length: Option<&str>) -> Result<IpNet, DestinationError> {
    prefix(addr.into(), parse_length(length, 32)?)
}

/// Reads an IPv6 prefix; one of IPv4-mapped addresses becomes the IPv4 prefix that it is.
fn v6_prefix(addr: &str, length: Option<&str>) -> Result<IpNet, DestinationError> {
    use DestinationError as E;
    if addr.contains('%') {
        return Err(E::PatternZone);
    }
    let addr: Ipv6Addr = addr.parse().map_err(|_| E::Address(addr.to_owned()))?;
    let length = parse_length(length, 128)?;
    match addr.to_ipv4_mapped() {
        Some(v4) if length >= MAPPED_BITS => prefix(v4.into(), length - MAPPED_BITS),
        _ => prefix(addr.into(), length),
    }
}

fn parse_length(text: Option<&str>, max: u8) -> Result<u8, DestinationError> {
    let Some(text) = text else { return Ok(max) };
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u8>() {
        Ok(length) if digits && length <= max => Ok(length),
        _ => Err(DestinationError::PrefixLength(text.to_owned(), max)),
    }
}

/// The prefix, if `addr` is its first address. `length` is in range for the family.
fn prefix(addr: IpAddr, length: u8) -> Result<IpNet, DestinationError> {
    let net = match addr {
        IpAddr::V4(addr) => IpNet::V4(Ipv4Net::new_assert(addr, length)),
        IpAddr::V6(addr) => IpNet::V6(Ipv6Net::new_assert(addr, length)),
    };
    if net.trunc() != net {
        return Err(DestinationError::HostBits(length, net.trunc().to_string()));
    }
    if addr.is_unspecified() && length == net.max_prefix_len() {
        let (loopback, all) = match addr {
            IpAddr::V4(_) => ("127.0.0.1", "0.0.0.0/0"),
            IpAddr::V6(_) => ("::1", "::/0"),
        };
        return Err(DestinationError::Unspecified(loopback, all));
    }
    Ok(net)
}
