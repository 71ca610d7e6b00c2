//! Connections of a Python in a namespace of its own.

use std::{
    io::Read as _,
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use backstop::sockets::{
    diag::{Diag, Target},
    look::{Look, State, Tuple},
    namespace::{Namespaces, Place},
};
use tests::{cgroup::TestCgroup, interpreter::Interpreter, net::Namespace, wait};

/// Longest wait for something that takes microseconds.
pub const SOON: Duration = wait::LONGEST;

/// A namespace with a listener on loopback, and a program.
pub struct Scene {
    pub namespace: Namespace,
    pub group: TestCgroup,
    pub python: Interpreter,
    pub listener: TcpListener,
}

impl Scene {
    /// `address` is where the listener is.
    pub fn new(label: &str, address: &str) -> Self {
        let namespace = Namespace::new(label);
        let group = TestCgroup::new(label);
        let python = Interpreter::start(&group, &namespace);
        let listener = namespace.enter(|| TcpListener::bind((address, 0)).expect("listen"));
        Self {
            namespace,
            group,
            python,
            listener,
        }
    }

    pub fn pid(&self) -> u32 {
        self.group.pids()[0] as u32
    }

    pub fn port(&self) -> u16 {
        self.listener.local_addr().expect("its address").port()
    }

    /// Has the program connect, as `name`; the server's end and how to find the program's.
    pub fn connect(&mut self, name: &str, host: &str) -> (TcpStream, Target) {
        let port = self.port();
        let python = &mut self.python;
        python.value(&format!(
            "({name} := socket.create_connection(('{host}', {port}))) and 0"
        ));
        (self.accept(), self.target(name))
    }

    pub fn accept(&self) -> TcpStream {
        self.listener.accept().expect("accept").0
    }

    /// How to find a socket of the program's.
    pub fn target(&mut self, name: &str) -> Target {
        let python = &mut self.python;
        let local = end(&python.value(&format!("{name}.getsockname()[:2]")));
        let remote = end(&python.value(&format!("{name}.getpeername()[:2]")));
        // SO_COOKIE
        let bytes = python.value(&format!("{name}.getsockopt(1, 57, 8).hex()"));
        let hex = bytes.as_str().expect("hex");
        let cookie = u64::from_str_radix(hex, 16).expect("hex").swap_bytes();
        let tuple = Tuple::new(local, remote, 0);
        Target { tuple, cookie }
    }

    pub fn diag<T>(&self, batch: impl FnOnce(&mut Diag) -> T) -> T {
        diag(&self.namespace, &[self.pid()], batch)
    }

    pub fn look(&self, target: &Target) -> Option<Look> {
        self.diag(|diag| diag.look(target).expect("look"))
    }

    /// Waits until a look shows something.
    pub fn until(&self, what: &str, target: &Target, mut shows: impl FnMut(&Look) -> bool) -> Look {
        wait::until(what, SOON, || self.look(target).filter(&mut shows))
    }
}

pub fn diag<T>(namespace: &Namespace, pids: &[u32], batch: impl FnOnce(&mut Diag) -> T) -> T {
    let inode = namespace.inode() as u32;
    let place = Place { inode, pids };
    (Namespaces::default().diag(place, batch)).expect("ask in the namespace")
}

fn end(value: &serde_json::Value) -> SocketAddr {
    let host = value[0].as_str().expect("a host").parse().expect("address");
    SocketAddr::new(host, value[1].as_u64().expect("a port") as u16)
}

/// Whether the peer of a stream has reset it.
pub fn is_reset(mut stream: TcpStream) -> bool {
    stream.set_read_timeout(Some(SOON)).expect("a timeout");
    let error = stream.read(&mut [0]).expect_err("no end, no data");
    error.kind() == std::io::ErrorKind::ConnectionReset
}

/// Sockets of this namespace in these states.
pub fn all(namespace: &Namespace, states: &[State]) -> Vec<Look> {
    let mut found = Vec::new();
    diag(namespace, &[], |diag| {
        diag.dump(states, true, |look| found.push(look))
            .expect("dump");
    });
    found
}
