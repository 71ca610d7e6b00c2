//! Other ways in which a request leaves a program than write().

use std::{
    io::{Read as _, Write as _},
    sync::{Mutex, mpsc},
    time::Duration,
};

use tests::{
    need,
    net::TestNet,
    outcome::expect,
    process::{Program, find},
    server::Server,
    talk::{CONNECT, DESTINATION, Talk, echo, read_byte, wait_end},
};

/// For Python's sendmsg() that connects (include/linux/socket.h).
const MSG_FASTOPEN: u32 = 0x2000_0000;

/// A new socket of the program's that is not connected, kept as `s`.
const SOCKET: &str = "(s := socket.socket()) and 0";

/// Lets both ends use TCP Fast Open, and the client without a cookie.
fn allow_fast_open(talk: &Talk, server: bool) {
    let write = |value: &str| {
        std::fs::write("/proc/sys/net/ipv4/tcp_fastopen", value).expect("write tcp_fastopen");
    };
    talk.net.client.enter(|| write("5"));
    // 0x203: client, server, and every listener takes data without a cookie.
    let value = if server { "1539" } else { "0" };
    talk.net.server.enter(|| write(value));
}

/// The request goes with the SYN, and the server's SYN-ACK says that it has it.
#[test]
fn a_request_in_the_syn() {
    need!("python3");
    let mut talk = Talk::new("fast-open", wait_end);
    allow_fast_open(&talk, true);
    // A listener takes such data only if it was allowed when it began to listen.
    let to = TestNet::server4(8081);
    let _server = Server::with(&talk.net.server, to, |mut stream| {
        let mut request = [0; 16];
        let _ = stream.read_exact(&mut request);
        std::thread::sleep(Duration::from_millis(100));
        let _ = stream.write_all(b"HTTP/1.1 503 No\r\n\r\n");
        wait_end(stream);
    });
    for count in 1..=3 {
        talk.value(SOCKET);
        talk.value(&format!(
            "s.sendto(b'GET / HTTP/1.1\\r\\n', {MSG_FASTOPEN}, ('10.77.0.2', 8081))"
        ));
        assert_eq!(talk.python.value("len(s.recv(99))"), 19);
        // TCP_INFO: tcpi_options, whose bit 5 says that the SYN's data was taken.
        let options = talk.python.value("s.getsockopt(6, 11, 8)[5]");
        assert_eq!(options.as_u64().map(|options| options & 32), Some(32));
        let wanted = [("responses", count), ("status", count)];
        let row = expect(&talk.agent, "10.77.0.2:8081", &wanted);
        let p50 = row["response_latency_us"]["p50"].as_u64();
        // From the SYN-ACK on: neither nothing, nor since some time long ago.
        assert!((Some(90_000)..Some(10_000_000)).contains(&p50), "{row:#}");
        talk.value("s.close()");
    }
}

/// A server that does not take it: it is sent once more, and counts once.
#[test]
fn a_request_in_the_syn_that_is_not_taken() {
    need!("python3");
    let mut talk = Talk::new("fast-open-not", echo);
    allow_fast_open(&talk, false);
    talk.value(SOCKET);
    talk.value(&format!(
        "s.sendto(b'x', {MSG_FASTOPEN}, ('10.77.0.2', 8080))"
    ));
    assert_eq!(talk.python.value("len(s.recv(99))"), 1);
    talk.expect(&[("responses", 1)], (1, 0));
    talk.ask(1);
    talk.value("s.close()");
    talk.expect(&[("responses", 2)], (2, 0));
}

/// Nothing is sent, so nothing is owed.
#[test]
fn a_write_of_nothing() {
    need!("python3");
    let mut talk = Talk::new("nothing", echo);
    talk.value(CONNECT);
    talk.value("[s.send(b'') for _ in range(3)]");
    talk.expect(&[], (0, 0));
    talk.ask(1);
    talk.value("s.send(b'')");
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

#[test]
fn requests_by_sendfile_and_splice() {
    need!("python3");
    let mut talk = Talk::new("sendfile", |mut stream| {
        let mut request = vec![0; 100_000];
        while stream.read_exact(&mut request).is_ok() {
            let _ = stream.write_all(b"y");
        }
    });
    talk.value("(os := __import__('os')) and (f := __import__('tempfile').TemporaryFile()) and 0");
    talk.value("(f.write(bytes(100000)), f.flush()) and 0");
    talk.value(CONNECT);
    talk.value("os.sendfile(s.fileno(), f.fileno(), 0, 100000)");
    assert_eq!(talk.python.value("len(s.recv(9))"), 1);
    talk.expect(&[("responses", 1)], (1, 0));
    talk.value("(p := os.pipe()) and 0");
    talk.value(
        "[os.splice(p[0], s.fileno(), os.splice(f.fileno(), p[1], 50000, offset_src=0)) for _ in range(2)]",
    );
    assert_eq!(talk.python.value("len(s.recv(9))"), 1);
    talk.value("s.close()");
    talk.expect(&[("responses", 2)], (2, 0));
}

/// One request and its answer by io_uring, without any other system call on the socket.
const URING: &str = r#"
#include <liburing.h>
#include <arpa/inet.h>
#include <stdio.h>
#include <string.h>

static int run(struct io_uring *ring, int op, int fd, void *data, unsigned size) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);
    struct io_uring_cqe *cqe;
    switch (op) {
    case 0: io_uring_prep_connect(sqe, fd, data, size); break;
    case 1: io_uring_prep_send(sqe, fd, data, size, 0); break;
    default: io_uring_prep_recv(sqe, fd, data, size, 0);
    }
    io_uring_submit(ring);
    if (io_uring_wait_cqe(ring, &cqe) < 0) return -1;
    int result = cqe->res;
    io_uring_cqe_seen(ring, cqe);
    return result;
}

int main(void) {
    struct io_uring ring;
    if (io_uring_queue_init(4, &ring, 0) < 0) return 77;
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(8080)};
    inet_pton(AF_INET, "10.77.0.2", &to.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    char buffer[9] = "x";
    if (run(&ring, 0, fd, &to, sizeof to) != 0) return 1;
    for (int i = 0; i < 3; i++) {
        if (run(&ring, 1, fd, buffer, 1) != 1) return 2;
        if (run(&ring, 2, fd, buffer, sizeof buffer) != 1) return 3;
    }
    return 0;
}
"#;

#[test]
fn requests_by_io_uring() {
    need!("gcc");
    if !std::path::Path::new("/usr/include/liburing.h").is_file() {
        tests::skip!("liburing-dev is not installed");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("uring.c"), URING).expect("write the program");
    Program::new(find("gcc").expect("installed"))
        .args(["-O1", "-o"])
        .args([at("uring"), at("uring.c")])
        .arg("-luring")
        .run()
        .good();
    let talk = Talk::new("uring", echo);
    let finished = Program::new(at("uring"))
        .in_cgroup(&talk.group)
        .in_netns(&talk.net.client)
        .run();
    if finished.code() == 77 {
        tests::skip!("this kernel allows no io_uring");
    }
    finished.good();
    let row = talk.expect(&[("responses", 3)], (3, 0));
    assert_eq!(row["established"], 1, "{row:#}");
}

/// The answer comes long after the program has said that it sends no more.
#[test]
fn a_half_closed_connection_waits() {
    need!("python3");
    let (looked, is_looked) = mpsc::channel();
    let is_looked = Mutex::new(is_looked);
    let mut talk = Talk::new("half-closed", move |mut stream| {
        while read_byte(&mut stream) {}
        let _ = is_looked.lock().expect("no panic holds it").recv();
        std::thread::sleep(Duration::from_millis(700));
        let _ = stream.write_all(b"y");
    });
    talk.value(CONNECT);
    talk.value("s.sendall(b'x') or s.shutdown(1)");
    assert_eq!(talk.agent.row(DESTINATION)["in_flight"], 1);
    looked.send(()).expect("the server waits");
    assert_eq!(talk.python.value("len(s.recv(9))"), 1);
    talk.value("s.close()");
    let row = talk.expect(&[("responses", 1)], (1, 0));
    let p50 = row["response_latency_us"]["p50"].as_u64();
    assert!(p50 >= Some(700_000), "{row:#}");
}
