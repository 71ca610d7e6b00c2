//! What is ended is what was meant, and nothing else.

use std::{fs, io::Write as _};

use backstop::sockets::{
    abort::Fate,
    diag::Target,
    namespace::{EnterError, Namespaces, Place},
};
use tests::{need, net::Namespace, wait};

use crate::common::{SOON, Scene, is_reset};

const ECONNABORTED: i32 = 103;

fn abort(scene: &Scene, target: &Target) -> Fate {
    let mut fates = scene.diag(|diag| diag.abort(&[*target], |_| true));
    assert_eq!(fates.len(), 1);
    fates.remove(0)
}

/// A program that sleeps in recv in another namespace wakes with ECONNABORTED.
fn wakes(address: &str, connect: &str) {
    let mut scene = Scene::new("wakes", address);
    let port = scene.port();
    scene
        .python
        .value(&connect.replace("PORT", &port.to_string()));
    let server = scene.accept();
    let target = scene.target("s");
    scene.python.value("(t := __import__('threading')) and 0");
    scene.python.value("(got := []) and 0");
    // The interpreter's thread sleeps in recv, its main thread still answers.
    scene.python.value(
        "(f := lambda: got.append(__import__('ctypes').CDLL(None, use_errno=True).recv(s.fileno(), b' ', 1, 0) \
         or 0) or got.append(__import__('ctypes').get_errno())) and 0",
    );
    scene.python.value("(r := t.Thread(target=f)).start()");
    let pid = scene.pid();
    wait::until("a thread that sleeps in recv", SOON, || {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let mut calls = tasks
            .flatten()
            .filter_map(|task| fs::read_to_string(task.path().join("syscall")).ok());
        // recvfrom
        calls.any(|call| call.starts_with("45 ")).then_some(())
    });
    assert!(matches!(abort(&scene, &target), Fate::Aborted));
    scene.python.value("r.join()");
    assert_eq!(
        scene.python.value("got"),
        serde_json::json!([-1, ECONNABORTED])
    );
    assert!(is_reset(server));
    assert!(matches!(abort(&scene, &target), Fate::Gone));
}

const PLAIN: &str = "(s := socket.create_connection(('HOST', PORT))) and 0";

#[test]
fn a_sleeping_recv_wakes_v4() {
    need!("python3");
    wakes("127.0.0.1", &PLAIN.replace("HOST", "127.0.0.1"));
}

#[test]
fn a_sleeping_recv_wakes_v6() {
    need!("python3");
    wakes("::1", &PLAIN.replace("HOST", "::1"));
}

#[test]
fn a_sleeping_recv_wakes_mapped() {
    need!("python3");
    let connect = "(s := socket.socket(socket.AF_INET6)).connect(('::ffff:127.0.0.1', PORT))";
    wakes("127.0.0.1", connect);
}

#[test]
fn another_cookie_ends_nothing() {
    need!("python3");
    let mut scene = Scene::new("cookie", "127.0.0.1");
    let (mut server, target) = scene.connect("s", "127.0.0.1");
    // The last one is the kernel's wild card.
    for cookie in [0, target.cookie + 1, target.cookie ^ 1 << 40, u64::MAX] {
        let other = Target { cookie, ..target };
        assert!(matches!(abort(&scene, &other), Fate::Gone), "{cookie:#x}");
    }
    server.write_all(b"x").expect("write");
    assert_eq!(scene.python.value("len(s.recv(9))"), 1);
}

#[test]
fn what_has_changed_is_left_alone() {
    need!("python3");
    let mut scene = Scene::new("changed", "127.0.0.1");
    let (mut server, target) = scene.connect("s", "127.0.0.1");
    server.write_all(b"x").expect("write");
    scene.until("the answer", &target, |look| look.has_unread());
    let fates = scene.diag(|diag| diag.abort(&[target], |look| !look.has_unread()));
    assert!(matches!(fates[..], [Fate::Changed]), "{fates:?}");
    assert_eq!(scene.python.value("len(s.recv(9))"), 1);
    let fates = scene.diag(|diag| diag.abort(&[target], |look| !look.has_unread()));
    assert!(matches!(fates[..], [Fate::Aborted]), "{fates:?}");
}

/// Closed by the program, the kernel still works on its end: nobody would feel an abort.
#[test]
fn what_no_program_has_open_is_gone() {
    need!("python3");
    let mut scene = Scene::new("closed", "127.0.0.1");
    let (_server, target) = scene.connect("s", "127.0.0.1");
    scene.python.value("s.close()");
    let look = scene.look(&target).expect("in FIN_WAIT");
    assert_eq!(look.inode, 0);
    assert!(matches!(abort(&scene, &target), Fate::Gone));
}

/// A connect that waits for an answer can be ended, too.
#[test]
fn a_pending_connect_ends() {
    need!("python3");
    let net = tests::net::TestNet::new();
    let group = tests::cgroup::TestCgroup::new("pending");
    let mut python = tests::interpreter::Interpreter::start(&group, &net.client);
    python.value("(s := socket.socket()).setblocking(False)");
    let blackhole = tests::net::TestNet::blackhole4(0);
    assert_eq!(
        python.errno(&format!("s.connect(('{blackhole}', 80))")),
        115
    );
    let found = crate::common::all(&net.client, &[backstop::sockets::look::State::SynSent]);
    let target = Target {
        tuple: found[0].tuple,
        cookie: found[0].cookie,
    };
    let fates = crate::common::diag(&net.client, &[], |diag| diag.abort(&[target], |_| true));
    assert!(matches!(fates[..], [Fate::Aborted]), "{fates:?}");
    assert_eq!(python.value("s.getsockopt(1, 4)"), ECONNABORTED);
}

/// Neither descriptors nor the namespace outlive a batch.
#[test]
fn nothing_is_held() {
    need!("python3");
    let scene = Scene::new("held", "127.0.0.1");
    let inode = scene.namespace.inode() as u32;
    let pid = scene.pid();
    let mut namespaces = Namespaces::default();
    let own = || fs::read_link("/proc/thread-self/ns/net").expect("own");
    let before = own();
    for _ in 0..50 {
        let place = Place {
            inode,
            pids: &[u32::MAX, 1, pid],
        };
        namespaces
            .diag(place, |diag| diag.dump(&[], false, |_| {}))
            .expect("enter")
            .expect("dump");
    }
    assert_eq!(own(), before);
    let ours = fs::read_dir("/proc/self/fd").expect("list").flatten();
    let held: Vec<_> = ours
        .filter_map(|fd| fs::read_link(fd.path()).ok())
        .filter(|link| link.to_string_lossy() == format!("net:[{inode}]"))
        .collect();
    assert_eq!(held, Vec::<std::path::PathBuf>::new());
}

/// A namespace that is gone takes its devices along, though we have just asked in it.
#[test]
fn a_namespace_can_go() {
    need!("python3");
    let outer = Namespace::new("outer");
    let inner = Namespace::new("inner");
    outer.ip(&format!(
        "link add name v0 type veth peer name v1 netns {}\n",
        inner.name()
    ));
    let inode = inner.inode() as u32;
    let mut namespaces = Namespaces::default();
    let mut ask = || {
        let place = Place { inode, pids: &[] };
        namespaces.diag(place, |diag| diag.dump(&[], false, |_| {}).expect("dump"))
    };
    let devices =
        || outer.enter(|| fs::read_to_string("/proc/thread-self/net/dev").expect("devices"));
    ask().expect("by its name");
    assert!(devices().contains("v0:"));
    drop(inner);
    wait::until("the link to go with its namespace", SOON, || {
        (!devices().contains("v0:")).then_some(())
    });
    let error = ask().expect_err("it is gone");
    let gone = matches!(
        error,
        backstop::sockets::diag::DiagError::Enter(EnterError::NotFound { .. })
    );
    assert!(gone, "{error}");
}
