//! The server in this process, over sockets in a temporary directory.

use std::{os::unix::fs::PermissionsExt, path::PathBuf};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{
    fake::{Fake, failure, started},
    *,
};
use crate::control::{
    api::{Event, EventRecord, Explanation, StatusEnvelope},
    client::{Client, ClientError, encode},
};

/// A served socket; everything ends when it is dropped.
pub(crate) struct Served {
    pub(super) path: PathBuf,
    pub(crate) client: Client,
    _tasks: JoinSet<()>,
    _socket: ControlSocket,
    _directory: tempfile::TempDir,
}

pub(crate) fn serve_fake(backend: &Arc<Fake>, limits: Limits) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("b.sock");
    let (listener, socket) = bind_control(&path, false).unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(serve_control(
        listener,
        Arc::clone(backend) as Arc<dyn Backend>,
        limits,
    ));
    Served {
        client: Client::new(&path),
        path,
        _tasks: tasks,
        _socket: socket,
        _directory: directory,
    }
}

/// Sends bytes as they are and reads the answer to its end.
async fn raw(served: &Served, request: &str) -> String {
    let mut stream = UnixStream::connect(&served.path).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    // A server that closes with bytes unread resets; what it said before is in `answer`.
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8(answer).unwrap()
}

fn status_of(error: &ClientError) -> u16 {
    match error {
        ClientError::Refused { status, .. } => *status,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn status_is_sorted_json() {
    let backend = Fake::new();
    let served = serve_fake(&backend, Limits::default());
    let body = served.client.get("/v1/destinations").await.unwrap();
    let envelope: StatusEnvelope = serde_json::from_slice(&body).unwrap();
    assert_eq!(envelope.destinations[0].destination, "10.0.0.9:80");
    let body = served
        .client
        .get("/v1/destinations/10.0.0.5:5432")
        .await
        .unwrap();
    let envelope: StatusEnvelope = serde_json::from_slice(&body).unwrap();
    assert_eq!(envelope.destinations.len(), 1);
    let body = served
        .client
        .get("/v1/destinations/10.9.9.9:1")
        .await
        .unwrap();
    assert!(body.starts_with(b"{\"version\"") && body.ends_with(b"\"destinations\":[]}\n"));
}

#[tokio::test]
async fn destinations_are_percent_decoded_and_brackets_allowed() {
    let backend = Fake::new();
    let served = serve_fake(&backend, Limits::default());
    for destination in [
        "[2001:db8::1]:443",
        "[fe80::1%3]:80",
        "[2001:db8::]/32:443",
        "db.internal:5432",
    ] {
        let target = format!(
            "/v1/destinations/{}/trip?workload=a%2Fb&for=90s",
            encode(destination)
        );
        let body = served.client.post(&target).await.unwrap();
        assert_eq!(
            body,
            "{\"rows\":2,\"taken_back\":0,\"closed_already\":0,\"left\":[]}"
        );
        let asked = backend.asked().pop().unwrap();
        assert_eq!(asked, format!("{destination} Some(\"a/b\") Trip(90s)"));
    }
    for written in ["[2001:db8::1]:443", "%5B2001%3Adb8%3A%3A1%5D%3A443"] {
        let request = format!("GET /v1/destinations/{written} HTTP/1.1\r\nHost: b\r\n\r\n");
        let answer = raw(&served, &request).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        assert_eq!(
            backend.asked().pop().unwrap(),
            "status Some(\"[2001:db8::1]:443\")"
        );
    }
}

#[tokio::test]
async fn manual_actions() {
    let backend = Fake::new();
    let served = serve_fake(&backend, Limits::default());
    for (target, asked) in [
        ("/v1/destinations/a:1/trip", "a:1 None Trip(600s)"),
        (
            "/v1/destinations/a:1/hold-closed?for=1h",
            "a:1 None HoldClosed(3600s)",
        ),
        (
            "/v1/destinations/a:1/reset?workload=%2F",
            "a:1 Some(\"/\") Reset",
        ),
        ("/v1/pause?for=15m", "pause Some(900s)"),
        ("/v1/pause", "pause None"),
        ("/v1/resume", "resume"),
    ] {
        served.client.post(target).await.unwrap();
        assert_eq!(backend.asked().pop().unwrap(), asked);
    }
    let refused = served
        .client
        .post("/v1/destinations/10.0.0.53:53/trip")
        .await
        .unwrap_err();
    assert_eq!((status_of(&refused), refused.exit_code()), (409, 1));
    let refused = served.client.post("/v1/reload").await.unwrap_err();
    assert_eq!((status_of(&refused), refused.exit_code()), (400, 2));
    assert_eq!(refused.to_string(), "backstop.toml:3: no");
}

#[tokio::test]
async fn explain_takes_a_workload_or_a_process() {
    let backend = Fake::new();
    let served = serve_fake(&backend, Limits::default());
    for (query, asked) in [
        ("", "Any"),
        ("&workload=a%2Fb", "Workload(\"a/b\")"),
        ("&pid=7", "Process(7)"),
    ] {
        let target = format!("/v1/explain?destination={}{query}", encode("[::1]:80"));
        let body = served.client.get(&target).await.unwrap();
        let explanation: Explanation = serde_json::from_slice(&body).unwrap();
        assert_eq!(explanation.destination, "[::1]:80");
        let last = backend.asked().pop().unwrap();
        assert_eq!(last, format!("explain [::1]:80 {asked}"));
    }
}

#[tokio::test]
async fn what_is_wrong_is_said_as_json() {
    let backend = Fake::new();
    let served = serve_fake(&backend, Limits::default());
    for (request, status) in [
        ("GET /v1/destinations/nonsense", 400),
        ("GET /v1/destinations/%FF", 400),
        ("GET /v1/destinations/a%0Ab", 400),
        ("GET /v1/destinations?x=1", 400),
        ("GET /v1/events?follow=perhaps", 400),
        ("POST /v1/destinations/a:1/trip?for=soon", 400),
        ("POST /v1/destinations/a:1/trip?for=0s", 400),
        ("POST /v1/destinations/a:1/trip?for=", 400),
        ("POST /v1/destinations/a:1/trip?fro=1s", 400),
        ("POST /v1/destinations/a:1/reset?for=1s", 400),
        ("POST /v1/destinations/a:1/trip?workload=", 400),
        ("POST /v1/destinations/a:1/trip?workload=%2Fa", 400),
        ("POST /v1/destinations/a:1/trip?workload=a%2F", 400),
        ("POST /v1/destinations/a:1/hold-closed?workload=a/../b", 400),
        ("POST /v1/destinations/a:1/reset?workload=a%00", 400),
        ("POST /v1/destinations/a:1/trip?workload=%FF", 400),
        ("POST /v1/pause?for=-1s", 400),
        ("GET /v1/explain", 400),
        ("GET /v1/explain?destination=", 400),
        ("GET /v1/explain?destination=nonsense", 400),
        ("GET /v1/explain?destination=a:1&x=1", 400),
        ("GET /v1/explain?destination=a:1&destination=b:1", 400),
        ("GET /v1/explain?destination=a:1&pid=0", 400),
        ("GET /v1/explain?destination=a:1&pid=-1", 400),
        ("GET /v1/explain?destination=a:1&pid=99999999999", 400),
        ("GET /v1/explain?destination=a:1&pid=1&workload=a", 400),
        ("GET /v1/explain?destination=a:1&workload=", 400),
        ("GET /v1/explain?destination=a:1&workload=%2Fa", 400),
        ("GET /v1/explain?destination=a:1&workload=a/../b", 400),
        ("GET /v1/explain?destination=a:1&workload=%FF", 400),
        ("GET /v1/explain?destination=a:1&pid=4000000", 404),
        ("POST /v1/explain?destination=a:1", 405),
        ("GET /v1/audit", 404),
        ("GET /v1/doctor?x=1", 400),
        ("POST /v1/doctor", 405),
        ("GET /v1/destinations/a:1/trip/x", 404),
        ("GET /metrics", 404),
        ("GET /", 404),
        ("GET /v1/destinations/a:1/trip", 405),
        ("DELETE /v1/destinations", 405),
        ("POST /v1/events", 405),
    ] {
        let answer = raw(&served, &format!("{request} HTTP/1.1\r\nHost: b\r\n\r\n")).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{request}: {answer}"
        );
        let body = answer.split_once("\r\n\r\n").unwrap().1;
        let body: serde_json::Value = serde_json::from_str(body).unwrap();
        assert!(!body["error"].as_str().unwrap().is_empty(), "{request}");
    }
    let changed: Vec<_> = backend
        .asked()
        .iter()
        .filter(|a| !a.starts_with("status") && !a.starts_with("explain"))
        .cloned()
        .collect();
    assert_eq!(changed, Vec::<String>::new());
}

#[tokio::test]
async fn oversized_requests_are_refused_before_they_are_read() {
    let served = serve_fake(&Fake::new(), Limits::default());
    let body = "POST /v1/resume HTTP/1.1\r\nHost: b\r\nContent-Length: 5000\r\n\r\n";
    let answer = raw(&served, body).await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
    let head = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(40_000));
    let answer = raw(&served, &head).await;
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
}

#[tokio::test]
async fn a_client_that_sends_no_request_is_cut_off() {
    let limits = Limits {
        head: Duration::from_millis(50),
        ..Limits::default()
    };
    let served = serve_fake(&Fake::new(), limits);
    let answer = raw(&served, "GET /v1/destinations HTTP/1.1\r\nHost:").await;
    assert!(!answer.contains("200 OK"), "{answer}");
}

#[tokio::test]
async fn a_daemon_that_does_not_answer_is_said() {
    let limits = Limits {
        answer: Duration::from_millis(50),
        ..Limits::default()
    };
    let served = serve_fake(&Fake::new(), limits);
    let refused = served
        .client
        .get("/v1/destinations/hang:1")
        .await
        .unwrap_err();
    assert_eq!(status_of(&refused), 503);
}

#[tokio::test]
async fn too_many_connections_and_followers_are_told() {
    let limits = Limits {
        connections: 2,
        followers: 1,
        ..Limits::default()
    };
    let backend = Fake::new();
    backend.kept.lock().unwrap().push(started("one"));
    let served = serve_fake(&backend, limits);
    let mut follower = served
        .client
        .stream("/v1/events?follow=true")
        .await
        .unwrap();
    assert!(follower.next().await.unwrap().is_some());
    let refused = served
        .client
        .get("/v1/events?follow=true")
        .await
        .err()
        .unwrap();
    assert_eq!(status_of(&refused), 503);
    assert!(
        refused.to_string().contains("follow the events already"),
        "{refused}"
    );
    served.client.get("/v1/destinations").await.unwrap();
    let idle = UnixStream::connect(&served.path).await.unwrap();
    let answer = raw(&served, "").await;
    assert!(
        answer.starts_with("HTTP/1.1 503 ") && answer.contains("{\"error\""),
        "{answer}"
    );
    drop(idle);
}

#[tokio::test]
async fn kept_events_and_then_the_end() {
    let backend = Fake::new();
    backend
        .kept
        .lock()
        .unwrap()
        .extend([started("one"), failure()]);
    let served = serve_fake(&backend, Limits::default());
    let body = served.client.get("/v1/events").await.unwrap();
    assert_eq!(
        body,
        "{\"time\":\"1970-01-01T00:00:00.000Z\",\"kind\":\"config\",\"action\":\"started\",\
         \"message\":\"one\",\"by\":null}\n"
    );
    let body = served.client.get("/v1/events?all=true").await.unwrap();
    assert_eq!(body.iter().filter(|byte| **byte == b'\n').count(), 2);
}

#[tokio::test]
async fn a_follower_gets_kept_events_then_new_ones() {
    let backend = Fake::new();
    backend.kept.lock().unwrap().push(started("one"));
    let served = serve_fake(&backend, Limits::default());
    let mut pieces = served
        .client
        .stream("/v1/events?follow=true")
        .await
        .unwrap();
    let first = pieces.next().await.unwrap().unwrap();
    assert!(first.ends_with(b"\"message\":\"one\",\"by\":null}\n"));
    backend.publisher.send(failure()).unwrap();
    backend.publisher.send(started("two")).unwrap();
    let second = pieces.next().await.unwrap().unwrap();
    assert!(second.ends_with(b"\"message\":\"two\",\"by\":null}\n"));
    assert!(!second.windows(7).any(|bytes| bytes == b"failure"));
}

#[tokio::test]
async fn a_follower_that_falls_behind_is_dropped_with_a_note() {
    let backend = Fake::new();
    backend.kept.lock().unwrap().push(started("one"));
    let served = serve_fake(&backend, Limits::default());
    let mut pieces = served
        .client
        .stream("/v1/events?follow=true")
        .await
        .unwrap();
    pieces.next().await.unwrap().unwrap();
    // More than the channel keeps, at one go: the follower has no turn in between.
    for _ in 0..40 {
        backend.publisher.send(started("many")).unwrap();
    }
    let mut text = Vec::new();
    while let Some(piece) = pieces.next().await.unwrap() {
        text.extend_from_slice(&piece);
    }
    let text = String::from_utf8(text).unwrap();
    let last: EventRecord = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert!(matches!(last.event, Event::Loss { lost: 24, .. }), "{text}");
}

#[tokio::test]
async fn a_follower_that_stops_reading_blocks_nobody_and_is_cut_off() {
    let limits = Limits {
        stall: Duration::from_millis(100),
        ..Limits::default()
    };
    let backend = Fake::new();
    let served = serve_fake(&backend, limits);
    let mut stuck = UnixStream::connect(&served.path).await.unwrap();
    let request = b"GET /v1/events?follow=true HTTP/1.1\r\nHost: b\r\n\r\n";
    stuck.write_all(request).await.unwrap();
    let mut head = [0; 1];
    stuck.read_exact(&mut head).await.unwrap();
    // It reads no more. Publishing goes on, without a wait, until the server has let go of it. The
    // channel is never full here: what ends the follower is the write that makes no progress.
    let large = started(&"x".repeat(10_000));
    while backend.publisher.receiver_count() > 0 {
        if backend.publisher.len() < 8 {
            let _ = backend.publisher.send(Arc::clone(&large));
        }
        tokio::task::yield_now().await;
    }
    served.client.get("/v1/destinations").await.unwrap();
    // Dropped in the middle of the stream: the last chunk never comes.
    let mut rest = Vec::new();
    let _ = stuck.read_to_end(&mut rest).await;
    assert!(!rest.ends_with(b"0\r\n\r\n"));
}

#[tokio::test]
async fn config_is_shown() {
    let served = serve_fake(&Fake::new(), Limits::default());
    let body = served.client.get("/v1/config").await.unwrap();
    assert_eq!(
        body,
        r#"{"file":null,"toml":"mode = \"enforce\"\n","warnings":["w"]}"#
    );
}

#[tokio::test]
async fn the_tcp_listener_shows_and_changes_nothing() {
    let backend = Fake::new();
    let listener = bind_http("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let taken = bind_http(address).await.unwrap_err().to_string();
    assert!(taken.contains("--listen"), "{taken}");
    let mut tasks = JoinSet::new();
    tasks.spawn(serve_http(
        listener,
        Arc::clone(&backend) as Arc<dyn Backend>,
        Limits::default(),
    ));
    let ask = async |request: &str| {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("{request} HTTP/1.1\r\nHost: b\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let metrics = ask("GET /metrics").await;
    assert!(
        metrics.contains("content-type: text/plain; version=0.0.4"),
        "{metrics}"
    );
    assert!(metrics.ends_with("# HELP x y\n"));
    assert!(ask("GET /healthz").await.starts_with("HTTP/1.1 200 "));
    assert!(ask("GET /readyz").await.ends_with("enforcing\n"));
    assert!(ask("POST /metrics").await.starts_with("HTTP/1.1 405 "));
    assert!(
        ask("GET /v1/destinations")
            .await
            .starts_with("HTTP/1.1 404 ")
    );
    assert!(ask("POST /v1/pause").await.starts_with("HTTP/1.1 404 "));
    backend.health.lock().unwrap().ready = false;
    assert!(ask("GET /healthz").await.starts_with("HTTP/1.1 200 "));
    assert!(ask("GET /readyz").await.starts_with("HTTP/1.1 503 "));
    backend.health.lock().unwrap().alive = false;
    assert!(ask("GET /healthz").await.starts_with("HTTP/1.1 503 "));
}

#[tokio::test]
async fn the_socket_is_private_and_belongs_to_one_agent() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new/b.sock");
    let (first, first_file) = bind_control(&path, false).unwrap();
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(matches!(
        bind_control(&path, false),
        Err(BindError::InUse { .. })
    ));
    let (_second, second_file) = bind_control(&path, true).unwrap();
    // The first one's file is gone already: it must not take the second one's with it.
    drop((first, first_file));
    UnixStream::connect(&path).await.unwrap();
    drop(second_file);
    assert!(!path.exists());
    let left = std::fs::read_dir(path.parent().unwrap()).unwrap().count();
    assert_eq!(left, 0);
}

#[tokio::test]
async fn a_dead_socket_is_replaced_and_a_file_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("b.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(bind_control(&path, false).unwrap());
    std::fs::write(&path, "precious").unwrap();
    for takeover in [false, true] {
        let refused = bind_control(&path, takeover);
        assert!(matches!(refused, Err(BindError::NotASocket { .. })));
    }
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
}

#[tokio::test]
async fn nobody_on_the_socket_is_exit_code_3() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("none.sock");
    let error = Client::new(&path)
        .get("/v1/destinations")
        .await
        .unwrap_err();
    assert_eq!(error.exit_code(), 3);
    let message = error.to_string();
    assert!(
        message.contains("none.sock") && message.contains("backstop run"),
        "{message}"
    );
}

#[tokio::test]
async fn an_agent_that_goes_away_ends_its_followers_with_exit_code_3() {
    let backend = Fake::new();
    backend.kept.lock().unwrap().push(started("one"));
    let served = serve_fake(&backend, Limits::default());
    let mut pieces = served
        .client
        .stream("/v1/events?follow=true")
        .await
        .unwrap();
    pieces.next().await.unwrap().unwrap();
    drop(served);
    let error = pieces.next().await.unwrap_err();
    assert_eq!(error.exit_code(), 3, "{error}");
}
