//! Programs that make one call each.

use std::{
    io::{Read as _, Write as _},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use tests::{
    cgroup::TestCgroup,
    net::{Namespace, TestNet},
    nginx::Nginx,
    process::Program,
};

use super::{
    Ended,
    cells::{Cell, Client, Kind},
    server::Silent,
};

/// More than the send and receive buffers of a connection hold, with the limits that
/// [`small_buffers`] sets.
const LARGE: usize = 4 << 20;
const NGINX: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8000);

/// Limits what a connection holds: whoever writes is soon held up.
pub fn small_buffers(net: &TestNet) {
    for namespace in [&net.client, &net.server] {
        namespace.enter(|| {
            for file in ["tcp_rmem", "tcp_wmem"] {
                std::fs::write(format!("/proc/sys/net/ipv4/{file}"), "4096 65536 262144")
                    .expect("set the namespace's buffers");
            }
        });
    }
}

/// What the programs need.
pub struct Singles<'a> {
    group: &'a TestCgroup,
    namespace: &'a Namespace,
    directory: tempfile::TempDir,
    _nginx: Nginx,
}

impl<'a> Singles<'a> {
    pub fn new(group: &'a TestCgroup, namespace: &'a Namespace) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let filler = "x".repeat(LARGE);
        std::fs::write(directory.path().join("large"), &filler).expect("write a file");
        let query = format!("select '{filler}';\n");
        std::fs::write(directory.path().join("large.sql"), query).expect("write a file");
        let mut server = format!("listen {NGINX};\nclient_body_buffer_size 5m;\n");
        for cell in Cell::all() {
            if cell.client == Client::Nginx {
                let (path, url) = (path(cell), cell.url());
                server += &format!("location = {path} {{ proxy_pass {url}; }}\n");
            }
        }
        let nginx = Nginx::start_in(group, namespace, NGINX, &server);
        Self {
            group,
            namespace,
            directory,
            _nginx: nginx,
        }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Makes the call; how it ended, as the server and the program show.
    pub fn call(&self, cell: Cell, server: &Silent) -> Ended {
        let said = if cell.client == Client::Nginx {
            self.namespace.enter(|| through_nginx(cell))
        } else {
            let program = self.program(cell);
            let finished = program.in_cgroup(self.group).in_netns(self.namespace).run();
            finished.to_string()
        };
        let ended = Instant::now();
        let seen = server.take(cell);
        let last = seen.iter().map(|seen| seen.end).max();
        Ended {
            waited: seen.iter().map(|seen| seen.waited(cell.kind)).collect(),
            said,
            lingered: last.map_or(Duration::ZERO, |last| ended.saturating_duration_since(last)),
        }
    }

    fn program(&self, cell: Cell) -> Program {
        let writes = cell.kind == Kind::Write;
        let (host, port) = (cell.host(), cell.port().to_string());
        match cell.client {
            Client::Curl => {
                let program = Program::new("curl").args(["-q", "-sS", "-H", "Expect:"]);
                let program = if writes {
                    program.arg("-T").arg(self.file("large"))
                } else {
                    program
                };
                program.arg(cell.url())
            }
            Client::Hey => {
                let program = Program::new("hey").args(["-n", "1", "-c", "1"]);
                let program = if writes {
                    program.args(["-m", "POST", "-D"]).arg(self.file("large"))
                } else {
                    program
                };
                program.arg(cell.url())
            }
            Client::Psql => {
                let to = format!(
                    "hostaddr={host} port={port} user=u dbname=d sslmode=disable \
                     gssencmode=disable"
                );
                let program = Program::new("psql").args(["-X", "-q", "-d", &to]);
                if writes {
                    program.arg("-f").arg(self.file("large.sql"))
                } else {
                    program.args(["-c", "select 1"])
                }
            }
            Client::RedisCli if writes => {
                let large = self.file("large");
                let script = format!(
                    "exec redis-cli -h {host} -p {port} -x SET key <{}",
                    large.display()
                );
                Program::new("sh").args(["-c", &script])
            }
            Client::RedisCli => {
                Program::new("redis-cli").args(["-h", &host, "-p", &port, "GET", "key"])
            }
            other => panic!("{other:?} makes many calls"),
        }
    }
}

/// Where nginx has the cell.
fn path(cell: Cell) -> String {
    let (kind, family) = (cell.kind.name(), cell.family);
    format!("/{kind}-{}-{family:?}", cell.step)
}

/// What nginx answers in the server's place.
fn through_nginx(cell: Cell) -> String {
    let mut stream = TcpStream::connect(NGINX).expect("nginx listens");
    let limit = Some(Duration::from_secs(60));
    stream.set_read_timeout(limit).expect("set the timeout");
    let body = vec![b'x'; if cell.kind == Kind::Write { LARGE } else { 0 }];
    let (path, length) = (path(cell), body.len());
    write!(
        stream,
        "POST {path} HTTP/1.1\r\nHost: n\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )
    .and_then(|()| stream.write_all(&body))
    .expect("ask nginx");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("nginx answers");
    answer
}

/// Compiles the client in C.
pub fn compile(directory: &Path) -> PathBuf {
    let program = directory.join("cells");
    Program::new("gcc")
        .args(["-O1", "-Wall", "-Werror", "-o"])
        .arg(&program)
        .arg(tests::clients::source("cells.c"))
        .args(["-luring", "-lpthread"])
        .run()
        .good();
    program
}
