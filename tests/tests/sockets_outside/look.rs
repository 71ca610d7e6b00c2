//! A look shows what the program and its peer did.

use std::{
    io::{Read as _, Write as _},
    os::unix::fs::MetadataExt as _,
};

use backstop::sockets::{
    abort::support,
    diag::Target,
    look::{Look, State, Tcp, Timer, Tuple},
};
use tests::need;

use crate::common::{SOON, Scene, all};

#[test]
fn the_kernel_of_the_tests_can_abort() {
    support().expect("support");
}

#[test]
fn identity() {
    need!("python3");
    let mut scene = Scene::new("identity", "127.0.0.1");
    let (_server, target) = scene.connect("s", "127.0.0.1");
    let look = scene.look(&target).expect("it is there");
    assert_eq!((look.tuple, look.cookie), (target.tuple, target.cookie));
    assert_eq!(look.state, State::Established);
    let link = scene
        .python
        .value("__import__('os').readlink(f'/proc/self/fd/{s.fileno()}')");
    assert_eq!(link, format!("socket:[{}]", look.inode));
    let group = std::fs::metadata(scene.group.path()).expect("the group");
    assert_eq!(look.cgroup_id, group.ino());
    assert_eq!(
        (look.uid, look.timer, look.is_inet6),
        (0, Timer::None, false)
    );
    assert!(look.is_in_use() && !look.has_unread());
}

#[test]
fn queues_and_counts() {
    need!("python3");
    let mut scene = Scene::new("queues", "127.0.0.1");
    let (mut server, target) = scene.connect("s", "127.0.0.1");
    scene.python.value("s.sendall(b'x' * 100)");
    server.read_exact(&mut [0; 100]).expect("read");
    server.write_all(&[0; 30]).expect("write");
    let look = scene.until("the answer", &target, |look| look.receive_queue == 30);
    let tcp = look.tcp.expect("details");
    assert!(look.has_unread());
    assert_eq!(
        (tcp.bytes_received, tcp.bytes_acked),
        (30, 101),
        "the SYN counts"
    );
    assert_eq!((tcp.unacked, tcp.notsent_bytes, look.send_queue), (0, 0, 0));
    scene.python.value("len(s.recv(99))");
    let look = scene.look(&target).expect("there");
    assert!(!look.has_unread());
    drop(server);
    scene.until("the end", &target, |look| {
        look.state == State::CloseWait && look.has_unread()
    });
    scene.python.value("len(s.recv(99))");
    assert!(!scene.look(&target).expect("there").has_unread());
}

/// The peer does not read: its kernel answers every probe.
#[test]
fn a_peer_that_does_not_read() {
    need!("python3");
    let mut scene = Scene::new("zero", "127.0.0.1");
    let (mut server, target) = scene.connect("s", "127.0.0.1");
    scene.python.value("s.setblocking(False)");
    scene
        .python
        .value("[s.send(b'x' * 100000) for _ in range(3)] and 0");
    let fill = "s.send(b'x' * 10000000)";
    while scene.python.errno(fill) == 0 {}
    let look = scene.until("a closed window", &target, |look| {
        // (The answer to a probe may be on its way.)
        let answered = |tcp: Tcp| tcp.backoff > 0 && (tcp.probes, tcp.unacked) == (0, 0);
        look.peer_reads_nothing() && look.tcp.is_some_and(answered)
    });
    let tcp = look.tcp.expect("details");
    assert!(tcp.notsent_bytes > 0 && tcp.rwnd_limited_us > 0, "{look:?}");
    assert!(look.send_queue >= tcp.notsent_bytes, "{look:?}");
    let mut sink = vec![0; 1 << 20];
    scene.until("an open window", &target, |look| {
        let _ = server.read(&mut sink);
        !look.peer_reads_nothing()
    });
}

const CUT: &str = "table inet cut {\n\
                   chain input { type filter hook input priority 0; policy drop; }\n\
                   }\n";

/// A connection over a link, and what a look shows once the peer answers nothing any more.
fn vanished(before: &str, shows: impl Fn(&Look) -> bool) -> Look {
    let net = tests::net::TestNet::new();
    let group = tests::cgroup::TestCgroup::new("vanished");
    let mut python = tests::interpreter::Interpreter::start(&group, &net.client);
    let to = tests::net::TestNet::server4(8080);
    let listener = net
        .server
        .enter(|| std::net::TcpListener::bind(to).expect("listen"));
    python.value("(s := socket.create_connection(('10.77.0.2', 8080))) and 0");
    let _server = listener.accept().expect("accept");
    python.value("s.setblocking(False)");
    let look = || all(&net.client, &[State::Established]).into_iter().next();
    while python.errno(before) == 0 && before != "0" {}
    let closed = || look().is_some_and(|look| look.peer_reads_nothing());
    if before != "0" {
        tests::wait::until("a closed window", SOON, || closed().then_some(()));
    }
    net.server.nft(CUT);
    python.errno("s.send(b'x')");
    let look = || look().filter(&shows);
    tests::wait::until("the silence to show", SOON, look)
}

#[test]
fn a_peer_that_vanished() {
    need!("python3", "nft");
    let look = vanished("0", |look| {
        look.tcp
            .is_some_and(|tcp| tcp.retransmits > 1 && tcp.last_ack_recv_ms > 200)
    });
    let tcp = look.tcp.expect("details");
    assert_eq!(
        (look.timer, tcp.unacked),
        (Timer::Retransmit, 1),
        "{look:?}"
    );
    assert_eq!((look.send_queue, tcp.notsent_bytes), (1, 0), "{look:?}");
    assert!(!look.peer_reads_nothing());
}

/// Unlike one that does not read, it leaves the probes of its window unanswered.
#[test]
fn a_peer_that_vanished_with_its_window_closed() {
    need!("python3", "nft");
    let look = vanished("s.send(b'x' * 1000000)", |look| {
        look.tcp.is_some_and(|tcp| tcp.probes > 1)
    });
    assert!(look.peer_reads_nothing(), "{look:?}");
}

/// The program does not read: the peer's window closes.
#[test]
fn a_program_that_does_not_read() {
    need!("python3");
    let mut scene = Scene::new("full", "127.0.0.1");
    let (mut server, target) = scene.connect("s", "127.0.0.1");
    server.set_nonblocking(true).expect("not blocking");
    let chunk = vec![0; 1 << 20];
    let look = scene.until("our window to close", &target, |look| {
        while server.write(&chunk).is_ok() {}
        let offered = look.tcp.and_then(|tcp| tcp.receive_window);
        look.has_unread() && offered.is_none_or(|window| window < 1 << 16)
    });
    assert!(look.receive_queue > 1 << 16, "{look:?}");
}

#[test]
fn both_families_and_both_at_once() {
    need!("python3");
    let mut v4 = Scene::new("v4", "127.0.0.1");
    let (_a, target) = v4.connect("s", "127.0.0.1");
    assert!(!v4.look(&target).expect("there").is_inet6);

    let mut v6 = Scene::new("v6", "::1");
    let (_b, target) = v6.connect("s", "::1");
    let look = v6.look(&target).expect("there");
    assert!(look.is_inet6 && look.tuple.remote().is_ipv6());

    // The program connects an IPv6 socket to a mapped address, as Java does.
    let mut mapped = Scene::new("mapped", "127.0.0.1");
    let port = mapped.port();
    mapped
        .python
        .value("(s := socket.socket(socket.AF_INET6)) and 0");
    let connect = format!("s.connect(('::ffff:127.0.0.1', {port}))");
    mapped.python.value(&connect);
    let target = mapped.target("s");
    assert!(target.tuple.remote().is_ipv4());
    let look = mapped.look(&target).expect("there");
    assert!(look.is_inet6 && look.tuple == target.tuple, "{look:?}");
}

/// A link-local address binds the socket to its interface.
#[test]
fn link_local() {
    need!("python3");
    let net = tests::net::TestNet::new();
    let link = |namespace: &tests::net::Namespace, device: &str, address: &str| {
        namespace.ip(&format!("addr add {address}/64 dev {device} nodad\n"));
    };
    link(&net.client, "c0", "fe80::77:1");
    link(&net.server, "s0", "fe80::77:2");
    let group = tests::cgroup::TestCgroup::new("linklocal");
    let mut python = tests::interpreter::Interpreter::start(&group, &net.client);
    let mut server = tests::interpreter::Interpreter::start(&group, &net.server);
    server.value("(l := socket.create_server(('::', 8080), family=socket.AF_INET6)) and 0");
    python.value("(s := socket.socket(socket.AF_INET6)) and 0");
    python.value("s.connect(('fe80::77:2', 8080, 0, socket.if_nametoindex('c0')))");
    let found = all(&net.client, &[State::Established]);
    let [look] = found.as_slice() else {
        panic!("one connection: {found:?}");
    };
    assert_ne!(look.tuple.ifindex(), 0);
    let target = |ifindex| Target {
        tuple: Tuple::new(look.tuple.local(), look.tuple.remote(), ifindex),
        cookie: look.cookie,
    };
    crate::common::diag(&net.client, &[], |diag| {
        let with = diag.look(&target(look.tuple.ifindex())).expect("look");
        assert_eq!(with.map(|look| look.cookie), Some(look.cookie));
        assert_eq!(diag.look(&target(0)).expect("look"), None);
    });
}

/// Many at once, in order, with some that are not there.
#[test]
fn many_in_one_batch() {
    need!("python3");
    let mut scene = Scene::new("many", "127.0.0.1");
    let port = scene.port();
    let connect = format!("socket.create_connection(('127.0.0.1', {port}))");
    scene.python.value("(all := []) and 0");
    let mut servers = Vec::new();
    for _ in 0..300 {
        scene.python.value(&format!("all.append({connect})"));
        servers.push(scene.accept());
    }
    let here = servers[0].local_addr().expect("address");
    let looks = all(&scene.namespace, &[State::Established]);
    let programs = looks.iter().filter(|look| look.tuple.remote() == here);
    let mut targets: Vec<Target> = programs
        .map(|look| Target {
            tuple: look.tuple,
            cookie: look.cookie,
        })
        .collect();
    assert_eq!(targets.len(), 300);
    for target in targets.iter_mut().step_by(3) {
        target.cookie += 1 << 60;
    }
    let mut seen = Vec::new();
    scene.diag(|diag| {
        let each = |index, look: Option<_>| seen.push((index, look));
        diag.look_all(&targets, each).expect("look");
    });
    for (index, (told, look)) in seen.iter().enumerate() {
        assert_eq!(index, *told);
        let look: &Option<Look> = look;
        assert_eq!(look.is_none(), index % 3 == 0, "{index}");
        assert!(look.is_none_or(|look| look.tuple == targets[index].tuple));
    }
    assert_eq!(seen.len(), 300);

    let listening = all(&scene.namespace, &[State::Listen]);
    let ports: Vec<_> = listening
        .iter()
        .map(|look| look.tuple.local().port())
        .collect();
    assert_eq!(ports, [port]);
}
