//! A program, a server that fails as its targets say, and an agent between them.

use std::{
    io::{Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::Value;
use tests::{
    agent::Agent,
    cgroup::TestCgroup,
    interpreter::Interpreter,
    net::TestNet,
    server::{Server, read_head},
    wait,
};

pub const TO: SocketAddr = TestNet::server4(8080);
pub const DESTINATION: &str = "10.77.0.2:8080";
pub const SOON: Duration = Duration::from_secs(60);
pub const ECONNABORTED: i64 = 103;
/// Retries are told, and none is refused. The window is longer than a test takes.
pub const COUNTS: &str = "[defaults]\nbreaker = \"off\"\n\
     [defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\nwindow = \"5m\"\n";
pub const REFUSES: &str = "[defaults]\nbreaker = \"off\"\n\
     [defaults.retry]\nlimit = \"off\"\nbudget = \"off\"\nwindow = \"5m\"\n\
     refuse_non_idempotent = true\n";

/// What the program can do: `ask` makes a call on a connection of its own, `kept` one on a connection that
/// it keeps as long as it lasts. Both return the first line of the answer, or an errno. Who pauses far longer
/// before one retry than before another does not retry: a pause that no busy machine makes 16 times longer.
const PROGRAM: &str = "
TO = ('10.77.0.2', 8080)

def first_line(s):
    got = b''
    while b'\\r\\n\\r\\n' not in got:
        more = s.recv(4096)
        if not more:
            break
        got += more
    return got.split(b'\\r\\n')[0].decode()

def request(line, *headers, body=''):
    size = [f'Content-Length: {len(body)}'] if body else []
    return '\\r\\n'.join([line + ' HTTP/1.1', 'Host: test', *headers, *size, '', body]).encode()

def ask(*words, times=1, **more):
    time.sleep(0.1)
    s = socket.socket()
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        s.connect(TO)
        for _ in range(times):
            s.sendall(request(*words, **more))
        return first_line(s)
    except OSError as error:
        return error.errno
    finally:
        s.close()

def connected():
    s = socket.create_connection(TO)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s

# The head, and the body in so many packets.
def apart(*words, body, packets=1):
    s = connected()
    try:
        whole = request(*words, body=body)
        head = whole[:len(whole) - len(body)]
        size = -(-len(body) // packets)
        for piece in [head] + [body[at:at + size].encode() for at in range(0, len(body), size)]:
            s.sendall(piece)
        return first_line(s)
    except OSError as error:
        return error.errno
    finally:
        s.close()

held = None
def kept(*words, **more):
    global held
    if held is None:
        held = socket.create_connection(TO)
    try:
        held.sendall(request(*words, **more))
        line = first_line(held)
        if not line:
            held.close()
            held = None
        return line
    except OSError as error:
        held.close()
        held = None
        return error.errno
";

/// First lines and bodies of the requests that have reached a server, all of each, with a space between.
pub type Asked = Arc<Mutex<Vec<String>>>;

/// A server that hangs up on every request whose target begins with `/bad`, says 503 to those that begin with
/// `/ill`, and hangs up on the fifth and the sixth that begins with `/twice`.
pub struct Scene {
    pub agent: Agent,
    pub program: Interpreter,
    pub asked: Asked,
    _server: Server,
    pub net: TestNet,
    group: TestCgroup,
}

impl Scene {
    pub fn new(config: &str) -> Self {
        let net = TestNet::new();
        let group = TestCgroup::new("idempotent");
        let agent = Agent::start(&group, config);
        let asked = Asked::default();
        let heard = Arc::clone(&asked);
        let server = Server::with(&net.server, TO, move |stream| serve(stream, &heard));
        let mut program = Interpreter::start(&group, &net.client);
        program.run(PROGRAM);
        Self {
            agent,
            program,
            asked,
            _server: server,
            net,
            group,
        }
    }

    pub fn do_(&mut self, call: &str) -> Value {
        self.program.value(call)
    }

    /// The control group of its program.
    pub fn group(&self) -> &TestCgroup {
        &self.group
    }

    /// Requests of which all has reached the server, and which begin so.
    pub fn reached(&self, begin: &str) -> usize {
        let asked = self.asked.lock().expect("a list");
        asked.iter().filter(|line| line.starts_with(begin)).count()
    }

    pub fn row(&self) -> Value {
        (self.agent).wait_row(DESTINATION, "quiet", |row| row["in_flight"] == 0)
    }

    /// The events of repeated requests, once there are so many.
    pub fn events(&self, least: usize) -> Vec<Value> {
        wait::until("events", SOON, || {
            let all = self.agent.command(&["events", "--json"]).good();
            let all: Vec<Value> = (all.lines())
                .map(|line| serde_json::from_str(line).expect("JSON"))
                .filter(|event: &Value| event["kind"] == "non_idempotent")
                .collect();
            (all.len() >= least).then_some(all)
        })
    }
}

/// Answers the requests of a connection.
pub fn serve(mut stream: TcpStream, heard: &Mutex<Vec<String>>) {
    while let Some(head) = read_head(&mut stream) {
        let Some(body) = read_body(&mut stream, &head) else {
            return;
        };
        let line = head.lines().next().unwrap_or_default().to_owned();
        let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let number = {
            let mut heard = heard.lock().expect("a list");
            heard.push(format!("{line} {body}"));
            heard.iter().filter(|line| line.contains(" /twice")).count()
        };
        if target.starts_with("/bad") || (target.starts_with("/twice") && (5..7).contains(&number))
        {
            return;
        }
        let status = if target.starts_with("/ill") {
            "503 No"
        } else {
            "200 OK"
        };
        let answer = format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        if stream.write_all(answer.as_bytes()).is_err() {
            return;
        }
    }
}

/// The body of a request, in chunks or not; `None` if not all of it comes.
fn read_body(stream: &mut TcpStream, head: &str) -> Option<String> {
    let lower = head.to_lowercase();
    let value = |name: &str| lower.lines().find_map(|line| line.strip_prefix(name));
    if value("expect: ").is_some() {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").ok()?;
    }
    let mut bytes = Vec::new();
    if value("transfer-encoding: ").is_some() {
        loop {
            let line = read_line(stream)?;
            let length = usize::from_str_radix(&line, 16).expect("the size of a chunk");
            let mut chunk = vec![0; length];
            stream.read_exact(&mut chunk).ok()?;
            bytes.extend(chunk);
            read_line(stream)?;
            if length == 0 {
                break;
            }
        }
    } else {
        let length =
            value("content-length: ").map_or(0, |length| length.parse().expect("a length"));
        bytes.resize(length, 0);
        stream.read_exact(&mut bytes).ok()?;
    }
    Some(String::from_utf8(bytes).expect("text"))
}

fn read_line(stream: &mut TcpStream) -> Option<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    while !line.ends_with(b"\r\n") {
        stream.read_exact(&mut byte).ok()?;
        line.push(byte[0]);
    }
    line.truncate(line.len() - 2);
    String::from_utf8(line).ok()
}
