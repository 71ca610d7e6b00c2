//! The real programs that the tests protect, each asking a server for `/` once.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Mutex,
};

use crate::{
    process::{Finished, Program, find, python},
    unique,
};

/// A program that asks an HTTP server once.
#[derive(Clone, Copy)]
pub struct Client {
    /// What it is called in messages.
    pub name: &'static str,
    /// Programs that must be installed for it.
    pub needs: &'static [&'static str],
    /// The command line.
    pub command: fn(SocketAddr) -> Program,
    /// What its failure says, without what differs from run to run.
    pub message: fn(&Finished) -> String,
    /// Whether the server answered.
    pub succeeded: fn(&Finished) -> bool,
}

impl Client {
    /// The command line for one request.
    pub fn command(&self, to: SocketAddr) -> Program {
        (self.command)(to)
    }

    /// What it says and how it ends, without what differs from run to run.
    pub fn outcome(&self, finished: &Finished) -> (i32, String) {
        (finished.code(), (self.message)(finished))
    }

    /// Whether the server answered.
    pub fn succeeded(&self, finished: &Finished) -> bool {
        (self.succeeded)(finished)
    }
}

fn plain(finished: &Finished) -> String {
    format!("{}{}", finished.stdout, finished.stderr)
}

fn exit_code(finished: &Finished) -> bool {
    finished.status.success()
}

/// Where the source of a client is.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("clients")
        .join(name)
}

fn words(to: SocketAddr) -> [String; 2] {
    [to.ip().to_string(), to.port().to_string()]
}

/// curl.
pub const CURL: Client = Client {
    name: "curl",
    needs: &["curl"],
    command: |to| Program::new("curl").args(["-q", "-sS", &format!("http://{to}/")]),
    // "after 0 ms"
    message: |finished| replace_digits_before(&plain(finished), " ms"),
    succeeded: exit_code,
};

/// GNU wget.
pub const WGET: Client = Client {
    name: "wget",
    needs: &["wget"],
    command: |to| {
        let options = [
            "--no-config",
            "--no-verbose",
            "--tries=1",
            "--output-document=-",
        ];
        Program::new("wget")
            .args(options)
            .arg(format!("http://{to}/"))
    },
    message: plain,
    succeeded: exit_code,
};

/// Python, blocking sockets.
pub const PYTHON_BLOCKING: Client = Client {
    name: "Python, blocking",
    needs: &["python3"],
    command: |to| {
        Program::new(python())
            .arg(source("blocking.py"))
            .args(words(to))
    },
    message: plain,
    succeeded: exit_code,
};

/// Python, asyncio.
pub const PYTHON_ASYNCIO: Client = Client {
    name: "Python, asyncio",
    needs: &["python3"],
    command: |to| {
        Program::new(python())
            .arg(source("streams.py"))
            .args(words(to))
    },
    // Up to "[Errno 111]": the words after it depend on whether connect() itself fails, or the
    // socket later. Over a network a non-blocking connect is refused later, by Backstop at once.
    message: |finished| {
        let said = plain(finished);
        said.split_inclusive(']')
            .next()
            .unwrap_or_default()
            .to_owned()
    },
    succeeded: exit_code,
};

/// Python, urllib3.
pub const PYTHON_URLLIB3: Client = Client {
    name: "Python, urllib3",
    needs: &["python3"],
    command: |to| {
        Program::new(python())
            .arg(source("pool.py"))
            .args(words(to))
    },
    message: plain,
    succeeded: exit_code,
};

/// Java's HttpClient, whose sockets are IPv6 and reach IPv4 by mapped addresses.
pub const JAVA: Client = Client {
    name: "Java",
    needs: &["java", "javac"],
    command: |to| java("Ask").args(words(to)),
    // The exception's class: its text depends on the same as that of asyncio.
    message: |finished| {
        let said = plain(finished);
        said.split([':', '\n'])
            .next()
            .unwrap_or_default()
            .to_owned()
    },
    succeeded: exit_code,
};

/// Node.
pub const NODE: Client = Client {
    name: "Node",
    needs: &["node"],
    command: |to| Program::new("node").arg(source("ask.js")).args(words(to)),
    message: plain,
    succeeded: exit_code,
};

/// hey, a Go program. It ends well whatever happens: its report says what did.
pub const HEY: Client = Client {
    name: "hey",
    needs: &["hey"],
    command: |to| Program::new("hey").args(["-n", "1", "-c", "1", &format!("http://{to}/")]),
    message: |finished| {
        let said = plain(finished);
        said.lines()
            .filter(|line| line.contains("dial tcp"))
            .collect::<Vec<_>>()
            .join("\n")
    },
    succeeded: |finished| finished.stdout.contains("[200]"),
};

/// Whether the Python of the tests has urllib3.
pub fn has_urllib3() -> bool {
    find("python3").is_some()
        && Program::new(python())
            .args(["-c", "import urllib3"])
            .run()
            .status
            .success()
}

/// "after 12 ms" becomes "after # ms".
fn replace_digits_before(text: &str, unit: &str) -> String {
    let mut parts = text.split(unit).peekable();
    let mut result = String::new();
    while let Some(part) = parts.next() {
        if parts.peek().is_some() {
            result += part.trim_end_matches(|c: char| c.is_ascii_digit());
            result += "#";
            result += unit;
        } else {
            result += part;
        }
    }
    result
}

/// A Java client, by its class.
pub fn java(class: &str) -> Program {
    Program::new("java")
        .args(["-XX:TieredStopAtLevel=1", "-Xshare:auto", "-cp"])
        .arg(java_classes(class))
        .arg(class)
}

/// Where cargo has put this program, a test or one of the binaries, and what is built beside it:
/// target/PROFILE.
pub fn profile() -> PathBuf {
    let own = std::env::current_exe().expect("the path of this program");
    let directory = own.parent().expect("a directory");
    let is_test = directory.ends_with("deps");
    let above = if is_test { directory.parent() } else { None };
    above.unwrap_or(directory).to_owned()
}

/// Compiles a Java client once; the classes stay in the target directory.
fn java_classes(name: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let profile = profile();
    let target = profile.parent().expect("target/PROFILE");
    let classes = target.join("test-clients");
    let _guard = ONE_AT_A_TIME
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let modified = |path: &Path| fs::metadata(path).and_then(|meta| meta.modified()).ok();
    let class = classes.join(name).with_extension("class");
    let text = source(name).with_extension("java");
    if modified(&class) < modified(&text) {
        // Other tests may do the same at this moment: what is there is always whole.
        let new = target.join(unique("classes"));
        let javac = Program::new("javac").arg("-d").arg(&new).arg(&text);
        javac.run().good();
        fs::create_dir_all(&classes).expect("make a directory");
        let made = new.join(name).with_extension("class");
        fs::rename(made, class).expect("move the class");
        fs::remove_dir(&new).expect("remove an empty directory");
    }
    classes
}
