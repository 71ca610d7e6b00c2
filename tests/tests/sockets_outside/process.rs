//! Whether a program can run, and that a pid is not a process.

use std::{fs, ops::ControlFlow, os::fd::AsRawFd as _, path::PathBuf};

use backstop::sockets::{
    namespace::{live_cookies, netns_cookie_here},
    options::{Wanted, reach},
    process::{Freezers, Process, RunState},
};
use rustix::process::Signal;
use tests::{cgroup::TestCgroup, need, net::Namespace, process::Program, unique, wait};

use crate::common::SOON;

fn until(process: &Process, state: RunState) {
    let freezers = Freezers::find();
    wait::until(&format!("the process to be {state:?}"), SOON, || {
        (process.run_state(&freezers) == state).then_some(())
    });
}

fn open(pid: i32) -> Process {
    Process::open(pid as u32).expect("open").expect("it lives")
}

#[test]
fn stopped_and_continued() {
    let running = Program::new("sleep").arg("600").spawn();
    let process = open(running.pid());
    until(&process, RunState::Running);
    running.signal(Signal::STOP);
    until(&process, RunState::Stopped);
    running.signal(Signal::CONT);
    until(&process, RunState::Running);
    drop(running);
    assert_eq!(process.run_state(&Freezers::find()), RunState::Ended);
}

/// The first thread has ended, the others run: not stopped until they are.
#[test]
fn a_process_without_its_first_thread() {
    need!("python3");
    let threads = "import ctypes, threading, time\n\
                   threading.Thread(target=lambda: time.sleep(600)).start()\n\
                   ctypes.CDLL(None).syscall(60, 0)";
    let running = Program::new(tests::process::python())
        .args(["-c", threads])
        .spawn();
    let process = open(running.pid());
    let stat = format!("/proc/{}/stat", running.pid());
    wait::until("the first thread to end", SOON, || {
        let stat = fs::read_to_string(&stat).expect("stat");
        stat.contains(") Z ").then_some(())
    });
    until(&process, RunState::Running);
    running.signal(Signal::STOP);
    until(&process, RunState::Stopped);
}

#[test]
fn frozen_by_its_group_or_one_above() {
    let above = TestCgroup::new("frozen");
    let group = above.child("inner");
    let running = Program::new("sleep").arg("600").in_cgroup(&group).spawn();
    let process = open(running.pid());
    for frozen in [&group, &above] {
        let freeze = |value| fs::write(frozen.path().join("cgroup.freeze"), value).expect("freeze");
        until(&process, RunState::Running);
        freeze("1");
        until(&process, RunState::Frozen);
        freeze("0");
    }
    until(&process, RunState::Running);
}

/// A group of the v1 freezer: thawed and removed when dropped.
struct V1(PathBuf);

impl Drop for V1 {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
        let procs = fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default();
        let parent = self.0.parent().expect("the mount");
        for pid in procs.lines() {
            let _ = fs::write(parent.join("cgroup.procs"), pid);
        }
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn frozen_by_the_v1_freezer() {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("the mount table");
    let Some(mount) = backstop::kernel::cgroup::find_v1_mount(&mounts, "freezer") else {
        tests::skip!("the freezer of cgroup v1 is not mounted");
    };
    let running = Program::new("sleep").arg("600").spawn();
    let group = V1(mount.join(unique("freezer")));
    fs::create_dir(&group.0).expect("make a group");
    fs::write(group.0.join("cgroup.procs"), running.pid().to_string()).expect("move");
    let process = open(running.pid());
    until(&process, RunState::Running);
    fs::write(group.0.join("freezer.state"), "FROZEN").expect("freeze");
    until(&process, RunState::Frozen);
    fs::write(group.0.join("freezer.state"), "THAWED").expect("thaw");
    until(&process, RunState::Running);
}

/// A child with this id (or the next free one) that sleeps until it is killed.
fn child(pid: Option<i32>) -> i32 {
    let set = [pid.unwrap_or(0)];
    // SAFETY: all fields are numbers, for which 0 means none.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = libc::SIGCHLD as u64;
    if pid.is_some() {
        args.set_tid = set.as_ptr() as u64;
        args.set_tid_size = 1;
    }
    // SAFETY: a fork; the child makes system calls only.
    let child = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of_val(&args)) };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            loop {
                libc::pause();
            }
        }
    }
    assert!(child > 0, "clone3: {}", std::io::Error::last_os_error());
    child as i32
}

fn end(pid: i32) {
    // SAFETY: a child of ours that has not been waited for, so that the id is its own.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, std::ptr::null_mut(), 0);
    }
}

/// The id of a process that we have a handle of goes to another process, which has the very same
/// descriptors: the handle leads to nobody.
#[test]
fn a_pid_used_again_is_noticed() {
    use std::os::unix::fs::MetadataExt as _;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
    let path = format!("/proc/self/fd/{}", listener.as_raw_fd());
    let inode = fs::metadata(path).expect("its inode").ino() as u32;
    let cookie = rustix::net::sockopt::socket_cookie(&listener).expect("its cookie");
    // How many descriptors of the process are it, and whether it was the process all the time.
    let count = |process: &Process| {
        let mut count = 0;
        let same = process.each_socket(|_, of| {
            count += usize::from(of == inode);
            ControlFlow::Continue(())
        });
        (count, same.expect("list"))
    };
    let pid = child(None);
    let process = open(pid);
    assert_eq!(count(&process), (1, true));
    end(pid);
    assert_eq!(count(&process), (0, false));
    let pid = child(Some(pid));
    let freezers = Freezers::find();
    assert_eq!(process.run_state(&freezers), RunState::Ended);
    assert!(!process.is_alive());
    assert_eq!(count(&process), (1, false), "the other process has it");
    assert_eq!(open(pid).run_state(&freezers), RunState::Running);
    let socket = Wanted {
        inode,
        cookie,
        spot: None,
    };
    let reached = reach(&[socket], [pid as u32], |_, socket| socket.spot().pid);
    assert_eq!(reached.results, [Some(pid as u32)]);
    end(pid);
    let reached = reach(&[socket], [pid as u32], |_, socket| socket.spot().pid);
    assert_eq!(reached.results, [None]);
}

#[test]
fn a_namespace_is_there_until_it_is_gone() {
    let namespace = Namespace::new("census");
    let cookie = namespace.enter(netns_cookie_here).expect("a cookie");
    let here = netns_cookie_here().expect("a cookie");
    let is_there = |cookie| live_cookies().map(|cookies| cookies.contains(&cookie));
    assert_eq!((is_there(cookie), is_there(here)), (Some(true), Some(true)));
    // A process keeps it when its name is gone.
    let sleeper = Program::new("sleep")
        .arg("600")
        .in_netns(&namespace)
        .spawn();
    drop(namespace);
    assert_eq!(is_there(cookie), Some(true));
    sleeper.signal(Signal::KILL);
    sleeper.wait();
    assert_eq!(
        (is_there(cookie), is_there(here)),
        (Some(false), Some(true))
    );
}
