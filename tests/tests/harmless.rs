//! What Backstop leaves alone, by nature or by decision; docs/LIMITS.md says so.

use std::{
    io::Write as _,
    net::{SocketAddr, UdpSocket},
    time::Duration,
};

use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    dialer::{Dialer, How},
    need,
    net::{Namespace, TestNet},
    process::{Program, python},
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");
const TO: SocketAddr = TestNet::server4(8080);
const DESTINATION: &str = "10.77.0.2:8080";

/// A Python program of a few lines in the control group.
fn script(text: &str, net: &TestNet, group: &TestCgroup) -> Program {
    let head = format!(
        "import socket, sys\nTO = ({:?}, {})\n",
        TO.ip().to_string(),
        TO.port()
    );
    Program::new(python())
        .args(["-c", &format!("{head}{text}")])
        .in_cgroup(group)
        .in_netns(&net.client)
}

/// A destination that is tripped, before anybody has called it.
fn tripped(group: &TestCgroup) -> Agent {
    let agent = Agent::start(group, "");
    agent.command(&["trip", DESTINATION]).good();
    agent
}

#[test]
fn udp() {
    need!("python3");
    let (net, group) = (TestNet::new(), TestCgroup::new("udp"));
    let agent = tripped(&group);
    let server = net.server.enter(|| UdpSocket::bind(TO)).expect("a socket");
    server
        .set_read_timeout(Some(Duration::from_secs(60)))
        .expect("a timeout");
    let text = "s = socket.socket(type=socket.SOCK_DGRAM); s.connect(TO); s.send(b'hello')";
    script(text, &net, &group).run().good();
    let mut buffer = [0; 16];
    let count = server.recv(&mut buffer).expect("a datagram");
    assert_eq!(&buffer[..count], b"hello");
    assert_eq!(agent.status()["destinations"], serde_json::json!([]));
}

#[test]
fn unix_sockets() {
    need!("python3");
    let (net, group) = (TestNet::new(), TestCgroup::new("unix"));
    let agent = tripped(&group);
    let text = "\
path = sys.argv[1]
a = socket.socket(socket.AF_UNIX); a.bind(path); a.listen()
b = socket.socket(socket.AF_UNIX); b.connect(path)
";
    let path = agent.home().path().join("other.sock");
    script(text, &net, &group).arg(path).run().good();
    assert_eq!(agent.status()["destinations"], serde_json::json!([]));
}

/// A connection that exists when its destination is tripped goes on; only new ones are refused.
/// So do requests of a connection that is kept and used again.
#[test]
fn connections_that_exist() {
    need!("python3");
    let (net, group) = (TestNet::new(), TestCgroup::new("existing"));
    let agent = Agent::start(&group, "");
    let _server = Server::start(&net.server, TO);
    let text = "\
s = socket.create_connection(TO)
print('connected', flush=True)
sys.stdin.readline()
s.sendall(b'GET / HTTP/1.1\\r\\n\\r\\n')
print(s.recv(100).decode().split('\\r')[0])
";
    let mut running = script(text, &net, &group).fed().spawn();
    agent.wait_row(DESTINATION, "established", |row| row["established"] == 1);
    agent.command(&["trip", DESTINATION]).good();
    agent.wait_state(DESTINATION, "forced_open");
    let mut input = running.stdin.take().expect("a pipe");
    input.write_all(b"\n").expect("write to it");
    assert_eq!(running.wait().good(), "connected\nHTTP/1.1 200 OK\n");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(dialer.connect(TO).errno, libc::ECONNREFUSED);
}

/// A server in the control group: its accepted connections are nobody's attempts, and its sockets
/// have no option of ours.
#[test]
fn servers() {
    need!("python3");
    let (net, group) = (TestNet::new(), TestCgroup::new("server"));
    let agent = Agent::start(&group, "");
    let text = "\
l = socket.create_server(('10.77.0.1', 7000))
print('listening', flush=True)
s, _ = l.accept()
print(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT), s.recv(10))
";
    let running = script(text, &net, &group).spawn();
    let to: SocketAddr = "10.77.0.1:7000".parse().expect("an address");
    let mut stream = tests::wait::until("the server", Duration::from_secs(60), || {
        net.server.enter(|| std::net::TcpStream::connect(to)).ok()
    });
    stream.write_all(b"hello").expect("write");
    assert_eq!(running.wait().good(), "listening\n0 b'hello'\n");
    assert_eq!(agent.status()["destinations"], serde_json::json!([]));
}

/// TCP Fast Open sends data with the SYN, by `sendto()` instead of `connect()`: covered.
#[test]
fn fast_open_is_covered() {
    need!("python3");
    let (net, group) = (TestNet::new(), TestCgroup::new("fast-open"));
    let agent = Agent::start(&group, "");
    let _server = Server::start(&net.server, TO);
    let text = "\
s = socket.socket()
try:
    s.sendto(b'GET / HTTP/1.1\\r\\n\\r\\n', socket.MSG_FASTOPEN, TO)
    print(s.recv(100).decode().split('\\r')[0])
except OSError as error:
    print(error.errno)
";
    assert_eq!(script(text, &net, &group).run().good(), "HTTP/1.1 200 OK\n");
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["attempts"], &row["established"]),
        (&1.into(), &1.into()),
        "{row:#}"
    );
    agent.command(&["trip", DESTINATION]).good();
    agent.wait_state(DESTINATION, "forced_open");
    assert_eq!(script(text, &net, &group).run().good(), "111\n");
    assert_eq!(agent.row(DESTINATION)["rejected"]["breaker"], 1);
}

/// A socket that is connected, disconnected and connected again, as few programs do: two attempts.
#[test]
fn a_socket_used_twice_is_two_attempts() {
    need!("python3");
    let (net, group) = (TestNet::new(), TestCgroup::new("twice"));
    let agent = Agent::start(&group, "[defaults.breaker]\nredial = false\n");
    let text = "\
s = socket.socket()
for i in range(7):
    if i == 5:
        sys.stdin.readline()
    try:
        s.connect(TO)
    except ConnectionRefusedError:
        print('refused')
";
    let mut running = script(text, &net, &group).fed().spawn();
    agent.wait_state(DESTINATION, "open");
    let mut input = running.stdin.take().expect("a pipe");
    input.write_all(b"\n").expect("write to it");
    assert_eq!(running.wait().good(), "refused\n".repeat(7));
    let row = agent.row(DESTINATION);
    assert_eq!(
        (&row["attempts"], &row["rejected"]["breaker"]),
        (&5.into(), &2.into()),
        "{row:#}"
    );
    assert_eq!(row["in_flight"], 0);
}

/// The agent's own connects are nobody's: with all of its host's loopback tripped it still scrapes.
#[test]
fn the_agent_itself() {
    let namespace = Namespace::new("itself");
    let group = TestCgroup::new("itself");
    let agent = Agent::start(&group, "");
    std::fs::write(group.path().join("cgroup.procs"), agent.pid().to_string())
        .expect("move the agent into its own control group");
    let to: SocketAddr = "127.0.0.1:8080".parse().expect("an address");
    let mut dialer = Dialer::start(DIAL, &group, &namespace);
    for _ in 0..5 {
        assert_eq!(dialer.connect(to).errno, libc::ECONNREFUSED);
    }
    // Its redials go through although they are made inside the group, and are not counted.
    let _server = Server::start(&namespace, to);
    let row = agent.wait_state(&to.to_string(), "half_open");
    assert_eq!(row["attempts"], 5, "{row:#}");
    assert_eq!(dialer.connect_how(to, How::default()).errno, 0);
}
