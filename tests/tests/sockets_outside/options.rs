//! Options set on a program's descriptor from outside.

use std::{net::TcpStream, time::Duration};

use backstop::sockets::{
    diag::Target,
    options::{
        Given, Keepalive, KeptAlive, OptionError, Reached, Socket, Spot, Tightened, TimeOption,
        Wanted, reach,
    },
    process::in_cgroup,
};
use tests::{interpreter::Interpreter, need};

use crate::common::Scene;

const EAGAIN: i32 = 11;
const LIMIT: Duration = Duration::from_millis(200);

fn wanted(scene: &Scene, target: &Target) -> Wanted {
    let inode = scene.look(target).expect("there").inode;
    Wanted {
        inode,
        cookie: target.cookie,
        spot: None,
    }
}

/// What `work` says of the program's socket.
fn at<T>(
    scene: &Scene,
    target: &Target,
    work: impl Fn(&Socket<'_>) -> Result<T, OptionError>,
) -> T {
    let wanted = [wanted(scene, target)];
    let Reached {
        mut results,
        problem,
    } = reach(&wanted, [scene.pid()], |_, socket| work(socket));
    assert!(problem.is_none(), "{problem:?}");
    results.remove(0).expect("reached").expect("done")
}

fn tighten(scene: &Scene, target: &Target, option: TimeOption, limit: Duration) -> Tightened {
    at(scene, target, |socket| socket.tighten(option, limit))
}

fn ours(tightened: Tightened) -> Given {
    match tightened {
        Tightened::Ours(given) => given,
        other => panic!("{other:?}"),
    }
}

fn start(label: &str) -> (Scene, TcpStream, Target) {
    let mut scene = Scene::new(label, "127.0.0.1");
    let (server, target) = scene.connect("s", "127.0.0.1");
    (scene, server, target)
}

#[test]
fn the_next_recv_ends_in_time() {
    need!("python3");
    let (mut scene, _server, target) = start("rcvtimeo");
    let given = ours(tighten(&scene, &target, TimeOption::Receive, LIMIT));
    assert_eq!((given.before, given.ours), (None, LIMIT));
    assert_eq!(scene.python.errno("s.recv(1)"), EAGAIN);
    scene.python.value("(began := time.monotonic()) and 0");
    assert_eq!(scene.python.errno("s.recv(1)"), EAGAIN);
    let took = scene.python.value("time.monotonic() - began");
    let took = Duration::from_secs_f64(took.as_f64().expect("seconds"));
    // (Without the option it would never end.)
    assert!(took >= LIMIT, "{took:?}");
    assert!(at(&scene, &target, |socket| socket.give_back(&given)));
    assert_eq!(
        scene.python.value("s.getsockopt(1, 20, 16).hex()"),
        "0".repeat(32)
    );
}

#[test]
fn the_next_send_ends_in_time() {
    need!("python3");
    let (mut scene, _server, target) = start("sndtimeo");
    ours(tighten(&scene, &target, TimeOption::Send, LIMIT));
    // More than both buffers hold: a blocking send of all of it never ends by itself.
    let mut errno = 0;
    while errno == 0 {
        errno = scene.python.errno("s.send(b'x' * 10000000)");
    }
    assert_eq!(errno, EAGAIN);
}

/// The program's own, set before or after ours, is what it reads back and what counts.
#[test]
fn the_stricter_value_wins() {
    need!("python3");
    let (mut scene, _server, target) = start("stricter");
    let set = |seconds: &str| {
        format!("s.setsockopt(1, 20, __import__('struct').pack('ll', {seconds}, 0))")
    };
    scene.python.value(&set("1"));
    for limit in [Duration::from_secs(1), Duration::from_secs(3)] {
        let tightened = tighten(&scene, &target, TimeOption::Receive, limit);
        assert_eq!(tightened, Tightened::Theirs(Duration::from_secs(1)));
    }
    let given = ours(tighten(&scene, &target, TimeOption::Receive, LIMIT));
    assert_eq!(given.before, Some(Duration::from_secs(1)));
    assert!(at(&scene, &target, |socket| socket.give_back(&given)));
    let theirs = |scene: &Scene| at(scene, &target, |socket| socket.time(TimeOption::Receive));
    assert_eq!(theirs(&scene), Some(Duration::from_secs(1)));

    let given = ours(tighten(&scene, &target, TimeOption::Receive, LIMIT));
    scene.python.value(&set("7"));
    assert!(!at(&scene, &target, |socket| socket.give_back(&given)));
    assert_eq!(theirs(&scene), Some(Duration::from_secs(7)));
}

/// The kernel rounds to ticks; what it has is what we call ours.
#[test]
fn a_rounded_value_is_given_back() {
    need!("python3");
    let (scene, _server, target) = start("rounded");
    let limit = Duration::from_micros(10_001);
    let given = ours(tighten(&scene, &target, TimeOption::Receive, limit));
    assert!(given.ours >= limit && given.ours < limit * 3, "{given:?}");
    assert!(at(&scene, &target, |socket| socket.give_back(&given)));
    let now = at(&scene, &target, |socket| socket.time(TimeOption::Receive));
    assert_eq!(now, None);
}

#[test]
fn keepalive_where_there_is_none() {
    need!("python3");
    let (mut scene, _server, target) = start("keepalive");
    let keepalive = Keepalive {
        idle_s: 30,
        interval_s: 5,
        count: 4,
    };
    let on = |scene: &Scene| at(scene, &target, |socket| socket.keep_alive(keepalive));
    let numbers = "[s.getsockopt(1, 9)] + [s.getsockopt(6, n) for n in (4, 5, 6)]";
    let before = scene.python.value(numbers);
    assert_eq!(before[0], 0);
    let KeptAlive::Ours(given) = on(&scene) else {
        panic!("it was off");
    };
    assert_eq!(
        scene.python.value(numbers),
        serde_json::json!([1, 30, 5, 4])
    );
    assert_eq!(on(&scene), KeptAlive::Theirs);
    assert!(at(&scene, &target, |socket| socket.give_back_keepalive(&given)));
    assert_eq!(scene.python.value(numbers), before);

    // Set by the program afterwards: not ours any more.
    let KeptAlive::Ours(given) = on(&scene) else {
        panic!("it was off");
    };
    scene.python.value("s.setsockopt(6, 4, 77)");
    assert!(!at(&scene, &target, |socket| socket.give_back_keepalive(&given)));
    assert_eq!(
        scene.python.value(numbers),
        serde_json::json!([1, 77, 5, 4])
    );
}

#[test]
fn user_timeout_and_keepalive_exclude_each_other() {
    need!("python3");
    let (mut scene, _server, target) = start("user");
    let user =
        |scene: &Scene, ms| tighten(scene, &target, TimeOption::User, Duration::from_millis(ms));
    let given = ours(user(&scene, 1500));
    assert_eq!(scene.python.value("s.getsockopt(6, 18)"), 1500);
    assert_eq!(user(&scene, 2000), Tightened::Theirs(given.ours));
    let keepalive = Keepalive {
        idle_s: 30,
        interval_s: 5,
        count: 4,
    };
    let on = |scene: &Scene| at(scene, &target, |socket| socket.keep_alive(keepalive));
    assert_eq!(on(&scene), KeptAlive::UserTimeout);
    assert!(at(&scene, &target, |socket| socket.give_back(&given)));
    assert_eq!(scene.python.value("s.getsockopt(6, 18)"), 0);
    scene.python.value("s.setsockopt(1, 9, 1)");
    assert_eq!(user(&scene, 1500), Tightened::KeepaliveOn);
    assert_eq!(scene.python.value("s.getsockopt(6, 18)"), 0);
}

#[test]
fn blocking_or_not() {
    need!("python3");
    let (mut scene, _server, target) = start("blocking");
    let blocks = |scene: &Scene| at(scene, &target, |socket| socket.is_blocking());
    assert!(blocks(&scene));
    scene.python.value("s.setblocking(False)");
    assert!(!blocks(&scene));
}

/// The process that connected has ended; a child has the socket.
#[test]
fn a_child_owns_it() {
    need!("python3");
    let (mut scene, _server, target) = start("child");
    scene.python.value("(os := __import__('os')) and 0");
    let parent = scene.pid();
    scene
        .python
        .value("(child := os.fork()) or (time.sleep(600), os._exit(0))");
    let child = scene.python.value("child").as_u64().expect("a pid") as u32;
    let wanted = wanted(&scene, &target);
    scene.python.value("s.close()");
    let mut pids = std::iter::once(parent).chain(in_cgroup(scene.group.path()));
    let reached = reach(&[wanted], &mut pids, |_, socket| socket.spot().pid);
    assert_eq!(reached.results, [Some(child)]);
    assert!(reached.problem.is_none());
    scene.python.kill();
    let mut pids = std::iter::once(parent).chain(in_cgroup(scene.group.path()));
    let reached = reach(&[wanted], &mut pids, |_, socket| socket.spot().pid);
    assert_eq!(reached.results, [Some(child)]);
    assert!(reached.problem.is_none());
}

/// Handed on over a unix socket to another process of the group, or of a group below.
#[test]
fn another_process_was_handed_it() {
    need!("python3");
    let (mut scene, _server, target) = start("handed");
    let below = scene.group.child("below");
    let mut other = Interpreter::start(&below, &scene.namespace);
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("socket");
    let path = path.display();
    let unix = "socket.socket(socket.AF_UNIX)";
    other.value(&format!("(u := {unix}) and u.bind('{path}') or u.listen()"));
    scene
        .python
        .value(&format!("(u := {unix}) and u.connect('{path}')"));
    scene
        .python
        .value("socket.send_fds(u, [b'x'], [s.fileno()])");
    let wanted = wanted(&scene, &target);
    let first = scene.pid();
    scene.python.value("s.close()");
    let receive = "(s := socket.socket(fileno=socket.recv_fds(u.accept()[0], 9, 1)[1][0])) and 0";
    other.value(receive);
    let reached = reach(&[wanted], [first], |_, socket| socket.spot().pid);
    assert_eq!(reached.results, [None]);
    let pids = in_cgroup(scene.group.path());
    let reached = reach(&[wanted], pids, |_, socket| {
        socket.tighten(TimeOption::Receive, LIMIT).expect("set");
        socket.spot().pid
    });
    assert_eq!(reached.results, [Some(below.pids()[0] as u32)]);
    assert_eq!(other.errno("s.recv(1)"), EAGAIN);
}

/// Descriptors of this process that are this socket, or a handle of this process.
fn held(inode: u32, pid: u32) -> usize {
    let leads = |fd: &std::fs::DirEntry| {
        let link = std::fs::read_link(fd.path()).unwrap_or_default();
        let info = std::path::Path::new("/proc/self/fdinfo").join(fd.file_name());
        let info = std::fs::read_to_string(info).unwrap_or_default();
        link.to_string_lossy() == format!("socket:[{inode}]")
            || info.lines().any(|line| line == format!("Pid:\t{pid}"))
    };
    let ours = std::fs::read_dir("/proc/self/fd").expect("list").flatten();
    ours.filter(leads).count()
}

#[test]
fn no_copy_outlives_the_call() {
    need!("python3");
    let (mut scene, _server, target) = start("copy");
    scene
        .python
        .value("(copies := [s.dup() for _ in range(9)]) and 0");
    let wanted = wanted(&scene, &target);
    let pid = scene.pid();
    let before = held(wanted.inode, pid);
    let during = reach(&[wanted], [pid], |_, _| held(wanted.inode, pid)).results;
    assert_eq!(during, [Some(before + 2)]);
    assert_eq!(held(wanted.inode, pid), before);
    let other = Wanted {
        cookie: wanted.cookie + 1,
        ..wanted
    };
    assert_eq!(reach(&[other], [pid], |_, _| ()).results, [None]);
    assert_eq!(held(wanted.inode, pid), before);
}

/// An inode alone does not do: the cookie is compared.
#[test]
fn another_cookie_is_another_socket() {
    need!("python3");
    let (mut scene, _server, target) = start("inode");
    let mut wanted = wanted(&scene, &target);
    wanted.cookie += 1;
    let reached = reach(&[wanted], [scene.pid()], |_, socket| {
        socket.tighten(TimeOption::Receive, LIMIT).expect("set")
    });
    assert_eq!(reached.results, [None]);
    assert_eq!(
        scene.python.value("s.getsockopt(1, 20, 16).hex()"),
        "0".repeat(32)
    );
}

/// Back where it was, without a search; somewhere else by now, with one.
#[test]
fn the_way_back() {
    need!("python3");
    let (mut scene, _server, target) = start("back");
    let mut wanted = wanted(&scene, &target);
    let spot = reach(&[wanted], [scene.pid()], |_, socket| socket.spot()).results[0];
    let spot = spot.expect("reached");
    wanted.spot = Some(spot);
    let again = |wanted, pids: &[u32]| reach(&[wanted], pids.to_vec(), |_, socket| socket.spot());
    assert_eq!(again(wanted, &[]).results, [Some(spot)]);
    // Another socket has the number now.
    scene.python.value("(copy := s.dup()) and 0");
    scene.python.value("(other := socket.socket()) and 0");
    scene
        .python
        .value("__import__('os').dup2(other.fileno(), s.fileno())");
    assert_eq!(again(wanted, &[]).results, [None]);
    let found = again(wanted, &[scene.pid()]).results[0].expect("the copy");
    let copy = scene.python.value("copy.fileno()");
    assert_eq!(found.fd, copy.as_i64().expect("a number") as i32);
    wanted.spot = Some(Spot {
        pid: u32::MAX,
        ..spot
    });
    assert_eq!(again(wanted, &[scene.pid()]).results, [Some(found)]);
}

/// Many sockets of one process, and one that nobody has, in one pass.
#[test]
fn many_in_one_pass() {
    need!("python3");
    let mut scene = Scene::new("pass", "127.0.0.1");
    let mut servers = Vec::new();
    let mut sockets = Vec::new();
    for at in 0..20 {
        let (server, target) = scene.connect(&format!("s{at}"), "127.0.0.1");
        servers.push(server);
        sockets.push(wanted(&scene, &target));
    }
    scene.python.value("s7.close()");
    scene.python.value("(copy := s3.dup()) and 0");
    let mut calls = 0;
    let reached = reach(&sockets, [scene.pid(), scene.pid()], |at, socket| {
        calls += 1;
        (at, socket.spot().fd)
    });
    assert_eq!(calls, 19);
    for (at, result) in reached.results.iter().enumerate() {
        assert_eq!(result.map(|result| result.0), (at != 7).then_some(at));
    }
}
