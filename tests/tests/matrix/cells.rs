//! What is called by whom: each combination is a cell, with an address and a port of its own.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use tests::net::TestNet;

/// Which timeout ends the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Connect,
    Read,
    Write,
    Deadline,
}

impl Kind {
    pub const ALL: [Self; 4] = [Self::Connect, Self::Read, Self::Write, Self::Deadline];

    /// What the policy and the programs call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Connect => "connect",
            Self::Read => "read",
            Self::Write => "write",
            Self::Deadline => "deadline",
        }
    }

    /// Its counter in a row.
    pub fn counter(self) -> &'static str {
        match self {
            Self::Connect => "connect_timeout",
            Self::Read => "read_timeout",
            Self::Write => "write_timeout",
            Self::Deadline => "deadline",
        }
    }
}

/// How a program names the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    V4,
    V6,
    /// IPv4 through a socket of IPv6.
    Mapped,
}

impl Family {
    pub const ALL: [Self; 3] = [Self::V4, Self::V6, Self::Mapped];
}

/// The values of the timeouts, ms.
pub const VALUES_MS: [u16; 3] = [100, 1_000, 3_000];

/// Destinations that differ in their last byte begin here.
const FIRST_HOST: u8 = 11;
const FIRST_PORT: u16 = 9_000;

/// A program that calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Client {
    C,
    Uring,
    Python,
    Asyncio,
    Node,
    Java,
    Nio,
    Curl,
    Hey,
    Nginx,
    Psql,
    RedisCli,
}

impl Client {
    pub const ALL: [Self; 12] = [
        Self::C,
        Self::Uring,
        Self::Python,
        Self::Asyncio,
        Self::Node,
        Self::Java,
        Self::Nio,
        Self::Curl,
        Self::Hey,
        Self::Nginx,
        Self::Psql,
        Self::RedisCli,
    ];

    /// Whether a combination makes sense for it. A Go program takes a mapped address for IPv4, so
    /// its cells of that kind would be those of IPv4 once more. Everything else is there: psql
    /// writes a query of some MiB, and redis-cli takes a value of that size from its input.
    pub fn has(self, family: Family) -> bool {
        !(self == Self::Hey && family == Family::Mapped)
    }

    /// The first port that it calls: which family it is, the port tells.
    fn port(self) -> u16 {
        FIRST_PORT + self as u16 * Family::ALL.len() as u16
    }
}

/// One call that never ends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cell {
    pub client: Client,
    pub kind: Kind,
    pub family: Family,
    /// Which of [`VALUES_MS`].
    pub step: usize,
}

impl Cell {
    /// The whole matrix.
    pub fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for client in Client::ALL {
            for kind in Kind::ALL {
                for family in Family::ALL.into_iter().filter(|f| client.has(*f)) {
                    all.extend((0..VALUES_MS.len()).map(|step| Self {
                        client,
                        kind,
                        family,
                        step,
                    }));
                }
            }
        }
        all
    }

    /// The timeout.
    pub fn value(self) -> Duration {
        Duration::from_millis(VALUES_MS[self.step].into())
    }

    /// The address as the kernel knows it.
    pub fn address(self) -> IpAddr {
        let four = self.family != Family::V6;
        if self.kind == Kind::Connect {
            let number = self.step as u8;
            return if four {
                TestNet::blackhole4(number)
            } else {
                TestNet::blackhole6(number)
            };
        }
        let addresses = addresses(self.kind, self.step);
        if four { addresses[0] } else { addresses[1] }
    }

    pub fn port(self) -> u16 {
        self.client.port() + self.family as u16
    }

    /// How the agent calls it.
    pub fn destination(self) -> String {
        SocketAddr::new(self.address(), self.port()).to_string()
    }

    /// The address as the program is told.
    pub fn host(self) -> String {
        match (self.family, self.address()) {
            (Family::Mapped, IpAddr::V4(four)) => four.to_ipv6_mapped().to_string(),
            (_, address) => address.to_string(),
        }
    }

    /// The same as part of a URL.
    pub fn url(self) -> String {
        let host = self.host();
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host
        };
        format!("http://{host}:{}/", self.port())
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            client,
            kind,
            family,
            step,
        } = self;
        write!(f, "{client:?} {kind:?} {} {family:?}", VALUES_MS[*step])
    }
}

/// A server's IPv4 and IPv6 address for a timeout.
fn addresses(kind: Kind, step: usize) -> [IpAddr; 2] {
    let number = FIRST_HOST + (kind as usize * VALUES_MS.len() + step) as u8;
    [
        Ipv4Addr::new(10, 77, 0, number).into(),
        Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, number.into()).into(),
    ]
}

/// Commands that give the server all of its addresses.
pub fn server_addresses() -> String {
    let mut batch = String::new();
    for kind in [Kind::Read, Kind::Write, Kind::Deadline] {
        for step in 0..VALUES_MS.len() {
            let [four, six] = addresses(kind, step);
            batch += &format!("addr add {four}/24 dev s0\naddr add {six}/64 dev s0 nodad\n");
        }
    }
    batch
}

/// A policy for each timeout. No breaker, and no limit of retries, which a call that is made again would be taken
/// for: this is about time alone.
pub fn policies() -> String {
    let mut config = String::from("[defaults]\nbreaker = \"off\"\nretry = \"off\"\n");
    for kind in Kind::ALL {
        for (step, ms) in VALUES_MS.into_iter().enumerate() {
            let cell = |family| Cell {
                client: Client::C,
                kind,
                family,
                step,
            };
            let (four, six) = (cell(Family::V4).address(), cell(Family::V6).address());
            let name = kind.name();
            config += &format!(
                "[[policy]]\nname = \"{name}-{ms}\"\ndestinations = [\"{four}\", \"{six}/128\"]\n\
                 timeouts = {{ {name} = \"{ms}ms\" }}\n"
            );
        }
    }
    config
}

/// Which timeout is for a server's address.
pub fn kind_of(address: IpAddr) -> Kind {
    let last = match address.to_canonical() {
        IpAddr::V4(four) => four.octets()[3],
        IpAddr::V6(six) => six.octets()[15],
    };
    let number = usize::from(last - FIRST_HOST) / VALUES_MS.len();
    Kind::ALL[number]
}

/// Whether those who call this port speak PostgreSQL's protocol.
pub fn is_postgres(port: u16) -> bool {
    (Client::Psql.port()..Client::RedisCli.port()).contains(&port)
}
