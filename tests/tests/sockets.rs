//! Whatever a program does with its socket, its exchanges are seen.

use std::io::{Read as _, Write as _};

use tests::{
    interpreter::Interpreter,
    need,
    outcome::expect,
    talk::{CONNECT, DESTINATION, PATIENCE, Talk, echo, read_byte, wait_end},
};

#[test]
fn a_client_that_ends_without_closing_has_abandoned() {
    need!("python3");
    let mut talk = Talk::new("ended", wait_end);
    talk.value("(os := __import__('os')) and 0");
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    talk.value(PATIENCE);
    let fork = "(child := os.fork()) or (s.close(), os._exit(0))";
    talk.value(fork);
    talk.value("os.waitpid(child, 0)");
    let row = talk.agent.row(DESTINATION);
    assert_eq!(row["in_flight"], 1, "the parent has it: {row:#}");
    let agent = &talk.agent;
    talk.python.kill();
    expect(agent, DESTINATION, &[("abandoned", 1)]);
}

/// A copy of the socket keeps the exchange alive, wherever it lies.
#[test]
fn a_copy_of_the_socket_gets_the_answer() {
    need!("python3");
    let mut talk = Talk::new("copy", echo);
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    talk.value("(copy := s.dup()) and s.close()");
    assert_eq!(talk.python.value("len(copy.recv(9))"), 1);
    talk.value("copy.sendall(b'x')");
    assert_eq!(talk.python.value("len(copy.recv(9))"), 1);
    talk.value("copy.close()");
    talk.expect(&[("responses", 2)], (2, 0));
}

/// Passed to a process outside the control group over a unix socket.
#[test]
fn a_socket_passed_on_is_still_counted() {
    need!("python3");
    let mut talk = Talk::new("passed", echo);
    let mut other = Interpreter::start_outside(&talk.net.client);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let path = path.display();
    let unix = "socket.socket(socket.AF_UNIX)";
    other.value(&format!("(u := {unix}) and u.bind('{path}') or u.listen()"));
    talk.value(CONNECT);
    talk.value(&format!("(u := {unix}) and u.connect('{path}')"));
    talk.value("socket.send_fds(u, [b'x'], [s.fileno()])");
    talk.value("s.close()");
    other.value("(s := socket.socket(fileno=socket.recv_fds(u.accept()[0], 9, 1)[1][0])) and 0");
    for _ in 0..3 {
        other.value("s.sendall(b'x')");
        assert_eq!(other.value("len(s.recv(9))"), 1);
    }
    other.value("s.close()");
    talk.expect(&[("responses", 3)], (3, 0));
}

/// Requests by sendfile and splice, an answer by splice: no byte passes the program.
#[test]
fn sendfile_and_splice_are_seen() {
    need!("python3");
    let mut talk = Talk::new("splice", echo);
    talk.value("(os := __import__('os')) and 0");
    talk.value("(file := os.memfd_create('x')) and os.write(file, b'x' * 1)");
    talk.value("(pipe := os.pipe()) and 0");
    talk.value(CONNECT);
    talk.value("os.sendfile(s.fileno(), file, 0, 1)");
    assert_eq!(talk.python.value("len(s.recv(9))"), 1);
    talk.value("os.splice(file, pipe[1], 1, offset_src=0)");
    talk.value("os.splice(pipe[0], s.fileno(), 1)");
    assert_eq!(talk.python.value("os.splice(s.fileno(), pipe[1], 9)"), 1);
    talk.value("s.close()");
    talk.expect(&[("responses", 2)], (2, 0));
}

/// Nothing was asked by writing nothing.
#[test]
fn an_empty_write_asks_for_nothing() {
    need!("python3");
    let mut talk = Talk::new("empty", wait_end);
    talk.value(CONNECT);
    talk.value("s.send(b'')");
    talk.value(PATIENCE);
    talk.value("s.close()");
    let row = talk.expect(&[], (0, 0));
    assert_eq!(row["established"], 1, "{row:#}");
}

#[test]
fn a_large_upload_is_one_exchange() {
    need!("python3");
    let mut talk = Talk::new("upload", |mut stream| {
        let mut left = 32 << 20;
        let mut buffer = vec![0; 1 << 16];
        while left > 0 {
            match stream.read(&mut buffer) {
                Ok(count @ 1..) => left -= count,
                _ => return,
            }
        }
        let _ = stream.write_all(b"y");
        wait_end(stream);
    });
    talk.value(CONNECT);
    talk.value("s.sendall(bytes(32 << 20))");
    assert_eq!(talk.python.value("len(s.recv(9))"), 1);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}

#[test]
fn a_large_download_is_one_exchange() {
    need!("python3");
    let mut talk = Talk::new("download", |mut stream| {
        read_byte(&mut stream);
        let _ = stream.write_all(&vec![b'y'; 32 << 20]);
    });
    talk.value(CONNECT);
    talk.value("s.sendall(b'x')");
    let all = "sum(iter(lambda: len(s.recv(1 << 16)), 0))";
    assert_eq!(talk.python.value(all), 32 << 20);
    talk.value("s.close()");
    talk.expect(&[("responses", 1)], (1, 0));
}
