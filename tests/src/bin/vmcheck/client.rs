//! The clients, which run in the watched control group as processes of their own, and the server.

use std::{
    fs,
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    os::unix::process::CommandExt as _,
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::Instant,
};

use anyhow::{Context as _, Result, bail, ensure};

/// The client: connects once and prints errno and milliseconds.
pub fn connect(address: &str) -> Result<()> {
    let address: SocketAddr = address.parse().context("parse the address")?;
    let begin = Instant::now();
    let errno = match TcpStream::connect(address) {
        Ok(_) => 0,
        Err(error) => error.raw_os_error().unwrap_or(-1),
    };
    println!("{errno} {}", begin.elapsed().as_millis());
    Ok(())
}

/// A client with one connection: sends each line of its input, and says what came back.
pub fn talk(address: &str) -> Result<()> {
    let mut stream = TcpStream::connect(address).context("connect")?;
    println!("connected");
    for line in std::io::stdin().lines() {
        for request in line.context("read the input")?.split(' ') {
            // One write: one segment.
            let text = format!("{request} / HTTP/1.1\r\n\r\n");
            stream.write_all(text.as_bytes()).context("send")?;
            let mut answer = [0; 64];
            let count = stream.read(&mut answer).unwrap_or(0);
            println!("{count}");
        }
    }
    Ok(())
}

/// A client that receives until a receive ends with EAGAIN, and says which limits it is told to have.
pub fn receive(address: &str) -> Result<()> {
    let mut stream = TcpStream::connect(address).context("connect")?;
    loop {
        match stream.read(&mut [0]) {
            Ok(1..) => {}
            Ok(0) => bail!("the server has closed"),
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => break,
            Err(error) => return Err(error).context("receive"),
        }
    }
    let (read, write) = (stream.read_timeout()?, stream.write_timeout()?);
    println!(
        "{} {}",
        i32::from(read.is_some()),
        i32::from(write.is_some())
    );
    Ok(())
}

/// A client that asks, and reads until that fails: errno, and how long nothing had come by then.
pub fn fetch(address: &str) -> Result<()> {
    let mut stream = TcpStream::connect(address).context("connect")?;
    stream
        .write_all(b"GET / HTTP/1.1\r\n\r\n")
        .context("send")?;
    let mut last = Instant::now();
    let errno = loop {
        match stream.read(&mut [0; 64]) {
            Ok(0) => break 0,
            Ok(_) => last = Instant::now(),
            Err(error) => break error.raw_os_error().unwrap_or(-1),
        }
    };
    println!("{errno} {}", last.elapsed().as_millis());
    Ok(())
}

/// Answers GET, leaves PUT without an answer, and closes at anything else.
pub fn serve(mut stream: TcpStream) {
    let mut request = [0; 64];
    while let Ok(count) = stream.read(&mut request) {
        match &request[..count.min(3)] {
            b"GET" => {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
            }
            b"PUT" => {}
            _ => return,
        }
    }
}

/// A `talk` that runs in the watched control group.
pub struct Talker {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Talker {
    pub fn start(cgroup: &Path, address: SocketAddr) -> Result<Self> {
        let procs = cgroup.join("cgroup.procs");
        let mut command = Command::new("/proc/self/exe");
        command.args(["talk", &address.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: the child only writes a file before it runs the program.
        unsafe { command.pre_exec(move || fs::write(&procs, std::process::id().to_string())) };
        let mut child = command.spawn().context("run the client")?;
        let input = child.stdin.take().context("write to the client")?;
        let output = child.stdout.take().context("read from the client")?;
        let mut talker = Self {
            child,
            input,
            output: BufReader::new(output),
        };
        ensure!(talker.line()? == "connected", "the client did not connect");
        Ok(talker)
    }

    pub fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.output
            .read_line(&mut line)
            .context("hear the client")?;
        Ok(line.trim().to_owned())
    }

    pub fn say(&mut self, requests: &str) -> Result<()> {
        writeln!(self.input, "{requests}").context("tell the client")
    }
}

impl Drop for Talker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
