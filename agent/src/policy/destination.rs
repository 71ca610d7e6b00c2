//! How destinations are written: one address and port, or a name and port.
//!
//! One destination has one spelling: IPv6 as in RFC 5952 and in brackets, IPv4-mapped IPv6 as
//! IPv4, the unspecified address as loopback (that is what connecting to it reaches), a link-local
//! address with the number of its interface, names in lower case and without a trailing dot.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    str::FromStr,
};

use agent_common::{
    DestinationKey,
    key::{IPV4_MAPPED_PREFIX, ManualKey, mapped},
};

/// Longest name, and longest label in it, in bytes (RFC 1035, section 2.3.4; without the root).
const MAX_NAME: usize = 253;
const MAX_LABEL: usize = 63;

/// An address and port that something connects to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Destination {
    addr: IpAddr,
    ifindex: u32,
    port: u16,
}

impl Destination {
    /// The destination in its one form. An `ifindex` counts only for a link-local address.
    pub fn new(addr: IpAddr, port: u16, ifindex: u32) -> Self {
        let addr = match addr.to_canonical() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => IpAddr::V4(Ipv4Addr::LOCALHOST),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => IpAddr::V6(Ipv6Addr::LOCALHOST),
            addr => addr,
        };
        let ifindex = if is_link_local(addr) { ifindex } else { 0 };
        Self {
            addr,
            ifindex,
            port,
        }
    }

    /// The destination that a row is about. Meaningless for the all-zero key of a row that has no
    /// destination of its own (a free row, or `other`).
    pub fn from_key(key: &DestinationKey) -> Self {
        Self::new(from_bytes(key.addr), u16::from_be(key.port_be), key.ifindex)
    }

    /// The key of this destination's row for one workload and network namespace.
    pub fn to_key(self, cgroup_id: u64, netns_cookie: u64) -> DestinationKey {
        DestinationKey {
            cgroup_id,
            netns_cookie,
            addr: self.addr_bytes(),
            ifindex: self.ifindex,
            port_be: self.port.to_be(),
            reserved: 0,
        }
    }

    /// The key under which the kernel finds an operator's manual state for this destination.
    pub fn to_manual_key(self) -> ManualKey {
        ManualKey {
            addr: self.addr_bytes(),
            ifindex: self.ifindex,
            port_be: self.port.to_be(),
            reserved: 0,
        }
    }

    /// The address; never IPv4-mapped, never unspecified.
    pub fn addr(self) -> IpAddr {
        self.addr
    }

    /// The address in the 16-byte form of the kernel's keys.
    pub fn addr_bytes(self) -> [u8; 16] {
        to_bytes(self.addr)
    }

    /// Index of the interface of a link-local address; 0: none given.
    pub fn ifindex(self) -> u32 {
        self.ifindex
    }

    /// TCP port.
    pub fn port(self) -> u16 {
        self.port
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.addr, self.ifindex) {
            (IpAddr::V4(addr), 0) => write!(f, "{addr}:{}", self.port),
            (IpAddr::V4(addr), index) => write!(f, "{addr}%{index}:{}", self.port),
            (IpAddr::V6(addr), 0) => write!(f, "[{addr}]:{}", self.port),
            (IpAddr::V6(addr), index) => write!(f, "[{addr}%{index}]:{}", self.port),
        }
    }
}

impl FromStr for Destination {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.parse()? {
            DestinationArg::Address(destination) => Ok(destination),
            DestinationArg::Name { .. } => Err(DestinationError::NotAnAddress),
        }
    }
}

/// A destination as a person names it on the command line or in a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DestinationArg {
    /// An address and port.
    Address(Destination),
    /// A name and port.
    Name {
        /// Lower case, without a trailing dot.
        name: String,
        /// TCP port.
        port: u16,
    },
}

impl fmt::Display for DestinationArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(destination) => destination.fmt(f),
            Self::Name { name, port } => write!(f, "{name}:{port}"),
        }
    }
}

impl FromStr for DestinationArg {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        use DestinationError as E;
        if text.contains('/') {
            return Err(E::Prefix);
        }
        if let Some(rest) = text.strip_prefix('[') {
            let (inside, after) = rest.split_once(']').ok_or(E::Bracket)?;
            let (addr, ifindex) = split_zone(inside)?;
            let addr: Ipv6Addr = addr.parse().map_err(|_| E::Address(addr.to_owned()))?;
            let port = match after.strip_prefix(':') {
                Some(port) => parse_port(port)?,
                None if after.is_empty() => return Err(E::NoPort),
                None => return Err(E::AfterBracket(after.to_owned())),
            };
            return address(addr.into(), port, ifindex);
        }
        if text.parse::<Ipv6Addr>().is_ok() {
            return Err(E::Brackets(text.to_owned()));
        }
        let (host, port) = text.rsplit_once(':').ok_or(E::NoPort)?;
        if host.contains(':') {
            return Err(E::Address(host.to_owned()));
        }
        let port = parse_port(port)?;
        let (bare, ifindex) = split_zone(host)?;
        match parse_host(bare)? {
            Host::V4(addr) => address(addr.into(), port, ifindex),
            Host::Name { .. } if ifindex != 0 => Err(E::Zone),
            Host::Name { wildcard: true, .. } => Err(E::Wildcard),
            Host::Name {
                name,
                wildcard: false,
            } => Ok(Self::Name { name, port }),
        }
    }
}

fn address(addr: IpAddr, port: u16, ifindex: u32) -> Result<DestinationArg, DestinationError> {
    if ifindex != 0 && !is_link_local(addr.to_canonical()) {
        return Err(DestinationError::Zone);
    }
    Ok(DestinationArg::Address(Destination::new(
        addr, port, ifindex,
    )))
}

/// Why text is no destination or no destination pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "each variant's message says what it means")]
pub enum DestinationError {
    #[error("is empty")]
    Empty,
    #[error("has a \"[\" without a \"]\"")]
    Bracket,
    #[error("has {0:?} after the \"]\", where only a prefix length and a port may stand")]
    AfterBracket(String),
    #[error("is an IPv6 address without a port; write it as \"[{0}]:PORT\"")]
    Brackets(String),
    #[error("has a port after an IPv6 prefix; write it as {0:?}")]
    BracketsPrefix(String),
    #[error("has no port")]
    NoPort,
    #[error("has the port {0:?}, which is no number from 1 to 65535")]
    Port(String),
    #[error("names a host where an address is needed")]
    NotAnAddress,
    #[error("has {0:?} where an IP address should stand")]
    Address(String),
    #[error("has the prefix length {0:?}, which is no number from 0 to {1}")]
    PrefixLength(String, u8),
    #[error("has bits set beyond its prefix length of {0}; write it as {1:?}")]
    HostBits(u8, String),
    #[error(
        "is the unspecified address, which reaches loopback; write {0:?} for that, or {1:?} for every address"
    )]
    Unspecified(&'static str, &'static str),
    #[error("has a prefix length after a name")]
    NamePrefix,
    #[error("has {0:?} where a number of an interface should stand (\"ip link\" shows it)")]
    ZoneNumber(String),
    #[error("names an interface, which only a link-local address may")]
    Zone,
    #[error("names an interface, which no pattern may; leave \"%…\" away")]
    PatternZone,
    #[error("is a prefix, which stands for no single destination")]
    Prefix,
    #[error("has a \"*\", which stands for no single destination")]
    Wildcard,
    #[error("has a \"*\" elsewhere than at the beginning, before a dot")]
    WildcardPlace,
    #[error("stands for everything; write \"0.0.0.0/0\" and \"[::]/0\" for every address")]
    Everything,
    #[error(
        "holds {0:?}, which no host name does (an international name is written in its xn-- form)"
    )]
    Character(char),
    #[error("has a name longer than {MAX_NAME} characters")]
    LongName,
    #[error(
        "has an empty label, or one longer than {MAX_LABEL} characters, or one with a hyphen at an end"
    )]
    Label,
}

/// What stands before the port, unless it is IPv6.
pub(super) enum Host {
    /// An address.
    V4(Ipv4Addr),
    /// A name; `wildcard`: anything below it.
    Name { name: String, wildcard: bool },
}

/// Reads an IPv4 address or a name, and normalises the name.
pub(super) fn parse_host(text: &str) -> Result<Host, DestinationError> {
    use DestinationError as E;
    if text.is_empty() {
        return Err(E::Empty);
    }
    if text == "*" {
        return Err(E::Everything);
    }
    // A top-level label is never a number (RFC 3696, section 2), so this is meant as an address.
    let last = text
        .rsplit('.')
        .find(|label| !label.is_empty())
        .unwrap_or_default();
    if !last.is_empty() && last.bytes().all(|byte| byte.is_ascii_digit()) {
        return text
            .parse()
            .map(Host::V4)
            .map_err(|_| E::Address(text.to_owned()));
    }
    let (wildcard, rest) = match text.strip_prefix("*.") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    if rest.contains('*') {
        return Err(E::WildcardPlace);
    }
    let name = rest.strip_suffix('.').unwrap_or(rest).to_ascii_lowercase();
    if let Some(bad) = name
        .chars()
        .find(|c| !(c.is_ascii_alphanumeric() || "-_.".contains(*c)))
    {
        return Err(E::Character(bad));
    }
    if name.len() > MAX_NAME {
        return Err(E::LongName);
    }
    let good = |label: &str| {
        (1..=MAX_LABEL).contains(&label.len()) && !label.starts_with('-') && !label.ends_with('-')
    };
    if !name.split('.').all(good) {
        return Err(E::Label);
    }
    Ok(Host::Name { name, wildcard })
}

/// A host name in its one form (lower case, without a trailing dot); `None` if the text is none: an
/// address, a wildcard, or with characters that no host name has.
pub fn host_name(text: &str) -> Option<String> {
    match parse_host(text) {
        Ok(Host::Name {
            name,
            wildcard: false,
        }) => Some(name),
        _ => None,
    }
}

/// Reads a port. Stricter than the standard library, which accepts a plus sign.
pub(super) fn parse_port(text: &str) -> Result<u16, DestinationError> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    match text.parse::<u16>() {
        Ok(port) if digits && port != 0 => Ok(port),
        _ => Err(DestinationError::Port(text.to_owned())),
    }
}

/// Takes `%3` off the end of an address; 0: there was none.
fn split_zone(text: &str) -> Result<(&str, u32), DestinationError> {
    let Some((addr, zone)) = text.split_once('%') else {
        return Ok((text, 0));
    };
    let digits = zone.bytes().all(|byte| byte.is_ascii_digit());
    match zone.parse::<u32>() {
        Ok(index) if digits && index != 0 => Ok((addr, index)),
        _ => Err(DestinationError::ZoneNumber(zone.to_owned())),
    }
}

/// Whether an address means different hosts on different interfaces.
fn is_link_local(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => addr.is_link_local(),
        IpAddr::V6(addr) => addr.is_unicast_link_local(),
    }
}

/// The 16-byte form of an address.
pub(super) fn to_bytes(addr: IpAddr) -> [u8; 16] {
    match addr {
        IpAddr::V4(addr) => mapped(addr.octets()),
        IpAddr::V6(addr) => addr.octets(),
    }
}

fn from_bytes(bytes: [u8; 16]) -> IpAddr {
    match bytes.strip_prefix(&IPV4_MAPPED_PREFIX) {
        Some(&[a, b, c, d]) => Ipv4Addr::new(a, b, c, d).into(),
        _ => Ipv6Addr::from(bytes).into(),
    }
}
