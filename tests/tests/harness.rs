//! The guards and helpers themselves: a test that rests on them must not fail for their sake.

use std::{
    net::SocketAddr,
    path::PathBuf,
    time::{Duration, Instant},
};

use tests::{
    cgroup::TestCgroup,
    clients::{self, Client},
    dialer::{Dialer, How},
    need,
    net::{Namespace, TestNet},
    process::Program,
    server::Server,
};

const DIAL: &str = env!("CARGO_BIN_EXE_dial");

#[test]
fn a_control_group_goes_with_its_processes() {
    let group = TestCgroup::new("guard");
    let child = group.child("inner");
    let running = Program::new("sleep").arg("60").in_cgroup(&child).spawn();
    assert_eq!(child.pids(), [running.pid()]);
    assert!(
        child
            .workload()
            .starts_with(&format!("{}/", group.workload()))
    );
    let path = group.path().to_owned();
    drop(group);
    assert!(!path.exists());
    assert_eq!(running.wait().code(), 128 + 9);
}

#[test]
fn a_control_group_goes_on_a_panic() {
    let path = std::panic::catch_unwind(|| {
        let group = TestCgroup::new("panic");
        std::panic::panic_any(group.path().to_owned())
    });
    let path = path
        .expect_err("it panicked")
        .downcast::<PathBuf>()
        .expect("a path");
    assert!(!path.exists());
}

#[test]
fn a_namespace_goes_with_its_guard() {
    let namespace = Namespace::new("guard");
    let path = namespace.path();
    let inside = namespace.enter(|| std::fs::read_link("/proc/thread-self/ns/net").unwrap());
    assert_eq!(
        inside.to_str().unwrap(),
        format!("net:[{}]", namespace.inode())
    );
    drop(namespace);
    assert!(!path.exists());
}

#[test]
fn a_program_that_takes_too_long_fails_the_test() {
    let result = std::panic::catch_unwind(|| {
        Program::new("sleep")
            .arg("60")
            .within(Duration::from_millis(100))
            .run()
    });
    let message = result
        .expect_err("it panics")
        .downcast::<String>()
        .expect("a message");
    assert!(message.contains("did not end within 100ms"), "{message}");
}

#[test]
fn addresses_behave_as_they_are_called() {
    let net = TestNet::new();
    let group = TestCgroup::new("addresses");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    assert_eq!(group.pids(), [dialer.pid()]);

    let server = Server::start(&net.server, TestNet::server4(0));
    assert_eq!(dialer.connect(server.address()).errno, 0);
    let uring = How {
        uring: true,
        ..How::default()
    };
    assert_eq!(dialer.connect_how(server.address(), uring).errno, 0);
    let nonblocking = How {
        nonblocking: true,
        ..How::default()
    };
    assert_eq!(dialer.connect_how(server.address(), nonblocking).errno, 0);
    let port = server.address().port();
    let mapped = SocketAddr::from(([0, 0, 0, 0, 0, 0xffff, 0x0a4d, 2], port));
    assert_eq!(dialer.connect(mapped).errno, 0);
    server.wait_accepts(4);
    let address = server.address();
    server.stop();
    assert_eq!(dialer.connect(address).errno, libc::ECONNREFUSED);
    assert_eq!(dialer.connect_how(address, uring).errno, libc::ECONNREFUSED);
    assert_eq!(
        dialer.connect_how(address, nonblocking).errno,
        libc::ECONNREFUSED
    );
    let server = Server::start(&net.server, address);
    assert_eq!(dialer.connect(address).errno, 0);
    drop(server);

    let server = Server::start(&net.server, SocketAddr::new(TestNet::SERVER6, 0));
    assert_eq!(dialer.connect(server.address()).errno, 0);
    let unreachable = SocketAddr::new(TestNet::UNREACHABLE, 80);
    assert_eq!(dialer.connect(unreachable).errno, libc::EHOSTUNREACH);
    let no_route = SocketAddr::new(TestNet::NO_ROUTE, 80);
    assert_eq!(dialer.connect(no_route).errno, libc::ENETUNREACH);
}

#[test]
fn blackholes_swallow_packets() {
    let net = TestNet::new();
    let group = TestCgroup::new("blackhole");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    for address in [TestNet::blackhole4(0), TestNet::blackhole6(7)] {
        let to = SocketAddr::new(address, 80);
        assert_eq!(dialer.open(to, 1, How::default()), [libc::EINPROGRESS]);
    }
    // Longer than an answer of any kind takes on this link.
    let pending = [libc::EINPROGRESS; 2];
    assert_eq!(dialer.settle(Duration::from_millis(1500)), pending);
    let own = How {
        own_timeout: Some(300),
        ..How::default()
    };
    assert_eq!(
        dialer.open(SocketAddr::new(TestNet::blackhole4(1), 80), 1, own),
        pending[..1]
    );
    assert_eq!(dialer.user_timeouts(), [0, 0, 300]);
}

#[test]
fn syns_are_counted() {
    need!("nft");
    let net = TestNet::new();
    let group = TestCgroup::new("syns");
    let mut dialer = Dialer::start(DIAL, &group, &net.client);
    let server = Server::start(&net.server, TestNet::server4(0));
    let counter = net.server.count_syns(server.address().port(), false);
    assert_eq!(counter.seen(), 0);
    let ends = dialer.burst(server.address(), 20);
    assert!(ends.iter().all(|end| end.errno == 0), "{ends:?}");
    assert_eq!(counter.seen(), 20);
    counter.stop();
    let counter = net.server.count_syns(server.address().port(), true);
    let began = Instant::now();
    assert_eq!(
        dialer.open(server.address(), 3, How::default()),
        [libc::EINPROGRESS; 3]
    );
    let seen = tests::wait::until("three SYNs", Duration::from_secs(60), || {
        Some(counter.seen()).filter(|&seen| seen >= 3)
    });
    // After a second they come again.
    assert!(seen == 3 || began.elapsed() > Duration::from_millis(900));
}

#[test]
fn clients_tell_a_server_from_none() {
    let net = TestNet::new();
    let all = [
        clients::CURL,
        clients::WGET,
        clients::PYTHON_BLOCKING,
        clients::PYTHON_ASYNCIO,
        clients::PYTHON_URLLIB3,
        clients::JAVA,
        clients::NODE,
        clients::HEY,
    ];
    let installed = |client: &&Client| {
        client
            .needs
            .iter()
            .all(|program| tests::process::find(program).is_some())
            && (client.name != clients::PYTHON_URLLIB3.name || clients::has_urllib3())
    };
    let server = Server::start(&net.server, TestNet::server4(0));
    let address = server.address();
    for client in all.iter().filter(installed) {
        let finished = client.command(address).in_netns(&net.client).run();
        assert!(client.succeeded(&finished), "{}: {finished}", client.name);
    }
    server.stop();
    for client in all.iter().filter(installed) {
        let [first, second] = [0, 1].map(|_| client.command(address).in_netns(&net.client).run());
        assert!(!client.succeeded(&first), "{}: {first}", client.name);
        assert_eq!(
            client.outcome(&first),
            client.outcome(&second),
            "{}",
            client.name
        );
        assert_ne!(client.outcome(&first).1, "", "{} says nothing", client.name);
    }
}
