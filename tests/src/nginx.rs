//! nginx as a server of its own.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::{
    cgroup::TestCgroup,
    net::Namespace,
    process::{Program, Running, find},
    wait,
};

/// A running nginx; killed when dropped.
pub struct Nginx {
    directory: TempDir,
    process: Running,
}

impl Nginx {
    /// Starts one with this inside its `server` block, `listen` included, and waits until it
    /// accepts on `address`.
    pub fn start(namespace: &Namespace, address: SocketAddr, server: &str) -> Self {
        Self::run(None, namespace, address, server)
    }

    /// As [`Nginx::start`], inside a control group.
    pub fn start_in(
        group: &TestCgroup,
        namespace: &Namespace,
        address: SocketAddr,
        server: &str,
    ) -> Self {
        Self::run(Some(group), namespace, address, server)
    }

    fn run(
        group: Option<&TestCgroup>,
        namespace: &Namespace,
        address: SocketAddr,
        server: &str,
    ) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let at = directory.path().display();
        let config = format!(
            "daemon off;\nmaster_process off;\npid {at}/pid;\nerror_log {at}/error.log;\n\
             events {{ worker_connections 4096; }}\n\
             http {{\n\
               log_format status \"$status\";\n\
               access_log {at}/access.log status;\n\
               keepalive_requests 1000000;\n\
               keepalive_timeout 1h;\n\
               client_max_body_size 0;\n\
               client_body_temp_path {at}/body;\n\
               proxy_temp_path {at}/proxy;\n\
               fastcgi_temp_path {at}/fastcgi;\n\
               uwsgi_temp_path {at}/uwsgi;\n\
               scgi_temp_path {at}/scgi;\n\
               server {{ {server} }}\n\
             }}\n"
        );
        let file = directory.path().join("nginx.conf");
        fs::write(&file, config).expect("write nginx.conf");
        let mut program = Program::new(find("nginx").expect("installed"))
            .args(["-e", "stderr", "-p"])
            .arg(directory.path())
            .arg("-c")
            .arg(&file)
            .in_netns(namespace);
        if let Some(group) = group {
            program = program.in_cgroup(group);
        }
        let process = program.spawn();
        namespace.enter(|| {
            wait::until("nginx to listen", Duration::from_secs(60), || {
                TcpStream::connect(address).ok()
            });
        });
        Self { directory, process }
    }

    /// Sends it a signal; one process is all there is.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Waits for its end.
    pub fn ended(mut self) {
        self.process.extend_deadline(Duration::from_secs(60));
        self.process.wait();
    }

    /// Waits until as many requests with this status are in its log, which nginx writes after the
    /// answer has left: a client may end first. The log is read once more after that: no more.
    pub fn assert_logged(&self, status: u16, expected: u64) {
        let what = format!("{expected} requests with {status} in the log");
        wait::until(&what, Duration::from_secs(60), || {
            (self.logged(status) >= expected).then_some(())
        });
        assert_eq!(self.logged(status), expected, "requests with {status}");
    }

    fn logged(&self, status: u16) -> u64 {
        let log = fs::read_to_string(self.directory.path().join("access.log"))
            .unwrap_or_else(|e| panic!("{e}; nginx says {}", self.process.stderr_so_far()));
        let wanted = status.to_string();
        log.lines().filter(|line| *line == wanted).count() as u64
    }
}
