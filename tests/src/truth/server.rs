//! A server that fails some of what it is asked, and notes of each attempt whether it is a retry, and what
//! Backstop took it for.
//!
//! Every operation has a name of its own (a path, a key): who asks for it again retries.

use std::{
    collections::HashSet,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use super::label::{Label, Labels};
use crate::{
    net::Namespace,
    server::{Server, reset},
};

/// What was seen of a program's attempts. Connects only: what is asked on a connection that has served
/// before was not dialled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Requests.
    pub requests: u64,
    /// Connects for the first attempt of an operation.
    pub fresh: u64,
    /// Those of them that Backstop took for retries, in the end.
    pub fresh_taken: u64,
    /// Those that `connect()` took for retries.
    pub fresh_by_connect: u64,
    /// Connects for a later attempt.
    pub retries: u64,
    /// Those of them that Backstop took for retries, in the end.
    pub retries_taken: u64,
    /// Those that `connect()` took for retries.
    pub retries_by_connect: u64,
    /// Connects of which it is not known what Backstop took them for.
    pub unknown: u64,
}

/// What all connections share.
struct Shared {
    percent: u64,
    labels: Option<Labels>,
    served: AtomicU64,
    known: Mutex<HashSet<String>>,
    seen: Mutex<Seen>,
}

/// How a request ends.
enum End {
    Well,
    /// By an answer that says so.
    Failed,
    Reset,
}

/// The server. It stops when dropped.
pub struct Labelling {
    shared: Arc<Shared>,
    _servers: Vec<Server>,
}

impl Labelling {
    /// Listens in the namespace, and fails so many of a hundred requests: every other one by an answer (HTTP
    /// 503) or an early end, the others by a reset. Without labels all is counted as fresh or retries, and as
    /// not taken for any.
    pub fn start(
        namespace: &Namespace,
        addresses: &[SocketAddr],
        percent: u64,
        labels: Option<Labels>,
    ) -> Self {
        let shared = Arc::new(Shared {
            percent,
            labels,
            served: AtomicU64::new(0),
            known: Mutex::default(),
            seen: Mutex::default(),
        });
        let servers = addresses.iter().map(|&address| {
            let shared = Arc::clone(&shared);
            Server::with(namespace, address, move |stream| {
                let _ = shared.serve(stream);
            })
        });
        Self {
            _servers: servers.collect(),
            shared,
        }
    }

    /// What was seen so far.
    pub fn seen(&self) -> Seen {
        *self.shared.seen.lock().expect("no panic holds it")
    }
}

impl Shared {
    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        match reader.fill_buf()?.first() {
            Some(b'*') => self.redis(reader),
            Some(0) => self.postgres(reader),
            Some(_) => self.http(reader),
            None => Ok(()),
        }
    }

    /// How the next request ends: at random, and the same in each run.
    fn end(&self) -> End {
        // (The very first goes well: a program that knows nothing good is another case.)
        let number = self.served.fetch_add(1, Ordering::Relaxed);
        let random = scattered(number);
        match number > 0 && random % 100 < self.percent {
            false => End::Well,
            true if random >> 63 == 0 => End::Failed,
            true => End::Reset,
        }
    }

    /// A request for this operation; `None`: there is no operation that could be asked for twice.
    fn asked(&self, operation: Option<String>, dialled: Option<&TcpStream>) {
        const NONE: Label = Label {
            retry: false,
            by_connect: false,
        };
        let taken = dialled.map(|stream| match &self.labels {
            Some(labels) => labels.of(stream),
            None => Some(NONE),
        });
        let is_retry = operation.is_some_and(|operation| {
            let mut known = self.known.lock().expect("no panic holds it");
            !known.insert(operation)
        });
        let mut seen = self.seen.lock().expect("no panic holds it");
        seen.requests += 1;
        let taken = match taken {
            None => return,
            Some(None) => {
                seen.unknown += 1;
                return;
            }
            Some(Some(taken)) => taken,
        };
        let Label { retry, by_connect } = taken;
        if is_retry {
            seen.retries += 1;
            seen.retries_taken += u64::from(retry);
            seen.retries_by_connect += u64::from(by_connect);
        } else {
            seen.fresh += 1;
            seen.fresh_taken += u64::from(retry);
            seen.fresh_by_connect += u64::from(by_connect);
        }
    }

    fn http(&self, mut reader: BufReader<TcpStream>) -> std::io::Result<()> {
        let mut is_first = true;
        loop {
            let (mut line, mut path, mut is_kept) = (String::new(), None, false);
            while reader.read_line(&mut line)? > 0 && line != "\r\n" {
                path = path.or_else(|| line.split(' ').nth(1).map(str::to_owned));
                is_kept |= line.to_ascii_lowercase().starts_with("connection: keep");
                line.clear();
            }
            if line.is_empty() {
                return Ok(());
            }
            // (The root is no operation's name.)
            let path = path.filter(|path| path != "/");
            self.asked(path, is_first.then_some(reader.get_ref()));
            is_first = false;
            match self.end() {
                End::Well if is_kept => reader
                    .get_mut()
                    .write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")?,
                End::Well => {
                    return reader.get_mut().write_all(
                        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok",
                    );
                }
                End::Failed => {
                    return reader.get_mut().write_all(
                        b"HTTP/1.1 503 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
                    );
                }
                End::Reset => {
                    reset(reader.into_inner());
                    return Ok(());
                }
            }
        }
    }

    /// As much of Redis as `GET KEY` takes; the key is the operation.
    fn redis(&self, mut reader: BufReader<TcpStream>) -> std::io::Result<()> {
        let mut is_first = true;
        loop {
            let mut words = Vec::new();
            for _ in 0..redis_number(&mut reader)? {
                let length = redis_number(&mut reader)?;
                let mut word = vec![0; length + 2];
                reader.read_exact(&mut word)?;
                word.truncate(length);
                words.push(String::from_utf8_lossy(&word).into_owned());
            }
            if words.first().is_none_or(|word| word != "GET") {
                reader.get_mut().write_all(b"+OK\r\n")?;
                continue;
            }
            self.asked(words.pop(), is_first.then_some(reader.get_ref()));
            is_first = false;
            match self.end() {
                End::Well => reader.get_mut().write_all(b"$2\r\nok\r\n")?,
                End::Failed => return Ok(()),
                End::Reset => {
                    reset(reader.into_inner());
                    return Ok(());
                }
            }
        }
    }

    /// As much of PostgreSQL as connecting takes. Whoever fails here goes to the next host.
    fn postgres(&self, mut reader: BufReader<TcpStream>) -> std::io::Result<()> {
        const VERSION_3: u32 = 3 << 16;
        loop {
            let mut head = [0; 8];
            reader.read_exact(&mut head)?;
            let [length, code] = [0, 4]
                .map(|at| u32::from_be_bytes(head[at..at + 4].try_into().expect("four bytes")));
            std::io::copy(
                &mut (&mut reader).take(u64::from(length.saturating_sub(8))),
                &mut std::io::sink(),
            )?;
            if code == VERSION_3 {
                break;
            }
            // It asks for TLS.
            reader.get_mut().write_all(b"N")?;
        }
        self.asked(None, Some(reader.get_ref()));
        if !matches!(self.end(), End::Well) {
            // Only after this one does libpq go on: cannot_connect_now.
            const STARTS: &[u8] =
                b"SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0\0";
            let mut answer = vec![b'E'];
            answer.extend((4 + STARTS.len() as u32).to_be_bytes());
            answer.extend(STARTS);
            return reader.get_mut().write_all(&answer);
        }
        let mut answer = b"R\0\0\0\x08\0\0\0\0".to_vec();
        for (name, value) in [
            ("server_version", "15.0"),
            ("client_encoding", "UTF8"),
            ("DateStyle", "ISO, MDY"),
            ("standard_conforming_strings", "on"),
        ] {
            answer.push(b'S');
            answer.extend(((4 + name.len() + value.len() + 2) as u32).to_be_bytes());
            answer.extend(format!("{name}\0{value}\0").bytes());
        }
        answer.extend(b"Z\0\0\0\x05I");
        reader.get_mut().write_all(&answer)?;
        std::io::copy(&mut reader, &mut std::io::sink())?;
        Ok(())
    }
}

/// A number that seems to be random (splitmix64, after Vigna).
pub fn scattered(number: u64) -> u64 {
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// `*3` or `$5`.
fn redis_number(reader: &mut BufReader<TcpStream>) -> std::io::Result<usize> {
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let number = line.get(1..).and_then(|number| number.trim().parse().ok());
    number.ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}
