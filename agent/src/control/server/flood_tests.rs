//! Clients that ask for much and read nothing, or hold connections and ask nothing.

use std::{net::SocketAddr, os::fd::AsFd, path::Path};

use rustix::io::Errno;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{
    fake::Fake,
    tests::{Served, serve_fake},
    *,
};
use crate::control::client::Client;

/// More than the buffers of a socket hold, on either side.
const LARGE: usize = 16 << 20;

/// A served TCP listener; everything ends when it is dropped.
struct Http {
    address: SocketAddr,
    _tasks: JoinSet<()>,
}

async fn serve_tcp(backend: &Arc<Fake>, limits: Limits) -> Http {
    let listener = bind_http("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(serve_http(
        listener,
        Arc::clone(backend) as Arc<dyn Backend>,
        limits,
    ));
    Http {
        address,
        _tasks: tasks,
    }
}

impl Http {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// A connection that has asked and read nothing yet.
    async fn ask(&self, path: &str) -> TcpStream {
        let mut stream = self.connect().await;
        ask(&mut stream, path).await;
        stream
    }

    /// The whole answer.
    async fn get(&self, path: &str) -> String {
        rest(self.ask(path).await).await
    }
}

async fn ask(stream: &mut (impl AsyncWrite + Unpin), path: &str) {
    let request = format!("GET {path} HTTP/1.1\r\nHost: b\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
}

/// `200` or `503`, once the server has said so; the rest is not read.
async fn code(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = [0; 12];
    stream.read_exact(&mut head).await.unwrap();
    String::from_utf8_lossy(&head[9..]).into_owned()
}

async fn rest(mut stream: impl AsyncRead + Unpin) -> String {
    let mut answer = Vec::new();
    // Cut off: what came before is in `answer`.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

fn asked(backend: &Fake, what: &str) -> usize {
    let asked = backend.asked();
    asked.iter().filter(|entry| entry.starts_with(what)).count()
}

#[tokio::test]
async fn unread_pages_are_one_page_and_few_are_sent() {
    let limits = Limits {
        stall: Duration::from_secs(3600),
        turn: Duration::from_millis(50),
        page: Duration::from_secs(3600),
        page_bytes: 0,
        ..Limits::default()
    };
    let backend = Fake::new();
    *backend.page.lock().unwrap() = "x".repeat(LARGE);
    let http = serve_tcp(&backend, limits).await;
    let mut unread = Vec::new();
    for _ in 0..32 {
        unread.push(http.ask("/metrics").await);
    }
    let mut codes = Vec::new();
    for stream in &mut unread {
        codes.push(code(stream).await);
    }
    let sent = codes.iter().filter(|code| *code == "200").count();
    assert_eq!(sent, limits.pages, "{codes:?}");
    let refused = codes.iter().position(|code| code == "503").unwrap();
    let told = rest(unread.swap_remove(refused)).await;
    assert!(
        told.contains("pages of metrics are being sent already"),
        "{told}"
    );
    // Those that go make room for another.
    drop(unread);
    page_comes(&http).await;
    assert_eq!(asked(&backend, "metrics"), 1);
}

async fn page_comes(http: &Http) {
    loop {
        let answer = http.get("/metrics").await;
        if answer.starts_with("HTTP/1.1 200 ") {
            assert!(answer.len() > LARGE);
            return;
        }
    }
}

#[tokio::test]
async fn who_does_not_read_its_page_is_cut_off() {
    let limits = Limits {
        stall: Duration::from_millis(100),
        pages: 1,
        page_bytes: 0,
        ..Limits::default()
    };
    let backend = Fake::new();
    *backend.page.lock().unwrap() = "x".repeat(LARGE);
    let http = serve_tcp(&backend, limits).await;
    let mut unread = http.ask("/metrics").await;
    assert_eq!(code(&mut unread).await, "200");
    page_comes(&http).await;
    assert!(rest(unread).await.len() < LARGE);
}

#[tokio::test]
async fn who_asks_for_a_page_in_the_making_gets_the_same() {
    let backend = Fake::new();
    backend.go.forget_permits(Semaphore::MAX_PERMITS);
    let http = serve_tcp(
        &backend,
        Limits {
            page_bytes: 0,
            ..Limits::default()
        },
    )
    .await;
    let (one, two) = (http.ask("/metrics").await, http.ask("/metrics").await);
    // This one begins the page, perhaps, and does not wait for it.
    let gone = http.ask("/metrics").await;
    while asked(&backend, "metrics") == 0 {
        tokio::task::yield_now().await;
    }
    drop(gone);
    backend.go.add_permits(1);
    for stream in [one, two] {
        assert!(rest(stream).await.ends_with("# HELP x y\n"));
    }
    assert_eq!(asked(&backend, "metrics"), 1);
}

#[tokio::test]
async fn a_page_is_made_again_when_it_is_old() {
    let backend = Fake::new();
    let limits = Limits {
        page: Duration::ZERO,
        page_bytes: 0,
        ..Limits::default()
    };
    let http = serve_tcp(&backend, limits).await;
    http.get("/metrics").await;
    *backend.page.lock().unwrap() = "# new\n".to_owned();
    assert!(http.get("/metrics").await.ends_with("# new\n"));
}

#[tokio::test]
async fn a_page_is_let_go_of_when_it_is_old() {
    let page = large::Page::new(&Limits {
        page: Duration::from_millis(1),
        page_bytes: 0,
        ..Limits::default()
    });
    page.get(async { Ok("x".to_owned()) }).await.unwrap();
    while page.kept.lock().await.is_some() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

async fn ask_status(served: &Served) -> UnixStream {
    let mut stream = UnixStream::connect(&served.path).await.unwrap();
    ask(&mut stream, "/v1/destinations").await;
    stream
}

#[tokio::test]
async fn unread_answers_to_status_are_few() {
    let limits = Limits {
        stall: Duration::from_secs(3600),
        turn: Duration::from_millis(50),
        page_bytes: 0,
        ..Limits::default()
    };
    let backend = Fake::new();
    backend
        .rows
        .store(2_000, std::sync::atomic::Ordering::Relaxed);
    let served = serve_fake(&backend, limits);
    let mut unread = [ask_status(&served).await, ask_status(&served).await];
    for stream in &mut unread {
        assert_eq!(code(stream).await, "200");
    }
    let told = rest(ask_status(&served).await).await;
    assert!(told.starts_with("HTTP/1.1 503 "), "{told}");
    assert!(told.contains("busy: 2 answers to status"), "{told}");
    // Everything else is answered all the time, and one that goes makes room for another.
    served.client.get("/v1/config").await.unwrap();
    drop(unread);
    while served.client.get("/v1/destinations").await.is_err() {}
}

#[tokio::test]
async fn more_who_ask_for_the_status_wait_their_turn() {
    let backend = Fake::new();
    backend.go.forget_permits(Semaphore::MAX_PERMITS);
    let limits = Limits {
        turn: Duration::from_secs(60),
        page_bytes: 0,
        ..Limits::default()
    };
    let served = serve_fake(&backend, limits);
    let mut asking = JoinSet::new();
    for _ in 0..10 {
        let client = served.client.clone();
        asking.spawn(async move { client.get("/v1/destinations").await });
    }
    for done in 0..10 {
        while asked(&backend, "status") <= done {
            tokio::task::yield_now().await;
        }
        // One at a time is collected.
        assert_eq!(asked(&backend, "status"), done + 1);
        backend.go.add_permits(1);
        asking.join_next().await.unwrap().unwrap().unwrap();
    }
}

#[tokio::test]
async fn idle_connections_starve_no_probe() {
    starve(Limits::default()).await;
}

/// Here each that is opened again cuts another one off, which is then opened again.
#[tokio::test]
async fn nor_do_more_than_may_wait() {
    starve(Limits {
        http_waiting: 64,
        page_bytes: 0,
        ..Limits::default()
    })
    .await;
}

async fn starve(limits: Limits) {
    let backend = Fake::new();
    let http = Arc::new(serve_tcp(&backend, limits).await);
    let mut idle = Vec::new();
    for _ in 0..70 {
        idle.push(http.connect().await);
    }
    // Opened again whenever the server closes them.
    let mut holders = JoinSet::new();
    for mut stream in idle {
        let http = Arc::clone(&http);
        holders.spawn(async move {
            loop {
                let _ = stream.read(&mut [0; 64]).await;
                stream = http.connect().await;
            }
        });
    }
    for round in 0..100 {
        let path = ["/healthz", "/readyz"][round % 2];
        let answer = http.get(path).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{round}: {answer:?}");
    }
}

#[tokio::test]
async fn the_oldest_that_asks_nothing_makes_room_and_those_that_ask_stay() {
    let limits = Limits {
        connections: 1,
        http_waiting: 2,
        http_head: Duration::from_secs(3600),
        page_bytes: 0,
        ..Limits::default()
    };
    let backend = Fake::new();
    backend.go.forget_permits(Semaphore::MAX_PERMITS);
    let http = serve_tcp(&backend, limits).await;
    let scrape = http.ask("/metrics").await;
    while asked(&backend, "metrics") == 0 {
        tokio::task::yield_now().await;
    }
    let mut idle = Vec::new();
    for _ in 0..3 {
        idle.push(http.connect().await);
    }
    assert_eq!(rest(idle.remove(0)).await, "");
    // The only place is taken by the scrape: another is told, a probe does not need one.
    let told = http.get("/metrics").await;
    assert!(
        told.starts_with("HTTP/1.1 503 ") && told.contains("too many connections"),
        "{told}"
    );
    assert!(http.get("/healthz").await.starts_with("HTTP/1.1 200 "));
    backend.go.add_permits(1);
    assert!(rest(scrape).await.ends_with("# HELP x y\n"));
    // And the place is free again.
    while !http.get("/metrics").await.starts_with("HTTP/1.1 200 ") {}
}

#[tokio::test]
async fn who_asks_nothing_is_cut_off() {
    let limits = Limits {
        http_head: Duration::from_millis(20),
        page_bytes: 0,
        ..Limits::default()
    };
    let http = serve_tcp(&Fake::new(), limits).await;
    let silent = http.connect().await;
    assert!(!rest(silent).await.contains("200 OK"));
}

/// A listener that accepts nothing, with a full backlog: a stopped process, as others see it.
fn stopped(path: &Path) -> Vec<std::os::fd::OwnedFd> {
    use rustix::net::*;
    let socket = || {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
    };
    let address = SocketAddrUnix::new(path).unwrap();
    let listener = socket();
    bind(&listener, &address).unwrap();
    listen(&listener, 0).unwrap();
    let mut all = vec![listener];
    loop {
        let client = socket();
        let connected = connect(client.as_fd(), &address);
        all.push(client);
        match connected {
            Ok(()) => {}
            Err(Errno::AGAIN) => return all,
            Err(error) => panic!("{error}"),
        }
    }
}

#[tokio::test]
async fn beside_a_stopped_agent_nobody_hangs() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("b.sock");
    let _stopped = stopped(&path);
    let (other, bound) = (path.clone(), path.clone());
    let runtime = tokio::runtime::Handle::current();
    let refused = tokio::task::spawn_blocking(move || {
        let _entered = runtime.enter();
        bind_control(&bound, false).map(|_| ())
    });
    let refused = tokio::time::timeout(Duration::from_secs(30), refused).await;
    assert!(matches!(refused, Ok(Ok(Err(BindError::InUse { .. })))));
    let error = Client::new(&other).get("/v1/config").await.unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert_eq!(
        error.to_string(),
        format!(
            "the agent on {} is there but does not answer (is it stopped or overloaded?)",
            path.display()
        )
    );
}

#[tokio::test]
async fn an_agent_that_accepts_and_says_nothing_is_told_apart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("b.sock");
    let _listener = UnixListener::bind(&path).unwrap();
    let client = Client::new(&path).with_patience(Duration::from_millis(20));
    let error = client.get("/v1/config").await.unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert!(
        error.to_string().contains("is there but does not answer"),
        "{error}"
    );
}

#[tokio::test]
async fn second_names_of_dead_agents_are_removed() {
    let directory = tempfile::tempdir().unwrap();
    let mut ended = std::process::Command::new("true").spawn().unwrap();
    let dead = ended.id();
    ended.wait().unwrap();
    let name = |rest: String| directory.path().join(format!(".b{rest}"));
    let socket = |path: &Path| drop(std::os::unix::net::UnixListener::bind(path).unwrap());
    let stale = name(dead.to_string());
    socket(&stale);
    // Of a process that lives, no socket, and no such name: not ours to remove.
    let kept = [
        name(std::os::unix::process::parent_id().to_string()),
        name("x1".to_owned()),
        name("-1".to_owned()),
    ];
    kept.iter().for_each(|path| socket(path));
    let file = name(format!("0{dead}"));
    std::fs::write(&file, "precious").unwrap();
    let _bound = bind_control(&directory.path().join("b.sock"), false).unwrap();
    assert!(!stale.exists());
    assert!(kept.iter().chain([&file]).all(|path| path.exists()));
}

/// The cause is in the sentence, and so must not be in the chain, which is printed behind it.
#[tokio::test]
async fn a_bind_error_says_its_cause_once() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    let taken = bind_http("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let tcp = bind_http(taken.local_addr().unwrap()).await.unwrap_err();
    let unix = bind_control(&file.join("b.sock"), false).unwrap_err();
    for (error, cause) in [(tcp, "in use"), (unix, "os error")] {
        let printed = format!("{:#}", anyhow::Error::from(error));
        assert_eq!(printed.matches(cause).count(), 1, "{printed}");
    }
}
