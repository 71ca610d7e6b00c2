//! Network namespaces, a link between two of them, and addresses that behave badly.

use std::{
    fs::File,
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    os::{fd::AsFd as _, unix::fs::MetadataExt as _},
    path::PathBuf,
    process::{Command, Stdio},
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::unique;

/// Addresses on the link that swallow every packet: enough for one per tested timeout.
pub const BLACKHOLES: u8 = 8;

/// A network namespace with its loopback up; removed when dropped.
pub struct Namespace {
    name: String,
}

impl Namespace {
    /// Makes one.
    pub fn new(label: &str) -> Self {
        let namespace = Self {
            name: unique(label),
        };
        run_ip(&["netns", "add", &namespace.name]);
        namespace.ip("link set lo up\n");
        namespace
    }

    /// Its name for `ip netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that setns takes.
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    /// Inode of the namespace, as `status` shows it.
    pub fn inode(&self) -> u64 {
        std::fs::metadata(self.path())
            .expect("the namespace's file")
            .ino()
    }

    /// Runs `ip` commands, one a line, inside.
    pub fn ip(&self, batch: &str) {
        feed("ip", &["-n", &self.name, "-batch", "-"], batch);
    }

    /// Runs a closure on a thread of its own inside.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let inside = scope.spawn(|| {
                self.move_thread();
                work()
            });
            inside
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Moves the calling thread inside, for good.
    pub fn move_thread(&self) {
        let file = File::open(self.path()).expect("open the namespace");
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("enter the namespace");
    }

    /// Loads nftables rules inside.
    pub fn nft(&self, rules: &str) {
        self.enter(|| feed("nft", &["-f", "-"], rules));
    }

    /// Counts the SYNs to a port of this namespace from now on, and drops them if so asked.
    /// Needs nft.
    pub fn count_syns(&self, port: u16, drop: bool) -> SynCounter<'_> {
        let verdict = if drop { "drop" } else { "accept" };
        self.nft(&format!(
            "table inet syns{port}\n\
             delete table inet syns{port}\n\
             table inet syns{port} {{\n\
               counter seen {{ }}\n\
               chain input {{\n\
                 type filter hook input priority 0; policy accept;\n\
                 tcp dport {port} tcp flags & (syn | ack) == syn counter name seen {verdict}\n\
               }}\n\
             }}\n"
        ));
        SynCounter {
            namespace: self,
            port,
        }
    }

    /// Loses the next SYN over IPv4 to a port of this namespace, and no other: those after it pass, however
    /// late the test is. Needs nft.
    pub fn lose_one_syn(&self, port: u16) {
        // A SYN is 60 bytes long. (One byte more than that, because kernels before 6.11 take a quota that is
        // just used up for exceeded.)
        self.nft(&format!(
            "table ip lossy{port}\n\
             delete table ip lossy{port}\n\
             table ip lossy{port} {{\n\
               chain input {{\n\
                 type filter hook input priority 0; policy accept;\n\
                 tcp dport {port} tcp flags & (syn | ack) == syn quota until 61 bytes drop\n\
               }}\n\
             }}\n"
        ));
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip")
            .args(["netns", "del", &self.name])
            .stderr(Stdio::null())
            .status();
    }
}

/// SYNs that reached a port. What it counts it goes on counting until [`SynCounter::stop`].
pub struct SynCounter<'a> {
    namespace: &'a Namespace,
    port: u16,
}

impl SynCounter<'_> {
    /// SYNs so far, repeats included.
    pub fn seen(&self) -> u64 {
        let table = format!("syns{}", self.port);
        let list = self.namespace.enter(|| {
            Command::new("nft")
                .args(["-j", "list", "counter", "inet", &table, "seen"])
                .output()
                .expect("run nft")
        });
        let value: serde_json::Value = serde_json::from_slice(&list.stdout).expect("nft's JSON");
        value["nftables"]
            .as_array()
            .and_then(|all| {
                all.iter()
                    .find_map(|entry| entry["counter"]["packets"].as_u64())
            })
            .unwrap_or_else(|| panic!("no counter in {value}"))
    }

    /// Removes the rule.
    pub fn stop(self) {
        self.namespace
            .nft(&format!("delete table inet syns{}\n", self.port));
    }
}

/// A client's and a server's namespace, joined by a link with IPv4 and IPv6.
pub struct TestNet {
    /// Where the protected programs live.
    pub client: Namespace,
    /// Where the servers live.
    pub server: Namespace,
}

impl TestNet {
    /// Makes both and the link.
    pub fn new() -> Self {
        let client = Namespace::new("client");
        let server = Namespace::new("server");
        run_ip(&[
            "link",
            "add",
            "name",
            "c0",
            "netns",
            client.name(),
            "type",
            "veth",
            "peer",
            "name",
            "s0",
            "netns",
            server.name(),
        ]);
        server.ip("addr add 10.77.0.2/24 dev s0\n\
             addr add fd77::2/64 dev s0 nodad\n\
             link set s0 up\n");
        let mut batch = String::from(
            "addr add 10.77.0.1/24 dev c0\n\
             addr add fd77::1/64 dev c0 nodad\n\
             link set c0 up\n\
             route add unreachable 10.88.0.0/24\n",
        );
        for i in 0..BLACKHOLES {
            for address in [Self::blackhole4(i), Self::blackhole6(i)] {
                batch +=
                    &format!("neigh add {address} lladdr 02:00:00:00:00:66 dev c0 nud permanent\n");
            }
        }
        client.ip(&batch);
        Self { client, server }
    }

    /// The server's IPv4 address as seen by the client.
    pub const SERVER4: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2));
    /// The server's IPv6 address as seen by the client.
    pub const SERVER6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 2));
    /// An address that the client has an `unreachable` route for: EHOSTUNREACH at once.
    pub const UNREACHABLE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 88, 0, 1));
    /// An address that the client has no route for: ENETUNREACH at once.
    pub const NO_ROUTE: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1));

    /// One of [`BLACKHOLES`] addresses that never answer: a permanent neighbour that nobody is.
    pub const fn blackhole4(i: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(10, 77, 0, 100 + i))
    }

    /// The same for IPv6.
    pub const fn blackhole6(i: u8) -> IpAddr {
        IpAddr::V6(Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, 0x100 + i as u16))
    }

    /// The server's IPv4 address with a port.
    pub const fn server4(port: u16) -> SocketAddr {
        SocketAddr::new(Self::SERVER4, port)
    }
}

impl Default for TestNet {
    fn default() -> Self {
        Self::new()
    }
}

fn run_ip(args: &[&str]) {
    let output = Command::new("ip")
        .args(args)
        .output()
        .expect("run ip (package iproute2)");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "ip {}: {errors}", args.join(" "));
}

fn feed(program: &str, args: &[&str], input: &str) {
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("run {program}: {error}"));
    child
        .stdin
        .take()
        .expect("piped")
        .write_all(input.as_bytes())
        .expect("write its input");
    let output = child.wait_with_output().expect("wait for it");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{program} {} says {errors} for:\n{input}",
        args.join(" ")
    );
}
