//! A program that keeps its socket locked: no look and no abort gets at it, and the timeouts of all others
//! go on.

use std::{fs, time::Duration};

use rustix::process::Signal;
use tests::{
    agent::Agent,
    attached,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    need,
    net::TestNet,
    outcome::expect,
    server::Server,
    skip,
    talk::{DESTINATION, TO, wait_end},
    wait,
};

/// For what comes by itself, on a busy machine.
const SOON: Duration = Duration::from_secs(60);

/// `hold()`: sends from memory that is not there, until `let_go()` serves the fault (userfaultfd(2)).
const HOLD: &str = r#"
import ctypes, fcntl, platform, struct, threading
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 323, "aarch64": 282}[platform.machine()]
uffd = libc.syscall(number, os.O_CLOEXEC)
can_hold, why = uffd >= 0, os.strerror(ctypes.get_errno())
libc.mmap.restype = ctypes.c_void_p
def dial():
    s = socket.create_connection(("10.77.0.2", 8080))
    s.sendall(b"x")
    return s
def hold():
    global memory, s, sender
    s = dial()
    fcntl.ioctl(uffd, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))  # UFFDIO_API
    PRIVATE_ANONYMOUS = 0x22
    memory = libc.mmap(None, ctypes.c_size_t(4096), 3, PRIVATE_ANONYMOUS, -1, ctypes.c_long(0))
    fcntl.ioctl(uffd, 0xC020AA00, struct.pack("QQQQ", memory, 4096, 1, 0))  # UFFDIO_REGISTER
    send = lambda: libc.send(s.fileno(), ctypes.c_void_p(memory), ctypes.c_size_t(4096), 0)
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    os.read(uffd, 32)  # the fault
def let_go():
    fcntl.ioctl(uffd, 0xC020AA04, struct.pack("QQQq", memory, 4096, 0, 0))  # UFFDIO_ZEROPAGE
    sender.join()
"#;

/// Since Linux 6.9 not all of sock_diag waits for one socket's lock (`sock_diag_mutex` has gone).
fn others_can_go_on() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("the release");
    let mut numbers = release
        .split(['.', '-'])
        .map(|n| n.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(6), Some(9))
}

#[test]
fn a_locked_socket_holds_up_nobody_else() {
    need!("python3");
    if !others_can_go_on() {
        skip!("before Linux 6.9 one lock is for all looks at sockets");
    }
    let net = TestNet::new();
    let _server = Server::with(&net.server, TO, wait_end);
    let group = TestCgroup::new("held");
    let agent = Agent::start(
        &group,
        "[defaults]\nbreaker = \"off\"\n[defaults.timeouts]\nread = \"300ms\"\n",
    );
    let mut holder = Interpreter::start(&group, &net.client);
    let mut other = Interpreter::start(&group, &net.client);
    holder.run(HOLD);
    other.run(HOLD);
    if holder.value("can_hold") != true {
        skip!("userfaultfd is not to be had: {}", holder.value("why"));
    }
    holder.value("hold()");
    let said = |what: &str, times: usize| {
        wait::until(what, SOON, || {
            (agent.log().matches(what).count() >= times).then_some(())
        });
    };
    said("keeps the socket of the connection of pid", 1);
    // More than once: a thread is there again.
    for count in 1..=2 {
        let ended = other.errno("dial().recv(1)");
        assert_eq!(ended, libc::ECONNABORTED, "{}", agent.log());
        agent.wait_row(DESTINATION, "ended", |row| {
            row["failures"]["read_timeout"] == count
        });
    }
    holder.value("let_go()");
    said("is not locked any more", 1);
    // It has sent what it held; from then on its time runs.
    assert_eq!(holder.errno("s.recv(1)"), libc::ECONNABORTED);
    expect(&agent, DESTINATION, &[("read_timeout", 3)]);
}

/// An agent that hangs in a program's lock stops enforcing when it is told to end, and ends with the lock.
#[test]
fn an_agent_that_is_held_up_stops() {
    need!("python3");
    let net = TestNet::new();
    let _server = Server::with(&net.server, TO, wait_end);
    let group = TestCgroup::new("held-stop");
    let agent = Agent::start(&group, "[defaults.timeouts]\nread = \"300ms\"\n");
    let mut holder = Interpreter::start(&group, &net.client);
    holder.run(HOLD);
    if holder.value("can_hold") != true {
        skip!("userfaultfd is not to be had: {}", holder.value("why"));
    }
    holder.value("hold()");
    wait::until("it to hang", SOON, || {
        agent.log().contains("keeps the socket of").then_some(())
    });
    agent.signal(Signal::TERM);
    wait::until("nothing to be attached", SOON, || {
        (attached::programs(&group) == [0; 4]).then_some(())
    });
    holder.value("let_go()");
    let finished = agent.stop();
    assert!(finished.status.success(), "{}", finished.stderr);
}
