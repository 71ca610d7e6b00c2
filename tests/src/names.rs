//! Names: files that a program resolves by, and a DNS server of the test's own.

use std::{
    collections::HashMap,
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use tempfile::TempDir;

use crate::{net::Namespace, process::Program};

/// `/etc/hosts`, `/etc/resolv.conf` and `/etc/nsswitch.conf` for programs that are started with them,
/// each in a mount namespace of its own.
pub struct EtcFiles(TempDir);

impl EtcFiles {
    /// With these lines in `hosts`, and this server, if any; without one, nothing answers.
    pub fn new(hosts: &str, server: Option<IpAddr>) -> Self {
        let files = Self(tempfile::tempdir().expect("a directory"));
        files.hosts(hosts);
        let server = server.map_or("127.0.0.1".to_owned(), |server| server.to_string());
        let resolv = format!("nameserver {server}\noptions timeout:2 attempts:3\n");
        fs::write(files.path("resolv.conf"), resolv).expect("write resolv.conf");
        fs::write(files.path("nsswitch.conf"), "hosts: files dns\n").expect("write nsswitch.conf");
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Other lines, also for programs that run.
    pub fn hosts(&self, lines: &str) {
        let lines = format!("127.0.0.1 localhost\n::1 localhost\n{lines}");
        fs::write(self.path("hosts"), lines).expect("write hosts");
    }

    /// The program with these files.
    pub fn program(&self, program: Program) -> Program {
        let mut script = String::from("set -e\n");
        for name in ["hosts", "resolv.conf", "nsswitch.conf"] {
            let from = self.path(name);
            script += &format!("mount --bind {} /etc/{name}\n", from.display());
        }
        script += "exec \"$@\"\n";
        let args = ["--mount", "sh", "-c", &script, "sh"].map(str::to_owned);
        program.run_by("unshare", &args)
    }
}

/// What the server says about a name.
#[derive(Clone, Debug, Default)]
pub struct Says {
    /// Another name that it stands for.
    pub alias: Option<String>,
    /// Its addresses (of the alias, if there is one).
    pub addresses: Vec<IpAddr>,
    /// Seconds.
    pub ttl: u32,
}

/// A DNS server in a namespace. Ends when dropped.
pub struct DnsServer {
    says: Arc<Mutex<HashMap<String, Says>>>,
    asked: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DnsServer {
    /// Starts one on port 53 of the address.
    pub fn start(namespace: &Namespace, address: IpAddr) -> Self {
        let says = Arc::new(Mutex::new(HashMap::new()));
        let asked = Arc::new(AtomicU64::new(0));
        let ends = Arc::new(AtomicBool::new(false));
        let socket = namespace.enter(|| {
            UdpSocket::bind(SocketAddr::new(address, 53)).expect("bind port 53 in the namespace")
        });
        socket
            .set_read_timeout(Some(Duration::from_millis(50)))
            .expect("a timeout");
        let shared = (Arc::clone(&says), Arc::clone(&asked), Arc::clone(&ends));
        let thread = std::thread::spawn(move || {
            let (says, asked, ends) = shared;
            let mut buffer = [0; 2048];
            while !ends.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut buffer) else {
                    continue;
                };
                asked.fetch_add(1, Ordering::Relaxed);
                let says = says.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(reply) = reply(&buffer[..length], &says) {
                    let _ = socket.send_to(&reply, from);
                }
            }
        });
        Self {
            says,
            asked,
            ends,
            thread: Some(thread),
        }
    }

    /// What is said about a name from now on.
    pub fn says(&self, name: &str, says: Says) {
        let mut all = self.says.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(name.to_owned(), says);
    }

    /// A name with these addresses, for a minute.
    pub fn addresses(&self, name: &str, addresses: &[IpAddr]) {
        self.says(
            name,
            Says {
                alias: None,
                addresses: addresses.to_vec(),
                ttl: 60,
            },
        );
    }

    /// Questions so far.
    pub fn asked(&self) -> u64 {
        self.asked.load(Ordering::Relaxed)
    }
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const A: u16 = 1;
const CNAME: u16 = 5;
const AAAA: u16 = 28;
const IN: u16 = 1;

/// A name as it is sent.
pub fn wire(name: &str) -> Vec<u8> {
    let mut wire = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        wire.push(label.len() as u8);
        wire.extend_from_slice(label.as_bytes());
    }
    wire.push(0);
    wire
}

fn reply(query: &[u8], says: &HashMap<String, Says>) -> Option<Vec<u8>> {
    let mut at = 12;
    let mut labels = Vec::new();
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        labels.push(String::from_utf8(query.get(at..at + length)?.to_vec()).ok()?);
        at += length;
    }
    let question = query.get(12..at + 4)?;
    let qtype = u16::from_be_bytes([*query.get(at)?, *query.get(at + 1)?]);
    let known = says.get(&labels.join(".").to_ascii_lowercase());
    let mut answers: Vec<Vec<u8>> = Vec::new();
    if let Some(says) = known {
        let mut owner = labels.join(".");
        let mut record = |owner: &str, kind: u16, data: &[u8]| {
            let mut record = wire(owner);
            record.extend(kind.to_be_bytes());
            record.extend(IN.to_be_bytes());
            record.extend(says.ttl.to_be_bytes());
            record.extend((data.len() as u16).to_be_bytes());
            record.extend(data);
            answers.push(record);
        };
        if let Some(alias) = &says.alias {
            record(&owner, CNAME, &wire(alias));
            owner.clone_from(alias);
        }
        for address in &says.addresses {
            match address {
                IpAddr::V4(addr) if qtype == A => record(&owner, A, &addr.octets()),
                IpAddr::V6(addr) if qtype == AAAA => record(&owner, AAAA, &addr.octets()),
                _ => {}
            }
        }
    }
    let mut reply = query.get(..2)?.to_vec();
    // An answer with recursion; no such name where nothing is said.
    reply.extend([0x81, if known.is_some() { 0x80 } else { 0x83 }]);
    for count in [1, answers.len() as u16, 0, 0] {
        reply.extend(count.to_be_bytes());
    }
    reply.extend(question);
    reply.extend(answers.concat());
    Some(reply)
}
