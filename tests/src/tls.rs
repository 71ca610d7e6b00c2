//! Servers that speak TLS.

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
};

use tempfile::TempDir;

use crate::{
    clients,
    net::Namespace,
    process::{Program, Running, python},
};

/// What the program evaluates before its first connection: a context that trusts everybody.
pub const CONTEXT: &str =
    "(ssl := __import__('ssl')) and (c := ssl._create_unverified_context()) and 0";
/// A new connection after its handshake, kept as `s`.
pub const CONNECT: &str =
    "(s := c.wrap_socket(socket.create_connection(('10.77.0.2', 8080)))) and 0";

/// A certificate and its key.
pub struct Certificate {
    directory: TempDir,
}

impl Certificate {
    /// Makes one; needs `openssl`.
    pub fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let at = |name: &str| directory.path().join(name);
        Program::new("openssl")
            .args(["req", "-x509", "-nodes", "-days", "2", "-subj", "/CN=test"])
            .args(["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"])
            .arg("-keyout")
            .arg(at("key"))
            .arg("-out")
            .arg(at("certificate"))
            .run()
            .good();
        let read = |name| std::fs::read_to_string(at(name)).expect("what openssl wrote");
        let both = read("certificate") + &read("key");
        std::fs::write(at("both"), both).expect("write the certificate");
        Self { directory }
    }

    /// The certificate.
    pub fn certificate(&self) -> PathBuf {
        self.directory.path().join("certificate")
    }

    /// Its key.
    pub fn key(&self) -> PathBuf {
        self.directory.path().join("key")
    }

    /// Both in one file.
    pub fn both(&self) -> PathBuf {
        self.directory.path().join("both")
    }
}

impl Default for Certificate {
    fn default() -> Self {
        Self::new()
    }
}

/// How a server behaves.
#[derive(Clone, Copy)]
pub struct Behaviour {
    /// `1.2` or `1.3`.
    pub version: &'static str,
    /// Session tickets after a handshake of TLS 1.3.
    pub tickets: u32,
    /// Connections that are answered; the others hang after the handshake.
    pub answers: u32,
    /// Time until an answer.
    pub delay_ms: u32,
}

/// A running server; killed when dropped.
pub struct TlsServer {
    _process: Running,
}

impl TlsServer {
    /// Starts one on 10.77.0.2:8080 and waits until it listens.
    pub fn start(namespace: &Namespace, certificate: &Path, behaviour: Behaviour) -> Self {
        let mut process = Program::new(python())
            .arg(clients::source("tls_server.py"))
            .args(["10.77.0.2", "8080"])
            .arg(certificate)
            .arg(behaviour.version)
            .args([behaviour.tickets, behaviour.answers, behaviour.delay_ms].map(|n| n.to_string()))
            .in_netns(namespace)
            .within(std::time::Duration::from_secs(120))
            .spawn();
        let mut line = String::new();
        let output = process.stdout.take().expect("piped");
        BufReader::new(output)
            .read_line(&mut line)
            .expect("read from the server");
        assert_eq!(line, "ready\n", "{}", process.stderr_so_far());
        Self { _process: process }
    }
}
